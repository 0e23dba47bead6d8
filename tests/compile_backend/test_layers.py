"""Which linears of a Dynamo graph are masked, in whatever form it shows them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from compile_backend.helpers import OPTIONS, Wrap, compiled, failing, graph_of, train
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


class Out(nn.Module):
    """Whose weight has a name of its own."""

    def __init__(self):
        super().__init__()
        self.out, self.bias = nn.Parameter(torch.randn(32, 32)), None

    @property
    def weight(self):
        return self.out


def test_rows_of_weights_that_are_given_by_keyword():
    """Projections of Linears are no packed ones, and what comes last may be of any name."""
    model = Keywords()
    model.c_proj = Out()
    compiled(model, **OPTIONS)(torch.randn(6, 2, 32))
    rows = {row["name"]: row["reason"] for row in fxmask.explain(model).rows if row["masked"]}
    assert rows == dict.fromkeys(["q_proj", "k_proj", "v_proj", "c_proj.out"], "selected in graphs of backend='fxmask' alone")


def test_a_projection_that_the_graph_makes_is_no_layers_weight_there():
    model, x = Keywords(), torch.randn(6, 2, 32)
    model.q_proj = nn.utils.parametrizations.weight_norm(model.q_proj)
    compiled(model, **OPTIONS)(x)
    row = fxmask.explain(model).rows[0]
    assert row["name"] == "q_proj" and row["reason"].startswith("the graph packs it from other weights for its attention")
    torch._dynamo.reset()
    assert "expected in_proj to be masked" in str(failing(model, x, **OPTIONS, require=True))


class Attends(nn.Module):
    """Whose last projection the graph makes."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2)
        nn.utils.parametrizations.weight_norm(self.attention.out_proj)

    def forward(self, x):
        return self.attention(x, x, x)[0]


def test_a_last_projection_that_the_graph_makes_goes_by_the_layers_name():
    with pytest.warns(FxMaskWarning, match=r"masked nothing in a graph: attention\.out_proj: in exclude"):
        compiled(Attends(), **OPTIONS, exclude="attention.out_proj")(torch.randn(6, 2, 32))


class AttendsPlainly(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(32, 2)

    def forward(self, x):
        return self.attention(x, x, x)[0]


@pytest.mark.parametrize("backward", ["masked", "ste"])
def test_a_masked_block_of_a_weight_that_is_given_as_an_argument_is_zero_whatever_it_holds(backward):
    """Of two blocks with an Inf one is kept."""
    model, x = AttendsPlainly(), torch.randn(6, 2, 32)
    with torch.no_grad():
        model.attention.out_proj.weight[[0, 31], [0, 31]] = torch.inf
    y = compiled(model, ratio=0.75, block=(16, 16), backward=backward, include="attention.out_proj")(x)
    assert torch.equal(y[..., 16:], model.attention.out_proj.bias[16:].expand(6, 2, 16)) and not y[..., 0].isfinite().any()


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
    with pytest.warns(FxMaskWarning, match=r"inner\.[12]\.fc stays dense: it stands in a region that is compiled once for several layers") as told:
        found = compiled(model, "aot_eager", **OPTIONS)(x)
    assert [str(w.message).partition(" ")[0] for w in told] == ["inner.1.fc", "inner.2.fc"]
    first = fxmask.apply(copy.deepcopy(model), **OPTIONS, include="inner.0.fc")  # the first one is traced by itself
    torch.testing.assert_close(found, first(x))


class CheckpointedRegion(Region):
    @torch.compiler.nested_compile_region
    def forward(self, x):
        return checkpoint(self.fc, x, use_reentrant=False) + x


def test_so_does_a_checkpoint_inside_a_shared_region():
    torch.manual_seed(0)
    model, x = Wrap(nn.Sequential(*(CheckpointedRegion() for _ in range(3)))), torch.randn(4, 32, requires_grad=True)  # all three share
    with pytest.warns(FxMaskWarning, match=r"inner\.[02]\.fc.*it stands in a region that is compiled once for several layers"):
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
    """Its weights are what linears give for a parameter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.w = nn.Linear(32, 64), nn.Linear(64, 32), nn.Parameter(torch.randn(32, 32))

    def forward(self, x):
        w = self.a(self.w)
        return F.linear(F.linear(x, w), self.b(w))


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_weight_that_another_linear_gives_is_masked_after_that(inner):
    model, x = OfAnother(), torch.randn(32, 64)
    call, given = compiled(copy.deepcopy(model), inner, **OPTIONS), x.clone().requires_grad_()
    traced, expected = fxmask.apply(torch.export.export(model, (x,)).module(), **OPTIONS), x.clone().requires_grad_()
    y, z = call(given), traced(expected)
    y.sum().backward()
    z.sum().backward()
    assert torch.equal(y, z) and torch.equal(given.grad, expected.grad)


@pytest.mark.parametrize("masks", [{}, OPTIONS], ids=["alone", "masked"])
def test_a_linear_whose_weight_another_gives_is_pruned_too(masks):
    (text,) = graph_of(OfAnother(), torch.randn(32, 64), activations=dict(ratio=0.5, block=4), **masks)
    code = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    assert sum("lifted_pruning_linear(" in line for line in code) == 4


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


class ReadBeside(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(32, 32)

    def forward(self, x):
        return checkpoint(self.fc, x, use_reentrant=False) + x @ self.fc.weight


def test_a_product_beside_the_body_that_masks_its_weight_is_named():
    model = ReadBeside()
    with pytest.warns(FxMaskWarning, match=r"fc stays dense: matmul\(\) reads it, which is no linear call"):
        compiled(model, **OPTIONS)(torch.randn(4, 32))
    assert "in some of its uses; in others: matmul() reads it" in fxmask.explain(model).rows[0]["reason"]


def test_a_product_beside_a_body_that_stays_dense_is_not():
    class Multiplied(MappedCheckpoint):
        def forward(self, x):
            return super().forward(x) + x @ self.fc.weight

    with pytest.warns(FxMaskWarning) as told:
        compiled(Multiplied(), **OPTIONS)(torch.randn(3, 4, 32))
    assert len(told) == 1 and "it stands in the body of map_impl" in str(told[0].message)
