"""`fxmask.analyze` leaves everything as it was, whatever the model does and however it ends."""

import copy
import random
from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from analysis.counted import SMALL, analyze, kept_of
from analysis.unchanged import Net, unchanged
from torch import nn

import fxmask
from fxmask.errors import StateError, UnsupportedError
from fxmask.passes.counting import record

WRITTEN = torch.zeros(2)  # of the program, not of the model


class Messy(nn.Module):
    """A forward that writes wherever it can: buffers, attributes, lists, dicts, its own parameters' places; and draws random numbers."""

    def __init__(self, fails=False):
        super().__init__()
        self.fc, self.norm, self.out = nn.Linear(16, 24), nn.BatchNorm1d(24), nn.Linear(24, 8)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("absent", None)
        self.scale = torch.ones(24, requires_grad=True)  # no Parameter: its gradient is written to the tensor itself
        self.shift, self.calls, self.fails, self.last = torch.zeros(24), 0, fails, None
        self.cache, self.named, self.nested = [], {"first": 1}, ([torch.ones(2)], {"inner": [0]})
        self.ordered, self.held = OrderedDict(a=1, b=2), {"tensor": torch.ones(3)}

    def forward(self, x):
        self.calls += 1
        self.seen += 1
        self.absent = x.detach()
        x = self.norm(self.fc(x) * self.scale + self.shift)
        self.shift += 1
        self.held["tensor"].mul_(2)
        WRITTEN.add_(1)
        torch.add(WRITTEN, 1, out=WRITTEN)
        torch._foreach_add_([WRITTEN], 1)
        self.last, self.mask = x, torch.rand(24) < 0.5
        self.cache.append(x)
        self.named["first"], self.named["second"] = x, 2
        self.nested[0][0] = x
        self.nested[1]["inner"].append(x)
        self.ordered.move_to_end("a")
        self.training = not self.training
        self.register_parameter("late", nn.Parameter(torch.zeros(2)))
        self.register_buffer("later", torch.zeros(2))
        self.norm.extra = nn.Linear(2, 2)
        self.fc.register_forward_hook(lambda m, a, o: None)
        random.random(), np.random.rand()
        torch.manual_seed(7)
        if self.fails:
            raise RuntimeError("the model breaks")
        return self.out(F.dropout(x, 0.5))


@pytest.mark.parametrize("training", [True, False])
def test_a_model_that_writes_everywhere(training):
    model, x = Messy().train(training), torch.randn(4, 16)
    inner = {"scale": model.scale, "shift": model.shift, "cache": model.cache, "nested": model.nested}
    unchanged(model, lambda: analyze(model, x))
    assert model.scale.grad is None and torch.equal(model.scale, torch.ones(24))
    assert torch.equal(model.shift, torch.zeros(24)) and torch.equal(model.seen, torch.zeros(3))
    assert model.cache == [] and model.named == {"first": 1} and list(model.ordered) == ["a", "b"] and model.absent is None
    assert torch.equal(model.nested[0][0], torch.ones(2)) and model.nested[1] == {"inner": [0]}
    assert torch.equal(model.held["tensor"], torch.ones(3)) and torch.equal(WRITTEN, torch.zeros(2))
    assert all(getattr(model, k) is v for k, v in inner.items())
    assert not hasattr(model, "late") and not hasattr(model, "later") and not hasattr(model.norm, "extra") and not model.fc._forward_hooks
    assert model.norm.num_batches_tracked == 0 and model.calls == 0 and model.training is training
    model(x).sum().backward()  # and it still works
    WRITTEN.zero_()
    assert type(model.fc.weight.grad) is torch.Tensor and type(model.scale.grad) is torch.Tensor


class Remembers(nn.Module):
    """A table that is made in the first forward and kept by an object, in a list of it too."""

    def __init__(self):
        super().__init__()
        self.fc, self.tables = nn.Linear(16, 16), SimpleNamespace(first=None, all=[])

    def forward(self, x):
        if self.tables.first is None:
            self.tables.first = torch.arange(16.0)
            self.tables.all.append(self.tables.first)
        return self.fc(x) * self.tables.first * self.tables.all[0]


