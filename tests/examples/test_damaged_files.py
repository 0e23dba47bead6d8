"""Files that are damaged, or another thing than they are taken for: one line that names them, and 2."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import data
import pytest
import torch
from benchmarks import train_step
from danhofer import learned, learning, networks, small
from PIL import Image
from sparsedrop import table_1, tasks
from thesis import checkpoint
from thesis import train as program
from zoo import results
from zoo import run as zoo
from zoo.catalogue import Entry

from fxmask.errors import ConfigError

DENSE = ["--data", "digits", "--epochs", "1", "--warmup", "0", "--cooldown", "0", "--mix-prob", "0", "--masks-from", "0", "--no-figures"]


ODD = (b"s", b"hh", b"X\1\0\0\0\xff")  # IndexError, KeyError and UnicodeDecodeError of an unpickler


@pytest.fixture
def folder(tmp_path):
    """Six images of two classes, for training and for testing; one of them is none."""
    for part in ("train", "val"):
        for name in ("a", "b"):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(3):
                Image.new("RGB", (8, 8), (80 * i, 9, 9)).save(tmp_path / part / name / f"{i}.png")
        (tmp_path / part / "b" / "2.png").write_bytes(b"no image")
    return tmp_path


def test_an_archive_that_was_not_unpacked_whole(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"half")
    with pytest.raises(data.DataMissing, match=r"cifar-10-batches-py: expected CIFAR-10's files, got others, or not all\.\n  fix: unpack the archive anew\.$"):
        data.load("cifar10", tmp_path, batch=8)


def test_a_worker_s_error_is_told_without_its_traceback(folder):
    images = data.load("folder", folder, batch=2, image=96, workers=1)
    with pytest.raises(data.DataMissing) as caught:
        list(images.train(1))
    assert str(caught.value).startswith(f"{folder}/train/b/2.png: expected an image, got") and "Traceback" not in str(caught.value)


def test_images_of_dropout(folder, tmp_path, capsys):
    args = ["--size", "small", "--tasks", "cifar10", "--root", str(folder), "--csv", str(tmp_path / "t.csv")]
    assert table_1.main(args) == 2 and "train/b/2.png: expected an image, got" in capsys.readouterr().err
    (folder / "train" / "b" / "2.png").unlink()
    x, y, classes = tasks.images("cifar10", folder)
    assert x.shape == (5, 3, 32, 32) and y.tolist() == [0, 0, 0, 1, 1] and classes == 2
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"):
            (raw / f"{part}-{kind}-ubyte").write_bytes(b"\x89PNG" * 9)
    assert table_1.main([*args, "--tasks", "mnist"]) == 2 and "expected torchvision's files there, got: " in capsys.readouterr().err


def test_images_of_a_network_of_torchvision(folder, tmp_path):
    torch.save(data.torchvision().models.resnet18().state_dict(), tmp_path / "weights.pt")
    task = networks.pretrained("resnet18", tmp_path / "weights.pt", folder, seed=0, batch=2, workers=0, limit=None, device="cpu")
    with pytest.raises(data.DataMissing, match=r"val/b/2\.png: expected an image, got"):
        list(task.test())
    for path in folder.glob("val/b/*"):
        path.unlink()
    with pytest.raises(data.DataMissing, match="expected one folder a class with images in it, got"):
        task.test()


def test_the_state_of_another_program(tmp_path, monkeypatch):
    path, run = tmp_path / "run.pt", {"settings": {}, "logits": {}}
    for state in (b"no state", *ODD, [1], {"a": 1}):
        path.write_bytes(state) if isinstance(state, bytes) else torch.save(state, path)
        with pytest.raises(data.DataMissing, match=r"--state .*run\.pt: expected a run's file, got"):
            learning._load(path, run, None, None)
    with pytest.raises(data.DataMissing, match=r"--state .*: expected a run's file, got IsADirectoryError"):
        learning._load(tmp_path, run, None, None)
    monkeypatch.setattr(learned, "masked", lambda *_, **__: pytest.fail("something is searched"))
    with pytest.raises(data.DataMissing, match=r"--state .*run\.pt: expected a run's file"):
        learned.forms(small.trained("digits", 0, epochs=1), "conv", 0, learning.SOURCE, path)


@pytest.mark.parametrize("state", ODD)
def test_files_that_are_no_checkpoint(state, tmp_path):
    path = tmp_path / checkpoint.LAST
    path.write_bytes(state)
    with pytest.raises(checkpoint.CheckpointError, match="no whole checkpoint in"):
        checkpoint.load(tmp_path)
    with pytest.raises(data.DataMissing, match=r"--checkpoint .*: expected the state_dict of resnet18, got \w+Error: "):
        networks.pretrained("resnet18", path, tmp_path, seed=0, batch=2, workers=0, limit=None, device="cpu")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that has no room is Linux's")
def test_a_disk_that_is_full(tmp_path, capsys):
    """No traceback of torch's archive, and nothing is left that takes room."""
    new = tmp_path / "checkpoint.new.pt"
    new.symlink_to("/dev/full")
    assert program.main([*DENSE, "--dense", "--out", str(tmp_path)]) == 2
    assert f"{new}: cannot be written: No space left on device.\n  fix: make room; the same command goes on" in capsys.readouterr().err
    assert not new.is_symlink() and program.main([*DENSE, "--dense", "--out", str(tmp_path)]) == 0 and (tmp_path / checkpoint.LAST).is_file()


