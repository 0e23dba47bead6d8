"""`fxmask.graphed`: captured steps are the steps that run as they are, and count as they do. The graph is `unit.tape`'s; a GPU's own is in tests/gpu."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from unit import tape
from unit.graphed_runs import BLOCK, MIX, RAMP, Run, adamw, assert_goes_on, assert_same, graphs, pair  # noqa: F401  (a fixture)

import fxmask
from fxmask import ActivationPruning, Regrow, Schedule, WeightMask
from fxmask.errors import ConfigError, FxMaskWarning, UnsupportedError

pytestmark = pytest.mark.usefixtures("graphs")
WAYS = {
    "a mask a forward": {"backward": "masked"},
    "ramp": {"schedule": RAMP},
    "ramp, start": {"schedule": RAMP, "start": 4},
    "cyclic": {"schedule": Schedule("cyclic", steps=18, cycles=3)},
    "cached": {"refresh": 3, "schedule": RAMP},
    "built once": {"refresh": 0},
    "unmasked, free": {"backward": "unmasked", "guard": {"masked_weights": "free"}},
    "decay": {"guard": {"masked_weights": "decay"}, "schedule": RAMP},
    "ste": {"backward": "ste", "refresh": 2},
    "rigl": {"backward": "rigl", "dense_every": 4, "refresh": 2},
    "rigl, regrow": {"backward": "rigl", "dense_every": 4, "refresh": 4, "regrow": Regrow("gradient", 0.3)},
    "regrow at random": {"refresh": 3, "regrow": Regrow("random", 0.3)},
    "random": {"criterion": "random"},
    "taylor": {"criterion": "taylor", "average": 0.9, "schedule": RAMP},
    "average of norms": {"average": 0.5, "hysteresis": 0.1, "refresh": 2},
    "movement": {"criterion": "movement", "backward": "ste"},
    "momentum": {"criterion": "momentum", "refresh": 2},
    "gain": {"gain": True, "schedule": RAMP, "refresh": 1},
    "soft": {"soft": True, "schedule": RAMP},
    "returning": {"guard": {"returning": "zero"}, "backward": "ste", "refresh": 2},
    "phases": {"backward": "ste", "phases": {9: {"backward": "masked"}}},
    "phases of blocks": {"refresh": 2, "phases": {9: {"block": (16, 16)}}},
    "phases of scores": {"backward": "ste", "phases": {9: {"criterion": "linf"}}},  # which decides inside of the graph
    "flips": {"schedule": fxmask.Feedback("flip_rate", initial=0.2, goal=0.2, every=3)},
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_the_same_steps(options):
    graphed, plain = (Run(g, **copy.deepcopy(options)).train(25) for g in (True, False))
    assert_same(graphed, plain)
    assert graphed.step.replays >= 10, (graphed.step.captures, graphed.step.replays)
    assert fxmask.explain(graphed.model).rows == fxmask.explain(plain.model).rows
    ours, theirs = (tree_leaves(fxmask.state_dict(r.model)) for r in (graphed, plain))
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(ours, theirs, strict=True))


def test_a_dense_model():
    graphed, plain = (Run(g).train(12) for g in (True, False))
    assert_same(graphed, plain)
    assert (graphed.step.captures, graphed.step.replays) == (1, 10)


def test_pruned_inputs_by_a_schedule():
    pruning = ActivationPruning(0.5, 8, schedule=Schedule("linear", steps=12, initial=0.25))
    graphed, plain = (Run(g, WeightMask(0.5, BLOCK), pruning).train(20) for g in (True, False))
    assert_same(graphed, plain)
    assert graphed.step.captures >= 2  # how much is saved is a shape


def test_several_optimisers():
    """Of one model, a guard each; one that steps twice, or is not named, is told."""
    runs = []
    for g in (True, False):
        r = Run(False, schedule_lr=False)
        weights = list(r.model.parameters())
        halves = [torch.optim.SGD(weights[:2], lr=0.1, momentum=0.9), torch.optim.SGD(weights[2:], lr=0.1)]
        fxmask.apply(r.model, WeightMask(0.5, BLOCK, refresh=2, schedule=RAMP), include=["0", "2"])
        for half in halves:
            fxmask.guard(half, r.model)

        def plain(r=r, halves=halves):
            r.model.zero_grad(set_to_none=True)
            loss = F.cross_entropy(r.model(r.x), r.y)
            loss.backward()
            for half in halves:
                half.step()
            return loss.detach()

        r.step, r.plain, r.halves = fxmask.graphed(plain, *halves) if g else plain, plain, halves
        runs.append(r.train(20))
    graphed, plain = runs
    assert graphed.losses == plain.losses and graphed.step.replays >= 15
    assert all(torch.equal(a, b) for a, b in zip(graphed.model.parameters(), plain.model.parameters(), strict=True))
    wrong = fxmask.graphed(graphed.plain, graphed.halves[0], warmup=1)
    wrong()
    with pytest.raises(UnsupportedError, match="a step is counted inside a CUDA graph"):
        wrong()
    twice = fxmask.graphed(lambda: (graphed.plain(), graphed.plain()), *graphed.halves, warmup=1)
    twice()
    before = [p.clone() for p in graphed.model.parameters()]
    with pytest.raises(ConfigError, match=r"expected a step in which each guarded optimiser steps once, got \[2, 2\] steps; it was not taken"):
        twice()
    assert all(torch.equal(a, b) for a, b in zip(graphed.model.parameters(), before, strict=True))
    for _ in range(3):  # what `wrong` and `twice` took before they were captured
        plain.plain()
    assert_goes_on(graphed, plain)


def test_steps_as_they_are_between_replays():
    """A last, smaller batch that runs past the graph moves masks and scores where the graph finds them: nothing is captured anew."""
    graphed, plain = Run(True, **MIX).train(6), Run(False, **MIX).train(6)
    for _ in range(3):
        for r in (graphed, plain):
            r.train(1, step=r.plain)
        assert_goes_on(graphed, plain, 4)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(graphed.model.parameters(), plain.model.parameters(), strict=True))
    assert_same(graphed, plain)
    assert graphed.step.captures == 1


def test_what_a_load_replaces():
    """Tensors of the optimiser's state and of the masks' lie elsewhere after a load: captured anew."""
    saved = []
    graphed, plain = Run(True, **MIX).train(6), Run(False, **MIX).train(6)
    for r in (graphed, plain):
        saved.append(copy.deepcopy((r.model.state_dict(), fxmask.state_dict(r.model), r.optimiser.state_dict())))
        r.train(4)
    captures = graphed.step.captures
    for r, (weights, masks, state) in zip((graphed, plain), saved, strict=True):
        r.model.load_state_dict(weights)
        fxmask.load_state_dict(r.model, masks)
        r.optimiser.load_state_dict(state)
    assert_goes_on(graphed, plain, 12)
    assert graphed.step.captures > captures
    for r in (graphed, plain):
        for p in r.model.parameters():
            p.data = p.data * 0.9
    assert_goes_on(graphed, plain)


def test_dense_for_a_while():
    """An evaluation inside of `fxmask.dense` gives the masks back where the graph reads them; steps inside of it raise, as without a graph."""
    graphed, plain = Run(True, **MIX).train(8), Run(False, **MIX).train(8)
    x, seen = torch.randn(4, 32), []
    for r in (graphed, plain):
        with fxmask.dense(r.model), torch.no_grad():
            dense = copy.deepcopy(r.model.state_dict())
            seen.append(r.model(x))
        other = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        other.load_state_dict(dense)
        assert torch.allclose(other(x), seen[-1], atol=1e-6)
    captures = graphed.step.captures
    assert_goes_on(graphed, plain)
    assert_same(graphed, plain)
    assert graphed.step.captures == captures


def test_masks_that_go_and_come():
    """Restored and masked anew: never a replay of what was."""
    graphed, plain = Run(True, **MIX).train(6), Run(False, **MIX).train(6)
    for r in (graphed, plain):
        fxmask.restore(r.model)
    assert_goes_on(graphed, plain)
    for r in (graphed, plain):
        fxmask.apply(r.model, WeightMask(0.25, BLOCK), include=["0"])
        fxmask.guard(r.optimiser, r.model)
    assert_goes_on(graphed, plain)
    assert_same(graphed, plain)


def test_numbers_that_move():
    """A Python rate that moves now and then is captured anew; one that moves in every step is told of, and right all the same."""
    graphed, plain = pair(schedule_lr=False, refresh=2)
    for lr in (0.02, 0.01):
        for r in (graphed, plain):
            r.optimiser.param_groups[0]["lr"] = lr
        assert_goes_on(graphed, plain, 12)
    assert graphed.step.captures == 2

    def falling():
        for i in range(40):
            for r in (graphed, plain):
                r.optimiser.param_groups[0]["lr"] = 0.01 * 0.9**i
            assert_goes_on(graphed, plain, 1)

    what = r"(?s)got 20 replays in 50 calls.*because what a graph holds fixed has changed: numbers of the optimiser.*lr=torch.tensor"
    with pytest.warns(FxMaskWarning, match=what) as told:
        falling()
    assert len(told) == 1


def test_memory_of_many_kinds():
    """No more than four graphs are kept."""
    r = Run(True, schedule_lr=False, refresh=2, warmup=1)
    for i in range(9):
        r.optimiser.param_groups[0]["weight_decay"] = 0.1 * i
        r.train(12)
    assert len(r.step._graphs) <= 4 and r.step.captures == 9


@pytest.mark.filterwarnings("ignore:.*expected a step that is mostly replayed")
def test_memory_of_kinds_that_are_never_captured():
    """A rate that is another number at every call; the ones that came last are remembered."""
    r = Run(True, schedule_lr=False, warmup=2)
    held = []
    for i in range(60):
        r.optimiser.param_groups[0]["lr"] = 0.02 - 0.0001 * i
        r.train(1)
        held.append(len(r.step._warm))
    assert r.step.captures == 0 and max(held) == held[20]
    r.train(2)
    assert r.step.captures == 1


def test_a_step_that_cannot_be_captured():
    """It is not taken, its error says why, and the step as it is goes on."""
    graphed, plain = Run(True, **MIX), Run(False, **MIX)
    graphed.step = fxmask.graphed(lambda: graphed.plain().item(), graphed.optimiser, warmup=2)
    graphed.train(3), plain.train(3)  # the third looks at the first masked gradients
    with pytest.raises(UnsupportedError, match=r"(?s)cannot be captured in a CUDA graph, and was not taken: .*not permitted.*no \.item\(\)"):
        graphed.step()
    graphed.step = graphed.plain
    assert_goes_on(graphed, plain)
    assert_same(graphed, plain)


def test_a_capture_that_ends_inside_the_optimisers_step():
    """What the guard keeps during a step goes with it: the next one warns of no step that raised half-way."""
    graphed, plain = pair(**MIX)
    graphed.optimiser.register_step_pre_hook(lambda *_: graphed.x.sum().item() and None)
    graphed.train(3), plain.train(3)
    with pytest.raises(UnsupportedError, match="cannot be captured"):
        graphed.step()
    graphed.step = graphed.plain
    assert_goes_on(graphed, plain)


def test_a_layer_without_gradients():
    """A masked layer that a step does not use is looked at once, and does not keep the others from their graph; gradients may be gone after the step."""
    runs = []
    for g in (True, False):
        r = Run(False, **MIX)
        r.model[2].weight.requires_grad_(False)

        def plain(r=r):
            loss = F.cross_entropy(r.model(r.x), r.y)
            loss.backward()
            r.optimiser.step()
            r.optimiser.zero_grad(set_to_none=True)
            return loss.detach()

        r.step = fxmask.graphed(plain, r.optimiser, warmup=1) if g else plain
        runs.append(r.train(15))
    assert_same(*runs)
    assert runs[0].step.replays >= 8
    assert all(p.grad is None for p in runs[0].model.parameters())


def test_wrong_use():
    r = Run(False, backward="ste", refresh=2, regrow=Regrow("gradient"))
    with pytest.raises(UnsupportedError, match="regrow by gradient, which looks at every step's gradient: expected backward='rigl'"):
        fxmask.graphed(r.plain, r.optimiser)()
    r = Run(False, guard={"masked_step": True}, refresh=2)
    with pytest.raises(UnsupportedError, match=r"fxmask\.graphed of a masked step: expected a guard without masked_step"):
        fxmask.graphed(r.plain, r.optimiser)()
    with pytest.raises(ConfigError, match="expected a function without arguments that takes one training step, got Tensor"):
        fxmask.graphed(torch.ones(1), r.optimiser)
    with pytest.raises(ConfigError, match=r"expected the torch\.optim.Optimizers that the step steps, got none"):
        fxmask.graphed(r.plain)
    with pytest.raises(ConfigError, match=r"expected the torch\.optim.Optimizers that the step steps, got Sequential"):
        fxmask.graphed(r.plain, r.model)
    with pytest.raises(ConfigError, match="expected warmup, an int of at least 1, got 0"):
        fxmask.graphed(r.plain, r.optimiser, warmup=0)


def test_on_a_cpu_it_runs_as_it_is(monkeypatch):
    monkeypatch.undo()
    graphed, plain = Run(True, **MIX).train(6), Run(False, **MIX).train(6)
    assert_same(graphed, plain)
    assert (graphed.step.captures, graphed.step.replays) == (0, 0)


def test_the_tape_is_a_graph():
    """Nothing happens while it is recorded; replays happen to the tensors as they are by then, and no Python runs."""
    x, total, ran = torch.ones(2), torch.zeros(2), []

    def step():
        ran.append(1)
        y = x[:1] * 2 + len(ran)
        total.add_(y)
        return y

    t = tape.Tape()
    y = t.record(step)
    assert total.tolist() == [0, 0] and y.tolist() == [3]
    x.fill_(5)
    t.replay(), t.replay()
    assert total.tolist() == [22, 22] and y.tolist() == [11] and len(ran) == 1
    with pytest.raises(RuntimeError, match="not permitted"):
        tape.Tape().record(lambda: x.sum().item())
