"""Pictures of an analysis: the roofline, and bytes by phase and level. They need matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import as_path, cannot_write
from ..kernels.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from .report import Analysis

COLOURS = {"fwd": "tab:blue", "recompute": "tab:cyan", "dX": "tab:orange", "dW": "tab:green", "db": "tab:gray", "opt": "tab:purple"}


def available() -> Any:
    """matplotlib.pyplot, without a window; UnsupportedError where it is not installed."""
    try:
        import matplotlib
    except ImportError as e:
        raise UnsupportedError(f"plots need matplotlib: expected it installed, got {e!r}.\n  fix: pip install 'fxmask[plot]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def roofline(report: Analysis, path: str | Path) -> Path:
    """Useful FLOP a second at the least time, against FLOP a compulsory byte, of every op with products, under the device's roofs. Bounds, not times."""
    plt = available()
    peaks, bandwidth = report.meta["peaks"], report.meta["dram_bytes_s"]
    rows = [r for r in report.tables["roofline"] if r["ai_dram"] and r["flop"]]
    fig, ax = plt.subplots(layout="constrained", figsize=(7, 4.5))
    ridges = [r["ridge_dram"] for r in rows if r["ridge_dram"]]
    places = [r["ai_dram"] for r in rows] + (ridges or [1.0])
    low, high = min(places) / 4, max(places) * 4
    for peak in dict.fromkeys(peaks.values()):
        if any(abs(ridge * bandwidth - peak) < 1e-3 * peak for ridge in ridges):  # of a dtype that some op has
            xs = [low, peak / bandwidth, high]
            ax.plot(xs, [min(peak, x * bandwidth) / 1e12 for x in xs], color="black", lw=1)
            same = ", ".join(n for n, p in peaks.items() if p == peak)
            ax.annotate(f"{same}: {peak / 1e12:.4g} TFLOP/s", (high, peak / 1e12), ha="right", va="bottom", fontsize=8)
    for phase, colour in COLOURS.items():
        if own := [r for r in rows if r["phase"] == phase]:
            ax.scatter([r["ai_dram"] for r in own], [r["flop"] / r["t_min_us"] / 1e6 for r in own], s=14, color=colour, label=phase, alpha=0.7)
    ax.set(xscale="log", yscale="log", xlabel="useful FLOP a compulsory byte", ylabel="TFLOP/s at the least time", title=report.title)
    ax.title.set_fontsize(8)
    ax.legend(fontsize=8)
    return save(fig, plt, path)


def traffic(report: Analysis, path: str | Path) -> Path:
    """Bytes of a step by phase: compulsory, the estimate for DRAM, requested, in sectors, in lines."""
    plt = available()
    rows = report.tables["traffic"]
    phases = list(dict.fromkeys(r["phase"] for r in rows))
    levels = ("bytes_min", "bytes_dram_est", "bytes_req", "bytes_sector", "bytes_line")
    fig, ax = plt.subplots(layout="constrained", figsize=(7, 4))
    for i, level in enumerate(levels):
        heights = [sum(r[level] for r in rows if r["phase"] == p) / 1e9 for p in phases]
        ax.bar([x + i / (len(levels) + 1) for x in range(len(phases))], heights, width=1 / (len(levels) + 1), label=level)
    ax.set_xticks([x + 0.4 for x in range(len(phases))], phases)
    ax.set(ylabel="GB a step", title=report.title)
    ax.title.set_fontsize(8)
    ax.legend(fontsize=8)
    return save(fig, plt, path)


def save(fig: Any, plt: Any, path: str | Path, dpi: int = 120) -> Path:
    """Write a figure and close it; ConfigError where its file cannot be written, or has a suffix that matplotlib does not know."""
    path = as_path(path, "a picture")
    try:
        fig.savefig(path, dpi=dpi)
    except OSError as e:
        raise cannot_write(path.parent, e) from None
    except ValueError as e:
        raise ConfigError(f"a picture in {str(path)!r}: expected a suffix that matplotlib knows, such as .png, got {path.suffix!r} ({e}).") from None
    finally:
        plt.close(fig)
    return path
