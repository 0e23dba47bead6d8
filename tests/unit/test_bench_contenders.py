"""Who takes turns in `fxmask bench` on a CPU: what each computes, on which operands, and what a dispatch's row says of times that a test makes up."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fxmask.bench import clock, contenders, floor, interleaved, regret, table
from fxmask.bench.cells import Cell
from fxmask.kernels import tune
from fxmask.kernels.cpu import deciding

CELL = Cell("step", "interleaved", 300, 96, 64, "fp32", (32, 32), 0.5, "random", 0)


@pytest.fixture(autouse=True)
def idle(monkeypatch):
    """A machine that does nothing else, and no decision of another test."""
    monkeypatch.setattr(clock, "load_average", lambda: 0.0)
    monkeypatch.setattr(deciding, "decisions", {})


@pytest.mark.parametrize("name", contenders.KNOWN)
def test_a_contender_takes_a_training_step_of_the_layer(name):
    i = contenders.layer_of(CELL)
    c = contenders.contender(name, i)
    mask = c.mask()
    kept = torch.ones_like(i.w) if mask is None else mask.repeat_interleave(32, 0).repeat_interleave(32, 1)
    assert (mask is None) == (name == "dense") and (mask is None or int(mask.sum()) == 3)
    x, w = i.x.clone().requires_grad_(), (i.w * kept).requires_grad_()
    y = F.linear(x, w)
    y.backward(i.gy)
    for got, want in zip((c.forward(mask), *c.backward(mask)), (y, x.grad, w.grad * kept), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("output", [0, 1, 2])
def test_each_output_of_a_step_is_judged(output):
    i = contenders.layer_of(CELL)
    right = contenders.contender("fxmask_reference", i)

    def spoilt(found, first):
        return [t * 1.01 if first + j == output else t for j, t in enumerate(found)]

    c = right._replace(forward=lambda m: spoilt([right.forward(m)], 0)[0], backward=lambda m: tuple(spoilt(right.backward(m), 1)))
    assert contenders.error_of(i, right)[1] and not contenders.error_of(i, c)[1]


def test_every_turn_has_another_weight_and_mask():
    i = contenders.layer_of(CELL)
    c = contenders.contender("fxmask_reference", i)
    masks = []
    for turn in range(3):
        interleaved._turn(i, c._replace(mask=lambda: masks.append(c.mask()) or masks[-1]), turn)
        assert torch.equal(i.w, i.weights[turn % 2])
    assert torch.equal(masks[0], masks[2]) and not torch.equal(masks[0], masks[1])


def test_rows_of_both_weights_differ_in_scale():
    tall = Cell("step", "interleaved", 8, 4096, 64, "fp32", (16, 16), 0.5, "rows", 0)
    for kind, spread in (("rows", 0.02), ("random", 0.0)):
        for w in contenders.layer_of(replace(tall, mask=kind)).weights:
            scales = w.reshape(256, -1).square().mean(1).sqrt()
            assert scales.std().item() == pytest.approx((spread**2 + 1 / 2048) ** 0.5, rel=0.15)  # of 1,024 normal numbers a row


@pytest.mark.parametrize("loads", [(0.5, 1e3), (1e3, 0.5)])
def test_a_machine_is_busy_that_was_before_or_after(monkeypatch, loads):
    seen = iter(loads)
    monkeypatch.setattr(clock, "load_average", lambda: next(seen))
    (row,) = interleaved.measure(CELL, ("dense",), 0.0, {})
    assert row["verdict"].startswith("none: load 1000.0") and (float(row["load"]), float(row["load_after"])) == loads


@pytest.mark.parametrize("threads", [1, 2])
def test_columns_of_made_up_turns(monkeypatch, threads):
    """Eleven turns of (wall, process) times of mask, forward and backward; the parts' are in the time that decides."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    row = interleaved._times([[(1.0 * t, 10.0 * t), (2.0 * t, 20.0 * t), (3.0 * t, 30.0 * t)] for t in range(11)])
    assert [row[c] for c in ("mask_ms", "forward_ms", "backward_ms")] == (["50", "100", "150"] if threads == 1 else ["5", "10", "15"])
    assert [row[c] for c in ("turns", "ms_p10", "ms_p50", "ms_p90", "cpu_ms_p50")] == ["11", "6", "30", "54", "300"]


