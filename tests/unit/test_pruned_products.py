"""`ActivationPruning(affine=True)` on modules: y, dx and db of the product, da of the pruned input, memory that is really less, and what apply promises."""

import copy
import gc
import pickle
import re
import weakref

import pytest
import torch
from resmlp import Affine
from torch import nn
from torch.utils.checkpoint import checkpoint
from unit.pruned_models import grads, pruned_input, saved_bytes

import fxmask
from fxmask import ActivationPruning, Schedule, WeightMask
from fxmask.errors import ShapeError, UnsupportedError
from fxmask.kernels import prune, scale_ops
from fxmask.pruning import PrunedProduct


class Gain(nn.Module):
    """timm's LayerScale, with a gain a channel, or one a token."""

    def __init__(self, *shape: int, inplace: bool = False) -> None:
        super().__init__()
        self.gamma, self.inplace = nn.Parameter(torch.rand(shape)), inplace

    def forward(self, x):
        return x.mul_(self.gamma) if self.inplace else x * self.gamma


class Shifted(nn.Module):
    """An affine that is no addcmul, which rounds twice."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.rand(dim)), nn.Parameter(torch.rand(dim))

    def forward(self, hidden):
        return self.a * hidden + self.b


KINDS = {"affine": lambda: Affine(64), "gain": lambda: Gain(64), "token": lambda: Gain(10, 1), "scalar": lambda: Gain(), "shifted": lambda: Shifted(64)}


def filled(m: nn.Module, dtype=torch.float64) -> nn.Module:
    torch.manual_seed(0)
    for p in m.parameters():
        nn.init.normal_(p)
    return m.to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_only_da_changes(kind, ratio, dtype):
    dense, x = filled(KINDS[kind](), dtype), torch.randn(3, 10, 64, dtype=dtype)
    model = fxmask.apply(copy.deepcopy(dense), ActivationPruning(ratio, 16, affine=True))
    assert isinstance(model, PrunedProduct) and torch.equal(model(x), dense(x))
    want, got = grads(dense, x), grads(model, x)
    first = next(n for n, _ in dense.named_parameters() if n in ("alpha", "gamma", "a"))
    for name, g in want.items():
        assert torch.equal(got[name], g) == (name != first or ratio == 0), name
    exact = (2 * dense(x).detach().double() * pruned_input(x, ratio, 16)).sum_to_size(want[first].shape)
    torch.testing.assert_close(got[first].double(), exact, rtol=1e-12 if dtype == torch.float64 else 1e-4, atol=1e-12 if dtype == torch.float64 else 1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_an_input_of_fewer_bits_than_its_parameter_costs_the_gradient_none(dtype):
    """As under autocast, where a Linear gives 16 bits and a gain has 32: the product is of 32, and so is what is summed for da."""
    model, x = fxmask.apply(filled(Gain(64), torch.float32), ActivationPruning(0.5, 16, affine=True)), torch.randn(3, 10, 64).to(dtype)
    gy = torch.randn(3, 10, 64)
    y = model(x)
    y.backward(gy)
    exact = (gy.double() * pruned_input(x, 0.5, 16).double()).sum((0, 1))
    assert y.dtype == model.gamma.grad.dtype == torch.float32
    torch.testing.assert_close(model.gamma.grad.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 10, 64), (7, 64), (64,), (2, 3, 5, 64), (2, 9, 50)], ids=str)
def test_every_sample_keeps_as_many_blocks(shape):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    b, r, c = prune.sample_shape(shape, False)
    n = prune.block_count(r, c, 16)
    kept = n - prune.dropped_count(n, 0.7)
    y, values, index = scale_ops.pruned_scale(x, torch.rand(shape[-1], dtype=torch.float64), None, 16, kept, False)
    assert y.shape == x.shape and values.shape == (b, kept, 16) and index.shape == (b, kept) and index.dtype == torch.int16
    back = prune.expand(values, index, x.shape, False)
    assert torch.equal(back[back != 0], x[back != 0]) and torch.equal(back, pruned_input(x.detach(), 0.7, 16))


def test_the_derivative_is_that_of_the_formula():
    """dx and db by differences; da of y = a x is that of y = a x_s, so gradcheck sees it where x is its own pruned form."""
    torch.manual_seed(0)
    x = pruned_input(torch.randn(2, 3, 8, dtype=torch.float64), 0.5, 4)
    a, b = (torch.randn(8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda a, b: scale_ops.pruned_scale(x, a, b, 4, 3, False)[0], (a, b))
    moved = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, b: scale_ops.pruned_scale(x, a.detach(), b, 4, 3, False)[0], (moved, b))
    assert not torch.autograd.gradcheck(lambda a: scale_ops.pruned_scale(moved.detach(), a, b, 4, 3, False)[0], (a,), raise_exception=False)


@pytest.mark.parametrize("shift", [False, True])
def test_the_ops_are_sound(shift):
    x, a = torch.randn(2, 5, 48, requires_grad=True), torch.randn(48, requires_grad=True)
    b = torch.randn(5, 1, requires_grad=True) if shift else None
    torch.library.opcheck(torch.ops.fxmask.pruned_scale.default, (x, a, b, 16, 6, False))
    torch.library.opcheck(torch.ops.fxmask.pruned_scale.default, (torch.randn(2, 48, 5).transpose(1, 2), a, None, 16, 6, True))
    _, values, index = scale_ops.pruned_scale(x.detach(), a.detach(), None, 16, 6, False)
    torch.library.opcheck(torch.ops.fxmask.pruned_scale_da.default, (torch.randn(2, 5, 48), values, index, [2, 5, 48], False, [48]))
    gy, turned = torch.randn(2, 5, 48), torch.randn(2, 48, 5).transpose(1, 2)
    _, values, index = scale_ops.pruned_scale(turned, a.detach(), None, 16, 6, True)
    torch.library.opcheck(torch.ops.fxmask.pruned_scale_da.default, (gy, values, index, [2, 5, 48], True, [2, 5, 48]))
    assert scale_ops.pruned_scale_da(gy, values, index, [2, 5, 48], True, [2, 5, 48]).is_contiguous()
    torch.library.opcheck(torch.ops.fxmask.pruned_scale_da.default, (gy.half(), values, index, [2, 5, 48], True, [48]))
    with pytest.raises(ShapeError, match=r"gy: expected the shape of the input, \(2, 5, 48\), got \(5, 2, 48\)"):
        scale_ops.pruned_scale_da(gy.transpose(0, 1), values, index, [2, 5, 48], True, [48])


def test_what_the_op_takes_and_what_has_a_gradient():
    x, a = torch.randn(5, 48, requires_grad=True), torch.randn(48, requires_grad=True)
    y, values, index = scale_ops.pruned_scale(x, a, None, 16, 2, False)
    assert [t.requires_grad for t in (y, values, index)] == [True, False, False]
    larger = torch.randn(2, 1, 48)
    others = {
        "larger b": (x, a, larger, "torch.float32 (5, 48) with (48,) and (2, 1, 48)"), "larger a": (x, larger, None, "torch.float32 (5, 48) with (2, 1, 48)"),
        "larger a beside b": (x, larger, a, "torch.float32 (5, 48) with (2, 1, 48) and (48,)"),
        "integers": (x.detach().int(), a, a, "torch.int32 (5, 48) with (48,) and (48,)"), "a number": (x[0, 0], a[0], None, "torch.float32 () with ()"),
    }  # fmt: skip
    for x, a, b, got in others.values():
        assert not scale_ops.fits(x, a, b)
        with pytest.raises(ShapeError, match=re.escape(f"a pruned product: expected a floating x that has its result's shape, got {got}")):
            scale_ops.pruned_scale(x, a, b, 16, 2, False)


def test_what_no_gradient_needs_is_not_saved():
    x, a = torch.randn(5, 48), torch.randn(48)
    for of_x, of_a in ((True, False), (False, True)):
        held = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, held=held: held.append(tuple(t.shape)) or t, lambda t: t):
            scale_ops.pruned_scale(x.clone().requires_grad_(of_x), a.clone().requires_grad_(of_a), None, 16, 2, False)
        assert held == ([(48,)] if of_x else [(5, 2, 16), (5, 2)])


def test_forward_mode_is_refused():
    x, a = torch.randn(5, 48), torch.randn(48)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(UnsupportedError, match="forward-mode"):
        scale_ops.pruned_scale(torch.autograd.forward_ad.make_dual(x, x), a, None, 16, 2, False)


def test_what_stays_dense_says_nothing_in_a_graph():
    x, a = torch.randn(5, 1), torch.randn(48)
    compiled = torch.compile(lambda x: scale_ops.scale(x, a, None, 16, 0.5), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), x * a)


def test_blocks_lie_along_the_axis_of_stride_one():
    """Behind token mixing: the gain's input is a transposed view, (batch, tokens, channels) with tokens inside."""
    model = fxmask.apply(filled(Gain(48)), ActivationPruning(0.5, 16, affine=True))
    x = torch.randn(3, 48, 32, dtype=torch.float64).transpose(1, 2)
    assert prune.is_turned(x, 16)
    y = model(x)
    gy = torch.randn_like(y)
    y.backward(gy)
    torch.testing.assert_close(model.gamma.grad, (gy * pruned_input(x, 0.5, 16)).sum((0, 1)))
    assert y.stride() == (x * model.gamma).stride()
    narrow = fxmask.apply(filled(Gain(40)), ActivationPruning(0.5, 16, affine=True))
    x = torch.randn(3, 40, 8, dtype=torch.float64).transpose(1, 2)  # a row is one block, of 8 features and no padding
    assert prune.is_turned(x, 16) and saved_bytes(narrow, x) == 3 * 20 * (8 * 8 + 2)


