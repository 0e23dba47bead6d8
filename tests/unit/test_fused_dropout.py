"""Which dropouts `BlockDropout` fuses and which it leaves alone, what `explain` says of them, and that a graph is turned back to the letter."""

import copy
import pickle
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxmask
from fxmask import ActivationPruning, BlockDropout, FxMaskWarning, WeightMask
from fxmask.passes.graphs.fused_dropout import left_in

HERE = BlockDropout(block=(8, 8))


EXPORTED = "what torch.export makes has no train.. and eval..,"


class Net(nn.Module):
    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.a, self.d, self.b = nn.Linear(32, 32), nn.Dropout(0.25, inplace), nn.Linear(32, 32)

    def forward(self, x):
        return self.b(self.d(self.a(x)))


def trace(forward, **options) -> torch.fx.GraphModule:
    return torch.fx.symbolic_trace(type("Traced", (Net,), {"forward": forward})(**options))


def names(gm) -> list[tuple[str, str]]:
    return [(n.name, str(n.target)) for n in gm.graph.nodes]


def notes(model) -> list[str]:
    return [n for n in fxmask.explain(model).notes if n.startswith("Dropouts")]


def test_who_else_calls_a_fused_dropout_is_told_of_it():
    model = fxmask.apply(nn.Sequential(nn.Dropout(0.3), nn.Linear(32, 32), nn.Dropout(0.2)), HERE)
    assert notes(model) == ["Dropouts whose work the next linear does: 0; whoever else calls them drops nothing.", "Dropouts that are left alone: 2."]
    x = torch.ones(4, 32)
    assert torch.equal(model[0](x), x)


@pytest.mark.parametrize("masks", [(), (WeightMask(0.5, (8, 8)),)], ids=["alone", "with masks"])
def test_a_fused_dropout_that_is_switched_alone_warns(masks):
    """Monte-Carlo dropout and its end, as people write them: by the modules that are nn.Dropouts."""
    x = torch.ones(64, 32)
    model = fxmask.apply(nn.Sequential(nn.Dropout(0.5), nn.Linear(32, 32)), *masks, HERE)
    model(x), model.eval()(x), model.train()[1].eval()  # of the whole model: nothing to say
    with pytest.warns(FxMaskWarning, match=r"Dropout in train\(\) rests .* drops nothing: expected both in one mode(.|\n)*fxmask.restore"):
        quiet = model(x)
    assert torch.equal(quiet, model[1](x))
    model.train()[0].eval()
    with pytest.warns(FxMaskWarning, match=r"Dropout in eval\(\) rests .* and drops: expected"):
        model(x)
    model.train()[0].p = 0.1
    with pytest.warns(FxMaskWarning, match=r"p of a Dropout .* was changed: expected 0.5, of which it knows, got 0.1"):
        model(x)
    always = fxmask.apply(nn.Sequential(nn.Dropout(0.5), nn.Linear(32, 32)), BlockDropout(block=(8, 8), mc=True)).eval()
    always[0].train()
    always(x)  # drops, as it would without


@pytest.mark.parametrize("trace", [False, True])
@pytest.mark.parametrize("p", [0.0, 1.0])
def test_the_ends_of_a_dropout_s_range(p, trace):
    """A Dropout that drops nothing is fused, too; one that drops all is refused."""
    dense, x = nn.Sequential(nn.Linear(32, 32), nn.Dropout(p), nn.Linear(32, 32)), torch.randn(32, 32)
    model = torch.fx.symbolic_trace(dense) if trace else copy.deepcopy(dense)
    if p == 1:
        with pytest.raises(fxmask.FxMaskError, match=r"behind a [Dd]ropout with p=1.0: expected p in \[0, 1\), or exclude='2'"):
            fxmask.apply(model, BlockDropout())
        return
    fxmask.apply(model, BlockDropout())
    assert [r["name"] for r in fxmask.explain(model).rows if r.get("dropout")] == ["2"]
    assert torch.equal(model(x), dense(x))


