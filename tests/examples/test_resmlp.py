"""The model of the examples: its published sizes, its definition, and that it can be traced and exported."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from resmlp import PRESETS, DropPath, ResMLP, ResMLPConfig
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

# the first two follow from the thesis' shapes, the others are the published sizes: 15.4, 30.0, 44.7, 115.7 and 129.1 million
PARAMETERS = {
    "cifar": 192_074,
    "imagenet-thesis": 15_607_912,
    "s12": 15_350_872,
    "s24": 30_020_680,
    "s36": 44_690_488,
    "b24": 115_736_776,
    "b24-8": 129_138_280,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_count(name):
    with torch.device("meta"):
        model = ResMLP(PRESETS[name])
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


def test_cifar_macs_a_sample():
    with FlopCounterMode(display=False) as counter:
        ResMLP(PRESETS["cifar"])(torch.zeros(1, 3, 32, 32))
    assert counter.get_total_flops() == 2 * 11_993_728


def test_cifar_maskable_weights():
    model = ResMLP(PRESETS["cifar"])
    names = [n for n, p in model.named_parameters() if n.startswith("blocks.") and p.ndim == 2]
    assert len(names) == 15
    assert sum(model.get_parameter(n).numel() for n in names) == 184_320


def test_hidden_units_whatever_the_expansion():
    block = ResMLP(replace(PRESETS["cifar"], hidden=112)).blocks[4]
    assert block.fc1.weight.shape == (112, 64) and block.fc2.weight.shape == (64, 112)


def test_layerscale_starts_by_depth():
    assert [PRESETS[n].layerscale for n in ("s12", "s24", "s36", "b24")] == [1e-4, 1e-5, 1e-6, 1e-6]
    model = ResMLP(PRESETS["cifar"])
    assert torch.equal(model.blocks[0].gain1, torch.full((64,), 0.1))


def test_forward_is_the_definition():
    torch.manual_seed(0)
    config = ResMLPConfig(image=6, channels=2, patch=2, dim=5, depth=2, expansion=3, classes=4)
    model = ResMLP(config).double()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.5)
    images = torch.randn(3, 2, 6, 6, dtype=torch.float64)

    # patches as unfold cuts them: [B, C * p * p, T]
    x = model.embed(F.unfold(images, 2, stride=2).transpose(1, 2))
    for b in model.blocks:
        mixed = torch.einsum("ts,bsc->btc", b.patch_mix.weight, b.norm1.alpha * x + b.norm1.beta) + b.patch_mix.bias[:, None]
        x = x + b.gain1 * mixed
        x = x + b.gain2 * b.fc2(F.gelu(b.fc1(b.norm2.alpha * x + b.norm2.beta)))
    expected = model.head((model.norm.alpha * x + model.norm.beta).mean(1))
    torch.testing.assert_close(model(images), expected)


def test_wrong_image_size_is_an_error():
    with pytest.raises(RuntimeError, match="shape"):
        ResMLP(PRESETS["digits"])(torch.zeros(4, 1, 4, 4))


def test_bad_shape_is_an_error():
    with pytest.raises(ValueError, match="multiple of patch: got image=30, patch=4"):
        ResMLPConfig(image=30, patch=4)
    with pytest.raises(ValueError, match="drop_path"):
        ResMLPConfig(drop_path=1.0)


def test_symbolic_trace_keeps_stochastic_depth_switchable():
    model = ResMLP(replace(PRESETS["digits"], drop_path=0.5))
    traced = torch.fx.symbolic_trace(model)
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(traced.eval()(x), model.eval()(x))
    traced.train()
    torch.manual_seed(0)
    first = traced(x)
    assert not torch.equal(first, traced(x))


def test_drop_path_drops_whole_samples():
    torch.manual_seed(0)
    y = DropPath(0.25)(torch.ones(400, 3, 2))
    per_sample = y[:, 0, 0]
    assert torch.equal(y, per_sample[:, None, None].expand_as(y))
    assert torch.equal(per_sample[per_sample != 0], torch.full_like(per_sample[per_sample != 0], 1 / 0.75))
    assert 0.15 < (per_sample == 0).float().mean() < 0.35


def test_export():
    model = ResMLP(PRESETS["digits"]).eval()
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(model, (torch.zeros(4, 1, 8, 8),), dynamic_shapes=({0: batch},))
    x = torch.randn(7, 1, 8, 8)
    torch.testing.assert_close(program.module()(x), model(x))
