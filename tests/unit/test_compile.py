"""torch.compile of a masked model: one graph, equal to eager, no recompile while masks and ratios move."""

import copy
import pickle

import pytest
import torch
from resmlp import PRESETS, ResMLP
from sample_models import Region, Residual, mlp
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from works.twin import slow_but

import fxmask


def train(model, call, steps, counter=None):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses, frames = [], []
    for _ in range(steps):
        x = torch.randn(8, *shape_of(model))
        optimizer.zero_grad()
        loss = call(x).square().mean()
        loss.backward()
        optimizer.step()
        fxmask.step(model)
        losses.append(loss.item())
        frames.append(counter.frame_count if counter else 0)
    return losses, frames


def shape_of(model):
    return {Residual: (32, 32), ResMLP: (1, 8, 8)}.get(type(model), (64,))


OPTIONS = {
    "cubic": dict(ratio=0.9, schedule=fxmask.Schedule("cubic", steps=15), start=2),
    "cached": dict(ratio=0.8, schedule=fxmask.Schedule("linear", steps=15), refresh=3),
    "rigl": dict(ratio=0.8, backward="rigl", schedule=fxmask.Schedule(steps=10)),
    "random": dict(ratio=0.5, criterion="random"),
    "unmasked": dict(ratio=0.5, backward="unmasked"),
}


def resmlp():
    torch.manual_seed(0)
    return ResMLP(PRESETS["digits"])


CASES = [(name, make, "aot_eager") for name in OPTIONS for make in (mlp, Residual)] + [("cubic", mlp, "inductor"), ("cubic", resmlp, "inductor")]
# the default run has these options with another model
SELDOM = [*((n, m, "aot_eager") for n, m in (("cached", mlp), ("rigl", Residual), ("random", mlp), ("unmasked", Residual))), ("cubic", resmlp, "inductor")]


@pytest.mark.parametrize(
    ("name", "make", "backend"),
    [pytest.param(*c, id="-".join((c[0], c[1].__name__, c[2])), marks=pytest.mark.slow if c in SELDOM else ()) for c in CASES],
)
def test_training_equals_eager_without_recompiles(name, make, backend):
    torch._dynamo.reset()
    eager, model = (fxmask.apply(make(), **OPTIONS[name]) for _ in range(2))
    for m in (eager, model):
        fxmask.step(m, 0)
    counter = CompileCounterWithBackend(backend)
    losses, frames = train(model, torch.compile(model, backend=counter, fullgraph=True), 20, counter)
    expected, _ = train(eager, eager, 20)
    assert frames == [1] * 20
    assert losses == pytest.approx(expected, rel=1e-5)
    flips = [int((a != b).sum()) for a, b in zip(fxmask.masks(model).values(), fxmask.masks(eager).values(), strict=True)]
    assert sum(flips) == 0
    assert all(torch.allclose(p, q, atol=1e-6) for p, q in zip(model.parameters(), eager.parameters(), strict=True))


MOVING = [dict(refresh=2), dict(backward="rigl"), dict(refresh=1), dict(schedule=fxmask.Schedule(steps=3))]


@pytest.mark.parametrize("options", slow_but(MOVING, *MOVING[:2]), ids=str)
def test_a_step_between_forward_and_backward(options):
    torch._dynamo.reset()
    eager, model = (fxmask.apply(mlp(), ratio=0.7, **options) for _ in range(2))
    x, grads = torch.randn(3, 64), []
    for m, call in ((eager, eager), (model, torch.compile(model, backend="aot_eager", fullgraph=True))):
        fxmask.step(m, 0)
        loss = call(x).square().sum()
        fxmask.step(m, 2)
        with fxmask.dense(m):
            loss.backward()
        grads.append([p.grad for p in m.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*grads, strict=True))


def test_masks_do_move_in_that_training():
    model = fxmask.apply(mlp(), **OPTIONS["cubic"])
    fxmask.step(model, 0)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    kept, sets = [], []
    for _ in range(20):
        train(model, compiled, 1)
        masks = fxmask.masks(model)
        kept.append(int(masks["0.weight"].sum()))
        sets.append(masks["0.weight"])
    assert kept[0] == 24 and kept[-1] == 3 and len(set(kept)) > 8


def test_dense_inside_a_compiled_model():
    torch._dynamo.reset()
    model = fxmask.apply(mlp(), ratio=0.8)
    counter = CompileCounterWithBackend("aot_eager")
    compiled, x = torch.compile(model, backend=counter, fullgraph=True), torch.randn(2, 64)
    compiled(x)
    with fxmask.dense(model):
        assert torch.equal(compiled(x), mlp()(x))
    assert torch.equal(compiled(x), model(x))
    assert counter.frame_count == 1


def test_varying_batch_is_one_graph_more():
    torch._dynamo.reset()
    model = fxmask.apply(mlp(), ratio=0.8)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for n in (2, 3, 4, 5):
        x = torch.randn(n, 64)
        assert torch.allclose(compiled(x), model(x), atol=1e-6)
    assert counter.frame_count == 2


def test_export_of_a_masked_model_keeps_the_op():
    model, x = fxmask.apply(mlp(), ratio=0.8), torch.randn(2, 64)
    program = torch.export.export(model, (x,))
    targets = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
    assert targets.count("fxmask.masked_linear.default") == 2
    assert torch.equal(program.module()(x), model(x))


def test_functional_calls_and_transforms_of_a_masked_module():
    model = fxmask.apply(mlp(), ratio=0.8)
    x, params = torch.randn(5, 64), {k: v.detach() for k, v in model.named_parameters()}

    def loss(p, x):
        return torch.func.functional_call(model, p, (x,)).square().sum()

    grads = torch.func.grad(loss)(params, x)
    loss(dict(model.named_parameters()), x).backward()
    assert all(torch.allclose(grads[k], p.grad, atol=1e-4) for k, p in model.named_parameters())
    per_sample = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)
    assert torch.allclose(per_sample["0.weight"].sum(0), grads["0.weight"], atol=1e-4)


class Regions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Region() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


OWN = [dict(backward="ste"), dict(block=(8, 8)), dict(cover=True), dict(criterion="l1")]


@pytest.mark.parametrize("own", slow_but(OWN, *OWN[::2]), ids=str)
def test_regions_compiled_once_keep_the_masks_of_their_own_layers(own):
    """PyTorch compares ints alone before it takes one region's code for another."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = Regions(), torch.randn(8, 64)
    fxmask.apply(model, ratio=0.5, overrides={"layers.3.fc": own})
    compiled = copy.deepcopy(model)
    y, expected = torch.compile(compiled, backend="aot_eager", fullgraph=True)(x), model(x)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(y, expected)
    for p, q in zip(compiled.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


COPIED = {
    "masked": lambda: fxmask.apply(mlp(), ratio=0.5),
    "read": lambda: fxmask.apply(mlp(), ratio=0.5, overrides={"0": dict(read="weight")}),
    "N:M": lambda: fxmask.apply(mlp(), fxmask.NMMask(2, 4)),
    "pruned": lambda: fxmask.apply(mlp(), fxmask.ActivationPruning(0.5, block=8)),
    "dropped": lambda: fxmask.apply(mlp(), fxmask.BlockDropout(0.5, block=(2, 8))),
}


@pytest.mark.parametrize("by", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("what", ["the model", "a layer"])
@pytest.mark.parametrize("kind", COPIED)
def test_a_copy_of_what_was_compiled_in_place_computes_with_its_own_weights(kind, what, by):
    """As an average of weights is: what `compile()` has made calls the module that it was made of."""
    model, x = COPIED[kind]().eval(), torch.randn(4, 64)
    (model if what == "the model" else model[0]).compile(backend="eager")
    before, twin = model(x), by(model)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2)
    plain = COPIED[kind]().eval()
    plain.load_state_dict(twin.state_dict())
    torch.testing.assert_close(twin(x), plain(x))
    assert torch.equal(model(x), before)
