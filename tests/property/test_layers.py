"""Layers of the four systems beside plain NumPy: inputs, weights and gradients of any layout and dtype, and what a learned mask's draws are made of."""

import math

import numpy as np
import pytest
import torch
from property import plain
from torch import nn

import fxmask
from fxmask import ActivationPruning, BlockDropout, NMMask, WeightMask

N, K, BLOCK = 24, 40, (8, 8)
SYSTEMS = {
    **{mode: ([WeightMask(0.5, BLOCK, mode)], mode) for mode in ("masked", "ste", "unmasked")},
    "pruned": ([ActivationPruning(0.45, 8)], "ste"),
    **{f"{mode} and pruned": ([WeightMask(0.5, BLOCK, mode), ActivationPruning(0.45, 8)], mode) for mode in ("masked", "ste", "unmasked")},
    "dropped": ([BlockDropout(0.5, (4, 8))], "ste"),
    "2:4": ([NMMask(2, 4)], "masked"),
    "sr-ste": ([NMMask(2, 4, "sr-ste", decay=0.25)], "ste"),
}
INPUTS = (
    lambda r: r(2, 3, K),
    lambda r: r(K),
    lambda r: r(K, 6).t(),
    lambda r: r(6, 2 * K)[:, ::2],
    lambda r: r(1, K).expand(6, K),
    lambda r: r(2, K, 5, 3).permute(0, 2, 3, 1),
    lambda r: r(3, K, 5).transpose(1, 2),
)
WEIGHTS = (lambda r: r(N, K), lambda r: r(K, N).t(), lambda r: r(N, 2 * K)[:, ::2])
GRADIENTS = (
    lambda r, y: r(*y.shape),
    lambda r, y: r().expand(y.shape),
    lambda r, y: r(*y.shape[::-1]).permute(*range(y.dim())[::-1]),
)
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def asked(configs, impl):
    """Of a WeightMask and what goes beside it the first has the word; an NMMask is plain PyTorch."""
    return configs if isinstance(configs[0], NMMask) else [configs[0].replace({"impl": impl}, ""), *configs[1:]]


def elements_of(configs, w):
    """Which elements of the weight are kept."""
    if isinstance(configs[0], WeightMask):
        sizes = plain.norms(w, BLOCK)
        return plain.elements(plain.best(plain.kept_count(sizes.size, 0.5), sizes), BLOCK, w.shape)
    if isinstance(configs[0], NMMask):
        return np.concatenate([plain.best(2, abs(group)) for group in w.reshape(-1, 4)]).reshape(w.shape)
    return np.ones(w.shape, bool)


def expected(configs, mode, x, w, b, dy, dx):
    kept, scale, through = elements_of(configs, w), 1, np.ones(x.shape, bool)
    if isinstance(configs[0], BlockDropout):
        scale, through = 2, dx != 0
        rows = through.reshape(-1, K)
        assert all(len(np.unique(rows[i : i + 4, j : j + 8])) == 1 for i in range(0, len(rows), 4) for j in range(0, K, 8))  # whole blocks
    y, dx, dw, db = plain.linear(np.where(through, x, 0) * scale, w, b, kept, dy, mode)
    if isinstance(configs[-1], ActivationPruning):
        dw = plain.linear(plain.pruned(x, 8, 0.45), w, b, kept, dy, mode)[2]
    if isinstance(configs[0], NMMask) and mode == "ste":
        dw = dw + 0.25 * np.where(kept, 0, w)
    return y, np.where(through, dx, 0) * scale, dw, db


def check(configs, mode, x, weight, gradient, dtype=torch.float64):
    model = nn.Sequential(nn.Linear(K, N, dtype=dtype))
    model[0].weight = nn.Parameter(weight)
    fxmask.apply(model, *configs)
    x = x.detach().requires_grad_()
    y = model(x)
    dy = gradient(y)
    y.backward(dy)
    assert y.dtype == dtype
    got = [t.detach().double().numpy() for t in (y, x.grad, model[0].weight.grad, model[0].bias.grad)]
    held = [t.detach().double().numpy() for t in (x, model[0].weight, model[0].bias, dy)]
    for name, a, e in zip(("y", "dx", "dw", "db"), got, expected(configs, mode, *held, got[1]), strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=CLOSE[dtype] * max(1, abs(e).max()), err_msg=name)


@pytest.mark.parametrize("impl", ["auto", "cpu", "reference"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_layouts(system, impl):
    configs, mode = SYSTEMS[system]
    draw = lambda *shape: torch.randn(shape, dtype=torch.float64, generator=generator)  # noqa: E731
    generator = torch.Generator().manual_seed(0)
    for i, make in enumerate(INPUTS):
        for j, weight in enumerate(WEIGHTS):
            gradient = GRADIENTS[(i + j) % 3]
            check(asked(configs, impl), mode, make(draw), weight(draw), lambda y, of=gradient: of(draw, y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("system", SYSTEMS)
def test_dtypes(system, dtype):
    configs, mode = SYSTEMS[system]
    draw = lambda *shape: torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)  # noqa: E731
    generator = torch.Generator().manual_seed(1)
    check(configs, mode, draw(2, 7, K), draw(N, K), lambda y: draw(*y.shape), dtype)


@pytest.mark.parametrize("tau", [0.3, 1.0, 3.0])
def test_a_soft_draw_is_a_softmax_of_logits_and_gumbel_noise(tau):
    """Of one kept of four the mixture is the softmax itself, so that its noise can be read off: differences of two Gumbels are logistic."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64, dtype=torch.float64)) for _ in range(2)]
    for layer, soft in zip(layers, (True, False), strict=True):
        layer.load_state_dict(layers[0].state_dict(), strict=False)
        fxmask.apply(layer, NMMask(1, 4, "learned", tau=tau, soft=soft))
    layers[1].load_state_dict(layers[0].state_dict())
    weight, logits, towards = layers[0][0].weight, layers[0][0].nm_logits, torch.randn(64, 64, dtype=torch.float64)
    found = []
    for layer in layers:
        torch.manual_seed(5)
        product = (layer(torch.eye(64, dtype=torch.float64)) - layer[0].bias).t()
        found.append(((product / weight).detach().numpy().reshape(-1, 4), *torch.autograd.grad((product * towards).sum(), layer[0].nm_logits)))
    (z, soft), (one, hard) = found
    np.testing.assert_allclose(z.sum(1), 1, rtol=1e-9)
    dz = (towards * weight).detach().numpy().reshape(-1, 4)
    by_hand = z * (dz - (z * dz).sum(1, keepdims=True)) / tau
    for gradient in (soft, hard):  # straight-through
        np.testing.assert_allclose(gradient.numpy(), by_hand, rtol=1e-6, atol=1e-9)
    assert np.array_equal(one.round(9), np.eye(4)[z.argmax(1)])
    sure = (z[:, :2] > 1e-9).all(1)
    noise = tau * np.log(z[sure, 0] / z[sure, 1]) - (logits[:, 0] - logits[:, 1]).detach().numpy()[sure]
    assert sure.mean() > 0.9
    if tau >= 1:  # nothing is cut off
        assert abs(noise.mean()) < 5 * math.pi / math.sqrt(3 * len(noise)) and abs(noise.var() / (math.pi**2 / 3) - 1) < 0.3
