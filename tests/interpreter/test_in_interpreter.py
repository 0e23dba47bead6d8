"""Runs this folder in Triton's interpreter, on CPU tensors."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.mark.parametrize("name", sorted(p.name for p in FOLDER.glob("test_*.py") if p.name != Path(__file__).name))
def test_the_folder(name):
    env = {**os.environ, "TRITON_INTERPRET": "1", "FXMASK_INTERPRETER": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", str(FOLDER / name)]
    done = subprocess.run(command, env=env, cwd=FOLDER.parent.parent, capture_output=True, text=True, check=False)
    print(done.stdout[-6000:], done.stderr[-2000:])
    assert done.returncode == 0
    assert re.search(r"\d+ passed", done.stdout) and "skipped" not in done.stdout
