"""Runs the bodies of the GPU tests on the CPU, in Triton's interpreter, with small shapes: TRITON_INTERPRET=1 PYTHONPATH=.:tests python tests/gpu/rehearse.py

What it cannot show: CUDA graphs, streams, the sync debug mode, running out of memory, bfloat16 and tf32.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext

import torch
from gpu import bodies, pruning_bodies, training_bodies

W = torch.randn(100, 130, generator=torch.Generator().manual_seed(0))
CASES = [
    *((bodies.check_numbers, ("cpu", (37, 64, 96), block, 0.6, p, 5)) for p in ("fp16", "fp32") for block in ((16, 16), (64, 64), (3, 5))),
    *((bodies.check_numbers, ("cpu", (20, *features), (16, 16), 0.6, "fp16", 8)) for features in ((33, 34), (34, 33))),
    (bodies.check_repeats, ("cpu", (40, 64, 96), (32, 32), 0.7, "fp16", 1)),
    *((bodies.check_mask, ("cpu", w, block, 0.7)) for w in (W, W.half(), torch.zeros(100, 130)) for block in ((16, 16), (64, 32))),
    (bodies.check_lists, ("cpu", torch.rand(8, 10, generator=torch.Generator().manual_seed(0)) < 0.3, (16, 16))),
    (bodies.check_group, ("cpu", ((100, 130), (64, 64), (17, 300)), (32, 16), torch.float16)),
    (bodies.check_scores, ("cpu", ((100, 130), (64, 64), (17, 300)), (32, 16), torch.float16)),
    (bodies.check_token_mixing, ("cpu", (2, 24, 96, 64), (16, 16), torch.float16)),
    *((bodies.check_dropout, ("cpu", (70, 64, 96), block, 0.5, p, 5)) for p in ("fp16", "fp32") for block in ((16, 32), (64, 64), (3, 5))),
    (bodies.check_dropout_repeats, ("cpu", (150, 32, 64), (16, 16), 0.5, "fp16", 1)),
    (training_bodies.check_training, ("cpu",)),
    (training_bodies.check_training, ("cpu", torch.float16, 0.01)),
    (training_bodies.check_optimiser_steps, ("cpu", nullcontext, 1)),
    (training_bodies.check_optimiser_steps, ("cpu", nullcontext, 1, {"masked_step": True})),
    (training_bodies.check_backward_thread, ("cpu", False)),
    (training_bodies.check_compiled, ("cpu", "aot_eager")),
    (training_bodies.check_autocast, ("cpu", torch.float16)),
    *((training_bodies.check_set_aside, ("cpu", dtype, block)) for dtype in (torch.float32, torch.float16) for block in ((16, 16), (3, 5))),
    (bodies.check_many_elements, ("cpu", bodies.tokens_beyond(2**12, 128), 128, 64, torch.float16, 20)),
    (training_bodies.check_usable_after, ("cpu", lambda model: None)),
    *((pruning_bodies.check_pruned_dw, ("cpu", (2, 15, 40), 34, f, 0.6, "fp16", block, 1)) for f, block in ((16, None), (32, (16, 16)), (24, (5, 3)))),
    (pruning_bodies.check_pruned_dw, ("cpu", (2, 15, 40), 34, 16, 1, "fp32", None, 1)),
    (pruning_bodies.check_nm, ("cpu", (11, 48), 2, 4, "fp32", "fp16")),
    *((pruning_bodies.check_layer, ("cpu", masked)) for masked in (False, True)),
]


def main() -> int:
    begin = time.monotonic()
    for body, args in CASES:
        body(*args)
        print(f"{body.__name__} {' '.join(str(a) for a in args if not isinstance(a, torch.Tensor))}")
    print(f"{len(CASES)} bodies in {time.monotonic() - begin:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
