"""A copy of a guarded model has no guard; an optimiser that steps it without one is told. A guard may outlive everything else."""

import copy
import gc
import io
import linecache
import pickle
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from sample_models import mlp
from torch import optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import fxmask
from fxmask import FxMaskWarning
from fxmask.errors import UnsupportedError
from fxmask.passes.state import lost_guards, rebuild

TEXT = "this model had a guard, which has ended with its optimiser, or follows no copy and no pickle: expected a new one, got none"
FIX = r"where: 0.weight, 2.weight(.|\n)*fix: call fxmask.guard\(optimizer, model\); without one on purpose: fxmask.step\(model, 0\)"


def saved(model):
    torch.save(model, buffer := io.BytesIO())
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIERS = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "torch.save": saved, "twice": lambda m: copy.deepcopy(saved(m))}


def guarded(**options):
    torch.manual_seed(0)
    model = fxmask.apply(mlp(), ratio=0.7)
    optimiser = optim.AdamW(model.parameters(), weight_decay=0.1)
    return model, optimiser, fxmask.guard(optimiser, model, **options)


def train(model, optimiser):
    optimiser.zero_grad()
    model(torch.randn(4, 64)).square().mean().backward()
    optimiser.step()


def is_step(warning):
    """Whether it stands where the optimiser steps."""
    return warning.filename == __file__ and "optimiser.step()" in linecache.getline(__file__, warning.lineno)


@pytest.mark.parametrize("copier", COPIERS)
def test_a_step_on_a_copy_warns_once(copier):
    model, optimiser, _ = guarded()
    twin = COPIERS[copier](model)
    train(model, optimiser)  # the guarded one is no copy
    other = optim.AdamW(twin.parameters())
    with pytest.warns(FxMaskWarning, match=f"{TEXT}(.|\n)*{FIX}") as caught:
        train(twin, other)
    assert len(caught) == 1 and is_step(caught[0])
    train(twin, other)


@pytest.mark.parametrize("guards", [True, False])
def test_a_step_that_makes_an_optimisers_state_is_not_the_first(guards):
    """torch.distributed.checkpoint takes one before it loads a state, and the guard comes behind that. Any warning is an error."""
    model, optimiser, _ = guarded()
    train(model, optimiser)
    twin, state = saved(model), get_optimizer_state_dict(model, optimiser)
    other = optim.AdamW(twin.parameters())
    set_optimizer_state_dict(twin, other, state)
    if guards:
        fxmask.guard(other, twin)
        train(twin, other)
    else:
        with pytest.warns(FxMaskWarning, match=TEXT):
            train(twin, other)


@pytest.mark.parametrize("meant", ["guard", "guard and remove", "step", "free", "removed", "restore"])
def test_what_is_meant_is_not_told(meant):
    model, optimiser, handle = guarded(masked_weights="free" if meant == "free" else "auto")
    if meant == "removed":
        handle.remove()
    twin = copy.deepcopy(model)
    other = optim.AdamW(twin.parameters())
    if meant.startswith("guard"):
        new = fxmask.guard(other, twin)
        if "remove" in meant:
            new.remove()
    elif meant == "step":
        fxmask.step(twin, 0)
    elif meant == "restore":
        fxmask.restore(twin)
    train(twin, other)
    train(model, optimiser)


def test_an_average_that_no_optimiser_holds_says_nothing():
    model, optimiser, _ = guarded()
    ema = optim.swa_utils.AveragedModel(model)
    for _ in range(3):
        train(model, optimiser)
        ema.update_parameters(model)
    optim.swa_utils.update_bn([torch.randn(2, 64)], ema)
    waiting = [m for m in ema.modules() if m in lost_guards._waiting]
    assert waiting and all(m._fxmask_guard is None for m in waiting)


def test_a_guard_at_the_end_of_a_process_says_nothing():
    """PyTorch's modules are half gone by then."""
    code = "import torch, fxmask; m = fxmask.apply(torch.nn.Sequential(torch.nn.Linear(64, 64)), refresh=2); "
    code += "torch.nn.held = fxmask.guard(torch.optim.SGD(m.parameters(), 0.1), m)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_an_optimiser_made_anew_warns_once():
    """The guard has ended with the first one."""
    model, optimiser, handle = guarded()
    train(model, optimiser)
    del optimiser, handle
    gc.collect()
    other = optim.SGD(model.parameters(), 0.1)
    with pytest.warns(FxMaskWarning, match=f"{TEXT}(.|\n)*{FIX}") as caught:
        train(model, other)
    assert len(caught) == 1 and is_step(caught[0])
    train(model, other)


