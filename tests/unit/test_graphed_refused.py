"""Steps that `fxmask.graphed` refuses, or that raise, and gradients that lie around: nothing that no device has computed stays."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from unit import tape
from unit.graphed_runs import BLOCK, MIX, RAMP, Run, assert_goes_on, assert_same, graphs, pair  # noqa: F401  (a fixture)

import fxmask
from fxmask import ActivationPruning, Feedback, Schedule, WeightMask
from fxmask.errors import ConfigError, UnsupportedError

pytestmark = pytest.mark.usefixtures("graphs")


@pytest.mark.parametrize("zero", [False, True], ids=["added to", "set to zero"])
def test_gradients_that_stay(zero):
    """A step that adds to the gradients that it finds, or sets them to zero in place; replaced from outside they are no graph's."""
    runs = []
    for g in (True, False):
        r = Run(False, **(MIX if zero else {"refresh": 0}))

        def plain(r=r):
            if zero:
                r.optimiser.zero_grad(set_to_none=False)
            loss = F.cross_entropy(r.model(r.x), r.y)
            loss.backward()
            r.optimiser.step()
            return loss.detach()

        r.step, r.plain = fxmask.graphed(plain, r.optimiser, warmup=2) if g else plain, plain
        r.train(7)
        r.train(1, step=plain)
        r.train(4)
        r.optimiser.zero_grad(set_to_none=True)
        F.cross_entropy(r.model(r.x), r.y).backward()
        r.train(8)
        runs.append(r)
    assert_same(*runs)
    assert runs[0].step.replays >= 10


class Counting(torch.optim.SGD):
    """Counts on the host, as some optimisers do."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["taken"] = self.state[p].get("taken", 0) + 1
        super().step()


def test_an_optimiser_that_counts_on_the_host():
    graphed, plain = (Run(g, optimiser=lambda p, lr: Counting(p, lr=0.1), schedule_lr=False, refresh=2) for g in (True, False))
    graphed.train(3), plain.train(3)
    with pytest.raises(UnsupportedError, match=r"(?s)an optimiser counts on the host, which a CUDA graph holds fixed.*not taken.*Counting"):
        graphed.step()
    graphed.step = graphed.plain
    assert_goes_on(graphed, plain)
    assert graphed.optimiser.state[graphed.model[0].weight]["taken"] == plain.optimiser.state[plain.model[0].weight]["taken"] == 11


def test_an_optimiser_that_is_not_capturable():
    r = Run(False, refresh=2, optimiser=lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True))
    with pytest.raises(ConfigError, match="expected an optimiser with capturable=True, got AdamW without, which PyTorch refuses to capture"):
        fxmask.graphed(r.plain, r.optimiser)()


@pytest.mark.parametrize("calls", [(1, 2, 3), (3,), (4,)])
def test_a_step_that_raises(calls):
    """In its first calls, before anything is warm, or in the capture: nothing that Python has made stays."""
    graphed, plain = pair(**MIX)
    count = iter(range(1, 100))

    def raising():
        bad = next(count) in calls
        graphed.optimiser.zero_grad(set_to_none=True)
        loss = F.cross_entropy(graphed.model(graphed.x), graphed.y)
        loss.backward()
        if bad:
            raise ValueError("a broken image")
        graphed.optimiser.step()
        return loss.detach()

    graphed.step = fxmask.graphed(raising, graphed.optimiser, warmup=2)
    broken = 0
    for _ in range(20):
        try:
            graphed.train(1)
        except ValueError:
            broken += 1
            graphed.steps -= 1
    plain.train(20 - len(calls))
    assert broken == len(calls)
    assert_same(graphed, plain)
    assert graphed.step.replays >= 10


def test_gradients_after_a_capture_that_failed():
    """With zero_grad at the step's end they would be added to."""
    graphed, plain = pair(**MIX)

    def zero_last(r, more=lambda loss: loss):
        def step():
            loss = F.cross_entropy(r.model(r.x), r.y)
            loss.backward()
            r.optimiser.step()
            more(loss)
            r.optimiser.zero_grad(set_to_none=True)
            return loss.detach()

        return step

    for r in (graphed, plain):
        r.train(6, step=zero_last(r))
    broken = fxmask.graphed(zero_last(graphed, lambda loss: loss.item()), graphed.optimiser, warmup=1)
    graphed.train(1, step=broken), plain.train(1, step=zero_last(plain))
    with pytest.raises(UnsupportedError, match="cannot be captured"):
        broken()
    assert all(p.grad is None for p in graphed.model.parameters())
    for r in (graphed, plain):
        r.train(4, step=zero_last(r))
    assert_same(graphed, plain)


def test_state_that_a_capture_makes():
    """Of a Parameter that has its first gradient then: every replay would make it anew, and so the step runs as it is once more."""
    runs = pair(**MIX)
    for r in runs:
        r.extra, r.calls = nn.Parameter(torch.ones(10)), 0
        r.optimiser.add_param_group({"params": [r.extra]})

        def plain(r=r):
            r.calls += 1
            r.optimiser.zero_grad(set_to_none=True)
            out = r.model(r.x)
            loss = F.cross_entropy(out if r.steps < 4 else out * r.extra, r.y)
            loss.backward()
            r.optimiser.step()
            return loss.detach()

        r.step = fxmask.graphed(plain, r.optimiser, warmup=2) if r is runs[0] else plain
        r.train(10)
    assert_same(*runs)
    step = runs[0].step
    assert step.captures == 1 and runs[0].calls == 10 - step.replays + 2


