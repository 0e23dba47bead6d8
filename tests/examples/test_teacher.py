"""`--teacher`: the loss, whom it takes as a teacher, and that a run with one goes on as it would have."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from thesis import accuracy, checkpoint
from thesis import train as program
from thesis.recipes import arguments_of
from thesis.teacher import watched

import fxmask

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
    assert torch.allclose(teacher.loss(images, logits, [], hard), 0.7 * hard + 0.3 * 16 * divergence, atol=1e-5)
    assert torch.allclose(teacher.loss(images, teacher.model(images), [], hard), 0.7 * hard, atol=1e-6)


def test_loss_of_blocks_by_hand(dense, tmp_path):
    """A pupil whose blocks give twice what the teacher's give is off by the whole of it; one that gives the same, by nothing; the logits' part stays."""
    teacher = pupil(dense, tmp_path / "pupil", "--teach-blocks", "0.25").teacher
    images, hard = torch.rand(5, 1, 8, 8), torch.tensor(2.0)
    logits, given = watched(teacher.model, images)
    assert [t.shape for t in given] == [(5, 64, 32)] * 2 and not any(block._forward_hooks for block in teacher.model.blocks)
    for factors, far in (((1, 1), 0.0), ((2, 2), 1.0), ((1, 3), 2.0), ((0, 1), 0.5)):
        loss = teacher.loss(images, logits, [f * t for f, t in zip(factors, given, strict=True)], hard)
        assert torch.allclose(loss, 0.3 * hard + 0.25 * far, atol=1e-5), factors


def test_a_pupil_begins_with_the_teachers_weights(dense, tmp_path):
    """To the bit, masked or dense, and without the option with its own; masks follow the weights that came."""
    saved = torch.load(dense / "checkpoint.pt", weights_only=True)["model"]
    for more in ((), ("--dense",)):
        begun, own = (pupil(dense, tmp_path / "pupil", *more, *how).model.state_dict() for how in (("--from-teacher",), ()))
        assert all(torch.equal(saved[name], begun[name]) for name in saved)
        assert not any(torch.equal(saved[name], own[name]) for name in saved if name.endswith("fc1.weight"))
    run = pupil(dense, tmp_path / "pupil", "--from-teacher")
    (name, mask), *_ = fxmask.masks(run.model).items()
    scores = saved[name].unfold(0, 16, 16).unfold(1, 16, 16).square().sum((2, 3))
    assert set(scores[mask].tolist()) == set(scores.flatten().topk(int(mask.sum())).values.tolist())


def test_a_gain_is_of_the_weights_that_a_pupil_begins_with(dense, tmp_path):
    """Masks, and what they make of weights, come after the teacher's."""
    plain, gained = (pupil(dense, tmp_path / "pupil", "--from-teacher", *how).model for how in ((), ("--gain",)))
    for (name, mask), other in zip(fxmask.masks(plain).items(), fxmask.masks(gained).values(), strict=True):
        w, g = plain.get_parameter(name), gained.get_parameter(name)
        assert torch.equal(mask, other) and g[:16, :16][mask[0, 0].expand(16, 16)].norm() >= w[:16, :16][mask[0, 0].expand(16, 16)].norm()
        kept = mask.repeat_interleave(16, 0).repeat_interleave(16, 1)
        assert torch.allclose((g * kept).norm(), w.norm(), rtol=1e-4)


@pytest.mark.slow
def test_a_teacher_of_other_batches_and_other_hidden_layers(dense, tmp_path):
    """Its own steps say whether it has ended; its blocks give the same shapes."""
    small = tmp_path / "small"
    options = [*SHORT, "--batch", "64", "--dense", "--out", str(small)]
    assert program.main([*options, "--stop", "1"]) == 0
    with pytest.raises(checkpoint.CheckpointError, match="got 23 of 46 steps"):
        pupil(small, tmp_path / "pupil")
    assert program.main(options) == 0
    for option, size, hidden in (("--expansion", "2", 64), ("--hidden", "48", 48)):
        run = pupil(small, tmp_path / "pupil", option, size, "--teach-blocks", "1")
        assert [model.blocks[0].fc1.out_features for model in (run.teacher.model, run.model)] == [128, hidden]


def test_teachers_run_before_their_pupils(tmp_path, monkeypatch):
    """Whatever is free earlier: a pupil is refused while its teacher trains."""
    begun = []
    monkeypatch.setattr(accuracy.sweep_local.subprocess, "run", lambda words, **_: begun.append(words) or subprocess.CompletedProcess(words, 0))
    only = ["dense-muon-wd0.1-bf16", "dense-muon-wd0.1-bf16-from-teacher", "b16-tokens-whole-muon-wd0.1-bf16-from-teacher"]
    assert accuracy.main(["final", "--data", "digits", "--runs", str(tmp_path), "--csv", str(tmp_path / "t.csv"), "--only", *only]) == 0
    assert ["--teacher" in words for words in begun] == [False, False, True, True, True, True]