def test_a_dropout_with_a_forward_of_its_own_stays():
    for make in (lambda m: m, torch.fx.symbolic_trace):
        model = make(nn.Sequential(nn.Dropout(0.3), nn.Linear(32, 32)))
        dropout = model.get_submodule("0")
        dropout.forward = lambda x: 2 * x
        with pytest.warns(FxMaskWarning, match="changed nothing"):
            fxmask.apply(model, HERE)
        assert type(dropout) is nn.Dropout


@pytest.mark.parametrize("module", [True, False])
def test_a_dropout_that_writes_into_what_others_read_stays_in_a_graph(module):
    def forward(self, x):
        h = self.a(x)
        return self.b(self.d(h) if module else F.dropout(h, 0.25, True, True)) + h

    gm = trace(forward, inplace=True)
    with pytest.warns(FxMaskWarning, match="changed nothing: .*b: no active dropout before it"):
        fxmask.apply(gm, HERE)
    alone = fxmask.apply(trace(Net.forward, inplace=True), HERE)
    assert [r["dropout"] for r in fxmask.explain(alone).rows] == ["p=0.25 in 8x8", None]


def _read_again(self, x):
    d = F.dropout(self.a(x), 0.25, True, True)
    return self.b(d) + d


def _through_a_view(self, x):
    h = self.a(x)
    return self.b(self.d(h.view(-1, 32))) + h


def _as_a_method_of_torch(self, x):
    d = torch.dropout_(self.a(x), 0.25, True)
    return self.b(d) + d


@pytest.mark.parametrize("forward", [_read_again, _through_a_view, _as_a_method_of_torch])
@pytest.mark.parametrize("export", [False, True])
def test_a_dropout_in_place_whose_result_is_read_again_stays(forward, export):
    gm = trace(forward, inplace=True)
    if export:
        gm = torch.export.export(type("Exported", (Net,), {"forward": forward})(inplace=True).train(), (torch.randn(4, 32),)).module()
    code = gm.code
    with pytest.warns(FxMaskWarning, match="changed nothing: .*b: no active dropout before it"):
        fxmask.apply(gm, HERE)
    assert gm.code == code
    assert left_in(gm) or (not export and forward is _through_a_view)  # a module is named elsewhere


def test_what_is_written_behind_the_linear_is_not_between_it_and_its_dropout():
    def forward(self, x):
        h = self.a(x)
        y = self.b(self.d(h))
        h.mul_(2)
        return y + h

    gm = fxmask.apply(trace(forward), HERE)
    assert {r["name"]: r["dropout"] for r in fxmask.explain(gm).rows} == {"a": None, "b": "p=0.25 in 8x8"}


@pytest.mark.parametrize("op", [torch.dropout_, torch.ops.aten.dropout_.default])
def test_a_dropout_in_place_that_the_linear_alone_reads_is_fused(op):
    gm = fxmask.apply(trace(lambda self, x: self.b(op(self.a(x), 0.25, True))), HERE)
    assert [r["dropout"] for r in fxmask.explain(gm).rows] == ["p=0.25 in 8x8", None] and not left_in(gm)
    assert "dropout_" in fxmask.restore(gm).code


def test_a_checkpoint_that_ends_between_a_dropout_and_its_linear():
    model = fxmask.apply(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 32)), HERE)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxMaskWarning)
        for _ in range(3):
            x = torch.randn(4, 32, requires_grad=True)
            model[3](checkpoint(model[:3], x, use_reentrant=True)).sum().backward()


