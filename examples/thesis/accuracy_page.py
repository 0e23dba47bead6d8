"""The tables of docs/accuracy.md and examples/results/cifar10_accuracy.md, from the csv of accuracy.py's runs: no figure in them is written by hand.

    python examples/thesis/accuracy_page.py                     # after accuracy.py, or isoflop.py time

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; the text around it is the pages' own. Runs of one recipe are one line, seeds in order.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tabulate import tabulate

from fxmask.errors import ConfigError
from thesis import gaps, isoflop
from thesis.accuracy_table import RESULTS
from thesis.csv_files import read
from thesis.side_by_side import exit_code

Row = dict[str, str]
ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "docs" / "accuracy.md", ROOT / "examples" / "results" / "cifar10_accuracy.md")
TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
# columns of the csv by their titles
COLUMNS = {
    "test top-1, %": "test_top1", "top-5": "test_top5", "held-out top-1": "held_top1", "training images right": "train_acc",
    "TFLOP": "train_tflop", "weights loaded, 10^9": "loaded_weights_g", "flips": "flips",
}  # fmt: skip
COSTS = ("train_tflop", "loaded_weights_g")  # said once where the seeds agree
# what a recipe's name doesn't say
NOTES = {
    "dense-activations50": "half of the saved inputs in 1x16 groups",
    "dense-activations50-x4": "half of the saved inputs in 1x4 groups",
    "b16-activations50-x4": "the masks of b16-tokens-whole-taylor, and half of the saved inputs in 1x4 groups",
    "dense-e2-adamw-lr0.01": "half of the hidden units",
    "dense-h112-adamw-lr0.01": "112 of 256 hidden units",
    "dense-muon-wd0.1-bf16": "autocast to bfloat16",
    "b16-tokens-whole-muon-wd0.1-bf16-fast": "the ramp over a fifth of the steps",
    "dense-d48-muon-wd0.1-bf16": "three quarters of the width",
    "dense-e2-muon-wd0.1-bf16": "half of the hidden units",
    "dense-h112-muon-wd0.1-bf16": "112 of 256 hidden units",
    "dense-muon-wd0.1-bf16-from-teacher": "20 epochs more of that run, which teaches",
    "b16-tokens-whole-muon-wd0.1-bf16-from-teacher": "the same, masked",
    "b16-tokens-whole-muon-wd0.1-bf16-from-teacher-fast": "the ramp over a fifth of the steps",
    "dense-d96-muon-wd0.1-bf16": "half as wide again, 400,586 parameters",
    "b16-tokens-whole-d128-muon-wd0.1-bf16": "twice as wide, half of the blocks",
    "dense-muon-wd0.1-bf16-taught-d96": "taught by dense-d96",
    "b16-tokens-whole-muon-wd0.1-bf16-taught-d96": "from random weights, taught by dense-d96",
    "dense-muon-wd0.1": "weight decay 0.1 instead of 0.0001",
    "dense-muon-wd0.1-batch64": "batches of 64, twice the steps",
    "b16-fc1-denser-muon-wd0.1": "first channel linears 50 %, second 62.5 %",
    "b16-tokens-part-muon-wd0.1": "token mixing 25 %, channels 53 %",
    "b16-tokens-whole-muon-wd0.1-ste": "gradients of all blocks",
    "b1-tokens-whole-muon": "as many weights, one by one",
    "b1-tokens-whole-taylor": "as many weights, one by one",
    "b8-tokens-whole-taylor": "8x8",
    "b4-tokens-whole-taylor": "4x4",
    "b16-tokens-whole-muon-smooth0": "no label smoothing",
    "b32-tokens-whole-muon-wd0.1-hysteresis": "a block comes in if it is better by a fifth",
    "b32-tokens-whole-early-muon": "the last block leaves before the ramp's end",
    "dense-d64-e2": "half of the hidden units",
    "d128-b16-75-static": "twice as wide, random masks, the ratio from the first step",
    "d128-b16-75-rigl-channels": "RigL, token mixing whole",
    "d96-b16-70-ramp-channels": "dense to 70 % over half of the steps, Taylor saliency, token mixing whole",
    "d96-b8-70-ramp-channels": "the same in 8x8",
    "d32-b8-50-ramp-channels": "33 % achieved: small layers round up",
}


def named(run: str, epochs: str = "") -> str:
    note = "; ".join(part for part in (NOTES.get(run, ""), f"{epochs} epochs" * bool(epochs)) if part)
    return f"`{run}`" + (f": {note}" if note else "")


def runs_of(rows: Iterable[Row], usual_epochs: str) -> list[Row]:
    """A line a recipe and length, what differs between its seeds in a row."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for r in rows:
        groups.setdefault((r["run"], r["epochs"]), []).append(r)
    lines = []
    for (run, epochs), seeds in groups.items():
        seeds.sort(key=lambda r: int(r["seed"]))
        line = {"recipe": named(run, "" if epochs == usual_epochs else epochs), "seeds": ", ".join(r["seed"] for r in seeds)}
        for title, column in COLUMNS.items():
            values = [r[column] for r in seeds]
            line[title] = ", ".join(dict.fromkeys(values) if column in COSTS else values)
        lines.append({**line, "ratio achieved": seeds[0]["ratio_achieved"]})
    return lines


