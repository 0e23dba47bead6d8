"""`NMMask`: outputs and gradients of W∘M, what trains, frozen masks, and everything that apply promises."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxmask
from fxmask import NMMask
from fxmask.kernels import nm

MODES = {
    "magnitude": dict(),
    "transposable": dict(transposable=True),
    "sr-ste": dict(mode="sr-ste", decay=0.1),
    "permuted": dict(mode="permuted"),
    "learned": dict(mode="learned", train_weights=True),
    "soft": dict(mode="learned", soft=True, train_weights=True),
    "reordered": dict(mode="learned", permute=True, train_weights=True),
}
LAYERS = ["0", "3"]  # of `net`


def net(dtype=torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 16, 3, padding=1, stride=2), nn.GELU(), nn.Flatten(), nn.Linear(256, 32), nn.GELU(), nn.Linear(32, 10)).to(dtype)


def batch(dtype=torch.float64) -> torch.Tensor:
    return torch.randn(3, 4, 8, 8, dtype=dtype, generator=torch.Generator().manual_seed(1))


def grads(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.detach().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return {"y": y.detach(), "x": x.grad} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def with_zeros(dense: nn.Module, masks: dict[str, torch.Tensor]) -> nn.Module:
    twin = copy.deepcopy(dense)
    for name, mask in masks.items():
        twin.get_parameter(name).data.masked_fill_(~mask, 0)
    return twin


def logits_of(model: nn.Module) -> list[nn.Parameter]:
    return [p for n, p in model.named_parameters() if n.endswith("nm_logits")]


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


@pytest.mark.parametrize("mode", MODES)
def test_finalize(mode):
    dense, x = net(), batch()
    model = fxmask.apply(copy.deepcopy(dense), NMMask(**MODES[mode])).eval()
    weight, masks, y = model[3].weight, fxmask.masks(model), model(x)
    assert fxmask.finalize(model) is model and torch.equal(model(x), y) and fxmask.masks(model) == {}
    assert type(model[0]) is nn.Conv2d and model[3].weight is weight and list(model.state_dict()) == list(dense.state_dict())
    assert all(torch.equal(model.get_parameter(n), torch.where(m, dense.get_parameter(n), 0)) for n, m in masks.items())
    fxmask.apply(model, NMMask())


def test_finalize_for_the_hardware_says_what_it_cannot():
    for include, words in ((None, "got a convolution"), ("3", "CUDA device of capability 8.0")):
        model = fxmask.apply(net(), NMMask(), include=include)
        with pytest.raises(fxmask.FxMaskError, match=words):
            fxmask.finalize(model, "2:4")
        assert fxmask.masks(model) and torch.equal(model[0].weight, net()[0].weight), "nothing has changed"
    for config, format, words in ((NMMask(mode="permuted"), "2:4", "at most 2 nonzeros"), (NMMask(3, 4), "2:4", "got 3"), (NMMask(), "bsr", "has no blocks")):
        with pytest.raises(fxmask.FxMaskError, match=words):
            fxmask.finalize(fxmask.apply(net(), config, include="3"), format)


def test_linears_for_the_hardware_beside_convolutions_with_zeros(monkeypatch):
    """What the message advises: a submodule of Linears by itself, then the rest. PyTorch's tensor needs a GPU, so a dense copy stands in for it."""
    monkeypatch.setattr("fxmask.nm_finalizing.semi_structured", lambda name, w, made_by: w.clone())
    parts = net()
    model, x = nn.Sequential(nn.Sequential(*parts[:3]), nn.Sequential(*parts[3:])), batch()
    fxmask.apply(model, NMMask())
    masks, y, conv = fxmask.masks(model), model(x), model[0][0].weight
    with pytest.raises(fxmask.FxMaskError, match=r"got a convolution(?s:.*)finalize the Linears' submodule alone"):
        fxmask.finalize(model, "2:4")
    fxmask.finalize(model[1], "2:4")
    assert list(fxmask.masks(model)) == ["0.0.weight"] and not model[1][0].weight.requires_grad
    fxmask.finalize(model)
    assert torch.equal(model(x), y) and model[0][0].weight is conv and type(model[0][0]) is nn.Conv2d
    assert all(torch.equal(model.get_parameter(n) != 0, m) for n, m in masks.items())


