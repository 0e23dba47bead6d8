"""Scores of blocks where nothing is to be added: default dtypes, weights that have not stepped yet, skipped steps, other weights."""

import pytest
import torch
from torch import nn, optim

import fxmask
from fxmask.errors import UnsupportedError


def layer(**config):
    torch.manual_seed(0)
    return fxmask.apply(nn.Sequential(nn.Linear(32, 32)), fxmask.WeightMask(**{"ratio": 0.5, "block": (8, 8), **config}))


def train(model, optimizer, n):
    for _ in range(n):
        optimizer.zero_grad()
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def default_dtype(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


SOFT = dict(soft=True, schedule=fxmask.Schedule("linear", steps=4))


@pytest.mark.parametrize("config", [dict(criterion="taylor"), dict(criterion="movement", backward="ste"), dict(average=0.9), SOFT], ids=str)
@pytest.mark.parametrize("n", [0, 2])
def test_the_default_dtype_is_nothing_to_a_state(default_dtype, config, n):
    model = layer(**config)
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    fxmask.guard(optimizer, model)
    train(model, optimizer, n)
    site = model[0]
    assert all(t is None or t.dtype == torch.float32 for t in (site._fxmask_score, site._fxmask_scale))
    fxmask.load_state_dict(model, fxmask.state_dict(model))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x, both=True):
        return self.b(self.a(x)) if both else self.a(x)


@pytest.mark.parametrize("how", ["frozen", "unfrozen", "unused"])
def test_a_weight_that_the_optimiser_has_not_moved_has_no_momentum_yet(how):
    torch.manual_seed(0)
    model = fxmask.apply(Two(), ratio=0.5, block=(8, 8), criterion="momentum")
    model.b.weight.requires_grad_(how == "unused")
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    fxmask.guard(optimizer, model)
    for i in range(5):
        if how == "unfrozen" and i == 2:
            model.b.weight.requires_grad_(True)
        optimizer.zero_grad()
        model(torch.randn(4, 32), both=how != "unused" or i >= 2).square().sum().backward()
        optimizer.step()
    scores = [float(m._fxmask_score.sum()) for m in (model.a, model.b)]
    assert scores[0] > 0 and (scores[1] > 0) == (how != "frozen")


def test_steps_told_by_hand_want_a_gradient_of_some_layer_and_none_of_several_steps_at_once():
    model = fxmask.apply(Two(), ratio=0.5, block=(8, 8), criterion="gradient")
    fxmask.step(model, 0)
    model(torch.randn(4, 32), both=False).square().sum().backward()
    fxmask.step(model)
    seen = [m._fxmask_score.clone() for m in (model.a, model.b)]
    assert seen[0].any() and not seen[1].any()
    model.zero_grad()
    fxmask.step(model, 4)
    assert all(torch.equal(m._fxmask_score, s) and m._fxmask_step == 5 for m, s in zip((model.a, model.b), seen, strict=True))


def test_a_new_optimiser_has_no_momentum_yet():
    model = layer(criterion="momentum")
    for cls in (optim.Adam, optim.AdamW):
        optimizer = cls(model.parameters())
        with fxmask.guard(optimizer, model):
            train(model, optimizer, 3)
    optimizer = optim.Adam(model.parameters())
    fresh = optimizer.state_dict()
    with fxmask.guard(optimizer, model):
        train(model, optimizer, 2)
        optimizer.load_state_dict(fresh)
        train(model, optimizer, 2)
    optimizer = optim.SGD(model.parameters(), lr=0.1)  # and this one never has
    fxmask.guard(optimizer, model)
    train(model, optimizer, 1)
    with pytest.raises(UnsupportedError, match="expected one of exp_avg, momentum_buffer, got none"):
        train(model, optimizer, 1)


GRADIENTS = [dict(criterion="taylor"), dict(criterion="movement"), dict(criterion="gradient", average=0.9), dict(regrow=fxmask.Regrow("gradient", 0.3))]


@pytest.mark.parametrize("config", GRADIENTS, ids=str)
def test_a_step_that_a_scaler_skips_adds_nothing_to_any_layer(config):
    torch.manual_seed(0)
    model = fxmask.apply(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), fxmask.WeightMask(ratio=0.5, block=(8, 8), backward="ste", refresh=100, **config))
    optimizer = optim.Adam(model.parameters(), lr=1e-3, fused=True)
    fxmask.guard(optimizer, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for broken in (False, True, False):
        before = kept(model)
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(4, 32)).square().mean()).backward()
        if broken:
            model[1].weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        assert [torch.equal(t, old) for t, old in zip(kept(model), before, strict=True)] == [broken] * 2


