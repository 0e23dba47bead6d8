"""Small models for the tests, and what they should compute, written without fxmask."""

import copy
from fractions import Fraction
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn


def mlp(seed=0, sizes=(64, 96, 64, 10)):
    torch.manual_seed(seed)
    layers = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.GELU()]
    return nn.Sequential(*layers[:-1])


class Residual(nn.Module):
    """A block with a token-mixing linear on a transposed view, a functional linear on a parameter, and dropout."""

    def __init__(self, seed=0, tokens=32, dim=32, p=0.0):
        super().__init__()
        torch.manual_seed(seed)
        self.mix = nn.Linear(tokens, tokens)
        self.fc1, self.fc2 = nn.Linear(dim, 64), nn.Linear(64, dim, bias=False)
        self.proj = nn.Parameter(torch.randn(32, dim) / 6)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.drop(self.fc2(F.gelu(self.fc1(x))))
        return F.linear(x, self.proj)


class Attention(nn.Module):
    """Multi-head attention, which reads its out_proj's weight, and a layer that is called."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.fc = nn.MultiheadAttention(32, 2, batch_first=True), nn.Linear(32, 48)

    def forward(self, x):
        return self.fc(self.attention(x, x, x, need_weights=False)[0])


class Twice(nn.Module):
    """One weight, two calls."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(32, 32, bias=False)

    def forward(self, x):
        return self.fc(F.gelu(self.fc(x)))


class Scale(nn.Module):
    """y = a x, by a gain a channel."""

    def __init__(self, width):
        super().__init__()
        self.a = nn.Parameter(torch.linspace(1, 2, width))

    def forward(self, x):
        return x * self.a


class Computed(nn.Module):
    """A weight that the forward computes."""

    def __init__(self):
        super().__init__()
        self.v = nn.Parameter(torch.randn(32, 32))

    def forward(self, x):
        return F.linear(x, self.v * 2)


class Region(nn.Module):
    """A layer whose forward the compiler traces once for all that are alike."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64)

    @torch.compiler.nested_compile_region
    def forward(self, x):
        return self.fc(x).tanh()


def best_blocks(w, block, ratio):
    """The mask by the definition, in float64, block by block; for weights without near-ties."""
    nb, kb = -(-w.shape[0] // block[0]), -(-w.shape[1] // block[1])
    norms = torch.tensor(
        [
            [w[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]].detach().double().square().sum() for j in range(kb)]
            for i in range(nb)
        ]
    )
    k = max(1, -(-(nb * kb * (1 - Fraction(str(ratio)))).numerator // (nb * kb * (1 - Fraction(str(ratio)))).denominator))
    mask = torch.zeros(nb * kb, dtype=torch.bool)
    mask[norms.flatten().argsort(descending=True)[:k]] = True
    return mask.reshape(nb, kb)


def with_zeros(model, names, block, ratio):
    """A dense copy of a model with W∘M written into the named weights."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name in names:
            w = model.get_parameter(name)
            mask = best_blocks(w, block, ratio)
            w.mul_(mask.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: w.shape[0], : w.shape[1]])
    return model


def snapshot(model):
    """Everything of a model that a failed apply must leave alone."""
    modules = {n: (type(m), sorted(m.__dict__), list(m._buffers), len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()}
    code = model.code if isinstance(model, torch.fx.GraphModule) else ""
    return modules, {k: (id(v), torch.zeros(()) if v.is_meta else v.clone()) for k, v in model.named_parameters()}, list(model.state_dict()), code


def same_snapshot(a, b):
    """Whether two snapshots are equal, tensors by identity and bits."""
    tensors = a[1].keys() == b[1].keys() and all(a[1][k][0] == b[1][k][0] and torch.equal(a[1][k][1], b[1][k][1]) for k in a[1])
    return a[0] == b[0] and a[2:] == b[2:] and tensors


def noisy_step(call, optimiser, i):
    """An optimiser's step on noise that hangs on `i` alone, inputs of 64 features and targets of 10; gives the loss."""
    noise = torch.Generator().manual_seed(i)
    optimiser.zero_grad()
    loss = (call(torch.randn(8, 64, generator=noise)) - torch.randn(8, 10, generator=noise)).square().mean()
    loss.backward()
    optimiser.step()
    return loss.detach()
