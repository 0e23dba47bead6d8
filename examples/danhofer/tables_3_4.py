"""Tables 3 and 4 of Danhofer (2024): a network dense, 2:4 by magnitude, and 2:4 after a permutation of its columns, not retrained; published beside ours.

    python examples/danhofer/tables_3_4.py --out examples/results/nm                                     # digits, under a minute
    python examples/danhofer/tables_3_4.py --model resnet18 --checkpoint FILE --data FOLDER --out DIR    # or another network

Table 4 is the dense network as the author validated it; ours is the same as table 3's. Ours permute the columns of each weight (c_in * kh * kw) on their own,
which moves single taps of a filter and not only channels. With `--limit` nothing is comparable.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started

from thesis.side_by_side import Row, exit_code, options, show

from danhofer.command import OPTIONS, merge, rows_of_others, settings, task_of
from danhofer.networks import NETWORKS, Task, accuracy, masked, shares

FORMS = {"dense": None, "magnitude24": "magnitude", "permuted24": "permuted"}


def published(model: str) -> dict[str, str]:
    """The row of a network, as text; empty for one that is not in the tables."""
    with (Path(__file__).resolve().parent / "published" / "tables_3_4.csv").open(newline="") as file:
        return next((row for row in csv.DictReader(file) if row["model"] == model), {})


def cells(task: Task, of: Row) -> list[Row]:
    """A row for each cell of both tables; `of`: its first columns."""
    known, rows = published(task.name), []
    found = {form: accuracy(task.model if mode is None else masked(task, of["layers"], mode=mode), task.test()) for form, mode in FORMS.items()}
    for table, forms in ((3, list(FORMS)), (4, ["dense_validated"])):
        for form in forms:
            for top in ("top1", "top5"):
                ours, text = found["dense" if table == 4 else form][top], known.get(f"{form}_{top}", "")
                cell = {**of, "table": table, "form": form, "metric": top, "published": text, "ours": f"{ours:.2f}"}
                rows.append({**cell, "difference": f"{ours - float(text):+.2f}" if text else ""})
    return rows


def share_lines(task: Task, layers: str) -> list[str]:
    """How much of the network is masked, beside what the source gives."""
    ours, known = shares(task, layers), NETWORKS.get(task.name)
    share = f"{ours['parameters_pct']:.1f} % of the parameters, {ours['macs_pct']:.1f} % of the MACs"
    line = f"masked: {ours['layers']} layers, {share}; {ours['dense']} stay dense"
    if known is None or known.parameters is None or layers != "conv":
        return [line]
    return [line, f"published: {known.parameters} % of the parameters, {known.macs} % of the MACs"]


def main(argv: Sequence[str] | None = None) -> int:
    args = options(__doc__, argv, *OPTIONS, ("--seed", dict(type=int, default=0)))
    return exit_code("danhofer/tables_3_4.py", lambda: run(args))


def run(args: argparse.Namespace) -> None:
    """Evaluate, show, write."""
    rows_of_others(args, "danhofer_tables_3_4")
    task = task_of(args, args.seed)
    of = settings(args, task, args.seed)
    rows = cells(task, of)
    show(f"Tables 3 and 4: {task.name}, accuracy in %, not retrained", rows, share_lines(task, args.layers))
    merge(args, "danhofer_tables_3_4", rows, list(of))


if __name__ == "__main__":
    sys.exit(main())
