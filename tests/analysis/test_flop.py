"""FLOP of `fxmask.analyze` for dense models: PyTorch's counter on meta tensors to the unit, and hand counts; nobody else counts."""

import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from analysis.counted import IMAGES, MODELS, SMALL, TOKENS, both, calls_of_linears, on_meta, s12, sdpa, totals
from analysis.counted import analyze as count
from torch import nn
from torch.utils import flop_counter

import fxmask

FOLDERS = [Path(fxmask.__file__).parent / f for f in ("analysis", "passes", "kernels")]


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
