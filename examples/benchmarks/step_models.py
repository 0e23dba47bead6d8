"""The models of `train_step.py`, with a batch of noise for each, and which of their linears are masked.

Masked are the linears of the blocks: neither heads nor the patch embedding. In torchvision's ViT a block's in_proj is a bare Parameter, which stays dense.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from resmlp import PRESETS, ResMLP, ResMLPConfig
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision_shim import import_torchvision

from fxmask.errors import ConfigError
from fxmask.kernels.errors import message

SHARE = 0.8  # of the free memory that the default depth of gpt plans with
STATE_BYTES = 12  # of a float32 weight between steps: itself and AdamW's two momenta; gradients live for a step alone


@dataclass(frozen=True)
class Spec:
    """One model on one device; width, depth and sequence (tokens of a sample) are those of gpt."""

    name: str
    device: torch.device
    batch: int
    width: int = 512
    depth: int = 4
    sequence: int = 128
    seed: int = 0

    @property
    def vocabulary(self) -> int:
        return 8 * self.width

    @property
    def size(self) -> str:
        """What tells two models of one name apart."""
        return f"width {self.width}, depth {self.depth}, sequence {self.sequence}" if self.name == "gpt" else ""


class GPTBlock(nn.Module):
    """LayerNorm, causal attention, LayerNorm, an MLP of 4 times the width, both as residual branches. [B, T, C] -> [B, T, C]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 128)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class GPT(nn.Module):
    """Tokens [B, T] -> logits [B, T, vocabulary]; the head has a weight of its own."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.embed = nn.Embedding(spec.vocabulary, spec.width)
        self.position = nn.Parameter(0.02 * torch.randn(spec.sequence, spec.width))
        self.blocks = nn.ModuleList(GPTBlock(spec.width) for _ in range(spec.depth))
        self.norm, self.head = nn.LayerNorm(spec.width), nn.Linear(spec.width, spec.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class MLP(nn.Module):
    """Eight linears of one width with GELU, then a head of 10 classes."""

    def __init__(self, width: int = 1024, depth: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.gelu(block(x))
        return self.head(x)


class Kind(NamedTuple):
    """How a model is built, what it eats, which modules are masked (a glob), and the usual batch on a GPU and on a CPU."""

    build: Callable[[Spec], nn.Module]
    sample: tuple[int, ...]  # shape of one; () for tokens
    classes: int
    include: str
    batches: tuple[int, int]


def _resmlp(config: ResMLPConfig, *batches: int) -> Kind:
    return Kind(lambda _: ResMLP(config), (config.channels, config.image, config.image), config.classes, "blocks.*", (batches[0], batches[-1]))


MODELS = {
    "resmlp-s12": _resmlp(PRESETS["s12"], 128, 4),
    "vit-b16": Kind(lambda _: import_torchvision().models.vit_b_16(), (3, 224, 224), 1000, "encoder.layers.*", (128, 2)),
    "gpt": Kind(GPT, (), 0, "blocks.*", (8, 2)),
    "mlp": Kind(lambda _: MLP(), (1024,), 10, "blocks.*", (4096, 4096)),
    "cifar": _resmlp(PRESETS["cifar"], 128),
    "tiny": _resmlp(ResMLPConfig(image=16, dim=32, depth=2, layerscale=1.0), 4),  # for tests
}


def build(spec: Spec) -> nn.Module:
    """The model in train mode, with the same weights each time."""
    torch.manual_seed(spec.seed)
    with spec.device:
        return MODELS[spec.name].build(spec).train()


def data(spec: Spec) -> tuple[Tensor, Tensor]:
    """One batch: inputs N(0, 1) or random tokens, and random targets."""
    kind, g = MODELS[spec.name], torch.Generator().manual_seed(spec.seed)
    if not kind.sample:
        tokens = torch.randint(spec.vocabulary, (spec.batch, spec.sequence + 1), generator=g).to(spec.device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    x = torch.randn(spec.batch, *kind.sample, generator=g)
    return x.to(spec.device), torch.randint(kind.classes, (spec.batch,), generator=g).to(spec.device)


def check_maskable(model: nn.Module, include: str) -> None:
    """ConfigError where no linear's name matches, so that there is nothing to compare."""
    linears = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    if not any(fnmatch.fnmatchcase(name, include) for name in linears):
        what = f"{type(model).__name__}: expected an nn.Linear whose name matches {include!r}, got {', '.join(linears) or 'a model without linears'}."
        raise ConfigError(message(what, fix="name the blocks' linears in Kind.include."))


def check_inputs(model: nn.Module, *tensors: Tensor) -> None:
    """ConfigError where the batch is elsewhere than the weights."""
    device = next(model.parameters()).device
    for t in tensors:
        if t.device != device:
            what = f"inputs: expected tensors on {device}, where the model's weights are, got one on {t.device}."
            raise ConfigError(message(what, fix=f"move the batch by .to({str(device)!r}), or the model."))


def depth_that_fits(free: int, held: int, passing: int, instances: int, rest: int) -> int:
    """Blocks for which `instances` models of `held` bytes a block, one of them in a step (`passing` a block) and `rest` take SHARE of the free bytes."""
    return max(1, int((SHARE * free - rest) // (instances * held + passing)))


def depth_on_cuda(spec: Spec, instances: int, step: Callable[[nn.Module, Tensor], None]) -> int:
    """As much depth as memory takes: `step` trains one block on [B, T, C] twice, as the hungriest contender would; what it needs on top is measured."""
    torch.cuda.empty_cache()
    free, before = torch.cuda.mem_get_info(spec.device)[0], torch.cuda.memory_allocated(spec.device)
    with spec.device:
        block = GPTBlock(spec.width)
        x = torch.randn(spec.batch, spec.sequence, spec.width)
    torch.cuda.reset_peak_memory_stats(spec.device)
    step(block, x)
    held = STATE_BYTES * sum(p.numel() for p in block.parameters())
    passing = max(0, torch.cuda.max_memory_allocated(spec.device) - before - held)
    logits = 3 * 4 * spec.batch * spec.sequence * spec.vocabulary  # themselves, the softmax, their gradient
    rest = logits + (instances * STATE_BYTES + 4) * 2 * spec.vocabulary * spec.width  # embedding and head
    return depth_that_fits(free, held, passing, instances, rest)
