"""Exchange of blocks: beside a ratio that falls, over phases, and what it does to momenta."""

from itertools import pairwise

import pytest
import torch
from torch import nn, optim

import fxmask
from fxmask.kernels.grid import expand_mask
from fxmask.passes.state import ranking

SIDE, BLOCK = 64, (8, 8)


def test_one_old_block_stays_where_more_than_all_of_them_are_put_up():
    """A ratio that falls: two blocks are kept, three more come back, and three are exchanged. Growth prefers the others."""
    keys, growth = torch.tensor([[7, 8, 1, 2, 3, 4, 5, 6]]).int(), torch.tensor([[0, 0, 5, 5, 5, 5, 5, 5]]).int()
    old = keys > 6
    mask, grown = ranking.regrown(keys, old, torch.tensor(5), 3, growth, False)
    assert mask.int().tolist() == [[0, 1, 1, 0, 0, 1, 1, 1]] and grown.int().tolist() == [[0, 0, 1, 0, 0, 0, 0, 0]]


def layer(**config):
    torch.manual_seed(0)
    return fxmask.apply(nn.Sequential(nn.Linear(SIDE, SIDE)), fxmask.WeightMask(**{"ratio": 0.5, "block": BLOCK, **config}))


def mask_of(model):
    return fxmask.masks(model)["0.weight"]


def elements(mask):
    return expand_mask(mask, (SIDE, SIDE), BLOCK)


def train(model, optimizer, n, unused=()):
    """Steps; in those that are `unused` the layer has no gradient."""
    generator = torch.Generator().manual_seed(1)
    for i in range(n):
        optimizer.zero_grad()
        if i not in unused:
            model(torch.randn(32, SIDE, generator=generator)).square().mean().backward()
        optimizer.step()
        yield i + 1


def by(growth, fraction):
    return dict(backward="ste", regrow=fxmask.Regrow(growth, fraction))


FALLING = {
    "cyclic": dict(ratio=0.75, schedule=fxmask.Schedule("cyclic", steps=8, cycles=2, initial=0.25)),
    "descending": dict(ratio=0.3, refresh=2, schedule=fxmask.Schedule("linear", steps=6, initial=0.9)),
    "feedback": dict(ratio=0.8, refresh=2, schedule=fxmask.Feedback("loss", every=1, change=0.2, goal=1.0)),
}


@pytest.mark.parametrize("growth", ["random", "gradient"])
@pytest.mark.parametrize("schedule", list(FALLING))
def test_where_the_ratio_falls_as_many_are_exchanged_and_the_others_come_as_they_are(schedule, growth):
    model = layer(**by(growth, 0.2), **FALLING[schedule])
    optimizer, exchanged = optim.SGD(model.parameters(), lr=0.0), []
    fxmask.guard(optimizer, model)
    old, before = mask_of(model), model[0].weight.detach().clone()
    for step in train(model, optimizer, 8):
        new, weight = mask_of(model), model[0].weight.detach()
        zero = new & (weight.reshape(8, 8, 8, 8).abs().sum((1, 3)) == 0)
        assert torch.equal(weight[~elements(zero)], before[~elements(zero)]) and not (zero & old).any()
        if int(new.sum()) > int(old.sum()):
            assert int((old & ~new).sum()) == int(zero.sum()) <= int(0.2 * int(new.sum()))  # less where one that has just left comes in again
            exchanged.append(int(zero.sum()))
        with torch.no_grad():
            model[0].weight.masked_fill_(elements(zero), 1e-3)  # so that a block which is zeroed is seen
        old, before = new, model[0].weight.detach().clone()
        if schedule == "feedback":
            fxmask.feedback(model, 0.5 if step < 4 else 2.0)
    assert exchanged and (growth == "gradient" or sum(exchanged))


def flips(n=12, **config):
    model = layer(refresh=4, **config)
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    fxmask.guard(optimizer, model)
    return [int(fxmask.state_dict(model)["masks"]["0.weight"]["flips"]) for _ in train(model, optimizer, n)]


RIGL = dict(backward="rigl", dense_every=3, regrow=fxmask.Regrow("gradient", 0.3))


