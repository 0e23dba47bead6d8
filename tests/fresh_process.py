"""Training in processes of their own: by torch.compile(backend="fxmask") where nobody imports fxmask, and by fxmask.apply."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
sys.path[:0] = {path}
{make}
torch.manual_seed(0)
model = make()
if {apply}:
    import fxmask
    call = fxmask.apply(model, ratio=0.75, block=(8, 16))
else:
    assert "fxmask" not in sys.modules
    call = torch.compile(model, backend="fxmask", options={{"ratio": 0.75, "block": (8, 16), "inner": {inner!r}}})
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for _ in range(3):
    optimizer.zero_grad()
    loss = call(inputs()).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item())
print(sum(p.double().sum().item() for p in model.parameters()))
assert {apply} or "fxmask.compiler.backend" in sys.modules
"""


def run(make, apply, inner="eager"):
    """The losses, and the sum of all weights."""
    code = SCRIPT.format(path=[str(Path(__file__).parents[1] / "examples")], make=make, apply=apply, inner=inner)
    # not from the checkout: its folder would make an import of fxmask look like an installed one
    env = {**os.environ, "FXMASK_TUNE": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=Path.home(), env=env)
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


def check(make, inner):
    """`make`: code that defines make() and inputs()."""
    with ThreadPoolExecutor() as at_once:
        found, expected = at_once.map(lambda apply: run(make, apply, inner), (False, True))
    assert len(found) == 4
    assert found == (expected if inner == "eager" else pytest.approx(expected, rel=1e-4))
