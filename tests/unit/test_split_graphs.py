"""Traced models that torch.fx's split_module has cut into parts: masked before it, or after."""

import copy

import pytest
import torch
from torch import nn
from torch.fx.passes.split_module import split_module
from unit.formed_models import X, formed

import fxmask


def split(gm, last):
    names = [n.name for n in gm.graph.nodes]
    at = names.index(next(n for n in names if n.startswith(last)))
    return split_module(gm, gm, lambda n: int(names.index(n.name) > at))


def two(form):
    return formed(form, nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)))


def of(model):
    return torch.utils._pytree.tree_leaves(model(X))[0]


@pytest.mark.parametrize("form", ["trace", "export"])
def test_a_split_of_a_masked_trace_trains_and_is_not_torn_apart(form):
    gm = fxmask.apply(two(form), ratio=0.5, block=(16, 16))
    model = split(gm, "relu" if form == "export" else "_1")
    masks, y = fxmask.masks(model), of(model)
    assert torch.equal(y, of(gm)) and len(masks) == 2
    for take_off in (fxmask.restore, fxmask.finalize):
        before = copy.deepcopy(model)
        with pytest.raises(fxmask.FxMaskError, match=r"(?s)that was split after fxmask.apply.*before it is split"):
            take_off(model)
        assert torch.equal(of(model), y) and torch.equal(of(before), y)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    handle = fxmask.guard(optimizer, model)
    old = {name: model.get_parameter(name).detach().clone() for name in handle.policies}
    of(model).square().sum().backward()
    optimizer.step()
    assert set(handle.policies.values()) == {"freeze"}
    for name, w in old.items():
        off = ~masks[name].repeat_interleave(16, 0).repeat_interleave(16, 1)
        assert torch.equal(model.get_parameter(name)[off], w[off]) and not torch.equal(model.get_parameter(name), w)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_a_guard_knows_whose_weights_the_parts_are_given(decay):
    model = fxmask.apply(split(two("export"), "relu"), ratio=0.5, block=(16, 16))
    with pytest.warns(fxmask.FxMaskWarning, match=r"weights that other parameters make \(by a parametrisation, a pruning or a graph\) cannot be guarded"):
        fxmask.guard(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=decay), model)


def test_states_of_pruned_inputs_are_those_of_the_graph_before_it_was_split():
    gm = fxmask.apply(two("export"), fxmask.ActivationPruning(0.5, 16, schedule=fxmask.Schedule("linear", steps=4)))
    fxmask.step(gm, 0)
    state = fxmask.state_dict(gm)
    model = split(gm, "relu")
    assert fxmask.state_dict(model) == state and set(state["pruning"]) == {"0", "2"}


@pytest.mark.filterwarnings("ignore:what torch.export makes has no train:fxmask.FxMaskWarning")
@pytest.mark.parametrize("config", [fxmask.ActivationPruning(0.5, 16), fxmask.BlockDropout(0.5, (2, 16))], ids=["pruned", "dropped"])
def test_a_split_of_changed_inputs_is_not_torn_apart(config):
    model = split(fxmask.apply(two("export"), config), "relu")
    with pytest.raises(fxmask.FxMaskError, match=r"(?s)fxmask.restore of a traced model that was split after fxmask.apply.*before it is split"):
        fxmask.restore(model)
    of(model).sum().backward()


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")  # of PyTorch's own
@pytest.mark.parametrize("masked", [False, True])
def test_an_export_that_is_unflattened_is_named(masked):
    """So are the stages of torch.distributed.pipelining.pipeline; those that a user makes of modules are as any model."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    program = torch.export.export(fxmask.apply(model, ratio=0.5) if masked else model, (X,))
    parts = torch.export.unflatten(program)
    torch.testing.assert_close(parts(X), model(X))
    with pytest.raises(fxmask.FxMaskError, match=r"(?s)guard does not look into graphs of torch\.export\.unflatten.*fix: use the model that was exported"):
        fxmask.guard(torch.optim.SGD(parts.parameters()), parts)
    with pytest.warns(fxmask.FxMaskWarning, match=r"masked nothing: its graphs are those of torch\.export\.unflatten.*before the export\.$"):
        fxmask.apply(parts, ratio=0.5)
    assert "Graphs of torch.export.unflatten, as stages of pipelining have them, are not looked into" in str(fxmask.explain(parts))
