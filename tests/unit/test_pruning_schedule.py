"""The ratio of pruned inputs by the optimiser's step: stages, who counts, compiles, states, wrong use."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import fxmask
from fxmask import ActivationPruning, Schedule, WeightMask
from fxmask.kernels import prune

CUBIC = Schedule("linear", steps=8)
CONFIG = ActivationPruning(0.8, 16, schedule=CUBIC, stages=4)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))


def saved(model, x):
    """Blocks that the first layer's op keeps of a sample; None where the input itself is saved."""
    seen = []

    def pack(t):
        if t.dtype in (torch.int16, torch.int32):
            seen.append(t.shape[1])
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x)
    return seen[0] if seen else None


X = torch.randn(2, 10, 64)
BLOCKS = prune.block_count(10, 64, 16)


def kept(ratio):
    n = BLOCKS - prune.dropped_count(BLOCKS, ratio)
    return None if n == BLOCKS else n


def test_the_ratio_moves_in_stages_and_ends_exactly():
    assert [round(CONFIG.ratio_at(s), 9) for s in range(10)] == [0, 0, 0.2, 0.2, 0.4, 0.4, 0.6, 0.6, 0.8, 0.8]
    for kind in ("linear", "cubic", "cosine", "exponential", "cyclic"):
        for stages in (1, 3, 4, 50):
            c = ActivationPruning(0.7, 16, schedule=Schedule(kind, steps=41), stages=stages, start=5)
            ratios = [c.ratio_at(s) for s in range(60)]
            assert len(set(ratios[5:46])) <= stages and set(ratios[:5]) == {0.0} and set(ratios[46:]) == {0.7}
    assert ActivationPruning(0.7, 16, start=3).ratio_at(2) == 0 and ActivationPruning(0.7, 16, start=3).ratio_at(3) == 0.7
    assert not ActivationPruning(0.7).needs_steps and not ActivationPruning(0.7, schedule=Schedule("constant")).needs_steps


@pytest.mark.parametrize("trace", [False, True], ids=["module", "trace"])
def test_steps_move_what_is_saved(trace):
    model = fxmask.apply(torch.fx.symbolic_trace(mlp()) if trace else mlp(), CONFIG)
    assert "80 % of 1x16, by steps that nobody counts yet" in {r["activations"] for r in fxmask.explain(model).rows}
    with pytest.raises(fxmask.FxMaskError, match=r"(?s)count optimiser steps, and nobody tells them.*fxmask\.step\(model, 0\)"):
        model(X)
    with torch.no_grad():
        model(X)  # nothing is saved
    fxmask.step(model, 0)
    for step in range(12):
        assert saved(model, X) == kept(CONFIG.ratio_at(step)), step
        if step == 4:
            assert fxmask.explain(model).rows[0]["activations"] == "40 % of 1x16, 80 % in the end"
        fxmask.step(model)
    assert fxmask.explain(model).rows[0]["activations"] == "80 % of 1x16"
    fxmask.restore(model)
    assert not any(k.startswith("_fxmask_pruning") for m in model.modules() for k in m.__dict__)


@pytest.mark.parametrize("trace", [False, True], ids=["module", "trace"])
def test_before_its_start_an_input_is_saved_whole(trace):
    config = ActivationPruning(0.8, 16, start=3)
    model = fxmask.apply(torch.fx.symbolic_trace(mlp()) if trace else mlp(), config)
    with pytest.raises(fxmask.FxMaskError, match=r"(?s)count optimiser steps, and nobody tells them.*fxmask\.step\(model, 0\)"):
        model(X)
    fxmask.step(model, 0)
    for step in range(5):
        assert saved(model, X) == (None if step < 3 else kept(0.8)), step
        fxmask.step(model)


