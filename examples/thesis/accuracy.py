"""Which recipe keeps the accuracy at which block and ratio: the thesis' CIFAR model, searched on held-out images, judged once on the test images.

    python examples/thesis/accuracy.py search --data folder --root DIR      # or --data cifar10; one seed, few epochs, 5,000 training images held out
    python examples/thesis/accuracy.py final --data folder --root DIR       # two seeds, 20 epochs, of what the search has chosen
    python examples/thesis/accuracy.py isoflop --data folder --root DIR     # dense widths and wider masked models, 8 epochs; isoflop.py draws them
    python examples/thesis/accuracy.py table                                # the csv anew from the runs that have ended

Two single-threaded runs at once by examples/thesis/train.py; stopped and started again, it goes on where it was, and the csv is written anew after every run.
A run of other settings in the folder of one that is asked for is an error; runs of other lengths or data want another --runs. Every configuration that was
tried is in the table. No MixUp and no CutMix, which short runs lose by. A ratio reaches its end at half of the steps.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from thesis import csv_files, lock, run_folder, train
from thesis.csv_files import read
from thesis.recipes import COMMON, FINAL, ISOFLOP, SEARCH, arguments_of
from thesis.sweep_checks import SweepError, text
from thesis.sweep_file import defaults_of_train, options_of

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "cifar10_accuracy.csv"
RUNS = Path("runs/accuracy")
COLUMNS = (
    "phase", "run", "block", "target_ratio", "ratio_achieved", "epochs", "seed", "held_top1", "test_top1", "test_top5", "train_acc", "train_loss", "flips",
    "train_tflop", "loaded_weights_g", "train_seconds", "threads", "torch", "data", "holdout", "command",
)  # fmt: skip
PHASES = {"search": (SEARCH, 6, (0,)), "final": (FINAL, 20, (0, 1)), "isoflop": (ISOFLOP, 8, (0, 1))}
DATA_NAMES = {"folder": "CIFAR-10 as JPEG, quality 75", "cifar10": "CIFAR-10", "digits": "digits"}


def jobs(phase: str, epochs: int, seeds: tuple[int, ...], only: list[str] | None = None, runs: Path = RUNS) -> Iterator[tuple[str, int, list[str]]]:
    """(name of the run, seed, arguments of train.py but for data and folder), seeds paired: all runs of a seed see the same batches."""
    for seed in seeds:
        for name in PHASES[phase][0]:
            if only is None or name in only:
                yield name, seed, ["--epochs", str(epochs), "--seed", str(seed), *COMMON, *arguments_of(name, epochs, seed, runs)]


def folder_of(runs: Path, phase: str, name: str, seed: int) -> Path:
    return runs / phase / f"{name}-seed{seed}"


def settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """What must be alike of two runs. A teacher is one whatever folder the runs lie in; whether test images were read is seen from the accuracies."""
    teacher = options.get("teacher")
    return {**options, "teacher": teacher and "/".join(Path(teacher).parts[-2:]), "read_test": False}


def words_of(name: str, seed: int, facts: dict[str, Any]) -> list[str]:
    """The arguments of train.py but for data and folder: the recipe's, or where this has changed since the run the run's own."""
    words = ["--epochs", str(facts["epochs"]), "--seed", str(seed), *COMMON, *arguments_of(name, facts["epochs"], seed)]
    asked = train.arguments([*words, "--data", facts["data"], "--holdout", str(facts["holdout"])])
    if not run_folder.differing(settings(vars(asked)), settings(facts)):
        return words
    known = {key: value for key, value in defaults_of_train().items() if key not in (*train.HOW_RUN, "data", "holdout", "read_test")}
    return options_of("run.json", {key: text(facts[key]) for key, value in known.items() if facts.get(key, value) != value})


def row_of(phase: str, name: str, seed: int, out: Path) -> dict[str, Any] | None:
    """A run's row, None while it has not ended."""
    facts, log, test = run_folder.facts_of(out), run_folder.log_of(out), run_folder.test_of(out) if phase != "search" else {}
    if facts is None or len(log) < facts["epochs"] or test is None:
        return None
    last, config = log[-1], "" if facts["dense"] else facts.get("config") or ""
    images = ["--data", facts["data"], "--root", "DIR", "--holdout", str(facts["holdout"])]
    return {
        "phase": phase,
        "run": name,
        "block": block_of(config),
        "target_ratio": "0" if facts["dense"] else ratio_of(config),
        "ratio_achieved": f"{float(last['ratio_achieved']):.4f}",
        "epochs": facts["epochs"],
        "seed": seed,
        "held_top1": f"{float(last['top1']):.2f}",
        "test_top1": f"{test['top1']:.2f}" if test else "",
        "test_top5": f"{test['top5']:.2f}" if test else "",
        "train_acc": f"{float(last['train_acc']):.2f}",
        "train_loss": f"{float(last['train_loss']):.4f}",
        "flips": sum(int(r["flips"]) for r in log),
        "train_tflop": f"{sum(float(r['flop']) for r in log) / 1e12:.2f}",
        "loaded_weights_g": f"{sum(float(r['loaded']) for r in log) / 1e9:.3f}",
        "train_seconds": f"{sum(float(r['seconds']) for r in log):.0f}",
        "threads": facts["threads"],
        "torch": facts["torch"],
        "data": DATA_NAMES[facts["data"]],
        "holdout": facts["holdout"],
        "command": shlex.join(["python", "examples/thesis/train.py", *images, *words_of(name, seed, facts)]),
    }