def test_a_graph_names_what_it_still_calls():
    def forward(self, x, on):
        h = F.dropout(self.b(self.d(self.a(x))), 0.5, on)
        return self.b(F.relu(F.dropout(F.dropout2d(h, 0.1), 0.5, training=False)))

    gm = fxmask.apply(trace(forward), HERE)
    (dropped,) = (n for n in gm.graph.nodes if "fxmask_dropped" in str(n.target))
    assert notes(gm) == ["Dropouts that are left alone: dropout, dropout2d."]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
        apart = torch.export.export(Net(), (torch.randn(4, 32),)).run_decompositions().module()
    assert left_in(apart) == ["native_dropout"]
    both = fxmask.apply(nn.ModuleDict({"g": trace(Net.forward), "g2": nn.Sequential(Net(), nn.Dropout(0.1), nn.Linear(32, 32))}), HERE)
    assert notes(both)[1:] == ["Dropouts that are left alone: g2.0.d."] and notes(both)[0].startswith("Dropouts whose work the next linear does: g2.1;")


def twice(self, x):
    w, b = self.b.weight, self.b.bias
    return self.a(self.d(self.a(self.d(x)))) + F.linear(F.dropout(x, 0.5), w, b)



@pytest.mark.filterwarnings("ignore:the trace .* no longer follows train:fxmask.FxMaskWarning", f"ignore:{EXPORTED}:fxmask.FxMaskWarning")
@pytest.mark.parametrize("config", [HERE, BlockDropout(0.5, (8, 8)), WeightMask(0.5, (8, 8)), ActivationPruning(0.5, 8)], ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("forward", [Net.forward, twice, "export"], ids=["modules", "twice", "export"])
def test_a_graph_is_turned_back_to_the_letter(config, forward):
    gm = torch.export.export(Net(), (torch.randn(4, 32),)).module() if forward == "export" else trace(forward)
    before, meta = names(gm), {n.name: set(n.meta) for n in gm.graph.nodes}
    assert names(fxmask.apply(gm, config)) != before
    fxmask.restore(gm)
    assert names(gm) == before and all(set(n.meta) >= meta[n.name] and "dropout" not in n.meta for n in gm.graph.nodes)
    gm(torch.randn(4, 32)).sum().backward()


def test_an_export_is_said_to_drop_until_it_is_told():
    net, x = Net().eval(), torch.randn(64, 32)
    gm = nn.Sequential(torch.export.export(net, (x,)).module())
    with pytest.warns(FxMaskWarning, match=EXPORTED + r"(?s:.*)where: 0\.a, 0\.b\n  fix: call .eval.., and .train.., of '0.fxmask_dropped' in it"):
        fxmask.apply(gm, BlockDropout(0.5, (8, 8)))
    with pytest.raises(NotImplementedError):
        gm.eval()
    assert not torch.equal(gm(x), gm(x))
    gm.get_submodule("0.fxmask_dropped").eval()
    assert torch.equal(gm(x), net(x))
    fxmask.apply(torch.export.export(net, (x,)).module(), BlockDropout(0.5, (8, 8), mc=True))  # drops in evaluation, too


def test_a_call_by_keyword_is_given_back_by_place():
    gm = torch.fx.symbolic_trace(Net())
    for n in gm.graph.nodes:
        if n.op == "call_module":
            n.args, n.kwargs = (), {"input": n.args[0]}
    gm.recompile()
    x = torch.ones(64, 32)
    fxmask.apply(gm, HERE)
    assert not torch.equal(gm(x), gm(x))
    fxmask.restore(gm)
    assert not torch.equal(gm(x), gm(x)) and torch.equal(gm.eval()(x), gm.b(gm.a(x)))


def test_unused_modules_may_be_deleted_meanwhile():
    dense = torch.fx.symbolic_trace(Net())
    gm = fxmask.apply(copy.deepcopy(dense), HERE)
    gm.delete_all_unused_submodules()
    assert "d" not in gm._modules
    for twin in (copy.deepcopy(gm), pickle.loads(pickle.dumps(gm)), gm):
        fxmask.restore(twin)
        assert twin.code == dense.code and twin.get_submodule("d").p == 0.25 and torch.equal(twin.eval()(torch.ones(2, 32)), dense.eval()(torch.ones(2, 32)))


def test_beside_a_mask_a_config_that_changes_nothing_says_so():
    images = lambda: nn.Sequential(nn.Conv2d(16, 16, 3))  # noqa: E731
    for config in (BlockDropout(0.5, (8, 8)), ActivationPruning(0.5, 8)):
        with pytest.warns(FxMaskWarning, match=rf"{type(config).__name__} changes no layer: none that is masked is a Linear that somebody calls"):
            fxmask.apply(images(), WeightMask(0.5, (8, 8)), config, layers=nn.Conv2d)
    with pytest.warns(FxMaskWarning, match="BlockDropout changes no layer: none has an active dropout right before it, and no p was given"):
        model = fxmask.apply(nn.Sequential(nn.Linear(32, 32)), WeightMask(0.5, (8, 8)), HERE)
    assert list(fxmask.masks(model)) == ["0.weight"]


class FFN(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.fc1, self.drop, self.fc2 = nn.Linear(64, 128), nn.Dropout(p), nn.Linear(128, 64)

    def forward(self, x):
        return self.fc2(self.drop(self.fc1(x).relu()))


def test_a_dropout_beside_the_layer_is_told():
    """A class' forward fuses nothing, so that the inputs of fc2 would be dropped twice."""
    text = r"drops beside 0\.drop, which stays(.|\n)*where: 0\.fc2\n(.|\n)*set that one's p to 0"
    with pytest.warns(FxMaskWarning, match=text) as caught:
        model = fxmask.apply(nn.Sequential(FFN(0.5)), BlockDropout(0.5, (8, 16)), include="*.fc2")
    assert len(caught) == 1 and caught[0].filename == __file__
    with pytest.warns(FxMaskWarning, match=text) as caught:
        fxmask.apply(nn.Sequential(FFN(0.5)), WeightMask(0.5), BlockDropout(0.5, (8, 16)), include="*.fc2")
    assert caught[0].filename == __file__ and type(model[0].drop) is nn.Dropout


def test_a_dropout_that_is_not_right_before_the_layer_is_told():
    """In nn.Sequential: through what acts on one element or token, and not through another layer."""
    between = [nn.ReLU(), nn.LayerNorm(64)]
    with pytest.warns(FxMaskWarning, match=r"drops beside 1, which stays(.|\n)*where: 4\n"):
        fxmask.apply(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), *between, nn.Linear(64, 64)), BlockDropout(0.5, (8, 16)), include="4")


