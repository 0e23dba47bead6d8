"""Lower bounds of an op's time: a roof each for arithmetic, DRAM, L2 (where its bandwidth was measured) and launches.

Williams, Waterman, Patterson, CACM 52(4), 2009; the largest bound says what an op is bound by. `t_min_us` is a lower bound, never a prediction of a speed-up;
`speedup_bound` is the ratio of two, above which a measured one lies where dense is further from its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..passes.counting.work import Work
from . import traffic
from .devices import Device


def bounds(work: Work, device: Device, tf32: bool) -> dict[str, float]:
    """Seconds that each roof asks for; a roof of which nothing is known is left out."""
    c, peak = work.cost, peak_of(work, device, tf32)
    found = {"dram": c.bytes_min / device.dram_bytes_s, "launch": work.launches * device.launch_s}
    if peak and c.flop_issued:
        found["compute"] = c.flop_issued / peak
    if device.l2_bytes_s and c.bytes_req:
        found["l2"] = c.bytes_req / device.l2_bytes_s
    return found


def peak_of(work: Work, device: Device, tf32: bool) -> float | None:
    """FLOP/s of the device in the dtype that is used, where it is known."""
    return device.peak("tf32" if tf32 and work.dtype == torch.float32 else work.dtype or torch.float32)


def dense_of(work: Work) -> Work:
    """The same op of the dense layer."""
    return work if work.dense is None else replace(work, cost=work.dense, dense=None, kept=None, nnzb=None, block=None, launches=1)


def seconds(work: Work, device: Device, tf32: bool = False) -> float:
    """The largest bound: no implementation of this op, as it is counted here, is faster on the device."""
    return max(bounds(work, device, tf32).values())


def dense_seconds(work: Work, device: Device, tf32: bool = False) -> float:
    """The largest bound of what a dense step does instead of this op: nothing instead of one that is `extra`."""
    return 0.0 if work.extra else seconds(dense_of(work), device, tf32)


def row(work: Work, device: Device, tf32: bool = False) -> dict[str, Any]:
    """The columns of the table `roofline`. AI is FLOP/byte of useful FLOP; the ridge is peak over bandwidth in the dtype that is used (a dense peak)."""
    c, found = work.cost, bounds(work, device, tf32)
    plain = dense_of(work)
    t, t_dense = max(found.values()), seconds(plain, device, tf32)
    peak, bounded = peak_of(work, device, tf32), work.dense is not None and not device.is_cpu
    return {
        "ai_dram": c.flop_useful / c.bytes_min if c.bytes_min else None,
        "ai_l2": c.flop_useful / c.bytes_req if c.bytes_req else None,
        "ridge_dram": peak / device.dram_bytes_s if peak else None,
        "ridge_l2": peak / device.l2_bytes_s if peak and device.l2_bytes_s else None,
        "bound": max(found, key=lambda k: found[k]),
        "t_min_us": 1e6 * t,
        "t_dense_min_us": 1e6 * t_dense if work.dense is not None else None,
        "speedup_bound": t_dense / t if bounded and t else None,
        "l2_bw_to_tie": c.bytes_req / t_dense / 1e12 if bounded and t_dense else None,
        "dram_est_us": 1e6 * sum(o["bytes_dram_est"] for o in traffic.operands(work, device)) / device.dram_bytes_s,
    }
