"""Which linears of a trace are found, and as what: leaves of other classes and with hooks, graphs in graphs, graphs that somebody wrote by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxmask
from fxmask import ActivationPruning, BlockDropout, WeightMask
from fxmask.errors import StateError, UnsupportedError

DROP = BlockDropout(0.5, (8, 8))


def rows(model):
    return [(row["name"], row["masked"], row["dropout"]) for row in fxmask.explain(model).rows]


def by_hand(owner, *targets):
    """A graph that calls a module, or F.linear on a parameter, one after the other, each by a node of its own."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    for target in targets:
        x = graph.call_module(target, (x,)) if target in owner._modules else graph.call_function(F.linear, (x, graph.get_attr(target)))
    graph.output(x)
    return fx.GraphModule(owner, graph)


class Leaves(fx.Tracer):
    """Leaves what it is told to as one call."""

    def __init__(self, *kinds):
        super().__init__()
        self.kinds = kinds

    def is_leaf_module(self, m, name):
        return isinstance(m, self.kinds) or super().is_leaf_module(m, name)


class Weights(nn.Module):
    def __init__(self, dtype=None):
        super().__init__()
        self.p = nn.Parameter(torch.randn(32, 32, dtype=dtype))
        self.table = nn.Module()
        self.table.register_buffer("weight", torch.randn(32, 32))


@pytest.mark.parametrize("register", ["register_forward_pre_hook", "register_full_backward_hook", "register_full_backward_pre_hook"])
def test_every_hook_of_a_leaf_still_runs(register):
    model, seen = nn.Sequential(nn.Linear(32, 32)), []
    getattr(model[0], register)(lambda *args: seen.append(1))
    gm = fxmask.apply(fx.symbolic_trace(model))
    gm(torch.randn(3, 32, requires_grad=True)).sum().backward()
    assert seen == [1] and rows(gm) == [("0", True, None)]


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_leaf_keeps_a_forward_of_its_own():
    model, x = nn.Sequential(Doubled(32, 32), nn.Linear(32, 32)), torch.randn(3, 32)
    gm = fx.GraphModule(model, Leaves(Doubled).trace(model))
    doubled = 2 * F.linear(x, model[0].weight, model[0].bias)
    with pytest.warns(fxmask.FxMaskWarning, match="0 stays dense: Doubled has its own forward"):
        fxmask.apply(gm)
    assert rows(gm) == [("0", False, None), ("1", True, None)] and torch.equal(gm.get_submodule("0")(x), doubled) and "= getattr(self, \"0\")(" in gm.code


def test_a_leaf_that_has_a_plain_tensor_for_a_weight_is_called_as_before():
    model = nn.Sequential(nn.Linear(32, 32))
    weight = model[0].weight.detach().clone()
    del model[0].weight
    model[0].weight = weight
    gm = fxmask.apply(fx.symbolic_trace(model))
    assert [n.op for n in gm.graph.nodes] == ["placeholder", "call_module", "output"] and rows(gm) == [("0", True, None)]


def test_weights_that_no_mask_can_have_are_refused_in_graphs():
    for gm in (by_hand(nn.Sequential(nn.Linear(32, 32, dtype=torch.complex64)), "0"), by_hand(Weights(torch.complex64), "p")):
        with pytest.raises(UnsupportedError, match="its weight is complex"):
            fxmask.apply(gm)


def test_types_name_the_linears_of_a_graph_without_records():
    assert rows(fxmask.apply(by_hand(nn.Sequential(nn.Linear(32, 32)), "0"), include=nn.Linear)) == [("0", True, None)]
    assert rows(fxmask.apply(by_hand(Weights(), "p"), include=nn.Linear)) == [("p", True, None)]


def test_a_weight_that_two_nodes_read_has_one_mask():
    gm = fxmask.apply(by_hand(Weights(), "p", "p"), ratio=0.5)
    assert rows(gm) == [("p", True, None)] and len(list(gm.get_submodule("fxmask_sites").children())) == 1
    assert rows(fxmask.apply(by_hand(Weights(), "p", "p"), DROP)) == [("p", False, DROP.words())]


