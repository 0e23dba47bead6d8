"""Peaks of devices: what a roofline and a traffic model divide by.

GPUs have the figures of their datasheets, each with its source; all peaks are dense ones, half of what is printed "with sparsity". They agree with the chips,
SMs x FLOP a clock and SM x boost clock: 56 x 2048 x 1.44 GHz = 165 TFLOP/s in bf16 for an A30, 108 x 2048 x 1.41 = 312 (A100), 132 x 4096 x 1.83 = 989 (H100).
No datasheet has the bandwidth of an L2 cache (the A100 whitepaper's 5,120 bytes a clock do not say which clock), so `l2_bytes_s` is None until it is measured,
which `python -m fxmask.bench.gpu` does: `dataclasses.replace(device("h200"), l2_bytes_s=..., source=...)`. This CPU's peaks are measured when first asked for.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from functools import cache

import torch

from ..bench.clock import load_average
from ..bench.provenance import cpu_name
from ..kernels.errors import ConfigError, message
from .cpu_speed import MEASURED, reached

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


# lower end of the 2 to 5 us that eager launches cost back to back, so that a bound made of it stays one; a replayed CUDA graph costs less
LAUNCH_S = 2e-6
_ASSUMED = "launch_s is an assumption (2 to 5 us for eager kernels back to back)"
_AMPERE = (128, 256), "dense_tile: 128x256, the largest of CUTLASS's and cuBLAS's kernels for sm_80"
_HOPPER = (
    (256, 256),
    "dense_tile: tiles of 128x256 whose loads a cluster of 2x1 shares, reported as the best for large products (NVIDIA/cutlass issue 2397)",
)
_A30_PEAKS = {"fp32": 10.3e12, "tf32": 82.6e12, "fp16": 165e12, "bf16": 165e12}
_A100_PEAKS = {"fp32": 19.5e12, "tf32": 156e12, "fp16": 312e12, "bf16": 312e12}
_H100_PEAKS = {"fp32": 66.9e12, "tf32": 494.7e12, "fp16": 989.4e12, "bf16": 989.4e12, "fp8": 1978.9e12}
_H100_PCIE_PEAKS = {"fp32": 51.2e12, "tf32": 378e12, "fp16": 756e12, "bf16": 756e12, "fp8": 1513e12}
_A30_SHEET = (
    "NVIDIA A30 datasheet (a30-datasheet.pdf): 10.3, 82 | 165*, 165 | 330* TFLOP/s, * with sparsity, 933 GB/s; "
    "tf32's 82 is 82.6 by the clock; L2 of 24 MB: TechPowerUp's database, no NVIDIA document at hand has it"
)
_A100_SHEET = "NVIDIA A100 datasheet, 1758950-r4, column {} (peaks without sparsity, bandwidth); L2 of 40 MB: NVIDIA A100 architecture whitepaper, table 4"
_H100_PAPER = "NVIDIA H100 Tensor Core GPU Architecture whitepaper v1.04, table 3 (dense peaks, L2 of 50 MB)"
_H100_PCIE_BRIEF = "H100 PCIe product brief PB-11133-001_v02, table 2: 2,000 GB/s (the whitepaper has 2,039)"
_H200_SHEET = (
    "NVIDIA H200 datasheet, SXM: the H100's peaks (989, 1979, 1979, 3958 with sparsity), 4.8 TB/s; "
    "L2 of 60 MB and 132 SMs as PyTorch reports them on one"
)


def _gpu(name: str, peaks: dict[str, float], dram: float, l2_mib: int, tile: tuple[tuple[int, int], str], source: str) -> Device:
    return Device(name, peaks, dram, l2_mib << 20, None, LAUNCH_S, tile[0], f"{source}; {tile[1]}; {_ASSUMED}")


_TABLE = (
    _gpu("a30", _A30_PEAKS, 933e9, 24, _AMPERE, _A30_SHEET),
    _gpu("a100-sxm", _A100_PEAKS, 2039e9, 40, _AMPERE, _A100_SHEET.format("80 GB SXM")),
    _gpu("a100-sxm-40gb", _A100_PEAKS, 1555e9, 40, _AMPERE, _A100_SHEET.format("40 GB SXM")),
    _gpu("a100-pcie", _A100_PEAKS, 1935e9, 40, _AMPERE, _A100_SHEET.format("80 GB PCIe")),
    _gpu("a100-pcie-40gb", _A100_PEAKS, 1555e9, 40, _AMPERE, _A100_SHEET.format("40 GB PCIe")),
    _gpu("h100-sxm", _H100_PEAKS, 3.35e12, 50, _HOPPER, f"{_H100_PAPER}; NVIDIA H100 datasheet: 3.35 TB/s"),
    _gpu("h100-pcie", _H100_PCIE_PEAKS, 2.0e12, 50, _HOPPER, f"{_H100_PAPER}; {_H100_PCIE_BRIEF}"),
    _gpu("h200", _H100_PEAKS, 4.8e12, 60, _HOPPER, _H200_SHEET),
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


def is_here(index: int | None = None) -> bool:
    """Whether PyTorch can use a CUDA device of this number, the current one by default. A GPU whose driver is too old for this PyTorch is counted, too."""
    return torch.cuda.is_available() and (index or 0) < torch.cuda.device_count()


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
        if not is_here(index):
            raise ConfigError(f"no such device here: {known}, got {name!r}, and this process sees {torch.cuda.device_count()} CUDA devices.")
        if found := of_machine(index):
            return found
        raise ConfigError(message(f"no figures for this GPU: {known}, got {name!r}, a {torch.cuda.get_device_name(index)!r}.", fix=_OWN))
    raise ConfigError(message(f"unknown device: {known}, got {str(which)!r}.", fix=_OWN))


@cache
def _measured(threads: int) -> Device:
    flops, bytes_s, launch_s, cached = reached()
    load = load_average()
    source = (
        f"measured here, {threads} threads of {os.cpu_count()} CPUs, load {'unknown' if load is None else f'{load:.1f}'}: {MEASURED}; l2_bytes is the last "
        f"cache's size ({'from Linux' if cached else 'assumed'}); dense_tile is assumed"
    )
    peaks, cache_bytes = {"fp32": flops}, cached or 32 << 20
    return Device(f"cpu ({cpu_name()})", peaks, bytes_s, cache_bytes, None, launch_s, (256, 256), source, line_bytes=64, sector_bytes=64, is_cpu=True)


def cpu() -> Device:
    """This CPU's own peaks with the current number of threads, measured in under two seconds once a process and number of threads."""
    return _measured(torch.get_num_threads())
