"""Soft masks: masked blocks scaled down over a ramp, with the true gradient, and cut off at its end."""

import pytest
import torch
import torch.nn.functional as F
from sample_models import mlp
from saved_states import same, through_a_file
from torch import fx, nn, optim
from torch._dynamo.testing import CompileCounterWithBackend

import fxmask
from fxmask.compiler.backend import parse
from fxmask.errors import UnsupportedError
from fxmask.kernels.grid import expand_mask

STEPS, START = 8, 2
SCHEDULE = fxmask.Schedule("linear", steps=STEPS, warmup=1, cooldown=2)
RAMP = 5


def soft(**config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48))
    return fxmask.apply(model, fxmask.WeightMask(**{"ratio": 0.5, "block": (16, 16), "schedule": SCHEDULE, "start": START, "soft": True, **config}))


def scale_at(step):
    return min(1.0, max(0.0, 1 - (step - START - 1) / RAMP))


@pytest.mark.parametrize("backward", ["masked", "ste", "unmasked"])
@pytest.mark.parametrize("refresh", [1, 3])
def test_values_and_gradients_are_the_formula_at_every_step(backward, refresh):
    model = soft(backward=backward, refresh=refresh)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    handle = fxmask.guard(optimizer, model)
    policy = handle.policies["0.weight"]
    for step in range(START + STEPS + 2):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step), requires_grad=True)
        w, b = (p.detach().clone().requires_grad_() for p in (model[0].weight, model[0].bias))
        kept, scale = expand_mask(fxmask.masks(model)["0.weight"], w.shape, (16, 16)), scale_at(step)
        row = fxmask.explain(model).rows[0]
        y = model(x)
        y.square().sum().backward()
        grads = x.grad, model[0].weight.grad.clone()
        x.grad = None
        if scale > 0:
            assert row["reason"] == f"selected; soft: computes densely until step 8, masked blocks at {scale:.3g}"
            expected = F.linear(x, torch.where(kept, w, scale * w), b)
            expected.square().sum().backward()
            for got, want in zip((y, *grads), (expected, x.grad, w.grad), strict=True):
                torch.testing.assert_close(got, want)
        else:
            assert row["reason"] == "selected"
            torch.testing.assert_close(y, F.linear(x, w * kept, b))
            masked = grads[1][~kept]
            assert bool(masked.any()) == (backward != "masked")
        before = w.detach()
        optimizer.step()
        optimizer.zero_grad()
        moved = (model[0].weight.detach() != before)[~kept]
        if scale > 0 and kept.logical_not().any():
            assert moved.all(), "masked blocks still learn on the ramp"
        elif policy == "freeze" and kept.logical_not().any():
            assert not moved.any()


@pytest.mark.parametrize("change", [dict(refresh=2), dict(criterion="l1"), dict(block=(8, 8)), dict(backward="ste")], ids=str)
@pytest.mark.parametrize("refresh", [1, 3])
def test_the_factor_follows_the_step_where_a_phase_begins_on_the_ramp(change, refresh):
    """In the run, and in one that takes up its state."""
    phases = {5: change}
    model = soft(refresh=refresh, phases=phases)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    fxmask.guard(optimizer, model)
    x = torch.randn(8, 64)
    for step in range(START + STEPS):
        resumed = soft(refresh=refresh, phases=phases)
        resumed.load_state_dict(model.state_dict())
        fxmask.load_state_dict(resumed, fxmask.state_dict(model))
        fxmask.step(resumed, 0)
        w, block = model[0].weight.detach(), change.get("block", (16, 16)) if step >= 5 else (16, 16)
        kept = expand_mask(fxmask.masks(model)["0.weight"], w.shape, block)
        expected = F.linear(x, torch.where(kept, w, scale_at(step) * w), model[0].bias)
        for m in (model, resumed):
            torch.testing.assert_close(m(x), expected)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("cut", [4, 12, 14])
