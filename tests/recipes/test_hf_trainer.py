"""The recipe of Hugging Face's Trainer: saved and resumed, it ends with the bits of a run that was never stopped."""

import runpy
import shutil
from pathlib import Path

import pytest
import torch

import fxmask
from fxmask.kernels.grid import expand_mask
from fxmask.passes.state.site import Site

pytestmark = [
    pytest.mark.models,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(transformers|accelerate)"),
    pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning"),
]
RECIPE = Path(__file__).resolve().parents[2] / "examples" / "recipes" / "hf_trainer.py"


@pytest.fixture(scope="module")
def recipe(torchvision):
    return runpy.run_path(str(RECIPE))


@pytest.fixture
def train(recipe):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda *args: recipe["main"]([str(a) for a in args])
    torch.set_num_threads(before)


def masks_of(folder: Path) -> dict:
    return torch.load(folder / "fxmask.pt", weights_only=True)["masks"]["masks"]


def test_resumed_is_as_never_stopped(train, tmp_path):
    whole = train("--steps", 20, "--out", tmp_path / "whole")
    train("--steps", 10, "--out", tmp_path / "parts")
    assert {e["step"] for e in masks_of(tmp_path / "parts" / "checkpoint-10").values()} == {10}
    parts = train("--steps", 20, "--out", tmp_path / "parts", "--resume")
    assert whole.args.optim == "adamw_torch_fused"
    a, b = masks_of(tmp_path / "whole" / "checkpoint-20"), masks_of(tmp_path / "parts" / "checkpoint-20")
    assert a == b and {e["step"] for e in a.values()} == {20} and {e["policy"] for e in a.values()} == {"freeze"} and len(a) == 14
    assert all(torch.equal(p, q) for p, q in zip(whole.model.parameters(), parts.model.parameters(), strict=True))
    assert whole.state.log_history[0]["loss"] > whole.state.log_history[1]["loss"]


def test_the_data_come_to_an_end(recipe):
    """A Dataset is also walked by its indices, as sampling by length does."""
    assert len(list(recipe["Counting"]())) == len(recipe["Counting"]()) == 256


def test_it_guards(train, recipe, tmp_path):
    """Blocks that were never kept have the bits they began with, though AdamW decays; the guard is off after training."""
    trainer = train("--steps", 1, "--out", tmp_path)
    model = fxmask.apply(fxmask.restore(trainer.model), ratio=0.75, block=(16, 16))
    masks, before = fxmask.masks(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    again = type(trainer)(model=model, args=trainer.args, train_dataset=recipe["Counting"](), callbacks=[recipe["MaskCallback"]()])
    again.args.max_steps = 4
    again.train()
    for name, mask in fxmask.masks(model).items():
        never, now = ~expand_mask(mask | masks[name], before[name].shape, (16, 16)), model.get_parameter(name)
        assert torch.equal(now[never], before[name][never]) and not torch.equal(now, before[name])
    assert all(site._fxmask_guard is None for site in model.modules() if isinstance(site, Site))


def test_a_checkpoint_without_masks_or_of_another_run_is_refused(train, tmp_path):
    train("--steps", 10, "--out", tmp_path / "a")
    train("--steps", 10, "--out", tmp_path / "b")
    shutil.copy(tmp_path / "b" / "checkpoint-10" / "fxmask.pt", tmp_path / "a" / "checkpoint-10" / "fxmask.pt")
    with pytest.raises(FileNotFoundError, match=r"no masks' state for the checkpoint of step 10(.|\n)*resume_from_checkpoint"):
        train("--steps", 20, "--out", tmp_path / "a", "--resume")
    (tmp_path / "b" / "checkpoint-10" / "fxmask.pt").unlink()
    with pytest.raises(FileNotFoundError, match="no masks' state"):
        train("--steps", 20, "--out", tmp_path / "b", "--resume")


def test_resumed_from_another_folder(train, tmp_path):
    """Trainer does not tell where it resumes from; TrainingArguments do."""
    trainer = train("--steps", 10, "--out", tmp_path / "old")
    trainer.args.output_dir, trainer.args.max_steps, folder = str(tmp_path / "new"), 12, str(tmp_path / "old" / "checkpoint-10")
    with pytest.raises(FileNotFoundError, match="no masks' state"):
        trainer.train(resume_from_checkpoint=folder)
    trainer.args.resume_from_checkpoint = folder
    fxmask.step(trainer.model, 5)  # which the file's steps replace
    trainer.train(resume_from_checkpoint=folder)
    assert {row["step"] for row in fxmask.explain(trainer.model).rows if row["masked"]} == {12}


def test_the_best_model_has_its_masks(train, recipe, tmp_path):
    """`load_best_model_at_end` puts another step's weights there, and the callback that step's masks."""
    trainer = train("--steps", 10, "--out", tmp_path)
    trainer.args.load_best_model_at_end, trainer.args.max_steps = True, 20
    best = str(tmp_path / "checkpoint-10")
    callback = next(c for c in trainer.callback_handler.callbacks if type(c).__name__ == "MaskCallback")
    trainer.state.best_model_checkpoint = best
    fxmask.step(trainer.model, 5)
    callback.on_train_end(trainer.args, trainer.state, trainer.control, model=trainer.model)
    assert {row["step"] for row in fxmask.explain(trainer.model).rows if row["masked"]} == {10}
