"""A mask that remembers nothing is built once a step: the optimiser's step takes the one that the forward has built, where that is the mask of its gradient."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from sample_models import mlp
from torch import nn, optim

import fxmask
from fxmask.errors import FxMaskWarning
from fxmask.kernels.grid import expand_mask
from fxmask.passes.state import site_forward, site_mask

X = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch):
    """Other tests may have compiled layers like these, and then nothing that is noted is taken."""
    monkeypatch.setattr(site_forward, "_TRACED", {})


@pytest.fixture
def builds(monkeypatch):
    """The layers that a mask is built of, in order."""
    built, build = [], site_mask.build
    monkeypatch.setattr(site_mask, "build", lambda site, *args: built.append(site) or build(site, *args))
    return built


def build(masked_step=False, fused=False, stepped=True, **config):
    """A masked model, an optimiser that moves whatever it can by decay too, and its guard, which has counted a step: from then on forwards are known."""
    torch.manual_seed(0)
    model = fxmask.apply(mlp(), **{"ratio": 0.5, "block": (16, 16), **config})
    optimizer = optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5, fused=fused)
    fxmask.guard(optimizer, model, masked_step=masked_step)
    if stepped:
        backward(model)
        optimizer.step()
    return model, optimizer


def backward(model):
    model.zero_grad()
    (model(X) ** 2).sum().backward()


def masked_of(model):
    """Each masked weight's elements that its mask, as it is now, leaves out."""
    return {n: ~expand_mask(m, model.get_parameter(n).shape, (16, 16)) for n, m in fxmask.masks(model).items()}


def moved(model, optimizer):
    """Which elements a step moves."""
    before = {n: model.get_parameter(n).detach().clone() for n in fxmask.masks(model)}
    optimizer.step()
    return {n: model.get_parameter(n) != w for n, w in before.items()}


def exchange(model, values):
    """Other values, past the count of writes."""
    for n, p in model.named_parameters():
        p.data = values[n]


def flip(weight):
    """Other blocks become the largest."""
    norms = weight.unflatten(1, (-1, 16)).unflatten(0, (-1, 16)).norm(dim=(1, 3))
    return weight * torch.where(expand_mask(norms >= norms.median(), weight.shape, (16, 16)), 0.01, 10.0)


@pytest.mark.parametrize("masked_step", [False, True])
def test_a_mask_is_built_once_a_step(masked_step, builds):
    model, optimizer = build(masked_step)
    builds.clear()
    for _ in range(3):
        backward(model)
        optimizer.step()
    assert builds == 3 * [model[0], model[2]]


@pytest.mark.parametrize("stepped", [False, True], ids=["first step", "later"])
@pytest.mark.parametrize("masked_step", [False, True])
def test_a_weight_that_was_written_since_has_its_own_mask(masked_step, stepped):
    """A guard's first step warns."""
    model, optimizer = build(masked_step, stepped=stepped)
    backward(model)
    before = masked_of(model)
    with torch.no_grad():
        for n in before:
            model.get_parameter(n).copy_(flip(model.get_parameter(n)))
    now = masked_of(model)
    assert all((before[n] != now[n]).any() for n in now)
    with nullcontext() if stepped else pytest.warns(FxMaskWarning, match=r"have a gradient, .* the weights were others in the forward"):
        after = moved(model, optimizer)
    assert all(torch.equal(m, ~now[n]) for n, m in after.items())


def test_a_write_that_pytorch_does_not_count_leaves_the_mask_of_the_gradient():
    model, optimizer = build()
    backward(model)
    before = masked_of(model)
    for n in before:
        model.get_parameter(n).data.copy_(flip(model.get_parameter(n).detach()))
    assert all((before[n] != m).any() for n, m in masked_of(model).items())
    for n, m in moved(model, optimizer).items():
        assert torch.equal(m, ~before[n])


def flipped(model):
    """Values under which the masked weights have other masks."""
    masked = fxmask.masks(model)
    return {n: flip(p.detach()) if n in masked else p.detach().clone() for n, p in model.named_parameters()}


def lend(model, values, how):
    """Other values for a while, in none of the ways that PyTorch counts."""
    for n, p in model.named_parameters():
        if how == "data = other":
            p.data = values[n].clone()
        else:
            p.data.copy_(values[n])


