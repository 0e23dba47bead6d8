"""PyTorch's own tools over masked convolutions: autocast, checkpoints, export, function transforms and compilers, against a dense copy with W∘M written in."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from works.twin import slow_but

import fxmask
from fxmask.kernels.grid import expand_mask

BLOCK = (8, 16)


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 32, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 1), nn.ReLU(),
        nn.Conv2d(32, 24, 2, 2), nn.ReLU(), nn.Conv2d(24, 16, 3, padding="same", dilation=2), nn.Flatten(), nn.Linear(256, 20),
    )  # fmt: skip


def pair(**options):
    """(masked, its twin, the kept elements of each masked weight)."""
    model, twin, kept = net(), net(), {}
    fxmask.apply(model, fxmask.WeightMask(**{"ratio": 0.5, "block": BLOCK, **options}), layers=(nn.Linear, nn.Conv2d))
    for name, mask in fxmask.masks(model).items():
        w = twin.get_parameter(name)
        kept[name] = expand_mask(mask, w.shape, BLOCK)
        w.data.mul_(kept[name])
    return model, twin, kept


def images(n=3):
    return torch.randn(n, 4, 8, 8, generator=torch.Generator().manual_seed(1))


def results(model, x, run=None):
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = (run or model)(x)
    y.float().square().mean().backward()
    return {"y": y.detach(), "x": x.grad, **{n: p.grad.clone() for n, p in model.named_parameters()}}


def check(found, expected, kept, mode="masked", tolerance=2e-5):
    assert found.keys() == expected.keys()
    for name, b in expected.items():
        b = b * kept[name] if name in kept and mode == "masked" else b
        if mode != "unmasked" or name == "y":
            assert found[name].dtype == b.dtype and (found[name] - b).abs().max() <= tolerance * b.abs().max() + 1e-9, name


@pytest.mark.parametrize("impl", ["auto", "cpu"])
@pytest.mark.parametrize("last", [False, True])
def test_autocast(impl, last):
    model, twin, kept = pair(impl=impl)
    x = images().to(memory_format=torch.channels_last if last else torch.contiguous_format)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = model[:8](x), twin[:8](x)
        assert y.dtype == torch.bfloat16 and y.stride() == expected.stride()
        found, wanted = results(model, x), results(twin, x)
    check(found, wanted, kept, tolerance=0.03 if impl == "cpu" else 2e-5)


FAST = [("aot_eager", "unmasked", "cpu")]
CASES = [("aot_eager", m, i) for m in ("masked", "ste", "unmasked") for i in ("auto", "cpu")] + [("inductor", "ste", "cpu"), ("inductor", "unmasked", "auto")]


@pytest.mark.parametrize("case", slow_but(CASES, *FAST), ids="-".join)
def test_compiled(case):
    backend, mode, impl = case
    model, _, kept = pair(backward=mode, impl=impl)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    eager = copy.deepcopy(model)
    for n in (3, 5):
        check(results(model, images(n), compiled), results(eager, images(n)), {}, tolerance=1e-4)


def test_one_compile_for_a_schedule():
    model, _, _ = pair(schedule=fxmask.Schedule("linear", steps=6), backward="ste")
    fxmask.step(model, 0)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    results(model, images(), compiled)
    blocks = [(model.get_submodule(n.removesuffix(".weight")), m.numel()) for n, m in fxmask.masks(model).items()]
    with torch.compiler.set_stance("fail_on_recompile"):
        for step in range(6):
            fxmask.step(model)
            assert [int(m.sum()) for m in fxmask.masks(model).values()] == [m._fxmask_config.keep_at(step + 1, n) for m, n in blocks]
            check(results(model, images(), compiled), results(copy.deepcopy(model), images()), {}, tolerance=1e-4)


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.parametrize("impl", slow_but(["auto", "cpu"], "auto"))
def test_exported(impl):
    model, twin, kept = pair(impl=impl)
    with torch.no_grad():
        program = torch.export.export(model.eval(), (images(),))
    found = program.module()
    assert torch.allclose(found(images()), twin.eval()(images()), rtol=1e-4, atol=1e-5)
    w = found.get_parameter("0.weight")
    w.data.mul_(-1)  # the program masks by its own weights
    model[0].weight.data.mul_(-1)
    assert torch.allclose(found(images()), model(images()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant):
    model, twin, kept = pair()
    model.eval(), twin.eval()
    check(results(model, images(), lambda x: checkpoint(model, x, use_reentrant=reentrant)), results(twin, images()), kept)


@pytest.mark.parametrize("mode", ["masked", "ste", "unmasked"])
@pytest.mark.parametrize("impl", ["auto", "cpu"])
def test_function_transforms(impl, mode):
    model, twin, kept = pair(backward=mode, impl=impl)
    model.eval()
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    expected = results(model, images())
    for name, g in torch.func.grad(loss)(parameters, images()).items():
        assert torch.allclose(g, expected[name], rtol=1e-4, atol=1e-6), name
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, images()[:, None])
    for name, g in each.items():
        assert torch.allclose(g.mean(0), expected[name], rtol=1e-4, atol=1e-6), name
    if mode == "masked":
        _, tangent = torch.func.jvp(lambda x: model(x), (images(),), (images() + 1,))
        _, wanted = torch.func.jvp(lambda x: twin.eval()(x), (images(),), (images() + 1,))
        assert wanted.any() and torch.allclose(tangent, wanted, rtol=1e-4, atol=1e-5)


def test_vmap_over_weights_whose_channels_lie_inside():
    """W∘M keeps its own strides there: PyTorch's vmap makes no channels_last copies."""
    models = [fxmask.apply(nn.Conv2d(4, 16, 3), fxmask.WeightMask(0.5, (4, 4)), layers=nn.Conv2d, exclude=()) for _ in range(2)]
    w = torch.stack([m.weight.detach().permute(0, 2, 3, 1) for m in models]).permute(0, 1, 4, 2, 3)
    b, x = torch.stack([m.bias.detach() for m in models]), images()
    y = torch.func.vmap(lambda w, b: torch.func.functional_call(models[0], {"weight": w, "bias": b}, (x,)))(w, b)
    for found, m in zip(y, models, strict=True):
        assert torch.allclose(found, m(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["masked", "ste", "rigl"])
@pytest.mark.parametrize("impl", ["auto", "cpu"])
def test_second_derivatives(impl, mode):
    conv = fxmask.apply(nn.Conv2d(3, 4, 1).double(), fxmask.WeightMask(0.5, (2, 1), backward=mode, impl=impl), layers=nn.Conv2d, exclude=())
    fxmask.step(conv, 0)
    x = torch.randn(2, 3, 2, 2, dtype=torch.double, requires_grad=True)
    torch.autograd.gradgradcheck(conv, x)


def test_accumulation_adds_up():
    model, twin, kept = pair()
    model.eval(), twin.eval()
    for m in (model, twin):
        for part in images(4).split(2):
            m(part).square().sum().backward()
    for name, p in twin.named_parameters():
        g = p.grad * kept[name] if name in kept else p.grad
        assert torch.allclose(model.get_parameter(name).grad, g, rtol=1e-4, atol=1e-5)
