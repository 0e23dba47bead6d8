"""Block dropout's mask as random numbers, and its products against the formulas in float64."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property.often import examples
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fxmask.errors import ConfigError, ShapeError
from fxmask.kernels import draw_ops, dropout, dropout_ops
from fxmask.kernels.cpu import dropout_runs
from fxmask.kernels.grid import expand_mask


def seed(n: int) -> torch.Tensor:
    return torch.tensor(n, dtype=torch.int64)


@pytest.mark.parametrize("p", [0.05, 0.2, 0.5, 0.9])
def test_the_rate_is_p_and_blocks_are_independent(p):
    masks = torch.stack([dropout.draw(40, 25, (1, 1), p, seed(s * 2**33 + 7 * s)) for s in range(400)]).double()  # 400 draws of 1,000 blocks
    n = masks.numel()
    sigma = math.sqrt(p * (1 - p) / n)
    assert abs(float(1 - masks.mean()) - p) < 5 * sigma
    flat = masks.view(400, 1000) - masks.mean()
    spread = p * (1 - p)
    for other in (flat.roll(1, 1), flat.roll(25, 1), flat.roll(1, 0), flat.flip(1)):  # the next block, the one below, the next draw, the mirror
        assert abs(float((flat * other).mean())) < 5 * spread / math.sqrt(n)
    by_block = flat.mean(0) / math.sqrt(spread / 400)  # of each place over the draws: standard normal
    assert 0.8 < float(by_block.var()) < 1.2 and float(by_block.abs().max()) < 5


def test_whoever_counts_leaves_masks_as_they_were_drawn(monkeypatch):
    """By the op inside, even where the count fails; by aten's ops, which a compiler fuses, before and after."""
    asked, op = [], draw_ops.drop_mask
    monkeypatch.setattr(draw_ops, "drop_mask", lambda *args: (asked.append(args), op(*args))[1])

    def count():
        with draw_ops.drawn_by_one_op(None):
            draw_ops.mask(torch.randn(4, 8), (2, 4), 0.5)
            raise ZeroDivisionError

    draw_ops.mask(torch.randn(4, 8), (2, 4), 0.5)
    assert not asked
    with pytest.raises(ZeroDivisionError):
        count()
    assert len(asked) == 1
    draw_ops.mask(torch.randn(4, 8), (2, 4), 0.5)
    assert len(asked) == 1


def test_flops_of_a_mask_without_values_are_the_upper_bound():
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        dropout_ops.dropped_linear(torch.randn(4, 8), torch.randn(6, 8), None, torch.ones(2, 2, dtype=torch.bool), 2, 4, 0.5)
    assert counter.get_total_flops() == 2 * 4 * 8 * 6


def test_a_mask_is_a_function_of_its_seed():
    a = dropout.draw(1000, 500, (16, 16), 0.5, seed(12345))
    assert torch.equal(a, dropout.draw(1000, 500, (16, 16), 0.5, seed(12345)))
    assert not any(torch.equal(a, dropout.draw(1000, 500, (16, 16), 0.5, seed(12345 + d))) for d in (1, 2**40))
    assert a.shape == (63, 32) and bool(dropout.draw(10, 10, (1, 1), 0.0, seed(1)).all())
    # bits that must not change from version to version or from device to device
    assert dropout.draw(4, 8, (1, 1), 0.5, seed(1)).int().tolist() == FIXED


FIXED = [[0, 0, 0, 0, 0, 1, 0, 1], [0, 1, 1, 1, 0, 0, 1, 0], [1, 1, 1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 0, 0, 1, 1]]


