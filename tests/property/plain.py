"""What the four systems compute, in NumPy's float64 and from their definitions: nothing here comes from the library."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np


def share_of(n, ratio):
    """n * ratio, the ratio read as the nearest multiple of 1e-9."""
    return n * Fraction(round(Decimal(ratio) * 10**9), 10**9)


def by_blocks(w, block, function):
    (n, k), (bh, bw) = w.shape, block
    return np.array([[function(w[i : i + bh, j : j + bw]) for j in range(0, k, bw)] for i in range(0, n, bh)])


def norms(w, block):
    """Of the weight as float32."""
    return by_blocks(w.astype(np.float32).astype(np.float64), block, np.linalg.norm)


def best(k, *scores):
    """The k blocks with the highest scores, ties by the next scores, then to the lowest flat index."""
    order = sorted(range(scores[0].size), key=lambda i: (*(-float(s.flat[i]) for s in scores), i))
    mask = np.zeros(scores[0].size, bool)
    mask[order[:k]] = True
    return mask.reshape(scores[0].shape)


def kept_count(n, ratio):
    return max(1, math.ceil(n - share_of(n, ratio)))


def elements(mask, block, shape):
    return mask.repeat(block[0], 0).repeat(block[1], 1)[: shape[0], : shape[1]]


def linear(x, w, b, kept, dy, mode, dense=False):
    """(y, dX, dW, db) of a linear whose weight keeps the elements `kept`; `dense`: of a rigl layer on its dense steps."""
    wm, rows, grads = np.where(kept, w, 0), x.reshape(-1, w.shape[1]), dy.reshape(-1, w.shape[0])
    dw = grads.T @ rows
    if mode == "masked" or (mode == "rigl" and not dense):
        dw = np.where(kept, dw, 0)
    dx = grads @ (w if mode == "unmasked" else wm)
    return (rows @ wm.T + (0 if b is None else b)).reshape(dy.shape), dx.reshape(x.shape), dw, grads.sum(0)


def pruned(x, width, ratio):
    """An input without the blocks of each sample that are smallest: a block is `width` features of one row, a row of two axes or of one a sample."""
    samples = x.reshape(-1, 1, x.shape[-1]) if x.ndim <= 2 else x.reshape(x.shape[0], -1, x.shape[-1])
    out = np.zeros_like(samples)
    for sample, to in zip(samples, out, strict=True):
        size = by_blocks(sample, (1, width), np.linalg.norm)
        keep = best(max(1, size.size - round(share_of(size.size, ratio))), size)
        to[...] = np.where(elements(keep, (1, width), sample.shape), sample, 0)
    return out.reshape(x.shape)


def ratio_at(kind, t, steps, initial, target):
    """A schedule without warm-up and cool-down."""
    u = t / steps
    if u >= 1:
        return target
    return {
        "linear": target + (initial - target) * (1 - u),
        "cubic": target + (initial - target) * (1 - u) ** 3,
        "cosine": target + (initial - target) * (1 + math.cos(math.pi * u)) / 2,
        "exponential": 1 - (1 - initial) ** (1 - u) * (1 - target) ** u,
    }[kind]


class Optimiser:
    """SGD with momentum 0.9, Adam (coupled decay) and AdamW of a weight, and what becomes of its masked elements."""

    def __init__(self, kind, shape, lr, decay):
        self.kind, self.lr, self.decay, self.t = kind, lr, decay, 0
        self.m, self.v = np.zeros(shape), np.zeros(shape)

    def step(self, w, g, kept, policy):
        self.t += 1
        g = g + self.decay * w if self.kind != "adamw" else g
        if self.kind == "sgd":
            m, v, new = 0.9 * self.m + g, self.v, w - self.lr * (0.9 * self.m + g)
        else:
            m, v = 0.9 * self.m + 0.1 * g, 0.999 * self.v + 0.001 * g * g
            new = w * (1 - self.lr * self.decay) if self.kind == "adamw" else w
            new = new - self.lr * m / (1 - 0.9**self.t) / (np.sqrt(v / (1 - 0.999**self.t)) + 1e-8)
        if policy == "freeze":
            m, v, new = np.where(kept, m, self.m), np.where(kept, v, self.v), np.where(kept, new, w)
        elif policy == "decay":
            new = np.where(kept, new, w * (1 - self.lr * self.decay))
        self.m, self.v = m, v
        return new

    def forget(self, where):
        self.m[where] = self.v[where] = 0
