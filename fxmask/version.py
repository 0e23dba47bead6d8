"""The installed version."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("fxmask")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+unknown"
