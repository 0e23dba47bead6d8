"""`make demo`, shortened to a few steps: it runs without arguments, data or GPU, and says what it must say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import demo
from thesis import lock

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_smoke(tmp_path):
    command = [sys.executable, "-W", "error", "examples/demo.py", "--smoke", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert "torch.ops.fxmask.masked_linear" in text
    for row in ("top-1 accuracy", "target ratio", "achieved ratio", "block flips", "MFLOP a training step", "median time a step"):
        assert row in text
    assert "The FLOP ratio is not a speed-up" in text
    assert "gain nothing by skipping blocks" in text
    flop = [float(x) for x in re.search(r"MFLOP a training step, useful +([\d.]+) +([\d.]+)", text).groups()]
    # embed and head stay dense: a little more than half is left at a ratio of one half
    assert 0.5 < flop[1] / flop[0] < 0.52
    for name in ("dense/log.csv", "dense/accuracy.png", "masked/log.csv", "masked/accuracy.png", "masked/active_blocks.png"):
        assert (tmp_path / name).stat().st_size > 0


def test_two_demos_do_not_share_a_folder(tmp_path, capsys):
    with lock.held(tmp_path):
        assert demo.main(["--smoke", "--out", str(tmp_path)]) == 2
    assert "expected a folder that no other run writes into" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == [lock.NAME]
