"""Steps that `fxmask.step(model, 0)` announced and nobody tells: a ramp stands at its beginning, densely, and a warning says so."""

import gc
import warnings

import pytest
import torch
from torch import nn

import fxmask
from fxmask import untold
from fxmask.errors import FxMaskWarning

RAMP = {"schedule": fxmask.Schedule("linear", steps=50)}
NEVER = r"fxmask.step\(model, 0\) has announced that steps will be told: expected fxmask.step\(model\) after every optimizer.step\(\), got none in 11"


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))


def train(model, steps, tell=None, parameters=None, x=None):
    optimizer = torch.optim.SGD(model.parameters() if parameters is None else parameters, lr=0.01)
    for i in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 32) if x is None else x).square().mean().backward()
        optimizer.step()
        if tell is not None:
            tell(i)


CASES = {
    "ramp": (lambda m: fxmask.apply(m, ratio=0.5, block=(8, 8), **RAMP), "0.weight, 2.weight"),
    "refresh": (lambda m: fxmask.apply(m, ratio=0.5, block=(8, 8), refresh=5), "0.weight, 2.weight"),
    "trace": (lambda m: fxmask.apply(torch.fx.symbolic_trace(m), ratio=0.5, block=(8, 8), **RAMP), "0.weight, 2.weight"),
    "inputs": (lambda m: fxmask.apply(m, fxmask.ActivationPruning(ratio=0.5, block=8, **RAMP)), "0.weight, 2.weight"),
    "tau": (lambda m: fxmask.apply(m, fxmask.NMMask(mode="learned", tau_from=4.0, tau_steps=50)), "0.weight, 2.weight"),
}


class Gated(nn.Module):
    """A product with a parameter."""

    def __init__(self):
        super().__init__()
        self.fc, self.gamma = nn.Linear(32, 32), nn.Parameter(torch.ones(32))

    def forward(self, x):
        return self.fc(x) * self.gamma