def test_a_buffer_that_is_called_a_weight_is_no_layers():
    class Reads(Weights):
        def forward(self, x):
            return torch.einsum("bi,oi->bo", F.linear(x, self.p), self.table.weight)

    gm = fxmask.apply(fx.symbolic_trace(Reads()))  # a warning would be an error here
    assert rows(gm) == [("p", True, None)]


def test_a_layer_of_a_graph_in_a_graph_is_named_by_the_nearest():
    class Calls(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.fc, self.inner = nn.Linear(32, 32), inner

        def forward(self, x):
            return self.inner(self.fc(x))

    outer = Calls(fx.symbolic_trace(Calls(nn.Identity())))
    gm = fxmask.apply(fx.GraphModule(outer, Leaves(fx.GraphModule).trace(outer)), DROP)
    assert rows(gm) == [("fc", False, DROP.words()), ("inner.fc", False, DROP.words())]
    assert rows(gm.inner) == [("fc", False, DROP.words())]


def test_a_graph_with_a_computed_weight_is_not_masked_twice():
    class Computes(Weights):
        def forward(self, x):
            return F.linear(x, 2 * self.p)

    gm = fxmask.apply(torch.export.export(Computes(), (torch.randn(2, 32),)).module())
    assert rows(gm) == [("linear", True, None)]
    with pytest.raises(StateError, match="masked already"):
        fxmask.apply(gm)


@pytest.mark.parametrize("config", [DROP, ActivationPruning(0.5, 8), WeightMask(0.5, (8, 8))], ids=lambda c: type(c).__name__)
def test_a_bias_that_is_given_by_name_is_kept(config):
    class Named(Weights):
        def forward(self, x):
            return F.linear(x, self.p, bias=self.p[0])

    gm, x = fxmask.apply(fx.symbolic_trace(Named()), config).eval(), torch.randn(3, 32)
    w = gm.p * fxmask.masks(gm)["p"].repeat_interleave(8, 0).repeat_interleave(8, 1) if isinstance(config, WeightMask) else gm.p
    torch.testing.assert_close(gm(x), F.linear(x, w, gm.p[0]))


@pytest.mark.parametrize("how", ["symbolic_trace", "export"])
def test_a_linear_is_not_masked_whose_weight_is_a_bags_table(how):
    class Bag(Weights):
        def forward(self, x, rows):
            return F.linear(x, self.p) + F.embedding_bag(rows, self.p)

    x, rows = torch.randn(4, 32), torch.zeros(4, 2, dtype=torch.long)
    gm = fx.symbolic_trace(Bag()) if how == "symbolic_trace" else torch.export.export(Bag(), (x, rows)).module()
    with pytest.warns(fxmask.FxMaskWarning, match="p: default exclusion: weight tied to an Embedding"):
        fxmask.apply(gm)


class Product(nn.Module):
    def __init__(self, fc):
        super().__init__()
        self.__dict__["fc"] = fc  # held elsewhere

    def forward(self, x):
        return torch.einsum("bi,oi->bo", x, self.fc.weight)


def test_the_type_of_what_reads_a_weight_leaves_it_out():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.head = nn.Linear(32, 32), nn.Linear(32, 32)
            self.product = Product(self.fc)

        def forward(self, x):
            return self.head(self.product(x))

    with pytest.warns(fxmask.FxMaskWarning, match="fc stays dense: einsum"):
        fxmask.apply(fx.symbolic_trace(Model()))
    gm = fxmask.apply(fx.symbolic_trace(Model()), exclude=Product)  # a warning would be an error here
    assert [row["reason"] for row in fxmask.explain(gm).rows if not row["masked"]] == ["in exclude"]


PRODUCTS = {
    "mv": lambda x, w: torch.mv(w, x[0]),
    "bmm": lambda x, w: torch.bmm(x[None], w.t()[None])[0],
    "baddbmm": lambda x, w: torch.baddbmm(x[None], batch1=x[None], batch2=w.t()[None])[0],
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_of_any_name_is_told_of(name):
    class Multiplies(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.head = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x):
            return self.head(PRODUCTS[name](x, self.fc.weight))

    with pytest.warns(fxmask.FxMaskWarning, match=rf"fc stays dense: {name}\(\) reads it"):
        fxmask.apply(fx.symbolic_trace(Multiplies()))
