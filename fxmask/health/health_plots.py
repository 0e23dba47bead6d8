"""Pictures of a HealthLog; they need matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from ..analysis.plots import available, save

SHOWN = {"flip_rate": "flipped blocks, of all", "kept_norm_fraction": "share of the squared norm in kept blocks", "dead_rows": "outputs without a kept block"}


def curves(rows: list[dict[str, Any]], path: str | Path) -> Path:
    """One panel a quantity, one line a layer."""
    plt = available()
    fig, axes = plt.subplots(len(SHOWN), 1, layout="constrained", figsize=(7, 7), sharex=True)
    for ax, (column, label) in zip(axes, SHOWN.items(), strict=True):
        for name in dict.fromkeys(r["name"] for r in rows):
            own = [r for r in rows if r["name"] == name]
            ax.plot([r["update"] for r in own], [r[column] for r in own], lw=1, label=name)
        ax.set_ylabel(label, fontsize=8)
    axes[-1].set_xlabel("update")
    axes[0].legend(fontsize=6, ncols=2)
    return save(fig, plt, path)


def heatmaps(shares: dict[str, Tensor], path: str | Path) -> Path:
    """Blocks as pixels, block rows downwards; shares of updates, in [0, 1]."""
    plt = available()
    fig, axes = plt.subplots(1, len(shares), layout="constrained", figsize=(3 * len(shares), 3.2), squeeze=False)
    for ax, (name, share) in zip(axes[0], shares.items(), strict=True):
        shown = ax.imshow(share.numpy(), vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        ax.set_title(name, fontsize=8)
    fig.colorbar(shown, ax=axes[0].tolist(), label="share of updates in which it was kept")
    return save(fig, plt, path)
