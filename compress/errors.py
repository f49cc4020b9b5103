"""Everything that can go wrong and is not a bug, and the exit code it ends the command with.

CompressError
 ├── InputError        2   recipe, command line, or an input that cannot be used as given
 │    ├── RecipeError      a recipe or an override
 │    └── CheckpointError  a checkpoint that is damaged, incomplete, or of a kind we do not read
 ├── GateFailed        3   the loss is shown to be above the margin
 ├── Inconclusive      4   the loss is not shown to be below the margin
 ├── ProcessLost       1   another process of the run is gone, or failed for a reason of its own
 ├── Refused           5   the evidence is invalid or the two sides are not comparable
 │    └── Diverged         training came to values that are not finite
 └── PushFailed        6   a PASS that could not be published

Each message is one sentence: what is wrong, the value, the fix. The command line prints it without a traceback.
"""

import errno
from typing import ClassVar


class CompressError(Exception):
    """Base of every error that is reported to the user as one sentence."""

    exit_code: ClassVar[int] = 1


class ProcessLost(CompressError):
    """Another process of the run is gone, or failed for a reason of its own; the same command goes on from there."""


class InputError(CompressError):
    """The recipe, the command line, or an input cannot be used as given."""

    exit_code = 2


class RecipeError(InputError):
    """A recipe or an override is wrong; lists every problem with its path."""


class CheckpointError(InputError):
    """A checkpoint is damaged, incomplete, or of a kind that is not read."""


class GateFailed(CompressError):
    """The loss is shown to be above the margin."""

    exit_code = 3


class Inconclusive(CompressError):
    """The loss is neither shown to be below nor above the margin; blocks as well."""

    exit_code = 4


class Refused(CompressError):
    """The evidence is invalid, or source and variant are not comparable."""

    exit_code = 5


class Diverged(Refused):
    """Training came to a loss that is not finite; what was good until then is kept for a look at it."""


class PushFailed(CompressError):
    """The variant passed but could not be published, or the remote bytes differ."""

    exit_code = 6


# what the system refuses, in words and with the fix; anything else is a bug and keeps its traceback
OS_ERRORS = {
    errno.ENOSPC: "the disk is full: free space or choose another output",
    errno.EDQUOT: "the disk quota is used up: free space or choose another output",
    errno.EACCES: "permission denied: choose a place you can read and write",
    errno.EPERM: "permission denied: choose a place you can read and write",
    errno.ENOENT: "a file or folder is missing, or was removed meanwhile: check the path",
    errno.ENOTDIR: "a file stands where a directory should be: choose another place",
    errno.EISDIR: "a directory stands where a file should be: give the path of a file",
    errno.ENAMETOOLONG: "the path is too long: choose a shorter one",
    errno.ELOOP: "the path is a circle of links: give the path of what is meant",
    errno.EFBIG: "a file would be larger than the limit here: raise it (ulimit -f) or lower max_shard_size",
    errno.EMFILE: "too many files are open: raise the limit (ulimit -n)",
    errno.EIO: "the disk or the network reports an error: check it and run the command again",
    errno.EROFS: "the file system is read-only: choose another output",
}