@pytest.mark.filterwarnings("error::fxmask.FxMaskWarning")
def test_dropouts_that_drop_nothing_twice_are_not():
    fxmask.apply(nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), BlockDropout(0.5, (8, 16)), include="3")
    fxmask.apply(nn.Sequential(nn.Dropout(0.5), nn.LazyLinear(64), nn.ReLU(), nn.Linear(64, 64)), BlockDropout(0.5, (8, 16)), include="3")
    fxmask.apply(FFN(0.0), BlockDropout(0.5, (8, 16)), include="fc2")
    fxmask.apply(nn.Linear(64, 64), BlockDropout(0.5, (8, 16)), include="")
    fxmask.apply(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64)), BlockDropout(0.5, (8, 16)))
    fxmask.apply(torch.fx.symbolic_trace(FFN(0.5)), BlockDropout(0.5, (8, 16)), include="fc2")


@pytest.mark.parametrize("masks", [(), (WeightMask(0.5, (8, 8)),)], ids=["", "masked"])
def test_a_dropout_that_is_gone_is_missed(masks):
    """What fine-tuning does to all dropouts of a model; the linear drops all the same."""
    made = lambda: fxmask.apply(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 32)), *masks, HERE)  # noqa: E731
    for gone in (nn.Identity(), nn.Dropout(0.1)):
        model, x = made(), torch.ones(64, 32)
        model[2] = gone
        with pytest.warns(FxMaskWarning, match="(?s)drops for a Dropout that is in the model no more.*restore"):
            model(x)
        with warnings.catch_warnings():
            warnings.simplefilter("error", FxMaskWarning)
            model.eval()(x)
            fxmask.restore(model.train())(x)
    model = made()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxMaskWarning)
        head = model[:3](x)  # in two parts; the second again in the backward
        checkpoint(model[3], head, use_reentrant=False).sum().backward()
        model(x)


