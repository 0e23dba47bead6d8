"""WeightMask on Conv2d in training and after it: guard, schedules, states, finalize and copies treat it as a Linear."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from unit.conv_models import BLOCK, BOTH, images, masked, net

import fxmask
from fxmask import Feedback, Regrow, Schedule
from fxmask.errors import FxMaskWarning, StateError, UnsupportedError
from fxmask.kernels.grid import as_matrix, expand_mask
from fxmask.swap import MaskedLayer

# ---- training --------------------------------------------------------------------------------------------------------------------------------------------


OPTIMIZERS = {"sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1)}


def train(model, optimizer, steps=4):
    for i in range(steps):
        optimizer.zero_grad()
        model(images(n=2 + i)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_frozen_and_masked_steps_leave_the_same_bits(name, last):
    ends = []
    for masked_step in (False, True):
        model = masked(BOTH, net().to(memory_format=torch.channels_last) if last else None, refresh=0)
        before = copy.deepcopy(model.state_dict())
        optimizer = OPTIMIZERS[name](model.parameters())
        fxmask.guard(optimizer, model, masked_step=masked_step)
        train(model, optimizer)
        for key, mask in fxmask.masks(model).items():
            kept, w = expand_mask(mask, before[key].shape, BLOCK), model.get_parameter(key)
            assert torch.equal(w[~kept], before[key][~kept]) and (w[kept] != before[key][kept]).any()
            assert w.stride() == before[key].stride()
            assert all(not t[~kept].any() for t in optimizer.state[w].values() if t.shape == w.shape)
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        dict(schedule=Schedule("cubic", steps=3), refresh=2), dict(criterion="taylor"), dict(criterion="momentum"),
        dict(criterion="movement", average=0.5, backward="ste"),
        dict(backward="rigl", regrow=Regrow("gradient", 0.3), dense_every=1), dict(regrow=Regrow("random", 0.3)), dict(criterion="linf", cover=True),
        dict(criterion="spectral", average=0.9, hysteresis=0.2), dict(criterion="random"), dict(gain=True, schedule=Schedule("linear", steps=3)),
        dict(schedule=Feedback("flip_rate", every=1, goal=0.5)), dict(phases={2: dict(block=(4, 9), backward="ste")}),
    ],
    ids=lambda o: "-".join(o),
)  # fmt: skip
def test_every_option_trains_saves_and_resumes_to_the_same_bits(options):
    def start():
        model = masked(**options)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        return model, optimizer

    model, optimizer = start()
    fxmask.guard(optimizer, model)
    train(model, optimizer, 3)
    file = io.BytesIO()
    torch.save([model.state_dict(), fxmask.state_dict(model), optimizer.state_dict()], file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, second = start()
    other.load_state_dict(saved[0])
    fxmask.load_state_dict(other, saved[1])
    second.load_state_dict(saved[2])
    fxmask.guard(second, other)
    for m, o in ((model, optimizer), (other, second)):
        train(m, o, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(fxmask.masks(model).values(), fxmask.masks(other).values(), strict=True))
    for name, site in ((n, m) for n, m in model.named_modules() if isinstance(m, MaskedLayer)):
        c, mask = site._fxmask_config, fxmask.masks(model)[f"{name}.weight"]
        assert c.schedule is not None or int(mask.sum()) == c.keep_at(5, mask.numel())


def test_fxmask_step_counts_and_training_without_a_count_raises():
    model = masked(nn.Conv2d, schedule=Schedule("linear", steps=4))
    with pytest.raises(StateError, match="count optimiser steps"):
        model(images())
    fxmask.step(model, 2)
    assert int(fxmask.masks(model)["4.weight"].sum()) == 27
    model(images())
    with fxmask.dense(model):
        assert torch.equal(model(images()), net()(images()))


def test_health_and_explain_say_the_same_of_a_convolution():
    model = masked(nn.Conv2d)
    log = fxmask.HealthLog(model)
    rows = {r["name"]: r for r in log.update().rows}
    w, kept = model[4].weight.detach(), expand_mask(fxmask.masks(model)["4.weight"], (16, 288), BLOCK)
    assert rows["4.weight"]["kept_norm_fraction"] == pytest.approx(float((as_matrix(w) * kept).square().sum() / w.square().sum()), rel=1e-12)
    assert rows["4.weight"]["dead_cols"] == pytest.approx(float((~kept.any(0)).double().mean()))
    assert fxmask.explain(model, health=True).rows[2]["kept_norm_fraction"] == rows["4.weight"]["kept_norm_fraction"]


@pytest.mark.filterwarnings("ignore:allocation by:fxmask.FxMaskWarning")
def test_allocation_shares_out_convolutions():
    found = fxmask.allocate(net(), 0.5, "erk", block=BLOCK, layers=BOTH)
    assert list(found) == ["0", "2", "4", "6", "8"] and found.spent == found.budget == sum(found.kept.values())
    # Erdős-Rényi-Kernel: the sum of the axes over their product, where no layer is full
    free = [n for n in found if found.kept[n] < found.blocks[n]]
    density = {"0": 34 / 864, "2": 58 / 768, "4": 54 / 4608, "6": 44 / 1536, "8": 116 / 1920}
    share = [found.kept[n] / (found.blocks[n] * density[n]) for n in free]
    assert len(free) >= 2 and max(share) / min(share) < 1.25
    by_flop = fxmask.allocate(net(), 0.5, "flop", block=BLOCK, layers=BOTH, inputs=images())
    pixels = {"0": 64, "2": 16, "4": 16, "6": 4, "8": 1}
    sizes = {"0": 864, "2": 768, "4": 4608, "6": 1536, "8": 1920}
    assert by_flop.total == sum(2 * 3 * pixels[n] * sizes[n] for n in pixels) and by_flop.spent <= by_flop.budget
    kept = fxmask.masks(fxmask.apply(net(), ratio=0.5, block=BLOCK, layers=BOTH, allocation="global"))
    assert sum(int(m.sum()) for m in kept.values()) == -(-sum(m.numel() for m in kept.values()) // 2)


# ---- and back --------------------------------------------------------------------------------------------------------------------------------------------


def test_copies_pickles_and_dense_checkpoints():
    dense = net()
    model = masked(BOTH, copy.deepcopy(dense), refresh=0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other[0]) is type(model[0]) and torch.equal(other(images()), model(images()))
        fxmask.restore(other)
        assert type(other[0]) is nn.Conv2d and torch.equal(other(images()), dense(images()))
    assert model.load_state_dict({k: v + 1 for k, v in dense.state_dict().items()}, strict=True) and list(model.state_dict()) == list(dense.state_dict())
    model.load_state_dict(dense.state_dict(), strict=True)
    fxmask.restore(model)
    assert all(type(a) is type(b) for a, b in zip(model.modules(), dense.modules(), strict=True)) and torch.equal(model(images()), dense(images()))
    assert not [k for m in model.modules() for k in m.__dict__ if k.startswith("_fxmask")]


def test_finalize_writes_zeros_into_convolutions():
    model = masked()
    y, kept = model(images()), fxmask.masks(model)
    fxmask.finalize(model)
    assert type(model[0]) is nn.Conv2d and fxmask.masks(model) == {} and torch.equal(model(images()), y)
    assert all(bool((model.get_parameter(n) == 0)[~expand_mask(m, model.get_parameter(n).shape, BLOCK)].all()) for n, m in kept.items())
    for format in ("bsr", "2:4"):
        with pytest.raises(UnsupportedError, match="in Linears alone: got a convolution"):
            fxmask.finalize(masked(), format=format)


def test_a_trace_keeps_its_convolution_modules_and_leaves_calls_of_functions():
    dense = net()
    gm = fxmask.apply(torch.fx.symbolic_trace(copy.deepcopy(dense)), ratio=0.5, block=BLOCK, layers=BOTH)
    same = masked(BOTH, copy.deepcopy(dense))
    assert fxmask.masks(gm).keys() == fxmask.masks(same).keys() and torch.equal(gm(images()), same(images()))
    assert torch.equal(fxmask.restore(gm)(images()), dense(images()))
    with pytest.raises(UnsupportedError, match="symbolic_trace of a masked model"):
        torch.fx.symbolic_trace(same)
    exported = torch.export.export(dense, (images(),)).module()
    with pytest.warns(FxMaskWarning, match="stays dense: a convolution call in a traced graph"):
        fxmask.apply(exported, ratio=0.5, block=BLOCK, layers=BOTH)
    rows = {r["name"]: (r["masked"], r["reason"][:33]) for r in fxmask.explain(exported).rows}
    assert rows == {**{str(i): (False, "a convolution call in a traced gr") for i in (0, 2, 4, 6)}, "8": (True, "selected")}
