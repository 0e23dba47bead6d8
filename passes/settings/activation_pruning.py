"""Activation pruning as a user asks for it, and what it makes of a layer's forward. In graphs: `passes.graphs.pruned_linears` and `pruned_products`."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from ...kernels import prune_ops, prune_plan, scale_ops
from ...kernels.dispatch import IMPLEMENTATIONS, check_available
from ...kernels.errors import ConfigError, StateError, UnsupportedError, message
from ...kernels.grid import ratio_units
from ...kernels.prune import check_width
from .checks import at_least, is_number, one_of
from .options import Options
from .schedule import Schedule

REENTRANT = (CheckpointFunction.forward.__code__, CheckpointFunction.backward.__code__)


@dataclasses.dataclass(frozen=True)
class ActivationPruning(Options):
    """The input of a linear is saved for the backward block-sparse: the blocks with the smallest norms are dropped (Barley and Fröning 2023).

    The forward, dX and db are those of the layer, exactly; dW = dY^T X_s sees the pruned input X_s, unscaled. What autograd holds is the kept blocks and
    their numbers; the dense input is free after the forward, unless another op saves it, too. ReLU, tanh, sigmoid, softmax and scaled_dot_product_attention
    save what they return: behind them nothing is freed, and the blocks' numbers are all that is held more (GELU and SiLU save what they were given). Layers
    that read one input, as q, k and v, hold its kept blocks once (same ratio and block, no noise; an input that carries a gradient). Beside a `WeightMask`
    the layer's forward is the masked one (SWAT's form is `WeightMask(backward="ste")` with this; Raihan and Aamodt 2020).

    Args:
        ratio: share of blocks that are dropped, in [0, 1); round(n * ratio) of a sample's n blocks, halves to even, in every sample as many, never all.
        block: features of a block, which is one token high; the last one of a row may be ragged. Samples: table in `kernels.prune`.
        noise: 0: the norms decide. Else they are multiplied by 2^(noise * u), u uniform in [-1, 1], drawn anew in every forward from PyTorch's generator of
            the device, so that blocks near the threshold are drawn by lot and blocks that differ by more than 4^noise are not (ours). In eval() without
            gradients each layer then walks the Python stack, to recognise a reentrant checkpoint; not under `torch.inference_mode()`, nor with frozen weights.
        schedule: None, or a `Schedule` of the ratio over optimiser steps, which ends at `ratio`. How many blocks are kept is a shape, for which a model may be
            compiled anew; so the ratio moves in at most `stages` jumps, one every ceil(schedule.steps / stages) steps, each to what the schedule says then.
        affine: whether products with a parameter, y = a x (+ b), save x pruned, too, for da (ours; the source prunes inputs of linears alone): modules that are
            such a product and nothing else, as timm's Affine and LayerScale, and in a trace every product with a parameter; by the parameter's name. Products
            inside other forwards are named and stay dense. Nothing is freed where another op saves the same x (its own result, as sigmoid and an in-place ReLU
            do; nn.LayerNorm and its like save their input for its own gradient and are no products).
        stages: see there. start: first optimiser step that drops anything. With either, `fxmask.step` or, beside a WeightMask, a guard counts the steps.
        impl: of dW: `auto`, `reference`, `cpu` or `triton`, table in `kernels.prune_ops.pruned_dw`; an explicit one runs nowhere else, and raises. (da has one
            form, of plain PyTorch's elementwise ops.)

    Where nothing can be dropped (few blocks a sample: a row of an input with two axes is one) the layer is the dense one, with a warning. A layer whose weight
    needs no gradient, and any layer where gradients are off, computes densely and saves nothing: export for inference under `torch.no_grad()`, or the program
    keeps the op, for training. `fxmask.dense` changes none of it.
    Raises: ConfigError. Not with torch.func, forward-mode AD, nested tensors, or a second derivative through dW: UnsupportedError.
    """

    ratio: float = 0.5
    block: int = 64
    noise: float = 0.0
    impl: str = "auto"
    schedule: Schedule | None = None
    stages: int = 4
    start: int = 0
    affine: bool = False

    def __post_init__(self) -> None:
        ratio_units(self.ratio)
        object.__setattr__(self, "ratio", float(self.ratio))
        object.__setattr__(self, "block", check_width(self.block))
        if not is_number(self.noise) or not 0 <= self.noise < 64:
            raise ConfigError(f"noise: expected a number in [0, 64), powers of two, got {self.noise!r}.")
        object.__setattr__(self, "noise", float(self.noise))
        if type(self.affine) is not bool:
            raise ConfigError(f"affine, whether products with parameters are pruned, too: expected a bool, got {self.affine!r}.")
        one_of("impl", self.impl, IMPLEMENTATIONS)
        check_available(self.impl)
        if self.schedule is not None and not isinstance(self.schedule, Schedule):
            raise ConfigError(f"schedule of pruned activations: expected None or a fxmask.Schedule, got {self.schedule!r}.")
        object.__setattr__(self, "start", at_least("start", self.start, 0))
        object.__setattr__(self, "stages", at_least("stages", self.stages, 1, "the jumps of a scheduled ratio"))
        if self.schedule is None and self.stages != 4:
            raise ConfigError(f"stages are those of a schedule: expected schedule=fxmask.Schedule(...) with stages={self.stages}, got none.")
        self._set_kind(self)

    @property
    def needs_steps(self) -> bool:
        """Whether the ratio depends on the step."""
        return self.start > 0 or (self.schedule is not None and self.schedule.moves)

    def ratio_at(self, step: int) -> float:
        """The ratio at an optimiser step."""
        if step < self.start:
            return 0.0
        if self.schedule is None:
            return self.ratio
        done, stage = step - self.start, -(-self.schedule.steps // self.stages)
        return self.schedule.ratio_at(done if done >= self.schedule.steps else done // stage * stage, self.ratio)

    def in_force(self, step: int) -> ActivationPruning:
        """What holds at an optimiser step, itself without steps."""
        return dataclasses.replace(self, ratio=self.ratio_at(step), schedule=None, stages=4, start=0)

    def words(self) -> str:
        """What `explain` says of it."""
        by = "" if self.impl == "auto" else f", dW by {self.impl}"
        return f"{100 * self.ratio:g} % of 1x{self.block}" + (f", noise {self.noise:g}" if self.noise else "") + by

    def _check_counted(self) -> None:
        if torch.jit.is_tracing():
            what = "torch.jit.trace cannot record activation pruning, which counts blocks from shapes: expected no gradients, for which nothing is saved."
            raise UnsupportedError(message(what, "", "trace under torch.no_grad(), or use torch.export.export or torch.compile."))
        if self.needs_steps:  # a layer whose steps are counted has the ratio in force instead
            what = "start and schedule of ActivationPruning count optimiser steps, and nobody tells them: expected a step source in training."
            fix = "call fxmask.step(model, 0) before training and fxmask.step(model) after every step. A guard counts them, too; for what its optimiser was"
            raise StateError(message(what, "", f"{fix} given after that it wants fxmask.step(model, 0), once."))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, training: bool = False) -> Tensor:
        """The layer's forward."""
        if not saves(weight):
            self.draw_unused(x, weight, training)
            return F.linear(x, weight, bias)
        self._check_counted()
        return prune_ops.linear(x, weight, bias, self.block, self.ratio, self.noise, dw_impl=self.impl)

    def masked_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, *masked: Any) -> Tensor:
        """That of a masked layer which saves its input; `masked`: the mask and what follows it in `kernels.prune_ops.linear`, to the lists."""
        self._check_counted()
        mask, blocks, backward, dense, impl, lists = masked
        return prune_ops.linear(x, weight, bias, self.block, self.ratio, self.noise, mask, blocks, backward, dense, impl, lists, self.impl)

    def draw_unused(self, x: Tensor, weight: Tensor, training: bool) -> None:
        """Without gradients: what a reentrant checkpoint's second forward will draw, or what comes behind would have other numbers there.

        In training always, so that other checkpoints are served; in eval() in PyTorch's own alone, as nothing else may move the generator there.
        """
        if self.noise and not self.needs_steps and weight.requires_grad and not torch.is_grad_enabled() and (training or _in_checkpoint()):
            prune_plan.draw_unused(x, self.block, self.ratio)

    def product(self, x: Tensor, a: Tensor, b: Tensor | None, inplace: bool = False, training: bool = False) -> Tensor:
        """That of a product with a parameter, a x + b by addcmul or a x; `inplace`: written into x, as the model has it."""
        if not saves(a):
            self.draw_unused(x, a, training)
            return scale_ops.dense(x, a, b, inplace)
        self._check_counted()
        return scale_ops.scale(x, a, b, self.block, self.ratio, self.noise, inplace)


def _in_checkpoint() -> bool:
    """Whether a reentrant checkpoint runs its forward, for the first or the second time. Compiled code has checkpoints of another kind.

    Nothing but the stack tells, and each layer walks all of it, once a forward: under inference_mode, which has no second forward, none does.
    """
    if torch.compiler.is_dynamo_compiling() or torch.is_inference_mode_enabled():
        return False
    first, second = REENTRANT
    frame = inspect.currentframe()  # not by `passes.frames`, which takes twice the time
    while frame is not None:
        code = frame.f_code
        if code is first or code is second:
            return True
        frame = frame.f_back
    return False


def saves(weight: Tensor) -> bool:
    """Whether a backward will ask for dW, or da, so that there is an input to save."""
    return torch.is_grad_enabled() and weight.requires_grad
