"""Memory that ends in a forward, a backward or a rebuild of masks leaves the model as it was, and training goes on: on a CPU, where it is provoked."""

import copy
import functools

import pytest
import torch
from sample_models import mlp
from saved_states import same
from torch import fx

import fxmask
from fxmask.kernels import reference
from fxmask.kernels.cpu import chosen


def run_out(monkeypatch, call, *names):
    """Call with ops whose second use finds no memory: the first layer has run by then."""
    uses = []

    def full(*args, real, **kwargs):
        uses.append(real)
        if len(uses) == 2:
            raise torch.OutOfMemoryError
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        for form in (chosen.AUTO, reference):
            for name in names:
                patch.setattr(form, name, functools.partial(full, real=getattr(form, name)))
        with pytest.raises(torch.OutOfMemoryError):
            call()


@pytest.mark.parametrize("form", [lambda m: m, fx.symbolic_trace], ids=["module", "graph"])
@pytest.mark.parametrize("refresh", [1, 2])
def test_a_model_that_ran_out_of_memory_trains_on(monkeypatch, form, refresh):
    model = fxmask.apply(form(mlp()), ratio=0.6, refresh=refresh, schedule=fxmask.Schedule("cubic", steps=9))
    optimiser, x = torch.optim.AdamW(model.parameters(), lr=0.01), torch.randn(8, 64)
    fxmask.guard(optimiser, model)

    def step():
        optimiser.zero_grad()
        model(x).square().mean().backward()
        optimiser.step()

    def state():
        return copy.deepcopy((fxmask.state_dict(model), model.state_dict(), optimiser.state_dict(), fxmask.masks(model)))

    step(), step(), step()
    before, y = state(), model(x)
    run_out(monkeypatch, lambda: model(x), "masked_linear" if refresh == 2 else "block_index")
    run_out(monkeypatch, lambda: y.sum().backward(), "masked_linear_backward", "masked_linear_dx", "masked_linear_dw")
    assert same(state(), before) and torch.equal(model(x), y)
    if refresh == 2:  # the optimiser has moved the weights by then; the masks and their count stay, all of them
        run_out(monkeypatch, optimiser.step, "block_index")
        assert same(fxmask.state_dict(model), before[0])
    steps = fxmask.explain(model).rows[0]["step"]
    step(), step()
    assert {r["step"] for r in fxmask.explain(model).rows if r["masked"]} == {steps + 2}
    assert all(p.isfinite().all() for p in model.parameters())
