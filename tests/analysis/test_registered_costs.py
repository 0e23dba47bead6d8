"""Costs of ops that nobody knows: told of, registered, put right, refused."""

import copy
import functools
import inspect

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import fxmask
from fxmask.errors import ConfigError, UnsupportedError
from fxmask.passes.counting.work import RULES

X = torch.randn(3, 16)


def analyze(model, inputs, **options):
    return fxmask.analyze(model, inputs, device="h100-sxm", **options)


_made = []


def custom_op():
    """A new custom op, scaled x @ w^T with a backward, that nobody knows the cost of."""
    name = f"op{len(_made)}"

    @torch.library.custom_op(f"fxmask_analysis::{name}", mutates_args=())
    def op(x: torch.Tensor, w: torch.Tensor, scale: float) -> torch.Tensor:
        return x @ w.t() * scale

    op.register_fake(lambda x, w, scale: x.new_empty(x.shape[0], w.shape[0]))

    def keep(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])

    def gradient(ctx, gy):
        x, w = ctx.saved_tensors
        return gy @ w, gy.t() @ x, None

    op.register_autograd(gradient, setup_context=keep)
    _made.append(op)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.w = nn.Linear(16, 24), nn.Parameter(torch.randn(10, 24))

        def forward(self, x):
            return op(self.fc(x), self.w, 0.5)

    return M(), getattr(torch.ops.fxmask_analysis, name), name


@pytest.fixture
def registries():
    rules, formulas = dict(RULES), dict(flop_registry)
    yield
    for table, before in ((RULES, rules), (flop_registry, formulas)):
        table.clear()
        table.update(before)


def test_a_comparison_says_that_its_totals_are_lower_bounds():
    model, _, _ = custom_op()
    plain, masked = (analyze(m, X) for m in (model, fxmask.apply(copy.deepcopy(model), ratio=0.5, block=(8, 8))))
    assert [n for n in plain.compare(masked).notes if n.startswith("Totals are lower bounds (>=)")]
    assert plain.compare(analyze(nn.Linear(16, 8), X)).notes[1:] == [n for n in plain.notes if n.startswith("Totals")]


def test_an_unknown_op_and_its_cost(registries):
    model, op, name = custom_op()
    report = analyze(model, X)
    unknown = report.tables["coverage"]
    assert len(unknown) == 1 and unknown[0]["op"] == f"fxmask_analysis.{name}" and unknown[0]["count"] == 1
    assert unknown[0]["example_shapes"] == "3x24, 10x24" and unknown[0]["suggestion"] == f"@fxmask.register_cost(torch.ops.fxmask_analysis.{name})"
    assert unknown[0]["bytes_min"] == 4 * (3 * 24 + 10 * 24 + 3 * 10)
    shares = report.summary["coverage"]
    assert 0 < shares["nodes_pct"] < 100 and 0 < shares["bytes_pct"] < 100
    assert shares["params_pct"] == 100 * (1 - 240 / (240 + 17 * 24))
    assert any("lower bounds (>=)" in n for n in report.notes) and "unknown ops" in str(report)
    assert {r["status"] for r in report.tables["nodes"] if r["op"].startswith("fxmask_analysis")} == {"unknown"}
    with pytest.raises(UnsupportedError, match=rf"(?s)strict=True\) knows no cost of: fxmask_analysis.{name} \(1x, 3x24, 10x24\).*@fxmask.register_cost"):
        analyze(model, X, strict=True)

    @fxmask.register_cost(op)
    def cost(x_shape, w_shape, scale, *, out_shape):
        assert scale == 0.5 and tuple(out_shape) == (3, 10)
        return 2 * x_shape[0] * x_shape[1] * w_shape[0]

    report = analyze(model, X, strict=True)
    assert not report.tables["coverage"] and min(report.summary["coverage"].values()) == 100
    with FlopCounterMode(display=False) as counter:
        y = model(X)
    forward = counter.get_total_flops()
    with counter:
        y.backward(torch.ones_like(y))
    assert report.summary["flop"]["fwd"] == forward == 2 * 3 * 24 * (16 + 10)
    assert report.summary["flop"]["total"] == forward + counter.get_total_flops()
    row = next(r for r in report.tables["nodes"] if r["op"] == f"fxmask_analysis.{name}")
    assert row["status"] == "registered" and row["flop"] == 2 * 3 * 24 * 10 and row["mac"] * 2 == row["flop"]
    assert cost((3, 24), (10, 24), 0.5, out_shape=(3, 10)) == row["flop"]  # the decorator gives the function back


