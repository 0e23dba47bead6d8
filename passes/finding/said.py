"""Whose `.weight` a method's code reads: of `self.fc`, and of what the method calls a layer by: a name, a number or key, a loop's variable, a getattr.

The code is walked as it would run, with what each name may stand for by then (`passes.finding.naming`); two branches give a name both.
"""

from __future__ import annotations

import ast
import functools
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .naming import Names, Path, Value, flat, weights

# what takes no values of a weight: its type, place and size
FACTS = (
    "dtype", "device", "shape", "size", "dim", "ndim", "numel", "layout", "requires_grad", "is_cuda", "is_meta", "is_floating_point", "element_size", "stride",
    "is_contiguous",
)  # fmt: skip
LOOKS = ("isinstance", "hasattr", "id", "type")


def _renormed(name: str, node: ast.Call) -> list[ast.expr]:
    """The table of a lookup that scales the rows it finds, by `max_norm`."""
    given = {**dict(zip(("input", "weight", "padding_idx", "max_norm"), node.args, strict=False)), **{k.arg: k.value for k in node.keywords if k.arg}}
    limit, table = given.get("max_norm"), given.get("weight")
    scales = name in ("embedding", "embedding_bag") and limit is not None and not (isinstance(limit, ast.Constant) and limit.value is None)
    return [table] if scales and table is not None else []


class Said(NamedTuple):
    """Paths of layers whose weight is read, whose weight is written in place, and paths that are called."""

    reads: list[Path]
    writes: set[Path]
    calls: set[Path]


def said(sources: Iterable[str]) -> Said:
    """What methods say, each by its source, in which the first argument is `self`; nothing of what cannot be parsed."""
    walk = _Walk()
    for tree in parsed(sources):
        for node in tree.body:
            walk.names = {"self": {()}}
            walk.visit(node)
    return Said(walk.reads, walk.written, walk.calls)


def parsed(sources: Iterable[str]) -> Iterator[ast.Module]:
    """Sources as trees; nothing of what cannot be parsed."""
    for source in sources:
        try:
            yield ast.parse(textwrap.dedent(source))
        except SyntaxError:
            continue


class _Walk(Names):
    """Statements in their order; to visit an expression is to use what it stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.calls = list[Path](), set[Path]()

    def use(self, e: ast.AST) -> None:
        self.reads.extend(p for p in sorted(weights(self.value(e))) if p not in self.reads)

    def visit_Name(self, node: ast.Name) -> None:
        self.use(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if weights(owner := self.value(node.value)):
            if node.attr not in FACTS:
                self.use(node.value)
        elif flat(owner):
            self.use(node)
        else:
            self.visit(node.value)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.use(node) if flat(self.value(node)) else self.visit(node.value)
        self.visit(node.slice)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
        of = node.func.value if isinstance(node.func, ast.Attribute) else None
        args: list[ast.expr] = [*node.args, *(k.value for k in node.keywords)]
        if flat(self.value(node)):
            return self.use(node)
        self.written.update(path for k in node.keywords if k.arg == "out" for path in weights(self.value(k.value)))
        self.written.update(path for table in _renormed(name, node) for path in weights(self.value(table)))
        if name in LOOKS:
            args = args[1:]
        elif name.endswith("_") and not name.endswith("__"):  # in place
            written = of if of is not None and flat(self.value(of)) else args.pop(0) if args and flat(self.value(args[0])) else None
            if written is not None:
                self.written.update(weights(self.value(written)))
                of = None
        self.calls.update(p[:-1] if p[-1:] == ("forward",) else p for p in flat(self.value(node.func)))
        for part in (*([node.func] if of is not None or isinstance(node.func, (ast.Call, ast.Lambda)) else []), *args):
            self.visit(part)
        return None

    def visit_Compare(self, node: ast.Compare) -> None:
        for part in (node.left, *node.comparators):
            if not (all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops) and flat(self.value(part))):
                self.visit(part)

    def visit_Assign(self, node: ast.Assign) -> None:
        stays = any(not isinstance(n, (ast.Name, ast.Tuple, ast.List, ast.Starred, ast.expr_context)) for t in node.targets for n in ast.walk(t))
        self.visit(node.value) if stays else self.hold(node.value)  # in an attribute or a part of another tensor it is out of sight
        value = self.value(node.value)
        for target in node.targets:
            self.bind(target, value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.hold(node.value)
        self.bind(node.target, self.value(node.value) if node.value else set())

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.use(node) if flat(self.value(node)) else self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        self.written.update(weights(self.value(node.target)))

    def branch(self, *bodies: Sequence[ast.AST]) -> None:
        """Each from the names as they are; then a name stands for what any has given it."""
        before, after = dict(self.names), list[dict[str, Value]]()
        for body in bodies:
            self.names = dict(before)
            for node in body:
                self.visit(node)
            after.append(self.names)
        for name in {n for names in after for n in names}:
            values = [names[name] for names in after if name in names]
            self.names[name] = values[0] if all(v == values[0] for v in values) else functools.reduce(set.union, map(flat, values))

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self.branch(node.body, node.orelse)

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        self.branch([*node.body, *node.body], [])  # twice: a name may come from the turn before
        self.branch(node.orelse)

    def visit_For(self, node: ast.For) -> None:
        self.hold(node.iter)
        value = self.elements(node.iter)
        for _ in range(2):
            self.bind(node.target, value)
            self.branch(node.body, [])
        self.branch(node.orelse)

    def visit_Try(self, node: ast.Try) -> None:
        self.branch([*node.body, *node.orelse], *(handler.body for handler in node.handlers))
        self.branch(node.finalbody)

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        self.branch(*([*([case.guard] if case.guard else []), *case.body] for case in node.cases), [])

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            self.visit(item.context_expr)
            if item.optional_vars:
                self.bind(item.optional_vars, self.value(item.context_expr))
        for part in node.body:
            self.visit(part)

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> None:
        self.within(node.generators, lambda: self.visit(node.elt))

    visit_SetComp = visit_GeneratorExp = visit_ListComp

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self.within(node.generators, lambda: (self.visit(node.key), self.visit(node.value)))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        outside = dict(self.names)
        placed, named = [*node.args.posonlyargs, *node.args.args], [*zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
        defaults = {a.arg: self.value(e) for a, e in (*zip(placed[len(placed) - len(node.args.defaults) :], node.args.defaults, strict=True), *named) if e}
        others = {name: value for name, value in outside.items() if name == "self" or name not in {a.arg for a in (*placed, *node.args.kwonlyargs)}}
        self.names = {**others, **{name: value for name, value in defaults.items() if not weights(value)}}  # a weight is read where it is given
        for part in (*node.args.defaults, *filter(None, node.args.kw_defaults), *([node.body] if isinstance(node, ast.Lambda) else node.body)):
            self.visit(part)
        self.names = outside

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef
