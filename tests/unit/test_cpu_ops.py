"""`impl="cpu"` and `impl="auto"` as PyTorch sees them: gradients of every mode, transforms, compilers, models."""

import copy

import pytest
import torch
import torch.nn.functional as F
from sample_models import Residual
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from unit.test_ops import BLOCK, CASES
from unit.test_ops import tensors as tensors

import fxmask
from fxmask.errors import ShapeError, UnsupportedError
from fxmask.kernels import dropout, joint, ops, reference
from fxmask.kernels.cpu import chosen, deciding, implementation, masked_dense
from fxmask.kernels.cpu.plans import BY_NAME, Case
from fxmask.kernels.grid import kept_elements

IMPLS = pytest.mark.parametrize("impl", ["cpu", "auto"])


@pytest.fixture
def always_strips(monkeypatch):
    """Small ops in strips under `auto`, too, as if masked-dense were slow."""
    monkeypatch.setattr(deciding, "SMALL", 0.0)
    monkeypatch.setattr(deciding, "seconds", lambda plan, case: float(plan == chosen.MASKED_DENSE) + 1e-6 * plan.chunk)
    monkeypatch.setattr(deciding, "decisions", {})
    for name in ("masked_linear", "masked_linear_dx", "masked_linear_dw", "masked_linear_backward"):
        monkeypatch.setattr(chosen.reference, name, refuse)
        monkeypatch.setattr(chosen.masked_dense, name, refuse)


def refuse(*_):
    raise AssertionError("masked-dense was asked")


def step(tensors, mode, flag, impl, bias=True):
    x, w, b, gy, mask = tensors
    y = ops.linear(x, w, b if bias else None, mask, BLOCK, mode, flag, impl)
    return [y.detach(), *torch.autograd.grad(y, (x, w, b) if bias else (x, w), gy)]


