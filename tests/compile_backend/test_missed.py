"""Layers of a compiled model that no graph has met when they are trained, whatever else of the process was captured."""

import copy

import pytest
import torch
from compile_backend.helpers import OPTIONS, Wrap, compiled, steps_of
from sample_models import mlp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import fxmask
from fxmask.compiler import backend, backend_steps
from fxmask.errors import ConfigError, FxMaskWarning, UnsupportedError


class Looped(nn.Module):
    """A graph break in a loop, for which Dynamo skips the whole frame."""

    def __init__(self):
        super().__init__()
        self.layers, self.small = nn.ModuleList(nn.Linear(64, 64) for _ in range(2)), nn.Linear(64, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if x.abs().max() > 1e9:
                x = x * 0
        return self.small(x)


@pytest.fixture(autouse=True)
def beside():
    """Another model, which is captured."""
    other = Wrap(mlp())
    compiled(other, **OPTIONS)(torch.randn(4, 64))
    return other


def in_place(model, **options):
    model.compile(backend=backend.fxmask_backend, options={**options, "inner": "eager"})
    return model


def by_name(model, **options):
    return torch.compile(model, backend="fxmask", options={**options, "inner": "eager"})


def of_forward(model, **options):
    return compiled(model.forward, **options)


def of_call(model, **options):
    return compiled(model.__call__, **options)


class LoopedByCall(Looped):
    def __call__(self, x):
        return self.forward(x)


def of_own_call(model, **options):
    model.__class__ = LoopedByCall
    return of_call(model, **options)


TEXT = r"(?s)gradients of layers\.0, layers\.1 of a model.*no graph has reached it.*where: Looped.*a graph break in a loop.*fullgraph=True.*fxmask\.apply"


@pytest.mark.parametrize("how", [compiled, by_name, in_place, of_forward, of_call, of_own_call])
def test_a_frame_that_dynamo_skips_is_told_once(how):
    """Also beside another model, whose options are wrong."""
    model, other = Looped(), Looped()
    calls = how(other, rate=0.5), how(model, **OPTIONS)
    with pytest.warns(FxMaskWarning, match=TEXT) as told:
        steps_of(model, calls[1], 5)
    assert len(told) == 1


@pytest.mark.parametrize("require", [True, ["layers.1"], ["layers.*", "small"]])
def test_require_makes_it_an_error(require):
    model = Looped()
    with pytest.raises(UnsupportedError, match=r"(?s)layers\.0, layers\.1.*and require=.* wants them masked"):
        steps_of(model, compiled(model, **OPTIONS, require=require), 1)


@pytest.mark.parametrize("beside", [{}, {"ratio": 0.0}])
def test_inputs_that_are_not_pruned_are_told(beside):
    """Alone, and beside masks that leave nothing out."""
    model = Looped()
    with pytest.raises(UnsupportedError, match=r"layers\.0, layers\.1 of a model.* require=True wants them pruned"):
        steps_of(model, compiled(model, activations=dict(ratio=0.5, block=4), require=True, **beside), 1)


def test_of_pruned_inputs_those_that_overrides_leave_are_not_told():
    model, options = Looped(), dict(ratio=0.0, activations=dict(ratio=0.5, block=4))
    with pytest.warns(FxMaskWarning, match=r"gradients of layers\.1 of a model"):
        steps_of(model, compiled(model, overrides={"layers.0": {"activations": False}}, **options), 1)


def test_options_that_no_graph_has_checked():
    model = Looped()
    with pytest.raises(ConfigError, match=r"unknown option: expected some of .*, got 'rate'"):
        steps_of(model, compiled(model, rate=0.5), 1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    @torch.compiler.disable
    def forward(self, x):
        return self.attention(x[None], x[None], x[None], need_weights=False)[0]


@pytest.mark.parametrize("backward", ["masked", "ste", "unmasked"])
def test_a_layer_whose_owner_reads_it(backward):
    model = Attention()
    with pytest.warns(FxMaskWarning, match=r"gradients of attention\.out_proj of a model"):
        steps_of(model, compiled(model, **OPTIONS, backward=backward), 1)


def test_force_eager_from_the_first_step():
    model = mlp()
    call = compiled(model, **OPTIONS)
    with torch.compiler.set_stance("force_eager"), pytest.warns(FxMaskWarning, match=r"(?s)gradients of 0, 2 of a model.*force_eager"):
        steps_of(model, call, 2)


def test_a_model_that_is_one_linear():
    model = nn.Linear(64, 64)
    call = compiled(model, **OPTIONS)
    with torch.compiler.set_stance("force_eager"), pytest.warns(FxMaskWarning, match="gradients of the model itself of a model"):
        steps_of(model, call, 1)


def test_a_container_in_ddp_is_told_to_be_compiled_by_itself():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(mlp())
        call = compiled(model, **OPTIONS)
        told = r"(?s)where: Sequential.*DDP around a container and, before PyTorch 2\.14, module\.compile\(\) of one call no backend"
        with torch.compiler.set_stance("force_eager"), pytest.warns(FxMaskWarning, match=told):
            steps_of(model, call, 1)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_container_that_was_compiled_by_itself_is_told_what_its_pytorch_does(wrapped):
    """From PyTorch 2.14 on `compile()` wraps its call by itself, and Dynamo takes it: then it is as any model whose frame is skipped."""
    model = nn.Sequential(Looped())
    call = compiled(torch._dynamo.external_utils.wrap_inline(model._call_impl) if wrapped else model._call_impl, **OPTIONS)
    fix = r"a graph break in a loop" if wrapped or torch.__version__ >= "2.14" else r"module\.compile\(\) of one call no backend"
    with pytest.warns(FxMaskWarning, match=rf"(?s)gradients of 0\.layers\.0, 0\.layers\.1 of a model.*where: Sequential\n  fix: [^:]*{fix}"):
        steps_of(model, call, 1)


class Partly(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.outside(self.a(x))

    @torch.compiler.disable
    def outside(self, x):
        return self.b(x)


def test_one_layer_outside_of_every_graph():
    model = Partly()
    with pytest.warns(FxMaskWarning, match=r"gradients of b of a model"):
        steps_of(model, compiled(model, **OPTIONS), 1)
    model = Partly()
    with pytest.warns(FxMaskWarning, match=r"gradients of b of a model"):
        steps_of(model, compiled(model, **OPTIONS, require=["*"]), 1)  # which has a
    model = Partly()
    with pytest.raises(UnsupportedError, match=r"gradients of b of a model"):
        steps_of(model, compiled(model, **OPTIONS, require=True), 1)


def test_the_state_of_an_optimiser_may_be_loaded_before_the_first_forward():
    """torch.distributed.checkpoint steps it to make the state that it loads into."""
    model = mlp()
    optimiser = torch.optim.AdamW(model.parameters())
    call = compiled(model, **OPTIONS, require=True)
    state = get_optimizer_state_dict(model, optimiser)
    set_optimizer_state_dict(model, optimiser, state)
    steps_of(model, call, 1)


def test_a_pattern_of_require_that_names_nothing_is_no_error_here():
    """Graphs say that of it, and there is none."""
    model = Looped()
    with pytest.warns(FxMaskWarning, match="they are dense so far"):
        steps_of(model, compiled(model, **OPTIONS, require=["nothing"]), 1)


def test_what_is_meant_to_be_dense_is_not_told(beside):
    """Layers that options leave out, models that nothing compiles with the backend, weights that graphs of another compile have met, and what apply masks."""
    model = Looped()
    steps_of(model, compiled(model, **OPTIONS, exclude="layers.*"), 1)
    model = Looped()
    steps_of(model, compiled(model, ratio=0.0), 1)
    model = Looped()
    steps_of(model, torch.compile(model, backend="eager"), 1)
    torch._dynamo.reset()
    call = compiled(beside, **OPTIONS, seed=1)
    call(torch.randn(4, 64))
    steps_of(beside, compiled(beside, **OPTIONS, seed=1), 1)
    model = fxmask.apply(Looped(), ratio=0.5, block=(16, 16), exclude="layers.1")
    steps_of(model, compiled(model), 1)
    model = copy.deepcopy(model)
    with torch.compiler.set_stance("force_eager"):  # a graph would mark the copy's weights
        steps_of(model, compiled(model), 1)


def test_a_model_is_looked_for_ever_more_rarely(monkeypatch):
    looked = []
    monkeypatch.setattr(backend_steps, "missed", lambda weights: looked.append(len(weights)) or [])
    model, taken = Looped(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for n in range(1, 10):
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        taken += [n] * (len(looked) - len(taken))
    assert taken == [1, 2, 4, 8] and set(looked) == {3}


def test_a_function_that_no_graph_reaches_is_a_warning_where_nothing_else_was_captured(monkeypatch):
    monkeypatch.setattr(backend_steps, "state", backend_steps.State())
    model = Looped()

    def step(x):
        for _ in range(2):
            x = model(x)[:, :1] + x
            torch._dynamo.graph_break()
        return x

    call = compiled(step, **OPTIONS)
    with pytest.warns(FxMaskWarning, match=r"(?s)in a process that asked.*no graph has reached it.*a graph break in a loop.*container") as told:
        steps_of(model, call, 2)
    assert len(told) == 1


class Called(nn.Module):
    """Layers whose forwards are on the instance."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(64, 64) for _ in range(3))
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x):
        x = self.b(self.a(x))[None]
        return self.c(self.attention(x, x, x, need_weights=False)[0][0])


@pytest.mark.filterwarnings("ignore:a graph begins inside")
@pytest.mark.parametrize(("name", "gap"), [("b", "b"), ("attention", r"attention\.out_proj")])
def test_a_forward_that_was_replaced_on_the_instance(name, gap):
    models = Called(), Called()
    for model in models:
        layer = getattr(model, name)
        layer.forward = torch.compiler.disable(layer.forward)
    with pytest.warns(FxMaskWarning, match=f"gradients of {gap} of a model"):
        steps_of(models[0], compiled(models[0], **OPTIONS), 1)
    torch._dynamo.reset()
    with pytest.raises(UnsupportedError, match=f"gradients of {gap} of a model.*require=True"):
        steps_of(models[1], compiled(models[1], **OPTIONS, exclude="re:in_proj", require=True), 1)


def test_a_replaced_forward_that_graphs_reach_is_not_told():
    """Also where it makes another weight of the layer's."""
    model = Called()
    model.a.forward, linear = model.a.forward, model.b
    model.b.forward = lambda x: nn.functional.linear(x, linear.weight * 2, linear.bias)
    steps_of(model, compiled(model, **OPTIONS), 2)


class Powers(nn.Linear):
    def forward(self, x):
        return x @ (self.weight @ self.weight)


@pytest.mark.filterwarnings("ignore:a graph begins inside")
def test_a_replaced_forward_of_a_class_that_computes_no_linear_is_not_told():
    model = Called()
    model.b = Powers(64, 64, bias=False)
    model.b.forward = torch.compiler.disable(model.b.forward)
    steps_of(model, compiled(model, **OPTIONS), 1)


def test_a_compiled_optimiser_step_is_one_graph():
    """Dynamo traces the hook around it, which looks at nothing then."""
    model, graphs = mlp(), []

    def keep(gm, inputs):
        graphs.append(gm)
        return gm.forward

    call, optimizer = compiled(model, **OPTIONS), torch.optim.SGD(model.parameters(), 0.1)
    call(torch.randn(4, 64)).sum().backward()
    torch.compile(optimizer.step, backend=keep)()
    assert len(graphs) == 1


def test_a_compiled_function_with_nothing_in_a_cell_is_passed_over():
    """What holds a model is looked for among all of Python's objects."""
    model, other = mlp(), mlp()

    def calls():
        return later

    calls._torchdynamo_orig_callable = other.forward
    with torch.compiler.set_stance("force_eager"), pytest.warns(FxMaskWarning, match="gradients of 0, 2 of a model"):
        steps_of(model, compiled(model, **OPTIONS), 1)
    later = calls  # too late for the cell
