"""What the tests of activation pruning share: a model, what its ops see of an input, every gradient, and what autograd holds."""

import torch
from torch import nn

from fxmask.kernels import prune


def mlp(dtype=torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).to(dtype)


def pruned_input(x: torch.Tensor, ratio: float, block: int) -> torch.Tensor:
    turned = prune.is_turned(x, block)
    _, r, c = prune.sample_shape(x.shape, turned)
    n = prune.block_count(r, c, block)
    return prune.expand(*prune.compress(x, block, n - prune.dropped_count(n, ratio), turned), x.shape, turned)


def grads(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.detach().requires_grad_()
    model(x).square().sum().backward()
    return {"x": x.grad} | {n: p.grad for n, p in model.named_parameters()}


def saved_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """Of what a forward leaves for its backward, parameters aside, each storage once."""
    seen = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(t):
        if t.untyped_storage().data_ptr() not in own:
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(x)
    assert out is not None
    return sum(s.nbytes() for s in seen.values())
