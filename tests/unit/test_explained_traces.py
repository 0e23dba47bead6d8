"""What `explain` says of a trace that was made of a masked model: its masks are ops of the graph, and nobody owns them."""

import pytest
import torch
from sample_models import mlp
from torch import nn

import fxmask
from fxmask.errors import FxMaskWarning, StateError

OPTIONS = dict(ratio=0.6, block=(16, 32))
SAME = ("name", "masked", "shape", "block", "blocks", "achieved_ratio", "backward")
IN_TRACE = "masked before it was traced; the mask is part of the graph"


def traced(model, x):
    return torch.export.export(model, (x,)).module()


def rows(model, columns=SAME):
    return [tuple(row[c] for c in columns) for row in fxmask.explain(model).rows if row["masked"]]


@pytest.mark.parametrize("options", [{}, dict(backward="ste"), dict(impl="reference"), dict(refresh=5), dict(schedule=fxmask.Schedule("linear", steps=4))])
def test_rows_are_those_of_the_masked_model(options):
    torch.manual_seed(0)
    model = fxmask.apply(mlp(sizes=(72, 104, 40)), **OPTIONS, **options)
    fxmask.step(model, 2)
    gm = traced(model, torch.randn(4, 72))
    report = fxmask.explain(gm)
    assert rows(gm) == rows(model) and len(rows(gm)) == 2
    assert {row["reason"] for row in report.rows} == {IN_TRACE} and report.summary["masked"] == 2
    assert report.summary == fxmask.explain(model).summary
    assert {(row["impl"], row["why"]) for row in report.rows} == {("reference", "asked for") if "impl" in options else ("auto", "chosen when it runs")}
    if options.get("refresh") is None:  # a cached mask does not say for how many blocks it was made
        kept = [int(mask.sum()) for mask in fxmask.masks(model).values()]
        assert [round((1 - row["target_ratio"]) * row["blocks"]) for row in report.rows] == kept
    assert any("part of a trace" in note for note in report.notes)
    with pytest.raises(StateError, match=r"(?s)masks of this model are part of its trace.*use the model that was traced"):
        fxmask.masks(gm)


def test_apply_says_that_a_trace_is_masked():
    gm = traced(fxmask.apply(nn.Sequential(nn.Linear(64, 64)), **OPTIONS), torch.randn(4, 64))
    with pytest.warns(FxMaskWarning, match="fxmask.apply masked nothing: its linears were masked before it was traced"):
        fxmask.apply(gm, **OPTIONS)


def test_the_masks_are_those_of_the_weights_as_they_are():
    torch.manual_seed(0)
    model = fxmask.apply(nn.Sequential(nn.Linear(40, 40)), ratio=0.5, block=(32, 32))
    gm = traced(model, torch.randn(4, 40))
    for corner in (slice(0, 32), slice(32, 40)):
        with torch.no_grad():
            for m in (model, gm):
                weight = m.get_parameter("0.weight")
                weight.zero_()
                weight[:, corner] = 1
        assert rows(gm) == rows(model)


def test_one_mask_of_two_calls_and_layers_that_apply_left():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.small = nn.Linear(64, 64), nn.Linear(64, 4)

        def forward(self, x):
            return self.small(self.a(self.a(x)))

    gm = traced(fxmask.apply(Twice(), **OPTIONS), torch.randn(4, 64))
    assert [(r["name"], r["masked"]) for r in fxmask.explain(gm).rows] == [("small", False), ("a", True)]


def test_weights_that_owners_read_and_convolutions():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    model = fxmask.apply(Reader(), ratio=0.5, block=(32, 16))
    gm = nn.Sequential(traced(model, torch.randn(2, 4, 64)))
    found = {row["name"]: row for row in fxmask.explain(gm).rows}
    assert not found["0.attention.in_proj_weight"]["masked"] and found["0.attention.out_proj"]["reason"] == IN_TRACE and len(found) == 2
    assert found["0.attention.out_proj"]["impl"] == "reference" and found["0.attention.out_proj"]["block"] == "32x16"
    model = fxmask.apply(nn.Sequential(nn.Conv2d(16, 32, 3), nn.Conv2d(32, 16, 3, padding="same")), ratio=0.5, layers=nn.Conv2d)
    columns = ("name", "shape", "blocks", "achieved_ratio")
    assert rows(traced(model, torch.randn(1, 16, 8, 8)), columns) == rows(model, columns) and len(rows(model)) == 2