@IMPLS
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize(("mode", "flag"), CASES)
def test_gradients_of_every_mode(tensors, mode, flag, bias, impl):
    for got, expected in zip(step(tensors, mode, flag, impl, bias), step(tensors, mode, flag, "reference", bias), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("always_strips")
def test_auto_runs_strips_where_they_are_faster(tensors):
    y, dx, dw, _ = step(tensors, "masked", None, "auto")
    x, w, b, gy, mask = (t.detach() for t in tensors)
    kept = w * reference.expand_mask(mask, w.shape, BLOCK)
    torch.testing.assert_close(y, x @ kept.t() + b)
    torch.testing.assert_close(dx, gy @ kept)
    torch.testing.assert_close(dw, (gy.flatten(0, 1).t() @ x.flatten(0, 1)) * reference.expand_mask(mask, w.shape, BLOCK))


@IMPLS
@pytest.mark.parametrize("needed", ["x", "w", "b", "x w", "w b"])
def test_only_what_is_needed_is_computed(tensors, needed, impl):
    x, w, b, gy, mask = (t.detach() for t in tensors)
    leaves = {"x": x, "w": w, "b": b}
    for name in needed.split():
        leaves[name].requires_grad_()
    y = ops.linear(x, w, b, mask, BLOCK, "masked", None, impl)
    with FlopCounterMode(display=False) as counter:
        y.backward(gy)
    assert all((t.grad is not None) == t.requires_grad for t in leaves.values())
    assert counter.get_total_flops() == 2 * 10 * int(kept_elements(mask, w.shape, BLOCK)) * (("x" in needed) + ("w" in needed))


@IMPLS
@pytest.mark.parametrize(("mode", "flag"), CASES)
def test_opcheck_of_dx_and_dw_together(tensors, mode, flag, impl):
    x, w, _, gy, mask = tensors
    torch.library.opcheck(joint.masked_linear_backward, (gy, x, w, mask, *BLOCK, mode, flag, impl))


@IMPLS
def test_opcheck_of_the_ops(tensors, impl):
    x, w, b, gy, mask = tensors
    torch.library.opcheck(ops.masked_linear, (x, w, b, mask, *BLOCK, "masked", None, impl))
    torch.library.opcheck(ops.masked_linear, (x[0].detach().t().contiguous().t().requires_grad_(), w, None, mask, *BLOCK, "masked", None, impl))
    torch.library.opcheck(ops.masked_linear_dx, (gy, w, mask, *BLOCK, "masked", None, impl))
    torch.library.opcheck(ops.masked_linear_dw, (gy, x, mask, *BLOCK, "masked", None, impl))
    torch.library.opcheck(ops.block_index, (w, torch.tensor(3), torch.tensor(0), *BLOCK, "fro", "lowest", 7, impl))


@IMPLS
def test_masked_is_a_true_gradient_twice(tensors, impl):
    mask = tensors[4]
    small = [t.detach()[s].requires_grad_() for t, s in zip(tensors, (0, (slice(4, 20), slice(4, 16)), slice(4, 20)), strict=False)]
    small[0] = small[0].detach()[:3, 4:16].requires_grad_()

    def f(x, w, b):
        return ops.linear(x, w, b, mask[:, :3], (8, 5), "masked", None, impl)

    assert torch.autograd.gradcheck(f, small)
    assert torch.autograd.gradgradcheck(f, small)


@IMPLS
@pytest.mark.parametrize(("mode", "flag"), CASES)
def test_second_derivatives_are_those_of_the_reference(tensors, mode, flag, impl):
    x, w, b, gy, mask = tensors
    found = []
    for name in (impl, "reference"):
        y = ops.linear(x, w, b, mask, BLOCK, mode, flag, name)
        grads = torch.autograd.grad(y, (x, w), gy, create_graph=True)
        found.append(torch.autograd.grad(sum(t.square().sum() for t in grads), (x, w, gy)))
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


@IMPLS
def test_vmap_of_dx_and_dw_together(tensors, impl):
    x, w, _, gy, mask = (t.detach() for t in tensors)
    ws = torch.stack([w, 2 * w])

    def f(gy, x, w):
        return joint.masked_linear_backward(gy, x, w, mask, *BLOCK, "masked", None, impl)

    for dims, at in (((0, 0, None), lambda i: (gy[i], x[i], w)), ((0, None, None), lambda i: (gy[i], x[0], w)), ((None, 0, 0), lambda i: (gy[0], x[i], ws[i]))):
        given = [a if d is not None else t for d, a, t in zip(dims, (gy, x, ws), (gy[0], x[0], w), strict=True)]
        dx, dw = torch.vmap(f, in_dims=dims)(*given)
        for i in range(2):
            expected = f(*at(i))
            assert torch.equal(dx[i], expected[0]) and torch.equal(dw[i], expected[1])


@IMPLS
@pytest.mark.parametrize("mode", ["masked", "unmasked"])
def test_autocast_follows_the_ambient_dtype(tensors, mode, impl):
    x, w, b, _, mask = (t.detach().float().requires_grad_() if t.is_floating_point() else t for t in tensors)
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.linear(x, w, b, mask, BLOCK, mode, None, impl)
        y.float().square().sum().backward()
    low = [t.detach().bfloat16().requires_grad_() for t in (x, w, b)]
    expected = ops.linear(*low, mask, BLOCK, mode, None, "reference")
    expected.float().square().sum().backward()
    assert y.dtype == torch.bfloat16 and x.grad.dtype == w.grad.dtype == b.grad.dtype == torch.float32
    torch.testing.assert_close(y, expected, rtol=0.02, atol=0.05)
    for a, e in zip((x, w, b), low, strict=True):
        torch.testing.assert_close(a.grad, e.grad.float(), rtol=0.03, atol=0.03 * float(e.grad.abs().max()))


@IMPLS
@pytest.mark.parametrize(("mode", "flag"), CASES)
def test_compiled_equals_eager(tensors, mode, flag, impl):
    torch._dynamo.reset()  # the same function is compiled by other tests, too
    compiled = torch.compile(ops.linear, fullgraph=True, backend="aot_eager")
    x, w, b, gy, mask = tensors
    y = compiled(x, w, b, mask, BLOCK, mode, flag, impl)
    got = [y.detach(), *torch.autograd.grad(y, (x, w, b), gy)]
    assert all(map(torch.equal, got, step(tensors, mode, flag, impl)))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_trains_as_the_eager_one(backend):
    eager = fxmask.apply(Residual() if backend == "aot_eager" else torch.nn.Linear(32, 32), impl="cpu", ratio=0.5, block=(8, 8))
    model = copy.deepcopy(eager)
    compiled, x = torch.compile(model, fullgraph=True, backend=backend), torch.randn(4, 32, 32, generator=torch.Generator().manual_seed(1))
    for m, call in ((eager, eager), (model, compiled)):
        optimiser = torch.optim.SGD(m.parameters(), 0.1)
        for _ in range(2):
            optimiser.zero_grad()
            call(x).square().mean().backward()
            optimiser.step()
    for got, expected in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("mode", "refresh"), [("masked", 1), ("masked", 0), ("ste", 1), ("unmasked", 1), ("rigl", 1)])
