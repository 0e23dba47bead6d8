"""Feedback of any kind and any reports: bounds, directions, budgets, and a run that is saved anywhere on its way."""

import dataclasses
import io
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from property.often import examples
from sample_models import mlp
from torch import nn

import fxmask
from fxmask.errors import ConfigError
from fxmask.kernels.grid import RATIO_UNIT, ratio_units

pytestmark = pytest.mark.filterwarnings("ignore:no block can be masked", "ignore:a budget that masks nothing")  # small ratios, large budgets

RATIOS = st.one_of(st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999]), st.floats(0, 0.999))
CHANGES = st.one_of(st.sampled_from([0.05, 0.1, 0.3]), st.floats(1e-3, 0.99))
LOSSES = st.one_of(st.integers(-3, 3).map(float), st.floats(-1e6, 1e6))


@st.composite
def feedbacks(draw, measure, **options):
    """(a feedback, the ratio of its mask)"""
    initial, target = sorted((draw(RATIOS), draw(RATIOS)))
    return fxmask.Feedback(measure, **{"every": draw(st.integers(1, 3)), "initial": initial, "change": draw(CHANGES), **options}), target


def one_layer(f, target, **options):
    torch.manual_seed(0)
    model = fxmask.apply(nn.Sequential(nn.Linear(32, 32)), fxmask.WeightMask(ratio=target, block=(8, 8), schedule=f, **options), exclude=())
    fxmask.step(model, 0)
    return model


def ratio(model):
    return next(r["target_ratio"] for r in fxmask.explain(model).rows)


@given(feedbacks("loss"))
@examples(200)
def test_levels_lead_from_the_initial_ratio_to_the_target(given_):
    f, target = given_
    top = f.levels(target)
    path = [f.ratio_of(level, target) for level in (*range(-1, min(top, 60) + 1), top - 1, top, top + 1, 10**9)]
    assert path[0] == path[1] == (f.initial if top else target) and path[-1] == path[-2] == f.ratio_of(top, target) == target
    assert all(f.initial <= r <= target or ratio_units(f.initial) == ratio_units(target) for r in path)
    assert top == 0 or ratio_units(f.ratio_of(top - 1, target)) < ratio_units(target)
    for level in range(min(top, 60)):
        assert ratio_units(f.ratio_of(level, target)) == ratio_units(f.initial) + level * ratio_units(f.change)


def by_hand(f, target, losses):
    """The rule in plain Python: the ratio in units after each report."""
    low, high, change = ratio_units(f.initial), ratio_units(target), ratio_units(f.change)
    level, best, found, since = 0, None, [], []
    for loss in losses:
        since.append(loss)
        if len(since) == f.every:
            mean, since = sum(since, 0.0) / f.every, []
            goal = f.goal if f.goal is not None else best
            level += 1 if goal is None or mean <= goal + f.tolerance * abs(goal) else -1
            level = max(0, min(level, math.ceil((high - low) / change)))
            best = mean if best is None else min(best, mean)
        found.append(min(high, low + level * change))
    return found


