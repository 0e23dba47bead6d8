"""A hundred steps of a cubic schedule, with masks that move in each, are one compile; a second would be an error."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from sample_models import best_blocks, mlp
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from works.twin import near, pair, slow_but, some

import fxmask

STEPS, RATIO, BLOCK, LR = 100, 0.9, (8, 8), 0.2
MASKED = ("0.weight", "2.weight")


def batch(step, dynamic):
    return some(4 + step % 7 if dynamic else 8, 64, seed=step)


def by_hand(dynamic, backward):
    """The same training in plain PyTorch: the ratio by the cubic formula, masks by their definition, steps of SGD on what is kept."""
    model, kept = mlp(), []
    for step in range(STEPS):
        left = max(0.0, 1 - step / (STEPS - 20))
        ratio = round(RATIO - RATIO * left**3, 9)
        masks = {}
        for name in MASKED:
            w = model.get_parameter(name)
            masks[name] = best_blocks(w, BLOCK, ratio).repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
        kept.append(masks)
        x = batch(step, dynamic)
        for i in (0, 2, 4):
            w = model[i].weight
            reached = w * masks.get(f"{i}.weight", torch.ones(()))
            x = F.linear(x, reached if backward == "masked" else w + (reached - w).detach(), model[i].bias)
            x = F.gelu(x) if i < 4 else x
        model.zero_grad()
        x.square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= LR * p.grad
    return model, kept


def train(model, call, dynamic):
    optimizer = torch.optim.SGD(model.parameters(), LR)
    fxmask.guard(optimizer, model)
    masks = []
    for step in range(STEPS):
        masks.append(fxmask.masks(model))
        optimizer.zero_grad()
        call(batch(step, dynamic)).square().mean().backward()
        optimizer.step()
    return masks


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", slow_but(["static", "dynamic", "ste"], "dynamic"))
def test_a_hundred_steps(case, backend):
    dynamic, backward = case == "dynamic", "ste" if case == "ste" else "masked"
    expected, kept = by_hand(dynamic, backward)
    schedule = fxmask.Schedule("cubic", steps=STEPS - 20)
    model = fxmask.apply(mlp(), ratio=RATIO, block=BLOCK, schedule=schedule, backward=backward)
    counter = CompileCounterWithBackend(backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        masks = train(model, torch.compile(model, backend=counter, fullgraph=True, dynamic=dynamic or None), dynamic)
    assert counter.frame_count == 1
    for step in range(STEPS):
        for name in MASKED:
            blocks = kept[step][name][:: BLOCK[0], :: BLOCK[1]]
            assert torch.equal(masks[step][name], blocks), (step, name)
    assert len({int(m["0.weight"].sum()) for m in masks}) > 50  # the ratio did move
    came_back = [bool((a["0.weight"] & ~b["0.weight"]).any()) for a, b in pairwise(reversed(masks))]
    assert any(came_back) or backward == "masked"  # the weights move the masks, too
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        near(p.detach(), q.detach(), 1e-4, name)


CYCLIC = dict(schedule=fxmask.Schedule("cyclic", steps=60, cycles=3, warmup=5, cooldown=10))
OTHERS = [dict(refresh=3), dict(backward="rigl"), dict(criterion="random"), dict(start=30), CYCLIC]


@pytest.mark.parametrize("options", slow_but(OTHERS, dict(refresh=3), CYCLIC), ids=str)
def test_other_state_that_moves(options):
    """Caches, flags and steps are tensors, too."""
    models = [fxmask.apply(mlp(), **{"ratio": RATIO, "block": BLOCK, "schedule": fxmask.Schedule("cubic", steps=50), **options}) for _ in range(2)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = train(models[0], torch.compile(models[0], backend="aot_eager", fullgraph=True), False)
    eager = train(models[1], models[1], False)
    for a, b in zip(compiled, eager, strict=True):
        assert all(torch.equal(m, b[name]) for name, m in a.items())
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        near(p.detach(), q.detach(), 1e-4, name)


def test_layers_that_are_alike_share_a_compile():
    """Compiled one by one, as regional compilation does: nothing of a layer's mask is a constant of its own."""
    model, twin, _ = pair(nn.Sequential(*[mlp(seed, (64, 64, 64)) for seed in range(12)]))
    counter = CompileCounterWithBackend("eager")
    for block in model:
        block.compile(backend=counter)
    near(model(some(6, 64).requires_grad_()).detach(), twin(some(6, 64)).detach(), 1e-4)
    assert counter.frame_count <= 2  # an input that is no leaf may make the second


def test_the_setting_would_raise():
    """What these tests rest on: a ratio that is no tensor recompiles, and that is an error."""

    class Moving(nn.Module):
        ratio = 0.1

        def forward(self, x):
            return x * self.ratio

    model = Moving()
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(2))
    model.ratio = 0.2
    with torch._dynamo.config.patch(error_on_recompile=True), pytest.raises(torch._dynamo.exc.RecompileError):
        compiled(torch.ones(2))
