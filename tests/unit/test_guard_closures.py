"""fxmask.guard around a step that makes its gradients inside, by a closure."""

import pytest
import torch
from sample_models import mlp
from torch import nn, optim

import fxmask
from fxmask.kernels.grid import expand_mask

OPTIONS = dict(ratio=0.6, block=(16, 16))


class Clips(optim.SGD):
    """One that looks at whole gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = None if closure is None else closure()
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.1)
        super().step()
        return loss


def penalised(model, x):
    """A loss by which masked blocks have gradients, too."""
    model.zero_grad()
    loss = model(x).square().mean() + model[0].weight.square().sum()
    loss.backward()
    return loss


@pytest.mark.filterwarnings("ignore:masked blocks of:fxmask.errors.FxMaskWarning")
def test_an_optimiser_whose_momenta_lie_apart_is_given_whole_gradients():
    found = []
    for inside in (True, False):
        torch.manual_seed(0)
        model = fxmask.apply(mlp(), **OPTIONS, refresh=0)
        optimiser = Clips(model.parameters(), lr=0.1, momentum=0.9)
        fxmask.guard(optimiser, model)
        for _ in range(3):
            x = torch.randn(8, 64)
            optimiser.step(lambda x=x, model=model: penalised(model, x)) if inside else (penalised(model, x), optimiser.step())
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.filterwarnings("ignore:masked blocks of:fxmask.errors.FxMaskWarning")
def test_a_mask_that_a_closure_writes_anew_is_that_of_the_next_step():
    """As the graphs of `fxmask.graphed` do, where it lies: the step is one of the mask that its weights were guarded under."""
    model = fxmask.apply(mlp(), **OPTIONS, refresh=0)
    optimiser, w = optim.SGD(model.parameters(), lr=0.1), model[0].weight
    fxmask.guard(optimiser, model)
    model[0]._fxmask_in_place = True
    kept, before = expand_mask(fxmask.masks(model)["0.weight"].clone(), w.shape, (16, 16)), w.detach().clone()

    def closure():
        loss = penalised(model, torch.randn(8, 64))
        model[0]._fxmask_mask.logical_not_()
        return loss

    optimiser.step(closure)
    assert torch.equal(w[~kept], before[~kept]) and not torch.equal(w[kept], before[kept])


def test_masked_weights_stay_where_a_closure_loads_the_state_of_a_phase_that_frees_them():
    options = dict(OPTIONS, phases={1: dict(backward="ste")})
    model, later = fxmask.apply(mlp(), **options), fxmask.apply(mlp(), **options)
    fxmask.step(later, 1)
    optimiser, w = optim.SGD(model.parameters(), lr=0.1), model[0].weight
    handle = fxmask.guard(optimiser, model)
    kept, before = expand_mask(fxmask.masks(model)["0.weight"], w.shape, (16, 16)), w.detach().clone()

    def closure():
        loss = model(torch.randn(8, 64)).square().mean()
        loss.backward()
        fxmask.load_state_dict(model, fxmask.state_dict(later))
        return loss

    optimiser.step(closure)
    assert torch.equal(w[~kept], before[~kept]) and not torch.equal(w[kept], before[kept]) and set(handle.policies.values()) == {"free"}


@pytest.mark.parametrize("of", [lambda p: optim.SGD(p, lr=0.1, momentum=0.9), lambda p: optim.LBFGS(p, max_iter=2)], ids=["SGD", "LBFGS"])
def test_a_closure_may_restore_the_model(of):
    """The step is then one on a dense model, and ends as it does without a guard."""
    ends = []
    for guarded in (True, False):
        model, x = fxmask.apply(mlp(), **OPTIONS), torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
        optimiser = of(model.parameters())
        if guarded:
            fxmask.guard(optimiser, model)

        def closure(model=model, optimiser=optimiser, x=x):
            if any(isinstance(m, nn.Linear) and type(m) is not nn.Linear for m in model):
                fxmask.restore(model)
            optimiser.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        for _ in range(2):
            optimiser.step(closure)
        ends.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_muon_under_a_soft_mask_takes_its_steps():
    """Whose masked blocks compute and learn, so that nothing is held."""
    model = fxmask.apply(mlp(), **OPTIONS, soft=True, schedule=fxmask.Schedule("linear", steps=9))
    optimiser, w = optim.Muon([model[0].weight, model[2].weight]), model[0].weight
    fxmask.guard(optimiser, model)
    before = w.detach().clone()
    for _ in range(2):
        optimiser.step(lambda: penalised(model, torch.randn(8, 64)))
    assert (w != before).all()


def test_masked_weights_stay_where_a_history_moves_a_layer_without_a_gradient():
    """LBFGS steps along directions of before, when more blocks were kept."""
    torch.manual_seed(0)
    model = fxmask.apply(mlp(), **OPTIONS, schedule=fxmask.Schedule("linear", steps=3))
    optimiser, w, x = optim.LBFGS(model.parameters(), lr=0.1, max_iter=3), model[2].weight, torch.randn(8, 64)
    fxmask.guard(optimiser, model)

    def closure(whole=True):
        optimiser.zero_grad()
        loss = (model if whole else model[0])(x).square().mean()
        loss.backward()
        return loss

    optimiser.step(closure)
    optimiser.step(closure)
    out, before = ~expand_mask(fxmask.masks(model)["2.weight"], w.shape, (16, 16)), w.detach().clone()
    optimiser.step(lambda: closure(whole=False))
    assert w.grad is None and torch.equal(w[out], before[out]) and not torch.equal(w[~out], before[~out])
