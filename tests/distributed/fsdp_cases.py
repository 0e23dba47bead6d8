"""Cases of FSDP2, on every rank: each rank trains the sharded model on its share, and a model of its own on the whole batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.common import batch_of, build, mean_over_ranks, same_on_all_ranks, share
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import fxmask
from fxmask.errors import StateError, UnsupportedError
from fxmask.kernels.grid import expand_mask

SGD, ADAMW = (torch.optim.SGD, dict(lr=0.05, momentum=0.9, weight_decay=0.01)), (torch.optim.AdamW, dict(lr=3e-3, weight_decay=0.05))
RUNS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "freeze": (ADAMW, dict(schedule=fxmask.Schedule("cubic", steps=10)), dict(returning="zero")),
    "decay": (SGD, dict(), dict(masked_weights="decay")),
    "ste": (ADAMW, dict(backward="ste", criterion="l1"), dict()),
    "cached": (SGD, dict(refresh=3, start=2), dict()),
    "rigl": (SGD, dict(backward="rigl", dense_every=4, refresh=2), dict()),
    "phases": (ADAMW, dict(phases={5: dict(backward="ste"), 8: dict(block=(8, 8), refresh=2)}), dict(returning="zero")),
    "flips": (SGD, dict(backward="ste", schedule=fxmask.Feedback("flip_rate", every=2, goal=0.5, initial=0.3, change=0.1)), dict()),
    "columns": (ADAMW, dict(), dict()),  # sharded along in_features
}


def shard(model: nn.Sequential, **options: Any) -> nn.Sequential:
    options.setdefault("mesh", init_device_mesh("cpu", (dist.get_world_size(),)))
    for block in list(model)[:2]:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def trains_as_one_process(name: str, steps: int = 12) -> None:
    """Losses and weights of one process to rounding, its masks after every step; masks also those of the gathered weights, to the bit; frozen bits."""
    (cls, options), config, policy = RUNS[name]
    mask = fxmask.WeightMask(ratio=0.7, block=(16, 16), **config)
    alone, model = fxmask.apply(build(), mask), fxmask.apply(build(), mask)
    plain = fxmask.apply(build(), ratio=0.7, block=(16, 16))
    shard(model, **(dict(shard_placement_fn=lambda p: Shard(int(p.ndim == 2 and p.shape[1] % 2 == 0))) if name == "columns" else {}))
    optimizers = [cls(m.parameters(), **options) for m in (model, alone)]
    guards = [fxmask.guard(o, m, **policy) for o, m in zip(optimizers, (model, alone), strict=True)]
    assert guards[0].policies == guards[1].policies
    weights = {n: p for n, p in model.named_parameters() if n in guards[0].policies}
    assert all(isinstance(w, DTensor) for w in weights.values())
    first = masks = fxmask.masks(model)
    before = {n: w.full_tensor() for n, w in weights.items()}
    for step in range(steps):
        x, y = batch_of(step)
        loss = nn.functional.mse_loss(model(share(x)), share(y))
        if step == 1:
            assert all(torch.equal(m, masks[n]) for n, m in fxmask.masks(model).items())  # between forward and backward
        expected = nn.functional.mse_loss(alone(x), y)
        for optimizer, value in zip(optimizers, (loss, expected), strict=True):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        assert torch.allclose(mean_over_ranks(loss), expected.detach(), rtol=1e-4)
        after, theirs = fxmask.masks(model), fxmask.masks(alone)
        assert all(torch.equal(after[n], theirs[n]) for n in theirs), step
        assert same_on_all_ranks(*after.values())
        for n, w in weights.items():
            full = w.full_tensor()
            assert torch.allclose(full, alone.get_parameter(n), rtol=1e-3, atol=1e-5), (step, n)
            if guards[0].policies[n] == "freeze":
                assert torch.equal(*(torch.where(expand_mask(masks[n], full.shape, (16, 16)), 0, t) for t in (full, before[n]))), (step, n)
            with torch.no_grad():
                plain.get_parameter(n).copy_(full)
            before[n] = full
        masks = after
    if name == "columns":
        assert all(torch.equal(after[n], m) for n, m in fxmask.masks(plain).items())
    assert name == "rigl" or any(not torch.equal(after[n], first[n]) for n in first)
    assert {row["step"] for row in fxmask.explain(model).rows} == {steps}


def mixed_precision() -> None:
    """Forwards see weights rounded to bfloat16, where two blocks tie that differ in float32: the guard freezes what the forward masked."""
    model = nn.Sequential(nn.Linear(32, 16, bias=False), nn.Linear(16, 16))
    with torch.no_grad():
        model[0].weight[:, :16], model[0].weight[:, 16:] = 1.0, 1.001
    fxmask.apply(model, ratio=0.5, block=(16, 16), include="0")
    assert fxmask.masks(model)["0.weight"].tolist() == [[False, True]]
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    fxmask.guard(optimizer, model)
    before = model[0].weight.full_tensor().clone()
    model(torch.randn(4, 32)).sum().backward()
    assert fxmask.masks(model)["0.weight"].tolist() == [[True, False]]
    optimizer.step()
    after = model[0].weight.full_tensor()
    assert torch.equal(after[:, 16:], before[:, 16:]) and not torch.equal(after[:, :16], before[:, :16])


def whole_weights_after_an_evaluation() -> None:
    """The root keeps its gathered weights after a forward without a backward: a guard made then finds the shards all the same."""
    model = shard(fxmask.apply(build(), ratio=0.7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model(batch_of(0)[0])
    assert not isinstance(model[2].weight, DTensor)
    assert set(fxmask.guard(optimizer, model).policies) == {n for n, _ in fxmask.masks(model).items()} and len(fxmask.masks(model)) == 5


def refused_before_training() -> None:
    """What needs whole weights between steps is told when steps are announced, by hand or by a guard, whichever phase it is of."""
    for options in (
        dict(gain=True, schedule=fxmask.Schedule("linear", steps=4)),
        dict(regrow=fxmask.Regrow("random", 0.5)),
        dict(backward="ste", phases={2: dict(criterion="taylor")}),
    ):
        model = shard(fxmask.apply(build(), ratio=0.7, **options))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for call in (lambda m=model: fxmask.step(m, 0), lambda m=model, o=optimizer: fxmask.guard(o, m)):
            with pytest.raises(UnsupportedError, match="work on whole weights between steps"):
                call()


def readers() -> None:
    """An attention whose out_proj is read and never called computes what it does in one process; sharding the read layer itself is refused."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return fxmask.apply(nn.Sequential(nn.Linear(32, 32), nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)), ratio=0.5)

    model, alone, (x, gy) = make(), make(), torch.randn(2, 4, 6, 32, generator=torch.Generator().manual_seed(0))
    fully_shard(model[1].self_attn, mesh=(mesh := init_device_mesh("cpu", (dist.get_world_size(),))))
    fully_shard(model, mesh=mesh)
    for m in (model, alone):
        m(x).backward(gy)  # a mean of squares has next to no gradient behind a layer norm
    for (n, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert torch.allclose(p.grad.full_tensor(), q.grad, atol=1e-6), n
    assert torch.allclose(model(x), alone(x), atol=1e-6)
    wrong = make()
    fully_shard(wrong[1].self_attn.out_proj, mesh=mesh)
    with pytest.raises(UnsupportedError, match="shard the owner and not the layer"):
        wrong(x)


def loading_rebuilds_cached_masks() -> None:
    """Weights loaded into a sharded model: every forward's masks follow, cached ones are rebuilt, as in one process; a meta model comes alive."""
    for refresh in (1, 0):
        model, other = shard(fxmask.apply(build(0), ratio=0.7, refresh=refresh)), fxmask.apply(build(1), ratio=0.7, refresh=refresh)
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, other.state_dict(), options=options)
        assert all(torch.equal(m, fxmask.masks(other)[n]) for n, m in fxmask.masks(model).items())
        saved = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        assert dist.get_rank() != 0 or all(torch.equal(t, other.state_dict()[n]) for n, t in saved.items())
    with torch.device("meta"):
        model = fxmask.apply(build(), ratio=0.7)
    shard(model).to_empty(device="cpu")
    set_model_state_dict(model, other.state_dict(), options=options)
    x = batch_of(0)[0]
    assert torch.allclose(model(x), fxmask.restore(other)(x)) is False
    alone = fxmask.apply(build(1), ratio=0.7)
    assert torch.equal(model(x), alone(x)) and all(torch.equal(m, fxmask.masks(alone)[n]) for n, m in fxmask.masks(model).items())


