"""The thesis' two figures of a run, made from the csv files that training leaves: `python examples/plots.py OUT_DIR` makes them again.

Figure 6.5: top-1 accuracy (green) and training loss (blue) over the epochs. Figure 6.6: for the three linears of block 0, in how many
training steps each block of the weight had been active so far; a mask that never moves shows only two colours.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from thesis.csv_files import numbers
from thesis.csv_files import read as read_csv
from thesis.side_by_side import can_draw, exit_code
from thesis.side_by_side import png as save

from fxmask.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_COLUMNS = 4  # snapshots over the run in figure 6.6


def plot_run(out: Path) -> list[Path]:
    """Draw `out/log.csv` and, of a masked run, `out/active_blocks.csv`; returns the files written, none if matplotlib cannot be imported.

    Raises:
        ConfigError: one of the two is not what a training has written, or no epoch has ended.
    """
    if not can_draw("figures"):
        return []
    log, active, counts = out / "log.csv", out / "active_blocks.csv", ("epoch", "block_row", "block_col", "active_steps")
    if not log.is_file():
        raise ConfigError(f"expected a folder that examples/train.py has written, with a log.csv, got {out}.")
    epochs = numbers(log, numbers(log, read_csv(log, ("epoch", "top1", "train_loss")), "epoch", kind=int), "top1", "train_loss")
    blocks = numbers(active, read_csv(active, ("layer", *counts)), *counts, kind=int)
    if not epochs:
        raise ConfigError(f"{log}: expected a row for each epoch, got none.\n  fix: train for an epoch at least.")
    written = [save(accuracy_figure(epochs), out / "accuracy.png")]
    if blocks:  # none of a dense run
        written.append(save(active_blocks_figure(blocks), out / "active_blocks.png"))
    return written


def new_figure(width_in: float, height_in: float) -> Figure:
    """A figure without pyplot: no window system, no global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in), layout="constrained")


def accuracy_figure(rows: list[dict[str, str]]) -> Figure:
    """Figure 6.5 from the rows of log.csv."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(6.0, 3.6)
    left = figure.subplots()
    right = left.twinx()
    epochs = [int(row["epoch"]) for row in rows]
    left.plot(epochs, [float(row["top1"]) for row in rows], color="tab:green", marker="." if len(rows) < 30 else "")
    right.plot(epochs, [float(row["train_loss"]) for row in rows], color="tab:blue", marker="." if len(rows) < 30 else "")
    left.set_xlabel("epoch")
    left.set_ylabel("top-1 accuracy on the test images (%)", color="tab:green")
    right.set_ylabel("training loss", color="tab:blue")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def active_blocks_figure(rows: list[dict[str, str]]) -> Figure:
    """Figure 6.6 from the rows of active_blocks.csv: one row a layer, one column a snapshot, one colour scale for all."""
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    epochs = list(dict.fromkeys(int(row["epoch"]) for row in rows))
    shown = min(len(epochs), MAX_COLUMNS)
    columns = [epochs[(i + 1) * len(epochs) // shown - 1] for i in range(shown)]
    counts: dict[tuple[str, int], dict[tuple[int, int], int]] = {}
    for row in rows:
        counts.setdefault((row["layer"], int(row["epoch"])), {})[int(row["block_row"]), int(row["block_col"])] = int(row["active_steps"])
    sides = {layer: [1 + max(int(row[side]) for row in rows if row["layer"] == layer) for side in ("block_row", "block_col")] for layer in layers}
    for (layer, (high, wide)), epoch in product(sides.items(), epochs):
        if len(counts.get((layer, epoch), ())) < high * wide:  # a run was killed in the middle of them
            raise ConfigError(f"active_blocks.csv: expected {high}x{wide} blocks of {layer} after epoch {epoch}, got fewer.\n  fix: remove that epoch's rows.")
    most = max(max(cells.values()) for cells in counts.values())

    figure = new_figure(2.2 * len(columns) + 1.6, 2.2 * len(layers) + 0.4)
    axes = figure.subplots(len(layers), len(columns), squeeze=False)
    for row_of_axes, (layer, (high, wide)) in zip(axes, sides.items(), strict=True):
        for ax, epoch in zip(row_of_axes, columns, strict=True):
            grid = [[counts[layer, epoch][r, c] for c in range(wide)] for r in range(high)]
            image = ax.imshow(grid, vmin=0, vmax=max(most, 1), cmap="viridis", aspect="auto", interpolation="nearest")
            ax.set(xticks=[], yticks=[])
        row_of_axes[0].set_ylabel(layer)
    for ax, epoch in zip(axes[0], columns, strict=True):
        ax.set_title(f"after epoch {epoch}", fontsize=9)
    figure.colorbar(image, ax=axes, label="training steps in which the block was active")
    return figure


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("out", type=Path, metavar="OUT_DIR", help="a folder that examples/train.py has written")
    args = p.parse_args(argv)
    return exit_code("plots.py", lambda: [print(path) for path in plot_run(args.out)])


if __name__ == "__main__":
    sys.exit(main())