@examples(60)
@given(st.integers(0, 150), st.integers(1, 150), st.integers(1, 40), st.integers(1, 70), st.integers(1, 70), st.floats(0, 0.95), st.integers(0, 99))
def test_the_products_are_the_formulas(m, k, n, bm, bk, p, s):
    g = torch.Generator().manual_seed(s)
    x, w, b, gy = (torch.randn(*size, generator=g, dtype=torch.float64) for size in ((m, k), (n, k), (n,), (m, n)))
    keep = dropout.draw(m, k, (bm, bk), p, seed(s))
    xm = torch.where(expand_mask(keep, (m, k), (bm, bk)), x, 0) / (1 - p)
    full = expand_mask(keep, (m, k), (bm, bk))
    for form in (dropout, dropout_runs):
        torch.testing.assert_close(form.linear(x, w, b, keep, (bm, bk), p), xm @ w.t() + b, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(form.linear(x, w, None, keep, (bm, bk), p), xm @ w.t(), rtol=1e-10, atol=1e-10)
        dx = form.dx(gy, w, keep, (bm, bk), p)
        torch.testing.assert_close(dx, torch.where(full, gy @ w, 0) / (1 - p), rtol=1e-10, atol=1e-10)
        assert bool((dx[~full] == 0).all())
        torch.testing.assert_close(form.dw(gy, x, keep, (bm, bk), p), gy.t() @ xm, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("p", [0.2, 0.5])
def test_gradients_and_their_gradients(p):
    x, w, b = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((2, 40, 64), (24, 64), (24,)))
    keep = dropout.draw(80, 64, (32, 32), p, seed(3))
    call = lambda x, w, b: dropout_ops.dropped_linear(x, w, b, keep, 32, 32, p)  # noqa: E731
    assert torch.autograd.gradcheck(call, (x, w, b), fast_mode=True)
    assert torch.autograd.gradgradcheck(call, (x, w, b), fast_mode=True)
    torch.library.opcheck(dropout_ops.dropped_linear, (x, w, b, keep, 32, 32, p))


def test_a_dropped_element_is_zero_whatever_it_was():
    keep = torch.tensor([[True, False]])
    x = torch.tensor([[1.0, float("nan")]])
    assert dropout.drop(x, keep, (1, 1), 0.5).tolist() == [[2.0, 0.0]]


def test_runs():
    assert dropout_runs.runs([True, True, False, True], 4, 14) == [(0, 8), (12, 14)]
    assert dropout_runs.runs([False, False], 4, 8) == [] and dropout_runs.runs([], 4, 0) == [] and dropout_runs.runs([True], 128, 5) == [(0, 5)]


def test_wrong_operands():
    x, w = torch.randn(4, 8), torch.randn(3, 8)
    with pytest.raises(ShapeError, match=r"expected bool \(2, 2\)"):
        dropout_ops.dropped_linear(x, w, None, torch.ones(1, 2, dtype=torch.bool), 2, 4, 0.5)
    with pytest.raises(ShapeError, match="last axis of x"):
        dropout_ops.dropped_linear(x, torch.randn(3, 9), None, torch.ones(2, 2, dtype=torch.bool), 2, 4, 0.5)
    with pytest.raises(ShapeError, match=r"expected bool \(2, 2\), got torch.int64 \(2, 2\)"):
        dropout_ops.dropped_linear(x, w, None, torch.ones(2, 2, dtype=torch.int64), 2, 4, 0.5)
    assert [dropout.check_probability(p) for p in (0, np.float32(0.5), Fraction(1, 4))] == [0, 0.5, 0.25]
    for p in (1, 1.0, -0.1, "0.5", None, True, False, float("nan"), 1 - Fraction(1, 10**20), np.float32(1)):
        with pytest.raises(ConfigError, match=r"number in \[0, 1\)"):
            dropout.check_probability(p)
    keep = torch.ones(2, 2, dtype=torch.bool)
    for op, operands in ((dropout_ops.dropped_linear, (x, w, None)), (dropout_ops.dropped_dx, (x[:, :3], w)), (dropout_ops.dropped_dw, (x[:, :3], x))):
        with pytest.raises(ConfigError, match=r"number in \[0, 1\), got 1.5"):
            op(*operands, keep, 2, 4, 1.5)
        with pytest.raises(ConfigError, match="unknown impl: expected one of auto, reference, cpu, triton, got 'cuda'"):
            op(*operands, keep, 2, 4, 0.5, "cuda")
    with pytest.raises(ConfigError, match=r"number in \[0, 1\), got nan"):
        draw_ops.drop_mask(seed(1), 4, 8, 2, 4, float("nan"))
    with pytest.raises(ConfigError, match="unknown impl: expected one of auto, reference, cpu, triton, got 'cuda'"):
        draw_ops.drop_mask(seed(1), 4, 8, 2, 4, 0.5, "cuda")


@pytest.mark.parametrize("impl", ["auto", "cpu", "reference"])
@pytest.mark.parametrize("kept", [True, False], ids=["something kept", "nothing kept"])
def test_operands_of_two_dtypes_are_refused_as_pytorch_refuses_them(kept, impl):
    """Whatever was drawn, and of a bias, too."""
    x, w, bias, gy, keep = torch.randn(128, 128), torch.randn(64, 128), torch.randn(64), torch.randn(128, 64), torch.eye(2, dtype=torch.bool) & kept
    how, fx = (keep, 64, 64, 0.5, impl), torch.ops.fxmask
    assert impl != "auto" or dropout_runs.pays(x, (64, 64), 0.5)
    for call in (
        lambda: fx.dropped_linear(x, w, bias.double(), *how),
        lambda: fx.dropped_linear(x, w.double(), None, *how),
        lambda: fx.dropped_dx(gy, w.double(), *how),
        lambda: fx.dropped_dw(gy.double(), x, *how),
    ):
        with pytest.raises(RuntimeError, match="dtype"):
            call()


def test_where_runs_pay(monkeypatch):
    x = torch.zeros(1)
    for threads, wanted in ((1, {256: 0.1, 128: 0.1, 64: 0.2, 32: 0.5}), (2, {128: 0.1, 64: 0.2, 32: 0.7})):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        found = {side: min(p / 100 for p in range(100) if dropout_runs.pays(x, (side, 256), p / 100)) for side in wanted}
        assert found == wanted
        assert dropout_runs.pays(x, (128, 128), 0.99) and not dropout_runs.pays(x.to("meta"), (128, 128), 0.99)
        assert not dropout_runs.pays(x, (16, 128), 0.99) and not dropout_runs.pays(x.half(), (128, 128), 0.99)
