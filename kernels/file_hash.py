"""A name for code: the hash of its files, by which what was measured or compiled under other code is told apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path


def file_hash(files: Iterable[Path], root: Path) -> str:
    """SHA-256 over files and their paths below `root`, in the order given, as hex digits."""
    h = hashlib.sha256()
    for path in files:
        h.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return h.hexdigest()