@pytest.mark.parametrize("how", ["data = other", "data.copy_"])
@pytest.mark.parametrize("masked_step", [False, True])
def test_two_forwards_of_uncounted_weights_have_the_mask_of_the_weight(how, masked_step):
    """Sharpness-aware steps, and a teacher that borrows its student's model: the last forward is none of the weight as the step finds it."""
    model, optimizer = build(masked_step)
    backward(model)
    mine = masked_of(model)
    own = {n: p.detach().clone() for n, p in model.named_parameters()}
    lend(model, flipped(model), how)
    (model(X) ** 2).sum().detach()
    assert all((mine[n] != m).any() for n, m in masked_of(model).items())
    lend(model, own, how)
    for n, m in moved(model, optimizer).items():
        assert torch.equal(m, ~mine[n])


def test_other_data_since_the_only_forward_has_its_own_mask():
    model, optimizer = build()
    backward(model)
    before = masked_of(model)
    lend(model, flipped(model), "data = other")
    now = masked_of(model)
    assert all((before[n] != m).any() for n, m in now.items())
    for n, m in moved(model, optimizer).items():
        assert torch.equal(m, ~now[n])


def test_a_compiled_forward_after_one_that_was_noted():
    """It notes nothing, and the one that did is of other weights."""
    model, optimizer = build()
    compiled = torch.compile(model, backend="eager")
    own = {n: p.detach().clone() for n, p in model.named_parameters()}
    mine = masked_of(model)
    lend(model, flipped(model), "data.copy_")
    model(X)
    lend(model, own, "data.copy_")
    (compiled(X) ** 2).sum().backward()
    for n, m in moved(model, optimizer).items():
        assert torch.equal(m, ~mine[n])


@pytest.mark.parametrize("unseen", ["by the guard", "before a move"])
def test_a_forward_of_other_weights_after_one_that_is_not_known(unseen):
    """It is the first that is seen, and none of the gradient."""
    model, optimizer = build(stepped=unseen == "before a move")
    if unseen == "by the guard":
        model = fxmask.apply(fxmask.restore(model), ratio=0.5, block=(16, 16))
    backward(model)
    if unseen == "by the guard":
        optimizer = optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        fxmask.guard(optimizer, model)
    else:
        model.to("cpu")
    mine = masked_of(model)
    own = {n: p.detach().clone() for n, p in model.named_parameters()}
    lend(model, flipped(model), "data.copy_")
    model(X)
    lend(model, own, "data.copy_")
    for n, m in moved(model, optimizer).items():
        assert torch.equal(m, ~mine[n])


def test_what_is_noted_under_a_guard_ends_with_it():
    """Fused steps that nobody guards move the weight uncounted."""
    torch.manual_seed(0)
    model = fxmask.apply(mlp(), ratio=0.5, block=(16, 16))
    optimizer = optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5, fused=True)
    handle = fxmask.guard(optimizer, model)
    backward(model)
    handle.remove()
    optimizer.step()
    lend(model, flipped(model), "data.copy_")
    now = masked_of(model)
    fxmask.guard(optimizer, model)
    with pytest.warns(FxMaskWarning, match="the weights were others in the forward"):
        after = moved(model, optimizer)
    assert all(torch.equal(m, ~now[n]) for n, m in after.items())


@pytest.mark.parametrize("what", ["load_state_dict", "to"])
def test_parameters_are_swapped_after_a_forward(what):
    """PyTorch swaps none that has weak references."""
    model, optimizer = build()
    model(X)
    weight, state = model[0].weight, flipped(model)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        if what == "to":
            model.to(torch.float64).to(torch.float32)
        else:
            model.load_state_dict(state)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert model[0].weight is weight and (what == "to" or torch.equal(weight, state["0.weight"]))
    model.zero_grad()
    (model(X) ** 2).sum().backward()
    mine = masked_of(model)
    for n, m in moved(model, optimizer).items():
        assert torch.equal(m, ~mine[n])


@pytest.mark.parametrize("masked_step", [False, True])
def test_a_second_step_on_one_backward_has_the_mask_of_what_the_first_has_left(masked_step):
    """A fused step is one that PyTorch does not count as a write."""
    model, optimizer = build(masked_step, fused=True)
    backward(model)
    first = masked_of(model)
    optimizer.step()
    assert model[0]._fxmask_forward is model[2]._fxmask_forward is None
    for n in first:
        model.get_parameter(n).data.copy_(flip(model.get_parameter(n).detach()))  # and so that the mask is another one for sure
    now = masked_of(model)
    assert all((first[n] != now[n]).any() for n in now)
    for n, m in moved(model, optimizer).items():
        assert torch.equal(m, ~now[n])


