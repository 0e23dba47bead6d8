"""Products of a graph that read a layer's weight and are no linear calls stay dense, and are told: by a warning, and by a row of `explain`."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from unit.called_bodies import called_twice

import fxmask
from fxmask import FxMaskWarning

OPTIONS = dict(ratio=0.5, block=(8, 8))
X = torch.randn(4, 32)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)


class Matmul(Layers):
    def forward(self, x):
        return self.b(torch.addmm(self.a.bias, x, self.a.weight.t()))


class Attribute(Layers):
    def forward(self, x):
        return self.b(x @ self.a.weight.T + self.a.bias)


class Copied(Layers):
    """The transpose, and something after it."""

    def forward(self, x):
        return self.b(torch.matmul(x, self.a.weight.t().contiguous()) + self.a.bias)


class Einsum(Layers):
    def forward(self, x):
        return self.b(torch.einsum("bi,oi->bo", x, self.a.weight.float()))


class MadeAlike(Layers):
    """The type and the shape of an input are none of its values."""

    def forward(self, x):
        return self.b(torch.einsum("bi,oi->bo", x, (self.a.weight * torch.ones_like(x[:1])).type_as(x)))


class Convolution(Layers):
    def forward(self, x):
        return self.b(F.conv1d(x[..., None], self.a.weight[..., None])[..., 0])


class Swapped(Layers):
    def forward(self, x):
        return self.b(x @ self.a.weight.swapaxes(axis0=0, axis1=1))


class Moved(Layers):
    def forward(self, x):
        return self.b(torch.matmul(x, torch.movedim(self.a.weight, 1, 0)))


class Left(Layers):
    """y^T = W x^T."""

    def forward(self, x):
        return self.b(torch.mm(self.a.weight, x.t()).t())


class LeftAdded(Layers):
    def forward(self, x):
        return self.b(torch.addmm(input=self.a.bias[:, None], mat1=self.a.weight, mat2=x.t()).t())


class CastToInput(Layers):
    def forward(self, x):
        return self.b(x @ self.a.weight.to(x.dtype).T)


class ForEach(Layers):
    """The weight once for each of a batch."""

    def forward(self, x):
        return self.b(torch.bmm(x[:, None], self.a.weight.T.expand(x.size(0), -1, -1))[:, 0])


class AddedToItself(Layers):
    def forward(self, x):
        return self.b(torch.addmm(x, x, self.a.weight.t()))


class Inner(Layers):
    def forward(self, x):
        return self.b(torch.inner(x, self.a.weight))


class Triangle(Layers):
    """Of a constant that the graph makes."""

    def forward(self, x):
        return self.b(x @ (self.a.weight * torch.ones(32, 32).tril()).T)


class OfTable(Layers):
    """Of nothing that the graph is given."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.eye(32)[:4])

    def forward(self, x):
        return self.b(x + self.table @ self.a.weight.T)


class InPlace(Layers):
    """As it is written; nothing is in place."""

    def forward(self, x):
        x @= self.a.weight.t()
        return self.b(x)


class Both(Layers):
    def forward(self, x):
        return self.b(self.a(x)) @ self.a.weight


@torch.fx.wrap
def kept_whole(x, w):
    return x @ w


class OfWrapped(Layers):
    def forward(self, x):
        return self.b(kept_whole(x, self.a.weight.to(x.dtype).T))


class Quiet(Layers):
    """Penalties, a power iteration, a table that a product reads, a plain product with a matrix of another layout: none of them is a linear that is lost."""

    def __init__(self):
        super().__init__()
        self.table, self.other = nn.Embedding(40, 32), nn.Module()
        self.other.weight = nn.Parameter(torch.randn(32, 32))
        self.register_buffer("u", torch.ones(32))

    def forward(self, x):
        penalty = (self.a.weight @ self.a.weight.t()).square().sum() + self.b.weight.norm() + torch.mv(self.a.weight, self.u).norm()
        y = self.b(self.a(self.table(torch.arange(4)) + x @ self.other.weight))
        return y @ self.table.weight.t() + penalty


class Rotated(Layers):
    """A product that makes a linear's weight is no linear; what it makes is masked."""

    def __init__(self):
        super().__init__()
        self.register_buffer("turn", torch.linalg.qr(torch.randn(32, 32))[0])

    def forward(self, x):
        return F.linear(self.b(x), self.turn.T @ self.a.weight @ self.turn)


def traced(model, how):
    return torch.fx.symbolic_trace(model) if how == "symbolic_trace" else torch.export.export(model, (X,)).module()


READERS = [
    (Matmul, "addmm"), (Attribute, "matmul"), (Copied, "matmul"), (Einsum, "einsum"), (Convolution, "conv1d"), (Swapped, "matmul"), (Moved, "matmul"),
    (MadeAlike, "einsum"), (Left, "mm"), (LeftAdded, "addmm"), (Inner, "inner"), (Triangle, "matmul"),
    (OfTable, "matmul"), (AddedToItself, "addmm"),
    (CastToInput, "matmul"), (ForEach, "bmm"),
]  # fmt: skip


