"""Ratios that a loss, a flip rate or a budget of bytes drives: against the rules by hand, compiled, stopped, copied, and asked for in vain."""

import copy
import dataclasses
import io
import math

import pytest
import torch
import torch.distributed as dist
from sample_models import Twice, mlp, noisy_step
from saved_states import same, through_a_file
from torch import nn, optim
from unit.feedback_masks import FLIPS, FORMS, LOSS, kept, masked, ratios, told

import fxmask
from fxmask.errors import ConfigError, FxMaskWarning, StateError
from fxmask.passes.settings import looks
from fxmask.sites import sites

pytestmark = pytest.mark.usefixtures("one_thread")

# ---- by a loss ---------------------------------------------------------------------------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize("refresh", [1, 2])
def test_up_while_no_worse_than_the_best_and_down_again(form, refresh):
    model = masked(LOSS, form=form, refresh=refresh)
    assert told(model, [3.0, 2.0, 2.5, 2.0, 1.0, 1.0, 1.0, 1.5]) == [0.0, 0.2, 0.4, 0.2, 0.4, 0.6, 0.7, 0.7, 0.6]
    fxmask.step(model, 2)
    assert kept(model) == {"0.weight": 39, "2.weight": 39}  # ceil(96 (1 - 0.6))


@pytest.mark.parametrize(
    ("options", "losses", "expected"),
    [
        (dict(tolerance=0.25), [2.0, 2.5, 2.51, 1.0, 1.25, 1.26], [0.0, 0.2, 0.4, 0.2, 0.4, 0.6, 0.4]),
        (dict(tolerance=0.25), [-2.0, -1.5, -1.49], [0.0, 0.2, 0.4, 0.2]),  # a share of its size, whatever its sign
        (dict(goal=2.0), [3.0, 2.0, 1.0, 2.1], [0.0, 0.0, 0.2, 0.4, 0.2]),
        (dict(goal=2.0, tolerance=0.5), [3.0, 3.1], [0.0, 0.2, 0.0]),
        (dict(every=2), [1.0, 3.0, 1.0, 1.0, 2.0, 0.5], [0.0, 0.0, 0.2, 0.2, 0.4, 0.4, 0.2]),  # means 2, 1, 1.25
        (dict(initial=0.5, change=0.3), [1.0, 2.0, 2.0, 1.0], [0.5, 0.7, 0.5, 0.5, 0.7]),
    ],
    ids=str,
)
def test_the_rule_of_the_loss(options, losses, expected):
    assert told(masked(fxmask.Feedback("loss", **{"every": 1, "change": 0.2, **options})), losses) == expected


def test_a_report_changes_nothing_until_the_next_step():
    """A mask that changed between a backward and its step would freeze and move other blocks than those of the gradient."""
    model = masked(LOSS)
    optimiser = optim.SGD(model.parameters(), lr=0.1)
    fxmask.guard(optimiser, model)
    x = torch.randn(8, 64)
    model(x).sum().backward()
    before = fxmask.masks(model)
    assert fxmask.feedback(model, 1.0) == {"0.weight": 0.2, "2.weight": 0.2}
    assert ratios(model) == [0.0, 0.0] and all(torch.equal(m, before[n]) for n, m in fxmask.masks(model).items())
    fxmask.step(model, 0)  # to announce is no step
    assert ratios(model) == [0.0, 0.0]
    optimiser.step()
    assert ratios(model) == [0.2, 0.2] and kept(model) == {"0.weight": 77, "2.weight": 77}


def test_tensors_and_other_numbers():
    numpy = pytest.importorskip("numpy")
    given = fxmask.Feedback("loss", 1, goal=numpy.float32(2), tolerance=numpy.float32(0.5))
    assert given == fxmask.Feedback("loss", 1, goal=2.0, tolerance=0.5) and type(given.goal) is type(given.tolerance) is float
    for value in (torch.tensor(2.0), torch.tensor([2.0]), numpy.float32(2), 2):
        model = masked(LOSS)
        assert told(model, [value, 3.0]) == [0.0, 0.2, 0.0]
        fxmask.load_state_dict(masked(LOSS), through_a_file(fxmask.state_dict(model)))


