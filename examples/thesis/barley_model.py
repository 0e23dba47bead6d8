"""What the scripts of Barley's tables measure: what autograd saves of a real ResMLP-S12, and real BSR tensors of pruned activations."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started

import torch
from resmlp import PRESETS, ResMLP
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

MIB = 2**20
BATCH, PATCHES, DIM, CLASSES = 32, 196, 384, 1000  # ResMLP-S12 at 224 with 16-pixel patches


class PatchConvolution(nn.Module):
    """The patch embedding as a convolution, as ResMLP's authors have it: the same numbers, and autograd saves the image instead of a copy of it."""

    def __init__(self, dim: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, dim, patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2)


class S12(ResMLP):
    """ResMLP-S12, 15,350,872 parameters."""

    def __init__(self) -> None:
        super().__init__(PRESETS["s12"])
        self.embed = PatchConvolution(self.config.dim, self.config.patch)  # type: ignore[assignment]

    def patches(self, images: Tensor) -> Tensor:
        return images


def inputs(batch: int, device: str) -> tuple[Tensor, Tensor]:
    """Images and soft labels, as MixUp makes them."""
    return torch.zeros(batch, 3, 224, 224, device=device), torch.full((batch, CLASSES), 1 / CLASSES, device=device)


def soft_target_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy with soft labels, in the order of operations that decides what autograd saves: negated labels and log-softmax."""
    return torch.sum(-labels * F.log_softmax(logits, dim=-1), dim=-1).mean()


def saved_by_autograd(model: nn.Module, images: Tensor, labels: Tensor, on_input: Callable[[str, Tensor], Any] | None = None) -> int:
    """Bytes of the storages that one forward with loss leaves saved for the backward pass, each once; parameters, images and labels are not counted.

    `on_input(name, x)` sees what the linears of the blocks save of their inputs; of token mixing that is (samples * channels, patches).
    """
    known = {t.untyped_storage()._cdata for t in (*model.parameters(), images, labels)}
    saved: dict[int, Any] = {}
    running: list[str] = []
    linears = {m: n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.startswith("blocks.")}
    hooks = [m.register_forward_pre_hook(lambda m, args: running.append(linears[m])) for m in linears]
    hooks += [m.register_forward_hook(lambda m, args, out: running.clear()) for m in linears]

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in known:
            saved[storage._cdata] = storage  # held, so that no other storage gets its address
            if running and on_input is not None:
                on_input(running[-1], t.detach())
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        soft_target_loss(model(images), labels)
    for hook in hooks:
        hook.remove()
    return sum(storage.nbytes() for storage in saved.values())


def block_inputs() -> tuple[int, list[Tensor]]:
    """Bytes that autograd saves of one sample, and those among them that Barley prunes, as (patches, channels): inputs of the blocks' 36 linears."""
    torch.manual_seed(0)
    found: list[Tensor] = []
    images, labels = inputs(1, "cpu")
    total = saved_by_autograd(S12(), images.normal_(), labels, lambda name, x: found.append(x.t() if name.endswith("patch_mix") else x))
    return total, found


def pruned_bsr(a: Tensor, block: int, sparsity: Fraction) -> Tensor:
    """One sample's input (patches, channels) as BSR without its `round(n * sparsity)` weakest 1 x `block` blocks, by l2."""
    blocks = a.reshape(a.shape[0], -1, block)
    scores = torch.linalg.vector_norm(blocks, dim=-1).flatten()
    dropped = scores.argsort()[: round(scores.numel() * sparsity)]
    kept = torch.ones_like(scores, dtype=torch.bool).index_fill_(0, dropped, False).view(blocks.shape[:2])
    crow = F.pad(kept.sum(1).cumsum(0), (1, 0))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse BSR tensor support is in beta|Sparse invariant checks")  # the second of PyTorch 2.11
        return torch.sparse_bsr_tensor(crow, kept.nonzero()[:, 1], blocks[kept][:, None, :], a.shape, check_invariants=True)


def bsr_parts(bsr: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values, column indices and row pointers of a BSR tensor, as they lie in memory."""
    return bsr.values(), bsr.col_indices(), bsr.crow_indices()
