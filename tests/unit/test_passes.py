"""Passes on graphs of a few lines."""

import operator
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.testing import FileCheck

import fxmask
from fxmask.errors import ConfigError
from fxmask.passes import infra
from fxmask.passes.frames import frames
from fxmask.passes.graphs.canonical import Canonicalise
from fxmask.passes.infra import CleanUp, Pass, run_passes

aten = torch.ops.aten
CONJUGATES = (aten.matrix_H, aten.matrix_H.default, aten.mH, aten.mH.default, aten.adjoint.default)
OPS = (aten.numpy_T, aten.numpy_T.default, aten.mT, aten.mT.default, aten.t, aten.t.default, *CONJUGATES)  # as Dynamo (2.14), torch.export or people write them
SWAPS = (torch.movedim, aten.movedim.int, aten.moveaxis, aten.swapaxes.default, aten.swapdims.default, aten.transpose)  # of two axes


def axes_of(x):
    return 1, 0


fx.wrap("axes_of")


def transposed_by(op, *axes):
    return lambda x, w, b: x @ op(w, *axes)


FORMS = {
    "x @ w.t()": (lambda x, w, b: x @ w.t(), True),
    "matmul(x, w.T)": (lambda x, w, b: torch.matmul(x, w.T), True),
    "x @ w.mT": (lambda x, w, b: x @ w.mT, True),
    "mm(x, w.transpose(0, 1))": (lambda x, w, b: torch.mm(x, w.transpose(0, 1)), True),
    "mm(x, transpose(w, -1, -2))": (lambda x, w, b: torch.mm(x, torch.transpose(w, -1, -2)), True),
    "x.matmul(w.permute(1, 0))": (lambda x, w, b: x.matmul(w.permute(1, 0)), True),
    "x @ torch.permute(w, (1, 0))": (lambda x, w, b: x @ torch.permute(w, (1, 0)), True),
    "mm(x, mat2=w.t())": (lambda x, w, b: torch.mm(x, mat2=w.t()), True),
    "matmul(input=x, other=w.t())": (lambda x, w, b: torch.matmul(input=x, other=w.t()), True),
    "x @ w.transpose(dim0=0, dim1=1)": (lambda x, w, b: x @ w.transpose(dim0=0, dim1=1), True),
    "x @ w.swapaxes(0, 1)": (lambda x, w, b: x @ w.swapaxes(0, 1), True),
    "x @ swapdims(w, 0, 1)": (lambda x, w, b: x @ torch.swapdims(w, 0, 1), True),
    "x @ w.H": (lambda x, w, b: x @ w.H, True),
    "x @ w.adjoint()": (lambda x, w, b: x @ w.adjoint(), True),
    **{f"x @ {op}(w)": (transposed_by(op), True) for op in OPS},
    **{f"x @ {op.__name__}(w, 0, 1)": (transposed_by(op, 0, 1), True) for op in SWAPS},
    **{f"x @ {op.__name__}(w, -1, 1)": (transposed_by(op, -1, 1), False) for op in SWAPS},
    "x @ w.moveaxis(1, 0)": (lambda x, w, b: x @ w.moveaxis(1, 0), True),
    "x @ w.movedim((0, 1), (1, 0))": (lambda x, w, b: x @ w.movedim((0, 1), (1, 0)), False),
    "aten.mm(x, w.t())": (lambda x, w, b: aten.mm(x, w.t()), True),
    "aten.addmm(b, x, w.t())": (lambda x, w, b: aten.addmm(b, x, w.t()), True),
    "x @ w.permute(dims=(1, 0))": (lambda x, w, b: x @ w.permute(dims=(1, 0)), True),
    "b.addmm(x, w.t())": (lambda x, w, b: b.addmm(x, w.t()), True),
    "addmm(b, x, mat2=w.t())": (lambda x, w, b: torch.addmm(b, x, mat2=w.t()), True),
    "addmm(b, mat1=x, mat2=w.t(), beta=2)": (lambda x, w, b: torch.addmm(b, mat1=x, mat2=w.t(), beta=2), False),
    "mm(x, w.t(), out=b)": (lambda x, w, b: torch.mm(x, w.t(), out=torch.empty(8, 8)), False),
    "x @ w.swapaxes(0, 0)": (lambda x, w, b: x @ w.swapaxes(0, 0), False),
    "addmm(b, x, w.t())": (lambda x, w, b: torch.addmm(b, x, w.t()), True),
    "addmm(b, x, w.t(), alpha=2)": (lambda x, w, b: torch.addmm(b, x, w.t(), alpha=2), False),
    "addmm(x, x, w.t())": (lambda x, w, b: torch.addmm(x, x, w.t()), False),
    "x @ w": (lambda x, w, b: x @ w, False),
    "x @ w.transpose(0, 0)": (lambda x, w, b: x @ w.transpose(0, 0), False),
    "x @ w.permute(0, 1)": (lambda x, w, b: x @ w.permute(0, 1), False),
    "x @ w.permute(axes_of(x))": (lambda x, w, b: x @ w.permute(axes_of(x)), False),
    "x @ x.t()": (lambda x, w, b: x @ x.t(), False),
    "w @ w.t()": (lambda x, w, b: w @ w.t(), True),
}


