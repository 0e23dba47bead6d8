"""Large models are analysed in seconds and without their memory: each in a fresh process, on the meta device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS, BYTES = 10, 2 * 10**9
SCRIPT = """
import json, resource, sys, time
from pathlib import Path

def peak():
    "Bytes; a child inherits its parent's ru_maxrss, and Linux has the process's own."
    status = Path("/proc/self/status")
    own = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM")] if status.exists() else []
    return 1024 * int(own[0] if own else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

began = time.perf_counter()
sys.path[:0] = {path}
import torch, fxmask
from analysis.counted import Block, ViT
from torch import nn
torch.set_num_threads(2)

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(4096, 32, 16384, batch_first=True, norm_first=True) for _ in range(24)))
    def forward(self, x):
        return self.blocks(x)

with torch.device("meta"):
    model, x = {make}
if {mask}:
    fxmask.apply(model, ratio=0.8, block=(64, 64))
before, used = time.perf_counter(), time.process_time()
report = fxmask.analyze(model, x, device="h100-sxm")
after, done = time.perf_counter(), time.process_time()
print(json.dumps({{
    "analyze_s": after - before, "cpu_s": done - used, "total_s": after - began, "rss": peak(),
    "params": report.summary["params"], "kept": report.summary["params_kept"], "flop": report.summary["flop"], "dense": report.summary["flop_dense"],
    "nodes": len(report.tables["nodes"]), "coverage": report.summary["coverage"],
}}))
"""
# the model and its input; parameters; MACs of the forward
VIT_L = 'ViT(1024, 16, 24), torch.zeros(8, 3, 224, 224, device="meta")'
WIDE = 'Wide(), torch.zeros(1, 2048, 4096, device="meta")'
T = 8 * 197
CASES = {
    "vit_l": (VIT_L, 304_326_632, T * 24 * 12 * 1024**2 + 8 * 24 * 2 * 197**2 * 1024 + 8 * 196 * 768 * 1024 + 8 * 1024 * 1000),
    "wide": (WIDE, 24 * (12 * 4096**2 + 13 * 4096), 2048 * 24 * 12 * 4096**2 + 24 * 2 * 2048**2 * 4096),
}


def measured(make, mask):
    code = SCRIPT.format(path=[str(ROOT), str(ROOT / "tests"), str(ROOT / "examples")], make=make, mask=mask)
    env = {**os.environ, "OMP_NUM_THREADS": "2", "FXMASK_TUNE": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mask"),
    [("wide", True), ("vit_l", False), ("vit_l", True), ("wide", False)],
    ids=["wide-masked", "vit_l-dense", "vit_l-masked", "wide-dense"],
)
def test_large_models(name, mask, record_property, capsys):
    make, params, macs = CASES[name]
    got = measured(make, mask)
    shown = f"{name} {'64x64 at 80 %' if mask else 'dense'}: {got['analyze_s']:.1f} s ({got['cpu_s']:.1f} s of CPU), with imports {got['total_s']:.1f} s"
    with capsys.disabled():
        print(f"\n{shown}, {got['rss'] / 1e9:.2f} GB, {got['nodes']} rows")
    assert got["params"] == params and got["dense"]["fwd"] == 2 * macs and min(got["coverage"].values()) == 100
    if mask:
        assert 0.2 < got["flop"]["total"] / got["dense"]["total"] < 0.5 and got["kept"] < params
        if name == "wide":  # out_proj and the two of the MLP are masked, in_proj is no Linear: 820 of 4,096 blocks are kept, and twice 3,277 of 16,384
            assert got["flop"]["fwd"] == 2 * (macs - 2048 * 24 * (9 * 4096**2 - (820 + 2 * 3277) * 64**2))
    else:
        assert got["flop"] == got["dense"] and got["kept"] == params
    assert got["cpu_s"] < SECONDS, shown  # of the process: what else runs on the machine does not count
    assert got["rss"] < BYTES, shown