def test_a_copy_that_does_not_move_says_nothing():
    """A frozen backbone in an optimiser that was given all parameters."""
    model, _, _ = guarded()
    twin = copy.deepcopy(model).requires_grad_(False)
    head = torch.nn.Linear(10, 32)
    other = optim.AdamW([*twin.parameters(), *head.parameters()])
    for _ in range(2):
        other.zero_grad()
        head(twin(torch.randn(4, 64))).sum().backward()
        other.step()
    twin.requires_grad_(True)
    with pytest.warns(FxMaskWarning, match=TEXT):
        train(twin, other)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))], ids=["deepcopy", "pickle"])
def test_a_trainer_that_holds_the_handle(copier):
    """The copy's handle guards nothing, and its end takes nothing from the guard that is in force."""
    model, optimiser, handle = guarded()
    train(model, optimiser)
    trainer = copier({"model": model, "optimiser": optimiser, "handle": handle})
    assert trainer["handle"].policies == {} and trainer["handle"].optimizer() is None
    with pytest.warns(FxMaskWarning, match=TEXT):
        train(trainer["model"], trainer["optimiser"])
    trainer["handle"].remove()
    assert set(fxmask.guard(trainer["optimiser"], trainer["model"]).policies.values()) == {"freeze"}
    del trainer
    gc.collect()
    train(model, optimiser)
    assert set(handle.policies.values()) == {"freeze"} and fxmask.explain(model).rows[0]["step"] == 2


def test_processes_share_weights_and_count_for_themselves():
    """As torch.multiprocessing sends a model: its tensors lie in shared memory, where the ramps of two processes would add up to no block at all."""
    model = fxmask.apply(mlp(), ratio=0.7, schedule=fxmask.Schedule("cubic", steps=4))
    first, second = (pickle.loads(ForkingPickler.dumps(model)) for _ in range(2))
    assert first[0].weight.data_ptr() == model[0].weight.data_ptr()
    for twin in (first, second):
        optimiser = optim.SGD(twin.parameters(), 0.1)
        fxmask.guard(optimiser, twin)
        for _ in range(5):
            train(twin, optimiser)
        assert [int(m.sum()) for m in fxmask.masks(twin).values()] == [8, 8]
    assert [int(m.sum()) for m in fxmask.masks(model).values()] == [24, 24]  # nobody has counted here


def test_a_guard_of_a_model_that_is_dense_again_says_nothing():
    model, optimiser, _ = guarded()
    fxmask.restore(model)
    other = optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        train(model, other)
    assert optimiser.state == {}


def test_what_two_optimisers_share_out_and_one_takes_up_later():
    """A guard holds what its optimiser holds: first one layer, then another, which counts each step once; the third is left for another guard."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 32) for _ in range(4)]
    model = fxmask.apply(torch.nn.Sequential(*layers), ratio=0.5, block=(8, 8), refresh=3)
    first = torch.optim.SGD(layers[0].parameters(), lr=0.1)
    handle = fxmask.guard(first, model)
    for n, layer in enumerate(layers[1:3]):
        first.add_param_group({"params": list(layer.parameters())})
        first.step()
        assert list(handle.policies) == [f"{i}.weight" for i in range(n + 2)]
    assert [r["step"] for r in fxmask.explain(model).rows] == [2, 2, 1, 0]
    other = fxmask.guard(torch.optim.SGD(layers[3].parameters(), lr=0.1), model)
    assert list(other.policies) == ["3.weight"]


def test_a_layer_at_rest_that_another_guards_optimiser_takes_up():
    """The first guard counts for it while it is frozen; from then on it is the second one's, which keeps its masked weights and lets them go at its end."""
    torch.manual_seed(0)
    model = fxmask.apply(torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(3))), ratio=0.5, block=(8, 8), refresh=0)
    masked = ~fxmask.kernels.grid.expand_mask(fxmask.masks(model)["2.weight"], (32, 32), (8, 8))
    model[2].requires_grad_(False)
    first, second = (torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 1))
    handles = [fxmask.guard(o, model) for o in (first, second)]
    model[2].requires_grad_(True)
    second.add_param_group({"params": list(model[2].parameters()), "weight_decay": 0.1})
    began = model[2].weight.detach().clone()
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(4, 32)).square().sum().backward()
        first.step(), second.step()
    moved = model[2].weight != began
    assert moved[~masked].any() and not moved[masked].any()
    assert [list(h.policies) for h in handles] == [["0.weight"], ["1.weight", "2.weight"]]
    for h in handles:
        h.remove()
    assert list(fxmask.guard(torch.optim.SGD(model.parameters(), lr=0.1), model).policies) == ["0.weight", "1.weight", "2.weight"]


