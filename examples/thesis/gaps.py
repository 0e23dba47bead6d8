"""What masks cost, on which terms: differences between runs of one seed, read from the table that accuracy.py writes.

    python examples/thesis/gaps.py

A difference is mask minus dense in points of top-1, so a price is negative. Runs that the table lacks are said to be missing, and no seed stands for another.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fxmask.errors import ConfigError
from thesis.accuracy_table import RESULTS, setting_of
from thesis.csv_files import numbers, read
from thesis.side_by_side import exit_code

BEST, MASK16, MASK32 = "dense-muon-wd0.1", "b16-tokens-whole-muon-wd0.1", "b32-tokens-whole-muon-wd0.1"
# terms, masked run, dense run; "@34", "@60", "@100": of so many epochs, where the others are of 20
EQUAL = (
    ("16x16, AdamW", "b16-tokens-whole-taylor", "dense-adamw-lr0.01"),
    ("16x16, Muon", "b16-tokens-whole-muon", "dense-muon"),
    ("16x16, Muon with decay 0.1", MASK16, BEST),
    ("16x16, Muon with decay 0.1, bfloat16", f"{MASK16}-bf16", f"{BEST}-bf16"),
    ("16x16, Muon with decay 0.1, bfloat16, 34 epochs", f"{MASK16}-bf16@34", f"{BEST}-bf16@34"),
    ("16x16, Muon with decay 0.1, bfloat16, 60 epochs", f"{MASK16}-bf16@60", f"{BEST}-bf16@60"),
    ("16x16, both taught by a dense run of their width", f"{MASK16}-taught", f"{BEST}-taught"),
    ("16x16, both taught by a dense run of their width, 60 epochs", f"{MASK16}-bf16-taught@60", f"{BEST}-bf16-taught@60"),
    ("16x16, both taught by a wider dense run", f"{MASK16}-bf16-taught-d96", f"{BEST}-bf16-taught-d96"),
    ("16x16, both go on from a dense run, which teaches", f"{MASK16}-bf16-from-teacher", f"{BEST}-bf16-from-teacher"),
    ("32x32, AdamW", "b32-tokens-whole-taylor", "dense-adamw-lr0.01"),
    ("32x32, Muon", "b32-tokens-whole-muon", "dense-muon"),
    ("32x32, Muon with decay 0.1", MASK32, BEST),
    ("32x32, Muon with decay 0.1, bfloat16, 100 epochs", f"{MASK32}-bf16@100", f"{BEST}-bf16@100"),
    ("32x32, both taught by a dense run of their width", f"{MASK32}-taught", f"{BEST}-taught"),
    ("32x32, both taught by a dense run of their width, 60 epochs", f"{MASK32}-bf16-taught@60", f"{BEST}-bf16-taught@60"),
)
OTHER = (
    ("16x16, Muon, as many FLOP: 34 epochs beside 20", f"{MASK16}-bf16@34", f"{BEST}-bf16"),
    ("16x16, Muon, as many FLOP: 60 epochs beside 34", f"{MASK16}-bf16@60", f"{BEST}-bf16@34"),
    ("16x16, AdamW, as many FLOP: half of the hidden units", "b16-tokens-whole-taylor", "dense-e2-adamw-lr0.01"),
    ("16x16, AdamW, as many weights at the end: 112 of 256 hidden units", "b16-tokens-whole-taylor", "dense-h112-adamw-lr0.01"),
    ("16x16, Muon, as many weights at the end: 112 of 256 hidden units", f"{MASK16}-bf16", "dense-h112-muon-wd0.1-bf16"),
    ("16x16, Muon, as many FLOP: a narrower dense model", f"{MASK16}-bf16", "dense-d48-muon-wd0.1-bf16"),
    ("16x16, Muon, as many FLOP: half of the hidden units", f"{MASK16}-bf16", "dense-e2-muon-wd0.1-bf16"),
    ("16x16, twice as wide, beside dense half as wide again", "b16-tokens-whole-d128-muon-wd0.1-bf16", "dense-d96-muon-wd0.1-bf16"),
    ("16x16, taught by a dense run, beside that run", f"{MASK16}-taught", BEST),
    ("16x16, taught by a dense run, beside that run, 60 epochs", f"{MASK16}-bf16-taught@60", f"{BEST}-bf16@60"),
    ("16x16, goes on from a dense run, beside that run", f"{MASK16}-bf16-from-teacher", f"{BEST}-bf16"),
    ("16x16, taught by a wider one, beside dense untaught", f"{MASK16}-bf16-taught-d96", f"{BEST}-bf16"),
    ("32x32, taught by a dense run, beside that run", f"{MASK32}-taught", BEST),
    ("32x32, taught by a dense run, beside that run, 60 epochs", f"{MASK32}-bf16-taught@60", f"{BEST}-bf16@60"),
    ("32x32, Muon, 100 epochs beside 60", f"{MASK32}-bf16@100", f"{BEST}-bf16@60"),
)


def differences(rows: list[dict[str, str]], pairs: tuple[tuple[str, str, str], ...]) -> list[dict[str, Any]]:
    """One row a pair, of `rows` of phase final: mask minus dense of every seed that both have, by test and by held-out images; FLOP over dense.

    With rows of several data sets, or of several numbers of images held out, one row a pair and set that has it, as no set's runs are compared with another's.
    """
    held = len({setting_of(r)[-1] for r in rows}) > 1

    def set_of(row: dict[str, str]) -> str:
        data, _, holdout = setting_of(row)
        return f"{data}, {holdout} held out" if held else data

    runs = {(r["run"], r["epochs"], r["seed"], set_of(r)): r for r in rows}
    sets, seeds = list(dict.fromkeys(data for *_, data in runs)), sorted({seed for _, _, seed, _ in runs})

    def of(run: str, seed: str, data: str) -> dict[str, str] | None:
        name, _, epochs = run.partition("@")
        return runs.get((name, epochs or "20", seed, data))

    table = []
    for terms, masked, dense in pairs:
        both = {data: [(a, b) for seed in seeds if (a := of(masked, seed, data)) and (b := of(dense, seed, data))] for data in sets}
        for data, found in [item for item in both.items() if item[1]] or [("", [])]:
            row: dict[str, Any] = {"terms": terms, **({"data": data} if len(sets) > 1 else {}), "seeds": ", ".join(a["seed"] for a, _ in found) or "missing"}
            for column, title in (("test_top1", "test"), ("held_top1", "held-out")):
                row[title] = ", ".join(f"{float(a[column]) - float(b[column]):+.2f}" for a, b in found)
            row["FLOP, of dense"] = f"{float(found[0][0]['train_tflop']) / float(found[0][1]['train_tflop']):.2f}" if found else ""
            table.append(row)
    return table


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--csv", type=Path, default=RESULTS)
    args = p.parse_args(argv)
    return exit_code("gaps.py", lambda: show(args.csv))


def show(path: Path) -> None:
    """Both tables of one csv."""
    rows = [r for r in read(path, ("phase", "run", "seed", "epochs", "test_top1", "held_top1", "train_tflop")) if r["phase"] == "final"]
    if not rows:
        raise ConfigError(f"expected rows of phase final in {path}, got none.\n  fix: run accuracy.py final first.")
    numbers(path, rows, "test_top1", "held_top1")
    numbers(path, rows, "train_tflop", above=0)
    for title, pairs in (("both sides get the same", EQUAL), ("they do not", OTHER)):
        print(f"\n{title}: points of top-1, mask minus dense\n" + tabulate(differences(rows, pairs), headers="keys", disable_numparse=True))


if __name__ == "__main__":
    sys.exit(main())
