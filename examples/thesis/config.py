"""The thesis' configuration strings, such as `"ResMLP5 @ XChannel = masked 0.9 (16, 16); XPatch = masked 0.9 (16, 16);"`.

Grammar, spaces free, the last semicolon optional:

    model  = name depth [ "@" { item ";" } ]
    item   = layer [ digits ] "=" form
    form   = "masked" ratio block | "sparse" ratio block | "compressed" block [ block ] [ word ] [ word ] [ float ]
    block  = "(" height "," width ")"          out_features, in_features

`masked` is a mask by magnitude, rebuilt as the weights move. `sparse` is read as a random mask that is drawn once and kept (the thesis does
not say; ours). A digit picks one of the linears of a layer: `XChannel1` is the first of the channel MLP, `XChannel2` the second (ours).
Layers that are not named stay dense. Where two items name the same linear, the later one holds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from fxmask import FxMaskError

# the linears of each layer, as patterns of module names in examples/resmlp.py
LAYERS: dict[str, tuple[str, ...]] = {"XPatch": ("blocks.*.patch_mix",), "XChannel": ("blocks.*.fc1", "blocks.*.fc2")}
MODELS = ("ResMLP",)
WORD = r"[A-Za-z_]\w*"
NUMBER = r"[0-9]+\.?[0-9]*|\.[0-9]+"


class ThesisConfigError(FxMaskError, ValueError):
    """A configuration string that does not follow the grammar; `position` counts characters from 0."""

    def __init__(self, text: str, position: int, what: str) -> None:
        self.position = position
        line = re.sub(r"\s", " ", text)  # one character each, so that the caret stands below its place
        super().__init__(f"thesis configuration, at character {position}: {what}\n  {line}\n  {' ' * position}^")


@dataclass(frozen=True)
class Item:
    """One item: which linears (`patterns` of module names), masked how. `block` is (out_features, in_features)."""

    layer: str
    form: str
    ratio: float
    block: tuple[int, int]
    patterns: tuple[str, ...]

    def options(self) -> dict[str, Any]:
        """The fields of a weight mask that this item sets."""
        kept = {"criterion": "random", "refresh": 0} if self.form == "sparse" else {}
        return {"ratio": self.ratio, "block": self.block, **kept}


@dataclass(frozen=True)
class ThesisConfig:
    """A parsed configuration string."""

    model: str
    depth: int
    items: tuple[Item, ...]

    def apply_arguments(self) -> dict[str, Any]:
        """Keyword arguments for `fxmask.apply` that mask the named linears and leave all others dense; empty if the string names none.

        `backward`, `start` and the rest are not in the grammar: pass them beside these.
        """
        if not self.items:
            return {}
        first, overrides = self.items[0], {p: item.options() for item in self.items for p in item.patterns}
        return {"ratio": first.ratio, "block": first.block, "include": list(overrides), "overrides": overrides}


def parse(text: str) -> ThesisConfig:
    """Read a configuration string.

    Raises:
        ThesisConfigError: the string breaks the grammar; the message points at the character and says what was expected.

    Example:
        >>> parse("ResMLP12 @ XPatch=masked 0.5 (2, 2);").apply_arguments()["overrides"]
        {'blocks.*.patch_mix': {'ratio': 0.5, 'block': (2, 2)}}
    """
    return _Parser(text).model()


class _Parser:
    """Recursive descent over the string, one method a rule of the grammar."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.start = text, 0, 0

    def take(self, pattern: str) -> str | None:
        """Skip spaces; take `pattern` if it is next. `self.start` is then where it began, for messages."""
        self.at += len(re.compile(r"\s*").match(self.text, self.at).group())  # type: ignore[union-attr]
        self.start = self.at
        found = re.compile(pattern).match(self.text, self.at)
        if found is None:
            return None
        self.at = found.end()
        return found.group()

    def need(self, pattern: str, expected: str) -> str:
        found = self.take(pattern)
        if found is None:
            rest = re.compile(r"[\w.]+|.|$", re.DOTALL).match(self.text, self.at).group()  # type: ignore[union-attr]
            raise self.error(f"expected {expected}, got {repr(rest) if rest else 'the end of the string'}.")
        return found

    def error(self, what: str, position: int | None = None) -> ThesisConfigError:
        return ThesisConfigError(self.text, self.start if position is None else position, what)

    def model(self) -> ThesisConfig:
        name = self.need("[A-Za-z]+", "the model's name and depth, such as 'ResMLP5'")
        if name not in MODELS:
            raise self.error(f"expected the model {' or '.join(MODELS)}, got {name!r}.")
        depth = int(self.need("[0-9]+", f"the depth of {name}, such as '{name}5'"))
        if depth < 1:
            raise self.error(f"expected a depth of at least 1, got {depth}.")
        items: list[tuple[int, Item]] = []
        if self.take("@") is None:
            self.need(r"\Z", "'@' and the layers to mask, or the end of the string (all layers dense)")
        while self.take(r"\Z") is None:
            items.append((self.at, self.item()))
            if self.take(";") is None:
                self.need(r"\Z", "';' after the item")
        self.check_shadowed(items)
        return ThesisConfig(name, depth, tuple(item for _, item in items))

    def check_shadowed(self, items: list[tuple[int, Item]]) -> None:
        """An item whose linears are all named again later would silently do nothing."""
        for i, (position, item) in enumerate(items):
            later = {p for _, other in items[i + 1 :] for p in other.patterns}
            if set(item.patterns) <= later:
                raise self.error(f"'{item.layer}' has no effect: later items name the same linears. Remove one of them.", position)

    def item(self) -> Item:
        name = self.need("[A-Za-z]+", f"a layer ({', '.join(LAYERS)})")
        if name not in LAYERS:
            raise self.error(f"expected a layer ({', '.join(LAYERS)}), got {name!r}.")
        patterns, digits = LAYERS[name], self.take("[0-9]+")
        if digits is not None:
            if not 1 <= int(digits) <= len(patterns):
                allowed = " or ".join(f"{name}{i + 1}" for i in range(len(patterns)))
                raise self.error(f"{name} has {len(patterns)} linear(s): expected {name} or {allowed}, got '{name}{digits}'.")
            patterns = (patterns[int(digits) - 1],)
        self.need("=", "'='")
        form = self.need("masked|sparse|compressed", "one of masked, sparse, compressed")
        if form == "compressed":
            raise self.compressed(self.start)
        return Item(name + (digits or ""), form, self.ratio(), self.block(), patterns)

    def ratio(self) -> float:
        ratio = float(self.need(NUMBER, "a ratio in [0, 1), the fraction of blocks that are masked, such as 0.9"))
        if ratio >= 1.0:
            hint = f" Write {ratio / 100:g} for {ratio:g} %." if 1 < ratio < 100 else ""
            raise self.error(f"expected a ratio in [0, 1), the fraction of blocks that are masked, got {ratio:g}.{hint}")
        return ratio

    def block(self) -> tuple[int, int]:
        self.need(r"\(", "a block such as (16, 16)")
        height = self.side("height")
        self.need(",", "',' between the block's height and width")
        width = self.side("width")
        self.need(r"\)", "')' after the block's width")
        return height, width

    def side(self, which: str) -> int:
        size = int(self.need("[0-9]+", f"the block's {which}, a positive whole number"))
        if size < 1:
            raise self.error(f"expected the block's {which}, a positive whole number, got {size}.")
        return size

    def compressed(self, position: int) -> ThesisConfigError:
        """Read the item to its end, so that errors in it are told first, then refuse it."""
        self.block()
        if self.take(r"(?=\()") is not None:
            self.block()
        for pattern in (WORD, WORD, NUMBER):
            self.take(pattern)
        self.need(r"(?=;)|\Z", "';' after the item")
        return self.error(
            "'compressed' layers are not weight masks and are not supported. Use 'masked R (h, w)', a mask by magnitude that is rebuilt as the "
            "weights move, or 'sparse R (h, w)', a random mask that is drawn once; or leave the layer out, and it stays dense.",
            position,
        )
