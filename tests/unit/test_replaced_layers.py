"""A layer that is replaced after `apply`: what rested for it, or was said of it, is told."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxmask
from fxmask.errors import StateError

UNSEEN = "fxmask.apply has not seen it, or its masks were taken off or made permanent"

X = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


def model(*configs: object) -> nn.Sequential:
    dense = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 64))
    return fxmask.apply(dense, *configs, fxmask.BlockDropout(block=(8, 16)))  # type: ignore[arg-type]


MASKED = fxmask.WeightMask(ratio=0.5, block=(16, 16))


def test_a_thread_between_dropout_and_linear_is_no_layer_that_is_gone() -> None:
    m = model()
    other = threading.Thread(target=m[:3], args=(X,))  # up to the Dropout, and the linear is still to come
    other.start()
    other.join()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        m(X)


@pytest.mark.parametrize("configs", [(), (MASKED,)], ids=["alone", "masked"])
def test_a_dropout_whose_linear_is_gone_says_so(configs: tuple[object, ...]) -> None:
    m = model(*configs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        m(X), m(X), copy.deepcopy(m)(X), pickle.loads(pickle.dumps(m))(X)
        m.eval()(X), m(X)
    m.train()[3] = nn.Linear(64, 10)
    m(X)  # the first forward cannot know
    with pytest.warns(fxmask.FxMaskWarning, match="(?s)has not run since: nothing was dropped there.*restore"):
        m(X)
    report = fxmask.explain(m)
    rows = {r["name"]: r for r in report.rows}
    assert rows["3"]["reason"] == UNSEEN and rows["3"]["dropout"] is None
    assert any("in the model no more: 2" in note for note in report.notes) and not any("next linear does" in note for note in report.notes)
    fxmask.restore(m)
    assert type(m[2]) is nn.Dropout and not torch.equal(m(X), m(X)) and "_fxmask_pair" not in m[2].__dict__


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_and_threads_of_calls_are_no_replacement(reentrant: bool) -> None:
    m = model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            checkpoint(m, X.clone().requires_grad_(), use_reentrant=reentrant).sum().backward()  # type: ignore[union-attr]


def test_a_called_dropout_drops_nothing_and_says_so() -> None:
    m = model()
    with pytest.warns(fxmask.FxMaskWarning, match=r"Dropout\(p=0.5\) rests"):
        assert torch.equal(m[:3](X), m[:2](X)) and torch.equal(m[:3](X), m[:2](X))


def test_a_replaced_pruned_layer_is_not_called_pruned() -> None:
    m = fxmask.apply(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), fxmask.ActivationPruning(0.5, 16), exclude=())
    m[1] = nn.Linear(64, 10)
    assert [r["reason"] for r in fxmask.explain(m).rows] == ["dense; its input is saved pruned", UNSEEN]


@pytest.mark.parametrize("size", [128, 32])
def test_a_weight_of_another_size_is_an_error(size):
    """Its mask would keep as many blocks as before, which is another ratio."""
    m = fxmask.apply(nn.Sequential(nn.Linear(64, 64, bias=False)), ratio=0.5)
    m[0].weight = nn.Parameter(torch.randn(size, 64))
    with pytest.raises(StateError, match=r"(?s)expected \(64, 64\).*\(" + str(size) + r", 64\).*0\.weight"):
        m(torch.randn(2, 64))


def test_a_step_of_a_guard_whose_weight_was_replaced_is_an_error():
    """It would leave the new Parameter's masked weights unprotected, and say that they are frozen."""
    m = fxmask.apply(nn.Sequential(nn.Linear(64, 64)), ratio=0.5)
    optimiser = torch.optim.AdamW(m.parameters(), lr=0.1)
    handle = fxmask.guard(optimiser, m)
    m[0].weight = nn.Parameter(torch.randn(64, 64))
    optimiser.param_groups[0]["params"] = list(m.parameters())
    m(X).sum().backward()
    before = m[0].weight.detach().clone()
    with pytest.raises(StateError, match=r"(?s)replaced since fxmask\.guard.*0\.weight.*call remove\(\) on the guard's handle"):
        optimiser.step()
    assert torch.equal(m[0].weight, before)
    handle.remove()
    fxmask.guard(optimiser, m)
    mask = fxmask.kernels.grid.expand_mask(fxmask.masks(m)["0.weight"], (64, 64), (16, 16))
    optimiser.step()
    assert (m[0].weight[mask] != before[mask]).any()
    assert torch.equal(m[0].weight[~mask], before[~mask])


