"""Before the first step: cached masks whose weights were written since `apply` are told, and so are masks that no guard and no `fxmask.step` would count."""

import warnings

import pytest
import torch
from sample_models import mlp
from torch import fx, nn, optim

import fxmask
from fxmask import FxMaskWarning
from fxmask.errors import StateError

WRITTEN = r"weights were written after fxmask\.apply had chosen their cached masks(.|\n)*where: 0\.weight, 2\.weight\n(.|\n)*call fxmask\.refresh"
WAYS = {
    "init": lambda p: nn.init.xavier_uniform_(p),
    "data": lambda p: p.data.normal_(),
    "copy": lambda p: p.copy_(torch.randn(p.shape)),
}


def begin(model, how):
    if how == "guard":
        fxmask.guard(optim.AdamW(model.parameters()), model)
    else:
        fxmask.step(model, 0)


def masked(form="module", **options):
    torch.manual_seed(0)
    return fxmask.apply(fx.symbolic_trace(mlp()) if form == "graph" else mlp(), **{"ratio": 0.75, "refresh": 0, "block": (8, 8), **options})


@pytest.mark.parametrize("form", ["module", "graph"])
@pytest.mark.parametrize("how", ["guard", "step"])
@pytest.mark.parametrize("way", WAYS)
def test_weights_that_are_written_after_apply(form, how, way):
    model = masked(form)
    with torch.no_grad():
        for name in ("0.weight", "2.weight"):
            WAYS[way](model.get_parameter(name))
    with pytest.warns(FxMaskWarning, match=WRITTEN) as caught:
        begin(model, how)
    assert len(caught) == 1 and caught[0].filename == __file__


RAMP = {"schedule": fxmask.Schedule("cubic", steps=4), "refresh": 2}
OPTIONS = [{}, {"refresh": 3}, {"start": 2}, RAMP, {"refresh": 1}, {"criterion": "random"}, {"gain": True}]


@pytest.mark.parametrize("how", ["guard", "step"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_is_as_it_was_is_not_told(how, options):
    """Nor a cast to 16 bits, whose rounding may exchange a block; nor masks that were brought, or made anew."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        begin(masked(**options), how)
        begin(masked(**options).bfloat16(), how)
        model, other = masked(**options), masked(**options)
        with torch.no_grad():
            other[0].weight.normal_()
        fxmask.refresh(other)
        begin(other, how)
        model.load_state_dict(other.state_dict())
        begin(model, how)
        model, other = masked(**options), masked(**options)
        other.load_state_dict(mlp(seed=5).state_dict())
        fxmask.load_state_dict(model, fxmask.state_dict(other))
        begin(model, how)


def test_masks_that_nobody_could_count():
    """The optimiser of a head alone, and a body that still asks for gradients."""
    model, x = masked(schedule=fxmask.Schedule("cubic", steps=6), refresh=1), torch.randn(4, 64)
    optimiser = optim.AdamW(model[2].parameters())
    handle = fxmask.guard(optimiser, model)
    with pytest.raises(StateError, match=r"got none\.\n(.|\n)*where: 0\.weight\n(.|\n)*wants requires_grad_\(False\)"):
        model(x)
    with pytest.raises(StateError, match=r"beside a guard that does not hold these weights(.|\n)*where: 0\.weight\n(.|\n)*requires_grad_\(False\)"):
        fxmask.step(model, 0)
    handle.remove()
    model[0].requires_grad_(False)
    fxmask.guard(optimiser, model)
    fxmask.step(model, 0)  # all are counted: nothing to announce
    for _ in range(6):
        optimiser.zero_grad()
        model(x).square().mean().backward()
        optimiser.step()
    assert [int(m.sum()) for m in fxmask.masks(model).values()] == [-(-m.numel() // 4) for m in fxmask.masks(model).values()]