def disagreeing_seeds() -> None:
    """Ranks that start with other weights shard a patchwork of them; a mask cached before says so."""
    model = shard(fxmask.apply(build(seed=dist.get_rank()), ratio=0.7, refresh=0))
    with pytest.raises(StateError, match="the same on all ranks"):
        fxmask.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    fxmask.refresh(model)
    fxmask.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert same_on_all_ranks(*fxmask.masks(model).values())


def compiled() -> None:
    """Blocks compiled and then sharded train as those that are not: Dynamo leaves out guards on what fully_shard manages, and masks move all the same."""
    for config in (dict(schedule=fxmask.Schedule("linear", steps=4)), dict(refresh=2), dict(backward="rigl", dense_every=3)):
        models = [fxmask.apply(build(), fxmask.WeightMask(ratio=0.7, **config)) for _ in range(2)]
        for block in list(models[0])[:2]:
            block.compile(backend="eager")
        for m in models:
            shard(m)
            optimizer = torch.optim.SGD(m.parameters(), lr=0.5)
            fxmask.guard(optimizer, m)
            for step in range(6):
                nn.functional.mse_loss(m(share(batch_of(step)[0])), share(batch_of(step)[1])).backward()
                optimizer.step()
                optimizer.zero_grad()
        for (n, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            assert torch.allclose(p.full_tensor(), q.full_tensor(), rtol=1e-4, atol=1e-6), (config, n)


def nm_masks() -> None:
    """N:M masks of sharded weights and logits are those of the whole ones, before and after they are frozen."""
    x = share(batch_of(0)[0])
    for options in (dict(), dict(mode="permuted"), dict(mode="learned"), dict(mode="learned", permute=True, final="sample")):
        alone, model = fxmask.apply(build(), fxmask.NMMask(**options)), fxmask.apply(build(), fxmask.NMMask(**options))
        model.load_state_dict(alone.state_dict())  # logits, whose draw was another
        shard(model)
        model(x).sum().backward()
        fxmask.refresh(model)
        wanted = fxmask.masks(alone)
        assert all(torch.equal(m, wanted[n]) for n, m in fxmask.masks(model).items()) and len(wanted) == 3
        assert torch.equal(model.eval()(x), alone.eval()(x))
        assert all(row["achieved_ratio"] == 0.5 for row in fxmask.explain(model).rows if row["masked"])
        fxmask.freeze(model)
        masks = fxmask.masks(model)
        assert same_on_all_ranks(*masks.values()) and all(int(m.sum()) * 2 == m.numel() for m in masks.values())
        fxmask.load_state_dict(alone, fxmask.state_dict(model))
        assert torch.equal(model.train()(x), alone(x))
        with pytest.raises(UnsupportedError, match="computed or sharded"):
            fxmask.finalize(model)


CASES = {
    **{f"fsdp-{name}": partial(trains_as_one_process, name) for name in RUNS},
    "fsdp-mixed-precision": mixed_precision,
    "fsdp-whole-weights-after-an-evaluation": whole_weights_after_an_evaluation,
    "fsdp-readers": readers,
    "fsdp-loading": loading_rebuilds_cached_masks,
    "fsdp-disagreeing-seeds": disagreeing_seeds,
    "fsdp-compiled": compiled,
    "fsdp-nm": nm_masks,
    "fsdp-refused": refused_before_training,
}
