"""Block dropout by the kernels against float64, through the ops: values, gradients, launches, dropped blocks that nobody reads, and no dense matmul."""

import copy
import itertools

import pytest
import torch
from interpreter.test_kernels import Matmuls, close
from interpreter.test_kernels import poisoned_empty as poisoned_empty
from torch import nn

import fxmask
from fxmask import BlockDropout
from fxmask.errors import ShapeError, UnsupportedError
from fxmask.kernels import draw_ops, dropout, dropout_ops, ops
from fxmask.kernels.grid import expand_mask
from fxmask.kernels.lists import LISTED
from fxmask.kernels.triton import dropped
from fxmask.kernels.triton.device import LAUNCHES

FP16, FP32 = torch.float16, torch.float32
SHAPES = [(70, 48, 130), (130, 160, 72), (1, 34, 200), (300, 130, 66), (257, 64, 96)]  # M, N, K: ragged tokens, strips, units
BLOCKS = list(itertools.product(LISTED, LISTED))
OTHER = [(1, 1), (3, 5), (8, 16), (48, 16), (200, 4)]
RATES = (0.0, 0.1, 0.5, 0.9)
# every block in one shape, dtype and p, which go round; in all of them where there is time
FEW = [(SHAPES[i % 5], b, RATES[(i + i // 5) % 4], (FP16, FP32)[i % 2]) for i, b in enumerate(BLOCKS)]
ALL = [c for c in itertools.product(SHAPES, BLOCKS, RATES, (FP16, FP32)) if c not in FEW]


def make(shape, block, p, dtype, extra=""):
    """x, w, bias, gy, keep; `gaps`: rows 5 elements apart; `turned`: x and gy as transposes; `holes`: a strip of tokens and one of features is all dropped."""
    (m, n, k), g = shape, torch.Generator().manual_seed(sum(shape) + int(10 * p))
    x, w, b, gy = (torch.randn(*s, generator=g).to(dtype) for s in ((m, k + 5), (n, k), (n,), (m, n + 5)))
    x, gy = (t[:, :-5] if extra == "gaps" else t[:, :-5].t().contiguous().t() if extra == "turned" else t[:, :-5].contiguous() for t in (x, gy))
    keep = dropout.draw(m, k, block, p, torch.tensor(11 + sum(shape)))
    if extra == "holes":
        keep[: -(-128 // block[0])] = False
        keep[:, -(-128 // block[1]) :] = False
    return x, w, b, gy, keep


def run(impl, x, w, b, gy, keep, block, p):
    wanted = [None if t is None else t.detach().requires_grad_() for t in (x, w, b)]
    y = dropout_ops.dropped_linear(*wanted, keep, *block, p, impl)
    return [y.detach(), *torch.autograd.grad(y, [t for t in wanted if t is not None], gy)]


def check(shape, block, p, dtype, bias=True, extra=""):
    x, w, b, gy, keep = make(shape, block, p, dtype, extra)
    b = b if bias else None
    LAUNCHES.clear()
    with Matmuls() as dense:
        got = run("triton", x, w, b, gy, keep, block, p)
    exact = run("reference", *(None if t is None else t.double() for t in (x, w, b, gy)), keep, block, p)
    low = run("reference", x, w, b, gy, keep, block, p)
    for what, g, e, q in zip(("y", "dx", "dw", "db"), got, exact, low, strict=False):
        assert g.is_contiguous() and g.shape == e.shape
        close(g, e, q, dtype, what)
    assert (got[1][~expand_mask(keep, x.shape, block)] == 0).all()  # exact zeros
    return dense.macs


@pytest.mark.parametrize(("shape", "block", "p", "dtype"), [*FEW, *(pytest.param(*c, marks=pytest.mark.slow) for c in ALL)], ids=str)
def test_forward_dx_dw_against_float64(shape, block, p, dtype):
    assert check(shape, block, p, dtype, bias=sum(block) % 3 > 0) == 0
    assert LAUNCHES["list_matmul_kernel"] == 2 and LAUNCHES["sampled_matmul_kernel"] == 1 and not LAUNCHES["mask_cast_kernel"]


@pytest.mark.parametrize("extra", ["gaps", "turned", "holes"])
def test_other_inputs(extra):
    for block, dtype in (((32, 64), FP16), ((128, 128), FP32)):
        assert check((290, 48, 200), block, 0.4, dtype, extra=extra) == 0


def test_everything_dropped():
    x, w, b, gy, keep = make((150, 48, 130), (16, 32), 0.5, FP16)
    y, dx, dw, db = run("triton", x, w, b, gy, torch.zeros_like(keep), (16, 32), 0.5)
    assert torch.equal(y, b.expand(150, -1)) and not dx.any() and not dw.any() and torch.allclose(db, gy.sum(0))


@pytest.mark.parametrize("shape", [(0, 48, 64), (5, 0, 64), (5, 48, 0)])
def test_empty_axes(shape):
    m, n, k = shape
    x, w, gy = torch.randn(m, k), torch.randn(n, k), torch.randn(m, n)
    keep = dropout.draw(m, k, (16, 16), 0.5, torch.tensor(1))
    y, dx, dw = run("triton", x, w, None, gy, keep, (16, 16), 0.5)
    assert y.shape == (m, n) and dx.shape == (m, k) and dw.shape == (n, k) and not any(t.any() for t in (y, dx, dw))


@pytest.mark.parametrize("block", OTHER, ids=str)
def test_other_blocks_are_dropped_in_one_pass_and_multiplied_densely(block):
    assert check((70, 48, 130), block, 0.4, FP16) == 3 * 70 * 48 * 130
    assert LAUNCHES["mask_cast_kernel"] == 3 and not LAUNCHES["list_matmul_kernel"] + LAUNCHES["sampled_matmul_kernel"]


@pytest.mark.parametrize(("n", "k", "dense"), [(47, 64, 2), (48, 65, 3), (47, 65, 3)])
def test_odd_features_are_multiplied_densely(n, k, dense):
    """Rows that no copy of 4 bytes reaches: of dX and dW those of dY, too."""
    assert check((40, n, k), (16, 16), 0.4, FP16) == dense * 40 * n * k
    assert LAUNCHES["mask_cast_kernel"] == dense and LAUNCHES["list_matmul_kernel"] == 3 - dense


@pytest.mark.parametrize(("splits", "block", "dtype"), [(2, (128, 128), FP16), (3, (16, 64), FP32), (9, (32, 16), FP16), (7, (128, 16), FP32)], ids=str)
def test_split_tokens(splits, block, dtype):
    """Shares of each list's steps, added in order; some have nothing, and lists of no entry give zeros."""
    x, _, _, gy, keep = make((400, 34, 200), block, 0.6, dtype, "holes")
    got = dropped.dw(gy, x, keep, block, 0.6, splits=splits)
    close(got, dropout.dw(gy.double(), x.double(), keep, block, 0.6), dropout.dw(gy, x, keep, block, 0.6), dtype, splits)
    assert torch.equal(got, dropped.dw(gy, x, keep, block, 0.6, splits=splits))
    assert not got[:, 128:].any()


def test_many_tokens_are_split(monkeypatch):
    real, seen = dropped.launch.launch_list_matmul, []
    monkeypatch.setattr(dropped.launch, "launch_list_matmul", lambda *a, splits=1, **n: seen.append(splits) or real(*a, splits=splits, **n))
    x, w, b, gy, keep = make((2100, 16, 32), (128, 32), 0.9, FP16)
    args = (keep, (128, 32), 0.9)
    close(dropped.dw(gy, x, *args), dropout.dw(gy.double(), x.double(), *args), dropout.dw(gy, x, *args), FP16, "dw")
    assert seen == [2]


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
def test_what_is_dropped_is_not_read():
    x, w, b, gy, keep = make((70, 48, 130), (16, 16), 0.5, FP32)
    x[~expand_mask(keep, (70, 130), (16, 16))] = float("nan")
    assert all(t.isfinite().all() for t in run("triton", x, w, b, gy, keep, (16, 16), 0.5))
    assert all(t.isfinite().all() for t in run("triton", x, w, b, gy, dropout.draw(70, 130, (3, 5), 0.5, torch.tensor(2)), (3, 5), 0.5)[1:2])


def test_gradients_of_gradients():
    x, w, b, gy, keep = make((40, 16, 34), (16, 16), 0.5, FP32)

    def both(impl):
        t = [a.detach().requires_grad_() for a in (x, w, gy)]
        y = dropout_ops.dropped_linear(t[0], t[1], b, keep, 16, 16, 0.5, impl)
        first = torch.autograd.grad(y, t[:2], t[2], create_graph=True)
        return torch.autograd.grad(sum(f.square().sum() for f in first), t)

    assert all(torch.allclose(a, c, rtol=1e-4, atol=1e-2) for a, c in zip(both("triton"), both("reference"), strict=True))
    torch.library.opcheck(dropout_ops.dropped_linear, (x.requires_grad_(), w.requires_grad_(), b, keep, 16, 16, 0.5, "triton"))


@pytest.mark.parametrize("p", [0.0, 0.05, 0.5, 0.999])
def test_masks_are_the_plain_forms_to_the_bit(p):
    for (tokens, features), seed in (((100, 70), 1), ((5000, 260), 2**61 + 12345), ((0, 64), 7), ((1, 1), 2**33)):
        args = (tokens, features, (16, 4), p, torch.tensor(seed))
        assert torch.equal(dropped.draw(*args), dropout.draw(*args))
    args = (torch.tensor(5), 100, 70, 16, 4, p)
    torch.library.opcheck(draw_ops.drop_mask, (*args, "triton"))
    assert torch.equal(draw_ops.drop_mask(*args, "triton"), draw_ops.drop_mask(*args))


def test_a_number_at_the_rate_is_kept():
    """By both forms, and the next rate drops its block."""
    block, seed, number, of = (1, 1, (16, 16)), torch.tensor(5), 0, 2**dropout.BITS
    for bit in reversed(range(dropout.BITS)):
        number |= int(dropout.draw(*block, (number | 1 << bit) / of, seed).item()) << bit
    for least in (number, number + 1):
        assert dropped.draw(*block, least / of, seed).item() == dropout.draw(*block, least / of, seed).item() == (least == number)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Dropout(0.3), nn.Linear(96, 64))


@pytest.mark.parametrize("form", ["module", "graph", "compiled"])
def test_through_a_model(form):
    """The same seed drops the same blocks; lists are made once a layer, for forward and backward."""
    models = []
    for impl in ("triton", "reference"):
        model = net() if form != "graph" else torch.fx.symbolic_trace(net())
        model = fxmask.apply(model, BlockDropout(block=(16, 32), impl=impl), overrides={"0": {"p": 0.5}})
        assert [r["dropout"] for r in fxmask.explain(model).rows] == [f"p=0.5 in 16x32, impl={impl!r}", f"p=0.3 in 16x32, impl={impl!r}"]
        models.append(copy.deepcopy(model) if form != "compiled" else model)
    x, found = torch.randn(3, 30, 64), []
    for model in models:
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if form == "compiled" else model
        torch.manual_seed(5)
        LAUNCHES.clear()
        y = call(x)
        y.square().mean().backward()
        found.append([y.detach(), *(p.grad for p in model.parameters())])
        if model is models[0]:
            twice = dict.fromkeys(("draw_kernel", "strip_lists_kernel", "order_kernel"), 2)
            assert dict(LAUNCHES) == {**twice, "list_matmul_kernel": 4, "sampled_matmul_kernel": 1}  # x needs no gradient
        assert torch.equal(model.eval()(x), net().eval()(x))
    assert len(found[0]) == 5 and not LAUNCHES["mask_cast_kernel"]
    assert all(torch.allclose(a, b, atol=1e-5, rtol=1e-4) for a, b in zip(*found, strict=True))


def test_tokens_that_the_compiler_does_not_know():
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 64)), BlockDropout(0.5, (16, 16), impl="triton"))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    assert [compiled(torch.randn(m, 64)).shape[0] for m in (24, 40, 7)] == [24, 40, 7]
    gm = torch.export.export(model, (torch.randn(4, 16, 64),), dynamic_shapes=({0: torch.export.Dim("b")},)).module()
    assert gm(torch.randn(9, 16, 64)).shape == (9, 16, 64)


def test_wrong_use():
    x, w, b, gy, keep = make((40, 16, 32), (16, 16), 0.5, FP32)
    call = lambda x=x, w=w, b=b, keep=keep, lists=None, impl="triton": dropout_ops.dropped_linear(x, w, b, keep, 16, 16, 0.5, impl, lists)  # noqa: E731
    for dtype in (torch.float64, torch.bfloat16):
        with pytest.raises(UnsupportedError, match=f"cannot run on dtype {dtype}" if dtype == torch.float64 else "bfloat16 wrongly"):
            call(*(t.to(dtype) for t in (x, w, b)))
    for args in ((x.half(), w, b), (x, w, b.half())):
        with pytest.raises(UnsupportedError, match="operands of one dtype"):
            call(*args)
    with pytest.raises(ShapeError, match="lists of a mask"):
        call(lists=ops.strip_lists(torch.ones(9, 9, dtype=torch.bool), 16, 16, "triton"))
    with pytest.raises(ShapeError, match="last axis of gy"):
        dropout_ops.dropped_dx(gy[:, :8], w, keep, 16, 16, 0.5, "triton")
    with pytest.raises(ShapeError, match=r"bias: expected \(16,\)"):
        call(b=torch.randn(3))
    with pytest.raises(UnsupportedError, match=r"65537 units of 16"):
        ops.strip_lists(torch.zeros(65_537, 1, dtype=torch.bool), 16, 16, "triton")
    model = fxmask.apply(nn.Sequential(nn.Linear(32, 16)), BlockDropout(0.5, (16, 16), impl="triton"))
    with pytest.raises(UnsupportedError, match="function transform"):
        torch.func.grad(lambda x: model(x).sum())(x)
