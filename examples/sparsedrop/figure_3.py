"""SparseDrop's figures 3a and 3b, from the csv of `benchmarks/block_dropout.py`: time of forward and backward against p, and FLOP/s of the dense product.

    python examples/sparsedrop/figure_3.py examples/results/cpu/block_dropout.csv --out examples/results/sparsedrop

A csv with several machines, numbers of threads or sizes gives a column of plots for each, its latest rows.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from plots import new_figure, read_csv, save
from thesis.csv_files import numbers
from thesis.side_by_side import check_folder, exit_code

from fxmask.errors import ConfigError

SETTING = ("device", "threads", "dtype", "tokens", "features", "block")
PARTS = (("ms", "ms"), ("gflops_dense_equivalent", "GFLOP/s of the dense product"))


def figure(rows: list[dict[str, str]]) -> Any:
    """Two plots for every setting, one above the other."""
    of: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for r in rows:
        of.setdefault(tuple(r[c] for c in SETTING), []).append(r)
    drawn = new_figure(5 * len(of), 6)
    for column, (setting, found) in enumerate(of.items()):
        known = dict(zip(SETTING, setting, strict=True))
        size = f"{known['tokens']}x{known['features']}x{known['features']}, blocks of {known['block']}"
        title = f"{known['device']}, {known['threads']} thread(s), {known['dtype']}\n{size}"
        for line, (value, label) in enumerate(PARTS):
            axes = drawn.add_subplot(2, len(of), line * len(of) + column + 1, xlabel="p", ylabel=label, title=title if not line else "")
            for contender in dict.fromkeys(r["contender"] for r in found):
                latest = {float(r["p"]): float(r[value]) for r in found if r["contender"] == contender and r[value]}
                axes.plot(list(latest), list(latest.values()), marker="o", label=contender)
            axes.set_ylim(bottom=0)
            axes.legend()
    return drawn


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("csv", type=Path)
    p.add_argument("--out", type=Path, default=Path("."), metavar="DIR")
    a = p.parse_args(argv)
    check_folder(p, "--out", a.out)
    return exit_code("figure_3.py", lambda: run(a))


def run(a: argparse.Namespace) -> None:
    """Read and draw."""
    rows = read_csv(a.csv, (*SETTING, "p", "contender", *(value for value, _ in PARTS)))
    if not rows:
        raise ConfigError(f"{a.csv}: expected rows of examples/benchmarks/block_dropout.py, got {'none' if a.csv.exists() else 'no file'}.")
    for value, _ in PARTS:
        numbers(a.csv, [r for r in rows if r[value]], "p", value)
    print(save(figure(rows), a.out / "figure_3.png"))


if __name__ == "__main__":
    sys.exit(main())
