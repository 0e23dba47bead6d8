"""Whatever a graph reads or holds fixed changes between two calls of `fxmask.graphed`: it is captured anew, and training goes on as without a graph."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from unit.graphed_runs import BLOCK, MIX, RAMP, Run, adamw, assert_goes_on, assert_same, graphs, pair  # noqa: F401  (a fixture)

import fxmask
from fxmask import BlockDropout, NMMask, Schedule, WeightMask
from fxmask.errors import UnsupportedError
from fxmask.guards.guard_handle import handles_of

pytestmark = pytest.mark.usefixtures("graphs")
SOFT = {"soft": True, "schedule": Schedule("cubic", steps=60)}


def replace(module, name):
    """The same values in another tensor."""
    setattr(module, name, getattr(module, name).clone())


def moved(r):
    for p in r.model.parameters():
        p.data = p.data * 0.9


def another_rate(r):
    r.rate = None
    for group in r.optimiser.param_groups:
        group["lr"] = torch.tensor(0.005)


def fresh_state(r):
    for state in r.optimiser.state.values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def thawed(r):
    r.model[4].weight.requires_grad_(True)


def appended(r):
    r.model.append(nn.Tanh())


CHANGES = {
    "a parameter elsewhere": (MIX, moved),
    "a layer is trained no more": (MIX, lambda r: r.model[0].weight.requires_grad_(False)),
    "a bias is trained again": (MIX, thawed),
    "another tensor for the rate": (MIX, another_rate),
    "another number": (MIX, lambda r: r.optimiser.param_groups[0].update(weight_decay=0.3)),
    "the optimiser's state is gone": (MIX, lambda r: r.optimiser.state.clear()),
    "a momentum is replaced": (MIX, fresh_state),
    "a score is replaced": (MIX, lambda r: replace(r.model[0], "_fxmask_score")),
    "a cached mask is replaced": ({"refresh": 4}, lambda r: replace(r.model[0], "_fxmask_mask")),
    "the number of kept blocks is replaced": ({"schedule": RAMP}, lambda r: replace(r.model[0], "_fxmask_keep")),
    "a random mask's count is replaced": ({"criterion": "random"}, lambda r: replace(r.model[0], "_fxmask_count")),
    "rigl's switch is replaced": ({"backward": "rigl", "dense_every": 3}, lambda r: replace(r.model[0], "_fxmask_dense")),
    "a soft mask's factor is replaced": (SOFT, lambda r: replace(r.model[0], "_fxmask_scale")),
    "eval": (MIX, lambda r: r.model.eval()),
    "eval of a layer that is not masked": (MIX, lambda r: r.model[1].eval()),
    "another layer": (MIX, appended),
    "a hook before a layer": (MIX, lambda r: r.model[2].register_forward_pre_hook(lambda m, args: (2 * args[0],))),
    "a hook behind a layer": (MIX, lambda r: r.model[1].register_forward_hook(lambda m, args, out: 2 * out)),
    "another layer in a layer's place": (MIX, lambda r: r.model.__setitem__(1, nn.Tanh())),
    "another class": (MIX, lambda r: setattr(r.model[1], "__class__", nn.Tanh)),
    "another group": (MIX, lambda r: r.optimiser.add_param_group({"params": [nn.Parameter(torch.ones(2))]})),
}


@pytest.mark.parametrize(("options", "change"), CHANGES.values(), ids=CHANGES)
def test_a_change(options, change):
    graphed, plain = pair(**copy.deepcopy(options))
    for r in (graphed, plain):
        if change is thawed:
            r.model[4].weight.requires_grad_(False)
        r.train(9)
    captures = graphed.step.captures
    assert captures == 1
    for r in (graphed, plain):
        change(r)
    assert_goes_on(graphed, plain, 9)
    assert graphed.step.captures == captures + 1
    assert all(torch.equal(p, q) for p, q in zip(graphed.model.parameters(), plain.model.parameters(), strict=True))


@pytest.mark.parametrize("change", ["another layer", "a hook behind a layer", "another layer in a layer's place"])
def test_a_change_of_models_that_are_guarded_together(change):
    """By a list that nobody keeps."""
    graphed, plain = pair(**MIX)
    for r in (graphed, plain):
        handles_of(r.optimiser)[0].remove()
        fxmask.guard(r.optimiser, nn.ModuleList([r.model]))
        r.train(9)
        CHANGES[change][1](r)
    assert_goes_on(graphed, plain, 9)
    assert graphed.step.captures == 2


def test_a_guard_that_is_removed_and_made_anew():
    graphed, plain = pair(refresh=2, schedule=RAMP)
    for r in (graphed, plain):
        r.train(6)
        next(h.fxmask_guard for h in r.optimiser._optimizer_step_pre_hooks.values()).remove()
        fxmask.step(r.model, 0)
        for _ in range(5):  # counted by hand, where the graph reads it
            r.train(1)
            fxmask.step(r.model)
        fxmask.guard(r.optimiser, r.model)
        r.train(8)
    assert_same(graphed, plain)
    assert graphed.step.captures == 3


def other_runs(make):
    """What `make(run)` gives as the run's step, graphed and as it is; `make` may change the model before."""
    runs = []
    for g in (True, False):
        r = Run(False, schedule_lr=False)
        plain, *optimisers = make(r)
        r.step = fxmask.graphed(plain, *optimisers, warmup=2) if g else plain
        runs.append(r)
    return runs


