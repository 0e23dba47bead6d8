"""FLOP of `fxmask.analyze`: PyTorch's counter on meta tensors to the unit, hand counts, and kept blocks where there are masks."""

import copy
import inspect
import re
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from analysis.counted import (
    IMAGES,
    MODELS,
    SMALL,
    TOKENS,
    Attention,
    calls_of_linears,
    kept_of,
    left_out,
    on_meta,
    pytorch_count,
    s12,
    sdpa,
    totals,
)
from torch import nn
from torch.utils import checkpoint, flop_counter

import fxmask
from fxmask.passes import shapes

FOLDERS = [Path(fxmask.__file__).parent / f for f in ("analysis", "passes", "kernels")]


def count(model, *inputs, **options):
    return fxmask.analyze(model, inputs, device="h100-sxm", **options)


def both(model, *inputs, **kwargs):
    """(forward, backward) as PyTorch counts them."""
    forward = pytorch_count(model, *inputs, backward=False, **kwargs)
    return forward, pytorch_count(model, *inputs, **kwargs) - forward


# ---- dense ---------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_dense(name):
    make, x = MODELS[name]
    model = on_meta(make)
    forward, backward = both(model, x)
    assert forward > 0 and backward > forward
    report = count(model, x)
    assert totals(report) == totals(report, "flop_dense") == (forward, backward, forward + backward)
    assert min(report.summary["coverage"].values()) == 100 and not report.tables["coverage"]
    assert totals(count(model, x, phases=("fwd",))) == (forward, 0, forward)
    assert report.summary["mac"]["total"] * 2 == forward + backward
    s = report.summary["flop"]
    assert s["total"] == sum(v for k, v in s.items() if k != "total")


def test_known_models_by_hand():
    # ResMLP-S12: 196 tokens; embed, twelve times (mix, fc1, fc2), head
    macs = 196 * 768 * 384 + 12 * (384 * 196 * 196 + 2 * 196 * 384 * 1536) + 384 * 1000
    assert totals(count(on_meta(s12), IMAGES[:1], phases=("fwd",)))[0] == 2 * macs
    # GPT: two blocks of 3 x 40 tokens at width 128, causal attention counted whole
    linears = 2 * 120 * (2 * (3 + 1 + 8) * 128 * 128 + 128 * 211)
    assert totals(count(on_meta(MODELS["gpt"][0]), TOKENS, phases=("fwd",)))[0] == linears + 2 * sdpa(3, 4, 40, 40, 32)[0]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("keys", [40, 24])
def test_attention_by_hand(causal, keys):
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    class M(nn.Module):
        def forward(self, q, k, v):
            return attend(q, k, v)

    q = torch.randn(2, 3, 40, 16, requires_grad=True)
    k, v = (torch.randn(2, 3, keys, 16, requires_grad=True) for _ in range(2))
    forward, backward = sdpa(2, 3, 40, keys, 16)
    report = count(M(), q, k, v)
    assert totals(report)[:2] == (forward, backward)
    assert totals(report)[:2] == both(M(), *(t.detach().to("meta").requires_grad_() for t in (q, k, v)))


@pytest.mark.parametrize("mask", [torch.ones(1, 1, 12, 20, dtype=torch.bool), torch.zeros(2, 3, 12, 20)], ids=["bool", "float"])
def test_attention_with_a_mask_and_dropout(mask):
    class M(nn.Module):
        def forward(self, q, k, v, m, p):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=m, dropout_p=p)

    q, k, v = torch.randn(2, 3, 12, 16), torch.randn(2, 3, 20, 16), torch.randn(2, 3, 20, 8)
    for t in (q, k, v):
        t.requires_grad_()
    product = 2 * 2 * 3 * 12 * 20
    for p in (0.0, 0.3):
        assert totals(count(M(), q, k, v, mask, p))[:2] == (product * 24, 2 * product * 24)