def test_masked_models(mode, refresh):
    """Gradients of a model with a token-mixing linear, a functional one and a bias, as by the reference; `rigl` in both of its steps."""
    x, found = torch.randn(3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), []
    for impl in ("cpu", "auto", "reference"):
        options = {"dense_every": 2} if mode == "rigl" else {}
        model = fxmask.apply(Residual().double(), fxmask.WeightMask(ratio=0.6, block=(8, 16), backward=mode, refresh=refresh, impl=impl, **options))
        grads = []
        if mode == "rigl":
            fxmask.step(model, 0)
        for _ in range(2):
            model.zero_grad()
            model(x).square().sum().backward()
            grads += [p.grad.clone() for p in model.parameters()]
            if mode == "rigl":
                fxmask.step(model)
        found.append(grads)
        rows = [r for r in fxmask.explain(model).rows if r["masked"]]
        assert len(rows) >= 3 and all(r["impl"].startswith("forward ") if impl != "reference" else r["impl"] == impl for r in rows if r["name"] != "proj")
    for got in found[:2]:
        for a, e in zip(got, found[2], strict=True):
            torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10)


@IMPLS
def test_inference_mode_and_what_needs_no_gradient(tensors, impl):
    x, w, b, gy, mask = tensors
    expected = ops.linear(x, w, b, mask, BLOCK, "masked", None, impl)
    with torch.inference_mode():
        y = ops.linear(x, w, b, mask, BLOCK, "masked", None, impl)
        dx, dw = joint.masked_linear_backward(gy, x, w, mask, *BLOCK, "masked", None, impl)
        assert y.is_inference() and torch.equal(y, expected)
    assert expected.requires_grad
    with torch.no_grad():
        assert not ops.linear(x, w, b, mask, BLOCK, "masked", None, impl).requires_grad
    grads = torch.autograd.grad(expected, (x, w), gy)
    assert torch.equal(grads[0], dx) and torch.equal(grads[1], dw)
    assert torch.equal(torch.autograd.grad(ops.linear(x, w, b, mask, BLOCK, "masked", None, impl).sum(), w)[0],
                       implementation_dw(torch.ones_like(gy), x, mask, impl))  # fmt: skip


def implementation_dw(gy, x, mask, impl):
    """dW of a sum: its gradient is one number, expanded."""
    if impl == "auto":  # too small for strips
        return reference.masked_linear_dw(gy, x, mask, None, BLOCK, "masked")
    case = Case("backward", x.shape[:-1].numel(), (20, 30), BLOCK, float(mask.double().mean()), x.dtype)
    return implementation.backward(gy, x, None, mask, BLOCK, BY_NAME[deciding.of(case, forced=True).name])[1]


def test_meta_tensors_have_shapes_and_no_values():
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 32))
    fxmask.apply(model, ratio=0.5, impl="cpu")
    y = model(torch.empty(5, 64, device="meta"))
    assert y.shape == (5, 32) and y.device.type == "meta"
    assert all(r["masked"] for r in fxmask.explain(model).rows)
    with pytest.raises(UnsupportedError, match="meta"):
        fxmask.masks(model)
    model.to_empty(device="cpu")
    for p in model.parameters():
        torch.nn.init.normal_(p)
    assert model(torch.randn(5, 64)).isfinite().all()


def test_operands_of_two_dtypes_are_refused_as_pytorch_refuses_them():
    gy, x, w = torch.randn(40, 32), torch.randn(40, 48).double(), torch.randn(32, 48).double()
    mask, fx = torch.tensor([[True, False, True], [False, True, True]]), torch.ops.fxmask
    for impl in ("cpu", "reference"):
        for call in (
            lambda i: fx.masked_linear(x.float(), w, None, mask, 16, 16, "masked", impl=i),
            lambda i: fx.masked_linear(x, w, torch.zeros(32), mask, 16, 16, "masked", impl=i),
            lambda i: fx.masked_linear_dx(gy, w, mask, 16, 16, "masked", impl=i),
            lambda i: fx.masked_linear_dw(gy, x, mask, 16, 16, "masked", impl=i),
            lambda i: fx.masked_linear_backward(gy, x, w, mask, 16, 16, "masked", impl=i),
            lambda i: fx.masked_linear_backward(gy, x.float(), w, mask, 16, 16, "masked", impl=i),
        ):
            with pytest.raises(RuntimeError, match="dtype"):
                call(impl)


@pytest.mark.parametrize("impl", ["auto", "cpu", "reference"])
@pytest.mark.parametrize("shape", [(48, 48), (32, 64), (16, 48), (32, 32), (30, 48), (32, 47), (31, 47)], ids=str)
def test_both_gradients_of_another_weight_than_the_masks_are_refused(shape, impl):
    """One of as many blocks among them: strips would read as much of it as there is."""
    gy, x, mask = torch.randn(5, 32), torch.randn(5, 48), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ShapeError, match=rf"last axis of (gy: expected {shape[0]}|x: expected {shape[1]}), got shape"):
        torch.ops.fxmask.masked_linear_backward(gy, x, torch.randn(shape), mask, 16, 16, "masked", None, impl)


