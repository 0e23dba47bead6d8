"""Runs this folder in Triton's interpreter, on CPU tensors: a process of one thread for each file, as many at once as there are cores."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
FILES = sorted((p for p in FOLDER.glob("test_*.py") if p.name != Path(__file__).name), key=lambda p: (p.name != "test_kernels.py", p.name))  # the longest first


def run(path, marks):
    env = {**os.environ, "TRITON_INTERPRET": "1", "FXMASK_INTERPRETER": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-m", marks, str(path)]
    return subprocess.run(command, env=env, cwd=FOLDER.parent.parent, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def runs(request):
    """For each file that was selected its run, begun."""
    wanted = {item.callspec.params["path"] for item in request.session.items if item.fspath == request.node.fspath}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        marks = "not slow" if "not slow" in request.config.option.markexpr else ""
        yield {path: pool.submit(run, path, marks) for path in FILES if path in wanted}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_the_folder(path, runs):
    done = runs[path].result()
    print(done.stdout[-6000:], done.stderr[-2000:])
    assert done.returncode == 0
    assert re.search(r"\d+ passed", done.stdout) and "skipped" not in done.stdout
