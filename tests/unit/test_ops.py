"""The custom ops as PyTorch sees them: schemas, gradients, autocast, transforms, FLOP counts, messages."""

import re

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.utils.flop_counter import FlopCounterMode

from fxmask.errors import ConfigError, ShapeError, UnsupportedError
from fxmask.kernels import dispatch, lists, ops, reference
from fxmask.kernels.cpu import chosen
from fxmask.kernels.grid import kept_elements
from fxmask.kernels.score import CRITERIA
from fxmask.kernels.strides import are_tokens_inner

BLOCK = (16, 8)
FLAGS = {"masked": [None], "ste": [None], "unmasked": [None], "rigl": [torch.tensor(False), torch.tensor(True)]}
CASES = [pytest.param(m, f, id=m + ("" if f is None else f"-{bool(f)}")) for m, flags in FLAGS.items() for f in flags]


@pytest.fixture
def tensors():
    """x, w, bias, gy and mask in float64."""
    g = torch.Generator().manual_seed(0)

    def make(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()

    return make(2, 5, 30), make(20, 30), make(20), make(2, 5, 20), torch.rand(2, 4, generator=g) < 0.5


@pytest.mark.parametrize(("mode", "flag"), CASES)
def test_opcheck(tensors, mode, flag):
    x, w, b, gy, mask = tensors
    torch.library.opcheck(ops.masked_linear, (x, w, b, mask, *BLOCK, mode, flag))
    torch.library.opcheck(ops.masked_linear, (x, w, None, mask, *BLOCK, mode, flag))
    torch.library.opcheck(ops.masked_linear, (x[0, 0].detach().requires_grad_(), w, None, mask, *BLOCK, mode, flag))
    torch.library.opcheck(ops.masked_linear_dx, (gy, w, mask, *BLOCK, mode))
    torch.library.opcheck(ops.masked_linear_dw, (gy, x, mask, *BLOCK, mode, flag))


@pytest.mark.parametrize("criterion", CRITERIA)
def test_opcheck_block_index(tensors, criterion):
    w = tensors[1]
    torch.library.opcheck(ops.block_index, (w, torch.tensor(3), torch.tensor(0), *BLOCK, criterion, "lowest", 7))


@pytest.mark.parametrize("bias", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["bias", "no-bias"])
def test_masked_is_a_true_gradient_twice(tensors, bias):
    x, w, b, _, mask = tensors
    inputs = (x, w, b) if bias else (x, w)

    def f(x, w, b=None):
        return ops.masked_linear(x, w, b, mask, *BLOCK, "masked")

    assert torch.autograd.gradcheck(f, inputs)
    assert torch.autograd.gradgradcheck(f, inputs)


def test_unmasked_and_ste_are_true_only_where_they_claim_to_be(tensors):
    x, w, b, gy, mask = tensors
    y = ops.masked_linear(x, w, b, mask, *BLOCK, "ste")
    assert torch.autograd.gradcheck(lambda x, b: ops.masked_linear(x, w.detach(), b, mask, *BLOCK, "ste"), (x, b))
    assert torch.autograd.gradcheck(lambda b: ops.masked_linear(x.detach(), w.detach(), b, mask, *BLOCK, "unmasked"), (b,))
    (dw,) = torch.autograd.grad(y, w, gy)
    assert torch.allclose(dw, gy.flatten(0, 1).T @ x.flatten(0, 1))


@pytest.mark.parametrize(("mode", "flag"), CASES)
def test_second_derivatives_follow_the_mode(tensors, mode, flag):
    """dX and dW are bilinear: their own gradients equal those of the aten form with the same straight-through rule."""
    x, w, b, gy, mask = tensors
    masked_w = reference.masked(w, mask, BLOCK)
    ggx, ggw = torch.randn_like(x), torch.randn_like(w)
    dx = ops.masked_linear_dx(gy, w, mask, *BLOCK, mode)
    got = torch.autograd.grad(dx, (gy, w), ggx)
    reached = w if mode == "unmasked" else masked_w
    wanted = reference.gradient_mask(mask, None, mode)
    dense = gy.flatten(0, 1).T @ ggx.flatten(0, 1)
    assert torch.allclose(got[0], ggx @ reached.T)
    assert torch.allclose(got[1], dense if wanted is None else reference.masked(dense, wanted, BLOCK))
    dw = ops.masked_linear_dw(gy, x, mask, *BLOCK, mode, flag)
    wanted = reference.gradient_mask(mask, flag, mode)
    seen = ggw if wanted is None else reference.masked(ggw, wanted, BLOCK)
    got = torch.autograd.grad(dw, (gy, x), ggw)
    assert torch.allclose(got[0], x @ seen.T)
    assert torch.allclose(got[1], gy @ seen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["masked", "unmasked"])
def test_autocast_follows_the_ambient_dtype(tensors, dtype, mode):
    x, w, b, _, mask = (t.detach().float().requires_grad_() if t.is_floating_point() else t for t in tensors)
    with torch.autocast("cpu", dtype):
        y = ops.linear(x, w, b, mask, BLOCK, mode)
        dense = torch.nn.functional.linear(x, torch.where(reference.expand_mask(mask, w.shape, BLOCK), w, 0), b)
    assert y.dtype == dense.dtype == dtype
    assert torch.equal(y, dense)
    y.float().square().sum().backward()
    assert x.grad.dtype == w.grad.dtype == b.grad.dtype == torch.float32
    with torch.autocast("cpu", dtype):  # a backward inside the region
        ops.linear(x, w, b, mask, BLOCK, mode).sum().backward()
    compiled = torch.compile(ops.linear, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype):
        assert torch.equal(compiled(x, w, b, mask, BLOCK, mode), y)


def test_vmap_of_the_ops(tensors):
    x, w, b, gy, mask = (t.detach() for t in tensors)
    out = torch.vmap(lambda x: ops.masked_linear(x, w, b, mask, *BLOCK, "masked", None))(x)
    assert torch.equal(out, ops.masked_linear(x, w, b, mask, *BLOCK, "masked"))
    ws = torch.stack([w, w * torch.linspace(0.01, 3, 30)])
    out = torch.vmap(lambda w, x: ops.masked_linear(x, w, b, mask, *BLOCK, "masked", None))(ws, x)
    assert torch.equal(out[1], ops.masked_linear(x[1], ws[1], b, mask, *BLOCK, "masked"))
    out = torch.vmap(lambda g, x: ops.masked_linear_dw(g, x, mask, *BLOCK, "masked", None), in_dims=(1, 1))(gy, x)
    assert torch.equal(out[2], ops.masked_linear_dw(gy[:, 2], x[:, 2], mask, *BLOCK, "masked"))
    out = torch.vmap(lambda g: ops.masked_linear_dx(g, w, mask, *BLOCK, "masked"), in_dims=1)(gy)
    assert torch.equal(out[3], ops.masked_linear_dx(gy[:, 3], w, mask, *BLOCK, "masked"))
    out = torch.vmap(lambda w: ops.block_index(w, torch.tensor(3), torch.tensor(0), *BLOCK, "fro", "lowest", 0))(ws)
    assert not torch.equal(out[0], out[1])
    for i in range(2):
        assert torch.equal(out[i], ops.block_index(ws[i], torch.tensor(3), torch.tensor(0), *BLOCK, "fro", "lowest", 0))


def test_vmap_over_no_weights_is_empty(tensors):
    x, w, b, gy, mask = (t.detach() for t in tensors)
    no_w, no_mask, no_gy = (t.new_zeros(t.shape[0], 0, *t.shape[1:]) for t in (w, mask, gy))
    assert torch.vmap(lambda w: ops.masked_linear(x, w, b, mask, *BLOCK, "masked"), in_dims=1)(no_w).shape == (0, *gy.shape)
    assert torch.vmap(lambda g: ops.masked_linear_dw(g, x, mask, *BLOCK, "masked"), in_dims=1)(no_gy).shape == (0, *w.shape)
    both = torch.vmap(lambda g, w: torch.ops.fxmask.masked_linear_backward(g, x, w, mask, *BLOCK, "masked"), in_dims=1)(no_gy, no_w)
    assert [t.shape for t in both] == [(0, *x.shape), (0, *w.shape)]
    found = torch.vmap(lambda w: ops.block_index(w, torch.tensor(3), torch.tensor(0), *BLOCK, "fro", "lowest", 0), in_dims=1)(no_w)
    assert (found.shape, found.dtype) == ((0, *mask.shape), torch.bool)
    assert torch.vmap(lambda m: ops.strip_lists(m, 16, 16), in_dims=1)(no_mask).shape == (0, len(ops.strip_lists(mask, 16, 16)))


@pytest.mark.parametrize(("mode", "flag"), CASES)
def test_function_transforms_are_right_and_never_zero(tensors, mode, flag):
    x, w, b, gy, mask = (t.detach() for t in tensors)

    def f(x, w, b):
        return ops.linear(x, w, b, mask, BLOCK, mode, flag)

    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    f(*leaves).backward(gy)
    grads = torch.func.vjp(f, x, w, b)[1](gy)
    assert all(torch.allclose(a, t.grad) for a, t in zip(grads, leaves, strict=True))
    per_sample = torch.vmap(torch.func.grad(lambda w, x, g: (f(x, w, b) * g).sum()), in_dims=(None, 0, 0))(w, x, gy)
    assert torch.allclose(per_sample.sum(0), leaves[1].grad)
    directions = [torch.randn_like(t) for t in (x, w, b)]
    tangent = torch.func.jvp(f, (x, w, b), tuple(directions))[1]
    pairing = sum((d * t.grad).sum() for d, t in zip(directions, leaves, strict=True))
    assert torch.allclose((tangent * gy).sum(), pairing)  # <gy, J v> = <J^T gy, v>
    with forward_ad.dual_level():
        dual = f(*(forward_ad.make_dual(t, d) for t, d in zip((x, w, b), directions, strict=True)))
        assert torch.allclose(forward_ad.unpack_dual(dual).tangent, tangent)


@pytest.mark.parametrize(("mode", "flag"), CASES)
def test_flops_are_the_useful_ones(tensors, mode, flag):
    x, w, b, gy, mask = tensors
    kept = int(kept_elements(mask, w.shape, BLOCK))
    dense_dw = mode in ("ste", "unmasked") or (flag is not None and bool(flag))
    with FlopCounterMode(display=False) as counter:
        ops.linear(x, w, b, mask, BLOCK, mode, flag).backward(gy)
    counts = {str(k): v for k, v in counter.get_flop_counts()["Global"].items()}
    tokens = 10
    dx, dw = 2 * tokens * (w.numel() if mode == "unmasked" else kept), 2 * tokens * (w.numel() if dense_dw else kept)
    if mode in ("masked", "rigl"):  # on a CPU, one op for both
        assert counts == {"fxmask.masked_linear": 2 * tokens * kept, "fxmask.masked_linear_backward": dx + dw}  # the bodies are not counted again
    else:
        assert counts == {"fxmask.masked_linear": 2 * tokens * kept, "fxmask.masked_linear_dx": dx, "fxmask.masked_linear_dw": dw}


def test_flops_of_a_meta_mask_are_the_upper_bound():
    x, w, mask = torch.empty(10, 30, device="meta"), torch.empty(20, 30, device="meta"), torch.ones(2, 4, dtype=torch.bool, device="meta")
    with FlopCounterMode(display=False) as counter:
        ops.linear(x, w, None, mask, BLOCK, "masked")
    assert counter.get_total_flops() == 2 * 10 * 20 * 30


def test_flops_of_a_mask_that_is_a_parameter(tensors):
    x, w, _, _, mask = tensors
    with FlopCounterMode(display=False) as counter:
        ops.linear(x, w, None, torch.nn.Parameter(mask, requires_grad=False), BLOCK, "masked")
    assert counter.get_total_flops() == 2 * 10 * int(kept_elements(mask, w.shape, BLOCK))


def test_nothing_is_saved_that_no_gradient_needs(tensors):
    x, w, b, _, mask = tensors
    for given, unread in (((x, w.detach()), x), ((x.detach(), w), w)):
        y = ops.masked_linear(*given, b, mask, *BLOCK, "masked")
        saved = [t.data_ptr() for t in y.grad_fn.saved_tensors if t is not None]
        assert unread.data_ptr() not in saved and len(saved) == 2  # the other one, and the mask


@pytest.mark.parametrize("impl", ["auto", "reference", "cpu"])
def test_a_bias_of_one_element_is_added_to_every_feature(tensors, impl):
    """As F.linear takes it."""
    x, w, _, gy, mask = tensors
    one = torch.tensor([3.0], dtype=torch.float64, requires_grad=True)
    y = ops.masked_linear(x, w, one, mask, *BLOCK, "masked", None, impl)
    torch.testing.assert_close(y, ops.masked_linear(x, w, None, mask, *BLOCK, "masked", None, impl) + 3)
    torch.testing.assert_close(torch.autograd.grad(y, one, gy)[0], gy.sum().reshape(1))


@pytest.mark.parametrize(("call", "text"), [
    pytest.param(lambda x, w, b, gy, m: ops.masked_linear(x[..., :5], w, b, m, *BLOCK, "masked"), "last axis of x: expected 30, got shape", id="x"),
    pytest.param(lambda x, w, b, gy, m: ops.masked_linear(x, w, b, m[:1], *BLOCK, "masked"), r"got torch.bool \(1, 4\)", id="mask"),
    pytest.param(lambda x, w, b, gy, m: ops.masked_linear(x, w, b, m.int(), *BLOCK, "masked"), r"got torch.int32 \(2, 4\)", id="mask-dtype"),
    pytest.param(lambda x, w, b, gy, m: ops.masked_linear_dx(x, w, m, *BLOCK, "masked"), "last axis of gy: expected 20, got shape", id="dx"),
    pytest.param(lambda x, w, b, gy, m: ops.masked_linear_dw(gy[:1], x, m, *BLOCK, "masked"), "tokens of gy and x: expected the same leading axes", id="dw"),
    pytest.param(lambda x, w, b, gy, m: ops.masked_linear(x.sum(), w, b, m, *BLOCK, "masked"), r"last axis of x: expected 30, got shape \(\)", id="no-axis"),
    pytest.param(lambda x, w, b, gy, m: ops.masked_linear(x, w, b[:, None], m, *BLOCK, "masked"), r"bias: expected \(20,\), .* got \(20, 1\)", id="bias"),
    pytest.param(lambda x, w, b, gy, m: ops.strip_lists(m.int(), 16, 16), "expected a mask bool", id="lists-of-ints"),
])  # fmt: skip
def test_shapes_that_do_not_fit(tensors, call, text):
    with pytest.raises(ShapeError, match=text):
        call(*tensors)


@pytest.mark.parametrize("impl", ["auto", "reference", "cpu"])
def test_a_criterion_that_nobody_knows(tensors, impl):
    with pytest.raises(ConfigError, match=f"unknown criterion: expected one of {', '.join(CRITERIA)}, got 'l3'"):
        ops.block_index(tensors[1], torch.tensor(3), torch.tensor(0), *BLOCK, "l3", "lowest", 0, impl)


def test_options_that_an_op_does_not_know(tensors):
    x, w, b, gy, mask = tensors
    fx = torch.ops.fxmask
    calls = (fx.masked_linear, (x, w, b)), (fx.masked_linear_dx, (gy, w)), (fx.masked_linear_dw, (gy, x)), (fx.masked_linear_backward, (gy, x, w))
    for op, operands in calls:
        for mode, impl, what in (("mask", "auto", "backward: expected one of masked, ste"), ("masked", "gpu", "impl: expected one of auto")):
            with pytest.raises(ConfigError, match=f"unknown {what}"):
                op(*operands, mask, *BLOCK, mode, None, impl)
    with pytest.raises(ConfigError, match="unknown ties: expected one of lowest, keep, got 'lowst'"):
        ops.block_index(w, torch.tensor(3), torch.tensor(0), *BLOCK, "fro", "lowst", 0)
    with pytest.raises(ConfigError, match="block must be two positive ints"):
        ops.block_index(w, torch.tensor(3), torch.tensor(0), 0, 8, "fro", "lowest", 0)
    with pytest.raises(ConfigError, match="block must be two positive ints"):
        ops.masked_linear(x, w, b, mask, 16, 0, "masked")


@pytest.mark.parametrize(("block", "grid", "strip"), [((64, 64), (2, 1), 128), ((16, 64), (8, 1), 64), ((64, 32), (1, 4), 128), ((64, 128), (1, 1), 64)])
def test_lists_in_strips_of_another_width(block, grid, strip):
    """Of these matrices all parts of the lists, each up to a multiple of 4, are as long in either width."""
    x, w, mask = torch.randn(3, grid[1] * block[1]), torch.randn(grid[0] * block[0], grid[1] * block[1]), torch.ones(grid, dtype=torch.bool)
    ops.masked_linear(x, w, None, mask, *block, "masked", None, "auto", lists.packed(mask, block))
    with pytest.raises(ShapeError, match="lists of a mask"):
        ops.masked_linear(x, w, None, mask, *block, "masked", None, "auto", lists.packed(mask, block, strip))


def test_autocast_leaves_float64_alone(tensors):
    x, w, b, gy, mask = tensors
    with torch.autocast("cpu", torch.bfloat16):
        found = [ops.masked_linear(x, w, b, mask, *BLOCK, "masked"), *torch.ops.fxmask.masked_linear_backward(gy, x, w, mask, *BLOCK, "masked")]
    assert [t.dtype for t in found] == [torch.float64] * 3
    assert torch.equal(found[0], ops.masked_linear(x, w, b, mask, *BLOCK, "masked"))


def test_autocast_of_both_gradients_is_that_of_each(tensors):
    x, w, _, gy, mask = (t.detach().float() if t.dtype == torch.float64 else t for t in tensors)
    how = (*BLOCK, "masked", None, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        both = torch.ops.fxmask.masked_linear_backward(gy, x, w, mask, *how)
        each = ops.masked_linear_dx(gy, w, mask, *how), ops.masked_linear_dw(gy, x, mask, *how)
    assert all(a.dtype == b.dtype == torch.bfloat16 for a, b in zip(both, each, strict=True))
    assert all(torch.allclose(a.float(), b.float(), rtol=2e-2, atol=1e-2) for a, b in zip(both, each, strict=True))


@pytest.mark.parametrize("impl", ["auto", "reference", "cpu"])
@pytest.mark.parametrize("shape", [(), (256,), (2, 16, 16)], ids=str)
def test_a_mask_is_made_of_a_matrix(shape, impl):
    """Also where a form would flatten it."""
    with pytest.raises(ShapeError, match=rf"a masked weight has two axes .* got shape {re.escape(str(shape))}"):
        ops.block_index(torch.randn(shape), torch.tensor(1), torch.tensor(0), 16, 16, "fro", "lowest", 0, impl)


@pytest.mark.parametrize("wrong", [lambda t: t[:-1], lambda t: t.long(), lambda t: t.repeat_interleave(2)[::2]], ids=["length", "dtype", "strides"])
def test_lists_that_no_kernel_could_follow(wrong):
    x, w, gy, mask = torch.randn(5, 64), torch.randn(32, 64), torch.randn(5, 32), torch.ones(2, 4, dtype=torch.bool)
    how = mask, 16, 16, "masked", None, "auto", wrong(ops.strip_lists(mask, 16, 16))
    for call, operands in ((ops.masked_linear, (x, w, None)), (ops.masked_linear_dx, (gy, w)), (ops.masked_linear_dw, (gy, x))):
        with pytest.raises(ShapeError, match=r"lists of a mask \(2, 4\) in blocks \(16, 16\): expected contiguous torch.int32"):
            call(*operands, *how)


@pytest.mark.parametrize("side", range(1, 19))
def test_lists_name_the_kept_blocks_and_none_behind_the_last_one(side):
    """A strip of 128 features has eight blocks of 16, the last one fewer: a bit for each, and the columns that any of them keeps."""
    mask = torch.rand(side, 5, generator=torch.Generator().manual_seed(side)) < 0.4
    entries, counts, _ = lists.unpack(ops.strip_lists(mask, 16, 16), (side, 5), (16, 16), False)
    named = {(8 * s + g, e & 0xFFFF) for s, n in enumerate(counts.tolist()) for e in entries[s, :n].tolist() for g in range(8) if e >> 16 >> g & 1}
    assert named == {tuple(at) for at in mask.nonzero().tolist()}


def test_what_lists_cannot_name_and_what_no_kernel_skips():
    with pytest.raises(UnsupportedError, match=r"65537 units of 16: expected at most 65536 .* use a larger block"):
        ops.strip_lists(torch.ones(1, 65537, dtype=torch.bool), 16, 16)
    assert [lists.skips(op, shape, (16, 16)) for op in ("forward", "dx", "dw") for shape in ((31, 64), (32, 63), (32, 64))] == [
        *(True, False, True), *(False, False, True), *(False, False, True)
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["nested", "sparse_coo"])
def test_triton_is_refused_for_what_no_kernel_reads(tensors, kind):
    x, w, _, _, mask = tensors
    x = torch.nested.nested_tensor([*x], layout=torch.jagged) if kind == "nested" else x[0].to_sparse()
    with pytest.raises(UnsupportedError, match=rf"impl='triton' got a {kind} tensor: expected a plain one"):
        ops.linear(x, w, None, mask, BLOCK, "masked", None, "triton")


def test_which_inputs_are_read_with_their_tokens_inside():
    """Three axes, the second one inner, in pieces of 16 bytes."""
    shape, strides = (2, 24, 10), (240, 1, 24)
    assert are_tokens_inner(shape, strides, torch.float16) and not are_tokens_inner(shape, strides, torch.float32)
    for wrong in ((244, 1, 24), (280, 1, 28), (240, 2, 24), (160, 1, 16), (240, 10, 1)):
        assert not are_tokens_inner(shape, wrong, torch.float16), wrong
    assert not are_tokens_inner((2, 20, 10), strides, torch.float16) and not are_tokens_inner((2, 1, 10), strides, torch.float16)
    for shape in ((2, 24, 1), (2, 0, 10)):  # contiguous, as any tensor of these sizes is
        assert not are_tokens_inner(shape, (shape[1] * shape[2], 1, shape[1]), torch.float16)


def test_what_an_implementation_means_on_a_device(monkeypatch):
    """Without a GPU, and for check_available as if there were one."""
    with pytest.raises(UnsupportedError, match="impl='cpu' works on CPU tensors: expected device cpu, got meta"):
        dispatch.form("cpu", torch.empty(2, device="meta"))
    assert dispatch.form("auto", torch.empty(2)) is chosen.AUTO and dispatch.form("auto", torch.empty(2, device="meta")) is reference
    devices = torch.device("cuda"), torch.device("cpu")
    assert [dispatch.runs_triton(impl, d) for impl in ("triton", "auto") for d in devices] == [True, False, False, False]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    dispatch.check_available("triton")
