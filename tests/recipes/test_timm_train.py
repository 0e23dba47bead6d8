"""The timm recipe: a script that knows nothing of masks trains under them, saves their state in its own files, and goes on from there to the same bits."""

import runpy
from pathlib import Path

import pytest
import torch

import fxmask
from fxmask.errors import UnsupportedError

pytestmark = pytest.mark.models
RECIPE = Path(__file__).resolve().parents[2] / "examples" / "recipes" / "timm_train.py"
SCRIPT = Path(__file__).parent / "timm_stand_in.py"
MASKS = ("--ratio", "0.75", "--block", "16", "16", "--ramp", "12")


@pytest.fixture
def train(torchvision):
    """Run the recipe in this process: its options, then the script's."""
    main = runpy.run_path(str(RECIPE))["main"]

    def run(*args: object, masks: tuple[str, ...] = MASKS) -> None:
        main([*masks, str(SCRIPT), *map(str, args)])

    return run


def last(folder: Path) -> dict:
    return torch.load(folder / "last.pth.tar", weights_only=True)


@pytest.mark.parametrize("opt", ["adamw", "lamb", "sgd"])
def test_a_run_in_two_parts_ends_with_the_bits_of_one_in_one(train, tmp_path, capsys, opt):
    train("--opt", opt, "--epochs", 2, "--output", tmp_path / "one")
    assert "fxmask.explain" in capsys.readouterr().out
    train("--opt", opt, "--epochs", 1, "--output", tmp_path / "two")
    half = last(tmp_path / "two")["optimizer"]["fxmask"]["masks"]
    assert {e["step"] for e in half.values()} == {4} and all(e["guarded"] for e in half.values())
    train("--opt", opt, "--epochs", 2, "--output", tmp_path / "two", "--resume", tmp_path / "two" / "last.pth.tar")
    one, two = last(tmp_path / "one"), last(tmp_path / "two")
    assert one["epoch"] == two["epoch"] == 1
    assert one["optimizer"]["fxmask"] == two["optimizer"]["fxmask"]
    assert {e["step"] for e in one["optimizer"]["fxmask"]["masks"].values()} == {8}
    assert one["state_dict"].keys() == two["state_dict"].keys() and all(torch.equal(t, two["state_dict"][n]) for n, t in one["state_dict"].items())
    assert "head.weight" not in one["optimizer"]["fxmask"]["masks"] and "blocks.0.mlp.fc1.weight" in one["optimizer"]["fxmask"]["masks"]


def test_masked_weights_stay(train, tmp_path, monkeypatch):
    """The guard is on: with a constant ratio, what a masked block held at the start it holds at the end, unless it came back."""
    kept, guard = [], fxmask.guard

    def watched(optimizer, model):
        kept.append((model, fxmask.masks(model), {n: p.detach().clone() for n, p in model.named_parameters()}))
        return guard(optimizer, model)

    monkeypatch.setattr(fxmask, "guard", watched)
    train("--epochs", 1, "--output", tmp_path, masks=("--ratio", "0.5"))
    (model, masks, before), after = kept[0], last(tmp_path)["state_dict"]
    name = "blocks.0.mlp.fc1.weight"
    never = ~(masks[name] | fxmask.masks(model)[name]).repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert never.any() and torch.equal(before[name][never], after[name][never]) and not torch.equal(before[name], after[name])


def test_a_dense_checkpoint_is_refused_and_its_weights_taken(train, tmp_path):
    train("--epochs", 1, "--output", tmp_path / "masked")
    dense = last(tmp_path / "masked")
    del dense["optimizer"]["fxmask"]
    torch.save(dense, tmp_path / "dense.pth.tar")
    with pytest.raises(ValueError, match=r"no masks' state.*\n.*--no-resume-opt"):
        train("--epochs", 2, "--output", tmp_path / "next", "--resume", tmp_path / "dense.pth.tar")
    train("--epochs", 2, "--output", tmp_path / "next", "--resume", tmp_path / "dense.pth.tar", "--no-resume-opt")
    assert {e["step"] for e in last(tmp_path / "next")["optimizer"]["fxmask"]["masks"].values()} == {4}


def test_a_wrapped_optimiser_is_refused(train, tmp_path):
    with pytest.raises(UnsupportedError, match="Lookahead has no step hooks"):
        train("--opt", "lookahead_adamw", "--output", tmp_path)


def test_a_script_that_makes_no_optimiser(train, tmp_path):
    (tmp_path / "other.py").write_text("print('nothing')\n")
    main = runpy.run_path(str(RECIPE))["main"]
    with pytest.raises(RuntimeError, match="nothing was masked"):
        main([str(tmp_path / "other.py")])