def traced(f, **examples):
    gm = fx.symbolic_trace(f)
    for node in gm.graph.nodes:
        if node.name in examples:
            node.meta["example_value"] = examples[node.name]
    return gm


@pytest.mark.parametrize("form", FORMS)
def test_products_with_a_transposed_weight_are_linears(form):
    f, rewritten = FORMS[form]
    x, w, b = torch.randn(8, 8), torch.randn(8, 8), torch.randn(8)
    gm = traced(f, x=x, w=w, b=b)
    result, _ = run_passes(gm, [Canonicalise(lambda node: node.name == "w"), CleanUp()])
    assert result.modified == rewritten
    if rewritten:
        FileCheck().check("torch._C._nn.linear").check_not("permute").check_not("transpose").check_not(".t()").check_not("getattr").check_not("swap").check_not("move").check_not("adjoint").check_not("aten").run(gm.code)
    else:
        FileCheck().check_not("linear").run(gm.code)
    torch.testing.assert_close(gm(x, w, b), f(x, w, b))


@pytest.mark.parametrize("transpose", [lambda w: w.H, lambda w: w.mH, lambda w: w.adjoint(), torch.adjoint, *CONJUGATES])
def test_a_conjugate_is_no_transpose(transpose):
    x, w = torch.randn(4, 8, dtype=torch.complex64), torch.randn(8, 8, dtype=torch.complex64)
    gm = traced(lambda x, w: x @ transpose(w), x=x, w=w)
    result, _ = run_passes(gm, [Canonicalise(lambda node: node.name == "w"), CleanUp()])
    assert not result.modified


class Twice(Pass):
    """x + y becomes x + 2 y; leaves a dead node."""

    def __init__(self, factor=2):
        self.factor = factor

    def settings(self):
        return (self.factor,)

    def run(self, gm):
        names = []
        for node in gm.graph.find_nodes(op="call_function", target=operator.add):
            with gm.graph.inserting_before(node):
                gm.graph.call_function(torch.t, (node.args[0],))
                node.args = (node.args[0], gm.graph.call_function(operator.mul, (node.args[1], self.factor)))
            names.append(node.name)
        return names


def test_passes_run_in_order_and_the_last_one_cleans_up():
    gm = fx.symbolic_trace(lambda x, y: x + y)
    first, second, clean = run_passes(gm, [Twice(), Twice(3), CleanUp()])
    assert first.rewritten == second.rewritten == ["add"] and len(clean.rewritten) == 2
    assert gm(1, 1) == 7 and "torch.t(" not in gm.code


def test_a_pass_that_finds_nothing_changes_nothing():
    gm = fx.symbolic_trace(lambda x, y: x * y)
    code = gm.code
    (result,) = run_passes(gm, [Twice()])
    assert not result.modified and gm.code == code


def test_an_identity_is_of_the_file_and_of_the_settings():
    assert Twice().uuid() == Twice(2).uuid() != Twice(3).uuid()
    assert Twice().uuid() != CleanUp().uuid() == CleanUp().uuid()


def test_writes_whose_results_nobody_uses_are_not_cleaned_up():
    def f(x, buffer):
        buffer.copy_(x)
        x.t()
        buffer.add_(1)
        return x + 1

    gm = fx.symbolic_trace(f)
    assert CleanUp()(gm).rewritten == ["t"]
    buffer = torch.zeros(2, 2)
    gm(torch.ones(2, 2), buffer)
    assert torch.equal(buffer, torch.full((2, 2), 2.0))


def test_a_pass_without_a_file_has_an_identity():
    space = {"Pass": Pass}
    exec("class Here(Pass):\n    __module__ = '__nowhere__'", space)
    assert space["Here"]().uuid() != CleanUp().uuid()


