"""Schedules of any kind, length and end: their bounds, their ends, how they move between them, and the blocks that they keep."""

import dataclasses
import io
import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property.often import examples
from sample_models import mlp

import fxmask
from fxmask.kernels.grid import RATIO_UNIT, ratio_units
from fxmask.passes.settings.config import SCHEDULES

RATIOS = st.one_of(st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1 - 1e-9]), st.floats(0, 1 - 1e-9))
MONOTONE = [k for k in SCHEDULES if k != "cyclic"]


@st.composite
def schedules(draw, kinds=tuple(SCHEDULES), longest=60):
    kind, ramp = draw(st.sampled_from(kinds)), draw(st.integers(1, longest))
    around = [0, 0] if kind == "constant" else [draw(st.integers(0, 9)), draw(st.integers(0, 9))]
    cycles = draw(st.integers(1, ramp)) if kind == "cyclic" else 1
    return fxmask.Schedule(kind, ramp + sum(around), draw(RATIOS), cycles, *around)


def path(s, target, beyond=3):
    return [s.ratio_at(step, target) for step in range(s.steps + beyond)]


def test_a_ramp_from_a_ratio_to_itself_stays_there():
    """In floats 1 - (1 - 0.16) is larger than 0.16."""
    assert set(path(fxmask.Schedule("exponential", 700, 0.16), 0.16)) == {0.16}


@given(schedules(), RATIOS)
@examples(300)
def test_bounds_and_ends(s, target):
    ratios = path(s, target)
    assert all(min(s.initial, target) <= r <= max(s.initial, target) for r in ratios)
    assert all(0 <= r < 1 for r in ratios)
    assert ratios[s.steps - s.cooldown :] == [target] * (s.cooldown + 3)
    assert s.ratio_at(10**12, target) == target
    if s.kind != "constant":
        assert ratios[: s.warmup + 1] == [s.initial] * (s.warmup + 1)
        assert s.ratio_at(-5, target) == s.initial


@given(schedules(kinds=MONOTONE, longest=400), RATIOS)
@examples(200)
def test_all_but_cyclic_are_monotone(s, target):
    units = [ratio_units(r) for r in path(s, target)]
    up = target >= s.initial
    assert all((a <= b) if up else (a >= b) for a, b in pairwise(units))


@given(st.sampled_from(["linear", "cubic", "cosine", "exponential"]), st.integers(2, 500), st.integers(0, 9), st.integers(0, 9))
@examples(100)
def test_a_ramp_moves_from_its_first_step(kind, ramp, warmup, cooldown):
    """So warm-up and cool-down are not a step longer than they say."""
    s = fxmask.Schedule(kind, ramp + warmup + cooldown, 0.1, 1, warmup, cooldown)
    assert s.ratio_at(warmup, 0.9) == 0.1 < s.ratio_at(warmup + 1, 0.9)
    assert s.ratio_at(warmup + ramp - 1, 0.9) < 0.9 == s.ratio_at(warmup + ramp, 0.9)


FORMULAS = {
    "linear": lambda t, a, b: a + (b - a) * t,
    "cubic": lambda t, a, b: b + (a - b) * (1 - t) ** 3,
    "cosine": lambda t, a, b: b + (a - b) * 0.5 * (1 + math.cos(math.pi * t)),
    "exponential": lambda t, a, b: 1 - math.exp((1 - t) * math.log(1 - a) + t * math.log(1 - b)),
}


@given(schedules(kinds=tuple(FORMULAS)), RATIOS)
@examples(200)
def test_the_papers_formulas(s, target):
    ramp = s.steps - s.warmup - s.cooldown
    for done in range(ramp + 1):
        expected = FORMULAS[s.kind](done / ramp, s.initial, target)
        assert s.ratio_at(s.warmup + done, target) == pytest.approx(expected, abs=1e-9)


@given(st.integers(1, 8), st.integers(1, 30), st.integers(0, 5), st.integers(0, 5), RATIOS, RATIOS)
@examples(150)
def test_every_cycle_is_the_same_cubic(cycles, length, warmup, cooldown, initial, target):
    """Bit for bit where the cycles are of equal length; a cubic of one cycle is the cubic."""
    s = fxmask.Schedule("cyclic", warmup + cycles * length + cooldown, initial, cycles, warmup, cooldown)
    ratios = path(s, target)[warmup : warmup + cycles * length]
    one = ratios[:length]
    assert ratios == one * cycles and one[0] == pytest.approx(initial, abs=1e-15)
    cubic = fxmask.Schedule("cubic", length, initial)
    assert one == pytest.approx([cubic.ratio_at(i, target) for i in range(length)], abs=1e-12)
    if abs(target - initial) > 1e-6 and length > 1:
        assert sum(abs(b - initial) < abs(a - initial) for a, b in pairwise(ratios)) == cycles - 1  # so often it falls back


@given(schedules(), RATIOS, st.integers(1, 500), st.integers(0, 5))
@examples(200)
def test_exactly_the_blocks_of_the_ratio(s, target, blocks, start):
    config = fxmask.WeightMask(ratio=target, schedule=s, start=start)
    for step in range(s.steps + start + 2):
        ratio = s.ratio_at(step - start, target) if step >= start else 0.0
        exact = math.ceil(blocks * (1 - Fraction(round(ratio * RATIO_UNIT), RATIO_UNIT)))
        assert config.keep_at(step, blocks) == max(1, exact)
    assert config.keep_at(s.steps + start, blocks) == fxmask.WeightMask(ratio=target).keep_at(0, blocks)


@given(schedules(longest=12), st.sampled_from([0.5, 0.7, 0.9]), st.integers(0, 20), st.booleans())
@examples(25)
def test_a_save_changes_nothing(s, ratio, cut, cached):
    """A run that is saved and loaded anywhere on its way keeps the same blocks at every later step."""
    make = lambda: fxmask.apply(mlp(), ratio=ratio, block=(8, 8), schedule=s, refresh=2 if cached else 1)  # noqa: E731
    whole, first, second = make(), make(), make()
    fxmask.step(whole, cut)
    fxmask.step(first, cut)
    torch.save(fxmask.state_dict(first), buffer := io.BytesIO())
    fxmask.load_state_dict(second, torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    for _ in range(cut, s.steps + 2):
        for (name, a), b in zip(fxmask.masks(whole).items(), fxmask.masks(second).values(), strict=True):
            assert torch.equal(a, b), name
        fxmask.step(whole)
        fxmask.step(second)


@given(schedules())
@examples(50)
def test_it_is_plain_and_frozen(s):
    assert fxmask.Schedule(**dataclasses.asdict(s)) == s
    assert all(type(v) in (str, int, float) for v in dataclasses.asdict(s).values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        s.steps = 3
