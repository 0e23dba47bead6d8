"""What the backend leaves dense because nobody can train it: buffers, plain tensors of modules, and what graphs make of these and of inputs."""

import operator
import warnings
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from compile_backend.helpers import OPTIONS, compiled, graph_of
from torch import nn
from torch.testing import FileCheck
from torch.utils.checkpoint import checkpoint

import fxmask
from fxmask.compiler import backend
from fxmask.errors import FxMaskWarning


class OfNoParameter(nn.Module):
    """A table that is a buffer, another that is made of it, and a product of two inputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(32, 32)
        self.register_buffer("table", torch.randn(32, 32))

    def forward(self, x):
        return F.linear(x, self.table) + F.linear(x, self.table * 2) + F.linear(x, x.relu()) + self.fc(x)


class GivenToRegion(OfNoParameter):
    """A table that is made outside of the region that multiplies by it, and a weight that is."""

    def forward(self, x):
        made, scaled = self.table * 2, self.fc.weight * 2
        return checkpoint(lambda z: F.linear(z, made), x, use_reentrant=False) + checkpoint(lambda z: F.linear(z, scaled), x, use_reentrant=False)


def test_what_is_made_of_no_parameter_outside_of_a_region_stays_dense_in_it():
    model, x = GivenToRegion(), torch.randn(4, 32)
    with pytest.warns(FxMaskWarning, match="stays dense: the graph makes its weight of no parameter") as told:
        (text,) = graph_of(model, x, **OPTIONS)
    assert len(told) == 1
    FileCheck().check_count("masked_linear.default", 1, exactly=True).run(text)


def test_what_is_made_of_no_parameter_stays_dense_and_says_so():
    model, x = OfNoParameter(), torch.randn(32, 32)
    with pytest.warns(FxMaskWarning) as told:
        found = compiled(model, **OPTIONS)(x)
    buffer, made = "its weight is a buffer, not a parameter", "the graph makes its weight of no parameter"
    assert [str(w.message) for w in told] == [f"table stays dense: {buffer}.", f"linear_1 stays dense: {made}.", f"linear_2 stays dense: {made}."]
    assert [(r["name"], r["masked"]) for r in fxmask.explain(model).rows] == [("fc", True), ("table", False)]
    assert fxmask.explain(model).rows[1]["reason"] == f"{buffer} (backend='fxmask')"
    assert torch.equal(found, fxmask.apply(model, **OPTIONS)(x))


class Plain(nn.Module):
    """Multiplies by an attribute that is neither a parameter nor a buffer, and by one that somebody trains."""

    def __init__(self, held=lambda t: t):
        super().__init__()
        torch.manual_seed(0)
        self.tables, self.trained = held(torch.randn(32, 32)), torch.randn(32, 32, requires_grad=True)

    def forward(self, x):
        return F.linear(F.linear(x, self.tables[0] if isinstance(self.tables, list) else self.tables), self.trained)


@pytest.mark.parametrize("held", [lambda t: t, lambda t: [t]])
def test_a_tensor_that_is_no_parameter_stays_dense_and_one_that_is_trained_does_not(held):
    model, x = nn.Sequential(Plain(held)), torch.randn(4, 32)
    with pytest.warns(FxMaskWarning, match="stays dense: its weight is a plain tensor, not a parameter") as told:
        (text,) = graph_of(model, x, **OPTIONS)
    assert len(told) == 1
    FileCheck().check_count("masked_linear.default", 1, exactly=True).run(text)


class Holding(nn.Module):
    """Multiplies by what an object holds that is no module."""

    def __init__(self, **held):
        super().__init__()
        self.held = SimpleNamespace(**held)

    def forward(self, x):
        return F.linear(x, self.held._buffers)


@pytest.mark.filterwarnings("error::fxmask.errors.FxMaskWarning")
def test_a_trained_tensor_that_an_object_calls_as_modules_call_their_tables_of_buffers_is_no_buffer():
    (text,) = graph_of(Holding(_buffers=torch.randn(32, 32, requires_grad=True)), torch.randn(4, 32), **OPTIONS)
    FileCheck().check_count("masked_linear.default(", 1, exactly=True).run(text)


class Replaced(nn.Module):
    """Its table of buffers is another one than PyTorch gave it, as of modules that were pickled by an old one."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(32, 32)
        self._buffers = OrderedDict(c=torch.randn(32, 32))

    def forward(self, x):
        return F.linear(self.fc(x), self.c)


