"""What a user does to train a masked model, a short run each: on `device`, compared with the same run on the CPU by the reference; see `flows.py`.

FLOWS: {name: function(device, impl)}, where impl is that of the run on `device`. All layers have one shape and one block, so that few kernels are compiled.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

import fxmask
from fxmask import Feedback, Regrow, Schedule

WIDTH, TOKENS, BLOCK, STEPS = 64, 32, (16, 16), 5
OWN = {"0": torch.arange(16).view(4, 4) * 7 % 16, "2": torch.arange(16).view(4, 4) * 5 % 16}  # scores of the user's


def default_impl(device):
    return "triton" if torch.device(device).type == "cuda" else "auto"


def net(device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)).to(device, dtype)


def batch(device="cpu", dtype=torch.float32, seed=1):
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x.to(device, dtype), (x[:, :10].abs().argmax(1) % 10).to(device)


def masked_net(device, impl, dtype=torch.float32, **options):
    """Created on the CPU, so that two devices have the same weights, and masked where it will run."""
    impl = "auto" if options.get("soft") and impl == "triton" else impl  # which computes densely over the ramp, as no kernel does
    return fxmask.apply(net(device, dtype), impl=impl, **{"ratio": 0.5, "block": BLOCK, **options})


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adamw(params, **options):
    return torch.optim.AdamW(params, lr=1e-3, **options)


def loss_of(model, x, target):
    return nn.functional.cross_entropy(model(x).float(), target)


def train(model, device, steps=STEPS, optimiser=sgd, guard=True, report=False, dtype=torch.float32, **guarding):
    """Losses of steps on one batch; with a guard, or by `fxmask.step`."""
    opt = optimiser(model.parameters())
    if guard:
        fxmask.guard(opt, model, **guarding)
    else:
        fxmask.step(model, 0)
    x, target = batch(device, dtype)
    losses = []
    for _ in range(steps):
        opt.zero_grad(set_to_none=True)
        loss = loss_of(model, x, target)
        loss.backward()
        opt.step()
        if not guard:
            fxmask.step(model)
        if report:
            fxmask.feedback(model, loss.detach())
        losses.append(loss.detach())
    return opt, [float(loss) for loss in losses]


def on_host(tensors):
    return {name: t.detach().cpu() for name, t in tensors.items()}


def assert_masks_equal(model, other):
    a, b = (on_host(fxmask.masks(m)) for m in (model, other))
    assert a and a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), f"{name}: {int((a[name] != b[name]).sum())} blocks differ"


def assert_same_weights(model, other, tolerance=1e-3):
    others = dict(other.named_parameters())
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach().cpu(), others[name].detach().cpu(), rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


def check_training(device, impl, options=None, make=masked_net, falls=True, tolerance=1e-3, **training):
    """Losses finite and falling, and losses, weights and masks are those of the same run on the CPU."""
    model, other = make(device, impl, **(options or {})), make("cpu", "reference", **(options or {}))
    (_, losses), (_, others) = train(model, device, **training), train(other, "cpu", **training)
    assert all(p.device.type == torch.device(device).type for p in model.parameters())
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(others), rtol=1e-3, atol=1e-3)
    assert torch.tensor(losses).isfinite().all() and (not falls or losses[-1] < losses[0]), losses
    assert_same_weights(model, other, tolerance)
    assert_masks_equal(model, other)


def trained(options=None, **training):
    return functools.partial(check_training, options=options, **training)


def auto(flow):
    """A flow whose options no kernel has: masks with `cover`, which impl="triton" refuses."""
    return lambda device, impl: flow(device, "auto")


def check_guarded_masks(device, impl, masked_weights="auto", rest=True, tolerance=1e-3, **training):
    """What a guard says of masked weights: they rest to the bit, or move; and the run is the CPU's."""
    model = masked_net(device, impl, refresh=0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    masks = {name: mask.clone() for name, mask in fxmask.masks(model).items()}
    train(model, device, masked_weights=masked_weights, **training)
    for name, mask in masks.items():
        left = ~mask.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
        p = dict(model.named_parameters())[name].detach()
        assert torch.equal(p[left], before[name][left]) == rest and not torch.equal(p, before[name]), name
    check_training(device, impl, {"refresh": 2}, tolerance=tolerance, masked_weights=masked_weights, **training)


def guarded(masked_weights="auto", rest=True, **training):
    return functools.partial(check_guarded_masks, masked_weights=masked_weights, rest=rest, **training)


def on_cuda(optimiser, **options):
    """Options of an optimiser that a CPU refuses."""
    return lambda params: optimiser(params := list(params), **(options if params[0].is_cuda else {}))


def muon(params):
    return torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.02)


