"""fxmask.guard with optimisers that move an element by the momenta of others: what masked blocks have left behind must not turn the kept ones."""

import functools
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from sample_models import mlp
from torch import nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

import fxmask
from fxmask.kernels.errors import UnsupportedError
from fxmask.kernels.grid import expand_mask
from fxmask.passes.stepping import gathered

MUON = dict(lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")


class Average(optim.Optimizer):
    """Somebody's own optimiser: every element moves by the mean of all momenta of its weight."""

    memory = "memory"

    def __init__(self, params, lr=0.1):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                memory = self.state[p].setdefault(self.memory, torch.zeros_like(p))
                memory.mul_(0.9).add_(p.grad)
                p.sub_(group["lr"] * memory.mean())


class TwoParts(optim.Optimizer):
    """One that steps its weights by an optimiser each, all on one state."""

    def __init__(self, params, lr=0.1):
        super().__init__([{"params": [p], "lr": lr} for p in params], {})
        self.parts = [optim.SGD(g["params"], lr=lr, momentum=0.9) for g in self.param_groups]

    def step(self, closure=None):
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.param_groups, part.state = [{**part.defaults, **group}], self.state
            part.step()


class UnseenParts(TwoParts):
    """The same, but nothing finds its parts among its attributes."""

    def __init__(self, params):
        super().__init__(params)
        self.parts = iter(self.parts * 10)

    def step(self, closure=None):
        for group in self.param_groups:
            part = next(self.parts)
            part.param_groups, part.state = [{**part.defaults, **group}], self.state
            part.step()


class Ops(TorchDispatchMode):
    """The names of all ops that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def matrices(model):
    """The weights that `fxmask.apply` masks there."""
    return [model[0].weight, model[2].weight]


def ramped(optimiser_of, steps=12, **guard):
    """A guarded run whose masks grow over half of its steps: (weights after it, the masks and gradients of every step, the optimiser)."""
    torch.manual_seed(0)
    model = fxmask.apply(mlp(), ratio=0.6, block=(16, 16), schedule=fxmask.Schedule("linear", steps=steps // 2))
    optimiser, seen = optimiser_of(matrices(model)), []
    fxmask.guard(optimiser, model, **guard)
    torch.manual_seed(1)
    for _ in range(steps):
        optimiser.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        masks = fxmask.masks(model)
        pairs = zip(("0.weight", "2.weight"), matrices(model), strict=True)
        seen.append([(expand_mask(masks[name], p.shape, (16, 16)), p.grad.clone()) for name, p in pairs])
        optimiser.step()
    return [p.detach() for p in matrices(model)], seen, optimiser


def ops_of_a_step(optimiser_of, refresh, **guard):
    """How often each op runs in the third step of a guarded run whose masks stay: its rate is zero."""
    model = fxmask.apply(mlp(), ratio=0.5, block=(16, 16), refresh=refresh)
    optimiser = optimiser_of(matrices(model))
    fxmask.guard(optimiser, model, **guard)
    for _ in range(3):
        optimiser.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        for group in optimiser.param_groups:
            group["lr"] = 0.0
        with Ops() as ops:
            optimiser.step()
    return Counter(ops.names)


def in_plain_pytorch(optimiser_of, seen):
    """The same steps without fxmask: momenta outside of the mask set to zero before each, masked weights put back after it."""
    torch.manual_seed(0)
    weights = [p.detach().clone().requires_grad_() for p in matrices(mlp())]
    optimiser = optimiser_of(weights)
    for step in seen:
        before = [w.detach().clone() for w in weights]
        for w, (kept, grad) in zip(weights, step, strict=True):
            w.grad = grad * kept
            for t in optimiser.state[w].values():
                t.masked_fill_(~kept, 0)
        optimiser.step()
        with torch.no_grad():
            for w, (kept, _), old in zip(weights, step, before, strict=True):
                w.copy_(torch.where(kept, w, old))
    return [w.detach() for w in weights]


@pytest.mark.parametrize("large", [gathered.LARGE, 0])
def test_muon_steps_as_if_masked_blocks_had_never_been(large, monkeypatch):
    monkeypatch.setattr(gathered, "LARGE", large)  # of weights that other optimisers' steps gather
    weights, seen, optimiser = ramped(lambda params: optim.Muon(params, **MUON))
    assert any((a[0] & ~b[0]).any() for a, b in zip(seen[2], seen[-1], strict=True)), "no block has left since its first momentum: nothing is tested"
    for got, expected in zip(weights, in_plain_pytorch(lambda params: optim.Muon(params, **MUON), seen), strict=True):
        assert torch.equal(got, expected)
    for (kept, _), p in zip(seen[-1], optimiser.param_groups[0]["params"], strict=True):
        assert not optimiser.state[p]["momentum_buffer"][~kept].any()


def test_somebody_elses_muon_is_known_by_its_name():
    """timm's, Keller Jordan's: no class of torch.optim, the same momentum."""
    muon = type("AdaMuonWithAuxAdam", (Average,), {"memory": "momentum_buffer"})
    weights, seen, _ = ramped(muon)
    for got, expected in zip(weights, in_plain_pytorch(muon, seen), strict=True):
        assert torch.equal(got, expected)
    with pytest.raises(UnsupportedError, match="this one looks at others"):
        fxmask.guard(muon([nn.Parameter(torch.ones(2))]), fxmask.apply(mlp(), block=(16, 16)), masked_step="elementwise")


def test_a_momentum_that_looks_like_a_copy_of_its_weight_is_cleared():
    model = fxmask.apply(mlp(), ratio=0.6, block=(16, 16))
    optimiser, w = optim.Muon(matrices(model), **MUON), model[0].weight
    fxmask.guard(optimiser, model)
    optimiser.state[w]["momentum_buffer"] = w.detach().clone()
    model(torch.randn(8, 64)).square().mean().backward()
    out = ~expand_mask(fxmask.masks(model)["0.weight"], w.shape, (16, 16))
    optimiser.step()
    assert out.any() and not optimiser.state[w]["momentum_buffer"][out].any()


def test_dense_gradients_are_for_regrowth_alone():
    """RigL's dense steps: Muon moves kept elements as the kept part of the gradient says, and the gradient is whole again after the step."""
    torch.manual_seed(0)
    config = fxmask.WeightMask(ratio=0.6, block=(16, 16), backward="rigl", dense_every=4, refresh=4, regrow=fxmask.Regrow("gradient", 0.3))
    model = fxmask.apply(mlp(), config)
    optimiser, w, dense = optim.Muon(matrices(model), **MUON), model[0].weight, 0
    fxmask.guard(optimiser, model)
    for _ in range(9):
        optimiser.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        kept = expand_mask(fxmask.masks(model)["0.weight"], w.shape, (16, 16))
        alone = nn.Parameter(w.detach().clone())
        alone.grad, whole = w.grad * kept, w.grad.clone()
        other = optim.Muon([alone], **MUON)
        if optimiser.state[w]:
            other.state[alone]["momentum_buffer"] = optimiser.state[w]["momentum_buffer"] * kept
        other.step()
        optimiser.step()
        assert torch.equal(w[kept], alone[kept]) and torch.equal(w.grad, whole)
        dense += bool(whole[~kept].any())
    assert dense == 2


def test_state_that_is_no_momentum_stays():
    """A Muon with a copy of the weights: returning blocks must not come back as zeros."""

    class WithMaster(optim.Muon):
        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                self.state[p].setdefault("master", p.detach().clone())
            super().step()

    _, seen, optimiser = ramped(lambda params: WithMaster(params, **MUON))
    for (kept, _), p in zip(seen[-1], optimiser.param_groups[0]["params"], strict=True):
        assert optimiser.state[p]["master"][~kept].all() and not optimiser.state[p]["momentum_buffer"][~kept].any()


@pytest.mark.parametrize("cls", [optim.AdamW, optim.Adafactor])
def test_others_of_torch_keep_what_they_have(cls):
    """Elementwise ones need no clearing; Adafactor's factored moments have no element of a weight."""
    _, seen, optimiser = ramped(lambda params: cls(params, lr=0.01), returning="zero")
    for (kept, _), p in zip(seen[-1], optimiser.param_groups[0]["params"], strict=True):
        state = optimiser.state[p]
        assert state["exp_avg"][~kept].any() if cls is optim.AdamW else state["row_var"].all()


@pytest.mark.parametrize("cls", [Average, type("Mine", (optim.SGD,), {"step": Average.step, "memory": "memory"})])
@pytest.mark.parametrize("returning", ["keep", "zero"])
def test_an_optimiser_of_ones_own_is_told_by_returning(returning, cls):
    weights, seen, _ = ramped(cls, returning=returning)
    same = [torch.equal(a, b) for a, b in zip(weights, in_plain_pytorch(cls, seen), strict=True)]
    assert all(same) if returning == "zero" else not all(same)


def test_a_state_that_parts_share_is_looked_after_once():
    assert ops_of_a_step(TwoParts, 1, returning="zero") == ops_of_a_step(UnseenParts, 1, returning="zero")


@pytest.mark.parametrize(("refresh", "looks"), [(0, set()), (1, {"fxmask::block_index", "aten::equal"})])
def test_where_no_block_returns_no_momentum_is_touched(refresh, looks):
    """A refresh that changes nothing is seen from the masks, which are small."""
    sgd = functools.partial(optim.SGD, lr=0.1, momentum=0.9)
    more = ops_of_a_step(sgd, refresh, returning="zero") - ops_of_a_step(sgd, refresh, returning="keep")
    assert set(more) - {"aten::detach"} == looks


def test_step_sizes_are_no_momenta():
    model = fxmask.apply(nn.Sequential(nn.Linear(32, 32, bias=False)), ratio=0.5, block=(16, 16), refresh=0)
    optimiser = optim.Rprop(model.parameters(), lr=0.01)
    fxmask.guard(optimiser, model, returning="zero")
    for _ in range(3):
        optimiser.zero_grad()
        model(torch.randn(4, 32)).square().mean().backward()
        optimiser.step()
    out = ~expand_mask(fxmask.masks(model)["0.weight"], (32, 32), (16, 16))
    state = optimiser.state[model[0].weight]
    assert torch.equal(state["step_size"][out], torch.full_like(state["step_size"][out], 0.01))


def test_step_sizes_of_blocks_that_return_stay():
    """At zero they would hold the blocks where they are."""
    model = fxmask.apply(nn.Sequential(nn.Linear(32, 32, bias=False)), ratio=0.5, block=(8, 8), criterion="random")
    optimiser = optim.Rprop(model.parameters(), lr=0.01)
    fxmask.guard(optimiser, model, returning="zero")
    for _ in range(4):
        before = fxmask.masks(model)["0.weight"]
        optimiser.zero_grad()
        model(torch.randn(4, 32)).square().mean().backward()
        optimiser.step()
        assert (fxmask.masks(model)["0.weight"] & ~before).any() and (optimiser.state[model[0].weight]["step_size"] > 1e-4).all()


def test_a_second_state_of_a_muon_keeps_what_it_has():
    """Its momentum alone is cleared while masked."""

    class WithSquares(optim.Muon):
        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                self.state[p].setdefault("squares", torch.zeros_like(p)).mul_(0.9).addcmul_(p.grad, p.grad)
            super().step()

    _, seen, optimiser = ramped(lambda params: WithSquares(params, **MUON))
    for (first, _), (kept, _), p in zip(seen[2], seen[-1], optimiser.param_groups[0]["params"], strict=True):
        assert (first & ~kept).any() and optimiser.state[p]["squares"][first & ~kept].any()


def test_a_gradient_past_the_mask_turns_no_kept_block():
    """A term that reads the weight has one for all blocks, here below zero; it is whole again after the step."""
    torch.manual_seed(0)
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 32, bias=False)), ratio=0.6, block=(16, 16), refresh=0)
    w = model[0].weight
    optimiser = optim.Muon([w], **MUON)
    fxmask.guard(optimiser, model)
    kept = expand_mask(fxmask.masks(model)["0.weight"], w.shape, (16, 16))
    for turn in range(2):
        optimiser.zero_grad()
        (model(torch.randn(8, 64)).square().mean() - w.sum()).backward()
        alone, whole = nn.Parameter(w.detach().clone()), w.grad.clone()
        other = optim.Muon([alone], **MUON)
        alone.grad = w.grad * kept
        if optimiser.state[w]:
            other.state[alone]["momentum_buffer"] = optimiser.state[w]["momentum_buffer"].clone()
        other.step()
        with nullcontext() if turn else pytest.warns(fxmask.FxMaskWarning, match="masked blocks of 0.weight have a gradient"):
            optimiser.step()
        assert torch.equal(w[kept], alone[kept]) and torch.equal(w.grad, whole) and whole[~kept].any()


