"""Legal but unusual operands give the reference's numbers; wrong ones raise before a kernel follows them."""

import types

import pytest
import torch
import torch.nn.functional as F
from interpreter.trace import recording
from torch import nn

import fxmask
from fxmask.errors import ConfigError, ShapeError, UnsupportedError
from fxmask.kernels import lists, ops, reference
from fxmask.kernels.strides import tokens_inner
from fxmask.kernels.triton import device, launch, prune_launch, refresh
from fxmask.kernels.triton.device import LAUNCHES, aligned

torch.manual_seed(0)
X, W, GY = torch.randn(5, 64), torch.randn(40, 64), torch.randn(5, 40)
MASK, SMALL = torch.rand(3, 4) < 0.6, torch.rand(5, 8) < 0.6
LIST_TOL = 1e-4


def linear(x, w, bias, mask, block=(16, 16), impl="triton", made=None):
    return ops.masked_linear(x, w, bias, mask, *block, "masked", None, impl, made)


def turned(mask):
    """The same mask in another memory order."""
    return mask.t().contiguous().t()


BIASES = {"step": torch.randn(80)[::2], "expanded": torch.randn(1).expand(40), "one": torch.randn(1), "column": torch.randn(40, 3)[:, 1]}


@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES)
def test_bias_of_any_stride(bias):
    assert torch.allclose(linear(X, W, bias, MASK), linear(X, W, bias, MASK, impl="reference"), atol=LIST_TOL)


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("shape", [(80,), (3,), (40, 1), ()])
def test_bias_of_another_shape(shape, impl):
    with pytest.raises(ShapeError, match=r"bias: expected \(40,\)"):
        linear(X, W, torch.randn(shape), MASK, impl=impl)


def test_mask_in_another_memory_order():
    assert torch.allclose(linear(X, W, None, turned(SMALL), (8, 8)), linear(X, W, None, SMALL, (8, 8), "reference"), atol=LIST_TOL)
    x, gy = torch.randn(3000, 64), torch.randn(3000, 40)  # long enough for a split
    ours, theirs = (ops.masked_linear_dw(gy, x, m, 16, 16, "masked", None, impl) for m, impl in ((turned(MASK), "triton"), (MASK, "reference")))
    assert torch.allclose(ours, theirs, atol=1e-2)


def test_vmap_over_masks():
    masks, xs = torch.rand(5, 8, 3) < 0.6, torch.randn(3, 5, 64)
    both = [torch.vmap(lambda a, k, i=i: linear(a, W, None, k, (8, 8), i), in_dims=(0, 2))(xs, masks) for i in ("triton", "reference")]
    assert torch.allclose(*both, atol=LIST_TOL)


def test_lists_of_another_mask():
    other = ops.strip_lists(torch.ones(25, 40, dtype=torch.bool), 16, 16, "triton")
    right = ops.strip_lists(MASK, 16, 16, "triton")
    wide = torch.zeros(2 * len(right), dtype=torch.int32)
    for wrong in (other, right.long(), right[:-1], wide[::2], right.view(2, -1)):
        for call in (
            lambda wrong=wrong: linear(X, W, None, MASK, made=wrong),
            lambda wrong=wrong: ops.masked_linear_dx(GY, W, MASK, 16, 16, "masked", None, "triton", wrong),
            lambda wrong=wrong: ops.masked_linear_dw(GY, X, MASK, 16, 16, "masked", None, "triton", wrong),
        ):
            with pytest.raises(ShapeError, match="lists of a mask"):
                call()


@pytest.mark.parametrize("what", ["x", "w", "dx", "dw", "pruned dw"])
def test_rows_further_apart_than_int32_counts(what):
    """Rows 2^31 elements apart; the memory between them is never touched."""
    apart = torch.empty(2**31 + 4096, dtype=torch.half).as_strided((2, 64), (2**31, 1))
    apart.copy_(torch.randn(2, 64))
    near, mask = apart.contiguous(), torch.ones(1, 4, dtype=torch.bool)
    other = torch.randn(2, 16).half()
    if what == "x":
        calls = [linear(t, W[:16].half(), None, mask) for t in (apart, near)]
    elif what == "w":
        calls = [linear(X.half(), t, None, mask) for t in (apart, near)]
        keys = [refresh.block_keys(t, (16, 16)) for t in (apart, near)]
        assert torch.equal(*keys)
    elif what == "dx":
        calls = [ops.masked_linear_dx(GY[:, :2].half(), t, mask, 16, 16, "masked", None, "triton") for t in (apart, near)]
    elif what == "pruned dw":
        index = torch.tensor([[0, 1]], dtype=torch.int16)
        calls = [prune_launch.pruned_dw(t[None], other[None], index, (1, 2, 16)) for t in (apart, near)]
    else:
        calls = [ops.masked_linear_dw(other, t, mask, 16, 16, "masked", None, "triton") for t in (apart, near)]
    assert torch.equal(*calls)