def test_a_layer_that_keeps_every_block_has_the_bits_of_a_dense_one(monkeypatch):
    monkeypatch.setattr(deciding, "choose", lambda case, *_: pytest.fail(f"strips were asked for: {case}"))  # whose bits are others on some processors only
    torch.manual_seed(0)
    x, w, b = (torch.randn(shape, requires_grad=True) for shape in ((300, 200), (136, 200), (136,)))
    found = []
    for y in (F.linear(x, w, b), ops.masked_linear(x, w, b, torch.ones(9, 13, dtype=torch.bool), 16, 16, "masked", None, "cpu")):
        found.append([y, *torch.autograd.grad(y.square().sum(), (x, w, b))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("impl", ["cpu", "auto", "reference"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize(("batch", "channels", "tokens", "out"), [(3, 5, 196, 196), (2, 5, 16, 196), (4, 2, 33, 17), (64, 1, 48, 33)])
def test_so_has_one_that_mixes_tokens(batch, channels, tokens, out, bias, impl):
    torch.manual_seed(0)
    x, gy = torch.randn(batch, tokens, channels, requires_grad=True), torch.randn(batch, out, channels).transpose(1, 2)
    w, b = torch.randn(out, tokens, requires_grad=True), torch.randn(out, requires_grad=True)
    mask, found, wanted = torch.ones(-(-out // 16), -(-tokens // 16), dtype=torch.bool), [], (x, w, b) if bias else (x, w)
    for run in (F.linear, lambda x, w, b: ops.masked_linear(x, w, b, mask, 16, 16, "masked", None, impl)):
        y = run(x.transpose(1, 2), w, b if bias else None)
        found.append([y, *torch.autograd.grad(y, wanted, gy)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("channels", [1, 7])
def test_few_tokens_side_by_side_are_one_product(channels):
    """Batch by batch, seven channels of 196 tokens took 30 times as long as the dense layer, and one channel, which lies contiguous, 12 times."""
    x, gy = (torch.randn(28 // channels, features, channels).transpose(1, 2) for features in (64, 48))
    w, mask, block, dropped = torch.randn(48, 64), torch.ones(3, 4, dtype=torch.bool), (16, 16), torch.ones(2, 4, dtype=torch.bool)
    with Ops() as ran:
        made = [form.masked_linear(x, w, None, mask, block) for form in (reference, masked_dense)]
        made += [form.masked_linear_dx(gy, w, mask, block, mode) for form in (reference, masked_dense) for mode in ("masked", "unmasked")]
        made += [masked_dense.masked_linear_backward(gy, x, w, mask, block)[0], dropout.dx(gy, w, dropped, block, 0.0)]
        assert (before := len(ran.seen)) and masked_dense.masked_linear_backward(gy, x, w, mask, block)
    assert channels == 1 or ran.seen[before:].count(torch.ops.aten.clone.default) == 2  # of x and of gy
    assert torch.ops.aten.bmm.default not in ran.seen and torch.ops.aten.mm.default in ran.seen
    y, gx = F.linear(x.contiguous(), w), gy.contiguous() @ w
    assert all(t.is_contiguous() for t in made)
    for t in made:
        torch.testing.assert_close(t, y if t.shape == y.shape else gx)


def test_a_gradient_that_is_a_part_of_wider_rows_is_not_copied():
    """As torch.cat hands it back. PyTorch multiplies such rows as they lie."""
    gy, x, w, mask = torch.randn(4, 7, 50)[..., :48], torch.randn(4, 7, 64), torch.randn(48, 64), torch.ones(3, 4, dtype=torch.bool)
    with Ops() as ran:
        made = masked_dense.masked_linear_backward(gy, x, w, mask, (16, 16))
    assert torch.ops.aten.clone.default not in ran.seen
    torch.testing.assert_close(made, (gy @ w, gy.flatten(0, 1).T @ x.flatten(0, 1)))


def test_a_gradient_that_is_wanted_whole_is_a_dense_one(monkeypatch):
    """As on the steps of `rigl` whose flag is set: how much the mask keeps does not count."""
    monkeypatch.setattr(deciding, "choose", lambda case, *_: pytest.fail(f"strips were asked for: {case}"))
    gy, x, mask = torch.randn(300, 136), torch.randn(300, 200), torch.zeros(9, 13, dtype=torch.bool)
    assert torch.equal(ops.masked_linear_dw(gy, x, mask, 16, 16, "rigl", torch.tensor(True), "cpu"), gy.t() @ x)
