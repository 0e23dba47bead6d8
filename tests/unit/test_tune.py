"""The measured tune: decisions are made once, for each op and shape, and `explain` says what was chosen."""

import json
import math
import os
import time

import pytest
import torch
from unit.tuned import BLOCK, GY, MASK, W, X, a_table, forward  # noqa: F401  (a_table is a fixture)

import fxmask
from fxmask.kernels import ops, tune
from fxmask.kernels.cpu import chosen, deciding
from fxmask.kernels.cpu.plans import BY_NAME, Case, plans, seconds


@pytest.mark.parametrize("impl", ["cpu", "auto"])
def test_a_choice_is_measured_once_kept_and_loaded(table, monkeypatch, impl):
    forward(impl)
    forward(impl)
    assert len(table.measured) == 1 and len(table.measured[0]) == 2 + (impl == "auto")
    (file,) = table.files()
    content, (first,) = json.loads(file.read_text()), deciding.decisions.values()
    assert content["name"] == first.name == min(first.times, key=first.times.get) and content["stamp"] == tune.stamp()
    assert set(content["times"]) == set(table.measured[0]) and not first.busy and abs(first.at - time.time()) < 60
    table.fresh()
    monkeypatch.setattr(tune, "measure", lambda *_: pytest.fail("measured again"))
    forward(impl)
    assert list(deciding.decisions.values()) == [first] and table.files() == [file]


def test_it_is_logged(table, caplog):
    with caplog.at_level("INFO", logger="fxmask"):
        forward()
        forward()
    (record,) = [r for r in caplog.records if r.name == "fxmask"]
    (choice,) = deciding.decisions.values()
    assert record.getMessage().startswith(f"timed {len(choice.times)} ways of forward/") and f": {choice.name} is taken, " in record.getMessage()


def test_every_op_its_dtype_and_tokens_decide_for_themselves(table):
    a, b, gy = X.clone().requires_grad_(), W.clone().requires_grad_(), GY
    ops.linear(a, b, None, MASK, BLOCK, "masked", None, "cpu").backward(gy)
    ops.masked_linear_dx(gy, W, MASK, *BLOCK, "masked", None, "cpu")
    ops.masked_linear_dw(gy, X, MASK, *BLOCK, "masked", None, "cpu")
    assert len(table.files()) == len(table.measured) == 4
    ops.linear(X.double(), W.double(), None, MASK, BLOCK, "masked", None, "cpu")
    ops.linear(X[:300], W, None, MASK, BLOCK, "masked", None, "cpu")
    ops.linear(X, W, None, MASK & (torch.arange(4) < 1), BLOCK, "masked", None, "cpu")
    assert len(table.files()) == len(table.measured) == 7
    ops.linear(X[:599], W, None, MASK, BLOCK, "masked", None, "cpu")  # as good as 600 tokens
    assert len(table.measured) == 7


def test_impl_cpu_never_multiplies_densely_and_the_reference_never_asks(table, monkeypatch):
    monkeypatch.setattr(deciding, "seconds", lambda plan, case: 1.0 if plan.chunk else 1e-8)
    forward("cpu")
    assert "masked_dense" not in table.measured[0]
    forward("auto")
    assert "masked_dense" in table.measured[1]
    monkeypatch.setattr(chosen.Form, "_plan", lambda *_: pytest.fail("asked"))
    forward("reference")


