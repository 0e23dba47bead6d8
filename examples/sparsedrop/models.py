"""The networks of SparseDrop's table 1: an MLP, a ViT and a character GPT. Linears are made by `linear(inputs, outputs)`, so that dropout can go before each.

The sources give widths, depths and heads; four times the width inside a transformer's MLP, pre-norm, learned positions and GELU are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MakeLinear = Callable[[int, int], nn.Module]


class MLP(nn.Sequential):
    """An input layer, `hidden` hidden ones and an output layer, ReLU between them. [B, C, H, W] -> [B, classes]."""

    def __init__(self, linear: MakeLinear, inputs: int, classes: int, width: int = 1024, hidden: int = 2) -> None:
        layers: list[nn.Module] = [nn.Flatten(), linear(inputs, width), nn.ReLU()]
        for _ in range(hidden):
            layers += [linear(width, width), nn.ReLU()]
        super().__init__(*layers, linear(width, classes))


class Block(nn.Module):
    """Attention and an MLP, each behind a norm and beside a residual path. [B, T, width] -> [B, T, width]."""

    def __init__(self, linear: MakeLinear, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.fc1, self.fc2 = linear(width, 4 * width), linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, c))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    """Patches, blocks, the mean over the patches, a head. [B, C, side, side] -> [B, classes]."""

    def __init__(self, linear: MakeLinear, channels: int, side: int, classes: int, width: int = 1024, depth: int = 2, heads: int = 8, patch: int = 2) -> None:
        super().__init__()
        self.patch = patch
        self.embed = linear(channels * patch**2, width)
        self.position = nn.Parameter(0.02 * torch.randn((side // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(linear, width, heads, causal=False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = F.pixel_unshuffle(images, self.patch).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(self.embed(patches) + self.position)).mean(1))


class GPT(nn.Module):
    """Characters [B, T] -> logits of the next ones [B, T, vocabulary]."""

    def __init__(self, linear: MakeLinear, vocabulary: int, context: int = 128, width: int = 1024, depth: int = 4, heads: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(*(Block(linear, width, heads, causal=True) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens) + self.position[: tokens.shape[1]])))


def maker(method: str, p: float) -> MakeLinear:
    """Linears; of `dropout` behind a Dropout each."""
    return (lambda i, o: nn.Sequential(nn.Dropout(p), nn.Linear(i, o))) if method == "dropout" else nn.Linear


NETWORKS: dict[str, Callable[..., Any]] = {"mlp": MLP, "vit": ViT, "gpt": GPT}
