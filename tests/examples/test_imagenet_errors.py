"""What the ImageNet path says when a folder, an argument or a checkpoint is not as it must be: expected, got, where, how to fix."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch
from data import DataMissing
from distributed.imagenet_runs import OPTIONS, make_folder, state
from saved_states import same
from thesis import checkpoint
from thesis import imagenet as program
from thesis.imagenet_data import open_images
from thesis.imagenet_run import Run
from thesis.ranks import RankError, Ranks

import fxmask

CONFIG = "ResMLP12 @ XPatch = masked 0.8 (32, 32); XChannel = masked 0.8 (32, 32);"


@pytest.fixture(scope="module")
def root(torchvision, tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("imagenet") / "data")


@pytest.fixture(scope="module")
def options(root):
    return [*OPTIONS, "--stop", "1", "--root", str(root), "--out"]


def told(capsys, argv) -> str:
    """What a run that ends with status 2 says."""
    assert program.main([str(word) for word in argv]) == 2
    return capsys.readouterr().err


def test_an_image_that_is_none(root, tmp_path):
    shutil.copytree(root, tmp_path / "data")
    (tmp_path / "data" / "train" / "class2" / "7.png").write_bytes(b"no image")
    images = open_images(tmp_path / "data", Ranks(0, 1, torch.device("cpu"), grouped=False), image=32, batch=8, seed=0, workers=0)
    with pytest.raises(DataMissing, match=r"class2/7.png: expected an image, got UnidentifiedImageError"):
        list(images.train(1, 0))


@pytest.mark.parametrize(("error", "words"), [(PermissionError(13, "Permission denied"), "Permission denied"), (TimeoutError(), "TimeoutError")])
def test_what_one_rank_cannot_do_is_raised_on_all(error, words, monkeypatch):
    def work():
        raise error

    monkeypatch.setattr("torch.distributed.all_gather_object", lambda texts, mine: texts.__setitem__(slice(None), ["", mine]))
    with pytest.raises(RankError, match=rf"{words}\n  where: rank 1 of 2"):
        Ranks(1, 2, torch.device("cpu"), grouped=True).together(work)


def test_wrong_folders(root, options, tmp_path, capsys):
    start = [*OPTIONS, "--out", tmp_path / "out", "--root"]
    assert "expected folders train and val, each with one folder a class, got no train and no val" in told(capsys, [*start, tmp_path])
    (tmp_path / "train").mkdir()
    assert "got no val" in told(capsys, [*start, tmp_path])
    (tmp_path / "val").mkdir()
    assert "expected one folder a class with images in it" in told(capsys, [*start, tmp_path])
    shutil.copytree(root, tmp_path / "data")
    (tmp_path / "data" / "val" / "class3").rename(tmp_path / "data" / "val" / "dog")
    text = told(capsys, [*start, tmp_path / "data"])
    assert "the same classes in train and val, got 4 and 4; only in train: class3; only in val: dog" in text
    shutil.rmtree(tmp_path / "data" / "val" / "dog")
    assert "got 4 and 3; only in train: class3" in told(capsys, [*start, tmp_path / "data"])
    assert "expected at least one batch of 64 images, got 48" in told(capsys, [*options, tmp_path / "out", "--batch", "64"])
    assert not (tmp_path / "out").exists()


def test_wrong_arguments(root, options, tmp_path, capsys, monkeypatch):
    assert "MixUp and CutMix mix, got one" in told(capsys, [*options, tmp_path, "--batch", "1"])
    at = options.index("--block")
    named = [*options[:at], *options[at + 3 :], tmp_path, "--config"]
    assert "--depth: expected 12" in told(capsys, [*named, CONFIG])
    assert "--dense trains without masks" in told(capsys, [*named, "ResMLP2"])
    assert "multiple of patch" in told(capsys, [*options, tmp_path, "--patch", "7"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "got process 1 and 0 GPU(s).\n  fix: --device cpu." in told(capsys, [*options, tmp_path, "--device", "cuda"])
    monkeypatch.setitem(sys.modules, "timm", None)
    start = ["--root", root, "--out", tmp_path]
    assert "--timm resmlp_12_224: expected timm, got import of timm halted" in told(capsys, [*start, "--timm", "resmlp_12_224", "--batch", "8"])
    assert "--loader timm: expected timm, got import of timm halted" in told(capsys, [*start, "--loader", "timm"])
    args = program.arguments([*options, str(tmp_path)])
    with pytest.raises(fxmask.FxMaskError, match=r"a multiple of the 3 processes, who share it, got 8.\n  fix: --batch 6 or 9"):
        Run(args, Ranks(0, 3, torch.device("cpu"), False))
    for words in (["--dense", "--config", CONFIG], ["--timm", "resmlp_12_224", "--config", CONFIG], ["--opt", "sgd"]):
        with pytest.raises(SystemExit):
            program.main([*map(str, start), *words])


def test_wrong_checkpoints(options, tmp_path, capsys):
    """Nothing goes on with another recipe, other images, another number of processes, or from scratch in silence."""
    whole, tmp_path = tmp_path / "whole", tmp_path / "other"
    assert program.main([*options, str(whole)]) == 0
    tmp_path.mkdir()
    before = state(whole)
    assert "lr: 0.5 now, 0.001 in the checkpoint" in told(capsys, [*options, whole, "--lr", "0.5"])
    assert "seed: 1 now, 0 in the checkpoint" in told(capsys, [*options, whole, "--seed", "1"])
    assert same(state(whole), before)
    saved = torch.load(whole / checkpoint.LAST, weights_only=True)
    saved["progress"]["processes"] = 4
    torch.save(saved, tmp_path / checkpoint.LAST)
    text = told(capsys, [*options, tmp_path])
    assert "expected 4 process(es), as this run began with, got 1" in text and "torchrun --nproc-per-node 4" in text
    for name in (checkpoint.LAST, checkpoint.BEFORE):
        shutil.copy(whole / name, tmp_path / name)
    last = tmp_path / checkpoint.LAST
    last.write_bytes(last.read_bytes()[:3000])
    assert program.main([*options, str(tmp_path)]) == 0  # from the one before
    assert "cut off or damaged" in capsys.readouterr().err
    assert same(state(tmp_path), before)
    for name in (checkpoint.LAST, checkpoint.BEFORE):
        (tmp_path / name).write_bytes(b"")
    assert "no whole checkpoint" in told(capsys, [*options, tmp_path])


def test_two_runs_of_one_folder(options, tmp_path, capsys):
    holder = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); f.write('process 7 on host'); f.flush(); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", holder, tmp_path / "lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        text = told(capsys, [*options, tmp_path])
        assert "got one that is in use by process 7 on host.\n  fix: wait for it to end, or name another folder" in text
        other.kill()
    assert program.main([*options, str(tmp_path)]) == 0
