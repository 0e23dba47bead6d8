"""One run a folder: two that write the same log and checkpoints would each go on from what the other left."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import IO

from thesis.checkpoint import CheckpointError


def lock(folder: Path) -> IO[str] | None:
    """Make `folder` and hold it until the returned file is closed or the process ends, however it ends. None where the system has no such locks.

    A lock of the process (lockf) and not of the open file (flock): workers that load data inherit the latter and outlive a killed run by some seconds.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be made: {error.strerror}.\n  fix: name a folder that you may write to.") from error
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    file = (folder / "lock").open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise CheckpointError(
            f"{folder}: expected no other run in this folder, got one that is training there ({holder}).\n  fix: another --out, or end that run first."
        ) from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file
