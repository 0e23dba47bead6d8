"""The ImageNet path on a small ImageFolder, in one process: table 5.2, data order, exact resume, bf16."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import image_folder
import plots
import pytest
import torch
import torch.distributed as dist
import train as common
from distributed.imagenet_runs import OPTIONS, ROOT, TEST_IMAGES, broken_off, make_folder, rows, state
from image_folder import Seeded
from saved_states import same
from thesis import checkpoint
from thesis import imagenet as program
from thesis.imagenet_data import open_images, torchvision_sets
from thesis.imagenet_model import build
from thesis.imagenet_run import Run
from thesis.ranks import Ranks
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import fxmask

CONFIG = "ResMLP12 @ XPatch = masked 0.8 (32, 32); XChannel = masked 0.8 (32, 32);"
ALONE = Ranks(0, 1, torch.device("cpu"), grouped=False)


@pytest.fixture(scope="module")
def root(torchvision, tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("imagenet") / "data")


@pytest.fixture(scope="module")
def options(root):
    return [*OPTIONS, "--root", str(root), "--out"]


@pytest.fixture(scope="module")
def whole(options, tmp_path_factory):
    """A run that nobody disturbed."""
    out = tmp_path_factory.mktemp("whole")
    assert program.main([*options, str(out)]) == 0
    return out


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    """Half a second each; `whole`, which is made before, has its own."""
    monkeypatch.setattr(program, "plot_run", lambda out: [])


def assert_same_end(out: Path, other: Path) -> None:
    assert same(state(out), state(other))
    assert rows(out) == rows(other) and len(rows(out)) == 4


def test_table_5_2():
    args = program.arguments(["--root", "x", "--config", CONFIG])
    assert (args.epochs, args.stop, args.batch, args.opt, args.lr, args.weight_decay) == (300, 90, 64, "adamw", 1e-3, 0.005)
    assert (args.min_lr, args.warmup, args.warmup_lr, args.cooldown, args.masks_from) == (1e-5, 5, 1e-5, 10, 0)
    assert (args.mixup, args.cutmix, args.mix_prob, args.mix_switch, args.smoothing, args.image) == (0.8, 1.0, 1.0, 0.5, 0.1, 224)
    model = build(args, 1000, 20_018, torch.device("cpu"))
    assert sum(p.numel() for p in model.parameters()) == 15_607_912
    assert (model.config.patch, model.config.tokens, model.config.dim, model.config.depth, model.config.expansion) == (14, 256, 384, 12, 4)
    table = [row for row in fxmask.explain(model).rows if row["masked"]]
    assert len(table) == 36 and {(row["block"], row["target_ratio"]) for row in table} == {("32x32", 0.8)}
    assert min(row["achieved_ratio"] for row in table) > 0.79
    assert not any(row["masked"] for row in fxmask.explain(build(program.arguments(["--root", "x", "--dense"]), 10, 1, ALONE.device)).rows)


def test_a_run_learns(whole):
    log = plots.read_csv(whole / "log.csv")
    losses = [float(row["train_loss"]) for row in log]
    assert losses == sorted(losses, reverse=True) and float(log[-1]["top1"]) > 50 and {row["test_images"] for row in log} == {str(TEST_IMAGES)}
    assert float(log[-1]["ratio_achieved"]) > 0.7 and sum(int(row["flips"]) for row in log) > 0
    assert (whole / "accuracy.png").exists()
    told = json.loads((whole / "run.json").read_text())
    assert (told["classes"], told["train_images"], told["steps_per_epoch"], told["batch_per_process"]) == (4, 48, 6, 8)


def test_what_a_row_is_made_of(options, tmp_path, monkeypatch):
    """Sums over images, which means are made of; accuracies as the other examples have them; seconds of before a stop; random numbers of step and rank."""
    args = program.arguments([*options, str(tmp_path), "--mix-prob", "0", "--smoothing", "0"])
    run, other, seeds = Run(args, ALONE), Run(args, ALONE), []
    found, known = run.evaluate(), common.evaluate(run.model, run.images.test())
    assert {c: found[c] for c in known} == pytest.approx(known, rel=1e-5) and found["top1"] < found["top5"] == 100  # of four classes
    images, labels = next(iter(run.images.train(1, 0)))
    with torch.no_grad():
        loss, right = F.cross_entropy(logits := run.model(images), labels), (logits.argmax(1) == labels).sum()
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    run.train_step(images, labels)
    assert run.sums.tolist() == pytest.approx([8 * float(loss), int(right), 8], rel=1e-5)
    run.ranks = Ranks(1, 2, ALONE.device, grouped=False)
    run.train_step(images, labels)
    assert seeds == [0, 2 * 1 + 1]
    run.ranks, run.seconds = ALONE, 5.0
    run.save()
    assert other.resume() and (other.step, other.seconds, other.sums.tolist()) == (2, 5.0, run.sums.tolist())


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_is_exact(workers, options, whole, tmp_path):
    """Broken off behind checkpoints in the middle of epochs and in the middle of a test; whatever the workers."""
    broken = [*options, str(tmp_path), "--workers", str(workers)]
    for calls in (6, 9) if workers else (6, 9, 4, 6):
        broken_off(broken, calls)
    assert program.main(broken) == 0
    assert_same_end(tmp_path, whole)


@pytest.mark.parametrize("before", [True, False])
def test_broken_off_beside_the_row(before, options, whole, tmp_path, monkeypatch):
    """Between a checkpoint at an epoch's last step and the row, or between the row and its checkpoint: no row is lost, none written twice."""

    class Crash(Exception):
        pass

    def breaking(self, *args, honest=Run.report if before else Run.save):
        if self.step == 12 and self.epochs_done == (1 if before else 2):
            raise Crash
        return honest(self, *args)

    monkeypatch.setattr(Run, "report" if before else "save", breaking)
    with pytest.raises(Crash):
        program.main([*options, str(tmp_path)])
    monkeypatch.undo()
    assert state(tmp_path)["progress"]["step"] == 12 and len(rows(tmp_path)) == (2 if before else 3)
    assert program.main([*options, str(tmp_path)]) == 0
    assert_same_end(tmp_path, whole)


