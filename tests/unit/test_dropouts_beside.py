"""Dropouts beside layers with block dropout: which of them may feed one and warn, and which `explain` names as left alone."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxmask
from fxmask import BlockDropout, FxMaskWarning

OWN, FUSE = BlockDropout(0.5, (8, 8)), BlockDropout(block=(8, 8))


def told(model, config=OWN, **options) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FxMaskWarning)
        fxmask.apply(model, config, **options)
    return [str(w.message).splitlines()[0] for w in caught if issubclass(w.category, FxMaskWarning)]


def left(model) -> list[str]:
    return [note for note in fxmask.explain(model).notes if "left alone" in note]


class Behind(nn.Sequential):
    """Its own forward alone knows the order."""

    def forward(self, x):
        return self[0](self[1](x))


class Holds(nn.Module):
    def __init__(self, **modules):
        super().__init__()
        for name, m in modules.items():
            setattr(self, name, m)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Holds(fc=nn.Linear(32, 32), drop=nn.Dropout(0.1)), "drop"),
        (lambda: Holds(a=nn.Linear(32, 32), drop=nn.Dropout(0.1), b=nn.Linear(32, 32)), "drop"),
        (lambda: Behind(nn.Linear(32, 32), nn.Dropout(0.1)), "1"),
        (lambda: nn.Sequential(nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 32)), "0"),
        (lambda: nn.Sequential(nn.Dropout(0.1), nn.Sequential(nn.ReLU()), nn.Linear(32, 32)), None),
        (lambda: nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1)), None),
        (lambda: nn.ModuleList([nn.Dropout(0.1), nn.Linear(32, 32)]), None),
        (lambda: nn.ModuleDict({"drop": nn.Dropout(0.1), "fc": nn.Linear(32, 32)}), None),
    ],
)
def test_which_dropouts_may_feed_a_layer(make, named):
    expected = [f"BlockDropout(p=...) drops beside {named}, which stays: expected one dropout before a layer, and where one of them feeds it there are two."]
    assert told(make()) == (expected if named else [])


def exported():
    return torch.export.export(nn.Sequential(nn.Linear(32, 32)).train(), (torch.randn(2, 32),)).module()


def test_of_two_exports_the_one_that_drops_is_named():
    (words,) = told(nn.Sequential(exported(), exported()), include="1.*")
    assert words.startswith("what torch.export makes has no train() and eval()")
    assert told(nn.Sequential(exported()), BlockDropout(0.5, (8, 8), mc=True)) == []


class Calls(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.fc, self.layer = nn.Dropout(0.5), nn.Linear(32, 32), nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)

    def forward(self, x):
        return F.dropout(self.layer(self.fc(self.drop(x))), 0.1)


def test_what_a_graph_calls_as_one_has_its_dropouts_named():
    gm = fxmask.apply(nn.Sequential(torch.fx.symbolic_trace(Calls())), FUSE, include="0.fc")
    (words,) = left(gm)
    assert "0.layer.dropout1" in words and words.endswith("0.dropout.")


def test_a_dropout_of_several_places_has_one_name_and_one_of_zero_none():
    shared = nn.Dropout(0.2)
    model = fxmask.apply(nn.Sequential(nn.Dropout(0.5), nn.Linear(32, 32), shared, nn.ReLU(), shared, nn.Dropout(0.0)), FUSE)
    assert left(model) == ["Dropouts that are left alone: 2."]


def test_a_dropout_that_a_graph_calls_no_more_is_named_where_others_hold_it():
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Dropout(0.5), nn.Linear(32, 32)))
    model = fxmask.apply(nn.ModuleDict({"graph": traced, "outside": nn.Sequential(traced.get_submodule("0"))}), FUSE)
    assert left(model) == ["Dropouts that are left alone: outside.0."]
