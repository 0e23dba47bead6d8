"""Whose `.weight` a method's code reads: of `self.fc`, and of what the method calls a layer by: a name, a number or key, a loop's variable, a getattr.

The code is walked as it would run, with what each name may stand for by then; two branches give a name both. A path is a tuple of attributes from `self`;
"*" is any child, "fc?*" any whose name begins so. Names that come from elsewhere, such as arguments and results of calls, stand for nothing.
"""

from __future__ import annotations

import ast
import functools
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

Path = tuple[str, ...]
Value = Any  # set[Path], or a tuple of values, to be unpacked
# what takes no values of a weight: its type, place and size
FACTS = (
    "dtype", "device", "shape", "size", "dim", "ndim", "numel", "layout", "requires_grad", "is_cuda", "is_meta", "is_floating_point", "element_size", "stride",
    "is_contiguous",
)  # fmt: skip
LOOKS = ("isinstance", "hasattr", "id", "type")
SAME = ("data", "_modules")  # of a weight, and of a module: a way to the same
AS_IT_IS = ("list", "tuple", "iter", "reversed", "sorted")


class Said(NamedTuple):
    """Paths of layers whose weight is read, whose weight is written in place, and paths that are called."""

    reads: list[Path]
    writes: set[Path]
    calls: set[Path]


def said(sources: Iterable[str]) -> Said:
    """What methods say, each by its source, in which the first argument is `self`; nothing of what cannot be parsed."""
    found = Said([], set(), set())
    for source in sources:
        try:
            tree = ast.parse(textwrap.dedent(source))
        except SyntaxError:
            continue
        for node in tree.body:
            _Walk(found).visit(node)
    return found


def flat(value: Value) -> set[Path]:
    """All paths of a value."""
    return set().union(*map(flat, value)) if isinstance(value, tuple) else value


def _child(value: Value, name: str) -> set[Path]:
    return {p if p[-1:] == ("weight",) else (*p, name) for p in flat(value)}


def _weights(value: Value) -> set[Path]:
    return {p[:-1] for p in flat(value) if len(p) > 1 and p[-1] == "weight"}


def _key(e: ast.expr) -> str:
    """A number, a key or a name as an attribute of the path."""
    if isinstance(e, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "?*" for part in e.values)
    try:
        return str(ast.literal_eval(e))
    except ValueError:
        return "*"


