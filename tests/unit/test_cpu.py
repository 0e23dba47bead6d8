"""The CPU's strips against the reference: every plan, shape, dtype and odd operand; and what they really multiply."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fxmask.kernels import reference
from fxmask.kernels.cpu import chosen, implementation, runs
from fxmask.kernels.cpu.plans import COLUMNS_512, MASKED_DENSE, ROWS_512, ROWS_512X3, RUNS_2048, Plan
from fxmask.kernels.errors import UnsupportedError
from fxmask.kernels.grid import grid_shape, kept_elements

ODD = (Plan("rows", 7), Plan("columns", 7))
FORWARD = (ROWS_512, ROWS_512X3, RUNS_2048, Plan("rows", 7), Plan("runs", 7), Plan("runs", 100, 2), Plan("rows", 100, 2), Plan("rows", 7, 3))
BACKWARDS = (ROWS_512, COLUMNS_512)
BACKWARD = (*BACKWARDS, *ODD)
IDS = ("lead", "shape", "block", "density", "dtype")
CASES = {
    "token mixing": ((2, 40), (196, 196), (16, 16), 0.5, torch.float32),
    "token mixing, two ranges": ((3, 200), (196, 196), (32, 32), 0.3, torch.float32),
    "1000 x 768": ((300,), (1000, 768), (64, 64), 0.3, torch.float32),
    "1000 x 770": ((300,), (1000, 770), (64, 64), 0.6, torch.float32),
    "17 x 33": ((70,), (17, 33), (16, 16), 0.6, torch.float32),
    "1 x 1": ((5,), (1, 1), (16, 16), 1.0, torch.float32),
    "a token": ((1,), (48, 80), (16, 16), 0.5, torch.float32),
    "no lead": ((), (48, 80), (16, 16), 0.5, torch.float32),
    "a few more than two chunks": ((523,), (64, 96), (16, 32), 0.4, torch.float32),
    "nothing kept": ((60,), (64, 48), (16, 16), 0.0, torch.float32),
    "everything kept": ((60,), (64, 48), (16, 16), 1.0, torch.float32),
    "one block kept": ((60,), (256, 160), (16, 16), -1, torch.float32),
    "all but one kept": ((60,), (256, 160), (16, 16), -2, torch.float32),
    "blocks larger than the weight": ((60,), (33, 17), (128, 300), 1.0, torch.float32),
    "wide blocks": ((60,), (50, 200), (8, 48), 0.4, torch.float32),
    "tall blocks": ((60,), (200, 50), (48, 8), 0.4, torch.float32),
    "a row each": ((60,), (20, 30), (1, 30), 0.4, torch.float32),
    "an element each": ((20,), (13, 11), (1, 1), 0.4, torch.float32),
    "bfloat16": ((2, 300), (96, 130), (16, 16), 0.4, torch.bfloat16),
    "float16": ((2, 300), (96, 130), (16, 16), 0.4, torch.float16),
    "float64": ((2, 40), (60, 70), (16, 16), 0.4, torch.float64),
}


def mask_of(shape, block, density, g):
    """A mask, without its first strip of either direction where it keeps some; -1 keeps one block, -2 all but one."""
    nb, kb = grid_shape(shape, block)
    mask = torch.rand(nb, kb, generator=g) < density
    if 0 < density < 1:
        mask[0] = mask[:, 0] = False
    if density < 0:
        mask.view(-1)[int(torch.randint(nb * kb, (), generator=g))] = True
    return ~mask if density == -2 else mask


def operands(lead, shape, block, density, dtype, seed=0):
    """x, w, bias, gy and mask; x and gy of more than two axes are transposed, as token mixing has them."""
    g = torch.Generator().manual_seed(seed)

    def make(*s):
        return torch.randn(s, generator=g, dtype=torch.float64).to(dtype)

    def tokens(features):
        return make(lead[0], features, lead[1]).transpose(1, 2) if len(lead) == 2 else make(*lead, features)

    n, k = shape
    return tokens(k), make(n, k), make(n), tokens(n), mask_of(shape, block, density, g)


def close(got, plain, exact, what=""):
    """At most twice the error of masked-dense in the same dtype, and a rounding of the largest value; see `fxmask.bench.gate`.

    In float32 the largest error is a matter of chance, since strips add up longer runs of values that are no zeros: twice the root mean square is the rule
    there, and four times the largest error.
    """
    assert (got.shape, got.dtype) == (exact.shape, plain.dtype) and got.is_contiguous(), what
    want = exact.astype(np.longdouble) if isinstance(exact, np.ndarray) else exact.double().numpy().astype(np.longdouble)
    error, base = (np.abs(t.double().numpy() - want) for t in (got, plain))
    assert np.isfinite(error).all(), what
    eps, chance = torch.finfo(got.dtype).eps, 4 if got.dtype == torch.float32 else 2
    largest, allowed = float(error.max(initial=0)), chance * float(base.max(initial=0)) + eps * float(np.abs(want).max(initial=0))
    assert largest <= allowed, what
    mean, other, size = (float(np.sqrt(np.square(t).sum() / max(1, t.size))) for t in (error, base, want))
    assert mean <= 2 * other + eps * size / 2, what


def product(a, b):
    """In float64, of float64 in more."""
    if a.dtype != torch.float64:
        return a.double() @ b.double()
    return a.numpy().astype(np.longdouble) @ b.numpy().astype(np.longdouble)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(IDS, CASES.values(), ids=CASES)
def test_forward_and_dx_of_every_plan(lead, shape, block, density, dtype):
    x, w, bias, gy, mask = operands(lead, shape, block, density, dtype)
    kept = reference.masked(w, mask, block)
    exact_y, exact_dx = product(x, kept.t()), product(gy, kept)
    b = bias.double().numpy() if dtype == torch.float64 else bias.double()
    plain_y, plain_b = (reference.masked_linear(x, w, t, mask, block) for t in (None, bias))
    plain_dx = reference.masked_linear_dx(gy, w, mask, block, "masked")
    for plan in FORWARD:
        close(implementation.masked_linear(x, w, None, mask, block, plan), plain_y, exact_y, f"y by {plan}")
        close(implementation.masked_linear(x, w, bias, mask, block, plan), plain_b, exact_y + b, f"y with a bias by {plan}")
        close(implementation.masked_linear_dx(gy, w, mask, block, plan), plain_dx, exact_dx, f"dX by {plan}")


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(IDS, CASES.values(), ids=CASES)
def test_backward_of_every_plan(lead, shape, block, density, dtype):
    x, w, _, gy, mask = operands(lead, shape, block, density, dtype)
    kept = torch.ones_like(w).where(reference.expand_mask(mask, w.shape, block), 0)
    exact_dx, exact_dw = product(gy, reference.masked(w, mask, block)), product(reference.rows(gy).t(), reference.rows(x))
    exact_dw = exact_dw * (kept.numpy() if dtype == torch.float64 else kept.double())
    plain_dx, plain_dw = reference.masked_linear_backward(gy, x, w, mask, None, block, "masked")
    for plan in BACKWARD:
        dx, dw = implementation.backward(gy, x, w, mask, block, plan)
        nothing, alone = implementation.backward(gy, x, None, mask, block, plan)
        close(dx, plain_dx, exact_dx, f"dX by {plan}")
        close(dw, plain_dw, exact_dw, f"dW by {plan}")
        assert nothing is None and torch.equal(alone, dw)
        assert not dw[kept == 0].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_over_many_chunks_keep_the_budget_where_the_processor_multiplies_16_bits(dtype, monkeypatch):
    """As on a machine with instructions for bfloat16: dW adds up over all tokens, chunk by chunk, and `runs` over the runs of a strip."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    x, w, _, gy, mask = operands((8192,), (48, 64), (16, 16), 1.0, dtype)
    exact, plain = product(gy.t(), x), reference.masked_linear_dw(gy, x, mask, None, (16, 16), "masked")
    for plan in BACKWARDS:
        close(implementation.backward(gy, x, w, mask, (16, 16), plan)[1], plain, exact, str(plan))
    x, w, _, _, mask = operands((300,), (32, 1024), (16, 4), 0.5, dtype)
    exact, plain = product(x, reference.masked(w, mask, (16, 4)).t()), reference.masked_linear(x, w, None, mask, (16, 4))
    for plan in FORWARD:
        close(implementation.masked_linear(x, w, None, mask, (16, 4), plan), plain, exact, str(plan))


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("block", [(16, 16), (5, 24)])
def test_a_broken_weight_shows_where_it_is_kept_and_only_there(block, broken):
    x, w, bias, gy, mask = operands((50,), (70, 90), block, 0.4, torch.float32)
    kept = reference.expand_mask(mask, w.shape, block)
    hidden = w.masked_fill(~kept, broken)
    shown = w.clone()
    row, column = kept.nonzero()[0].tolist()
    shown[row, column] = broken
    for plan in FORWARD:
        for f in (lambda w, p: implementation.masked_linear(x, w, bias, mask, block, p), lambda w, p: implementation.masked_linear_dx(gy, w, mask, block, p)):
            assert torch.equal(f(hidden, plan), f(w, plan))
            assert not f(shown, plan).isfinite().all()
        assert (~implementation.masked_linear(x, shown, bias, mask, block, plan).isfinite()).any(0).nonzero().tolist() == [[row]]
    for plan in BACKWARD:
        dx, dw = implementation.backward(gy, x, hidden, mask, block, plan)
        assert dx.isfinite().all() and dw.isfinite().all()
        assert (~implementation.backward(gy, x, shown, mask, block, plan)[0].isfinite()).any(0).nonzero().tolist() == [[column]]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("case", ["17 x 33", "a few more than two chunks", "nothing kept", "bfloat16"])
