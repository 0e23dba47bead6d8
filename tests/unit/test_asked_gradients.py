"""A backward makes the gradients that somebody looks at, as a Linear's does: `torch.autograd.grad` names them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fxmask

MASK = {"ratio": 0.5, "block": (16, 16)}
CONFIGS = {
    **{mode: (fxmask.WeightMask(**MASK, backward=mode),) for mode in ("masked", "ste", "unmasked")},
    "rigl": (fxmask.WeightMask(**MASK, backward="rigl", dense_every=2, refresh=2),),
    "pruned": (fxmask.ActivationPruning(0.5, 8),),
    "both": (fxmask.WeightMask(**MASK), fxmask.ActivationPruning(0.5, 8)),
    "dropped": (fxmask.BlockDropout(0.5, (8, 16)),),
}
BY_W = ("masked_linear_dw", "masked_linear_backward", "pruned_dw", "dropped_dw")
BY_X = ("masked_linear_dx", "masked_linear_backward", "dropped_dx")


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fxmask":
            self.seen.append(func._schema.name.removeprefix("fxmask::"))
        return func(*args, **(kwargs or {}))


def model_of(configs):
    torch.manual_seed(0)
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 32)), *configs)
    if configs is CONFIGS["rigl"]:
        fxmask.step(model, 1)  # between two dense gradients
    return model, torch.randn(8, 64, requires_grad=True)


def loss_of(model, x):
    torch.manual_seed(1)  # block dropout draws
    return model(x).square().sum()


@pytest.fixture(params=CONFIGS)
def made(request):
    return model_of(CONFIGS[request.param])


def test_a_gradient_by_the_input_makes_none_of_weights(made):
    model, x = made
    whole = torch.autograd.grad(loss_of(model, x), [x, *model.parameters()])
    with Ops() as ops:
        (gx,) = torch.autograd.grad(loss_of(model, x), x)
    assert not set(ops.seen) & set(BY_W) and torch.allclose(gx, whole[0], rtol=1e-5, atol=1e-6) and gx.any()


def test_a_gradient_by_the_last_weight_makes_none_of_its_input(made):
    model, x = made
    whole = torch.autograd.grad(loss_of(model, x), [x, *model.parameters()])
    with Ops() as ops:
        (gw,) = torch.autograd.grad(loss_of(model, x), model[2].weight)
    assert not set(ops.seen) & set(BY_X) and torch.allclose(gw, whole[3], rtol=1e-5, atol=1e-6) and gw.any()


def wholes(model, x):
    return torch.autograd.grad(loss_of(model, x), [x, *model.parameters()])


def by_backward(model, x):
    loss_of(model, x).backward()
    return [t.grad for t in (x, *model.parameters())]


def by_named_backward(model, x):
    tensors = [x, *model.parameters()]
    loss = loss_of(model, x)
    for tensor in tensors:
        loss.backward(inputs=[tensor], retain_graph=True)
    return [t.grad for t in tensors]


def one_by_one(model, x):
    return [torch.autograd.grad(loss_of(model, x), tensor)[0] for tensor in (x, *model.parameters())]


def from_one_graph(model, x):
    loss = loss_of(model, x)
    return [torch.autograd.grad(loss, tensor, retain_graph=True)[0] for tensor in (x, *model.parameters())]


def batched(model, x):
    loss = loss_of(model, x)
    return [g[1] / 2 for g in torch.autograd.grad(loss, [x, *model.parameters()], torch.tensor([1.0, 2.0]), is_grads_batched=True)]


def checkpointed(reentrant):
    def gradients(model, x):
        torch.manual_seed(1)
        checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
        return [t.grad for t in (x, *model.parameters())]

    return gradients


WAYS = {
    "backward": by_backward, "backward of inputs": by_named_backward, "one by one": one_by_one, "from one graph": from_one_graph,
    "checkpoint": checkpointed(False), "reentrant": checkpointed(True),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_what_is_asked_for_is_there(made, way):
    model, x = made
    wanted = wholes(model, x)
    found = WAYS[way](model, x)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_gradients_that_are_batched_are_there():
    model, x = model_of(CONFIGS["masked"])
    for a, b in zip(batched(model, x), wholes(model, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


class Doubled(nn.Module):
    def forward(self, w):
        return 2 * w


@pytest.mark.parametrize("mode", ["masked", "ste", "unmasked"])
def test_a_weight_that_is_computed_hands_its_gradient_on(mode):
    """It is no leaf, and nobody asks for its own."""
    model, x = model_of(CONFIGS[mode])
    plain = copy.deepcopy(model)
    parametrize.register_parametrization(model[2], "weight", Doubled())
    with torch.no_grad():
        model[2].parametrizations.weight.original.mul_(0.5)
    found = torch.autograd.grad(loss_of(model, x), model[2].parametrizations.weight.original)[0]
    torch.testing.assert_close(found, 2 * torch.autograd.grad(loss_of(plain, x), plain[2].weight)[0])
    with parametrize.cached():  # the same tensor, asked for itself
        own = torch.autograd.grad(loss_of(model, x), model[2].weight)[0]
    torch.testing.assert_close(own, found / 2)


@pytest.mark.parametrize("mode", ["masked", "rigl", "pruned", "dropped"])
def test_a_penalty_on_the_inputs_gradient_trains_the_weights(mode):
    model, x = model_of(CONFIGS[mode])
    (gx,) = torch.autograd.grad(loss_of(model, x), x, create_graph=True)
    gx.square().sum().backward()
    both = copy.deepcopy(model)
    both.zero_grad()
    y = x.detach().requires_grad_()
    whole = torch.autograd.grad(loss_of(both, y), [y, *both.parameters()], create_graph=True)
    whole[0].square().sum().backward()
    for a, b in zip(model.parameters(), both.parameters(), strict=True):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    assert model[0].weight.grad.any()


def test_compiled_gradients_are_there():
    model, x = model_of(CONFIGS["masked"])
    wanted = wholes(model, x)
    compiled = torch.compile(model, backend="aot_eager")
    F.mse_loss(compiled(x), torch.zeros(8, 32), reduction="sum").backward()
    for tensor, b in zip((x, *model.parameters()), wanted, strict=True):
        torch.testing.assert_close(tensor.grad, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["masked", "pruned", "dropped"])
def test_a_backward_that_is_called_by_hand_makes_all_within_another_graphs_too(name):
    model, x = model_of(CONFIGS[name])
    y = model[0](x)
    found = []

    class Calls(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            return z.clone()

        @staticmethod
        def backward(ctx, gz):
            found.extend(y.grad_fn.apply(gz)[:2])
            return gz

    z = torch.ones_like(y, requires_grad=True)
    Calls.apply(z).sum().backward()
    for a, b in zip(found, torch.autograd.grad(y.sum(), [x, model[0].weight]), strict=True):
        torch.testing.assert_close(a, b)


def test_a_leaf_that_does_not_say_is_asked_once_a_backward(monkeypatch):
    """The engine raises then, which takes as long as a small matmul."""
    torch.manual_seed(0)
    model = fxmask.apply(nn.Sequential(*[nn.Linear(32, 32) for _ in range(5)]), fxmask.WeightMask(**MASK))
    x, ask, raised = torch.randn(8, 32), torch._C._will_engine_execute_node, []

    def asking(node):
        try:
            return ask(node)
        except RuntimeError:
            raised.append(node)
            raise

    monkeypatch.setattr(torch._C, "_will_engine_execute_node", asking)
    for count in (1, 2):
        found = torch.autograd.grad(model(x).sum(), list(model.parameters()))
        assert all(g.any() for g in found) and len(raised) == count
