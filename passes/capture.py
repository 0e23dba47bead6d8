"""Run a model once on fake tensors, forward and backward, and leave it as it was.

What may be given: an nn.Module, an fx.GraphModule (traced, from Dynamo with its parameters among the inputs, or unlifted), an exported program. Parameters and
buffers are replaced by fake ones for the time of the run, and every attribute of every module is put back afterwards, and the random states with them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from ..kernels.errors import ConfigError, FxMaskError, UnsupportedError, message
from .calls import Call, Place
from .fakes import Fakes, swap
from .lifted import source_name
from .other_masks import kept_of_idle, masks_of_computed
from .record import CALL_CODE, Recorder
from .site import Site
from .untouched import plain_ops, unchanged

LOCAL = re.compile(r"^(L\['\w+'\]|L__self__)[._]*")  # what Dynamo calls the module that it was given
CHANGED = {"_fxmask_config", "_fxmask_pruning", "_fxmask_dropping", "_fxmask_nm"}  # attributes of layers whose forward is another now
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
    saved: list[Saved]  # each storage once, without parameters, buffers, cached masks and inputs of the model
    parameters: dict[str, Tensor]  # by name, tied ones once; the real ones
    buffers: dict[str, Tensor]
    inputs: list[Tensor]
    modules: dict[str, str]  # name -> class
    sites: dict[str, Site] = field(default_factory=dict)  # parameter's name -> owner of its mask
    changed: set[str] = field(default_factory=set)  # layers whose forward is another now: masked, pruned, dropped
    own: set[str] = field(default_factory=set)  # those of `changed` whose class had a forward of its own, which reads a masked weight
    idle: dict[str, int] = field(default_factory=dict)  # masked parameters that no op read -> their elements in kept blocks
    executions: dict[str, int] = field(default_factory=dict)  # module -> how often it was called
    typical: set[str] = field(default_factory=set)  # weights whose masks were drawn at random, because they have no values
    uncounted: set[str] = field(default_factory=set)  # masked weights of which nothing says how many blocks are kept
    backward: bool = False  # whether a backward ran
    trained: set[str] = field(default_factory=set)  # parameters that got a gradient: what a step moves
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
    faked = Fakes(mode, dtype)
    with unchanged(root), plain_ops(), torch.compiler.set_stance("force_eager"):
        computed = masks_of_computed(root)
        parameters, buffers = swap(root, faked)
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
        known = [(m, m._fxmask_mask) for m in cached]
        recorder.cached = {t.untyped_storage()._cdata: (m._fxmask_config.block, m._fxmask_shape) for m, t in known if t is not None}
        recorder.computed = computed
        sites = {m._fxmask_name: m for m in root.modules() if isinstance(m, Site)}
        recorder.masked_dw = {name for name, m in sites.items() if m._fxmask_config.backward in ("masked", "rigl") and not _dense_now(m)}
        saved: list[Saved] = []
        run = _Nodes(gm, recorder).run if gm is not None else root
        metadata = [t for m in cached for t in (m._fxmask_mask, m._fxmask_lists) if t is not None]
        before = {t.untyped_storage()._cdata for t in (*map(faked, inputs), *metadata)}
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
        read = {name for c in recorder.calls for p in c.inputs for name in p.weight.split("+")}
        idle = kept_of_idle(sites, parameters, read)
    trained = {name for name, p in parameters.items() if faked(p).grad is not None}
    kinds = {name: type(m).__name__ for name, m in root.named_modules()}
    executions = dict(Counter(name for _, name in recorder.frames.values()))
    changed = {name: m for name, m in root.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d)) and not CHANGED.isdisjoint(m.__dict__)}
    own = {name for name, m in changed.items() if isinstance(m, Site) and m._fxmask_config.read == "weight" and _computes(m)}
    if gm is not None:
        kinds, traced = _traced_kinds(gm) | kinds, _traced_calls(gm)
        executions = traced | executions | {"": 1}  # an interpreter runs it, no call of the module
    typical, uncounted = recorder.typical, recorder.uncounted
    return Recording(
        recorder.calls, saved, parameters, buffers, inputs, kinds, sites, set(changed), own, idle, executions, typical, uncounted, ran, trained, dtype
    )


def _computes(m: nn.Module) -> bool:
    """Whether the class that a layer had before it was masked has a forward of its own."""
    return getattr(m, "_fxmask_base", type(m)).forward not in (nn.Linear.forward, nn.Conv2d.forward)


def _dense_now(site: Site) -> bool:
    """Whether this step's gradient of the weight is dense under `rigl`."""
    return site._fxmask_config.backward == "rigl" and site._fxmask_dense_now


def arguments(inputs: Any, kwargs: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a forward is called with: `inputs` is one argument, a tuple or list of them, or a dict of keyword arguments, to which `kwargs` adds."""
    if isinstance(inputs, Mapping):
        return (), {**inputs, **(kwargs or {})}
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), dict(kwargs or {})


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


def backend_of(model: Any) -> str:
    """The name of the backend that `torch.compile` was given by name for this model; empty for Inductor, and where there is none."""
    backend = getattr(getattr(model, "dynamo_ctx", None), "callback", None)
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    return str(getattr(backend, "compiler_name", ""))


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


def _traced_calls(gm: fx.GraphModule) -> dict[str, int]:
    """How often a graph calls the modules that it was traced from: every call has a key of its own."""
    keys = {(key, LOCAL.sub("", name)) for n in gm.graph.nodes if n.op != "placeholder" for key, (name, _) in (n.meta.get("nn_module_stack") or {}).items()}
    return dict(Counter(name for _, name in keys))


@contextmanager
def _saves(recorder: Recorder, saved: list[Saved], inputs: set[int]) -> Iterator[None]:
    known = set(recorder.real) | inputs | set(recorder.neutral)  # buffers; what a forward makes of them, or draws, autograd holds

    def pack(t: Tensor) -> Tensor:
        key = t.untyped_storage()._cdata
        if key not in known:
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
