"""A layer's own training step: what is done for one of its times, and on what."""

import gc
import time
import weakref
from functools import partial

import pytest
import torch
from torch import nn

import fxmask
from fxmask.advice import search
from fxmask.advice import unit as units
from fxmask.advice.layers import Layer, Seen
from fxmask.advice.unit import FEWEST, Unit

CPU = torch.device("cpu")
MASK = fxmask.WeightMask(ratio=0.5, block=(32, 32), refresh=0)


def layer(tokens=50, **seen) -> Layer:
    call = Seen((tokens, 64), (64, 1), torch.float32, **{"needs_gradient": True, **seen})
    return Layer("fc", nn.Parameter(torch.randn(96, 64)), True, (call,))


def test_inputs_are_normal_numbers_in_the_layers_layout():
    (x,) = Unit(layer(4000), None).inputs
    assert (x.mean().item(), x.std().item()) == (pytest.approx(0, abs=0.02), pytest.approx(1, abs=0.02)) and x.requires_grad
    wide = Seen((8, 6, 64), (64, 0, 1), torch.float32, False)
    assert units._input(wide, CPU).stride() == (64, 0, 1)


def test_a_step_starts_without_gradients_and_caches():
    """Both parts of it from cold caches, and gradients are those of one step."""
    order = []
    unit = Unit(layer(), partial(torch.optim.SGD, lr=0.0), lambda: order.append("flush"))
    unit.watch = lambda run: order.append(run.__name__) or run() or 1.0
    order.clear()
    run = unit._runner(unit.dense, unit._optimizer(unit.dense))
    run()
    first = unit.inputs[0].grad.clone(), unit.dense.weight.grad.clone()
    run()
    assert first[0].any() and torch.equal(first[0], unit.inputs[0].grad) and torch.equal(first[1], unit.dense.weight.grad)
    assert [name if name in ("flush", "passes") else "step" for name in order] == ["flush", "passes", "flush", "step"] * 2


def test_a_call_without_gradients_has_no_backward():
    unit = Unit(layer(graph=False), torch.optim.SGD)
    unit.run_dense()
    assert unit.inputs[0].grad is None and unit.dense.weight.grad is None


def test_a_frozen_weight_beside_a_bias_that_is_trained_takes_no_step():
    frozen = layer()
    frozen.weight.requires_grad_(False)
    unit = Unit(frozen, torch.optim.SGD)
    dense, masked = unit.masked(MASK)
    assert unit.dense.bias.requires_grad and (dense.step, masked.step, unit.kept_step) == (0, 0, False)


def test_dense_and_masked_take_turns_in_changing_order(monkeypatch):
    unit, order, removed = Unit(layer(), torch.optim.SGD), [], []
    unit.run_dense = lambda: order.append("dense") or (3.0, 1.0)
    real = unit._runner
    monkeypatch.setattr(unit, "_runner", lambda *given: real(*given) and (lambda: order.append("masked") or (2.0, 0.5)))
    monkeypatch.setattr(units, "SECONDS", 0.0)
    monkeypatch.setattr(units, "guarded", lambda *given: type("Handle", (), {"masked_step": True, "remove": lambda self: removed.append(1)})())
    dense, masked = unit.masked(MASK)
    assert order[:2] == ["masked", "masked"] and order[2:] == [*["masked", "dense", "dense", "masked"] * 2, "masked", "dense"]
    assert dense[:2] == (3.0, 1.0) and masked[:2] == (2.0, 0.5) and dense.rebuild == 0 and masked.rebuild > 0 and removed == [1] and unit.kept_step


def test_few_tokens_are_not_cut_short_however_long_they_take(monkeypatch):
    monkeypatch.setattr(units, "LONG", 0.0)
    assert [Unit(layer(n), None).share for n in (FEWEST, FEWEST - 1, 2 * FEWEST)] == [1.0, 1.0, 0.5]


def test_what_flushes_the_caches_is_larger_than_the_last(monkeypatch):
    for size, wanted in ((3 << 20, 6 << 20), (None, 64 << 20)):
        monkeypatch.setattr(units, "last_cache_bytes", lambda size=size: size)
        assert units.flusher(CPU).__self__.nbytes == wanted


def test_what_flushes_is_one_for_all_layers_of_a_search_and_ends_with_it(monkeypatch):
    """Twice the last cache is half a gigabyte on some processors."""
    class Flush:
        def __call__(self):
            return None

    made = []
    monkeypatch.setattr(search, "flusher", lambda device: (flush := Flush(), made.append(weakref.ref(flush)))[0])
    layers = [layer(), layer(64), layer(32)]
    gc.collect()
    gc.disable()  # nothing waits for it
    try:
        found = search.search(layers, [((32, 32), 0.5)], {}, torch.optim.SGD, 0, time.perf_counter() + 60)
        alive = [ref() for ref in made]
    finally:
        gc.enable()
    assert len(found) == 3 and all(timed.cells for timed in found) and alive == [None]
