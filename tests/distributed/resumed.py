"""Go on, on one rank, from what a recipe has saved on two; it ends where one process ends that was never stopped."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed.recipe_cases import FIRST, RECIPES


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., float]]:
    """Run a recipe in this process, as the only rank."""
    for name, value in dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda recipe, *args: runpy.run_path(str(RECIPES / recipe))["main"]([str(a) for a in args])
    torch.set_num_threads(before)
    if dist.is_initialized():
        dist.destroy_process_group()


def saved(folder: Path) -> dict:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def resumes_as_one_process(recipe: str, here: Callable[..., float], folder: Path) -> None:
    """`folder / recipe` holds the checkpoint of two ranks."""
    last, two = 2 * FIRST, folder / recipe
    at_first = saved(two)
    loss = here(recipe, "--steps", last, "--out", two, "--resume")
    expected = here(recipe, "--steps", last, "--out", folder / f"{recipe}-alone")
    assert abs(loss - expected) < 1e-4
    ended, alone = saved(two), saved(folder / f"{recipe}-alone")
    assert (at_first["step"], ended["step"], alone["step"]) == (FIRST, last, last)
    assert {e["step"] for e in at_first["masks"]["masks"].values()} == {FIRST}
    assert ended["masks"] == alone["masks"] and {e["step"] for e in ended["masks"]["masks"].values()} == {last}
    assert ended["model"].keys() == alone["model"].keys() and len(alone["model"]) > 4
    for name, t in alone["model"].items():
        assert torch.allclose(ended["model"][name], t, rtol=1e-3, atol=1e-5), name
        assert not torch.equal(t, at_first["model"][name]), name
