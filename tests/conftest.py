"""What every tier of the tests shares."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torchvision_shim import import_torchvision  # examples/ is on the path, see pyproject.toml

os.environ.setdefault("FXMASK_TUNE", "0")  # what a measurement chooses differs from run to run; tests/unit/tuned.py switches it on


def pytest_configure() -> None:
    """Nothing that is imported for the tests is garbage: a third of the time that it takes would go into looking."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What is imported by now stays: a collection need not go through it, and a test that asks for one need not wait a second for it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # what compiles leave is much, and alive: looking through it every 700 objects took a tenth of the time
    gc.enable()


@pytest.fixture
def little_garbage() -> None:
    """What is there by now is not gone through by collections that the test asks for: they took a second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def torchvision() -> ModuleType:
    """torchvision, also beside a CPU build of torch; a test that wants it asks for this fixture instead of importing it."""
    try:
        return import_torchvision()
    except ImportError as error:
        pytest.skip(str(error))


def settings() -> dict[str, object]:
    """What a process has once, and the next test would meet."""
    return {
        "threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "denormals": torch.tensor(1e-40).mul(1.0).item() > 0,
    }


@pytest.fixture(autouse=True)
def settings_stay() -> Iterator[None]:
    """Each process runs its files in an order of its own, so a setting that a test leaves changed breaks one that nobody suspects."""
    before = settings()
    yield
    assert settings() == before


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread of PyTorch: sums in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_runtest_setup(item: pytest.Item) -> None:
    # asked when a test runs, not when it is collected: the question initialises CUDA
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
