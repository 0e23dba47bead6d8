"""fxmask -> passes -> kernels, never back; Triton only in its own folders."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

# tree -> the parts of fxmask that its modules may import; the public face may import them all
ALLOWED = {
    "kernels": ("fxmask.kernels",),
    "passes": ("fxmask.kernels", "fxmask.passes"),
    "fxmask": ("fxmask",),
}
TRITON_FOLDERS = ("kernels/triton/", "kernels/gluon/")


def imported(source: str, package: str) -> list[tuple[int, str]]:
    """(line, absolute name) of each import in a module of `package`, wherever it stands; `from a import b` counts as a.b."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def violations(path: str, source: str) -> list[str]:
    tree = path.partition("/")[0]
    folder = str(Path(path).parent).replace("/", ".")
    package = folder if tree == "fxmask" else f"fxmask.{folder}"
    found = []
    for line, name in imported(source, package):
        if within(name, ("fxmask",)) and not within(name, ALLOWED[tree]):
            found.append(f"{path}:{line} imports {name}; {tree} may import {' and '.join(ALLOWED[tree])}")
        if within(name, ("kernels", "passes")):
            found.append(f"{path}:{line} imports {name}; say fxmask.{name}, or its ops are registered twice")
        if within(name, ("triton",)) and not path.startswith(TRITON_FOLDERS):
            found.append(f"{path}:{line} imports {name}; only {' and '.join(TRITON_FOLDERS)} may")
    return found


def test_imports_go_one_way(root, project_files):
    paths = [name for name in project_files if name.endswith(".py") and name.partition("/")[0] in ALLOWED]
    assert paths
    assert [line for path in paths for line in violations(path, (root / path).read_text(encoding="utf-8"))] == []


LEAN = """
import sys
import torch
import torch.utils.flop_counter  # where formulas are registered: it imports Triton
before = set(sys.modules)
import fxmask
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
fxmask.apply(model, ratio=0.5)
model(torch.randn(4, 32)).sum().backward()
fxmask.explain(model)
print(*sorted((set(sys.modules) - before) & {"torch._dynamo", "sympy"}))
"""


def test_an_import_is_without_the_compiler(tmp_path):
    """It takes seconds, and a first optimiser, which wants it anyhow, or a compile imports it."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", LEAN], capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/ops.py", "import fxmask"),
        ("kernels/ops.py", "from .. import apply"),
        ("kernels/ops.py", "from ..passes import find"),
        ("kernels/ops.py", "from ..passes.finding.find import sites"),
        ("kernels/triton/list_matmul.py", "from ... import errors"),
        ("kernels/ops.py", "def f():\n    import triton.language as tl"),
        ("passes/finding/find.py", "from ... import errors"),
        ("passes/finding/find.py", "from fxmask.errors import FxMaskError"),
        ("passes/finding/find.py", "from kernels import ops"),
        ("fxmask/report.py", "import triton"),
    ],
)
def test_a_wrong_import_is_found(path, source):
    assert len(violations(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/ops.py", "from . import grid"),
        ("kernels/ops.py", "from .triton import dsd"),
        ("kernels/triton/dsd.py", "import triton.language as tl\nfrom ..grid import grid_shape\nfrom .. import grid"),
        ("passes/infra.py", "from ..kernels import ops\nfrom .. import kernels\nimport fxmask.kernels.ops"),
        ("passes/finding/find.py", "from ...kernels import ops\nfrom .. import infra\nfrom . import candidate"),
        ("fxmask/report.py", "from . import errors\nfrom .passes import find\nfrom fxmask.kernels.errors import FxMaskError"),
    ],
)
def test_a_right_import_is_not(path, source):
    assert violations(path, source) == []
