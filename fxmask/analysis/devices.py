"""Peaks of devices: what a roofline and a traffic model divide by.

GPUs have the figures of their datasheets, each with its source; all peaks are dense ones, half of what is printed "with sparsity". They agree with the chips,
SMs x FLOP a clock and SM x boost clock: 56 x 2048 x 1.44 GHz = 165 TFLOP/s in bf16 for an A30, 108 x 2048 x 1.41 = 312 (A100), 132 x 4096 x 1.83 = 989 (H100).
No datasheet has the bandwidth of an L2 cache (the A100 whitepaper's 5,120 bytes a clock do not say which clock), so `l2_bytes_s` is None until it is measured,
which `python -m fxmask.bench.gpu` does: `dataclasses.replace(device("h200"), l2_bytes_s=..., source=...)`. This CPU's peaks are measured when first asked for.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ..bench.clock import load_average
from ..bench.provenance import cpu_name
from ..errors import ConfigError
from ..kernels.errors import message

MIB = 1 << 20
DTYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"} | {t: "fp8" for n, t in vars(torch).items() if n.startswith("float8_")}


@dataclass(frozen=True)
class Device:
    """What a device can do at best.

    peak_flops: dense FLOP/s of a matmul by dtype (fp32, tf32, fp16, bf16, fp8).   dram_bytes_s, l2_bytes_s: bytes/s; None: nobody has measured it.
    l2_bytes: size of the last cache before DRAM.   launch_s: assumed seconds from one small kernel to the next.
    dense_tile: (tokens, features) of the tile within which a dense matmul reads each operand once, clusters that share loads included.
    line_bytes, sector_bytes: what a cache allocates and what it moves.   source: where all this is from.
    is_cpu: masked layers run as strips of PyTorch's matmuls there, which no row counts: no speed-up is bounded.
    """

    name: str
    peak_flops: dict[str, float] = field(hash=False)
    dram_bytes_s: float
    l2_bytes: int
    l2_bytes_s: float | None
    launch_s: float
    dense_tile: tuple[int, int]
    source: str
    line_bytes: int = 128  # with sectors of 32 bytes in L1 and L2: NVIDIA developer forum, thread 312884
    sector_bytes: int = 32
    is_cpu: bool = False

    def peak(self, dtype: torch.dtype | str) -> float | None:
        """Dense FLOP/s in a dtype or a mode ("tf32"); None where the table has no figure, such as fp8 on an A100."""
        return self.peak_flops.get(DTYPES.get(dtype, "") if isinstance(dtype, torch.dtype) else dtype)


# ---- GPUs ------------------------------------------------------------------------------------------------------------------------------------------------

# lower end of the 2 to 5 us that eager launches cost back to back, so that a bound made of it stays one; a replayed CUDA graph costs less
LAUNCH_S = 2e-6
_ASSUMED = "launch_s is an assumption (2 to 5 us for eager kernels back to back)"
_AMPERE_TILE = "dense_tile: 128x256, the largest of CUTLASS's and cuBLAS's kernels for sm_80"
_HOPPER_TILE = "dense_tile: tiles of 128x256 whose loads a cluster of 2x1 shares, reported as the best for large products (NVIDIA/cutlass issue 2397)"
_A100_PEAKS = {"fp32": 19.5e12, "tf32": 156e12, "fp16": 312e12, "bf16": 312e12}
_H100_PEAKS = {"fp32": 66.9e12, "tf32": 494.7e12, "fp16": 989.4e12, "bf16": 989.4e12, "fp8": 1978.9e12}
_H100_PAPER = "NVIDIA H100 Tensor Core GPU Architecture whitepaper v1.04, table 3 (dense peaks, L2 of 50 MB)"


def _gpu(name: str, peaks: dict[str, float], dram: float, l2_mib: int, hopper: bool, source: str) -> Device:
    tile, why = ((256, 256), _HOPPER_TILE) if hopper else ((128, 256), _AMPERE_TILE)
    return Device(name, peaks, dram, l2_mib * MIB, None, LAUNCH_S, tile, f"{source}; {why}; {_ASSUMED}")


def _a100(name: str, dram: float, which: str) -> Device:
    source = f"NVIDIA A100 datasheet, 1758950-r4, column {which} (peaks without sparsity, bandwidth); L2 of 40 MB: NVIDIA A100 architecture whitepaper, table 4"
    return _gpu(name, _A100_PEAKS, dram, 40, False, source)


_TABLE = (
    _gpu(
        "a30",
        {"fp32": 10.3e12, "tf32": 82.6e12, "fp16": 165e12, "bf16": 165e12},
        933e9,
        24,
        False,
        "NVIDIA A30 datasheet (a30-datasheet.pdf): 10.3, 82 | 165*, 165 | 330* TFLOP/s, * with sparsity, 933 GB/s; "
        "tf32's 82 is 82.6 by the clock; L2 of 24 MB: TechPowerUp's database, no NVIDIA document at hand has it",
    ),
    _a100("a100-sxm", 2039e9, "80 GB SXM"),
    _a100("a100-sxm-40gb", 1555e9, "40 GB SXM"),
    _a100("a100-pcie", 1935e9, "80 GB PCIe"),
    _a100("a100-pcie-40gb", 1555e9, "40 GB PCIe"),
    _gpu("h100-sxm", _H100_PEAKS, 3.35e12, 50, True, f"{_H100_PAPER}; NVIDIA H100 datasheet: 3.35 TB/s"),
    _gpu(
        "h100-pcie",
        {"fp32": 51.2e12, "tf32": 378e12, "fp16": 756e12, "bf16": 756e12, "fp8": 1513e12},
        2.0e12,
        50,
        True,
        f"{_H100_PAPER}; H100 PCIe product brief PB-11133-001_v02, table 2: 2,000 GB/s (the whitepaper has 2,039)",
    ),
    _gpu(
        "h200",
        _H100_PEAKS,
        4.8e12,
        60,
        True,
        "NVIDIA H200 datasheet, SXM: the H100's peaks (989, 1979, 1979, 3958 with sparsity), 4.8 TB/s; L2 of 60 MB and 132 SMs as PyTorch reports them on one",
    ),
)
DEVICES = {d.name: d for d in _TABLE}
# names that the driver gives; other forms of these chips (H100 NVL, GH200, MIG slices) have other figures and match nothing
CUDA_NAMES = {
    "NVIDIA A30": "a30",
    "NVIDIA A100-SXM4-80GB": "a100-sxm",
    "NVIDIA A100-SXM4-40GB": "a100-sxm-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie",
    "NVIDIA A100-PCIE-40GB": "a100-pcie-40gb",
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200",
}


_OWN = "for another device pass a fxmask.analysis.devices.Device with its figures."


def of_machine(index: int | None = None) -> Device | None:
    """The table's entry of a CUDA device of this machine, the current one by default; None without CUDA, or where the table does not have it."""
    if not torch.cuda.is_available():
        return None
    return DEVICES.get(CUDA_NAMES.get(torch.cuda.get_device_name(index), ""))


