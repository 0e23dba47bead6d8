"""Dumps and caches."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compile_backend.helpers import OPTIONS, Wrap, compiled
from sample_models import mlp
from torch.testing import FileCheck

import fxmask
from fxmask.compiler import backend, sources
from fxmask.passes.infra import CleanUp


def test_graphs_are_dumped_before_and_after_every_pass(tmp_path, monkeypatch):
    monkeypatch.setenv("FXMASK_DUMP", str(tmp_path / "dump"))
    compiled(Wrap(mlp()), **OPTIONS)(torch.randn(4, 64))
    files = {p.name.split(".", 2)[2]: p.read_text() for p in (tmp_path / "dump").iterdir()}
    assert sorted(files) == ["CleanUp.after.py", "CleanUp.before.py", "MaskLifted.after.py", "MaskLifted.before.py"]
    FileCheck().check_not("fxmask").check("torch._C._nn.linear").run(files["MaskLifted.before.py"])
    FileCheck().check("# 2 rewritten: inner.0, inner.2").check("torch.ops.fxmask.masked_linear").run(files["MaskLifted.after.py"])


class Own(CleanUp):
    """A pass of somebody's own."""


def test_the_key_of_inductors_caches_holds_the_library_the_passes_and_what_was_set_before(monkeypatch):
    """And what is asked of Inductor by name goes before what a mode asks."""
    keys = []
    compile_fx = importlib.import_module("torch._inductor.compile_fx")
    monkeypatch.setattr(compile_fx, "compile_fx", lambda gm, inputs, config_patches: keys.append((torch.compiler.config.cache_key_tag, config_patches)))
    mine = f"fxmask-{sources.source_hash()}"
    with torch.compiler.config.patch(cache_key_tag="theirs"):
        for options in ({}, {"passes": [Own()], "inductor": {"max_autotune": False}}):
            backend._inner(backend.parse(options), "max-autotune")(None, [])
        assert torch.compiler.config.cache_key_tag == f"theirs+{mine}"
    assert [tag for tag, _ in keys] == [f"theirs+{mine}", f"theirs+{mine}+{Own().uuid()}"]
    assert [patches["max_autotune"] for _, patches in keys] == [True, False] and all(patches["triton.cudagraphs"] for _, patches in keys)


def test_the_librarys_hash_is_of_all_that_decides_what_is_compiled(monkeypatch):
    root, hashed = Path(fxmask.__file__).parent, []
    monkeypatch.setattr(sources, "file_hash", lambda files, root: hashed.extend(f.relative_to(root).parts for f in files) or "0" * 64)
    sources.source_hash.__wrapped__()
    folders = {f.name for f in root.iterdir() if any(f.glob("*/*.py")) or any(f.glob("*.py"))}
    assert {parts[0] for parts in hashed if len(parts) > 1} == folders - {"advice", "analysis", "bench"}
    assert {parts[0] for parts in hashed if len(parts) == 1} == {f.name for f in root.glob("*.py")}
    assert ("kernels", "triton", "launch.py") in hashed


def test_a_library_without_files_goes_by_its_version(monkeypatch):
    monkeypatch.setattr(sources, "FOLDERS", ())
    assert sources.source_hash.__wrapped__() == f"version-{fxmask.__version__}"


def test_a_cache_tag_that_nobody_has_set_is_the_librarys_alone():
    with torch.compiler.config.patch(cache_key_tag=""):
        sources.tag_caches()
        assert torch.compiler.config.cache_key_tag == f"fxmask-{sources.source_hash()}"


STALE = """
import sys
sys.path.insert(0, {root!r})
import torch, fxmask
torch.manual_seed(0)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(32, 32)
    def forward(self, x):
        return self.fc(x)
model = Model()
if {apply}:
    call = torch.compile(fxmask.apply(model, ratio=0.5))
else:
    from fxmask.compiler.backend import fxmask_backend
    call = torch.compile(model, backend=fxmask_backend, options={{"ratio": 0.5}})
call(torch.ones(4, 32)).sum().backward()
counters = torch._dynamo.utils.counters
print(model.fc.weight.grad.abs().sum().item(), counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("apply", [True, False], ids=["apply and stock Inductor", "backend"])
def test_a_changed_backward_is_never_taken_from_a_cache(tmp_path, apply):
    """Three processes over one cache: cold, warm, and after an edit of the backward."""
    root, source = tmp_path / "copy", Path(fxmask.__file__).parent.parent
    for folder in ("fxmask", "passes", "kernels"):
        shutil.copytree(source / folder, root / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "FXMASK_TUNE": "0", "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    env.pop("TORCHINDUCTOR_FORCE_DISABLE_CACHES", None)

    def run():
        code = STALE.format(root=str(root), apply=apply)
        done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        gradient, hits = done.stdout.split()
        return float(gradient), int(hits)

    cold, hits = run()
    assert hits == 0 and cold > 0
    assert run() == (cold, 1)
    gradients = root / "kernels" / "gradients.py"
    text = gradients.read_text()
    edited = text.replace("return gx, gw, gb, *[None] * 7", "return gx, 7 * gw, gb, *[None] * 7")
    assert edited != text
    gradients.write_text(edited)
    assert run() == (pytest.approx(7 * cold), 0)
