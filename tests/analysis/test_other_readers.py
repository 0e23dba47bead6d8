"""Weights that are read by other ways than a linear call: views that somebody holds, masks that a trace was given, ops that fill zeros or move them."""

import pytest
import torch
from analysis.counted import Apply, analyze
from analysis.unchanged import unchanged
from torch import nn

TOKENS = 24
DENSE = 2 * TOKENS * 48 * 64


def tokens():
    return torch.randn(TOKENS, 64, requires_grad=True)


def of_phases(report, name="flop"):
    return tuple(report.summary[name].get(phase, 0) for phase in ("fwd", "bwd_dx", "bwd_dw"))


# ---- views that somebody holds -------------------------------------------------------------------------------------------------------------------------


class Held(nn.Module):
    """A view of the weight that was made before: an attribute, in a list, or in a closure."""

    def __init__(self, where, made):
        super().__init__()
        self.fc = nn.Linear(64, 48, bias=False)
        view = made(self.fc.weight)
        if where == "attribute":
            self.view = view
        elif where == "list":
            self.views = [view]
        self.find = {"attribute": lambda: self.view, "list": lambda: self.views[0], "closure": lambda: view}[where]

    def forward(self, x):
        return x @ self.find()


@pytest.mark.parametrize("where", ["attribute", "list", "closure"])
@pytest.mark.parametrize("had", [None, 1.0])
def test_a_view_of_a_weight_that_somebody_holds(where, had):
    """Its gradient is the weight's, which stays what it was; no op is unknown for being given a real tensor."""
    model, x = Held(where, lambda w: w.t()), tokens()
    model.fc.weight.grad = had and torch.full((48, 64), had)
    unchanged(model, lambda: analyze(model, x))
    report = analyze(model, x)
    assert of_phases(report) == (DENSE,) * 3 and not report.tables["coverage"]
    assert [r["op"] for r in report.tables["nodes"] if r["phase"] == "opt"] == ["optim.adamw"], "it is trained"
    made = [r["module"] for r in report.tables["modules"] if r["params"]]
    assert made == ["(model)", "fc"] and (model.fc.weight.grad is None) == (had is None)


def test_a_view_without_a_gradient_and_one_on_the_meta_device():
    report = analyze(Held("attribute", lambda w: w.detach().t()), tokens())
    assert of_phases(report) == (DENSE, DENSE, 0) and not report.tables["coverage"]
    with torch.device("meta"):
        model = Held("attribute", lambda w: w.t())
    assert of_phases(analyze(model, tokens())) == (DENSE,) * 3


def test_what_is_made_of_another_models_weight_leaves_no_gradient_there():
    other = nn.Linear(64, 48)
    twice = (other.weight * 2).t()
    assert sum(of_phases(analyze(Apply(lambda x: x @ twice), tokens()))) == 3 * DENSE and other.weight.grad is None
