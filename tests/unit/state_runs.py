"""Runs that are stopped and taken up again, for the tests of states."""

import copy
from types import SimpleNamespace

import pytest
import torch
from sample_models import mlp
from torch import fx, optim
from torch.optim.lr_scheduler import StepLR

import fxmask
from fxmask.sites import sites

CUBIC = fxmask.Schedule("cubic", steps=9, initial=0.1)
CONFIGS = {
    "refresh-1": dict(refresh=1),
    "refresh-2-cubic": dict(refresh=2, schedule=CUBIC),
    "refresh-3-start-4": dict(refresh=3, start=4),
    "refresh-0": dict(refresh=0),
    "rigl": dict(backward="rigl", dense_every=3),
    "random": dict(criterion="random"),
}
EACH = pytest.mark.parametrize("config", CONFIGS)
FORMS = pytest.mark.parametrize("form", ["module", "graph"])
CUT, LAST = 5, 12


def masked(form="module", weights=0, overrides=None, **options):
    model = mlp(weights) if form == "module" else fx.symbolic_trace(mlp(weights))
    return fxmask.apply(model, fxmask.WeightMask(**{"ratio": 0.6, **options}), overrides=overrides)


def run(form, config, weights=0, masked_weights="auto", returning="keep"):
    """A training in the making: `go` puts the guard on, which in a resumed run comes last."""
    model = masked(form, weights, **CONFIGS[config])
    optimiser = optim.Adam(model.parameters(), lr=0.05, weight_decay=0.5)
    r = SimpleNamespace(model=model, optimiser=optimiser, scheduler=StepLR(optimiser, 3, 0.7))
    r.go = lambda: fxmask.guard(optimiser, model, masked_weights, returning)
    return r


def train(r, first, last, batches=1, traced=True):
    """The steps first..last, and after each everything that a run consists of, copied."""
    trace = []
    for i in range(first, last):
        noise, losses = torch.Generator().manual_seed(i), []
        for _ in range(batches):
            loss = (r.model(torch.randn(8, 64, generator=noise)) - torch.randn(8, 10, generator=noise)).square().mean()
            loss.backward()
            losses.append(loss.item())
        r.optimiser.step()
        r.optimiser.zero_grad()
        r.scheduler.step()
        if not traced:
            continue
        parts = (losses, r.model.state_dict(), fxmask.masks(r.model), r.optimiser.state_dict(), r.scheduler.state_dict(), fxmask.explain(r.model).rows)
        trace.append(copy.deepcopy(dict(zip(("loss", "weights", "masks", "optimiser", "scheduler", "explain"), parts, strict=True))))
    return trace


def checkpoint(r):
    parts = dict(model=r.model, optimiser=r.optimiser, scheduler=r.scheduler)
    return {**{k: p.state_dict() for k, p in parts.items()}, "masks": fxmask.state_dict(r.model)}


def take_up(r, saved):
    r.model.load_state_dict(saved["model"])
    fxmask.load_state_dict(r.model, saved["masks"])
    r.optimiser.load_state_dict(saved["optimiser"])
    r.scheduler.load_state_dict(saved["scheduler"])


def snapshot(model):
    """All that fxmask keeps of a model's masks, copied, and the weights."""
    found = {name: {k: v for k, v in site.__dict__.items() if k.startswith("_fxmask_") and k != "_fxmask_class"} for name, site, _ in sites(model)}
    return copy.deepcopy((found, model.state_dict()))


def stepped(n=3, **options):
    model = masked(**{"refresh": 2, **options})
    fxmask.step(model, n)
    return model
