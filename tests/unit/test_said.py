"""Readers of a layer's weight, by whatever name their code calls it; and what is no read."""

import inspect
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxmask
from fxmask.passes.readers import weight_readers


class Held(nn.Module):
    """Five layers; which a subclass reads its docstring says, by name."""

    def __init__(self):
        super().__init__()
        self.fc, self.fc1, self.fc2 = (nn.Linear(32, 32) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.named = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)})
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(2))

    def help(self, x, w):
        return F.linear(x, w)


class Named(Held):
    """fc"""

    def forward(self, x):
        lin = self.fc
        return F.linear(x, lin.weight, lin.bias)


class WeightNamed(Held):
    """fc"""

    def forward(self, x):
        w = self.fc.weight
        return x @ w.t()


class Unpacked(Held):
    """fc1 fc2"""

    def forward(self, x):
        a, b = self.fc1, self.fc2
        return F.linear(F.linear(x, a.weight), b.weight)


class WeightsUnpacked(Held):
    """fc1"""

    def forward(self, x):
        w, b = self.fc1.weight, self.fc1.bias
        return self.help(x, w) + b


class Walrus(Held):
    """fc"""

    def forward(self, x):
        if (lin := self.fc) is not None:
            x = F.linear(x, lin.weight)
        return x


class Chained(Held):
    """blocks.0.0"""

    def forward(self, x):
        block = self.blocks[0]
        lin = block[0]
        return F.linear(x, lin.weight)


class Annotated(Held):
    """fc"""

    def forward(self, x):
        lin: nn.Linear = self.fc
        return F.linear(x, lin.weight)


class Chosen(Held):
    """fc1 fc2"""

    def forward(self, x):
        lin = self.fc1 if x.sum() > 0 else self.fc2
        return F.linear(x, lin.weight)


class Branched(Held):
    """fc1 fc2"""

    def forward(self, x):
        if x.sum() > 0:
            lin = self.fc1
        else:
            lin = self.fc2
        return F.linear(x, lin.weight)


class Last(Held):
    """layers.1"""

    def forward(self, x):
        return F.linear(self.layers[0](x), self.layers[-1].weight)


class Key(Held):
    """named.a"""

    def forward(self, x):
        return F.linear(x, self.named["a"].weight)


class Counted(Held):
    """layers.0 layers.1"""

    def forward(self, x):
        for i in range(2):
            x = F.linear(x, self.layers[i].weight)
        return x


class Looped(Held):
    """layers.0 layers.1"""

    def forward(self, x):
        for layer in self.layers:
            x = F.linear(x, layer.weight)
        return x


class Enumerated(Held):
    """layers.0 layers.1"""

    def forward(self, x):
        for i, layer in enumerate(reversed(self.layers)):
            x = F.linear(x, layer.weight) * i
        return x


class Zipped(Held):
    """layers.0 layers.1"""

    def forward(self, x):
        for scale, layer in zip((1, 2), self.layers, strict=True):
            x = F.linear(x, layer.weight) * scale
        return x


class Sliced(Held):
    """layers.0 layers.1"""

    def forward(self, x):
        for layer in self.layers[:1]:
            x = F.linear(x, layer.weight)
        return x


class Values(Held):
    """named.a named.b"""

    def forward(self, x):
        for layer in self.named.values():
            x = F.linear(x, layer.weight)
        return x


class Items(Held):
    """named.a named.b"""

    def forward(self, x):
        for _, layer in self.named.items():  # noqa: PERF102
            x = F.linear(x, layer.weight)
        return x


class Some(Held):
    """fc fc2"""

    def forward(self, x):
        for layer in (self.fc, self.fc2):
            x = F.linear(x, layer.weight)
        return x


class Pairs(Held):
    """fc1"""

    def forward(self, x):
        for read, called in [(self.fc1, self.fc2)]:
            x = called(F.linear(x, read.weight))
        return x


class Comprehended(Held):
    """layers.0 layers.1"""

    def forward(self, x):
        return F.linear(x, sum(layer.weight for layer in self.layers))


class Listed(Held):
    """blocks.0.0 blocks.1.0"""

    def forward(self, x):
        firsts = [block[0] for block in self.blocks]
        weights = [lin.weight for lin in firsts]
        for w in weights:
            x = F.linear(x, w)
        return x


class Got(Held):
    """fc"""

    def forward(self, x):
        return F.linear(x, getattr(self.fc, "weight"))  # noqa: B009


class GotByName(Held):
    """fc1 fc2"""

    def forward(self, x):
        for i in (1, 2):
            x = F.linear(x, getattr(self, f"fc{i}").weight)
        return x


class Submodule(Held):
    """blocks.0.0"""

    def forward(self, x):
        return F.linear(x, self.get_submodule("blocks.0.0").weight)


class Inner(Held):
    """fc"""

    def forward(self, x):
        lin = self.fc

        def run(y):
            return F.linear(y, lin.weight)

        return run(x)


class InMethod(Held):
    """fc"""

    def forward(self, x):
        return self._run(x)

    def _run(this, x):
        lin = this.fc
        return F.linear(x, lin.weight)


class Turned(Held):
    """fc1"""

    def forward(self, x):
        lin = None
        for _ in range(2):
            if lin is not None:
                x = F.linear(x, lin.weight)
            lin = self.fc1
        return x