class Branched(nn.Module):
    """A linear in a branch."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(32, 32)

    def forward(self, x):
        return torch.cond(x.sum() > -1e9, lambda x: self.fc(x) * 1.0, lambda x: self.fc(x) * 2.0, (x,))


class Counted(nn.Module):
    """A parametrisation that counts its calls."""

    calls = 0

    def forward(self, w):
        Counted.calls += 1
        return w


class Over(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("case", CASES)
def test_none_is_told(case):
    make, names = CASES[case]
    model = make(net())
    fxmask.step(model, 0)
    train(model, 10)  # without a word
    with pytest.warns(FxMaskWarning, match=rf"{NEVER}(?s:.)*where: {names}\n") as caught:
        train(model, 1)
    assert len(caught) == 1 and caught[0].filename == __file__
    train(model, 12)  # once


@pytest.mark.parametrize(("case", "at"), [("ramp", ", at ratio 0 instead of 0.5."), ("refresh", ".")])
def test_where_it_stands(case, at):
    model = CASES[case][0](net())
    fxmask.step(model, 0)
    with pytest.warns(FxMaskWarning) as caught:
        train(model, 11)
    assert f"What counts steps stands still{at}\n" in str(caught[0].message)


def test_a_computed_weight_is_not_computed_for_this():
    model = net()
    nn.utils.parametrize.register_parametrization(model[0], "weight", Counted())
    fxmask.apply(model, ratio=0.5, block=(8, 8), **RAMP)
    fxmask.step(model, 0)
    train(model, 10)
    before = Counted.calls
    with pytest.warns(FxMaskWarning, match=rf"{NEVER}(?s:.)*where: 0.weight, 2.weight\n"):
        train(model, 1)
    assert Counted.calls - before == 1  # by the forward


def test_a_product_with_a_parameter():
    config = fxmask.ActivationPruning(ratio=0.5, block=8, affine=True, **RAMP)
    gm = fxmask.apply(torch.fx.symbolic_trace(Gated()), config)
    fxmask.step(gm, 0)
    with pytest.warns(FxMaskWarning, match=rf"{NEVER}(?s:.)*where: fc.weight, gamma\n"):
        train(gm, 11)


def test_a_body_of_control_flow():
    gm = fxmask.apply(torch.export.export(Branched(), (torch.randn(8, 32),)).module(), ratio=0.5, block=(8, 8), **RAMP)
    fxmask.step(gm, 0)
    train(gm, 11, lambda i: fxmask.step(gm))


def test_a_root_that_is_gone():
    model = fxmask.apply(net(), ratio=0.5, block=(8, 8), **RAMP)
    fxmask.step(nn.ModuleList([model]), 0)
    with pytest.warns(FxMaskWarning, match=NEVER):
        train(model, 11)


def test_announced_anew_each_epoch():
    model = fxmask.apply(net(), ratio=0.5, block=(8, 8), **RAMP)
    for _ in range(2):
        fxmask.step(model, 0)
        train(model, 5)
    fxmask.step(model, 0)
    with pytest.warns(FxMaskWarning, match=NEVER):
        train(model, 1)


def test_a_part_is_told():
    model = fxmask.apply(net(), ratio=0.5, block=(8, 8), **RAMP)
    fxmask.step(model, 0)
    with pytest.warns(FxMaskWarning, match=rf"{NEVER}(?s:.)*where: 2.weight\n"):
        train(model, 11, lambda i: fxmask.step(model[0]))


def test_one_of_two_models_is_told():
    model, other = (fxmask.apply(net(), ratio=0.5, block=(8, 8), **RAMP) for _ in range(2))
    both = nn.ModuleList([model, other])
    both.forward = lambda x: model(x) + other(x)
    fxmask.step(model, 0), fxmask.step(other, 0)
    with pytest.warns(FxMaskWarning, match=NEVER) as caught:
        train(both, 11, lambda i: fxmask.step(model))
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("announce", "tell"),
    [
        (lambda m: fxmask.step(m, 0), lambda m, i: fxmask.step(m)),
        (lambda m: fxmask.step(m, 0), lambda m, i: (i + 1) % 4 or fxmask.step(m, 4)),
        (lambda m: fxmask.load_state_dict(m, fxmask.state_dict(m)) or fxmask.step(m, 0), lambda m, i: fxmask.step(m)),
    ],
    ids=["each", "four-at-once", "resumed"],
)
def test_told_steps_say_nothing(announce, tell):
    model = fxmask.apply(net(), ratio=0.5, block=(8, 8), **RAMP)
    announce(model)
    train(model, 24, lambda i: tell(model, i))  # a warning would be an error here
    assert fxmask.explain(model).rows[0]["step"] == 24


def test_without_a_guard_on_purpose():
    """As the warning of a guard that is gone recommends."""
    model = fxmask.apply(net(), ratio=0.5, block=(8, 8), schedule=fxmask.Schedule("linear", steps=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    handle = fxmask.guard(optimizer, model)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 32)).sum().backward()
        optimizer.step()
    handle.remove()
    fxmask.step(model, 0)
    train(model, 12)


def test_steps_inside_of_steps_count_once():
    model = fxmask.apply(net(), ratio=0.5, block=(8, 8), **RAMP)
    fxmask.step(model, 0)
    torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = Over(model.parameters(), lr=0.01)
    for i in range(16):
        optimizer.zero_grad()
        model(torch.randn(8, 32)).sum().backward()
        optimizer.step()
        if i % 8 == 7:
            fxmask.step(model, 8)


def test_weights_that_rest_make_no_steps():
    model = fxmask.apply(net(), ratio=0.5, block=(8, 8), **RAMP)
    fxmask.step(model, 0)
    model.requires_grad_(False)
    head = nn.Linear(32, 32)
    train(nn.Sequential(model, head), 12)


def test_others_steps_and_what_counts_nothing_say_nothing():
    model, other = fxmask.apply(net(), ratio=0.5, block=(8, 8), **RAMP), net()
    fxmask.step(model, 0)
    train(nn.Sequential(model, other), 12, parameters=other.parameters())  # its weights rest
    plain = fxmask.apply(net(), ratio=0.5, block=(8, 8))
    fxmask.step(plain, 0)
    train(plain, 12)


def test_a_layer_that_rests_for_long_is_watched_no_more(monkeypatch):
    monkeypatch.setattr(untold, "FOREIGN", 3)
    model, other = fxmask.apply(net(), ratio=0.5, block=(8, 8), **RAMP), net()
    fxmask.step(model, 0)
    train(nn.Sequential(model, other), 4, parameters=other.parameters())
    train(model, 12)  # any warning is an error here


def test_a_guard_that_comes_counts():
    model = fxmask.apply(net(), ratio=0.5, block=(8, 8), **RAMP)
    fxmask.step(model, 0)
    train(model, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fxmask.guard(optimizer, model)
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.randn(8, 32)).sum().backward()
        optimizer.step()
    assert fxmask.explain(model).rows[0]["step"] == 12


def test_another_weight_in_its_place_and_a_model_that_is_gone():
    model = fxmask.apply(net(), ratio=0.5, block=(8, 8), **RAMP)
    fxmask.step(model, 0)
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    with pytest.warns(FxMaskWarning, match=NEVER):
        train(model, 11)
    gone = fxmask.apply(net(), ratio=0.5, block=(8, 8), **RAMP)
    fxmask.step(gone, 0)
    fxmask.restore(gone)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(gone, 12)


def test_a_model_that_goes_meanwhile_is_passed_over(monkeypatch):
    """The collector, or another thread, may take one whose step has just been looked for."""
    models = [fxmask.apply(net(), ratio=0.5, block=(8, 8), **RAMP) for _ in range(2)]
    fxmask.step(models[0], 0)
    fxmask.step(models[1], 0)
    optimizer, told = torch.optim.SGD(models[0].parameters(), lr=0.01), untold._told
    models[0](torch.randn(8, 32)).sum().backward()

    def asked(m):
        if len(models) == 2:
            del models[1]
            gc.collect()
        return told(m)

    monkeypatch.setattr(untold, "_told", asked)
    optimizer.step()
    assert len(models) == 1


def test_steps_without_a_gradient_of_a_layer_are_none_of_it():
    model = fxmask.apply(net(), ratio=0.5, block=(8, 8), refresh=5)
    fxmask.step(model, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(untold.PATIENCE + 2):
        optimizer.step()