def kept(model):
    found = [m._fxmask_growth if m._fxmask_config.regrow is not None else m._fxmask_score for m in model]
    return [torch.zeros(4, 4) if t is None else t.clone() for t in found]


@pytest.mark.parametrize("config", [dict(average=0.9), dict(criterion="movement", backward="ste")], ids=str)
def test_scores_outlive_weights_that_are_swapped_in_and_out(config):
    """Those of an average of this run. Weights of another run want masks that begin anew."""
    model = layer(**config)
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    fxmask.guard(optimizer, model)
    train(model, optimizer, 4)
    own, mask, score = {k: v.clone() for k, v in model.state_dict().items()}, fxmask.masks(model)["0.weight"], model[0]._fxmask_score.clone()
    other = torch.zeros(32, 32)
    other[16:] = torch.randn(16, 32)
    for weights in ({**own, "0.weight": other}, own):
        model.load_state_dict(weights)
        assert torch.equal(fxmask.masks(model)["0.weight"], mask) and torch.equal(model[0]._fxmask_score, score)
    model.load_state_dict({**own, "0.weight": other})
    anew = fxmask.apply(fxmask.restore(model), fxmask.WeightMask(ratio=0.5, block=(8, 8), **config))
    assert not fxmask.masks(anew)["0.weight"][:2].any()


HOLDS = [(dict(hysteresis=999.0), False), (dict(hysteresis=999.0), True), (dict(regrow=fxmask.Regrow("random")), False)]


@pytest.mark.parametrize(("config", "tied"), HOLDS, ids=["hysteresis", "tied", "regrow"])
def test_masks_of_loaded_weights_hold_to_nothing_that_was(config, tied):
    """Neither blocks that stay, nor those that nothing but an exchange may move, also of a layer whose weight another one has loaded."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
    if tied:
        model[1].weight = model[0].weight
    fxmask.apply(model, fxmask.WeightMask(0.5, (8, 8), refresh=100, **config))
    new, plain = nn.Linear(32, 32), fxmask.apply(nn.Sequential(nn.Linear(32, 32)), ratio=0.5, block=(8, 8))
    model[int(tied)].load_state_dict(new.state_dict())
    plain[0].load_state_dict(new.state_dict())
    assert torch.equal(fxmask.masks(model)["0.weight"], fxmask.masks(plain)["0.weight"])


def test_an_average_of_norms_sees_a_broken_weight_and_forgets_it():
    model = layer(average=0.5)
    worst = int(fxmask.masks(model)["0.weight"].flatten().int().argmin())
    row, col = worst // 4 * 8, worst % 4 * 8
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    fxmask.guard(optimizer, model)
    own = model[0].weight.detach().clone()
    for broken in (False, True, False, False):
        with torch.no_grad():
            model[0].weight.copy_(own)
            model[0].weight[row, col] = torch.inf if broken else own[row, col]
        train(model, optimizer, 1)
        assert bool(fxmask.masks(model)["0.weight"].flatten()[worst]) == broken
        assert bool(model[0]._fxmask_score.isfinite().all()) != broken


@pytest.mark.parametrize(("score", "stays"), [(-1.9, True), (-2.1, False)])
def test_hysteresis_holds_kept_blocks_of_negative_scores_too(score, stays):
    """With 0.5 a kept block at -1.9 counts as one at -0.95, and the masked ones are at -1."""
    model = layer(criterion="movement", hysteresis=0.5, backward="ste")
    before = fxmask.masks(model)["0.weight"]
    model[0]._fxmask_score = torch.where(before, score, -1.0)
    fxmask.refresh(model)
    assert torch.equal(fxmask.masks(model)["0.weight"], before if stays else ~before)


@pytest.mark.parametrize("config", [*GRADIENTS[:3], dict(average=0.5), dict(criterion="momentum", average=0.5)], ids=str)
def test_a_scaler_scales_no_score(config):
    """The scale differs from step to step, and an average would mix them. Those of gradients are divided by it, others are left as they are."""
    found = []
    for scale in (1.0, 4.0):
        model = layer(**config, backward="ste")
        optimizer = optim.Adam(model.parameters(), lr=0.0, fused=True)
        fxmask.guard(optimizer, model)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_factor=2.0, growth_interval=1)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(4, 32)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(model[0]._fxmask_score.clone())
    assert torch.allclose(*found, rtol=1e-5)