def test_layers_end_at_their_own_ratio():
    config = fxmask.WeightMask(ratio=0.9, block=(8, 8), schedule=LOSS)
    model = fxmask.apply(mlp(), config, overrides={"2": dict(ratio=0.3)})
    told(model, [1.0] * 3)
    assert ratios(model) == [0.6, 0.3]


def test_before_the_start_nothing_is_masked():
    model = masked(fxmask.Feedback("loss", every=1, initial=0.4), start=3)
    assert told(model, [1.0, 1.0, 1.0, 1.0, 1.0]) == [0.0, 0.0, 0.0, 0.4, 0.45, 0.5]


def test_losses_of_the_dense_model_before_the_start_are_no_goal_and_count_nothing():
    model = masked(fxmask.Feedback("loss", every=2, initial=0.4, change=0.1), start=3)
    announced = []
    for loss in (0.1, 0.1, 0.1, 2.0, 2.0, 1.0, 1.0, 3.0, 3.0):
        announced.append(fxmask.feedback(model, loss)["0.weight"])
        fxmask.step(model)
        assert ratios(model)[0] == pytest.approx(announced[-1])
    assert announced == pytest.approx([0.0, 0.0, 0.4, 0.4, 0.5, 0.5, 0.6, 0.6, 0.5])


def test_nobody_reports():
    model = masked(LOSS)
    fxmask.step(model, looks.SILENT - 1)
    with pytest.warns(FxMaskWarning, match=r"no loss was reported in 10,000 optimiser steps(.|\n)*call fxmask\.feedback\(model, loss\)"):
        fxmask.step(model)
    for n in (looks.SILENT, 4 * looks.SILENT):  # once
        fxmask.step(model, n)
    model = masked(LOSS, start=3)
    for n in (2, 1, looks.SILENT - 1):  # counted from the first mask on
        fxmask.step(model, n)
    with pytest.warns(FxMaskWarning, match="no loss was reported in 10,000 optimiser steps"):
        fxmask.step(model)
    model = masked(LOSS)
    fxmask.feedback(model, 1.0)
    fxmask.step(model, looks.SILENT)


# ---- by flips ----------------------------------------------------------------------------------------------------------------------------------------------