class Cast(Held):
    """fc"""

    def forward(self, x):
        w = self.fc.weight.to(x.dtype)
        return F.linear(x, w)


class Added(Held):
    """layers.0 layers.1 named.a named.b"""

    def forward(self, x):
        for layer in list(self.layers) + list(self.named.values()):
            x = F.linear(x, layer.weight)
        return x


class InARow(Held):
    """fc layers.0 layers.1"""

    def forward(self, x):
        for layer in itertools.chain([self.fc], self.layers):
            x = F.linear(x, layer.weight)
        return x


class Matched(Held):
    """fc fc1"""

    def forward(self, x):
        match x.ndim:
            case 1:
                lin = self.fc
            case _:
                lin = self.fc1
        return F.linear(x, lin.weight)


class Tried(Held):
    """fc fc1"""

    def forward(self, x):
        try:
            lin = self.fc
        except RuntimeError:
            lin = self.fc1
        return F.linear(x, lin.weight)


class Copied(Held):
    """fc fc1"""

    def forward(self, x):
        new = torch.zeros(64, 32)
        new[:32] = self.fc.weight.data
        self.kept = self.fc1.weight
        return F.linear(x, new[:32]) + F.linear(x, self.kept)


READS = [Copied, Named, WeightNamed, Unpacked, WeightsUnpacked, Walrus, Chained, Annotated, Chosen, Branched, Last, Key, Counted, Looped, Enumerated, Zipped]
READS += [Sliced, Values, Items, Some, Pairs, Comprehended, Listed, Got, GotByName, Submodule, Inner, InMethod, Turned, Cast]
READS += [Added, InARow, Matched, Tried]


class Calls(Held):
    def forward(self, x):
        lin = self.fc
        for layer in self.layers:
            x = layer(x)
        return lin(x)


class NameAgain(Held):
    """The name stands for another layer by then."""

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        for layer in self.blocks:
            x = layer(x) * layer.training
        lin = self.fc
        x = lin(x)
        lin = nn.Identity()
        lin.weight = x
        return x @ lin.weight.t()


class Facts(Held):
    def forward(self, x):
        lin, w = self.fc, self.fc.weight
        x = x.to(lin.weight.dtype, copy=False) * lin.weight.shape[0] + w.size(0) + lin.weight.data.numel()
        assert isinstance(lin.weight, nn.Parameter) and lin.weight is not None and hasattr(lin.weight, "dtype") and w.device == x.device
        return lin(x)


class Writes(Held):
    """As RWKV rescales its blocks: what is written is the Parameter, and so is what a layer that is called, too, reads of it."""

    def forward(self, x):
        with torch.no_grad():
            for block in self.blocks:
                block[0].weight.div_(2)
            for i in range(2):
                self.layers[i].weight.data[0] = 1
                w = self.layers[i].weight
                w *= 1
            self.fc.weight.copy_(self.fc.weight / self.fc.weight.norm())
            nn.init.zeros_(self.fc1.weight)
            self.fc2.weight += 1
        for block in self.blocks:
            x = block(x)
        return self.fc(x)


class Arguments(Held):
    """A name that a function is given is not the one outside."""

    def forward(self, x):
        lin = self.fc
        return (lambda lin: lin.weight)(nn.Linear(1, 1)).sum() + lin(x)


class Words(Held):
    """lin = self.fc; lin.weight"""

    def forward(self, x):
        # lin = self.fc; lin.weight
        return self.fc(x)


NONE = [Calls, NameAgain, Facts, Writes, Arguments, Words]


@pytest.mark.parametrize("cls", READS, ids=lambda c: c.__name__)
def test_a_reader_is_found_by_whatever_name(cls):
    m = cls()
    m(torch.randn(2, 32))  # it runs, so what it reads is there
    names = {id(layer): name for name, layer in m.named_modules()}
    assert {names[key] for key in weight_readers(m)} == set(inspect.getdoc(cls).split())


@pytest.mark.parametrize("cls", NONE, ids=lambda c: c.__name__)
def test_this_is_no_read(cls):
    m = cls()
    m(torch.randn(2, 32))
    assert weight_readers(m) == {}


@pytest.mark.parametrize("cls", READS[1:], ids=lambda c: c.__name__)
def test_what_is_read_is_masked(cls):
    """The gradient of what the owner's forward reads lies in kept blocks alone, and its result is that of the masked weights."""
    torch.manual_seed(0)
    dense = cls()
    m = cls()
    m.load_state_dict(dense.state_dict())
    fxmask.apply(m, ratio=0.5)
    x, masks = torch.randn(4, 32), fxmask.masks(m)
    with torch.no_grad():
        for name, p in dense.named_parameters():
            if name in masks:
                p.mul_(masks[name].repeat_interleave(16, 0).repeat_interleave(16, 1))
    y = m(x)
    torch.testing.assert_close(y, dense(x))
    y.square().sum().backward()
    for name in inspect.getdoc(cls).split():
        weight = m.get_submodule(name)._parameters["weight"]
        masked = ~masks[f"{name}.weight"].repeat_interleave(16, 0).repeat_interleave(16, 1)
        assert masked.any() and (weight.grad is None or not weight.grad[masked].any())
