"""Forward and dW of one linear whose input is saved pruned, timed beside dense ones: what `thesis/barley_figures_4_5.py` measures."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor, nn

import fxmask
from benchmarks.step_group import state_of
from benchmarks.step_measure import Watch
from fxmask.analysis import devices
from fxmask.analysis.barley import kept_blocks
from fxmask.bench.clock import load_average, percentiles
from fxmask.bench.provenance import utc
from fxmask.bench.stopwatch import Stopwatch
from fxmask.bench.table import WHERE, Row, text
from fxmask.errors import ConfigError, FxMaskError

PARTS, WRONG = ("dW", "forward", "both"), 0.02
NAMES = ("threads", "samples", "tokens", "features", "D", "dtype", "repeats", "block", "sparsity", "part")
STATE = ("load", "load_after", "cpu_share", "busy", "verdict")
FOUND = ("ms_p50", "ms_p10", "ms_p90", "error", "gflops_dense_equivalent", "peak_gflops", "of_peak_pct", "formula_x_dense", "x_dense")
COLUMNS = (*(c for c in WHERE if c != "threads"), *STATE, *NAMES, *FOUND)
Calls = tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]


def data(a: argparse.Namespace, out: int) -> tuple[Tensor, Tensor, Tensor]:
    """(weight, input, gradient of the output), N(0, 1) but for the weight, the same each time."""
    generator = torch.Generator().manual_seed(0)
    shapes = (out, a.features), (a.samples, a.tokens, a.features), (a.samples, a.tokens, out)
    w, x, gy = (torch.randn(shape, generator=generator).to(a.device, getattr(torch, a.dtype)) for shape in shapes)
    return w / a.features**0.5, x, gy


def layer(w: Tensor, x: Tensor, gy: Tensor, block: int, sparsity: float) -> Calls:
    """(forward, dW from its result) of a linear without bias whose input needs no gradient."""
    linear = nn.Linear(w.shape[1], w.shape[0], bias=False, device=w.device, dtype=w.dtype)
    linear.weight = nn.Parameter(w)
    model = nn.Sequential(linear)
    if sparsity:
        fxmask.apply(model, fxmask.ActivationPruning(sparsity, block))
    return lambda: model(x), lambda y: torch.autograd.grad(y, linear.weight, gy, retain_graph=True)[0]


def error(x: Tensor, gy: Tensor, block: int, sparsity: float, dw: Tensor) -> float:
    """How far dW is from dY^T X_s in float64, as a share of its norm, X_s without the round(n s) blocks of least norm in each sample."""
    blocks = x.double().view(x.shape[0], -1, block)
    dropped = blocks.norm(dim=2).argsort(1)[:, : round(Fraction(str(sparsity)) * blocks.shape[1])]
    pruned = blocks.scatter(1, dropped[:, :, None].expand(-1, -1, block), 0.0).view_as(x)
    wanted = gy.double().flatten(0, 1).t() @ pruned.flatten(0, 1)
    return float((dw.double() - wanted).norm() / wanted.norm())


def times(a: argparse.Namespace, calls: dict[float, Calls]) -> tuple[dict[float, dict[str, list[float]]], float]:
    """Milliseconds of each part by sparsity, a turn after the other, and the CPUs that the process had."""
    watch = Stopwatch(torch.device(a.device))
    found: dict[float, dict[str, list[float]]] = {s: {part: [] for part in PARTS} for s in calls}
    wall, cpu = time.perf_counter(), time.process_time()
    for turn in range(a.repeats + 1):
        for s in random.Random(turn).sample(list(calls), len(calls)):
            forward, dw = calls[s]
            made: list[Tensor] = []
            first = 1e3 * watch(lambda forward=forward, made=made: made.append(forward()))  # type: ignore[misc]
            second = 1e3 * watch(lambda dw=dw, made=made: dw(made[0]))  # type: ignore[misc]
            if turn:  # the first turn warms up
                for part, ms in zip(PARTS, (second, first, first + second), strict=True):
                    found[s][part].append(ms)
    return found, (time.process_time() - cpu) / max(time.perf_counter() - wall, 1e-9)


def peak_gflops(a: argparse.Namespace) -> float | None:
    """A GPU's peak in the dtype by its datasheet, None where the table has none; of a CPU what a product of 1,024 cubed reaches, by the clock of the others."""
    device, dtype = torch.device(a.device), getattr(torch, a.dtype)
    if device.type == "cpu":
        watch, square = Stopwatch(device), torch.full((1024, 1024), 0.5, dtype=dtype)
        return 2 * 1024**3 / min(watch(lambda: square @ square) for _ in range(5)) / 1e9
    try:
        peak = devices.device(a.device).peak(dtype)
    except ConfigError:
        return None
    return None if peak is None else peak / 1e9


def group(a: argparse.Namespace, out: int, block: int, peak: float | None) -> list[Row]:
    """The rows of one D and one block, dense first."""
    device = torch.device(a.device)
    before, (w, x, gy) = load_average(), data(a, out)
    calls = {s: layer(w, x, gy, block, s) for s in (0.0, *a.sparsities)}
    errors = {s: error(x, gy, block, s, dw(forward())) for s, (forward, dw) in calls.items()}
    wrong = {s: e for s, e in errors.items() if not e <= WRONG}
    if wrong:
        raise FxMaskError(f"dW at D = {out}, 1x{block}: expected an error of at most {WRONG:g} of its norm against float64, got {wrong}; nothing is timed.")
    found, share = times(a, calls)
    state = {k: v for k, v in state_of(device, Watch(device), before, share).items() if k in STATE}
    n, flop, rows = kept_blocks(a.tokens, a.features, block, 0.0), 2 * a.samples * a.tokens * a.features * out, []
    for s, parts in found.items():
        kept = kept_blocks(a.tokens, a.features, block, s) / n
        for part, ms in parts.items():
            low, mid, high = percentiles(ms)
            work = flop * (2 if part == "both" else 1)
            rate, ideal = work / mid / 1e6, 1 / kept if part == "dW" else 2 / (1 + kept) if part == "both" else 1.0
            values = (low, mid, high, errors[s], rate, peak, None if peak is None else 100 * rate / peak, ideal, percentiles(found[0.0][part])[1] / mid)
            names = ("ms_p10", "ms_p50", "ms_p90", "error", "gflops_dense_equivalent", "peak_gflops", "of_peak_pct", "formula_x_dense", "x_dense")
            row = named(a, out, block, s, part) | {k: text(v) for k, v in zip(names, values, strict=True)}
            rows.append(row | state | {"utc": utc()})
    return rows


def named(a: argparse.Namespace, out: int, block: int, sparsity: float, part: str) -> Row:
    """The columns that tell rows apart."""
    values = (torch.get_num_threads(), a.samples, a.tokens, a.features, out, a.dtype, a.repeats, block, sparsity, part)
    return {k: text(v) for k, v in zip(NAMES, values, strict=True)}
