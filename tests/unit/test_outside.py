"""Weights that are in no nn.Linear: `explain` names them, `apply` warns where they are most of a model. And those that other modules hold, too."""

import pytest
import torch
from sample_models import mlp
from torch import nn

import fxmask
from fxmask.errors import FxMaskWarning


class Experts(nn.Module):
    """Like Mixtral's: the experts' matrices in one Parameter each."""

    def __init__(self, n=4):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(32, 16)
        self.gate_up = nn.Parameter(torch.randn(n, 32, 64) / 6)
        self.down = nn.Parameter(torch.randn(n, 64, 32) / 8)

    def forward(self, x):
        gates = self.router(x).softmax(-1)[..., : len(self.down)]
        return torch.einsum("...e,...eo->...o", gates, torch.einsum("...ei,eio->...eo", torch.einsum("...i,eio->...eo", x, self.gate_up).relu(), self.down))


class Conv1D(nn.Module):
    """Like GPT-2's."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(32, 96) / 6), nn.Parameter(torch.zeros(96))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


def notes(model):
    return [n for n in fxmask.explain(model).notes if n.startswith("In no nn.Linear")]


def test_experts_are_named():
    model = Experts()
    with pytest.warns(FxMaskWarning, match=r"most of this model is in no nn\.Linear, and masks do not reach it") as caught:
        fxmask.apply(model)
    assert len(caught) == 1 and "2 weights of 16,384 elements (gate_up 4x32x64, down 4x64x32), beside 512 in linears" in str(caught[0].message)
    assert notes(model) == ["In no nn.Linear, where masks do not reach: 2 weights of 16,384 elements (gate_up 4x32x64, down 4x64x32)."]
    model(torch.randn(3, 32))


def test_where_nothing_is_masked_they_are_named():
    with pytest.warns(FxMaskWarning, match=r"masked nothing: it has no linear; in no nn\.Linear.*: 1 weight of 4,096 elements \(0 16x16x16\)\."):
        fxmask.apply(nn.Sequential(nn.Bilinear(16, 16, 16)))
    with pytest.warns(FxMaskWarning, match=r"masked nothing: 0: default exclusion: .* < 16; in no nn\.Linear.*: 1 weight of 4,096 elements \(1 16x16x16\)\."):
        fxmask.apply(nn.Sequential(nn.Linear(8, 8), nn.Bilinear(16, 16, 16)))


@pytest.mark.parametrize("exclude", ["re:gate_up|down", Experts, ["gate_up", "down"]], ids=str)
def test_exclude_says_that_it_is_meant(exclude):
    model = nn.Sequential(nn.Linear(16, 32), Experts())
    if exclude is Experts:
        fxmask.apply(model, exclude=exclude)
    else:
        fxmask.apply(model[1], exclude=exclude)


def test_a_weight_is_excluded_by_the_name_of_its_layer():
    with pytest.warns(FxMaskWarning, match=r"\(1\.0 32x96, 1\.1 32x96\)"):
        fxmask.apply(nn.Sequential(nn.Linear(32, 32), nn.Sequential(Conv1D(), Conv1D())))
    fxmask.apply(nn.Sequential(nn.Linear(32, 32), nn.Sequential(Conv1D(), Conv1D())), exclude="1.?")


def test_an_exclude_of_nothing_is_still_told():
    with pytest.warns(FxMaskWarning, match="exclude: 'nowhere' matches nothing"):
        fxmask.apply(mlp(), exclude="nowhere")


def test_few_elements_are_named_and_no_warning():
    model = fxmask.apply(nn.Sequential(mlp(sizes=(32, 128, 32)), Conv1D()))
    named = ["In no nn.Linear, where masks do not reach: 1 weight of 3,072 elements (1 32x96)."]
    assert notes(model) == notes(torch.compile(model)) == named, "as the model names it, compiled or not"


def test_who_includes_layers_means_these():
    fxmask.apply(nn.Sequential(mlp(sizes=(32, 128, 32)), Conv1D(), nn.Linear(96, 16)), include="2")


class Positions(nn.Module):
    """Tables that are added or looked up."""

    def __init__(self):
        super().__init__()
        self.cls, self.pos_embed, self.rel_pos_h = (nn.Parameter(torch.zeros(*shape)) for shape in ((1, 64, 512), (512, 512), (512, 512)))
        self.grid, self.relative_position_bias_table = nn.Parameter(torch.zeros(1, 1, 128, 128)), nn.Parameter(torch.zeros(1024, 32))


def lazy():
    model = nn.Sequential(nn.LazyConv2d(64, 3), nn.Flatten(), nn.Linear(64, 16))
    model.append(nn.LazyBatchNorm1d())
    return model


def tied():
    """Something that reads a Linear's weight under a name of its own."""
    model = nn.Sequential(nn.Linear(128, 128), Conv1D())
    model[1].weight = model[0].weight
    return model


