"""Products with masked weights that a trace of a masked model computes: wherever the mask comes from, and whatever became of the weight since."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

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


class Bilinear(Owner):
    def forward(self, x):
        return F.bilinear(x[:, :8], x[:, 8:16], self.fc.weight.view(64, 8, 8))


class Distances(Owner):
    def forward(self, x):
        return torch.cdist(x, self.fc.weight)


class Keys(Owner):
    def forward(self, x):
        return F.scaled_dot_product_attention(x[None, None], self.fc.weight[None, None], self.fc.weight[None, None])


class Transposed(Owner):
    def forward(self, x):
        return F.conv_transpose1d(x.T[None], self.fc.weight[:, :, None])


OWNERS = [(Sum, 1), (Sum, 5), (Body, 1), (BodyOfABody, 5), (Given, 1), (Given, 5)]  # with masks that each forward makes, and cached ones


def traced(owner, refresh):
    model = fxmask.apply(owner(), **OPTIONS, refresh=refresh)
    fxmask.step(model, 0)
    return torch.export.export(model, (torch.ones(4, 64),)).module()


def programs(model, *inputs):
    """The module of a program, and that of its decompositions."""
    program = torch.export.export(model, inputs)
    with warnings.catch_warnings():  # PyTorch's own
        warnings.simplefilter("ignore", FutureWarning)
        return program.module(), program.run_decompositions().module()


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
    _, gm = programs(model, torch.randn(1, 16, 2, 2))
    found, expected = ([tuple(row[c] for c in columns) for row in fxmask.explain(m).rows] for m in (gm, model))
    assert found == expected and len(found) == 2


def names_and_masks(gm):
    return [(row["name"], row["masked"]) for row in fxmask.explain(gm).rows]


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x, gate):
        return torch.einsum("bi,eoi,be->bo", x, torch.stack([e.weight for e in self.experts]), gate)


class Mixed(Experts):
    """Experts' weights are mixed as an input says."""

    def forward(self, x, gate):
        mean = gate.mean(0)
        return F.linear(x, sum(mean[i] * e.weight for i, e in enumerate(self.experts)))


class Chosen(Experts):
    def forward(self, x, gate):
        chosen = gate.sum(0).argmax(0, keepdim=True)
        return F.linear(x, torch.stack([e.weight for e in self.experts]).index_select(0, chosen)[0])


class Modulated(Experts):
    """By a whole matrix that an input gives."""

    def forward(self, x, gate):
        return F.linear(x, sum(e.weight for e in self.experts) * (x.T @ x))


def test_an_input_may_write_a_whole_matrix_over_masked_weights():
    """Of a linear call, which says what its weight is; its decompositions do not."""
    gm, _ = programs(fxmask.apply(Modulated(), **OPTIONS), torch.randn(4, 64), torch.rand(4, 3))
    assert sorted(names_and_masks(gm)) == [(f"experts.{i}", True) for i in range(3)]


class ChosenByRow(Experts):
    def forward(self, x, gate):
        return torch.einsum("bi,bkoi->bo", x, torch.stack([e.weight for e in self.experts])[gate.argsort(1)[:, :2]])


@pytest.mark.parametrize("refresh", [1, 5])
@pytest.mark.parametrize("kind", [Experts, Mixed, Chosen, ChosenByRow])
def test_every_mask_of_a_product_has_its_row(kind, refresh):
    model = fxmask.apply(kind(), **OPTIONS, refresh=refresh)
    fxmask.step(model, 0)
    for gm in programs(model, torch.randn(4, 64), torch.rand(4, 3)):
        assert sorted(names_and_masks(gm)) == [(f"experts.{i}", True) for i in range(3)]


