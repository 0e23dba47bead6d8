"""Masks that score, regrow, fade or scale their weights, where they meet everything else: findings of a review, each of which was wrong once."""

import csv
import itertools

import pytest
import torch
from torch import nn, optim

import fxmask
from fxmask.errors import ConfigError, FxMaskWarning, StateError, UnsupportedError
from fxmask.kernels.grid import expand_mask
from fxmask.passes.state.ranking import keep_norm


def layer(n=64, k=64, seed=0, **config):
    torch.manual_seed(seed)
    return fxmask.apply(nn.Sequential(nn.Linear(k, n)), fxmask.WeightMask(**{"ratio": 0.5, "block": (16, 16), **config}))


def train(model, optimizer, n, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n):
        optimizer.zero_grad()
        model(torch.randn(16, model[0].in_features, generator=generator)).square().mean().backward()
        optimizer.step()
        yield


def sgd(model, lr=0.0, **options):
    optimizer = optim.SGD(model.parameters(), lr=lr, **options)
    fxmask.guard(optimizer, model)
    return optimizer


def mask_of(model):
    return fxmask.masks(model)["0.weight"]


def kept_norm(model):
    w = model[0].weight.detach().double()
    return float(torch.where(expand_mask(mask_of(model), w.shape, model[0]._fxmask_config.block), w, 0).norm())


REGROW = {
    "gradient": dict(backward="rigl", dense_every=2, refresh=2, regrow=fxmask.Regrow("gradient", 0.5, until=8)),
    "random": dict(refresh=2, regrow=fxmask.Regrow("random", 0.5, until=8)),
}


@pytest.mark.parametrize("by", list(REGROW))
def test_from_until_on_no_block_is_exchanged_and_none_is_zeroed(by):
    model = layer(128, 128, **REGROW[by])
    optimizer, moved = sgd(model), []
    last = mask_of(model)
    for step, _ in enumerate(train(model, optimizer, 20), 1):
        moved.append(int((mask_of(model) != last).sum()))
        last = mask_of(model)
        if step == 8:
            norm = float(model[0].weight.detach().norm())
    assert sum(moved[:8]) > 0 and moved[8:] == [0] * 12
    assert float(model[0].weight.detach().norm()) == norm


def test_blocks_that_the_ratio_brings_back_come_as_they_are():
    schedule = fxmask.Schedule("cyclic", steps=40, cycles=4)
    with pytest.warns(FxMaskWarning, match=r"which is none in: 0 \(8 blocks kept\); choose a larger fraction"):
        model = layer(regrow=fxmask.Regrow("random", 0.05, until=1), schedule=schedule)
    before = model[0].weight.detach().clone()
    kept = [int(mask_of(model).sum()) for _ in train(model, sgd(model), 40)]
    assert any(a < b for a, b in itertools.pairwise(kept)) and torch.equal(model[0].weight.detach(), before)


def test_each_phase_is_asked_whether_it_exchanges_any_block():
    config = fxmask.WeightMask(0.5, (64, 64), refresh=2, regrow=fxmask.Regrow("random"), phases={10: dict(block=(16, 16))})
    with pytest.warns(FxMaskWarning) as told:
        fxmask.apply(nn.Sequential(nn.Linear(64, 64)), config)
    assert any("which is none in: 0 (1 blocks kept);" in str(w.message) for w in told)


def test_no_block_grows_by_a_gradient_that_nobody_saw():
    model = layer(backward="rigl", dense_every=100, refresh=2, regrow=fxmask.Regrow("gradient", 0.5))
    before = mask_of(model)
    for _ in train(model, sgd(model, 0.1), 10):
        assert torch.equal(mask_of(model), before)


def test_a_dense_gradient_is_good_for_one_exchange():
    model = layer(backward="rigl", dense_every=5, refresh=1, regrow=fxmask.Regrow("gradient", 0.5))
    last, moved = mask_of(model), []
    for step, _ in enumerate(train(model, sgd(model, 0.1), 15), 1):
        moved += [step] if not torch.equal(mask_of(model), last) else []
        last = mask_of(model)
    assert moved and set(moved) <= {5, 10, 15}


