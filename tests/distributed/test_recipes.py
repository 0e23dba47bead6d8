"""The recipes of DDP and FSDP2, started by torchrun as a user would; the normal tier runs their `main` in `test_two_processes`."""

import math

import pytest
from distributed.launch import torchrun
from distributed.recipe_cases import FIRST, RECIPES
from distributed.resumed import here, resumes_as_one_process, saved  # noqa: F401  # a fixture


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["ddp.py", "fsdp2.py"])
def test_saved_on_two_ranks_resumed_on_one_and_on_two(recipe, here, tmp_path):  # noqa: F811
    out = torchrun(RECIPES / recipe, "--steps", FIRST, "--out", tmp_path / recipe)
    assert f"step {FIRST} on 2 ranks: loss" in out and "masked" in out
    resumes_as_one_process(recipe, here, tmp_path)
    out = torchrun(RECIPES / recipe, "--steps", 3 * FIRST, "--out", tmp_path / recipe, "--resume")
    assert f"step {3 * FIRST} on 2 ranks: loss" in out


@pytest.mark.parametrize("recipe", ["ddp.py", "fsdp2.py"])
def test_a_run_that_is_there_already_says_so_and_has_no_loss(recipe, here, tmp_path, capsys):  # noqa: F811
    assert here(recipe, "--steps", 3, "--out", tmp_path) > 0
    for steps in (3, 2):
        capsys.readouterr()
        assert math.isnan(here(recipe, "--steps", steps, "--out", tmp_path, "--resume"))
        said = capsys.readouterr().out
        assert f"already at step 3: --steps {steps} leaves none to take" in said and "loss" not in said and saved(tmp_path)["step"] == 3


@pytest.mark.parametrize("recipe", ["ddp.py", "fsdp2.py"])
def test_nothing_to_resume_is_said_before_anything_begins(recipe, here, tmp_path, capsys):  # noqa: F811
    with pytest.raises(SystemExit):
        here(recipe, "--steps", 3, "--out", tmp_path / "new", "--resume")
    assert f"--resume: expected a checkpoint at {tmp_path / 'new' / 'checkpoint.pt'}, found none" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
