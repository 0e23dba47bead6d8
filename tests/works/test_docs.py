"""What a page recommends runs as it is written there."""

import re
from pathlib import Path

import pytest
import torch
from sample_models import mlp
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, update_bn

import fxmask

DOCS = Path(__file__).parents[2] / "docs"


def test_the_recipe_for_a_run_from_scratch():
    torch.manual_seed(0)
    (code,) = re.findall(r"```python\n(fxmask\.apply.*?)```", (DOCS / "accuracy.md").read_text(), re.DOTALL)
    steps, model = 20, mlp()
    names: dict = {"fxmask": fxmask, "torch": torch, "model": model, "steps": steps}
    exec(code, names)
    x = torch.randn(32, model[0].in_features)
    y = x.argmax(1) % 8
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(x), y)
        losses.append(loss.item())
        for optimiser in (names["muon"], names["adamw"]):
            optimiser.zero_grad()
        loss.backward()
        for optimiser in (names["muon"], names["adamw"]):
            optimiser.step()
    assert losses[-1] < 0.5 * losses[0]
    rows = [row for row in fxmask.explain(model).rows if row["masked"]]
    assert {row["step"] for row in rows} == {steps} and all(row["achieved_ratio"] >= 0.5 for row in rows)
    held = {id(p) for o in (names["muon"], names["adamw"]) for g in o.param_groups for p in g["params"]}
    assert held == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("how", [{"schedule": fxmask.Schedule("cubic", 10)}, {"refresh": 5}, {"schedule": fxmask.Schedule("cubic", 10), "refresh": 5}], ids=str)
def test_an_average_takes_the_runs_masks(how):
    """As the page on training says it: the average is the dense copy with the run's masks, and its batch norms can be updated."""
    (code,) = re.findall(r"```python\n(fxmask\.load_state_dict\(ema.*?)```", (DOCS / "training.md").read_text(), re.DOTALL)
    torch.manual_seed(0)
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)), ratio=0.5, **how)
    ema, optimiser = AveragedModel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    fxmask.guard(optimiser, model)
    for _ in range(15):
        optimiser.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimiser.step()
        ema.update_parameters(model)
    exec(code, {"fxmask": fxmask, "ema": ema, "model": model})
    update_bn([torch.randn(8, 64)], ema)
    assert all(mask.float().mean() == 0.5 for mask in fxmask.masks(ema).values())
    if how.get("refresh"):
        assert all(torch.equal(a, b) for a, b in zip(fxmask.masks(ema.module).values(), fxmask.masks(model).values(), strict=True))