@pytest.mark.parametrize("to_none", [True, False])
def test_a_muon_that_takes_its_gradients_away(to_none):
    class Takes(optim.Muon):
        def step(self, closure=None):
            super().step()
            self.zero_grad(set_to_none=to_none)

    config = fxmask.WeightMask(ratio=0.6, block=(16, 16), backward="rigl", dense_every=1, refresh=4, regrow=fxmask.Regrow("gradient", 0.3))
    model = fxmask.apply(mlp(), config)
    optimiser, w = Takes(matrices(model), **MUON), model[0].weight
    fxmask.guard(optimiser, model)
    before, out = w.detach().clone(), ~expand_mask(fxmask.masks(model)["0.weight"], w.shape, (16, 16))
    model(torch.randn(8, 64)).square().mean().backward()
    assert w.grad[out].any()
    optimiser.step()
    assert (w.grad is None if to_none else not w.grad.any()) and torch.equal(w[out], before[out]) and not torch.equal(w, before)


@pytest.mark.parametrize("returning", ["keep", "zero"])
def test_nothing_is_held_between_two_steps(returning):
    """A guard's copies would be memory of the size of model and momenta while activations are there."""
    torch.manual_seed(0)
    config = fxmask.WeightMask(ratio=0.6, block=(16, 16), backward="rigl", dense_every=1, refresh=4, regrow=fxmask.Regrow("gradient", 0.3))
    model = fxmask.apply(mlp(), config)
    optimiser = optim.Muon(matrices(model), **MUON)
    handle = fxmask.guard(optimiser, model, returning=returning)
    for _ in range(2):
        optimiser.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimiser.step()
        for g in handle._held.guarded:
            assert not g.momenta and all(v is g.weight for v in vars(g).values() if isinstance(v, torch.Tensor)) and g.last is None