def shuffled(model, blocks):
    """Other weights: `blocks` of the largest blocks of each layer change places with as many of the smallest."""
    with torch.no_grad():
        for m in (model[0], model[2]):
            w, (nb, kb) = m.weight, (m.out_features // 8, m.in_features // 8)
            view = w.view(nb, 8, kb, 8).transpose(1, 2).reshape(nb * kb, 8, 8)
            order = view.square().sum((1, 2)).argsort()
            new = view.clone()
            new[order[:blocks]], new[order[-blocks:]] = view[order[-blocks:]], view[order[:blocks]]
            w.copy_(new.view(nb, kb, 8, 8).transpose(1, 2).reshape(w.shape))


@pytest.mark.parametrize("refresh", [1, 2])
def test_up_while_masks_are_calm(refresh):
    """96 blocks: 5 that change with 5 are 10 flips, more than a tenth; 4 with 4 are less. The first look, of step 2, only remembers; what it remembers, and
    what the next one does, keeps all blocks, so that nothing can have flipped since."""
    model = masked(FLIPS, refresh=refresh)
    fxmask.step(model, 0)
    found = []
    for blocks in [5, 5, 5, 5, 4, 0, 9, 1, 0]:
        if blocks:
            shuffled(model, blocks)
        fxmask.step(model, 2)
        found.append(ratios(model)[0])
    assert found == [0.0, 0.15, 0.3, 0.3, 0.45, 0.6, 0.6, 0.7, 0.7]
    assert ratios(model)[0] == ratios(model)[1]


def test_as_many_flips_as_the_goal_are_too_many():
    model = masked(dataclasses.replace(FLIPS, goal=10 / 96))
    fxmask.step(model, 0)
    found = []
    for blocks in (5, 5, 5, 5, 4):
        shuffled(model, blocks)
        fxmask.step(model, 2)
        found.append(ratios(model)[0])
    assert found == [0.0, 0.15, 0.3, 0.3, 0.45]


def test_each_layer_by_its_own_masks():
    model = masked(FLIPS, ratio=0.5)
    fxmask.step(model, 2)
    fxmask.step(model, 2)
    assert ratios(model) == [0.15, 0.15]
    for _ in range(2):
        weight = model[2].weight.detach().clone()
        shuffled(model, 9)
        with torch.no_grad():
            model[2].weight.copy_(weight)
        fxmask.step(model, 2)
    assert ratios(model) == [0.3, 0.45]  # of one look, which compares with a mask that keeps all, both


def test_a_weight_that_is_made_anew_is_looked_at_anew():
    """Of a parametrised layer the guard has seen the weight of an earlier step."""
    model = mlp()
    nn.utils.parametrizations.weight_norm(model[0])
    fxmask.apply(model, fxmask.WeightMask(ratio=0.5, block=(8, 8), schedule=fxmask.Feedback("flip_rate", every=1, goal=1e-6, initial=0.5), backward="ste"))
    optimiser = optim.SGD(model.parameters(), lr=5.0)
    fxmask.guard(optimiser, model)
    for i in range(3):
        before = fxmask.masks(model)["0.weight"]
        optimiser.zero_grad()
        model(torch.randn(4, 64, generator=torch.Generator().manual_seed(i))).square().sum().backward()
        optimiser.step()
        site = next(s for n, s, _ in sites(model) if n == "0.weight")
        assert not torch.equal(site._fxmask_looked, before)


# ---- by bytes ----------------------------------------------------------------------------------------------------------------------------------------------


def test_up_until_the_budget_is_met():
    """96 and 96 blocks of 256 bytes: 30,000 bytes are 117 blocks. Two layers lose one each at the same ratio, so 116 are kept."""
    model = masked(fxmask.Feedback("bytes", every=3, goal=30_000, change=0.15))
    found = []
    for _ in range(12):
        found.append((ratios(model)[0], sum(kept(model).values()) * 256))
        fxmask.step(model)
    assert [r for r, _ in found[::3]] == pytest.approx([0.0, 0.15, 0.3, 1 - 58 / 96])
    assert [b for _, b in found] == [192 * 256] * 3 + [164 * 256] * 3 + [136 * 256] * 3 + [116 * 256] * 3
    fxmask.step(model, 1000)
    assert sum(kept(model).values()) == 116 and fxmask.explain(model).rows[0]["final_ratio"] == ratios(model)[0]


def test_a_layer_that_has_come_to_its_ratio_leaves_the_rest_to_others():
    config = fxmask.WeightMask(ratio=0.9, block=(8, 8), schedule=fxmask.Feedback("bytes", every=1, goal=20_000))
    model = fxmask.apply(mlp(), config, overrides={"2": dict(ratio=0.5)})
    fxmask.step(model, 100)
    assert kept(model) == {"0.weight": 30, "2.weight": 48}  # 78 blocks of 256 bytes


def test_bytes_are_those_of_the_dtype_and_a_shared_weight_counts_once():
    half = fxmask.apply(mlp().half(), fxmask.WeightMask(ratio=0.9, block=(8, 8), schedule=fxmask.Feedback("bytes", every=1, goal=15_000)))
    fxmask.step(half, 100)
    assert sum(kept(half).values()) == 116
    model = fxmask.apply(Twice(), fxmask.WeightMask(ratio=0.9, block=(8, 8), schedule=fxmask.Feedback("bytes", every=1, goal=8 * 256)))
    fxmask.step(model, 100)
    assert kept(model) == {"fc.weight": 8}
    tied = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    tied[1].weight = tied[0].weight
    fxmask.apply(tied, fxmask.WeightMask(ratio=0.9, block=(8, 8), schedule=fxmask.Feedback("bytes", every=1, goal=8 * 256)))
    fxmask.step(tied, 100)
    assert set(kept(tied).values()) == {8}


def test_a_block_beyond_the_weight_costs_what_lies_inside():
    model = fxmask.apply(nn.Linear(64, 16), fxmask.WeightMask(ratio=0.9, block=(32, 16), schedule=fxmask.Feedback("bytes", every=1, goal=2 * 16 * 16 * 4)))
    fxmask.step(model, 100)
    assert kept(model) == {"weight": 2}


def test_a_budget_holds_in_all_phases():
    """In blocks of 32 a weight of 96 x 64 has 6, and as few as they are, the ratio has to be higher."""
    budget = fxmask.Feedback("bytes", every=1, goal=30_000)
    model = masked(budget, phases={40: dict(block=(32, 32))})
    fxmask.step(model, 30)
    assert sum(kept(model).values()) * 256 <= 30_000
    fxmask.step(model, 30)
    assert sum(kept(model).values()) * 4096 == 6 * 4096 <= 30_000


def test_a_budget_that_is_met_already():
    model = masked(fxmask.Feedback("bytes", every=1, goal=10**6, initial=0.25))
    fxmask.step(model, 100)
    assert ratios(model) == [0.25, 0.25]


def test_a_budget_that_masks_nothing():
    with pytest.warns(FxMaskWarning, match=r"a budget that masks nothing: expected fewer than the 49,152 bytes of these 2 layers, got goal=49,152"):
        masked(fxmask.Feedback("bytes", every=1, goal=49_152))


def test_a_budget_that_cannot_be_met():
    text = r"a budget that cannot be met: expected at most 5,000 bytes of kept blocks, got 14,848 of 49,152 at ratio 0\.7, in 2 layers(.|\n)*or goal=14848"
    with pytest.raises(ConfigError, match=text):
        masked(fxmask.Feedback("bytes", every=1, goal=5_000))
    model = mlp()
    with pytest.raises(ConfigError, match="cannot be met"):
        fxmask.apply(model, fxmask.WeightMask(ratio=0.7, block=(8, 8), schedule=fxmask.Feedback("bytes", every=1, goal=14_847)))
    assert type(model[0]) is nn.Linear
    masked(fxmask.Feedback("bytes", every=1, goal=14_848))


def test_a_budget_and_ties():
    with pytest.raises(ConfigError, match=r"Feedback\('bytes'\) with ties='keep', which keeps as many blocks as there are ties(.|\n)*where: 0"):
        masked(fxmask.Feedback("bytes", every=1, goal=30_000), ties="keep")


# ---- compiled, stopped, copied -----------------------------------------------------------------------------------------------------------------------------


def run(schedule, weights=0, **options):
    model = masked(schedule, weights, **{"backward": "ste", **options})
    optimiser = optim.SGD(model.parameters(), lr=0.3)
    fxmask.guard(optimiser, model)
    return model, optimiser


def train(model, optimiser, first, last, call=None):
    trace = []
    for i in range(first, last):
        loss = noisy_step(call or model, optimiser, i)
        if i % 2 and any(looks.feedback_of(s, "loss") for _, s, _ in sites(model)):
            fxmask.feedback(model, loss)
        trace.append((loss.item(), ratios(model), fxmask.masks(model), [p.detach().clone() for p in model.parameters()]))
    return trace


EACH = {
    "loss": fxmask.Feedback("loss", every=2, tolerance=0.5),
    "flip_rate": fxmask.Feedback("flip_rate", every=2, goal=0.06),
    "bytes": fxmask.Feedback("bytes", every=2, goal=30_000),
}


@pytest.mark.parametrize("measure", ["loss", *(pytest.param(m, marks=pytest.mark.slow) for m in ("flip_rate", "bytes"))])
def test_one_compile(measure):
    (model, optimiser), (plain, own) = run(EACH[measure]), run(EACH[measure])
    with torch._dynamo.config.patch(error_on_recompile=True):
        found = train(model, optimiser, 0, 12, torch.compile(model, backend="aot_eager", fullgraph=True))
    for a, b in zip(found, train(plain, own, 0, 12), strict=True):
        assert a[1] == b[1] and all(torch.equal(m, b[2][n]) for n, m in a[2].items())
        torch.testing.assert_close(a[3], b[3])
    assert len({tuple(t[1]) for t in found}) > 2


@pytest.mark.parametrize("measure", EACH)
@pytest.mark.parametrize(("cut", "refresh"), [(3, 1), (7, 2), *(pytest.param(*c, marks=pytest.mark.slow) for c in [(3, 2), (6, 1), (6, 2), (7, 1)])])
def test_a_resumed_run_is_the_same_run(measure, cut, refresh):
    model, optimiser = run(EACH[measure], refresh=refresh)
    train(model, optimiser, 0, cut)
    saved = through_a_file((model.state_dict(), fxmask.state_dict(model)))
    expected = train(model, optimiser, cut, 14)
    other, own = run(EACH[measure], 9, refresh=refresh)
    train(other, own, 0, 4)
    other.load_state_dict(saved[0])
    fxmask.load_state_dict(other, saved[1])
    assert same(train(other, own, cut, 14), expected)
    assert same(fxmask.state_dict(other), fxmask.state_dict(model))
    assert len({tuple(t[1]) for t in expected}) > 1


def test_phases_and_feedback_together():
    """A look after other blocks only remembers, and a ratio that was come to goes on."""
    c = dict(phases={7: dict(block=(16, 16)), 9: dict(backward="masked")}, backward="ste")
    model, optimiser = run(fxmask.Feedback("flip_rate", every=2, goal=1.0, change=0.1), **c)
    trace = train(model, optimiser, 0, 14)
    assert [t[1][0] for t in trace] == [0.0, 0.0, 0.0, 0.1, 0.1, 0.2, 0.2, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4, 0.5]
    assert {tuple(t[2]["0.weight"].shape) for t in trace[:6]} == {(12, 8)} and {tuple(t[2]["0.weight"].shape) for t in trace[6:]} == {(6, 4)}
    first, own = run(fxmask.Feedback("flip_rate", every=2, goal=1.0, change=0.1), **c)
    train(first, own, 0, 8)
    other, other_own = run(fxmask.Feedback("flip_rate", every=2, goal=1.0, change=0.1), 9, **c)
    other.load_state_dict(first.state_dict())
    fxmask.load_state_dict(other, through_a_file(fxmask.state_dict(first)))
    assert same(train(other, other_own, 8, 14), trace[8:])


def test_copies_go_their_own_way():
    model = masked(LOSS)
    told(model, [1.0, 1.0])
    twin = copy.deepcopy(model)
    torch.save(model, buffer := io.BytesIO())
    other = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert told(twin, [1.0, 2.0])[-1] == told(other, [1.0, 2.0])[-1] == 0.4
    assert told(model, [1.0])[-1] == pytest.approx(0.6)
    restored = fxmask.restore(model)
    assert not [n for n in restored[0].__dict__ if n.startswith("_fxmask")]


def test_the_end_of_a_feedback_is_where_it_is():
    """A loss may never allow the highest ratio, and that is no reason to warn."""
    model = masked(LOSS)
    told(model, [1.0, 1.0])
    fxmask.finalize(model)
    assert int((model[0].weight.view(12, 8, 8, 8) == 0).all(3).all(1).sum()) == 96 - 58


def test_a_step_that_failed_may_be_told_again(monkeypatch):
    from fxmask.passes.state import rebuild

    model, twin = masked(LOSS), masked(LOSS)
    for m in (model, twin):
        fxmask.step(m)
        fxmask.feedback(m, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(rebuild, "rebuild", lambda jobs, compute=None: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fxmask.step(model)
    assert ratios(model) == [0.0, 0.0] and kept(model) == {"0.weight": 96, "2.weight": 96}
    for m in (model, twin):
        fxmask.step(m)
    assert kept(model) == kept(twin) == {"0.weight": 77, "2.weight": 77}


# ---- several ranks -----------------------------------------------------------------------------------------------------------------------------------------


def test_ranks_that_report_different_losses(monkeypatch):
    model = masked(LOSS)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    others = [1.0]

    def gather(found, value):
        found[:] = [value, others[0]]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    assert fxmask.feedback(model, 1.0)["0.weight"] == 0.2
    others[0] = math.nextafter(1.0, 2)
    text = r"ranks report different losses, and their masks would part: expected one number, got 1\.0, 1\.0000000000000002(.|\n)*reduce the loss first"
    with pytest.raises(StateError, match=text):
        fxmask.feedback(model, 1.0)
    assert fxmask.state_dict(model)["masks"]["0.weight"]["feedback"]["next"] == 1