def test_a_buffer_in_a_table_that_was_replaced_is_one():
    model = nn.Sequential(Replaced())
    with pytest.warns(FxMaskWarning, match="^0.c stays dense: its weight is a buffer, not a parameter"):
        compiled(model, **OPTIONS)(torch.randn(4, 32))
    assert {row["name"]: row["masked"] for row in fxmask.explain(model).rows} == {"0.fc": True, "0.c": False}


class Numbered(nn.Module):
    """A tensor whose name is a number."""

    def __init__(self):
        super().__init__()
        setattr(self, "0", torch.randn(32, 32))

    def forward(self, x):
        return F.linear(x, getattr(self, "0"))


def test_a_tensor_that_a_module_holds_under_a_number_stays_dense_too():
    with pytest.warns(FxMaskWarning, match="0 stays dense: its weight is a plain tensor, not a parameter"):
        compiled(nn.Sequential(Numbered(), nn.Linear(32, 32)), **OPTIONS)(torch.randn(4, 32))


@pytest.mark.parametrize(("w", "told"), [(torch.randn(32, 32), 2), (nn.Parameter(torch.randn(32, 32)), 0)])
def test_a_plain_tensor_of_a_closure_stays_dense_too(w, told):
    def closing_over(w):
        return lambda x: F.linear(x, w)

    call = closing_over(w)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", FxMaskWarning)
        (text,) = graph_of(lambda x: call(x) + 1, torch.randn(4, 32), **OPTIONS)
    assert len([w for w in seen if w.category is FxMaskWarning]) == told  # that it is a plain tensor, and that nothing is masked
    assert ("masked_linear.default" in text) is not bool(told)


@pytest.mark.parametrize("detached", [False, True])
def test_weights_that_a_function_is_given_are_masked(detached):
    """Plain tensors, too: nothing says that they are no parameters."""
    model, x = nn.Sequential(nn.Linear(32, 32), Cast(32, 32)), torch.randn(4, 32)
    given = {name: p.detach() if detached else p for name, p in model.named_parameters()}
    (text,) = graph_of(lambda p, z: F.linear(torch.func.functional_call(model[0], {"weight": p["0.weight"]}, (z,)), p["1.weight"]), given, x, **OPTIONS)
    FileCheck().check_count("masked_linear.default", 2, exactly=True).run(text)


def test_weights_that_a_function_is_given_in_a_dict_go_by_their_names_there():
    given = {f"{n}.weight": nn.Parameter(torch.randn(32, 32)) for n in "ab"}
    (text,) = graph_of(lambda p, z: F.linear(F.linear(z, p["a.weight"]), p["b.weight"]), given, torch.randn(4, 32), **OPTIONS, exclude="a")
    FileCheck().check_count("masked_linear.default", 1, exactly=True).run(text)


@pytest.mark.filterwarnings("error::fxmask.errors.FxMaskWarning")
def test_what_a_dict_has_of_trained_weights_after_a_step_or_a_closure_of_tables_makes_weights():
    """As learners that learn to learn hand their weights on: with a gradient, and no leaves."""
    made, table = {"w": nn.Parameter(torch.randn(32, 32)) * 2}, torch.randn(32, 32)

    def closing_over(table):
        return lambda x, w: F.linear(x, w * table)

    call = closing_over(table)
    (text,) = graph_of(lambda p, x: call(F.linear(x, p["w"] * 2), p["w"]), made, torch.randn(4, 32), **OPTIONS)
    FileCheck().check_count("masked_linear.default(", 2, exactly=True).run(text)


