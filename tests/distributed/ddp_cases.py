"""Cases of DistributedDataParallel, on every rank."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from distributed.common import batch_of, build, mean_over_ranks, same_on_all_ranks, share
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import fxmask
from fxmask.errors import StateError

CONFIGS = {
    "masked": dict(schedule=fxmask.Schedule("cubic", steps=12)),
    "cached": dict(refresh=3, start=5),
    "random": dict(criterion="random", refresh=7),
    "ste": dict(backward="ste"),
    "rigl": dict(backward="rigl", dense_every=4),
    "phases": dict(phases={5: dict(backward="ste"), 9: dict(block=(8, 8))}),
    "flips": dict(backward="ste", schedule=fxmask.Feedback("flip_rate", every=2, goal=0.3, initial=0.3, change=0.1)),
}


def trains_alike(config: str, steps: int) -> None:
    """After every step: masks, mean loss, weights and momenta have the same bits on all ranks, and are those of one process to rounding."""
    mask = fxmask.WeightMask(ratio=0.7, block=(16, 16), **CONFIGS[config])
    model, alone = fxmask.apply(build(), mask), fxmask.apply(build(), mask)
    wrapped = DDP(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3, weight_decay=0.05) for m in (model, alone)]
    for optimizer, m in zip(optimizers, (model, alone), strict=True):
        fxmask.guard(optimizer, m)
    moved, first = False, fxmask.masks(model)
    for step in range(steps):
        x, y = batch_of(step)
        losses = [nn.functional.mse_loss(wrapped(share(x)), share(y))]
        if step < 40:  # two runs that round differently part in the end
            losses.append(nn.functional.mse_loss(alone(x), y))
        for optimizer, value in zip(optimizers, losses, strict=False):
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        masks = fxmask.masks(model)
        momenta = [t for s in optimizers[0].state.values() for t in s.values()]
        loss = mean_over_ranks(losses[0])
        assert same_on_all_ranks(loss, *masks.values(), *model.parameters(), *momenta), step
        moved = moved or any(not torch.equal(masks[n], first[n]) for n in masks)
        assert len(losses) == 1 or torch.allclose(loss, losses[1].detach(), rtol=1e-3), step
    assert moved
    assert {row["step"] for row in fxmask.explain(model).rows} == {steps}


def disagreeing_seeds() -> None:
    """DDP puts rank 0's weights on all ranks; a mask cached before says so, a mask of every forward follows."""
    model = fxmask.apply(build(seed=dist.get_rank()), ratio=0.7, refresh=0)
    wrapped, x = DDP(model), share(batch_of(0)[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if dist.get_rank() == 0:
        fxmask.guard(optimizer, model)
    else:
        for call in (lambda: fxmask.guard(optimizer, model), lambda: fxmask.step(model, 0), lambda: model(x)):
            with pytest.raises(StateError, match=r"the same on all ranks\.(.|\n)*fxmask\.refresh\(model\) on all ranks"):
                call()
        fxmask.refresh(model)
        fxmask.guard(optimizer, model)
    wrapped(x).sum().backward()
    optimizer.step()
    assert same_on_all_ranks(*fxmask.masks(model).values(), *model.parameters())
    every = DDP(fxmask.apply(build(seed=dist.get_rank()), ratio=0.7))
    every(x).sum().backward()
    assert same_on_all_ranks(*fxmask.masks(every).values(), *(p.grad for p in every.parameters()))


def nm_masks() -> None:
    """N:M masks are each rank's own, so a permutation of other weights than DDP sends says so; a mask that is drawn at the end is one mask."""
    x = share(batch_of(0)[0])
    for options in (dict(mode="permuted"), dict(mode="learned", permute=True)):
        mask = fxmask.NMMask(**options)
        differs = DDP(fxmask.apply(build(seed=dist.get_rank()), mask))
        if dist.get_rank():
            with pytest.raises(StateError, match="searched in other weights than the layer has now"):
                differs(x)
        if not mask.permute:
            fxmask.refresh(differs)
            differs(x)
        wrapped = DDP(fxmask.apply(build(), mask))
        wrapped(x).sum().backward()
    torch.manual_seed(dist.get_rank())
    drawn = DDP(fxmask.apply(build(), fxmask.NMMask(mode="learned", final="sample")))
    drawn(x).sum().backward()
    likeliest = fxmask.masks(drawn)
    fxmask.freeze(drawn)
    masks = fxmask.masks(drawn)
    assert same_on_all_ranks(*masks.values()) and any(not torch.equal(m, likeliest[n]) for n, m in masks.items())
    assert all(bool((m.reshape(-1, 4).sum(1) == 2).all()) for m in masks.values())


def reported_losses() -> None:
    """The same loss moves all ranks alike; losses that were not reduced are an error on each of them, and change nothing."""
    model = fxmask.apply(build(), ratio=0.7, schedule=fxmask.Feedback("loss", every=1, change=0.2))
    fxmask.step(model, 0)
    x, y = batch_of(0)
    own = nn.functional.mse_loss(model(share(x)), share(y))
    with pytest.raises(StateError, match=r"ranks report different losses(.|\n)*reduce the loss first"):
        fxmask.feedback(model, own)
    assert set(fxmask.feedback(model, mean_over_ranks(own)).values()) == {0.2}
    fxmask.step(model)
    assert {row["target_ratio"] for row in fxmask.explain(model).rows} == {0.2} and same_on_all_ranks(*fxmask.masks(model).values())


def wrapped_names() -> None:
    """A state saved of the wrapper does not fit the plain model, and says why."""
    model = fxmask.apply(build(), ratio=0.7)
    saved = fxmask.state_dict(DDP(model))
    with pytest.raises(StateError, match=r"a wrapper stands in the names \(module\."):
        fxmask.load_state_dict(model, saved)


def steps_told_by_hand() -> None:
    """Without a guard: the step that is told has moved the weights, so that a kept mask is not that of the new ones, and ranks agree all the same."""
    for options in (dict(refresh=5), dict(refresh=0), dict(backward="ste", refresh=5), dict(backward="rigl", refresh=3)):
        model = fxmask.apply(build(), ratio=0.7, **options)
        wrapped, optimizer = DDP(model), torch.optim.AdamW(model.parameters(), lr=0.05)
        fxmask.step(model, 0)
        for i in range(6):
            wrapped(share(batch_of(i)[0])).square().mean().backward()
            optimizer.step()
            fxmask.step(model)
            optimizer.zero_grad()
            assert same_on_all_ranks(*fxmask.masks(model).values(), *model.parameters())


def masks_that_were_kept() -> None:
    """A mask that was built once is that of older weights when a state brings it, and training goes on with it; new weights make it anew."""

    def train(model: nn.Sequential, first: int, end: int) -> None:
        wrapped, optimizer = DDP(model), torch.optim.SGD(model.parameters(), lr=0.5)
        for i in range(first, end):
            wrapped(share(batch_of(i)[0])).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    make = lambda: fxmask.apply(build(), ratio=0.7, backward="ste", refresh=0)  # noqa: E731
    whole, resumed = make(), make()
    train(whole, 0, 3)
    resumed.load_state_dict(whole.state_dict())
    fxmask.load_state_dict(resumed, fxmask.state_dict(whole))
    train(whole, 3, 6)
    train(resumed, 3, 6)
    for a, b in zip((*fxmask.masks(whole).values(), *whole.parameters()), (*fxmask.masks(resumed).values(), *resumed.parameters()), strict=True):
        assert torch.equal(a, b)
    fxmask.refresh(resumed)
    with torch.no_grad():
        resumed[2].weight.copy_(resumed[2].weight.flip(0))
    with pytest.raises(StateError, match=r"the same on all ranks"):
        fxmask.step(resumed, 0)


def masks_given() -> None:
    """Masks of the user's own have to be the same on all ranks; the guard compares them."""
    for seed, words in ((0, None), (dist.get_rank(), "ranks were given other masks or scores for the same layers")):
        model = build()
        scores = torch.rand(2, model[2].in_features // 16, generator=torch.Generator().manual_seed(seed))
        fxmask.apply(model, scores={"2": scores}, ratio=0.5)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            fxmask.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)
        assert [words in str(w.message) if words else w.message for w in told] == ([True] if words else []), [str(w.message) for w in told]


def settings_that_differ() -> None:
    """Blocks that another rank keeps get its gradients: the first step says so."""
    model = fxmask.apply(build(), ratio=0.5 + 0.3 * dist.get_rank())
    wrapped, optimizer = DDP(model), torch.optim.SGD(model.parameters(), lr=0.1)
    fxmask.guard(optimizer, model)
    wrapped(share(batch_of(0)[0])).square().mean().backward()
    if dist.get_rank():
        with pytest.warns(fxmask.FxMaskWarning, match="have a gradient.*Or another rank.*has other masks: give all ranks the same settings"):
            optimizer.step()


CASES = {
    **{f"ddp-{name}": partial(trains_alike, name, 15) for name in CONFIGS},
    "ddp-1000-steps": partial(trains_alike, "masked", 1000),
    "ddp-1000-steps-cached": partial(trains_alike, "cached", 1000),
    "ddp-disagreeing-seeds": disagreeing_seeds,
    "ddp-wrapped-names": wrapped_names,
    "ddp-reported-losses": reported_losses,
    "ddp-nm": nm_masks,
    "ddp-by-hand": steps_told_by_hand,
    "ddp-kept-masks": masks_that_were_kept,
    "ddp-masks-given": masks_given,
    "ddp-settings-that-differ": settings_that_differ,
}