RAMP = Schedule("cubic", steps=4)
MODES = {
    f"mode {mode}, refresh {n}": trained({"backward": mode, "refresh": n, "dense_every": 2}) for mode in ("masked", "ste", "unmasked", "rigl") for n in (1, 3)
}
CRITERIA = {
    f"criterion {criterion}": trained({"criterion": criterion, "refresh": 2})
    for criterion in ("fro", "spectral", "l1", "linf", "random", "gradient", "taylor", "momentum")
}
DYNAMICS = {
    "criterion movement": trained({"criterion": "movement", "backward": "ste"}),
    "random, every forward": trained({"criterion": "random"}, falls=False),
    "moving average": trained({"average": 0.9, "criterion": "taylor"}),
    "hysteresis": trained({"hysteresis": 0.2, "refresh": 2}),
    "ties kept": trained({"ties": "keep"}),
    "cover": auto(trained({"cover": True})),
    "small ragged blocks": trained({"block": (24, 5)}),
    "start": trained({"start": 2}),
    "schedule": trained({"schedule": RAMP, "ratio": 0.8}),
    "schedule, refresh 2": trained({"schedule": RAMP, "ratio": 0.8, "refresh": 2}),
    "steps told": trained({"schedule": RAMP, "ratio": 0.8, "refresh": 2, "criterion": "taylor"}, guard=False),
    "cyclic schedule": trained({"schedule": Schedule("cyclic", steps=4, cycles=2)}),
    "soft": trained({"schedule": RAMP, "soft": True, "refresh": 2}),
    "gain": trained({"schedule": RAMP, "gain": True, "refresh": 2}, falls=False),
    "phases": trained({"phases": {2: {"backward": "ste"}, 4: {"block": (32, 32)}}, "refresh": 2}),
    "regrow by gradient": trained({"backward": "rigl", "refresh": 2, "dense_every": 2, "regrow": Regrow("gradient", 0.3)}),
    "regrow at random": trained({"refresh": 2, "regrow": Regrow("random", 0.3)}, falls=False),
    "allocation erk": trained({"allocation": "erk"}),
    "allocation global": trained({"allocation": "global"}),
    "allocation byte": trained({"allocation": "byte"}),
    "masks given": trained({"masks": {name: scores > 9 for name, scores in OWN.items()}}),
    "scores given": trained({"scores": OWN, "schedule": RAMP, "ratio": 0.8, "refresh": 2}),
    "feedback of the loss": trained({"schedule": Feedback("loss", every=1, change=0.2)}, report=True),
    "feedback of flips": trained({"schedule": Feedback("flip_rate", every=2, goal=0.5, change=0.2), "refresh": 2}),
    "feedback of bytes": trained({"schedule": Feedback("bytes", every=1, goal=20_000, change=0.2), "refresh": 2}),
}
OPTIMISERS = {
    "SGD freeze": guarded("freeze"),
    "AdamW freeze": guarded("freeze", optimiser=adamw),
    "AdamW decay": guarded("decay", rest=False, optimiser=adamw),
    "AdamW free": guarded("free", rest=False, optimiser=adamw),
    "AdamW foreach": guarded(optimiser=functools.partial(adamw, foreach=True)),
    "AdamW fused": guarded(optimiser=functools.partial(adamw, fused=True)),
    "AdamW capturable": guarded(optimiser=on_cuda(adamw, capturable=True)),
    "AdamW, momenta zero": guarded(optimiser=adamw, returning="zero"),
    "masked step SGD": guarded(masked_step=True),
    "masked step AdamW": guarded(optimiser=adamw, masked_step=True),
    "masked step foreach": guarded(optimiser=functools.partial(adamw, foreach=True), masked_step=True),
    "masked step fused": guarded(optimiser=functools.partial(adamw, fused=True), masked_step=True),
    "masked step capturable": guarded(optimiser=on_cuda(adamw, capturable=True), masked_step=True),
    "masked step, ties kept": lambda device, impl: check_training(device, impl, {"ties": "keep"}, optimiser=adamw, masked_step=True),
    "Muon": guarded(optimiser=muon, tolerance=0.01),  # it orthogonalises in bfloat16
}
FLOWS = {**MODES, **CRITERIA, **DYNAMICS, **OPTIMISERS}