def test_switched_off_nothing_is_measured_or_written(table, monkeypatch):
    monkeypatch.setenv("FXMASK_TUNE", "0")
    forward()
    monkeypatch.delenv("FXMASK_TUNE")
    torch.use_deterministic_algorithms(True)
    try:
        forward("auto")
        forward("cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    assert {c.why for c in deciding.decisions.values()} == {"estimated"} and not table.measured and table.files() == []
    forward()
    assert len(table.measured) == 1


def test_switched_off_the_closed_forms_alone_decide_whatever_was_measured_before(table, monkeypatch):
    """And what was measured on a busy machine is not measured again meanwhile."""
    case, tunes = Case("forward", 600, (48, 64), BLOCK, float(MASK.float().mean()), torch.float32), []
    monkeypatch.setattr(tune, "measure", lambda c, threads: tunes.append(c) or tune.Choice("masked_dense", "measured", dict.fromkeys(c, 1.0), busy=True))
    estimate = min(plans(case), key=lambda p: deciding.seconds(p, case))
    forward("auto")
    assert deciding.of(case, False).why == "measured" and deciding.of(case, False).name == "masked_dense" != str(estimate)
    monkeypatch.setattr(deciding, "seconds", lambda plan, case: 1.0 if plan != estimate else 0.1)
    monkeypatch.setenv("FXMASK_TUNE", "0")
    assert deciding.of(case, False) is None and not deciding.made("forward", (48, 64), BLOCK, case.density, False)
    forward("auto")
    assert (deciding.of(case, False).name, deciding.of(case, False).why) == (str(estimate), "estimated") and len(tunes) == 1
    assert [c.name for c in deciding.made("forward", (48, 64), BLOCK, case.density, False).values()] == [str(estimate)]
    monkeypatch.setenv("FXMASK_TUNE", "1")
    assert deciding.of(case, False).name == "masked_dense"


@pytest.mark.parametrize("op", ["forward", "dx", "dw", "backward"])
def test_estimates_name_every_plan(op):
    case = Case(op, 600, (48, 64), BLOCK, 0.5, torch.float32)
    choice = deciding.decide(case, ("a", "case", op, True), False, 1, lambda plan, tokens: lambda: None)
    assert set(choice.times) <= {*map(str, plans(case)), "masked_dense"} and choice.name in BY_NAME


@pytest.mark.parametrize("op", ["forward", "dw"])
def test_a_chunk_that_is_not_full_is_estimated_with_all_of_its_calls(op):
    case = Case(op, 512, (2048, 2048), BLOCK, 0.5, torch.float32)
    for plan in plans(case):
        full, short = (seconds(plan, case._replace(tokens=plan.chunk - n)) for n in (0, 1))
        assert 0.995 * full < short < full


def test_explain_says_what_was_chosen(monkeypatch):
    torch.manual_seed(0)
    model = fxmask.apply(torch.nn.Sequential(torch.nn.Linear(64, 48)), ratio=0.5, block=BLOCK, impl="cpu")
    (row,) = fxmask.explain(model).rows
    assert (row["impl"], row["why"]) == ("cpu", "chosen when it first runs")
    model(X.clone().requires_grad_()).sum().backward()
    (row,) = fxmask.explain(model).rows
    for op in ("forward", "backward"):
        choice = deciding.of(Case(op, 600, (48, 64), BLOCK, 0.5, torch.float32), forced=True)
        assert f"{op} {choice.name}" in row["impl"] and f"{choice.name} {1e3 * choice.times[choice.name]:.3g} ms" in row["why"]
    assert row["why"].startswith("forward measured over 600 tokens: ") and "busy" not in row["why"]
    monkeypatch.setattr(os, "getloadavg", lambda: (1e3, 0.0, 0.0))
    deciding.decisions.clear()
    monkeypatch.setattr(tune, "load", lambda key, names: None)
    model(X)
    assert "forward measured over 600 tokens, on a busy machine: will be repeated: " in str(fxmask.explain(model).rows[0]["why"])


def test_explain_tells_layers_of_one_shape_apart():
    """By their ratio, by the tokens that they saw, and not by what another model ran."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    fxmask.apply(model, ratio=0.5, block=BLOCK, impl="cpu", include=["0", "3"])
    fxmask.apply(model, ratio=0.75, block=BLOCK, impl="cpu", include=["1"])
    fxmask.apply(model, ratio=0.25, block=BLOCK, impl="cpu", include=["2"])
    names = {0.5: "rows-512", 0.25: "runs-2048"}
    model[3](X)
    model[1](X)
    for key, choice in deciding.decisions.items():  # as if measured
        density = next(d for d in names if key[4] == deciding._step(d))
        deciding.decisions[key] = choice._replace(name=names[density], times={names[density]: 1e-3 * key[4] ** 2})
    first, second, third, fourth = fxmask.explain(model).rows
    assert first["impl"] == fourth["impl"] == "forward rows-512" and second["impl"] == "forward runs-2048" and third["why"] == "chosen when it first runs"
    assert "16 ms" in first["why"] and "64 ms" in second["why"]
    model[1](X[:70])
    (tokens,) = (key for key in deciding.decisions if key[1] == round(2 * math.log2(70)))
    deciding.decisions[tokens] = deciding.decisions[tokens]._replace(name="rows-512")
    (_, second, *_) = fxmask.explain(model).rows
    assert second["impl"] == "forward rows-512 (about 64 tokens) or runs-2048 (about 512 tokens)" and second["why"].count("forward measured over") == 2
    dense = fxmask.apply(torch.nn.Sequential(torch.nn.Linear(64, 64)), ratio=0.0, block=BLOCK, impl="cpu")
    dense(X)
    assert [fxmask.explain(dense).rows[0][c] for c in ("impl", "why")] == ["masked_dense", "no block is masked"]
