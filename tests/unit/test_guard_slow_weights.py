"""fxmask.guard and optimisers whose state is a copy of the weight (Schedule-Free, Lookahead), or codes of values (8-bit optimisers)."""

import pytest
import torch
from sample_models import mlp
from torch import optim

import fxmask
from fxmask.kernels.grid import expand_mask
from fxmask.passes.stepping import held


class ScheduleFree(optim.Optimizer):
    """Schedule-Free SGD (Defazio et al., 2024): `eval` and `train` move the weights towards z and back, outside of any step."""

    def __init__(self, params, lr=0.5, beta=0.9, weight_decay=0.1):
        super().__init__(params, dict(lr=lr, beta=beta, weight_decay=weight_decay, steps=0))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            c, lr, beta = 1 / (group["steps"] + 1), group["lr"], group["beta"]
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                grad = p.grad + group["weight_decay"] * p
                p.lerp_(z, c).add_(grad, alpha=lr * (beta * (1 - c) - 1))
                z.sub_(grad, alpha=lr)
            group["steps"] += 1

    @torch.no_grad()
    def eval(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.lerp_(self.state[p]["z"], 1 - 1 / group["beta"])


class Lookahead(optim.Optimizer):
    """Slow weights that are noted at the third step (Zhang et al., 2019)."""

    def __init__(self, base):
        super().__init__(base.param_groups, {})
        self.base, self.steps = base, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.steps += 1
        for p in (p for group in self.param_groups for p in group["params"] if self.steps % 3 == 0):
            p.copy_(self.state[p].setdefault("slow", p.clone()).lerp_(p, 0.5))


class Coded(optim.Optimizer):
    """A momentum in 8 bits with a scale for the whole, whose code for nothing is 128."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            momentum = p.grad if not state else 0.9 * (state["codes"].float() - 128) * state["scale"] + p.grad
            state["scale"] = momentum.abs().max().clamp(min=1e-12) / 127
            state["codes"] = (momentum / state["scale"]).round().add(128).to(torch.uint8)
            p.sub_(momentum, alpha=0.1)


KINDS = {
    "Schedule-Free": (ScheduleFree, "z"),
    "Lookahead": (lambda params: Lookahead(optim.AdamW(params, 1e-2, weight_decay=0.1)), "slow"),
}
GUARDS = {"freeze": {}, "zero": dict(returning="zero"), "masked_step": dict(masked_step="elementwise")}


def train(model, optimiser, steps=4):
    for i in range(steps):
        optimiser.zero_grad()
        model(torch.randn(8, 64, generator=torch.Generator().manual_seed(i))).square().mean().backward()
        optimiser.step()


def masked_parts(model, optimiser, key):
    """The masked elements of each weight and of its state."""
    for name, mask in fxmask.masks(model).items():
        weight = model.get_parameter(name)
        out = ~expand_mask(mask, weight.shape, (16, 16))
        yield weight.detach()[out], optimiser.state[weight][key][out]


@pytest.mark.parametrize(("kind", "guard"), [("Schedule-Free", "freeze"), ("Schedule-Free", "zero"), ("Schedule-Free", "masked_step"), ("Lookahead", "freeze")])
def test_a_copy_of_the_weight_begins_at_the_weight(kind, guard):
    """At zero it would pull blocks that come back there."""
    make, key = KINDS[kind]
    model = fxmask.apply(mlp(), ratio=0.6, refresh=0)
    optimiser = make(model.parameters())
    fxmask.guard(optimiser, model, **GUARDS[guard])
    train(model, optimiser)
    for weight, state in masked_parts(model, optimiser, key):
        assert torch.equal(weight, state) and weight.any()


@pytest.mark.parametrize("guard", GUARDS)
def test_an_evaluation_at_other_weights_leaves_masked_ones(guard):
    model = fxmask.apply(mlp(), ratio=0.6, refresh=0)
    optimiser = ScheduleFree(model.parameters())
    fxmask.guard(optimiser, model, **GUARDS[guard])
    train(model, optimiser)
    before, was = [w.clone() for w, _ in masked_parts(model, optimiser, "z")], model[0].bias.detach().clone()
    optimiser.eval()
    assert all(torch.equal(a, b) for a, (b, _) in zip(before, masked_parts(model, optimiser, "z"), strict=True)) and not torch.equal(model[0].bias, was)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_come_back_go_on_from_their_weights(kind):
    """Where momenta are cleared, a copy of the weight is where the weight is."""
    make, key = KINDS[kind]
    model = fxmask.apply(mlp(), ratio=0.6, criterion="random")
    optimiser = make(model.parameters())
    fxmask.guard(optimiser, model, returning="zero")
    train(model, optimiser, 3)
    for _ in range(2):
        before = fxmask.masks(model)
        train(model, optimiser, 1)
        for name, mask in fxmask.masks(model).items():
            weight = model.get_parameter(name).detach()
            back = expand_mask(mask & ~before[name], weight.shape, (16, 16))
            assert weight[back].any() and torch.equal(weight[back], optimiser.state[model.get_parameter(name)][key][back])


def test_codes_are_the_optimisers():
    """A code of zero would be the largest negative momentum, which sets the scale of all others."""
    model = fxmask.apply(mlp(), ratio=0.6, refresh=0)
    optimiser = Coded(model.parameters(), {})
    fxmask.guard(optimiser, model, returning="zero")
    train(model, optimiser)
    for _, codes in masked_parts(model, optimiser, "codes"):
        assert (codes == 128).all()


@pytest.mark.parametrize("several", [lambda o: o, lambda o: [o], lambda o: (o,), lambda o: {"inner": o}], ids=["one", "list", "tuple", "dict"])
def test_what_an_optimiser_wraps_is_found_wherever_it_holds_it(several):
    """And of a state of one name the outermost's is told."""
    weight = torch.ones(2, requires_grad=True)
    outer, inner = type("Outer", (optim.SGD,), {})([weight]), optim.SGD([weight])
    outer.parts = several(inner)
    outer.other = optim.SGD([torch.ones(2, requires_grad=True)])  # it steps nothing of these
    assert held.find_wrapped(outer) == [outer, inner]
    outer.state[weight], inner.state[weight] = {"a": 1}, {"a": 2, "b": 3}
    assert held.state_of(outer, weight) == {"a": 1, "b": 3}
    outer.state[weight] = (1, 2)  # whatever somebody keeps there
    assert held.state_of(outer, weight) == {"a": 2, "b": 3}


FAR = {"far": lambda p: ScheduleFree(p, lr=1e4, weight_decay=0.0), "decayed": lambda p: optim.ASGD(p, lr=1.5, lambd=0.0, weight_decay=0.5)}


@pytest.mark.parametrize("make", FAR.values(), ids=FAR)
def test_a_copy_is_told_by_what_is_masked_or_by_its_name(make):
    """However far kept elements have gone in the first step, and an ASGD's average however much of it decayed."""
    model = fxmask.apply(mlp(), ratio=0.6, refresh=0)
    optimiser = make(model.parameters())
    fxmask.guard(optimiser, model)
    train(model, optimiser, 1)
    for weight, state in masked_parts(model, optimiser, "z" if isinstance(optimiser, ScheduleFree) else "ax"):
        assert torch.equal(weight, state) and weight.any()


def test_an_average_is_no_momentum_that_returning_clears():
    """Neither while it is masked, where an optimiser of one's own has all momenta at zero, nor when its block comes back."""
    for cls in (optim.ASGD, type("Mine", (optim.ASGD,), {})):
        model = fxmask.apply(mlp(), ratio=0.6, criterion="random")
        optimiser = cls(model.parameters(), lr=0.1, t0=0)
        fxmask.guard(optimiser, model, returning="zero")
        train(model, optimiser, 3)
        w = model[0].weight
        for _ in range(3):
            was, mask = optimiser.state[w]["ax"].clone(), expand_mask(fxmask.masks(model)["0.weight"], w.shape, (16, 16))
            train(model, optimiser, 1)
            out = ~mask
            assert torch.equal(optimiser.state[w]["ax"][out], was[out])
            assert not torch.equal(was[out], w.detach()[out])


def test_states_may_have_keys_that_are_no_words():
    class Numbered(optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for p in (p for group in self.param_groups for p in group["params"]):
                p.sub_(self.state[p].setdefault(0, torch.zeros_like(p)).mul_(0.9).add_(p.grad).add_(p), alpha=0.1)

    model = fxmask.apply(mlp(), ratio=0.6, refresh=0)
    optimiser = Numbered(model.parameters(), {})
    fxmask.guard(optimiser, model, returning="zero")
    before = model[0].weight.detach().clone()
    train(model, optimiser)
    for _, state in masked_parts(model, optimiser, 0):
        assert not state.any()
    out = ~expand_mask(fxmask.masks(model)["0.weight"], before.shape, (16, 16))
    assert torch.equal(before[out], model[0].weight[out]) and optimiser.state[model[0].weight][0].any()


def test_a_momentum_that_decay_has_brought_near_the_weight_is_none():
    """A coupled decay of 0.1 under a momentum of 0.9 makes the momentum of a weight without gradients the weight itself."""
    model = fxmask.apply(torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False)), ratio=0.5, block=(16, 32))
    optimiser = optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
    fxmask.guard(optimiser, model, masked_weights="decay", returning="zero")
    w = model[0].weight
    with torch.no_grad():
        w.fill_(1.0)[:16] = 2.0  # kept, and falls faster
    for _ in range(200):
        near = optimiser.state[w]["momentum_buffer"][16:].clone() if optimiser.state else None
        model(torch.zeros(2, 32)).sum().backward()
        optimiser.step()
        if fxmask.masks(model)["0.weight"].tolist() == [[False], [True]]:
            break
    assert near is not None and torch.allclose(near, w[16:], rtol=0.1)
    assert not optimiser.state[w]["momentum_buffer"][16:].any()