@pytest.mark.parametrize("shape", [(2, 16, 8), (1, 2, 8)], ids=["batches", "features"])
def test_tokens_that_lie_side_by_side_further_apart_than_int32_counts(shape):
    """The batches of an input [batches, features, tokens], or its features."""
    memory = torch.empty(2**31 + 4096, dtype=torch.half)
    apart = memory.as_strided(shape, (2**31, 8, 1) if shape[0] == 2 else (2**32, 2**31, 1)).transpose(1, 2)
    apart.copy_(torch.randn(apart.shape))
    near, mask, w = apart.transpose(1, 2).contiguous().transpose(1, 2), torch.ones(1, 1, dtype=torch.bool), W[:16, : shape[1]].half()
    assert tokens_inner(apart) and torch.equal(linear(apart, w, None, mask), linear(near, w, None, mask))
    for gy, x in ((apart, near), (near, apart)):
        assert torch.equal(*(launch.sampled_matmul(*pair, mask, (16, 16)) for pair in ((gy, x), (near, near))))


def test_more_units_than_an_entry_names():
    mask = torch.zeros(1, 65_537, dtype=torch.bool)
    for call in (lambda: lists.packed(mask, (16, 16)), lambda: ops.strip_lists(mask.t(), 16, 16, "triton")):
        with pytest.raises(UnsupportedError, match="65537 units"):
            call()
    lists.packed(mask[:, 1:], (16, 16))


def test_operands_of_two_dtypes():
    for call in (lambda: linear(X.half(), W, None, MASK), lambda: launch.sampled_matmul(GY, X.half(), MASK, (16, 16))):
        with pytest.raises(UnsupportedError, match=r"operands of one dtype: expected that, got .*; cast them\.$"):
            call()


def test_operands_on_two_devices():
    """Of two GPUs a kernel would follow the other one's address."""
    far, lists_of = X.to("meta"), lists.packed(MASK, (16, 16)).to("meta")
    calls = [
        lambda: launch.list_matmul(far, W, None, MASK, (16, 16), False),
        lambda: launch.list_matmul(X, W, torch.zeros(40, device="meta"), MASK, (16, 16), False),
        lambda: launch.list_matmul(X, W, None, MASK.to("meta"), (16, 16), False),
        lambda: launch.list_matmul(X, W, None, MASK, (16, 16), False, lists=lists_of),
        lambda: launch.sampled_matmul(GY, far, MASK, (16, 16)),
        lambda: launch.sampled_matmul(GY, X, MASK.to("meta"), (16, 16)),
    ]
    for call in calls:
        with pytest.raises(ShapeError, match=r"operands on one device: .*'(cpu|meta)'.*\.to\(device\)"):
            call()


def test_bfloat16_is_refused_in_the_interpreter():
    with pytest.raises(UnsupportedError, match="bfloat16 wrongly"):
        linear(X.bfloat16(), W.bfloat16(), None, MASK)


