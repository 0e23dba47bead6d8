"""Inputs that the op before holds anyway: activation pruning saves them themselves, for nothing, and takes their kept blocks in the backward."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxmask
from fxmask.kernels import producer, prune

CONFIG = fxmask.ActivationPruning(0.5, 16)
COMPILED = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the compiler is no matter of the interpreter")


def held(call: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """(bytes of the storages that autograd holds, the result)."""
    found: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        found[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = call()
    return sum(found.values()), y


def mlp(between: nn.Module, affine: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), between, nn.Linear(64, 64), copy.deepcopy(between), nn.Linear(64, 8)).double()


def grads(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


class Attend(nn.Module):
    """What lies before the output projection of an attention."""

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (4, -1)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(x.shape)


X = torch.randn(3, 40, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
VIEWS = nn.Sequential(nn.ReLU(), nn.Unflatten(1, (40, 1)), nn.Flatten(1, 2))
HOLD = [Attend(), nn.ReLU(), nn.ReLU(inplace=True), nn.Tanh(), nn.Sigmoid(), nn.Softmax(-1), VIEWS]


@pytest.mark.parametrize("between", HOLD, ids=["attention", "relu", "relu_", "tanh", "sigmoid", "softmax", "views"])
def test_nothing_is_held_on_top_of_it(between: nn.Module) -> None:
    dense, _ = held(lambda: mlp(between)(X))
    pruned = fxmask.apply(mlp(between), fxmask.ActivationPruning(0.5, 16), exclude=())
    assert held(lambda: pruned(X))[0] < dense
    assert held_nodes(pruned(X)) == [True, True, False]  # last layer first; the first reads X, which nothing has made


def held_nodes(y: Tensor) -> list[bool]:
    """Of the pruned linears behind y whether they saved their input itself."""
    found, todo, met = [], [y.grad_fn], set()
    while todo:
        fn = todo.pop()
        if fn is None or fn in met:
            continue
        met.add(fn)
        found += [fn.held] if hasattr(fn, "held") else []
        todo += [n for n, _ in fn.next_functions]
    return found


@pytest.mark.parametrize("between", HOLD, ids=["attention", "relu", "relu_", "tanh", "sigmoid", "softmax", "views"])
@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_gradients_are_those_of_kept_blocks(between: nn.Module, noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    config = fxmask.ActivationPruning(0.5, 16, noise=noise)
    pruned = fxmask.apply(mlp(between), config, exclude=())
    torch.manual_seed(2)
    found = grads(pruned, X)
    monkeypatch.setattr(producer, "holds", lambda x: False)
    torch.manual_seed(2)
    assert all(torch.equal(a, b) for a, b in zip(found, grads(pruned, X), strict=True))
    assert not torch.equal(found[2], grads(mlp(between), X)[2])  # or nothing was pruned


def test_masked_layers_and_products_hold_nothing_on_top_either() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.linspace(0.5, 2, 64).double())

        def forward(self, x: Tensor) -> Tensor:
            return x * self.a

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), Scaled(), nn.Tanh(), nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 8)).double()

    weights = fxmask.WeightMask(ratio=0.5, block=(16, 16), backward="ste")
    pruned = fxmask.apply(model(), weights, fxmask.ActivationPruning(0.5, 16, affine=True), include=("2.a", "4", "6"))
    dense, _ = held(lambda: model()(X))
    masked, _ = held(lambda: fxmask.apply(model(), weights, include=("4", "6"))(X))
    bytes_held, y = held(lambda: pruned(X))
    index = sum(X.shape[0] * 40 * 4 // 2 * 2 for _ in range(3))  # int16 of half of the blocks of three inputs
    assert bytes_held <= masked + index and dense <= masked
    y.sum().backward()


def test_what_a_backward_calls_an_output_is_what_it_was_given() -> None:
    x = torch.randn(4, 8, 64, requires_grad=True)
    (dx,) = torch.autograd.grad(x.tanh().sum(), x, create_graph=True)
    assert hasattr(dx.grad_fn, "_saved_output") and not producer.holds(dx) and producer.holds(x.tanh())


@COMPILED
def test_compiled_and_checkpointed(monkeypatch: pytest.MonkeyPatch) -> None:
    pruned = fxmask.apply(mlp(nn.ReLU()), CONFIG, exclude=())
    want = grads(pruned, X)
    compiled = torch.compile(pruned, backend="aot_eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(want, grads(compiled, X), strict=True))
    for reentrant in (False, True):
        pruned.zero_grad()
        checkpoint(pruned, X.clone().requires_grad_(), use_reentrant=reentrant).square().sum().backward()  # type: ignore[union-attr]
        assert all(torch.equal(a, p.grad) for a, p in zip(want, pruned.parameters(), strict=True) if p.grad is not None)


def test_analyze_counts_what_is_held() -> None:
    for between in (nn.ReLU(), nn.GELU()):
        pruned = fxmask.apply(mlp(between), CONFIG, exclude=())
        weights = {p.untyped_storage()._cdata for p in pruned.parameters()}
        found: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            found[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()  # noqa: B023
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = pruned(X)
        want = sum(n for key, n in found.items() if key not in weights)
        assert y.requires_grad and fxmask.analyze(pruned, X).tables["footprint"][-1]["saved_activations"] == want


@pytest.mark.parametrize("turned", [False, True])
def test_values_of_are_those_of_compress(turned: bool) -> None:
    x = torch.randn(4, 24, 40).transpose(1, 2) if turned else torch.randn(4, 40, 24)
    values, index = prune.compress(x, 10, 7, turned)
    assert torch.equal(prune.values_of(x, index, 10, turned), values)


def test_holds_by_the_op_that_made_it() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    assert producer.holds(x.relu()) and producer.holds(x.relu().view(8, 4)[1:]) and producer.holds(x.exp())
    assert not producer.holds(x) and not producer.holds(x * 2) and not producer.holds(nn.functional.gelu(x)) and not producer.holds(x.detach().relu())
