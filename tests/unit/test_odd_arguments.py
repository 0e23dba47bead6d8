"""Arguments of kinds that nobody thinks of: NumPy's ints, one name for a list, paths into nowhere, weights that are not finite, layers without features."""

import copy
import dataclasses
import json
import operator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fxmask
from fxmask.errors import ConfigError, FxMaskWarning, ShapeError

KINDS = (np.int64, np.int32, np.uint8, torch.tensor)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))


def is_plain(value):
    """Whether something holds nothing but Python's own numbers."""
    if isinstance(value, dict):
        return all(is_plain(k) and is_plain(v) for k, v in value.items())
    if isinstance(value, (tuple, list)):
        return all(map(is_plain, value))
    if hasattr(value, "__dataclass_fields__"):
        return all(is_plain(getattr(value, f)) for f in value.__dataclass_fields__)
    return value is None or type(value) in (int, float, str, bool)


CONFIGS = {
    "mask": lambda i: fxmask.WeightMask(refresh=i(3), start=i(4), dense_every=i(7), seed=i(5), block=(i(16), i(32)), backward="rigl"),
    "schedule": lambda i: fxmask.WeightMask(schedule=fxmask.Schedule("cyclic", i(10), cycles=i(2), warmup=i(1), cooldown=i(3))),
    "phases": lambda i: fxmask.WeightMask(phases={i(3): dict(block=(i(32), i(32))), i(9): dict(refresh=i(2))}),
    "phases as pairs": lambda i: fxmask.WeightMask(phases=((i(9), dict(refresh=i(2))), (i(3), dict(backward="ste")))),
    "regrow": lambda i: fxmask.WeightMask(regrow=fxmask.Regrow("random", until=i(20)), refresh=i(2)),
    "loss": lambda i: fxmask.WeightMask(schedule=fxmask.Feedback("loss", every=i(5))),
    "flips": lambda i: fxmask.WeightMask(schedule=fxmask.Feedback("flip_rate", every=i(5), goal=0.1)),
    "bytes": lambda i: fxmask.WeightMask(schedule=fxmask.Feedback("bytes", every=i(5), goal=i(200))),
    "pruning": lambda i: fxmask.ActivationPruning(block=i(16), start=i(2), stages=i(5), schedule=fxmask.Schedule("linear", i(10))),
    "dropout": lambda i: fxmask.BlockDropout(0.5, block=(i(64), i(32))),
    "groups": lambda i: fxmask.NMMask(i(1), i(4), "learned", tau_from=1.0, tau_steps=i(9)),
    "permuted groups": lambda i: fxmask.NMMask(i(2), i(4), "permuted", passes=i(3)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CONFIGS)
def test_whatever_is_an_index_is_taken_as_a_plain_int(case, kind):
    found, expected = CONFIGS[case](kind), CONFIGS[case](int)
    assert found == expected and hash(found) == hash(expected) and is_plain(found)


class IndexedBool:
    """As NumPy 2.2 has its bools."""

    dtype = np.dtype(bool)

    def __index__(self):
        return 1


WRONG = {
    "refresh": (lambda v: fxmask.WeightMask(refresh=v), "refresh counts optimiser steps: expected an int of at least 0, got"),
    "start": (lambda v: fxmask.WeightMask(start=v), "start counts optimiser steps: expected an int of at least 0, got"),
    "dense_every": (lambda v: fxmask.WeightMask(dense_every=v), "dense_every counts optimiser steps: expected an int of at least 1, got"),
    "seed": (lambda v: fxmask.WeightMask(seed=v), "seed: expected an int, got"),
    "groups": (lambda v: fxmask.NMMask(v, 4), "n, m: expected ints with 1 <= n < m <= "),
    "analyze": (lambda v: fxmask.analyze(mlp(), torch.zeros(2, 64), steps=v), "steps: expected a number of steps or None, got"),
    "block": (lambda v: fxmask.WeightMask(block=(16, v)), "block must be two positive ints"),
    "steps": (lambda v: fxmask.Schedule("cubic", v), "Schedule.steps counts optimiser steps: expected an int of at least 1, got"),
    "cycles": (lambda v: fxmask.Schedule("cyclic", 10, cycles=v), "Schedule.cycles counts the ramps of a cyclic schedule: expected an int of at least 1, got"),
    "until": (lambda v: fxmask.Regrow(until=v), "Regrow.until counts optimiser steps: expected None or an int of at least 1, got"),
    "reports": (lambda v: fxmask.Feedback("loss", every=v), "Feedback.every counts reports of the loss: expected an int of at least 1, got"),
    "every": (lambda v: fxmask.Feedback("bytes", every=v, goal=9), "Feedback.every counts optimiser steps: expected an int of at least 1, got"),
    "goal": (lambda v: fxmask.Feedback("bytes", every=1, goal=v), "Feedback.goal of 'bytes' is a budget: expected a number of bytes, an int of at least 1"),
    "width": (lambda v: fxmask.ActivationPruning(block=v), "block of pruned activations, in features: expected a positive int, got"),
    "stages": (lambda v: fxmask.ActivationPruning(stages=v), "stages counts the jumps of a scheduled ratio: expected an int of at least 1, got"),
    "step": (lambda v: fxmask.step(fxmask.apply(mlp(), ratio=0.5), v), "fxmask.step: expected a number of optimiser steps, an int of at least 0, got"),
    "still": (lambda v: fxmask.HealthLog(fxmask.apply(mlp(), ratio=0.5), still=v), "HealthLog: still counts updates: expected an int of at least 1, got"),
    "phases": (lambda v: fxmask.WeightMask(phases=[(v, dict(backward="ste"))]), "phases: expected {optimiser step: dict of options, ...}"),
}


@pytest.mark.parametrize("case", WRONG)
def test_all_else_is_refused_as_before(case):
    make, text = WRONG[case]
    tensors = (torch.tensor(True), torch.tensor(2.0), torch.tensor([1, 2]), torch.empty((), dtype=torch.int64, device="meta"))
    negative = () if case == "seed" else (-1, np.int64(-1))
    for value in (True, np.True_, IndexedBool(), 2.0, np.float64(2), "2", int, *tensors, *negative):
        with pytest.raises(ConfigError) as e:
            make(value)
        assert str(e.value).startswith(text), value


def test_floats_of_numpy_are_saved_as_plain_ones():
    found = fxmask.Schedule(initial=np.float64(0.25)), fxmask.Regrow(fraction=np.float64(0.25))
    assert [type(v) for config in found for v in dataclasses.asdict(config).values() if v == 0.25] == [float, float]


def test_steps_of_numpy_count_and_are_saved(tmp_path):
    def moved(i):
        torch.manual_seed(0)
        model = fxmask.apply(mlp(), ratio=0.75, schedule=fxmask.Schedule("cubic", i(10)), refresh=i(2), start=i(1), phases={i(4): dict(backward="ste")})
        fxmask.step(model, i(0))
        fxmask.step(model, i(3))
        return model

    model, twin = moved(np.int64), moved(int)
    assert fxmask.explain(model).rows == fxmask.explain(twin).rows and fxmask.explain(model).rows[0]["step"] == 3
    torch.save(fxmask.state_dict(model), tmp_path / "state.pt")
    fxmask.load_state_dict(twin, torch.load(tmp_path / "state.pt", weights_only=True))
    assert fxmask.explain(model).rows == fxmask.explain(twin).rows
    log = fxmask.HealthLog(model, still=np.int64(4))
    torch.save({"log": log.state_dict(), "still": log.still}, tmp_path / "log.pt")
    assert torch.load(tmp_path / "log.pt", weights_only=True)["still"] == 4


def test_pruned_inputs_of_a_numpy_block(tmp_path):
    model = fxmask.apply(mlp(), fxmask.ActivationPruning(ratio=0.5, block=np.int64(16)))
    model(torch.randn(8, 64)).sum().backward()
    twin = fxmask.apply(mlp(), fxmask.ActivationPruning(ratio=0.5, block=16))
    assert fxmask.explain(model).rows == fxmask.explain(twin).rows and json.dumps(fxmask.explain(model).to_dict())
    assert type(operator.attrgetter("_fxmask_pruning.block")(model[0])) is int


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_no_dead_layer(value):
    model = fxmask.apply(mlp(), ratio=0.5)
    log = fxmask.HealthLog(model)
    log.update()
    model[2].weight.data[0, 0] = value  # its block has the greatest norm of all
    with pytest.warns(FxMaskWarning) as said:
        row = log.update().rows[1]
    assert [str(w.message) for w in said] == [
        f"the weight 2.weight is not finite: expected a finite sum of squares, got {value}, in kept blocks, so that the layer's output is not finite either. "
        "Go back to a checkpoint from before it."
    ]
    assert np.isnan(row["kept_norm_fraction"]) and np.isnan(fxmask.explain(model, health=True).rows[1]["kept_norm_fraction"])
    assert not model(torch.randn(2, 64)).isfinite().all()
    log.update()  # said once


def test_where_masked_blocks_alone_are_not_finite():
    model = fxmask.apply(mlp(), ratio=0.5, refresh=0)
    row, column = (~fxmask.masks(model)["2.weight"]).nonzero()[0].tolist()
    model[2].weight.data[16 * row, 16 * column] = float("nan")
    with pytest.warns(FxMaskWarning, match="2.weight is not finite: expected a finite sum of squares, got nan, in masked blocks alone"):
        fxmask.HealthLog(model).update()
    assert model(torch.randn(2, 64)).isfinite().all()


@pytest.mark.parametrize("below", ["no/such", "file"])
def test_a_log_in_a_folder_that_takes_no_files(tmp_path, below):
    (tmp_path / "file").write_text("mine")
    model, folder = fxmask.apply(mlp(), ratio=0.5), tmp_path / below
    with pytest.raises(ConfigError, match=r"the output folder cannot be written: (No such file or|Not a) directory\.\n  where: .*\n  fix: name a folder") as e:
        fxmask.HealthLog(model, folder / "h.csv")
    assert str(folder) in str(e.value)
    (tmp_path / "h.csv").mkdir()
    with pytest.raises(ConfigError, match=r"the output folder cannot be written: h\.csv is a folder there"):
        fxmask.HealthLog(model, tmp_path / "h.csv")


def test_a_log_whose_folder_goes_away(tmp_path, monkeypatch):
    (tmp_path / "logs").mkdir()
    log = fxmask.HealthLog(fxmask.apply(mlp(), ratio=0.5), tmp_path / "logs" / "h.csv")
    (tmp_path / "logs").rmdir()
    with pytest.raises(ConfigError, match="the output folder cannot be written: No such file or directory"):
        log.update()
    monkeypatch.chdir(tmp_path)
    fxmask.HealthLog(log.model, "here.csv").update()
    assert Path("here.csv").exists()


def test_one_name_is_one_layer(tmp_path, monkeypatch):
    from fxmask.health import health_log

    shown = []
    monkeypatch.setattr(health_log, "heatmaps", lambda shares, path: shown.append(list(shares)))
    log = fxmask.HealthLog(fxmask.apply(mlp(), ratio=0.5))
    log.update()
    for names in ("2.weight", ("2.weight",), None):
        log.heatmap("x.png", names)
    assert shown == [["2.weight"], ["2.weight"], ["0.weight", "2.weight"]]
    with pytest.raises(ConfigError, match=r"expected names among 0.weight, 2.weight, got \['weight'\]"):
        log.heatmap("x.png", names="weight")


@pytest.mark.parametrize("beside", [None, fxmask.BlockDropout(0.5), fxmask.ActivationPruning(0.5, 16)])
def test_an_input_of_another_width_is_told_with_the_layer(beside):
    model = fxmask.apply(mlp(), fxmask.WeightMask(0.5), *([] if beside is None else [beside]))
    with pytest.raises(ShapeError, match=r"last axis of x: expected 96, got shape \(5, 64\).\n  where: 2.weight\n  fix: "):
        model[2](torch.randn(5, 64))
    with pytest.raises(ShapeError, match=r"where: 0.weight"):
        model(torch.tensor(1.0))


def test_an_input_of_another_width_of_a_soft_mask_is_told_with_the_layer():
    model = fxmask.apply(mlp(), fxmask.WeightMask(0.5, soft=True, schedule=fxmask.Schedule("linear", 10)))
    fxmask.step(model, 3)
    with pytest.raises(ShapeError, match=r"where: 2.weight"):
        model[2](torch.randn(5, 64))


SPELT = {
    "sparsity": (dict(sparsity=0.5), "got 'sparsity'; did you mean 'ratio'?"),
    "block_size": (dict(block_size=(16, 16)), "got 'block_size'; did you mean 'block'?"),
    "an option of apply": (dict(excludes="0"), "got 'excludes'; did you mean 'exclude'?"),
    "in overrides": (dict(overrides={"0": dict(sparsity=0.5)}), "got 'sparsity'; did you mean 'ratio'?"),
    "criterion": (dict(criterion="magnitude"), "got 'magnitude'; did you mean 'fro'?"),
    "mode": (dict(backward="straight_through"), "got 'straight_through'; did you mean 'ste'?"),
    "like nothing": (dict(criterion="hessian_trace"), "momentum, given, got 'hessian_trace'."),
    "percent": (dict(ratio=80), "got 80; 80 % is 0.8."),
    "above one": (dict(ratio=1.5), "got 1.5."),
    "a side": (dict(block=64), "got 64; a square is (64, 64)."),
    "a module": (dict(include=nn.ReLU()), "a module type or a callable (module, name) -> bool, got ReLU()"),
    "one argument": (dict(include=lambda name: True), "expected a callable (module, name) -> bool, got TypeError"),
    "the other way round": (dict(exclude=lambda name, module: name.startswith("0")), "got AttributeError"),
}


@pytest.mark.parametrize("case", SPELT)
def test_what_others_call_it(case):
    """Names and spellings of papers and other libraries, and patterns of other kinds: the message has the house's word."""
    options, words = SPELT[case]
    model = mlp()
    with pytest.raises(ConfigError) as e:
        fxmask.apply(model, **options)
    assert words in str(e.value)
    assert all(type(m) is not type(fxmask.apply(mlp())[0]) for m in model)


TWO = np.array(["dense", "bsr"])  # has no single truth
ARRAYS = {
    "format": (lambda: fxmask.finalize(fxmask.apply(mlp()), TWO), "unknown format of finalize: expected one of dense"),
    "policy": (lambda: fxmask.guard(torch.optim.SGD(mlp().parameters()), mlp(), TWO), "unknown masked_weights"),
    "returning": (lambda: fxmask.guard(torch.optim.SGD(mlp().parameters()), mlp(), returning=TWO), "unknown returning"),
    "masked step": (lambda: fxmask.guard(torch.optim.SGD(mlp().parameters()), mlp(), masked_step=TWO), "masked_step: expected True, False or"),
    "layers": (lambda: fxmask.apply(mlp(), layers=TWO), "layers: expected torch.nn.Linear"),
    "allocation": (lambda: fxmask.apply(mlp(), ratio=0.5, allocation=TWO), "unknown allocation method"),
    "mode": (lambda: fxmask.NMMask(mode=TWO), "mode: expected"),
    "tau_steps": (lambda: fxmask.NMMask(mode="learned", tau_steps=np.array([1, 2])), "tau_from, tau_steps: expected"),
    "regrow": (lambda: fxmask.Regrow(by=TWO), "unknown Regrow.by"),
    "impl": (lambda: fxmask.analyze(mlp(), torch.randn(2, 64), impl=TWO), "impl: expected one of"),
    "memory model": (lambda: fxmask.analyze(mlp(), torch.randn(2, 64), memory_model=TWO), "memory_model: expected one of"),
    "table": (lambda: fxmask.explain(mlp()).table(TWO), "table: expected markdown or one of"),
    "ratios": (lambda: fxmask.advise(mlp(), torch.randn(2, 64), ratios=torch.tensor(0.5)), "advise: expected blocks and ratios as sequences"),
    "names": (lambda: fxmask.HealthLog(fxmask.apply(mlp())).heatmap("a.png", TWO), "heatmap: expected a name of a weight, or a list of names"),
    "a number": (lambda: fxmask.HealthLog(fxmask.apply(mlp())).heatmap("a.png", 3), "heatmap: expected a name of a weight, or a list of names, got 3"),
    "a path": (lambda: fxmask.analyze(mlp(), torch.randn(2, 64)).save(None), "Analysis.save: expected a path, got None"),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_an_array_or_a_number_where_a_word_is_wanted(case):
    call, said = ARRAYS[case]
    with pytest.raises(ConfigError, match=said):
        call()


def test_a_picture_without_a_path():
    pytest.importorskip("matplotlib")
    log = fxmask.HealthLog(fxmask.apply(mlp()))
    log.update()
    for call in (log.plot, log.heatmap):
        with pytest.raises(ConfigError, match="a picture: expected a path, got None"):
            call(None)


def test_a_module_that_holds_linears():
    """A pattern that names what lies around the layers: the warning has the pattern that names them."""
    model = nn.ModuleDict({"enc": mlp(), "head": nn.Linear(64, 64)})
    with pytest.warns(FxMaskWarning, match="'enc' matches nothing; there are: enc.0, enc.2, head. For what lies in it write 'enc.\\*'"):
        fxmask.apply(model, exclude="enc")


MASK, PRUNING = fxmask.WeightMask(0.5, (2, 2)), fxmask.ActivationPruning(0.5, 2)
MASKS = {"mask": [MASK], "ties": [dataclasses.replace(MASK, ties="keep")], "both": [MASK, PRUNING]}
PLANS = {**MASKS, "pruning": [PRUNING], "dropout": [fxmask.BlockDropout(0.5, (2, 2))]}


@pytest.mark.filterwarnings("ignore::fxmask.FxMaskWarning", "ignore:Initializing zero-element tensors")  # nothing to mask, nor to drop
@pytest.mark.parametrize("configs", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("shape", [(4, 4), (2, 3, 4), (0, 4)])
def test_layers_without_features_train_like_dense_ones(configs, shape):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 0), nn.Linear(0, 4))
    x, twins = torch.randn(shape), (fxmask.apply(copy.deepcopy(model), *configs, include=["0", "1"]), model)
    for m in twins:
        m(x).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(*(m.parameters() for m in twins), strict=True))