def test_the_dense_input_is_freed_after_the_forward(little_garbage):
    def held(layer: nn.Module) -> bool:
        x = torch.randn(8, 10, 64, requires_grad=True) * 1  # nothing else holds it
        ref, y = weakref.ref(x), layer(x)
        del x
        gc.collect()
        assert y.grad_fn is not None
        return ref() is not None

    for layer in (Affine(64), Gain(64), Shifted(64)):
        assert held(layer)
        assert not held(fxmask.apply(layer, ActivationPruning(0.5, 16, affine=True)))


def test_autograd_holds_what_the_formula_says_and_analyze_knows_it():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid(), Affine(64), nn.Linear(64, 64)), torch.randn(4, 10, 64)
    one = 4 * 10 * 64 * 4
    assert saved_bytes(model, x) == 3 * one  # x, the sigmoid's result, which is the affine's input, too, and the last linear's input
    pruned = 4 * (40 - 32) * (16 * 4 + 2)
    fxmask.apply(model, ActivationPruning(0.8, 16, affine=True))
    held = fxmask.analyze(model, x)
    index = 4 * (40 - 32) * 2  # the sigmoid holds on to its result: nothing is freed, and numbers of blocks are all that comes on top
    assert saved_bytes(model, x) == one + 2 * pruned + index == held.tables["footprint"][-1]["saved_activations"]
    assert held.summary["coverage"]["nodes_pct"] == 100
    rows = {r["module"]: r for r in held.tables["footprint"]}
    assert [rows[name]["saved_activations"] for name in "0123"] == [pruned, one, index, pruned]
    gain = nn.Sequential(nn.Linear(64, 64), Gain(64))
    before = saved_bytes(gain, x)
    assert before == one + 4 * 10 * 64 * 4
    fxmask.apply(gain, ActivationPruning(0.8, 16, affine=True))
    assert saved_bytes(gain, x) == 2 * pruned
    moved = fxmask.analyze(gain, x).tables["traffic"]
    assert "aten.zeros" not in {r["op"] for r in moved}  # no gradients of what is saved
    found = [r for r in moved if r["module"] == "1" and r["op"].startswith("fxmask")]
    assert [(r["op"], r["phase"], r["operand"], r["direction"], r["bytes_min"], r["bytes_req"]) for r in found] == [
        ("fxmask.pruned_scale", "fwd", "w", "read", 256, 256), ("fxmask.pruned_scale", "fwd", "x", "read", one, one),
        ("fxmask.pruned_scale", "fwd", "y", "write", one, one),
        ("fxmask.compress", "fwd", "x", "read", one, one), ("fxmask.compress", "fwd", "saved", "write", pruned, pruned),
        ("fxmask.pruned_scale_da", "dW", "dy", "read", one, one), ("fxmask.pruned_scale_da", "dW", "saved", "read", pruned, pruned),
        ("fxmask.pruned_scale_da", "dW", "x", "read", 0, 2 * one), ("fxmask.pruned_scale_da", "dW", "dw", "write", 256, 256),
        ("fxmask.pruned_scale_da", "dW", "x", "write", 0, 2 * one + pruned * 64 // 66),
    ]  # fmt: skip


def test_in_place_stays_in_place():
    torch.manual_seed(0)
    x = torch.randn(3, 10, 64)
    for ratio in (0.0, 0.5):
        dense, model = (nn.Sequential(nn.Linear(64, 64), filled(Gain(64, inplace=True), torch.float32)) for _ in range(2))
        model.load_state_dict(dense.state_dict())
        fxmask.apply(model, ActivationPruning(ratio, 16, affine=True), include="1*")
        hidden = [m[0](x) for m in (dense, model)]
        out = [m[1](h) for m, h in zip((dense, model), hidden, strict=True)]
        assert out[1] is hidden[1] and torch.equal(out[0], out[1])
        want, got = grads(dense, x), grads(model, x)
        assert [n for n in want if not torch.equal(want[n], got[n])] == (["1.gamma"] if ratio else [])
        with torch.no_grad():
            given = torch.ones(2, 64)
            assert model[1](given) is given and torch.equal(given[0], model[1].gamma)


def test_without_gradients_nothing_is_saved():
    model, x = fxmask.apply(filled(Affine(64), torch.float32), ActivationPruning(0.5, 16, affine=True)), torch.randn(4, 10, 64, requires_grad=True)
    with torch.no_grad():
        assert torch.equal(model(x), torch.addcmul(model.beta, model.alpha, x))
    model.alpha.requires_grad_(False)
    assert saved_bytes(model, x) == 0
    model(x).sum().backward()
    assert model.beta.grad is not None and torch.equal(x.grad, model.alpha.expand(4, 10, 64))


def both() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Affine(64), nn.Linear(64, 64), nn.GELU(), Gain(64))