def test_masks_that_nobody_guards():
    """Found while the step is captured: rebuilt, restored or laid aside, they are what a plain step would read."""

    def make(r):
        fxmask.apply(r.model, WeightMask(0.5, BLOCK, refresh=0), include=["0", "2"])
        return r.plain, r.optimiser

    runs = other_runs(make)
    for r in runs:
        r.train(6)
        fxmask.refresh(r.model)
        r.train(6)
        with fxmask.dense(r.model):
            r.train(4)
        r.train(4)
        fxmask.restore(r.model)
        r.train(6)
    assert_same(*runs)
    assert runs[0].step.replays >= 10


def test_a_dense_model_that_is_masked_later():
    runs = other_runs(lambda r: (r.plain, r.optimiser))
    for r in runs:
        r.train(6)
        fxmask.apply(r.model, WeightMask(0.5, BLOCK), include=["0", "2"])
        r.train(6)
    assert_same(*runs)
    assert runs[0].step.captures == 2


def test_steps_that_are_told_outside():
    """Without a guard, `fxmask.step` after each call."""

    def make(r):
        fxmask.apply(r.model, WeightMask(0.5, BLOCK, refresh=2, schedule=RAMP), include=["0", "2"])
        fxmask.step(r.model, 0)
        return r.plain, r.optimiser

    runs = other_runs(make)
    for r in runs:
        for _ in range(20):
            r.train(1)
            fxmask.step(r.model)
    assert_same(*runs)
    assert runs[0].step.replays >= 15
    inside = fxmask.graphed(lambda: (runs[0].plain(), fxmask.step(runs[0].model)), runs[0].optimiser, warmup=1)
    inside()
    with pytest.raises(UnsupportedError, match=r"fxmask\.step inside a CUDA graph, whose replays would not count: expected it after each replay, or a guard"):
        inside()


def test_a_masked_teacher():
    """Of another model, with cached masks that are rebuilt; named or not."""

    def make(r):
        r.teacher = fxmask.apply(copy.deepcopy(r.model), WeightMask(0.5, BLOCK, refresh=0), include=["0", "2"])

        def plain():
            r.optimiser.zero_grad(set_to_none=True)
            loss = F.cross_entropy(r.model(r.x), r.y) + (r.model(r.x) - r.teacher(r.x).detach()).square().mean()
            loss.backward()
            r.optimiser.step()
            return loss.detach()

        return plain, r.optimiser

    runs = other_runs(make)
    for r in runs:
        r.train(6)
        with torch.no_grad():
            for p, q in zip(r.teacher.parameters(), r.model.parameters(), strict=True):
                p.copy_(q)
        fxmask.refresh(r.teacher)
        r.train(6)
        for p in r.teacher[2].parameters():
            p.data = 0.5 * p.data
        r.train(4)
    assert_same(*runs)
    assert runs[0].step.captures == 2


def test_two_halves_in_turns():
    """As a GAN's: a step's forward runs layers whose masks another guard moves, in phases, too."""

    def make(r):
        masks = WeightMask(0.5, BLOCK, refresh=2, backward="ste", phases={7: {"backward": "masked"}})
        fxmask.apply(r.model, masks, include=["0", "2"])
        weights = list(r.model.parameters())
        r.halves = [torch.optim.SGD(weights[:2], lr=0.1, momentum=0.9), torch.optim.SGD(weights[2:], lr=0.1)]
        for half in r.halves:
            fxmask.guard(half, r.model)

        def step_of(half):
            def plain():
                r.model.zero_grad(set_to_none=True)
                loss = F.cross_entropy(r.model(r.x), r.y)
                loss.backward()
                half.step()
                return loss.detach()

            return plain

        r.other = step_of(r.halves[1])
        return step_of(r.halves[0]), r.halves[0]

    runs = other_runs(make)
    other = fxmask.graphed(runs[0].other, runs[0].halves[1], warmup=2)
    for r, second in zip(runs, (other, runs[1].other), strict=True):
        for _ in range(16):
            r.train(1)
            r.train(1, step=second)
    assert runs[0].losses == runs[1].losses
    assert min(runs[0].step.replays, other.replays) >= 6