@pytest.mark.parametrize("options", [{}, dict(masked_step=True)], ids=["freeze", "masked_step"])
def test_a_layer_that_was_replaced_under_a_guard_is_missed(options):
    """As a new head is put in; told once, at the first step without the old one's gradient."""
    m = fxmask.apply(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)), ratio=0.5)
    optimiser = torch.optim.AdamW(m.parameters())
    handle = fxmask.guard(optimiser, m, **options)
    step(m, optimiser)
    m[2] = nn.Linear(64, 32)
    optimiser.add_param_group({"params": list(m[2].parameters())})
    with pytest.warns(fxmask.FxMaskWarning, match=r"(?s)masked layers were replaced since fxmask\.guard.*where: 2\.weight\n.*fxmask\.apply") as caught:
        step(m, optimiser)
    assert len(caught) == 1 and caught[0].filename == __file__
    step(m, optimiser)
    handle.remove()
    fxmask.apply(m, ratio=0.5, include="2")
    assert fxmask.guard(optimiser, m, **options).policies.keys() == {"0.weight", "1.weight", "2.weight"}
    step(m, optimiser)


def test_layers_that_are_gone_or_do_not_run_are_not_replaced():
    m = fxmask.apply(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), ratio=0.5)
    optimiser = torch.optim.AdamW(m.parameters())
    fxmask.guard(optimiser, m)
    m[3] = nn.Identity()
    step(m, optimiser)
    m[2].requires_grad_(False)
    step(m, optimiser)
    step(m[:2], optimiser)  # the others stay where they are
    m[1], m[2] = m[2].requires_grad_(True), m[1]
    step(m[2:], optimiser)


def step(model, optimiser):
    optimiser.zero_grad()
    model(X).square().mean().backward()
    optimiser.step()


def test_a_layer_that_lies_elsewhere_now_is_not_replaced():
    """A new, dense one has its old name; it waits, and has no gradient."""
    m = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(fxmask.apply(m, MASKED).parameters(), 0.1)
    fxmask.guard(optimizer, m)
    m.add_module("waiting", m[1])
    m[1] = nn.Linear(64, 64)
    m[:2](X).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_a_layer_that_was_replaced_before_the_guard_is_missed():
    """As reset_classifier and resize_token_embeddings do; a guard says it, where nothing else would."""
    m = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), nn.Linear(64, 64))
    fxmask.apply(m[0], ratio=0.5)
    fxmask.apply(m, ratio=0.5, include="1")
    m[0][1], m[1] = nn.Linear(64, 32), nn.Identity()  # what is no layer cannot be masked
    optimiser = torch.optim.AdamW(m.parameters())
    with pytest.warns(fxmask.FxMaskWarning, match=r"(?s)replaced since fxmask\.apply.*where: 0\.1\n.*include=") as caught:
        handle = fxmask.guard(optimiser, m)
    assert len(caught) == 1 and caught[0].filename == __file__
    handle.remove()
    fxmask.apply(m, ratio=0.5, include="0.1")
    fxmask.guard(optimiser, m)
    fxmask.restore(m)
    m[0][0] = nn.Linear(64, 64)
    fxmask.apply(m, ratio=0.5, include="0.1")
    fxmask.guard(torch.optim.AdamW(m.parameters()), m)


def test_real_parameters_in_a_model_of_the_meta_device():
    """As accelerate loads large models: assigned one by one, then moved."""
    with torch.device("meta"):
        m = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    fxmask.apply(m, ratio=0.5, criterion="random")
    torch.manual_seed(0)
    for layer in m:
        layer.weight, layer.bias = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64))
    dense = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    dense.load_state_dict(m.state_dict())
    fxmask.apply(dense, ratio=0.5, criterion="random")
    y = dense(X)
    assert torch.equal(m(X), y) and torch.equal(m.to("cpu")(X), y) and torch.equal(m.double().float()(X), y)


@pytest.mark.parametrize("take_off", [fxmask.restore, fxmask.finalize])
def test_a_layer_whose_masks_were_taken_off_is_not_replaced(take_off):
    m = fxmask.apply(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), MASKED)
    take_off(m[2])
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fxmask.guard(optimizer, m).remove()
    m[2] = nn.Linear(64, 64)
    with pytest.warns(fxmask.FxMaskWarning, match="masked layers were replaced"):
        fxmask.guard(torch.optim.SGD(m.parameters(), lr=0.1), m)
