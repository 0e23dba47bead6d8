"""What a compiled kernel is made of: registers, spills, shared memory, pipeline buffers, copies and tensor-core instructions."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import triton
from record import Config
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INSTRUCTIONS = ("wgmma.mma_async", "mma.sync", "tcgen05.mma")


class Facts(NamedTuple):
    registers: int
    spills: int  # local loads and stores in the SASS
    shared: int  # bytes
    buffers: list[tuple[int, str]]  # pipeline buffers: how many, of what; barriers left out
    copies: dict[int, int]  # cp.async: bytes -> how many in the PTX
    bulk: int  # TMA copies of a tensor's box
    instructions: dict[str, int]
    waits: list[int]  # wgmma groups that may still run at each wait
    register_operands: int  # wgmma with an operand in registers
    fused: int  # fused multiply-adds in float32


def read(ptx: str, ttgir: str, resources: str, sass: str, shared: int) -> Facts:
    buffers = re.findall(r"ttg\.local_alloc\s*:\s*\(\)\s*->\s*!ttg\.memdesc<(\d+)x([0-9x]+x\w+)", ttgir)
    registers = re.search(r"REG:(\d+)", resources)
    return Facts(
        registers=int(registers[1]) if registers else -1,
        spills=len(re.findall(r"\b(?:STL|LDL)\b", sass)),
        shared=shared,
        buffers=[(int(n), what) for n, what in buffers if not what.endswith("xi64")],
        copies=dict(Counter(int(size, 16) for size in re.findall(r"cp\.async\.c[ag]\.shared[^;]*?, 0x([0-9a-f]+)[,;\s]", ptx))),
        bulk=len(re.findall(r"cp\.async\.bulk\.tensor\S*\.shared", ptx)),
        instructions={name: ptx.count(name + ".") for name in INSTRUCTIONS if name + "." in ptx},
        waits=[int(n) for n in re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", ptx)],
        register_operands=len(re.findall(r"wgmma\.mma_async[^;{]*\{[^}]*\},\s*\{", ptx)),
        fused=len(re.findall(r"fma\.rn\.(?:ftz\.)?f32", ptx)),
    )


def _tool(name: str, *args: str) -> str:
    done = subprocess.run([TOOLS / name, *args], capture_output=True, text=True)
    if done.returncode or not done.stdout:
        raise RuntimeError(f"{name}: {done.stderr.strip() or 'printed nothing'}")
    return done.stdout


def compile_config(config: Config) -> dict[str, Any]:
    """Triton's artefacts: asm by kind, and the bytes of shared memory."""
    source = ASTSource(config.kernel, config.signature, config.constants, config.attrs)
    compiled = triton.compile(source, target=GPUTarget("cuda", config.arch, 32), options=config.options)
    return {**compiled.asm, "shared": compiled.metadata.shared}


def facts_of(config: Config) -> Facts:
    made = compile_config(config)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made["cubin"])
        file.flush()
        resources = _tool("cuobjdump", "-res-usage", file.name)
        # no stack and no local memory: nothing to spill into, so the slower disassembly has nothing to show
        clean = re.search(r"STACK:0\b", resources) and re.search(r"LOCAL:0\b", resources)
        sass = "" if clean else _tool("nvdisasm", "-c", file.name)
    return read(made["ptx"], made["ttgir"], resources, sass, made["shared"])
