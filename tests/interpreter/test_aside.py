"""What masked blocks hold, set aside by a kernel and put back: the bits of clone and where, no kept element touched; under `guard`, too."""

import warnings

import pytest
import torch
from interpreter.trace import recording
from saved_states import same
from torch import nn

import fxmask
from fxmask.kernels import mask_cost
from fxmask.kernels.bits import bits_as
from fxmask.kernels.grid import expand_mask, grid_shape, kept_elements
from fxmask.kernels.triton import aside
from fxmask.kernels.triton.device import LAUNCHES
from fxmask.passes.stepping import set_aside

SHAPES = [(40, 130), (17, 300), (64, 64), (5, 7), (1, 1)]
BLOCKS = [(16, 16), (64, 32), (3, 5), (1, 1), (128, 128)]
FP32, BF16 = torch.float32, torch.bfloat16


def tensors(dtype, each=2):
    g = torch.Generator().manual_seed(0)
    found = [torch.randn(shape, generator=g).to(dtype) for shape in SHAPES for _ in range(each)]
    found[0].view(-1)[::7] = float("nan")
    return found


def masks_of(block, density=0.4):
    g = torch.Generator().manual_seed(1)
    return [torch.rand(grid_shape(shape, block), generator=g) < density for shape in SHAPES]


def same_bits(a, b):
    kind = torch.int32 if a.dtype == FP32 else torch.int16
    return torch.equal(bits_as(a, kind), bits_as(b, kind))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("density", [0.4, 0.0, 1.0])
def test_the_bits_of_the_plain_form(block, dtype, density):
    ts, masks, which = tensors(dtype), masks_of(block, density), [i for i in range(len(SHAPES)) for _ in range(2)]
    before = [t.clone() for t in ts]
    LAUNCHES.clear()
    held = aside.set_aside(ts, masks, which, block)
    assert all(same_bits(t, b) for t, b in zip(ts, before, strict=True))
    for t in ts:
        t.add_(1)
    after = [t.clone() for t in ts]
    held.back(ts[0])
    assert LAUNCHES == {"aside_kernel": 2}
    for i, (t, b, a, m) in enumerate(zip(ts, before, after, which, strict=True)):
        kept = expand_mask(masks[m], t.shape, block)
        assert same_bits(t, torch.where(kept, a, b))
        assert same_bits(torch.where(kept, b, held.of(i, t)), b)


@pytest.mark.parametrize("first", [0, 3])
def test_tensors_that_no_sixteen_bytes_divide(first):
    """Views into one tensor, at odd places (the second one's alone, or both) and of odd widths; what lies between them is not touched."""
    whole = torch.randn(2000)
    masks = [torch.rand(2, 2) < 0.5, torch.rand(2, 13) < 0.5]

    def views(t):
        return t[first : first + 63].view(9, 7)[:8], t[101:451].view(7, 50)

    expected = whole * 2
    for new, old, m in zip(views(expected), views(whole), masks, strict=True):
        new.copy_(torch.where(expand_mask(m, new.shape, (4, 4)), new, old))
    ts = views(whole)
    held = aside.set_aside(ts, masks, [0, 1], (4, 4))
    whole.mul_(2)
    held.back(ts[0])
    assert torch.equal(whole, expected)


@pytest.mark.parametrize(("shape", "block"), [((40, 130), (16, 16)), ((33, 257), (3, 5)), ((64, 64), (64, 64))])
def test_only_masked_elements_move(shape, block):
    t, mask = torch.randn(shape), torch.rand(grid_shape(shape, block), generator=torch.Generator().manual_seed(2)) < 0.5
    with recording() as launches:
        held = aside.set_aside([t], [mask], [0], block)
        held.back(t)
    want = mask_cost.set_aside(shape, block, int(kept_elements(mask, shape, block)), 4)
    masked = ~expand_mask(mask, shape, block)
    there, back = (entry.operands for entry in launches)
    assert there["mask"].bytes_read == back["mask"].bytes_read == want.reads["mask"]
    assert there["mask"].distinct_read == back["mask"].distinct_read == want.reads_min["mask"]
    assert torch.equal(there["first"].reads, masked.long()) and not there["first"].bytes_written
    assert there["first"].bytes_read == want.reads["t"] and there["aside"].bytes_written == want.writes["aside"]
    assert torch.equal(back["first"].writes, masked.long()) and back["aside"].bytes_read == want.reads["t"]


