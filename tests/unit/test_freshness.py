"""A mask is a function of the weight: whoever writes it, the next mask is the new weight's."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from sample_models import best_blocks, mlp
from torch import fx, nn

import fxmask
from fxmask.kernels import ops

BLOCK, RATIO = (16, 16), 0.7


def flip(model):
    """After a forward, a gradient that makes one SGD step move the weakest block to the top."""
    model(torch.randn(2, 64))
    for name in ("0.weight", "2.weight"):
        w = model.get_parameter(name)
        mask = best_blocks(w, BLOCK, RATIO).repeat_interleave(16, 0).repeat_interleave(16, 1)
        w.grad = torch.where(mask, w.detach(), -100 * w.detach())


def optimizers():
    for kind in ("SGD", "Adam", "AdamW", "Adagrad"):
        for how in ("foreach", "fused", "forloop"):
            options = dict(foreach=how == "foreach") | (dict(fused=True) if how == "fused" else {})
            yield pytest.param(kind, options, id=f"{kind}-{how}")


def check(model, old, flipped=True):
    """The next forward uses the new weights' best blocks, and some of them are new."""
    for name, mask in fxmask.masks(model).items():
        assert torch.equal(mask, best_blocks(model.get_parameter(name), BLOCK, RATIO)), name
    assert not flipped or any(not torch.equal(mask, old[name]) for name, mask in fxmask.masks(model).items())
    x = torch.randn(3, 64)
    dense = mlp()
    dense.load_state_dict(model.state_dict())
    for name in ("0.weight", "2.weight"):
        w = dense.get_parameter(name)
        mask = best_blocks(w, BLOCK, RATIO).repeat_interleave(16, 0).repeat_interleave(16, 1)
        w.data.mul_(mask)
    assert torch.equal(model(x), dense(x))


def masked(form, **options):
    model = mlp() if form == "module" else fx.symbolic_trace(mlp())
    return fxmask.apply(model, ratio=RATIO, block=BLOCK, **options)


FORMS = pytest.mark.parametrize("form", ["module", "graph"])


@FORMS
@pytest.mark.parametrize("stepping", [False, True], ids=["no-steps", "stepped"])
@pytest.mark.parametrize(("kind", "options"), list(optimizers()))
def test_optimizer_steps(form, kind, options, stepping):
    model = masked(form, refresh=1)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.05, **options)
    for i in range(3):
        old = fxmask.masks(model)
        flip(model)
        optimizer.step()
        if stepping:
            fxmask.step(model)
        check(model, old, flipped=kind == "SGD" or i == 0)  # the momenta of the others need a step or two to turn


@FORMS
def test_a_compiled_optimizer_step(form):
    model = masked(form)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    old = fxmask.masks(model)
    flip(model)
    torch.compile(optimizer.step, fullgraph=False)()
    check(model, old)


def reverse(w):
    return w.flip(0).flip(1)


WAYS = {
    "load_state_dict": lambda m: m.load_state_dict({k: reverse(v) if v.dim() == 2 else v for k, v in m.state_dict().items()}),
    "load-assign": lambda m: m.load_state_dict({k: reverse(v) if v.dim() == 2 else v for k, v in m.state_dict().items()}, assign=True),
    "data-write": lambda m: [p.data.copy_(reverse(p.data)) for p in m.parameters() if p.dim() == 2],
    "data-set": lambda m: [setattr(p, "data", reverse(p.data)) for p in m.parameters() if p.dim() == 2],
    "no-grad": lambda m: [p.copy_(reverse(p)) for p in m.parameters() if p.dim() == 2],
    "numpy": lambda m: [p.detach().numpy().__setitem__(slice(None), reverse(p.detach()).numpy().copy()) for p in m.parameters() if p.dim() == 2],
}


@FORMS
@pytest.mark.parametrize("stepping", [False, True], ids=["no-steps", "stepped"])
@pytest.mark.parametrize("way", WAYS)
def test_other_writes(form, way, stepping):
    model = masked(form)
    if stepping:
        fxmask.step(model)
    old = fxmask.masks(model)
    model(torch.randn(2, 64))
    with torch.no_grad():
        WAYS[way](model)
    check(model, old)


@FORMS
def test_a_cached_mask_follows_load_state_dict_refresh_and_its_steps(form):
    for way in ("load_state_dict", "refresh", "step"):
        model = masked(form, refresh=2)
        fxmask.step(model, 0)
        old = fxmask.masks(model)
        with torch.no_grad():
            WAYS["load_state_dict" if way == "load_state_dict" else "data-write"](model)
        if way == "refresh":
            fxmask.refresh(model)
        elif way == "step":
            fxmask.step(model)
            assert all(torch.equal(m, old[n]) for n, m in fxmask.masks(model).items())  # built at steps 0 and 2
            fxmask.step(model)
        check(model, old)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("copier", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["itself", "deepcopy", "pickle"])
@pytest.mark.parametrize("form", [lambda m: m, fx.symbolic_trace, lambda m: nn.Sequential(fx.symbolic_trace(m))], ids=["module", "graph", "inside"])
def test_tied_layers_of_a_checkpoint_that_tells_them_apart(form, copier, assign):
    """The last one's values are the weight of both, whose cached masks are built from it; assigned, each has its own."""
    model = copier(fxmask.apply(form(Tied()), ratio=RATIO, refresh=0))
    given = {name: torch.randn(p.shape) for name, p in model.state_dict().items()}
    model.load_state_dict(given, assign=assign)
    masks = fxmask.masks(model)
    assert len(masks) == 2 and all(torch.equal(mask, best_blocks(model.get_parameter(name), BLOCK, RATIO)) for name, mask in masks.items())
    fxmask.restore(model).load_state_dict(given)


