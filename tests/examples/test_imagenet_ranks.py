"""The ImageNet path on several ranks, started by torchrun on gloo: they agree, an image is counted once, a killed run goes on to the same bits."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time

import plots
import pytest
import torch
from distributed.imagenet_runs import OPTIONS, PATHS, ROOT, TEST_IMAGES, make_folder, rows, state
from distributed.launch import torchrun
from saved_states import same
from thesis import checkpoint
from thesis import imagenet as program
from thesis.imagenet_run import Run
from thesis.ranks import Ranks

import fxmask

pytestmark = pytest.mark.slow
BODY, SCRIPT = ROOT / "tests" / "distributed" / "imagenet_runs.py", ROOT / "examples" / "thesis" / "imagenet.py"


@pytest.fixture(scope="module")
def root(torchvision, tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("imagenet") / "data")


@pytest.mark.parametrize("ranks", [2, 3])
def test_on_several_ranks(ranks, root, tmp_path, capsys):
    """Weights and masks alike on all ranks, exact resume; three add up in an order that DDP's buckets give."""
    more = ["--batch", "12"]
    torchrun(BODY, root, tmp_path, *more, ranks=ranks, PYTHONPATH=PATHS)
    args = [*OPTIONS, "--root", str(root), "--out", str(tmp_path / "whole"), *more]
    assert program.main(args) == 2
    assert f"expected {ranks} process(es), as this run began with, got 1" in capsys.readouterr().err
    run = Run(program.arguments(args), Ranks(0, 1, torch.device("cpu"), grouped=False))
    run.model.load_state_dict(state(tmp_path / "whole")["model"])
    fxmask.load_state_dict(run.model, state(tmp_path / "whole")["masks"])
    log = plots.read_csv(tmp_path / "whole" / "log.csv")[-1]
    scores = run.evaluate()
    assert float(log["top1"]) == pytest.approx(scores["top1"], abs=1e-7) and float(log["val_loss"]) == pytest.approx(scores["val_loss"], rel=1e-5)
    assert log["test_images"] == str(TEST_IMAGES)


def test_a_rank_is_killed(root, tmp_path):
    """kill -9 of one of two ranks: torchrun ends the other, and the same command goes on to the same bits."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2", str(SCRIPT)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FXMASK_TUNE": "0", "CUDA_VISIBLE_DEVICES": ""}
    out, options = tmp_path / "killed", [*OPTIONS, "--root", str(root), "--workers", "1", "--threads", "1", "--out"]
    process = subprocess.Popen([*command, *options, str(out)], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (out / checkpoint.LAST).exists():
        time.sleep(0.002)
    os.kill(int((out / "lock").read_text().split()[1]), signal.SIGKILL)
    assert process.wait() != 0 and state(out)["progress"]["step"] < 18
    for folder in (out, tmp_path / "whole"):
        torchrun(SCRIPT, *options, folder)
    assert same(state(out), state(tmp_path / "whole")) and rows(out) == rows(tmp_path / "whole") and len(rows(out)) == 4


def test_an_error_on_one_rank_ends_all(root, tmp_path):
    """Rank 1 alone reads the second test image; rank 0 waits for its sums and must not wait for ever."""
    shutil.copytree(root, tmp_path / "data")
    (tmp_path / "data" / "val" / "class0" / "1.png").write_bytes(b"no image")
    with pytest.raises(AssertionError, match=r"class0/1\.png: expected an image, got UnidentifiedImageError"):
        torchrun(SCRIPT, *OPTIONS, "--root", tmp_path / "data", "--out", tmp_path / "out", timeout=120)


def test_an_error_on_all_ranks_is_told_once(root, tmp_path):
    with pytest.raises(AssertionError) as failed:
        torchrun(SCRIPT, *OPTIONS, "--root", tmp_path, "--out", tmp_path / "out")
    assert str(failed.value).count("expected folders train and val") == 1
