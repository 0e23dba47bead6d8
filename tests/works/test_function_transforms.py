"""torch.func and forward-mode AD over a masked module: outputs, gradients and tangents of the twin, eager and compiled."""

import copy

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from sample_models import mlp
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, stack_module_state, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from works.twin import MODELS, elements, near, pair, slow_but, some

import fxmask
from fxmask.kernels.grid import expand_mask

COMPILERS = {
    "eager": lambda f: f,
    "compiled": lambda f: torch.compile(f, backend="aot_eager", fullgraph=True),
}


CASES = [f"{name}-{compiler}" for name in MODELS for compiler in COMPILERS]
EAGER = [case for case in CASES if case.endswith("eager")]


def loss_of(model):
    return lambda params, x: functional_call(model, params, (x,)).pow(3).sum()


def params_of(model):
    return {name: p.detach() for name, p in model.named_parameters()}


def masked_part(gradients, kept):
    return {name: g * kept[name] if name in kept else g for name, g in gradients.items()}


@pytest.fixture(autouse=True)
def attention_out_of_ops():
    """PyTorch's fused attention has no forward derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


def unpacked(case):
    name, _, compiler = case.partition("-")
    return *MODELS[name], COMPILERS[compiler]


@pytest.mark.parametrize("case", slow_but(CASES, *EAGER, "mlp-compiled"))
def test_grad_and_vjp(case):
    make, shape, compiler = unpacked(case)
    masked, twin, kept = pair(make())
    x = some(*shape)
    found, expected = compiler(grad(loss_of(masked), argnums=(0, 1)))(params_of(masked), x), grad(loss_of(twin), argnums=(0, 1))(params_of(twin), x)
    for key, value in masked_part(expected[0], kept).items():
        near(found[0][key], value, name=key)
        assert key not in kept or not found[0][key][~kept[key]].any()
    near(found[1], expected[1])
    y, pull = vjp(masked, x)
    near(pull(torch.ones_like(y))[0], vjp(twin, x)[1](torch.ones_like(y))[0])


@pytest.mark.parametrize("case", slow_but([c for c in CASES if c != "encoder-compiled"], *EAGER, "mlp-compiled"))
def test_tangents(case):
    """Of inputs and of weights: the tangent of a masked weight counts for nothing, as its gradient does. PyTorch cannot compile that of a layer norm."""
    make, shape, compiler = unpacked(case)
    masked, twin, kept = pair(make())
    x, t = some(*shape), some(*shape, seed=5)
    y, tangent = compiler(lambda x, t: jvp(masked, (x,), (t,)))(x, t)
    near(y, twin(x).detach())
    near(tangent, jvp(twin, (x,), (t,))[1].detach())
    ts = {key: some(*p.shape, seed=6) for key, p in twin.named_parameters()}
    found = compiler(lambda p, t: jvp(lambda p: functional_call(masked, p, (x,)), (p,), (t,))[1])(params_of(masked), ts)
    near(found, jvp(lambda p: functional_call(twin, p, (x,)), (params_of(twin),), (masked_part(ts, kept),))[1])


@pytest.mark.parametrize("name", MODELS)
def test_dual_numbers(name):
    make, shape = MODELS[name]
    masked, twin, _ = pair(make())
    x, t = some(*shape), some(*shape, seed=5)
    tangents = []
    for m in (masked, twin):
        with forward_ad.dual_level():
            tangents.append(forward_ad.unpack_dual(m(forward_ad.make_dual(x, t))).tangent.detach())
    near(*tangents)


@pytest.mark.parametrize("case", slow_but(["mlp-eager", "residual-eager", "mlp-compiled", "residual-compiled"], *EAGER))
def test_per_sample_gradients(case):
    make, shape, compiler = unpacked(case)
    masked, twin, kept = pair(make())
    x = some(*shape)
    found = compiler(vmap(grad(loss_of(masked)), in_dims=(None, 0)))(params_of(masked), x[:, None])
    expected = vmap(grad(loss_of(twin)), in_dims=(None, 0))(params_of(twin), x[:, None])
    for key, value in masked_part(expected, kept).items():
        near(found[key], value, name=key)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_vmap_of_the_call(compiler):
    masked, twin, _ = pair(mlp())
    compiler = COMPILERS[compiler]
    x = some(4, 3, 64)
    near(compiler(vmap(masked, in_dims=1, out_dims=1))(x).detach(), twin(x).detach())


def test_an_ensemble():
    """Stacked weights: each member has the masks of its own."""
    members = [pair(mlp(seed=seed)) for seed in range(3)]
    params, buffers = stack_module_state([m for m, _, _ in members])
    model, x = members[0][0], some(6, 64)
    y = vmap(lambda p, b: functional_call(model, (p, b), (x,)))(params, buffers)
    for i, (_, twin, _) in enumerate(members):
        near(y[i].detach(), twin(x).detach())


@pytest.mark.parametrize("options", [{}, dict(backward="unmasked"), dict(criterion="random"), dict(schedule=fxmask.Schedule("cubic", 4))], ids=str)
def test_an_ensemble_of_a_model_without_values(options):
    """PyTorch's own way: the one that is called stands on the meta device, and what it keeps the host knows."""
    members = [fxmask.apply(mlp(seed=seed), **{"ratio": 0.5, "block": (8, 8), **options}) for seed in range(3)]
    for m in members:
        fxmask.step(m, 3)
    params, buffers = stack_module_state(members)
    model, x = copy.deepcopy(members[0]).to("meta"), some(6, 64)
    y = vmap(lambda p, b: functional_call(model, (p, b), (x,)))(params, buffers)
    for i, m in enumerate(members):
        near(y[i].detach(), m(x).detach())
        near(functional_call(model, params_of(m), (x,)), m(x).detach())


