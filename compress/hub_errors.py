"""What can go wrong on the hub, as one sentence each, and trying again where trying again helps.

Large files go through hf_xet, which raises Python's own ConnectionError, TimeoutError and PermissionError, without the
number that an error of the system has. Whatever the server says is shown without anything that looks like a token.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import httpx2
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from compress.errors import PushFailed
from compress.progress import say

__all__ = ["explained", "patiently"]

T = TypeVar("T")

FIXES = {
    401: "log in with `hf auth login` or set HF_TOKEN",
    403: "your token may not write there: use one with write access to it",
    404: "there is no such repository, or you may not see it",
    409: "someone else is changing it: run the same command again",
    412: "it was changed meanwhile: run the same command again",
    429: "the hub asks to slow down: run the same command again later, what was sent is kept",
}
FAULT = "the hub has a fault: run the same command again later, what was sent is kept"
NO_XET = "this hub takes no Xet uploads: set HF_HUB_DISABLE_XET=1"
REFUSED = "HTTP status client error"  # in the words of hf_xet
LINE = (httpx2.TransportError, ConnectionError, TimeoutError)
PASSING = frozenset({408, 429, 500, 502, 503, 504})
WAITS: Final = (2.0, 10.0)  # seconds before the second and the third try
TOKEN = re.compile(r"hf_\w+|(?i:bearer)\s+\S+")


@contextmanager
def explained(repo: str) -> Iterator[None]:
    """Turn every failure of the hub or the line into `PushFailed`."""
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise PushFailed(f"{repo} was not pushed: HF_HUB_OFFLINE is set, unset it to reach the hub") from error
    except (HfHubHTTPError, httpx2.HTTPError, RuntimeError, ValueError) as error:
        raise PushFailed(f"{repo} was not pushed: {_sentence(error)}") from error
    except OSError as error:
        if error.errno is not None:  # of the disk, not of the hub
            raise
        raise PushFailed(f"{repo} was not pushed: {_sentence(error)}") from error


def patiently(act: Callable[[], T], *, waits: tuple[float, ...] = WAITS) -> T:
    """Do `act`, which may be done again, and again after each wait while what stops it is likely to pass."""
    for wait in waits:
        try:
            return act()
        except (HfHubHTTPError, RuntimeError, *LINE) as error:
            if not _passes(_root(error)):
                raise
            say(f"the hub did not answer as it should ({_said(_root(error))}): trying again in {wait:.0f} s")
            time.sleep(wait)
    return act()


def _root(error: BaseException) -> BaseException:
    """The library wraps what went wrong with one file in a RuntimeError."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _passes(error: BaseException) -> bool:
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in PASSING
    return isinstance(error, LINE) and REFUSED not in str(error)


def _sentence(error: BaseException) -> str:
    error = _root(error)
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        fix = FIXES.get(status, FAULT if status >= 500 else "the hub refuses it")
        return f"{_said(error)}; {fix}"
    if isinstance(error, PermissionError):
        return f"{_said(error)}; {FIXES[401]}"
    if REFUSED in str(error) and "/xet-write-token/" in str(error):
        return f"{_said(error)}; {NO_XET}"
    if isinstance(error, LINE):
        return f"the connection failed ({_said(error)}); run the same command again, what was sent is kept"
    return _said(error)


def _said(error: BaseException) -> str:
    """The first line of what was said, short and without tokens."""
    if isinstance(error, HfHubHTTPError):
        text = f"{error.response.status_code} {error.server_message or error.response.reason_phrase}"
    else:
        text = str(error) or type(error).__name__
    line = text.strip().splitlines()[0].rstrip(".")
    return TOKEN.sub("[token]", line)[:300]
