"""From layers' times to a plan: pure arithmetic, on times that the tests make up."""

import os
import re
import sys
from typing import ClassVar

import pytest
import torch
from torch import nn

import fxmask
from fxmask.advice import search as searching
from fxmask.advice.advice import Known, advice_of
from fxmask.advice.layers import Layer, Seen
from fxmask.advice.plan import PAYS, best_block, chosen, part_of_step, plans
from fxmask.advice.search import Timed, check_cells, order_of, search, whole
from fxmask.advice.step import KEEP, mean_square, page_faults, usage
from fxmask.advice.trial import Trial
from fxmask.advice.unit import Times
from fxmask.bench.provenance import allocator

B64, B32 = (64, 64), (32, 32)


def layer(name: str, n: int = 256, k: int = 256, tokens: int = 100, others: tuple[str, ...] = ()) -> Layer:
    seen = Seen((tokens, k), (k, 1), torch.float32, True)
    return Layer(name, torch.empty(n, k), True, (seen,), "", others)


def timed(layers: list[Layer], dense: float, cells: dict, refresh: int = 10) -> Timed:
    """`cells`: {(block, ratio): seconds of the masked layer}."""
    return Timed(layers, Times(dense, 0.0), {c: (Times(dense, 0.0), Times(t, 0.0)) for c, t in cells.items()}, refresh)


def told(known: Known, narrowed: bool = False, make=torch.optim.AdamW, loads=(None, None), options=None):
    trial = Trial(nn.Identity(), ((), {}), mean_square, make, 10, options or {"backward": "masked", "impl": "auto"}, torch.device("cpu"))
    return advice_of(trial, known, 1.05, narrowed, [], loads, 1.0)


def test_the_step_is_the_dense_one_less_what_paying_layers_save():
    found = [
        timed([layer("a"), layer("b")], 0.10, {(B64, 0.8): 0.04, (B32, 0.8): 0.05, (B64, 0.5): 0.12}),
        timed([layer("c")], 0.05, {(B64, 0.8): 0.06}),
    ]
    low, high = plans(found, [0.8, 0.5], dense_step=0.5)
    assert (low.ratio, low.blocks, low.step, low.gain) == (0.5, {}, 0.5, 1.0)
    assert high.blocks == {"a": B64, "b": B64}
    assert high.step == pytest.approx(0.5 - 2 * 0.06) and high.gain == pytest.approx(0.5 / 0.38)


def test_a_cell_gives_a_ratio_and_the_median_of_all_turns_the_dense_time():
    cells = {(B64, 0.8): (0.2, 0.1), (B64, 0.5): (0.1, 0.11), (B32, 0.8): (0.1, 0.12)}  # the machine was half as fast once
    slow = Timed([layer("a")], Times(0.3, 0.0), {c: (Times(d, 0.0), Times(m, 0.0)) for c, (d, m) in cells.items()}, 10)
    assert slow.alone == 0.1 and Timed([layer("a")], Times(0.3, 0.1), {}, 10).alone == pytest.approx(0.4)
    (plan,) = plans([slow], [0.8], 0.2)
    assert plan.step == pytest.approx(0.15)


def test_layers_cannot_save_more_than_the_step_takes():
    found = [timed([layer("a")], 1.0, {(B64, 0.8): 0.5})]
    (plan,) = plans(found, [0.8], dense_step=0.4)
    assert plan.step == pytest.approx(0.2) and part_of_step(found, 0.4) == pytest.approx(0.4) and part_of_step(found, 2.0) == part_of_step([], 2.0) == 1


@pytest.mark.parametrize("step", [0.4, 2.0])
def test_shares_add_up_to_no_more_than_the_step(step):
    """Tiny layers take longer alone, from cold caches, than all together."""
    found = [timed([layer("a"), layer("b")], 0.3, {(B64, 0.8): 0.2}), timed([layer("c")], 0.2, {(B64, 0.8): 0.3})]
    made, layers = plans(found, [0.8], step), [x for t in found for x in t.layers]
    report = told(Known(layers, found, [(B64, 0.8)], made, None, step, {}))
    shares, said = [r["share_of_step"] for r in report.rows], [n for n in report.notes if "dense_ms are higher than in the step" in n]
    assert sum(shares) == pytest.approx(min(1.0, 0.8 / step)) and shares[0] == pytest.approx(1.5 * shares[2])
    assert len(said) == (step == 0.4) and all("took 2.00 times as long" in n and "of dense_ms times 0.50" in n for n in said)