def test_tied_weights():
    tied = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    tied[1].weight = tied[0].weight
    with pytest.raises(fxmask.FxMaskError, match="uses this weight unmasked"):
        fxmask.finalize(fxmask.apply(copy.deepcopy(tied), NMMask(), include="0"))
    with pytest.raises(fxmask.FxMaskError, match="one weight would have two masks: '0' and '1'"):
        fxmask.apply(tied, NMMask(mode="learned"))
    fxmask.finalize(fxmask.apply(tied, NMMask()))
    assert tied[0].weight is tied[1].weight and int((tied[0].weight != 0).sum()) == 512


@pytest.mark.parametrize("mode", MODES)
def test_copies_and_states(mode):
    dense, x = net(), batch()
    model = fxmask.apply(copy.deepcopy(dense), NMMask(**MODES[mode]))
    assert [k for k in model.state_dict() if "nm_" not in k] == list(dense.state_dict())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        a, b = (torch.manual_seed(2) and grads(copy.deepcopy(m), x) for m in (model, twin))
        assert all(torch.equal(a[n], b[n]) for n in a)
        fxmask.restore(twin)
        assert repr(twin) == repr(dense) and set(twin[3].__dict__) == set(dense[3].__dict__)
    fxmask.freeze(model)
    state = pickle.loads(pickle.dumps({"model": model.state_dict(), "fxmask": fxmask.state_dict(model)}))
    torch.manual_seed(5)
    fresh = fxmask.apply(net(), NMMask(**MODES[mode]))
    fresh.load_state_dict(state["model"])
    fxmask.load_state_dict(fresh, state["fxmask"])
    assert all(torch.equal(m, fxmask.masks(model)[n]) for n, m in fxmask.masks(fresh).items()) and torch.equal(fresh(x), model(x))


def test_states_that_do_not_fit():
    model = fxmask.apply(net(), NMMask())
    fxmask.freeze(model)
    state = fxmask.state_dict(model)
    one, fewer, blocks = fxmask.apply(net(), NMMask(1, 4)), fxmask.apply(net(), NMMask(), include="3"), fxmask.apply(net())
    for other, words in ((one, "other settings"), (fewer, "of other N:M masks"), (blocks, "other weights")):
        with pytest.raises(fxmask.FxMaskError, match=words):
            fxmask.load_state_dict(other, state)
    state["nm"]["0"]["mask"] = state["nm"]["0"]["mask"][:1]
    with pytest.raises(fxmask.FxMaskError, match="saved mask does not fit"):
        fxmask.load_state_dict(fxmask.apply(net(), NMMask()), state)