def test_a_cell_is_measured_where_a_contender_lacks_a_row(tmp_path, monkeypatch):
    real, measured = interleaved.measure, []
    monkeypatch.setattr(interleaved, "measure", lambda cell, names, *a: measured.append(names) or real(cell, names, *a))
    for names in (("dense",), ("dense", "masked_dense"), ("masked_dense",)):
        interleaved.run([CELL], tmp_path, 0.0, None, names, lambda line: None)
    assert measured == [("dense",), ("dense", "masked_dense")]


def test_a_dispatch_is_judged_by_the_least_times_behind_the_first_turn(monkeypatch):
    cell = Cell("forward", "plans", 40, 48, 32, "fp32", (16, 16), 0.5, "random", 0)
    now, names = [0, ""], []

    def turns(wanted, seconds, least):
        names.extend(wanted)
        for turn in range(3):
            for name in wanted:
                now[:] = turn, name
                yield turn, name

    def watch(call):
        call()
        return (1e-6, 3e-3 if now[1] == "masked_dense" else 4e-3 if now[1] == names[1] else 2e-3, 9e-3)[now[0]]

    monkeypatch.setattr(regret, "turns", turns)
    monkeypatch.setattr(regret, "Stopwatch", lambda device: watch)
    monkeypatch.setattr(deciding, "of", lambda case, forced: tune.Choice(names[1] if names else str(regret.plans(case)[0]), "made up", {}))
    row = regret.measure(cell, {}, 0.0)
    assert names[0] == "masked_dense" and len(names) >= 3 and row["chosen"] == names[1] and row["best"] in names[2:]
    assert (row["chosen_ms"], row["best_ms"], row["masked_dense_ms"], row["regret"], row["x_masked_dense"]) == ("4", "2", "3", "1", "0.75")
    assert row["gate"] == "pass" and f"{names[1]}:4 " in row["times"] + " "


def judged(*regrets, **changes):
    rows = [{**dict.fromkeys(regret.COLUMNS, ""), "op": "dx", "M": str(n), "gate": "pass", "verdict": "ok"} for n in range(len(regrets))]
    return [r | {"regret": str(x), "x_masked_dense": "1"} | changes for r, x in zip(rows, regrets, strict=True)]


def test_nineteen_of_twenty_good_choices_are_enough():
    assert regret.summary(judged(*[0.05] * 19, 0.9))[1] and not regret.summary(judged(*[0.05] * 18, 0.9, 0.06))[1]
    assert "; 2 below 0.97 of masked-dense" in regret.summary(judged(0.0, 0.0, x_masked_dense="0.96"))[0]


@pytest.mark.parametrize(("tokens", "good"), [(floor.LEAST - 1, True), (floor.LEAST, False)])
def test_few_tokens_are_judged_by_microseconds(tokens, good):
    row = {"phase": "interleaved", "M": str(tokens), "K": "32", "N": "48", "dtype": "fp32", "block_n": "16", "ratio": "0.5", "threads": "1"}
    row |= {"verdict": "ok", "gate": "pass", "forward_plan": "a", "backward_plan": "b"}
    times = {"masked_dense": "1", "fxmask_auto": "1.2"}  # 100 us of each of two calls
    assert floor.summary([row | {"provider": p, "cpu_ms_p50": times.get(p, "1")} for p in floor.CONTENDERS])[1] == good


def test_a_floor_in_16_bits_has_fewer_tokens():
    assert {c.M for c in floor.cells("fp32", 0)} - {c.M for c in floor.cells("bf16", 0)} == {25088}
    assert max(c.M for c in floor.cells("bf16", 0)) == 2048 and all(max(c.N, c.K) > c.block[0] for c in floor.cells("bf16", 0))


def test_a_row_says_in_which_columns_it_is_timed():
    assert [table.time_column({"threads": t}) for t in ("1", "2")] == ["cpu_ms_p50", "ms_p50"]