class Multiplies(nn.Module):
    """Reads weights, as owners of layers do, in products of several kinds."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.conv = nn.Linear(64, 64), nn.Linear(64, 64), nn.Conv2d(16, 32, 2)

    def forward(self, x):
        y = nn.functional.linear(x @ self.a.weight.T, self.b.weight.to(x.dtype), self.b.bias)
        return self.conv(y.view(-1, 16, 2, 2))


@pytest.mark.parametrize("options", [{}, dict(refresh=5), dict(refresh=5, backward="ste"), dict(refresh=5, impl="reference")])
def test_products_with_masked_weights_that_the_graph_computes(options):
    torch.manual_seed(0)
    model, x = fxmask.apply(Multiplies(), ratio=0.5, block=(32, 16), layers=(nn.Linear, nn.Conv2d), **options), torch.randn(4, 64)
    fxmask.step(model, 0)
    gm = traced(model, x)
    columns = ("name", "shape", "block", "blocks", "achieved_ratio")
    assert rows(gm, columns) == rows(model, columns) and len(fxmask.explain(gm).rows) == 3
    y = gm(x)
    with pytest.warns(FxMaskWarning) as told:
        fxmask.apply(gm, **OPTIONS)
    assert len(told) == 1 and "were masked before it was traced" in str(told[0].message) and torch.equal(gm(x), y)


class Reads(nn.Module):
    """Reads one weight in a body, and scales and repeats another one; a third takes part in no product, and what it makes of an input is no weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(64, 64) for _ in range(3))
        self.scale, self.w = nn.Parameter(torch.ones(64, 1)), nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        y = torch.cond(x.sum() > 0, lambda z: nn.functional.linear(z, self.a.weight), lambda z: z + 1, (x,))
        y = torch.bmm(y[:, None], (self.b.weight * self.scale).T.expand(4, -1, -1))[:, 0]
        return nn.functional.linear(y + self.c.weight.norm(), self.w)


@pytest.mark.parametrize("refresh", [1, 5])
def test_what_else_is_made_of_masked_weights(refresh):
    model = fxmask.apply(Reads(), ratio=0.5, block=(32, 128), refresh=refresh)
    fxmask.step(model, 0)
    found = [(row["name"], row["masked"], row["block"]) for row in fxmask.explain(traced(model, torch.randn(4, 64))).rows]
    block = "32x128" if refresh == 1 else "32x64"  # of a cached one the graph has the part alone that the weight fills
    assert sorted(found) == [("a", True, block), ("b", True, block), ("w", False, None)]


def test_a_layer_in_a_body_and_one_whose_weight_is_computed():
    class Cond(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))

        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda z: self.a(z), lambda z: z + 1, (self.b(x),))

    gm = traced(fxmask.apply(Cond(), **OPTIONS), torch.randn(4, 64))
    found = {row["name"]: row for row in fxmask.explain(gm).rows}
    assert set(found) == {"a", "b"} and all(row["reason"] == IN_TRACE for row in found.values())
    assert found["a"]["shape"] == "64x64" and found["a"]["achieved_ratio"] is None and found["b"]["shape"] is None


def test_a_computed_weight_of_the_model_itself_goes_by_its_call():
    layer = fxmask.apply(nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)), **OPTIONS)
    (row,) = fxmask.explain(traced(layer, torch.randn(4, 64))).rows
    assert row["name"].startswith("masked_linear") and row["reason"] == IN_TRACE


class Kept(nn.Module):
    """A mask of somebody's own, which a module gives that is none of fxmask's."""

    def __init__(self):
        super().__init__()
        self.fc, self.keep = nn.Linear(64, 64), nn.Identity()
        self.register_buffer("mask", torch.ones(4, 2, dtype=torch.bool))

    def forward(self, x):
        return torch.ops.fxmask.masked_linear.default(x, self.fc.weight, self.fc.bias, self.keep(self.mask), 16, 32, "masked")


def test_a_mask_that_another_module_gives_has_a_row():
    (row,) = fxmask.explain(torch.fx.symbolic_trace(Kept())).rows
    assert (row["name"], row["block"], row["reason"]) == ("fc", "16x32", IN_TRACE)


@pytest.mark.parametrize("moved", [False, True])
def test_a_trace_on_the_meta_device_has_rows_without_masks(moved):
    layer = nn.Conv2d(16, 32, 3, device=None if moved else "meta")
    gm = traced(fxmask.apply(layer, **OPTIONS, layers=nn.Conv2d), torch.randn(1, 16, 8, 8, device=layer.weight.device)).to("meta")
    (row,) = fxmask.explain(gm).rows
    assert row["masked"] and row["achieved_ratio"] is None and row["target_ratio"] == (0.6 if moved else None)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("gate", torch.rand(64, 64))

    def forward(self, w):
        return w * self.gate


@pytest.mark.parametrize("body", [False, True])
def test_a_buffer_beside_a_parameter_names_no_layer(body):
    layer = nn.utils.parametrize.register_parametrization(nn.Linear(64, 64), "weight", Gated())

    class Cond(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = layer

        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda z: self.a(z), lambda z: z + 1, (x,)) if body else self.a(x)

    (row,) = fxmask.explain(traced(fxmask.apply(Cond(), **OPTIONS), torch.randn(4, 64))).rows
    assert (row["name"], row["shape"], row["reason"]) == ("a.parametrizations.weight.original", "64x64", IN_TRACE)


