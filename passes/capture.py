"""Run a model once on fake tensors, forward and backward, and leave it as it was.

What may be given: an nn.Module, an fx.GraphModule (traced, from Dynamo with its parameters among the inputs, or unlifted), an exported program. Parameters and
buffers are replaced by fake ones for the time of the run, and every attribute of every module is put back afterwards, and the random states with them.
"""

from __future__ import annotations

import random
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from ..kernels.errors import ConfigError, FxMaskError, UnsupportedError, message
from . import ranks
from . import site as state
from .lifted import source_name
from .record import CALL_CODE, Call, Place, Recorder, typical_mask
from .site import Site

LOCAL = re.compile(r"^(L\['\w+'\]|L__self__)[._]*")  # what Dynamo calls the module that it was given
WRAPPERS = ("DistributedDataParallel", "DataParallel")  # forwards go to .module


@dataclass
class Saved:
    """A tensor that autograd holds for the backward."""

    place: Place
    module: str
    bytes: int  # of its whole storage: a view keeps all of it


@dataclass
class Recording:
    """What ran, and the tensors that were there before."""

    calls: list[Call]
    saved: list[Saved]  # each storage once, without parameters, buffers and inputs of the model
    parameters: dict[str, Tensor]  # by name, tied ones once; the real ones
    buffers: dict[str, Tensor]
    inputs: list[Tensor]
    modules: dict[str, str]  # name -> class
    sites: dict[str, Site] = field(default_factory=dict)  # parameter's name -> owner of its mask
    executions: dict[str, int] = field(default_factory=dict)  # module -> how often it was called
    typical: set[str] = field(default_factory=set)  # weights whose masks were drawn at random, because they have no values
    uncounted: set[str] = field(default_factory=set)  # masked weights of which nothing says how many blocks are kept
    backward: bool = False  # whether a backward ran
    dtype: torch.dtype | None = None  # that floating tensors were taken to have

    def size(self, t: Tensor) -> int:
        """Bytes of a tensor, in the dtype that was asked for."""
        return t.numel() * (self.dtype if self.dtype and t.is_floating_point() else t.dtype).itemsize


class _Nodes(fx.Interpreter):
    """Runs a graph, and tells the recorder which node runs."""

    def __init__(self, gm: fx.GraphModule, recorder: Recorder) -> None:
        super().__init__(gm)
        self.recorder = recorder

    def run_node(self, n: fx.Node) -> Any:
        self.recorder.node, self.recorder.stack = n.name, _module_of(n)
        out = super().run_node(n)  # where it raises, the node stays noted
        self.recorder.node = self.recorder.stack = ""
        return out


def _module_of(n: fx.Node) -> str:
    """The innermost module of a node of Dynamo or export, as it is named in the model that was traced."""
    stack = n.meta.get("nn_module_stack") or {}
    name = next(reversed(stack.values()))[0] if stack else ""
    return LOCAL.sub("", name)


def capture(
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    backward: bool = True,
    dtype: torch.dtype | None = None,
    progress: Callable[[int], None] | None = None,
) -> Recording:
    """Record one step of a model: its forward on `args` and `kwargs`, and, where anything requires a gradient, the backward from all its floating outputs.

    Tensors among the inputs are looked at for shape, dtype and requires_grad alone; they may be meta tensors, and so may the model's. With `dtype` all floating
    tensors are taken as if they had it. `progress` is called with the number of ops so far.
    Raises UnsupportedError where the model cannot run without values (an `.item()`, an `if` over a tensor) or is sharded, ConfigError for what is no model.
    Cost: one eager forward and backward without arithmetic, some 0.5 ms an op; no memory for tensors. A mask that each forward builds is built once, from the
    real weight.
    """
    gm, root = _runnable(model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    faked = _Fakes(mode, dtype)
    with _unchanged(root), _plain_ops(), torch.compiler.set_stance("force_eager"):
        parameters, buffers = _swap(root, faked)
        given = tree_leaves((args, kwargs or {}))
        inputs = [t for t in given if isinstance(t, Tensor)]
        for name, t in _placeholders(gm, args):
            if isinstance(t, nn.Parameter):  # Dynamo gives the model's parameters as inputs
                parameters.setdefault(name, t)
        inputs = [t for t in inputs if not isinstance(t, nn.Parameter)]
        fake_args, fake_kwargs = tree_map(lambda a: faked(a) if isinstance(a, Tensor) else a, (tuple(args), dict(kwargs or {})))
        weights = {t.untyped_storage()._cdata: (name, p) for name, p in parameters.items() for t in (p, faked(p))}  # some code holds the real ones
        constants = {faked(b).untyped_storage()._cdata for b in buffers.values()}
        names = {id(m): name for name, m in reversed(list(root.named_modules()))}
        recorder = Recorder(names, weights, constants)
        recorder.progress = progress
        recorder.values = {faked(t).untyped_storage()._cdata: t for t in (*inputs, *buffers.values())}
        cached = [m for m in root.modules() if isinstance(m, Site) and m._fxmask_mask is not None]
        recorder.blocks = {m._fxmask_mask.untyped_storage()._cdata: m._fxmask_config.block for m in cached if m._fxmask_mask is not None}
        saved: list[Saved] = []
        run = _Nodes(gm, recorder).run if gm is not None else root
        before = {faked(t).untyped_storage()._cdata for t in inputs}
        graph = torch.enable_grad() if backward else torch.no_grad()
        with mode, recorder, graph:
            try:
                with _saves(recorder, saved, before) if backward else nullcontext():  # what a backward recomputes is held for a moment only
                    out = run(*fake_args, **fake_kwargs)
                ran = _backward(out) if backward else False
            except FxMaskError:
                raise
            except Exception as e:
                raise _failed(recorder, e) from e
            finally:
                recorder.restore()
    sites = {m._fxmask_name: m for m in root.modules() if isinstance(m, Site)}
    kinds = {name: type(m).__name__ for name, m in root.named_modules()}
    executions = dict(Counter(name for _, name in recorder.frames.values()))
    if gm is not None:
        executions[""] = 1  # an interpreter runs it, no call of the module
        kinds = _traced_kinds(gm) | kinds
    return Recording(recorder.calls, saved, parameters, buffers, inputs, kinds, sites, executions, recorder.typical, recorder.uncounted, ran, dtype)


def _runnable(model: Any) -> tuple[fx.GraphModule | None, nn.Module]:
    if isinstance(model, torch.export.ExportedProgram):
        model = model.module()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"analyze takes an nn.Module, an fx.GraphModule or a torch.export.ExportedProgram: got {type(model).__name__}.")
    while True:
        inner = getattr(model, "_orig_mod", None) if type(model).__name__ == "OptimizedModule" else None
        inner = model.module if type(model).__name__ in WRAPPERS else inner
        if inner is None:
            break
        model = inner
    return model if isinstance(model, fx.GraphModule) else None, model


