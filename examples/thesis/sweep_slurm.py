"""The runs of a sweep on SLURM: submitit sends each as a task of one job array. What is queued or running is not sent a second time."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from thesis.csv_files import replacing
from thesis.sweep_checks import SweepError, whole
from thesis.sweep_file import Job
from thesis.sweep_local import arguments_of

RECORD = "slurm_jobs.json"
ALIVE = ("PENDING", "RUNNING", "REQUEUED", "CONFIGURING", "COMPLETING", "SUSPENDED", "RESIZING")
UNKNOWN_S = 600  # a job that SLURM does not know is taken for too new, so long
TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")


def submitit() -> ModuleType:
    """The package, which only this way of running a sweep needs."""
    try:
        import submitit
    except ImportError as error:
        what = f"meta.run: slurm needs submitit, which cannot be imported: {error}"
        raise SweepError(f"{what}.\n  fix: pip install submitit, or run: local.") from None
    module: ModuleType = submitit
    return module


def minutes(text: str) -> int:
    """sbatch's time in whole minutes, rounded up: 90, 90:00, 12:00:00, 1-12, 1-12:00 or 1-12:00:00."""
    found = TIME.fullmatch(text)
    if found is None:
        raise SweepError(f"sbatch.time: expected sbatch's form, such as 90, 12:00:00 or 1-12:00:00, got {text!r}.")
    parts = [int(part) for part in found["parts"].split(":")]
    if found["days"]:  # days-hours[:minutes[:seconds]]
        hours, mins, secs = (*parts, 0, 0)[:3]
    else:  # minutes, minutes:seconds or hours:minutes:seconds
        hours, mins, secs = (0, *parts, 0)[:3] if len(parts) < 3 else parts
    seconds = ((int(found["days"] or 0) * 24 + hours) * 60 + mins) * 60 + secs
    return -(-seconds // 60)


def parameters(meta: dict[str, str], sbatch: dict[str, str]) -> dict[str, Any]:
    """`sbatch` as submitit's parameters; what it has no name for is handed to sbatch as it is."""
    found: dict[str, Any] = {"name": meta.get("prefix", "fxmask")}
    for key, name in (("partition", "slurm_partition"), ("mem", "slurm_mem")):
        found |= {name: sbatch[key]} if key in sbatch else {}
    if "cpus-per-task" in sbatch:
        found["cpus_per_task"] = whole("sbatch.cpus-per-task", sbatch["cpus-per-task"], 1)
    if "time" in sbatch:
        found["timeout_min"] = minutes(sbatch["time"])
    if "gpus" in meta:  # so many GPUs at a time: tasks of the array
        each = sbatch.get("gpus", "1").rpartition(":")[2]  # a30:1 has a type in front
        found["slurm_array_parallelism"] = max(1, whole("meta.gpus", meta["gpus"], 1) // max(1, whole("sbatch.gpus", each)))
    found["slurm_additional_parameters"] = {key: sbatch[key] for key in ("gpus", "export", "chdir") if key in sbatch}
    return found


def is_alive(package: ModuleType, out: Path, job_id: str, sent: float) -> bool:
    """Whether a job is still queued or running."""
    state = package.SlurmJob(folder=out / "slurm", job_id=job_id).state.split(" ")[0]  # "CANCELLED by 0"
    return state in ALIVE or (state == "UNKNOWN" and time.time() - sent < UNKNOWN_S)


def recorded(out: Path) -> dict[str, tuple[str, float]]:
    """What has been sent from this folder: name -> (job id, when)."""
    path = out / RECORD
    try:
        return {name: (job_id, sent) for name, (job_id, sent) in json.loads(path.read_text()).items()} if path.exists() else {}
    except (ValueError, TypeError, AttributeError) as error:
        what = f"expected what was sent, got {type(error).__name__}: {error}"
        raise SweepError(f"{path}: {what}.\n  fix: bring the file back, or remove it once none of its jobs is queued.") from None


def submit(jobs: list[Job], out: Path, script: Path, meta: dict[str, str], sbatch: dict[str, str]) -> tuple[int, int]:
    """Send the runs; returns (how many were sent, how many are still queued or running from before)."""
    package, out = submitit(), out.resolve()
    record = recorded(out)
    wanted, jobs = len(jobs), [job for job in jobs if job.name not in record or not is_alive(package, out, *record[job.name])]
    if not jobs:
        return 0, wanted
    try:
        executor = package.AutoExecutor(folder=out / "slurm", cluster="slurm")
    except RuntimeError as error:
        raise SweepError(f"meta.run: slurm: {error}\n  fix: start the sweep where sbatch and srun are, or run: local.") from None
    executor.update_parameters(**parameters(meta, sbatch))
    with executor.batch():
        sent = [executor.submit(package.helpers.CommandFunction([sys.executable, str(script), *arguments_of(job, out)])) for job in jobs]
    record |= {job.name: (handle.job_id, time.time()) for job, handle in zip(jobs, sent, strict=True)}
    with replacing(out / RECORD) as part:
        part.write_text(json.dumps(record, indent=1) + "\n")
    return len(sent), wanted - len(sent)
