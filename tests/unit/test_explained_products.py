"""Products with masked weights that a trace of a masked model computes: wherever the mask comes from, and whatever became of the weight since."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxmask
from fxmask.errors import FxMaskWarning

OPTIONS = dict(ratio=0.5, block=(32, 16))


class Owner(nn.Module):
    """Reads the weight of a layer of its own."""

    def __init__(self):
        super().__init__()
        self.fc, self.other = nn.Linear(64, 64), nn.Parameter(torch.ones(64, 64))

    def forward(self, x):
        return F.linear(x, self.fc.weight)


class Sum(Owner):
    def forward(self, x):
        return x @ (self.fc.weight + self.other).T


class Body(Owner):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda y: F.linear(y, self.fc.weight), lambda y: y + 1, (x,))


class BodyOfABody(Owner):
    def inner(self, y):
        return torch.cond(y.mean() > 0, lambda z: F.linear(z, self.fc.weight), lambda z: z * 2, (y,))

    def forward(self, x):
        return torch.cond(x.sum() > 0, self.inner, lambda y: y + 1, (x,))


class Given(Owner):
    """A body is given the masked weight."""

    def forward(self, x):
        w = self.fc.weight
        return torch.cond(x.sum() > 0, lambda y: F.linear(y, w), lambda y: y + 1, (x,))


class Scaled(Owner):
    def forward(self, x):
        return F.linear(x, self.fc.weight * self.other[:, :1])


OWNERS = [(Sum, 1), (Sum, 5), (Body, 1), (BodyOfABody, 5), (Given, 1), (Given, 5)]  # with masks that each forward makes, and cached ones


def traced(owner, refresh):
    model = fxmask.apply(owner(), **OPTIONS, refresh=refresh)
    fxmask.step(model, 0)
    return torch.export.export(model, (torch.ones(4, 64),)).module()


def hold_as_buffer(gm, name):
    owner, _, leaf = name.rpartition(".")
    weight = gm.get_parameter(name).detach()
    delattr(gm.get_submodule(owner), leaf)
    gm.get_submodule(owner).register_buffer(leaf, weight)


@pytest.mark.parametrize(("owner", "refresh"), OWNERS)
def test_the_layer_has_its_row_and_is_not_masked_again(owner, refresh):
    gm = traced(owner, refresh)
    (row,) = fxmask.explain(gm).rows
    assert (row["name"], row["masked"], row["block"], row["shape"]) == ("fc", True, "32x16", "64x64")
    assert row["achieved_ratio"] == (None if (owner, refresh) == (Body, 1) else 0.5)  # made there of what comes in, whose values the body does not know
    with pytest.warns(FxMaskWarning, match="were masked before it was traced"):
        fxmask.apply(gm, **OPTIONS)
    for name in [name for name, _ in gm.named_parameters()]:
        hold_as_buffer(gm, name)
    (row,) = fxmask.explain(gm).rows
    assert row["name"].endswith(("linear", "matmul")), "goes by its call where no parameter is behind it"
    assert (row["masked"], row["block"], row["shape"]) == (True, "32x16", None)


def test_a_scale_that_stays_a_parameter_is_not_the_weight():
    gm = traced(Scaled, 5)
    hold_as_buffer(gm, "fc.weight")
    (row,) = fxmask.explain(gm).rows
    assert (row["name"], row["masked"], row["shape"]) == ("linear", True, None)


@pytest.mark.parametrize("refresh", [1, 5])
def test_decompositions_leave_rows_as_they_were(refresh):
    model = fxmask.apply(nn.Sequential(nn.Conv2d(16, 64, 2), nn.Flatten(), Owner()), **OPTIONS, layers=(nn.Conv2d, nn.Linear), refresh=refresh)
    fxmask.step(model, 0)
    columns = ("name", "masked", "block", "shape", "achieved_ratio")
    program = torch.export.export(model, (torch.randn(1, 16, 2, 2),))
    with warnings.catch_warnings():  # PyTorch's own
        warnings.simplefilter("ignore", FutureWarning)
        gm = program.run_decompositions().module()
    found, expected = ([tuple(row[c] for c in columns) for row in fxmask.explain(m).rows] for m in (gm, model))
    assert found == expected and len(found) == 2