def test_tables_are_kept_by_place(monkeypatch):
    """Not made anew for the tensors of the step before; the last `KEPT` are kept; in a capture there is none that was not made before, and it stays."""
    made, make = [], aside._made
    monkeypatch.setattr(aside, "_made", lambda *key: made.append(key) or make(*key))
    monkeypatch.setattr(aside, "KEPT", 2)
    aside._recent.clear()
    sets = [[torch.randn(32, 32)] for _ in range(3)]
    mask = [torch.eye(2) > 0]
    for ts in (sets[0], sets[0], sets[1], sets[0]):
        aside.set_aside(ts, mask, [0], (16, 16))
    assert len(made) == 2
    aside.set_aside(sets[2], mask, [0], (16, 16))  # the second goes
    aside.set_aside(sets[0], mask, [0], (16, 16))
    assert len(made) == 3 and len(aside._recent) == 2
    aside.set_aside(sets[1], mask, [0], (16, 16))
    assert len(made) == 4
    monkeypatch.setattr(aside.device, "capturing", lambda on: True)
    assert aside.set_aside(sets[2], mask, [0], (16, 16)) is None and len(made) == 4
    assert aside.set_aside(sets[1], mask, [0], (16, 16)) is not None
    monkeypatch.undo()
    aside._recent.clear()
    assert len(aside._captured) == 1
    aside._captured.clear()


class Replacing(torch.optim.SGD):
    """Its momenta are other tensors after every step."""

    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            state["momentum_buffer"] = state["momentum_buffer"] * 1.0


class Clearing(torch.optim.SGD):
    """Takes the gradients away at its end."""

    def step(self, closure=None):
        super().step(closure)
        self.zero_grad()


class Odd(torch.optim.SGD):
    """A momentum that every step turns where it lies, where it is square."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].get("m", torch.zeros_like(p))
                m.add_(p.grad).add_(p, alpha=0.1)
                p.sub_(m, alpha=0.1)
                self.state[p]["m"] = m.t() if m.ndim == 2 and m.shape[0] == m.shape[1] else m


OPTIMISERS = {
    "clearing": lambda p: Clearing(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "odd": lambda p: Odd(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "fused": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), weight_decay=0.1, fused=True, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "rprop": lambda p: torch.optim.Rprop(p),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "replacing": lambda p: Replacing(p, lr=0.1, momentum=0.9),
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 48), nn.GELU(), nn.Linear(48, 36), nn.GELU(), nn.Linear(36, 36))


def trained(impl, optimiser, make=net, steps=4, guard=None, **options):
    model = make()
    fxmask.apply(model, ratio=0.6, block=(16, 16), impl=impl, **options)
    opt = OPTIMISERS[optimiser](model.parameters())
    fxmask.guard(opt, model, **(guard or {}))
    LAUNCHES.clear()
    for i in range(steps):
        model(torch.ones(2, 40, dtype=next(model.parameters()).dtype))
        masks = fxmask.masks(model)
        for j, (name, p) in enumerate(model.named_parameters()):  # the same ones for both, whose products differ by rounding
            grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * i + j), dtype=p.dtype)
            p.grad = grad * expand_mask(masks[name], p.shape, (16, 16)) if name in masks else grad
        opt.step()
    return model, opt, LAUNCHES["aside_kernel"]


RAMP = {"refresh": 2, "schedule": fxmask.Schedule("linear", steps=3)}
FEW = [({}, "odd"), ({}, "fused"), (RAMP, "clearing"), (RAMP, "replacing")]
MORE = [(options, name) for options in ({}, {"refresh": 2}, RAMP) for name in OPTIMISERS if (options, name) not in FEW]


@pytest.mark.parametrize(("options", "optimiser"), [*FEW, *(pytest.param(*c, marks=pytest.mark.slow) for c in MORE)], ids=str)
def test_a_guard_has_the_bits_of_its_plain_form(optimiser, options):
    (ours, opt, launched), (theirs, other, none) = (trained(impl, optimiser, **options) for impl in ("triton", "reference"))
    assert same(ours.state_dict(), theirs.state_dict()) and same(opt.state_dict(), other.state_dict())
    assert launched == {"replacing": 5, "odd": 7}.get(optimiser, 8) and none == 0  # put back at once unless state lies otherwise by then


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_a_step_that_takes_its_gradients_away_is_frozen_too(impl):
    """State that such a first step makes begins anew, as any does."""
    model = net()
    fxmask.apply(model, ratio=0.6, block=(16, 16), impl=impl, refresh=0)
    opt = OPTIMISERS["clearing"](model.parameters())
    fxmask.guard(opt, model)
    masked = {name: ~expand_mask(m, model.get_parameter(name).shape, (16, 16)) for name, m in fxmask.masks(model).items()}
    before = {name: model.get_parameter(name).detach().clone() for name in masked}
    for _ in range(3):
        model(torch.randn(6, 40)).square().sum().backward()
        opt.step()
    for name, out in masked.items():
        p = model.get_parameter(name)
        assert torch.equal(p[out], before[name][out]) and not torch.equal(p, before[name])
        assert not opt.state[p]["momentum_buffer"][out].any() and opt.state[p]["momentum_buffer"].any()


@pytest.mark.parametrize("options", [dict(impl="triton"), dict(impl="reference"), dict(guard=dict(masked_step=True), impl="reference")], ids=str)
def test_an_average_of_weights_rests_at_them_where_masked(options):
    """From its first step on, whose decay ASGD has averaged by the time that weights are put back."""
    start = dict(net().named_parameters())
    for steps in (1, 3):
        model, opt, _ = trained(optimiser="asgd", steps=steps, refresh=0, **options)
        for name, mask in fxmask.masks(model).items():
            p, out = model.get_parameter(name), ~expand_mask(mask, start[name].shape, (16, 16))
            assert torch.equal(opt.state[p]["ax"][out], start[name][out]) and not torch.equal(opt.state[p]["ax"], start[name])


@pytest.mark.parametrize("optimiser", [pytest.param("adamw", marks=pytest.mark.slow), "replacing"])
def test_a_mask_that_is_rewritten_in_place_meanwhile(optimiser, monkeypatch):
    """As a graph's is, by a hook between the guard's and the step: what was set aside is put back, and nothing that was not."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")) if k.get("dtype") == FP32 else empty(*a, **k))
    found = []
    for impl in ("triton", "reference"):
        model = fxmask.apply(net(), ratio=0.6, block=(16, 16), impl=impl, refresh=2)
        for m in model:
            m.__dict__.update({"_fxmask_in_place": True} if hasattr(m, "_fxmask_keep") else {})
        opt = OPTIMISERS[optimiser](model.parameters())
        fxmask.guard(opt, model)

        def hook(*args, model=model):
            with torch.no_grad():
                for m in (model[0], model[2]):
                    m.weight.mul_(torch.linspace(0.1, 2, m.weight.shape[1]))
            fxmask.refresh(model)

        opt.register_step_pre_hook(hook)
        for i in range(3):
            model(torch.ones(2, 40))
            for j, p in enumerate(model.parameters()):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * i + j)) * (p != 0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", fxmask.errors.FxMaskWarning)  # these gradients are dense
                opt.step()
        found.append((model.state_dict(), opt.state_dict()))
    assert all(torch.isfinite(t).all() for t in found[0][0].values())
    assert same(*found)


def test_what_is_much_goes_in_pieces(monkeypatch):
    expected = trained("reference", "adamw")
    monkeypatch.setattr("fxmask.passes.stepping.set_aside.PIECE", 4000)  # three tensors of 48x40 and 36x48 are more
    ours = trained("triton", "adamw")
    assert same(ours[0].state_dict(), expected[0].state_dict()) and same(ours[1].state_dict(), expected[1].state_dict())
    assert ours[2] == 2 + 2 * 3 * 4 + 2  # instead of 8; AdamW's first step has the weights alone: three small pieces


@pytest.mark.parametrize("guard", [{"masked_weights": "decay"}, {"masked_weights": "free"}, {"returning": "zero"}])
def test_other_policies(guard):
    (ours, opt, launched), (theirs, other, _) = (trained(impl, "adamw", guard=guard, refresh=2) for impl in ("triton", "reference"))
    assert same(ours.state_dict(), theirs.state_dict()) and same(opt.state_dict(), other.state_dict())
    assert launched == (8 if "returning" in guard else 0)


def test_what_the_kernel_does_not_take():
    """A weight whose columns are contiguous, beside others that it takes; float64; nothing."""

    def mixed():
        model = net()
        model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())
        return model

    runs = [trained(impl, "adamw", mixed) for impl in ("triton", "reference")]
    assert same(runs[0][0].state_dict(), runs[1][0].state_dict()) and same(runs[0][1].state_dict(), runs[1][1].state_dict())
    assert runs[0][2] == 8
    assert [aside.takes(t) for t in (torch.ones(2, 2), torch.ones(2, 2).double(), torch.ones(2, 3).t(), torch.ones(0, 2))] == [True, False, False, False]