def test_a_table_that_an_object_of_the_model_would_keep():
    model, x = Remembers(), torch.randn(4, 16)
    unchanged(model, lambda: analyze(model, x))
    assert model.tables.first is None and model.tables.all == [] and type(model(x)) is torch.Tensor


def test_gradients_that_are_there_stay():
    model, x = SMALL["mixer"][0](), SMALL["mixer"][1]
    model(x).sum().backward()
    unchanged(model, lambda: analyze(model, x))


class Continues(nn.Module):
    """It goes on from what another layer gave before, whose graph it holds."""

    def __init__(self, other):
        super().__init__()
        self.fc, self.last = nn.Linear(16, 16), torch.tanh(other(torch.randn(4, 16)))

    def forward(self, x):
        return self.fc(x + self.last) * self.last


def test_a_graph_that_a_model_holds_can_still_be_differentiated():
    other, x = nn.Linear(16, 16), torch.randn(4, 16)
    model = Continues(other)
    unchanged(model, lambda: analyze(model, x))
    assert other.weight.grad is None
    model.last.sum().backward()
    assert type(other.weight.grad) is torch.Tensor


def test_a_graph_that_a_model_holds_is_walked_once(monkeypatch):
    """It may be long, and many ops may read what it gave."""
    walked, walk = [], record._leaves
    monkeypatch.setattr(record, "_leaves", lambda t: walked.append(t) or walk(t))
    model = Continues(nn.Linear(16, 16))
    analyze(model, torch.randn(4, 16))
    assert sum(t is model.last for t in walked) == 1


def test_a_model_that_breaks_in_the_middle():
    model, x = Messy(fails=True), torch.randn(4, 16)

    def run():
        with pytest.raises(UnsupportedError, match="RuntimeError: the model breaks"):
            analyze(model, x)

    unchanged(model, run)
    assert model.cache == [] and model.named == {"first": 1} and torch.equal(WRITTEN, torch.zeros(2))


def test_a_backward_that_breaks():
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gy):
            raise RuntimeError("no gradient here")

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.log = nn.Linear(4, 4), nn.Linear(4, 4), []

        def forward(self, x):
            self.log.append(x)
            return self.b(Breaks.apply(self.a(x)))

    model, x = M(), torch.randn(2, 4)

    def run():
        with pytest.raises(UnsupportedError, match="no gradient here"):
            analyze(model, x)

    unchanged(model, run)
    assert model.log == []
    assert analyze(model, x, phases=("fwd",)).summary["flop"]["fwd"] == 2 * 2 * 2 * 16


Pair = namedtuple("Pair", "first second")
PLACES = {"list": list, "tuple": tuple, "named": Pair._make, "nested": lambda ws: ([ws[0]], {"b": (ws[1],)}), "object": lambda ws: SimpleNamespace(held=ws)}


@pytest.mark.parametrize("place", PLACES)
def test_weights_held_in_other_places(place):
    """A list that the forward goes through instead of the attributes, as RNNs keep one; tuples; an object, which holds the real ones during the run."""

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
            self.table = PLACES[place]([self.a, self.b])

        def forward(self, x):
            for w in self.table.held if place == "object" else torch.utils._pytree.tree_leaves(self.table):
                x = F.linear(x, w)
            return x

    model, x = M(), torch.randn(3, 8)
    unchanged(model, lambda: analyze(model, x))
    report = analyze(model, x)
    assert all(p.grad is None for p in model.parameters())
    s = report.summary["flop"]
    assert (s["fwd"], s["bwd_dx"], s["bwd_dw"]) == (2 * 2 * 3 * 64, 2 * 3 * 64, 2 * 2 * 3 * 64)
    foot = report.tables["footprint"][-1]
    assert foot["saved_activations"] == 4 * 3 * 8 and foot["gradients"] == foot["weights"]  # the weights are no activations
    assert report.summary["coverage"]["nodes_pct"] == 100 and report.summary["bytes_min"]["fwd"] == 2 * (96 + 256 + 96)
    F.linear(x, model.a).sum().backward()
    unchanged(model, lambda: analyze(model, x))  # the gradient of before stays, and hides none of the run's
    assert analyze(model, x).tables["footprint"][-1] == foot


