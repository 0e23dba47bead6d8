"""apply that fails after masks are in place, as where memory runs out or somebody presses Ctrl-C, leaves the model as it was."""

import pytest
import torch
from sample_models import same_snapshot, snapshot
from torch import nn

import fxmask
from fxmask.passes.graphs import weight_mask
from fxmask.passes.state import rebuild

LINEARS = {"block": (8, 8), "ratio": 0.5}
INPUTS = {  # a config, and what fails at which call
    "pruning": (fxmask.ActivationPruning(0.5, 8), "fxmask.pruning.note_asked", 2),
    "dropout": (fxmask.BlockDropout(0.5, (8, 8)), "fxmask.dropping.note_asked", 2),
    "a Dropout's": (fxmask.BlockDropout(block=(8, 8)), "fxmask.dropping.FuseDropout", 1),
}


def small():
    return nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 32))


def fails(after, real=lambda *args: None):
    """A function that raises at its `after`-th call, and is `real` before."""
    left = [after]

    def call(*args):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return real(*args)

    return call


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("config", "where", "after"), INPUTS.values(), ids=INPUTS)
def test_inputs_that_were_changed_and_masks_are_undone(monkeypatch, config, where, after, masked):
    model = small()
    monkeypatch.setattr(where, fails(after))
    before = snapshot(model)
    configs = [fxmask.WeightMask(**LINEARS), config] if masked else [config]
    with pytest.raises(KeyboardInterrupt):
        fxmask.apply(model, *configs)
    assert same_snapshot(before, snapshot(model))
    monkeypatch.undo()
    fxmask.apply(model, *configs)


def test_weights_that_gain_has_scaled_are_undone(monkeypatch):
    model = small()
    monkeypatch.setattr(rebuild, "keep_norm", fails(2, rebuild.keep_norm))
    before = snapshot(model)
    with pytest.raises(KeyboardInterrupt):
        fxmask.apply(model, **LINEARS, gain=True)
    assert same_snapshot(before, snapshot(model))


def test_masks_that_were_there_before_stay(monkeypatch):
    model = fxmask.apply(small(), include="0", **LINEARS)
    masks, x = fxmask.masks(model), torch.randn(4, 32)
    y = model.eval()(x)
    monkeypatch.setattr(rebuild, "keep_norm", fails(1))
    with pytest.raises(KeyboardInterrupt):
        fxmask.apply(model, include="2", gain=True, **LINEARS)
    monkeypatch.undo()
    assert list(fxmask.masks(model)) == list(masks) == ["0.weight"]
    assert torch.equal(model(x), y)


@pytest.mark.parametrize(("where", "after"), [("_short", 2), ("replace_node", 1), ("_free_name", 2)])
def test_a_graph_that_was_rewritten_in_part_runs_as_before(monkeypatch, where, after):
    model, x = torch.fx.symbolic_trace(small().eval()), torch.randn(4, 32)
    y = model(x)
    monkeypatch.setattr(weight_mask, where, fails(after, getattr(weight_mask, where)))
    with pytest.raises(KeyboardInterrupt):
        fxmask.apply(model, backward="rigl", **LINEARS)  # whose mask comes with a flag
    monkeypatch.undo()
    model.graph.lint()
    assert [n.target for n in model.graph.nodes if n.op != "get_attr"][1:-1] == [*model._modules] == ["0", "1", "2"]
    assert torch.equal(model(x), y)
    fxmask.apply(model, **LINEARS)