def test_attention_with_fewer_heads_of_keys():
    class M(nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    q, k, v = torch.randn(2, 8, 12, 16), torch.randn(2, 2, 12, 16), torch.randn(2, 2, 12, 16)
    for t in (q, k, v):
        t.requires_grad_()
    assert totals(count(M(), q, k, v))[:2] == sdpa(2, 8, 12, 12, 16)


def test_multi_head_attention():
    """Its inner products are batched matmuls, or fused; eval mode, whose fast path hides them, is counted the same."""
    model = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True)
    x = torch.randn(2, 10, 64)
    linears = 2 * 20 * (64 * 192 + 64 * 64 + 2 * 64 * 96)
    expected = linears + sdpa(2, 4, 10, 10, 16)[0]
    assert totals(count(model, x))[0] == expected
    report = count(model.eval(), x, phases=("fwd",))
    assert totals(report)[0] == expected and not report.tables["coverage"]


# ---- convolutions, recurrence -----------------------------------------------------------------------------------------------------------------------------

# the layer, its input, MACs of one product by hand, whether PyTorch's counter has dW right
CONVOLUTIONS = {
    "1d": (lambda: nn.Conv1d(6, 10, 3, padding=1), (2, 6, 17), 2 * 17 * 10 * 6 * 3, True),
    "2d": (lambda: nn.Conv2d(3, 8, (3, 5), stride=2, padding=1), (2, 3, 17, 19), 2 * 9 * 9 * 8 * 3 * 15, True),
    "3d": (lambda: nn.Conv3d(2, 4, 2), (1, 2, 5, 6, 7), 4 * 5 * 6 * 4 * 2 * 8, True),
    "dilated": (lambda: nn.Conv2d(4, 4, 3, dilation=2), (1, 4, 11, 11), 7 * 7 * 4 * 4 * 9, True),
    "grouped": (lambda: nn.Conv2d(8, 12, 3, groups=4), (2, 8, 9, 9), 2 * 7 * 7 * 12 * 2 * 9, False),
    "depthwise": (lambda: nn.Conv2d(8, 8, 3, groups=8), (2, 8, 9, 9), 2 * 7 * 7 * 8 * 9, False),
    "transposed": (lambda: nn.ConvTranspose2d(6, 10, 4, stride=2, padding=1), (2, 6, 7, 9), 2 * 7 * 9 * 6 * 10 * 16, True),
    "transposed-grouped": (lambda: nn.ConvTranspose2d(6, 10, 4, stride=2, groups=2), (2, 6, 7, 9), 2 * 7 * 9 * 6 * 5 * 16, False),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name):
    make, shape, macs, countable = CONVOLUTIONS[name]
    model, x = make(), torch.randn(shape, requires_grad=True)
    y = model(x)
    report = count(model, x)
    s = report.summary["flop"]
    assert (s["fwd"], s["bwd_dx"], s["bwd_dw"]) == (2 * macs,) * 3
    if countable:
        assert both(on_meta(make), x.detach().to("meta").requires_grad_()) == (2 * macs, 4 * macs)
    rows = {r["phase"]: r for r in report.tables["nodes"] if r["op"].startswith("aten.convolution")}
    item, w = 4, model.weight.numel()
    assert rows["fwd"]["bytes_min"] == item * (x.numel() + w + y.numel() + model.bias.numel())
    assert rows["dX"]["bytes_min"] == rows["dW"]["bytes_min"] == item * (x.numel() + w + y.numel())
    assert rows["db"]["bytes_min"] == item * (y.numel() + model.bias.numel()) and rows["db"]["flop"] == 0


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(cell):
    """They keep their weights in a list, too, and fused kernels would hide their products."""
    model, x = cell(24, 40, num_layers=2, batch_first=True), torch.randn(3, 7, 24)
    gates = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}[cell]
    forward = 2 * 3 * 7 * gates * 40 * (24 + 40 + 40 + 40)
    report = count(model, x)
    assert report.summary["flop"]["fwd"] == forward and not report.tables["coverage"]
    assert report.summary["flop"]["bwd_dw"] <= forward and report.summary["flop"]["bwd_dw"] >= forward - 2 * 2 * 3 * gates * 40 * 40  # no first state's
    assert report.summary["params"] == sum(p.numel() for p in model.parameters())
    assert {r["module"] for r in report.tables["nodes"] if r["phase"] == "opt"} == {""}
    assert all(p.grad is None for p in model.parameters())


