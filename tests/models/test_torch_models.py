"""Models of torch alone: masked, they compute what a dense copy with W∘M written in computes, bit for bit."""

import copy

import pytest
import torch
import torch.nn.functional as F
from models.dense_copy import BLOCK, RATIO, Seen, check, check_equal, check_report, element_masks, expected_reasons, images, run, stirred
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import fxmask
from fxmask.errors import FxMaskWarning

FAST_PATH = "aten::_transformer_encoder_layer_fwd"


def call(model, *inputs):
    return model(*inputs)


# ---- attention -------------------------------------------------------------------------------------------------------------------------------------------


def encoder(**options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(96, 4, 160, dropout=0.1, batch_first=True, **options)
    return stirred(nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(96), enable_nested_tensor=False))


@pytest.mark.parametrize("options", [dict(), dict(norm_first=True, activation="gelu"), dict(bias=False)], ids=["post-norm", "pre-norm", "no-bias"])
def test_transformer_encoder(options):
    check(encoder(**options), images(2, 10, 96), read=["*.out_proj.weight"])


def test_transformer_encoder_on_its_fast_path():
    model, x = encoder().eval(), images(2, 10, 96)
    twin = copy.deepcopy(model)
    fxmask.apply(model, ratio=RATIO, block=BLOCK)
    masks = element_masks(model)
    with torch.inference_mode(), Seen() as dense:
        before = twin(x)
    with torch.no_grad():
        for name, kept in masks.items():
            twin.get_parameter(name).masked_fill_(~kept, 0)
    with torch.inference_mode(), Seen() as masked:
        y = model(x)
    with torch.inference_mode():
        assert torch.equal(y, twin(x)) and not torch.allclose(y, before, atol=1e-2)
    assert masked.count[FAST_PATH] == dense.count[FAST_PATH] == 2
    assert masked.weights == {model.get_parameter(name).data_ptr() for name in masks} and len(masks) == 6


def test_transformer_decoder():
    torch.manual_seed(0)
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(96, 4, 160, dropout=0.1, batch_first=True), 2)
    check(stirred(model), images(2, 7, 96), images(2, 10, 96), read=["*.out_proj.weight"])


@pytest.mark.parametrize("options", [dict(), dict(bias=False), dict(kdim=32, vdim=48), dict(add_bias_kv=True)], ids=["plain", "no-bias", "widths", "bias-kv"])
def test_multihead_attention(options):
    torch.manual_seed(0)
    model = stirred(nn.MultiheadAttention(64, 4, dropout=0.1, batch_first=True, **options))
    check(model, images(2, 5, 64), images(2, 9, model.kdim), images(2, 9, model.vdim), read=["out_proj.weight"])


# ---- control flow, ties ----------------------------------------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Which layers run, and how often, depends on the values of the input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.again, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 40)

    def forward(self, x):
        x = self.up(x) if x.mean() > 0 else self.down(x)
        x = self.again(x)
        return self.head(x.relu()) if bool((x > 0).any()) else self.head(x)


@pytest.mark.parametrize(("shift", "unused"), [(1.0, "down.weight"), (-1.0, "up.weight")])
def test_data_dependent_control_flow(shift, unused):
    check(stirred(Branches()), images(5, 64) + shift, unused=[unused])


def test_a_layer_that_runs_until_the_values_say_stop():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 64)

        def forward(self, x):
            while x.abs().max() > 0.5:
                x = self.fc(x).tanh() * 0.7
            return x

    torch.manual_seed(0)
    model, x = Loop(), images(3, 64)
    twin, masks = copy.deepcopy(model), element_masks(fxmask.apply(model, ratio=RATIO, block=BLOCK))
    with torch.no_grad():
        twin.fc.weight.masked_fill_(~masks["fc.weight"], 0)
    with Seen() as seen:
        result = run(model, [x], call)
    assert seen.count["fxmask::masked_linear"] > 1
    check_equal(result, run(twin, [x], call), masks, {})