def test_a_guard_counts_until_it_is_removed():
    model = fxmask.apply(mlp(), WeightMask(0.5, (16, 16)), CONFIG)
    assert "activations: 80 % of 1x16, by steps that nobody counts yet" in repr(model[0])
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    handle = fxmask.guard(optimizer, model)
    for step in range(10):
        assert saved(model, X) == kept(CONFIG.ratio_at(step))
        model(X).square().sum().backward()
        optimizer.step()
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    handle.remove()
    for m in (model, *twins):  # nobody counts them any more
        with pytest.raises(fxmask.FxMaskError, match="nobody tells them"):
            m(X)
    fxmask.step(model, 0)
    assert saved(model, X) == kept(0.8)
    second = fxmask.guard(optimizer, model)
    assert [m.__dict__["_fxmask_pruning_step"] for m in (model[0], model[2])] == [10, 10]
    for twin in twins:  # guards of their own count for them
        fxmask.guard(own := torch.optim.SGD(twin.parameters(), lr=0.1), twin)
        twin(X).square().sum().backward()
        own.step()
        assert [m.__dict__["_fxmask_pruning_step"] for m in (twin[0], twin[2])] == [11, 11]
    del optimizer, second, handle


def test_two_optimisers_count_their_own_layers():
    model = fxmask.apply(mlp(), WeightMask(0.5, (16, 16)), CONFIG)
    first, second = (torch.optim.SGD(m.parameters(), 1e-3) for m in (model[0], model[2]))
    fxmask.guard(first, model), fxmask.guard(second, model)
    model(X).sum().backward()
    first.step()
    first.step()
    second.step()
    assert [m.__dict__["_fxmask_pruning_step"] for m in (model[0], model[2])] == [2, 1]


@pytest.mark.parametrize("beside", [[], [WeightMask()]])
def test_a_guard_does_not_count_for_a_later_apply(beside):
    """Which wants a guard, or steps, of its own; the layers are the same objects, and so is the configuration."""
    model = fxmask.apply(mlp(), WeightMask(), CONFIG)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = fxmask.guard(optimizer, model)
    fxmask.apply(fxmask.restore(model), *beside, CONFIG)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    fxmask.step(model, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of masks that nobody guards
        for _ in range(2):
            model(X).square().sum().backward()
            optimizer.step()
            fxmask.step(model)
    assert [m.__dict__["_fxmask_pruning_step"] for m in (model[0], model[2])] == [2, 2] and handle.steps == 2


def test_more_stages_than_the_compiler_takes_recompiles():
    """Their numbers of blocks become a variable, and nothing else of a layer changes that compiled code looks at."""
    torch._dynamo.reset()
    graphs = []
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 96)), WeightMask(), ActivationPruning(0.8, 16, schedule=Schedule("linear", steps=16), stages=16))
    fxmask.step(model, 0)
    compiled = torch.compile(model, backend=lambda gm, inputs: graphs.append(gm) or gm.forward, fullgraph=True)
    for _ in range(20):
        compiled.train()(X).square().sum().backward()
        with torch.no_grad():
            compiled.eval()(X)
        fxmask.step(model)
    assert len(graphs) < torch._dynamo.config.recompile_limit


def test_a_model_is_compiled_at_most_once_a_stage():
    torch._dynamo.reset()
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward

    model = fxmask.apply(nn.Sequential(nn.Linear(64, 96)), CONFIG)
    fxmask.step(model, 0)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    eager = copy.deepcopy(model)
    for _ in range(14):
        for m in (compiled, eager):
            m.zero_grad()
            m(X).square().sum().backward()
        assert torch.equal(model[0].weight.grad, eager[0].weight.grad)
        fxmask.step(model)
        fxmask.step(eager)
    assert 2 <= len(graphs) <= 5  # 0, 20, 40, 60 and 80 %, as far as the compiler does not take their number of blocks for a variable