def test_no_folder_no_dumps(tmp_path, monkeypatch):
    monkeypatch.delenv("FXMASK_DUMP", raising=False)
    monkeypatch.setattr(infra, "_write", lambda *_: pytest.fail("written"))
    run_passes(fx.symbolic_trace(lambda x, y: x + y), [Twice()])


def test_a_dump_of_every_pass(tmp_path, monkeypatch):
    monkeypatch.setenv("FXMASK_DUMP", str(tmp_path / "a" / "b"))
    run_passes(fx.symbolic_trace(lambda x, y: x + y), [Twice(), CleanUp()])
    files = sorted((tmp_path / "a" / "b").iterdir())
    assert [f.name.split(".", 2)[2] for f in files] == ["Twice.after.py", "Twice.before.py", "CleanUp.after.py", "CleanUp.before.py"]
    FileCheck().check("# 1 rewritten: add").check("torch.t").run(files[0].read_text())
    FileCheck().check("# before").check_not("torch.t").run(files[1].read_text())


def test_a_folder_for_dumps_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FXMASK_DUMP", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"(?s)FXMASK_DUMP: graphs cannot be written there: File exists.*where: .*file.*fix: name a folder"):
        run_passes(fx.symbolic_trace(lambda x, y: x + y), [Twice()])


@pytest.mark.parametrize("given", [None, "add", True], ids=repr)
def test_a_pass_that_does_not_name_what_it_rewrote(given):
    """Its graph would not be compiled anew, and the code of before would run."""

    class Forgetful(Twice):
        def run(self, gm):
            super().run(gm)
            return given

    with pytest.raises(ConfigError, match=rf"(?s)expected a list of them, got {given!r}\..*where: .*Forgetful.run.*fix: return the names, and \[\]"):
        run_passes(fx.symbolic_trace(lambda x, y: x + y), [Forgetful(), CleanUp()])


def test_the_example_of_an_own_pass(capsys):
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "own_pass.py"))
    example["main"]()
    out = capsys.readouterr().out
    FileCheck().check("rewritten: square").check("relu").check_not("gelu").check("The compiled model computes the same.").run(out)
    gm = fx.symbolic_trace(lambda x: F.gelu(x) + 1)
    example["SquaredRelu"]()(gm)
    FileCheck().check("relu").check("square").check_not("gelu").run(gm.code)
    assert isinstance(example["Block"]().fc1, nn.Linear)


@pytest.mark.parametrize(("config", "printed"), [
    (fxmask.ActivationPruning(0.5, 16), "PrunedCall(1, 50 % of 1x16)"), (fxmask.BlockDropout(block=(2, 16)), "DroppedCall(1, p=0.25 in 2x16)"),
])  # fmt: skip
def test_a_printed_graph_says_what_its_calls_do(config, printed):
    gm = torch.fx.symbolic_trace(nn.Sequential(nn.Dropout(0.25), nn.Linear(64, 64)))
    assert printed not in repr(gm) and printed in repr(fxmask.apply(gm, config))


class ByHand(nn.Module):
    """Calls an op of ours by itself, beside a linear."""

    def __init__(self):
        super().__init__()
        self.fc, self.own = nn.Linear(64, 64), nn.Parameter(torch.randn(64, 64))
        self.register_buffer("blocks", torch.eye(4) > 0)

    def forward(self, x):
        return self.fc(torch.ops.fxmask.masked_linear.default(x, self.own, None, self.blocks, 16, 16, "masked"))


def test_restore_leaves_a_masked_linear_that_the_model_calls_itself():
    model, x = ByHand(), torch.randn(4, 64)
    gm, want = torch.fx.symbolic_trace(model), model(x)
    code = gm.code
    fxmask.apply(gm, ratio=0.5, include="fc")
    assert not torch.equal(gm(x), want)
    fxmask.restore(gm)
    assert torch.equal(gm(x), want) and "masked_linear" in gm.code and gm.code == code


def test_a_name_that_another_node_has_by_now_is_not_given_back():
    gm = fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.GELU()))
    relu, gelu = (n for n in gm.graph.nodes if n.op == "call_module")
    infra.call_again(gm, gelu, relu.name)
    assert (relu.name, gelu.name) == ("_0", "_1")
    infra.call_again(gm, gelu, "free")
    assert gelu.name == "free"


def test_frames_begin_with_whoever_asks_and_go_outwards():
    def inner():
        return next(frames()), [f.f_code.co_name for f in frames()]

    first, names = inner()
    assert first.f_code is inner.__code__ and sys._getframe().f_code.co_name in names