COPIERS = pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])


def tied(n):
    """n cached masks of one weight, in layers that each load by themselves."""
    model = nn.ModuleList(nn.Linear(64, 64) for _ in range(n))
    for m in model:
        m.weight = model[0].weight
    return fxmask.apply(model, ratio=RATIO, block=BLOCK, refresh=0)


@COPIERS
def test_copies_of_many_tied_layers(copier):
    """Their masks know each other in the copy, and none of the first ones."""
    model = tied(300)
    again, before = copier(model), fxmask.masks(model)
    again[7].load_state_dict({"weight": torch.randn(64, 64), "bias": torch.zeros(64)})
    best = best_blocks(again[0].weight, BLOCK, RATIO)
    assert all(m.weight is again[0].weight and torch.equal(m._fxmask_mask, best) for m in again)
    assert all(torch.equal(mask, before[name]) for name, mask in fxmask.masks(model).items())
    assert not torch.equal(best, model[0]._fxmask_mask)


APART = [dict(ratio=0.5), dict(cover=True), dict(criterion="linf"), dict(criterion="random"), dict(block=(16, 32))]


@pytest.mark.parametrize("options", APART, ids=lambda o: next(iter(o)))
def test_layers_of_one_weight_that_were_masked_apart_have_masks_of_their_own(options):
    model, alone = fxmask.restore(tied(2)), []
    for layer, own in zip(model, ({}, options), strict=True):
        fxmask.apply(layer, **{"ratio": 0.75, "block": (16, 16), "refresh": 0, **own})
        fxmask.refresh(layer)
        alone.append(layer._fxmask_mask)
    assert not torch.equal(*alone)
    fxmask.refresh(model)
    assert all(torch.equal(layer._fxmask_mask, mask) for layer, mask in zip(model, alone, strict=True))


def test_layers_of_one_weight_keep_the_masks_that_each_was_given():
    model, given = fxmask.restore(tied(2)), [torch.eye(4) > 0, torch.eye(4).flip(0) > 0]
    for layer, mask in zip(model, given, strict=True):
        fxmask.apply(layer, block=(16, 16), masks={"weight": mask})
    fxmask.refresh(model)
    assert all(torch.equal(layer._fxmask_mask, mask) for layer, mask in zip(model, given, strict=True))


def test_tied_layers_make_one_mask_a_load(monkeypatch):
    """N layers load one after the other, and each load is for all: N masks are made, not N * N."""
    model, built, index = tied(9), [], ops.index
    monkeypatch.setattr(ops, "index", lambda *args: built.append(args) or index(*args))
    model.load_state_dict({name: torch.randn(p.shape) for name, p in model.state_dict().items()})
    assert len(built) == 9
    assert all(torch.equal(m._fxmask_mask, best_blocks(model[0].weight, BLOCK, RATIO)) for m in model)
    assert len({m._fxmask_mask.data_ptr() for m in model}) == 9  # one may be rewritten in place without the others


@COPIERS
def test_a_copy_of_one_tied_layer_brings_no_other(copier):
    model, alone, memo = tied(300), tied(1)[0], {}
    copy.deepcopy(model[0], memo)
    assert sum(isinstance(value, nn.Module) for value in memo.values()) == 1
    assert len(pickle.dumps(model[0])) < len(pickle.dumps(alone)) + 100
    again = copier(model[0])
    again.load_state_dict({"weight": torch.randn(64, 64), "bias": torch.zeros(64)})
    assert torch.equal(again._fxmask_mask, best_blocks(again.weight, BLOCK, RATIO))
    assert all(torch.equal(m._fxmask_mask, best_blocks(model[0].weight, BLOCK, RATIO)) for m in model)


def test_tied_layers_keep_no_layer_alive_and_forget_what_is_masked_anew():
    model = tied(3)
    gone = weakref.ref(model[2])
    del model[2]
    gc.collect()
    assert gone() is None
    fxmask.restore(model[1])
    model[0].load_state_dict({"weight": torch.randn(64, 64), "bias": torch.zeros(64)})
    assert list(fxmask.masks(model)) == ["0.weight"]
    fxmask.apply(model, ratio=RATIO, block=BLOCK, refresh=0, exclude="0")
    model[0].load_state_dict({"weight": torch.randn(64, 64), "bias": torch.zeros(64)})
    assert all(torch.equal(m._fxmask_mask, best_blocks(model[0].weight, BLOCK, RATIO)) for m in model)


def test_accumulation_counts_one_step():
    model = masked("module", schedule=fxmask.Schedule("linear", steps=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fxmask.step(model, 0)
    ratios = []
    for _ in range(5):
        seen = set()
        for _ in range(4):
            model(torch.randn(2, 64)).sum().backward()
            seen.add(tuple(int(m.sum()) for m in fxmask.masks(model).values()))
        assert len(seen) == 1
        optimizer.step()
        optimizer.zero_grad()
        ratios.append(fxmask.explain(model).rows[0]["target_ratio"])
        fxmask.step(model)
    assert ratios == pytest.approx([0, 0.175, 0.35, 0.525, 0.7])
    assert fxmask.explain(model).rows[0]["step"] == 5


def test_activation_checkpointing_recomputes_with_the_same_mask():
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(4, 64, requires_grad=True)
    for reentrant in (False, True):
        plain, ours = masked("module"), masked("module")
        plain(x).square().sum().backward()
        checkpoint(ours, x, use_reentrant=reentrant).square().sum().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), ours.parameters(), strict=True))
