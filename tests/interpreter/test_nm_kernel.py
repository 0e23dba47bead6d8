"""N:M masks by the kernel: bits, gradients, and bytes."""

import copy

import pytest
import torch
from interpreter.trace import recording
from torch import nn

import fxmask
from fxmask import NMMask
from fxmask.errors import FxMaskError
from fxmask.kernels import mask_cost
from fxmask.kernels import nm as plain
from fxmask.kernels.triton import nm
from fxmask.kernels.triton.device import LAUNCHES

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def awkward(rows, columns, m, dtype):
    """Ties, zeros of both signs, NaN, Inf, and every order of a small group."""
    w = torch.randn(rows, columns, generator=torch.Generator().manual_seed(m))
    w[::3] = (2 * w[::3]).round()
    w[1] = 1.0
    w[2] = 0.0
    w[2, ::2] = -0.0
    w[4, : 3 * m] = float("nan")
    w[5, m - 1], w[5, m + 1], w[7, 0] = float("nan"), float("inf"), float("-inf")
    return w.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "m"), [(1, 2), (1, 4), (2, 4), (3, 4), *(pytest.param(n, 8, marks=pytest.mark.slow if n != 3 else ()) for n in range(1, 8))])
def test_bits_and_bytes(n, m, dtype):
    w = awkward(11, 49 * m, m, dtype)  # no multiple of a program's share
    for out in (dtype, torch.float16):
        with recording() as launches:
            product, mask = nm.nm_mask(w, n, m, out)
        want = plain.magnitude_mask(w, n, m)
        assert torch.equal(mask, want) and (mask.view(11, -1, m).sum(2) == n).all()
        torch.testing.assert_close(product, torch.where(want, w, 0).to(out), rtol=0, atol=0, equal_nan=True)
        (entry,) = launches
        expected, zero = mask_cost.nm_mask(w.numel(), w.element_size(), product.element_size()), {"w": 0, "mask": 0, "out": 0}
        assert {k: o.bytes_read for k, o in entry.operands.items()} == {k: o.distinct_read for k, o in entry.operands.items()} == zero | expected.reads
        assert {k: o.bytes_written for k, o in entry.operands.items()} == {k: o.distinct_written for k, o in entry.operands.items()} == zero | expected.writes


def grads(model, x, autocast=False):
    v = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        y = model(v)
    y.float().square().sum().backward()
    return [y.detach(), v.grad, *(p.grad for p in model.parameters())]


@pytest.mark.filterwarnings("ignore:SR-STE's decay in float16 autocast")  # no scaler here
@pytest.mark.parametrize("mode", ["magnitude", "sr-ste"])
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_a_layer_is_the_plain_one_to_the_bit(mode, autocast):
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 24))
    dense[0].weight.data = dense[0].weight.data.to(memory_format=torch.channels_last)
    x, found = torch.randn(3, 4, 6, 6), {}
    for impl in ("triton", "auto"):
        model = fxmask.apply(copy.deepcopy(dense), NMMask(2, 4, mode=mode, impl=impl))
        LAUNCHES.clear()
        found[impl] = grads(model, x, autocast)
        assert LAUNCHES["nm_mask_kernel"] == (2 if impl == "triton" else 0)
        fxmask.freeze(model)
        LAUNCHES.clear()
        assert torch.equal(grads(model, x, autocast)[0], found[impl][0]) and not LAUNCHES["nm_mask_kernel"]
    for got, want in zip(found["triton"], found["auto"], strict=True):
        assert torch.equal(got, want)


def test_autocasts_dtype_is_written_in_the_same_pass():
    model = fxmask.apply(nn.Linear(16, 16), NMMask(2, 4, impl="triton"))
    with recording() as launches, torch.autocast("cpu", torch.float16):
        model(torch.randn(2, 16))
    assert launches[0].operands["out"].tensor.dtype == torch.float16 and launches[0].operands["w"].tensor.dtype == torch.float32


def test_compiled_analysed_saved_and_explained():
    torch.manual_seed(0)
    model = fxmask.apply(nn.Sequential(nn.Linear(32, 24)), NMMask(1, 4, impl="triton"))
    x = torch.randn(5, 32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))
    rows = [r for r in fxmask.analyze(model, x).tables["nodes"] if r["op"] == "fxmask.nm_magnitude"]
    assert [r["bytes_req"] for r in rows] == [mask_cost.nm_mask(24 * 32, 4, 4).bytes_req]
    assert "in one pass" in fxmask.explain(model).rows[0]["why"]
    twin = fxmask.apply(nn.Sequential(nn.Linear(32, 24)), NMMask(1, 4))
    fxmask.load_state_dict(twin, fxmask.state_dict(model))  # another impl is no other setting
    saved = fxmask.state_dict(model)
    saved["nm"]["0"]["settings"]["decay"] = 1.0
    with pytest.raises(FxMaskError, match="other settings"):
        fxmask.load_state_dict(twin, saved)


def test_what_no_kernel_has():
    for options in ({"m": 16}, {"mode": "learned"}, {"mode": "permuted"}, {"transposable": True}):
        with pytest.raises(FxMaskError, match=r"impl='triton' of N:M masks: expected mode='magnitude' or 'sr-ste' with m of \(2, 4, 8\)"):
            NMMask(impl="triton", **options)
    with pytest.raises(FxMaskError, match="unknown impl: expected one of auto, reference, triton, got 'cpu'"):
        NMMask(impl="cpu")
    model = fxmask.apply(nn.Linear(32, 24), NMMask(2, 4, impl="triton"))
    with pytest.raises(FxMaskError, match=r"torch\.func"):
        torch.func.vmap(model)(torch.randn(3, 32))
    with pytest.raises(FxMaskError, match=r"dtype torch\.float64"):
        model.double()(torch.randn(3, 32, dtype=torch.float64))
