"""The thesis' training: its recipes, what a checkpoint holds, and that a run that was killed ends where one that was not ends."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import plots
import pytest
import torch
from resmlp import ResMLP
from saved_states import same
from thesis import checkpoint, run_folder
from thesis import train as program
from thesis.muon import MuonAdamW
from thesis.recipe import CIFAR10, IMAGENET, Mixing, Recipe, optimiser, scheduler
from torch import nn
from unit import tape

import fxmask

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
SHORT = ("--threads", "1", "--data", "digits", "--batch", "64", "--epochs", "3", "--warmup", "1", "--cooldown", "1", "--masks-from", "1", "--save-every", "5")
MASKED = (*SHORT, "--schedule", "cubic:20", "--refresh", "2")


def rows(out: Path) -> list[dict[str, str]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in plots.read_csv(out / "log.csv")]


def state(out: Path) -> dict[str, object]:
    saved = torch.load(out / checkpoint.LAST, weights_only=True)
    saved["progress"]["sums"].pop("seconds")
    return saved


def assert_same_end(out: Path, other: Path) -> None:
    assert same(state(out), state(other))
    assert rows(out) == rows(other) and len(rows(out)) == 3
    blocks = [p / "active_blocks.csv" for p in (out, other)]
    assert blocks[0].exists() == blocks[1].exists() and (not blocks[0].exists() or blocks[0].read_text() == blocks[1].read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A masked run that nobody disturbed."""
    out = tmp_path_factory.mktemp("whole")
    assert program.main([*MASKED, "--out", str(out)]) == 0
    return out


class Crash(Exception):
    pass


OTHERS = [(*SHORT, "--dense"), (*SHORT, "--backward", "ste", "--refresh", "3"), (*SHORT, "--opt", "adamw", "--guard", "decay"), (*MASKED, "--opt", "muon")]


@pytest.mark.parametrize("options", [MASKED, *(pytest.param(o, marks=pytest.mark.slow) for o in OTHERS)])
def test_resume_is_exact(options, tmp_path, monkeypatch, whole):
    """Broken off in the middle of a step, in the middle of an epoch, three times; the checkpoints lie some steps back."""
    expected, out = (whole if options is MASKED else tmp_path / "whole"), tmp_path / "broken"
    if options is not MASKED:
        assert program.main([*options, "--out", str(expected)]) == 0
    honest = nn.Module.__call__
    for calls in (9, 17, 40):
        seen = 0

        def breaking(self, *args, calls=calls):
            nonlocal seen
            seen += isinstance(self, ResMLP)
            if seen > calls:
                raise Crash
            return honest(self, *args)

        monkeypatch.setattr(ResMLP, "__call__", breaking)
        with pytest.raises(Crash):
            program.main([*options, "--out", str(out)])
        monkeypatch.undo()
    assert program.main([*options, "--out", str(out)]) == 0
    assert_same_end(out, expected)


@pytest.mark.slow
def test_a_run_goes_on_on_another_device(tmp_path, monkeypatch, whole):
    """What a GPU's checkpoint holds is brought to the device that goes on, and run.json names both."""
    asked, honest = [], torch.load
    monkeypatch.setattr(torch, "load", lambda *args, map_location=None, **more: asked.append(map_location) or honest(*args, map_location=map_location, **more))
    assert program.main([*MASKED, "--stop", "1", "--out", str(tmp_path)]) == 0
    facts = json.loads((tmp_path / "run.json").read_text())
    assert facts["ran_on"] == ["cpu"]
    (tmp_path / "run.json").write_text(json.dumps({**facts, "ran_on": ["NVIDIA H200"]}))
    assert program.main([*MASKED, "--out", str(tmp_path)]) == 0
    assert asked == ["cpu"] and json.loads((tmp_path / "run.json").read_text())["ran_on"] == ["NVIDIA H200", "cpu"]
    assert_same_end(tmp_path, whole)
    (tmp_path / "run.json").write_text(json.dumps({**facts, "ran_on": ["NVIDIA H200"]}))
    assert program.main([*MASKED, "--out", str(tmp_path)]) == 0
    assert json.loads((tmp_path / "run.json").read_text())["ran_on"] == ["NVIDIA H200"]  # nothing was left to train


