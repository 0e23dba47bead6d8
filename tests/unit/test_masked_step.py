"""fxmask.guard(masked_step=True): a step on kept blocks alone is the step of freeze, for every elementwise optimiser."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn, optim

import fxmask
from fxmask.errors import ConfigError, UnsupportedError
from fxmask.kernels.grid import expand_mask
from fxmask.passes.kept_blocks import KeptBlocks

PLAIN, FOREACH, FUSED, CAPTURABLE = dict(foreach=False), dict(foreach=True), dict(fused=True), dict(foreach=True, capturable=True)
OPTIMISERS = {
    "SGD": (optim.SGD, dict(lr=0.1), (PLAIN, FOREACH, FUSED)),
    "SGD-momentum": (optim.SGD, dict(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1), (PLAIN, FOREACH, FUSED)),
    "SGD-nesterov": (optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True, maximize=True), (PLAIN, FOREACH, FUSED)),
    "Adam": (optim.Adam, dict(lr=0.01, weight_decay=0.1), (PLAIN, FOREACH, FUSED)),
    "Adam-amsgrad": (optim.Adam, dict(lr=0.01, weight_decay=0.1, amsgrad=True, maximize=True), (PLAIN, FOREACH, FUSED)),
    "AdamW": (optim.AdamW, dict(lr=0.01, weight_decay=0.1), (PLAIN, FOREACH, FUSED)),
    "AdamW-tensor-lr": (optim.AdamW, dict(lr=torch.tensor(0.01), weight_decay=0.1), (PLAIN, FUSED)),
    "NAdam": (optim.NAdam, dict(lr=0.01, weight_decay=0.1), (PLAIN, FOREACH)),
    "RAdam": (optim.RAdam, dict(lr=0.01, weight_decay=0.1), (PLAIN, FOREACH)),
    "Adamax": (optim.Adamax, dict(lr=0.01, weight_decay=0.1), (PLAIN, FOREACH)),
    "Adagrad": (optim.Adagrad, dict(lr=0.01, weight_decay=0.1, initial_accumulator_value=0.1), (PLAIN, FOREACH, FUSED)),
    "Adadelta": (optim.Adadelta, dict(lr=0.5, weight_decay=0.1), (PLAIN, FOREACH)),
    "RMSprop": (optim.RMSprop, dict(lr=0.01, weight_decay=0.1, momentum=0.5, centered=True), (PLAIN, FOREACH)),
    "Rprop": (optim.Rprop, dict(lr=0.01), (PLAIN, FOREACH)),
    "ASGD": (optim.ASGD, dict(lr=0.01, weight_decay=0.1, t0=5), (PLAIN, FOREACH)),
}
EVERY = [
    pytest.param(cls, {**options, **form}, id=f"{name}-{'-'.join(f'{k}-{v}' for k, v in form.items())}")
    for name, (cls, options, forms) in OPTIMISERS.items()
    for form in forms
]
RAMP = dict(ratio=0.7, block=(16, 16), schedule=fxmask.Schedule("cubic", 15))


def net():
    """Weights of whole blocks, and ragged ones: in rows, in columns, in both."""
    return nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 40), nn.Tanh(), nn.Linear(40, 37), nn.Tanh(), nn.Linear(37, 32))


def build(cls, options, make=net, groups=None, **config):
    torch.manual_seed(0)
    model = fxmask.apply(make(), **{**RAMP, **config})
    options = {k: v.clone() if torch.is_tensor(v) else v for k, v in options.items()}
    return model, cls(model.parameters() if groups is None else groups(model), **options)


def train(model, optimiser, steps, each=lambda i: None, seed=1):
    torch.manual_seed(seed)
    for i in range(steps):
        optimiser.zero_grad()
        model(torch.randn(8, 32)).square().mean().backward()
        optimiser.step()
        each(i)


def pair(cls, options, returning="keep", **config):
    """The same run twice: under freeze, and with the masked step."""
    runs = []
    for masked_step in (False, True):
        model, optimiser = build(cls, options, **config)
        handle = fxmask.guard(optimiser, model, returning=returning, masked_step=masked_step)
        assert handle.masked_step is masked_step and set(handle.policies.values()) == {"freeze"}
        runs.append((model, optimiser))
    return runs


def same(ours, theirs):
    """Weights and state of two runs, to rounding, with the same names, shapes and dtypes."""
    for (name, p), q in zip(ours[0].named_parameters(), theirs[0].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7, msg=name)
        a, b = ours[1].state.get(p, {}), theirs[1].state.get(q, {})
        assert list(a) == list(b), name
        for key in a:
            assert type(a[key]) is type(b[key]), (name, key)
            if torch.is_tensor(a[key]):
                torch.testing.assert_close(a[key], b[key], rtol=1e-5, atol=1e-7, msg=f"{name} {key}")


def masked_now(model):
    weights = dict(model.named_parameters())
    return {name: ~expand_mask(mask, weights[name].shape, (16, 16)) for name, mask in fxmask.masks(model).items()}


def frozen(model, optimiser, out):
    """Copies of what a step must not touch: masked elements of weights, and of momenta that there are."""
    found = {}
    for name, p in model.named_parameters():
        if name in out:
            found[name] = p.detach()[out[name]]
            found |= {(name, k): t[out[name]].clone() for k, t in optimiser.state.get(p, {}).items() if torch.is_tensor(t) and t.shape == p.shape}
    return found


@pytest.mark.parametrize(("cls", "options"), EVERY)
def test_it_is_freeze(cls, options):
    """20 steps of a cubic ramp whose masks move: freeze's weights and state to rounding; masked weights and momenta keep their bits."""
    theirs, ours = pair(cls, options)
    model, optimiser = ours
    first, moved, ratios = masked_now(model), 0, set()
    torch.manual_seed(1)
    for _ in range(20):
        out = masked_now(model)
        ratios.add(tuple(int(o.sum()) for o in out.values()))
        before = frozen(model, optimiser, out)
        optimiser.zero_grad()
        model(torch.randn(8, 32)).square().mean().backward()
        optimiser.step()
        after = frozen(model, optimiser, out)
        assert all(torch.equal(after[k], t) for k, t in before.items())
        moved += sum(int((p.detach() != 0).sum()) for p in model.parameters())
    train(*theirs, 20)
    same(ours, theirs)
    assert fxmask.explain(model).rows[0]["step"] == 20 and len(ratios) > 5
    last = masked_now(model)
    assert any((first[n] & ~last[n]).any() or (last[n] & ~first[n]).any() for n in last) and moved
