"""Optimisers of somebody's own that move weights without a `.grad` before or after their step, or wrap another one: masked weights stay as they are."""

import copy
import pickle
import weakref

import pytest
import torch
from sample_models import mlp
from torch import nn, optim

import fxmask
from fxmask.errors import FxMaskWarning, StateError, UnsupportedError
from fxmask.kernels.grid import expand_mask
from fxmask.passes.stepping import held

BLOCK = (16, 16)


class MeZO(optim.Optimizer):
    """Zeroth order: two forwards, no backward (Malladi et al. 2023)."""

    def __init__(self, params):
        super().__init__(params, dict(lr=0.01))

    def move(self, k):
        torch.manual_seed(7)
        for p in self.param_groups[0]["params"]:
            p.add_(torch.randn_like(p), alpha=k)

    @torch.no_grad()
    def step(self, closure):
        self.move(1e-3)
        a = closure()
        self.move(-2e-3)
        b = closure()
        self.move(1e-3 - 0.01 * float(a - b) / 2e-3)


class ClosureSAM(optim.AdamW):
    """Climbs, comes back and steps, and clears the gradients at its end."""

    def __init__(self, params):
        super().__init__(params, lr=0.01, weight_decay=0.1)

    def step(self, closure):
        weights = [p for group in self.param_groups for p in group["params"]]
        closure()
        with torch.no_grad():
            up = [0.01 * p.grad for p in weights]
            torch._foreach_add_(weights, up)
        self.zero_grad()
        closure()
        with torch.no_grad():
            torch._foreach_sub_(weights, up)
        super().step()
        self.zero_grad()


class MainGrad(optim.Optimizer):
    """Gradients lie beside `.grad`, as Megatron's do, and so does a momentum that the first step makes; every weight decays."""

    def __init__(self, params):
        super().__init__(params, dict(lr=0.01, weight_decay=0.1))

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            g = getattr(p, "main_grad", None)
            if g is not None:
                self.state[p]["exp_avg"] = self.state[p].get("exp_avg", torch.ones_like(p)).lerp_(g, 0.1)
                p.mul_(1 - 0.01 * 0.1).sub_(self.state[p]["exp_avg"], alpha=0.01)


def build(make, **options):
    torch.manual_seed(0)
    model = fxmask.apply(mlp(), ratio=0.6, block=BLOCK, **options)
    return model, make(model.parameters())


def train(model, optimiser, steps=3):
    def closure():
        loss = model(torch.randn(4, 64, generator=torch.Generator().manual_seed(1))).square().mean()
        if torch.is_grad_enabled():
            loss.backward()
        return loss.detach()

    for _ in range(steps):
        if isinstance(optimiser, (MeZO, ClosureSAM)):
            optimiser.step(closure)
            continue
        closure()
        for p in model.parameters():
            p.main_grad, p.grad = p.grad, None
        optimiser.step()


def masked_parts(model, of):
    """{name: masked elements of `of`(weight)}."""
    weights = dict(model.named_parameters())
    return {name: of(weights[name]).detach()[~expand_mask(mask, weights[name].shape, BLOCK)].clone() for name, mask in fxmask.masks(model).items()}


@pytest.mark.parametrize("make", [MeZO, ClosureSAM, MainGrad])
@pytest.mark.parametrize("refresh", [0, 1])
def test_freeze(make, refresh):
    """The masked part keeps its bits, the kept part is what the optimiser alone makes of it, and each step counts once."""
    (model, optimiser), (alone, other) = build(make, refresh=refresh), build(make, refresh=refresh)
    fxmask.guard(optimiser, model)
    masks, before = fxmask.masks(model), masked_parts(model, lambda w: w)
    train(model, optimiser, 1)
    train(alone, other, 1)
    for (name, mask), theirs in zip(masks.items(), (alone[0].weight, alone[2].weight), strict=True):
        kept, ours = expand_mask(mask, theirs.shape, BLOCK), model.get_parameter(name)
        assert torch.equal(ours[~kept], before[name]) and torch.equal(ours[kept], theirs[kept]) and not torch.equal(ours, theirs)
    train(model, optimiser, 2)
    assert fxmask.explain(model).rows[0]["step"] == 3
    if not refresh:
        assert all(torch.equal(before[name], now) for name, now in masked_parts(model, lambda w: w).items())