def _placeholders(gm: fx.GraphModule | None, args: Sequence[Any]) -> list[tuple[str, Any]]:
    nodes = [] if gm is None else [n for n in gm.graph.nodes if n.op == "placeholder"]
    return [(source_name(n) or n.target, a) for n, a in zip(nodes, args, strict=False)]


def _traced_kinds(gm: fx.GraphModule) -> dict[str, str]:
    """Modules of the model that a graph was traced from, and their classes."""
    found = {"": ""}
    for n in gm.graph.nodes:
        for name, kind in (n.meta.get("nn_module_stack") or {}).values() if n.op != "placeholder" else ():
            found[LOCAL.sub("", name)] = kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
    return dict(sorted(found.items(), key=lambda p: p[0] != ""))


class _Fakes:
    """Fake tensors of one mode: the same one for the same tensor, on a device that needs no hardware."""

    def __init__(self, mode: FakeTensorMode, dtype: torch.dtype | None) -> None:
        self.mode, self.dtype = mode, dtype
        self.made: dict[int, tuple[Tensor, Tensor]] = {}  # the original is held, so that its id stays its own

    def __call__(self, t: Tensor) -> Tensor:
        if id(t) not in self.made:
            if ranks.is_shard(t) or is_traceable_wrapper_subclass(t):
                what = f"analyze runs the model on plain fake tensors: expected none of a wrapper class, got {type(t).__name__}."
                raise UnsupportedError(message(what, "", "analyse the model before fully_shard, tensor parallelism or quantisation changes its parameters."))
            if nn.parameter.is_lazy(t):
                what = f"analyze needs the shapes of all parameters: expected none that is lazy, got {type(t).__name__}."
                raise UnsupportedError(message(what, "", "run one forward first, which gives lazy modules their shapes."))
            device = "cpu" if t.is_meta else t.device
            with self.mode:
                dtype = self.dtype if self.dtype and t.is_floating_point() else t.dtype
                fake = torch.empty_strided(tuple(map(int, t.shape)), tuple(map(int, t.stride())), dtype=dtype, device=device)
                fake = nn.Parameter(fake, t.requires_grad) if isinstance(t, nn.Parameter) else fake.requires_grad_(t.requires_grad)
            self.made[id(t)] = (t, fake)
        return self.made[id(t)][1]


