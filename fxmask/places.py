"""Where a command writes: a file by its suffix, or a folder; what is neither is refused before anything runs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from .kernels.errors import ConfigError, message


def place(given: str | Path, suffixes: Iterable[str], option: str = "-o") -> Path:
    """The path of an option. A folder is meant by a `/` at the end, by one that is there, and by a name without a suffix. Raises ConfigError."""
    text, path, known = str(given), Path(given), tuple(suffixes)
    if not text.strip() or (path.name in known and not path.is_dir()):
        raise ConfigError(f"{option}: expected a path, got {text!r}.")
    if path.suffix in known or not path.suffix or text.endswith(("/", os.sep)) or path.is_dir():
        return path
    what = f"{option}: expected a folder{' or a file that ends in ' if known else ''}{', '.join(known)}, got {text!r}."
    raise ConfigError(message(what, fix=f"for a folder of that name write {text}/"))