@pytest.mark.parametrize(("at", "change"), [(4, dict(criterion="l1")), (8, dict(criterion="l1")), (4, dict(backward="ste")), (7, dict(backward="ste"))])
def test_a_phase_keeps_the_gradient_that_blocks_grow_by(at, change):
    """The last dense gradient before a rebuild is two steps old, and a phase between them does not drop it."""
    moved = flips(**RIGL, phases={at: change})
    assert moved[:at] == flips(**RIGL)[:at]
    assert moved[2] == 0 < moved[3] < moved[7] < moved[11]


def test_other_blocks_drop_that_gradient():
    model = layer(refresh=4, **RIGL, phases={3: dict(block=(16, 16))})
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    fxmask.guard(optimizer, model)
    for step in train(model, optimizer, 12):
        growth = model[0]._fxmask_growth
        assert growth is None or tuple(growth.shape) == ((8, 8) if step < 3 else (4, 4))
        assert step != 3 or growth is None


def test_a_dense_gradient_is_for_one_exchange():
    """Rebuilds without a new one exchange nothing, whatever the weights are by then."""
    model = layer(refresh=2, backward="rigl", dense_every=6, regrow=fxmask.Regrow("gradient", 0.3))
    optimizer, moved = optim.SGD(model.parameters(), lr=0.0), []
    fxmask.guard(optimizer, model)
    old, generator = mask_of(model), torch.Generator().manual_seed(2)
    for step in train(model, optimizer, 18):
        new = mask_of(model)
        moved += [step] if not torch.equal(new, old) else []
        old = new
        with torch.no_grad():
            model[0].weight.copy_(torch.randn(SIDE, SIDE, generator=generator) * torch.rand(SIDE, 1, generator=generator))
    assert len(moved) == 3 and all(b - a == 6 for a, b in pairwise(moved))


SOFT = dict(soft=True, schedule=fxmask.Schedule("linear", steps=40, initial=0.4))


@pytest.mark.parametrize("masked_step", [False, True])
@pytest.mark.parametrize(("config", "unused"), [({}, ()), ({}, (3, 7)), (SOFT, ())], ids=["plain", "no gradient at the exchange", "soft"])
def test_blocks_that_regrow_have_no_momenta(config, unused, masked_step):
    model = layer(refresh=4, regrow=fxmask.Regrow("random", 0.3), **config)
    optimizer, last, came = optim.Adam(model.parameters(), lr=1e-3), mask_of(model), 0
    fxmask.guard(optimizer, model, masked_step=masked_step)
    for _ in train(model, optimizer, 8, unused):
        back = elements(mask_of(model) & ~last)
        came += int(back.sum())
        assert not model[0].weight[back].any()
        assert not any(optimizer.state[model[0].weight][k][back].any() for k in ("exp_avg", "exp_avg_sq"))
        last = mask_of(model)
    assert came


@pytest.mark.parametrize("refresh", [1, 2])
def test_zero_momenta_on_return_where_the_step_has_no_gradient(refresh):
    schedule = fxmask.Schedule("cyclic", steps=16, cycles=4, initial=0.1)
    model = layer(schedule=schedule, refresh=refresh)
    optimizer, last, came = optim.Adam(model.parameters(), lr=1e-3), mask_of(model), 0
    fxmask.guard(optimizer, model, returning="zero")
    for step in train(model, optimizer, 12, unused=(3, 7, 11)):
        back = elements(mask_of(model) & ~last)
        came += int(back.sum()) if step in (4, 8, 12) else 0
        assert not optimizer.state[model[0].weight]["exp_avg"][back].any()
        last = mask_of(model)
    assert came


@pytest.mark.parametrize(("block", "other"), [((8, 8), (16, 4)), ((SIDE, 33), (SIDE, 40))])
def test_elements_that_come_back_with_other_blocks_have_no_momenta(block, other):
    model = layer(block=block, phases={1: {"block": other}})
    old = expand_mask(mask_of(model), (SIDE, SIDE), block)
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    fxmask.step(model, 0)  # masks begin, under an optimiser with a momentum of before
    fxmask.guard(optimizer, model, returning="zero")
    optimizer.state[model[0].weight]["momentum_buffer"] = torch.ones(SIDE, SIDE)
    next(train(model, optimizer, 1))
    back = expand_mask(mask_of(model), (SIDE, SIDE), other) & ~old
    assert back.any() and torch.equal(optimizer.state[model[0].weight]["momentum_buffer"] == 0, back)


