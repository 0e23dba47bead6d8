"""Two watches by themselves: which optimiser steps have gradients of masked graphs, and which reads of W∘M were written into."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn, optim

import fxmask
from fxmask import lost_writes
from fxmask.compiler import backend_steps, backend_watch
from fxmask.compiler.backend_watch import Done
from fxmask.errors import FxMaskWarning, StateError, UnsupportedError

AROUND = "though no masked graph ran since the last one"
MASKED = Done(mask=fxmask.WeightMask(ratio=0.5))


@pytest.fixture
def weight():
    backend_steps.asked()
    backend_steps.state.told = True  # that no graph has reached it; steps of later tests are looked at, too
    return nn.Parameter(torch.randn(16, 16))


def graph(weight, done=MASKED, inputs=None, name="a"):
    return backend_watch.watch(lambda *args: None, [(name, weight, done)], [weight] if inputs is None else inputs)


def test_a_gradient_that_eager_code_adds_to(weight):
    """It is the same tensor, as after zero_grad(set_to_none=False): its version tells."""
    call, optimizer = graph(weight), optim.SGD([weight], 0.1)
    call(weight)
    weight.grad = torch.ones_like(weight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        optimizer.step()  # of the same gradient
    weight.grad.add_(1)
    with pytest.warns(FxMaskWarning, match=AROUND):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()  # of the same gradient, which was told


def test_calls_of_a_graph_that_holds_the_weight_itself(weight):
    call, optimizer = graph(weight, inputs=[]), optim.SGD([weight], 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            call()
            weight.grad = torch.ones_like(weight)
            optimizer.step()
    assert backend_watch.seen(weight) == MASKED


@pytest.mark.parametrize("inputs", [None, []], ids=["given", "held"])
def test_a_graph_that_leaves_the_weight_dense_forgets_no_other(weight, inputs):
    """Neither that one, nor by its calls what they train, nor, where `require` names what is excluded, makes it an error."""
    graph(weight)
    graph(weight, Done(dense="in exclude", required=True), inputs)(weight)
    weight.grad = torch.ones_like(weight)
    with pytest.warns(FxMaskWarning, match=AROUND):
        optim.SGD([weight], 0.1).step()


def test_a_graph_that_only_prunes_inputs_is_missed_as_one_that_masks(weight):
    graph(weight, Done(activations="0.5 in blocks of 16"))
    weight.grad = torch.ones_like(weight)
    with pytest.warns(FxMaskWarning, match=AROUND):
        optim.SGD([weight], 0.1).step()


def test_one_weight_that_require_wants_refuses_the_step_and_comes_first(weight):
    wanted = nn.Parameter(torch.ones(16, 16))
    graph(weight), graph(wanted, MASKED._replace(required=True), name="b")
    weight.grad, wanted.grad = torch.ones(16, 16), torch.ones(16, 16)
    with pytest.raises(UnsupportedError, match=f"gradients of b, a {AROUND}"):
        optim.SGD([weight, wanted], 0.1).step()


def test_a_random_mask_that_is_shared_is_told_once_for_all_graphs(weight):
    done, other = Done(mask=fxmask.WeightMask(criterion="random")), nn.Parameter(torch.randn(16, 16))
    calls = [graph(weight, done) for _ in range(2)]
    with pytest.warns(FxMaskWarning, match="share this graph and its name") as told:
        [call(other) for call in calls]
    assert len(told) == 1


def test_a_dense_graph_of_several_layers_meets_one_that_apply_has_seen():
    """A graph of a model of which a layer was replaced stays dense, that of a plain model does not."""
    layers = nn.ModuleDict({name: nn.Linear(16, 16) for name in "abc"})
    fxmask.apply(layers, ratio=0.5, block=(4, 4), exclude=["a", "b"])
    weights, new = [layers["a"].weight, layers["b"].weight], nn.Parameter(torch.randn(16, 16))
    checked = backend_watch.watch_left(lambda *args: "ran", weights, weights)
    assert checked(*weights) == checked(weights[0], new) == checked(copy.deepcopy(layers)["a"].weight, new) == "ran"
    with pytest.raises(StateError, match="meets a layer that apply has not seen"):
        checked(new, new)
    dense = backend_watch.watch(lambda *args: "ran", [("b", new, Done(dense="in exclude"))], [new])
    assert dense(weights[0]) == "ran"  # which it leaves as apply has


class Read:
    _fxmask_name, _fxmask_owned = "fc.weight", 0


def test_what_counts_writes_holds_no_memory():
    w = torch.ones(16, 16)
    counter, before = lost_writes._counter(w), w._version
    w.mul_(2)
    assert counter.numel() == 0 and counter._version == w._version == before + 1 and w.sum() == 512


def test_what_inference_mode_makes_has_no_count():
    m = Read()
    with torch.inference_mode():
        w = torch.ones(4, 4)
        assert lost_writes.look_at(m, w) is w
    lost_writes.refuse_lost_writes([m], nn.Module())


def test_a_layer_that_was_looked_at_goes():
    m = Read()
    lost_writes.look_at(m, torch.ones(4, 4))
    lost_writes.refuse_lost_writes([m], nn.Module())
    gone = weakref.ref(m)
    del m
    gc.collect()
    assert gone() is None


def test_a_forward_inside_of_another_owners_is_judged_when_that_ends():
    m, w = Read(), torch.ones(4, 4)
    lost_writes.look_at(m, w)
    m._fxmask_owned = 1
    lost_writes.refuse_lost_writes([m], nn.Module())
    w.mul_(2)
    m._fxmask_owned = 0
    with pytest.raises(UnsupportedError, match="writes into the weight of this layer"):
        lost_writes.refuse_lost_writes([m], nn.Module())
