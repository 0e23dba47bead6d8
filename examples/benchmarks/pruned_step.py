"""Training steps of a model whose linears save pruned inputs, beside dense ones: time and memory, what `thesis/barley_figure_10.py` measures."""

from __future__ import annotations

import argparse
import gc

import torch
from torch import nn

import fxmask
from benchmarks import step_measure, step_models
from benchmarks.step_group import STATE, state_of
from benchmarks.step_measure import Runner, Watch
from benchmarks.step_models import Spec
from fxmask.bench.clock import load_average, percentiles
from fxmask.bench.provenance import clocks, utc
from fxmask.bench.stopwatch import Stopwatch
from fxmask.bench.table import WHERE, Row, text
from fxmask.errors import ConfigError

MIB, DENSE = 2**20, "dense"
IMAGES = {"resmlp-s12": 1_281_167, "cifar": 50_000, "tiny": 50_000}  # of ImageNet's training set, of CIFAR-10's
NAMES = ("threads", "model", "dtype", "repeats", "batch", "activations")
FOUND = (
    "turns", "ms_p50", "ms_p10", "ms_p90", "epoch_s", "images_per_s", "x_dense", "formula_saved_mib", "ours_saved_mib", "formula_step_mib", "ours_step_mib",
)  # fmt: skip
COLUMNS = (*(c for c in WHERE if c != "threads"), *STATE, *NAMES, *FOUND)


def build(spec: Spec, activations: str) -> nn.Module:
    """The model, its blocks' linears with pruned inputs unless it is dense."""
    model = step_models.build(spec)
    if activations != DENSE:
        fxmask.apply(model, pruning(activations), include=step_models.MODELS[spec.name].include)
    return model


def pruning(activations: str) -> fxmask.ActivationPruning:
    """What "0.8:16" says."""
    sparsity, _, block = activations.partition(":")
    try:
        return fxmask.ActivationPruning(float(sparsity), int(block))
    except ValueError as error:
        raise ConfigError(f"--activations: expected RATIO:BLOCK such as 0.8:16, got {activations!r} ({error}).") from None


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05)


def footprint(a: argparse.Namespace, activations: str, batch: int) -> dict[str, int]:
    """Bytes of a step by `analyze`, on a CPU's copy that holds no activation: what autograd holds, and all together."""
    spec = Spec(a.model, torch.device("cpu"), batch)
    model, kind = build(spec, activations), step_models.MODELS[a.model]
    with torch.autocast("cpu", torch.bfloat16, enabled=a.dtype == "bf16"):
        rows = fxmask.analyze(model, (torch.empty(batch, *kind.sample, device="meta"),), optimizer=optimizer(model)).tables["footprint"]
    return {"saved": rows[-1]["saved_activations"], "total": rows[-1]["total"]}


def group(a: argparse.Namespace, batch: int, shared: Row) -> list[Row]:
    """The rows of one mini-batch, dense first; all contenders in memory, in turns."""
    device = torch.device(a.device)
    spec, watch, before, load = Spec(a.model, device, batch), Watch(device), clocks(device), load_average()
    data, runners, costs = step_models.data(spec), [], []
    for activations in (DENSE, *a.activations):
        model = build(spec, activations)
        r = Runner(activations, None, model, model, optimizer(model), data, a.dtype == "bf16")
        r.step()
        held = step_measure.held_bytes(r) + sum(t.numel() * t.element_size() for t in data[:1])
        peak, saved = step_measure.peak_bytes(r), step_measure.saved_bytes(r)
        known = footprint(a, activations, batch)
        costs.append({"ours_saved_mib": saved / MIB, "ours_step_mib": None if peak is None else (held + peak) / MIB})
        costs[-1] |= {"formula_saved_mib": known["saved"] / MIB, "formula_step_mib": known["total"] / MIB}
        runners.append(r)
    times, share = step_measure.in_turns(runners, Stopwatch(device), a.repeats, a.seconds, 0, watch)
    state = state_of(device, watch, load, share) | before | {f"{k}_after": v for k, v in clocks(device).items() if k != "power_limit_w"}
    found = [percentiles(t[False]) for t in times]
    rows = []
    for r, (low, mid, high), cost in zip(runners, found, costs, strict=True):
        values = {"turns": len(times[0][False]), "ms_p10": low, "ms_p50": mid, "ms_p90": high, "x_dense": found[0][1] / mid}
        values |= {"epoch_s": -(-IMAGES[a.model] // batch) * mid / 1e3, "images_per_s": 1e3 * batch / mid, **cost}
        rows.append({**shared, **state, **named(a, batch, r.name), "utc": utc(), **{k: text(v) for k, v in values.items()}})
    del runners
    gc.collect()
    return rows


def named(a: argparse.Namespace, batch: int, activations: str) -> Row:
    """The columns that tell rows apart."""
    return {k: text(v) for k, v in zip(NAMES, (torch.get_num_threads(), a.model, a.dtype, a.repeats, batch, activations), strict=True)}
