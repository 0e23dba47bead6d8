"""The training loop: it learns, repeats itself exactly, and leaves the files that it promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import plots
import pytest
import torch
import train
from thesis import lock
from thesis import train as thesis_train
from torch import nn
from tracking import COLUMNS, MaskTracker

import fxmask

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
THESIS = "ResMLP2 @ XPatch = masked 0.5 (16, 16); XChannel1 = masked 0.75 (16, 16); XChannel2 = sparse 0.25 (16, 16);"
MASKED = ("--epochs", "4", "--config", THESIS, "--lr", "0.01", "--seed", "3")


def run(out: Path, *options: str) -> list[dict[str, str]]:
    """Train in this process; the rows of log.csv."""
    assert train.main(["--out", str(out), *options]) == 0
    return plots.read_csv(out / "log.csv")


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    """A masked run of four epochs: its folder and its rows."""
    out = tmp_path_factory.mktemp("masked")
    return out, run(out, *MASKED)


def test_learns(masked):
    rows = masked[1]
    assert float(rows[-1]["top1"]) > 60  # guessing: 10
    assert float(rows[-1]["top5"]) > float(rows[-1]["top1"])
    assert float(rows[-1]["train_loss"]) < 0.5 * float(rows[0]["train_loss"])


@pytest.mark.slow
def test_same_numbers_twice(masked, tmp_path):
    again = run(tmp_path, *MASKED)
    for row, other in zip(masked[1], again, strict=True):
        assert {k: v for k, v in row.items() if k != "seconds"} == {k: v for k, v in other.items() if k != "seconds"}
    assert (masked[0] / "active_blocks.csv").read_text() == (tmp_path / "active_blocks.csv").read_text()


def test_csv(masked):
    rows = masked[1]
    assert tuple(rows[0]) == COLUMNS
    assert [row["epoch"] for row in rows] == ["1", "2", "3", "4"]
    # elements of XPatch, XChannel1, XChannel2 and what is masked of them: no ragged blocks here
    expected = (0.5 * 64 * 64 + 0.75 * 128 * 32 + 0.25 * 32 * 128) / (64 * 64 + 2 * 128 * 32)
    assert float(rows[0]["ratio_achieved"]) == pytest.approx(expected, abs=1e-6)


def test_a_tracker_weighs_layers_by_their_elements_and_counts_every_block_that_changes(monkeypatch):
    model = fxmask.apply(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 64)), ratio=0.5, block=(16, 16), overrides={"1": {"ratio": 0.75}}, exclude=())
    tracker = MaskTracker(model)
    assert tracker.ratio_achieved() == pytest.approx((0.5 * 32 * 32 + 0.75 * 32 * 64) / (32 * 32 + 32 * 64))
    first, second = (torch.tensor(kept).bool() for kept in ([[1, 1], [0, 0]], [[1, 0], [1, 0]]))
    tracker.now, tracker.active = {"0.weight": first.clone()}, {"0.weight": torch.zeros(2, 2, dtype=torch.int64)}
    masks = iter((first, second, second))
    monkeypatch.setattr(tracker, "read", lambda: {"0.weight": next(masks)})
    flips = [(tracker.before_step(), tracker.take_flips())[1] for _ in range(3)]
    assert flips == [0, 2, 0], "one leaves and one comes"
    assert tracker.active["0.weight"].tolist() == [[3, 1], [2, 0]] and tracker.all_flips == 2


def test_means_are_over_images(tmp_path):
    """Of a model that stands still; the last batch is smaller, and its images count as much as the others."""
    words = ["--device", "cpu", "--dense", "--epochs", "1", "--batch", "1000", "--lr", "1e-12", "--min-lr", "1e-12", "--out", str(tmp_path)]
    (row,), args = run(tmp_path, *words[:-2]), train.arguments(words)
    data = train.load("digits", batch=1000)
    seen = train.evaluate(train.build(args, data), data.train(1))
    assert (float(row["train_loss"]), float(row["train_acc"])) == pytest.approx((seen["val_loss"], seen["top1"]), abs=1e-4)


def test_active_blocks(masked):
    rows = plots.read_csv(masked[0] / "active_blocks.csv")
    steps = 45  # 1,437 images in batches of 32
    for epoch in (1, 4):
        for layer, blocks, kept in (("XPatch", 16, 8), ("XChannel1", 16, 4), ("XChannel2", 16, 12)):
            counts = [int(r["active_steps"]) for r in rows if (int(r["epoch"]), r["layer"]) == (epoch, layer)]
            assert len(counts) == blocks
            assert sum(counts) == kept * steps * epoch
            if layer == "XChannel2":  # drawn once and kept
                assert set(counts) == {0, steps * epoch}


def test_plots(masked):
    for name in ("accuracy.png", "active_blocks.png"):
        assert (masked[0] / name).read_bytes().startswith(b"\x89PNG")


def test_dense_run_has_no_masks(tmp_path):
    rows = run(tmp_path, "--epochs", "1", "--dense", "--batch", "500")
    assert (float(rows[0]["ratio_achieved"]), int(rows[0]["flips"])) == (0.0, 0)
    assert {p.name for p in tmp_path.iterdir()} == {"log.csv", "run.json", "accuracy.png", "lock"}


@pytest.mark.slow
def test_nothing_of_an_earlier_run_stays(tmp_path):
    run(tmp_path, "--epochs", "1", "--batch", "500")
    assert (tmp_path / "active_blocks.png").exists()
    run(tmp_path, "--epochs", "1", "--dense", "--batch", "500")
    assert {p.name for p in tmp_path.iterdir()} == {"log.csv", "run.json", "accuracy.png", "lock"}


def test_start_and_schedule_count_steps(tmp_path):
    options = ("--epochs", "4", "--batch", "500", "--ratio", "0.8", "--start", "1ep", "--schedule", "linear:2ep")
    achieved = [float(row["ratio_achieved"]) for row in run(tmp_path, *options)]
    # the masks of the evaluation after each epoch: the ramp starts from 0 after the first; halfway it is at 0.4, in whole blocks
    assert achieved[0] == 0.0
    assert achieved[1] == pytest.approx(6 / 16)
    assert achieved[2] == achieved[3] == pytest.approx(0.75)  # 12 of 16 blocks: 13 would be more than 0.8


def test_learning_rate():
    rates = [train.learning_rate(step, 50, lr=0.1, min_lr=0.001, warmup=10) for step in range(50)]
    assert rates[0] == pytest.approx(0.01)
    assert max(rates) == rates[10] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.001, abs=2e-4)


def test_evaluate_counts_top1_and_top5():
    logits = torch.eye(10)
    logits[5:] = torch.arange(10.0)  # the best five are 9 to 5, in this order
    scores = train.evaluate(torch.nn.Identity(), [(logits[:6], torch.arange(6)), (logits[6:], torch.arange(6, 10))])
    assert scores["top1"] == pytest.approx(60.0)  # 0 to 4, and 9
    assert scores["top5"] == pytest.approx(100.0)


@pytest.mark.parametrize("text", ["", "ep", "-1", "1.5", "ten"])
def test_bad_steps(text, capsys):
    assert train.main(["--start", text]) == 2
    assert f"got {text!r}" in capsys.readouterr().err


@pytest.mark.parametrize("others", [["--dense"], ["--ratio", "0.5"], ["--block", "8", "8"]])
def test_config_excludes_other_mask_options(others, capsys):
    with pytest.raises(SystemExit, match="2"):
        train.main(["--config", THESIS, *others])
    assert "--config says which layers are masked" in capsys.readouterr().err


def test_bad_config_string_is_shown(capsys):
    assert train.main(["--config", "ResMLP5 @ XPatch = masked 90 (2, 2);"]) == 2
    assert "Write 0.9 for 90 %" in capsys.readouterr().err


def test_model_must_fit_the_data(capsys):
    assert train.main(["--model", "s12"]) == 2
    assert "--model s12 takes images of 224 pixels, --data digits has 8" in capsys.readouterr().err


@pytest.mark.parametrize("script", [train, thesis_train], ids=["train", "thesis"])
def test_a_folder_that_cannot_be_made(script, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert script.main(["--data", "digits", "--epochs", "1", "--out", str(tmp_path / "file" / "run")]) == 2
    assert "cannot be made: Not a directory.\n  fix: name a folder" in capsys.readouterr().err


@pytest.mark.parametrize("script", [train, thesis_train], ids=["train", "thesis"])
def test_a_folder_that_another_run_writes_into(script, tmp_path, capsys):
    with lock.held(tmp_path):
        assert script.main(["--data", "digits", "--epochs", "1", "--out", str(tmp_path)]) == 2
    assert f"in use by process {os.getpid()} on " in capsys.readouterr().err and {p.name for p in tmp_path.iterdir()} == {lock.NAME}


def test_figures_of_nothing(tmp_path):
    done = subprocess.run([sys.executable, plots.__file__, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("plots.py: expected a folder that examples/train.py has written, with a log.csv, got")


def test_missing_data_ends_with_a_message(tmp_path):
    """As a user sees it: exit status 2, no traceback, what to do."""
    missing = tmp_path / "nonexistent"
    command = [sys.executable, "examples/train.py", "--data", "cifar10", "--root", str(missing), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"expected the folder {missing / 'cifar-10-batches-py'}" in done.stderr
    assert "fix: unpack" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
