"""The thesis' grid, or any other sweep over masks: its YAML files, run, stopped, and gone on with, on one machine or on SLURM.

    python examples/thesis/sweep.py list examples/thesis/sweeps/thesis_grid.yaml         # 342 runs, and which of them have ended
    python examples/thesis/sweep.py run examples/thesis/sweeps/small.yaml                # digits, a minute on one core
    python examples/thesis/sweep.py run FILE --jobs 4                                    # four processes at a time, of one run each
    python examples/thesis/sweep.py run FILE --at-once 8 --jobs 2                        # two processes, in each eight runs in turns (many.py)
    python examples/thesis/sweep.py table FILE                                           # the csv files anew
    python examples/thesis/sweep.py figures FILE                                         # and figures 6.1, 6.2, 6.4 and 6.5 of what has ended

Each run is one of train.py in a folder of its own, and goes on where it was. After every run `masked_accuracy.csv` and `loaded_elements.csv` are made
anew from the runs' logs. With meta.run: slurm the runs are sent through submitit, and the tables made by `table`. Accuracies are top-1 in percent of the last
epoch, masks active. The file's form is described in sweep_file.py.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started

from checked_arguments import check_numbers

from thesis import lock, sweep_figures, sweep_local, sweep_results, sweep_slurm
from thesis.side_by_side import GOES_ON, can_draw, check_folder, exit_code
from thesis.sweep_checks import SweepError, place, whole
from thesis.sweep_file import Job, Sweep, read

FOR = {"only": ("run", "list"), "jobs": ("run",), "at_once": ("run",), "ratio": ("figures",), "figure_of": ("figures",)}  # actions that read an option


def arguments(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("action", choices=("run", "list", "table", "figures"))
    p.add_argument("file", type=Path, help="a sweep file, .yaml or .json")
    p.add_argument("--out", type=Path, help="folder of the runs; default: meta's sandbox/prefix, else runs/NAME OF THE FILE")
    p.add_argument("--only", nargs="+", metavar="PATTERN", help="only runs whose names match, such as '32x32-*'")
    p.add_argument("--jobs", type=int, metavar="N", help="processes at a time; default: meta.gpus, else 1")
    p.add_argument("--at-once", type=int, metavar="K", help="in each process K runs in turns, images loaded once; default: one run a process")
    p.add_argument("--ratio", type=float, help="ratio of figure 6.4, default 0.8")
    p.add_argument("--figure-of", nargs="+", default=(), metavar="RUN", help="runs of figure 6.5; default: 32x32 blocks at 80 %%")
    args = p.parse_args(argv)
    check_numbers(p, args)
    check_folder(p, "--out", args.out)
    for name, actions in FOR.items():
        if getattr(args, name) not in (None, ()) and args.action not in actions:
            p.error(f"--{name.replace('_', '-')}: expected with {' or '.join(actions)}, got it with {args.action}")
    return args


def checked_meta(sweep: Sweep) -> tuple[str, Path]:
    """(slurm or local, the script of a run)."""
    run, mode = sweep.meta.get("run", "local"), sweep.meta.get("mode", "grid")
    if mode != "grid":
        raise SweepError(f"meta.mode: expected grid, got {mode!r}.\n  fix: only whole grids are run here; hp lists the values.")
    if run not in ("local", "slurm"):
        raise SweepError(f"meta.run: expected local or slurm, got {run!r}.")
    script = place(sweep.meta["script"]).resolve() if "script" in sweep.meta else sweep_local.TRAIN
    if not script.is_file():
        raise SweepError(f"meta.script: expected a script that takes train.py's options, got {script}, which is not there.\n  fix: leave it out for train.py.")
    return run, script


def folder_of(sweep: Sweep) -> Path:
    sandbox = place(sweep.meta.get("sandbox", "runs"))
    if "$" in str(sandbox):
        raise SweepError(f"meta.sandbox: expected a folder, got {sandbox}, whose variable is not set.\n  fix: set it, or name the folder by --out.")
    return sandbox / sweep.meta.get("prefix", sweep.path.stem)


def chosen(jobs: tuple[Job, ...], patterns: list[str] | None) -> list[Job]:
    found = [job for job in jobs if patterns is None or any(fnmatch.fnmatch(job.name, p) for p in patterns)]
    if not found:
        raise SweepError(f"--only: expected patterns of runs' names such as {jobs[0].name!r}, got {' '.join(patterns or ())}, which match none.")
    return found


def images_are_there(jobs: list[Job]) -> None:
    """One message now, and not one from every run."""
    for data, root in {(args.data, args.root) for args in (job.namespace() for job in jobs)}:
        if data != "digits" and (root is None or not root.is_dir()):
            got = "none" if root is None else f"{root}, which is not there"
            fix = "name it, or set the variable in it; nothing is downloaded"
            raise SweepError(f"fixed.data_dir: expected the folder of the images of {data}, got {got}.\n  fix: {fix}.")


class Table:
    """The csv files of a folder, made anew whenever a run has ended."""

    def __init__(self, sweep: Sweep, out: Path) -> None:
        self.sweep, self.out = sweep, out

    def write(self) -> list[sweep_results.Ended]:
        with lock.alone(self.out / "masked_accuracy.csv"):  # or `table`, which began before a run ended, would write without it after the sweep
            runs = sweep_results.collect(self.sweep.jobs, self.out)
            sweep_results.write(runs, self.out)
            return runs

    def after(self, name: str, status: int) -> None:
        n = len(self.write())
        how, by = "ended", lock.holder(self.out / name) if status else ""
        if by:  # a process that a killed sweep has left may take its next run before we do
            how = f"not trained here, as it is in use by {by}, which trains on; the same command waits for it and counts it"
        elif status:
            how = f"failed with exit status {status}, see {self.out / name / 'output.txt'}"
        print(f"{name}: {how}; {n} of {len(self.sweep.jobs)} runs have ended", flush=True)


def run(sweep: Sweep, out: Path, args: argparse.Namespace) -> int:
    """All runs that have not ended."""
    where, script = checked_meta(sweep)
    if args.at_once and (where == "slurm" or script != sweep_local.TRAIN):
        raise SweepError("--at-once: expected meta.run local and no script but train.py.\n  fix: leave --at-once out.")
    if args.jobs and where == "slurm":
        raise SweepError("--jobs: expected meta.run local, got slurm, where each run is a task.\n  fix: leave --jobs out; meta.gpus says how many at a time.")
    table = Table(sweep, out)
    done = {r.job.name for r in table.write()}
    jobs = [job for job in chosen(sweep.jobs, args.only) if job.name not in done]
    print(f"{out}: {len(done)} of {len(sweep.jobs)} runs have ended, {len(jobs)} to run", flush=True)
    if where == "slurm":
        sent, alive = sweep_slurm.submit(jobs, out, script, sweep.meta, sweep.sbatch)
        print(f"{sent} runs sent to SLURM, {alive} queued or running from before; afterwards: sweep.py table {sweep.path}, or run, which sends what has failed")
        return 0
    images_are_there(jobs)
    gpus = whole("meta.gpus", sweep.meta["gpus"]) if "gpus" in sweep.meta else None
    envs = sweep_local.environments(args.jobs or gpus or 1, gpus)
    if args.at_once:
        return sweep_local.in_turns(jobs, out, args.at_once, envs, gpus, table.after)
    return sweep_local.one_process_each(jobs, out, script, envs, lambda job: sweep_results.ended(job, out / job.name) is not None, table.after)


def report(sweep: Sweep, out: Path, args: argparse.Namespace, figures: bool) -> None:
    """Tables, and figures where matplotlib is installed."""
    runs = Table(sweep, out).write()
    files = [out / "masked_accuracy.csv", out / "loaded_elements.csv"]
    if figures and can_draw("figures"):
        files += sweep_figures.draw(runs, sweep.jobs, out, args.ratio, args.figure_of)
    print("\n".join(map(str, files)))
    print(f"{len(runs)} of {len(sweep.jobs)} runs have ended")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 1 where a run failed, 2 where the file, the folder or a package is not as it must be."""
    args = arguments(argv)
    return exit_code("thesis/sweep.py", lambda: act(args), GOES_ON)


def act(args: argparse.Namespace) -> int:
    """What the command line asks for; 1 where a run failed."""
    sweep = read(args.file)
    checked_meta(sweep)
    out = args.out or folder_of(sweep)
    if args.action == "run":
        with lock.held(out):
            return 1 if run(sweep, out, args) else 0
    if args.action == "list":
        done = {r.job.name for r in sweep_results.collect(sweep.jobs, out)}
        print("\n".join(f"{job.name}{'  ended' if job.name in done else ''}" for job in chosen(sweep.jobs, args.only)))
        print(f"{len(done)} of {len(sweep.jobs)} runs have ended")
    else:
        report(sweep, out, args, args.action == "figures")  # a sweep may be running meanwhile
    return 0


if __name__ == "__main__":
    sys.exit(main())