def _swap(root: nn.Module, faked: _Fakes) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Put fake parameters and buffers in place of the real ones, which are returned by their names."""
    parameters: dict[str, Tensor] = dict(root.named_parameters())
    buffers = dict(root.named_buffers())
    for m in root.modules():
        tables: tuple[dict[str, Any], ...] = (m._parameters, m._buffers)
        for table in tables:
            for name, t in table.items():
                if t is not None:
                    table[name] = faked(t)
        for name, t in list(m.__dict__.items()):
            if isinstance(t, Tensor) and t.is_meta and not name.startswith("_fxmask_"):  # a constant; with the weights it moves to where fake ones are
                m.__dict__[name] = faked(t)
    swapped = {id(t): faked(t) for t in (*parameters.values(), *buffers.values())}
    seen: set[int] = set()
    for m in root.modules():
        _refer(m.__dict__, swapped, seen)
    for m in root.modules():
        if isinstance(m, Site):
            _prepare(m)
    return parameters, buffers


def _refer(container: Any, swapped: dict[int, Tensor], seen: set[int]) -> None:
    """Let lists and dicts that hold parameters, as recurrent layers have one, hold the fake ones."""
    if id(container) in seen or not isinstance(container, (dict, list)):
        return
    seen.add(id(container))
    for key, value in list(container.items() if isinstance(container, dict) else enumerate(container)):
        if id(value) in swapped:
            container[key] = swapped[id(value)]
        else:
            _refer(value, swapped, seen)


def _prepare(site: Site) -> None:
    """For a look nobody needs to count steps, and ranks need not agree; state on the meta device gets values, a cached mask there typical ones."""
    site._fxmask_announced, site._fxmask_unguarded, site._fxmask_called = True, False, True
    if site._fxmask_keep.is_meta:
        state.place_on(site, torch.device("cpu"))
        site._fxmask_lost = False
        if site._fxmask_mask is not None:
            site._fxmask_mask = typical_mask(site._fxmask_grid, int(site._fxmask_keep))
            site._fxmask_lists = state.lists_of(site, site._fxmask_mask)


@contextmanager
def _unchanged(root: nn.Module) -> Iterator[None]:
    """Inside, modules may be changed at will: afterwards every attribute is what it was, what lists and dicts hold too, and so are the random states."""
    modules = list(root.modules())
    before = [(m, dict(m.__dict__)) for m in modules]
    held: dict[int, tuple[Any, Any]] = {}
    for _, attributes in before:
        for value in attributes.values():
            _copies(value, held)
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(state)
        for m, attributes in before:
            m.__dict__.clear()
            m.__dict__.update(attributes)
        for container, contents in held.values():
            _refill(container, contents)


CONTAINERS = (dict, list, set, deque)  # with their subclasses, such as an OrderedDict


def _copies(value: Any, held: dict[int, tuple[Any, Any]]) -> None:
    """Note what a container holds, and the containers in it."""
    if isinstance(value, tuple):
        for v in value:
            _copies(v, held)
    elif isinstance(value, CONTAINERS) and id(value) not in held:
        held[id(value)] = (value, dict(value) if isinstance(value, dict) else list(value))
        for v in value.values() if isinstance(value, dict) else value:
            _copies(v, held)


def _refill(container: Any, contents: Any) -> None:
    """Put back what a container held; one that nobody changed is not touched."""
    now: Any = dict(container) if isinstance(container, dict) else list(container)
    same = len(now) == len(contents) and all(a is b for a, b in zip(_flat(now), _flat(contents), strict=True))
    if not same:
        container.clear()
        container.extend(contents) if isinstance(container, (list, deque)) else container.update(contents)


def _flat(contents: Any) -> list[Any]:
    return [x for item in contents.items() for x in item] if isinstance(contents, dict) else contents


@contextmanager
def _plain_ops() -> Iterator[None]:
    """Inside, no fused op hides its products: encoder layers leave their fast path, recurrent layers their library's kernels."""
    fast, onednn = torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags warns of a setting that is not touched here
    try:
        with torch.inference_mode(False), torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch._C._set_mkldnn_enabled(onednn)


@contextmanager
def _saves(recorder: Recorder, saved: list[Saved], inputs: set[int]) -> Iterator[None]:
    known = set(recorder.real) | inputs

    def pack(t: Tensor) -> Tensor:
        key = t.untyped_storage()._cdata
        if key not in known and key not in recorder.neutral:
            known.add(key)
            saved.append(Saved(recorder._place(t), recorder._module()[0], t.untyped_storage().nbytes()))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield


def _backward(out: Any) -> bool:
    """Backward from every floating output that has a gradient, as a loss would begin it; False where there is none."""
    found = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad and t.is_floating_point()]
    if found:
        torch.autograd.backward(found, [torch.empty_like(t) for t in found])
    return bool(found)


def _raised_in(recorder: Recorder, e: Exception) -> str:
    """Name of the innermost module whose call an error came through."""
    found, tb = "", e.__traceback__
    while tb is not None:
        if tb.tb_frame.f_code is CALL_CODE:
            found = recorder.modules.get(id(tb.tb_frame.f_locals["self"])) or found
        tb = tb.tb_next
    return found


def _failed(recorder: Recorder, e: Exception) -> UnsupportedError:
    last = recorder.calls[-1] if recorder.calls else None
    where = f"{recorder.node or _raised_in(recorder, e) or '(model)'}, after {last.op if last else 'nothing'}"
    text = str(e).strip().splitlines()
    what = f"the model cannot run on fake tensors, which have shapes and no values: {type(e).__name__}: {text[0][:300] if text else ''}"
    fix = "check the inputs' shapes and dtypes; where the code needs values (.item(), an if over a tensor), pass the part of the model that"
    return UnsupportedError(message(what, where, f"{fix} does not, or a traced graph of it (torch.fx.symbolic_trace, torch.export.export)."))