def test_the_rebuilds_of_users_leave_regrown_blocks_alone():
    model = layer(128, 128, refresh=2, regrow=fxmask.Regrow("random", 0.5))
    list(train(model, sgd(model, 0.1), 5))  # in the same step as an exchange the same blocks would come in again
    before, weight = mask_of(model), model[0].weight.detach().clone()
    fxmask.refresh(model)
    assert torch.equal(mask_of(model), before) and torch.equal(model[0].weight, weight)


def test_blocks_that_return_have_no_momentum():
    model = layer(128, 128, refresh=1, regrow=fxmask.Regrow("random", 0.5))
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    fxmask.guard(optimizer, model)
    last, seen = mask_of(model), 0
    for _ in train(model, optimizer, 6):
        came = expand_mask(mask_of(model) & ~last, (128, 128), (16, 16))
        seen += int(came.sum())
        assert not optimizer.state[model[0].weight]["exp_avg"][came].any()
        last = mask_of(model)
    assert seen


@pytest.mark.parametrize("criterion", ["taylor", "gradient", "movement"])
def test_scores_that_are_all_zero_rank_by_the_norm(criterion):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    nn.init.zeros_(model[1].weight)  # as residual branches begin: no gradient reaches the first layer
    fxmask.apply(model, fxmask.WeightMask(block=(16, 16), criterion=criterion, backward="ste"), include="0")
    before = mask_of(model)
    next(train(model, sgd(model), 1))
    assert not model[0].weight.grad.any() and torch.equal(mask_of(model), before)


@pytest.mark.parametrize("fused", [False, True])
def test_a_first_step_that_overflows_changes_no_mask(fused):
    model = layer(criterion="taylor", backward="ste")
    before = mask_of(model)
    optimizer = optim.AdamW(model.parameters(), fused=fused)
    fxmask.guard(optimizer, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    scaler.scale(model(torch.randn(16, 64)).square().sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(mask_of(model), before) and torch.isfinite(model[0].weight).all()


def test_scores_are_of_the_gradient_without_the_scalers_factor():
    scores = []
    for scaled in (False, True):
        model = layer(criterion="gradient", average=0.5, backward="ste")
        optimizer = optim.SGD(model.parameters(), lr=0.1, fused=True)
        fxmask.guard(optimizer, model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        for i in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(16, 64, generator=torch.Generator().manual_seed(i))).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        scores.append(model[0]._fxmask_score)
    torch.testing.assert_close(*scores)


def test_a_broken_weight_is_seen_in_an_average_and_forgotten_when_mended():
    model = layer(average=0.5)
    optimizer = sgd(model)
    list(train(model, optimizer, 2))
    i, j = (~mask_of(model)).nonzero()[0].tolist()
    old = model[0].weight[16 * i, 16 * j].item()
    with torch.no_grad():
        model[0].weight[16 * i, 16 * j] = torch.inf
    optimizer.zero_grad()
    model[0].weight.grad = torch.zeros_like(model[0].weight)
    optimizer.step()
    assert mask_of(model)[i, j]
    with torch.no_grad():
        model[0].weight[16 * i, 16 * j] = old
    model[0].weight.grad = torch.zeros_like(model[0].weight)
    optimizer.step()
    assert torch.isfinite(model[0]._fxmask_score).all() and not mask_of(model)[i, j]


GAIN = {
    "cyclic": dict(ratio=0.75, schedule=fxmask.Schedule("cyclic", steps=40, cycles=8)),
    "initial": dict(ratio=0.75, schedule=fxmask.Schedule("linear", steps=10, initial=0.5)),
    "start": dict(ratio=0.75, start=5),
    "phases": dict(phases={3: dict(block=(32, 32)), 5: dict(block=(16, 16)), 7: dict(block=(32, 32))}),
}


def test_gain_leaves_layers_alone_that_were_masked_before():
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), ratio=0.5, gain=True, include="0")
    before = model[0].weight.detach().clone()
    fxmask.apply(model, ratio=0.5, gain=True, include="1")
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("name", ["cyclic", "initial", "start"])
def test_gain_adds_nothing_up(name):
    torch.manual_seed(0)
    dense = float(nn.Linear(64, 64).weight.detach().double().norm())
    model = layer(gain=True, **GAIN[name])
    for _ in train(model, sgd(model), 40):
        assert kept_norm(model) == pytest.approx(dense, rel=1e-5)


