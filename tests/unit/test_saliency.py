"""Scores that optimiser steps add to: each criterion against its formula in float64 loops, and what becomes of them over a run."""

import copy
import io

import pytest
import torch
from sample_models import mlp
from torch import fx, nn, optim

import fxmask
from fxmask.errors import ConfigError, StateError, UnsupportedError
from fxmask.kernels.grid import expand_mask
from fxmask.kernels.score import CRITERIA, NORMS, block_keys, norms_of
from fxmask.passes.state.saliency import LEARNED, norms

BLOCK, SHAPE = (16, 24), (40, 60)  # ragged on both sides
GRID = (3, 3)


def blocks(t):
    """{(i, j): elements} of a weight's blocks, by slices."""
    return {(i, j): t[i * 16 : i * 16 + 16, j * 24 : j * 24 + 24] for i in range(GRID[0]) for j in range(GRID[1])}


def of_blocks(function, *tensors):
    parts = [blocks(t.detach().double()) for t in tensors]
    return torch.stack([function(*(p[key] for p in parts)) for key in parts[0]]).reshape(GRID)


FORMULAS = {
    "gradient": lambda w, g: g.square().sum().sqrt(),
    "taylor": lambda w, g: (w * g).sum().abs(),
    "movement": lambda w, g: -(w * g).sum(),
    "fro": lambda w, g: w.square().sum().sqrt(),
    "l1": lambda w, g: w.abs().sum(),
    "linf": lambda w, g: w.abs().max(),
    "spectral": lambda w, g: torch.linalg.svdvals(w)[0],
}


def layer(**config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SHAPE[1], SHAPE[0]))
    return fxmask.apply(model, fxmask.WeightMask(**{"ratio": 0.5, "block": BLOCK, **config}))