def test_a_resumed_run_goes_on_at_its_step():
    model = fxmask.apply(mlp(), CONFIG)
    fxmask.step(model, 5)
    state = fxmask.state_dict(model)
    assert state["pruning"]["0"]["step"] == 5 and state["masks"] == {}
    other = fxmask.apply(mlp(), CONFIG.replace({"impl": "reference"}, "here"))
    fxmask.load_state_dict(other, pickle.loads(pickle.dumps(state)))
    for _ in range(5):
        assert saved(other, X) == saved(model, X)
        fxmask.step(model), fxmask.step(other)
    untold = fxmask.apply(mlp(), CONFIG)
    fxmask.load_state_dict(untold, fxmask.state_dict(fxmask.apply(mlp(), CONFIG)))
    with pytest.raises(fxmask.FxMaskError, match="nobody tells them"):  # nor did anybody when it was saved
        untold(X)
    guarded = fxmask.apply(mlp(), WeightMask(0.5, (16, 16)), CONFIG)
    optimizer = torch.optim.SGD(guarded.parameters(), 1e-3)
    fxmask.guard(optimizer, guarded)
    state = fxmask.state_dict(guarded)
    resumed = fxmask.apply(mlp(), WeightMask(0.5, (16, 16)), CONFIG)
    fxmask.load_state_dict(resumed, state)
    with pytest.raises(fxmask.FxMaskError, match="the state that was loaded had a guard"):  # hooks are not saved
        resumed(X)
    assert {r["activations"] for r in fxmask.explain(resumed).rows} == {"80 % of 1x16, by steps that nobody counts yet"}
    again = torch.optim.SGD(resumed.parameters(), 1e-3)
    fxmask.guard(again, resumed)
    resumed(X)


def changed(key, value):
    def load():
        model = fxmask.apply(mlp(), CONFIG)
        state = fxmask.state_dict(model)
        state["pruning"]["0"][key] = value
        fxmask.load_state_dict(model, state)

    return load


def load_elsewhere():
    fxmask.load_state_dict(fxmask.apply(mlp(), CONFIG, include="0"), fxmask.state_dict(fxmask.apply(mlp(), CONFIG)))