def block_of(config: str) -> str:
    """ "32x32" of the configuration string."""
    return config.partition("(")[2].partition(")")[0].replace(", ", "x")


def ratio_of(config: str) -> str:
    """The ratio, or of layers that differ all of them."""
    return "/".join(dict.fromkeys(part.split(" ")[0] for part in config.split("masked ")[1:]))


def setting_of(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """What runs must share to be compared: data set, epochs, images that are held out; older rows have these in their command alone."""
    told = re.search(r"--holdout (\d+)", str(row.get("command", "")))
    return str(row.get("data", "")), str(row.get("epochs", "")), str(row.get("holdout") or (told[1] if told else ""))


def words_for(settings: Iterable[tuple[str, str, str]]) -> str:
    """Settings in words, for an error."""
    return ", ".join(f"{epochs} epochs of {data}" + (f" with {held} images held out" if held else "") for data, epochs, held in sorted(settings))


def key_of(row: dict[str, Any]) -> tuple[str, ...]:
    """What makes a row one run's."""
    return tuple(str(row[column]) for column in ("phase", "run", "seed")) + setting_of(row)


def place_of(key: tuple[str, ...]) -> tuple[Any, ...]:
    """The table's order: phases and runs as the recipes name them, recipes of another day last, then the seeds."""
    phase, name, seed, *rest = key
    phases, names = list(PHASES), list(PHASES[phase][0]) if phase in PHASES else []
    return phases.index(phase) if phase in phases else len(phases), names.index(name) if name in names else len(names), name, int(seed), rest


def write(runs: Path, path: Path) -> int:
    """The table of all runs that have ended; returns how many. Rows whose run lies in another folder, or on another machine, stay in it."""
    with lock.alone(path):  # from before it is read: rows that others add meanwhile would be lost
        rows = {key_of(row): {**row, "holdout": setting_of(row)[-1]} for row in read(path)}
        for phase, (recipes, _, _) in PHASES.items():
            for name in recipes:
                for out in runs.glob(f"{phase}/{name}-seed*"):
                    row = row_of(phase, name, int(out.name.rpartition("seed")[2]), out)
                    rows.update({key_of(row): row} if row else {})
        csv_files.write(path, COLUMNS, (rows[key] for key in sorted(rows, key=place_of)))
    return len(rows)


def refuse_others(out: Path, words: list[str]) -> None:
    """A run that lies in the folder, ended or not, is the one of these arguments. Raises: SweepError where it is another."""
    facts = run_folder.facts_of(out)
    if facts is not None:
        asked = settings(vars(train.arguments(words)))
        run_folder.same_settings(asked, settings(facts), out, "the command and the recipe say", "another --runs folder")


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("phase", choices=(*PHASES, "table"))
    p.add_argument("--data", choices=tuple(DATA_NAMES), default="cifar10")
    p.add_argument("--root", type=Path)
    p.add_argument("--epochs", type=int, help="default: 6 for search, 20 for final, 8 for isoflop")
    p.add_argument("--seeds", type=int, nargs="+")
    p.add_argument("--holdout", type=int, default=5000)
    p.add_argument("--at-once", type=int, default=2)
    p.add_argument("--only", nargs="+")
    p.add_argument("--runs", type=Path, default=RUNS, help="where checkpoints and logs lie")
    p.add_argument("--csv", type=Path, default=RESULTS)
    args = p.parse_args(argv)
    failed = 0
    if args.phase != "table":
        recipes, epochs, seeds = PHASES[args.phase]
        unknown = sorted(set(args.only or ()) - set(recipes))
        if unknown:
            p.error(f"--only: expected names among {', '.join(recipes)}, got {', '.join(unknown)}")

        def one(job: tuple[str, int, list[str]]) -> int:
            name, seed, arguments = job
            out = folder_of(args.runs, args.phase, name, seed)
            if row_of(args.phase, name, seed, out):
                return 0
            root = ["--root", str(args.root)] if args.root else []
            command = [sys.executable, str(HERE / "train.py"), *images, *root, "--threads", "1", "--out", str(out)]
            out.mkdir(parents=True, exist_ok=True)
            if args.phase != "search":  # the search must not look at the test images
                command.append("--read-test")
            with (out / "output.txt").open("a") as file:
                code = subprocess.run([*command, *arguments], stdout=file, stderr=subprocess.STDOUT, check=False).returncode
            print(f"{out}: {'ended' if code == 0 else f'exit {code}, see output.txt'}", flush=True)
            write(args.runs, args.csv)
            return code

        images = ["--data", args.data, "--holdout", str(args.holdout)]
        todo = list(jobs(args.phase, args.epochs or epochs, tuple(args.seeds or seeds), args.only, args.runs))
        try:
            for name, seed, arguments in todo:  # all of them before the first is run
                refuse_others(folder_of(args.runs, args.phase, name, seed), [*images, *arguments])
        except SweepError as error:
            print(f"thesis/accuracy.py: {error}", file=sys.stderr)
            return 2
        taught = [job for job in todo if "--teacher" in job[2]]  # after their teachers
        with ThreadPoolExecutor(args.at_once) as pool:
            for part in ([job for job in todo if job not in taught], taught):
                failed += sum(map(bool, pool.map(one, part)))
    print(f"{write(args.runs, args.csv)} runs in {args.csv}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