GUARDED = {
    "built": {},
    "cached": {"refresh": 2},
    "schedule": {"schedule": fxmask.Schedule("cubic", steps=10)},
    "rigl": {"backward": "rigl"},
    "random": {"criterion": "random"},
}


@pytest.mark.parametrize("options", GUARDED.values(), ids=GUARDED)
def test_masks_counters_and_guards(options):
    torch.manual_seed(0)
    model, x = fxmask.apply(Net(), ratio=0.5, block=(16, 16), **options), torch.randn(3, 70)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    guard = fxmask.guard(optimizer, model)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    saved, masks, policies = copy.deepcopy(fxmask.state_dict(model)), fxmask.masks(model), guard.policies
    momenta = copy.deepcopy(optimizer.state_dict())

    def run():
        analyze(model, x)
        analyze(model, x, optimizer=optimizer)

    unchanged(model, run)
    after = fxmask.state_dict(model)
    for a, b in ((saved, after), (momenta, optimizer.state_dict())):
        leaves = zip(torch.utils._pytree.tree_leaves(a), torch.utils._pytree.tree_leaves(b), strict=True)
        assert all(torch.equal(v, w) if isinstance(v, torch.Tensor) else v == w for v, w in leaves)
    assert all(torch.equal(a, fxmask.masks(model)[n]) for n, a in masks.items()) and guard.policies == policies


@pytest.mark.parametrize("how", ["schedule", "refresh"])
def test_cached_masks_count_as_they_are_now(how):
    """With a schedule on its way, or a mask of some steps ago: the blocks that the next forward keeps, not the target's."""
    torch.manual_seed(0)
    options = {"schedule": fxmask.Schedule("linear", steps=10)} if how == "schedule" else {"refresh": 5}
    model = fxmask.apply(nn.Sequential(nn.Linear(70, 90), nn.Linear(90, 40)), ratio=0.8, block=(16, 16), **options)
    fxmask.step(model, 0)
    shares = []
    for _ in range(4):
        with torch.no_grad():
            for p in model.parameters():
                p.normal_()  # the cached mask is no longer the one of the weight
        kept = kept_of(model, (16, 16))
        report = analyze(model, torch.randn(5, 70))
        assert report.summary["flop"]["fwd"] == 2 * 5 * sum(k for k, _ in kept.values())
        assert report.summary["params_kept"] == 130 + sum(k for k, _ in kept.values())
        shares.append(report.summary["flop"]["fwd"])
        fxmask.step(model)
    assert (shares[0] > shares[1] > shares[3]) == (how == "schedule")
    assert (shares[0] == 2 * 5 * (70 * 90 + 90 * 40)) == (how == "schedule")


@pytest.mark.parametrize("beside", [(), (fxmask.WeightMask(block=(16, 16)),)], ids=["alone", "masked"])
def test_a_schedule_of_pruned_inputs_that_nobody_counts_yet(beside):
    """It counts as at step 0, as masks do, and training asks for a step source as before."""
    pruning = fxmask.ActivationPruning(ratio=0.75, block=16, schedule=fxmask.Schedule("linear", steps=4, initial=0.5))
    model, x = fxmask.apply(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)), *beside, pruning), torch.randn(4, 64)
    unchanged(model, lambda: analyze(model, x))
    early = analyze(model, x).summary["flop"]
    with pytest.raises(StateError, match="nobody tells them"):
        model(x)
    fxmask.step(model, 0)
    assert analyze(model, x).summary["flop"] == early
    fxmask.step(model, 4)
    late = analyze(model, x).summary["flop"]
    assert late["bwd_dw"] < early["bwd_dw"] and late["fwd"] == early["fwd"]


def test_hooks_run_and_stay():
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), []
    model[0].register_forward_hook(lambda m, a, o: seen.append(tuple(o.shape)))
    model.register_forward_pre_hook(lambda m, a: (a[0][:1],))  # it changes what runs, and that is what counts
    model[1].register_full_backward_hook(lambda m, gi, go: None)
    x = torch.randn(3, 4)
    unchanged(model, lambda: analyze(model, x))
    assert seen == [(1, 4)] and analyze(model, torch.randn(3, 4)).summary["flop"]["fwd"] == 2 * (16 + 8)