def test_what_a_run_is_survives_a_kill(tmp_path, monkeypatch):
    """Killed while run.json is written, the one before it stands; a damaged one is said, not a traceback."""
    checkpoint.write_facts(tmp_path, {"device": "cpu", "epochs": 3})
    with monkeypatch.context() as killed:
        killed.setattr(checkpoint.csv_files.os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            checkpoint.write_facts(tmp_path, {"device": "cuda"})
    assert checkpoint.ran_on(tmp_path, None, went_on=True) == ["cpu"] and [p.name for p in tmp_path.iterdir()] == ["run.json"]
    for damaged in (b'{"device": "c', b"\xff\xfe\x00"):
        (tmp_path / "run.json").write_bytes(damaged)
        with pytest.raises(checkpoint.CheckpointError, match=r"run.json: expected JSON, got"):
            checkpoint.ran_on(tmp_path, None, went_on=True)
        assert run_folder.facts_of(tmp_path) is None
    (tmp_path / "run.json").write_text("[1]")
    assert run_folder.facts_of(tmp_path) is None


def test_no_row_is_lost_where_an_epoch_ends(tmp_path, whole, monkeypatch):
    """Broken off in the evaluation, when a checkpoint was due at the epoch's last step."""
    options = (*MASKED, "--save-every", "1", "--out", str(tmp_path))
    calls = []

    def breaking(*args):
        calls.append(args)
        if len(calls) == 2:
            raise Crash
        return honest(*args)

    honest = program.common.evaluate
    monkeypatch.setattr(program.common, "evaluate", breaking)
    with pytest.raises(Crash):
        program.main([*options])
    assert program.main([*options]) == 0
    assert_same_end(tmp_path, whole)


def kill_and_go_on(out: Path, kills: int) -> int:
    """Start the run again and again, kill -9 each time at a random moment, then let it end; how many of the kills hit a run."""
    chance, hits = random.Random(), 0
    command = [sys.executable, str(ROOT / "examples" / "thesis" / "train.py"), *MASKED, "--out", str(out)]
    for _ in range(kills):
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        before = (out / "run.json").stat().st_mtime_ns if (out / "run.json").exists() else 0
        while process.poll() is None and not ((out / "run.json").exists() and (out / "run.json").stat().st_mtime_ns > before):
            time.sleep(0.01)  # until it trains
        time.sleep(chance.uniform(0, 0.6))
        process.send_signal(signal.SIGKILL)
        hits += process.wait() == -signal.SIGKILL
    subprocess.run(command, env=ENVIRONMENT, check=True, stdout=subprocess.DEVNULL)
    return hits


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, 10])
def test_killed_at_random_moments(kills, tmp_path, whole):
    assert kill_and_go_on(tmp_path / "killed", kills) >= kills // 2
    assert_same_end(tmp_path / "killed", whole)


def test_an_ended_run_is_left_alone(whole, capsys):
    before = state(whole)
    assert program.main([*MASKED, "--out", str(whole)]) == 0
    assert same(state(whole), before) and "going on after step" in capsys.readouterr().out


def test_fresh_and_killed_at_once(tmp_path, whole, monkeypatch):
    """Nothing of the run before is gone on with: its log would be lost."""
    out = shutil.copytree(whole, tmp_path / "out")
    (out / "test.json").write_text("{}")
    monkeypatch.setattr(program.Run, "epoch", lambda *args: (_ for _ in ()).throw(Crash))
    with pytest.raises(Crash):
        program.main([*MASKED, "--fresh", "--out", str(out)])
    monkeypatch.undo()
    assert {p.name for p in out.iterdir()} == {"log.csv", "active_blocks.csv", "run.json", "lock"}
    assert program.main([*MASKED, "--out", str(out)]) == 0
    assert_same_end(out, whole)


