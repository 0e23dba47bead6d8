"""What the scripts of tables and figures share: published values, rows of published / formula / ours, the csv, the last line that counts."""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checked_arguments import check_numbers
from tabulate import tabulate

from fxmask.errors import FxMaskError
from thesis import csv_files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GOES_ON = "stopped; the same command goes on"
PUBLISHED = Path(__file__).resolve().parent / "published"
Row = dict[str, Any]
Number = Fraction | int | float


def options(doc: str | None, argv: Sequence[str] | None, *more: tuple[str, dict[str, Any]]) -> argparse.Namespace:
    """The command line: `--out DIR`, and what a script adds."""
    p = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    p.add_argument("--out", type=Path, metavar="DIR", help="write a csv, and a png where the source plots")
    for name, how in more:
        p.add_argument(name, **how)
    args = p.parse_args(argv)
    check_numbers(p, args)
    check_folder(p, "--out", args.out)
    return args


def check_folder(p: argparse.ArgumentParser, option: str, folder: Path | None) -> None:
    """A folder that is written to in the end, if one was given, is one that can be, or be made."""
    there = next((place for place in (folder, *folder.absolute().parents) if os.path.exists(place)), None) if folder else None
    if there is not None and not (there.is_dir() and os.access(there, os.W_OK)):
        p.error(f"{option}: expected a folder to write to, got {folder}: {there} is {'not to be written to' if there.is_dir() else 'no folder'}")


def exit_code(script: str, run: Callable[[], object], stopped: str = "stopped") -> int:
    """What a script ends with: the status that `run` gives, else 0; 2 where what was asked for is refused, a package is not installed, or a file cannot be
    read or written, 130 where it is stopped by Ctrl-C: it says so in a line."""
    try:
        code = run()
        sys.stdout.flush()
    except (FxMaskError, OSError, ImportError) as error:
        if not (isinstance(error, BrokenPipeError) and unread()):
            print(f"{script}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if stopped:
            print(f"{script}: {stopped}", file=sys.stderr)
        return 130
    return code if isinstance(code, int) else 0


def unread() -> bool:
    """Whether it is stdout that broke, as where head has seen enough; what is left in its buffer, and would raise again at exit, goes nowhere then."""
    try:
        print(flush=True)  # one without a buffer has forgotten what broke it
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def published(name: str) -> list[dict[str, str]]:
    """Rows of `published/<name>.csv`, as text: a printed value says how exact it is by its digits."""
    with (PUBLISHED / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def blocks_and_ratios() -> list[tuple[tuple[int, int], float]]:
    """The thesis' grid of 19 blocks by 9 ratios, as its table 6.2 lists it."""
    table = published("table_6_2")
    ratios = [int(column.rstrip("%")) / 100 for column in table[0] if column != "block"]
    return [(block_of(row["block"]), ratio) for row in table for ratio in ratios]


def block_of(text: str) -> tuple[int, int]:
    rows, cols = map(int, text.split("x"))
    return rows, cols


def row(keys: Row, formula: Number, ours: Number, text: str = "", *, unit: str, digits: int = 2, within_percent: float | None = None) -> Row:
    """One cell: `text` as published, or derived without. It agrees where formula and ours both round to the printed digits, or lie `within_percent`."""
    values = {"formula": formula, "ours": ours}
    cell = {**keys, "published": text, **{name: f"{float(value):.{digits}f}" for name, value in values.items()}, "unit": unit}
    if not text:
        return {**cell, "status": "derived"}
    known = Fraction(text)
    allowed = Fraction(1, 2 * 10 ** len(text.partition(".")[2])) if within_percent is None else abs(known) * Fraction(within_percent) / 100
    off = {f"{name}_off_pct": f"{100 * (float(value) / float(known) - 1):+.2f}" for name, value in values.items()}
    return {**cell, **off, "status": "agrees" if all(abs(Fraction(value) - known) <= allowed for value in values.values()) else "differs"}


def show(title: str, rows: list[Row], notes: Sequence[str] = ()) -> None:
    """Print a table with its title above and its notes below; columns that hold nothing, and the unit, which the title names, are left out."""
    columns = [c for c in dict.fromkeys(key for r in rows for key in r) if c != "unit" and any(r.get(c, "") != "" for r in rows)]
    print(title + "\n")
    print(tabulate([[r.get(c, "") for c in columns] for r in rows], headers=columns, disable_numparse=True))
    print("\n" + "\n".join(notes) if notes else "")


def tally(rows: list[Row], how: str = "") -> str:
    """The last line of a script: how many published cells agree, by formula and by ours, and how far apart these two are at most."""
    known = [r for r in rows if r["status"] != "derived"]
    text = f"{sum(r['status'] == 'agrees' for r in known)} of {len(known)} published cells agree ({how}); " if known else "all cells derived; "
    same = sum(r["formula"] == r["ours"] for r in rows)
    apart = max(abs(float(r["formula"]) - float(r["ours"])) / (abs(float(r["formula"])) or 1.0) for r in rows)
    return f"{text}formula and ours are the same in {same} of {len(rows)}" + (f", at most {100 * apart:.2g} % apart" if same < len(rows) else "")


def one_table(
    doc: str | None, argv: Sequence[str] | None, name: str, title: str, rows: Callable[[], list[Row]], how: str = "",
    notes: Callable[[list[Row]], Sequence[str]] | None = None, draw: Callable[[list[Row]], Figure] | None = None,
) -> int:  # fmt: skip
    """A script that makes one table: shown, written to `--out`, its agreeing cells counted."""
    args = options(doc, argv)

    def run() -> None:
        found = rows()
        show(title, found, notes(found) if notes else ())
        save(args.out, name, found, draw and (lambda: draw(found)))
        print(tally(found, how))

    return exit_code(f"{name}.py", run)


def save(out: Path | None, name: str, rows: list[Row], draw: Callable[[], Figure] | None = None) -> None:
    """Write `out/name.csv`, and `out/name.png` if matplotlib is there."""
    if out is None:
        return
    columns = list(dict.fromkeys(key for r in rows for key in r))
    whole(out / f"{name}.csv", lambda path: csv_files.write(path, columns, rows))
    if draw is not None:
        picture(out / f"{name}.png", draw)


def picture(path: Path, draw: Callable[[], Figure]) -> None:
    """Write a png, if matplotlib is there."""
    if can_draw(path.name):
        whole(path, lambda path: png(draw(), path))


def can_draw(what: str) -> bool:
    """Whether matplotlib is there; says that there will be no `what` without."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        print(f"no {what}: matplotlib cannot be imported: {error} (pip install matplotlib)")
        return False
    return True


def png(figure: Figure, path: Path) -> Path:
    """Write a figure, as a png where its name does not say otherwise."""
    with csv_files.replacing(path) as part:
        figure.savefig(part, dpi=150, format=path.suffix[1:] or "png")
    return path


def whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file that is complete or not there at all, and print its name."""
    try:
        write(path)
    except OSError as error:
        print(f"--out: cannot write {path}: {error.strerror}. Name a folder that can be written to.", file=sys.stderr)
        sys.exit(2)
    print(path)