QUIET = {
    "positions": Positions,
    "embedding": lambda: nn.Embedding(512, 512),
    "convolution": lambda: nn.Sequential(nn.Conv2d(3, 64, 17), nn.ConvTranspose1d(64, 64, 32)),
    "norm": lambda: nn.LayerNorm((256, 256)),
    "attention": lambda: nn.MultiheadAttention(32, 2),
    "cross attention": lambda: nn.MultiheadAttention(32, 2, kdim=128, vdim=128),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(64, 64, 32)),
    "parametrised": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(128, 128)),
    "trace": lambda: torch.fx.symbolic_trace(nn.Sequential(Conv1D(), Conv1D())),
    "lazy": lazy,
}


@pytest.mark.parametrize("name", QUIET)
def test_neither_noted_nor_warned_of(name):
    """A warning would be an error."""
    model = nn.ModuleList([nn.Linear(32, 32), QUIET[name]()])
    fxmask.apply(model)
    assert notes(model) == []


@pytest.mark.parametrize("backward", ["masked", "ste"])
def test_a_weight_that_another_module_holds_is_said_to_be_dense_there(backward):
    """With ste no gradient tells of it later. It is no weight outside of linears."""
    model = nn.ModuleList([nn.Linear(32, 32), tied()])
    with pytest.warns(FxMaskWarning, match=r"parameters of other modules, too, where whatever reads them reads them dense: 1\.0 \(as 1\.1\.weight\)\.") as told:
        fxmask.apply(model, backward=backward)
    assert len(told) == 1 and notes(model) == []


def test_a_weight_that_an_own_parameter_of_the_model_is():
    model = nn.Linear(32, 32)
    model.again = model.weight
    root = nn.Sequential(model, nn.Linear(32, 32))
    root.own = root[1].weight
    with pytest.warns(FxMaskWarning, match=r"reads them dense: 1 \(as own\)\."):
        fxmask.apply(root)
    assert fxmask.masks(root).keys() == {"0.weight", "1.weight"}


def test_so_it_is_with_masks_of_elements():
    model = nn.ModuleList([nn.Linear(32, 32), tied()])
    with pytest.warns(FxMaskWarning, match=r"reads them dense: 1\.0 \(as 1\.1\.weight\)\."):
        fxmask.apply(model, fxmask.NMMask(mode="magnitude"))


class Reading(nn.Module):
    """Whose forward reads a weight, and not what else holds it."""

    def __init__(self):
        super().__init__()
        self.fc, self.unread = nn.Linear(32, 32), nn.Module()
        self.unread.weight = self.fc.weight

    def forward(self, x):
        return nn.functional.linear(x, self.fc.weight)


class Calling(torch.fx.Tracer):
    """Which leaves calls of these modules in a graph."""

    def is_leaf_module(self, m, qualname):
        return isinstance(m, (Conv1D, torch.fx.GraphModule)) or super().is_leaf_module(m, qualname)


def traced(model):
    return torch.fx.GraphModule(model, Calling().trace(model))


def beside():
    """A graph that masks its own call, and a module outside."""
    model = nn.Sequential(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(128, 128))), Conv1D())
    model[1].weight = model[0].get_parameter("0.weight")
    return model


HOLDERS = {"called": lambda: traced(tied()), "called in a graph's graph": lambda: traced(nn.Sequential(traced(tied()))), "beside": beside}


@pytest.mark.parametrize("where", HOLDERS)
def test_a_module_that_a_graph_calls_or_that_stands_beside_it_is_a_holder(where):
    with pytest.warns(FxMaskWarning, match=r"reads them dense: (0|0\.0) \(as (0\.)?1\.weight\)\."):
        fxmask.apply(HOLDERS[where]())


def test_what_a_graph_itself_reads_and_what_it_leaves_are_no_holders():
    """A warning would be an error."""
    fxmask.apply(torch.export.export(Reading(), (torch.randn(2, 32),)).module())
    inner = torch.fx.symbolic_trace(Reading())
    model = fxmask.apply(nn.Sequential(traced(nn.Sequential(inner)), nn.Linear(32, 32)))
    assert fxmask.masks(model).keys() == {"0.0.fc.weight", "1.weight"}


class QuantEmbedding(Conv1D):
    """As quantisation-aware code names it."""


TABLES = {"table": nn.Embedding, "table by its name": lambda *shape: QuantEmbedding()}


@pytest.mark.parametrize("other", ["linear", "excluded", *TABLES, "layer left out"])
def test_what_has_a_row_or_was_asked_for_by_name_is_no_such_holder(other):
    model = nn.Sequential(nn.Linear(32, 32), TABLES.get(other, nn.Linear)(32, 32))
    model[1].weight = model[0].weight
    options = {"excluded": {"exclude": "1"}, **{table: {"include": "0"} for table in TABLES}, "layer left out": {"overrides": {"0": False}}}
    fxmask.apply(model, **options.get(other, {}))  # a warning would be an error


@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.LSTMCell])
def test_recurrent_layers_are_named_and_no_warning(cls):
    model = fxmask.apply(nn.ModuleList([nn.Linear(32, 32), cls(64, 64)]))
    assert "1.weight_ih" in notes(model)[0]


def test_an_export_is_quiet():
    model = nn.Sequential(nn.Linear(32, 32), Conv1D())
    fxmask.apply(torch.export.export(model, (torch.randn(2, 32),)).module())
