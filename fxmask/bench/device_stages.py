"""What the stages of `fxmask.bench.gpu` run in their own processes: precompile, a tiny case of a kernel for a memory checker, ceilings, and the measurements
that have a csv of their own: bandwidth, tensorcore, tiles, splits, metadata, dropout, pruning, nm.

All but `precompile` and `ceilings` run on a CPU as well, in Triton's interpreter: the same bodies on tiny sizes, whose rows get no verdict.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..errors import FxMaskError
from ..kernels import nm_ops, ops, prune, prune_ops
from ..kernels.dispatch import triton_ops
from .clock import flush_buffer, time_cuda
from .driver import CEILINGS, Run, check_device, run_cells
from .dropping import ours
from .inputs import make_mask
from .part import run_part
from .parts import PARTS
from .precompiling import compile_choices, precompile
from .session import Session
from .sweeps import OPS, sweep
from .table import what

KERNELS = (
    "list_matmul", "list_matmul_dx", "sampled_matmul", "mask_cast", "zero_masked", "aside", "metadata", "group", "dropped", "pruned_matmul", "nm_mask",
)  # fmt: skip


def tiny(kernel: str) -> int:
    """One small ragged case of a kernel."""
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    block = (3, 5) if kernel in ("mask_cast", "zero_masked", "aside") else (16, 32)
    x, w, gy = (torch.randn(r, c, device=device).half() for r, c in ((70, 200), (150, 200), (70, 150)))
    mask = make_mask((-(-150 // block[0]), -(-200 // block[1])), 0.6, "random", 0).to(device)
    keep, step = torch.tensor(int(mask.sum()), device=device), torch.zeros((), dtype=torch.int64, device=device)
    args = (mask, *block, "masked", None, "triton")
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "list_matmul": lambda: ops.masked_linear(x, w, None, *args),
        "list_matmul_dx": lambda: ops.masked_linear_dx(gy, w, *args),
        "sampled_matmul": lambda: ops.masked_linear_dw(gy, x, *args),
        "mask_cast": lambda: ops.masked_linear(x, w, None, *args),
        "zero_masked": lambda: ops.masked_linear_dw(gy, x, *args),
        "aside": lambda: triton_ops().aside.set_aside([w], [mask], [0], block).values,
        "metadata": lambda: ops.block_index(w, keep, step, *block, "fro", "lowest", 0, "triton"),
        "dropped": lambda: ours(x, w, gy, block, 0.5, "triton")[2],
        "group": lambda: triton_ops().refresh_group([w, x], [keep, keep], block)[1][0],
        "nm_mask": lambda: nm_ops.nm_magnitude(w, 2, 4, False, 0.0, w.dtype)[0],
        "pruned_matmul": lambda: prune_ops.pruned_dw(gy, *prune.compress(x, 16, 7, False), list(x.shape), False, mask, *block, "triton"),
    }
    out = calls[kernel]()
    if device.type == "cuda":
        torch.cuda.synchronize()
    launched = {k: n for k, n in triton_ops().launch.device.LAUNCHES.items() if n}
    print(f"{kernel}: {tuple(out.shape)} {launched}")
    return 0 if launched else 1


def ceilings(out: Path) -> int:
    """What this GPU reaches: a large bf16 matmul through cuBLAS, and a kernel that reads 4 GB and writes as much, bytes read plus bytes written.

    The kernel negates bf16: `copy_` in a CUDA graph is a node for the copy engine, which reached 2.7 TB/s where kernels read 4.6 from the same memory.
    """
    device = check_device("cuda")
    flush = flush_buffer(device)
    a, b = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))
    matmul = time_cuda(lambda: (a @ b,), flush, 50).warm[1]
    free = torch.cuda.mem_get_info(device)[0]
    source = torch.empty(min(4 << 30, free // 4) // 2, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    copy = time_cuda(lambda: (torch.neg(source, out=target),), flush, 30).warm[1]
    found = {"flops_per_s": 2 * 8192**3 / matmul * 1e3, "bytes_per_s": 2 * source.nbytes / copy * 1e3}
    out.mkdir(parents=True, exist_ok=True)
    (out / CEILINGS).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"cuBLAS bf16 8192^3: {found['flops_per_s'] / 1e12:.0f} TFLOP/s ({matmul:.3f} ms); a kernel that copies: {found['bytes_per_s'] / 1e12:.2f} TB/s")
    return 0


def measure(stage: str, out: Path, quick: bool, time_limit: float | None, one_by_one: bool) -> int:
    """A stage with a csv of its own; 1 where a cell failed. A sweep compiles its choices before, side by side; `one_by_one`: each when its turn comes."""
    rehearsal = not torch.cuda.is_available() and triton_ops().interpreting()
    device = torch.device("cpu") if rehearsal else check_device("cuda")
    if stage in PARTS:
        cells = PARTS[stage].cells(device, quick)
        rows, left = run_part(Session(device, out, time_limit, 0.0, rehearsal=rehearsal), PARTS[stage], cells)
    else:
        cells, settings = sweep(stage, device, quick)
        run = Run(device, out, time_limit, 0.0, rehearsal=rehearsal, **settings)
        if not rehearsal and not one_by_one and not compile_choices(run, cells):  # a row of any cell would be wrong
            print(f"{stage}: the device answers no more after one of the choices; with --one-by-one their rows say after which.")
            return 1
        left = run_cells(run, cells)
        rows = run.table.of({**run.shared, **what(c)} for c in cells)
    failed = [r for r in rows if r["gate"] == "fail"]
    print(f"{stage}.csv: {len(rows) - len(failed)} of {len(cells)} cells, {len(failed)} failed, {left} left", *sorted({r["verdict"] for r in failed})[:1])
    return 1 if failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m fxmask.bench.device_stages")
    sub = p.add_subparsers(dest="stage", required=True)
    sub.add_parser("precompile")
    sub.add_parser("tiny").add_argument("kernel", choices=KERNELS)
    sub.add_parser("ceilings").add_argument("--out", type=Path, required=True)
    for name in (*PARTS, *OPS):
        q = sub.add_parser(name)
        q.add_argument("--out", type=Path, required=True)
        q.add_argument("--quick", action="store_true", help="fewer cells")
        q.add_argument("--one-by-one", action="store_true", help="compile nothing before its turn")
        q.add_argument("--time-limit", type=float, default=None, metavar="S", help="begin no cell that would not end within S seconds")
    a = p.parse_args(argv)
    try:
        if a.stage in PARTS or a.stage in OPS:
            return measure(a.stage, a.out, a.quick, a.time_limit, a.one_by_one)
        return tiny(a.kernel) if a.stage == "tiny" else ceilings(a.out) if a.stage == "ceilings" else precompile()
    except FxMaskError as e:
        print(f"fxmask: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
