"""What errors and warnings recommend works, they say what was meant, and warnings point at the user's own line."""

import itertools
import linecache
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import fxmask
from fxmask.errors import ConfigError, FxMaskWarning


def net(width=32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


class Own(nn.Linear):
    def forward(self, x):
        return torch.relu(super().forward(x))


def late():
    model = fxmask.apply(net(), ratio=0.5, schedule=fxmask.Schedule("linear", steps=4))
    fxmask.step(model, 2)
    return model


def dead():
    model = fxmask.apply(net(), ratio=0.5)
    with torch.no_grad():
        model[0].weight.zero_()
    return fxmask.HealthLog(model)


def starved():
    model = net(128)
    with torch.no_grad():
        model[0].weight.mul_(1e-3)
    return model


WARNED = {
    "no-match": lambda: fxmask.apply(net(), ratio=0.5, exclude="nothing"),
    "no-match-of-inputs": lambda: fxmask.apply(net(), fxmask.ActivationPruning(ratio=0.5, block=8), exclude="nothing"),
    "no-match-of-an-allocation": lambda: fxmask.allocate(net(), 0.5, "erk", exclude="nothing"),
    "own-forward": lambda: fxmask.apply(nn.Sequential(Own(32, 32), nn.Linear(32, 32)), ratio=0.5, include=("0", "1")),
    "override-of-a-default": lambda: fxmask.apply(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4)), ratio=0.5, overrides={"1": {"ratio": 0.25}}),
    "starved": lambda: fxmask.apply(starved(), ratio=0.5, allocation="global"),
    "early": lambda: fxmask.finalize(late()),
    "dead": lambda: dead().update(),
    "overtaken": lambda: fxmask.apply(net(), ratio=0.5, overrides={"0": False, "*": {"ratio": 0.25}}),
}


@pytest.mark.parametrize("case", WARNED)
def test_a_warning_points_at_the_users_line(case):
    with pytest.warns(FxMaskWarning) as caught:
        WARNED[case]()
    assert {w.filename for w in caught} == {__file__} and all(f'"{case}": lambda' in linecache.getline(__file__, w.lineno) for w in caught)


def test_an_override_that_a_later_one_overtakes():
    """The last match wins: what stands in front of a pattern that takes every layer has no effect."""
    for overrides, lost in [
        ({"0": False, "*": {"ratio": 0.25}}, "'0'"),
        ({"*": {"block": (8, 8)}, nn.Linear: {"ratio": 0.25}}, r"'\*'"),
        ({"0": False, "2": {"ratio": 0.75}, "re:.*": {"ratio": 0.25}}, "'0', '2'"),
    ]:
        with pytest.warns(FxMaskWarning, match=rf"overrides: no effect has {lost} \(.*\), as .* behind matches every layer: the last match wins"):
            model = fxmask.apply(net(), ratio=0.5, block=(16, 16), overrides=overrides)
        assert [int(m.sum()) for m in fxmask.masks(model).values()] == [3, 3]
    for overrides in ({"*": {"ratio": 0.25}, "0": False}, {"0": False, "2": {"ratio": 0.25}}, {"*": {"ratio": 0.25}}, {"[01]": False, "[12]": {"ratio": 0.25}}):
        fxmask.apply(net(), ratio=0.5, overrides=overrides)  # without a word
    fxmask.apply(nn.Sequential(nn.Linear(64, 64)), ratio=0.5, overrides={"*": {"ratio": 0.25}, "0": {"ratio": 0.75}})  # an only layer is every layer
    configs = fxmask.WeightMask(ratio=0.5, block=(8, 8)), fxmask.ActivationPruning(ratio=0.5, block=8)
    model = fxmask.apply(net(), *configs, overrides={"0": {"activations": {"ratio": 0.25}}, "*": {"ratio": 0.75}})  # the inputs of layer 0 are its own
    assert "25 %" in str(model[0]) and "50 %" in str(model[2])


REFUSED = {
    "nm-with-a-ratio": (lambda: fxmask.apply(net(), fxmask.NMMask(), ratio=0.6), "an NMMask goes alone, without the options of a WeightMask: .*got ratio"),
    "feedback-at-rest": (lambda: fxmask.WeightMask(refresh=0, schedule=fxmask.Feedback("loss", every=1)), r"refresh of at least 1 with a schedule\.$"),
    "ramp-at-rest": (lambda: fxmask.WeightMask(refresh=0, schedule=fxmask.Schedule("cubic", steps=9)), "from a step at which the ramp has ended on"),
    "inputs-alone": (
        lambda: fxmask.apply(net(), ratio=0.5, overrides={"0": {"activations": {"ratio": 0.25}}}),
        r"got 'activations'; expected fxmask.ActivationPruning\(\.\.\.\) in the same fxmask.apply",
    ),
    "inputs-by-name": (lambda: fxmask.apply(net(), activations={"ratio": 0.25}), r"got 'activations'; .* fxmask.apply\(model, fxmask.ActivationPruning\("),
    "dropout-by-name": (lambda: fxmask.apply(net(), dropout=0.25), r"got 'dropout'; .* fxmask.apply\(model, fxmask.BlockDropout\("),
    "nm-by-name": (lambda: fxmask.apply(net(), nm=(2, 4)), r"got 'nm'; .* fxmask.apply\(model, fxmask.NMMask\("),
    "nm-of-a-layer": (lambda: fxmask.apply(net(), ratio=0.5, overrides={"0": {"nm": (2, 4)}}), r"^unknown option in overrides\['0'\]: .*got 'nm'\.$"),
    "of-the-call": (lambda: fxmask.apply(net(), ratio=80), "^ratio is the fraction of blocks that are masked"),
    "of-a-layer": (lambda: fxmask.apply(net(), overrides={"0": {"ratio": 80}}), r"^overrides\['0'\]: ratio is the fraction of blocks"),
    "positional-ratio": (lambda: fxmask.apply(net(), 0.5), r"a ratio goes by name: fxmask.apply\(model, ratio=0.5\)"),
    "phase-typo": (lambda: fxmask.WeightMask(phases={4: {"refesh": 2}}), "got refesh; did you mean 'refresh'"),
    "option-typo": (lambda: torch.compile(net(), backend="fxmask", options={"sparsity": 0.5})(torch.randn(2, 32)), "did you mean 'ratio'"),
    "no-backend": (
        lambda: torch.compile(net(), backend="fxmask", options={"ratio": 0.5, "inner": 3})(torch.randn(2, 32)),
        "inner: expected the name of another backend or a function.*got 3",
    ),
    "kwargs": (lambda: fxmask.allocate(net(), 0.5, "flop", kwargs=[torch.randn(2, 32)]), "kwargs: expected a dict of the forward's keyword arguments"),
    "phases": (lambda: fxmask.analyze(net(), torch.randn(2, 32), phases=[np.array(["fwd", "dX"])]), "phases: expected a sequence of fwd"),
    "no-optimiser": (lambda: fxmask.advise(net(), torch.randn(2, 32), optimizer=lambda p: 3), "expected what makes a torch.optim.Optimizer.*got int"),
    "models": (lambda: fxmask.graphed(lambda: None, torch.optim.SGD(net().parameters()), models=net()), "expected models, a list of nn.Modules.*Sequential"),
    "models-none": (lambda: fxmask.graphed(lambda: None, torch.optim.SGD(net().parameters()), models=None), "expected models, a list.*got NoneType"),
    "array": (lambda: fxmask.WeightMask(criterion=np.array(["fro", "l1"])), "unknown criterion: expected one of"),
    "tolerance": (lambda: fxmask.Feedback("loss", every=2, tolerance=torch.tensor([0.1, 0.2])), "Feedback.tolerance is a share of the loss"),
    "strict": (lambda: fxmask.analyze(net(), torch.randn(2, 32), strict="no"), "strict: expected True or False, got 'no'"),
    "literal": (lambda: fxmask.stability(net(), torch.randn(2, 32), literal="no"), "literal: expected True or False, got 'no'"),
    "meta-inputs": (lambda: fxmask.stability(net(), torch.randn(2, 32, device="meta")), "expected inputs .* on meta"),
    "table": (lambda: fxmask.explain(fxmask.apply(net(), ratio=0.5)).table(3), "table: expected markdown or one of"),
    "save": (lambda: fxmask.explain(fxmask.apply(net(), ratio=0.5)).save(None), "Report.save: expected a path, got None"),
    "check": (lambda: fxmask.advise(net(), torch.randn(2, 32), check="no"), "advise: expected check, True or False"),
    "loss": (lambda: fxmask.advise(net(), torch.randn(2, 32), loss="mse"), "and loss, a function of the model's output"),
    "ratios": (lambda: fxmask.advise(net(), torch.randn(2, 32), ratios=None), "advise: expected blocks and ratios as sequences|expected blocks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_use_is_said(case):
    call, words = REFUSED[case]
    with pytest.raises(Exception, match=f"(?s){words}") as caught:
        call()
    assert isinstance(caught.value, ConfigError) or "ConfigError" in str(caught.value)  # what Dynamo wraps names it


def test_a_final_model_is_known_as_one():
    model = fxmask.finalize(fxmask.apply(net(), ratio=0.5))
    for call in (fxmask.step, fxmask.state_dict, fxmask.refresh, fxmask.HealthLog, fxmask.finalize):
        with pytest.raises(fxmask.FxMaskError, match=r"(?s)whose masks fxmask.finalize has made permanent.*before fxmask.finalize; "):
            call(model)
    fxmask.step(fxmask.apply(model, ratio=0.5))  # as the fix says


@pytest.mark.parametrize("refresh", [0, 1])
def test_explain_of_a_weight_of_another_size(refresh):
    model = fxmask.apply(net(), ratio=0.5, refresh=refresh)
    model[0].weight = nn.Parameter(torch.randn(16, 32))
    rows = {r["name"]: r for r in fxmask.explain(model).rows}
    assert rows["0"]["reason"].endswith("replaced by one of another size, and its forward raises: the mask is of (32, 32)")
    assert rows["0"]["achieved_ratio"] is None and rows["2"]["achieved_ratio"] == 0.5
    with pytest.raises(fxmask.FxMaskError, match="replaced by one of another size"):
        model(torch.randn(2, 32))


READ = dict(refresh=0, overrides={"0": dict(read="weight")})  # which a traced call, that has no owner, does not take


@pytest.mark.parametrize(("trace", "options"), [*itertools.product([lambda m: m, torch.fx.symbolic_trace], [{}, dict(refresh=0)]), (lambda m: m, READ)])
def test_a_weight_that_lost_its_axes_is_named(trace, options):
    model = fxmask.apply(trace(net()), ratio=0.5, **options)
    model.get_submodule("0").weight = nn.Parameter(torch.randn(32 * 32))
    said = r"replaced by one of another size: expected \(32, 32\) as a matrix, got \(1024,\)(.|\n)*where: 0.weight\n(.|\n)*fix: call fxmask.restore"
    for call in (model, lambda x: torch.export.export(model, (x,))):
        with pytest.raises(fxmask.FxMaskError, match=said):
            call(torch.randn(2, 32))


@pytest.mark.parametrize("layers", [nn.Linear, nn.Conv2d])
@pytest.mark.parametrize("refresh", [0, 1])
@pytest.mark.parametrize("view", [False, True])  # in the Parameter's place, as the older FSDP has them
def test_a_forward_on_freed_memory_is_named(view, refresh, layers):
    """With a cached mask a kernel would read there, and the process would die."""
    made = net() if layers is nn.Linear else nn.Sequential(nn.Conv2d(32, 32, 1))
    model = fxmask.apply(made, ratio=0.5, refresh=refresh, layers=layers)
    weight = model[0].weight
    if view:
        del model[0].weight
        model[0].weight = weight.view(weight.shape)
    weight.untyped_storage().resize_(0)
    x = torch.randn(2, 32) if layers is nn.Linear else torch.randn(2, 32, 4, 4)
    with pytest.raises(fxmask.FxMaskError, match=r"this weight's memory was freed(.|\n)*where: 0.weight\n(.|\n)*fix: run the forward of the wrapper"):
        model(x)


@pytest.mark.parametrize("trace", [lambda m: m, torch.fx.symbolic_trace], ids=["module", "graph"])
def test_sparse_weights_beside_a_cached_mask_are_named(trace):
    model = fxmask.apply(trace(net()), ratio=0.5, refresh=0)
    model.get_submodule("0").weight = nn.Parameter(torch.randn(32, 32).to_sparse())
    health = lambda m: fxmask.explain(m, health=True)  # noqa: E731
    for call in (lambda m: m(torch.randn(2, 32)), health, fxmask.finalize, lambda m: fxmask.HealthLog(m).update()):
        with pytest.raises(fxmask.FxMaskError, match=r"has become a torch.sparse_coo tensor(.|\n)*where: 0.weight\n(.|\n)*fix: load dense weights"):
            call(model)


def test_sparse_weights_in_a_masked_model_are_named():
    """As `finalize(model, "bsr")` saves them; a look at the masks says what the forward does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse BSR tensor support is in beta")
        saved = fxmask.finalize(fxmask.apply(net(), ratio=0.5), "bsr").state_dict()
    model = fxmask.apply(net(), ratio=0.5)
    model.load_state_dict(saved, assign=True)
    for call in (lambda: model(torch.randn(2, 32)), lambda: fxmask.masks(model), lambda: fxmask.explain(model)):
        with pytest.raises(fxmask.FxMaskError, match=r"has become a torch.sparse_bsr tensor(.|\n)*where: 0.weight\n(.|\n)*fix: load dense weights"):
            call()


def test_arguments_by_name_alone():
    model, x = net(), torch.randn(6, 32)
    by_place, by_name = (fxmask.allocate(model, 0.5, "flop", **given) for given in ({"inputs": x}, {"kwargs": {"input": x}}))
    assert dict(by_place) == dict(by_name) and by_place.spent == by_name.spent


@pytest.mark.parametrize("config", [fxmask.ActivationPruning(ratio=0.5, block=8), fxmask.BlockDropout(p=0.5, block=(8, 8))], ids=lambda c: type(c).__name__)
def test_a_layer_that_is_given_no_tensor(config):
    model = fxmask.apply(net(), config)
    for wrong in (None, [1.0]):
        with pytest.raises(TypeError, match=f"expected a Tensor .*, got {type(wrong).__name__}"):
            model[0](wrong)
