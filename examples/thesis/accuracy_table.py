"""The table of accuracy.py's runs: a row for each that has ended, in `results/cifar10_accuracy.csv`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fxmask.errors import ConfigError
from thesis import csv_files, lock, run_folder, train
from thesis.recipes import COMMON, FINAL, ISOFLOP, SEARCH, THESIS, arguments_of
from thesis.sweep_checks import text
from thesis.sweep_file import defaults_of_train, options_of
from thesis.train_run import HOW_RUN

RESULTS = Path(__file__).resolve().parents[1] / "results" / "cifar10_accuracy.csv"
RUNS = Path("runs/accuracy")
COLUMNS = (
    "phase", "run", "block", "target_ratio", "ratio_achieved", "epochs", "seed", "held_top1", "test_top1", "test_top5", "train_acc", "train_loss", "flips",
    "train_tflop", "loaded_weights_g", "train_seconds", "device", "threads", "torch", "data", "holdout", "command",
)  # fmt: skip
YOUNGER = ("device", "data", "holdout", "command")  # that tables of before lack
PHASES = {"search": (SEARCH, 6, (0,)), "final": (FINAL, 20, (0, 1)), "isoflop": (ISOFLOP, 8, (0, 1)), "thesis": (THESIS, 200, (0, 1, 2))}
DATA_NAMES = {"folder": "CIFAR-10 as JPEG, quality 75", "cifar10": "CIFAR-10", "digits": "digits"}


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
    known = {key: value for key, value in defaults_of_train().items() if key not in (*HOW_RUN, "data", "holdout", "read_test")}
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
        **run_folder.sums_of(log),
        "loaded_weights_g": f"{sum(float(r['loaded']) for r in log) / 1e9:.3f}",
        "device": ", ".join(facts.get("ran_on", [facts.get("device", "cpu")])),
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


def of_one_setting(path: Path, rows: Sequence[Any], data: str | None, epochs: str | None, holdout: str | None) -> list[Any]:
    """The rows of `path` of this data set, length and holdout, None for whatever there is. Raises: ConfigError where that leaves what cannot be compared."""
    wanted = DATA_NAMES.get(data or ""), epochs, holdout
    found = [r for r in rows if all(w in (None, s) for w, s in zip(wanted, setting_of(r), strict=True))]
    settings = {setting_of(r) for r in found}
    if len(settings) > 1:
        got = ", ".join(f"{epochs} epochs of {data}" + (f" with {held} images held out" if held else "") for data, epochs, held in sorted(settings))
        what = f"expected runs of one data set, one length and one holdout in {path}, got {got}"
        raise ConfigError(f"{what}.\n  fix: --data, --epochs, --holdout.")
    return found


def key_of(row: dict[str, Any]) -> tuple[str, ...]:
    """What makes a row one run's."""
    return tuple(str(row[column]) for column in ("phase", "run", "seed")) + setting_of(row)


def place_of(key: tuple[str, ...]) -> tuple[Any, ...]:
    """The table's order: phases and runs as the recipes name them, recipes of another day last, then the seeds."""
    phase, name, seed, *rest = key
    phases, names = list(PHASES), list(PHASES[phase][0]) if phase in PHASES else []
    return phases.index(phase) if phase in phases else len(phases), names.index(name) if name in names else len(names), name, int(seed), rest


def own(path: Path) -> list[dict[str, str]]:
    """The table's rows so far. Raises: ConfigError where it is another's."""
    return csv_files.numbers(path, csv_files.read_own(path, COLUMNS, YOUNGER), "seed", kind=int)


def write(runs: Path, path: Path) -> int:
    """The table of all runs that have ended; returns how many. Rows whose run lies in another folder, or on another machine, stay in it."""
    with lock.alone(path):  # from before it is read: rows that others add meanwhile would be lost
        rows = {key_of(row): {"device": "cpu", **row, "holdout": setting_of(row)[-1]} for row in own(path)}
        for phase, (recipes, _, _) in PHASES.items():
            for name in recipes:
                for out in runs.glob(f"{phase}/{name}-seed*"):
                    seed = out.name.rpartition("seed")[2]
                    row = row_of(phase, name, int(seed), out) if seed.isdecimal() else None
                    rows.update({key_of(row): row} if row else {})
        csv_files.write(path, COLUMNS, (rows[key] for key in sorted(rows, key=place_of)))
    return len(rows)