def test_memory_that_was_not_written_is_not_read(case, monkeypatch):
    """It may hold NaN, which times zero is none."""
    x, w, bias, gy, mask = operands(*CASES[case])
    block, empty, new_empty = CASES[case][2], torch.empty, torch.Tensor.new_empty

    def results():
        found = [implementation.masked_linear(x, w, b, mask, block, plan) for plan in FORWARD for b in (None, bias)]
        found += [implementation.masked_linear_dx(gy, w, mask, block, plan) for plan in FORWARD]
        return found + [t for plan in BACKWARD for t in implementation.backward(gy, x, w, mask, block, plan)]

    expected = results()
    assert all(t.isfinite().all() for t in expected)
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: new_empty(*a, **k).fill_(float("nan")))
    assert all(map(torch.equal, results(), expected))


def flops(f, *arguments):
    """Of the matmuls themselves; PyTorch counts none of `addmm_` unless told how."""
    told = {torch.ops.aten.addmm_: lambda out, a, b, *_, **__: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=told) as counter:
        f(*arguments)
    return counter.get_total_flops()


@pytest.mark.parametrize("density", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("block", [(16, 16), (32, 8), (8, 32)])
def test_masked_blocks_are_skipped(block, density):
    tokens, shape = 140, (96, 64)
    x, w, bias, gy, mask = operands((tokens,), shape, block, density, torch.float32)
    kept = 2 * tokens * int(kept_elements(mask, shape, block))
    assert flops(reference.masked_linear, x, w, bias, mask, block) == (dense := 2 * tokens * w.numel())
    for plan in FORWARD:
        counts = [flops(implementation.masked_linear, x, w, b, mask, block, plan) for b in (bias, None)]
        counts.append(flops(implementation.masked_linear_dx, gy, w, mask, block, plan))
        if plan.group == 1 or density in (0, 1):
            assert counts == [kept] * 3, plan
        else:
            assert all(kept < c < dense for c in counts), (plan, counts)
    for plan in BACKWARD:
        assert flops(implementation.backward, gy, x, w, mask, block, plan) == 2 * kept, plan
        assert flops(implementation.backward, gy, x, None, mask, block, plan) == kept, plan


def test_neighbours_among_the_kept_blocks_are_one_product(monkeypatch):
    """Where nothing is gathered: a run begins with `mm`, the others of a strip are added."""
    x, w, _, gy, _ = operands((40,), (32, 96), (16, 16), 1.0, torch.float32)
    mask, read = torch.tensor([[1, 1, 1, 0, 1, 1], [0, 0, 1, 0, 0, 0]]).bool(), []
    monkeypatch.setattr(runs.torch, "mm", lambda a, b, out, real=torch.mm: (read.append(a.shape[1]), real(a, b, out=out))[1])
    monkeypatch.setattr(torch.Tensor, "addmm_", lambda t, a, b, real=torch.Tensor.addmm_: (read.append(a.shape[1]), real(t, a, b))[1])
    implementation.masked_linear(x, w, None, mask, (16, 16), RUNS_2048)
    assert read == [48, 32, 16]
    read.clear()
    implementation.masked_linear_dx(gy, w, mask, (16, 16), RUNS_2048)
    assert read == [16, 16, 32, 0, 16, 16]


@pytest.mark.parametrize("form", [chosen.AUTO, chosen.FORCED], ids=["auto", "cpu"])
@pytest.mark.parametrize(("lead", "shape"), [((0,), (20, 30)), ((3, 0), (20, 30)), ((4,), (0, 30)), ((4,), (20, 0)), ((0,), (0, 0))])
def test_empty_operands(form, lead, shape):
    x, w, bias, gy, mask = operands(lead, shape, (8, 8), 1.0, torch.float32)
    for b in (bias, None):
        assert torch.equal(form.masked_linear(x, w, b, mask, (8, 8)), reference.masked_linear(x, w, b, mask, (8, 8)))
    got, expected = (f.masked_linear_backward(gy, x, w, mask, None, (8, 8), "masked") for f in (form, reference))
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    assert torch.equal(form.masked_linear_dx(gy, w, mask, (8, 8), "masked"), expected[0])
    assert torch.equal(form.masked_linear_dw(gy, x, mask, None, (8, 8), "masked"), expected[1])


@pytest.mark.parametrize("plan", [Plan("rows", 7), Plan("rows", 256, 2), Plan("runs", 512), Plan("columns", 256)], ids=str)
def test_odd_strides(plan):
    """Of 0, of 2, and of weights and biases that are views."""
    x, w, bias, gy, mask = operands((40,), (40, 48), (16, 16), 0.5, torch.float32)
    forms = {
        "one token for all": lambda t: t[:1].expand(t.shape),
        "one feature for all": lambda t: t[..., :1].expand(t.shape),
        "one number": lambda t: t[0, 0].expand(t.shape),
        "every second": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
        "a window": lambda t: torch.nn.functional.pad(t, (1, 1, 1, 1))[1:-1, 1:-1],
        "transposed": lambda t: t.t().contiguous().t(),
    }
    for name, form in forms.items():
        a, b, c = form(x), form(w), form(gy)
        pairs = []
        if plan.layout != "runs":
            both = implementation.backward(c, a, b, mask, (16, 16), plan._replace(group=1))
            pairs += zip(both, reference.masked_linear_backward(c, a, b, mask, None, (16, 16), "masked"), strict=True)
        if plan.layout != "columns":
            for one in (bias[:1].expand(40), bias[:1]):
                pairs.append((implementation.masked_linear(a, b, one, mask, (16, 16), plan), reference.masked_linear(a, b, one, mask, (16, 16))))
            pairs.append((implementation.masked_linear_dx(c, b, mask, (16, 16), plan), reference.masked_linear_dx(c, b, mask, (16, 16), "masked")))
        for got, expected in pairs:
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_only_cpu_tensors_are_taken():
    with pytest.raises(UnsupportedError, match=r"expected device cpu, got meta; use impl='auto'"):
        chosen.require(torch.empty(2, 3, device="meta"))
    chosen.require(torch.empty(2, 3))
    assert str(MASKED_DENSE) == "masked_dense"
