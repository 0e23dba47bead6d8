"""Activation checkpointing: forwards that run again in the backward give the twin's gradients, and count no step."""

import functools

import pytest
import torch
from sample_models import Residual
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts
from works.twin import check, pair, results, some

import fxmask


def save_matmuls(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op == torch.ops.fxmask.masked_linear.default else CheckpointPolicy.PREFER_RECOMPUTE


HOWS = {
    "reentrant": lambda m, x: checkpoint(m, x, use_reentrant=True),
    "not-reentrant": lambda m, x: checkpoint(m, x, use_reentrant=False),
    "selective": lambda m, x: checkpoint(m, x, use_reentrant=False, context_fn=functools.partial(create_selective_checkpoint_contexts, save_matmuls)),
    "sequential": lambda m, x: checkpoint_sequential(m, 2, x, use_reentrant=False),
    "": lambda m, x: m(x),
}


class Checkpointed(nn.Module):
    """Two blocks with dropout, run again in the backward."""

    def __init__(self, how):
        super().__init__()
        self.how, self.blocks = how, nn.Sequential(Residual(0, p=0.3), Residual(1, p=0.3))
        self.runs = 0
        self.blocks[1].register_forward_pre_hook(self.count)

    def count(self, module, args):
        self.runs += 1

    def forward(self, x):
        return HOWS[self.how](self.blocks, x)


X = (3, 32, 32)


@pytest.mark.parametrize("how", HOWS)
def test_gradients(how):
    masked, twin, kept = pair(Checkpointed(how))
    twin.how = ""
    found = results(masked, masked, some(*X))
    assert masked.runs == (2 if how in ("reentrant", "not-reentrant", "selective") else 1)  # the last segment of a sequence is kept
    check(found, results(twin, twin, some(*X)), kept)


@pytest.mark.parametrize("options", [dict(refresh=2), dict(backward="rigl"), dict(schedule=fxmask.Schedule(steps=5)), dict(criterion="random")], ids=str)
@pytest.mark.parametrize("how", [pytest.param("reentrant", marks=pytest.mark.slow), "not-reentrant"])
def test_a_second_forward_counts_no_step(how, options):
    """Three guarded steps end with the weights of three steps without checkpoints, to the bit."""
    ends = []
    for h in (how, ""):
        model = fxmask.apply(Checkpointed(h), ratio=0.75, impl="reference", **options)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        fxmask.guard(optimizer, model)
        for seed in range(3):
            optimizer.zero_grad()
            results(model, model, some(*X, seed=seed), seed)
            optimizer.step()
        assert {row["step"] for row in fxmask.explain(model).rows} == {3}
        ends.append(model.state_dict())
    assert all(torch.equal(a, ends[1][name]) for name, a in ends[0].items())


@pytest.mark.parametrize("first", ["wrapped", "masked"])
def test_checkpoint_wrapper(first):
    """PyTorch's own wrapper of modules, before and after apply."""
    wrap = functools.partial(apply_activation_checkpointing, check_fn=lambda m: isinstance(m, Residual))
    model = Checkpointed("")
    if first == "wrapped":
        wrap(model)
    masked, twin, kept = pair(model)
    if first == "masked":
        wrap(masked)
    found, expected = results(masked, masked, some(*X)), results(twin, twin, some(*X))
    check(*({name.replace("_checkpoint_wrapped_module.", ""): t for name, t in named.items()} for named in (found, expected, kept)))


@pytest.mark.parametrize("how", ["not-reentrant", "selective"])
def test_compiled(how):
    masked, twin, kept = pair(Checkpointed(how))
    for m in (masked, twin):  # without dropout, whose numbers the compiler draws in another order
        m.apply(lambda c: setattr(c, "p", 0.0) if isinstance(c, nn.Dropout) else None)
        for block in m.blocks:
            block._forward_pre_hooks.clear()
    twin.how = ""
    call = torch.compile(masked, backend="aot_eager", fullgraph=True)
    check(results(call, masked, some(*X)), results(twin, twin, some(*X)), kept)
    optimizer = torch.optim.SGD(masked.parameters(), 1e-3)
    fxmask.guard(optimizer, masked)
    optimizer.step()  # no warning of layers whose masked forward never ran: it was traced
