"""Quantization and compression with a quality gate: the command line and what all stages share."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("compress-gate")
except PackageNotFoundError:  # a checkout that is on the path but not installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
