"""States of runs, saved and compared."""

import io

import torch


def through_a_file(state):
    torch.save(state, buffer := io.BytesIO())
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


def same(a, b):
    """Equal bit for bit, however deep."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b
