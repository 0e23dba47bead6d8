"""One process a folder, and one at a time that rewrites a file.

The lock is the system's, on an open file, so a process that is killed leaves none behind, whatever the file says.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

NAME = "lock"
_REWRITES = threading.Lock()  # all that there is where files have no locks


class InUse(Exception):
    """Another process, or another run of this one, writes into the folder; the message says which."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make the folder if it is not there, and keep all others out of it.

    Raises:
        InUse: somebody else holds it, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InUse(f"{folder} cannot be made: {error.strerror}.\n  fix: name a folder that you may write to.") from error
    if fcntl is None:
        print(f"{folder}: no file locks on {sys.platform}; see to it that no other run writes here", file=sys.stderr)
        yield
        return
    with (folder / NAME).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            by = file.read().strip() or "another process"
            fix = "wait for it to end, or name another folder"
            raise InUse(f"{folder}: expected a folder that no other run writes into, got one that is in use by {by}.\n  fix: {fix}.") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}: {shlex.join(sys.argv)}\n")
        file.flush()
        yield


def wait_until_free(folder: Path, every_s: float = 1.0) -> bool:
    """Return when nobody holds the folder, and whether somebody did; what a killed sweep had started trains on without it."""
    told = False
    while (folder / NAME).exists():
        try:
            with held(folder):
                break
        except InUse as error:
            if not told:
                print(f"waiting: {error}".split("\n")[0], flush=True)
            told = True
            time.sleep(every_s)
    return told


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait until no other thread or process reads and rewrites the file `path`, and keep all others from it meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _REWRITES, path.with_name(f"{path.name}.lock").open("a") as file:
        if fcntl is None:
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: processes that were forked meanwhile have the file open, too
