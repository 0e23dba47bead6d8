"""Kernels compiled side by side before anything is timed: each is launched once, in threads, so that Triton's cache has it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext

import torch

from .cells import Cell, make_cells
from .driver import Run, check_device
from .inputs import make_inputs
from .providers import REGISTRY, Provider
from .table import what

PRECOMPILED, THREADS = 40, 16


def launch_once(cell: Cell, registry: Mapping[str, Provider], device: torch.device) -> None:
    """A cell's call on its real shape, as Triton specialises on what divides it; on CUDA in a stream of its own."""
    with torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext():
        registry[cell.provider](make_inputs(cell, device))()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def launch_all(cells: Sequence[Cell], registry: Mapping[str, Provider], device: torch.device) -> list[Cell]:
    """Launch each once, in threads; returns those that failed, perhaps only because of the threads."""
    torch.zeros(1, device=device)  # the context, before the threads
    with ThreadPoolExecutor(THREADS) as pool:
        jobs = {pool.submit(launch_once, c, registry, device): c for c in cells}
        return [jobs[job] for job in as_completed(jobs) if job.exception() is not None]


def precompile() -> int:
    """What the benchmark will launch, kept by Triton's cache on disk for the stages that follow."""
    device = check_device("cuda")
    cells: dict[tuple[str, str, str, int], Cell] = {}
    for c in make_cells("cuda", "bf16", providers=("fxmask_triton",), masks=("random",)):
        if c.op != "step":
            cells.setdefault((c.op, c.phase, c.shape, c.block[0]), c)
    wanted = list(cells.values())[:PRECOMPILED]
    begin, failed = time.monotonic(), 0
    for cell in launch_all(wanted, REGISTRY, device):  # once more, alone: this failure's words are the compiler's
        try:
            launch_once(cell, REGISTRY, device)
        except Exception as e:
            failed += 1
            print(f"{cell.name}: {e!r}"[:400])
    print(f"compiled {len(wanted) - failed} of {len(wanted)} configurations in {time.monotonic() - begin:.1f} s")
    return 1 if failed else 0


def compile_choices(run: Run, cells: Sequence[Cell]) -> bool:
    """What a sweep tries and its csv lacks, at one ratio a block, as all ratios launch the same kernels; in the run's time. Whether the device still answers.

    What fails is left to the timing, which has words for it.
    """
    begin = time.monotonic()
    new: dict[tuple[tuple[int, int], str], Cell] = {}
    for c in cells:
        if c.provider not in REGISTRY and {**run.shared, **what(c)} not in run.table:
            new.setdefault((c.block, c.provider), c)
    failed = launch_all(list(new.values()), run.registry, run.device)
    if not run.alive():
        return False
    torch.cuda.empty_cache()
    took = time.monotonic() - begin
    run.say(f"compiled {len(new) - len(failed)} of {len(new)} choices in {took:.1f} s")
    run.time_limit = None if run.time_limit is None else run.time_limit - took
    return True
