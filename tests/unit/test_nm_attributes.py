"""The tensors of N:M masks where a model is averaged, moved, emptied, frozen by hand: exactly n of m, or an error."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxmask
from fxmask import NMMask
from fxmask.kernels import nm
from fxmask.nm.nm_layers import masked_weight

MODES = {
    "magnitude": dict(),
    "transposable": dict(transposable=True),
    "permuted": dict(mode="permuted"),
    "learned": dict(mode="learned", tau_from=1.0, tau_steps=4),
    "reordered": dict(mode="learned", permute=True),
}


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(256, 32))


def keeps_two_of_four(model: nn.Module) -> bool:
    kept = []
    for name, mask in fxmask.masks(model).items():
        rows, order = mask.flatten(1), model.get_submodule(name.removesuffix(".weight")).nm_permutation
        kept.append((rows if order is None else rows[:, order]).reshape(-1, 4).sum(1))
    return len(kept) == 2 and all(bool((k == 2).all()) for k in kept)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.9)], ids=["swa", "ema"])
@pytest.mark.parametrize("use_buffers", [False, True], ids=["", "buffers"])
def test_averages_keep_exactly_two_of_four(mode, average, use_buffers):
    model = fxmask.apply(net(), NMMask(**MODES[mode]))
    averaged = AveragedModel(model, multi_avg_fn=average, use_buffers=use_buffers)
    names = list(dict(model.named_buffers()))
    for seed in range(3):
        with torch.no_grad():
            for p, new in zip(model.parameters(), net(seed).parameters(), strict=False):
                p.add_(torch.randn_like(p) if p.shape != new.shape else new)
        fxmask.refresh(model)
        averaged.update_parameters(model)
        if seed == 1:
            fxmask.freeze(model)  # the average has no frozen mask, and its other buffers stay in step
    assert keeps_two_of_four(averaged.module) and names == list(dict(model.named_buffers())) == list(dict(net().named_buffers()))


@pytest.mark.parametrize("mode", MODES)
def test_emptied_and_loaded_again(mode):
    x = torch.randn(2, 4, 4, 4)
    for by_meta in (False, True):
        model = fxmask.apply(net(), NMMask(**MODES[mode])).eval()
        saved, masks, y = {n: t.clone() for n, t in model.state_dict().items()}, fxmask.masks(model), model(x)
        (model.to("meta") if by_meta else model).to_empty(device="cpu").load_state_dict(saved)
        assert torch.equal(model(x), y) and all(torch.equal(m, masks[n]) for n, m in fxmask.masks(model).items())
    model = fxmask.apply(net(), NMMask(**MODES[mode]))
    fxmask.freeze(model)
    state, masks = fxmask.state_dict(model), fxmask.masks(model)
    model.to("meta").to_empty(device="cpu").load_state_dict(saved, strict=False)
    for use in (lambda: model(x), lambda: fxmask.masks(model), lambda: fxmask.finalize(model)):
        with pytest.raises(fxmask.FxMaskError, match="lost on the meta device"):
            use()
    row = fxmask.explain(model).rows[0]
    assert row["masked"] and row["achieved_ratio"] is None
    assert "frozen; its mask was lost on the meta device, and its forward raises until fxmask.load_state_dict brings it" in row["reason"]
    fxmask.load_state_dict(model, state)
    assert fxmask.explain(model).rows[0]["reason"] == "selected; frozen"
    assert all(torch.equal(m, masks[n]) for n, m in fxmask.masks(model).items())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("assign", [False, True])
def test_a_frozen_mask_that_is_loaded_on_meta_is_lost_there(mode, assign):
    """It was all False once the weights came, and the layer's output its bias."""
    x, model = torch.randn(2, 4, 4, 4), fxmask.apply(net(), NMMask(**MODES[mode])).eval()
    loaded = copy.deepcopy(model).to("meta")
    fxmask.freeze(model)
    fxmask.load_state_dict(loaded, fxmask.state_dict(model))
    (loaded if assign else loaded.to_empty(device="cpu")).load_state_dict(model.state_dict(), assign=assign)
    with pytest.raises(fxmask.FxMaskError, match="lost on the meta device"):
        loaded(x)
    other = copy.deepcopy(model)
    with pytest.raises(fxmask.FxMaskError, match=r"the saved mask does not fit: expected bool .*, with values"):
        fxmask.load_state_dict(other, fxmask.state_dict(loaded))
    assert torch.equal(other(x), model(x))
    fxmask.load_state_dict(loaded, fxmask.state_dict(model))
    assert torch.equal(loaded(x), model(x))


