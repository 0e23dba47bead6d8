"""One run a folder, and one process at a time that rewrites a file.

The locks are the system's, so a process that is killed leaves none behind, whatever the file says. A folder's is one of the process (lockf) and not of the
open file (flock): workers that load data inherit the latter, and outlive a killed run by some seconds.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fxmask import FxMaskError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

NAME = "lock"
_REWRITES = threading.Lock()  # all that there is where files have no locks
_TAKING = threading.Lock()
_HERE: set[Path] = set()  # folders that runs of this process hold, which the system would give it a second time


class InUse(FxMaskError):
    """Another process, or another run of this one, writes into the folder; the message says which, and `by`, where it is known."""

    by = ""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make the folder if it is not there, and keep all others out of it.

    Raises:
        InUse: somebody else holds it, or it cannot be made.
    """
    place, me = folder.resolve(), f"process {os.getpid()} on {socket.gethostname()}: {shlex.join(sys.argv)}"
    with _TAKING:
        if place in _HERE:  # nor is the file opened: the lock would go when it is closed
            raise in_use(folder, me)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / NAME).open("a+")
        except OSError as error:
            raise InUse(f"{folder} cannot be made: {error.strerror}.\n  fix: name a folder that you may write to.") from error
        if fcntl is None:
            print(f"{folder}: no file locks on {sys.platform}; see to it that no other run writes here", file=sys.stderr)
        else:
            take(file, folder)
        _HERE.add(place)
    try:
        with file:
            file.truncate(0)
            file.write(f"{me}\n")
            file.flush()
            yield
    finally:
        _HERE.remove(place)  # after the file is closed, or the one who comes next would lose its lock by that


def take(file: IO[str], folder: Path) -> None:
    """Take the system's lock; InUse where another process has it. A file system without locks is told of, and has none."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        with file:
            file.seek(0)
            raise in_use(folder, file.read().strip() or "another process") from None
    except OSError as error:
        print(f"{folder}: no file locks there ({error.strerror}); see to it that no other run writes here", file=sys.stderr)


def in_use(folder: Path, by: str) -> InUse:
    """The error, for whoever comes second."""
    what = f"expected a folder that no other run writes into, got one that is in use by {by}"
    error = InUse(f"{folder}: {what}.\n  fix: wait for it to end, or name another folder.")
    error.by = by
    return error


def holder(folder: Path) -> str:
    """Who holds the folder now; empty where nobody does, and where there is no folder."""
    if (folder / NAME).is_file():
        try:
            with held(folder):
                pass
        except InUse as error:
            return error.by
    return ""


def wait_until_free(folder: Path, every_s: float = 1.0, stopped: threading.Event | None = None) -> bool:
    """Return when nobody holds the folder, and whether somebody did; what a killed sweep had started trains on without it. Once `stopped` is set: at once."""
    told, stopped = False, stopped or threading.Event()
    while (folder / NAME).exists() and not stopped.is_set():
        try:
            with held(folder):
                break
        except InUse as error:
            if not told:
                print(f"waiting: {error}".split("\n")[0], flush=True)
            told = True
            stopped.wait(every_s)
    return told and not stopped.is_set()


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait until no other thread or process reads and rewrites the file `path`, and keep all others from it meanwhile; threads alone without locks of files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _REWRITES, path.with_name(f"{path.name}.lock").open("a") as file:
        locked = fcntl is not None
        try:
            if locked:
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:  # a table for which something was trained for hours is written all the same
            print(f"{path}: no file locks there ({error.strerror}); see to it that no other process rewrites it", file=sys.stderr)
            locked = False
        try:
            yield
        finally:
            if locked:
                fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: processes that were forked meanwhile have the file open, too
