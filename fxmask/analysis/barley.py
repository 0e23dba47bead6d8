"""What block-sparse (BSR) activations cost in memory: closed forms of a paper on pruning what the backward pass saves.

[B] is D. Barley, H. Fröning, *Compressing the Backward Pass of Large-Scale Neural Architectures by Structured Activation Pruning*, arXiv:2311.16883. The input
A (R patches, C features) of a linear is cut in 1 x b blocks, the `round(n s)` weakest of its n = R C / b blocks are dropped, the others saved as BSR: values,
a column index a block, R + 1 row pointers; for each sample alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from ..kernels.errors import ConfigError, ShapeError
from ..kernels.grid import RATIO_UNIT, ratio_units
from ..passes.settings.checks import is_number
from .model_shapes import positive


def kept_blocks(rows: int, cols: int, block: int, sparsity: float) -> int:
    """Blocks that are saved of one sample: n - round(n s), exact, halves to even. `sparsity` is in [0, 1]; 1 is a row of table II."""
    positive(rows, "rows")
    positive(cols, "cols")
    if cols % positive(block, "block", ConfigError):
        raise ShapeError(f"block: expected a divisor of the {cols} features, got {block}.")
    n = rows * cols // block
    return n - round(n * _share(sparsity))


def _share(sparsity: float) -> Fraction:
    return Fraction(1) if is_number(sparsity) and sparsity == 1 else Fraction(ratio_units(sparsity), RATIO_UNIT)


def overhead_percent(rows: int, cols: int, block: int, sparsity: float) -> Fraction:
    """Percent of the dense elements by which BSR is larger than its ideal, `(1 - s) R C`: table II of [B]. An index is as wide as a value there."""
    kept = kept_blocks(rows, cols, block, sparsity)
    ideal = (1 - _share(sparsity)) * rows * cols
    return 100 * (kept * block + kept + rows + 1 - ideal) / (rows * cols)


def bsr_bytes(rows: int, cols: int, block: int, sparsity: float, *, itemsize: int = 4, index_bytes: int = 8) -> int:
    """Bytes of one sample's BSR: values, column indices, row pointers. PyTorch's indices are int64, which fits table III of [B]; 0 counts values alone."""
    if index_bytes not in (0, 1, 2, 4, 8):
        raise ConfigError(f"index_bytes: expected 0, 1, 2, 4 or 8, got {index_bytes!r}.")
    kept = kept_blocks(rows, cols, block, sparsity)
    return kept * block * positive(itemsize, "itemsize", ConfigError) + (kept + rows + 1) * index_bytes


def resmlp_inputs(*, tokens: int = 196, dim: int = 384, depth: int = 12, expansion: int = 4) -> list[tuple[int, int]]:
    """(R, C) of the inputs that [B] prunes in a ResMLP; the defaults are its ResMLP-S12 at 224: 36 linears.

    Token mixing is pruned in its (patch, channel) layout, inferred from table III.
    """
    return [(tokens, dim), (tokens, dim), (tokens, expansion * dim)] * depth


def saved_bytes(inputs: Iterable[tuple[int, int]], batch: int, block: int, sparsity: float, *, itemsize: int = 4, index_bytes: int = 8) -> tuple[int, int]:
    """Bytes of `inputs` for a batch, dense and as BSR. Table III of [B] is all activations of table I, minus the first, plus the second."""
    shapes, samples = list(inputs), positive(batch, "batch", ConfigError)
    dense = sum(rows * cols for rows, cols in shapes) * itemsize * samples
    return dense, samples * sum(bsr_bytes(*shape, block, sparsity, itemsize=itemsize, index_bytes=index_bytes) for shape in shapes)


def resmlp_activations(*, batch: int = 32, tokens: int = 196, dim: int = 384, depth: int = 12, expansion: int = 4, classes: int = 1000) -> tuple[int, int]:
    """Elements that autograd saves of a ResMLP with a soft-target loss, and of the two gradients beside them; the defaults are table I of [B].

    Derived: the paper gives one figure, 1,599.2 MiB. A block saves the inputs of its affines, gains and three linears (6 of `dim`, one hidden) and of
    the GELU; then come the last affine's and the head's inputs, the negated labels and the log-softmax. The gradients are one hidden and one token gradient.
    """
    token, hidden = batch * tokens * dim, batch * tokens * expansion * dim
    saved = depth * (6 * token + 2 * hidden) + token + batch * dim + 2 * batch * classes
    return saved, hidden + token
