"""Gradient accumulation: many backwards to one step are the twin's, and one step."""

import pytest
import torch
from works.twin import MODELS, check, gradients, near, pair, slow_but, some

import fxmask


@pytest.mark.parametrize("case", slow_but([f"{name}{c}" for name in MODELS for c in ("", "-compiled")], *MODELS, "mlp-compiled"))
def test_micro_batches(case):
    name, _, compiled = case.partition("-")
    make, shape = MODELS[name]
    masked, twin, kept = pair(make())
    call = torch.compile(masked, backend="aot_eager", fullgraph=True) if compiled else masked
    batches = [some(*shape, seed=seed) for seed in range(4)]
    for m, f in ((masked, call), (twin, twin)):
        m.zero_grad()
        for x in batches:
            (f(x).pow(3).mean() / len(batches)).backward()
    check(gradients(masked), gradients(twin), kept)


@pytest.mark.parametrize("options", [{}, dict(refresh=2), dict(schedule=fxmask.Schedule("linear", steps=4, initial=0.5))], ids=str)
def test_steps_count_and_not_backwards(options):
    """Six steps of four micro-batches end as six steps of the whole batch."""
    ends = []
    for micro in (4, 1):
        model = fxmask.apply(MODELS["mlp"][0](), ratio=0.75, **options)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        fxmask.guard(optimizer, model)
        for seed in range(6):
            optimizer.zero_grad()
            for x in some(8, 64, seed=seed).chunk(micro):
                (model(x).square().mean() / micro).backward()
            optimizer.step()
        assert {row["step"] for row in fxmask.explain(model).rows if row["masked"]} == {6}
        ends.append((fxmask.masks(model), model.state_dict()))
    assert all(torch.equal(mask, ends[1][0][name]) for name, mask in ends[0][0].items())
    for name, p in ends[0][1].items():
        near(p, ends[1][1][name], 1e-3, name)  # Adam makes much of small gradients


def test_two_forwards_before_one_backward():
    masked, twin, kept = pair(MODELS["residual"][0](), refresh=3)
    fxmask.step(masked, 0)
    for m in (masked, twin):
        (m(some(3, 32, 32)) * m(some(3, 32, 32, seed=5))).sum().backward()
    check(gradients(masked), gradients(twin), kept)