@pytest.mark.parametrize("make", [lambda p: optim.Muon([q for q in p if q.ndim == 2]), optim.Adafactor, optim.AdamW], ids=["Muon", "Adafactor", "AdamW"])
def test_pytorchs_own_leave_a_layer_that_rests_alone(make):
    """Nothing of it is kept, and blocks that have just been masked keep their momenta until the layer steps again."""
    model, optimiser = build(make, schedule=fxmask.Schedule("linear", steps=2))
    handle = fxmask.guard(optimiser, model)
    model(torch.randn(4, 64)).square().mean().backward()
    optimiser.step()
    before = copy.deepcopy(optimiser.state_dict()["state"])
    held, seen = handle._held.guarded, []
    optimiser.register_step_pre_hook(lambda *_: seen.append([g.copied for g in held]))
    model.zero_grad()
    model[2](torch.randn(4, model[2].in_features)).square().mean().backward()
    optimiser.step()
    after = optimiser.state_dict()["state"]
    assert seen == [[False, True]] and not fxmask.masks(model)["0.weight"].all()
    assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(after[0][k])) for k, v in before[0].items())


def test_a_momentum_that_a_step_without_grad_makes_begins_anew():
    model, optimiser = build(MainGrad, refresh=0)
    fxmask.guard(optimiser, model)
    train(model, optimiser)
    momenta = masked_parts(model, lambda w: optimiser.state[w]["exp_avg"])
    assert all(not t.any() for t in momenta.values()) and model[0].weight.detach().any()


def test_decay_is_of_weights_that_were_stepped():
    """Of a layer that had no gradient it cannot be told but by its weight."""
    model, optimiser = build(MainGrad)
    fxmask.guard(optimiser, model, masked_weights="decay")
    before, whole = masked_parts(model, lambda w: w), model[2].weight.detach().clone()
    model(torch.randn(4, 64)).square().mean().backward()
    model[0].weight.main_grad = model[0].weight.grad
    model.zero_grad()
    optimiser.step()
    now = masked_parts(model, lambda w: w)
    torch.testing.assert_close(now["0.weight"], before["0.weight"] * (1 - 0.01 * 0.1), rtol=1e-6, atol=0)
    assert torch.equal(model[2].weight, whole) and not torch.equal(now["0.weight"], before["0.weight"])


class Skips(optim.AdamW):
    def step(self, closure=None):
        return super().step(closure) if all(p.grad.isfinite().all() for p in self.param_groups[0]["params"]) else None


@pytest.mark.parametrize(("make", "scaled"), [(Skips, False), (optim.AdamW, True)])
def test_a_step_that_is_skipped_decays_nothing(make, scaled):
    model = fxmask.apply(mlp(), ratio=0.5, block=BLOCK)
    optimiser = make(model.parameters(), lr=0.01, weight_decay=0.1, fused=scaled)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    fxmask.guard(optimiser, model, masked_weights="decay")
    before = copy.deepcopy(model.state_dict())
    scaler.scale(model(torch.randn(4, 64)).square().mean() * float("inf")).backward()
    scaler.step(optimiser)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_step_on_kept_blocks_leaves_the_others_too():
    """Nothing is gathered of a weight without `.grad`; what the class does to it stays in its kept blocks."""
    model, optimiser = build(MainGrad, refresh=0)
    fxmask.guard(optimiser, model, masked_step="elementwise")
    before, whole = masked_parts(model, lambda w: w), model[0].weight.detach().clone()
    train(model, optimiser)
    assert all(torch.equal(before[name], now) for name, now in masked_parts(model, lambda w: w).items())
    assert not torch.equal(model[0].weight, whole)


class Wrap(optim.Optimizer):
    """Its base has the momenta, as in SAM and Lookahead."""

    def __init__(self, base):
        super().__init__(base.param_groups, {})
        self.base, self.param_groups = base, base.param_groups

    def step(self, closure=None):
        return self.base.step(closure)


