"""Runs whose masks change by phases, for the tests of phases."""

from sample_models import mlp, noisy_step
from torch import fx, optim

import fxmask

PHASES = {3: dict(backward="ste"), 6: dict(block=(16, 16), refresh=2), 10: dict(backward="masked", criterion="l1")}
LAST = 13


def config(phases=PHASES, **options):
    return fxmask.WeightMask(**{"ratio": 0.6, "block": (8, 8), "phases": phases, **options})


def run(c, weights=0, form="module", guard="auto", returning="zero"):
    model = mlp(weights) if form == "module" else fx.symbolic_trace(mlp(weights))
    fxmask.apply(model, c)
    optimiser = optim.Adam(model.parameters(), lr=0.02, weight_decay=0.3)
    if guard:
        fxmask.guard(optimiser, model, guard, returning)
    return model, optimiser


def train(model, optimiser, first, last, call=None):
    """After each step: loss, masks, weights, momenta."""
    trace = []
    for i in range(first, last):
        loss = noisy_step(call or model, optimiser, i)
        momenta = [t.clone() for s in optimiser.state.values() for t in s.values()]
        trace.append((loss.item(), fxmask.masks(model), [p.detach().clone() for p in model.parameters()], momenta))
    return trace