def layers_without_products():
    given = {"Threshold": (1.0, 1.0), "Softmax": (1,), "Softmin": (1,), "LogSoftmax": (1,)}
    activations = [name for name in nn.modules.activation.__all__ if name != "MultiheadAttention"]
    found = {name: (getattr(nn, name)(*given.get(name, ())), 2) for name in activations}
    for kind in ("MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "ReflectionPad", "ReplicationPad", "ZeroPad", "CircularPad"):
        found |= {f"{kind}{d}d": (getattr(nn, f"{kind}{d}d")(2), d) for d in (1, 2, 3)}
    modes = {"nearest": (1, 2, 3), "linear": (1,), "bilinear": (2,), "bicubic": (2,), "trilinear": (3,), "nearest-exact": (2,)}
    found |= {f"{mode}{d}": (nn.Upsample(scale_factor=2, mode=mode), d) for mode, ds in modes.items() for d in ds}
    found |= {f"BatchNorm{d}d": (getattr(nn, f"BatchNorm{d}d")(4), d) for d in (1, 2, 3)}
    found |= {"GroupNorm": (nn.GroupNorm(2, 4), 2), "InstanceNorm": (nn.InstanceNorm2d(4), 2), "RMSNorm": (nn.RMSNorm(8), 2), "LayerNorm": (nn.LayerNorm(8), 2)}
    found |= {"Dropout2d": (nn.Dropout2d(), 2), "Unfold": (nn.Unfold(2), 2)}
    return found | {"PixelShuffle": (nn.PixelShuffle(2), 2), "ChannelShuffle": (nn.ChannelShuffle(2), 2)}


def test_layers_without_products_are_known():
    """An activation, a pool or a loss that were unknown would turn every total of the models that use it into a lower bound."""
    unknown = {}
    for name, (layer, d) in layers_without_products().items():
        report = count(layer, torch.randn((2, 4) + (8,) * d, requires_grad=True))
        unknown[name] = [r["op"] for r in report.tables["coverage"]]
        assert report.summary["flop"]["total"] == 0 and report.summary["bytes_min"]["total"] > 0, name
    for name in ("L1Loss", "MSELoss", "BCELoss", "BCEWithLogitsLoss", "SmoothL1Loss", "HuberLoss", "SoftMarginLoss", "PoissonNLLLoss"):
        unknown[name] = [r["op"] for r in count(getattr(nn, name)(), torch.rand(2, 4, requires_grad=True), torch.rand(2, 4)).tables["coverage"]]
    for name in ("CrossEntropyLoss", "NLLLoss", "MultiMarginLoss"):
        unknown[name] = [r["op"] for r in count(getattr(nn, name)(), torch.rand(2, 4, requires_grad=True), torch.tensor([0, 1])).tables["coverage"]]
    assert {n: ops for n, ops in unknown.items() if ops} == {} and len(unknown) > 70


# ---- which gradients there are -----------------------------------------------------------------------------------------------------------------------------


def mlp(*sizes):
    return nn.Sequential(*(m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.GELU())))


def test_the_first_layer_has_no_dx():
    model, x = mlp(16, 32, 8), torch.randn(5, 16)
    first, second = 2 * 5 * 16 * 32, 2 * 5 * 32 * 8
    s = count(model, x).summary["flop"]
    assert (s["fwd"], s["bwd_dx"], s["bwd_dw"]) == (first + second, second, first + second)
    s = count(model, x.requires_grad_()).summary["flop"]
    assert (s["fwd"], s["bwd_dx"], s["bwd_dw"]) == (first + second,) * 3