def stepped(wrapped, make, **options):
    """The weights after some steps, and the sum of momenta of blocks that came back."""
    model, base = build(make, **options)
    optimiser = Wrap(Wrap(base)) if wrapped else base
    fxmask.guard(optimiser, model)
    returned, blocks = 0.0, 0
    for i in range(8):
        was = fxmask.masks(model)
        model.zero_grad()
        (model(torch.randn(8, 64, generator=torch.Generator().manual_seed(i))) - 1).square().mean().backward()
        optimiser.step()
        for name, now in fxmask.masks(model).items():
            state, w = base.state[model.get_parameter(name)], model.get_parameter(name)
            new = expand_mask(now & ~was[name], w.shape, BLOCK)
            returned, blocks = returned + float(state.get("exp_avg", state.get("momentum_buffer"))[new].abs().sum()), blocks + int((now & ~was[name]).sum())
    return [p.detach() for p in model.parameters()], returned, blocks


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda p: optim.AdamW(p, lr=0.01), dict(backward="rigl", dense_every=2, refresh=2, regrow=fxmask.Regrow("gradient", 0.5))),
        (lambda p: optim.Muon([q for q in p if q.ndim == 2], lr=0.01), dict(schedule=fxmask.Schedule("linear", steps=4))),
        (lambda p: optim.AdamW(p, lr=0.01), dict(criterion="momentum", schedule=fxmask.Schedule("linear", steps=4))),
    ],
    ids=["regrow", "muon", "by momenta"],
)
def test_a_guard_of_a_wrapper_is_that_of_what_it_wraps(make, options):
    """Momenta of blocks that come back, Muon's hidden ones, scores: whoever holds the state."""
    (ours, returned, blocks), (theirs, *of_theirs) = stepped(True, make, **options), stepped(False, make, **options)
    assert [returned, blocks] == of_theirs and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    if "regrow" in options:
        assert returned == 0 and blocks > 0


def test_no_masked_step_of_a_wrapper():
    model, base = build(optim.AdamW)
    with pytest.raises(UnsupportedError, match=r"masked_step of Wrap, which wraps another optimiser(.|\n)*guard the optimiser inside"):
        fxmask.guard(Wrap(base), model, masked_step="elementwise")


@pytest.mark.parametrize("refresh", [1, 3])
def test_a_layer_that_was_grown_by_hand(refresh):
    """One message, by the guard and by the forward, whether the mask is cached or not."""
    model, _ = build(optim.AdamW, refresh=refresh)
    fxmask.step(model, 0)
    model[0].weight = nn.Parameter(torch.randn(2 * model[0].weight.shape[0], 64))
    for call in (lambda: fxmask.guard(optim.AdamW(model.parameters()), model), lambda: model(torch.randn(4, 64))):
        with pytest.raises(StateError, match=r"replaced by one of another size(.|\n)*where: 0(.|\n)*fxmask.restore\(model\) before"):
            call()


def test_a_backward_that_comes_after_the_step_of_another_branch():
    """As with losses in turn: nothing has moved there, and nothing looks as if it had."""
    model, optimiser = build(MainGrad, refresh=0)
    fxmask.guard(optimiser, model)
    first, second = model[0](torch.randn(4, 64)).sum(), model[2](torch.randn(4, model[2].weight.shape[1], requires_grad=True)).sum()
    first.backward()
    model[0].weight.main_grad, model[0].weight.grad = model[0].weight.grad, None
    optimiser.step()
    second.backward()
    assert model[2].weight.grad.any()


def test_optimisers_that_know_each_other():
    """Nobody walks in a circle, and who is gone is no error; of two that share nothing neither wraps the other."""
    model, optimiser = build(MainGrad)
    a, b = optimiser, MainGrad(model.parameters())
    a.other, b.other, gone = b, a, MainGrad([nn.Parameter(torch.ones(1))])
    a.gone, a.apart = weakref.proxy(gone), [MainGrad([nn.Parameter(torch.ones(1))])]
    del gone
    assert held.find_wrapped(a) == [a, b] and held.with_wrapped(a) == [a, b] and held.with_wrapped(b) == [b, a]
    a.other = None
    assert held.with_wrapped(a) == [a, b] and held.find_wrapped(a) == [a] == held.with_wrapped(a)
    theirs = optim.AdamW(model.parameters())
    theirs.previous = optim.SGD(model.parameters())
    assert held.find_wrapped(theirs) == [theirs]
    fxmask.guard(theirs, model, masked_step=True)


class Both(optim.Optimizer):
    """Muon for one matrix and AdamW for the others, side by side."""

    def __init__(self, params):
        params = list(params)
        self.parts = [optim.AdamW([p for p in params if p is not params[0]], lr=0.01), optim.Muon(params[:1], lr=0.01)]
        super().__init__([g for o in reversed(self.parts) for g in o.param_groups], {})

    def step(self, closure=None):
        for part in self.parts:
            part.step()


def test_each_wrapped_optimiser_is_found():
    model, optimiser = build(Both, refresh=0)
    fxmask.guard(optimiser, model)
    for _ in range(2):
        model(torch.randn(4, 64)).square().mean().backward()
        optimiser.step()
    momenta = masked_parts(model, lambda w: held.state_of(optimiser, w).get("momentum_buffer", held.state_of(optimiser, w).get("exp_avg")))
    assert len(momenta) == 2 and all(not t.any() for t in momenta.values())