def test_register_cost_refuses(registries):
    model, op, name = custom_op()
    for wrong in (None, "aten.mm", torch.mm, lambda x: x):
        with pytest.raises(ConfigError, match=r"register_cost: expected an op such as torch.ops.mylib.name, got"):
            fxmask.register_cost(wrong)
    for known in (torch.ops.aten.mm, torch.ops.aten.mm.default, torch.ops.fxmask.masked_linear):
        with pytest.raises(ConfigError, match=r"register_cost: \S+ has a cost already: expected an op that `analyze` lists as unknown"):
            fxmask.register_cost(known)
    for wrong in (None, 7, "x"):
        with pytest.raises(ConfigError, match=rf"register_cost: expected a function of the arguments of fxmask_analysis.{name} that gives its FLOP, got"):
            fxmask.register_cost(op)(wrong)


@pytest.mark.parametrize("cost", [max, int, dict, functools.partial(max, 1), lambda x_shape: 1], ids=["max", "int", "dict", "partial", "one argument"])
def test_a_cost_of_other_arguments_is_named_by_both_counters(registries, cost):
    """Builtins tell nothing of their arguments, and say what is wrong when they are called."""
    model, op, name = custom_op()
    fxmask.register_cost(op)(cost)
    refused = rf"the registered cost of fxmask_analysis.{name} does not take the op's arguments"
    with pytest.raises(ConfigError, match=refused):
        analyze(model, X)
    with pytest.raises(ConfigError, match=refused), FlopCounterMode(display=False):
        model(X)


def test_a_cost_that_fails_by_itself_says_why(registries):
    model, op, _ = custom_op()
    fxmask.register_cost(op)(lambda x_shape, w_shape, scale, out_shape: x_shape * 1.5)
    with pytest.raises(TypeError, match="can't multiply sequence"):
        analyze(model, X)


def test_a_cost_can_be_put_right(registries):
    """A wrong one is said when it is used, and another takes its place, for PyTorch's counter, too."""
    model, op, name = custom_op()
    fxmask.register_cost(op.default)(lambda *a: 7)
    with pytest.raises(ConfigError, match=rf"the registered cost of fxmask_analysis.{name} does not take the op's arguments: .*out_shape.* 3 positional"):
        analyze(model, X)
    for flop in (7, 8):
        fxmask.register_cost(op)(lambda *a, out_shape, flop=flop: flop)
        report = analyze(model, X)
        assert next(r["flop"] for r in report.tables["nodes"] if r["status"] == "registered") == flop
        with FlopCounterMode(display=False) as counter:
            model(X)
        assert counter.get_total_flops() == 2 * 3 * 24 * 16 + flop


def test_a_cost_may_be_decorated(registries):
    """What a decorator takes counts, and not what the function behind it takes."""
    model, op, name = custom_op()

    def by_the_input(formula):
        @functools.wraps(formula)
        def cost(x_shape, *others, out_shape):
            return formula(x_shape)

        return cost

    fxmask.register_cost(op)(by_the_input(lambda x_shape: 5 * x_shape[0]))
    report = analyze(model, X)
    assert next(r["flop"] for r in report.tables["nodes"] if r["status"] == "registered") == 15


def test_a_cost_may_tell_nothing_of_its_arguments(registries):
    """As functions of compiled modules do."""
    model, op, name = custom_op()

    def cost(x_shape, w_shape, scale, out_shape):
        return 7 * x_shape[0]

    cost.__signature__ = 3
    with pytest.raises(TypeError, match="__signature__"):
        inspect.signature(cost)
    fxmask.register_cost(op)(cost)
    assert next(r["flop"] for r in analyze(model, X).tables["nodes"] if r["status"] == "registered") == 21


@pytest.mark.parametrize("flop", [1.5, True, -1, None, "2"], ids=repr)
def test_a_cost_that_is_no_number_of_flop(registries, flop):
    model, op, name = custom_op()
    fxmask.register_cost(op)(lambda *a, out_shape: flop)
    refused = rf"the registered cost of fxmask_analysis.{name} must give FLOP: expected an int of at least 0, got"
    with pytest.raises(ConfigError, match=refused):
        analyze(model, X)
    with pytest.raises(ConfigError, match=refused), FlopCounterMode(display=False):
        model(X)
