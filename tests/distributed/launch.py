"""Start a script on several processes of this machine, as a user would: by torchrun, gloo on the CPU, one thread each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def torchrun(script: Path, *args: object, ranks: int = 2, timeout: float = 200, **variables: object) -> str:
    """Run it to its end; what it printed. AssertionError with its last lines where a rank failed or hung."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    variables = {"OMP_NUM_THREADS": 1, "FXMASK_TUNE": 0, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", **variables}
    env = {**os.environ, **{k: str(v) for k, v in variables.items()}}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks), str(script)]
    done = subprocess.run([*command, *map(str, args)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout
