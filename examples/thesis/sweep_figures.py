"""Figures 6.1, 6.2, 6.4 and 6.5 of the thesis from the runs of a sweep that have ended; what has not ended stays empty, and each figure says so.

Several seeds of one cell are averaged. Runs whose layers differ, dense ones and masks that are drawn once are in the csv files alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from plots import accuracy_figure, new_figure, save

from thesis.sweep_checks import SweepError
from thesis.sweep_file import Job
from thesis.sweep_results import Ended, block_and_ratio, loaded_row, variant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES = {"masked": "figure_6_1", "unmasked": "figure_6_2"}  # of the thesis, by backward mode
RATIO, BLOCK = 0.8, (32, 32)  # figure 6.4's, and the run of figure 6.5
Cell = tuple[tuple[int, int], float]


def modes_of(jobs: Sequence[Job]) -> Iterator[tuple[str, str, list[Cell]]]:
    """(backward mode, variant, cells) of each heat map that the sweep fills."""
    found: dict[tuple[str, str], dict[Cell, None]] = {}
    for job in jobs:
        cell = block_and_ratio(job)
        if cell:
            found.setdefault((job.settings["backward"], variant(job)), {})[cell] = None
    for (mode, which), cells in found.items():
        yield mode, which, list(cells)


def of(runs: list[Ended], mode: str, which: str) -> dict[Cell, list[Ended]]:
    """The runs of a mode by their cell: one a seed."""
    cells: dict[Cell, list[Ended]] = {}
    for run in runs:
        cell = block_and_ratio(run.job)
        if cell and (run.job.settings["backward"], variant(run.job)) == (mode, which):
            cells.setdefault(cell, []).append(run)
    return cells


def said(runs: list[Ended], jobs: Sequence[Job], mode: str, which: str) -> str:
    epochs = ", ".join(map(str, sorted({len(run.log) for run in runs})))
    return f"backward {mode} {which}".strip() + (f", epochs: {epochs}" if epochs else "") + f"\n{len(runs)} of {len(jobs)} runs of the sweep have ended"


def heatmap(runs: list[Ended], jobs: Sequence[Job], mode: str, which: str, cells: list[Cell]) -> Figure:
    """Figure 6.1 or 6.2: rows block, columns ratio; colour and first number top-1 in percent, second number GiB moved, by the thesis' memory model."""
    blocks, ratios = list(dict.fromkeys(block for block, _ in cells)), sorted({ratio for _, ratio in cells})
    ran = of(runs, mode, which)
    top1 = {cell: fmean(run.top1 for run in found) for cell, found in ran.items()}
    figure = new_figure(max(5.0, 2.2 + 0.85 * len(ratios)), max(4.0, 1.6 + 0.42 * len(blocks)))
    axes = figure.subplots()
    values = [[top1.get((b, r), float("nan")) for r in ratios] for b in blocks]
    image = axes.imshow(values, aspect="auto", cmap="viridis")
    for (block, ratio), found in ran.items():
        gib = fmean(float(loaded_row(run)["moved_gib"]) for run in found)
        label = f"{top1[block, ratio]:.1f} %\n{gib:.4g}"
        box = dict(facecolor="black", alpha=0.35, lw=0, pad=1)
        axes.text(ratios.index(ratio), blocks.index(block), label, ha="center", va="center", fontsize=6, color="white", bbox=box)
    axes.set_xticks(range(len(ratios)), [f"{r:.0%}" for r in ratios])
    axes.set_yticks(range(len(blocks)), [f"{b[0]}x{b[1]}" for b in blocks])
    axes.set_xlabel("ratio")
    axes.set_ylabel("block")
    axes.set_title(said(runs, jobs, mode, which) + f", {len(ran)} of {len(cells)} cells of this figure\nsecond number: GiB moved by the forwards", fontsize=8)
    if ran:  # no scale without a value
        figure.colorbar(image, label="top-1 accuracy (%)")
    return figure


def curves(runs: list[Ended], jobs: Sequence[Job], modes: list[tuple[str, str, list[Cell]]], ratio: float) -> Figure:
    """Figure 6.4: top-1 over the epochs at one ratio, a curve a block, the modes side by side."""
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(1.0 + 4.2 * len(modes), 4.4)
    axes = figure.subplots(1, len(modes), sharey=True, squeeze=False)[0]
    colours = list(dict.fromkeys(block for _, _, cells in modes for block, r in cells if r == ratio))
    for ax, (mode, which, _) in zip(axes, modes, strict=True):
        for (block, r), found in sorted(of(runs, mode, which).items()):
            if r == ratio:
                epochs = [int(row["epoch"]) for row in found[0].log]
                mean = [fmean(float(run.log[i]["top1"]) for run in found) for i in range(len(epochs))]
                colour = colormaps["turbo"]((colours.index(block) + 0.5) / len(colours))
                ax.plot(epochs, mean, color=colour, lw=1, marker="." if len(epochs) < 30 else "", label=f"{block[0]}x{block[1]}")
        ax.set_title(said(runs, jobs, mode, which) + f", {len(ax.lines)} of {len(colours)} blocks at {ratio:.0%}", fontsize=8)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_xlabel("epoch")
        if ax.lines:
            ax.legend(fontsize=6, ncols=2)
    axes[0].set_ylabel("top-1 accuracy (%)")
    return figure


def single(run: Ended) -> Figure:
    """Figure 6.5: top-1 (green) and training loss (blue) of one run."""
    figure = accuracy_figure(run.log)
    figure.axes[0].set_title(run.job.name, fontsize=8)
    return figure


def draw(runs: list[Ended], jobs: Sequence[Job], out: Path, ratio: float | None = None, names: Sequence[str] = ()) -> list[Path]:
    """All figures that the sweep can fill; figure 6.5 of the runs `names`, by default of 32x32 blocks at 80 %. Returns the files.

    Raises:
        SweepError: a ratio or a run that the sweep does not have, or a run that has not ended.
    """
    modes, files = list(modes_of(jobs)), []
    ratios, ended = sorted({r for _, _, cells in modes for _, r in cells}), [run.job.name for run in runs]
    if ratio not in (None, *ratios):
        raise SweepError(f"--ratio: expected one of the sweep's, {', '.join(map(str, ratios)) or 'which has none'}, got {ratio}.")
    for name in names:
        if name not in ended:
            raise SweepError(f"--figure-of: expected runs that have ended, such as {', '.join(ended[:3]) or 'none so far'}, got {name}.")
    for mode, which, cells in modes:
        name = "_".join([FIGURES.get(mode, "heatmap"), mode, *which.replace("=", "_").replace(":", "_").split()])
        files.append(save(heatmap(runs, jobs, mode, which, cells), out / f"{name}.png"))
    shown = RATIO if ratio is None else ratio
    if shown in ratios:
        files.append(save(curves(runs, jobs, modes, shown), out / "figure_6_4.png"))
    for run in runs:
        if run.job.name in names or (not names and block_and_ratio(run.job) == (BLOCK, RATIO)):
            files.append(save(single(run), out / f"figure_6_5_{run.job.name}.png"))
    return files
