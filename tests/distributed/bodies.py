"""What runs on every rank of the distributed tests: `torchrun bodies.py FILE CASE...` runs each case and writes {case: "" or what failed} to FILE.

One start for many cases, because a start costs seconds. A case that fails on one rank fails on all; those after it still run.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from distributed import ddp_cases, fsdp_cases, recipe_cases, stage_cases

CASES = {**ddp_cases.CASES, **fsdp_cases.CASES, **recipe_cases.CASES, **stage_cases.CASES}


def main() -> None:
    warnings.simplefilter("error", category=UserWarning)  # FxMaskWarning is one
    warnings.filterwarnings("ignore", module="torch")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found: dict[str, str] = {}
    for name in sys.argv[2:]:
        failure, begin = "", time.perf_counter()
        try:
            CASES[name]()
        except Exception:
            failure = traceback.format_exc()[-3000:]
        failures = [""] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
        if dist.get_rank() == 0:
            print(f"{name}: {time.perf_counter() - begin:.1f} s", flush=True)
        found[name] = "\n".join(f"rank {rank}:\n{text}" for rank, text in enumerate(failures) if text)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # outcomes are written; PyTorch's own threads have aborted a rank that was ending, once in some hundred runs ("terminate called without ...")


if __name__ == "__main__":
    main()
