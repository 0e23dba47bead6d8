"""Runs this folder in Triton's interpreter, on CPU tensors: a process of one thread for each file, begun by conftest.py."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
FILES = sorted((p for p in FOLDER.glob("test_*.py") if p.name != Path(__file__).name), key=lambda p: (p.name != "test_kernels.py", p.name))  # the longest first


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_the_folder(path, runs):
    done = runs[path].result()
    print(done.stdout[-6000:], done.stderr[-2000:])
    assert done.returncode == 0
    assert re.search(r"\d+ passed", done.stdout) and "skipped" not in done.stdout
