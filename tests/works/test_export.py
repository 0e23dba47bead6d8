"""torch.export of a masked model: the program masks by its own weights, also after a file, another process, and new weights."""

import inspect
import io
import os
import subprocess
import sys

import pytest
import torch
from sample_models import mlp
from torch import nn
from works.twin import MODELS, check, elements, near, pair, results, slow_but, some

import fxmask

pytestmark = [
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),  # torch.export's own, when it saves and loads
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),  # of torch 2.11's archive
    # in strict mode: the readers of a weight are counted while they are traced
    pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects happened:UserWarning"),
]


def reloaded(program):
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    return torch.export.load(buffer)


ARGUMENT = {"mlp": "input", "residual": "x", "encoder": "src"}  # as each forward names it, masked or not


def names_of(found, module):
    """Results by the names of the model; an exported module keeps them."""
    assert set(dict(module.named_parameters())) <= set(found)
    return found


@pytest.mark.parametrize("strict", slow_but([False, True], False), ids=["non-strict", "strict"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients(name, strict):
    make, shape = MODELS[name]
    x = some(*shape)
    masked, twin, kept = pair(make())
    program = torch.export.export(masked, (x,), strict=strict)
    expected = results(twin, twin, x)
    for p in (program, reloaded(program), program.run_decompositions()):
        module = p.module()
        check(names_of(results(module, module, x), module), expected, kept)


@pytest.mark.parametrize("name", MODELS)
def test_eval_and_any_batch(name):
    make, shape = MODELS[name]
    masked, twin, _ = pair(make().eval())
    batch = torch.export.Dim("batch", min=2, max=64)
    with torch.no_grad():
        program = reloaded(torch.export.export(masked, (some(*shape),), dynamic_shapes={ARGUMENT[name]: {0: batch}}))
        for n in (2, 5, 11):
            x = some(n, *shape[1:])
            near(program.module()(x), twin.eval()(x))


@pytest.mark.parametrize("config", [fxmask.WeightMask(0.5, (8, 8)), fxmask.WeightMask(0.5, (8, 8), backward="ste"), fxmask.NMMask(2, 4)])
@pytest.mark.parametrize("kernel", [1, 3])
def test_channels_last_convolutions_train_when_they_are_decomposed(config, kernel):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 16, kernel, padding=1)).to(memory_format=torch.channels_last)
    fxmask.apply(model, config, layers=nn.Conv2d)
    x = some(2, 16, 8, 8)
    module = torch.export.export(model, (x,)).run_decompositions().module()
    for m in (model, module):
        m(x).square().sum().backward()
    near(module.get_parameter("0.weight").grad, model[0].weight.grad)


def test_convolutions_of_patches_take_any_batch():
    model = fxmask.apply(nn.Sequential(nn.Conv2d(16, 32, 2, 2)), ratio=0.5, block=(8, 8), layers=nn.Conv2d, impl="cpu").eval()
    batch = torch.export.Dim("batch", min=2, max=64)
    with torch.no_grad():
        program = torch.export.export(model, (some(2, 16, 8, 8),), dynamic_shapes=({0: batch},))
        for n in (2, 5):
            x = some(n, 16, 8, 8)
            near(program.module()(x), model(x))


@pytest.mark.parametrize("name", MODELS)
def test_arguments_keep_their_names(name):
    """By which exporters, and trainers that pick columns, call a model."""
    masked, twin, _ = pair(MODELS[name][0]())
    assert list(inspect.signature(masked.forward).parameters) == list(inspect.signature(twin.forward).parameters)


def test_new_weights_have_new_masks():
    masked, _, _ = pair(mlp())
    module = reloaded(torch.export.export(masked, (some(6, 64),))).module()
    other, twin, _ = pair(mlp(seed=5))
    module.load_state_dict(other.state_dict())
    near(module(some(6, 64)), twin(some(6, 64)))


@pytest.mark.parametrize("options", [dict(refresh=0), dict(criterion="random"), dict(backward="ste"), dict(backward="unmasked")], ids=str)
def test_other_masks(options):
    model, x = fxmask.apply(mlp(), ratio=0.75, **options), some(6, 64)
    module = reloaded(torch.export.export(model, (x,))).module()
    found, expected = results(module, module, x), results(model, model, x)
    for name, value in expected.items():
        near(found[name], value, name=name)
    assert not torch.allclose(found["output"], mlp()(x), atol=1e-2)


def test_a_schedule_is_exported_as_it_stands():
    """The count of kept blocks is a constant of the program, that of the moment."""
    model = fxmask.apply(mlp(), ratio=0.75, schedule=fxmask.Schedule("linear", steps=10))
    fxmask.step(model, 5)
    module = reloaded(torch.export.export(model, (some(6, 64),))).module()
    half = mlp()
    for name in ("0.weight", "2.weight"):
        half.get_parameter(name).data.mul_(elements(half.get_parameter(name), 0.375))
    fxmask.step(model, 5)
    near(module(some(6, 64)), half(some(6, 64)))
    assert not torch.allclose(module(some(6, 64)), model(some(6, 64)), atol=1e-3)


@pytest.mark.slow
def test_another_process(tmp_path):
    """Which needs to import fxmask, and is told so by PyTorch where it does not."""
    masked, twin, _ = pair(mlp())
    torch.export.save(torch.export.export(masked, (some(6, 64),)), tmp_path / "program.pt2")
    torch.save((some(6, 64), twin(some(6, 64)).detach()), tmp_path / "expected.pt")
    code = """
import torch
x, y = torch.load("expected.pt")
assert torch.allclose(torch.export.load("program.pt2").module()(x), y, atol=1e-5)
print("equal")
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with_import, without = (
        subprocess.run([sys.executable, "-c", first + code], cwd=tmp_path, env=env, capture_output=True, text=True) for first in ("import fxmask", "")
    )
    assert with_import.stdout.strip() == "equal", with_import.stderr
    assert without.returncode and "fxmask" in without.stderr
