"""Two processes on gloo: DDP's ranks agree to the bit, FSDP2 computes what one process does, a checkpoint of two ranks is resumed on one.

The cases are in `ddp_cases`, `fsdp_cases`, `stage_cases` and `recipe_cases`.
"""

import json
from pathlib import Path

import pytest
from distributed import ddp_cases, fsdp_cases, recipe_cases, stage_cases
from distributed.launch import torchrun
from distributed.resumed import here, resumes_as_one_process  # noqa: F401  # a fixture

LONG = ["ddp-1000-steps", "ddp-1000-steps-cached"]
SLOW = ["ddp-cached", "ddp-ste", "ddp-rigl", "ddp-phases", "ddp-flips", "fsdp-decay", "fsdp-ste", "fsdp-rigl", "fsdp-flips", "fsdp-compiled"]
EVERY = [*ddp_cases.CASES, *fsdp_cases.CASES, *recipe_cases.CASES, *stage_cases.CASES]
SHORT = [name for name in EVERY if name not in (*LONG, *SLOW)]
BODIES = Path(__file__).parent / "bodies.py"


def run(folder, names):
    """{case: "" or what failed}"""
    torchrun(BODIES, folder / "outcome.json", *names, RECIPES_OUT=folder)
    return json.loads((folder / "outcome.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("distributed")


@pytest.fixture(scope="module")
def outcome(folder):
    """One start for all short cases."""
    return run(folder, SHORT)


@pytest.mark.parametrize("name", SHORT)
def test_on_two_ranks(outcome, name):
    assert not outcome[name], outcome[name]


@pytest.mark.parametrize("recipe", ["ddp.py", "fsdp2.py"])
def test_saved_on_two_ranks_resumed_on_one(outcome, folder, here, recipe):  # noqa: F811
    assert not outcome[f"recipe-{recipe}"]
    resumes_as_one_process(recipe, here, folder)


@pytest.mark.slow
def test_more_on_two_ranks(tmp_path):
    assert run(tmp_path, SLOW) == dict.fromkeys(SLOW, "")


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_a_thousand_steps(tmp_path, name):
    assert run(tmp_path, [name]) == {name: ""}