class Makes(nn.Module):
    """A masked layer makes the weight of another linear call, which no mask reaches."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 64 * 64)

    def forward(self, x, z):
        return F.linear(x, self.fc(z).view(64, 64))


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_what_a_masked_layer_makes_is_not_masked(impl):
    model = fxmask.apply(Makes(), **OPTIONS, impl=impl)
    gm = torch.export.export(model, (torch.randn(4, 64), torch.randn(16))).module()
    assert names_and_masks(gm) == [("linear", False), ("fc", True)]
    with pytest.warns(FxMaskWarning, match="linear.*: its weight is computed from an input"):
        fxmask.apply(gm, **OPTIONS)


def test_a_layer_whose_input_is_pruned_has_its_row():
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 64)), fxmask.WeightMask(**OPTIONS), fxmask.ActivationPruning(0.5, block=8))
    for gm in programs(model, torch.randn(2, 4, 64)):
        (row,) = fxmask.explain(gm).rows
        assert (row["name"], row["masked"], row["block"], row["achieved_ratio"], row["backward"]) == ("0", True, "32x16", 0.5, "masked")
        with pytest.warns(FxMaskWarning, match="were masked before it was traced"):
            fxmask.apply(gm, **OPTIONS)


PRUNED = [fxmask.ActivationPruning(0.5, block=8), fxmask.ActivationPruning(0.5, block=8, impl="reference")]  # the second says more


@pytest.mark.parametrize("config", [*PRUNED, fxmask.BlockDropout(0.5, block=(2, 8))])
def test_a_dense_layer_whose_input_is_pruned_or_dropped_has_its_row(config):
    dropped = [nn.Dropout(0.5)] if isinstance(config, fxmask.BlockDropout) else []
    model = fxmask.apply(nn.Sequential(*dropped, nn.Linear(64, 64)), config)
    for gm in programs(model, torch.randn(2, 4, 64)):
        assert names_and_masks(gm) == [(str(len(dropped)), False)]
        with pytest.warns(FxMaskWarning) as told:
            fxmask.apply(gm, **OPTIONS)
        words = "fxmask.apply has changed what becomes of its input, and was asked for no mask of its weight; mask the nn.Module"
        assert sum(words in str(w.message) for w in told) == 2  # of drawn dropouts a third one tells


@torch.library.custom_op("fxmask_tests::dropped_linear", mutates_args=())
def dropped_linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w.T


dropped_linear.register_fake(lambda x, w: x @ w.T)


class Custom(Owner):
    def forward(self, x):
        return dropped_linear(x, self.fc.weight)


def test_an_op_of_somebody_elses_that_has_a_name_of_ours():
    gm, _ = programs(Custom(), torch.randn(4, 64))
    with pytest.warns(FxMaskWarning) as told:
        fxmask.apply(gm, **OPTIONS)
    assert all("dropped_linear() reads it, which is no linear call; mask the nn.Module" in str(w.message) for w in told) and len(told) == 2


@pytest.mark.parametrize("owner", [Bilinear, Distances, Keys, Transposed])
def test_products_in_other_words(owner):
    """Masked before the trace, each has its row; masked afterwards, it stays dense and says so."""
    x = torch.randn(4, 64)
    for gm in programs(fxmask.apply(owner(), **OPTIONS), x):
        assert [(row["name"], row["masked"], row["block"]) for row in fxmask.explain(gm).rows] == [("fc", True, "32x16")]
    gm, _ = programs(owner(), x)
    with pytest.warns(FxMaskWarning) as told:
        fxmask.apply(gm, **OPTIONS)
    assert str(told[0].message).startswith("fc stays dense: ") and "reads it, which is no linear call" in str(told[0].message)
    (row,) = fxmask.explain(gm).rows
    assert (row["name"], row["masked"]) == ("fc", False) and "reads it, which is no linear call" in row["reason"]


class Biased(Owner):
    """A matrix that is added to the scores of attention."""

    def forward(self, x):
        return F.scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=self.fc.weight[:4, :4])


def test_what_is_added_to_scores_is_no_factor():
    for gm in programs(Biased(), torch.randn(4, 64)):
        assert not fxmask.explain(gm).rows


def test_linears_in_a_graph_of_make_fx_stay_dense_and_say_so():
    """It gives parameters names of its own, and has products in place of linear calls."""
    gm = make_fx(nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32, bias=False)))(torch.randn(4, 64))
    with pytest.warns(FxMaskWarning) as told:
        fxmask.apply(gm, **OPTIONS)
    assert any("_param_constant0 stays dense: addmm() reads it, which is no linear call" in str(w.message) for w in told)
    assert [(row["shape"], row["masked"]) for row in fxmask.explain(gm).rows] == [("48x64", False), ("32x48", False)]
