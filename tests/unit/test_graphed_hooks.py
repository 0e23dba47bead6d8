"""Hooks, gradients and settings that change between two calls of `fxmask.graphed`: it is captured anew, and training goes on as without a graph."""

import contextlib
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook
from unit.graphed_runs import MIX, Run, adamw, assert_goes_on, assert_same, graphs, pair  # noqa: F401  (a fixture)

import fxmask

MATMUL = torch.backends.cuda.matmul
pytestmark = pytest.mark.usefixtures("graphs")


def scale_gradients(r, by):
    for p in r.optimiser.param_groups[0]["params"]:
        p.grad.mul_(by)


def shrink(r):
    with torch.no_grad():
        for p in r.model.parameters():
            p.mul_(0.9)


def triple(p):
    p.grad.mul_(3)


HOOKS = {
    "of a module's gradient": lambda r: r.model[1].register_full_backward_hook(lambda m, before, after: (3 * before[0],)),
    "before a module's backward": lambda r: r.model[1].register_full_backward_pre_hook(lambda m, after: (3 * after[0],)),
    "of a masked weight's gradient": lambda r: r.model[0].weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3)),
    "of a dense weight's gradient": lambda r: r.model[4].weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3)),
    "behind a gradient": lambda r: r.model[4].weight.register_post_accumulate_grad_hook(triple),
    "before a step": lambda r: r.optimiser.register_step_pre_hook(lambda o, args, kwargs: scale_gradients(r, 3)),
    "behind a step": lambda r: r.optimiser.register_step_post_hook(lambda o, args, kwargs: shrink(r)),
    "of all modules": lambda r: register_module_forward_hook(lambda m, args, out: 0.9 * out),
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
def test_a_hook(register):
    """Registered, and removed again."""
    graphed, plain = pair(**MIX)
    for r in (graphed, plain):
        r.train(7)
        hook = register(r)
        try:
            r.train(7)
        finally:
            hook.remove()
        r.train(7)
    assert_same(graphed, plain)
    assert graphed.step.captures == 3 and graphed.step.replays >= 9


def test_a_hook_that_moves():
    """From a masked layer to the next one, which has no tensors of its own; and from a weight to its bias."""
    graphed, plain = pair(**MIX)
    for r in (graphed, plain):

        def double(m, args, out):
            return 2 * out

        def clamp(grad):
            return grad.clamp(-1e-3, 1e-3)

        hooks = r.model[4].weight.register_hook(clamp), r.model[0].register_forward_hook(double)
        r.train(7)
        hooks[0].remove(), r.model[4].bias.register_hook(clamp)
        r.train(7)
        hooks[1].remove(), r.model[1].register_forward_hook(double)
        r.train(7)
    assert_same(graphed, plain)
    assert graphed.step.captures == 3 and graphed.step.replays >= 9


def test_a_forward_of_one_module():
    graphed, plain = pair(**MIX)
    for r in (graphed, plain):
        r.train(7)
        r.model[1].forward = torch.tanh
        r.train(7)
    assert_same(graphed, plain)
    assert graphed.step.captures == 2


def test_a_forward_of_a_class():
    """Replaced, as by libraries that bring another attention; and by a trace that is rewritten, whose class then has a new one."""

    class Activation(nn.Module):
        def forward(self, x):
            return torch.relu(x)

    runs = [Run(False) for _ in range(2)]
    for r in runs:
        Activation.forward = lambda self, x: torch.relu(x)
        r.model[1], r.model[3] = Activation(), torch.fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.Identity()))
        r.step = fxmask.graphed(r.plain, r.optimiser, models=[r.model], warmup=2) if r is runs[0] else r.plain
        r.train(7)
        Activation.forward = lambda self, x: torch.tanh(x)
        r.train(7)
        trace = r.model[3]
        relu = next(n for n in trace.graph.nodes if n.op == "call_module")
        relu.replace_all_uses_with(relu.args[0]), trace.graph.erase_node(relu), trace.recompile()
        r.train(7)
    assert_same(*runs)
    assert runs[0].step.captures == 3


class ByClass(nn.Module):
    @classmethod
    def forward(cls, x):
        return torch.relu(x)


class ByPart(nn.Module):
    def _at(self, least, x):
        return x.clamp(min=least)

    forward = functools.partialmethod(_at, 0.0)


@pytest.mark.parametrize("kind", [ByClass, ByPart])
def test_a_forward_that_is_another_object_each_time(kind):
    r = Run(False, **MIX)
    r.model[1] = kind()
    r.step = fxmask.graphed(r.plain, r.optimiser, warmup=2)
    assert_goes_on(r, Run(False, **MIX), 12)
    assert r.step.captures == 1


def test_an_optimiser_that_is_wrapped_and_has_no_hooks():
    """As that of accelerate, which is an Optimizer and never calls its constructor."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner

        state = property(lambda self: self.inner.state)
        param_groups = property(lambda self: self.inner.param_groups)

    graphed, plain = (Run(False) for _ in range(2))
    graphed.step = fxmask.graphed(graphed.plain, Wrapper(graphed.optimiser), models=[graphed.model], warmup=2)
    assert_goes_on(graphed, plain, 12)
    assert graphed.step.captures == 1


def test_a_parameter_in_another_group():
    """The groups' numbers and the order of all parameters are as before."""

    def in_two(params, lr):
        weights = list(params)
        return torch.optim.SGD([{"params": weights[:3], "lr": 0.1}, {"params": weights[3:], "lr": 0.01}], momentum=0.9)

    graphed, plain = pair(refresh=2, optimiser=in_two, schedule_lr=False)
    for r in (graphed, plain):
        r.train(7)
        first, second = r.optimiser.param_groups
        second["params"].insert(0, first["params"].pop())
        r.train(7)
    assert_same(graphed, plain)
    assert graphed.step.captures == 2


