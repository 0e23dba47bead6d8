"""Rebuilds of cached masks as graphs of their own (`cuda_graphs.graph_rebuild`), on `unit.tape`'s: masks, scores and flips of rebuilds that run as they are."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from unit import tape
from unit.graphed_runs import BLOCK, MIX, RAMP, Run, adamw, assert_goes_on, assert_same, graphs, pair  # noqa: F401  (a fixture)

import fxmask
from fxmask import Feedback, Regrow

pytestmark = pytest.mark.usefixtures("graphs")
CAPTURED = {
    "norms": {"refresh": 2, "schedule": RAMP},
    "every step": {"refresh": 1, "criterion": "taylor", "average": 0.9, "schedule": RAMP},
    "start": {"refresh": 1, "average": 0.5, "start": 4},
    "hysteresis": {"refresh": 2, "average": 0.5, "hysteresis": 0.1},
    "gain": {"refresh": 1, "average": 0.5, "gain": True, "schedule": RAMP},
    "soft": {"refresh": 1, "average": 0.5, "soft": True, "schedule": RAMP},
    "random": {"refresh": 2, "criterion": "random"},
    "feedback": {"refresh": 1, "average": 0.5, "schedule": Feedback("flip_rate", initial=0.2, goal=0.2, every=3)},
    "returning": {"refresh": 2, "backward": "ste", "guard": {"returning": "zero"}},
}
# what counts on the host, waits for the device, or is not cached: never a graph
NOT = {
    "exchange": {"refresh": 1, "regrow": Regrow("random", 0.3)},
    "singular values": {"refresh": 2, "criterion": "spectral"},
    "a mask a forward": {"refresh": 1},
    "built once": {"refresh": 0},
}


@pytest.fixture
def made(monkeypatch):
    """The captures."""
    found = []

    class Counted(tape.Tape):
        def record(self, step):
            found.append(self)
            return super().record(step)

    monkeypatch.setattr("fxmask.cuda_graphs.graphed_step.recorder", lambda device: Counted)
    return found


def two_intervals(steps):
    """A graphed run and a plain one, of two layers whose masks are due in turns: alone, alone, together."""
    runs = []
    for g in (True, False):
        r = Run(False)
        for name, refresh in (("0", 2), ("2", 3)):
            fxmask.apply(r.model, fxmask.WeightMask(0.5, BLOCK, refresh=refresh, average=0.5), include=[name])
        fxmask.guard(r.optimiser, r.model)
        r.step = fxmask.graphed(r.plain, r.optimiser) if g else r.plain
        runs.append(r.train(steps))
    return runs


@pytest.mark.parametrize("options", [*CAPTURED.values(), *NOT.values()], ids=[*CAPTURED, *NOT])
def test_the_same_masks(options):
    graphed, plain = (Run(g, **options).train(30) for g in (True, False))
    assert_same(graphed, plain)
    assert fxmask.explain(graphed.model).rows == fxmask.explain(plain.model).rows  # flips, too
    least = 8 if options in CAPTURED.values() else 0
    assert graphed.step.replays >= 20
    assert graphed.step._rebuilds.replays >= least if least else graphed.step._rebuilds.replays == 0


def test_a_rebuild_runs_no_python(monkeypatch):
    r = Run(True, **MIX).train(12)
    monkeypatch.setattr("fxmask.passes.state.rebuild._build", lambda jobs: 1 / 0)
    before = r.step._rebuilds.replays
    r.train(6)
    assert r.step._rebuilds.replays == before + 3  # refresh=2


def test_all_at_once(made):
    """The masks of one step are one graph, and what is due in one step another than what is due in the next has its own."""
    runs = two_intervals(40)
    assert_same(*runs)
    assert len(made) == 1 + 3 and runs[0].step.captures == 1  # the step; the first layer alone, the second alone, both


def test_where_there_can_be_no_graph(monkeypatch):
    """A capture that fails, as for want of memory, is tried once and told of, and rebuilds go on as they are."""
    tried = []

    def failing(self, step):
        if self.stage:
            tried.append(self)
            raise RuntimeError("CUDA out of memory")
        return whole(self, step)

    whole, graphed, plain = tape.Tape.record, Run(True, **MIX).train(5), Run(False, **MIX).train(5)
    monkeypatch.setattr(tape.Tape, "record", failing)
    monkeypatch.setattr(tape.Tape, "stage", True, raising=False)
    graphed.step._rebuilds._graphs.clear()
    with pytest.warns(fxmask.FxMaskWarning, match=r"rebuilds of masks cannot be captured, .* launch by launch .*: CUDA out of memory"):
        assert_goes_on(graphed, plain, 12)
    assert_same(graphed, plain)
    assert len(tried) == 1 and graphed.step._rebuilds.replays <= 1


def test_tied_layers():
    """Layers that share a weight share their mask by what the host knows: no graph, and the right masks."""
    runs = []
    for g in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        model[2].weight = model[0].weight
        fxmask.apply(model, ratio=0.5, block=BLOCK, refresh=2, average=0.5)
        x, opt = torch.randn(8, 32), adamw(model.parameters(), 0.01)
        fxmask.guard(opt, model)

        def plain(model=model, x=x, opt=opt):
            opt.zero_grad(set_to_none=True)
            loss = F.mse_loss(model(x), x)
            loss.backward()
            opt.step()
            return loss.detach()

        step = fxmask.graphed(plain, opt) if g else plain
        runs.append(([float(step()) for _ in range(20)], list(fxmask.masks(model).values()), step))
    assert runs[0][0] == runs[1][0] and all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))
    assert runs[0][2].replays >= 10 and runs[0][2]._rebuilds.replays == 0


def test_weights_that_lie_elsewhere():
    """`weight.data = ...` between steps: never a rebuild from where it lay."""
    graphed, plain = pair(refresh=1, average=0.5, schedule=RAMP)
    for _ in range(4):
        assert_goes_on(graphed, plain, 8)
        for r in (graphed, plain):
            with torch.no_grad():
                r.model[0].weight.data = r.model[0].weight.data.flip(0).clone()
    assert_same(graphed, plain)
    assert graphed.step._rebuilds.replays >= 8
    assert len(graphed.step._rebuilds._graphs) == 4  # a tape would not notice: it holds tensors, where a graph holds addresses


def test_flips_that_a_load_replaces():
    """The number of flips is another tensor after a load, where masks are written in place."""
    runs = pair(refresh=2, schedule=RAMP)
    for r in runs:
        saved = copy.deepcopy(fxmask.state_dict(r.train(8).model))
        r.train(2)
        fxmask.load_state_dict(r.model, saved)
        r.train(12)
    assert_same(*runs)
    ours, theirs = ([row["flips"] for row in fxmask.explain(r.model).rows] for r in runs)
    assert ours == theirs and runs[0].step._rebuilds.replays >= 5


def test_more_kinds_than_are_kept(made, monkeypatch):
    """The first ones keep their graphs, the others have none; those of a phase that has ended, or of weights that have moved, make room."""
    monkeypatch.setattr("fxmask.cuda_graphs.graph_rebuild.KEPT", 2)
    runs = two_intervals(60)
    assert_same(*runs)
    assert len(made) == 1 + 2 and runs[0].step._rebuilds.replays >= 25  # of three kinds the two that came first
    for r in runs:
        with torch.no_grad():
            r.model[0].weight.data = r.model[0].weight.data.clone()
        r.train(60)
    assert_same(*runs)
    assert len(made) == 2 + 4  # both again, and the step