def test_in_a_capture_without_a_table(monkeypatch):
    """Clones, as without kernels."""
    expected = trained("reference", "adamw")
    monkeypatch.setattr(aside.device, "capturing", lambda on: True)
    monkeypatch.setattr(aside, "_recent", type(aside._recent)())
    ours = trained("triton", "adamw")
    assert same(ours[0].state_dict(), expected[0].state_dict()) and same(ours[1].state_dict(), expected[1].state_dict()) and ours[2] == 0


def test_tied_and_convolutional_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.conv = nn.Linear(40, 40), nn.Linear(40, 40), nn.Conv2d(16, 32, 3)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.conv(self.b(self.a(x))[:, None, None].expand(2, 16, 4, 40)).sum()

    def tied():
        torch.manual_seed(0)
        return Tied()

    runs = [trained(impl, "adamw", tied, refresh=2) for impl in ("triton", "reference")]
    assert same(runs[0][0].state_dict(), runs[1][0].state_dict()) and same(runs[0][1].state_dict(), runs[1][1].state_dict())
    assert runs[0][2] == 8


def test_pieces_are_as_long_as_they_may_be_and_never_empty(monkeypatch):
    """A tensor that is longer has a piece of its own."""
    monkeypatch.setattr(set_aside, "PIECE", 5)
    members = [(None, None, torch.empty(n)) for n in (10, 3, 3, 2)]
    assert [[t.numel() for *_, t in piece] for piece in set_aside._pieces(members)] == [[10], [3], [3, 2]]
