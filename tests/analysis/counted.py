"""Models for the tests of `fxmask.analyze`, and their FLOP as PyTorch counts them, or as they are counted by hand."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from resmlp import PRESETS, ResMLP
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fxmask
from fxmask.kernels.grid import kept_elements


class Apply(nn.Module):
    """A model that is a function."""

    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, *args):
        return self.f(*args)


class Reads(nn.Module):
    """A Linear of 64 to 48 whose weight is used as `how` says."""

    def __init__(self, how):
        super().__init__()
        self.fc, self.how = nn.Linear(64, 48, bias=False), how

    def forward(self, x):
        return self.how(x, self.fc.weight)


class Attention(nn.Module):
    def __init__(self, dim, heads, causal):
        super().__init__()
        self.qkv, self.proj, self.heads, self.causal = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), heads, causal

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, dim, heads, causal=False, hidden=0):
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(dim), nn.LayerNorm(dim), Attention(dim, heads, causal)
        self.fc1, self.fc2 = nn.Linear(dim, hidden or 4 * dim), nn.Linear(hidden or 4 * dim, dim)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    """ViT-B/16 unless told otherwise."""

    def __init__(self, dim=768, heads=12, depth=12, classes=1000, side=14):
        super().__init__()
        self.patch, self.cls = nn.Conv2d(3, dim, 16, 16), nn.Parameter(torch.zeros(1, 1, dim))
        self.position = nn.Parameter(torch.zeros(1, side**2 + 1, dim))
        self.blocks, self.norm, self.head = nn.Sequential(*(Block(dim, heads) for _ in range(depth))), nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


class MixerBlock(nn.Module):
    def __init__(self, tokens, dim, token_hidden, hidden):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mix = nn.Sequential(nn.Linear(tokens, token_hidden), nn.GELU(), nn.Linear(token_hidden, tokens))
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x):
        x = x + self.mix(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.norm2(x))


class Mixer(nn.Module):
    """Mixer-S/16 unless told otherwise."""

    def __init__(self, dim=512, depth=8, tokens=196, classes=1000):
        super().__init__()
        self.patch, self.head, self.norm = nn.Conv2d(3, dim, 16, 16), nn.Linear(dim, classes), nn.LayerNorm(dim)
        self.blocks = nn.Sequential(*(MixerBlock(tokens, dim, dim // 2, 4 * dim) for _ in range(depth)))

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.patch(x).flatten(2).transpose(1, 2))).mean(1))


class GPT(nn.Module):
    """A small GPT: its head is the token table."""

    def __init__(self, dim=128, heads=4, depth=2, words=211, length=40):
        super().__init__()
        self.table, self.position = nn.Embedding(words, dim), nn.Embedding(length, dim)
        self.blocks, self.norm = nn.Sequential(*(Block(dim, heads, causal=True) for _ in range(depth))), nn.LayerNorm(dim)
        self.head = nn.Linear(dim, words, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        x = self.table(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def s12():
    return ResMLP(PRESETS["s12"])


IMAGES, TOKENS = torch.empty(2, 3, 224, 224, device="meta"), torch.zeros(3, 40, dtype=torch.int64, device="meta")
MODELS = {"resmlp_s12": (s12, IMAGES), "vit_b_16": (ViT, IMAGES), "mixer_s_16": (Mixer, IMAGES), "gpt": (GPT, TOKENS)}
# models of the same kinds that run on a CPU in no time, with ragged edges for blocks of 16 and 32
SMALL = {
    "vit": (lambda: ViT(dim=72, heads=3, depth=1, classes=37, side=2), torch.randn(2, 3, 32, 32)),
    "mixer": (lambda: Mixer(dim=88, depth=1, tokens=20, classes=30), torch.randn(3, 3, 64, 80)),
    "gpt": (lambda: GPT(dim=96, heads=4, depth=1, words=101, length=24), torch.randint(0, 101, (2, 24))),
}


def on_meta(make):
    with torch.device("meta"):
        return make()


def pytorch_count(model, *inputs, backward=True, **kwargs):
    """What FlopCounterMode counts of a run; of the backward from all outputs, too."""
    counter = FlopCounterMode(display=False)
    with counter, torch.set_grad_enabled(backward):
        out = model(*inputs, **kwargs)
        outs = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
        if backward:
            torch.autograd.backward(outs, [torch.ones_like(t) for t in outs])
    return counter.get_total_flops()


def sdpa(batch, heads, queries, keys, dim):
    """Forward and backward of one attention by hand: Q K^T and P V, then dV, dP, dQ, dK."""
    return 4 * batch * heads * queries * keys * dim, 8 * batch * heads * queries * keys * dim


def calls_of_linears(model, *inputs):
    """{name: (tokens of its calls, whether its input has a gradient)} of a model on the meta device."""
    found = {}

    def note(name):
        def hook(module, args, out):
            tokens, needs = found.get(name, (0, False))
            found[name] = (tokens + args[0].numel() // args[0].shape[-1], needs or args[0].requires_grad)

        return hook

    for name, m in model.named_modules():
        if isinstance(m, nn.Linear):
            m.register_forward_hook(note(name))
    model(*inputs)
    return found


def kept_of(model, block):
    """{weight's name: (elements in kept blocks, all elements)} of a masked model."""
    found = {}
    for name, mask in fxmask.masks(model).items():
        w = model.get_parameter(name)
        found[name] = (int(kept_elements(mask, tuple(w.shape), block)), w.numel())
    return found


def left_out(model, plain, inputs, block, mode):
    """{fwd, dX, dW: FLOP that the masks leave out}, by hand: 2 a token and element outside kept blocks, where the mode drops it."""
    calls, found = calls_of_linears(plain, *inputs), {"fwd": 0, "dX": 0, "dW": 0}
    for name, (kept, size) in kept_of(model, block).items():
        tokens, needs = calls[name.removesuffix(".weight")]
        less = 2 * tokens * (size - kept)
        found["fwd"] += less
        found["dX"] += less * (needs and mode != "unmasked")
        found["dW"] += less * (mode in ("masked", "rigl"))
    return found


def totals(report, name="flop"):
    """Forward, backward and all of it."""
    s = report.summary[name]
    return s["fwd"], s["total"] - s["fwd"], s["total"]


def masked(name, **options):
    make, x = SMALL[name]
    torch.manual_seed(0)
    return fxmask.apply(make(), **{"ratio": 0.6, "block": (16, 32), **options}), x


def analyze(model, *inputs, **options):
    return fxmask.analyze(model, inputs, **{"device": "h100-sxm", **options})


def both(model, *inputs, **kwargs):
    """(forward, backward) as PyTorch counts them."""
    forward = pytorch_count(model, *inputs, backward=False, **kwargs)
    return forward, pytorch_count(model, *inputs, **kwargs) - forward


def mlp(*sizes):
    return nn.Sequential(*(m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.GELU())))
