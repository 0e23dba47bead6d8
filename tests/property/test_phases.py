"""Phases of any kind and order: the masks of each step, and a run that is saved and loaded anywhere on its way."""

import dataclasses
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property.often import examples
from sample_models import mlp

import fxmask
from fxmask.errors import ConfigError

VALUES = {
    "block": st.sampled_from([(8, 8), (16, 16), (32, 8), (24, 20)]),
    "backward": st.sampled_from(["masked", "ste", "unmasked", "rigl"]),
    "criterion": st.sampled_from(["fro", "l1", "random"]),
    "refresh": st.sampled_from([1, 1, 2, 3]),
    "cover": st.booleans(),
}
LAST = 10


@st.composite
def configs(draw):
    """Valid configs with up to four phases; a phase that would change nothing is left out."""
    options = {name: draw(values) for name, values in VALUES.items()}
    schedule = draw(st.sampled_from([None, fxmask.Schedule("linear", steps=7), fxmask.Schedule("cyclic", steps=8, cycles=2, initial=0.2)]))
    c = fxmask.WeightMask(ratio=0.5, start=draw(st.integers(0, 3)), schedule=schedule, **options)
    for step in sorted(draw(st.sets(st.integers(1, LAST), max_size=4))):
        changes = {name: draw(VALUES[name]) for name in draw(st.sets(st.sampled_from(list(VALUES)), min_size=1))}
        if all(values_at(c, step)[name] == value for name, value in changes.items()):
            with pytest.raises(ConfigError, match=rf"phases\[{step}\] changes nothing"):
                dataclasses.replace(c, phases=(*(c.phases or ()), (step, tuple(changes.items()))))
            continue
        c = dataclasses.replace(c, phases=(*(c.phases or ()), (step, tuple(changes.items()))))
    return c


def values_at(c, step):
    """The definition, in a loop of its own."""
    found = {name: getattr(c, name) for name in VALUES}
    for first, changes in c.phases or ():
        if first <= step:
            found.update(changes)
    return found


def moved(model, step):
    """Other weights after each step."""
    noise = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.data.add_(torch.randn(p.shape, generator=noise), alpha=0.03)


def step(model, i):
    moved(model, i)
    fxmask.step(model)


def plain(c, values, **more):
    return fxmask.WeightMask(ratio=c.ratio, start=c.start, schedule=c.schedule, **{**values, **more})


@given(configs())
@examples(12)
def test_each_step_has_the_masks_of_its_phase(c):
    """Those of a model that had its phase's values all along, built when the phase says so."""
    model, built = fxmask.apply(mlp(), c), 0
    fxmask.step(model, 0)
    weights = {n: model.get_parameter(n).detach().clone() for n in fxmask.masks(model)}
    for i in range(LAST):
        now, past = values_at(c, i), values_at(c, i - 1)
        due = i >= c.start and (i - c.start) % now["refresh"] == 0
        entered = any(now[k] != past[k] for k in now if k != "backward")
        if due or entered:
            built = i
            weights = {n: model.get_parameter(n).detach().clone() for n in weights}
        twin = fxmask.apply(mlp(), plain(c, now, refresh=1))
        with torch.no_grad():
            for n, w in weights.items():
                twin.get_parameter(n).copy_(w)
        fxmask.step(twin, built)
        for (name, a), b in zip(fxmask.masks(model).items(), fxmask.masks(twin).values(), strict=True):
            assert torch.equal(a, b), (i, name, now)
        row = fxmask.explain(model).rows[0]
        assert (row["block"], row["backward"]) == ("x".join(map(str, now["block"])), now["backward"])
        step(model, i)


@given(configs(), st.integers(0, LAST), st.integers(0, LAST))
@examples(12)
def test_a_save_changes_nothing(c, cut, other):
    """Loaded by a run that is anywhere else, in another phase perhaps."""
    first, second = fxmask.apply(mlp(), c), fxmask.apply(mlp(1), c)
    fxmask.step(first, 0)
    for i in range(cut):
        step(first, i)
    fxmask.step(second, other)
    torch.save((first.state_dict(), fxmask.state_dict(first)), buffer := io.BytesIO())
    weights, state = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    second.load_state_dict(weights)
    fxmask.load_state_dict(second, state)
    for i in range(cut, LAST + 2):
        for (name, a), b in zip(fxmask.masks(first).items(), fxmask.masks(second).values(), strict=True):
            assert torch.equal(a, b), (i, name)
        x = torch.randn(2, 64, generator=torch.Generator().manual_seed(i))
        assert torch.equal(first(x), second(x))
        step(first, i)
        step(second, i)


@given(configs())
@examples(60)
def test_it_is_plain_frozen_and_its_own_input(c):
    assert fxmask.WeightMask(**{f.name: getattr(c, f.name) for f in dataclasses.fields(c)}) == c and hash(c) == hash(dataclasses.replace(c))
    assert dataclasses.replace(c, phases={s: dict(new) for s, new in c.phases or ()}) == c
