"""Stages: subprocesses with their own time limits. One that fails or hangs does not end the run; what is known is written after each.

Those that measure nothing run side by side: processes spend their time on compiling and on a CPU's work, and a device has room for many.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # of a checkout; in an installation the folder of packages
LOG, RESULTS = "log.txt", "stages.json"


@dataclass(frozen=True)
class Stage:
    """A command and how long it may take. `skip`: why it cannot run here, empty where it can. `after_failure_of`: runs only where that stage failed.

    `beside`: measures nothing, and may run beside its neighbours.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    skip: str = ""
    env: Mapping[str, str] | None = None
    after_failure_of: str = ""
    beside: bool = False


@dataclass(frozen=True)
class Result:
    """`status`: ok, failed, timeout or skipped. `last`: the last line that the stage printed, or why it was skipped."""

    name: str
    status: str
    seconds: float = 0.0
    code: int | None = None
    last: str = ""


def python(*args: str) -> list[str]:
    """A command of this interpreter."""
    return [sys.executable, *args]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process' environment, with fxmask importable from where this file lies."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(paths), **(extra or {})}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a stage and what it started: it has a process group of its own."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
            return


def run_stage(stage: Stage, log: Path, limit_s: float | None, started: list[subprocess.Popen[bytes]], stopped: threading.Event) -> Result:
    """Run one stage, its output appended to a log, for at most the smaller of both limits. `started` gets its process; it ends at once if `stopped`."""
    if stage.skip:
        return Result(stage.name, "skipped", last=stage.skip)
    limit = stage.limit_s if limit_s is None else min(stage.limit_s, limit_s)
    if limit <= 0:
        return Result(stage.name, "skipped", last="no time left (--time-limit)")
    begin = time.monotonic()
    with log.open("ab") as f:
        f.write(f"\n==== {stage.name} (at most {limit:.0f} s)\n".encode())
        f.flush()
        start = f.tell()
        try:
            process = subprocess.Popen(list(stage.command), cwd=ROOT, env=environment(stage.env), stdout=f, stderr=subprocess.STDOUT, start_new_session=True)
            started.append(process)
            if stopped.is_set():  # while this one was being started, so that nobody else has ended it
                _end(process)
        except OSError as e:
            return Result(stage.name, "failed", last=f"{type(e).__name__}: {e}")
        try:
            code: int | None = process.wait(timeout=limit)
            status = "ok" if code == 0 else "failed"
        except subprocess.TimeoutExpired:
            code, status = None, "timeout"
        finally:
            if process.poll() is None:
                _end(process)
    with log.open("rb") as f:
        f.seek(start)
        lines = f.read().decode(errors="replace").strip().splitlines()
    return Result(stage.name, status, round(time.monotonic() - begin, 1), code, lines[-1][:200] if lines else "")


def run_stages(stages: Sequence[Stage], out: Path, time_limit: float | None = None, say: Callable[[str], None] = print, jobs: int = 1) -> list[Result]:
    """Run them all, in order, neighbours that may up to `jobs` at a time, within `time_limit` seconds together; results are written as they come."""
    out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    results: list[Result] = []
    started: list[subprocess.Popen[bytes]] = []
    stopped = threading.Event()

    def one(stage: Stage) -> Result:
        left = None if time_limit is None else time_limit - (time.monotonic() - begin)
        return run_stage(stage, out / (f"{stage.name}.{LOG}" if stage.beside else LOG), left, started, stopped)

    for key, group in groupby(stages, key=lambda s: s.beside or s.name):
        failed = {r.name for r in results if r.status == "failed"}
        due = [s for s in group if not s.after_failure_of or s.after_failure_of in failed]
        with ThreadPoolExecutor(jobs) as pool:
            try:
                for result in pool.map(one, due) if key is True else map(one, due):
                    _join(out / f"{result.name}.{LOG}", out / LOG)
                    results.append(result)
                    (out / RESULTS).write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n", encoding="utf-8")
                    say(f"{result.name:12} {result.status:8} {result.seconds:6.1f} s  {result.last}")
            except BaseException:  # interrupted: threads would wait for what they have started
                stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                for process in started:
                    if process.poll() is None:
                        _end(process)
                raise
    return results


def _join(part: Path, log: Path) -> None:
    """Append what one of several stages has said, so that sections of the log are whole and in order."""
    if part.exists():
        with log.open("ab") as f:
            f.write(part.read_bytes())
        part.unlink()