def test_momenta_that_are_moved():
    """By `.data`, as they are when an optimiser goes to the host and back: the tensors are the same ones, and lie elsewhere."""
    graphed, plain = pair(**MIX)
    for r in (graphed, plain):
        r.train(7)
        for state in r.optimiser.state.values():
            state["exp_avg"].data = state["exp_avg"].data.clone()
        r.train(7)
    assert_same(graphed, plain)
    assert graphed.step.captures == 2  # the stand-in reads moved ones, a GPU's graph would not


def stepping(make):
    """Runs whose step is `make(run)`, graphed and as it is."""
    runs = pair(**MIX)
    for r in runs:
        plain = make(r)
        r.step = fxmask.graphed(plain, r.optimiser, warmup=2) if r is runs[0] else plain
    return runs


def adding(r):
    """A step that adds to the gradients that it finds, and leaves none."""

    def plain():
        loss = F.cross_entropy(r.model(r.x), r.y)
        loss.backward()
        r.optimiser.step()
        r.optimiser.zero_grad(set_to_none=True)
        return loss.detach()

    return plain


@pytest.mark.parametrize("at_first", [False, True])
def test_a_gradient_from_outside(at_first):
    """The first half of a batch outside of the graph, where the graph has found no gradients: the step adds to them, or they would be lost."""
    runs = stepping(adding)
    for r in runs:
        if at_first:  # which the step adds to and drops behind itself, and not before
            F.cross_entropy(r.model(2 * r.x), r.y).backward()
        r.train(7)
        for _ in range(2):
            F.cross_entropy(r.model(2 * r.x), r.y).backward()
            r.train(1)
        r.train(7)
    assert_same(*runs)
    assert runs[0].step.replays >= 9


def test_a_gradient_from_outside_at_every_call():
    """New tensors, to which the step adds and which it drops: a graph would read the first ones for ever."""
    runs = stepping(adding)
    for r in runs:
        for _ in range(12):
            F.cross_entropy(r.model(2 * r.x + 1), r.y).backward()
            r.train(1)
    assert_same(*runs)


def test_gradients_that_are_dropped_outside_now_and_then():
    """At the beginning of an epoch, by whoever drops them in the step, too: the graph is captured where there are none, and uses none."""
    graphed, plain = pair(**MIX)
    for r in (graphed, plain):
        for _ in range(6):
            r.train(3)
            r.model.zero_grad(set_to_none=True)
    assert_same(graphed, plain)
    assert graphed.step.captures == 1


def test_gradients_that_a_step_adds_to_and_drops_before_it_makes_its_own():
    """As a GAN's in one step: the generator's backward leaves gradients with the other half, which nobody reads."""

    def make(r):
        def plain():
            F.cross_entropy(r.model(2 * r.x), r.y).backward()
            r.optimiser.zero_grad(set_to_none=True)
            loss = F.cross_entropy(r.model(r.x), r.y)
            loss.backward()
            r.optimiser.step()
            return loss.detach()

        return plain

    runs = stepping(make)
    for r in runs:
        r.train(12)
    assert_same(*runs)
    assert runs[0].step.captures == 1 and runs[0].step.replays >= 9


def test_a_parameter_that_nobody_steps_is_trained_no_more():
    """Its gradient is part of the norm that all are clipped by."""

    def make(r):
        def plain():
            r.model.zero_grad(set_to_none=True)
            loss = F.cross_entropy(r.model(r.x), r.y)
            loss.backward()
            nn.utils.clip_grad_norm_(r.model.parameters(), 0.1)
            r.optimiser.step()
            return loss.detach()

        return plain

    runs = [Run(False, **MIX, optimiser=lambda params, lr: adamw(list(params)[:-1], lr)) for _ in range(2)]
    for r in runs:
        plain = make(r)
        r.step = fxmask.graphed(plain, r.optimiser, warmup=2) if r is runs[0] else plain
        r.train(7)
        r.model[4].bias.requires_grad_(False)
        r.train(7)
    assert runs[0].losses == runs[1].losses and runs[0].step.captures == 2


@contextlib.contextmanager
def by(ask, change, *values):
    """A setting of PyTorch's, for a while."""
    before = ask()
    change(*values)
    try:
        yield
    finally:
        change(before)


SETTINGS = {
    "deterministic": lambda: by(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "products of float32": lambda: by(lambda: MATMUL.fp32_precision, lambda to: setattr(MATMUL, "fp32_precision", to), "tf32"),
    "sums of float16": lambda: by(lambda: MATMUL.allow_fp16_accumulation, lambda to: setattr(MATMUL, "allow_fp16_accumulation", to), True),
    "attention": lambda: sdpa_kernel([SDPBackend.MATH]),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "the default dtype": lambda: by(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_a_setting(setting):
    """Around some calls; behind them the first graph is replayed again."""
    graphed, plain = pair(**MIX)
    for r in (graphed, plain):
        r.train(7)
        with setting():
            r.train(7)
    captures, replays = graphed.step.captures, graphed.step.replays
    assert_goes_on(graphed, plain, 4)
    assert_same(graphed, plain)
    assert graphed.step.captures == captures == 2 and graphed.step.replays == replays + 4