@pytest.mark.parametrize("masks", [(), (WeightMask(0.5, (16, 16)),)], ids=["dropout", "with masks"])
def test_compiled_code_does_not_look_at_what_eager_forwards_note(masks):
    torch._dynamo.reset()
    model, counter, x = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64)), CompileCounterWithBackend("eager"), torch.randn(8, 64)
    fxmask.apply(model, *masks, BlockDropout(block=(2, 16)))
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for run in (compiled, compiled, model, compiled):
        run(x)
    assert counter.frame_count == 1


def test_rows_of_a_trace_go_by_where_it_lies():
    trace = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64)))
    fxmask.apply(trace, BlockDropout(block=(16, 16)))
    rows = fxmask.explain(nn.Sequential(nn.Identity(), trace)).rows
    assert {r["name"]: bool(r["dropout"]) for r in rows} == {"1.0": False, "1.2": True} and len(rows) == 2
    outside = fxmask.apply(nn.Sequential(torch.fx.symbolic_trace(nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 64)))), BlockDropout(block=(16, 16)))
    rows = [(r["name"], r["reason"], bool(r["dropout"])) for m in (outside, outside[0]) for r in fxmask.explain(m).rows]
    assert rows == [(name, "dense; its input is dropped in blocks", True) for name in ("0.1", "1")]


@pytest.mark.filterwarnings("error::fxmask.errors.FxMaskWarning")
def test_a_trace_of_one_layer_goes_by_where_it_lies():
    model = fxmask.apply(nn.Sequential(torch.fx.symbolic_trace(nn.Linear(64, 64))), BlockDropout(p=0.5, block=(16, 16)))
    rows = [(r["name"], r["reason"], bool(r["dropout"])) for m in (model, nn.Sequential(model)) for r in fxmask.explain(m).rows]
    assert rows == [(name, "dense; its input is dropped in blocks", True) for name in ("0", "0.0")]


class Stage(nn.Sequential):
    """Another class, with the forward of its base."""


def test_a_container_of_another_class_runs_its_modules_in_turn():
    model = fxmask.apply(Stage(nn.Dropout(0.3), nn.Linear(32, 32)), HERE)
    assert notes(model) == ["Dropouts whose work the next linear does: 0; whoever else calls them drops nothing."]


def test_a_dropout_that_rests_and_is_called_alone_in_eval_says_nothing():
    model, x = fxmask.apply(nn.Sequential(nn.Dropout(0.3), nn.Linear(32, 32)), HERE).eval(), torch.ones(4, 32)
    for _ in range(3):
        assert torch.equal(model[0](x), x)


@pytest.mark.parametrize("mc", [False, True])
def test_a_copys_linear_that_has_lost_its_dropout_says_so(mc):
    """With `mc` nothing is to be said: it drops in any case."""
    model = copy.deepcopy(fxmask.apply(nn.Sequential(nn.Dropout(0.3), nn.Linear(32, 32)), BlockDropout(block=(8, 8), mc=mc)))
    model(torch.ones(4, 32))
    model[0] = nn.Identity()
    with nullcontext() if mc else pytest.warns(FxMaskWarning, match="a linear drops for a Dropout that is in the model no more"):
        model(torch.ones(4, 32))


def test_a_rate_of_ones_own_asks_for_none_of_the_dropout_before_it():
    gm = fxmask.apply(torch.fx.symbolic_trace(nn.Sequential(nn.Dropout(1.0), nn.Linear(32, 32))), BlockDropout(0.25, (8, 8)))
    assert [r["dropout"] for r in fxmask.explain(gm).rows] == ["p=0.25 in 8x8"]