@pytest.mark.parametrize("key", ["mask", "permutation"])
def test_a_saved_mask_without_values_is_refused_before_anything_changes(key):
    model = fxmask.apply(net(), NMMask(mode="permuted"))
    state, before = fxmask.state_dict(model), {n: t.clone() for n, t in fxmask.masks(model).items()}
    last = state["nm"]["3"]
    last[key] = last[key].to("meta")
    state["nm"]["0"]["mask"].fill_(False)
    with pytest.raises(fxmask.FxMaskError, match=f"the saved {key} does not fit: expected (.|\\n)*where: 3"):
        fxmask.load_state_dict(model, state)
    assert all(torch.equal(m, before[n]) for n, m in fxmask.masks(model).items())


@pytest.mark.parametrize("mode", MODES)
def test_emptied_and_loaded_by_assignment(mode):
    """Weights come from another device, and with them an order of columns; the attributes follow, as they do when the model moves."""
    x, model = torch.randn(2, 4, 4, 4), fxmask.apply(net(), NMMask(**MODES[mode])).eval()
    y, loaded = model(x), copy.deepcopy(model).to("meta")
    loaded.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(loaded(x), y) and keeps_two_of_four(loaded)
    loaded = copy.deepcopy(model).to("meta")
    for m, full in ((loaded[0], model[0]), (loaded[1], model[1]), (loaded[3], model[3])):
        m._parameters.update(full._parameters)  # by hand, buffers too
        m._buffers.update(full._buffers)
    if MODES[mode].get("mode") != "permuted" and not MODES[mode].get("permute"):  # whose order is lost
        assert torch.equal(loaded.to("cpu")(x), y)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [(40, 256), (32, 512)])
def test_a_weight_of_another_size_is_an_error(mode, size):
    model = fxmask.apply(nn.Sequential(nn.Linear(256, 32)), NMMask(**MODES[mode])).eval()
    model[0].weight, model[0].bias = nn.Parameter(torch.randn(size)), nn.Parameter(torch.zeros(size[0]))
    if mode in ("magnitude", "transposable"):  # made anew in each forward
        assert int(fxmask.masks(model)["0.weight"].sum()) == model[0].weight.numel() // 2 and model(torch.randn(2, size[1])).shape == (2, size[0])
        return
    for use in (lambda: model(torch.randn(2, size[1])), lambda: fxmask.masks(model), lambda: fxmask.freeze(model), lambda: fxmask.finalize(model)):
        with pytest.raises(fxmask.FxMaskError, match="replaced by one of another size"):
            use()
    (row,) = fxmask.explain(model).rows
    assert row["reason"] == "selected; its weight has been replaced by one of another size, and its forward raises"
    assert row["shape"] == f"{size[0]}x{size[1]}" and row["achieved_ratio"] is None


def test_masks_that_were_lost_come_back_by_a_refresh():
    model = fxmask.apply(net(), NMMask(mode="permuted")).to("meta").to_empty(device="cpu")
    with torch.no_grad():
        for p, new in zip(model.parameters(), net(1).parameters(), strict=True):
            p.copy_(new)
    with pytest.raises(fxmask.FxMaskError, match=r"call fxmask.refresh\(model\)"):
        model(torch.randn(2, 4, 4, 4))
    fxmask.refresh(model)
    assert keeps_two_of_four(model) and model(torch.randn(2, 4, 4, 4)).isfinite().all()


def test_a_refresh_of_meta_weights_is_refused():
    model = fxmask.apply(net(), NMMask(mode="permuted")).to("meta")
    with pytest.raises(fxmask.FxMaskError, match=r"fxmask.refresh needs the weight's values: expected real memory, got a meta tensor(.|\n)*where: 0"):
        fxmask.refresh(model)


def test_masks_of_a_mode_that_needs_a_table_on_meta_weights():
    model = fxmask.apply(net().to("meta"), NMMask(transposable=True)).to_empty(device="cpu")
    model.load_state_dict(net().state_dict())
    assert torch.equal(model[3].nm_patterns, nm.transposable_patterns()) and keeps_two_of_four(model)


def test_analysis_of_a_masked_model_on_meta():
    model, x = fxmask.apply(net(), NMMask(mode="permuted")).to("meta"), torch.zeros(2, 4, 4, 4, device="meta")
    assert fxmask.analyze(model, (x,)).summary["coverage"]["nodes_pct"] == 100
    with pytest.raises(fxmask.FxMaskError, match="lost on the meta device"):
        model(x)


def test_logits_that_ask_for_no_gradient():
    x, model = torch.randn(2, 4, 4, 4), fxmask.apply(net(), NMMask(mode="learned"))
    model.requires_grad_(False)
    model[3].bias.requires_grad_()
    with pytest.raises(fxmask.FxMaskError, match="logits that ask for no gradient, so that nothing is learned"):
        model(x)
    with torch.no_grad():
        assert not torch.equal(model(x), model(x)), "a look in train() draws"
    assert torch.equal(model.eval()(x), model(x))
    fxmask.freeze(model)
    model.train()(x).sum().backward()  # the frozen mask needs no logits
    fxmask.restore(model)
    assert keeps_two_of_four(fxmask.apply(model, NMMask()))


