"""Weights that are used past their masks: caught at the first optimiser step, before a second training step."""

import copy
import warnings

import pytest
import torch
from sample_models import mlp
from torch import fx, nn, optim
from torch.nn import functional as F
from torch.nn.utils import prune
from unit.dense_readers import Calls, Reader, layer_of, loss, model

import fxmask
from fxmask.errors import FxMaskWarning
from fxmask.kernels.grid import expand_mask
from fxmask.passes.finding.readers import weight_readers
from fxmask.passes.state import ranks


class Both(Reader):
    """Calls its Linear, and reads its weight too."""

    def forward(self, x):
        inner = layer_of(self)
        return inner(x) + F.linear(x, inner.weight * 0.5)


class Plain(Reader):
    """As timm's BEiT does it."""

    def forward(self, x):
        return self.mix(x)

    def mix(self, x):
        return F.linear(x, weight=self.inner.weight, bias=self.inner.bias)


def test_reader_is_caught_by_the_guard():
    """At the first optimiser step, before a second training step; once."""
    m = model(Reader())
    optimiser = optim.AdamW(m.parameters())
    fxmask.guard(optimiser, m)
    loss(m).backward()
    with pytest.warns(FxMaskWarning) as told:
        optimiser.step()
    assert all(word in str(told[0].message) for word in ("2.inner.weight", "never run", "{'read': 'weight'}"))
    loss(m).backward()
    optimiser.step()  # warnings are errors here: not a second time


def test_reader_is_caught_by_step():
    m = model(Reader())
    fxmask.step(m, 0)
    loss(m).backward()
    with pytest.warns(FxMaskWarning, match="never run"):
        fxmask.step(m)
    assert fxmask.explain(m).rows[0]["step"] == 1


def test_one_of_several_processes_says_that_it_is_one(monkeypatch):
    """A stage of a pipeline runs on one rank, and is masked there."""
    monkeypatch.setattr(ranks, "several", lambda: True)
    m = model(Reader())
    fxmask.step(m, 0)
    loss(m).backward()
    with pytest.warns(FxMaskWarning, match=r"never run(?s:.*)fix: .* This is what this process saw: a layer that ran on another rank alone is masked there\."):
        fxmask.step(m)


@pytest.mark.parametrize("how", ["override", "source"])
def test_what_is_known_to_be_read_is_masked(how):
    """By the override that the warning names, or because the owner's source says so; in training and in evaluation."""
    torch.manual_seed(0)
    layer = Plain() if how == "source" else Reader()
    m = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), layer)
    fxmask.apply(m, ratio=0.5, overrides=None if how == "source" else {"2.inner": {"read": "weight"}})
    dense = copy.deepcopy(m[2].inner)
    fxmask.restore(dense)
    x = torch.randn(4, 64)
    with torch.no_grad():
        dense.weight.mul_(fxmask.kernels.grid.expand_mask(fxmask.masks(m)["2.inner.weight"], (64, 64), (16, 16)))
        for mode in (True, False):
            assert torch.allclose(m.train(mode)[2](x), dense(x), atol=1e-6)
    m.train()
    optimiser = optim.SGD(m.parameters(), lr=0.1)
    fxmask.guard(optimiser, m)
    mask = fxmask.kernels.grid.expand_mask(fxmask.masks(m)["2.inner.weight"], (64, 64), (16, 16))
    loss(m).backward()
    assert not m[2].inner.weight.grad[~mask].any()
    optimiser.step()


@pytest.mark.parametrize(("policy", "then"), [("auto", "The step drops it"), ("free", "the step moves them")])
def test_second_reader_is_warned_of_once(policy, then):
    m = model(Both())
    optimiser = optim.SGD(m.parameters(), lr=0.1)
    fxmask.guard(optimiser, m, masked_weights=policy)
    loss(m).backward()
    mask = fxmask.kernels.grid.expand_mask(fxmask.masks(m)["2.inner.weight"], (64, 64), (16, 16))
    before = m[2].inner.weight.detach().clone()
    with pytest.warns(FxMaskWarning, match=rf"2\.inner\.weight have a gradient.*{then}"):
        optimiser.step()
    assert (m[2].inner.weight != before)[~mask].any() == (policy == "free")
    optimiser.zero_grad()
    loss(m).backward()
    optimiser.step()  # warnings are errors here: not a second time