class Outer(Wrap):
    """With a momentum that has the name of the inner one's."""

    def step(self, closure=None):
        super().step()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                self.state[p]["momentum_buffer"].add_(1)


def test_momenta_of_one_name():
    """All of them rest."""
    model, base = build(lambda p: optim.SGD(p, lr=0.1, momentum=0.9), refresh=0)
    optimiser = Outer(base)
    for p in model.parameters():
        optimiser.state[p]["momentum_buffer"] = torch.full_like(p, 2.0)
        base.state[p]["momentum_buffer"] = torch.full_like(p, 3.0)
    fxmask.guard(optimiser, model)
    model(torch.randn(4, 64)).square().mean().backward()
    optimiser.step()
    for o, value in ((optimiser, 2.0), (base, 3.0)):
        assert all((t == value).all() for t in masked_parts(model, lambda w, o=o: o.state[w]["momentum_buffer"]).values())
        assert (o.state[model[0].weight]["momentum_buffer"] != value).any()


def test_a_momentum_that_the_outer_one_makes_takes_no_others_place():
    """Of the name that the inner one's had before."""

    class Late(Wrap):
        def step(self, closure=None):
            super().step()
            for p in self.param_groups[0]["params"]:
                self.state[p].setdefault("momentum_buffer", torch.full_like(p, 5.0))

    model, base = build(lambda p: optim.SGD(p, lr=0.1, momentum=0.9), refresh=0)
    for p in model.parameters():
        base.state[p]["momentum_buffer"] = torch.full_like(p, 3.0)
    optimiser = Late(base)
    fxmask.guard(optimiser, model)
    model(torch.randn(4, 64)).square().mean().backward()
    optimiser.step()
    for o, value in ((optimiser, 0.0), (base, 3.0)):
        assert all((t == value).all() for t in masked_parts(model, lambda w, o=o: o.state[w]["momentum_buffer"]).values())


@pytest.mark.parametrize("then", ["goes on", "goes on, as after a load", "loads", "loads masks, too"])
@pytest.mark.parametrize("wide", [False, True], ids=["cloned", "gathered"])
def test_a_step_that_raised_half_way_is_told_of_by_the_next_one(wide, then):
    """Its masked part has moved, as no hook came after it; once, and not where weights were loaded since."""

    class Raises(optim.SGD):
        fails = True

        def step(self, closure=None):
            super().step(closure)
            if self.fails:
                raise RuntimeError("out of memory")

    model = nn.Sequential(nn.Linear(512, 512) if wide else nn.Linear(64, 64))
    optimiser = Raises(fxmask.apply(model, ratio=0.5, refresh=0, backward="masked").parameters(), lr=0.1, weight_decay=0.1)
    fxmask.guard(optimiser, model)
    saved, masks = copy.deepcopy(model.state_dict()), fxmask.state_dict(model)
    if then == "goes on, as after a load":  # a first step is the one that makes an optimiser's state, and finds no memory for it
        model.load_state_dict(saved)
    model(torch.randn(4, model[0].in_features)).square().mean().backward()
    out = ~expand_mask(fxmask.masks(model)["0.weight"], model[0].weight.shape, (16, 16))
    with pytest.raises(RuntimeError, match="out of memory"):
        optimiser.step()
    assert not torch.equal(model[0].weight[out], saved["0.weight"][out])
    optimiser.fails = False
    if then.startswith("loads"):
        model.load_state_dict(saved)
        if then != "loads":
            fxmask.load_state_dict(model, masks)
    else:
        with pytest.warns(FxMaskWarning, match=r"the last optimizer.step\(\) raised half-way(.|\n)*where: 0.weight\n(.|\n)*fix: go on from a saved state"):
            optimiser.step()
    before = model[0].weight.detach().clone()
    optimiser.step()
    assert torch.equal(model[0].weight[out], before[out])


def test_nothing_stays_of_a_step_that_raised():
    class Raises(MainGrad):
        def step(self, closure=None):
            raise RuntimeError("out of memory")

    model, optimiser = build(Raises, refresh=0)
    handle = fxmask.guard(optimiser, model, masked_step="elementwise")
    with pytest.raises(RuntimeError, match="out of memory"):
        optimiser.step()
    assert len(pickle.dumps(handle)) < 2000 and copy.deepcopy(handle)._under_way is None
    Raises.step = MainGrad.step
    fxmask.restore(model)
    optimiser.step()