def markdown(lines: list[Row]) -> str:
    return tabulate(lines, headers="keys", tablefmt="github", disable_numparse=True) + "\n"


def search(rows: list[Row]) -> str:
    """One seed, no test image read; the best first."""
    kept = ("recipe", "held-out top-1", "ratio achieved", "TFLOP", "weights loaded, 10^9", "flips")
    best = sorted((r for r in rows if r["phase"] == "search"), key=lambda r: -float(r["held_top1"]))
    return markdown([{key: line[key] for key in kept} for line in runs_of(best, "6")])


def frontier(rows: list[Row], times: list[Row]) -> str:
    """Every run beside what dense widths have at its training FLOP, and the time of its step."""
    found = isoflop.points(rows)
    verdicts = {v["run"]: v for v in isoflop.verdicts(found, "tflop")}
    milliseconds = {r["run"]: f"{float(r['step_ms']):.0f}" for r in times}
    lines = []
    for p in found:
        of, runs = verdicts.get(p["run"]), sorted((r for r in rows if r["phase"] == "isoflop" and r["run"] == p["run"]), key=lambda r: int(r["seed"]))
        inside = of if of and of["difference"] is not None else None
        lines.append({
            "run": named(p["run"]), "top-1 of the seeds, %": ", ".join(r["test_top1"] for r in runs), "TFLOP": f"{p['tflop']:.2f}",
            "dense there": f"{inside['dense there']:.2f}" if inside else "", "difference": f"{inside['difference']:+.1f}" if inside else "",
            "a step, ms": milliseconds.get(p["run"], ""),
        })  # fmt: skip
    return markdown(lines)


def tables(rows: list[Row], times: list[Row]) -> dict[str, str]:
    final = [r for r in rows if r["phase"] == "final"]
    return {
        "gaps-equal": markdown(gaps.differences(final, gaps.EQUAL)),
        "gaps-other": markdown(gaps.differences(final, gaps.OTHER)),
        "final-adam": markdown(runs_of((r for r in final if "muon" not in r["run"]), "20")),
        "final-muon": markdown(runs_of((r for r in final if "muon" in r["run"]), "20")),
        "thesis": markdown(runs_of((r for r in rows if r["phase"] == "thesis"), "200")),
        "search": search(rows),
        "isoflop": frontier(rows, times),
    }


def filled(page: str, known: dict[str, str]) -> str:
    """The page with its tables written anew. Raises: KeyError for a table that there isn't, ValueError for one without rows."""
    empty = [found[2] for found in TABLE.finditer(page) if not known[found[2]].strip()]
    if empty:
        raise ValueError(f"no rows of the tables {', '.join(empty)}")
    return TABLE.sub(lambda found: found[1] + known[found[2]] + found[3], page)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("pages", nargs="*", type=Path, default=list(PAGES))
    p.add_argument("--csv", type=Path, default=RESULTS)
    p.add_argument("--times", type=Path, default=isoflop.TIMES)
    args = p.parse_args(argv)
    return exit_code("accuracy_page.py", lambda: run(args))


def run(args: argparse.Namespace) -> None:
    """Write the pages, none of them where one cannot be made."""
    try:
        known = tables(read(args.csv, (*isoflop.NEEDED, "seed", "epochs", "ratio_achieved", *COLUMNS.values())), read(args.times, ("run", "step_ms")))
        texts = {page: filled(page.read_text(), known) for page in args.pages}
    except (ConfigError, OSError) as error:
        raise ConfigError(f"{error}\n  the pages are as they were.") from None
    except (KeyError, ValueError) as error:
        what = f"expected the csv of accuracy.py with rows for every table of the pages, got {args.csv}: {type(error).__name__} {error}"
        raise ConfigError(f"{what}.\n  fix: name another --csv; the pages are as they were.") from None
    for page, text in texts.items():
        page.write_text(text)
        print(page)


if __name__ == "__main__":
    sys.exit(main())