def test_a_log_that_lacks_epochs(tmp_path, whole, capsys):
    out = shutil.copytree(whole, tmp_path / "out")
    lines = (out / "log.csv").read_text().splitlines(keepends=True)
    for text, missing in (("", "1, 2, 3"), ("".join(lines[:2] + lines[3:]), "2"), ("".join(lines)[:-20], "3")):
        (out / "log.csv").write_text(text)
        assert program.main([*MASKED, "--out", str(out)]) == 2
        said = f"expected a row for each of the 3 epochs that the checkpoint has behind it, got none of {missing}.\n  fix: bring the file back, or --fresh"
        assert f"{out / 'log.csv'}: {said}" in capsys.readouterr().err
        assert (out / "log.csv").read_text() == text
    assert program.main([*MASKED, "--fresh", "--out", str(out)]) == 0
    assert_same_end(out, whole)


def test_cut_off_checkpoint(tmp_path, whole, capsys):
    """The last whole one is taken; where none is whole, nothing is trained from scratch in silence."""
    out = tmp_path / "cut"
    assert program.main([*MASKED, "--stop", "2", "--out", str(out)]) == 0
    last, before = out / checkpoint.LAST, out / checkpoint.BEFORE
    last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
    assert program.main([*MASKED, "--out", str(out)]) == 0
    assert "cut off or damaged" in capsys.readouterr().err
    assert_same_end(out, whole)
    last.write_bytes(b"")
    before.write_bytes(before.read_bytes()[:1000])
    assert program.main([*MASKED, "--out", str(out)]) == 2
    assert "no whole checkpoint" in capsys.readouterr().err


def test_a_kill_while_a_cut_off_checkpoint_is_replaced(tmp_path, monkeypatch):
    """The run went on from the one before it, which stays until the new one is in its place."""
    for step in (1, 2):
        checkpoint.save(tmp_path, {**dict.fromkeys(checkpoint.PARTS), "progress": step})
    last, before = tmp_path / checkpoint.LAST, tmp_path / checkpoint.BEFORE
    last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
    replace = os.replace

    def killed(old, new):
        if new == last:
            raise KeyboardInterrupt
        replace(old, new)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, {**dict.fromkeys(checkpoint.PARTS), "progress": 3})
    assert checkpoint.load(tmp_path)["progress"] == torch.load(before)["progress"] == 1


def test_other_settings_are_refused(tmp_path, whole, capsys):
    before = state(whole)
    assert program.main([*MASKED, "--lr", "0.5", "--out", str(whole)]) == 2
    assert "lr: 0.5 now, 0.01 in the checkpoint" in capsys.readouterr().err
    assert same(state(whole), before)


def test_a_checkpoint_without_its_masks(tmp_path, whole, capsys):
    torch.save({k: v for k, v in state(whole).items() if k != "masks"}, tmp_path / checkpoint.LAST)
    assert program.main([*MASKED, "--out", str(tmp_path)]) == 2
    assert "cached masks and the guard are lost" in capsys.readouterr().err


def test_checkpoint_goes_into_a_dense_model(whole):
    saved = state(whole)
    run = program.Run(program.arguments([*SHORT, "--dense"]))
    run.model.load_state_dict(saved["model"], strict=True)
    assert not any(row["masked"] for row in fxmask.explain(run.model).rows)


def test_literal_mode_is_options_alone():
    args = program.arguments([*SHORT, "--criterion", "spectral", "--backward", "unmasked", "--guard", "free"])
    run = program.Run(args)
    assert set(run.guard.policies.values()) == {"free"} and type(run.optimiser) is torch.optim.Adam
    assert run.optimiser.param_groups[0]["weight_decay"] == 1e-4  # coupled: Adam, not AdamW
    row = next(row for row in fxmask.explain(run.model).rows if row["masked"])
    assert row["backward"] == "unmasked" and run.model.blocks[0].fc1._fxmask_config.criterion == "spectral"


