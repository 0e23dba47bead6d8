"""Masks whose ratio a feedback drives, for the tests of feedback."""

import pytest
from sample_models import mlp
from torch import fx

import fxmask

LOSS = fxmask.Feedback("loss", every=1, change=0.2)
FLIPS = fxmask.Feedback("flip_rate", every=2, goal=0.1, change=0.15)
FORMS = pytest.mark.parametrize("form", ["module", "graph"])


def masked(schedule, weights=0, form="module", **options):
    model = mlp(weights) if form == "module" else fx.symbolic_trace(mlp(weights))
    return fxmask.apply(model, fxmask.WeightMask(**{"ratio": 0.7, "block": (8, 8), "schedule": schedule, **options}))


def ratios(model):
    return [r["target_ratio"] for r in fxmask.explain(model).rows if r["masked"]]


def kept(model):
    return {name: int(m.sum()) for name, m in fxmask.masks(model).items()}


def told(model, losses):
    """The ratio of the first layer before each report and after the last, a step after each."""
    fxmask.step(model, 0)
    found = []
    for loss in losses:
        found.append(ratios(model)[0])
        fxmask.feedback(model, loss)
        fxmask.step(model)
    return [*found, ratios(model)[0]]