def test_accumulation_checkpointing_and_autocast():
    torch.manual_seed(0)
    x = torch.randn(6, 10, 64)
    model = fxmask.apply(both(), ActivationPruning(0.5, 16, affine=True))
    whole = grads(copy.deepcopy(model), x)
    parts, again = copy.deepcopy(model), copy.deepcopy(model)
    for half in x.split(3):
        parts(half).square().sum().backward()
    checkpoint(again, x, use_reentrant=False).square().sum().backward()
    for n, p in parts.named_parameters():
        torch.testing.assert_close(p.grad, whole[n])
        assert torch.equal(again.get_parameter(n).grad, whole[n])
    dense = fxmask.restore(copy.deepcopy(model))
    with torch.autocast("cpu", torch.bfloat16):
        out, want = model(x), dense(x)
        assert out.dtype == want.dtype and torch.equal(out, want)
        assert saved_bytes(model, x) < saved_bytes(dense, x)
    a, b = (torch.autograd.grad(t.float().square().sum(), m.parameters()) for t, m in ((out, model), (want, dense)))
    assert [p.dtype for p in a] == [p.dtype for p in b] and torch.equal(a[1], b[1]) and torch.equal(a[3], b[3])  # beta and bias


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend):
    model, x = fxmask.apply(both(), ActivationPruning(0.5, 16, affine=True)), torch.randn(4, 10, 64)
    want = grads(copy.deepcopy(model), x)
    got = grads(torch.compile(copy.deepcopy(model), backend=backend, fullgraph=True), x)
    for n, g in want.items():
        assert torch.equal(got[n if n == "x" else f"_orig_mod.{n}"], g)


