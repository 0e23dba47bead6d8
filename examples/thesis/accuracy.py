"""Which recipe keeps the accuracy at which block and ratio: the thesis' CIFAR model, searched on held-out images, judged once on the test images.

    python examples/thesis/accuracy.py search --data folder --root DIR      # or --data cifar10; one seed, few epochs, 5,000 training images held out
    python examples/thesis/accuracy.py final --data folder --root DIR       # two seeds, 20 epochs, of what the search has chosen
    python examples/thesis/accuracy.py isoflop --data folder --root DIR     # dense widths and wider masked models, 8 epochs; isoflop.py draws them
    python examples/thesis/accuracy.py thesis --data folder --root DIR --graphs --at-once 18    # three seeds, 200 epochs, for a GPU
    python examples/thesis/accuracy.py table                                # the csv anew from the runs that have ended

Two single-threaded runs at once by examples/thesis/train.py; stopped and started again, it goes on where it was, and the csv is written anew after every run.
A run of other settings in the folder of one that is asked for is an error; runs of other lengths or data want another --runs. Every configuration that was
tried is in the table. No MixUp and no CutMix, which short runs lose by, but in the thesis' own recipe. A ratio reaches its end at half of the steps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from checked_arguments import check_numbers

from thesis import run_folder, sweep_local, train
from thesis.accuracy_table import DATA_NAMES, PHASES, RESULTS, RUNS, own, row_of, settings, write
from thesis.recipes import COMMON, arguments_of
from thesis.side_by_side import GOES_ON, exit_code


class Job(NamedTuple):
    """A run of train.py, with its arguments but for the folder."""

    recipe: str
    seed: int
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.recipe}-seed{self.seed}"


def jobs(phase: str, epochs: int, seeds: tuple[int, ...], only: list[str] | None, runs: Path, how: list[str]) -> Iterator[Job]:
    """Seeds paired: all runs of a seed see the same batches. `how`: what all runs have."""
    for seed in seeds:
        for name in PHASES[phase][0]:
            if only is None or name in only:
                yield Job(name, seed, (*how, "--epochs", str(epochs), "--seed", str(seed), *COMMON, *arguments_of(name, epochs, seed, runs)))


def refuse_others(out: Path, words: Sequence[str]) -> None:
    """A run that lies in the folder, ended or not, is the one of these arguments. Raises: SweepError where it is another."""
    facts = run_folder.facts_of(out)
    if facts is not None:
        asked = settings(vars(train.arguments(list(words))))
        run_folder.same_settings(asked, settings(facts), out, "the command and the recipe say", "another --runs folder")


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("phase", choices=(*PHASES, "table"))
    p.add_argument("--data", choices=tuple(DATA_NAMES), default="cifar10")
    p.add_argument("--root", type=Path)
    p.add_argument("--epochs", type=int, help="default: 6 for search, 20 for final, 8 for isoflop, 200 for thesis")
    p.add_argument("--seeds", type=int, nargs="+")
    p.add_argument("--holdout", type=int, default=5000)
    p.add_argument("--at-once", type=int, default=2, help="processes")
    p.add_argument("--in-turns", type=int, metavar="K", help="in each process K runs in turns (many.py), for a GPU; default: one run a process")
    p.add_argument("--graphs", action="store_true", help="steps as CUDA graphs")
    p.add_argument("--only", nargs="+")
    p.add_argument("--runs", type=Path, default=RUNS, help="where checkpoints and logs lie")
    p.add_argument("--csv", type=Path, default=RESULTS)
    args = p.parse_args(argv)
    check_numbers(p, args)
    if args.phase == "table" and not args.runs.is_dir():
        p.error(f"--runs: expected a folder of runs, got {args.runs}, which is none")
    if args.phase != "table":
        if args.root is not None and not args.root.is_dir():
            p.error(f"--root: expected a folder of images, got {args.root}, which is none")
        unknown = sorted(set(args.only or ()) - set(PHASES[args.phase][0]))
        if unknown:
            p.error(f"--only: expected names among {', '.join(PHASES[args.phase][0])}, got {', '.join(unknown)}")
    return exit_code("thesis/accuracy.py", lambda: act(args), GOES_ON)


def act(args: argparse.Namespace) -> int:
    """Train what has not ended, unless the table alone is wanted, and write that; 1 where a run failed."""
    own(args.csv)  # before anything is trained for it
    failed = 0 if args.phase == "table" else train_phase(args)
    print(f"{write(args.runs, args.csv)} runs in {args.csv}")
    return 1 if failed else 0


def train_phase(args: argparse.Namespace) -> int:
    """The runs of a phase that have not ended; how many failed."""
    out, (_, epochs, seeds) = args.runs / args.phase, PHASES[args.phase]

    def ended(run: Job) -> bool:
        return row_of(args.phase, run.recipe, run.seed, out / run.name) is not None

    def after(name: str, code: int) -> None:
        print(f"{out / name}: {'ended' if code == 0 else f'exit {code}, see output.txt'}", flush=True)
        write(args.runs, args.csv)

    def train_all(runs: list[Job]) -> int:
        left = [run for run in runs if not ended(run)]
        processes = sweep_local.environments(max(1, min(args.at_once, len(left))), None)
        if args.in_turns:
            return sweep_local.in_turns(left, out, args.in_turns, processes, None, after)
        return sweep_local.one_process_each(left, out, sweep_local.TRAIN, processes, ended, after)

    how = ["--data", args.data, "--holdout", str(args.holdout), *(["--graphs"] if args.graphs else []), "--threads", "1"]
    how += ["--root", str(args.root)] if args.root else []
    if args.phase != "search":  # the search must not look at the test images
        how.append("--read-test")
    seeds = tuple(dict.fromkeys(args.seeds or seeds))
    todo = list(jobs(args.phase, epochs if args.epochs is None else args.epochs, seeds, args.only, args.runs, how))
    for run in todo:  # all of them before the first is run
        refuse_others(out / run.name, run.arguments)
    taught = [run for run in todo if "--teacher" in run.arguments]  # after their teachers
    return train_all([run for run in todo if run not in taught]) + train_all(taught)


if __name__ == "__main__":
    sys.exit(main())
