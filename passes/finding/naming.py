"""What an expression of a method's code may stand for: paths of modules and of their weights, from `self`.

A path is a tuple of attributes; "*" is any child, "fc?*" any whose name begins so. Names that come from elsewhere, such as arguments and results of calls,
stand for nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

Path = tuple[str, ...]
Value = Any  # set[Path], or a tuple of values, to be unpacked
SAME = ("data", "_modules")  # of a weight, and of a module: a way to the same
VIEWS = (  # methods, and functions of torch, that give a weight's own memory
    "view", "view_as", "reshape", "flatten", "ravel", "t", "transpose", "swapaxes", "swapdims", "permute", "movedim", "squeeze", "unsqueeze", "unflatten",
    "narrow", "select", "diagonal", "unfold", "expand", "chunk", "split", "tensor_split", "hsplit", "vsplit", "unbind", "detach", "contiguous",
)  # fmt: skip
TURNED = ("T", "mT", "H", "mH")  # attributes that do
AS_IT_IS = ("list", "tuple", "iter", "reversed", "sorted")


def flat(value: Value) -> set[Path]:
    """All paths of a value."""
    return set().union(*map(flat, value)) if isinstance(value, tuple) else value


def child(value: Value, name: str) -> set[Path]:
    """A child of whatever a value may be; a part of a weight is the weight."""
    return {p if p[-1:] == ("weight",) else (*p, name) for p in flat(value)}


def weights(value: Value) -> set[Path]:
    """The layers whose weight a value may be."""
    return {p[:-1] for p in flat(value) if len(p) > 1 and p[-1] == "weight"}


def _key(e: ast.expr) -> str:
    """A number, a key or a name as an attribute of the path."""
    if isinstance(e, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "?*" for part in e.values)
    try:
        return str(ast.literal_eval(e))
    except (ValueError, TypeError):  # no constant, or a set of what cannot be in one
        return "*"


class Names(ast.NodeVisitor):
    """What each name stands for by now, and from that every expression; `written` are the layers whose weight an assignment has changed in place."""

    def __init__(self) -> None:
        self.names, self.written = dict[str, Value](self={()}), set[Path]()

    def value(self, e: ast.AST) -> Value:
        """Paths that an expression may be, or a tuple of such."""
        match e:
            case ast.Name(id=name):
                return self.names.get(name, set())
            case ast.Attribute(value=owner, attr=name):
                whole = self.value(owner)
                same = name in SAME or (name in TURNED and weights(whole))
                return flat(whole) if same else {(*p, name) for p in flat(whole)}
            case ast.Subscript(value=owner, slice=ast.Slice()):
                return flat(self.value(owner))
            case ast.Subscript(value=owner, slice=index):
                whole, key = self.value(owner), _key(index)
                place = int(key) if key.lstrip("-").isdigit() else len(whole)
                return (whole[place] if -len(whole) <= place < len(whole) else flat(whole)) if isinstance(whole, tuple) else child(whole, key)
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, name, *_]):
                return {(*p, _key(name)) for p in flat(self.value(owner))}
            case ast.Call(func=ast.Attribute(value=owner, attr="get_submodule" | "get_parameter"), args=[name]):
                return {(*p, *_key(name).split(".")) for p in flat(self.value(owner))}
            case ast.Call(func=ast.Name(id=name), args=[of, *_]) if name in AS_IT_IS:
                return self.value(of)
            case ast.Call(func=ast.Name(id="next"), args=[of, *_]):
                return self.elements(of)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name), args=[of, *_]) if name in VIEWS and weights(self.value(of)):
                return flat(self.value(of))
            case ast.Call(func=ast.Attribute(value=owner, attr=name)) if name in VIEWS and weights(self.value(owner)):
                return flat(self.value(owner))
            case ast.Call(func=ast.Attribute(value=owner, attr="values" | "children")):
                return self.value(owner)
            case ast.IfExp(body=a, orelse=b):
                return flat(self.value(a)) | flat(self.value(b))
            case ast.BoolOp(values=parts):
                return flat(tuple(map(self.value, parts)))
            case ast.NamedExpr(target=target, value=v):
                self.bind(target, self.value(v))
                return self.value(v)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return tuple(map(self.value, parts))
            case ast.Dict(values=parts):
                return (flat(tuple(map(self.value, parts))),)  # whatever the key is
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
                whole = self.value(owner)
                return set(), flat(whole) if isinstance(whole, tuple) else child(whole, "*")
            case ast.Call(func=ast.Name(id="chain") | ast.Attribute(attr="chain"), args=of):
                return set().union(*(flat(self.elements(part)) for part in of))
            case ast.BinOp(left=a, op=ast.Add(), right=b):
                return flat(self.elements(a)) | flat(self.elements(b))
        value = self.value(e)
        if not isinstance(value, tuple):
            return child(value, "*")
        pairs = [v for v in value if isinstance(v, tuple)]
        return tuple(flat(parts) for parts in zip(*pairs, strict=False)) if pairs else flat(value)

    def bind(self, target: ast.AST, value: Value) -> None:
        """Give a target what it stands for; a weight that is assigned to is written."""
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, ast.Starred):
            self.bind(target.value, (flat(value),))  # a list of any of them
        elif isinstance(target, (ast.Tuple, ast.List)):
            fits = isinstance(value, tuple) and len(value) == len(target.elts)
            for i, part in enumerate(target.elts):
                self.bind(part, value[i] if fits else flat(value) if isinstance(value, tuple) else child(value, "*"))
        else:
            self.written.update(weights(self.value(target)))

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

    def hold(self, e: ast.AST | None) -> None:
        """An expression that is given a name, or gone over: it is used where that is."""
        if isinstance(e, (ast.Tuple, ast.List)):
            for part in e.elts:
                self.hold(part)
        elif e is not None and not flat(self.value(e)):
            self.visit(e)