def test_a_frozen_layer_has_no_dw():
    model, x = mlp(16, 32, 24, 8), torch.randn(5, 16)
    one, two, three = (2 * 5 * a * b for a, b in ((16, 32), (32, 24), (24, 8)))
    model[2].requires_grad_(False)
    s = count(model, x).summary["flop"]
    assert (s["fwd"], s["bwd_dx"], s["bwd_dw"]) == (one + two + three, two + three, one + three)
    assert not [r for r in count(model, x).tables["nodes"] if r["module"] == "2" and r["phase"] in ("dW", "db", "opt")]
    model[0].requires_grad_(False)  # now nobody asks for the gradient behind the third layer
    s = count(model, x).summary["flop"]
    assert (s["bwd_dx"], s["bwd_dw"]) == (0, three)
    assert totals(count(model, x))[1] == both(model.to("meta"), x.to("meta"))[1]


def test_nothing_is_trained():
    model = mlp(16, 32, 8).requires_grad_(False)
    report = count(model, torch.randn(5, 16))
    assert totals(report)[1] == 0 and {r["phase"] for r in report.tables["nodes"]} == {"fwd"}
    assert any("forward only" in n for n in report.notes)


def test_a_part_under_no_grad():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.head = mlp(16, 32), nn.Linear(32, 8)

        def forward(self, x):
            with torch.no_grad():
                x = self.frozen(x)
            return self.head(x)

    s = count(M(), torch.randn(5, 16)).summary["flop"]
    assert (s["fwd"], s["bwd_dx"], s["bwd_dw"]) == (2 * 5 * 32 * (16 + 8), 0, 2 * 5 * 32 * 8)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_callers_mode_does_not_matter(around):
    model, x = mlp(16, 32, 8), torch.randn(5, 16)
    expected = count(model, x).summary["flop"]
    with around():
        assert count(model, x).summary["flop"] == expected
        assert torch.is_grad_enabled() == (around is torch.enable_grad) and torch.is_inference_mode_enabled() == (around is torch.inference_mode)


class Twice(nn.Module):
    """One layer, called twice; another that shares its weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(24, 24), nn.Linear(24, 24, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(self.a(x)))


def test_a_layer_called_twice_and_a_tied_weight():
    report = count(Twice(), torch.randn(5, 24))
    one = 2 * 5 * 24 * 24
    s = report.summary["flop"]
    assert (s["fwd"], s["bwd_dx"], s["bwd_dw"]) == (3 * one, 2 * one, 3 * one)
    assert report.summary["params"] == 24 * 24 + 24
    rows = {r["module"]: r for r in report.tables["modules"]}
    assert rows["a"]["calls"] == 2 and rows["b"]["calls"] == 1
    assert rows["a"]["flop"] == 5 * one and rows["b"]["flop"] == 3 * one  # no dX in a's first call
    assert len([r for r in report.tables["nodes"] if r["phase"] == "opt"]) == 2
    names = {r["node"] for r in report.tables["nodes"] if r["phase"] == "fwd"}
    assert len(names) == 3  # every call has a name of its own


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes(reentrant):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.body, self.last = nn.Linear(16, 16), mlp(16, 40, 16), nn.Linear(16, 8)

        def forward(self, x):
            return self.last(checkpoint.checkpoint(self.body, self.first(x), use_reentrant=reentrant))

    model, x = M(), torch.randn(5, 16)
    body, first, last = 2 * 2 * 5 * 16 * 40, 2 * 5 * 16 * 16, 2 * 5 * 16 * 8
    report = count(model, x)
    s = report.summary["flop"]
    assert (s["fwd"], s["bwd_dx"], s["bwd_dw"], s["total"] - s["fwd"]) == (body + first + last, body + last, body + first + last, totals(report)[1])
    # the second of the two matmuls is not needed again: nothing behind it is saved but what the first half makes; PyTorch's own early stop says so
    assert s["recompute"] == (body if reentrant else both(copy.deepcopy(model).to("meta"), x.to("meta"))[1] - s["bwd_dx"] - s["bwd_dw"])
    assert s["recompute"] in (body // 2, body)
    rows = [r for r in report.tables["nodes"] if r["phase"] == "recompute" and r["flop"]]
    assert rows and all(r["module"].startswith("body") for r in rows)
    with pytest.warns(UserWarning, match="None of the inputs") if reentrant else nullcontext():  # as without an analysis
        assert "recompute" not in {r["phase"] for r in count(model, x, phases=("fwd",)).tables["nodes"]}
    dense = copy.deepcopy(model)
    dense.forward = lambda x: dense.last(dense.body(dense.first(x)))
    saved = [r.tables["footprint"][-1]["saved_activations"] for r in (report, count(dense, x))]
    assert saved[0] < saved[1]


def test_gradients_of_gradients():
    """A model that differentiates inside its forward, as learned forces do: the counts are those of the ops that run."""

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(4, 32, 1)

        def forward(self, x):
            x = x.detach().requires_grad_()
            energy = self.net(x).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]

    seen = []

    class Products(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                a, b = args[-2:]
                seen.append(2 * a.shape[0] * a.shape[1] * b.shape[1])
            return out

    model, x = M(), torch.randn(6, 4)
    with Products():
        y = model(x)
        y.backward(torch.ones_like(y))
    assert totals(count(model, x))[2] == sum(seen)


# ---- masked ------------------------------------------------------------------------------------------------------------------------------------------------


CASES = [("resmlp_s12", (16, 16), 0.5), ("gpt", (32, 16), 0.7), pytest.param("mixer_s_16", (64, 64), 0.8, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("name", "block", "ratio"), CASES)
def test_masked(name, block, ratio):
    """Against PyTorch's count of the dense model on meta tensors, less what the masks leave out by hand."""
    make, x = MODELS[name]
    torch.manual_seed(0)
    model = fxmask.apply(make(), ratio=ratio, block=block)
    plain = on_meta(make)
    forward, backward = both(plain, x)
    less = left_out(model, plain, (x,), block, "masked")
    report = count(model, x)
    assert totals(report, "flop_dense")[:2] == (forward, backward)
    assert totals(report)[:2] == (forward - less["fwd"], backward - less["dX"] - less["dW"])
    sizes = kept_of(model, block)
    assert report.summary["params_kept"] == report.summary["params"] - sum(size - kept for kept, size in sizes.values())
    if name == "resmlp_s12":  # ragged: 196 = 12 x 16 + 4, 1000 = 62 x 16 + 8
        assert any(kept != round((1 - ratio) * size) for kept, size in sizes.values()), "the kept count is no other than the target here"