def test_a_ratio_says_which_layers_the_time_did_not_reach():
    """One that loses at 80 % needs no time at 50 %; of one that the time did not reach nothing is known."""
    cells = [(B64, 0.8), (B64, 0.5), (B64, 0.3)]
    known = timed([layer("a")], 0.3, {(B64, 0.8): 0.1, (B64, 0.5): 0.4})
    open_, lost = timed([layer("b", others=("c",))], 0.2, {(B64, 0.8): 0.1}), timed([layer("d")], 0.2, {(B64, 0.8): 0.3})
    known.left_out, open_.left_out = 1, 2
    found = [known, open_, lost]
    made, layers = plans(found, [0.3, 0.5, 0.8], 1.0), [x for t in found for x in t.layers]
    report = told(Known(layers, found, cells, made, None, 1.0, {}))
    said = {at: words.partition("linears")[2] or words for at, words in report.summary.items() if at.startswith("at ")}
    assert report.summary["at 50 %"] == "no layer pays; 2 of 4 linears were not timed"
    assert said["at 30 %"] == "not timed" and "timed" not in said["at 80 %"]


def test_a_printed_call_names_no_more_than_four_layers_and_its_arguments_name_all():
    layers = [layer(name) for name in "abcdefghijk"]
    found = [timed(layers[:6], 0.1, {(B64, 0.8): 0.05}), timed(layers[6:], 0.1, {(B32, 0.8): 0.05})]
    (made,) = plans(found, [0.8], 2.0)
    known = Known(layers, found, [(B64, 0.8)], [made], made, 2.0, {})
    some = told(known, narrowed=True, make=None)
    call = "fxmask.apply(model, ratio=0.8, block=(64, 64), refresh=10, include={}, overrides=<5 linears, see .arguments>)"
    assert some.summary["advice"].startswith(call.format("<11 linears, see .arguments>"))
    assert some.arguments["include"] == list("abcdefghijk") and some.arguments["overrides"] == {name: {"block": B32} for name in "ghijk"}
    every = told(known, make=None)
    assert every.summary["advice"].startswith(call.replace(" include={},", ""))


def known_of(found: list[Timed], cells: list, advised: bool = True, step: float = 2.0, trials: dict | None = None) -> Known:
    """Of layers' times; the plan of the first ratio is advised, or none."""
    made = plans(found, sorted({r for _, r in cells}), step)
    return Known([x for t in found for x in t.layers], found, cells, made, made[0] if advised else None, step, trials or {})


