"""Pruned inputs, block dropout, N:M masks; see `flow_bodies.py`."""

from __future__ import annotations

import copy
import functools

import torch
from gpu.flow_bodies import BLOCK, STEPS, WIDTH, assert_masks_equal, assert_same_weights, batch, loss_of, net, sgd
from torch import nn

import fxmask
from fxmask import ActivationPruning, BlockDropout, NMMask, Schedule, WeightMask


def check_plain_training(device, impl, change, steps=STEPS, tolerance=1e-3, guard=False):
    """`change(model, impl)` has no weight masks: losses and weights of the same run on the CPU, finite and falling."""
    found = []
    for d, i in ((device, impl), ("cpu", "reference")):
        model = change(net(d), i)
        opt = sgd(model.parameters())
        losses = []
        for _ in range(steps):
            opt.zero_grad(set_to_none=True)
            loss = loss_of(model, *batch(d))
            loss.backward()
            opt.step()
            losses.append(loss.detach().cpu())
        found.append((model, torch.stack(losses)))
    (model, losses), (other, others) = found
    torch.testing.assert_close(losses, others, rtol=tolerance, atol=tolerance)
    assert losses.isfinite().all() and losses[-1] < losses[0]
    assert_same_weights(model, other, tolerance)
    assert str(fxmask.explain(model))
    return model, other


def triple_batch(device):
    x = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(1))
    return x.to(device)


def pruned_net(device, impl, weight_masks=False, **options):
    masks = [WeightMask(0.5, BLOCK, impl=impl, backward="ste")] if weight_masks else []
    return fxmask.apply(net(device), *masks, ActivationPruning(**{"ratio": 0.5, "block": 16, "impl": impl, **options}))


def check_pruning(device, impl, weight_masks=False, **options):
    """Outputs and gradients, of the dW of pruned inputs, are those on the CPU; a scheduled ratio moves with the steps."""
    found = []
    for d, i in ((device, impl), ("cpu", "reference")):
        model = pruned_net(d, i, weight_masks, **options)
        told = weight_masks or "schedule" in options
        if told:
            fxmask.step(model, 0)
        opt = sgd(model.parameters())
        losses = []
        for _ in range(STEPS):
            opt.zero_grad(set_to_none=True)
            loss = model(triple_batch(d)).square().mean()
            loss.backward()
            opt.step()
            if told:
                fxmask.step(model)
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[0]
        found.append(model)
    if "noise" not in options:
        assert_same_weights(*found)
    fxmask.restore(found[0])


def check_dropout(device, impl, masks=False):
    """A rate, a forward in blocks, gradients that match the mask, and evaluation as dense; the same draw again by checkpointing's seed."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)).to(device)
    configs = [WeightMask(0.5, BLOCK, impl="reference")] if masks else []
    own = impl if not masks else "auto"  # beside a WeightMask its own counts
    model = fxmask.apply(copy.deepcopy(dense), *configs, BlockDropout(block=(16, 16), impl=own))
    x, _ = batch(device)
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        model.zero_grad()
        y = model(x)
        y.square().sum().backward()
        runs.append((y.detach(), model[2].weight.grad.clone()))
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])
    assert not torch.equal(model(x), model(x))
    model.eval()
    other = copy.deepcopy(dense).eval()
    if masks:
        fxmask.apply(other, ratio=0.5, block=BLOCK, impl="reference")
    torch.testing.assert_close(model(x), other(x), rtol=1e-4, atol=1e-4)
    model.train()
    wide = torch.ones(512, WIDTH, device=device, requires_grad=True)
    only = fxmask.apply(nn.Linear(WIDTH, WIDTH, bias=False).to(device), BlockDropout(0.5, (16, 16), impl=own))
    with torch.no_grad():
        only.weight.copy_(torch.eye(WIDTH))
    y = only(wide)
    share = float((y == 0).double().mean())
    assert 0.3 < share < 0.7 and set(y.unique().tolist()) == {0.0, 2.0}
    y.sum().backward()
    assert torch.equal(wide.grad, y) and torch.equal(only.weight.grad, y.sum(0).expand(WIDTH, WIDTH))


def nm_net(model, impl, **options):
    mode = options.get("mode", "magnitude")
    impl = impl if impl != "triton" or (mode in ("magnitude", "sr-ste") and not options.get("transposable")) else "auto"
    return fxmask.apply(model, NMMask(**{"n": 2, "m": 4, "impl": impl, **options}), include=["0", "2"])


def check_nm(device, impl, **options):
    """The masks of a trained model are those on the CPU; frozen, saved and loaded they stay."""
    model, other = check_plain_training(device, impl, functools.partial(nm_net, **options))
    if options.get("mode") != "permuted":
        assert_masks_equal(model, other)
    fxmask.freeze(model)
    saved = {name: mask.clone() for name, mask in fxmask.masks(model).items()}
    again = nm_net(net(device), impl, **options)
    again.load_state_dict({name: t.cpu() for name, t in model.state_dict().items()})
    fxmask.load_state_dict(again, fxmask.state_dict(model))
    assert all(torch.equal(saved[name], mask) for name, mask in fxmask.masks(again).items())
    x, _ = batch(device)
    with torch.no_grad():
        y = again.eval()(x)
        moved = again.cpu()(x.cpu())
        torch.testing.assert_close(moved, y.cpu(), rtol=1e-4, atol=1e-4)
        fxmask.finalize(model.eval())
        torch.testing.assert_close(model(x), y, rtol=1e-4, atol=1e-4)


def check_learned(device, impl, **options):
    """Logits learn by Gumbel draws of the device's generator; the temperature follows the steps."""
    model = nm_net(net(device), impl, mode="learned", tau_from=1.0, tau=0.1, tau_steps=4, **options)
    logits = model[0].nm_logits.detach().clone()
    fxmask.step(model, 0)
    opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.05)
    losses = []
    for _ in range(STEPS):
        opt.zero_grad()
        loss = loss_of(model, *batch(device))
        loss.backward()
        opt.step()
        fxmask.step(model)
        losses.append(float(loss.detach()))
    assert torch.tensor(losses).isfinite().all() and not torch.equal(model[0].nm_logits.detach(), logits)
    assert abs(float(model[0].nm_tau) - 0.1) < 1e-6
    mask = fxmask.masks(model)["0.weight"]
    assert mask.device == model[0].weight.device and int(mask.sum()) == WIDTH * WIDTH // 2
    other = nm_net(net("cpu"), "auto", mode="learned", tau_from=1.0, tau=0.1, tau_steps=4, **options)
    other.load_state_dict(model.state_dict())
    assert_masks_equal(model, other)
    fxmask.finalize(model.eval())


of = functools.partial
FLOWS = {
    "pruned inputs": check_pruning,
    "pruned inputs, noise": of(check_pruning, noise=1.0),
    "pruned inputs, schedule": of(check_pruning, schedule=Schedule("linear", steps=4), stages=2),
    "pruned inputs with masks": of(check_pruning, weight_masks=True),
    "block dropout": check_dropout,
    "block dropout with masks": of(check_dropout, masks=True),
    "2:4 by magnitude": check_nm,
    "2:4 sr-ste": of(check_nm, mode="sr-ste"),
    "2:4 transposable": of(check_nm, transposable=True),
    "2:4 permuted": of(check_nm, mode="permuted"),
    "2:4 learned": check_learned,
    "2:4 learned, soft, from magnitudes": of(check_learned, soft=True, init="magnitude", permute=True),
}