def test_masked_blocks_that_learn_keep_their_momenta():
    model = layer(**SOFT)
    optimizer, last, came = optim.SGD(model.parameters(), lr=20, momentum=0.9), mask_of(model), 0
    fxmask.guard(optimizer, model, returning="zero")
    for _ in train(model, optimizer, 12):
        back = elements(mask_of(model) & ~last)
        came += int(back.sum())
        assert optimizer.state[model[0].weight]["momentum_buffer"][back].all()
        last = mask_of(model)
    assert came


def test_a_step_that_raised_leaves_no_mask_to_the_next_one():
    """Other weights are loaded, whose kept blocks have momenta, and the next step has no gradient: no block has come back."""
    model = layer()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fxmask.guard(optimizer, model, returning="zero")
    next(train(model, optimizer, 1))
    hook = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    hook.remove()
    old, other = mask_of(model), {name: p.flip(0) for name, p in model.state_dict().items()}
    model.load_state_dict(other)
    assert not torch.equal(mask_of(model), old)
    optimizer.state[model[0].weight]["momentum_buffer"].fill_(1)
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.state[model[0].weight]["momentum_buffer"].all()


def test_told_steps_leave_the_optimiser_alone():
    model = layer(refresh=4, regrow=fxmask.Regrow("random", 0.3))
    fxmask.step(model, 0)
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    for _ in train(model, optimizer, 4):
        momenta = optimizer.state[model[0].weight]["exp_avg"].clone()
        fxmask.step(model)
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], momenta)


def test_what_a_failed_exchange_would_have_brought_is_not_zeroed_later(monkeypatch):
    """Blocks come back with weights of zero where their mask is put in force: here another layer's could not be built, and then weights are loaded."""
    from fxmask.passes.state import site_mask

    torch.manual_seed(0)
    model = fxmask.apply(nn.Sequential(nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)), fxmask.WeightMask(0.5, BLOCK, refresh=2, regrow=fxmask.Regrow("random")))
    fxmask.step(model, 0)
    build = site_mask.build
    with monkeypatch.context() as patched:
        patched.setattr(site_mask, "build", lambda site, *args: 1 / 0 if site is model[1] else build(site, *args))
        with pytest.raises(ZeroDivisionError):
            fxmask.step(model, 2)
    weights = {name: torch.rand_like(p) + 1 for name, p in model.state_dict().items()}
    model.load_state_dict(weights)
    assert torch.equal(model[0].weight, weights["0.weight"])


def test_until_counts_from_the_start():
    model = layer(refresh=1, start=4, regrow=fxmask.Regrow("random", 0.3, until=4))
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    fxmask.guard(optimizer, model)
    moved, last = [], mask_of(model)
    for _ in train(model, optimizer, 9):
        moved.append(int((last & ~mask_of(model)).sum()))
        last = mask_of(model)
    assert all(moved[3:7]) and not any(moved[7:])


def test_one_block_at_least_is_never_exchanged():
    assert [fxmask.Regrow("random", 1 - 1e-9).exchanged(0, kept) for kept in (1, 2)] == [0, 1]


def test_a_number_of_numpy_is_a_number():
    numpy = pytest.importorskip("numpy")
    found = fxmask.Regrow(fraction=numpy.float32(0.5))
    assert found == fxmask.Regrow(fraction=0.5) and type(found.fraction) is float
    with pytest.raises(fxmask.FxMaskError, match=r"Regrow\.fraction .*: expected a number in \(0, 1\), got .*nan"):
        fxmask.Regrow(fraction=numpy.float32("nan"))


def test_between_exchanges_a_ratio_that_rises_empties_no_row():
    model = layer(regrow=fxmask.Regrow("random", 0.3, until=1), ratio=0.7, cover=True, schedule=fxmask.Schedule("linear", steps=4))
    with torch.no_grad():
        model[0].weight[:8] *= 1e-3  # its blocks would be the first to go
    fxmask.step(model, 0)
    for step in range(1, 6):
        fxmask.step(model)
        assert mask_of(model).any(0).all() and mask_of(model).any(1).all(), step
    assert mask_of(model)[0].sum() == 1


def test_a_weight_that_rests_exchanges_nothing_until_it_learns():
    model = layer(refresh=2, regrow=fxmask.Regrow("random", 0.3))
    old, before = mask_of(model), model.requires_grad_(False)[0].weight.clone()
    fxmask.step(model, 8)
    assert torch.equal(mask_of(model), old) and torch.equal(model[0].weight, before)
    model.requires_grad_(True)
    fxmask.step(model, 2)
    assert not torch.equal(mask_of(model), old)