@pytest.mark.parametrize("how", ["symbolic_trace", "export"])
@pytest.mark.parametrize(("cls", "reader"), READERS)
def test_a_weight_that_no_linear_call_reads(cls, reader, how):
    gm = traced(cls(), how)
    with pytest.warns(FxMaskWarning, match=rf"a stays dense: {reader}\(\) reads it, which is no linear call; mask the nn\.Module"):
        fxmask.apply(gm, **OPTIONS)
    rows = {r["name"]: (r["masked"], r["reason"]) for r in fxmask.explain(gm).rows}
    assert rows == {"a": (False, f"{reader}() reads it, which is no linear call; mask the nn.Module"), "b": (True, "selected")}
    assert torch.equal(fxmask.restore(gm)(X), cls()(X))


class Packed(Layers):
    """One product for two layers."""

    def forward(self, x):
        q, k = (x @ torch.cat([self.a.weight, self.b.weight]).T).chunk(2, -1)
        return q + k


def told_of(gm, names, reader):
    with pytest.warns(FxMaskWarning) as told:
        fxmask.apply(gm, **OPTIONS)
    said = [str(w.message) for w in told if "stays dense" in str(w.message)]
    assert said == [f"{name} stays dense: {reader}() reads it, which is no linear call; mask the nn.Module." for name in names]
    assert [r["name"] for r in fxmask.explain(gm).rows if not r["masked"]] == names


@pytest.mark.parametrize("how", ["symbolic_trace", "export"])
def test_several_weights_that_one_product_reads(how):
    told_of(traced(Packed(), how), ["a", "b"], "matmul")


def test_a_function_that_a_trace_keeps_as_one_call_is_given_a_view_of_a_weight():
    with pytest.warns(FxMaskWarning, match=r"a stays dense: kept_whole\(\) reads it, which the trace keeps as one call; mask the nn\.Module"):
        gm = fxmask.apply(torch.fx.symbolic_trace(OfWrapped()), **OPTIONS)
    assert [r["name"] for r in fxmask.explain(gm).rows if not r["masked"]] == ["a"]


class AlsoWrapped(Layers):
    def forward(self, x):
        return self.b(self.a(x)) + kept_whole(x, self.a.weight * 2)


def test_a_masked_weight_that_a_wrapped_function_reads_too_has_one_row():
    gm = fxmask.apply(torch.fx.symbolic_trace(AlsoWrapped()), **OPTIONS)
    assert [(r["name"], r["masked"]) for r in fxmask.explain(gm).rows] == [("a", True), ("b", True)]


def test_a_product_that_makes_a_weight():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gm = fxmask.apply(traced(Rotated(), "export"), **OPTIONS)
        rows = backend(Rotated())
    assert {r["name"]: r["masked"] for r in fxmask.explain(gm).rows} == {"b": True, "linear_1": True}
    assert {name: masked for name, (masked, _) in rows.items()} == {"a": True, "b": True}  # as what else a graph makes of one weight


def test_several_weights_that_come_into_one_body():
    told_of(called_twice(lambda body, x, w: body.call_function(torch.einsum, ("bi,oi->bo", x, w))), ["a", "b"], "einsum")


