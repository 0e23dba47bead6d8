"""What is measured: a cell is one op of one masked linear, by one provider. The list is in order of value, so that a run that is cut short kept the best."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import TypeVar

from ..errors import ConfigError

C = TypeVar("C")

OPS = ("forward", "dx", "dw", "step", "metadata")
PHASES = {"forward": ("forward",), "dx": ("backward",), "dw": ("backward",), "step": ("both",), "metadata": ("block_index", "lists")}
PROVIDERS = ("dense", "masked_dense", "fxmask_triton", "fxmask_reference", "torch_bsr", "torch_bsr_s4", "torch_sampled", "fxmask_auto")
MASKS = ("random", "rows")
DTYPES = ("bf16", "fp16", "fp32", "tf32")
BLOCKS = (128, 64, 32, 16)
RATIOS = (0.8, 0.5, 0.9, 0.7)
# tokens x in -> out, most telling first: a language model's layers, a vision model's two, and one that launches dominate
CUDA_SHAPES = ("8192x4096->4096", "8192x4096->14336", "25088x384->1536", "25088x1536->384", "1024x1024->1024")
CPU_SHAPES = ("4096x1024->1024", "4096x384->1536")
TINY_SHAPES = ("256x128->256", "200x256->128")
ANCHORS = ("torch_bsr", "torch_bsr_s4", "torch_sampled")
# a cell's place is a sum of ranks by axis; metadata comes before the matmuls of its weight and block, whose refresh columns need it
OP_COST = {"forward": 0, "step": 2, "dw": 2, "dx": 3, "metadata": -1}


@dataclass(frozen=True)
class Cell:
    """One measurement. `dense` has no mask, so its block is 0 and its ratio 0."""

    op: str
    phase: str
    M: int  # tokens
    N: int  # out_features
    K: int  # in_features
    dtype: str
    block: tuple[int, int] = (0, 0)
    ratio: float = 0.0
    mask: str = "-"
    seed: int = 0
    provider: str = "dense"

    @property
    def shape(self) -> str:
        return f"{self.M}x{self.K}->{self.N}"

    @property
    def group(self) -> str:
        """The cell without its provider: what `--cells` is matched with."""
        op = self.op if self.op != "metadata" else f"metadata.{self.phase}"
        return f"{op}/{self.shape}/{self.dtype}/b{self.block[0]}x{self.block[1]}/r{self.ratio:g}/{self.mask}"

    @property
    def name(self) -> str:
        return f"{self.group}/{self.provider}"

    def by(self, provider: str) -> Cell:
        """The same measurement by another provider."""
        return replace(self, provider=provider)

    def dense(self) -> Cell:
        """The dense layer of the same op and shape."""
        return Cell(self.op, self.phase, self.M, self.N, self.K, self.dtype)


def products(op: str) -> tuple[str, ...]:
    """The matmuls of an op: a step is all three."""
    return ("forward", "dx", "dw") if op == "step" else (op,)


def parse_shape(text: str) -> tuple[int, int, int]:
    """(M, N, K) of `tokens x in -> out`, e.g. 8192x4096->14336; ConfigError otherwise."""
    found = re.fullmatch(r"(\d+)x(\d+)->(\d+)", text.strip())
    if not found or not all(int(n) for n in found.groups()):
        raise ConfigError(f"a shape is TOKENSxIN->OUT: expected e.g. 8192x4096->14336, got {text!r}.")
    m, k, n = map(int, found.groups())
    return m, n, k


def providers_of(cell: Cell, device: str) -> tuple[str, ...]:
    """Who can be asked for a cell, baselines first. Anchors and the dispatcher are compared on random masks only; it makes masks, and no lists."""
    own = "fxmask_triton" if device == "cuda" else "fxmask_reference"
    if cell.op == "metadata":
        return (own, "fxmask_reference", *(("fxmask_auto",) if cell.phase == "block_index" else ()))
    names = ["dense", "masked_dense", own]
    if cell.mask == "random":
        bsr = ("torch_bsr", "torch_bsr_s4") if device == "cuda" else ("torch_bsr",)
        names += {"forward": bsr, "dx": bsr, "dw": ("torch_sampled",) if device == "cuda" else ()}.get(cell.op, ())
        names += ["fxmask_auto"] if cell.op == "forward" else []
    return tuple(names)


def _groups(shapes: Iterable[str], blocks: Iterable[int], ratios: Iterable[float], dtype: str, masks: Iterable[str], seed: int) -> list[Cell]:
    found = []
    for (i, shape), (j, b), (r, ratio), op, (q, mask) in product(enumerate(shapes), enumerate(blocks), enumerate(ratios), OPS, enumerate(masks)):
        if op == "metadata" and (r or q):  # costs the same for every ratio and kind of mask
            continue
        m, n, k = parse_shape(shape)
        found += [(i + 2 * j + r + OP_COST[op] + 4 * q, Cell(op, p, m, n, k, dtype, (b, b), ratio, mask, seed, "")) for p in PHASES[op]]
    return [cell for _, cell in sorted(found, key=lambda t: t[0])]


def make_cells(
    device: str,
    dtype: str,
    quick: bool = False,
    only: str = "",
    providers: Iterable[str] = (),
    shapes: Iterable[str] = (),
    masks: Iterable[str] = (),
    seed: int = 0,
) -> list[Cell]:
    """The cells of a run, in order of value; within a group the baselines come first, so that a row can be compared when it is written.

    `only`: globs against `Cell.group`, separated by commas. Raises: ConfigError where nothing is left, or a provider is unknown.
    """
    unknown = sorted(set(providers) - set(PROVIDERS))
    if unknown:
        raise ConfigError(f"unknown provider: expected some of {', '.join(PROVIDERS)}, got {', '.join(unknown)}.")
    small = TINY_SHAPES if device == "cpu" else CUDA_SHAPES[:1] + CUDA_SHAPES[2:3]
    shapes = tuple(shapes) or (small if quick else CPU_SHAPES if device == "cpu" else CUDA_SHAPES)
    blocks, ratios = (BLOCKS[:2], RATIOS[:3]) if quick else (BLOCKS, RATIOS)
    masks, providers = tuple(masks) or (MASKS[:1] if quick else MASKS), tuple(providers)
    groups = [g for g in _groups(shapes, blocks, ratios, dtype, masks, seed) if not providers or set(providers) & set(providers_of(g, device))]
    if not groups:
        raise ConfigError(f"--providers: expected some for {' and '.join(masks)} masks on {device}, got {', '.join(providers)}.")
    return list(_expand(matching(groups, only, lambda g: g.group), device, providers))


def names(given: str) -> tuple[str, ...]:
    """What an option names, separated by commas."""
    return tuple(n.strip() for n in given.split(",") if n.strip())


def matching(found: list[C], cells: str, name: Callable[[C], str]) -> list[C]:
    """Those whose name `--cells` matches. ConfigError where it leaves none."""
    globs = names(cells)
    chosen = [c for c in found if not globs or any(fnmatch.fnmatchcase(name(c), p) for p in globs)]
    if not chosen:
        raise ConfigError(f"--cells {cells!r} leaves nothing to measure: expected globs that match e.g. {name(found[0])!r}.")
    return chosen


def _expand(groups: Iterable[Cell], device: str, providers: tuple[str, ...]) -> Iterator[Cell]:
    done: set[Cell] = set()
    for group in groups:
        for name in providers_of(group, device):
            cell = group.dense() if name == "dense" else group.by(name)
            if cell not in done and (not providers or name in providers):
                done.add(cell)
                yield cell