def test_gain_does_not_begin_anew_with_other_blocks():
    model = layer(gain=True, **GAIN["phases"])
    norm = float(model[0].weight.detach().norm())
    list(train(model, sgd(model), 10))
    assert float(model[0].weight.detach().norm()) == pytest.approx(norm)


@pytest.mark.parametrize("other", [(32, 32), (8, 8), (64, 16)])
def test_gain_goes_on_where_other_blocks_and_another_ratio_come_together(other):
    model = layer(gain=True, ratio=0.75, refresh=4, schedule=fxmask.Schedule("linear", steps=12), phases={4: dict(block=other)})
    norm = kept_norm(model)
    for _ in train(model, sgd(model), 14):
        assert kept_norm(model) == pytest.approx(norm, rel=1e-5)


def test_gain_leaves_loaded_weights_and_refreshed_masks_alone():
    model = layer(gain=True, ratio=0.8, refresh=10, schedule=fxmask.Schedule("linear", steps=100))
    optimizer = sgd(model, 0.01)
    list(train(model, optimizer, 25))
    saved = {k: v.clone() for k, v in model.state_dict().items()}
    list(train(model, optimizer, 9))
    model.load_state_dict(saved)
    fxmask.refresh(model)
    assert all(torch.equal(v, saved[k]) for k, v in model.state_dict().items())


def test_a_failed_apply_with_gain_changes_no_weight():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)))
    before = model[0].weight.detach().clone()
    with pytest.raises(UnsupportedError, match="expected a Parameter, got one that the model computes"):
        fxmask.apply(model, fxmask.WeightMask(gain=True))
    assert torch.equal(model[0].weight.detach(), before)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.emb.weight


@pytest.mark.parametrize("config", [dict(gain=True), dict(regrow=fxmask.Regrow("random"))], ids=["gain", "regrow"])
def test_weights_that_others_use_unmasked_are_refused(config):
    with pytest.raises(ConfigError, match="write the weight of 'head', which an Embedding uses, too"):
        fxmask.apply(Tied(), fxmask.WeightMask(**config), include="head")
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    with pytest.raises(ConfigError, match="write the weight of '1', which '0' uses, too"):
        fxmask.apply(model, fxmask.WeightMask(**config), exclude="0")


def test_closures_hide_their_gradients():
    model = layer(criterion="gradient", backward="ste")
    optimizer = sgd(model, 0.1)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 64)).square().sum()
        loss.backward()
        return loss

    with pytest.raises(UnsupportedError, match="a step with a closure makes its gradients inside, where no score can see them"):
        optimizer.step(closure)
    assert model[0].weight.grad is None


def test_momentum_of_an_optimiser_without_any():
    model = layer(criterion="momentum", backward="ste")
    with pytest.raises(UnsupportedError, match="expected one of exp_avg, momentum_buffer, got none"):
        list(train(model, sgd(model, 0.1), 3))


def test_a_later_phase_that_scores_needs_a_parameter_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)))
    with pytest.raises(UnsupportedError, match="expected a Parameter, got one that the model computes"):
        fxmask.apply(model, fxmask.WeightMask(backward="ste", phases={2: dict(criterion="taylor")}))