def steps(model, optimizer, n, seed=1):
    """Train; yields (weight, gradient) of each step before the optimiser moves the weight."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n):
        x = torch.randn(32, SHAPE[1], generator=generator)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        seen = model[0].weight.detach().clone(), model[0].weight.grad.detach().clone()
        optimizer.step()
        yield seen


LAST = [(c, a) for c in FORMULAS for a in (0.0, 0.75) if a or c in ("gradient", "taylor", "movement")]  # a norm as it is now does not last


@pytest.mark.parametrize(("criterion", "average"), LAST)
def test_scores_are_their_formula(criterion, average):
    model = layer(criterion=criterion, average=average, backward="ste")
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    fxmask.guard(optimizer, model)
    expected = torch.zeros(GRID, dtype=torch.float64)
    for w, g in steps(model, optimizer, 4):
        new = of_blocks(FORMULAS[criterion], w, g)
        if criterion == "movement":
            expected = (average or 1) * expected + new
        else:
            expected = average * expected + (1 - average) * new if expected.any() else new
        torch.testing.assert_close(model[0]._fxmask_score.double(), expected, rtol=2e-5, atol=1e-6)
        best = torch.zeros(9, dtype=torch.bool)
        best[expected.flatten().argsort(descending=True)[:5]] = True
        assert torch.equal(fxmask.masks(model)["0.weight"], best.reshape(GRID))


@pytest.mark.parametrize(
    ("cls", "options", "key"), [(optim.SGD, dict(lr=0.05, momentum=0.9), "momentum_buffer"), (optim.AdamW, dict(lr=0.01), "exp_avg")], ids=["SGD", "AdamW"]
)
def test_momentum_is_the_optimisers(cls, options, key):
    model = layer(criterion="momentum", backward="ste")
    optimizer = cls(model.parameters(), **options)
    fxmask.guard(optimizer, model)
    before = None
    for _ in steps(model, optimizer, 3):
        if before is not None:
            torch.testing.assert_close(model[0]._fxmask_score.double(), of_blocks(lambda m: m.abs().mean(), before), rtol=1e-5, atol=0)
        before = optimizer.state[model[0].weight][key].clone()
    assert before is not None  # at its first step an optimiser has no momentum


def test_until_a_gradient_was_seen_the_norm_ranks():
    torch.manual_seed(0)
    plain = layer()
    for criterion in ("taylor", "movement", "gradient", "momentum"):
        assert torch.equal(fxmask.masks(layer(criterion=criterion, backward="ste"))["0.weight"], fxmask.masks(plain)["0.weight"])


def test_a_masked_block_does_not_return_by_its_gradient_unless_the_mode_gives_it_one():
    flips = {}
    for backward in ("masked", "ste"):
        model = layer(criterion="gradient", average=0.5, backward=backward, block=(8, 12))
        optimizer = optim.SGD(model.parameters(), lr=0.5)
        fxmask.guard(optimizer, model)
        first, came = fxmask.masks(model)["0.weight"], 0
        for _ in steps(model, optimizer, 12):
            came += int((fxmask.masks(model)["0.weight"] & ~first).sum())
        flips[backward] = came
    assert flips["masked"] == 0 and flips["ste"] > 0


def test_a_gradient_that_is_not_finite_changes_no_score():
    model = layer(criterion="taylor", average=0.5)
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    fxmask.guard(optimizer, model)
    for _ in steps(model, optimizer, 2):
        pass
    before = model[0]._fxmask_score.clone()
    optimizer.zero_grad()
    model(torch.full((2, SHAPE[1]), torch.inf)).sum().backward()
    optimizer.step()
    assert torch.equal(model[0]._fxmask_score, before) and before.abs().sum() > 0


def test_accumulated_gradients_count_once():
    scores = []
    for parts in (1, 4):
        model = layer(criterion="gradient")
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        fxmask.guard(optimizer, model)
        x = torch.randn(32, SHAPE[1], generator=torch.Generator().manual_seed(3))
        for piece in x.chunk(parts):
            (model(piece).square().sum() / 32).backward()
        optimizer.step()
        scores.append(model[0]._fxmask_score)
    torch.testing.assert_close(*scores)


def test_step_instead_of_a_guard():
    model = layer(criterion="gradient", backward="ste")
    fxmask.step(model, 0)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for _, g in steps(model, optimizer, 2):
        fxmask.step(model)
        torch.testing.assert_close(model[0]._fxmask_score.double(), of_blocks(lambda g: g.square().sum().sqrt(), g), rtol=1e-5, atol=0)
    optimizer.zero_grad()
    with pytest.raises(StateError, match=r"expected it to be there still, got none.\n  where: 0.weight\n  fix: call fxmask.step\(model\) before"):
        fxmask.step(model)


def test_told_steps_ask_no_gradient_of_weights_that_rest():
    model = fxmask.apply(mlp(), ratio=0.5, criterion="gradient", backward="ste").requires_grad_(False)
    fxmask.step(model)
    assert fxmask.explain(model).rows[0]["step"] == 1


def test_momentum_without_a_guard_and_without_momentum():
    model = layer(criterion="momentum")
    fxmask.step(model, 0)
    for _ in steps(model, optim.SGD(model.parameters(), lr=0.1), 1):
        pass
    with pytest.raises(StateError, match=r"reads the optimiser's first moment: expected a guard, got fxmask\.step"):
        fxmask.step(model)
    model = layer(criterion="momentum")
    optimizer = optim.Adagrad(model.parameters(), lr=0.1)
    fxmask.guard(optimizer, model)
    with pytest.raises(UnsupportedError, match="expected one of exp_avg, momentum_buffer, got step, sum"):
        for _ in steps(model, optimizer, 2):
            pass


def test_a_layer_without_a_gradient_has_its_first_momentum_still_to_come():
    model = nn.Sequential(layer(criterion="momentum"), layer(criterion="momentum"))
    optimizer, x = optim.AdamW(model.parameters()), torch.randn(4, model[0][0].in_features)
    fxmask.guard(optimizer, model)
    model[0](x).sum().backward()
    optimizer.step()
    model[1](x).sum().backward()
    for _ in range(2):
        optimizer.step()
    assert all(bool(m[0]._fxmask_score.any()) for m in model)


def test_training_without_a_step_source_raises():
    told = {"averages": dict(average=0.5), "hysteresis": dict(hysteresis=0.1), "regrow": dict(regrow=fxmask.Regrow("random"))}
    for name, config in {"criteria": dict(criterion="taylor"), **told}.items():
        with pytest.raises(StateError, match=rf"\b{name}\b.* count optimiser steps: expected a step source before training"):
            layer(**config)(torch.randn(2, SHAPE[1]))


EVERY = {
    "taylor": dict(criterion="taylor", average=0.9, schedule=fxmask.Schedule("cubic", steps=6)),
    "movement": dict(criterion="movement", backward="ste", hysteresis=0.1),
    "rigl": dict(backward="rigl", dense_every=2, refresh=2, regrow=fxmask.Regrow("gradient", 0.5)),
    "random": dict(regrow=fxmask.Regrow("random", 0.4, until=9), refresh=3),
    "gain": dict(gain=True, schedule=fxmask.Schedule("linear", steps=6)),
    "soft": dict(soft=True, schedule=fxmask.Schedule("linear", steps=6)),
}


@pytest.mark.parametrize("config", list(EVERY.values()), ids=list(EVERY))
def test_a_resumed_run_takes_the_identical_steps(config):
    def make():
        model = layer(**config)
        optimizer = optim.AdamW(model.parameters(), lr=0.05)
        return model, optimizer

    whole, whole_optimizer = make()
    fxmask.guard(whole_optimizer, whole)
    list(steps(whole, whole_optimizer, 4, seed=1))
    file = io.BytesIO()
    torch.save({"model": whole.state_dict(), "masks": fxmask.state_dict(whole), "optimizer": whole_optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, optimizer = make()
    other.load_state_dict(saved["model"])
    fxmask.load_state_dict(other, saved["masks"])
    optimizer.load_state_dict(saved["optimizer"])
    fxmask.guard(optimizer, other)
    for (w, g), (w2, g2) in zip(steps(whole, whole_optimizer, 5, seed=2), steps(other, optimizer, 5, seed=2), strict=True):
        assert torch.equal(w, w2) and torch.equal(g, g2)
        assert torch.equal(fxmask.masks(whole)["0.weight"], fxmask.masks(other)["0.weight"])


def test_states_of_before_there_were_scores_load():
    model = layer(refresh=2)
    saved = fxmask.state_dict(model)
    for key in ("score", "growth"):
        del saved["masks"]["0.weight"][key]
    for key in ("average", "hysteresis", "regrow", "soft", "gain"):
        del saved["masks"]["0.weight"]["settings"][key]
    fxmask.load_state_dict(model, saved)
    saved["masks"]["0.weight"]["score"] = torch.zeros(GRID)
    with pytest.raises(StateError, match="score: expected None, got Tensor"):
        fxmask.load_state_dict(model, saved)


@pytest.mark.parametrize("config", [EVERY["taylor"], EVERY["rigl"], EVERY["gain"]], ids=["taylor", "rigl", "gain"])
def test_a_traced_graph_trains_as_the_module(config):
    runs = []
    for trace in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(SHAPE[1], SHAPE[0]))
        model = fxmask.apply(fx.symbolic_trace(model) if trace else model, fxmask.WeightMask(ratio=0.5, block=BLOCK, **config))
        optimizer = optim.AdamW(model.parameters(), lr=0.05)
        fxmask.guard(optimizer, model)
        generator = torch.Generator().manual_seed(1)
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.randn(32, SHAPE[1], generator=generator)).square().mean().backward()
            optimizer.step()
        runs.append((model.get_parameter("0.weight").detach(), fxmask.masks(model)["0.weight"]))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("name", ["taylor", "rigl", "random", "gain"])
def test_moving_scores_compile_once(name):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = layer(**EVERY[name])
    optimizer = optim.AdamW(model.parameters(), lr=0.05)
    fxmask.guard(optimizer, model)
    call = torch.compile(model, backend=counter, fullgraph=True)
    for i in range(10):
        optimizer.zero_grad()
        call(torch.randn(32, SHAPE[1], generator=torch.Generator().manual_seed(i))).square().mean().backward()
        optimizer.step()
    assert counter.frame_count == 1


def test_copies_have_scores_of_their_own():
    model = layer(criterion="taylor")
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    fxmask.guard(optimizer, model)
    list(steps(model, optimizer, 2))
    twin = copy.deepcopy(model)
    before = twin[0]._fxmask_score.clone()
    list(steps(model, optimizer, 2, seed=9))
    assert torch.equal(twin[0]._fxmask_score, before) and not torch.equal(model[0]._fxmask_score, before)


WRONG = {
    "average=1": (dict(average=1.0), r"average: expected a number in \[0, 1\), got 1.0"),
    "average=True": (dict(average=True), r"average: expected a number in \[0, 1\), got True"),
    "hysteresis<0": (dict(hysteresis=-0.1), r"hysteresis: expected a number in \[0, 1000\), got -0.1"),
    "hysteresis nan": (dict(hysteresis=float("nan")), r"hysteresis: expected a number in \[0, 1000\), got nan"),
    "hysteresis 1e40": (dict(hysteresis=1e40), r"hysteresis: expected a number in \[0, 1000\), got 1e\+40"),
    "hysteresis 10**400": (dict(hysteresis=10**400), r"hysteresis: expected a number in \[0, 1000\), got 1000"),
    "soft gain": (dict(soft=True, gain=True, schedule=fxmask.Schedule(steps=9)), "soft=True lets blocks fade, and gain=True makes up for blocks"),
    "movement": (dict(criterion="movement"), "backward='masked' leaves masked ones standing: expected backward='ste'"),
    "movement held": (dict(criterion="movement", backward="ste", hysteresis=1), "has scores below 0, .*: expected hysteresis below 1, got 1.0"),
    "soft": (dict(soft=True), "soft=True scales masked blocks down over the ramp of a schedule: expected schedule="),
    "soft constant": (dict(soft=True, schedule=fxmask.Schedule("constant")), r"expected schedule=.*, got Schedule\(kind='constant'"),
    "soft=1": (dict(soft=1), "soft: expected a bool, got 1"),
    "gain": (dict(gain="yes"), "gain: expected a bool, got 'yes'"),
    "regrow": (dict(regrow="random"), "regrow: expected None or a fxmask.Regrow, got 'random'"),
    "regrow masked": (dict(regrow=fxmask.Regrow()), "regrow by gradient needs dense gradients, and backward='masked' gives masked blocks none"),
    "ties": (dict(average=0.5, ties="keep"), "expected ties='lowest' with average, hysteresis, regrow or gain, and of masks or scores given, got 'keep'"),
    "random": (dict(criterion="random", hysteresis=0.5), "criterion='random' has no scores to average"),
    "refresh": (dict(criterion="taylor", refresh=0), "refresh=0 builds the mask once: expected refresh of at least 1"),
    "refresh hysteresis": (dict(hysteresis=0.1, refresh=0), "refresh=0 builds the mask once: expected refresh of at least 1"),
    "criterion": (dict(criterion="taylr"), f"unknown criterion: expected one of {', '.join((*CRITERIA, *LEARNED))}"),
}


@pytest.mark.parametrize(("options", "text"), list(WRONG.values()), ids=list(WRONG))
def test_wrong_options(options, text):
    with pytest.raises(ConfigError, match=text):
        fxmask.WeightMask(**options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("grad",), "unknown Regrow.by: expected one of gradient, random, got 'grad'"),
        (("random", 1.0), r"Regrow.fraction is the share of kept blocks that are exchanged: expected a number in \(0, 1\), got 1.0"),
        (("random", 0.5, 0), "Regrow.until counts optimiser steps: expected None or an int of at least 1, got 0"),
    ],
)
def test_wrong_regrow(options, text):
    with pytest.raises(ConfigError, match=text):
        fxmask.Regrow(*options)


@pytest.mark.parametrize("how", ["norm", "as it is"])  # as of a fake quantiser that is off
def test_weights_that_other_parameters_make_are_refused(how):
    layer, add = nn.Linear(64, 64), nn.utils.parametrize.register_parametrization
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(layer) if how == "norm" else add(layer, "weight", nn.Identity()))
    for config in (dict(criterion="taylor"), dict(gain=True), dict(regrow=fxmask.Regrow("random"))):
        with pytest.raises(UnsupportedError, match="expected a Parameter, got one that the model computes"):
            fxmask.apply(model, fxmask.WeightMask(**config))
    assert type(model[0]).__name__ == "ParametrizedLinear"  # the failed calls changed nothing


def test_a_gain_over_a_shared_weight_is_refused():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    with pytest.raises(ConfigError, match="gain and regrow write the weight of '0', which '1' uses, too: expected one user"):
        fxmask.apply(model, fxmask.WeightMask(gain=True))


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"criterion": "taylor"}, "keeps no state between calls, and criterion=taylor counts optimiser steps"),
        ({"gain": True, "average": 0.5}, "keeps no state between calls, and average, gain count optimiser steps"),
        ({"overrides": {"*": {"hysteresis": 0.5}}}, "keeps no state between calls, and the options of '0' count optimiser steps or cache a mask"),
    ],
)
def test_the_backend_refuses_scores(option, text):
    with pytest.raises(Exception, match=text):
        torch.compile(mlp(), backend="fxmask", options={"ratio": 0.5, **option})(torch.randn(2, 64))


def test_hysteresis_holds_blocks_whose_scores_tie():
    """Without a gradient all scores are zero, and blocks rank by the weight's norm: it takes as much more of that."""
    model = layer(criterion="gradient", hysteresis=0.5, refresh=1, start=0, average=0.5)
    fxmask.step(model, 0)
    mask = fxmask.masks(model)["0.weight"]
    with torch.no_grad():
        model[0].weight.mul_(torch.where(expand_mask(mask, SHAPE, BLOCK), 1.0, 1.1))
    fxmask.refresh(model)
    assert torch.equal(fxmask.masks(model)["0.weight"], mask)


