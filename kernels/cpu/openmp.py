"""OpenMP's own threads, told to go: after each parallel op of PyTorch they wait busily for the next one, 8 to 14 ms long, on a core that our ranges need."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path

RUNTIME = re.compile(r"/lib(gomp|iomp5|omp)[-.\w]*\.(so|dylib)[.\d]*$")
SOFT = 1  # omp_pause_soft: settings stay
_forked = False  # a child has its parent's record of threads, and none of them: who waits for them waits for ever


def dismiss() -> None:
    """End the idle threads of the caller's OpenMP team. The next parallel op of this thread begins them anew, some 50 us. Does nothing where there is no such
    runtime: OpenMP 5.0, omp_pause_resource_all (section 3.6.2 of its specification).
    """
    pause = None if _forked else _pause()
    if pause is not None:
        pause(SOFT)


@functools.cache
def _pause() -> Callable[[int], int] | None:
    """omp_pause_resource_all of the runtime that PyTorch has loaded; None on systems that do not list what is loaded, and of older runtimes."""
    try:
        loaded = {line.split(None, 5)[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
        found = sorted(path for path in loaded if RUNTIME.search(path))
        pause = ctypes.CDLL(found[0]).omp_pause_resource_all if len(found) == 1 else None  # of two, which one PyTorch uses is unknown
    except (OSError, AttributeError):
        return None
    if pause is not None:
        pause.argtypes, pause.restype = [ctypes.c_int], ctypes.c_int
    return pause


def _after_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
