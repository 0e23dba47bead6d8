"""Types as patterns: a layer's own, or that of any module around it, in every form that a model has; and exact names."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxmask


class Net(nn.Module):
    """A body in a container, and a head beside it."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.ModuleDict({"deep": nn.Linear(64, 64)})["deep"])
        self.head = nn.Linear(64, 32)

    def forward(self, x):
        return self.head(self.body(x))


def net():
    torch.manual_seed(0)
    return Net()


def masked(model):
    return sorted(row["name"] for row in fxmask.explain(model).rows if row["masked"])


FORMS = {
    "module": lambda m: m,
    "symbolic": fx.symbolic_trace,
    "export": lambda m: torch.export.export(m, (torch.randn(2, 64),)).module(),
    "strict": lambda m: torch.export.export(m, (torch.randn(2, 64),), strict=True).module(),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_container_takes_what_it_holds(form):
    """As exclude, include and a key of overrides; warnings, as of a pattern that matches nothing, are errors here."""
    inside, beside = ["body.0", "body.2"], ["head"]
    make = FORMS[form]
    assert masked(fxmask.apply(make(net()), ratio=0.5, exclude=nn.Sequential)) == beside
    assert masked(fxmask.apply(make(net()), ratio=0.5, include=[nn.Sequential])) == inside
    assert masked(fxmask.apply(make(net()), ratio=0.5, overrides={nn.Sequential: False})) == beside
    rows = fxmask.explain(fxmask.apply(make(net()), ratio=0.5, overrides={nn.Sequential: {"ratio": 0.75}})).rows
    assert {row["name"]: row["target_ratio"] for row in rows} == {"body.0": 0.75, "body.2": 0.75, "head": 0.5}


def test_the_model_itself_holds_everything():
    assert masked(fxmask.apply(net(), ratio=0.5, include=Net)) == ["body.0", "body.2", "head"]


def test_attention_is_left_out_by_its_type():
    """Its out_proj is a Linear of another class, inside of it."""
    layer = fxmask.apply(nn.TransformerEncoderLayer(64, 4, 128), ratio=0.5, exclude=nn.MultiheadAttention)
    assert masked(layer) == ["linear1", "linear2"]


def test_a_container_of_convolutions():
    m = nn.Sequential(nn.Sequential(nn.Conv2d(32, 32, 3)), nn.Conv2d(32, 32, 3))

    class Stem(nn.Sequential):
        pass

    m[0].__class__ = Stem
    fxmask.apply(m, ratio=0.5, layers=nn.Conv2d, exclude=Stem)
    assert masked(m) == ["1"]


def test_a_compiled_graph():
    """The backend has no model, only what the trace says."""
    torch._dynamo.reset()
    options = {"ratio": 0.5, "exclude": nn.Sequential, "inner": "eager"}
    m, x = net(), torch.randn(4, 64)
    y = torch.compile(m, backend="fxmask", options=options)(x)
    alike = fxmask.apply(net(), ratio=0.5, include="head")
    assert torch.equal(y, alike(x)) and not torch.equal(y, m(x))
    torch._dynamo.reset()


def test_a_type_that_holds_nothing_is_warned_of():
    with pytest.warns(fxmask.FxMaskWarning, match="BatchNorm1d'> matches nothing"):
        fxmask.apply(net(), ratio=0.5, exclude=nn.BatchNorm1d)


class Computed(nn.Module):
    """Two linear calls of weights that it computes, too small to be masked unasked."""

    def __init__(self):
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return F.linear(F.linear(x, self.w * 2), self.v * 3)


@pytest.mark.filterwarnings("ignore:fxmask.apply masked nothing")
@pytest.mark.parametrize("make", [Computed, lambda: nn.Sequential(Computed())], ids=["the model itself", "inside"])
def test_the_name_of_a_call_is_an_exact_name(make):
    def graph():
        return torch.export.export(make(), (torch.randn(2, 8),)).module()

    gm = fxmask.apply(graph(), ratio=0.5, block=(4, 4), include=["linear_1"])
    assert masked(gm) == ["linear_1"]
    with pytest.warns(fxmask.FxMaskWarning, match=r"overrides\['linear_1'\] names a layer that stays dense by default exclusion"):
        fxmask.apply(graph(), ratio=0.5, block=(4, 4), overrides={"linear_1": dict(ratio=0.25)})


@pytest.mark.filterwarnings("ignore:fxmask.apply masked nothing")
def test_each_call_of_a_module_has_the_reason_of_its_own():
    gm = torch.export.export(nn.Sequential(Computed()), (torch.randn(2, 8),)).module()
    fxmask.apply(gm, ratio=0.5, exclude="linear_1")
    assert {r["reason"] for r in fxmask.explain(gm).rows} == {"in exclude", "default exclusion: min(out, in) = 8 < 16"}


@pytest.mark.filterwarnings("ignore:fxmask.apply masked nothing")
def test_a_call_that_is_named_as_another_layer_has_the_reason_of_its_own():
    model = nn.Sequential()
    model.first, model.linear = nn.utils.parametrizations.weight_norm(nn.Linear(64, 8)), nn.Linear(8, 64)
    gm = torch.export.export(model, (torch.randn(2, 64),)).module()  # whose node `linear` is the call of `first`
    fxmask.apply(gm, ratio=0.5, exclude="first")
    for form, prefix in ((gm, ""), (nn.Sequential(gm), "0.")):
        reasons = {r["name"]: r["reason"] for r in fxmask.explain(form).rows}
        assert reasons == {f"{prefix}first": "in exclude", f"{prefix}linear": "default exclusion: min(out, in) = 8 < 16"}


def test_names_of_other_letters_are_other_names():
    model = nn.Sequential()
    for name in ("Fc1", "fc1"):
        model.add_module(name, nn.Linear(64, 64))
    assert masked(fxmask.apply(model, ratio=0.5, include="fc*")) == ["fc1"]