def test_noise_schedule_and_state():
    config = ActivationPruning(0.8, 16, schedule=Schedule("linear", steps=2), stages=2, affine=True)
    model, x = fxmask.apply(nn.Sequential(Gain(64)), config), torch.randn(2, 10, 64)
    with pytest.raises(fxmask.FxMaskError, match="nobody tells them"):
        model(x)
    fxmask.step(model, 0)
    held = []
    for _ in range(3):
        held.append(saved_bytes(model, x))
        fxmask.step(model)
    assert held == [x.nbytes, 2 * 24 * 66, 2 * 8 * 66]
    state = fxmask.state_dict(model)
    assert list(state["pruning"]) == ["0.gamma"]
    other = fxmask.apply(nn.Sequential(Gain(64)), config)
    fxmask.load_state_dict(other, state)
    assert saved_bytes(other, x) == held[-1]
    optimizer = torch.optim.SGD([*(m := fxmask.apply(both(), WeightMask(0.5, (16, 16)), config)).parameters()], 0.1)
    fxmask.guard(optimizer, m)
    m(x).sum().backward()
    optimizer.step()
    assert [r["activations"] for r in fxmask.explain(m).rows] == ["40 % of 1x16, 80 % in the end"] * 3
    noisy = fxmask.apply(Gain(64), ActivationPruning(0.5, 16, noise=1.0, affine=True))
    first, second = ((torch.manual_seed(s), grads(noisy, x)["gamma"].clone(), noisy.zero_grad())[1] for s in (1, 2))
    assert not torch.equal(first, second)