@pytest.mark.parametrize("place", ["state", "group"])
def test_an_optimiser_that_makes_its_state_anew(place):
    """A replay would read that of the capture, each time."""

    class Anew(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr, "rate": torch.ones(())})

        @torch.no_grad()
        def step(self):
            group = self.param_groups[0]
            if place == "group":
                group["rate"] = 0.9 * group["rate"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                self.state[p]["m"] = m.mul_(0.9).add_(p.grad) if place == "group" else 0.9 * m + p.grad
                p.sub_(0.1 * group["rate"] * self.state[p]["m"])

    graphed, plain = pair(refresh=2, optimiser=Anew, schedule_lr=False)
    with pytest.raises(UnsupportedError, match=r"(?s)puts new tensors in place of state or buffers, .*was not taken\..*where: Anew"):
        graphed.train(9)
    go_on_without(graphed, plain)
    assert_same(graphed, plain)


class Mean(nn.Module):
    """Puts a new tensor in place of its buffer, at one of two places in turns, as an allocator has them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.other = torch.zeros(())

    def forward(self, x):
        new = 0.9 * self.mean + 0.1 * x.detach().mean()
        if not tape.recording[0]:
            new = self.other.copy_(new)
            self.other = self.mean
        self.mean = new
        return x + new


def test_a_module_that_makes_its_buffer_anew():
    graphed, plain = (Run(False, **MIX) for _ in range(2))
    for r in (graphed, plain):
        r.model[1] = Mean()
    graphed.step = fxmask.graphed(graphed.plain, graphed.optimiser, warmup=2)
    with pytest.raises(UnsupportedError, match=r"(?s)puts new tensors in place of state or buffers, .*was not taken\..*where: Mean"):
        graphed.train(9)
    go_on_without(graphed, plain)
    assert_same(graphed, plain)


def go_on_without(graphed, plain):
    """The last call was refused, and is taken again by the step itself."""
    graphed.steps -= 1
    plain.train(graphed.steps)
    graphed.step = graphed.plain
    assert_goes_on(graphed, plain)


def by_halves(r, *more, **options):
    """Masked, and stepped by two optimisers in turns: the first one's layers run again behind its step."""
    fxmask.apply(r.model, WeightMask(0.5, BLOCK, **options), *more, include=["0", "2"])
    weights = list(r.model.parameters())
    halves = [torch.optim.SGD(weights[:2], lr=0.1, momentum=0.9), torch.optim.SGD(weights[2:], lr=0.1)]
    for half in halves:
        fxmask.guard(half, r.model)

    def plain():
        losses = []
        for half in halves:
            r.model.zero_grad(set_to_none=True)
            losses.append(F.cross_entropy(r.model(r.x), r.y))
            losses[-1].backward()
            half.step()
        return (losses[0] + losses[1]).detach()

    return plain, halves


@pytest.mark.parametrize("options", [{"schedule": RAMP}, {"refresh": 2}, {"criterion": "random"}], ids=["ramp", "cached", "random"])
def test_a_layer_that_runs_behind_the_step_that_moves_its_mask(options):
    """A replay counts at its end, and so the layer would have the mask of before; by `step` itself training goes on."""
    graphed, plain = (Run(False, schedule_lr=False) for _ in range(2))
    (graphed.plain, halves), (plain.step, _) = (by_halves(r, **options) for r in (graphed, plain))
    graphed.step = fxmask.graphed(graphed.plain, *halves, warmup=2)
    with pytest.raises(UnsupportedError, match=r"(?s)runs a layer behind the optimiser's step that moves its mask: .* was not taken\..*0\.weight"):
        graphed.train(9)
    go_on_without(graphed, plain)


def test_a_layer_that_runs_behind_the_step_that_moves_how_its_input_is_pruned():
    graphed = Run(False, schedule_lr=False)
    step, halves = by_halves(graphed, ActivationPruning(0.5, 8, schedule=Schedule("linear", steps=40), stages=2))
    graphed.step = fxmask.graphed(step, *halves, warmup=2)
    with pytest.raises(UnsupportedError, match=r"(?s)runs a layer behind the optimiser's step that moves its mask: .*where: 0\n"):
        graphed.train(9)


def test_a_layer_that_runs_behind_a_step_and_whose_mask_follows_its_weight():
    graphed, plain = (Run(False, schedule_lr=False) for _ in range(2))
    (step, halves), (plain.step, _) = (by_halves(r) for r in (graphed, plain))
    graphed.step = fxmask.graphed(step, *halves, warmup=2)
    assert_goes_on(graphed, plain, 12)
    assert graphed.step.replays >= 8


@pytest.mark.parametrize(
    ("options", "call", "told"),
    [
        ({"refresh": 4, "schedule": RAMP}, fxmask.refresh, "refresh"),
        ({"schedule": Feedback("loss", every=1)}, lambda model: fxmask.feedback(model, 0.5), "feedback"),
    ],
    ids=["refresh", "feedback"],
)
def test_what_a_replay_would_not_note(options, call, told):
    graphed, plain = runs = pair(**options)
    steps = [lambda r=r, plain=r.plain: (plain(), call(r.model))[0] for r in runs]
    graphed.step, graphed.plain, plain.step = fxmask.graphed(steps[0], graphed.optimiser, warmup=1), steps[0], steps[1]
    with pytest.raises(UnsupportedError, match=rf"fxmask\.{told} inside a CUDA graph, .*: expected it after a replay"):
        graphed.train(9)
    go_on_without(graphed, plain)


def test_one_inside_of_another():
    r = Run(True, **MIX, warmup=1)
    outer = fxmask.graphed(lambda: r.step(), r.optimiser, warmup=1)
    r.train(1, step=outer)
    with pytest.raises(ConfigError, match=r"fxmask\.graphed inside of a step that is captured: expected one, around the whole step"):
        outer()
