"""What an analysis must leave as it was: a model, the random states, the modes."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def state_of(model):
    """Everything that could have changed, in a form that compares."""
    modules = {}
    for name, m in model.named_modules():
        plain = {k: id(v) for k, v in m.__dict__.items()}
        tables = {t: list(m.__dict__[t].items()) for t in m.__dict__ if isinstance(m.__dict__[t], dict)}
        modules[name] = (type(m), m.training, plain, {t: [(k, id(v)) for k, v in items] for t, items in tables.items()})
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    grads = {n: (id(p.grad), None if p.grad is None else p.grad.clone()) for n, p in model.named_parameters()}
    values = {n: (id(t), t._version, t.is_meta or t.clone(), t.requires_grad) for n, t in tensors.items()}
    return modules, values, grads, [(k, t if t.is_meta else t.clone()) for k, t in model.state_dict().items()]


def assert_same(a, b):
    assert a[0] == b[0]
    assert a[1].keys() == b[1].keys() and a[2].keys() == b[2].keys()
    for name in a[1]:
        (*x, values_x, rx), (*y, values_y, ry) = a[1][name], b[1][name]
        assert x == y and rx == ry, name
        assert values_x is True or torch.equal(values_x, values_y), name
    for name in a[2]:
        assert a[2][name][0] == b[2][name][0] and (a[2][name][1] is None or torch.equal(a[2][name][1], b[2][name][1])), name
    assert [k for k, _ in a[3]] == [k for k, _ in b[3]]
    assert all(x.is_meta or torch.equal(x, y) for (_, x), (_, y) in zip(a[3], b[3], strict=True))


def drawn():
    """NumPy's random state."""
    _, key, position, *_ = np.random.get_state()
    return key.tolist(), position


def unchanged(model, run):
    """Run something and look: the model, the random states, the modes, the switches of the backends."""
    before = state_of(model)
    states = random.getstate(), torch.get_rng_state(), drawn()
    modes = lambda: (  # noqa: E731
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), torch.get_num_threads(),
        torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled(), torch.backends.cudnn.enabled,
        torch.utils._python_dispatch._len_torch_dispatch_stack(), torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    found = modes()
    run()
    assert_same(before, state_of(model))
    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1]) and drawn() == states[2]
    assert modes() == found


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(70, 96), nn.Linear(96, 40)
        self.body = nn.Sequential(nn.Linear(40, 40), nn.ReLU())

    def forward(self, x):
        return self.body(self.fc2(F.gelu(self.fc1(x))))
