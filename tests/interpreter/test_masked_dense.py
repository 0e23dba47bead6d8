"""Masked-dense as `auto` runs it on a GPU: the bits of the plain form, any block and weight, by one pass of a kernel each."""

import pytest
import torch
from interpreter.trace import recording
from torch import nn

import fxmask
from fxmask.kernels import availability, dispatch, mask_cost, ops, reference
from fxmask.kernels.errors import ShapeError
from fxmask.kernels.grid import grid_shape, kept_elements
from fxmask.kernels.triton import masked_dense
from fxmask.kernels.triton.device import LAUNCHES

SHAPES = [((70, 130), (16, 16)), ((64, 64), (64, 64)), ((33, 257), (3, 5)), ((9, 200), (1, 1)), ((40, 100), (128, 32)), ((1, 7), (16, 16))]
FP16, FP32 = torch.float16, torch.float32
shapes = pytest.mark.parametrize(("shape", "block"), SHAPES)


@pytest.fixture
def hopper(monkeypatch):
    """The interpreter's CPU says that kernels run there."""
    monkeypatch.setattr(availability, "capability", lambda device: (9, 0))
    monkeypatch.setattr(availability, "_TRIED", {})


def make(shape, block, dtype=FP32):
    g = torch.Generator().manual_seed(sum(shape))
    mask = torch.rand(grid_shape(shape, block), generator=g) < 0.5
    w = torch.randn(shape, generator=g).to(dtype)
    w[:, ::3] *= -1
    if not mask.all():
        w[~reference.masked(torch.ones(shape), mask, block).bool()] = float("nan")  # what is masked is not multiplied
    return w, mask


@shapes
@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_a_weight_has_the_bits_of_the_plain_form(shape, block, dtype):
    w, mask = make(shape, block, dtype)
    LAUNCHES.clear()
    got = masked_dense.masked(w, mask, block)
    assert torch.equal(got, reference.masked(w, mask, block)) and got.is_contiguous()
    assert LAUNCHES == {"mask_cast_kernel": 1}


def test_a_transposed_weight_stays_transposed():
    w, mask = make((48, 80), (16, 32))
    w = w.t().contiguous().t()
    got = masked_dense.masked(w, mask, (16, 32))
    assert torch.equal(got, reference.masked(w, mask, (16, 32))) and got.stride() == w.stride() == (1, 48)
    w = torch.randn(96, 160)[::2, ::2]  # neither axis is contiguous
    assert torch.equal(masked_dense.masked(w, mask, (16, 32)), reference.masked(w, mask, (16, 32)))


def test_float64_and_empty_weights_are_masked_as_well():
    w, mask = make((48, 80), (16, 32), torch.float64)
    assert torch.equal(masked_dense.masked(w, mask, (16, 32)), reference.masked(w, mask, (16, 32)))
    dw = masked_dense.masked_linear_dw(torch.randn(5, 48).double(), torch.randn(5, 80).double(), mask, None, (16, 32), "masked")
    assert dw.dtype == torch.float64 and not dw[reference.masked(torch.ones(48, 80), mask, (16, 32)) == 0].any()
    assert masked_dense.masked(torch.randn(0, 16), torch.ones(0, 1, dtype=torch.bool), (16, 16)).shape == (0, 16)


@shapes
@pytest.mark.parametrize("backward", reference.MODES)
def test_products_have_the_bits_of_the_plain_form(shape, block, backward):
    (n, k), (w, mask) = shape, make(shape, block)
    if backward == "unmasked":
        w = w.nan_to_num()
    x, gy, b = torch.randn(2, 3, k), torch.randn(2, 3, n), torch.randn(n)
    for form in (masked_dense, reference):
        LAUNCHES.clear()
        dense = torch.tensor(backward == "rigl" and n % 2 == 0)
        found = (
            form.masked_linear(x, w, b, mask, block),
            form.masked_linear_dx(gy, w, mask, block, backward),
            form.masked_linear_dw(gy, x, mask, dense, block, backward),
        )
        if form is masked_dense:
            ours, launched = found, dict(LAUNCHES)
    assert all(torch.equal(a, c) and a.is_contiguous() for a, c in zip(ours, found, strict=True))
    whole = backward == "unmasked"
    assert launched == {"mask_cast_kernel": 2 - whole} | ({} if backward in ("ste", "unmasked") else {"zero_masked_kernel": 1})


