"""timm's image models at their published width: masked, they compute what a dense copy with W∘M written in computes, bit for bit."""

import copy
import warnings

import pytest
import torch
from models.dense_copy import check, images, stirred
from torch import nn

import fxmask

pytestmark = pytest.mark.models


@pytest.fixture(scope="module")
def model_of(torchvision):
    """A maker of models. timm imports torchvision, which beside a CPU build of torch wants its shim first."""
    import timm

    def make(name, **options):
        torch.manual_seed(0)
        return stirred(timm.create_model(name, num_classes=1000, drop_path_rate=0.1, **options))

    return make


def test_resmlp(model_of):
    check(model_of("resmlp_12_224"), images(2, 3, 224, 224))


def test_a_head_of_timms_own_linear(model_of):
    model = check(model_of("starnet_s050"), images(2, 3, 64, 64))
    assert list(fxmask.masks(model)) == ["head.weight"] and "timm.layers.linear" in {c.__module__ for c in type(model.head).__mro__}


def test_mixer(model_of):
    check(model_of("mixer_s16_224"), images(2, 3, 224, 224))


# their attention gives qkv.weight to F.linear, beside a bias of its own
@pytest.mark.parametrize("name", ["beit_base_patch16_224", "eva02_tiny_patch14_224"])
def test_attention_that_reads_its_weight(model_of, name):
    check(model_of(name, depth=2), images(2, 3, 224, 224), read=["blocks.*.attn.qkv.weight"])


def test_attention_whose_bias_is_added_apart(model_of):
    model = model_of("eva02_tiny_patch14_224", depth=1)
    model.blocks[0].attn.qkv_bias_separate = True  # then qkv is called, and its output written in place
    check(model, images(2, 3, 224, 224))


@pytest.mark.parametrize(
    ("name", "options", "whole", "traced"),
    [("resmlp_12_224", {}, 25, 49), ("vit_tiny_patch16_224", {"depth": 2, "init_values": 0.1}, 4, 4), ("convnext_atto", {"depths": (1, 1, 1, 1)}, 0, 4)],
)  # modules that are a product: Affine, LayerScale; in a trace the gains of ResMLP and ConvNeXt, too, the latter's by a view
def test_pruned_products(model_of, name, options, whole, traced):
    dense, x = model_of(name, **options).eval(), images(2, 3, 224, 224)
    want = gradients(dense, x)
    for model, count in ((dense, whole), (torch.fx.symbolic_trace(dense), traced)):
        model = copy.deepcopy(model)
        chosen = dict(include=lambda m, name: not isinstance(m, nn.Linear))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fxmask.FxMaskWarning)  # what stays dense
            fxmask.apply(model, fxmask.ActivationPruning(0.5, 16, affine=True), **chosen)
        pruned = {r["name"] for r in fxmask.explain(model).rows if r["activations"]}
        got = gradients(model, x)
        assert len(pruned) == count and {n for n, g in got.items() if not torch.equal(g, want[n])} == pruned


def gradients(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return {n: p.grad for n, p in model.named_parameters()}
