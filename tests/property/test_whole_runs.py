"""Runs of 20 steps beside the same runs in plain NumPy: which masks, which gradients, what the optimiser leaves, and when a mask is built."""

import numpy as np
import pytest
import torch
from property import plain
from saved_states import through_a_file
from torch import nn, optim

import fxmask

N, K, BLOCK, RATIO, STEPS = 22, 33, (4, 5), 0.6, 20
MODES = ("masked", "ste", "unmasked", "rigl")
ADAMS = dict(adam=optim.Adam, adamw=optim.AdamW)
RUNS = {
    **{f"{kind} {policy}": dict(kind=kind, policy=policy) for kind in ("sgd", "adam", "adamw") for policy in ("freeze", "decay", "free")},
    **{f"{mode} at intervals": dict(backward=mode, refresh=3, start=2, dense_every=4 if mode == "rigl" else 100) for mode in MODES},
    **{f"{mode} built once": dict(backward=mode, refresh=0, start=2) for mode in MODES},
    **{f"{mode} in each forward": dict(backward=mode, start=2, dense_every=4 if mode == "rigl" else 100) for mode in MODES},
    **{f"{kind} ramp": dict(ramp=(kind, 13, 0.1), start=2, kind="sgd") for kind in ("linear", "cubic", "cosine", "exponential")},
    "cubic ramp at intervals, resumed": dict(ramp=("cubic", 13, 0.1), refresh=4, backward="ste", resume=6),
    "resumed between rebuilds": dict(refresh=7, resume=10),
    "gradient": dict(criterion="gradient", backward="ste"),
    "taylor of dense steps": dict(criterion="taylor", backward="rigl", refresh=3, dense_every=3),
    "movement": dict(criterion="movement", backward="unmasked", refresh=2),
    "momentum": dict(criterion="momentum", backward="ste", refresh=2),
    "averages": dict(average=0.8, backward="ste", refresh=2, resume=5),
    "hysteresis": dict(hysteresis=0.3, backward="unmasked"),
    "averages of taylor with hysteresis": dict(criterion="taylor", average=0.5, hysteresis=0.2, backward="ste"),
    "gain": dict(gain=True, ramp=("linear", 13, 0.0), kind="sgd"),
    "regrow": dict(backward="rigl", refresh=4, dense_every=4, regrow=(0.3, None), kind="sgd"),
    "regrow of ste, falling": dict(backward="ste", refresh=3, regrow=(0.4, 14), kind="sgd", start=2),
}
STILL = ("adam free",)  # the others have masks that move


class Plain:
    """One masked weight, its optimiser, and what ranks its blocks."""

    def __init__(self, w, o):
        self.w, self.o, self.t, self.scores, self.growth = w, o, 0, None, None
        self.n, optimiser = plain.norms(w, BLOCK).size, o.get("kind", "adamw")
        self.optimiser = plain.Optimiser(optimiser, w.shape, 0.05, 0.1)
        self.lasting = any(k in o for k in ("average", "hysteresis", "regrow", "gain")) or o.get("criterion", "fro") != "fro"
        mode = o.get("backward", "masked")
        self.policy = o.get("policy", "freeze" if mode == "masked" or (mode == "rigl" and "regrow" in o) else "free")
        self.mask = np.ones(plain.norms(w, BLOCK).shape, bool)
        if not o.get("start"):
            self.mask = plain.best(self.kept(), plain.norms(w, BLOCK))

    def kept(self):
        t, ramp = self.t - self.o.get("start", 0), self.o.get("ramp")
        return plain.kept_count(self.n, 0 if t < 0 else plain.ratio_at(ramp[0], t, *ramp[1:], RATIO) if ramp else RATIO)

    def observe(self, g, dense):
        c, a, new = self.o.get("criterion", "fro"), self.o.get("average", 0), None
        products = plain.by_blocks(g * self.w, BLOCK, np.sum)
        if c == "fro":
            new = plain.norms(self.w, BLOCK) if a else None
        elif c != "momentum" or self.t:
            new = {"gradient": plain.by_blocks(g, BLOCK, np.linalg.norm), "taylor": abs(products), "movement": -products}.get(c)
            new = plain.by_blocks(abs(self.optimiser.m), BLOCK, np.mean) if new is None else new
        if new is not None:
            before = self.scores
            self.scores = new if before is None else before + new if c == "movement" else a * before + (1 - a) * new
        if "regrow" in self.o and (dense or self.o["backward"] != "rigl"):
            self.growth = plain.by_blocks(g, BLOCK, np.linalg.norm)

    def rebuild(self):
        old, size, start, refresh = self.mask, plain.norms(self.w, BLOCK), self.o.get("start", 0), self.o.get("refresh", 1)
        passed = self.t - start
        if passed < 0 or (passed % refresh if refresh else passed > 0):
            return
        scores, hold = size if self.scores is None else self.scores, self.o.get("hysteresis", 0)
        if "regrow" in self.o:
            self.mask = self.exchange(old, scores, passed)
        elif hold:
            self.mask = plain.best(self.kept(), *(np.where(old, s + hold * abs(s), s) for s in (scores, size)), old)
        else:
            self.mask = plain.best(self.kept(), scores, size)
        if "gain" in self.o and self.mask.sum() != old.sum():
            was, now = (np.linalg.norm(self.w * self.elements(m)) for m in (old, self.mask))
            self.w = np.where(self.elements(self.mask), self.w * was / now, self.w)

    def exchange(self, old, scores, passed):
        share, until = self.o["regrow"]
        share *= 1 if until is None else (1 + np.cos(np.pi * passed / until)) / 2 if passed < until else 0
        stay, n = plain.best(self.kept(), old, scores), int(share * self.kept())
        if not passed or not n or self.growth is None:
            return stay
        mask = plain.best(self.kept(), plain.best(self.kept() - n, stay, scores), self.growth)
        self.growth, came = None, self.elements(mask & ~old)
        self.w = np.where(came, 0, self.w)
        self.optimiser.forget(came)
        return mask

    def elements(self, mask):
        return plain.elements(mask, BLOCK, self.w.shape)

    def step(self, x, target):
        """(gradient before the optimiser's step, output)."""
        mode, every, kept = self.o.get("backward", "masked"), self.o.get("dense_every", 100), self.elements(self.mask)
        dense = mode == "rigl" and (self.t - self.o.get("start", 0) + 1) % every == 0
        y = plain.linear(x, self.w, None, kept, target, mode)[0]
        g = plain.linear(x, self.w, None, kept, np.tanh(y - target), mode, dense)[2]
        self.observe(g, dense)
        self.w = self.optimiser.step(self.w, g, kept, self.policy)
        self.t += 1
        self.rebuild()
        return y, g


