"""AOTInductor: a package compiled from a masked model gives the twin's outputs, in this process and in another."""

import os
import subprocess
import sys

import pytest
import torch
from works.twin import MODELS, near, pair, some

pytestmark = [
    pytest.mark.slow,  # each compiles C++
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),  # torch.export's own
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))


def package(masked, x, tmp_path, **dynamic):
    with torch.no_grad():
        program = torch.export.export(masked, (x,), **dynamic)
    return torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))


@pytest.mark.parametrize("name", MODELS)
def test_outputs(name, tmp_path):
    make, shape = MODELS[name]
    masked, twin, _ = pair(make().eval())
    batch = torch.export.Dim("batch", min=2, max=64)
    runner = torch._inductor.aoti_load_package(package(masked, some(*shape), tmp_path, dynamic_shapes=({0: batch},)))
    for n in (2, 7):
        x = some(n, *shape[1:])
        near(runner(x), twin.eval()(x).detach())


def test_another_process(tmp_path):
    masked, twin, _ = pair(MODELS["mlp"][0]().eval())
    package(masked, some(6, 64), tmp_path)
    torch.save((some(6, 64), twin(some(6, 64)).detach()), tmp_path / "expected.pt")
    code = """
import fxmask, torch
x, y = torch.load("expected.pt")
assert torch.allclose(torch._inductor.aoti_load_package("model.pt2")(x), y, atol=1e-5)
print("equal")
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "equal", done.stderr
