"""What the cost of a kernel is: FLOP, and bytes by operand. `matmul_cost`, `mask_cost` and `pruned_cost` have the closed forms; traces are compared with them.

Four counts that must not be confused, all exact integers:

| count | what |
| --- | --- |
| useful FLOP | 2 a token and kept weight element; what the mask leaves of the mathematics |
| issued FLOP | what the tensor cores do: whole tiles, whole steps, ragged edges and masked blocks inside a union included |
| requested bytes (`reads`, `writes`) | every element that a load or store asks for with a true predicate, once a program: what programs ask of the L2 cache |
| compulsory bytes (`reads_min`, `writes_min`) | every byte that the result depends on, or that is part of it, once: the least that any schedule moves |

Only products count as FLOP. Operands are named like the kernels' parameters. Symbols of those files: b bytes an element of the floating operands, M tokens,
T = ⌈M / BM⌉ token tiles; `across` and `along` are the features on the strip axis and on the reduction axis: out and in for the forward and dW, in and out for
dX; s a strip, S their number, c_s its entries, U features an entry, f_s = Σ over its entries of the features that exist (fewer than U at a ragged edge); a step
takes STEP features: P = STEP / U entries, or U / STEP steps take one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

INDEX = 4  # bytes of an entry, a count, a rank, a key
PARTIAL = 4  # bytes of an element of the float32 workspace
BINS = 2048  # of a histogram of the selection


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Cost:
    """FLOP and bytes of one launch, or of several: costs add up, operand by operand."""

    flop_useful: int = 0
    flop_issued: int = 0
    reads: dict[str, int] = field(default_factory=dict)
    writes: dict[str, int] = field(default_factory=dict)
    reads_min: dict[str, int] = field(default_factory=dict)
    writes_min: dict[str, int] = field(default_factory=dict)

    def renamed(self, names: dict[str, str]) -> Cost:
        """The same by other names of the operands; two that get one name are added up."""

        def new(moved: dict[str, int]) -> dict[str, int]:
            total: Counter[str] = Counter()
            for name, size in moved.items():
                total[names.get(name, name)] += size
            return dict(total)

        return Cost(self.flop_useful, self.flop_issued, *(new(d) for d in (self.reads, self.writes, self.reads_min, self.writes_min)))

    def with_flop(self, useful: int, issued: int) -> Cost:
        """The same bytes with other FLOP."""
        return replace(self, flop_useful=useful, flop_issued=issued)

    @property
    def bytes_req(self) -> int:
        """Requested bytes of all operands, both directions."""
        return sum(self.reads.values()) + sum(self.writes.values())

    @property
    def bytes_min(self) -> int:
        """Compulsory bytes of all operands, both directions."""
        return sum(self.reads_min.values()) + sum(self.writes_min.values())

    def __add__(self, other: Cost) -> Cost:
        def merged(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
            total = Counter(a)
            total.update(b)
            return dict(total)

        return Cost(
            self.flop_useful + other.flop_useful, self.flop_issued + other.flop_issued,
            merged(self.reads, other.reads), merged(self.writes, other.writes),
            merged(self.reads_min, other.reads_min), merged(self.writes_min, other.writes_min),
        )  # fmt: skip
