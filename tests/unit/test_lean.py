"""The lean autograd kernel's constants, and devices that it is not made for."""

import torch
from torch import _C

from fxmask.kernels import lean, ops


def test_what_is_switched_off_is_what_pytorch_switches_off():
    before = _C._dispatch_tls_local_exclude_set()
    with _C._AutoDispatchBelowAutograd(), _C._ExcludeDispatchKeyGuard(lean._VIEWS):
        expected = _C._dispatch_tls_local_exclude_set()
    with _C._ExcludeDispatchKeyGuard(lean._SWITCHED_OFF):
        assert _C._dispatch_tls_local_exclude_set().raw_repr() == expected.raw_repr() != before.raw_repr()


def test_a_kernel_is_the_last_where_nothing_waits_below_autograd():
    x = torch.randn(2, 3)
    assert lean._is_last(_C._dispatch_keys(x) | _C.DispatchKeySet(_C.DispatchKey.AutogradCPU))
    assert not lean._is_last(_C._dispatch_keys(x) | _C.DispatchKeySet(_C.DispatchKey.Python))


def test_other_devices_have_pytorchs_own_kernel():
    x, w = (torch.empty(shape, device="meta", requires_grad=True) for shape in ((5, 40), (24, 40)))
    mask = torch.ones(2, 3, dtype=torch.bool, device="meta")
    ops.masked_linear(x, w, None, mask, 16, 16, "masked", None, "reference").sum().backward()
    assert x.grad.shape == x.shape and w.grad.shape == w.shape