@pytest.mark.parametrize("config", [dict(criterion="gradient"), dict(criterion="movement", backward="ste"), dict()], ids=str)
@pytest.mark.parametrize(("masked", "moves"), [(0.0, False), (1.5, False), (1.75, True)])
def test_hysteresis_lets_nothing_in_that_exceeds_by_the_share_alone(config, masked, moves):
    """No score and no norm at all, or masked ones that are by exactly the share larger."""
    model = layer(hysteresis=0.5, refresh=1, **config)
    fxmask.step(model, 0)
    mask = fxmask.masks(model)["0.weight"]
    with torch.no_grad():
        model[0].weight.copy_(torch.where(expand_mask(mask, SHAPE, BLOCK), float(masked > 0), masked))
    fxmask.refresh(model)
    assert torch.equal(fxmask.masks(model)["0.weight"], mask) != moves


def test_norms_beside_a_block_that_is_not_finite():
    w = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    for criterion in NORMS:
        broken = w.clone()
        broken[0, 0] = torch.inf
        whole, seen = norms(w, BLOCK, criterion), norms(broken, BLOCK, criterion)
        assert torch.allclose(seen.flatten()[1:], whole.flatten()[1:]) and not seen[0, 0].isfinite()


@pytest.mark.parametrize("criterion", NORMS)
def test_norms_are_what_keys_stand_for(criterion):
    """`values` of `kernels.score.NORMS` gives numbers in the order of `keys`: average and hysteresis go by them."""
    w = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 9, SHAPE[0])[:, None]
    keys = block_keys(w, BLOCK, criterion)
    ordered = norms_of(keys, w, criterion).flatten()[keys.flatten().argsort()]
    assert ordered.dtype == torch.float32 and ordered.isfinite().all() and (ordered.diff() >= 0).all() and ordered[0] < ordered[-1]
