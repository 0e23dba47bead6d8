"""Wrong use of `ActivationPruning`: an error that says what and how, and a model that is as it was."""

import numpy
import pytest
import torch
from torch import nn
from unit.pruned_models import mlp

import fxmask
from fxmask import ActivationPruning, WeightMask
from fxmask.errors import ShapeError
from fxmask.kernels import prune

X = torch.randn(4, 64)
WRONG = {
    "ratio 1": (lambda: ActivationPruning(1.0), "finite number in"),
    "block": (lambda: ActivationPruning(0.5, (1, 64)), "positive int"),
    "impl": (lambda: ActivationPruning(0.5, 64, impl="cuda"), "unknown impl: expected one of auto, reference, cpu, triton"),
    "noise": (lambda: ActivationPruning(0.5, 64, noise=-1), "noise: expected"),
    "twice": (lambda: fxmask.apply(mlp(), ActivationPruning(), ActivationPruning()), "one ActivationPruning, got 2"),
    "ratio beside it": (lambda: fxmask.apply(mlp(), ActivationPruning(), ratio=0.5), "configs and ratio"),
    "no config": (lambda: fxmask.apply(mlp(), 0.5), "BlockDropout or NMMask, got 0.5"),
    "again": (lambda: fxmask.apply(fxmask.apply(mlp(), ActivationPruning()), ActivationPruning()), "both configs in one call"),
    "masks later": (lambda: fxmask.apply(fxmask.apply(mlp(), ActivationPruning()), ratio=0.5), "both configs in one call"),
    "after masks": (lambda: fxmask.apply(fxmask.apply(mlp()), ActivationPruning()), "both configs in one call"),
    "dropout later": (
        lambda: fxmask.apply(fxmask.apply(mlp(), ActivationPruning()), fxmask.BlockDropout(0.5)),
        r"dropped already(?s:.*)fix: call fxmask.restore\(model\) first\.$",
    ),
    "masks after dropout": (
        lambda: fxmask.apply(fxmask.apply(mlp(), fxmask.BlockDropout(0.5)), ratio=0.5),
        r"apply\(model, WeightMask\(\.\.\.\), BlockDropout\(\.\.\.\)\)",
    ),
    "lazy": (lambda: fxmask.apply(nn.Sequential(nn.LazyLinear(8)), ActivationPruning()), "cannot change '0': its weight is not initialised yet"),
    "option": (lambda: fxmask.apply(mlp(), ActivationPruning(), overrides={"0": {"backward": "ste"}}), "unknown option .* got 'backward'"),
    "activations": (lambda: fxmask.apply(mlp(), WeightMask(), ActivationPruning(), overrides={"0": {"activations": 3}}), "a dict of options or False, got 3"),
    "both in a trace": (lambda: fxmask.apply(torch.fx.symbolic_trace(mlp()), WeightMask(), ActivationPruning()), "instead of its trace"),
    "torch.func": (lambda: (m := fxmask.apply(mlp(torch.float32), ActivationPruning())) and torch.func.grad(lambda x: m(x).sum())(X), "function transform"),
    "guard": (lambda: fxmask.guard(torch.optim.SGD((m := fxmask.apply(mlp(), ActivationPruning())).parameters()), m), "nothing is masked"),
    "ints": (lambda: fxmask.apply(mlp(torch.float32), ActivationPruning(0.5, 16))(X.long()), r"expected floats \(\.\.\., K\), got torch.int64"),
    "no axis": (lambda: fxmask.apply(mlp(torch.float32), ActivationPruning(0.5, 16))(X.sum()), r"got torch.float32 of shape \(\)"),
    "tracing": (lambda: torch.fx.symbolic_trace(fxmask.apply(mlp(), ActivationPruning())), "trace first"),
    "tracing a trace": (lambda: torch.fx.symbolic_trace(fxmask.apply(torch.fx.symbolic_trace(mlp()), ActivationPruning())), "trace first"),
    "a trace of Gain": (lambda: torch.fx.symbolic_trace(fxmask.apply(torch.fx.symbolic_trace(Gain()), ActivationPruning(affine=True))), "trace first"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use(case):
    call, words = WRONG[case]
    with pytest.raises(fxmask.FxMaskError, match=words):
        call()


def test_samples_without_rows_are_no_blocks_that_a_ratio_rounds_away():
    """Any warning is an error here."""
    y = fxmask.apply(mlp(torch.float32), ActivationPruning(0.5, 16))(torch.randn(2, 0, 64))
    y.sum().backward()
    assert y.shape[:2] == (2, 0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused(layout):
    x = torch.nested.nested_tensor([torch.randn(3, 64), torch.randn(5, 64)], layout=layout)
    with pytest.raises(fxmask.FxMaskError, match="activation pruning got a nested tensor: expected plain tensors"):
        fxmask.apply(mlp(torch.float32), ActivationPruning(0.5, 16))(x)


def test_numbers_of_numpy_are_numbers():
    assert ActivationPruning(noise=numpy.float32(0.5)) == ActivationPruning(noise=0.5) and type(ActivationPruning(noise=numpy.int64(1)).noise) is float


def test_a_layer_whose_weight_rests_says_so():
    for configs in ((ActivationPruning(0.5, 16),), (WeightMask(0.5), ActivationPruning(0.5, 16))):
        model = mlp(torch.float32)
        model[0].weight.requires_grad_(False)
        rows = {r["name"]: r for r in fxmask.explain(fxmask.apply(model, *configs)).rows}
        if len(configs) == 1:
            assert "asks for no gradient: nothing is saved" in rows["0"]["reason"] and rows["2"]["reason"] == "dense; its input is saved pruned"
        x = X.clone().requires_grad_()
        model(x).sum().backward()
        assert model[0].weight.grad is None and x.grad is not None and model[2].weight.grad is not None


def test_a_layer_rests_or_trains_as_its_weight_does_by_now():
    model = mlp(torch.float32)
    model[0].weight.requires_grad_(False)
    fxmask.apply(model, ActivationPruning(0.5, 16))
    model[0].weight.requires_grad_()
    model[2].weight.requires_grad_(False)
    rows = {r["name"]: r["reason"] for r in fxmask.explain(model).rows}
    assert rows["0"] == "dense; its input is saved pruned" and "asks for no gradient: nothing is saved" in rows["2"]


@pytest.mark.parametrize("end", [fxmask.restore, lambda _: nn.Linear(64, 96).requires_grad_(False)], ids=["restored", "replaced"])
@pytest.mark.parametrize("trains", [False, True])
def test_a_layer_that_is_pruned_no_more_is_not_said_to_rest(end, trains):
    model = fxmask.apply(mlp(torch.float32).requires_grad_(trains), ActivationPruning(0.5, 16))
    model[0] = end(model[0])
    assert fxmask.explain(model).rows[0]["reason"].startswith("fxmask.apply has not seen it")


@pytest.mark.parametrize("configs", [(ActivationPruning(0.5, 16),), (WeightMask(0.5), ActivationPruning(0.5, 16))], ids=["alone", "masked"])
def test_a_layer_whose_weight_rests_packs_nothing(configs, monkeypatch):
    model, packed, real = fxmask.apply(mlp(torch.float32), *configs), [], prune.compress
    model[0].weight.requires_grad_(False)
    monkeypatch.setattr(prune, "compress", lambda x, *rest: packed.append(x.shape[-1]) or real(x, *rest))
    x = torch.randn(2, 6, 64, requires_grad=True)
    model(x).sum().backward()
    assert packed == [model[2].in_features] and x.grad is not None
    with torch.no_grad():
        model(x)
    assert len(packed) == 1


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda t: self.a(t), lambda t: self.b(self.a(t)), (x,))


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(64))

    def forward(self, x):
        return self.gain * x


@pytest.mark.parametrize("trace", [torch.fx.symbolic_trace, lambda m: m], ids=["trace", "module"])
def test_a_part_says_so_too(trace):
    inner = nn.Sequential(mlp(torch.float32), Gain())
    inner[0][0].weight.requires_grad_(False)
    inner[1].gain.requires_grad_(False)
    model = fxmask.apply(nn.Sequential(trace(inner)), ActivationPruning(0.5, 16, affine=True))
    whole, part = ({r["name"]: r["reason"] for r in fxmask.explain(m).rows} for m in (model, model[0]))
    assert whole == {f"0.{name}": reason for name, reason in part.items()} and len({part["0.0"], part["0.2"], part["1.gain"]}) == 2


def test_a_weight_that_comes_into_a_body_rests_by_what_it_is():
    """And not by what the trace has recorded of it."""
    trace = torch.export.export(Branches(), (torch.ones(4, 64),)).module()
    trace.b.weight.requires_grad_(False)
    rows = {r["name"]: r["reason"] for r in fxmask.explain(fxmask.apply(trace, ActivationPruning(0.5, 16))).rows}
    assert rows.keys() == {"a", "b"}, "the first is a layer of both bodies"
    assert rows["a"] == "dense; its input is saved pruned" and "asks for no gradient: nothing is saved" in rows["b"]


@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated", "ignore:Converting a tensor to a Python boolean")  # shapes
@pytest.mark.parametrize("masks", [(), (WeightMask(0.5),)], ids=["alone", "with masks"])
def test_a_trace_by_torch_jit(masks):
    model = fxmask.apply(mlp(torch.float32), *masks, ActivationPruning(0.5, 16))
    with pytest.raises(fxmask.FxMaskError, match=r"torch.jit.trace cannot record activation pruning(.|\n)*under torch.no_grad"):
        torch.jit.trace(model, X)
    with torch.no_grad():
        assert torch.equal(torch.jit.trace(model, X)(X), model(X))


def test_wrong_use_loses_nothing():
    model = mlp()
    with pytest.raises(fxmask.FxMaskError, match="got 'width'"):
        fxmask.apply(model, WeightMask(), ActivationPruning(), overrides={"0": {"activations": {"width": 3}}})
    assert repr(model) == repr(mlp())


def test_options_that_would_be_ignored_are_errors():
    with pytest.raises(fxmask.FxMaskError, match="allocation='erk'"):
        fxmask.apply(mlp(), ActivationPruning(), allocation="erk")
    with pytest.raises(fxmask.FxMaskError, match="got 'dropout'"):
        fxmask.apply(mlp(), WeightMask(), ActivationPruning(), overrides={"0": {"dropout": {"p": 0.5}}})


def test_ops_of_operands_that_do_not_belong_together():
    x, w, gy, fx = torch.randn(2, 6, 8), torch.randn(3, 8), torch.randn(2, 6, 3), torch.ops.fxmask
    values, index = prune.compress(x, 4, 5, False)
    fx.pruned_linear(x, w, None, values, index, False)
    for block, kept, words in ((0, 5, "features of a kept block: expected 1 or more, got 0"), (4, 0, "kept blocks of a sample: expected 1 to 12, got 0")):
        with pytest.raises(ShapeError, match=words):
            fx.compress(x, block, kept, False)
    with pytest.raises(fxmask.FxMaskError, match=r"unknown impl: .* got 'best'"):  # in the forward, not in a backward to come
        fx.pruned_linear(x, w, None, values, index, False, dw_impl="best")
    with pytest.raises(ShapeError, match=r"kept blocks of an input \(2, 6, 8\): expected 2 samples, got 1"):
        fx.pruned_linear(x, w, None, values[:1], index[:1], False)
    with pytest.raises(ShapeError, match=r"kept blocks of x: expected torch.float32 .* got torch.float64"):
        fx.pruned_linear(x, w, None, values.double(), index, False)
    fx.pruned_dw(gy, values, index, x.shape, False)
    with pytest.raises(ShapeError, match=r"tokens of gy: expected those of an input \(2, 6, 8\), got \(3, 4, 3\)"):
        fx.pruned_dw(gy.view(3, 4, 3), values, index, x.shape, False)
    mask, lists = torch.ones(2, 2, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    wrong = [
        (dict(mask=mask, backward="best"), r"unknown backward: expected one of masked, .* got 'best'"),
        (dict(mask=mask, lists=lists), r"lists of a mask \(2, 2\) in blocks \(2, 4\): expected contiguous torch.int32"),
        (dict(mask=mask[:1]), r"mask of a weight \(3, 8\) in blocks \(2, 4\): expected bool \(2, 2\)"),
    ]
    for given, words in wrong:  # in the forward, too
        with pytest.raises(fxmask.FxMaskError, match=words):
            fx.pruned_linear(x, w, None, values, index, False, **{"block_rows": 2, "block_cols": 4, "backward": "masked", **given})
    for given, words in wrong[1:]:
        with pytest.raises(ShapeError, match=words):
            fx.pruned_dw(gy, values, index, x.shape, False, **given, block_rows=2, block_cols=4)
    with pytest.raises(ShapeError, match=r"bias: expected \(3,\)"):
        fx.pruned_linear(x, w, torch.randn(6, 3), values, index, False, mask, 2, 4)


def test_float64_under_autocast_stays_as_it_is():
    """As PyTorch's linear leaves it."""
    model = fxmask.apply(mlp(torch.float64), ActivationPruning(0.5, 4))
    with torch.autocast("cpu", torch.bfloat16):
        y = model(X.double().requires_grad_())
    y.sum().backward()
    assert y.dtype == torch.float64 and all(p.grad.dtype == torch.float64 for p in model.parameters())
