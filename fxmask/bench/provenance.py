"""Where a row comes from: versions, commit, a hash of the sources, device, clocks. Everything optional is empty where it is unknown."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..analysis.nvml import Gpu
from ..errors import UnsupportedError
from ..kernels import grid
from ..kernels.dispatch import triton_ops
from ..kernels.file_hash import file_hash
from ..kernels.tune import cpu_name
from ..version import __version__

PACKAGE = Path(__file__).resolve().parents[1]
# what must agree for a row to count as measured already
SAME = ("fxmask", "source", "device", "driver", "torch", "triton", "ptxas", "threads")


def utc() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _git(*args: str) -> str:
    try:
        done = subprocess.run(["git", *args], cwd=PACKAGE, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


@cache
def commit() -> tuple[str, str]:
    """(sha, dirty as 0 or 1) of the checkout that holds this file; empty outside of one, or where git does not know the file."""
    if not _git("ls-files", "__init__.py"):
        return "", ""
    return _git("rev-parse", "--short=12", "HEAD"), str(int(bool(_git("status", "--porcelain", "--untracked-files=no"))))


@cache
def source_hash() -> str:
    """Hash of the sources that are timed, those of `kernels`: says more than a commit where a tree is dirty or was copied.

    Without `gpu_choice`, whose constants are fitted to the rows: a fit would make them those of other sources.
    """
    folder = Path(grid.__file__).resolve().parent
    return file_hash(sorted(p for p in folder.rglob("*.py") if p.name != "gpu_choice.py"), folder)[:12]


def _triton() -> tuple[str, str]:
    """Versions of Triton and of the ptxas that it would run."""
    try:
        triton: Any = triton_ops().launch.triton
    except (UnsupportedError, AttributeError):
        return "", ""
    try:
        tool = triton.knobs.nvidia.ptxas
        return triton.__version__, str(getattr(tool, "version", ""))
    except Exception:  # no such tool, or another way to ask for it in this version
        return triton.__version__, ""


@cache
def nvml() -> Any:
    """The pynvml module, initialised; None where it is not installed or finds no driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, no driver
        return None
    return pynvml


def nvml_handle(nvml: Any, index: int) -> Any:
    """NVML's handle of the device that torch calls cuda:index."""
    uuid = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
    try:  # NVML counts all GPUs, torch those that are visible
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") if uuid else nvml.nvmlDeviceGetHandleByIndex(index)
    except Exception:
        return nvml.nvmlDeviceGetHandleByIndex(index)


def clocks(device: torch.device) -> dict[str, str]:
    """Power limit in W, SM clock in MHz and temperature in °C, now; an empty text for each that NVML does not tell, as in a virtual machine."""
    limit = clock = temperature = None
    api = nvml() if device.type == "cuda" else None
    if api is not None:
        with suppress(Exception):  # it may not show this GPU
            gpu = Gpu(api, nvml_handle(api, device.index or 0), "")
            limit, clock = gpu.ask("nvmlDeviceGetEnforcedPowerLimit"), gpu.ask("nvmlDeviceGetClockInfo", api.NVML_CLOCK_SM)
            temperature = gpu.ask("nvmlDeviceGetTemperature", api.NVML_TEMPERATURE_GPU)
    told = {"power_limit_w": None if limit is None else f"{limit / 1000:.0f}", "sm_clock_mhz": clock, "temperature_c": temperature}
    return {name: "" if value is None else str(value) for name, value in told.items()}


def _driver() -> str:
    api = nvml()
    try:
        return str(api.nvmlSystemGetDriverVersion()) if api else ""
    except Exception:
        return ""


def allocator() -> str:
    """What the environment sets of the C allocator, which decides whether memory that a step frees comes back by page faults; empty where it sets nothing."""
    known = {name: value for name, value in sorted(os.environ.items()) if name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD")}
    if "LD_PRELOAD" in known:
        known["LD_PRELOAD"] = ":".join(Path(library).name for library in known["LD_PRELOAD"].replace(":", " ").split())
    return " ".join(f"{name}={value}" for name, value in known.items() if value)


def provenance(device: torch.device) -> dict[str, str]:
    """The columns that all rows of a run share."""
    sha, dirty = commit()
    triton, ptxas = _triton()
    cuda = device.type == "cuda"
    return {
        "fxmask": __version__,
        "git_sha": sha,
        "dirty": dirty,
        "source": source_hash(),
        "device": torch.cuda.get_device_name(device) if cuda else ", ".join(filter(None, (cpu_name(), allocator()))),
        "driver": _driver() if cuda else "",
        "torch": torch.__version__,
        "triton": triton,
        "ptxas": ptxas,
        "python": platform.python_version(),
        "threads": "" if cuda else str(torch.get_num_threads()),
    }