def test_recipes_are_the_tables():
    assert (CIFAR10.epochs, CIFAR10.batch, CIFAR10.opt, CIFAR10.lr, CIFAR10.weight_decay) == (200, 128, "adam", 0.01, 1e-4)
    assert (CIFAR10.warmup, CIFAR10.warmup_lr, CIFAR10.min_lr, CIFAR10.cooldown) == (5, 1e-3, 1e-5, 10)
    assert (CIFAR10.mixup, CIFAR10.cutmix, CIFAR10.mix_prob, CIFAR10.mix_switch, CIFAR10.smoothing) == (0.2, 0.8, 1.0, 0.5, 0.1)
    assert (IMAGENET.epochs, IMAGENET.batch, IMAGENET.opt, IMAGENET.lr, IMAGENET.weight_decay) == (300, 64, "adamw", 1e-3, 0.005)
    assert (IMAGENET.warmup, IMAGENET.warmup_lr, IMAGENET.mixup, IMAGENET.cutmix) == (5, 1e-5, 0.8, 1.0)


def test_muon_for_matrices_and_adamw_for_the_rest():
    """The parts' own steps to the bit; a head of ten classes is no matrix."""
    shapes, recipe = ((48, 64), (10, 64), (64,)), Recipe(opt="muon", lr=0.02, weight_decay=0.1)
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    optim = optimiser(ours, recipe)
    parts = [torch.optim.Muon(theirs[:1], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"), torch.optim.AdamW(theirs[1:], lr=0.02, weight_decay=0.1)]
    for step in range(4):
        if step == 2:  # a fresh one, from what the first has saved
            saved, optim = optim.state_dict(), optimiser(ours, recipe)
            optim.load_state_dict(saved)
            pickle.loads(pickle.dumps(optim)).step()  # its own weights
        for a, b in zip(ours, theirs, strict=True):
            a.grad = b.grad = torch.randn_like(a)
        for part in (optim, *parts):
            part.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)) and [len(g["params"]) for g in optim.param_groups] == [1, 2]


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_muon_at_a_rate_that_is_a_tensor(decay):
    """The step that torch's takes at that number, to rounding; the rate stays the tensor that a graph reads, moved in place between steps."""
    torch.manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.ones(48, 64)), nn.Parameter(torch.ones(64))] for _ in range(2))
    rate = torch.tensor(0.02)
    optim, plain = MuonAdamW(ours, lr=rate, weight_decay=decay), MuonAdamW(theirs, lr=0.02, weight_decay=decay)
    for number in (0.02, 0.005, 0.0):
        rate.fill_(number)
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for group in plain.param_groups:
            group["lr"] = number
        optim.step()
        plain.step()
        assert all(group["lr"] is rate for group in optim.param_groups) and float(rate) == pytest.approx(number)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
        assert (a - 1).abs().max() > 0.01
        assert torch.equal(optim.state[a]["exp_avg" if a.ndim == 1 else "momentum_buffer"], plain.state[b]["exp_avg" if b.ndim == 1 else "momentum_buffer"])


def test_learning_rate():
    """Warm-up from warmup_lr, lr where it ends, the middle of the cosine half-way, min_lr through the cool-down."""
    recipe, steps = Recipe(epochs=30, warmup=5, cooldown=5, lr=0.01, warmup_lr=1e-3, min_lr=1e-5), 4
    optim = optimiser([nn.Parameter(torch.ones(1))], recipe)
    plan, rates = scheduler(optim, recipe, steps), []
    for _ in range(30 * steps):
        rates.append(optim.param_groups[0]["lr"])
        optim.step()
        plan.step()
    assert rates[0] == pytest.approx(1e-3) and rates[20] == pytest.approx(0.01) and rates[60] == pytest.approx((0.01 + 1e-5) / 2)
    assert rates[100:] == pytest.approx([1e-5] * 20) and rates[10] == pytest.approx(0.0055)
    assert rates[:21] == sorted(rates[:21]) and rates[20:101] == sorted(rates[20:101], reverse=True)