def test_accumulating_into_another_layout():
    for out in (torch.zeros(64, 40).t(), torch.zeros(40, 60)):
        with pytest.raises(ShapeError, match="adds to `out`"):
            launch.sampled_matmul(GY, X, MASK, (16, 16), out=out)


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize(("n", "k"), [(40, 0), (0, 64)])
def test_empty_axes(n, k, impl):
    x, w = torch.randn(5, k, requires_grad=True), torch.randn(n, k, requires_grad=True)
    mask = torch.ones(-(-n // 16), -(-k // 16), dtype=torch.bool)
    y = linear(x, w, None, mask, impl=impl)
    assert y.shape == (5, n) and not y.any()
    y.sum().backward()
    assert x.grad.shape == x.shape and w.grad.shape == w.shape


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_wrong_arguments_of_the_ops():
    keep = torch.tensor(3)
    with pytest.raises(ShapeError, match="two axes"):
        ops.block_index(torch.randn(2, 40, 64), keep, keep, 16, 16, "fro", "lowest", 0, "triton")
    for bad, block in ((MASK, (8, 8)), (MASK.int(), (16, 16)), (MASK[0], (16, 16))):
        with pytest.raises(ShapeError, match="strip_lists"):
            ops.strip_lists(bad, *block, "triton")
    with pytest.raises(ConfigError, match="unknown backward"):
        ops.masked_linear(X, W, None, MASK, 16, 16, "backwards", None, "triton", None)
    with pytest.raises(UnsupportedError, match="nested"):
        ops.linear(torch.nested.nested_tensor([X, X[:2]]), W, None, MASK, (16, 16), "masked", impl="triton")


def test_lists_are_the_references_to_the_last_element():
    torch.library.opcheck(ops.strip_lists, (MASK, 16, 16, "triton"))
    assert torch.equal(refresh.strip_lists(MASK, (16, 16)), reference.strip_lists(MASK, (16, 16)))


def test_a_step_that_failed_may_be_told_again():
    model = nn.Sequential(nn.Linear(64, 64))
    fxmask.apply(model, refresh=2, impl="triton")
    fxmask.step(model, 0)
    real, weight = model[0].weight, nn.Parameter(torch.randn(64, 64, dtype=torch.complex64))
    model[0]._parameters["weight"] = weight
    for _ in range(2):
        with pytest.raises(KeyError, match="complex64"):
            fxmask.step(model, 2)
        assert fxmask.state_dict(model)["masks"]["0.weight"]["step"] == 0
    model[0]._parameters["weight"] = real
    fxmask.step(model, 2)
    assert fxmask.state_dict(model)["masks"]["0.weight"]["step"] == 2


@pytest.mark.parametrize("layout", ["rows", "tokens"])
@pytest.mark.parametrize(("n", "k"), [(40, 63), (41, 64), (41, 63)])
def test_odd_features_are_multiplied_densely(n, k, layout):
    """Rows that no 4-byte copy reaches would leave the pipeline: the result is right, and in the layout that the fake promises."""
    g = torch.Generator().manual_seed(n + k)
    x = torch.randn(2, 8, k, generator=g) if layout == "rows" else torch.randn(2, k, 8, generator=g).transpose(1, 2)
    x, w = x.half().requires_grad_(), torch.randn(n, k, generator=g).half().requires_grad_()
    mask = torch.rand(3, 4, generator=g) < 0.5
    LAUNCHES.clear()
    torch.library.opcheck(ops.masked_linear, (x, w, None, mask, 16, 16, "masked", None, "triton", None))
    y = linear(x, w, None, mask)
    assert torch.allclose(y, linear(x, w, None, mask, impl="reference"), atol=0.1)
    y.sum().backward()
    assert not LAUNCHES["sampled_matmul_kernel"] and bool(LAUNCHES["list_matmul_kernel"]) == (k % 2 == 0)


def test_rows_that_lie_badly_are_copied():
    """An odd stride over an even number of features, or a base that 16 does not divide: the kernels run, on a copy."""
    lies = {"odd": lambda t: F.pad(t, (0, 1))[:, :-1], "off": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)}
    x, w, gy = torch.randn(9, 64).half(), W.half(), torch.randn(9, 40).half()
    for lie in lies.values():
        with recording() as launches:
            y, dw = linear(lie(x), lie(w), None, MASK), launch.sampled_matmul(lie(gy), lie(x), MASK, (16, 16))
        assert torch.allclose(y, linear(x, w, None, MASK, impl="reference"), atol=0.1) and [e.kernel for e in launches].count("list_matmul_kernel") == 1
        assert torch.equal(y, linear(x, w, None, MASK)) and torch.equal(dw, launch.sampled_matmul(gy, x, MASK, (16, 16)))
        operands = {e.kernel: e.operands for e in launches}
        assert "mask_cast_kernel" not in operands and aligned(lie(x)).is_contiguous() and aligned(lie(x)).data_ptr() % 16 == 0
        for name in ("x", "w"):
            check_lies_well(operands["list_matmul_kernel"][name].tensor)
        for name in ("x", "gy"):
            check_lies_well(operands["sampled_matmul_kernel"][name].tensor)
    even = torch.randn(9, 66).half()[:, :64]
    assert aligned(even) is even


def check_lies_well(t):
    assert t.data_ptr() % 16 == 0 and t.stride(0) % 2 == 0 and t.stride(1) == 1


def test_products_and_sums_are_fused_unless_a_launch_says_otherwise():
    """Triton's default changes between versions, and with it what a kernel rounds."""

    class Kernel:
        fn, told = types.SimpleNamespace(__name__="none"), []

        def __getitem__(self, grid):
            return lambda *args, **options: self.told.append(options)

    device.launch(Kernel(), (1,), X, SIZE=4)
    device.launch(Kernel(), (1,), X, SIZE=4, enable_fp_fusion=False)
    assert Kernel.told == [{"SIZE": 4, "enable_fp_fusion": True}, {"SIZE": 4, "enable_fp_fusion": False}]
