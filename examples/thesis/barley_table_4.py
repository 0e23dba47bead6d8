"""Table IV of Barley and Fröning: top-1 on CIFAR-10, dense and with half of the linears' inputs pruned, at mini-batches of 16 to 128; and figure 7's losses.

    python examples/thesis/barley_table_4.py --root DIR --jobs 2 --out examples/results/thesis      # cifar-10-batches-py, or --data folder
    python examples/thesis/barley_table_4.py --data digits --at-once 4 --out examples/results/thesis        # minutes on one core
    python examples/thesis/barley_table_4.py --root DIR --table                                     # of the runs that have ended so far

Runs of examples/thesis/train.py. The same command goes on where it was stopped, and what has ended is not run again. No formula gives an accuracy: the column
of the formula is what pruning saves of what autograd holds for the backward, in MiB, with the measured bytes of the same model beside it. What barley_runs.py
names as ours differs from the source, so that only differences to dense are compared: `within` says that pruned is at most a point below it.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started

import torch
from plots import new_figure

from thesis.barley_runs import DATA, DENSE, NO_CIFAR, against_dense, arguments, cells, command, guarded, held_bytes, saved_mib, shape, top1, train_all
from thesis.side_by_side import Row, published, save, show
from thesis.sweep_results import Ended

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME, WITHIN = "barley_table_4", 1.0  # point of top-1
Cells = dict[tuple[int, str], dict[int, Ended]]


def table(found: Cells, args: Namespace) -> list[Row]:
    """A row a mini-batch: accuracies published and ours, what is saved by formula and ours."""
    said, rows = {int(line["mini_batch"]): line for line in published(NAME)}, []
    for batch in args.batches:
        dense, pruned, line = found.get((batch, DENSE), {}), found.get((batch, args.activations), {}), said.get(batch, {})
        difference, tops = against_dense(pruned, dense), [run.top1 for run in dense.values()]
        held, left = (held_bytes(shape(args), pruned_by) for pruned_by in (DENSE, args.activations))
        status = "" if difference is None else "within" if round(difference, 6) >= -WITHIN else "below"
        rows.append({
            "mini_batch": batch,
            "published_dense": line.get("dense_top1", ""), "published_sparse50": line.get("sparse50_top1", ""),
            "ours_dense": f"{top1(dense):.2f}" if dense else "", "ours_pruned": f"{top1(pruned):.2f}" if pruned else "",
            "published_difference": f"{int(line['sparse50_top1']) - int(line['dense_top1']):+d}" if line else "",
            "ours_difference": "" if difference is None else f"{difference:+.2f}",
            "dense_seeds_differ_by": f"{max(tops) - min(tops):.2f}" if len(tops) > 1 else "",
            "seeds": len(set(dense) & set(pruned)),
            **saved_mib(args, batch, args.activations),
            "of_held_pct": f"{100 * (held - left) / held:.1f}",
            "status": status,
        })  # fmt: skip
    return rows


def curves(found: Cells) -> list[Row]:
    """Figure 7: mean training loss, and top-1, of every epoch."""
    rows = []
    for (batch, pruned), runs in sorted(found.items()):
        for lines in zip(*(run.log for run in runs.values()), strict=True):
            loss, top = (f"{fmean(float(line[c]) for line in lines):.4f}" for c in ("train_loss", "top1"))
            key = {"mini_batch": batch, "activations": pruned or "dense", "epoch": lines[0]["epoch"]}
            rows.append({**key, "train_loss": loss, "top1": top, "seeds": len(runs)})
    return rows


def figure(rows: list[Row], args: Namespace) -> Figure:
    """Training loss over the epochs, a panel a mini-batch, dense beside pruned."""
    batches = list(dict.fromkeys(r["mini_batch"] for r in rows))
    drawn = new_figure(1.0 + 2.6 * len(batches), 3.2)
    for axes, batch in zip(drawn.subplots(1, len(batches), sharey=True, squeeze=False)[0], batches, strict=True):
        for kind, colour in (("dense", "tab:gray"), (args.activations, "tab:blue")):
            mine = [r for r in rows if (r["mini_batch"], r["activations"]) == (batch, kind)]
            label = "dense" if kind == "dense" else f"pruned {kind}"
            axes.plot([int(r["epoch"]) for r in mine], [float(r["train_loss"]) for r in mine], color=colour, marker=".", label=label)
        axes.set_title(f"mini-batch {batch}", fontsize=9)
        axes.set_xlabel("epoch")
        axes.legend(fontsize=7)
    drawn.axes[0].set_ylabel("training loss")
    drawn.suptitle(f"{DATA[args.data]}, {args.epochs} epochs, mean of the seeds; label smoothing 0.1", fontsize=8)
    return drawn


def work(args: Namespace) -> int:
    runs, planned, failed = train_all(args, NAME, args.batches, [args.activations])
    found = cells(runs)
    rows = table(found, args)
    settings = {"data": args.data, "model": args.model, "activations": args.activations, "epochs": args.epochs, "lr": args.lr, "torch": torch.__version__}
    made = {"command": command(args, NAME, batches=args.batches, activations=args.activations)}
    notes = ["published: ResMLP-S12 on CIFAR-10; recipe and number of epochs are ours, see barley_runs.py"]
    if args.data == "digits":
        notes.append(NO_CIFAR)
    show(f"Table IV: top-1, % ({DATA[args.data]}, {args.model}, {args.epochs} epochs); saved: MiB a batch that autograd does not hold", rows, notes)
    suffix = "" if args.data == "cifar10" else f"_{args.data}"
    if runs:
        save(args.out, NAME + suffix, [{**settings, **r, **made} for r in rows])
        drawn = curves(found)
        save(args.out, f"barley_figure_7{suffix}", [{**settings, **r, **made} for r in drawn], lambda: figure(drawn, args))
    known = [r for r in rows if r["status"]]
    good = sum(r["status"] == "within" for r in known)
    print(f"{len(runs)} of {planned} runs have ended; pruned is at most {WITHIN:g} point below dense at {good} of {len(known)} mini-batches")
    return 1 if failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    def add(p: ArgumentParser) -> None:
        p.add_argument("--batches", type=int, nargs="+", default=[16, 32, 64, 128])
        p.add_argument("--activations", default="0.5:16", metavar="RATIO:BLOCK", help="the source's half; its block is not known: ours")

    args = arguments(__doc__, argv, add)
    return guarded(NAME, lambda: work(args))


if __name__ == "__main__":
    sys.exit(main())
