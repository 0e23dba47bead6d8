"""Runs this folder in Triton's interpreter, on CPU tensors: processes of one thread, each of several files, begun by conftest.py."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
FILES = sorted((p for p in FOLDER.glob("test_*.py") if p.name != Path(__file__).name), key=lambda p: (p.name != "test_kernels.py", p.name))  # the longest first
GROUPS = [tuple(FILES[i::2]) for i in range(2)]  # one for each of two cores, where they run alone; each takes seconds to begin


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("paths", GROUPS, ids=lambda paths: "-".join(p.stem.removeprefix("test_") for p in paths))
def test_the_folder(paths, runs):
    done = runs[paths].result()
    print(done.stdout[-6000:], done.stderr[-2000:])
    assert done.returncode == 0
    assert re.search(r"\d+ passed", done.stdout) and "skipped" not in done.stdout