@pytest.mark.parametrize("options", [dict(refresh=0), dict(backward="rigl")], ids=str)
def test_masks_that_only_a_device_holds_want_one(options):
    m = fxmask.apply(mlp(), ratio=0.5, **options)
    fxmask.step(m, 0)
    with pytest.raises(fxmask.FxMaskError, match=r"on meta|lost on the meta device"):
        functional_call(copy.deepcopy(m).to("meta"), params_of(m), (some(6, 64),))


@pytest.mark.parametrize("inside", [lambda f: f, grad], ids=["vmap", "vmap of grad"])
def test_an_ensemble_of_cached_masks_raises(inside):
    """They would all get the mask of the module that is called."""
    members = [fxmask.apply(mlp(seed=seed), ratio=0.5, block=(8, 8), refresh=0) for seed in range(2)]
    params, buffers = stack_module_state(members)
    x = some(6, 64)
    with pytest.raises(fxmask.FxMaskError, match="vmap over the weights of a layer with a cached mask"):
        vmap(inside(lambda p, b: functional_call(members[0], (p, b), (x,)).sum()))(params, buffers)
    one = vmap(lambda x: members[0](x))(x)  # many inputs and one weight are no ensemble
    near(one.detach(), members[0](x).detach())


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node with no underlying reference:UserWarning")  # torch.func.linearize of anything
def test_jacobians_and_second_derivatives():
    masked, twin, _ = pair(mlp())
    x = some(64)

    def scalar(m):
        return lambda x: m(x).square().sum()

    near(jacrev(masked)(x).detach(), jacrev(twin)(x).detach())
    near(jacfwd(masked)(x).detach(), jacfwd(twin)(x).detach())
    near(hessian(scalar(masked))(x).detach(), hessian(scalar(twin))(x).detach())
    near(linearize(masked, x)[1](some(64, seed=5)).detach(), jvp(twin, (x,), (some(64, seed=5),))[1].detach())
    found, expected = (torch.autograd.functional.hvp(scalar(m), x, some(64, seed=5))[1] for m in (masked, twin))  # twice backward, through the ops
    near(found, expected)


@pytest.mark.parametrize("backward", ["ste", "unmasked", "rigl"])
def test_other_modes(backward):
    """Forward and reverse agree with the mode's own gradients."""
    model = fxmask.apply(mlp(), ratio=0.75, backward=backward)
    fxmask.step(model, 99)  # for rigl, a step whose weight gradient is dense
    x = some(6, 64)
    loss = loss_of(model)
    found = grad(loss)(params_of(model), x)
    model.zero_grad()
    loss(dict(model.named_parameters()), x).backward()
    for name, p in model.named_parameters():
        near(found[name], p.grad, name=name)
    assert found["0.weight"][~elements(model[0].weight)].any()
    ts = {key: some(*p.shape, seed=6) for key, p in model.named_parameters()}
    tangent = jvp(lambda p: loss(p, x), (params_of(model),), (ts,))[1]
    near(tangent, sum((ts[key] * g).sum() for key, g in found.items()))


WILD = [torch.nan, *(pytest.param(value, marks=pytest.mark.slow) for value in (torch.inf, -torch.inf))]


FIXED = [fxmask.WeightMask(0.5, (16, 16), backward=mode, refresh=0) for mode in ("unmasked", "ste")]


@pytest.mark.parametrize("config", [*FIXED, fxmask.NMMask(2, 4, mode="learned")], ids=["unmasked", "ste", "learned 2:4"])
@pytest.mark.parametrize("value", WILD)
def test_what_is_masked_may_be_infinite(config, value):
    """Outputs, tangents and gradients of the layer with a zero there, where a function transform sees into the op, too."""
    model = fxmask.apply(torch.nn.Linear(32, 32), config, exclude=())
    with torch.no_grad():
        for name in dict(model.named_parameters()).keys() & {"nm_logits"}:
            model.get_parameter(name).mul_(1e6)  # what is drawn is the likeliest mask
    (mask,) = fxmask.masks(model).values()
    masked = ~(mask if mask.shape == model.weight.shape else expand_mask(mask, model.weight.shape, (16, 16)))
    x, t = some(4, 32), some(4, 32, seed=3)

    def results():
        w, b = model.weight.detach(), model.bias.detach()
        call = lambda w, x: functional_call(model, {"weight": w, "bias": b}, (x,))  # noqa: E731
        return *jvp(lambda x: call(w, x), (x,), (t,)), vmap(lambda x: call(w, x[None]), randomness="same")(x), grad(lambda w: call(w, x).pow(2).sum())(w)

    at, found = masked.nonzero()[3].tolist(), []
    for v in (value, 0.0):
        with torch.no_grad():
            model.weight[at[0], at[1]] = v
        found.append(results())
    found, expected = found
    for a, b in zip(found[:3], expected[:3], strict=True):
        near(a, b)
    there = torch.ones_like(masked)
    there[at[0], at[1]] = False
    near(found[3][there], expected[3][there])
    assert torch.isfinite(found[3][there]).all()
