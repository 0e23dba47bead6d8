"""What a recipe says where a package is missing, or a ratio, a folder or a checkpoint is not as it must be: a line and 2."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import fxmask

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "examples" / "recipes"
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
WITHOUT = "import runpy, sys; sys.modules[sys.argv[1]] = None; sys.argv = sys.argv[2:]; runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.mark.parametrize(
    ("recipe", "package", "args"),
    [
        ("hf_trainer", "transformers", ["--out", "run"]),
        ("lightning_callback", "lightning", ["--out", "run"]),
        ("timm_train", "timm", [__file__]),
    ],
)
def test_a_package_that_is_not_installed(recipe, package, args, tmp_path):
    command = [sys.executable, "-c", WITHOUT, package, str(RECIPES / f"{recipe}.py"), *args]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 2 and package in done.stderr and "pip install 'fxmask[models]'" in done.stderr and "Traceback" not in done.stderr


def of_another_ratio():
    model = nn.Sequential(*(layer for _ in range(2) for layer in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))), nn.Linear(64, 10))
    fxmask.apply(model, ratio=0.5, block=(16, 16), schedule=fxmask.Schedule("cubic", steps=30))
    return {"step": 1, "model": model.state_dict(), "masks": fxmask.state_dict(model)}


@pytest.mark.parametrize(
    ("recipe", "state", "words"),
    [
        ("ddp", b"\x89PNG", "UnpicklingError: Weights only load failed\n"),
        ("fsdp2", b"\x89PNG", "UnpicklingError: Weights only load failed\n"),
        ("fsdp2", [1], "TypeError: list indices must be integers or slices, not str\n"),
        ("ddp", of_another_ratio(), "with other settings: expected the same, got ratio: 0.75 here, 0.5 saved.\n"),
        ("ddp", {"model": {}}, "for Sequential: Missing key(s) in state_dict: "),
    ],
    ids=["no file of ddp", "no file of fsdp2", "a list", "another ratio", "no weights"],
)
def test_a_checkpoint_that_cannot_be_gone_on_from(recipe, state, words, tmp_path):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(state) if isinstance(state, bytes) else torch.save(state, path)
    command = [sys.executable, str(RECIPES / f"{recipe}.py"), "--out", str(tmp_path), "--resume"]
    done = subprocess.run(command, env={**os.environ, **ALONE, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
    assert f"--resume: expected a checkpoint of this script at {path}, of the same --ratio, got" in done.stderr


FAKES = {
    "transformers": ("LlamaConfig", "LlamaForCausalLM", "Trainer", "TrainerCallback", "TrainingArguments"),
    "transformers.trainer_callback": ("ExportableState",),
    "lightning": ("LightningModule", "Trainer"),
    "lightning.pytorch": (),
    "lightning.pytorch.callbacks": ("Callback", "ModelCheckpoint"),
}


@pytest.mark.parametrize("recipe", ["ddp", "fsdp2", "hf_trainer", "lightning_callback"])
def test_before_anything_is_trained(recipe, tmp_path, capsys, monkeypatch):
    for name, classes in FAKES.items():
        module = ModuleType(name)
        vars(module).update({of: type(of, (), {}) for of in classes})
        monkeypatch.setitem(sys.modules, name, module)
    for name, value in ALONE.items():
        monkeypatch.setenv(name, value)
    main = runpy.run_path(str(RECIPES / f"{recipe}.py"))["main"]
    file = tmp_path / "file"
    file.write_text("")
    wrong = [(["--out", str(tmp_path / "run"), "--resume"], "--resume: expected a checkpoint")]
    if recipe != "lightning_callback":
        wrong += [(["--out", str(tmp_path / "run"), "--ratio", "2"], "expected a finite number in [0, 1), got 2.0"), (["--out", str(file)], "File exists")]
    for args, words in wrong:
        with pytest.raises(SystemExit, match="2"):
            main(args)
        assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