def test_autocast_trains_in_bfloat16_and_keeps_float32_weights(tmp_path):
    seen = []
    run = program.Run(program.arguments([*SHORT, "--amp", "bf16", "--out", str(tmp_path)]))
    run.model.blocks[0].fc1.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    run.train_step(*next(iter(run.data.train(1))))
    assert seen == [torch.bfloat16] and {p.dtype for p in run.model.parameters()} == {torch.float32}
    assert run.settings()["amp"] == "bf16"


def test_checkpoints_of_before_these_options_go_on(tmp_path):
    """Their settings do not have them."""
    settings = program.Run(program.arguments([*SHORT, "--out", str(tmp_path)])).settings()
    assert not {"amp", "from_teacher", "teach_blocks", "teach"} & settings.keys() and settings["teacher"] is None


def test_the_teacher_is_the_run_that_ended(dense, tmp_path):
    """Its weights, and never trained."""
    run = pupil(dense, tmp_path / "pupil")
    saved = torch.load(dense / "checkpoint.pt", weights_only=True)["model"]
    before = {name: t.clone() for name, t in run.teacher.model.state_dict().items()}
    run.train_step(*next(iter(run.data.train(1))))
    after = run.teacher.model.state_dict()
    assert all(torch.equal(saved[n], before[n]) and torch.equal(before[n], after[n]) for n in saved) and not run.teacher.model.training
    mixed = torch.rand(4, 1, 8, 8)
    assert not run.teacher.loss(mixed, torch.randn(4, 10), [], torch.tensor(1.0)).requires_grad  # neither its weights nor anything else of it


@pytest.mark.slow
@pytest.mark.parametrize("amp", ["none", "bf16"])
def test_a_stopped_pupil_goes_on(amp, dense, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    options = [*SHORT, "--batch", "512", "--teacher", str(dense), "--opt", "muon", "--teach-blocks", "0.5", "--from-teacher", "--amp", amp]
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
        (dense, ("--holdout", "10"), "got holdout 0, the pupil has 10"),
        (masked, (), "got masks, or no run at all"),
        (unfinished, (), "got 12 of 24 steps"),
        (tmp_path / "nothing", (), "no run at all"),
        (dense, ("--teach", "2:1"), "--teach: expected a share of 0 to 1"),
        (dense, ("--teach", "half"), "--teach: expected a share of 0 to 1"),
        (dense, ("--teach-blocks", "-1"), "--teach-blocks: expected a weight of 0 or more, got -1.0"),
        (dense, ("--teach-blocks", "nan"), "--teach-blocks: expected a weight of 0 or more, got nan"),
        (dense, ("--teach", "0.7:inf"), "--teach: expected a share of 0 to 1 and a temperature above 0"),
        (dense, ("--from-teacher", "--dim", "48"), "--from-teacher: expected a teacher of the pupil's shape, got embed.weight (32, 1), the pupil has (48, 1)"),
        (dense, ("--from-teacher", "--config", "ResMLP3"), "--from-teacher: expected a teacher of the pupil's shape"),
        (dense, ("--teach-blocks", "1", "--dim", "48"), "expected a teacher with the pupil's (depth, tokens, width) (2, 64, 48), got (2, 64, 32)"),
    ):
        assert program.main([*SHORT, "--teacher", str(teacher), *more, "--out", str(tmp_path / "pupil")]) == 2
        assert got in capsys.readouterr().err
    assert not (tmp_path / "pupil").exists()
    for alone in (("--from-teacher",), ("--teach-blocks", "1")):
        with pytest.raises(SystemExit):
            program.arguments([*SHORT, *alone])
        assert "expected a --teacher, got none" in capsys.readouterr().err


def test_a_teacher_of_another_seed_and_width(dense, tmp_path):
    """The held-out images are the same of every seed."""
    options = [*SHORT, "--teacher", str(dense), "--seed", "1", "--dim", "48", "--stop", "1", "--out", str(tmp_path / "pupil")]
    assert program.main(options) == 0


def test_a_recipe_names_the_teacher_of_its_seed():
    words = arguments_of("b16-tokens-whole-muon-taught", 20, 1, Path("here"))
    assert words[words.index("--teacher") + 1] == "here/final/dense-muon-seed1"
    words = arguments_of("b16-tokens-whole-muon-wd0.1-bf16-taught-d96", 20, 1, Path("here"))
    assert words[words.index("--teacher") + 1] == "here/final/dense-d96-muon-wd0.1-bf16-seed0"  # one wide teacher for all


def test_teach_alone_is_no_setting():
    """A run that began before the option was there goes on."""
    assert "teach" not in program.Run(program.arguments([*SHORT, "--dense"])).settings()
