"""What a page recommends runs as it is written there."""

import re
from pathlib import Path

import torch
from sample_models import mlp
from torch.nn import functional as F

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
