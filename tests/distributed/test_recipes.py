"""The recipes of DDP and FSDP2, started by torchrun as a user would; the normal tier runs their `main` in `test_two_processes`."""

import pytest
from distributed.launch import torchrun
from distributed.recipe_cases import FIRST, RECIPES
from distributed.resumed import here, resumes_as_one_process  # noqa: F401  # a fixture


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["ddp.py", "fsdp2.py"])
def test_saved_on_two_ranks_resumed_on_one_and_on_two(recipe, here, tmp_path):  # noqa: F811
    out = torchrun(RECIPES / recipe, "--steps", FIRST, "--out", tmp_path / recipe)
    assert f"step {FIRST} on 2 ranks: loss" in out and "masked" in out
    resumes_as_one_process(recipe, here, tmp_path)
    out = torchrun(RECIPES / recipe, "--steps", 3 * FIRST, "--out", tmp_path / recipe, "--resume")
    assert f"step {3 * FIRST} on 2 ranks: loss" in out
