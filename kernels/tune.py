"""A small measured tune: time a few candidates once, remember the fastest, in this process and on disk.

One file a decision, written beside and moved into place, so that two processes cannot damage each other's. The file's name holds the device and the versions;
a file that says otherwise inside, or cannot be read, is made again with one warning, and a folder that cannot be written costs one warning and nothing else.
`FXMASK_CACHE` names the folder (default: fxmask in the user's cache folder), `FXMASK_TUNE=0` switches measuring and files off, and so does
`torch.use_deterministic_algorithms(True)`: then the cost model alone decides, the same in every run. The logger `fxmask` says at level INFO what was timed.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .errors import warn
from .file_hash import file_hash

FORMAT = 2
BUDGET = 0.8  # seconds of one tune, unless LEAST turns take longer
OVER = 3.0  # times the budget that TURNS turns may take
TURNS, LEAST = 4, 2  # fewest turns, and fewest where TURNS would take longer than that; the first one warms up
AGAIN = 60.0  # seconds until a tune on a busy machine is repeated; twice as many after each repeat that was busy too
FIX = "FXMASK_CACHE names another folder, FXMASK_TUNE=0 tunes nothing."
LOG = logging.getLogger("fxmask")
_warned: set[str] = set()


class Choice(NamedTuple):
    """A decision: a candidate's name, why, its time and those of the others in seconds (measured, or estimated), and over how many tokens.

    `busy`: the machine was, at the time `at`, and had been so in `tries` tunes before.
    """

    name: str
    why: str
    times: dict[str, float]
    tokens: int = 0
    busy: bool = False
    at: float = 0.0
    tries: int = 0


def enabled() -> bool:
    """Whether candidates may be timed."""
    return os.environ.get("FXMASK_TUNE", "1") != "0" and not torch.are_deterministic_algorithms_enabled()


def folder() -> Path:
    """Where decisions are kept. OSError where there is no home for them."""
    given = os.environ.get("FXMASK_CACHE")
    try:
        if given:
            return Path(given).expanduser()
        home = Path(os.environ.get("XDG_CACHE_HOME", ""))
        return (home if home.is_absolute() else Path.home() / ".cache") / "fxmask"  # the XDG specification: relative ones are ignored
    except RuntimeError as e:  # no HOME, and a user without an entry
        raise OSError(str(e)) from None


def stamp() -> dict[str, Any]:
    """What a decision depends on beside its case."""
    return {"format": FORMAT, "device": f"{cpu_name()}, {os.cpu_count()} cores", "torch": torch.__version__, "code": code()}


@functools.cache
def code() -> str:
    """A hash of the candidates' sources: what was the fastest of other code is no decision about this one."""
    folder = Path(__file__).parent / "cpu"
    return file_hash(sorted(folder.glob("*.py")), folder)[:16]


def cpu_name() -> str:
    """The processor's model, as the system tells it."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _path(key: str) -> Path:
    return folder() / (hashlib.sha256(f"{json.dumps(stamp(), sort_keys=True)}/{key}".encode()).hexdigest()[:24] + ".json")


def _warn(kind: str, text: str) -> None:
    if kind not in _warned:
        _warned.add(kind)
        warn(text)


def load(key: str, names: Container[str]) -> Choice | None:
    """The decision on disk, for one of `names`; None where there is none that can be used."""
    try:
        path = _path(key)
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        _warn("folder", f"tuned decisions cannot be read: {e}; they are made again. {FIX}")
        return None
    try:
        found = json.loads(content)
        if found["stamp"] != stamp() or found["key"] != key:
            raise ValueError(f"it is of {found['stamp']}, {found['key']}")
        times = {str(name): float(t) for name, t in found["times"].items()}
        if found["name"] not in times or found["name"] not in names:
            raise ValueError(f"it names {found['name']!r}")
        return Choice(found["name"], "measured", times, int(found["tokens"]), bool(found["busy"]), float(found["at"]), int(found["tries"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as e:
        _warn("damaged", f"{path} is no decision of this version: {str(e)[:200]}; it is made again.")
        return None


def store(key: str, choice: Choice) -> None:
    """Write a decision; a warning, once, where that cannot be done."""
    LOG.info("timed %d ways of %s: %s is taken, %.3g ms", len(choice.times), key, choice.name, 1e3 * choice.times[choice.name])
    content = {"stamp": stamp(), "key": key, **{k: v for k, v in choice._asdict().items() if k != "why"}}
    try:
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(content, file, indent=1)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as e:
        _warn("folder", f"tuned decisions cannot be kept: {e}; each process will make them again. {FIX}")


def measure(candidates: Mapping[str, Callable[[], Any]], threads: int, budget: float | None = None) -> Choice:
    """Time every candidate in turns until the budget is spent, each TURNS times or more, fewer where they go beyond it by OVER; the least time counts.

    Each turn has another order: what ran before leaves the caches and the allocator in its state, which may cost the next one a fifth of its time.

    On one thread its own time is taken, which other threads and processes disturb less. Busy: more load than cores, much waiting, or more threads at work than
    `threads`.
    """
    clock = time.thread_time if threads == 1 else time.perf_counter
    limit = BUDGET if budget is None else budget
    times = dict.fromkeys(candidates, float("inf"))
    started, used, turns, names = time.perf_counter(), time.process_time(), 0, list(candidates)
    while turns < LEAST or time.perf_counter() - started < (limit if turns >= TURNS else OVER * limit):
        for name in random.Random(turns).sample(names, len(names)):
            begin = clock()
            candidates[name]()
            took = clock() - begin
            if turns:  # the first turn warms up
                times[name] = min(times[name], took)
        turns += 1
    wall, cpu = time.perf_counter() - started, time.process_time() - used
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    busy = load > (os.cpu_count() or 1) or not 0.8 * wall < cpu < 1.2 * threads * wall
    return Choice(min(times, key=lambda n: times[n]), "measured", times, busy=busy, at=time.time())


def stale(choice: Choice) -> bool:
    """Whether a choice was timed on a busy machine, long enough ago to try again."""
    return choice.busy and time.time() - choice.at > AGAIN * 2 ** min(choice.tries, 20)
