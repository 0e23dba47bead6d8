"""OpenMP's own threads, told to go: after each parallel op of PyTorch they wait busily for the next one, 8 to 14 ms long, on a core that our ranges need."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

RUNTIME = re.compile(r"/libgomp[-.\w]*\.so[.\d]*$")  # of PyTorch's wheels; what LLVM's and Intel's do in a pause was not tried
SOFT = 1  # omp_pause_soft: settings stay
_forked = False  # a child has its parent's record of threads, and none of them: who waits for them waits for ever


def dismiss() -> None:
    """End the idle threads of the caller's OpenMP team. The next parallel op of this thread begins them anew, in 50 to 180 us on two cores. Does nothing where
    /proc names no GNU runtime that can (OpenMP 5.0, omp_pause_resource_all), nor in a forked process, which is as fast as without this module.
    """
    if not _forked and _pauses() and _others():
        for pause in _pauses():
            pause(SOFT)


def _others() -> bool:
    """Whether this process has threads that are not Python's: one that was forked before this module was imported, or by C, may have a team on record alone."""
    return len(os.listdir("/proc/self/task")) > threading.active_count()


@functools.cache
def _pauses() -> tuple[Callable[[int], int], ...]:
    """omp_pause_resource_all of the runtimes that are loaded: other packages may bring one beside PyTorch's, where there is nothing to end."""
    try:
        loaded = {line.split(None, 5)[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
        runtimes = [ctypes.CDLL(path) for path in sorted(loaded) if RUNTIME.search(path)]
    except OSError:
        return ()
    found = [r.omp_pause_resource_all for r in runtimes if hasattr(r, "omp_pause_resource_all")]
    for pause in found:
        pause.argtypes, pause.restype = [ctypes.c_int], ctypes.c_int
    return tuple(found)


def _after_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