class Tied(nn.Module):
    """Two linears of one weight, and a head that is its embedding's table."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.a, self.b, self.head = nn.Embedding(50, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 50, bias=False)
        self.b.weight, self.head.weight = self.a.weight, self.table.weight

    def forward(self, tokens):
        return self.head(self.b(self.a(self.table(tokens)).relu()))


TOKENS = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))


def test_tied_weights():
    model = check(stirred(Tied()), TOKENS)
    assert list(fxmask.masks(model)) == ["a.weight", "b.weight"]


def test_a_head_that_is_a_table_by_exact_name():
    model = stirred(Tied())
    twin = copy.deepcopy(model)
    kept = element_masks(fxmask.apply(model, ratio=RATIO, block=BLOCK, include="head"))["head.weight"]
    twin.head.forward = lambda x: F.linear(x, twin.table.weight.masked_fill(~kept, 0))  # the table itself stays dense
    check_equal(run(model, [TOKENS], call), run(twin, [TOKENS], call), {}, {})


# ---- weights that something makes ------------------------------------------------------------------------------------------------------------------------


class Keep(nn.Module):
    """A plain parametrisation: a constant mask behind whatever made the weight, so that autograd applies the chain rule."""

    def __init__(self, kept):
        super().__init__()
        self.kept = kept

    def forward(self, w):
        return w.masked_fill(~self.kept, 0)


def made(wrap):
    """A model whose first and last layer have weights made by `wrap`; a copy of a pruned or old weight-normed layer cannot be made, so it is built twice."""
    torch.manual_seed(0)
    model = stirred(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 40)))
    wrap(model[0])
    wrap(model[4])
    return model


def pruned(m):
    prune.l1_unstructured(m, "weight", amount=0.3)


def pruned_twice(m):
    pruned(m)
    prune.ln_structured(m, "weight", amount=0.2, n=2, dim=0)


MAKERS = {
    "weight_norm": parametrizations.weight_norm,
    "weight_norm-of-all": lambda m: parametrizations.weight_norm(m, dim=None),
    "spectral_norm": parametrizations.spectral_norm,
    "old-weight_norm": nn.utils.weight_norm,
    "old-spectral_norm": nn.utils.spectral_norm,
    "pruned": pruned,
    "pruned-twice": pruned_twice,
}


def constant_mask(m, kept):
    """The same constant mask in a dense layer, by plain torch: the last of its parametrisations, or the last hook that writes its weight."""
    if parametrize.is_parametrized(m):
        parametrize.register_parametrization(m, "weight", Keep(kept), unsafe=True)  # the check would look at the weight, and spectral_norm iterate
    elif "weight" in m._parameters:
        with torch.no_grad():
            m.weight.masked_fill_(~kept, 0)
    else:
        m.register_forward_pre_hook(lambda m, _x: setattr(m, "weight", m.weight.masked_fill(~kept, 0)))


@pytest.mark.filterwarnings("ignore:.torch.nn.utils.(weight|spectral)_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("wrap", MAKERS.values(), ids=MAKERS)
def test_made_weights(wrap, training):
    model, twin, x = made(wrap).train(training), made(wrap).train(training), images(5, 64)
    reasons = expected_reasons(model)
    check_report(fxmask.apply(model, ratio=RATIO, block=BLOCK), reasons)
    masks = element_masks(model)
    for name, kept in masks.items():
        constant_mask(twin.get_submodule(name.rpartition(".")[0]), kept)
    with Seen() as seen:
        result = run(model, [x], call)
    assert seen.count["fxmask::masked_linear"] == seen.count["fxmask::block_index"] == 3
    check_equal(result, run(twin, [x], call), {"2.weight": masks["2.weight"]}, {})
    assert all(g.any() for g in result.gradients.values())


# ---- LoRA, subclasses ------------------------------------------------------------------------------------------------------------------------------------


class LoRA(nn.Module):
    """A low-rank update beside a frozen linear."""

    def __init__(self, base, rank):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + 2 * self.lora_B(self.lora_A(x))


@pytest.mark.parametrize("rank", [4, 16])
def test_lora_by_hand(rank):
    torch.manual_seed(0)
    model = check(stirred(nn.Sequential(LoRA(nn.Linear(64, 96), rank), nn.GELU(), nn.Linear(96, 40))), images(5, 64))
    assert list(fxmask.masks(model)) == ["0.base.weight", "2.weight"]


class Scaled(nn.Linear):
    """A Linear with a forward of its own."""

    def forward(self, x):
        return F.linear(x, self.weight / self.weight.norm(), self.bias)


class Named(nn.Linear):
    """A Linear that adds nothing to the forward."""


def with_subclasses():
    torch.manual_seed(0)
    return stirred(nn.Sequential(Named(64, 96), nn.GELU(), Scaled(96, 64), nn.GELU(), nn.Linear(64, 40)))


def test_a_subclass_with_its_own_forward_is_left_alone_and_named():
    with pytest.warns(FxMaskWarning, match="^2 stays dense: Scaled has its own forward"):
        model = check(with_subclasses(), images(5, 64))
    assert type(model[2]) is Scaled
    row = next(row for row in fxmask.explain(model).rows if row["name"] == "2")
    assert not row["masked"] and "Scaled has its own forward" in row["reason"] and "read='weight'" in row["reason"]


def test_what_the_warning_says_masks_it():
    model, x = with_subclasses(), images(5, 64)
    twin = copy.deepcopy(model)
    masks = element_masks(fxmask.apply(model, ratio=RATIO, block=BLOCK, overrides={"2": dict(read="weight")}))
    for name, kept in masks.items():
        parametrize.register_parametrization(twin.get_submodule(name.rpartition(".")[0]), "weight", Keep(kept))
    result, expected = run(model, [x], call), run(twin, [x], call)
    expected.gradients = {name.replace("parametrizations.weight.original", "weight"): g for name, g in expected.gradients.items()}
    check_equal(result, expected, masks, {})
    assert len(masks) == 3
