"""The step of the dense model, as the analysis of a changed one tells it: FLOP and least time of every op that a dense step has, and of no other."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from analysis.counted import Block, analyze
from torch import nn

import fxmask

BLOCK, TOKENS = (16, 16), torch.randn(2, 8, 64)


class Shared(nn.Module):
    """A weight that is used three times, and once more under another name; what goes into the last layer has one gradient twice."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 64), nn.Linear(64, 48), nn.Linear(64, 64)
        self.c.weight = self.a.weight

    def forward(self, x):
        for layer in (self.a, self.a, self.a, self.c):
            x = torch.tanh(layer(x))
        return self.b(x + x)


class Reads(nn.Module):
    """Weights that are read: one twice, one that is scaled after it was masked."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        x = F.linear(torch.relu(F.linear(x, self.a.weight)), self.a.weight)
        return F.linear(x, self.b.weight * 2, self.b.bias)


class Convolutions(nn.Module):
    """Residual, and one of them used twice; of images with edges of three kinds."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect")
        self.c = nn.Conv2d(16, 32, 2, stride=2)

    def forward(self, x):
        return self.c(self.b(F.relu(self.a(F.relu(self.a(x)))) + x))


class Causal(nn.Module):
    """Its own bool masks: buffers, an attribute and a flag, for attention by hand, fused, and for means over the tokens before."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.w = nn.Linear(64, 64), nn.Linear(64, 64), nn.Parameter(torch.randn(8, 8))
        self.register_buffer("mask", torch.ones(8, 8).tril().bool())
        self.register_buffer("started", torch.tensor(True))
        self.before = torch.ones(8, 8).tril().bool()

    def forward(self, x):
        q = self.a(x)
        for mask in (self.mask, self.before):
            x = x + (q @ q.transpose(1, 2)).masked_fill(~mask, -1e9).softmax(-1) @ x
            x = x + F.scaled_dot_product_attention(q[:, None], q[:, None], x[:, None], attn_mask=mask[None, None].expand(2, 1, 8, 8))[:, 0]
            x = x + mask.float() @ x + torch.where(mask, self.w, 0.0) @ x
        return self.b(torch.where(self.started, x, q))


MODELS = {
    "shared": (Shared, TOKENS),
    "residual": (lambda: Block(64, 4, hidden=128), TOKENS),
    "encoder": (lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0), TOKENS),
    "reads": (Reads, TOKENS),
    "causal": (Causal, TOKENS),
    "convolutions": (Convolutions, torch.randn(2, 16, 8, 8)),
}


def weight_mask(**options):
    return fxmask.WeightMask(0.5, BLOCK, **options)


CONFIGS = {
    **{mode: (weight_mask(backward=mode),) for mode in ("masked", "ste", "unmasked", "rigl")},
    "cached": (weight_mask(refresh=4),),
    "by the reference": (weight_mask(impl="reference"),),
    "2:4": (fxmask.NMMask(2, 4),),
    "2:4, transposable": (fxmask.NMMask(2, 4, transposable=True),),
    "2:4, sr-ste": (fxmask.NMMask(2, 4, mode="sr-ste"),),
    "dropped": (fxmask.BlockDropout(0.5, BLOCK),),
    "masked and dropped": (weight_mask(), fxmask.BlockDropout(0.5, BLOCK)),
    "pruned": (fxmask.ActivationPruning(0.5, 16),),
    "pruned and straight through": (weight_mask(backward="ste"), fxmask.ActivationPruning(0.5, 16)),
}


def fits(name, config):
    if name in ("encoder", "reads") and config == "unmasked":  # a read weight has one gradient
        return False
    if name in ("encoder", "reads") and config.startswith("2:4"):  # they leave read weights as they are
        return False
    return name not in ("reads", "convolutions") or not ("pruned" in config or "dropped" in config)


CASES = [(name, config) for name in MODELS for config in CONFIGS if fits(name, config)]


def analyses(name, config):
    make, x = MODELS[name]
    torch.manual_seed(0)
    model = make()
    dense = analyze(model, x)
    layers = {"layers": nn.Conv2d} if name == "convolutions" else {"include": "*"}
    return dense, analyze(fxmask.apply(model, *CONFIGS[config], **layers), x)


# every second pair, so that each model and each configuration is there
ALTERNATE = [pytest.param(*case, marks=pytest.mark.slow if (list(MODELS).index(case[0]) + list(CONFIGS).index(case[1])) % 2 else ()) for case in CASES]


@pytest.mark.parametrize(("name", "config"), ALTERNATE)
def test_the_dense_step_is_that_of_the_dense_model(name, config):
    dense, found = analyses(name, config)
    assert found.summary["flop_dense"] == dense.summary["flop"]
    assert found.summary["t_dense_min_us"] == pytest.approx(dense.summary["t_min_us"], rel=1e-9)


def sums(report):
    """How many sums of two gradients there are, by phase."""
    return Counter(r["phase"] for r in report.tables["nodes"] if r["op"] == "aten.add" and r["phase"] in ("dX", "dW"))


@pytest.mark.parametrize(("name", "expected"), [("shared", {"dW": 3 + 2, "dX": 1}), ("residual", {"dX": 1})])
@pytest.mark.parametrize("config", ["masked", "ste"])
def test_sums_of_gradients_are_of_what_they_sum(name, expected, config):
    """Of a weight that is used four times and its bias that is used three times; of the second branch's input, where that of the first needs no gradient."""
    assert [sums(report) for report in analyses(name, config)] == [expected] * 2


def test_two_products_of_a_convolution_whose_backward_is_unmasked():
    """One of W∘M, for the value, beside the dense one, for the gradients: useful FLOP have both, the dense step one, and the weights are loaded once."""
    x, once = torch.randn(2, 16, 8, 8), 2 * 2 * 64 * 16 * 16 * 9
    model = fxmask.apply(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1)), weight_mask(backward="unmasked"), layers=nn.Conv2d)
    report, kept = analyze(model, x), 5 * 16 * 16  # of nine blocks
    s = report.summary
    assert s["flop"]["fwd"] == 2 * 2 * 64 * kept + once and s["flop_dense"]["fwd"] == once
    assert s["weights_loaded"] == kept
    assert "a dense step has no such product" in report.explain("0")
    assert analyze(model, x, phases=("fwd",)).summary["flop_dense"]["fwd"] == once