@pytest.mark.filterwarnings("error::fxmask.errors.FxMaskWarning")
def test_of_a_dict_in_a_closure_and_of_another_tracers_inputs_nothing_says_that_they_are_no_parameters():
    def closing_over(tables):
        return lambda x: F.linear(x, tables["w"])

    call = closing_over({"w": torch.randn(32, 32)})
    (text,) = graph_of(lambda x: call(x) + 1, torch.randn(4, 32), **OPTIONS)
    FileCheck().check_count("masked_linear.default(", 1, exactly=True).run(text)
    gm = torch.fx.symbolic_trace(lambda x, w: F.linear(x, w))
    backend.fxmask_backend(gm, [torch.randn(4, 32), torch.randn(32, 32)], options={**OPTIONS, "inner": "eager"})
    FileCheck().check_count("fxmask.masked_linear.default(", 1, exactly=True).run(gm.code)


class Rotated(nn.Linear):
    def __init__(self):
        super().__init__(32, 32)
        self.register_buffer("turn", torch.linalg.qr(torch.randn(32, 32))[0])

    def forward(self, x):
        return F.linear(F.linear(x, self.turn), self.weight, self.bias)


def test_a_buffer_beside_a_layers_weight_is_not_the_layers():
    model = Rotated()
    with pytest.warns(FxMaskWarning, match="turn stays dense: its weight is a buffer, not a parameter"):
        text, *_ = graph_of(nn.Sequential(model), torch.randn(4, 32), **OPTIONS)
    FileCheck().check_count("masked_linear.default", 1, exactly=True).run(text)


class AfterABreak(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(32, 32)

    def forward(self, x):
        y = self.fc(x)
        torch._dynamo.graph_break()
        return F.linear(x, y.relu())


@pytest.mark.parametrize("training", [True, False])
def test_what_an_earlier_graph_has_made_is_no_parameter_in_training_either(training):
    torch.manual_seed(0)
    model, x = AfterABreak(), torch.randn(32, 32)
    with torch.set_grad_enabled(training), pytest.warns(FxMaskWarning, match="linear.*: the graph makes its weight of no parameter"):
        found = compiled(model, **OPTIONS)(x)
    assert torch.equal(found, fxmask.apply(model, **OPTIONS)(x))


class Cast(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * 1, self.bias)


def test_a_view_that_a_module_holds_in_a_parameters_place_is_one():
    """As FSDP1 has them, of one flat parameter."""
    model, x = nn.Sequential(nn.Linear(32, 32), Cast(32, 32)), torch.randn(4, 32)
    flat = nn.Parameter(model[1].weight.detach().flatten())
    model[1]._parameters["weight"] = flat.view(32, 32)
    (text,) = graph_of(model, x, **OPTIONS)
    FileCheck().check_count("masked_linear.default", 2, exactly=True).run(text)


def test_a_tensor_that_a_module_holds_in_a_parameters_place_is_one():
    """As `torch.func.functional_call` puts detached ones there."""
    model = Doubled()
    model._parameters["w"] = model.w.detach().clone()
    (text,) = graph_of(lambda x: F.linear(x, model.w), torch.randn(4, 32), **OPTIONS)
    FileCheck().check_count("masked_linear.default", 1, exactly=True).run(text)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_view_that_a_module_holds_as_an_attribute_is_one_frozen_or_not(frozen):
    """As FSDP1 has them while a forward runs."""
    model, flat = nn.Sequential(Plain()), nn.Parameter(torch.randn(1024), requires_grad=not frozen)
    model[0].tables = flat.view(32, 32)
    (text,) = graph_of(model, torch.randn(4, 32), **OPTIONS)
    FileCheck().check_count("masked_linear.default", 2, exactly=True).run(text)


class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(32, 32))

    def forward(self, x):
        return F.linear(x, self.w * 2)