@pytest.mark.parametrize("order", ["first, second", "second, first"])
def test_each_step_of_a_layer_that_is_taken_up_counts_once(order):
    model = fxmask.apply(torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3))), ratio=0.5, block=(8, 8), refresh=10)
    model[2].requires_grad_(False)
    first, second = (torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 1))
    handles = [fxmask.guard(o, model) for o in (first, second)]
    for i in range(4):
        if i == 2:
            model[2].requires_grad_(True)
            second.add_param_group({"params": list(model[2].parameters())})
        model(torch.randn(4, 32)).square().sum().backward()
        for o in (first, second) if order == "first, second" else (second, first):
            o.step()
    assert [r["step"] for r in fxmask.explain(model).rows] == [4, 4, 4] and [h.steps for h in handles] == [4, 4]


def test_a_layer_at_rest_that_its_own_guards_optimiser_takes_up_counts_once():
    """Gradual unfreezing: the guard has counted for the frozen layer, and goes on as before."""
    model = fxmask.apply(torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(2))), ratio=0.5, block=(8, 8), refresh=10)
    model[1].requires_grad_(False)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    handle = fxmask.guard(optimizer, model)
    for i in range(4):
        if i == 2:
            model[1].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[1].parameters())})
        model(torch.randn(4, 32)).square().sum().backward()
        optimizer.step()
    assert [r["step"] for r in fxmask.explain(model).rows] == [4, 4] and list(handle.policies) == ["0.weight", "1.weight"]


def test_a_layer_at_rest_stays_with_the_first_guard_where_a_second_one_ends():
    model = fxmask.apply(torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3))), ratio=0.5, block=(8, 8), refresh=10)
    model[2].requires_grad_(False)
    first, second = (torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 1))
    fxmask.guard(first, model)
    fxmask.guard(second, model).remove()
    first.step()
    assert [r["step"] for r in fxmask.explain(model).rows] == [1, 0, 1]


def test_steps_that_were_told_of_a_layer_hide_none_when_it_is_taken_up():
    model = fxmask.apply(torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(2))), ratio=0.5, block=(8, 8), refresh=10)
    fxmask.step(model[1], 5)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    fxmask.guard(optimizer, model)
    optimizer.add_param_group({"params": list(model[1].parameters())})
    optimizer.step()
    assert [r["step"] for r in fxmask.explain(model).rows] == [1, 6]


