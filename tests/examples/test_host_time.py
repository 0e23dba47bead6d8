"""examples/benchmarks/host_time.py in a process of its own, as it leaves kernels out: launches and calls are counted as they are, times are some."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
PROGRAM = Path(__file__).parents[2] / "examples" / "benchmarks" / "host_time.py"


@functools.cache
def measured(contender, refresh, *more):
    command = [sys.executable, str(PROGRAM), "--contender", contender, "--refresh", str(refresh), "--layers", "2", "--steps", "3", *more]
    return ast.literal_eval(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize(
    ("contender", "refresh", "launches"),
    # two layers: 2 forwards, 1 dX, 2 dW; 4 for each mask that a forward builds, none for the guard; freeze sets aside and puts back, 2 for all layers
    [
        pytest.param("masked_step", 1, (5 + 8) / 2, marks=pytest.mark.slow),
        ("masked_step", 100, 5 / 2),
        pytest.param("freeze", 1, (5 + 8 + 2) / 2, marks=pytest.mark.slow),
        pytest.param("dense", 1, 0, marks=pytest.mark.slow),
    ],
)
def test_what_a_layer_launches(contender, refresh, launches):
    row = measured(contender, refresh)
    assert row["launches_of_ours"] == pytest.approx(launches, abs=0.01) and (row["contender"], row["refresh"]) == (contender, refresh)
    assert min(row[f"{part}_us"] for part in ("forward", "backward", "step")) > 0 and row["calls"] > 0


def test_what_scores_that_last_launch():
    """Two launches a layer for them, and as many for the masks as norms take; PyTorch is called for flips, which masks of norms do not count."""
    row, norms = measured("freeze", 1, "--criterion", "taylor", "--average", "0.9"), measured("freeze", 1)
    assert row["launches_of_ours"] == pytest.approx((5 + 2 * 2 + 4 + 2) / 2, abs=0.01)
    assert row["criterion"] == "taylor" and norms["calls"] < row["calls"] <= 9.5


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--layers", "0"], "--layers: expected at least 1, got 0"),
        (["--refresh", "-1"], "--refresh: expected 0 or more, got -1"),
        (["--criterion", "size"], "got 'size'"),
    ],
)
def test_what_cannot_be_measured(words, text):
    done = subprocess.run([sys.executable, str(PROGRAM), *words], capture_output=True, text=True)
    assert done.returncode == 2 and text in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_cached_masks_take_fewer_calls():
    assert measured("masked_step", 100)["calls"] < measured("masked_step", 1)["calls"]
