"""Steps by `fxmask.graphed`, whose replays count: losses, weights and masks of the same steps without a graph; see `flow_bodies.py`.

A CPU runs each step as it is; the same on a stand-in for CUDA graphs: tests/unit/test_graphed.py.
"""

from __future__ import annotations

import functools
import itertools

import torch
from gpu.flow_bodies import WIDTH, assert_masks_equal, assert_same_weights, batch, loss_of, masked_net, net

import fxmask
from fxmask import ActivationPruning, Regrow, Schedule, WeightMask

RAMP = Schedule("cubic", steps=12)


def graphed_run(model, device, graphed, steps=20, masked=True, compiled=False, guard=None):
    """Losses; every seventh step runs as it is, past the graph."""
    x, target = batch(device)
    x, target = x.clone(), target.clone()
    opt = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3, device=device), fused=True, capturable=True)
    rate = torch.optim.lr_scheduler.ExponentialLR(opt, 0.95)
    if masked:
        fxmask.guard(opt, model, **(guard or {}))
    forward = torch.compile(model) if compiled else model

    def plain():
        opt.zero_grad(set_to_none=True)
        loss = loss_of(forward, x, target)
        loss.backward()
        opt.step()
        return loss.detach()

    step, losses = fxmask.graphed(plain, opt) if graphed else plain, []
    for i in range(steps):
        new = batch(device, seed=i)
        x.copy_(new[0])
        target.copy_(new[1])
        losses.append((plain if i % 7 == 6 else step)().clone())
        rate.step()
    if graphed and torch.device(device).type == "cuda":
        assert step.replays >= 5, (step.captures, step.replays)
    return torch.stack(losses).cpu()


def check(device, impl, make=masked_net, running=None, **options):
    runs = [make(device, impl, **options) for _ in range(2)]
    losses = [graphed_run(model, device, g, **(running or {})) for model, g in zip(runs, (True, False), strict=True)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-4)
    assert_same_weights(*runs, tolerance=1e-4)
    if make is not dense_net:
        assert_masks_equal(*runs)
        ours, theirs = ([(row["name"], row["achieved_ratio"]) for row in fxmask.explain(m).rows] for m in runs)
        assert ours == theirs


def dense_net(device, impl):
    return net(device)


def pruned_net(device, impl):
    pruning = ActivationPruning(0.5, 16, schedule=Schedule("linear", steps=12, initial=0.25))
    return fxmask.apply(net(device), WeightMask(0.5, (16, 16), impl=impl), pruning)


def check_turns(device, impl):
    """Two graphed models in turns, each on a stream of its own, as many.py trains them."""
    cuda = torch.device(device).type == "cuda"
    streams = [torch.cuda.Stream() for _ in range(2)] if cuda else [None, None]
    models = [masked_net(device, impl, refresh=n, schedule=RAMP) for n in (1, 2)]
    steps, inputs = [], []
    for model, stream in zip(models, streams, strict=True):
        with torch.cuda.stream(stream):
            x, target = batch(device)
            opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)
            fxmask.guard(opt, model)
            steps.append(fxmask.graphed(functools.partial(one_step, model, opt, x, target), opt))
            inputs.append(x)
    if cuda:
        torch.cuda.synchronize()
    for i in range(15):
        for step, stream, x in zip(steps, streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                x.copy_(batch(device, seed=i)[0])
                step()
    if cuda:
        torch.cuda.synchronize()
    for n, model in zip((1, 2), models, strict=True):
        other = masked_net(device, impl, refresh=n, schedule=RAMP)
        x, target = batch(device)
        opt = torch.optim.AdamW(other.parameters(), lr=1e-3, fused=True, capturable=True)
        fxmask.guard(opt, other)
        for i in range(15):
            x.copy_(batch(device, seed=i)[0])
            one_step(other, opt, x, target)
        assert_same_weights(model, other, 1e-4)
        assert_masks_equal(model, other)


def one_step(model, opt, x, target):
    opt.zero_grad(set_to_none=True)
    loss = loss_of(model, x, target)
    loss.backward()
    opt.step()
    return loss.detach()


def check_generator(device, impl):
    """Dropout in a graph draws anew in every replay."""
    model = masked_net(device, impl)
    model.append(torch.nn.Dropout(0.5))
    opt, x = torch.optim.SGD(model.parameters(), lr=0.0), torch.randn(8, WIDTH, device=device)
    fxmask.guard(opt, model)

    def plain():
        opt.zero_grad(set_to_none=True)
        y = model(x)
        y.sum().backward()
        opt.step()
        return y.detach()

    step = fxmask.graphed(plain, opt)
    seen = [step().clone() for _ in range(8)]
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(seen))


of = functools.partial
FLOWS = {
    "graphed, dense": of(check, make=dense_net, running={"masked": False}),
    "graphed, a mask a forward": check,
    "graphed, ramp": of(check, schedule=RAMP),
    "graphed, cached ramp": of(check, schedule=RAMP, refresh=3),
    "graphed, default impl": lambda device, impl: check(device, "auto", schedule=RAMP, refresh=2),
    "graphed, taylor": of(check, schedule=RAMP, criterion="taylor", average=0.9),
    "graphed, ste": of(check, backward="ste", refresh=2),
    "graphed, unmasked and free": of(check, backward="unmasked", running={"guard": {"masked_weights": "free"}}),
    "graphed, decay": of(check, schedule=RAMP, running={"guard": {"masked_weights": "decay"}}),
    "graphed, rigl": of(check, backward="rigl", dense_every=4, refresh=4, regrow=Regrow("gradient", 0.3), running={"steps": 30}),
    "graphed, soft": of(check, schedule=RAMP, soft=True, running={"steps": 30}),
    "graphed, phases": of(check, backward="ste", phases={9: {"backward": "masked"}}),
    "graphed, compiled": of(check, schedule=RAMP, refresh=2, running={"compiled": True}),
    "graphed, pruned": of(check, make=pruned_net, running={"steps": 30}),  # each step of its schedule saves another share
    "graphed, in turns": check_turns,
    "graphed, dropout": check_generator,
}
