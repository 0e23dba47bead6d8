"""Autocast: 16 bits inside the region, float32 gradients outside, equal to the twin under the same autocast."""

import pytest
import torch
from torch import nn
from works.twin import MODELS, check, near, pair, results, some

import fxmask

DTYPES = [torch.bfloat16, torch.float16]
LIMIT = {torch.bfloat16: 1e-2, torch.float16: 2e-3}  # a few roundings of 8 and of 11 bits


def under(dtype, call):
    def run(x):
        with torch.autocast("cpu", dtype):
            return call(x)

    return run


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
def test_training(name, dtype):
    make, shape = MODELS[name]
    masked, twin, kept = pair(make())
    x = some(*shape)
    found, expected = (results(under(dtype, m), m, x) for m in (masked, twin))
    assert all(g.dtype == torch.float32 for name, g in found.items() if name != "output")
    check(found, expected, kept, LIMIT[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
def test_inference(name, dtype):
    """For the encoder: its fast path in eval."""
    make, shape = MODELS[name]
    masked, twin, _ = pair(make().eval())
    x = some(*shape)
    with torch.no_grad():
        near(under(dtype, masked)(x), under(dtype, twin.eval())(x), LIMIT[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
def test_the_same_bits_where_both_multiply_densely(dtype):
    masked, twin, kept = pair(MODELS["mlp"][0](), impl="reference")
    found, expected = (results(under(dtype, m), m, some(6, 64)) for m in (masked, twin))
    for name, value in found.items():
        assert torch.equal(value, expected[name] * kept[name] if name in kept else expected[name]), name
    assert found["output"].dtype == dtype


@pytest.mark.parametrize(("where", "dtype"), [("around", torch.bfloat16), ("inside", torch.float16)], ids=["around-bf16", "inside-fp16"])
def test_compiled(where, dtype):
    masked, twin, kept = pair(MODELS["residual"][0]())
    x = some(3, 32, 32)
    if where == "around":
        call = under(dtype, torch.compile(masked, backend="aot_eager", fullgraph=True))
    else:
        call = torch.compile(under(dtype, masked), backend="aot_eager", fullgraph=True)
    check(results(call, masked, x), results(under(dtype, twin), twin, x), kept, LIMIT[dtype])


def test_backward_inside_the_region():
    masked, twin, kept = pair(MODELS["mlp"][0]())
    found = []
    for m in (masked, twin):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(results(m, m, some(6, 64)))
    check(*found, kept, LIMIT[torch.bfloat16])


def test_the_mask_is_made_from_the_float32_weight():
    """Two blocks whose norms a bfloat16 cannot tell apart."""
    torch.manual_seed(0)
    model = nn.Linear(32, 32, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.weight[16:, 16:] += 1e-3
    assert torch.equal(model.weight.bfloat16(), torch.ones(32, 32, dtype=torch.bfloat16))
    fxmask.apply(model, ratio=0.75)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(torch.eye(32))
    assert y[16:, 16:].all() and not y[:16].any() and not y[:, :16].any()


def test_a_scaled_step():
    """A GradScaler's step under guard: kept weights as the twin's, masked ones untouched."""
    masked, twin, kept = pair(MODELS["mlp"][0]())
    before, after = masked[0].weight.detach().clone(), []
    for m in (masked, twin):
        optimizer, scaler = torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, weight_decay=1e-3), torch.amp.GradScaler("cpu")
        if m is masked:
            fxmask.guard(optimizer, m)
        for seed in (2, 3):
            optimizer.zero_grad()
            loss = under(torch.float16, m)(some(6, 64, seed=seed)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([p for name, p in m.named_parameters() if name not in kept], 0.1)
            scaler.step(optimizer)
            scaler.update()
            with torch.no_grad():
                for name, k in kept.items() if m is twin else ():
                    m.get_parameter(name).mul_(k)
        after.append(dict(m.named_parameters()))
    for name, p in after[1].items():
        near(after[0][name].detach() * kept.get(name, torch.ones(())), p.detach(), 1e-3, name)
    assert not torch.equal(after[0]["0.weight"], before)
    assert torch.equal(after[0]["0.weight"][~kept["0.weight"]], before[~kept["0.weight"]])