def test_fresh_and_killed_at_once(options, whole, tmp_path, monkeypatch, capsys):
    """Nothing of the run before is gone on with: its log would be lost, and is missed where it is."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    (tmp_path / "log.csv").write_text((whole / "log.csv").read_text().partition("\n")[0] + "\n")
    assert program.main([*options, str(tmp_path)]) == 2
    assert "expected a row for each of the 3 epochs that the checkpoint has behind it, got none of 1, 2, 3" in capsys.readouterr().err
    monkeypatch.setattr(Run, "epoch", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        program.main([*options, str(tmp_path), "--fresh"])
    monkeypatch.undo()
    assert program.main([*options, str(tmp_path)]) == 0
    assert_same_end(tmp_path, whole)


@pytest.mark.slow
def test_killed(options, whole, tmp_path):
    """kill -9 in the middle of an epoch, with workers that outlive it by a moment and must not hold the folder."""
    command = [sys.executable, str(ROOT / "examples" / "thesis" / "imagenet.py"), *options, str(tmp_path), "--workers", "1", "--threads", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (tmp_path / checkpoint.LAST).exists():
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert 0 < state(tmp_path)["progress"]["step"] < 18
    assert program.main([*options, str(tmp_path)]) == 0
    assert_same_end(tmp_path, whole)


def test_a_process_group_of_one(options, whole, tmp_path, monkeypatch):
    """Under DDP, with what it gathers and adds up: the bits of a run without."""
    wrapped = []
    monkeypatch.setattr("thesis.ranks.DistributedDataParallel", lambda *args, **how: wrapped.append(DistributedDataParallel(*args, **how)) or wrapped[-1])
    monkeypatch.setenv("WORLD_SIZE", "1")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        broken_off([*options, str(tmp_path)], 6)
        assert program.main([*options, str(tmp_path)]) == 0
    finally:
        dist.destroy_process_group()
    assert_same_end(tmp_path, whole)
    assert len(wrapped) == 2


def test_bf16(options, whole, tmp_path):
    """Another arithmetic, the same path: near the float32 run and not equal to it, weights in float32, exact resume."""
    outs = [tmp_path / "one", tmp_path / "two"]
    broken_off([*options, str(outs[1]), "--amp", "bf16"], 9)
    for out in outs:
        assert program.main([*options, str(out), "--amp", "bf16"]) == 0
    assert_same_end(*outs)
    ours, theirs = (plots.read_csv(out / "log.csv")[-1] for out in (outs[0], whole))
    assert ours["train_loss"] != theirs["train_loss"] and float(ours["train_loss"]) == pytest.approx(float(theirs["train_loss"]), rel=0.02)
    assert {t.dtype for t in state(outs[0])["model"].values()} == {torch.float32}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_images_are_shared_out(root, world):
    """A step's images are the same for any number of ranks; from a later step on an epoch is its tail; a test image is on one rank alone."""
    alone = open_images(root, ALONE, image=32, batch=12, seed=3, workers=0)
    parts = [open_images(root, Ranks(r, world, torch.device("cpu"), False), image=32, batch=12, seed=3, workers=0) for r in range(world)]
    assert {p.steps for p in parts} == {4} and {len(list(p.train(1, 4))) for p in parts} == {0}
    epoch, shares = list(alone.train(2, 0)), [list(p.train(2, 0)) for p in parts]
    for step in range(4):
        images = torch.cat([share[step][0] for share in shares])
        order = [rank + world * i for rank in range(world) for i in range(12 // world)]
        assert torch.equal(images, epoch[step][0][order])
    tail = list(parts[-1].train(2, 3))
    assert len(tail) == 1 and same(tail[0], shares[-1][3]) and not same(tail, list(parts[-1].train(1, 3)))
    found = torch.cat([images for p in parts for images, _ in p.test()])
    assert len(found) == TEST_IMAGES == len({image.numpy().tobytes() for image in found})


def test_an_incomplete_batch_is_left_out(root):
    """And nothing is shown twice to fill it, nor to give five ranks equal shares of 48 images."""
    parts = [open_images(root, Ranks(r, 5, torch.device("cpu"), False), image=32, batch=10, seed=0, workers=0) for r in range(5)]
    assert [p.steps for p in parts] == [len(list(p.train(1, 0))) for p in parts] == [4] * 5


def test_each_epoch_has_its_own_crops(root):
    """And the seed decides them, beside the order."""
    seen = [Seeded(torchvision_sets(root, 32)[0], seed) for seed in (0, 0, 1)]
    first, again, other = (images[1, 5][0] for images in seen)
    assert torch.equal(first, again) and not torch.equal(first, other) and not torch.equal(first, seen[0][2, 5][0])


def test_skipped_images_are_not_read(root, monkeypatch):
    read, honest = [], image_folder.decode
    monkeypatch.setattr(image_folder, "decode", lambda path: read.append(path) or honest(path))
    images = open_images(root, ALONE, image=32, batch=8, seed=0, workers=0)
    assert len(list(images.train(1, 4))) == 2 and len(read) == 16