@given(feedbacks("loss"), st.lists(st.tuples(LOSSES, st.booleans()), max_size=12), st.sampled_from([0.0, 0.1, 1.0]), st.one_of(st.none(), LOSSES))
@examples(40)
def test_any_reports(given_, reports, tolerance, goal):
    """Each a loss, and whether a step comes before the next."""
    f, target = given_
    f = dataclasses.replace(f, tolerance=tolerance, goal=goal)
    model, expected = one_layer(f, target), by_hand(f, target, [loss for loss, _ in reports])
    before = ratio_units(f.initial)
    for (loss, stepped), units in zip(reports, expected, strict=True):
        announced = fxmask.feedback(model, loss)["0.weight"]
        assert ratio_units(ratio(model)) == before and ratio_units(announced) == units  # not before the step
        if not stepped:
            continue
        fxmask.step(model)
        assert ratio_units(ratio(model)) == units
        assert int(fxmask.masks(model)["0.weight"].sum()) == max(1, -(-16 * (RATIO_UNIT - units) // RATIO_UNIT))
        before = units


def moved(model, strength, seed):
    noise = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data.add_(torch.randn(p.shape, generator=noise), alpha=strength)


@given(feedbacks("flip_rate", goal=0.2), st.lists(st.sampled_from([0.0, 0.0, 0.1, 1.0]), min_size=4, max_size=14), st.integers(0, 3), st.booleans())
@examples(15)
def test_any_flips(given_, strengths, start, cached):
    """Monotone, within bounds; a rise follows a look with fewer flips than the goal, and no rise one with more."""
    f, target = given_
    model = one_layer(f, target, start=start, refresh=f.every if cached else 1)
    found, looked, level = [], None, 0
    for i, strength in enumerate(strengths):
        moved(model, strength, i)
        before = ratio(model)
        fxmask.step(model)
        now = ratio(model)
        if i + 1 >= start and (i + 1 - start) % f.every == 0:
            # the mask of the look: that of the ratio before it rose
            mask = fxmask.masks(one_layer_at(model, f.ratio_of(level, target)))["0.weight"]
            if looked is not None:
                flips = int((mask != looked).sum()) - abs(int(mask.sum()) - int(looked.sum()))
                level = min(level + (flips / 16 < 0.2), f.levels(target))
            looked = mask
        elif i + 1 > start:
            assert now == before
        expected = f.ratio_of(level, target) if i + 1 >= start else 0.0
        assert now == expected
        found.append(now)
    assert all(a <= b <= target for a, b in pairwise(found))


def one_layer_at(model, target):
    twin = one_layer(None, target)
    twin.load_state_dict(model.state_dict())
    return twin


SHAPES = st.lists(st.tuples(st.integers(1, 70), st.integers(1, 70)), min_size=1, max_size=4)
BLOCKS = st.tuples(st.sampled_from([4, 8, 16, 20]), st.sampled_from([4, 8, 16]))


@given(feedbacks("bytes", goal=1), SHAPES, BLOCKS, st.floats(0, 1.1), st.sampled_from([torch.float32, torch.bfloat16]))
@examples(50)
def test_a_budget_is_met_and_hardly_more_or_told(given_, shapes, block, share, dtype):
    f, target = given_
    layers = [nn.Linear(k, n, bias=False, dtype=dtype) for n, k in shapes]
    whole = sum(m.weight.numel() * m.weight.element_size() for m in layers)
    f = dataclasses.replace(f, goal=max(1, int(share * whole)))

    def spent(units):
        """Bytes by the definition: blocks count as whole ones, up to the weight."""
        total = 0
        for (n, k), m in zip(shapes, layers, strict=True):
            blocks, size = -(-n // block[0]) * -(-k // block[1]), m.weight.element_size()
            kept = max(1, -(-blocks * (RATIO_UNIT - min(units, ratio_units(target))) // RATIO_UNIT))
            total += min(kept * min(block[0], n) * min(block[1], k), n * k) * size
        return total

    apply = lambda: fxmask.apply(nn.ModuleList(layers), fxmask.WeightMask(ratio=target, block=block, schedule=f), exclude=())  # noqa: E731
    if spent(ratio_units(target)) > f.goal:
        with pytest.raises(ConfigError, match=rf"a budget that cannot be met: expected at most {f.goal:,} bytes .*, got {spent(ratio_units(target)):,} of"):
            apply()
        return
    model = apply()
    steps = f.every * (f.levels(target) + 1)
    path = []
    for _ in range(min(steps, 40)):
        path.append(ratio(model))
        fxmask.step(model)
    assert all(f.initial <= a <= b <= target for a, b in pairwise(path))
    fxmask.step(model, steps)
    kept = 0
    for name, mask in fxmask.masks(model).items():
        w = model.get_parameter(name)
        elements = mask.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: w.shape[0], : w.shape[1]]
        kept += int(elements.sum()) * w.element_size()
    end = ratio_units(ratio(model))
    assert kept <= spent(end) <= f.goal
    assert end == ratio_units(f.initial) or spent(end - 1) > f.goal  # a billionth less would be too much


@given(feedbacks("loss"), st.lists(st.tuples(st.booleans(), LOSSES), min_size=1, max_size=10), st.integers(0, 9), st.sampled_from([1, 2]))
@examples(12)
def test_a_save_changes_nothing(given_, events, cut, refresh):
    """Anywhere between reports and steps: each event is a report with its loss, or a step."""
    f, target = given_
    assume(cut < len(events))
    model, twin = (fxmask.apply(mlp(seed), fxmask.WeightMask(ratio=target, block=(16, 16), schedule=f, refresh=refresh)) for seed in (0, 1))
    for i, (is_report, loss) in enumerate(events):
        if i == cut:
            torch.save((model.state_dict(), fxmask.state_dict(model)), buffer := io.BytesIO())
            weights, state = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
            twin.load_state_dict(weights)
            fxmask.load_state_dict(twin, state)
        for m in (model, twin) if i >= cut else (model,):
            fxmask.feedback(m, loss) if is_report else fxmask.step(m)
    assert all(torch.equal(m, fxmask.masks(twin)[n]) for n, m in fxmask.masks(model).items())
    ours, theirs = fxmask.state_dict(model)["masks"], fxmask.state_dict(twin)["masks"]
    assert all(ours[n]["feedback"] == theirs[n]["feedback"] and ours[n]["step"] == theirs[n]["step"] for n in ours)


@given(feedbacks("loss"))
@examples(30)
def test_it_is_plain_and_frozen(given_):
    f, _ = given_
    assert fxmask.Feedback(**dataclasses.asdict(f)) == f and hash(f) == hash(dataclasses.replace(f))
    with pytest.raises(dataclasses.FrozenInstanceError):
        f.every = 3
