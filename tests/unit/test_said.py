"""Readers of a layer's weight, by whatever name their code calls it; and what is no read."""

import inspect

import pytest
import torch
from torch import nn
from unit.reads_by_name import (
    Annotated,
    Branched,
    ByLambda,
    Cast,
    Chained,
    Chosen,
    Copied,
    Default,
    Given,
    Got,
    GotByName,
    Held,
    InADictMade,
    InMethod,
    Inner,
    Matched,
    Named,
    Region,
    Rest,
    RestByPlace,
    Submodule,
    Tried,
    Turned,
    Unpacked,
    Walrus,
    WalrusInside,
    WeightNamed,
    WeightsUnpacked,
)
from unit.reads_in_loops import (
    Added,
    Awaited,
    Carried,
    Comprehended,
    Counted,
    Enumerated,
    InADict,
    InADictByKey,
    InARow,
    Items,
    Key,
    Last,
    LastOfTwo,
    Listed,
    Looped,
    NamedChildren,
    Next,
    Pairs,
    Sliced,
    Some,
    Values,
    Zipped,
)

import fxmask
from fxmask.passes.finding.readers import weight_readers

READS = [Copied, Named, WeightNamed, Unpacked, WeightsUnpacked, Walrus, Chained, Annotated, Chosen, Branched, Last, Key, Counted, Looped, Enumerated, Zipped]
READS += [Sliced, Values, Items, Some, Pairs, Comprehended, Listed, Got, GotByName, Submodule, Inner, InMethod, Turned, Cast]
READS += [Added, InARow, Matched, Tried, NamedChildren, Next, InADict, InADictByKey, Default, Given, Region, Carried, Awaited]
READS += [LastOfTwo, ByLambda, InADictMade, Rest, RestByPlace, WalrusInside]


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


class WritesViews(Held):
    """Through views, by names of their own; the layers are called, too."""

    def forward(self, x):
        with torch.no_grad():
            halves = self.fc.weight.detach().chunk(2)
            halves[0].mul_(2)
            flat = self.fc1.weight.reshape(-1)
            flat[:3] = 0
            for row in torch.unbind(self.fc1.weight.T):
                row.div_(2)
            torch.nn.functional.embedding_bag(torch.tensor([[0]]), self.fc2.weight, None, 1.0)
        return self.fc(x) + self.fc1(x) + self.fc2(x)


class Looks(Held):
    """A lookup without a norm, and facts of views."""

    def forward(self, x):
        return self.fc(x) * self.fc.weight.t().shape[0] * self.fc.weight.view(-1).numel()


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


NONE = [Calls, NameAgain, Facts, Writes, WritesViews, Looks, Arguments, Words]


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
