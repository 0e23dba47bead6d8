"""The bits of tensors, in transforms that have a rule for `view(dtype)` and in those that have none."""

import pytest
import torch

from fxmask.kernels.bits import _Bits, bits_as

X = torch.tensor([[0.0, -0.0, 1.5, -3.0], [float("inf"), float("nan"), 1e-45, 2.0]])


@pytest.mark.parametrize("x", [X, X.half(), X.double()], ids=lambda x: str(x.dtype))
def test_the_bits_are_those_of_view(x):
    dtype = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    for way in (bits_as, _Bits.apply):  # the second is what the first falls back to
        assert torch.equal(way(x, dtype), x.view(dtype))
        for axis in (0, 1):
            assert torch.equal(torch.vmap(lambda v, way=way: way(v, dtype), axis)(x), x.view(dtype).movedim(axis, 0))
        assert torch.equal(torch.vmap(torch.vmap(lambda v, way=way: way(v, dtype)))(x), x.view(dtype))


def test_no_gradient_is_asked_of_them():
    seen = bits_as(X.clone().requires_grad_() * 2, torch.int32)
    assert not seen.requires_grad and torch.equal(seen, (X * 2).view(torch.int32))


def test_another_size_is_an_error():
    with pytest.raises(RuntimeError):
        bits_as(torch.zeros(3), torch.int64)
