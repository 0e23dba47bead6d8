"""The runs of a sweep on this machine: a process each, or several in turns in one process (many.py), and as many processes as are wanted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol, TypeVar

import torch

from thesis import lock, many, train
from thesis.sweep_checks import SweepError

After = Callable[[str, int], None]  # (a run's name, its exit status); called from any thread
TRAIN, MANY = (Path(str(module.__file__)).resolve() for module in (train, many))


class Named(Protocol):
    """A run: its folder's name, and the arguments of train.py but for --out."""

    @property
    def name(self) -> str: ...

    @property
    def arguments(self) -> tuple[str, ...]: ...


Run = TypeVar("Run", bound=Named)


def arguments_of(job: Named, out: Path) -> list[str]:
    """Figures of single runs are left to examples/plots.py: two a run, and a second each."""
    return [*job.arguments, "--no-figures", "--out", str(out / job.name)]


def environments(processes: int, gpus: int | None) -> list[dict[str, str]]:
    """One for each process, which shows it one of the GPUs in turn; all of them where the file does not say how many."""
    if gpus is None:
        return [dict(os.environ)] * processes
    have = torch.cuda.device_count()
    if gpus > have:
        raise SweepError(f"meta.gpus: expected at most {have}, which this machine shows, got {gpus}.\n  fix: a smaller number, or leave it out.")
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name] or [str(i) for i in range(have)]
    return [{**os.environ, "CUDA_VISIBLE_DEVICES": names[i % gpus] if gpus else ""} for i in range(processes)]


def one_process_each(jobs: list[Run], out: Path, script: Path, envs: list[dict[str, str]], ended: Callable[[Run], bool], after: After) -> int:
    """Every run by a process of its own, as many at a time as there are environments; how many failed."""
    free: SimpleQueue[dict[str, str]] = SimpleQueue()
    stopped = threading.Event()  # by which whoever waits for another's run knows that nobody wants it any more
    for env in envs:
        free.put(env)

    def one(job: Run) -> int:
        folder = out / job.name
        lock.wait_until_free(folder, stopped=stopped)  # a sweep that was killed may have left the run training
        if stopped.is_set() or ended(job):
            return 0
        folder.mkdir(parents=True, exist_ok=True)
        env = free.get()
        try:
            command = [sys.executable, str(script), *arguments_of(job, out)]
            with (folder / "output.txt").open("a") as file:
                run = partial(subprocess.run, command, env=env, stdout=file, stderr=subprocess.STDOUT, check=False)
                status = run().returncode
                if status != 0:  # it may be that a run of a killed sweep took the folder after we had looked, and has it still, or has ended by now
                    waited = lock.wait_until_free(folder, stopped=stopped)
                    if ended(job):
                        status = 0
                    elif waited:
                        status = run().returncode
        finally:
            free.put(env)
        if status == 0 or not stopped.is_set():  # Ctrl-C, which all processes hear, is no failure of a run
            after(job.name, status)
        return int(status != 0)

    pool = ThreadPoolExecutor(len(envs))
    try:
        return sum(pool.map(one, jobs))
    finally:
        stopped.set()
        pool.shutdown(cancel_futures=True)


def in_turns(jobs: Sequence[Named], out: Path, at_once: int, envs: list[dict[str, str]], gpus: int | None, after: After) -> int:
    """`at_once` runs in turns; in this process, or with several environments in a process each; how many failed."""
    for job in jobs:
        lock.wait_until_free(out / job.name)
    out.mkdir(parents=True, exist_ok=True)
    if len(envs) == 1 and gpus is None:
        return many.together([(job.name, train.arguments(arguments_of(job, out))) for job in jobs], at_once, after)
    stopped = threading.Event()

    def part(i: int) -> int:
        mine, file = jobs[i :: len(envs)], out / f".runs{i}.json"
        file.write_text(json.dumps([[job.name, arguments_of(job, out)] for job in mine]))
        command, left = [sys.executable, str(MANY), str(file), "--at-once", str(at_once), "--quiet"], {job.name for job in mine}
        with subprocess.Popen(command, env=envs[i], stdout=subprocess.PIPE, text=True) as process:
            failed = 0
            for line in process.stdout or ():
                name, status = json.loads(line)
                left.remove(name)
                failed += status != 0
                after(name, status)
        if not stopped.is_set():
            for name in left:  # the process died over them
                after(name, process.returncode or 1)
        return failed + len(left)

    pool = ThreadPoolExecutor(len(envs))
    try:
        return sum(pool.map(part, range(len(envs))))
    finally:
        stopped.set()
        pool.shutdown(cancel_futures=True)