@pytest.mark.parametrize("how", ["symbolic_trace", "export"])
def test_a_masked_weight_with_a_second_reader(how):
    with pytest.warns(FxMaskWarning, match=r"a graph reads masked weights whole, in products that are no linear calls: a \(matmul"):
        fxmask.apply(traced(Both(), how), **OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fxmask.apply(traced(Both(), how), exclude="a", **OPTIONS)


class InCondition(Layers):
    def forward(self, x):
        return self.b(torch.cond(x.sum() > -1e9, lambda x: x @ self.a.weight.T, lambda x: 2 * (x @ self.a.weight.T), (x,)))


class Teacher(Layers):
    def forward(self, x):
        with torch.no_grad():
            y = x @ self.a.weight.T
        return self.b(x) + y


class TurnedBefore(Layers):
    def forward(self, x):
        with torch.no_grad():
            turned = self.a.weight.T
        return self.b(x @ turned)


@pytest.mark.parametrize("cls", [InCondition, Teacher, TurnedBefore])
def test_bodies_that_an_export_makes_are_looked_into(cls):
    gm = traced(cls(), "export")
    with pytest.warns(FxMaskWarning, match=r"a stays dense: matmul\(\) reads it, which is no linear call; mask the nn\.Module"):
        fxmask.apply(gm, **OPTIONS)
    assert {r["name"]: r["masked"] for r in fxmask.explain(gm).rows} == {"a": False, "b": True}
    assert torch.equal(fxmask.restore(gm)(X), cls()(X))


class BothInCondition(Layers):
    def forward(self, x):
        return self.b(torch.cond(x.sum() > -1e9, lambda x: x @ self.a.weight.T, self.a, (x,)))


def test_a_second_reader_in_a_body():
    with pytest.warns(FxMaskWarning, match=r"a graph reads masked weights whole, in products that are no linear calls: a \(matmul") as told:
        gm = fxmask.apply(traced(BothInCondition(), "export"), **OPTIONS)
    assert len(told) == 1 and {r["name"]: r["masked"] for r in fxmask.explain(gm).rows} == {"a": True, "b": True}


class BothInOrder(Layers):
    def forward(self, x):
        return self.b(self.a(x)) + torch.einsum("bi,oi->bo", x, self.a.weight)


@pytest.mark.parametrize("how", ["symbolic_trace", "export"])
def test_a_masked_weight_stays_masked_in_its_row(how):
    with pytest.warns(FxMaskWarning, match="a graph reads masked weights whole") as told:
        gm = fxmask.apply(traced(BothInOrder(), how), **OPTIONS)
    assert not [w for w in told if "stays dense" in str(w.message)]
    assert {r["name"]: r["masked"] for r in fxmask.explain(gm).rows} == {"a": True, "b": True}
    with pytest.raises(fxmask.errors.StateError, match="'a' is masked already"):
        fxmask.apply(gm, include="a", **OPTIONS)


@pytest.mark.parametrize("how", ["symbolic_trace", "export"])
def test_what_is_no_lost_linear_is_not_told(how):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxMaskWarning)
        gm = fxmask.apply(traced(Quiet(), how), **OPTIONS)
    rows = {r["name"]: r["reason"] for r in fxmask.explain(gm).rows}
    assert rows == {"a": "selected", "b": "selected", "table": "default exclusion: weight tied to an Embedding"}


class ByOp(Layers):
    def forward(self, x):
        return self.b(torch.ops.aten.linear(x, self.a.weight, self.a.bias))


def test_an_op_that_is_written_without_its_overload_is_a_linear():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxMaskWarning)
        gm = fxmask.apply(traced(ByOp(), "symbolic_trace"), **OPTIONS)
        assert [r["masked"] for r in fxmask.explain(gm).rows] == [masked for masked, _ in backend(ByOp()).values()] == [True, True]
    assert torch.equal(fxmask.restore(gm)(X), ByOp()(X))


def backend(model, **more):
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="fxmask", options={**OPTIONS, "inner": "eager", **more})
    compiled(X)
    return {r["name"].removeprefix("_orig_mod."): (r["masked"], r["reason"]) for r in fxmask.explain(compiled).rows}


TOLD = [(Matmul, "addmm"), (Einsum, "einsum"), (MadeAlike, "einsum"), (Convolution, "conv1d"), (Left, "mm"), (InPlace, "imatmul")]


@pytest.mark.parametrize(("cls", "reader"), TOLD)
def test_the_backend_tells_it_too(cls, reader):
    with pytest.warns(FxMaskWarning, match=rf"a stays dense: {reader}\(\) reads it, which is no linear call"):
        rows = backend(cls())
    assert not rows["a"][0] and f"{reader}() reads it" in rows["a"][1] and rows["b"][0]
    with pytest.raises(Exception, match=r"require: expected a to be masked in this graph"), pytest.warns(FxMaskWarning):
        backend(cls(), require=True)


def test_sizes_that_move_are_no_inputs_of_a_weight():
    gm = torch.export.export(ForEach(), (X,), dynamic_shapes=({0: torch.export.Dim("b")},)).module()
    told_of(gm, ["a"], "bmm")
    torch._dynamo.reset()
    with pytest.warns(FxMaskWarning, match=r"a stays dense: bmm\(\) reads it"):
        torch.compile(ForEach(), backend="fxmask", dynamic=True, options={**OPTIONS, "inner": "eager"})(X)


def test_the_backend_tells_of_several_weights_that_one_product_reads():
    with pytest.warns(FxMaskWarning) as told:
        rows = backend(Packed())
    assert [str(w.message).partition(" it,")[0] for w in told][:2] == [f"{name} stays dense: matmul() reads" for name in "ab"]
    assert all("matmul() reads it" in reason for _, reason in rows.values()) and [*rows] == ["a", "b"]


def test_the_backend_tells_of_a_second_reader():
    with pytest.warns(FxMaskWarning, match=r"a stays dense: matmul\(\) reads it"):
        rows = backend(Both())
    assert rows["a"][0] and "in others: matmul() reads it" in rows["a"][1]


def test_the_backend_is_quiet_where_nothing_is_lost():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxMaskWarning)
        rows = backend(Quiet())
    assert rows["a"][0] and rows["b"][0]
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxMaskWarning)
        for cls in (Matmul, InPlace, Swapped, Moved):
            assert backend(cls(), match="matmul")["a"][0]