def test_mixing():
    """Half of the batches by each, labels a distribution; a batch's pixels are a blend (MixUp) or a patchwork (CutMix)."""
    torch.manual_seed(0)
    mixing, labels = Mixing(Recipe(), 10), torch.arange(8) % 10
    images, cut = torch.arange(8.0).view(8, 1, 1, 1).expand(8, 3, 8, 8) * 2**0.5, 0
    for _ in range(200):
        mixed, targets = mixing(images, labels)
        assert targets.shape == (8, 10) and torch.allclose(targets.sum(1), torch.ones(8))
        cut += all(bool(torch.isin(image, images).all()) for image in mixed)
    assert 70 < cut < 130
    assert Mixing(Recipe(mix_prob=0), 10)(images, labels)[1] is labels
    assert sum(Mixing(Recipe(mix_prob=0.3), 10)(images, labels)[1] is labels for _ in range(100)) > 50
    for options, all_cut in ((dict(mix_switch=1.0), True), (dict(mix_switch=0.0), False), (dict(mixup=0.0), True), (dict(cutmix=0.0), False)):
        mixing = Mixing(Recipe(**{"mixup": 1.0, "cutmix": 1.0} | options), 10)
        for mixed, targets in (mixing(images, labels) for _ in range(10)):
            assert targets is not labels and bool(torch.isin(mixed, images).all()) == all_cut


def test_wrong_use(tmp_path, capsys):
    for options in (("--data", "folder"), ("--config", "ResMLP2 @ XPatch = masked 2 (16, 16);")):
        assert program.main([*SHORT, *options, "--out", str(tmp_path / "x")]) == 2
        assert capsys.readouterr().err.startswith("thesis/train.py: ")
    assert not (tmp_path / "x").exists()
    with pytest.raises(SystemExit):
        program.main(["--dense", "--config", "ResMLP5"])
    with pytest.raises(SystemExit):
        program.main(["--opt", "lion"])
    assert re.search("argument --opt: invalid choice: 'lion' .*adam.*adamw.*muon", capsys.readouterr().err)


GRAPHS = (*SHORT, "--graphs")


RAMPED = (*GRAPHS, "--schedule", "cubic:20", "--refresh", "2", "--criterion", "taylor", "--average", "0.9")


MUON = (*RAMPED, "--opt", "muon", "--weight-decay", "0.1")


@pytest.mark.parametrize("options", [RAMPED, *(pytest.param(o, marks=pytest.mark.slow) for o in (MUON, (*GRAPHS, "--dense")))], ids=["masked", "muon", "dense"])
def test_graphed_steps(options, tmp_path, monkeypatch):
    """As CUDA graphs (a stand-in's) a run ends with the same bits as step by step, resumed in the middle, too."""
    alone, graphed = tmp_path / "alone", tmp_path / "graphed"
    assert program.main([*options, "--out", str(alone)]) == 0
    replays = []

    class Counting(tape.Tape):
        def replay(self):
            replays.append(self)
            super().replay()

    monkeypatch.setattr("fxmask.cuda_graphs.graphed_step.recorder", lambda device: Counting)
    monkeypatch.setattr("fxmask.passes.state.tensors.capturing", lambda t: tape.recording[0])
    for stop in ("2", "3"):
        assert program.main([*options, "--out", str(graphed), "--stop", stop]) == 0
    assert_same_end(graphed, alone)
    assert len(replays) > 40


@pytest.mark.slow
@pytest.mark.parametrize("options", [RAMPED, MUON, (*GRAPHS, "--dense")], ids=["masked", "muon", "dense"])
def test_steps_of_graphs_end_near_the_usual_ones(options, tmp_path):
    """The optimiser that a graph takes has its rate as a tensor."""
    graphed, usual = tmp_path / "graphed", tmp_path / "usual"
    assert program.main([*options, "--out", str(graphed)]) == 0
    assert program.main([*(o for o in options if o != "--graphs"), "--out", str(usual)]) == 0
    losses = [[float(row["train_loss"]) for row in rows(out)] for out in (graphed, usual)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02) and losses[0][-1] < losses[0][0]