def test_a_phase_with_another_criterion_goes_on_from_the_scores():
    model = layer(criterion="gradient", backward="ste", refresh=50, phases={20: dict(criterion="taylor")})
    optimizer = sgd(model, 0.5)
    list(train(model, optimizer, 19))
    scores = model[0]._fxmask_score
    list(train(model, optimizer, 1, seed=2))
    assert model[0]._fxmask_config.criterion == "taylor" and not torch.equal(scores, torch.zeros_like(scores))
    best = model[0]._fxmask_score.flatten().argsort(descending=True)[:8]
    assert set(mask_of(model).flatten().nonzero().flatten().tolist()) == set(best.tolist())


def test_a_step_that_is_refused_shows_no_score_anything():
    model = layer(criterion="movement", backward="rigl", regrow=fxmask.Regrow("random"))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    fxmask.guard(optimizer, model, masked_step=True)
    model(torch.randn(4, 64)).sum().backward()
    for _ in range(3):
        with pytest.raises(UnsupportedError, match="masked_step with a closure"):
            optimizer.step(lambda: None)
    assert not model[0]._fxmask_score.any()


RAMP = fxmask.Schedule("linear", steps=8, initial=0.5)


def test_a_soft_mask_is_made_permanent_with_a_warning_on_its_ramp():
    model = layer(soft=True, schedule=RAMP)
    fxmask.step(model, 4)
    with pytest.warns(FxMaskWarning, match="before the schedule has come to its end: 0.weight, whose masked blocks still count"):
        fxmask.finalize(model)


def test_a_backward_that_is_still_to_come_keeps_its_scale():
    model = layer(soft=True, schedule=RAMP)
    fxmask.step(model, 4)
    x = torch.randn(3, 64)
    y = model(x)
    with torch.no_grad(), fxmask.dense(model):
        teacher = model(x)
    fxmask.step(model)
    (y - teacher).square().mean().backward()
    assert model[0].weight.grad.abs().sum() > 0


def test_words_about_a_ramp():
    model = layer(soft=True, schedule=RAMP, average=0.5)
    optimizer = sgd(model)
    row = fxmask.explain(model).rows[0]
    assert row["ranks_by"] == "average 0.5, soft" and row["masked_weights"] == "freeze, from step 8; free till then"
    found = fxmask.analyze(model, torch.randn(4, 64), device="h200")
    assert found.summary["flop"]["fwd"] == found.summary["flop"]["bwd_dw"] == 2 * 4 * 64 * 32
    text = str(found)
    assert "1 soft masks are on their ramp and compute densely until step 8" in text and "1 masks take in scores" in text
    assert model[0]._fxmask_softening and optimizer.param_groups
    with pytest.raises(UnsupportedError, match="which impl='cpu' does not: expected impl='auto'"):
        fxmask.WeightMask(soft=True, schedule=RAMP, impl="cpu")


def test_a_log_counts_no_update_twice_and_mixes_no_runs(tmp_path):
    path, model = tmp_path / "h.csv", layer()
    log = fxmask.HealthLog(model, path)
    for _ in range(5):
        log.update()
    saved = log.state_dict()
    log.update(), log.update()
    again = fxmask.HealthLog(model, path)
    again.load_state_dict(saved)
    for _ in range(3):
        again.update()
    with path.open(newline="") as file:
        assert [r["update"] for r in csv.DictReader(file)] == [str(i) for i in range(1, 9)]
    before, other = path.read_text(), fxmask.HealthLog(model, path)
    for _ in range(2):
        with pytest.raises(StateError, match="holds the rows of another run: expected a new file"):
            other.update()
    assert path.read_text() == before and not other.updates


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_gain_scales_by_no_norm_that_is_none(value):
    """Old blocks of zeros, or a block that is not finite: a factor of them would be the end of all weights."""
    model = layer(gain=True)
    old, new = (torch.zeros(4, 4, dtype=torch.bool) for _ in range(2))
    old[0], new[1:3] = True, True
    weight = model[0].weight
    with torch.no_grad():
        weight[:16] = value
    before = weight.detach().clone()
    for masks in ((new, old), (old, new)):
        keep_norm(model[0], weight, *masks)
        assert torch.allclose(weight, before, rtol=0, atol=0, equal_nan=True)