@pytest.mark.parametrize("form", ["module", "graph", "compiled", "ste", "frozen", "lbfgs"])
def test_no_false_alarm(form):
    torch.manual_seed(0)
    m = fx.symbolic_trace(mlp()) if form == "graph" else mlp()
    fxmask.apply(m, ratio=0.5, backward="ste" if form == "ste" else "masked")
    if form == "frozen":
        next(p for p in m.parameters() if p.dim() == 2).requires_grad_(False)
    optimiser = optim.LBFGS(m.parameters(), max_iter=2) if form == "lbfgs" else optim.SGD(m.parameters(), lr=0.1)
    fxmask.guard(optimiser, m)
    called = torch.compile(m, backend="eager", fullgraph=True) if form == "compiled" else m

    def closure():
        optimiser.zero_grad()
        value = loss(called)
        value.backward()
        return value

    for _ in range(3):
        if form != "lbfgs":
            closure()
        optimiser.step(closure if form == "lbfgs" else None)
    assert fxmask.explain(m).rows[0]["step"] == 3


OPTIONS = [{}, dict(refresh=2), dict(backward="ste"), dict(ratio=0.9, schedule=fxmask.Schedule("linear", steps=4))]
# each with one way to count, and with the other one, too, where there is time
SHARED = [
    pytest.param(counted, options, marks=pytest.mark.slow if (i + j // 2) % 2 else ())
    for i, counted in enumerate(("guard", "step"))
    for j, options in enumerate(OPTIONS)
]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor is being accessed:UserWarning")  # Dynamo, of any tensor
@pytest.mark.parametrize(("counted", "options"), SHARED, ids=str)
def test_layers_that_share_a_compile_are_no_readers(options, counted):
    """Compiled one by one, or as a model that is made again: the compiler traces the first of those that are alike."""
    torch._dynamo.reset()
    for seed in range(2):
        torch.manual_seed(seed)
        m = fxmask.apply(nn.Sequential(*[Calls() for _ in range(4)]), **{"ratio": 0.5, **options})
        for layer in m:
            layer.compile(backend="eager")
        optimiser = optim.SGD(m.parameters(), lr=0.1)
        if counted == "guard":
            fxmask.guard(optimiser, m)
        else:
            fxmask.step(m, 0)
        for _ in range(4):
            optimiser.zero_grad()
            loss(m).backward()
            optimiser.step()
            if counted == "step":
                fxmask.step(m)
        assert {row["step"] for row in fxmask.explain(m).rows} == {4}
    torch._dynamo.reset()


def scaled_steps(m, optimiser, overflows):
    """As a GradScaler begins, whose first scale is too large; a fused optimiser skips such a step by itself, behind the guard's hooks."""
    scaler = torch.amp.GradScaler("cpu")
    for factor in overflows:
        optimiser.zero_grad()
        scaler.scale(loss(m) * factor).backward()
        scaler.unscale_(optimiser)
        nn.utils.clip_grad_norm_(m.parameters(), 1.0)  # multiplies every gradient by NaN, zeros of masked blocks, too
        scaler.step(optimiser)
        scaler.update()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor is being accessed:UserWarning")  # Dynamo, of any tensor
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gradient_that_has_broken_says_nothing_of_masks(compiled):
    m = fxmask.apply(nn.Sequential(*[Calls() for _ in range(3)]), ratio=0.5)
    for layer in m if compiled else ():
        layer.compile(backend="eager")
    optimiser = optim.AdamW(m.parameters(), fused=True)
    fxmask.guard(optimiser, m)
    scaled_steps(m, optimiser, [float("inf"), 1.0, 1.0])  # warnings are errors here
    assert all(p.isfinite().all() for p in m.parameters())


def test_what_uses_a_weight_past_its_mask_is_told_after_such_a_gradient():
    m = fxmask.apply(nn.Sequential(Both()), ratio=0.5)
    optimiser = optim.AdamW(m.parameters(), fused=True)
    fxmask.guard(optimiser, m)
    scaled_steps(m, optimiser, [float("inf")])
    with pytest.warns(FxMaskWarning, match="masked blocks of 0.inner.weight have a gradient"):
        scaled_steps(m, optimiser, [1.0])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor is being accessed:UserWarning")  # Dynamo, of any tensor
def test_a_reader_is_caught_beside_a_compiled_layer_like_it():
    m = fxmask.apply(nn.Sequential(Calls(), Reader()), ratio=0.5)
    m[0].compile(backend="eager")
    optimiser = optim.SGD(m.parameters(), lr=0.1)
    fxmask.guard(optimiser, m)
    loss(m).backward()
    with pytest.warns(FxMaskWarning) as caught:
        optimiser.step()
    assert "where: 1.inner.weight\n" in str(caught[0].message) and "has never run" in str(caught[0].message)
    torch._dynamo.reset()


def test_explain_notes_a_reader_without_a_guard():
    m = model(Reader())
    assert not any("has not run" in note for note in fxmask.explain(m).notes)
    loss(m).backward()
    (note,) = [note for note in fxmask.explain(m).notes if "has not run" in note]
    assert ": 2.inner.weight; it is older" in note
    optimiser = optim.SGD(m.parameters(), lr=0.1)
    fxmask.guard(optimiser, m)
    with pytest.warns(FxMaskWarning) as caught:
        optimiser.step()
    assert "has never run" in str(caught[0].message)  # the note has taken nothing from the warning


def test_an_unused_layer_is_no_reader():
    m = model(Reader())
    m[2].forward = lambda x: x
    optimiser = optim.SGD(m.parameters(), lr=0.1)
    fxmask.guard(optimiser, m)
    loss(m).backward()
    optimiser.step()


class Outer(nn.Module):
    """Reads a layer of a module that it holds."""

    def __init__(self):
        super().__init__()
        self.part = nn.ModuleDict({"fc": nn.Linear(64, 64)})

    def forward(self, x):
        fc = self.part["fc"]
        return x @ fc.weight.t()


def test_an_override_reaches_readers_further_up():
    m = fxmask.apply(Outer(), ratio=0.75, overrides={"part.fc": {"read": "weight"}})
    y = m(torch.eye(64))
    assert (y == 0).float().mean() == 0.75
    fxmask.restore(m)
    assert type(m) is Outer and type(m.part) is nn.ModuleDict and not (m(torch.eye(64)) == 0).any()


class Facts(nn.Module):
    """What takes no values is no read; assignments are none either."""

    def __init__(self):
        super().__init__()
        self.fc, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        if isinstance(self.fc.weight, torch.Tensor) and x.dtype != self.fc.weight.dtype:
            x = x.to(self.fc.weight.device)
        return self.fc(x)

    def reset(self):
        nn.init.zeros_(self.other.weight)


def test_facts_about_a_weight_are_no_reads():
    m = Facts()
    assert weight_readers(m) == {} and weight_readers(p := Plain()) == {id(p.inner): [p]}


class TiedDecoder(Reader):
    """Calls its Linear, and decodes by the same weight."""

    def forward(self, x):
        inner = layer_of(self)
        return F.linear(torch.relu(inner(x)), inner.weight.t())


RAMP = fxmask.Schedule("cubic", steps=4)


@pytest.mark.parametrize("how", [{"schedule": RAMP}, {"start": 2}, {"start": 2, "refresh": 3}, {"schedule": RAMP, "refresh": 3}], ids=str)
def test_second_reader_is_warned_of_at_the_first_step_that_masks(how):
    """A ramp that begins dense must not use up the one look."""
    torch.manual_seed(0)
    m = fxmask.apply(TiedDecoder(), ratio=0.75, **how)
    optimiser = optim.SGD(m.parameters(), lr=0.1)
    fxmask.guard(optimiser, m)
    told = []
    for _ in range(8):
        optimiser.zero_grad()
        loss(m).backward()
        with warnings.catch_warnings(record=True) as here:
            warnings.simplefilter("always")
            optimiser.step()
        told.append(sum("have a gradient" in str(w.message) for w in here))
    assert sum(told) == 1
    assert told[0] == 0


class Adapter(nn.Module):
    """As PEFT's HRA: it multiplies by a product with the base layer's weight, and never calls it."""

    def __init__(self, base):
        super().__init__()
        self.base_layer, self.turn, self.reads = base.requires_grad_(False), nn.ParameterDict({"default": torch.eye(64)}), True

    def forward(self, x):
        turned = x @ self.turn["default"]
        return F.linear(turned, self.base_layer.weight, self.base_layer.bias) if self.reads else self.base_layer(turned)


@pytest.mark.parametrize(("guarded", "before"), [(True, 0), (False, 0), (False, 5)])
@pytest.mark.parametrize("reads", [True, False])
def test_adapters_around_frozen_layers(reads, guarded, before):
    m = fxmask.apply(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), ratio=0.75, block=(8, 4), refresh=2)  # no compiled test has traced its like
    fxmask.step(other := copy.deepcopy(m), before)
    fxmask.load_state_dict(m, fxmask.state_dict(other))
    m[0] = Adapter(m[0])
    m[0].reads = reads
    optimiser = optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fxmask.guard(optimiser, m) if guarded else fxmask.step(m, 0)
        for _ in range(3):
            m(torch.randn(3, 64)).square().mean().backward()
            optimiser.step()
            if not guarded:
                fxmask.step(m)
    assert [str(w.message).count("where: 0.base_layer") for w in told if "never runs" in str(w.message)] == [1] * reads
    assert any("0.base_layer" in note and "dense" in note for note in fxmask.explain(m).notes) == reads


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor is being accessed:UserWarning")
def test_adapters_that_share_a_compile_run_their_layers():
    m = fxmask.apply(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), ratio=0.75, block=(4, 16))
    for i, layer in enumerate(m):
        m[i] = Adapter(layer)
        m[i].reads = False
        m[i].compile(backend="eager")
    m(torch.randn(3, 64)).square().mean().backward()
    assert not all(part.base_layer._fxmask_called for part in m)
    assert fxmask.passes.stepping.bypass.read_by_adapters(m) == []


