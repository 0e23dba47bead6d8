"""Which linears of a Dynamo graph are masked, in whatever form it shows them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from compile_backend.helpers import OPTIONS, Wrap, compiled, graph_of, train
from sample_models import Residual, Twice, mlp
from torch import nn
from torch._higher_order_ops.map import map as over_rows
from torch.testing import FileCheck
from torch.utils.checkpoint import checkpoint

import fxmask
from fxmask.errors import FxMaskWarning


def test_a_functional_linear_is_masked_too():
    (text,) = graph_of(Residual(), torch.randn(4, 32, 32), **OPTIONS)
    FileCheck().check_count("masked_linear.default", 4, exactly=True).run(text)
    FileCheck().check("block_index.default(l_self_parameters_proj_").run(text)


def test_layers_are_selected_by_name():
    (text,) = graph_of(mlp(), torch.randn(4, 64), **OPTIONS, include=["0", "2"], exclude="re:^2$")
    FileCheck().check_count("torch.ops.fxmask.masked_linear", 1, exactly=True).run(text)
    (text,) = graph_of(mlp(), torch.randn(4, 64), **OPTIONS, overrides={"2": dict(block=(4, 4))})
    FileCheck().check("block_index.default").check(", 8, 16,").check("block_index.default").check(", 4, 4,").run(text)


def test_masks_and_products_are_of_the_implementation_that_is_asked_for():
    (text,) = graph_of(mlp(), torch.randn(4, 64), **OPTIONS, impl="reference")
    assert text.count("block_index.default") == text.count("masked_linear.default") == 2 and text.count("'reference'") == 4


def test_a_weight_that_is_used_twice_has_one_mask():
    (text,) = graph_of(Twice(), torch.randn(4, 32), **OPTIONS)
    FileCheck().check_count("block_index.default", 1, exactly=True).run(text)
    FileCheck().check_count("masked_linear.default", 2, exactly=True).run(text)


class Products(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        for name in "abcdef":
            setattr(self, name, nn.Parameter(torch.randn(32, 32) / 6))
        self.bias = nn.Parameter(torch.randn(32))
        self.experts = nn.Parameter(torch.randn(2, 32, 32) / 6)
        self.register_buffer("fixed", torch.randn(32, 32) / 6)

    def forward(self, x):
        x = (x @ self.fixed.t() @ self.experts.mT).sum(0)  # no parameter; one of several matrices
        x = torch.addmm(self.bias, torch.mm(torch.matmul(x @ self.a.t(), self.b.T), self.c.transpose(0, 1)), self.d.permute(1, 0))
        return (x @ self.e) @ (x.t() @ x) @ self.f.mT


def test_products_with_transposed_parameters_are_linears_when_asked():
    x = torch.randn(4, 32)
    with pytest.warns(FxMaskWarning, match="masked nothing in a graph: it has no linear"):
        (text,) = graph_of(Products(), x, **OPTIONS)
    FileCheck().check_not("fxmask").run(text)
    (text,) = graph_of(Products(), x, **OPTIONS, match="matmul")
    FileCheck().check_count("masked_linear.default", 5, exactly=True).run(text)
    code = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    assert not [line for line in code if "permute" in line or "transpose" in line]  # nothing uses them any more
    model = Products()
    torch.testing.assert_close(compiled(model, ratio=0.0, match="matmul")(x), model(x))
    (text,) = graph_of(lambda x: checkpoint(lambda t: t @ model.a.t(), x, use_reentrant=False), x, **OPTIONS, match="matmul")  # in a body, too
    FileCheck().check_count("masked_linear.default", 1, exactly=True).run(text)


class Norm(nn.Module):
    """Writes into buffers, whose results nobody uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.norm = nn.Linear(32, 32), nn.BatchNorm1d(32)
        self.register_buffer("last", torch.zeros(4, 32))

    def forward(self, x):
        y = self.norm(self.fc(x))
        self.last.copy_(y.detach())
        return y


def test_writes_into_buffers_stay():
    ours, applied, x = Norm(), fxmask.apply(Norm(), **OPTIONS), torch.randn(4, 32)
    call = compiled(ours, **OPTIONS)
    for _ in range(2):
        assert torch.equal(call(x), applied(x))
    assert ours.norm.num_batches_tracked == 2 and all(torch.equal(a, b) for a, b in zip(ours.buffers(), applied.buffers(), strict=True))


