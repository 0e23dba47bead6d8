"""fxmask works the same however it got here: wheel, editable install, or a checkout that is not installed; and without Triton."""

from __future__ import annotations

import pytest

IMPORTS = "import fxmask, fxmask.passes, fxmask.kernels.ops as ops; print(fxmask.__file__); print(ops.__file__)"

# forward and backward of a masked model, on the CPU
TRAIN = """
import importlib.util, torch, fxmask
assert importlib.util.find_spec("triton") is None
torch.manual_seed(0)  # masks of the two layers may have no hidden unit in common
model = fxmask.apply(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)), ratio=0.5, block=(16, 16))
model(torch.randn(4, 32)).sum().backward()
assert model[0].weight.grad.count_nonzero() > 0
assert fxmask.masks(model)["0.weight"].sum() == 4
"""


@pytest.fixture
def elsewhere(tmp_path):
    """A working directory from which nothing can be imported by accident."""
    return tmp_path


def test_wheel(builds, fresh_environment, elsewhere, pyproject):
    version = pyproject["project"]["version"]
    environment = fresh_environment(without=("kernels", "passes"))
    environment.install(builds.wheel_of_checkout)
    assert environment.installed() == {"fxmask", f"fxmask-{version}.dist-info"}
    script = "from importlib.util import find_spec; assert not find_spec('kernels') and not find_spec('passes')"
    found = environment.run("-c", f"{script}; {IMPORTS}; print(fxmask.__version__)", cwd=elsewhere).splitlines()
    assert found == [str(environment.site / "fxmask/__init__.py"), str(environment.site / "fxmask/kernels/ops.py"), version]


@pytest.mark.slow
def test_editable_install_sees_new_modules(copy_checkout, fresh_environment, elsewhere):
    checkout, environment = copy_checkout(), fresh_environment()
    environment.install("--editable", checkout)
    for tree in ("kernels", "passes"):
        (checkout / tree / "written_after_the_install.py").write_text("VALUE = 1\n")
    script = "; from fxmask.kernels.written_after_the_install import VALUE; from fxmask.passes.written_after_the_install import VALUE"
    found = environment.run("-c", IMPORTS + script, cwd=elsewhere).splitlines()
    assert found[0] == str(checkout / "fxmask/__init__.py")
    assert not {"kernels", "passes"} & environment.installed()


def test_uninstalled_checkout(root, copy_checkout, fresh_environment):
    if not (root / "fxmask/kernels").is_symlink():
        pytest.skip("an unpacked sdist has no symlinks and needs an install")
    checkout = copy_checkout()
    found = fresh_environment().run("-c", IMPORTS, cwd=checkout).splitlines()
    assert found[0] == str(checkout / "fxmask/__init__.py")


def test_masked_training_without_triton(builds, fresh_environment, elsewhere):
    # beside Triton there is nothing to check: torch's FLOP counter imports it by itself
    environment = fresh_environment(without=("triton",))
    environment.install(builds.wheel_of_sdist)
    environment.run("-c", TRAIN, cwd=elsewhere)
