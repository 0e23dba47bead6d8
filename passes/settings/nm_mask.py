"""`NMMask`: what a user asks for of n:m masks, and how a mask is made of a weight."""

from __future__ import annotations

import dataclasses
import math

from torch import Tensor

from ...kernels import nm, nm_permute
from ...kernels.dispatch import check_available
from ...kernels.errors import ConfigError, UnsupportedError
from ...kernels.grid import plain_int
from .checks import is_number, one_of
from .options import Options

MODES = ("magnitude", "permuted", "learned", "sr-ste")
OF_LEARNED = ("tau", "tau_from", "tau_steps", "soft", "init", "final", "permute", "train_weights")
OWN = {"decay": "sr-ste", "passes": "permuted", "transposable": "magnitude", **dict.fromkeys(OF_LEARNED, "learned")}
LARGEST, MOST_PATTERNS = 32, 4096  # of m, and of logits a group


@dataclasses.dataclass(frozen=True)
class NMMask(Options):
    """n kept of every m consecutive elements of a row, of a Linear's weight as (out, in), of a Conv2d's as (c_out, c_in * kh * kw).

    | mode      | mask | gradient of W |
    | --------- | --- | --- |
    | magnitude | the largest magnitudes, in every forward | dY^T X ∘ M |
    | sr-ste    | the same | dY^T X + decay * (1 - M)∘W (Zhou et al. 2021) |
    | permuted  | the largest after a permutation of the input axis that keeps more; see below | dY^T X ∘ M |
    | learned   | in training drawn from the C(m, n) patterns of a group by Gumbel-softmax of its logits, elsewhere their argmax (Danhofer 2024) | dY^T X ∘ M |

    A permuted mask is built by `apply`, `load_state_dict` and `fxmask.refresh`, and rests between them; in the order that W has, a group may keep more or less
    than n. The layer keeps the permutation in its attribute `nm_permutation`. A load of weights that changes the mask under an optimiser that has stepped them
    wants `fxmask.load_state_dict` after it, or the first step warns.
    The matmuls are dense ones of W∘M. `fxmask.finalize(model, "2:4")` is PyTorch's hardware form, for Linears whose mask is 2:4 in the order that W has.

    Args:
        n, m: n kept of m, 1 <= n < m <= 32.
        mode: of the table.
        decay: SR-STE's lambda. As in its authors' code the term is added in every backward of the layer, whatever the loss: k micro-batches, or k calls, decay
            k times (divide it by k), and a GradScaler divides it by its scale (float16 autocast warns; bfloat16 needs no scaler).
        passes: of the search for a permutation, see `kernels.nm_permute`.
        transposable: for 2:4 by magnitude: tiles of 4x4 whose rows and columns both keep 2 of 4, so that W and its transpose are 2:4 (Hubara et al. 2021).
        tau: temperature of the draw. tau_from, tau_steps: it falls, or rises, from tau_from to tau by one factor a step over tau_steps optimiser steps, which
            `fxmask.step(model)` tells; by default it is tau all along, as in the source.
        soft: multiply by the mixture of patterns in training; by default by the drawn pattern, straight-through.
        init: of the logits, `glorot` (uniform) or `magnitude`. They are `nm_logits` (groups, patterns) of the layer: in `parameters()` and in `state_dict()`.
        permute: learn in the order of columns that `permuted` finds for the weight as it is at `apply`, and that stays. With init="magnitude" the likeliest
            masks begin as permuted ones. The order is the layer's `nm_permutation`, beside the logits in `state_dict()`; in the order that W has, a group may
            keep more or less than n.
        final: what `fxmask.freeze` and `fxmask.finalize` fix: `argmax`, or `sample`, drawn one last time. Forwards in eval() take the argmax in any case.
        impl: `auto`, `reference`: plain PyTorch. `triton`: a kernel, the same bits in one pass over W; for magnitude and sr-ste with m of 2, 4 or 8.
        train_weights: False: weight and bias of the layers lose their gradients and stop asking for them, until `fxmask.restore`; other layers and norms are
            the user's to freeze.

    Raises: ConfigError; UnsupportedError for an `impl` that this machine or this mask has not.
    """

    n: int = 2
    m: int = 4
    mode: str = "magnitude"
    transposable: bool = False
    decay: float = 2e-4
    passes: int = 16
    tau: float = 0.1
    tau_from: float | None = None
    tau_steps: int = 0
    soft: bool = False
    init: str = "glorot"
    final: str = "argmax"
    permute: bool = False
    train_weights: bool = False
    impl: str = "auto"

    def __post_init__(self) -> None:
        for name in ("n", "m", "passes", "tau_steps"):
            number = plain_int(getattr(self, name))
            if number is not None:  # NumPy's are taken, too
                object.__setattr__(self, name, number)
        for name in ("decay", "tau", "tau_from"):
            value = getattr(self, name)
            if is_number(value):
                object.__setattr__(self, name, float(value))
        if type(self.n) is not int or type(self.m) is not int or not 1 <= self.n < self.m <= LARGEST:
            raise ConfigError(f"n, m: expected ints with 1 <= n < m <= {LARGEST}, n of m kept, got n={self.n!r}, m={self.m!r}.")
        one_of("mode", self.mode, MODES)
        one_of("init", self.init, ("glorot", "magnitude"))
        one_of("final", self.final, ("argmax", "sample"))
        one_of("impl", self.impl, ("auto", "reference", "triton"))
        check_available(self.impl)
        if self.impl == "triton" and (self.mode not in ("magnitude", "sr-ste") or self.transposable or self.m not in nm.PAIRED):
            got = f"mode={self.mode!r}, m={self.m}{', transposable' if self.transposable else ''}"
            raise UnsupportedError(f"impl='triton' of N:M masks: expected mode='magnitude' or 'sr-ste' with m of {nm.PAIRED}, got {got}; use impl='auto'.")
        for name in ("transposable", "soft", "permute", "train_weights"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: expected True or False, got {getattr(self, name)!r}.")
        for name, least in (("decay", "at least 0"), ("tau", "above 0")):
            v = getattr(self, name)
            if not is_number(v) or v < 0 or (v == 0 and name == "tau"):
                raise ConfigError(f"{name}: expected a finite number {least}, got {v!r}.")
        if self.tau_from is not None or type(self.tau_steps) is not int or self.tau_steps != 0:
            v = self.tau_from
            if not is_number(v) or v <= 0 or type(self.tau_steps) is not int or self.tau_steps < 1:
                got = f"tau_from={v!r}, tau_steps={self.tau_steps!r}"
                raise ConfigError(f"tau_from, tau_steps: expected a finite number above 0 and an int of at least 1, or neither, got {got}.")
        if type(self.passes) is not int or self.passes < 1:
            raise ConfigError(f"passes: expected an int of at least 1, got {self.passes!r}.")
        for f in dataclasses.fields(self):
            v, own = getattr(self, f.name), OWN.get(f.name, self.mode)
            if self.mode != own and v != f.default:
                raise ConfigError(f"{f.name} is an option of mode={own!r}: expected it left out with mode={self.mode!r}, got {v!r}.")
        if self.transposable and (self.n, self.m) != (2, 4):
            raise ConfigError(f"transposable: expected n=2, m=4, whose tiles can be searched, got n={self.n}, m={self.m}.")
        if self.mode == "learned" and math.comb(self.m, self.n) > MOST_PATTERNS:
            raise ConfigError(f"mode='learned' has C(m, n) logits a group: expected at most {MOST_PATTERNS}, got {math.comb(self.m, self.n)}.")
        self._set_kind(self)

    def tau_at(self, step: int) -> float:
        """The temperature after `step` optimiser steps; exactly tau from tau_steps on."""
        if self.tau_from is None or step >= self.tau_steps:
            return self.tau
        return self.tau_from * (self.tau / self.tau_from) ** (step / self.tau_steps)

    def words(self) -> str:
        """What `repr` and `explain` say of it."""
        more = [name for name, on in (("transposable", self.transposable), ("soft", self.soft), ("permuted", self.permute)) if on]
        return ", ".join([f"{self.n}:{self.m} {self.mode}", *more])

    def misfit(self, weight: Tensor) -> str:
        """Why a weight cannot have this mask; empty where it can. A group never straddles two rows."""
        rows = weight.shape[0]
        columns = weight.numel() // rows if rows else 0
        if not columns or columns % self.m:
            return f"its rows have {columns} elements, no multiple of {self.m}"
        return f"it has {rows} rows, no multiple of 4 as transposable wants" if self.transposable and rows % 4 else ""

    def mask_of(self, weight: Tensor, table: Tensor | None, logits: Tensor | None, order: Tensor | None) -> Tensor:
        """The deterministic mask of a weight (any shape), which its mode builds anew each time; not of `permuted`.

        table, logits, order: `nm_patterns`, `nm_logits` and `nm_permutation` of the layer.
        """
        w = weight.detach().reshape(weight.shape[0], -1)
        if logits is not None and table is not None:
            return self.shaped(nm.argmax_mask(logits, table), weight, order)
        if self.transposable and table is not None:
            found = nm.transposable_mask(w, table)
        else:
            found = nm.magnitude_mask(w, self.n, self.m)
        return found.reshape(weight.shape)

    def shaped(self, groups: Tensor, weight: Tensor, order: Tensor | None) -> Tensor:
        """What is (groups, m), of a weight whose columns stand in `order` or in their own, in the weight's shape and order."""
        rows = groups.reshape(weight.shape[0], -1)
        return (rows if order is None else nm_permute.put_back(rows, order)).reshape(weight.shape)

    def permuted(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(mask of the weight's shape, permutation of its columns)."""
        w = weight.detach().reshape(weight.shape[0], -1)
        order = nm_permute.permutation(w, self.n, self.m, self.passes)
        return nm_permute.permuted_mask(w, order, self.n, self.m).reshape(weight.shape), order

    def table(self) -> Tensor | None:
        """The patterns that a layer of this mode chooses among, on the CPU."""
        if self.transposable:
            return nm.transposable_patterns()
        return nm.patterns(self.n, self.m) if self.mode == "learned" else None