def test_a_phase_that_holds_the_mask_behind_the_ramp_is_resumed(cut):
    def run(state=None):
        model = soft(phases={12: dict(refresh=0)})
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        fxmask.guard(optimizer, model)
        if state is not None:
            for load, part in zip((model.load_state_dict, optimizer.load_state_dict, lambda s: fxmask.load_state_dict(model, s)), state, strict=True):
                load(part)
        return model, optimizer

    def train(model, optimizer, first, last):
        for step in range(first, last):
            optimizer.zero_grad()
            model(torch.randn(8, 64, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            optimizer.step()

    train(*(whole := run()), 0, cut)
    resumed = run(through_a_file((whole[0].state_dict(), whole[1].state_dict(), fxmask.state_dict(whole[0]))))
    for r in (whole, resumed):
        train(*r, cut, 16)
    assert torch.equal(resumed[0][0].weight, whole[0][0].weight) and same(fxmask.state_dict(resumed[0]), fxmask.state_dict(whole[0]))


def test_steps_may_jump_to_such_a_phase_and_a_state_back():
    model, x = soft(phases={12: dict(refresh=0)}), torch.randn(3, 64)
    fxmask.step(model, 5)
    on_the_ramp, early = model(x), fxmask.state_dict(model)
    fxmask.step(model, 15)
    kept = expand_mask(fxmask.masks(model)["0.weight"], (48, 64), (16, 16))
    torch.testing.assert_close(model(x), F.linear(x, model[0].weight * kept, model[0].bias))
    fxmask.load_state_dict(model, early)
    fxmask.step(model, 0)
    assert torch.equal(model(x), on_the_ramp)


def test_a_ramp_recompiles_once_at_its_end():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model, plain = soft(), soft()
    for m, call in ((model, torch.compile(model, backend=counter, fullgraph=True)), (plain, plain)):
        optimizer = optim.SGD(m.parameters(), lr=0.1)
        fxmask.guard(optimizer, m)
        for step in range(START + STEPS + 3):
            optimizer.zero_grad()
            call(torch.randn(8, 64, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
    assert counter.frame_count == 2
    torch.testing.assert_close(model[0].weight, plain[0].weight)


def test_dense_means_dense():
    model = soft()
    fxmask.step(model, 5)
    x = torch.randn(3, 64)
    assert not torch.allclose(model(x), F.linear(x, model[0].weight, model[0].bias))
    with fxmask.dense(model):
        torch.testing.assert_close(model(x), F.linear(x, model[0].weight, model[0].bias))
    fxmask.restore(model)
    torch.testing.assert_close(model(x), F.linear(x, model[0].weight, model[0].bias))


def test_readers_of_the_weight_see_the_soft_one():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(32, 4, batch_first=True)
    twin = nn.MultiheadAttention(32, 4, batch_first=True)
    twin.load_state_dict(attention.state_dict())
    fxmask.apply(attention, fxmask.WeightMask(ratio=0.5, schedule=SCHEDULE, soft=True), include="out_proj")
    fxmask.step(attention, 4)
    kept = expand_mask(fxmask.masks(attention)["out_proj.weight"], (32, 32), (16, 16))
    with torch.no_grad():
        twin.out_proj.weight.copy_(torch.where(kept, twin.out_proj.weight, 0.4 * twin.out_proj.weight))
    x = torch.randn(2, 5, 32)
    attention.train(), twin.train()
    torch.testing.assert_close(attention(x, x, x)[0], twin(x, x, x)[0])
    assert not kept.all()


def test_flop_count_says_that_the_ramp_is_dense():
    from torch.utils.flop_counter import FlopCounterMode

    model, counts = soft(), []
    for at in (0, 5, 3):
        fxmask.step(model, at)
        with FlopCounterMode(display=False) as counter:
            model(torch.randn(4, 64))
        counts.append(counter.get_total_flops())
    assert counts == [2 * 4 * 64 * 48, 2 * 4 * 64 * 48, 2 * 4 * 64 * 24]


def test_graphs_and_kernels_are_refused():
    config = fxmask.WeightMask(schedule=SCHEDULE, soft=True)
    with pytest.raises(UnsupportedError, match=r"soft=True is for modules: expected an nn.Linear that is called, got a call in a graph.\n  where: 0\n  fix:"):
        fxmask.apply(fx.symbolic_trace(mlp()), config)
    with pytest.raises(UnsupportedError, match="keeps no state between calls, and soft counts"):
        parse({"soft": True})


def test_momenta_of_blocks_that_still_learn_are_not_cleared():
    """On the ramp of a soft mask nothing has been away, so nothing returns."""
    found = []
    for returning in ("keep", "zero"):
        torch.manual_seed(0)
        model = fxmask.apply(mlp(), ratio=0.6, soft=True, criterion="random", schedule=fxmask.Schedule("linear", steps=20))
        optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
        fxmask.guard(optimiser, model, returning=returning)
        for _ in range(4):
            optimiser.zero_grad()
            model(torch.randn(4, 64)).square().mean().backward()
            optimiser.step()
        found.append([t.clone() for state in optimiser.state.values() for t in state.values()])
    assert found[0] and all(torch.equal(a, b) for a, b in zip(*found, strict=True))