class Fourier(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(32, 32)
        self.register_buffer("dft", torch.fft.fft(torch.eye(32)))

    def forward(self, x):
        return F.linear(self.fc(x).to(self.dft.dtype), self.dft).abs()


def test_a_table_that_no_mask_could_have_is_no_error():
    model, x = Fourier(), torch.randn(4, 32)
    with pytest.warns(FxMaskWarning, match="dft stays dense: its weight is a buffer, not a parameter"):
        found = compiled(model, **OPTIONS)(x)
    assert torch.equal(found, fxmask.apply(model, **OPTIONS)(x))


def test_a_layer_whose_weight_is_a_buffer_is_masked_as_apply_masks_it():
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), torch.randn(4, 32)
    table = model[0].weight.data
    del model[0].weight
    model[0].register_buffer("weight", table)
    found = compiled(model, **OPTIONS)(x)
    assert [r["masked"] for r in fxmask.explain(model).rows] == [True, True]
    assert torch.equal(found, fxmask.apply(model, **OPTIONS)(x))


def test_a_leaf_that_is_no_parameter_is_trained_by_somebody_and_so_is_its_view():
    w = torch.randn(1024, requires_grad=True).view(32, 32)
    (text,) = graph_of(lambda x, v, w: F.linear(F.linear(x, v), w * 2), torch.randn(4, 32), w, w.detach().requires_grad_(), **OPTIONS)
    FileCheck().check_count("masked_linear.default(", 2, exactly=True).run(text)


@pytest.mark.filterwarnings("error::fxmask.errors.FxMaskWarning")
@pytest.mark.parametrize("given", [nn.Parameter(torch.randn(32, 32)), None])
def test_what_a_layer_makes_of_a_parameter_that_a_call_is_given_or_of_a_buffer_is_a_weight(given):
    model = OfNoParameter()
    (text,) = graph_of(lambda x, p: F.linear(x, model.fc(model.table if p is None else p)), torch.randn(4, 32), given, **OPTIONS)
    FileCheck().check_count("masked_linear.default", 2, exactly=True).run(text)


class Held(nn.Module):
    """A Parameter that is frozen, in a list that no module is."""

    def __init__(self):
        super().__init__()
        self.held = [nn.Parameter(torch.randn(32, 32), requires_grad=False)]

    def forward(self, x):
        return F.linear(x, self.held[0])


@pytest.mark.filterwarnings("error::fxmask.errors.FxMaskWarning")
def test_a_frozen_parameter_is_one_wherever_it_is_held():
    (text,) = graph_of(Held(), torch.randn(4, 32), **OPTIONS)
    FileCheck().check_count("masked_linear.default", 1, exactly=True).run(text)


@pytest.mark.filterwarnings("error::fxmask.errors.FxMaskWarning")
def test_what_a_frozen_parameter_makes_is_a_weight():
    (text,) = graph_of(Doubled().requires_grad_(False), torch.randn(4, 32), **OPTIONS)
    FileCheck().check_count("masked_linear.default", 1, exactly=True).run(text)


def test_a_weight_whose_size_moves_with_the_input_stays_dense():
    model = Doubled()
    call = torch.compile(lambda x: F.linear(x, model.w.repeat(x.shape[0], 1)), backend="fxmask", dynamic=True, options={**OPTIONS, "inner": "eager"})
    with pytest.warns(FxMaskWarning, match=r"linear stays dense: its weight has the shape \(.*s\d+.*, 32\)|masked nothing") as told:
        call(torch.randn(4, 32))
    assert len(told) == 2


@pytest.mark.filterwarnings("error::fxmask.errors.FxMaskWarning")
def test_a_parameter_that_the_graph_holds_itself_is_one():
    """As Dynamo left them there once, and other tracers do."""
    gm = torch.fx.symbolic_trace(Doubled())
    (made,) = gm.graph.find_nodes(op="call_function", target=operator.mul)
    made.meta["val"] = torch.empty(32, 32, device="meta")
    backend.fxmask_backend(gm, [torch.randn(4, 32)], options={**OPTIONS, "inner": "eager"})
    FileCheck().check_count("fxmask.masked_linear.default(", 1, exactly=True).run(gm.code)
