"""What every run of measurements shares: a device, a folder, limits, and the loop over cells that each end as a row."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from . import clock
from .provenance import clocks, provenance
from .table import Row, Table, text, verdict_of

T = TypeVar("T")


@dataclass
class Session:
    """A run's settings."""

    device: torch.device
    out: Path
    time_limit: float | None = None
    sample_s: float = 1.0  # CPU: at most this long a cell
    load: Callable[[], float | None] = clock.load_average
    say: Callable[[str], None] = print
    rehearsal: bool = False  # in Triton's interpreter: rows as on a device, and no time that says anything

    def __post_init__(self) -> None:
        self.shared = provenance(self.device)
        self.flush = clock.flush_buffer(self.device) if self.device.type == "cuda" else None

    def timed(self, call: Callable[[], Any]) -> Row:
        """Clocks, load and percentiles of a call; the verdict is `ok`, or why the time says nothing."""
        before, load = clocks(self.device), self.load()
        times = clock.time_cpu(call, self.sample_s, 1 if self.rehearsal else 5) if self.flush is None else clock.time_cuda(call, self.flush)
        after = clocks(self.device)
        row = before | {"sm_clock_mhz_after": after["sm_clock_mhz"], "temperature_c_after": after["temperature_c"], "load": text(load), "how": times.how}
        for prefix, values in (("", times.warm), ("cold_", times.cold)):
            if values is not None:
                row |= {f"{prefix}ms_{p}": text(v) for p, v in zip(("p10", "p50", "p90"), values, strict=True)}
        verdict = "none: interpreter" if self.rehearsal else verdict_of(load if self.flush is None else None)
        return row | {"cpu_ms_p50": text(times.cpu), "verdict": verdict}

    def alive(self) -> bool:
        """Whether the device still answers: an illegal access poisons the process, and what is asked for after it fails for no reason of its own."""
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except RuntimeError:
            return False
        return True

    def lacking(self, cells: Sequence[T], table: Table, names: Callable[[T], Row]) -> list[T]:
        """The cells that a csv lacks; says how many it has."""
        todo = [c for c in cells if {**self.shared, **names(c)} not in table]
        if len(todo) < len(cells):
            self.say(f"{len(cells) - len(todo)} of {len(cells)} cells are in {table.path.name} already")
        return todo

    def over(self, cells: Sequence[T], measure: Callable[[T], Row], done: Callable[[T, Row], None]) -> int:
        """Measure cell after cell until the time limit; returns how many are left. `done` writes the row."""
        left = len(cells)
        for cell in within(cells, self.time_limit, self.say):
            row = measure(cell)
            done(cell, row)
            left -= 1
            if row.get("verdict") != "ok" and not self.alive():
                self.say(f"the device answers no more, with {left} cells left; the same command goes on behind this one")
                break
        return left


def within(cells: Sequence[T], limit: float | None, say: Callable[[str], None]) -> Iterator[T]:
    """Cell after cell, but for those that would not end within the limit in seconds, were they as long as the longest of late."""
    begin, longest = time.monotonic(), 0.0
    for n, cell in enumerate(cells):
        start = time.monotonic()
        if limit is not None and start - begin + longest > limit:
            say(f"stopped by the time limit of {limit:g} s with {len(cells) - n} cells left; the same command goes on from here")
            return
        yield cell
        longest = max(0.9 * longest, time.monotonic() - start)


def words(error: BaseException) -> str:
    """The verdict of a cell that raised."""
    return f"none: {type(error).__name__}: {error}".split("\n")[0][:160]
