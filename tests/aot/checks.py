"""What a configuration must show: no spills, shared memory that fits, the architecture's tensor-core instruction, the pipeline at full depth, wide copies.

The exceptions are few and pinned to what they do reach, so that they cannot grow unseen:
  float32 without TF32 has no tensor-core instruction, and so one buffer less on sm_90 and sm_100;
  dW with mma.sync (sm_80, sm_120) transposes an operand through registers, which leaves one operand with buffers;
  float32 without TF32 is unrolled into fused multiply-adds, and with Triton 3.7.1 two of its dW on sm_80 spill 3 registers (every register limit that was tried
  is worse: 30 of 54 configurations spill at 255);
  TF32 wants the reduction axis contiguous, which W in dX and both operands of dW do not have: they are copied 4 bytes at a time.
"""

from __future__ import annotations

from artefacts import Facts
from record import MATMULS, Config

KIB = 1024
SHARED_LIMIT = {80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}  # bytes that one program may have
TENSOR_CORE = {8: "mma.sync", 9: "wgmma.mma_async", 10: "tcgen05.mma", 12: "mma.sync"}
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}


def element(config: Config) -> str:
    return config.pointer("values_ptr" if is_pruned(config) else "x_ptr")


def is_ieee(config: Config) -> bool:
    return element(config) == "fp32" and config.constant("PRECISION") == "ieee"


def is_pruned(config: Config) -> bool:
    return config.name == "pruned_matmul_kernel"


def is_dw(config: Config) -> bool:
    return config.name == "sampled_matmul_kernel" or is_pruned(config)


def widths(config: Config) -> set[int]:
    """Bytes of the copies that row strides allow; 16 is the most that an instruction takes."""
    size = ITEMSIZE[element(config)]
    if is_pruned(config):
        tile = config.constant("BT") * config.constant("B") * size  # bytes of a step's blocks
        return {min(16, config.constant("GM") * size), min(16, tile // (32 * config.options["num_warps"]))}
    divisors = ("GM", "XM") if is_dw(config) else ("XM", "WM")
    return {min(16, config.constant(name) * size) for name in divisors}


def check_matmul(facts: Facts, config: Config) -> list[str]:
    wrong: list[str] = []
    stages, async_mma = config.options["num_stages"], config.arch in (90, 100)  # sm_120 has mma.sync only
    ieee, tf32 = is_ieee(config), element(config) == "fp32" and not is_ieee(config)

    expected = {} if ieee else {TENSOR_CORE[config.arch // 10]}
    if set(facts.instructions) != set(expected):
        wrong.append(f"instructions {facts.instructions}, expected {sorted(expected) or 'no tensor core'}")

    depth = stages if async_mma and not ieee else stages - 1
    operands = 1 if is_dw(config) and not async_mma and element(config) != "fp32" and (is_pruned(config) or not config.constant("G_INNER")) else 2
    if [n for n, _ in facts.buffers] != [depth] * operands:
        wrong.append(f"buffers {facts.buffers}, expected {operands} operands {depth} deep")

    if not is_dw(config) and config.constant("TMA"):
        return wrong + ([] if facts.bulk and not facts.copies else [f"{facts.bulk} TMA copies and cp.async of {facts.copies}: expected TMA alone"])
    allowed = widths(config)
    transposed = is_dw(config) or not config.constant("W_ROWS")
    if tf32 and transposed:
        allowed |= {4}
    if not facts.copies or not set(facts.copies) <= allowed:
        wrong.append(f"cp.async of {facts.copies or 'nothing'}, expected bytes in {sorted(allowed)}")

    if facts.register_operands:
        wrong.append(f"{facts.register_operands} wgmma with an operand in registers")
    if config.arch == 90 and not ieee and max(facts.waits, default=0) < 1:
        wrong.append(f"wgmma waits {facts.waits}: none leaves one running")
    return wrong


def failures(facts: Facts, config: Config) -> list[str]:
    """What is wrong, a sentence each; empty where nothing is."""
    wrong = []
    few = 4 if is_dw(config) and is_ieee(config) and config.arch == 80 else 0
    if facts.spills > few:
        wrong.append(f"{facts.spills} spill loads and stores")
    if facts.shared > SHARED_LIMIT[config.arch]:
        wrong.append(f"{facts.shared} bytes of shared memory, sm_{config.arch} has {SHARED_LIMIT[config.arch]}")
    if not config.options["enable_fp_fusion"] and facts.fused:
        wrong.append(f"{facts.fused} fused multiply-adds in a kernel whose bits must equal the reference's")
    if config.name in MATMULS:
        wrong += check_matmul(facts, config)
    return wrong