@pytest.fixture
def fresh_compiler():
    """No compiles of other models before, and none left behind: all share the code of nn.Sequential, whose recompiles are limited."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frozen", [False, True])
def test_compiled_in_one_graph(fresh_compiler, mode, frozen):
    model, x = fxmask.apply(net(torch.float32), NMMask(**MODES[mode])), batch(torch.float32)
    if frozen:
        fxmask.freeze(model)
    got = grads(torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True), x)
    assert ("_orig_mod.0.nm_logits" in got) == (MODES[mode].get("mode") == "learned" and not frozen)
    model.eval()
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    for n, g in grads(model, x).items():
        torch.testing.assert_close(grads(compiled, x)["y"], model(x))
        assert n in ("x", "y") or g is not None


@pytest.mark.parametrize("mode", MODES)
def test_checkpoints_draw_the_same_mask_and_autocast_keeps_it_exact(mode):
    model, x = fxmask.apply(net(torch.float32), NMMask(**MODES[mode])), batch(torch.float32)
    torch.manual_seed(1)
    want = grads(copy.deepcopy(model), x)
    torch.manual_seed(1)
    again = copy.deepcopy(model)
    checkpoint(again, x, use_reentrant=False).square().sum().backward()
    for n, p in again.named_parameters():
        assert torch.equal(p.grad, want[n])
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        y = copy.deepcopy(model)(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), want["y"], atol=0.05, rtol=0.05)


def test_what_stays_dense_is_reported():
    convs = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, groups=4), nn.Conv2d(16, 16, 3)
    model = nn.Sequential(*convs, nn.Linear(30, 32), nn.Linear(32, 10), nn.MultiheadAttention(32, 2))
    fxmask.apply(model, NMMask(), overrides={"2": dict(n=1), "4": False})
    rows = {r["name"]: r for r in fxmask.explain(model).rows}
    assert [rows[n]["reason"] for n in ("0", "1", "3")] == [
        "its rows have 27 elements, no multiple of 4", "a grouped convolution (groups=4)", "its rows have 30 elements, no multiple of 4",
    ]  # fmt: skip
    assert "min(out, in) = 10" in rows["4"]["reason"] and "never calls it" in rows["5.out_proj"]["reason"]
    assert {n for n, r in rows.items() if r["masked"]} == {"2"}
    assert (rows["2"]["block"], rows["2"]["blocks"], rows["2"]["achieved_ratio"], rows["2"]["shape"]) == ("1:4", 576, 0.75, "16x16x3x3")
    assert "mask: 1:4 magnitude" in repr(model) and "convolution" in str(fxmask.explain(model))
    with pytest.warns(fxmask.FxMaskWarning, match="masked nothing: 0: its rows have 27 elements"):
        model = fxmask.apply(nn.Sequential(nn.Conv2d(3, 16, 3)), NMMask())
    assert [r["reason"] for r in fxmask.explain(model).rows] == ["its rows have 27 elements, no multiple of 4"]
    assert fxmask.explain(fxmask.apply(net(), ratio=0.5)).summary["linears"] == 2  # no row for what no N:M mask was asked for

    class Own(nn.Conv2d):
        def forward(self, x):
            return self._conv_forward(x, self.weight * 2, self.bias)

    model = fxmask.apply(nn.Sequential(Own(4, 16, 3), nn.Linear(16, 16)), NMMask())
    assert fxmask.explain(model).rows[0]["reason"] == "Own has a forward of its own, which a mask would not reach"


def test_patterns_choose_layers():
    assert list(fxmask.masks(fxmask.apply(net(), NMMask(), include=nn.Conv2d))) == ["0.weight"]
    assert list(fxmask.masks(fxmask.apply(net(), NMMask(), exclude=nn.Conv2d))) == ["3.weight"]
    assert list(fxmask.masks(fxmask.apply(nn.Linear(32, 32), NMMask()))) == ["weight"]
    model = fxmask.apply(net(), NMMask(), exclude=())
    assert list(fxmask.masks(model)) == ["0.weight", "3.weight", "5.weight"]


def test_a_parametrised_weight_is_masked_as_it_is_computed():
    lin = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32, dtype=torch.float64))
    x, w = torch.randn(2, 32, dtype=torch.float64), lin.weight.detach().clone()
    fxmask.apply(lin, NMMask())
    torch.testing.assert_close(lin(x), F.linear(x, torch.where(nm.magnitude_mask(w, 2, 4), w, 0), lin.bias))
    with pytest.raises(fxmask.FxMaskError, match="this weight is computed"):
        fxmask.finalize(lin)


@pytest.mark.parametrize("mode", MODES)
def test_exports_and_analysis(mode):
    model, x = fxmask.apply(net(torch.float32), NMMask(**MODES[mode])), batch(torch.float32)
    coverage = fxmask.analyze(model, (x,)).summary["coverage"]
    assert coverage["nodes_pct"] == 100 and coverage["params_pct"] == 100
    assert torch.equal(torch.export.export(model.eval(), (x,)).module()(x), model(x))
    want = grads(model, x)
    model.zero_grad()
    graph = torch.export.export(model, (x,)).module()
    graph(x).square().sum().backward()
    for n, p in graph.named_parameters():
        assert p.grad is None if n not in want else torch.allclose(p.grad, want[n])


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


@pytest.mark.parametrize("back", [fxmask.finalize, fxmask.restore])
def test_the_way_back_of_a_learned_checkpoint(back):
    model = fxmask.apply(net(), NMMask(2, 4, mode="learned"))
    assert any(n.endswith("nm_logits") for n in model.state_dict())
    fxmask.freeze(model)
    net().load_state_dict(back(model).state_dict())


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


@pytest.mark.parametrize("config", [fxmask.NMMask(2, 4, mode="sr-ste"), fxmask.ActivationPruning(0.5, 16)], ids=["sr-ste", "pruned"])
def test_a_model_exported_without_gradients_has_no_op_of_training(config):
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(4, 32, 64)
    fxmask.apply(model, config, exclude=())
    with torch.no_grad():
        program = torch.export.export(model.eval(), (x,))
    ops = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
    assert not [op for op in ops if "pruned" in op or "sr_ste" in op]
    torch.testing.assert_close(program.module()(x), model(x))