class _Walk(ast.NodeVisitor):
    """Statements in their order. `value` says what an expression stands for; to visit one is to use what it stands for."""

    def __init__(self, found: Said) -> None:
        self.found, self.names = found, dict[str, Value](self={()})

    # ---- what an expression stands for

    def value(self, e: ast.AST) -> Value:
        """Paths that an expression may be, or a tuple of such."""
        match e:
            case ast.Name(id=name):
                return self.names.get(name, set())
            case ast.Attribute(value=owner, attr=name):
                whole = self.value(owner)
                return flat(whole) if name in SAME else {(*p, name) for p in flat(whole)}
            case ast.Subscript(value=owner, slice=ast.Slice()):
                return flat(self.value(owner))
            case ast.Subscript(value=owner, slice=index):
                whole, key = self.value(owner), _key(index)
                place = int(key) if key.lstrip("-").isdigit() else len(whole)
                return (whole[place] if -len(whole) <= place < len(whole) else flat(whole)) if isinstance(whole, tuple) else _child(whole, key)
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, name, *_]):
                return {(*p, _key(name)) for p in flat(self.value(owner))}
            case ast.Call(func=ast.Attribute(value=owner, attr="get_submodule" | "get_parameter"), args=[name]):
                return {(*p, *_key(name).split(".")) for p in flat(self.value(owner))}
            case ast.Call(func=ast.Name(id=name), args=[of, *_]) if name in AS_IT_IS:
                return self.value(of)
            case ast.Call(func=ast.Attribute(value=owner, attr="values" | "children")):
                return flat(self.value(owner))
            case ast.IfExp(body=a, orelse=b):
                return flat(self.value(a)) | flat(self.value(b))
            case ast.BoolOp(values=parts):
                return flat(tuple(map(self.value, parts)))
            case ast.NamedExpr(target=target, value=v):
                self.bind(target, self.value(v))
                return self.value(v)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return tuple(map(self.value, parts))
            case ast.ListComp(elt=elt, generators=loops) | ast.GeneratorExp(elt=elt, generators=loops):
                return (self.within(loops, lambda: self.value(elt)),)
        return set()

    def elements(self, e: ast.expr) -> Value:
        """What a loop's variable may be."""
        match e:
            case ast.Call(func=ast.Name(id="enumerate"), args=[of, *_]):
                return set(), self.elements(of)
            case ast.Call(func=ast.Name(id="zip"), args=of):
                return tuple(map(self.elements, of))
            case ast.Call(func=ast.Name(id=name), args=[of, *_]) if name in AS_IT_IS:
                return self.elements(of)
            case ast.Call(func=ast.Attribute(value=owner, attr="items" | "named_children")):
                return set(), _child(self.value(owner), "*")
            case ast.Call(func=ast.Name(id="chain") | ast.Attribute(attr="chain"), args=of):
                return set().union(*(flat(self.elements(part)) for part in of))
            case ast.BinOp(left=a, op=ast.Add(), right=b):
                return flat(self.elements(a)) | flat(self.elements(b))
        value = self.value(e)
        if not isinstance(value, tuple):
            return _child(value, "*")
        pairs = [v for v in value if isinstance(v, tuple)]
        return tuple(flat(parts) for parts in zip(*pairs, strict=False)) if pairs else flat(value)

    def bind(self, target: ast.AST, value: Value) -> None:
        """Give a target what it stands for; a weight that is assigned to is written."""
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, ast.Starred):
            self.bind(target.value, flat(value))
        elif isinstance(target, (ast.Tuple, ast.List)):
            fits = isinstance(value, tuple) and len(value) == len(target.elts)
            for i, part in enumerate(target.elts):
                self.bind(part, value[i] if fits else flat(value) if isinstance(value, tuple) else _child(value, "*"))
        else:
            self.found.writes.update(_weights(self.value(target)))

    def within(self, loops: Sequence[ast.comprehension], do: Any) -> Any:
        """`do` with the variables of a comprehension, which end with it."""
        outside = dict(self.names)
        for loop in loops:
            self.hold(loop.iter)
            self.bind(loop.target, self.elements(loop.iter))
            for test in loop.ifs:
                self.visit(test)
        done = do()
        self.names = outside
        return done

    # ---- what the code does

    def use(self, e: ast.AST) -> None:
        self.found.reads.extend(p for p in sorted(_weights(self.value(e))) if p not in self.found.reads)

    def hold(self, e: ast.AST | None) -> None:
        """An expression that is given a name, or gone over: it is used where that is."""
        if isinstance(e, (ast.Tuple, ast.List)):
            for part in e.elts:
                self.hold(part)
        elif e is not None and not flat(self.value(e)):
            self.visit(e)

    def visit_Name(self, node: ast.Name) -> None:
        self.use(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if _weights(owner := self.value(node.value)):
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
        if name in LOOKS:
            args = args[1:]
        elif name.endswith("_") and not name.endswith("__"):  # in place
            written = of if of is not None and flat(self.value(of)) else args.pop(0) if args and flat(self.value(args[0])) else None
            if written is not None:
                self.found.writes.update(_weights(self.value(written)))
                of = None
        self.found.calls.update(p[:-1] if p[-1:] == ("forward",) else p for p in flat(self.value(node.func)))
        for part in (*([node.func] if of is not None or isinstance(node.func, ast.Call) else []), *args):
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
        if not isinstance(node.target, ast.Name) or _weights(self.value(node.target)):
            self.bind(ast.Attribute(node.target, "data", ast.Store()), set())

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
        args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self.names = {name: value for name, value in outside.items() if name == "self" or name not in {a.arg for a in args}}
        for part in (*node.args.defaults, *([node.body] if isinstance(node, ast.Lambda) else node.body)):
            self.visit(part)
        self.names = outside

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef
