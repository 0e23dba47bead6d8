"""Every matmul kernel against the reference, through the ops: values, gradients, launches, and no dense matmul where blocks are skipped."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fxmask.errors import UnsupportedError
from fxmask.kernels import dropout_ops, ops, reference
from fxmask.kernels.grid import grid_shape
from fxmask.kernels.lists import listed
from fxmask.kernels.triton import launch, plan, tiles
from fxmask.kernels.triton.device import LAUNCHES

MATMULS = {torch.ops.aten.matmul.default, torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default}


class Matmuls(TorchDispatchMode):
    """Counts the multiply-adds of aten matmuls, also inside of our ops."""

    def __init__(self):
        super().__init__()
        self.macs = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in MATMULS:
            a, b = [t for t in args if isinstance(t, torch.Tensor)][-2:]
            self.macs += math.prod(a.shape) * b.shape[-1]
        if func is torch.ops.aten.linear.default:  # below autograd it arrives whole
            self.macs += math.prod(args[0].shape) * args[1].shape[0]
        if func.namespace == "fxmask":
            with self:  # a mode is off while it handles an op, and would not see what the op's body calls: so the body is called
                name = func.overloadpacket.__name__
                return getattr(dropout_ops if name.startswith("dropped") else ops, name)._init_fn(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch):
    """Memory that a kernel should write holds NaN (or the largest int) before."""
    real = torch.empty

    def poisoned(*args, **kwargs):
        t = real(*args, **kwargs)
        return t.fill_(float("nan")) if t.is_floating_point() else t.fill_(True if t.dtype == torch.bool else torch.iinfo(t.dtype).max)

    monkeypatch.setattr(launch.torch, "empty", poisoned)


def error_budget(exact, low, dtype):
    """Twice the error of plain PyTorch in the same precision, and a rounding of the largest value."""
    return 2 * (low.double() - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()


def close(got, exact, low, dtype, what):
    assert got.dtype == dtype and not got.isnan().any(), what
    error = (got.double() - exact).abs().max() if exact.numel() else 0
    assert error <= (error_budget(exact, low, dtype) if exact.numel() else 0), (what, error)


SELDOM = pytest.mark.slow
SHAPES = [(37, 64, 96), (1, 100, 70), (130, 128, 192), (65, 40, 200), (16, 257, 130)]
SQUARE = [(16, 16), (32, 32), (64, 64), (128, 128)]
WIDE = [(16, 128), (128, 16), (32, 64), (64, 32)]
OTHER = [(1, 1), (1, 4), (8, 8), (3, 5), (48, 16), (2, 128)]
RATIOS = [0.0, 0.5, 0.9, 0.99]
BLOCKS = SQUARE + WIDE + OTHER
CASES = [(s, b, r) for i, s in enumerate(SHAPES) for j, b in enumerate(BLOCKS) for k, r in enumerate(RATIOS) if (i + j + k) % 3 == 0 or b in SQUARE]
DTYPES = [(torch.float32, "fp32"), (torch.float16, "fp16")]
# two of five cases, each in one of the two dtypes; all of them in both where there is time
MATRIX = [
    pytest.param(s, b, r, dtype, id="M{}-N{}-K{}-b{}x{}-r{}-{}".format(*s, *b, r, name), marks=pytest.mark.slow if (i + j) % 2 or i % 5 > 1 else ())
    for i, (s, b, r) in enumerate(CASES)
    for j, (dtype, name) in enumerate(DTYPES)
]


def make(shape, block, ratio, dtype, seed=0, contiguous=True):
    m, n, k = shape
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=g).to(dtype)
    if not contiguous:
        x = torch.randn(k, m, generator=g).to(dtype).t() if seed % 2 else torch.randn(m, k + 5, generator=g).to(dtype)[:, :k]
    w, b, gy = torch.randn(n, k, generator=g).to(dtype), torch.randn(n, generator=g).to(dtype), torch.randn(m, n, generator=g).to(dtype)
    nb, kb = grid_shape((n, k), block)
    keep = max(1, math.ceil(nb * kb * (1 - ratio)))
    mask = torch.zeros(nb * kb, dtype=torch.bool)
    mask[torch.randperm(nb * kb, generator=g)[:keep]] = True
    return x, w, b, gy, mask.reshape(nb, kb)


def run(impl, x, w, b, gy, mask, block, backward="masked", dense=None):
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    b = None if b is None else b.detach().requires_grad_()
    y = ops.masked_linear(x, w, b, mask, *block, backward, dense, impl)
    return [y.detach(), *torch.autograd.grad(y, [t for t in (x, w, b) if t is not None], gy)]


@pytest.mark.parametrize(("shape", "block", "ratio", "dtype"), MATRIX)
def test_forward_dx_dw_against_the_reference(shape, block, ratio, dtype):
    index = CASES.index((shape, block, ratio))
    x, w, b, gy, mask = make(shape, block, ratio, dtype, index, contiguous=index % 3 != 0)
    b = b if index % 2 else None
    LAUNCHES.clear()
    with Matmuls() as dense:
        got = run("triton", x, w, b, gy, mask, block)
    exact = run("reference", *(None if t is None else t.double() for t in (x, w, b, gy)), mask, block)
    low = run("reference", x, w, b, gy, mask, block)
    for what, g, e, q in zip(("y", "dx", "dw", "db"), got, exact, low, strict=False):
        close(g, e, q, dtype, what)
    if listed(block) and shape[1] % 2 == 0:
        assert LAUNCHES["list_matmul_kernel"] == 2 and LAUNCHES["sampled_matmul_kernel"] == 1
        assert dense.macs == 0
    elif listed(block):  # rows of dY are odd: dX and dW are multiplied densely
        masked = LAUNCHES["mask_cast_kernel"], LAUNCHES["zero_masked_kernel"]
        assert LAUNCHES["list_matmul_kernel"] == 1 and masked == (1, 1) and dense.macs == 2 * math.prod(shape)
    else:
        assert LAUNCHES["mask_cast_kernel"] == 2 and LAUNCHES["zero_masked_kernel"] == 1
    kept = mask.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: w.shape[0], : w.shape[1]]
    assert (got[2][~kept] == 0).all()  # exact zeros


def test_matmuls_inside_an_op_are_counted():
    """So that none in the tests above means none."""
    x, w, b, gy, mask = make((37, 64, 96), (16, 16), 0.5, torch.float32)
    with Matmuls() as dense:
        run("reference", x, w, b, gy, mask, (16, 16))
    assert dense.macs == 3 * 37 * 64 * 96


def test_there_are_enough_cases():
    assert 2 * len(CASES) >= 200


@pytest.mark.parametrize("backward", ["ste", "unmasked", "rigl"])
@pytest.mark.parametrize("flag", [False, True])
def test_other_modes(backward, flag):
    x, w, b, gy, mask = make((37, 64, 96), (16, 32), 0.7, torch.float32)
    dense = torch.tensor(flag) if backward == "rigl" else None
    got, expected = (run(impl, x, w, b, gy, mask, (16, 32), backward, dense) for impl in ("triton", "reference"))
    assert all(torch.allclose(g, e, atol=1e-4) for g, e in zip(got, expected, strict=True))


@pytest.mark.parametrize("shape", [(0, 40), (3, 0, 40), (40,), (2, 3, 40)])
def test_leading_axes_and_no_tokens(shape):
    x, w, mask = torch.randn(shape, requires_grad=True), torch.randn(24, 40, requires_grad=True), torch.tensor([[True, False, True], [False, True, False]])
    y = ops.linear(x, w, None, mask, (16, 16), "masked", impl="triton")
    assert torch.allclose(y, ops.linear(x, w, None, mask, (16, 16), "masked"), atol=1e-5)
    y.sum().backward()
    assert x.grad.shape == x.shape and w.grad.shape == w.shape and not w.grad.isnan().any()


def test_empty_strips_write_bias_or_zeros():
    x, w, b, gy, _ = make((20, 300, 64), (16, 16), 0.5, torch.float32)
    mask = torch.zeros(19, 4, dtype=torch.bool)
    mask[0, 0] = True
    y, dx, dw, _ = run("triton", x, w, b, gy, mask, (16, 16))
    assert torch.equal(y[:, 16:], b[16:].expand(20, -1))
    assert (dx[:, 16:] == 0).all() and (dw[16:] == 0).all()
    assert (run("triton", x, w, None, gy, mask, (16, 16))[0][:, 16:] == 0).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
def test_what_is_masked_is_not_multiplied():
    """A skipped block contributes nothing; a masked block in a union that is visited gives 0 * Inf where X is not finite, and only there."""
    x, w, b, gy, mask = make((20, 64, 64), (16, 16), 0.6, torch.float32)
    w[~mask.repeat_interleave(16, 0).repeat_interleave(16, 1)] = float("nan")
    assert all(t.isfinite().all() for t in run("triton", x, w, b, gy, mask, (16, 16)))
    x[3, 7] = float("inf")
    y = run("triton", x, w, b, gy, mask, (16, 16))[0]
    kept_only = reference.masked_linear(x[:, :16], w[:, :16], None, mask[:, :1], (16, 16))
    must = ~kept_only.isfinite() & mask[:, 0].repeat_interleave(16)
    assert (~y.isfinite() >= must).all() and y[[i for i in range(20) if i != 3]].isfinite().all()


@pytest.mark.parametrize("act", ["relu", "silu", "gelu"])
def test_activations_in_the_epilogue(act):
    x, w, b, _, mask = make((37, 64, 96), (32, 32), 0.5, torch.float32)
    y = launch.list_matmul(x, w, b, mask, (32, 32), False, act)
    assert torch.allclose(y, getattr(torch.nn.functional, act)(reference.masked_linear(x, w, b, mask, (32, 32))), atol=1e-5)


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_split_tokens_and_accumulation(splits):
    x, w, _, gy, mask = make((301, 100, 90), (32, 16), 0.5, torch.float32)
    expected = reference.masked_linear_dw(gy, x, mask, None, (32, 16), "masked")
    got = launch.sampled_matmul(gy, x, mask, (32, 16), splits=splits)
    assert torch.allclose(got, expected, atol=1e-3)
    assert torch.equal(got, launch.sampled_matmul(gy, x, mask, (32, 16), splits=splits))
    start = torch.randn_like(w)
    added = launch.sampled_matmul(gy, x, mask, (32, 16), out=start.clone(), splits=splits)
    kept = mask.repeat_interleave(32, 0).repeat_interleave(16, 1)[:100, :90]
    assert torch.allclose(added, start + expected, atol=1e-3) and torch.equal(added[~kept], start[~kept])


MIXED = [(s, b) for s in ((3, 24, 200, 130), (1, 136, 64, 96), (2, 8, 40, 300)) for b in ((16, 16), (64, 32), (128, 128))]


@pytest.mark.parametrize(("shape", "block"), [pytest.param(*c, marks=SELDOM if i % 2 else ()) for i, c in enumerate(MIXED)], ids=str)
def test_token_mixing(shape, block):
    """Inputs whose tokens lie side by side: the result has their layout, as the fake says, and their numbers."""
    (b, c, n, k), dtype = shape, torch.float16
    g = torch.Generator().manual_seed(c)
    x, gy = (torch.randn(b, f, c, generator=g).to(dtype).transpose(1, 2) for f in (k, n))
    w, bias = torch.randn(n, k, generator=g).to(dtype), torch.randn(n, generator=g).to(dtype)
    mask = torch.rand(grid_shape((n, k), block), generator=g) < 0.4
    LAUNCHES.clear()
    with Matmuls() as dense:
        got = run("triton", x, w, bias, gy, mask, block)
    assert dense.macs == 0 and LAUNCHES["list_matmul_kernel"] == 2 and LAUNCHES["sampled_matmul_kernel"] == 1
    assert got[0].stride() == gy.stride() and got[1].stride() == x.stride()
    exact = run("reference", *(t.double() for t in (x, w, bias, gy)), mask, block)
    low = run("reference", x, w, bias, gy, mask, block)
    for what, *three in zip(("y", "dx", "dw", "db"), got, exact, low, strict=True):
        close(*three, dtype, what)
    torch.library.opcheck(ops.masked_linear, (x.detach(), w, bias, mask, *block, "masked", None, "triton"))


@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "dX"])
@pytest.mark.parametrize("block", [(16, 16), (64, 64), (128, 64), (128, 128)], ids=str)
def test_tiles_that_are_no_default(block, transposed):
    """Also those that read by TMA descriptors."""
    dtype = torch.float16
    x, w, b, gy, mask = make((300, 264, 200), block, 0.6, dtype)
    t, bias = (gy, None) if transposed else (x, b)
    args = (t, w, bias, mask, block)
    plain = reference.masked_linear_dx(gy, w, mask, block, "masked") if transposed else reference.masked_linear(*args)
    exact = gy.double() @ reference.masked(w, mask, block).double() if transposed else reference.masked_linear(x.double(), w.double(), b.double(), mask, block)
    found = tiles.candidates(dtype, block, transposed)
    assert any(tile.tma for tile in found) == (block != (16, 16))
    for tile in found:
        close(launch.list_matmul(t, w, bias, mask, block, transposed, tile=tile), exact, plain, dtype, tile)


def test_groups_of_token_tiles(monkeypatch):
    """Of long inputs: tiles that read the same tokens run together, and the last group has fewer of them."""
    monkeypatch.setattr(plan, "TOKEN_GROUP", 256)
    monkeypatch.setattr(launch, "list_matmul_plan", plan.list_matmul_plan.__wrapped__)
    x, w, b, gy, mask = make((600, 264, 200), (32, 32), 0.8, torch.float16)
    y, dx = launch.list_matmul(x, w, b, mask, (32, 32), False), launch.list_matmul(gy, w, None, mask, (32, 32), True)
    exact = reference.masked_linear(x.double(), w.double(), b.double(), mask, (32, 32)), gy.double() @ reference.masked(w, mask, (32, 32)).double()
    close(y, exact[0], reference.masked_linear(x, w, b, mask, (32, 32)), torch.float16, "y")
    close(dx, exact[1], reference.masked_linear_dx(gy, w, mask, (32, 32), "masked"), torch.float16, "dx")


@pytest.mark.parametrize("block", [(64, 64), (128, 128)], ids=str)
def test_the_large_tile_by_tma_is_the_default_for_long_rows_that_a_descriptor_can_name(monkeypatch, block):
    monkeypatch.setattr(tiles, "LONG", 100)
    monkeypatch.setattr(tiles, "MULTIPROCESSORS", 1)
    chosen = []
    monkeypatch.setattr(launch, "best_tile", lambda *a, **k: chosen.append(tiles.best_tile(*a, **k)) or chosen[-1])
    dtype = torch.float16
    for k in (200, 204):  # rows of 400 bytes, and of 408, which 16 does not divide
        x, w, b, gy, mask = make((300, 264, k), block, 0.6, dtype)
        y, dx = launch.list_matmul(x, w, b, mask, block, False), launch.list_matmul(gy, w, None, mask, block, True)
        exact = reference.masked_linear(x.double(), w.double(), b.double(), mask, block), gy.double() @ reference.masked(w, mask, block).double()
        close(y, exact[0], reference.masked_linear(x, w, b, mask, block), dtype, "y")
        close(dx, exact[1], reference.masked_linear_dx(gy, w, mask, block, "masked"), dtype, "dx")
    assert [(t.tokens, t.tma) for t in chosen] == [(256, True)] * 2 + [(128, False)] * 2
    x = x[:1, :200].expand(300, 200)  # as the gradient of a sum: rows that lie on one another
    w = w[:, :200].contiguous()
    exact, plain = reference.masked_linear(x.double(), w.double(), b.double(), mask, block), reference.masked_linear(x, w, b, mask, block)
    close(launch.list_matmul(x, w, b, mask, block, False), exact, plain, dtype, "y")
    assert not chosen[-1].tma


def test_lists_are_made_once_for_forward_and_backward():
    x, w, b, gy, mask = make((37, 64, 96), (16, 16), 0.5, torch.float32)
    packed = ops.strip_lists(mask, 16, 16, "triton")
    x, w = x.requires_grad_(), w.requires_grad_()
    LAUNCHES.clear()
    y = ops.masked_linear(x, w, b, mask, 16, 16, "masked", None, "triton", packed)
    y.backward(gy)
    assert LAUNCHES["list_matmul_kernel"] == 2 and LAUNCHES["strip_lists_kernel"] == 0
    assert torch.equal(y, ops.masked_linear(x, w, b, mask, 16, 16, "masked", None, "triton"))
    torch.library.opcheck(ops.strip_lists, (mask, 16, 16, "reference"))


PAIRS = [("graph", "masked"), *(pytest.param(*pair, marks=SELDOM) for pair in (("module", "masked"), ("graph", "rigl"), ("module", "rigl")))]


@pytest.mark.parametrize(("form", "backward"), PAIRS)
def test_cached_masks_keep_their_lists(form, backward):
    """Built in one set of launches for the model, at the steps that are due; a forward makes none. Equal to the reference through a schedule and a load."""
    import fxmask

    def build(impl):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 80), torch.nn.Linear(80, 64))
        model = torch.fx.symbolic_trace(model) if form == "graph" else model
        fxmask.apply(model, ratio=0.7, refresh=2, schedule=fxmask.Schedule("cubic", 6), backward=backward, impl=impl)
        fxmask.step(model, 0)
        return model, torch.optim.SGD(model.parameters(), lr=0.5)

    pairs = [build("triton"), build("reference")]
    x = torch.randn(5, 64)
    for i in range(6):
        for model, optimiser in pairs:
            optimiser.zero_grad()
            LAUNCHES.clear()
            model(x).square().mean().backward()
            # rigl wants a list of its own for dW: the mask and its dense steps
            assert LAUNCHES["strip_lists_kernel"] == (3 if backward == "rigl" and model is pairs[0][0] else 0)
            optimiser.step()
            LAUNCHES.clear()
            fxmask.step(model)
            due = i % 2 == 1 and model is pairs[0][0]
            assert dict(LAUNCHES) == (dict.fromkeys(("block_keys_kernel", "select_kernel", "strip_lists_kernel", "order_kernel"), 1) if due else {})
        if i == 3:
            pairs[1][0].load_state_dict(pairs[0][0].state_dict())
        ours, theirs = (fxmask.masks(model) for model, _ in pairs)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    with fxmask.dense(pairs[0][0]):
        everything = pairs[0][0](x)
    fxmask.restore(pairs[0][0])
    assert torch.allclose(everything, pairs[0][0](x), atol=1e-4)


def test_through_a_model():
    import fxmask

    torch.manual_seed(0)
    make_model = lambda: torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 64))  # noqa: E731
    reference_model = make_model()
    model = make_model()
    model.load_state_dict(reference_model.state_dict())
    fxmask.apply(model, ratio=0.7, impl="triton")
    fxmask.apply(reference_model, ratio=0.7, impl="reference")
    x = torch.randn(5, 64)
    assert torch.allclose(model(x), reference_model(x), atol=1e-5)
    for m in (model, reference_model):
        m(x).square().sum().backward()
    assert all(torch.allclose(p.grad, q.grad, atol=1e-3) for p, q in zip(model.parameters(), reference_model.parameters(), strict=True))
    assert {r["impl"] for r in fxmask.explain(model).rows} == {"triton"}
    traced = fxmask.apply(torch.fx.symbolic_trace(make_model()), ratio=0.7, impl="triton")
    traced.load_state_dict(model.state_dict())
    assert torch.equal(traced(x), model(x))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize(("features", "block", "dense"), [((64, 96), (16, 64), ""), ((64, 96), (48, 16), "forward, dX, dW"), ((64, 97), (16, 16), "dX, dW")])
def test_explain_names_products_that_skip_nothing(features, block, dense):
    import fxmask

    model = fxmask.apply(torch.nn.Sequential(torch.nn.Linear(*features)), ratio=0.5, block=block, impl="triton")
    takes = "kernels skip blocks with sides of 16, 32, 64, 128, in even numbers of features"
    exported = torch.export.export(model, (torch.randn(8, features[0]),)).module()
    for m in (model, exported):
        assert fxmask.explain(m).rows[0]["why"] == (f"asked for; dense in {dense}: {takes}" if dense else "asked for")


def test_opcheck_of_the_triton_form():
    x, w, b, _, mask = make((7, 40, 24), (16, 16), 0.5, torch.float32)
    torch.library.opcheck(ops.masked_linear, (x.requires_grad_(), w.requires_grad_(), b.requires_grad_(), mask, 16, 16, "masked", None, "triton"))


@pytest.mark.parametrize("flag", [False, True], ids=["kept blocks", "all blocks"])
def test_dw_and_its_derivative_go_by_the_blocks_that_are_wanted(flag):
    """Where `rigl` wants all of them the lists of the mask name too few."""
    x, w, _, gy, mask = make((40, 64, 48), (16, 16), 0.6, torch.float32)
    found = []
    for impl, lists in (("triton", ops.strip_lists(mask, 16, 16, "triton")), ("reference", None)):
        of = gy.clone().requires_grad_(), x.clone().requires_grad_()
        dw = ops.masked_linear_dw(*of, mask, 16, 16, "rigl", torch.tensor(flag), impl, lists)
        found.append((dw, *torch.autograd.grad(dw, of, w)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_unsupported_dtypes_raise(dtype):
    x = torch.ones(2, 16, dtype=dtype)
    with pytest.raises(UnsupportedError, match=r"impl='triton' cannot run on dtype .* use impl='auto' or impl='reference'"):
        ops.masked_linear(x, torch.ones(16, 16, dtype=dtype), None, torch.ones(1, 1, dtype=torch.bool), 16, 16, "masked", None, "triton")


def test_function_transforms_raise_instead_of_falling_back():
    x, w, mask = torch.ones(2, 16), torch.ones(16, 16), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(UnsupportedError, match=r"impl='triton' inside torch\.func"):
        torch.func.grad(lambda x: ops.linear(x, w, None, mask, (16, 16), "masked", impl="triton").sum())(x)