def test_masks_alone_bring_a_word_about_accuracy_and_a_busy_machine_one_about_its_load(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    cells = [(B64, 0.8)]
    wins, loses = (known_of([timed([layer("a")], 0.1, {(B64, 0.8): t})], cells, advised=False) for t in (0.05, 0.2))
    eager = "Times are of eager steps. What a ratio costs in accuracy is another matter: docs/accuracy.md."
    assert told(wins).notes == [eager] and told(loses, loads=(4.0, 4.0)).notes == []
    for loads in ((4.5, 1.0), (1.0, 4.5), (4.5, None)):
        assert told(loses, loads=loads).notes == ["The machine was busy: load 4.5 on 4 cores; ask again when it is idle."]


def test_what_was_left_out_is_counted_by_signatures():
    found = [timed([layer("a"), layer("b")], 0.1, {(B64, 0.8): 0.2}), Timed([layer("c")], Times(0.1, 0.0), {}, 10, 2)]
    report = told(known_of(found, [(B64, 0.8), (B32, 0.8)], advised=False))
    assert report.notes == ["2 of 4 combinations of layer, block and ratio were not timed: the time was spent; seconds= gives more."]
    assert [r["why"] for r in report.rows] == ["", "", "the time was spent"]
    (row,) = told(known_of([Timed([layer("a")], Times(0.1, 0.0), {}, 10)], [(B64, 0.8)], advised=False)).rows
    assert row["why"] == "no block fits"


@pytest.mark.parametrize(("kept", "said"), [((True, True, False), ", masked_step=True)"), ((True, False, True), "(optimizer, model):")])
def test_a_masked_step_is_advised_where_all_layers_of_the_plan_were_timed_with_one(kept, said):
    found = [timed([layer(name)], 0.1, {(B64, 0.8): t}) for name, t in zip("abc", (0.05, 0.05, 0.2), strict=True)]
    for t, one in zip(found, kept, strict=True):
        t.kept_step = one
    assert said in told(known_of(found, [(B64, 0.8)])).summary["advice"]


def test_the_arguments_are_those_that_were_timed():
    found, ste = [timed([layer("a")], 0.1, {(B64, 0.8): 0.05})], {"backward": "ste", "impl": "cpu"}
    known = known_of(found, [(B64, 0.8)], trials={0.8: 1.5})
    assert told(known, options=ste).arguments == {"ratio": 0.8, "block": B64, "refresh": 10, "include": ["a"], **ste}
    lost = told(known_of(found, [(B64, 0.8)], advised=False, trials={0.8: 0.9})).summary["advice"]
    assert lost == "leave it dense: nothing reaches 1.05 times as fast"  # it is faster by the layers' times
    none = told(known_of([timed([layer("a")], 0.1, {(B64, 0.8): 0.2})], [(B64, 0.8)], advised=False)).summary["advice"]
    assert none == f"{lost}: no layer is faster masked"


def test_what_lost_when_it_was_looked_at_is_not_missed():
    """Later rounds may bring it nearer: that it was settled is known by that nothing was left out."""
    near = timed([layer("a")], 0.96, {(B64, 0.8): 1.0})
    assert not near.settled((B32, 0.8)) and not near.missed(0.5, [(B64, 0.5)])
    near.left_out = 1
    assert near.missed(0.5, [(B64, 0.5)])


def test_rebuilds_are_shared_out_over_the_steps():
    cell = {(B64, 0.8): (Times(0.1, 0.02), Times(0.03, 0.01, rebuild=0.04))}
    assert Timed([layer("a")], Times(0.1, 0.02), cell, 4).gain((B64, 0.8)) == pytest.approx(0.12 / 0.05)
    assert Timed([layer("a")], Times(0.1, 0.02), cell, 0).gain((B64, 0.8)) == pytest.approx(0.12 / 0.04)


def test_a_gain_that_may_be_noise_does_not_pay():
    just = timed([layer("a")], 1.0, {(B64, 0.8): 1.0 / (PAYS - 0.001)})
    assert plans([just], [0.8], 2.0)[0].blocks == {}


def test_the_lowest_ratio_that_reaches_the_target():
    found = [timed([layer("a")], 0.9, {(B64, 0.5): 0.8, (B64, 0.8): 0.5, (B64, 0.9): 0.3})]
    made = plans(found, [0.5, 0.8, 0.9], 1.0)
    assert [chosen(made, t, {}).ratio for t in (1.05, 1.3, 2.0)] == [0.5, 0.8, 0.9]
    assert chosen(made, 4.0, {}) is None and chosen(made, made[1].gain, {}) == made[1]
    assert chosen(made, 1.0, {0.5: 1.0}) == made[0] and chosen(made, 1.0, {0.5: 0.99}) == made[1]
    assert best_block(found[0], 0.7) == (None, None)


def test_arguments_mask_what_the_plan_says_with_its_blocks():
    model = nn.ModuleDict({name: nn.Linear(256, 256) for name in "abcd"})
    model["d"].weight = model["a"].weight
    found = [
        timed([layer("a", others=("d",))], 0.1, {(B64, 0.8): 0.05}),
        timed([layer("b")], 0.1, {(B32, 0.8): 0.05}),
        timed([layer("c")], 0.1, {(B64, 0.8): 0.2}),
    ]
    (plan,) = plans(found, [0.8], 1.0)
    assert plan.block == B64 and plan.words(4).startswith("64x64 in 2, 32x32 in 1 of 4 linears: ") and " predicted, " in plan.words(4)
    rows = {r["name"]: r for r in fxmask.explain(fxmask.apply(model, **plan.arguments(10, {"backward": "ste"}))).rows}
    assert {n: rows[n]["block"] for n in "abd"} == {"a": "64x64", "b": "32x32", "d": "64x64"} and not rows["c"]["masked"]
    assert all(rows[n]["backward"] == "ste" and rows[n]["target_ratio"] == 0.8 for n in "abd")


ROUNDS = searching.ROUNDS


class FakeUnit:
    """A layer whose masked time follows from its block and ratio; counts what was timed."""

    asked: ClassVar[list] = []
    gains: ClassVar[dict] = {}

    def __init__(self, layer, make, flush):
        self.dense_times, self.kept_step = Times(1.0, 0.0), True

    def masked(self, config):
        self.asked.append((config.block, config.ratio))
        return Times(1.0, 0.0), Times(1.0 / self.gains[config.block, config.ratio], 0.0)


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(searching, "Unit", FakeUnit)
    FakeUnit.asked = []
    return FakeUnit


def test_what_is_sure_to_lose_is_not_timed(fake):
    cells = order_of([B32, B64], [0.5, 0.8, 0.9])
    assert cells == [(B64, 0.9), (B64, 0.8), (B64, 0.5), (B32, 0.9), (B32, 0.8), (B32, 0.5)]
    fake.gains = {(B64, 0.9): 2.0, (B64, 0.8): 0.9, (B32, 0.9): 1.5}
    (found,) = search([layer("a")], cells, {}, None, 10, float("inf"))
    assert fake.asked == [(B64, 0.9), (B64, 0.8), (B32, 0.9)] * ROUNDS  # 80 % at 64x64 lost: so do 50 % at 64x64, and 80 and 50 % at 32x32
    assert found.left_out == 0 and found.gain((B32, 0.9)) == pytest.approx(1.5) and found.gain((B32, 0.8)) is None


def test_a_block_that_loses_settles_those_that_lie_within_it_alone(fake):
    """One that is wider may win, however small its area is."""
    wide, tall, small = (16, 128), (64, 64), (16, 64)
    fake.gains = {(tall, 0.8): 0.5, (wide, 0.8): 2.0}
    (found,) = search([layer("a")], order_of([wide, tall, small], [0.8]), {}, None, 10, float("inf"))
    assert fake.asked[:2] == [(tall, 0.8), (wide, 0.8)] and set(found.cells) == {(tall, 0.8), (wide, 0.8)}


def test_noise_around_one_settles_nothing(fake):
    fake.gains = {(B64, 0.9): 0.96, (B64, 0.5): 0.96, (B32, 0.9): 1.0, (B32, 0.5): 0.5}
    search([layer("a")], order_of([B64, B32], [0.5, 0.9]), {}, None, 10, float("inf"))
    assert len(fake.asked) == 4 * ROUNDS


def test_layers_of_one_signature_are_timed_once_and_time_that_is_spent_is_said(fake):
    fake.gains = {(B64, 0.9): 2.0}
    layers = [layer("a"), layer("b"), layer("c", tokens=50)]
    first, second = search(layers, [(B64, 0.9)], {}, None, 10, float("inf"))
    assert [x.name for x in first.layers] == ["a", "b"] and [x.name for x in second.layers] == ["c"] and len(fake.asked) == 2 * ROUNDS
    more = search([layers[2], *layers], [(B64, 0.9)], {}, None, 10, float("inf"))
    assert [len(t.layers) for t in more] == [2, 2] and more[0].layers[0].tokens == 100  # the most work first
    late = search(layers, [(B64, 0.9), (B64, 0.5)], {}, None, 10, 0.0)
    assert [t.left_out for t in late] == [2, 2] and all(t.why for t in late) and plans(late, [0.9], 1.0)[0].blocks == {}


def test_cells_are_timed_again_in_half_of_the_time_alone(fake, monkeypatch):
    """A clock on which every cell takes a second: of 10 s the first round has all, what comes after it ends with the fifth."""
    now = [100.0]
    monkeypatch.setattr(searching.time, "perf_counter", lambda: now[0])
    masked = FakeUnit.masked
    monkeypatch.setattr(FakeUnit, "masked", lambda self, config: (now.__setitem__(0, now[0] + 1), masked(self, config))[1])
    fake.gains = {(B64, r): 2.0 for r in (0.5, 0.6, 0.7, 0.8, 0.9)}
    search([layer("a")], order_of([B64], [0.5, 0.9]), {}, None, 10, now[0] + 10)
    assert fake.asked == [(B64, 0.9), (B64, 0.5), (B64, 0.9), (B64, 0.5), (B64, 0.9)]
    fake.asked.clear()
    (found,) = search([layer("a")], order_of([B64], [0.5, 0.6, 0.7, 0.8, 0.9]), {}, None, 10, now[0] + 4)
    assert [r for _, r in fake.asked] == [0.9, 0.8, 0.7, 0.6] and found.left_out == 1


def test_a_block_that_can_mask_nothing_is_not_timed(fake):
    assert whole(layer("a", 64, 64), (B64, 0.9)) and not whole(layer("a", 128, 64), (B64, 0.9)) and whole(layer("a", 128, 64), (B64, 0.4))
    search([layer("a", 64, 64)], [(B64, 0.9)], {}, None, 10, float("inf"))
    assert fake.asked == []


def test_blocks_and_ratios_are_checked():
    assert check_cells([16, (16, 64)], [0.5, 0.9]) == [((16, 64), 0.9), ((16, 64), 0.5), ((16, 16), 0.9), ((16, 16), 0.5)]
    for blocks, ratios in (([32], []), ([], [0.5]), (32, [0.5]), ([32], 0.5), ("32", [0.5])):
        with pytest.raises(fxmask.FxMaskError, match=re.escape(f"at least one each, got blocks={blocks!r}, ratios={ratios!r}.")):
            check_cells(blocks, ratios)
    wrong = ((32, 0.0, "expected ratios above 0, got 0.0"), (32, 1.0, "[0, 1), got 1.0"), (0, 0.5, "got (0, 0)"), ((1, 2, 3), 0.5, "got (1, 2, 3)"))
    for block, ratio, words in wrong:
        with pytest.raises(fxmask.FxMaskError, match=re.escape(words)):
            check_cells([block], [ratio])


def test_page_faults_are_named_where_they_take_time(monkeypatch):
    for name in [n for n in os.environ if n.startswith("MALLOC_") or n in ("GLIBC_TUNABLES", "LD_PRELOAD")]:
        monkeypatch.delenv(name)
    before, many = (5.0, 1.0, 100), (13.0, 3.0, 50_100)
    said = page_faults(before, many)
    assert "took 20 % of the trial's time, with 50000 page faults" in said and KEEP in said
    assert page_faults(before, (15.0, 1.405, 50_100)) == "" != page_faults(before, (15.0, 1.425, 50_100))  # of 10.4 s
    assert page_faults(before, (13.0, 3.0, 5_000)) == ""
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    monkeypatch.setenv("LD_PRELOAD", "/a/libother.so:/b/libmore.so")
    assert KEEP in page_faults(before, many) and allocator() == "LD_PRELOAD=libother.so:libmore.so MALLOC_ARENA_MAX=2"
    monkeypatch.setenv("LD_PRELOAD", "/a/libjemalloc.so.2:")
    assert "took 20 %" in page_faults(before, many) and KEEP not in page_faults(before, many)
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setenv(*KEEP.split()[0].split("="))
    assert KEEP not in page_faults(before, many)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="faults of fresh pages, as Linux counts them")
def test_what_is_touched_for_the_first_time_is_counted():
    before = usage()
    fresh = torch.ones(1 << 24)  # 64 MiB
    assert usage()[2] - before[2] > fresh.numel() * 4 // (2 << 20)  # at least where pages have 2 MiB