def masked(o, weight):
    model = nn.Sequential(nn.Linear(K, N, bias=False, dtype=torch.float64))
    with torch.no_grad():
        model[0].weight.copy_(weight)
    options = {k: v for k, v in o.items() if k not in ("kind", "policy", "ramp", "resume", "regrow")}
    if "ramp" in o:
        options["schedule"] = fxmask.Schedule(o["ramp"][0], steps=o["ramp"][1], initial=o["ramp"][2])
    if "regrow" in o:
        options["regrow"] = fxmask.Regrow("gradient", *o["regrow"])
    fxmask.apply(model, ratio=RATIO, block=BLOCK, **options)
    settings = dict(lr=0.05, weight_decay=0.1)
    kind = o.get("kind", "adamw")
    return model, ADAMS[kind](model.parameters(), **settings) if kind in ADAMS else optim.SGD(model.parameters(), momentum=0.9, **settings)


def resumed(o, model, optimiser):
    saved = through_a_file({"model": model.state_dict(), "masks": fxmask.state_dict(model), "optimiser": optimiser.state_dict()})
    model, optimiser = masked(o, torch.zeros(N, K))
    model.load_state_dict(saved["model"])
    fxmask.load_state_dict(model, saved["masks"])
    optimiser.load_state_dict(saved["optimiser"])
    return model, optimiser


@pytest.mark.parametrize("run", RUNS)
def test_masks_gradients_and_weights(run):
    o, random = RUNS[run], np.random.default_rng(3)
    w = random.standard_normal((N, K)) / 6
    ours, (model, optimiser) = Plain(w, o), masked(o, torch.tensor(w))
    fxmask.guard(optimiser, model, o.get("policy", "auto"))
    masks = set()
    for t in range(STEPS):
        if t == o.get("resume"):
            model, optimiser = resumed(o, model, optimiser)
            fxmask.guard(optimiser, model, o.get("policy", "auto"))
        mask = fxmask.masks(model)["0.weight"].numpy()
        assert np.array_equal(mask, ours.mask), t
        masks.add(mask.tobytes())
        x, target = random.standard_normal((2, 3, K)), random.standard_normal((2, 3, N))
        y = model(torch.tensor(x))
        optimiser.zero_grad()
        y.backward((y.detach() - torch.tensor(target)).tanh())
        gradient = model[0].weight.grad.clone()
        optimiser.step()
        for got, expected in zip((y.detach(), gradient), ours.step(x, target), strict=True):
            np.testing.assert_allclose(got.numpy(), expected, rtol=1e-7, atol=1e-7, err_msg=str(t))
        np.testing.assert_allclose(model[0].weight.detach().numpy(), ours.w, rtol=1e-7, atol=1e-7, err_msg=str(t))
    assert len(masks) > 1 or run in STILL
