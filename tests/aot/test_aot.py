"""Compilation for GPUs that are not there: `make aot` in a process of its own, and the checks on what a broken kernel compiles to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]


def aot(*args: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ["PYTHONPATH"] = str(root)
    return subprocess.run([sys.executable, str(ROOT / "tests" / "aot"), *args], cwd=root, env=environ, text=True, capture_output=True)


def test_one_launch_of_each_op_on_sm90():
    done = aot("--smoke", "--arch", "90")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 failed" in done.stdout.splitlines()[-1]


# What the compiler is known to lose the pipeline over, and what then fails. Each old text must be in the kernel once.
ROWS = "tl.where(rm < M, rm, 0).to(tl.int64)[:, None] * "
DOT = "acc = tl.dot(x, w, acc, input_precision=PRECISION)"
BREAKS = {
    "index loaded in the loop": (
        {"    for t in range(begin_t, steps):\n": "    for t in range(begin_t, steps):\n        e0 = tl.load(at + t * P)\n", "        e0 = tl.load(nxt)\n": ""},
        "expected 2 operands 3 deep",
    ),
    "branch around the dot": ({DOT: f"if (e0 >> 16) != 0:\n            {DOT}"}, "cp.async of nothing"),
    "operand from registers": ({DOT: DOT.replace("(x, w", "(tl.where(x > 0, x, 0.0).to(x.dtype), w")}, "with an operand in registers"),
    "stride of unknown divisibility": ({f"{ROWS}stride_x * XM": f"{ROWS}stride_x"}, "expected 2 operands 3 deep"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BREAKS)
def test_a_lost_pipeline_fails(tmp_path, name):
    edits, message = BREAKS[name]
    for folder in ("fxmask", "passes", "kernels"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "kernels" / "triton" / "list_matmul.py"
    source = path.read_text()
    for old, new in edits.items():
        assert source.count(old) == 1, f"{path.name} has {old!r} {source.count(old)} times: adapt this test"
        source = source.replace(old, new)
    path.write_text(source)
    done = aot("--smoke", "--arch", "90", "--only", "list_matmul", root=tmp_path)
    assert done.returncode == 1 and message in done.stdout, done.stdout + done.stderr