def test_the_gradient_that_a_closure_makes_is_there_after_the_step():
    model = fxmask.apply(mlp(), ratio=0.6, block=(16, 16))
    optimiser, w, made = optim.Muon(matrices(model), **MUON), model[0].weight, []
    fxmask.guard(optimiser, model)

    def closure():
        optimiser.zero_grad(set_to_none=False)
        loss = model(torch.randn(8, 64)).square().mean()
        loss.backward()
        made.append(w.grad.clone())
        return loss

    for _ in range(2):
        optimiser.step(closure)
        assert torch.equal(w.grad, made[-1])


@pytest.mark.filterwarnings("ignore:masked blocks of:fxmask.errors.FxMaskWarning")
@pytest.mark.parametrize("policy", ["freeze", "decay"])
@pytest.mark.parametrize("kind", ["clears", "zeroes", "adds", "has made", "by name"])
def test_a_step_with_a_closure_that_gives_masked_blocks_gradients_is_the_step_without(kind, policy):
    """As Lightning takes its steps."""
    found = {}
    for way in ("with", "without"):
        torch.manual_seed(0)
        model = fxmask.apply(mlp(), ratio=0.6, block=(16, 16), refresh=0)
        optimiser, found[way] = optim.Muon(matrices(model), **MUON), []
        fxmask.guard(optimiser, model, masked_weights=policy)

        def closure(x, model=model, optimiser=optimiser):
            if kind != "adds":
                optimiser.zero_grad(set_to_none=kind != "zeroes")
            loss = model(x).square().mean() + model[0].weight.square().sum()
            loss.backward()
            return loss

        for _ in range(3):
            make = functools.partial(closure, torch.randn(8, 64))
            if way == "without" or kind == "has made":
                loss = make()
                make = None if way == "without" else lambda loss=loss: loss
            given = optimiser.step(closure=make) if kind == "by name" else optimiser.step(make)
            assert (given is None) is (make is None)
            found[way] += [t.detach().clone() for w in matrices(model) for t in (w, w.grad)]
    assert all(torch.equal(a, b) for a, b in zip(found["with"], found["without"], strict=True))