def test_layers_that_take_turns_in_one_optimiser():
    """Block by block, as many parameters for as many: all are frozen and counted; other optimisers and copies are told of, too."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 32) for _ in range(2)]
    model = fxmask.apply(torch.nn.Sequential(*layers), ratio=0.5, block=(8, 8), refresh=0)
    masks = {i: fxmask.kernels.grid.expand_mask(m, (32, 32), (8, 8)) for i, m in enumerate(fxmask.masks(model).values())}
    optimizer = torch.optim.AdamW(layers[0].parameters(), lr=0.1, weight_decay=0.1)
    handle = fxmask.guard(optimizer, model)
    for i in (0, 1, 0, 1):
        optimizer.param_groups.pop()
        optimizer.add_param_group({"params": list(layers[i].parameters())})
        optimizer.zero_grad()
        model(torch.randn(4, 32)).square().sum().backward()
        before = layers[i].weight.detach().clone()
        optimizer.step()
        moved = layers[i].weight != before
        assert moved[masks[i]].any() and not moved[~masks[i]].any()
    assert list(handle.policies) == ["0.weight", "1.weight"]


@pytest.mark.parametrize("lost", [False, True], ids=["a guard on another", "a guard that is lost"])
def test_weights_that_an_optimiser_takes_in_exchange(lost):
    model = fxmask.apply(torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False)), ratio=0.5, block=(8, 8))
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    fxmask.guard(first, model)
    model = copy.deepcopy(model) if lost else model
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    other.param_groups[0]["params"][0].grad = torch.ones(3)
    other.step()
    other.param_groups.pop()
    other.add_param_group({"params": list(model.parameters())})
    model(torch.randn(4, 32)).square().sum().backward()
    with pytest.warns(fxmask.FxMaskWarning, match="this model had a guard" if lost else "whose guard is on another optimiser"):
        other.step()


def test_an_old_guard_that_is_removed_leaves_the_new_one_alone():
    model = fxmask.apply(torch.nn.Sequential(torch.nn.Linear(32, 32)), ratio=0.5, block=(8, 8), refresh=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    old = fxmask.guard(optimizer, model)
    fxmask.apply(fxmask.restore(model), ratio=0.5, block=(8, 8), refresh=2)
    new = fxmask.guard(optimizer, model)
    old.remove()
    model(torch.randn(2, 32)).sum().backward()
    optimizer.step()
    assert list(new.policies) == ["0.weight"] and fxmask.explain(model).rows[0]["step"] == 1 and old.policies == {}


def test_a_layer_that_cannot_be_taken_up_is_refused_at_every_step():
    model = fxmask.apply(torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(2))), block=(8, 8), overrides={"1": dict(backward="ste")})
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    fxmask.guard(optimizer, model, masked_weights="freeze")
    optimizer.add_param_group({"params": list(model[1].parameters())})
    model(torch.randn(2, 32)).sum().backward()
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"masked_weights='freeze' with backward='ste'(.|\n)*where: 1\.weight"):
            optimizer.step()


@pytest.mark.parametrize("options", [dict(masked_weights="freeze"), dict(masked_step=True)], ids=["freeze", "masked_step"])
def test_an_old_guard_takes_up_nothing_that_was_masked_anew(options):
    """It ended with the restore: a layer that is unfrozen after that is the new one's."""
    model = fxmask.apply(torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(2))), ratio=0.5, block=(8, 8), refresh=2)
    model[1].requires_grad_(False)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    old = fxmask.guard(optimizer, model, "free")
    fxmask.apply(fxmask.restore(model), ratio=0.5, block=(8, 8), refresh=2)
    new = fxmask.guard(optimizer, model, **options)
    model[1].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[1].parameters())})
    model(torch.randn(2, 32)).sum().backward()
    optimizer.step()
    assert new.policies == {"0.weight": "freeze", "1.weight": "freeze"} and old.policies == {}


@pytest.mark.parametrize("told", [True, False])
def test_steps_that_are_told_by_hand_want_no_new_guard(told):
    """After `restore` and `apply`, with the old guard where it was."""
    model, optimiser, _ = guarded()
    fxmask.apply(fxmask.restore(model), ratio=0.7)
    if told:
        fxmask.step(model, 0)
        train(model, optimiser)  # any warning is an error
    else:
        with pytest.warns(FxMaskWarning, match="its model is masked anew: expected a new guard, got none"):
            train(model, optimiser)


def test_a_step_that_fails_leaves_a_copy_uncounted(monkeypatch):
    model = fxmask.apply(mlp(), ratio=0.7, schedule=fxmask.Schedule("cubic", steps=4))
    fxmask.step(model, 0)
    twin = copy.deepcopy(model)
    monkeypatch.setattr(rebuild, "rebuild", lambda jobs, compute=None: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fxmask.step(twin)
    with pytest.warns(FxMaskWarning, match="evaluated at ratio 0.0, not 0.7"):
        twin.eval()(torch.randn(2, twin[0].in_features))


def test_a_guard_whose_model_is_gone_says_once_that_its_layers_are_masked_anew():
    layer = fxmask.apply(torch.nn.Linear(32, 32), ratio=0.5, block=(8, 8))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    fxmask.guard(optimizer, torch.nn.ModuleList([layer]))
    fxmask.apply(fxmask.restore(layer), ratio=0.5, block=(8, 8))
    with pytest.warns(FxMaskWarning, match="a guard ended with fxmask.restore, and its model is masked anew"):
        optimizer.step()
    fxmask.apply(mlp(), ratio=0.7)  # of another model: whoever looks for new masks looks again
    optimizer.step()