def device(which: str | Device | torch.device) -> Device:
    """The entry called `which`: a name of the table, "cpu" (this one, measured), a torch.device that is here, or a Device, which is returned as it is.

    Raises ConfigError where there is no such entry.
    """
    if isinstance(which, Device):
        return which
    name = str(which).strip().lower()
    if name == "cpu":
        return cpu()
    if name in DEVICES:
        return DEVICES[name]
    known = f"expected one of {', '.join(DEVICES)}, or cpu"
    if re.fullmatch(r"cuda(:\d+)?", name):
        index = torch.device(name).index
        if not torch.cuda.is_available() or (index or 0) >= torch.cuda.device_count():
            raise ConfigError(f"no such device here: {known}, got {name!r}, and this process sees {torch.cuda.device_count()} CUDA devices.")
        if found := of_machine(index):
            return found
        raise ConfigError(message(f"no figures for this GPU: {known}, got {name!r}, a {torch.cuda.get_device_name(index)!r}.", fix=_OWN))
    raise ConfigError(message(f"unknown device: {known}, got {str(which)!r}.", fix=_OWN))


# ---- this CPU --------------------------------------------------------------------------------------------------------------------------------------------


def _least(call: Callable[[], Any], budget_s: float) -> float:
    """Least seconds of a call, of three at least: what disturbs a time on a shared machine only ever adds to it."""
    call()
    best, repeats, end = float("inf"), 3, time.perf_counter() + budget_s
    while repeats > 0 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
        repeats -= 1
    return best


def last_cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int | None:
    """Size of the largest cache of CPU 0, as Linux tells it; None where it does not."""
    sizes = []
    for path in folder.glob("index*/size"):
        if match := re.fullmatch(r"(\d+)([KMG]?)", path.read_text().strip()):
            sizes.append(int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]])
    return max(sizes, default=None)


@cache
def _measured(threads: int) -> Device:
    n, numbers = 1024, 32 * MIB
    with torch.inference_mode():  # constants, so that no generator moves
        a, b, c = (torch.full((n, n), 0.5, dtype=torch.float32, device="cpu") for _ in range(3))
        matmul_s = _least(lambda: torch.mm(a, b, out=c), 0.4)
        read, written = (torch.full((numbers,), 0.5, dtype=torch.float32, device="cpu") for _ in range(2))
        copy_s = _least(lambda: written.copy_(read), 0.3)
        small = torch.full((8,), 0.5, dtype=torch.float32, device="cpu")
        launch_s = _least(lambda: [small.add_(0) for _ in range(100)], 0.02) / 100
    cached, load = last_cache_bytes(), load_average()
    source = (
        f"measured here, {threads} threads of {os.cpu_count()} CPUs, load {'unknown' if load is None else f'{load:.1f}'}: fp32 matmul of {n}^3, copy of "
        f"{4 * numbers // MIB} MiB (bytes read and written, without the line that a store fetches), an op on 8 numbers, the least time of several; l2_bytes is "
        f"the last cache's size ({'from Linux' if cached else 'assumed'}); dense_tile is assumed"
    )
    return Device(
        name=f"cpu ({cpu_name()})",
        peak_flops={"fp32": 2 * n**3 / matmul_s},
        dram_bytes_s=2 * 4 * numbers / copy_s,
        l2_bytes=cached or 32 * MIB,
        l2_bytes_s=None,
        launch_s=launch_s,
        dense_tile=(256, 256),
        source=source,
        line_bytes=64,
        sector_bytes=64,
        is_cpu=True,
    )


def cpu() -> Device:
    """This CPU's own peaks with the current number of threads, measured in under two seconds once a process and number of threads."""
    return _measured(torch.get_num_threads())