WRONG = {
    "schedule": (lambda: ActivationPruning(0.5, schedule=3), "expected None or a fxmask.Schedule, got 3"),
    "stages": (lambda: ActivationPruning(0.5, schedule=CUBIC, stages=0), "stages counts the jumps"),
    "stages alone": (lambda: ActivationPruning(0.5, stages=3), "stages are those of a schedule"),
    "start": (lambda: ActivationPruning(0.5, start=-1), "start counts optimiser steps"),
    "no schedule": (lambda: fxmask.step(fxmask.apply(mlp(), ActivationPruning(0.5, 16))), "a schedule of pruned inputs alone is counted by fxmask.step"),
    "negative": (lambda: fxmask.step(fxmask.apply(mlp(), CONFIG), -1), "an int of at least 0, got -1"),
    "a changed step": (changed("step", -2), "changed since it was saved"),
    "other settings": (changed("settings", {"ratio": 0.5}), "other settings"),
    "other layers": (load_elsewhere, "other schedules of pruned inputs"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use(case):
    call, words = WRONG[case]
    with pytest.raises(fxmask.FxMaskError, match=words):
        call()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("masks", [{"schedule": CUBIC}, {}], ids=["masks that count", "others"])
def test_what_the_optimiser_is_given_after_its_guard(frozen, masks):
    """Nobody has counted for it till then, and training says so; announced once, it is the guard's from the next step on."""
    model = fxmask.apply(mlp(), WeightMask(0.5, (16, 16), **masks), CONFIG)
    model[2].requires_grad_(not frozen)
    optimizer = torch.optim.SGD(model[0].parameters(), 1e-3)
    handle = fxmask.guard(optimizer, model)

    def train():
        model.zero_grad()
        model(X).sum().backward()
        optimizer.step()

    if frozen:
        train()
        model[2].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    with pytest.raises(fxmask.FxMaskError, match=r"its optimiser was given after that(?s:.)*fxmask\.step\(model, 0\), once"):
        model(X)
    fxmask.step(model, 0)
    for _ in range(12):  # more than an announcement without a step is waited for
        train()
    assert [m.__dict__["_fxmask_pruning_step"] for m in (model[0], model[2])] == [12 + frozen, 12]
    assert list(handle.policies) == ["0.weight", "2.weight"] and model[2]._fxmask_step == 12 + frozen
    handle.remove()
    with pytest.raises(fxmask.FxMaskError, match=r"nobody tells them|expected a step source"):
        model(X)


def test_traces_in_one_model_have_a_state_each():
    """Rows and states go by where a trace lies now, as those of masks."""

    def two(counts):
        parts = [fxmask.apply(torch.fx.symbolic_trace(mlp()), CONFIG) for _ in range(2)]
        for part, steps in zip(parts, counts, strict=True):
            fxmask.step(part, 0)
            fxmask.step(part, steps)
        return nn.Sequential(*parts)

    old, new = two((2, 5)), two((0, 0))
    rows = {r["name"]: r["activations"] for r in fxmask.explain(old).rows}
    assert rows == {f"{i}.{j}": f"{p} % of 1x16, 80 % in the end" for i, p in enumerate((20, 40)) for j in (0, 2)}
    state = fxmask.state_dict(old)
    assert {name: entry["step"] for name, entry in state["pruning"].items()} == {"0.0": 2, "0.2": 2, "1.0": 5, "1.2": 5}
    fxmask.load_state_dict(new, state)
    assert fxmask.state_dict(new) == state and [r["activations"] for r in fxmask.explain(new).rows] == list(rows.values())
    fxmask.load_state_dict(old[1], fxmask.state_dict(fxmask.apply(nn.Sequential(torch.fx.symbolic_trace(mlp())), CONFIG)[0]))
    assert set(fxmask.state_dict(old[1])["pruning"]) == {"0", "2"}, "applied from outside, and asked for by itself"


class KeepsTraces(torch.fx.Tracer):
    """Traces that lie in what is traced stay whole, as stages of a pipeline do."""

    def is_leaf_module(self, m, path):
        return isinstance(m, torch.fx.GraphModule) or super().is_leaf_module(m, path)


def traces_in_a_trace():
    root = nn.Sequential(*(torch.fx.symbolic_trace(mlp()) for _ in range(2)))
    return torch.fx.GraphModule(root, KeepsTraces().trace(root))


def test_traces_in_a_trace_have_a_state_each():
    """Whichever of them was given to apply: by names of the trace that holds the layer."""
    parts, whole = traces_in_a_trace(), traces_in_a_trace()
    for part, steps in zip(parts.children(), (2, 5), strict=True):
        fxmask.apply(part, CONFIG)
        fxmask.step(part, 0)
        fxmask.step(part, steps)
    state = fxmask.state_dict(parts)
    assert {name: entry["step"] for name, entry in state["pruning"].items()} == {"0.0": 2, "0.2": 2, "1.0": 5, "1.2": 5}
    fxmask.load_state_dict(fxmask.apply(whole, CONFIG), state)
    assert fxmask.state_dict(whole) == state
    for model, names in ((parts, ("0.0", "0.2", "1.0", "1.2")), (whole.get_submodule("1"), ("0", "2"))):
        rows = fxmask.explain(model).rows
        assert sorted(r["name"] for r in rows) == list(names) and {r["reason"] for r in rows} == {"dense; its input is saved pruned"}


def test_an_old_guard_that_is_removed_leaves_its_layers_to_the_next():
    model = fxmask.apply(mlp(), WeightMask(0.5, (16, 16)), CONFIG)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    old = fxmask.guard(optimizer, model)
    fxmask.apply(fxmask.restore(model), WeightMask(0.5, (16, 16)), CONFIG)
    with fxmask.guard(optimizer, model):
        old.remove()
        for _ in range(2):
            model(X).sum().backward()
            optimizer.step()
        assert [model[i].__dict__["_fxmask_pruning_step"] for i in (0, 2)] == [2, 2]