def test_explain_overrides_restore_copy_and_pickle():
    dense = both()
    for masks in ((), (WeightMask(0.5, (16, 16)),)):
        changes = {"3.gamma": {"ratio": 0.8, "block": 32}}
        overrides = {p: {"activations": c} for p, c in changes.items()} if masks else changes
        model = fxmask.apply(copy.deepcopy(dense), *masks, ActivationPruning(0.5, 16, impl="cpu", affine=True), overrides=overrides)
        report = fxmask.explain(model)
        assert [(r["name"], r["activations"]) for r in report.rows] == [
            ("1", "50 % of 1x16, dW by cpu"), ("0.alpha", "50 % of 1x16"), ("3.gamma", "80 % of 1x32")
        ]  # fmt: skip
        assert report.summary["linears"] == 1 and report.summary["products with parameters"] == 2
        assert report.rows[1]["reason"] == "dense; its input is saved pruned" and list(model.state_dict()) == list(dense.state_dict())
        x = torch.randn(2, 10, 64)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert all(torch.equal(a, b) for a, b in zip(grads(twin, x).values(), grads(copy.deepcopy(model), x).values(), strict=True))
            fxmask.restore(twin).zero_grad()
            assert repr(twin) == repr(dense) and not any(k.startswith("_fxmask") for m in twin.modules() for k in m.__dict__)
            assert all(torch.equal(a, b) for a, b in zip(grads(twin, x).values(), grads(copy.deepcopy(dense), x).values(), strict=True))


def test_off_by_default():
    model = fxmask.apply(both(), ActivationPruning(0.5, 16))
    assert type(model[0]) is Affine and type(model[3]) is Gain and len(fxmask.explain(model).rows) == 1
