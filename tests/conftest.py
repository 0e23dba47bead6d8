"""What every tier of the tests shares."""

from __future__ import annotations

import os
from types import ModuleType

import pytest
import torch
from torchvision_shim import import_torchvision  # examples/ is on the path, see pyproject.toml

os.environ.setdefault("FXMASK_TUNE", "0")  # what a measurement chooses differs from run to run; tests/unit/tuned.py switches it on


@pytest.fixture(scope="session")
def torchvision() -> ModuleType:
    """torchvision, also beside a CPU build of torch; a test that wants it asks for this fixture instead of importing it."""
    try:
        return import_torchvision()
    except ImportError as error:
        pytest.skip(str(error))


def pytest_runtest_setup(item: pytest.Item) -> None:
    # asked when a test runs, not when it is collected: the question initialises CUDA
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