class Keywords(nn.Module):
    """Multi-head attention by keywords, of four Linears, as CLIP pools."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj, self.v_proj, self.c_proj = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        return F.multi_head_attention_forward(
            query=x, key=x, value=x, embed_dim_to_check=32, num_heads=2, in_proj_weight=None, use_separate_proj_weight=True, add_zero_attn=False,
            q_proj_weight=self.q_proj.weight, k_proj_weight=self.k_proj.weight, v_proj_weight=self.v_proj.weight, dropout_p=0.0, bias_k=None, bias_v=None,
            in_proj_bias=torch.cat([self.q_proj.bias, self.k_proj.bias, self.v_proj.bias]), out_proj_weight=self.c_proj.weight,
            out_proj_bias=self.c_proj.bias, training=self.training, need_weights=False,
        )[0]  # fmt: skip


def test_weights_that_are_given_by_keyword():
    ours, applied = Keywords(), fxmask.apply(Keywords(), **OPTIONS)
    make_x = lambda: torch.randn(6, 2, 32)  # noqa: E731
    call = compiled(ours, **OPTIONS, require=["q_proj", "k_proj", "v_proj", "c_proj"])
    assert train(ours, call, make_x) == train(applied, applied, make_x)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Parameter(torch.randn(32, 32)) for _ in range(2))

    def forward(self, x):
        return F.linear(F.linear(x, self.a), self.b)


def test_parameters_of_one_module_have_names_of_their_own():
    (text,) = graph_of(Wrap(Named()), torch.randn(4, 32), **OPTIONS, exclude="inner.b")
    FileCheck().check_count("masked_linear.default", 1, exactly=True).check("l_self_modules_inner_parameters_b_").run(text)


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return F.linear(x, w)

    @staticmethod
    def backward(ctx, gy):
        x, w = ctx.saved_tensors
        return gy @ w, gy.t() @ x


class OwnBackward(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.other = nn.Linear(32, 32, bias=False), nn.Linear(32, 32)

    def forward(self, x):
        return self.other(Own.apply(x, self.fc.weight))


def test_a_linear_with_a_backward_of_its_own_stays_dense_and_says_so():
    with pytest.warns(FxMaskWarning, match="stands in the body of autograd_function_apply"):
        (text,) = graph_of(OwnBackward(), torch.randn(4, 32), **OPTIONS)
    FileCheck().check_count("masked_linear.default", 1, exactly=True).run(text)


class Region(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(32, 32, bias=False)

    @torch.compiler.nested_compile_region
    def forward(self, x):
        return F.gelu(self.fc(x))


def test_a_region_that_several_layers_share_stays_dense_and_says_so():
    torch.manual_seed(0)
    model, x = Wrap(nn.Sequential(*(Region() for _ in range(3)))), torch.randn(4, 32)
    with pytest.warns(FxMaskWarning, match=r"inner\.1\.fc stays dense: it stands in a region that is compiled once for several layers"):
        found = compiled(model, "aot_eager", **OPTIONS)(x)
    first = fxmask.apply(copy.deepcopy(model), **OPTIONS, include="inner.0.fc")  # the first one is traced by itself
    torch.testing.assert_close(found, first(x))


class CheckpointedRegion(Region):
    @torch.compiler.nested_compile_region
    def forward(self, x):
        return checkpoint(self.fc, x, use_reentrant=False) + x


def test_so_does_a_checkpoint_inside_a_shared_region():
    torch.manual_seed(0)
    model, x = Wrap(nn.Sequential(*(CheckpointedRegion() for _ in range(3)))), torch.randn(4, 32, requires_grad=True)  # all three share
    with pytest.warns(FxMaskWarning, match=r"inner\.0\.fc.*it stands in a region that is compiled once for several layers"):
        found = compiled(model, "aot_eager", **OPTIONS, exclude="inner.1.fc")(x)
    torch.testing.assert_close(found, model(x))


def test_a_tied_head_in_a_graph_of_its_own_stays_dense():
    table = nn.Embedding(64, 32)
    head = nn.Linear(32, 64, bias=False)
    head.weight = table.weight
    with pytest.warns(FxMaskWarning, match="masked nothing"):
        compiled(Wrap(table), **OPTIONS)(torch.arange(4))
    with pytest.warns(FxMaskWarning, match="default exclusion: weight tied to an Embedding"):
        compiled(Wrap(head), **OPTIONS)(torch.randn(4, 32))


class OfAnother(nn.Module):
    """Its weight is what another linear gives."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        w = self.a(x)
        return F.linear(F.linear(w, w), self.b(w))


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_weight_that_another_linear_gives_is_masked_after_that(inner):
    model, x = OfAnother(), torch.randn(32, 32)
    call, given = compiled(copy.deepcopy(model), inner, **OPTIONS), x.clone().requires_grad_()
    traced, expected = fxmask.apply(torch.export.export(model, (x,)).module(), **OPTIONS), x.clone().requires_grad_()
    y, z = call(given), traced(expected)
    y.sum().backward()
    z.sum().backward()
    assert torch.equal(y, z) and torch.equal(given.grad, expected.grad)


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


@pytest.mark.parametrize("masks", [{}, OPTIONS], ids=["alone", "masked"])
def test_a_linear_whose_weight_another_gives_is_pruned_too(masks):
    (text,) = graph_of(OfAnother(), torch.randn(32, 32), activations=dict(ratio=0.5, block=4), **masks)
    code = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    assert sum("lifted_pruning_linear(" in line for line in code) == 4


def test_a_leaf_that_is_no_parameter_is_trained_by_somebody():
    w = torch.randn(32, 32, requires_grad=True)
    (text,) = graph_of(lambda x, w: F.linear(x, w * 2), torch.randn(4, 32), w, **OPTIONS)
    FileCheck().check_count("masked_linear.default", 1, exactly=True).run(text)


class ByBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.other = nn.Linear(32, 32), nn.Linear(32, 32)
        self.register_buffer("scale", torch.ones(32, 32))

    def forward(self, x):
        return self.other(torch.einsum("bi,oi->bo", x, self.fc.weight * self.scale))


def test_a_weight_that_is_multiplied_by_a_buffer_first_is_named():
    with pytest.warns(FxMaskWarning, match=r"fc stays dense: einsum\(\) reads it, which is no linear call"):
        compiled(ByBuffer(), **OPTIONS)(torch.randn(4, 32))


class MappedCheckpoint(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.other = nn.Linear(32, 32, bias=False), nn.Linear(32, 32)

    def forward(self, x):
        return self.other(over_rows(lambda row: checkpoint(self.fc, row, use_reentrant=False), x))


def test_what_keeps_a_body_dense_keeps_those_inside_it():
    model = MappedCheckpoint()
    with pytest.warns(FxMaskWarning, match="fc stays dense: it stands in the body of map_impl"):
        compiled(model, **OPTIONS)(torch.randn(3, 4, 32))
    assert [row["masked"] for row in fxmask.explain(model).rows] == [False, True]