@pytest.mark.parametrize("set_to_none", [False, True])
def test_an_optimiser_of_everything_moves_no_weight_at_rest(set_to_none):
    """Not by gradients of the training before, nor by decay: both need a gradient, and apply has dropped it."""
    model, x = net(), torch.randn(2, 4, 4, 4)
    model(x).sum().backward()
    before = {n: copy.deepcopy(p.detach()) for n, p in model.named_parameters() if n[0] in "03"}
    fxmask.apply(model, NMMask(mode="learned"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        model(x).square().sum().backward()
        optimizer.step()
    assert all(torch.equal(model.get_parameter(n), p) for n, p in before.items())


@pytest.mark.parametrize("wrong", ["x", None, torch.zeros(256, dtype=torch.int64), torch.arange(8), torch.arange(256.0)], ids=str)
def test_orders_that_are_no_permutation(wrong):
    for mode in ("permuted", "reordered"):
        model = fxmask.apply(net(), NMMask(**MODES[mode]))
        masks, state = fxmask.masks(model), fxmask.state_dict(model)
        state["nm"]["3"]["permutation"] = wrong
        with pytest.raises(fxmask.FxMaskError, match="saved permutation does not fit"):
            fxmask.load_state_dict(model, state)
        assert all(torch.equal(m, masks[n]) for n, m in fxmask.masks(model).items())
    if wrong is not None:
        with pytest.raises(RuntimeError, match=r"3\.nm_permutation: expected a permutation of 256 columns"):
            model.load_state_dict({**model.state_dict(), "3.nm_permutation": wrong})


def test_tensors_that_did_not_move_with_the_weight():
    model = fxmask.apply(net(), NMMask(mode="permuted"))
    model[0].nm_mask = model[0].nm_mask.to("meta")
    with pytest.raises(fxmask.FxMaskError, match="are on meta and the weight on cpu: expected one device"):
        model(torch.randn(2, 4, 4, 4))


def test_an_ensemble():
    """vmap over stacked weights: masks that a forward makes are each weight's own; one that rests is of one weight."""
    x = torch.randn(2, 16)

    def members(mask, seeds=(0, 1)):
        return [fxmask.apply(torch.manual_seed(s) and nn.Sequential(nn.Linear(16, 16)), mask).eval() for s in seeds]

    def together(models):
        weights, buffers = torch.func.stack_module_state(models)
        return torch.func.vmap(lambda w, b: torch.func.functional_call(models[0], (w, b), (x,)))(weights, buffers)

    for mask in (NMMask(), NMMask(mode="learned")):
        models = members(mask)
        torch.testing.assert_close(together(models), torch.stack([m(x) for m in models]))
        for m in models:
            fxmask.freeze(m)
        with pytest.raises(fxmask.FxMaskError, match="would give all of them this model's"):
            together(models)
    for mask in (NMMask(mode="permuted"), NMMask(mode="learned", permute=True)):
        models = members(mask)
        with pytest.raises(fxmask.FxMaskError, match="would give all of them this model's"):
            together(models)
        one = torch.func.vmap(lambda x, m=models[0]: m(x))(x)  # many inputs and one weight are no ensemble
        torch.testing.assert_close(one, models[0](x))


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (1, 2)])
@pytest.mark.parametrize("mode", [m for m in MODES if m != "transposable"])
def test_exactly_n_of_m_in_every_forward(monkeypatch, mode, n, m):
    """While weights or logits train, in train() and in eval(), frozen and not: of what is multiplied, n of every m are not zero."""
    used = []
    monkeypatch.setattr("fxmask.nm.nm_layers.masked_weight", lambda layer, make=masked_weight: used.append((layer, w := make(layer))) or w)
    model, x = fxmask.apply(net(), NMMask(n, m, **MODES[mode]), exclude=()), torch.randn(4, 4, 4, 4)
    if mode == "learned":
        fxmask.step(model, 0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(6):
        if step == 4:
            fxmask.freeze(model)
        for training in (True, False):
            model.train(training)
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    names = {layer: name for name, layer in model.named_modules()}
    assert len(used) == 6 * 2 * 2 and {names[layer] for layer, _ in used} == {"0", "3"}
    for layer, w in used:
        rows = w.flatten(1) != 0
        rows = rows if layer.nm_permutation is None else rows[:, layer.nm_permutation]
        assert (rows.reshape(-1, m).sum(1) == n).all()