@pytest.mark.parametrize("options", [{}, dict(masked_step=True)], ids=["copies", "masked_step"])
def test_a_first_momentum_that_is_like_the_weight_is_none(options):
    """The gradient of half the squared weight is the weight."""
    model = fxmask.apply(torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False)), ratio=0.5, block=(16, 16))
    optimiser = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    fxmask.guard(optimiser, model, **options)
    kept = expand_mask(fxmask.masks(model)["0.weight"], (32, 32), (16, 16))
    (model(torch.eye(32)).square().sum() / 2).backward()
    optimiser.step()
    momentum = optimiser.state[model[0].weight]["momentum_buffer"]
    assert not momentum[~kept].any() and momentum[kept].all()


class AccSGD(optim.Optimizer):
    """Accelerated SGD (Kidambi et al., 2018): what it calls its momentum is a second copy of the weight."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            other = self.state[p].setdefault("momentum_buffer", p.clone())
            other.lerp_(p, 0.3).sub_(p.grad, alpha=0.1)
            p.sub_(p.grad, alpha=0.01).lerp_(other, 0.2)


@pytest.mark.parametrize("options", [{}, dict(masked_step="elementwise"), dict(returning="zero")], ids=["copies", "masked_step", "zero"])
def test_a_copy_of_the_weight_that_is_called_a_momentum(options):
    model = fxmask.apply(mlp(), ratio=0.6, refresh=0)
    optimiser = AccSGD(model.parameters(), {})
    fxmask.guard(optimiser, model, **options)
    train(model, optimiser, 2)
    for weight, state in masked_parts(model, optimiser, "momentum_buffer"):
        assert torch.equal(weight, state) and weight.any()


STATES = {
    "SGD": lambda p: optim.SGD(p, 0.1, momentum=0.9),
    "Adam": lambda p: optim.Adam(p, amsgrad=True),
    "Adamax": optim.Adamax,
    "NAdam": optim.NAdam,
    "RMSprop": lambda p: optim.RMSprop(p, momentum=0.9, centered=True),
    "Adadelta": optim.Adadelta,
    "Adagrad": optim.Adagrad,
    "Rprop": optim.Rprop,
}


@pytest.mark.parametrize("make", STATES.values(), ids=STATES)
def test_no_momentum_of_torchs_is_taken_for_a_copy(make):
    """Whatever its values: here they are the weight's own when its blocks come back."""
    model = fxmask.apply(torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False)), ratio=0.5, block=(8, 8), criterion="random")
    w = model[0].weight
    w.data.abs_()
    optimiser = make(model.parameters())
    fxmask.guard(optimiser, model, returning="zero")
    train(model, optimiser, 2)
    momenta = {k: t.copy_(w.detach()) for k, t in optimiser.state[w].items() if t.shape == w.shape and k != "step_size"}
    before = fxmask.masks(model)["0.weight"]
    train(model, optimiser, 1)
    back = expand_mask(fxmask.masks(model)["0.weight"] & ~before, w.shape, (8, 8))
    assert back.any() and momenta and not any(t[back].any() for t in momenta.values())


class Outer(optim.Optimizer):
    """A momentum over the steps of another optimiser, as SlowMo's."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    @torch.no_grad()
    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"]]
        was = [p.clone() for p in held]
        self.inner.step()
        for p, old in zip(held, was, strict=True):
            p.copy_(old).sub_(self.state[p].setdefault("momentum_buffer", torch.zeros_like(p)).mul_(0.5).add_(old - p))


def test_step_sizes_of_a_wrapped_optimiser_stay():
    """At zero, masked weights would never move again."""
    model = fxmask.apply(mlp(), ratio=0.6, refresh=0)
    inner = optim.Rprop(model.parameters(), 0.01)
    optimiser = Outer(inner)
    fxmask.guard(optimiser, model)
    train(model, optimiser)
    assert all((sizes == 0.01).all() for _, sizes in masked_parts(model, inner, "step_size"))