class Unsaved:
    """What does not let itself be pickled, behind an error of a file that was seen to."""

    def __reduce__(self):
        try:
            raise OSError(errno.ENOENT, "not there")
        except OSError:
            raise RuntimeError("its own reason") from None


def test_other_errors_of_a_checkpoint_are_not_of_its_room(tmp_path):
    """Whatever torch lets through: a folder that is gone, one that may not be written to, a state that is not pickled."""
    path = tmp_path / "gone" / "a.pt"
    with pytest.raises(FileNotFoundError):
        checkpoint.write(path, {})
    path.parent.mkdir()
    with pytest.raises(RuntimeError, match="its own reason"):
        checkpoint.write(path, {"a": Unsaved()})
    with pytest.raises(AttributeError, match="local object"):
        checkpoint.write(path, {"a": lambda: 0})


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A dense run that has ended."""
    out = tmp_path_factory.mktemp("teacher")
    assert program.main([*DENSE, "--dense", "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize("facts", ["{", "[1]", "{}", '{"steps": "many"}', "\udcff"])
def test_a_teacher_whose_facts_are_damaged(facts, teacher, tmp_path, capsys, monkeypatch):
    before = (teacher / "run.json").read_bytes()
    (teacher / "run.json").write_text(facts, errors="surrogateescape")
    try:
        assert program.main([*DENSE, "--teacher", str(teacher), "--out", str(tmp_path / "pupil")]) == 2
    finally:
        (teacher / "run.json").write_bytes(before)
    said = capsys.readouterr().err
    assert ("run.json: expected JSON" in said or "steps" in said) and not (tmp_path / "pupil").exists()


def test_a_teacher_s_checkpoint_without_its_steps(tmp_path, capsys):
    settings = {"dense": True, "data": "digits", "holdout": 0}
    torch.save({**{part: {} for part in checkpoint.PARTS}, "settings": settings}, tmp_path / checkpoint.LAST)
    (tmp_path / "run.json").write_text(json.dumps({"steps": 3}))
    assert program.main([*DENSE, "--teacher", str(tmp_path), "--out", str(tmp_path / "pupil")]) == 2
    assert "got None of an unknown number of steps" in capsys.readouterr().err


def test_the_log_of_another_program(tmp_path):
    (tmp_path / "log.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match=r"log\.csv: expected a csv with the columns epoch, got none of epoch"):
        checkpoint.has_epochs(tmp_path / "log.csv", 1)


def test_facts_of_a_run_that_goes_on(tmp_path):
    for text in ("[1]", "{"):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(checkpoint.CheckpointError, match=r"run\.json: expected JSON"):
            checkpoint.ran_on(tmp_path, None, went_on=True)
    (tmp_path / "run.json").write_text("{}")
    assert checkpoint.ran_on(tmp_path, "cpu", went_on=True) == ["cpu"]


def test_tables_that_are_none(tmp_path, capsys):
    (tmp_path / "t.csv").write_bytes(bytes(range(128, 256)))
    assert train_step.main(["--plot", str(tmp_path / "t.csv")]) == 2 and "t.csv: expected a csv, got UnicodeDecodeError" in capsys.readouterr().err
    assert zoo.main(["--report", "--csv", str(tmp_path / "t.csv" / "zoo.csv")]) == 2 and "zoo.csv" in capsys.readouterr().err


def test_a_page_of_no_rows_or_where_none_can_be(tmp_path, capsys):
    csv, page = tmp_path / "zoo.csv", tmp_path / "zoo.md"
    assert zoo.main(["--report", "--csv", str(csv)]) == 2 and "zoo.csv: expected rows to report, got none" in capsys.readouterr().err
    assert not page.exists()
    page.mkdir()
    results.append(csv, results.blank(Entry("own", "a", "a:b")))
    assert zoo.main(["--report", "--csv", str(csv)]) == 2 and "zoo.md" in capsys.readouterr().err
