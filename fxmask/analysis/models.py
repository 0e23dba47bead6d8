"""Models and inputs as a command line names them."""

from __future__ import annotations

import importlib
import math
import os
import re
import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.errors import ConfigError, message

EXPECTED = "expected timm:NAME, torchvision:NAME or package.module:CALLABLE"


def load(spec: str, meta: bool = True) -> nn.Module:
    """The model of `timm:resmlp_12_224`, `torchvision:vit_b_16` or `module:callable` (a function without arguments, or a class, that gives a module).

    It is made on the meta device, without memory and without weights' values, where it can be; otherwise, and with `meta=False`, as it is. ConfigError for a
    spec that names nothing.
    """
    source, colon, name = spec.partition(":")
    if not colon or not source or not name:
        raise ConfigError(f"model: {EXPECTED}, got {spec!r}.")
    make = {"timm": _timm, "torchvision": _torchvision}.get(source, _own)
    build = make(source, name, spec)
    try:
        with torch.device("meta") if meta else nullcontext():
            model = build()
    except Exception as first:  # code that reads values while it builds, as .item() and .tolist() do
        try:
            if not meta:  # that was it
                raise
            model = build()
        except Exception as e:
            before = f" (on the meta device: {type(first).__name__}: {first})" if meta and str(first) != str(e) else ""
            what = f"model: {spec!r} cannot be built: {type(e).__name__}: {e}{before}"
            raise ConfigError(message(what, spec, "build it yourself and give the result to fxmask's function, such as fxmask.analyze.")) from e
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: expected {spec!r} to give an nn.Module, got {type(model).__name__}.")
    return model


def _module(name: str, spec: str, package: str = "") -> Any:
    try:
        return importlib.import_module(name)
    except Exception as e:  # a broken installation raises what it likes
        lacks = str(e.name) if isinstance(e, ModuleNotFoundError) else "torch"
        fix = f"pip install {package}" if package else "check the name, and that it lies in the folder that this is called in, or in one on PYTHONPATH."
        if package and lacks != package and lacks.startswith("torch"):  # it is there, but its or timm's torchvision is for another torch; pip brings what else
            fix = f"install the torchvision that belongs to torch {torch.__version__}, from the index that torch came from."
        raise ConfigError(message(f"model: {name} cannot be imported: {type(e).__name__}: {str(e)[:300]}", spec, fix)) from e


def _timm(source: str, name: str, spec: str) -> Any:
    timm = _module("timm", spec, "timm")
    if not timm.is_model(name):
        near = timm.list_models(f"*{name.split('_')[0]}*")[:5]
        raise ConfigError(f"model: timm has no {name!r}: expected one of timm.list_models(){', such as ' + ', '.join(near) if near else ''}.")
    return lambda: timm.create_model(name)


def _torchvision(source: str, name: str, spec: str) -> Any:
    models = _module("torchvision.models", spec, "torchvision")
    if name not in models.list_models():
        raise ConfigError(f"model: torchvision has no {name!r}: expected one of torchvision.models.list_models().")
    return lambda: models.get_model(name)


def _own(source: str, name: str, spec: str) -> Any:
    # `python -m fxmask` looks there by itself, the installed command does not
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    found = _module(source, spec)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"model: {source} has no {name!r}: {EXPECTED}, got {spec!r}.")
        found = getattr(found, part)
    if isinstance(found, nn.Module):
        return lambda: found
    if not callable(found):
        raise ConfigError(f"model: expected {spec!r} to be callable, got {type(found).__name__}.")
    return found


def make_input(spec: str) -> Tensor:
    """A meta tensor of `1x3x224x224`, or `2x128:int64`; float32 unless said. ConfigError for anything else."""
    match = re.fullmatch(r"(\d+(?:x\d+)*)(?::(\w+))?", spec.strip())
    dtype = getattr(torch, match[2] or "float32", None) if match else None
    if not match or not isinstance(dtype, torch.dtype):
        raise ConfigError(f"input: expected sizes and maybe a dtype, such as 1x3x224x224 or 2x128:int64, got {spec!r}.")
    if str(dtype).startswith(("torch.qint", "torch.quint")):
        raise ConfigError(f"input: expected a dtype that is not quantized, such as int8, got {spec!r}.")
    sizes = [int(s) for s in match[1].split("x")]
    if max(sizes) >= 2**63 or math.prod(sizes) >= 2**63:
        raise ConfigError(f"input: expected fewer than 2^63 elements, got {spec!r}.")
    return torch.empty(sizes, dtype=dtype, device="meta")


def make_block(spec: str) -> tuple[int, int]:
    """(16, 32) of `16x32`, (16, 16) of `16`."""
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", spec.strip())
    if not match:
        raise ConfigError(f"block: expected out x in, such as 16x16, got {spec!r}.")
    return int(match[1]), int(match[2] or match[1])
