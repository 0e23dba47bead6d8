"""`NMMask`: outputs and gradients of W∘M, what trains, what is drawn, and masks that are learned."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from unit.nm_models import MODES, batch, grads, logits_of, net, with_zeros

import fxmask
from fxmask import NMMask
from fxmask.kernels import nm, nm_permute

LAYERS = ["0", "3"]  # of `net`


@pytest.mark.parametrize("mode", MODES)
def test_outputs_and_gradients_are_those_of_the_masked_weight(mode):
    dense, x = net(), batch()
    model = fxmask.apply(copy.deepcopy(dense), NMMask(**MODES[mode])).eval()  # learned masks are not drawn in eval()
    masks = fxmask.masks(model)
    assert list(masks) == ["0.weight", "3.weight"]
    for name, mask in masks.items():
        assert mask.dtype == torch.bool and mask.shape == dense.get_parameter(name).shape and int(mask.sum()) * 2 == mask.numel()
    want, got = grads(with_zeros(dense, masks), x), grads(model, x)
    for name, mask in masks.items():
        if mode == "sr-ste":
            want[name] += 0.1 * torch.where(mask, 0, dense.get_parameter(name).detach())
        else:
            want[name] *= mask
    assert {n for n in got if "nm_" in n} == set() and set(got) == set(want)
    for n, g in want.items():
        torch.testing.assert_close(got[n], g, rtol=1e-12, atol=1e-12)


def test_groups_lie_within_rows_and_follow_the_weight():
    model = fxmask.apply(net(), NMMask(1, 4))
    for _ in range(2):
        mask = fxmask.masks(model)["0.weight"]
        assert torch.equal(mask, nm.magnitude_mask(model[0].weight.detach().reshape(16, 36), 1, 4).reshape(16, 4, 3, 3))
        with torch.no_grad():
            model[0].weight.data.copy_(torch.randn_like(model[0].weight))
    assert not torch.equal(mask, fxmask.masks(model)["0.weight"])
    model = fxmask.apply(net().to(memory_format=torch.channels_last), NMMask(1, 4))
    assert torch.equal(fxmask.masks(model)["0.weight"], fxmask.masks(fxmask.apply(net(), NMMask(1, 4)))["0.weight"])


def test_permuted_masks_rest_until_they_are_told():
    model = fxmask.apply(net(), NMMask(mode="permuted"))
    first = fxmask.masks(model)["3.weight"]
    order, dense = model[3].nm_permutation, fxmask.masks(fxmask.apply(net(), NMMask()))["3.weight"]
    assert (first[:, order].reshape(32, -1, 4).sum(2) == 2).all()
    assert nm.retained(model[3].weight, first) > nm.retained(model[3].weight, dense)
    with torch.no_grad():
        model[3].weight.copy_(torch.randn_like(model[3].weight))
    assert torch.equal(fxmask.masks(model)["3.weight"], first)
    fxmask.refresh(model)
    second = fxmask.masks(model)["3.weight"]
    assert not torch.equal(second, first)
    model.load_state_dict(net().state_dict())
    assert torch.equal(fxmask.masks(model)["3.weight"], first)


def test_groups_that_are_searched_in_other_parts_meet_in_the_next_pass(monkeypatch):
    """By stride large columns meet large ones and small ones small ones, and nothing gains; in runs they meet each other."""
    monkeypatch.setattr(nm_permute, "COLUMNS", 8)
    w = torch.tensor([[10.0] * 4 + [1.0] * 4]).repeat(1, 2)
    order = nm_permute.permutation(w, 2, 4, 16)
    assert (w[:, order].reshape(4, 4).sum(1) == 22).all()


def test_learned_masks_in_permuted_order():
    dense, x = net(), batch()
    permuted = fxmask.apply(copy.deepcopy(dense), NMMask(mode="permuted"))
    model = fxmask.apply(copy.deepcopy(dense), NMMask(mode="learned", permute=True, init="magnitude"))
    assert all(torch.equal(m, fxmask.masks(permuted)[n]) for n, m in fxmask.masks(model).items()), "it begins with the permuted masks"
    order = model[3].nm_permutation
    assert torch.equal(order, permuted[3].nm_permutation) and "learned, permuted" in repr(model)
    model(x).square().sum().backward()
    for layer in (model[0], model[3]):
        drawn = layer.nm_logits.grad  # of a softmax: sums of 0 in every group, of one group as of the others
        assert drawn.abs().sum() > 0 and torch.allclose(drawn.sum(1), torch.zeros(len(drawn), dtype=drawn.dtype))
        with torch.no_grad():
            layer.nm_logits.normal_()
    masks = fxmask.masks(model)
    for name, layer in (("0.weight", model[0]), ("3.weight", model[3])):
        rows = masks[name].reshape(len(layer.weight), -1)[:, layer.nm_permutation]
        assert (rows.reshape(-1, 4).sum(1) == 2).all() and torch.equal(rows.reshape(-1, 4), nm.argmax_mask(layer.nm_logits, nm.patterns(2, 4)))
    saved, other = model.state_dict(), fxmask.apply(nn.Sequential(*(copy.deepcopy(m) for m in net())), NMMask(mode="learned", permute=True))
    for p in dense.parameters():
        p.data.normal_()
    model.load_state_dict(dense.state_dict())  # new weights: logits and their order stay
    fxmask.refresh(model)
    other.load_state_dict(saved)
    for m in (model, other):
        assert torch.equal(m[3].nm_permutation, order) and all(torch.equal(v, masks[n]) for n, v in fxmask.masks(m).items())


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_only_logits_train(optimizer):
    dense, x = net(torch.float32), batch(torch.float32)
    model = fxmask.apply(copy.deepcopy(dense), NMMask(mode="learned"))
    assert [tuple(p.shape) for p in logits_of(model)] == [(16 * 9, 6), (32 * 64, 6)] and "0.nm_logits" in model.state_dict()
    before, old = [p.detach().clone() for p in logits_of(model)], fxmask.masks(model)
    step = optimizer(logits_of(model), lr=1.0)
    for _ in range(5):
        step.zero_grad()
        model(x).square().sum().backward()
        assert model[0].weight.grad is None and model[3].bias.grad is None and model[5].weight.grad is not None
        step.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, logits_of(model), strict=True))
    assert any(not torch.equal(m, old[n]) for n, m in fxmask.masks(model).items())
    fxmask.restore(model)
    assert repr(model) == repr(dense) and list(model.state_dict()) == list(dense.state_dict())
    for a, b in zip(model.parameters(), dense.parameters(), strict=True):
        assert torch.equal(a, b) and a.requires_grad


def test_what_nobody_says_is_the_source_s_choice_or_the_one_that_is_told():
    c = NMMask(mode="learned")
    assert (c.n, c.m, c.tau, c.tau_from, c.soft, c.final, c.init, c.train_weights) == (2, 4, 0.1, None, False, "argmax", "glorot", False)
    logits = fxmask.apply(nn.Sequential(nn.Linear(64, 64)), c)[0].nm_logits.detach()
    edge = (6 / (64 * 16 + 6)) ** 0.5  # Glorot's, uniform
    assert logits.abs().max() <= edge and abs(logits.std() * 3**0.5 / edge - 1) < 0.05


def test_restore_wakes_what_apply_put_to_rest_alone():
    model = nn.Sequential(nn.Linear(32, 32))
    model[0].bias.requires_grad_(False)
    fxmask.restore(fxmask.apply(model, NMMask(mode="learned")))
    assert model[0].weight.requires_grad and not model[0].bias.requires_grad


def test_training_draws_and_eval_does_not():
    model, x = fxmask.apply(net(), NMMask(mode="learned")), batch()
    assert not torch.equal(model(x), model(x))
    torch.manual_seed(3)
    first = model(x)
    torch.manual_seed(3)
    assert torch.equal(model(x), first)
    model.eval()
    assert torch.equal(model(x), model(x)) and torch.equal(model(x), with_zeros(net(), fxmask.masks(model))(x))


@pytest.mark.parametrize("mode", MODES)
def test_a_frozen_mask_survives_new_weights(mode):
    model, other, x = fxmask.apply(net(), NMMask(**MODES[mode])), net(), batch()
    for p in other.parameters():
        p.data.normal_()
    fxmask.freeze(model)
    fxmask.freeze(model)  # again: nothing changes
    masks = fxmask.masks(model)
    assert not any(p.requires_grad for p in logits_of(model)) and fxmask.explain(model).rows[0]["reason"] == "selected; frozen"
    model.load_state_dict(other.state_dict())
    fxmask.refresh(model)
    assert all(torch.equal(m, masks[n]) for n, m in fxmask.masks(model).items())
    for m in (model, model.eval(), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(m(x), with_zeros(other, masks)(x))


def test_the_last_mask_may_be_drawn():
    torch.manual_seed(0)
    model = fxmask.apply(net(), NMMask(mode="learned", final="sample"))
    drawn, arg = copy.deepcopy(model), fxmask.masks(model)["3.weight"]
    fxmask.freeze(drawn)
    mask = fxmask.masks(drawn)["3.weight"]
    assert not torch.equal(mask, arg) and (mask.reshape(-1, 4).sum(1) == 2).all() and torch.equal(mask, fxmask.masks(drawn)["3.weight"])
    fxmask.finalize(drawn)
    assert torch.equal(drawn[3].weight != 0, mask)


def digits():
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order[:1400]], y[order[:1400]], x[order[1400:]], y[order[1400:]]


def fit(model, params, x, y, lr, epochs):
    step = torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.999), weight_decay=1e-4)
    for _ in range(epochs):
        for part in torch.randperm(len(x)).split(100):
            step.zero_grad()
            F.cross_entropy(model(x[part]), y[part]).backward()
            step.step()


def test_learned_masks_beat_magnitude_without_touching_weights():
    x, y, tx, ty = digits()
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    fit(dense, dense.parameters(), x, y, 3e-3, 20)

    def accuracy(model):
        return (model.eval()(tx).argmax(1) == ty).float().mean().item()

    found = {}
    for mode in ("magnitude", "permuted", "learned"):
        model = fxmask.apply(copy.deepcopy(dense), NMMask(mode=mode), exclude=())
        if mode == "learned":
            fit(model, logits_of(model), x, y, 0.1, 20)
            assert all(torch.equal(model.get_parameter(n), p) for n, p in dense.named_parameters())
        found[mode] = accuracy(model)
    assert found["learned"] >= max(found["magnitude"], found["permuted"]) and found["learned"] > 0.8, found


def test_a_learned_mask_that_is_not_frozen_says_what_evaluation_takes():
    model = fxmask.apply(net(), NMMask(2, 4, mode="learned"))
    assert all("eval() takes the likeliest" in r["why"] for r in fxmask.explain(model).rows if r["masked"])
    fxmask.freeze(model)
    assert not any("eval()" in r["why"] for r in fxmask.explain(model).rows if r["masked"])


def test_sr_ste_warns_where_a_scaler_would_divide_its_decay_away():
    model, x = nn.Sequential(nn.Linear(32, 32)), torch.randn(4, 32)
    fxmask.apply(model, fxmask.NMMask(2, 4, mode="sr-ste"), exclude=())
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
    with torch.autocast("cpu", torch.float16):
        with pytest.warns(fxmask.FxMaskWarning, match=r"(?s)float16.*bfloat16"):
            model(x)
        with torch.no_grad():
            model(x)
    without = fxmask.apply(nn.Sequential(nn.Linear(32, 32)), fxmask.NMMask(2, 4, mode="sr-ste", decay=0.0), exclude=())
    with torch.autocast("cpu", torch.float16):
        without(x)


def test_sr_ste_decays_once_a_backward_as_documented():
    model, x = nn.Linear(64, 64, bias=False), torch.zeros(8, 64)
    fxmask.apply(model, fxmask.NMMask(2, 4, mode="sr-ste", decay=0.1))
    found = []
    for n in (1, 4):
        model.zero_grad()
        for part in x.chunk(n):
            (model(part).sum() / n).backward()
        found.append(model.weight.grad.clone())
    torch.testing.assert_close(found[1], 4 * found[0])
    assert found[0].abs().sum() > 0
