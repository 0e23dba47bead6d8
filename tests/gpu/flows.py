"""Runs the bodies of `test_flows.py` on the CPU: PYTHONPATH=.:tests python tests/gpu/flows.py [part of a name]; with TRITON_INTERPRET=1 by the kernels.

What it cannot show: tensors on two devices, CUDA graphs, streams, memory.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
import warnings

from gpu import flow_bodies, flow_compiled, flow_cuda, flow_graphed, flow_models, flow_state, flow_systems

TABLES = tuple(m.FLOWS for m in (flow_bodies, flow_state, flow_models, flow_compiled, flow_systems, flow_cuda, flow_graphed))
FLOWS = {name: flow for table in TABLES for name, flow in table.items()}
assert len(FLOWS) == sum(map(len, TABLES))  # no name twice


def main(part: str = "") -> int:
    impl = "triton" if os.environ.get("TRITON_INTERPRET") == "1" else "auto"
    chosen, failed = {name: flow for name, flow in FLOWS.items() if part in name}, []
    begin = time.monotonic()
    for name, flow in chosen.items():
        since = time.monotonic()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.filterwarnings("ignore", "Conversion of an array with ndim", DeprecationWarning)  # Triton's interpreter
                warnings.filterwarnings("ignore", ".torch.jit.script")  # a module that Inductor imports
                flow("cpu", impl)
        except Exception:
            traceback.print_exc()
            failed.append(name)
        print(f"{name}: {time.monotonic() - since:.2f} s{', FAILED' if name in failed else ''}", flush=True)
    print(f"{len(chosen)} flows, impl={impl!r}, in {time.monotonic() - begin:.1f} s; failed: {', '.join(failed) or 'none'}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