def test_an_adapter_around_a_layer_that_trains_is_told_of_as_any_reader():
    m = fxmask.apply(nn.Sequential(nn.Linear(64, 64)), ratio=0.75, block=(4, 8))
    m[0] = Adapter(m[0])
    m.requires_grad_()
    m(torch.randn(3, 64)).square().mean().backward()
    optimiser = optim.SGD(m.parameters(), lr=0.1)
    fxmask.guard(optimiser, m)
    with pytest.warns(FxMaskWarning) as told:
        optimiser.step()
    assert [word for word in ("never run:", "frozen") if any(word in str(w.message) for w in told)] == ["never run:"]
    assert fxmask.passes.stepping.bypass.read_by_adapters(m) == []


def test_a_plain_tensor_in_the_place_of_a_weight_that_is_read():
    """As old-style pruning, weight_norm and PEFT's merges put one there."""
    attention, x = nn.MultiheadAttention(64, 4, batch_first=True), torch.randn(2, 5, 64)
    fxmask.apply(attention, ratio=0.75, block=(16, 16))
    layer = attention.out_proj
    weight = layer.weight.detach() * 2
    del layer.weight
    for gone in (lambda: layer.weight, lambda: delattr(layer, "weight")):
        with pytest.raises(AttributeError, match=r"has no (attribute ')?weight"):
            gone()
    layer.weight = weight
    mask = expand_mask(fxmask.masks(attention)["out_proj.weight"], (64, 64), (16, 16))
    assert layer.weight is weight and not mask.all()
    dense = copy.deepcopy(attention)
    fxmask.restore(dense)
    dense.out_proj.weight = weight * mask
    for mode in (True, False):
        assert torch.equal(attention.train(mode)(x, x, x)[0], dense.train(mode)(x, x, x)[0])
    del layer.weight
    layer.weight = nn.Parameter(weight)
    assert torch.equal(attention(x, x, x)[0], dense(x, x, x)[0]) and "weight" in dict(layer.named_parameters())


def test_pruning_of_a_weight_that_is_read():
    torch.manual_seed(0)
    attention, x = nn.MultiheadAttention(64, 4, batch_first=True), torch.randn(2, 5, 64)
    fxmask.apply(attention, ratio=0.75, block=(16, 16))
    prune.l1_unstructured(attention.out_proj, "weight", 0.3)
    attention.eval()
    mask = expand_mask(fxmask.masks(attention)["out_proj.weight"], (64, 64), (16, 16))
    y = attention(x, x, x)[0]
    dense = nn.MultiheadAttention(64, 4, batch_first=True).eval()
    with torch.no_grad():
        dense.in_proj_weight.copy_(attention.in_proj_weight)
        dense.out_proj.weight.copy_(attention.out_proj.weight * mask)
    assert torch.equal(y, dense(x, x, x)[0])
