"""ResMLP: residual MLPs made of linears and nothing else, in the sizes that the examples train.

The model is that of Touvron et al., "ResMLP: Feedforward networks for image classification with data-efficient training" (2021), in the
small forms that the thesis of S. Bespalov trains on CIFAR-10 and ImageNet. Almost all of its arithmetic is in three linears a block, so it
is a good subject for block masks.

The thesis' names for them: `XPatch` is `blocks.i.patch_mix` (token mixing), `XChannel1` and `XChannel2` are `blocks.i.fc1` and
`blocks.i.fc2`. Not given by any source and therefore ours: LayerScale's start in the two thesis models and in `digits`, and PyTorch's
default init of a Linear everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class ResMLPConfig:
    """Shape of a ResMLP. `image` and `patch` are side lengths in pixels; `layerscale` is the start value of the residual gains; `hidden`: units between the
    channel linears, expansion * dim where it is None."""

    image: int = 32
    channels: int = 3
    patch: int = 4
    dim: int = 64
    depth: int = 5
    expansion: int = 4
    classes: int = 10
    layerscale: float = 0.1
    drop_path: float = 0.0
    hidden: int | None = None

    def __post_init__(self) -> None:
        if self.image % self.patch:
            raise ValueError(f"image must be a multiple of patch: got image={self.image}, patch={self.patch}.")
        if not 0.0 <= self.drop_path < 1.0:
            raise ValueError(f"drop_path is a probability in [0, 1): got {self.drop_path}.")

    @property
    def tokens(self) -> int:
        """Number of patches, which is the width of the token-mixing linears."""
        return (self.image // self.patch) ** 2


_S12 = ResMLPConfig(image=224, patch=16, dim=384, depth=12, classes=1000, layerscale=1e-4)
PRESETS: dict[str, ResMLPConfig] = {
    "digits": ResMLPConfig(image=8, channels=1, patch=1, dim=32, depth=2, layerscale=1.0),  # seconds an epoch on one core
    "cifar": ResMLPConfig(),
    "imagenet-thesis": replace(_S12, patch=14),
    "s12": _S12,
    "s24": replace(_S12, depth=24, layerscale=1e-5),
    "s36": replace(_S12, depth=36, layerscale=1e-6),
    "b24": replace(_S12, dim=768, depth=24, layerscale=1e-6),
    "b24-8": replace(_S12, patch=8, dim=768, depth=24, layerscale=1e-6),
}


class Affine(nn.Module):
    """`alpha * x + beta`, one pair a channel: ResMLP's replacement of LayerNorm, without statistics. Any [..., dim] -> the same shape."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(dim))
        self.beta = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.beta, self.alpha, x)


class DropPath(nn.Module):
    """Stochastic depth: a sample's branch is dropped with probability `p`, else scaled by 1 / (1 - p). [B, T, C] -> [B, T, C]."""

    def __init__(self, p: float) -> None:
        super().__init__()
        # a Dropout over one number a sample; symbolic tracing keeps it as a module, so that train() and eval() still act on the trace
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.drop(x.new_ones(x.shape[0], 1, 1))


class Block(nn.Module):
    """One ResMLP block: mix the tokens, then the channels, each as a residual branch. [B, T, C] -> [B, T, C]."""

    def __init__(self, c: ResMLPConfig) -> None:
        super().__init__()
        self.norm1 = Affine(c.dim)
        self.patch_mix = nn.Linear(c.tokens, c.tokens)
        self.gain1 = nn.Parameter(torch.full((c.dim,), c.layerscale))
        self.norm2 = Affine(c.dim)
        hidden = c.hidden or c.expansion * c.dim
        self.fc1 = nn.Linear(c.dim, hidden)
        self.fc2 = nn.Linear(hidden, c.dim)
        self.gain2 = nn.Parameter(torch.full((c.dim,), c.layerscale))
        self.drop_path = DropPath(c.drop_path) if c.drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.patch_mix(self.norm1(x).transpose(1, 2)).transpose(1, 2)  # the linear runs along the tokens: [B, C, T]
        x = x + self.drop_path(self.gain1 * mixed)
        return x + self.drop_path(self.gain2 * self.fc2(F.gelu(self.fc1(self.norm2(x)))))


class ResMLP(nn.Module):
    """Images [B, channels, image, image] -> logits [B, classes].

    Submodules: `embed` (Linear on flattened patches), `blocks.i.{norm1, patch_mix, norm2, fc1, fc2}`, `norm`, `head`. Can be traced by
    `torch.fx.symbolic_trace` and exported by `torch.export`.

    Example:
        >>> ResMLP(PRESETS["digits"])(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(self, config: ResMLPConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Linear(config.channels * config.patch**2, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = Affine(config.dim)
        self.head = nn.Linear(config.dim, config.classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(self.patches(images))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))

    def patches(self, images: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, tokens, C * patch * patch], in the order of a convolution's weight. Another image size fails in reshape."""
        c, side = self.config, self.config.image // self.config.patch
        x = images.reshape(images.shape[0], c.channels, side, c.patch, side, c.patch)
        return x.permute(0, 2, 4, 1, 3, 5).reshape(images.shape[0], c.tokens, c.channels * c.patch**2)
