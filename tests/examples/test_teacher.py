"""`--teacher`: the loss, whom it takes as a teacher, and that a run with one goes on as it would have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from thesis import train as program
from thesis.recipes import arguments_of

SHORT = ("--threads", "1", "--data", "digits", "--batch", "128", "--epochs", "2", "--warmup", "1", "--cooldown", "0", "--masks-from", "0", "--no-figures")


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A dense run that has ended."""
    out = tmp_path_factory.mktemp("dense")
    assert program.main([*SHORT, "--dense", "--out", str(out)]) == 0
    return out


def pupil(dense: Path, out: Path, *more: str) -> program.Run:
    return program.Run(program.arguments([*SHORT, "--teacher", str(dense), "--out", str(out), *more]))


def test_loss_by_hand(dense, tmp_path):
    teacher = pupil(dense, tmp_path / "pupil", "--teach", "0.3:4").teacher
    images, logits, hard = torch.rand(5, 1, 8, 8), torch.randn(5, 10), torch.tensor(2.0)
    wanted = (teacher.model(images) / 4).softmax(-1)
    divergence = (wanted * (wanted.log() - (logits / 4).softmax(-1).log())).sum(-1).mean()
    assert torch.allclose(teacher.loss(images, logits, hard), 0.7 * hard + 0.3 * 16 * divergence, atol=1e-5)
    assert torch.allclose(teacher.loss(images, teacher.model(images), hard), 0.7 * hard, atol=1e-6)


def test_the_teacher_is_the_run_that_ended(dense, tmp_path):
    """Its weights, its accuracy on the test images, and never trained."""
    run = pupil(dense, tmp_path / "pupil")
    saved = torch.load(dense / "checkpoint.pt", weights_only=True)["model"]
    before = {name: t.clone() for name, t in run.teacher.model.state_dict().items()}
    run.train_step(*next(iter(run.data.train(1))))
    after = run.teacher.model.state_dict()
    assert all(torch.equal(saved[n], before[n]) and torch.equal(before[n], after[n]) for n in saved) and not run.teacher.model.training
    mixed = torch.rand(4, 1, 8, 8)
    assert not run.teacher.loss(mixed, torch.randn(4, 10), torch.tensor(1.0)).requires_grad  # neither its weights nor anything else of it


def test_a_stopped_pupil_goes_on(dense, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    options = [*SHORT, "--teacher", str(dense), "--opt", "muon"]
    assert program.main([*options, "--out", str(whole)]) == 0
    assert program.main([*options, "--out", str(broken), "--stop", "1"]) == 0
    assert program.main([*options, "--out", str(broken)]) == 0
    a, b = (torch.load(out / "checkpoint.pt", weights_only=True)["model"] for out in (whole, broken))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_wrong_use(dense, tmp_path, capsys):
    masked, unfinished = tmp_path / "masked", tmp_path / "unfinished"
    assert program.main([*SHORT, "--out", str(masked)]) == 0
    assert program.main([*SHORT, "--dense", "--stop", "1", "--out", str(unfinished)]) == 0
    capsys.readouterr()
    for teacher, more, got in (
        (dense, ("--seed", "1"), "got seed 0, the pupil has 1"),
        (dense, ("--holdout", "10"), "got holdout 0, the pupil has 10"),
        (masked, (), "got masks, or no run at all"),
        (unfinished, (), "got 12 of 24 steps"),
        (tmp_path / "nothing", (), "no run at all"),
        (dense, ("--teach", "2:1"), "--teach: expected a share of 0 to 1"),
        (dense, ("--teach", "half"), "--teach: expected a share of 0 to 1"),
    ):
        assert program.main([*SHORT, "--teacher", str(teacher), *more, "--out", str(tmp_path / "pupil")]) == 2
        assert got in capsys.readouterr().err
    assert not (tmp_path / "pupil").exists()


def test_a_recipe_names_the_teacher_of_its_seed():
    words = arguments_of("b16-tokens-whole-muon-taught", 20, 1, Path("here"))
    assert words[words.index("--teacher") + 1] == "here/final/dense-muon-seed1"


def test_teach_alone_is_no_setting():
    """A run that began before the option was there goes on."""
    assert "teach" not in program.Run(program.arguments([*SHORT, "--dense"])).settings()