@pytest.mark.parametrize(
    "config",
    [dict(schedule=fxmask.Schedule("linear", steps=10)), dict(phases={6: dict(criterion="linf")})],
    ids=["ratio", "criterion"],
)
def test_what_moves_a_mask_between_forward_and_step_is_in_force(config):
    later, its_optimizer = build(**config)
    model, optimizer = build(**config)
    for m, o, steps in ((later, its_optimizer, 8), (model, optimizer, 3)):
        for _ in range(steps):
            backward(m)
            o.step()
    with torch.no_grad():  # norms that disagree: many small elements in half of the blocks, few large ones in the others
        model[2].weight.uniform_(0.01, 0.1)[:, 48:].mul_(torch.where(torch.arange(48) % 16 == 0, 2, 1e-3))
    backward(model)
    before = masked_of(model)
    fxmask.load_state_dict(model, fxmask.state_dict(later))
    now = masked_of(model)
    assert any((now[n] != before[n]).any() for n in now)
    for n, m in moved(model, optimizer).items():
        assert torch.equal(m, ~now[n])


def test_a_model_that_has_moved_has_no_mask_of_before():
    model, _ = build()
    backward(model)
    assert model[0]._fxmask_forward
    model.to("meta")
    assert not model[0]._fxmask_forward and not model[2]._fxmask_forward


@pytest.mark.parametrize("other", ["eval", "eval of averages", "no_grad", "functional_call", "copy"])
def test_forwards_that_make_no_gradient_change_nothing(other):
    """Of an evaluation, of other weights, of a copy: between a backward and its step."""
    model, optimizer = build()
    backward(model)
    mine = masked_of(model)
    averages = flipped(model)
    if other in ("eval", "eval of averages", "no_grad"):
        own = {n: p.data for n, p in model.named_parameters()}
        if other != "eval":
            exchange(model, averages)  # as averages of weights are lent to a model
        model.train(other == "no_grad")
        with torch.set_grad_enabled(other != "no_grad"):
            model(X)
        model.train()
        exchange(model, own)
    elif other == "functional_call":
        others = {n: nn.Parameter(p) for n, p in averages.items()}
        for n, p in model.named_parameters():
            torch._C._autograd._unsafe_set_version_counter((others[n],), (p._version,))  # only the weight itself tells them apart
        torch.func.functional_call(model, others, (X,))
    else:
        twin = copy.deepcopy(model)
        twin.load_state_dict(averages, strict=False)
        twin.train()(X)
    for n, m in moved(model, optimizer).items():
        assert torch.equal(m, ~mine[n])


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_between_forward_and_step(how):
    model, _ = build()
    backward(model)
    twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert all(torch.equal(a, b) for a, b in zip(fxmask.masks(model).values(), fxmask.masks(twin).values(), strict=True))
    optimizer = optim.SGD(twin.parameters(), lr=0.1)
    fxmask.guard(optimizer, twin)
    backward(twin)
    mine = masked_of(twin)
    for n, m in moved(twin, optimizer).items():
        assert not m[mine[n]].any() and m.any()


def test_nothing_is_remembered_without_a_guard():
    model = fxmask.apply(mlp(), ratio=0.5, block=(16, 16))
    backward(model)
    assert not model[0]._fxmask_forward and not model[2]._fxmask_forward


def test_masks_of_a_transform_are_not_kept():
    """What a transform of torch.func or a capture has built has no values when it is over."""
    model, optimizer = build()
    torch.func.grad(lambda x: (model(x) ** 2).sum())(X)
    assert not model[0]._fxmask_forward and not model[2]._fxmask_forward
    backward(model)
    mine = masked_of(model)
    torch.func.vmap(lambda x: model(x[None])[0])(X)
    for n, m in moved(model, optimizer).items():
        assert torch.equal(m, ~mine[n])


@pytest.mark.parametrize("captured", ["forward", "step"])
def test_what_a_capture_builds_is_its_own(captured, builds, monkeypatch):
    """A mask that is captured has no values yet, and one that is made outside is not made again by the graph."""
    model, optimizer = build()
    builds.clear()
    for part, of in (("forward", backward), ("step", lambda _: optimizer.step())):
        with monkeypatch.context() as m:
            m.setattr(site_forward, "capturing", lambda t, now=part == captured: now)
            of(model)
    assert builds == 2 * [model[0], model[2]]
