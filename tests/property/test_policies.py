"""What becomes of masked weights over random shapes, blocks, ratios, rates and decays: frozen to the bit, decayed by the formula, or free."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property.often import examples
from torch import nn, optim

import fxmask
from fxmask.kernels.grid import expand_mask

CASES = st.tuples(
    st.integers(33, 48), st.integers(33, 48), st.sampled_from([(1, 1), (4, 8), (16, 16), (7, 5)]), st.floats(0.2, 0.95), st.floats(1e-4, 0.5), st.floats(0, 0.5)
)
KINDS = {"sgd": lambda p, lr, wd: optim.SGD(p, lr=lr, weight_decay=wd, momentum=0.9), "adamw": lambda p, lr, wd: optim.AdamW(p, lr=lr, weight_decay=wd)}


def layer(n, k, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(k, n))


def steps(model, optimizer, count=3):
    for i in range(count):
        x = torch.randn(4, model[0].in_features, generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        yield
        optimizer.step()


@pytest.mark.parametrize("kind", list(KINDS))
@given(CASES)
@examples(25)
def test_freeze_keeps_bits_and_decay_is_the_formula(kind, case):
    n, k, block, ratio, lr, decay = case
    for policy in ("freeze", "decay"):
        model = fxmask.apply(layer(n, k), ratio=ratio, block=block)
        optimizer = KINDS[kind](model.parameters(), lr, decay)
        fxmask.guard(optimizer, model, masked_weights=policy)
        seen = None
        for _ in steps(model, optimizer):
            w = model[0].weight.detach()
            if seen is not None:
                old, masked = seen
                expected = old[masked] if policy == "freeze" else old[masked] * (1 - lr * decay)
                assert torch.equal(w[masked], expected)
            masked = ~expand_mask(fxmask.masks(model)["0.weight"], w.shape, block)
            seen = w.clone(), masked


@pytest.mark.parametrize("kind", list(KINDS))
@given(CASES)
@examples(25)
def test_kept_weights_move_as_without_a_guard_and_free_is_no_guard(kind, case):
    n, k, block, ratio, lr, decay = case
    after = {}
    for policy in ("none", "free", "freeze", "decay"):
        model = fxmask.apply(layer(n, k), ratio=ratio, block=block, refresh=0)
        optimizer = KINDS[kind](model.parameters(), lr, decay)
        if policy != "none":
            fxmask.guard(optimizer, model, masked_weights=policy)
        for _ in steps(model, optimizer):
            pass
        after[policy] = model[0].weight.detach()
        kept = expand_mask(fxmask.masks(model)["0.weight"], after[policy].shape, block)
    assert torch.equal(after["free"], after["none"])
    for policy in ("freeze", "decay"):
        assert torch.equal(after[policy][kept], after["none"][kept])
