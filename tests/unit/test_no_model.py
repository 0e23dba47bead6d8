"""What is no model is told so, by every function that takes one; and a weight that two layers share is one weight in explain's sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxmask


class Net(nn.Module):
    """A class, which is easily given instead of an instance."""


CALLS: dict[str, Callable[[Any], Any]] = {
    "apply": fxmask.apply,
    "restore": fxmask.restore,
    "masks": fxmask.masks,
    "explain": fxmask.explain,
    "step": fxmask.step,
    "refresh": fxmask.refresh,
    "state_dict": fxmask.state_dict,
    "load_state_dict": lambda m: fxmask.load_state_dict(m, {}),
    "finalize": fxmask.finalize,
    "freeze": fxmask.freeze,
    "feedback": lambda m: fxmask.feedback(m, 1.0),
    "dense": lambda m: fxmask.dense(m).__enter__(),
    "guard": lambda m: fxmask.guard(torch.optim.SGD([nn.Parameter(torch.zeros(2))]), m),
    "HealthLog": fxmask.HealthLog,
    "allocate": lambda m: fxmask.allocate(m, 0.5),
    "advise": lambda m: fxmask.advise(m, torch.zeros(2, 32)),
    "stability": lambda m: fxmask.stability(m, torch.zeros(2, 32)),
}
WRONG = {
    "None": (None, "NoneType."),
    "a name": ("resnet18", "str."),
    "a state_dict": (nn.Linear(2, 2).state_dict(), "OrderedDict."),
    "a class": (Net, "Net, the class itself."),
    "another class": (dict, "dict."),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", CALLS)
def test_it_says_what_it_expected(name: str, wrong: str) -> None:
    model, got = WRONG[wrong]
    with pytest.raises(fxmask.FxMaskError) as raised:
        CALLS[name](model)
    assert str(raised.value).startswith(f"fxmask.{name}: expected an nn.Module, got {got}")


@pytest.mark.parametrize("name", CALLS)
def test_an_exported_program_has_a_module(name: str) -> None:
    program = torch.export.export(nn.Linear(32, 32), (torch.zeros(2, 32),))
    with pytest.raises(fxmask.FxMaskError, match=rf"fxmask\.{name}: expected an nn\.Module, got ExportedProgram\.\n  fix: give it the program's module"):
        CALLS[name](program)


@pytest.mark.parametrize("wrong", ["None", "a name", "a class"])
def test_analyze_takes_more_and_says_so(wrong: str) -> None:
    with pytest.raises(fxmask.FxMaskError, match=r"analyze takes an nn\.Module, .* got (NoneType|str|type)"):
        fxmask.analyze(WRONG[wrong][0], torch.zeros(2, 32))


def shared() -> nn.Sequential:
    a, b = nn.Linear(32, 32), nn.Linear(32, 32)
    b.weight = a.weight
    return nn.Sequential(a, nn.ReLU(), b)


def test_a_shared_weight_counts_once() -> None:
    report = fxmask.explain(fxmask.apply(shared(), ratio=0.75))
    assert (report.summary["weight elements in linears"], report.summary["of them in kept blocks"]) == (1024, 256)
    assert len(report.rows) == 2


def test_a_shared_weight_that_one_layer_reads_whole_is_whole() -> None:
    report = fxmask.explain(fxmask.apply(shared(), ratio=0.75, exclude="2"))
    assert [row["masked"] for row in report.rows] == [True, False]
    assert (report.summary["weight elements in linears"], report.summary["of them in kept blocks"]) == (1024, 1024)


def test_no_linear_at_all() -> None:
    assert fxmask.explain(nn.ReLU()).summary["weight elements in linears"] == 0