class Doubling(nn.Module):
    """Does something else in training, as Dropout does."""

    def forward(self, x):
        return 2 * x if self.training else x


@pytest.mark.parametrize("named", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_dense_model_in_eval(named):
    """One that is named is compared: the mode and the classes of its modules; of another one the graph holds them."""
    runs = []
    for g in (True, False):
        r = Run(False)
        r.model.insert(1, Doubling())
        r.step = fxmask.graphed(r.plain, r.optimiser, models=[r.model] if named else (), warmup=2) if g else r.plain
        r.train(6)
        r.model.eval()
        r.train(6)
        runs.append(r)
    assert (runs[0].losses == runs[1].losses) == named  # what the docstring says


@pytest.mark.parametrize("change", [lambda t: torch.full_like(t, 3.0), lambda t: t[:1]], ids=["another", "a part of it"])
def test_buffers(change):
    runs = []
    for g in (True, False):
        r = Run(False, refresh=2)
        r.model[4].register_buffer("scale", torch.arange(1.0, 11.0))
        r.model[4].register_forward_hook(lambda m, args, out: out * m.scale)
        r.step = fxmask.graphed(r.plain, r.optimiser, warmup=2) if g else r.plain
        r.train(6)
        r.model[4].scale = change(r.model[4].scale)
        r.train(6)
        runs.append(r)
    assert_same(*runs)


def test_nm_masks_that_are_frozen():
    def make(r):
        fxmask.apply(r.model, NMMask(2, 4), include=["0", "2"])
        return r.plain, r.optimiser

    runs = other_runs(make)
    for r in runs:
        r.train(6)
        fxmask.freeze(r.model)
        r.train(6)
        r.model[0].nm_mask = ~r.model[0].nm_mask
        r.train(6)
    assert_same(*runs)
    assert runs[0].step.captures == 3


def test_block_dropout_of_another_rate():
    """The layers have the same class, Parameters and mode as before."""
    runs = []
    for g in (True, False):
        r = Run(False)
        fxmask.apply(r.model, BlockDropout(p=0.1, block=BLOCK), include=["0", "2"])
        r.step = fxmask.graphed(r.plain, r.optimiser, models=[r.model], warmup=2) if g else r.plain
        for i in range(12):
            torch.manual_seed(i)
            r.train(1)
            if i == 5:
                fxmask.restore(r.model)
                fxmask.apply(r.model, BlockDropout(p=0.6, block=BLOCK), include=["0", "2"])
        runs.append(r)
    assert_same(*runs)
    assert runs[0].step.captures == 2


def test_a_temperature_that_moves():
    """Of learned N:M masks, told by `fxmask.step` after each call; inside of the step it would be told once."""

    def make(r):
        fxmask.apply(r.model, NMMask(2, 4, mode="learned", tau=0.1, tau_from=2.0, tau_steps=12), include=["0", "2"])
        r.optimiser = adamw([p for p in r.model.parameters() if p.requires_grad], lr=0.01)
        fxmask.step(r.model, 0)
        return r.plain, r.optimiser

    runs = other_runs(make)
    for r in runs:
        for i in range(12):
            torch.manual_seed(i)
            r.train(1)
            fxmask.step(r.model)
    assert runs[0].losses == runs[1].losses and runs[0].step.replays >= 8
    inside = fxmask.graphed(lambda: (runs[0].plain(), fxmask.step(runs[0].model)), runs[0].optimiser, warmup=1)
    inside()
    with pytest.raises(UnsupportedError, match=r"fxmask\.step inside a CUDA graph"):
        inside()


def test_autocast_around_the_call():
    graphed, plain = pair(**MIX)
    for r in (graphed, plain):
        r.train(8)
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                r.train(6)
        r.train(6)
    assert_same(graphed, plain)


def test_a_copy_is_no_graphs():
    """A copy of a graphed model is rewritten by replacement again: a backward may come after a step."""
    graphed, _ = pair(**MIX)
    graphed.train(6)
    twin = copy.deepcopy(graphed.model)
    fxmask.step(twin, 0)
    loss = F.cross_entropy(twin(graphed.x), graphed.y)
    fxmask.refresh(twin)
    loss.backward()
    assert graphed.model[0]._fxmask_in_place and not twin[0]._fxmask_in_place


def test_flips_of_cached_masks():
    """The mask of the last look is not the one that is rewritten in place."""
    graphed, plain = pair(criterion="random", refresh=2, schedule=fxmask.Feedback("flip_rate", initial=0.2, goal=0.01, every=4))
    graphed.train(40), plain.train(40)
    assert_same(graphed, plain)
    assert fxmask.explain(graphed.model).rows == fxmask.explain(plain.model).rows