@pytest.mark.slow
def test_masked_vit_b_16():
    make, x = MODELS["vit_b_16"]
    model, plain = fxmask.apply(make(), ratio=0.5, block=(64, 64)), on_meta(make)
    forward, backward = both(plain, x)
    less = left_out(model, plain, (x,), (64, 64), "masked")
    assert totals(count(model, x))[:2] == (forward - less["fwd"], backward - less["dX"] - less["dW"])


def hand_attention(model, x):
    """FLOP of the attention in a small model, which PyTorch's counter takes for nothing on a CPU."""
    found = [m for m in model.modules() if isinstance(m, Attention)]
    tokens = x.shape[1] if x.dim() == 2 else (x.shape[2] // 16) * (x.shape[3] // 16) + 1
    one = [sdpa(x.shape[0], m.heads, tokens, tokens, m.proj.out_features // m.heads) for m in found]
    return sum(f for f, _ in one), sum(b for _, b in one)


MODES = ("masked", "ste", "unmasked", "rigl", "rigl-dense")


@pytest.mark.parametrize(("name", "mode"), [*(("gpt", mode) for mode in MODES), ("vit", "masked"), ("vit", "unmasked"), ("mixer", "masked"), ("mixer", "ste")])
def test_masked_small(name, mode):
    """Ragged shapes, each backward mode: by hand, and as PyTorch counts the masked model's real run on a CPU."""
    make, x = SMALL[name]
    torch.manual_seed(0)
    mode, now = mode.partition("-")[::2]
    config = fxmask.WeightMask(ratio=0.6, block=(16, 32), backward=mode, dense_every=1 if now else 3)
    model = fxmask.apply(make(), config)
    if mode == "rigl":
        fxmask.step(model, 0)
    plain = on_meta(make)
    forward, backward = both(plain, x.to("meta"))
    less = left_out(model, plain, (x.to("meta"),), (16, 32), "ste" if now else mode)
    report = count(model, x)
    assert totals(report)[:2] == (forward - less["fwd"], backward - less["dX"] - less["dW"])
    s = report.summary
    assert s["flop_dense"]["bwd_dx"] - s["flop"]["bwd_dx"] == less["dX"] and s["flop_dense"]["bwd_dw"] - s["flop"]["bwd_dw"] == less["dW"]
    real = both(model, x)
    attention = hand_attention(model, x)
    assert totals(report)[:2] == (real[0] + attention[0], real[1] + attention[1])
    assert report.summary["flop_executed"]["total"] >= report.summary["flop"]["total"]


@pytest.mark.parametrize("block", [(16, 16), (64, 32), (3, 5), (40, 30)])
@pytest.mark.parametrize("impl", [None, "triton", "reference"])
def test_the_implementation_changes_no_useful_flop(block, impl):
    torch.manual_seed(1)
    with torch.no_grad():
        model = fxmask.apply(mlp(70, 90, 50), ratio=0.4, block=block, include="*")
    x = torch.randn(33, 70)
    kept = {n: k for n, (k, _) in kept_of(model, block).items()}
    report = count(model, x, impl=impl)
    expected = 2 * 33 * sum(kept.values())
    s = report.summary["flop"]
    assert (s["fwd"], s["bwd_dx"], s["bwd_dw"]) == (expected, 2 * 33 * kept["2.weight"], expected)
    executed = report.summary["flop_executed"]
    assert all(executed[k] >= s[k] for k in s)
    if impl == "reference":
        assert executed["fwd"] >= 2 * 33 * (70 * 90 + 90 * 50)


def test_a_mask_that_keeps_everything_is_dense():
    model = fxmask.apply(mlp(64, 96, 64), ratio=0.0, block=(16, 16))
    report = count(model, torch.randn(8, 64))
    assert report.summary["flop"] == report.summary["flop_dense"] and report.summary["params_kept"] == report.summary["params"]


@pytest.mark.parametrize("options", [{}, {"refresh": 2}, {"refresh": 0}], ids=["built", "cached", "once"])
def test_attention_that_reads_its_weight(options):
    """MultiheadAttention's out_proj gets W∘M and multiplies densely: kept elements are useful, the rest is issued."""
    torch.manual_seed(0)
    model = fxmask.apply(nn.MultiheadAttention(64, 4, batch_first=True), ratio=0.5, block=(16, 16), **options)
    if options.get("refresh"):
        fxmask.step(model, 0)

    class Self(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = model

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    kept, size = kept_of(model, (16, 16))["out_proj.weight"]
    assert size == 64 * 64 and kept == size // 2
    report = count(Self(), torch.randn(2, 10, 64))
    s, dense = report.summary["flop"], report.summary["flop_dense"]
    assert dense["fwd"] - s["fwd"] == 2 * 20 * (size - kept) and dense["bwd_dx"] - s["bwd_dx"] == 2 * 20 * (size - kept)
    assert s["fwd"] == 2 * 20 * (64 * 192 + kept) + sdpa(2, 4, 10, 10, 16)[0]


def test_weights_that_are_computed():
    """A weight-normed layer has no weight to read a mask off: the number of kept blocks is right, and a note says that the places are drawn."""
    model = fxmask.apply(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)), nn.GELU(), nn.Linear(64, 64)), ratio=0.5, block=(16, 16))
    report = count(model, torch.randn(8, 64))
    assert report.summary["flop"]["fwd"] == 2 * 8 * 64 * 64 and report.summary["flop_dense"]["fwd"] == 2 * 2 * 8 * 64 * 64
    assert next(n for n in report.notes if "drawn at random" in n).startswith("1 weights")


class Sorts(nn.Module):
    """Ops without products, which PyTorch does not tag as pointwise, as position codes and routers of language models have them."""

    def forward(self, x):
        places = torch.bucketize(x, torch.linspace(-1, 1, 5)) + torch.arange(64) // 16
        found = torch.zeros_like(x).scatter_reduce(1, places, x, "amax")
        turned = torch.view_as_real(torch.polar(found.abs(), x)).sum(-1)
        best = torch.cummax(turned, 1).values + torch.isin(places, torch.arange(3))
        return F.interpolate(best[None, None], size=(8, 20), mode="bilinear", antialias=True)


def test_ops_without_products_are_known():
    report = count(Sorts(), torch.randn(20, 64, requires_grad=True), strict=True)
    assert report.summary["flop"]["total"] == 0 and min(report.summary["coverage"].values()) == 100 and report.summary["bytes_min"]["total"] > 20 * 64 * 4


class Experts(nn.Module):
    """A mixture of experts: sorted tokens, each meets the matrix of its group."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 64, 96)), nn.Parameter(torch.randn(4, 96, 64))

    def forward(self, x, offs):
        return F.grouped_mm(F.grouped_mm(x, self.up, offs=offs).relu(), self.down, offs=offs)


@pytest.mark.parametrize("grad", [True, False])
def test_grouped_products(grad):
    """Each token meets one expert, however they are shared out; the shapes on fake tensors are those of the kernel."""
    torch.manual_seed(0)
    model, x, offs = Experts(), torch.randn(20, 64, requires_grad=grad), torch.tensor([3, 3, 11, 20], dtype=torch.int32)
    one = 2 * 20 * 64 * 96
    report = count(model, x, offs, strict=True)
    s = report.summary["flop"]
    assert (s["fwd"], s["bwd_dx"], s["bwd_dw"]) == (2 * one, (1 + grad) * one, 2 * one)
    y = model(x, offs)
    y.square().sum().backward()
    assert y.shape == (20, 64) and model.up.grad.shape == (4, 64, 96)
    for a, b in ((x, model.up), (x.t(), torch.randn(20, 96)), (torch.randn(4, 5, 64), model.up)):
        o = offs if a.dim() == 2 else None
        expected = F.grouped_mm(a, b, offs=o)
        found = shapes.grouped_mm(a, b, o)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


def test_meta_weights_have_the_right_number_of_blocks():
    real = fxmask.apply(mlp(64, 96, 64), ratio=0.7, block=(16, 16))
    meta = fxmask.apply(on_meta(lambda: mlp(64, 96, 64)), ratio=0.7, block=(16, 16))
    x = torch.randn(8, 64)
    assert count(meta, x).summary["flop"] == count(real, x).summary["flop"]
    assert any("2 weights have no values" in n for n in count(meta, x).notes) and not any("no values" in n for n in count(real, x).notes)


# ---- nobody else counts ----------------------------------------------------------------------------------------------------------------------------------


def test_pytorchs_counter_is_not_asked(monkeypatch):
    make, x = SMALL["gpt"]
    model = fxmask.apply(make(), ratio=0.5, block=(16, 16))
    expected = count(model, x).summary["flop"]

    def never(*args, **kwargs):
        raise AssertionError("asked PyTorch's counter")

    for name in [n for n, f in vars(flop_counter).items() if inspect.isfunction(f) and "flop" in n]:
        monkeypatch.setattr(flop_counter, name, never)
    monkeypatch.setattr(flop_counter.FlopCounterMode, "__init__", never)
    for op in flop_counter.flop_registry:
        monkeypatch.setitem(flop_counter.flop_registry, op, never)
    assert count(model, x).summary["flop"] == expected


def test_no_source_names_pytorchs_counter():
    found = []
    for folder in FOLDERS:
        for path in folder.resolve().rglob("*.py"):
            code = re.sub(r'""".*?"""|#.*', "", path.read_text(), flags=re.DOTALL)
            found += [path.name for word in ("FlopCounterMode", "get_total_flops") if word in code]
    assert len(FOLDERS) == 3 and not found


def test_the_tokens_of_the_hooks_are_those_of_the_rows():
    """The oracle of the masked tests and the table agree on what a layer sees."""
    make, x = SMALL["mixer"]
    model = make()
    calls = calls_of_linears(on_meta(make), x.to("meta"))
    rows = {r["module"]: r for r in count(model, x).tables["nodes"] if r["phase"] == "fwd" and r["flop"] and r["module"] in calls}
    assert {n: t for n, (t, _) in calls.items()} == {n: r["m"] * r["batch"] for n, r in rows.items()}