def test_a_trace_that_apply_masks_has_its_own_rows():
    gm = fxmask.apply(traced(mlp(), torch.randn(4, 64)), **OPTIONS)
    assert {row["reason"] for row in fxmask.explain(gm).rows if row["masked"]} == {"selected"}
    assert not any("part of a trace" in note for note in fxmask.explain(gm).notes)
    fxmask.restore(gm)
    gm = fxmask.apply(gm, **OPTIONS, backward="rigl", dense_every=2)  # whose masks come with a flag
    fxmask.step(gm, 0)
    assert {row["reason"] for row in fxmask.explain(gm).rows if row["masked"]} == {"selected"}


class Scaled(nn.Module):
    """A weight that its graph computes, by arithmetic that is no parametrization."""

    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.ones(64, 1))

    def forward(self, x):
        return nn.functional.linear(x, self.weight / self.weight.detach().norm() * self.scale)


def test_a_weight_that_the_graph_computes_counts_as_one_whose_mask_is_not_known():
    gm = fxmask.apply(traced(nn.Sequential(nn.Linear(64, 64), Scaled()), torch.randn(4, 64)), ratio=0.5, block=(16, 16))
    report = fxmask.explain(gm)
    plain, made = report.rows
    assert plain["achieved_ratio"] == 0.5 and made["achieved_ratio"] is None
    assert (made["impl"], made["why"]) == ("auto", "the graph computes its weight")
    elements = [report.summary[k] for k in ("weight elements in linears", "of them in kept blocks", "of them under masks that nobody knows here")]
    assert elements == [2 * 64 * 64, 64 * 64 // 2, 64 * 64]


@pytest.mark.parametrize("options", [{}, dict(mode="sr-ste"), dict(mode="learned")])
@pytest.mark.parametrize("frozen", [False, True])
def test_masks_of_single_elements_are_seen_in_a_trace(options, frozen):
    torch.manual_seed(0)
    model = fxmask.apply(mlp(sizes=(64, 32, 16)), fxmask.NMMask(2, 4, **options))
    if frozen:
        fxmask.freeze(model)
    gm = traced(model, torch.randn(4, 64))
    report = fxmask.explain(gm)
    columns = ("name", "masked", "reason", "block")
    assert rows(gm, columns) == [("0", True, IN_TRACE, "N:M"), ("2", True, IN_TRACE, "N:M")] and len(report.rows) == 2
    assert {row["impl"] for row in report.rows} == {"masked_dense"}
    assert {row["achieved_ratio"] for row in report.rows} == {0.5 if frozen else None}  # ranks are many ops of the graph, a frozen mask is a constant
    assert report.summary["of them in kept blocks"] == (64 * 32 + 32 * 16) // 2 * frozen
    with pytest.raises(StateError, match=r"(?s)masks of this model are part of its trace.*use the model that was traced"):
        fxmask.masks(gm)


def free(p):
    p.untyped_storage().resize_(0)


def resize(p):
    p.data = torch.randn(2 * p.shape[0] + 3, *p.shape[1:])


def flatten(p):
    p.data = p.data.flatten()


@pytest.mark.parametrize(("change", "why"), [(free, "flattened or freed"), (flatten, "flattened or freed"), (resize, "replaced by one of another size")])
@pytest.mark.parametrize("options", [{}, dict(refresh=5), dict(layers=(nn.Conv2d, nn.Linear))])
def test_weights_that_were_freed_or_resized_since_have_a_row(change, why, options):
    torch.manual_seed(0)
    model = fxmask.apply(nn.Sequential(nn.Conv2d(16, 32, 1), nn.Flatten(), nn.Linear(128, 64)), ratio=0.5, **options)
    fxmask.step(model, 0)
    gm = traced(model, torch.randn(4, 16, 2, 2))
    masked = [f"{row['name']}.weight" for row in fxmask.explain(gm).rows if row["masked"]]
    for name in masked:
        change(gm.get_parameter(name))
    found = [row for row in fxmask.explain(gm).rows if row["masked"]]
    assert len(found) == len(masked) == 1 + ("layers" in options)
    assert all(why in row["reason"] and row["achieved_ratio"] is None for row in found)
    with pytest.raises(StateError, match="masks of this model are part of its trace"):
        fxmask.masks(gm)


def test_a_frozen_mask_of_single_elements_of_a_weight_that_was_resized_is_not_known():
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 64)), fxmask.NMMask(2, 4))
    fxmask.freeze(model)
    gm = traced(model, torch.randn(4, 64))
    resize(gm.get_parameter("0.weight"))
    (row,) = fxmask.explain(gm).rows
    assert "replaced by one of another size" in row["reason"] and row["achieved_ratio"] is None


class Pruned(nn.Module):
    """A mask of somebody's own."""

    def __init__(self):
        super().__init__()
        self.fc, self.kept = nn.Linear(64, 64), nn.Buffer(torch.rand(64, 64) > 0.5)

    def forward(self, x):
        return nn.functional.linear(x, torch.where(self.kept, self.fc.weight, 0))


def test_masks_of_single_elements_that_are_none_of_ours_are_not_told_as_such():
    assert [(r["name"], r["masked"]) for r in fxmask.explain(traced(Pruned(), torch.randn(4, 64))).rows] == [("linear", False)]