@shapes
def test_zeros_are_all_that_is_written(shape, block):
    t, mask = torch.randn(shape), make(shape, block)[1]
    expected = reference.masked(t, mask, block)
    with recording() as launches:
        got = masked_dense.zero_masked(t, mask, block)
    assert got is t and torch.equal(t, expected)
    (entry,) = launches
    want = mask_cost.zero_masked(shape, block, int(kept_elements(mask, shape, block)), 4)
    assert {name: o.bytes_written for name, o in entry.operands.items() if o.bytes_written} == {k: v for k, v in want.writes.items() if v}
    assert {name: o.bytes_read for name, o in entry.operands.items() if o.bytes_read} == want.reads
    assert entry.operands["mask"].distinct_read == want.reads_min["mask"]


def test_only_contiguous_rows_are_written():
    with pytest.raises(ShapeError, match="zero_masked writes contiguous rows"):
        masked_dense.zero_masked(torch.randn(32, 16).t(), torch.ones(1, 2, dtype=torch.bool), (16, 16))
    w = torch.randn(32, 16).t()
    with pytest.raises(ShapeError, match="mask_cast writes contiguous rows"):
        masked_dense.mask_cast(w, torch.ones(1, 2, dtype=torch.bool), (16, 16), FP32, out=w)


def test_a_mask_in_another_memory_order():
    w, mask = make((48, 80), (16, 32))
    turned, t = mask.t().contiguous().t(), torch.randn(48, 80)
    assert torch.equal(masked_dense.masked(w, turned, (16, 32)), reference.masked(w, mask, (16, 32)))
    assert torch.equal(masked_dense.zero_masked(t.clone(), turned, (16, 32)), reference.masked(t, mask, (16, 32)))


def test_a_scale_is_rounded_once():
    """By the product in float32, and not first to the dtype of the weight."""
    w, mask = make((70, 130), (16, 16), FP16)
    got = masked_dense.mask_cast(w, mask, (16, 16), FP16, scale=1 / 0.6)
    assert torch.equal(got, (reference.masked(w, mask, (16, 16)).float() * (1 / 0.6)).half())


@pytest.mark.parametrize(("runs", "expected"), [(True, masked_dense), (False, reference)])
def test_auto_on_a_gpu_is_this_form_where_kernels_run(monkeypatch, runs, expected):
    elsewhere = torch.empty(2, device="meta")  # stands for a GPU: it is no CPU
    monkeypatch.setattr(dispatch, "kernels_run", lambda device: runs)
    assert dispatch.form("auto", elsewhere) is dispatch.form(dispatch.MASKED_DENSE, elsewhere) is expected
    assert dispatch.form("reference", elsewhere) is reference and dispatch.form("auto", torch.empty(2)) is dispatch.chosen.AUTO


@pytest.mark.parametrize("backward", reference.MODES)
def test_a_layer_trains_with_the_bits_of_the_reference(hopper, backward):
    """What a Linear asks for where its kernels do not pay; second derivatives, too."""
    w, mask = make((48, 80), (16, 16))
    w, x = w.nan_to_num(), torch.randn(6, 80)
    seen = []
    for impl in (dispatch.MASKED_DENSE, "reference"):
        wanted = [t.clone().requires_grad_() for t in (x, w)]
        LAUNCHES.clear()
        y = ops.linear(wanted[0], wanted[1], None, mask, (16, 16), backward, None, impl)
        first = torch.autograd.grad(y.square().sum(), wanted, create_graph=True)
        seen.append([y, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), wanted)])
        assert bool(LAUNCHES) == (impl != "reference")
    assert all(torch.equal(a, c) for a, c in zip(*seen, strict=True))


@pytest.mark.parametrize("impl", [dispatch.MASKED_DENSE, "triton"])
@pytest.mark.parametrize("backward", reference.MODES)
def test_both_gradients_by_one_op(hopper, impl, backward):
    """As in a step that was traced on a CPU, and runs on a GPU: each one has the bits of its own op, in the layout that the trace knows."""
    w, mask = make((48, 80), (16, 16), FP16)
    w, x, flag = w.nan_to_num(), torch.randn(2, 80, 8).half().transpose(1, 2), torch.tensor(False)
    gy = torch.randn(2, 48, 8).half().transpose(1, 2)
    how = mask, 16, 16, backward, flag, impl
    dx, dw = torch.ops.fxmask.masked_linear_backward(gy, x, w, *how)
    assert torch.equal(dx, ops.masked_linear_dx(gy, w, *how)) and torch.equal(dw, ops.masked_linear_dw(gy, x, *how))
    assert dx.is_contiguous() and dw.is_contiguous()


def test_a_user_cannot_ask_for_it():
    with pytest.raises(fxmask.errors.ConfigError, match="impl"):
        fxmask.apply(nn.Sequential(nn.Linear(64, 64)), ratio=0.5, block=(16, 16), impl=dispatch.MASKED_DENSE)
