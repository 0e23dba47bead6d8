"""What is known of one linear of a model, whatever form it has, and which weights cannot be masked at all."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..graphs.graph_calls import recorded_stack, resolve

IN_PROJ_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")  # one, or three where keys or values have another width
IN_PROJ = "its in_proj is a Parameter and no Linear (a torch.export trace shows it as a linear call, and masks it)"
REPLACED = "its forward was replaced on the instance, and a swapped class would not be called; call fxmask.apply before that"
OWNER_REPLACED = "its owner reads its weight, and the owner's forward was replaced on the instance; call fxmask.apply before that"

CHANGED = {"_fxmask_config", "_fxmask_pruning", "_fxmask_dropping", "_fxmask_nm"}  # attributes of layers whose forward is another now


@dataclasses.dataclass
class Candidate:
    """One linear of a model, whatever form it has.

    `name` is the module's path, or the parameter's without `.weight`. `nodes` are its calls in the graph of `host`, empty where the class is swapped.
    """

    name: str
    param_name: str
    weight: Tensor
    module: nn.Module | None = None  # of a call in a graph a stand-in, for patterns; without any, `explain` goes by marks of the weight, which may be computed
    host: GraphModule | None = None
    local: str = ""  # its name in the innermost graph module that holds both `host` and the layer
    nodes: list[Node] = dataclasses.field(default_factory=list)
    weight_path: str | None = None
    weight_node: Node | None = None  # in a Dynamo graph, where the weight is an input
    types: tuple[type, ...] = ()
    inside: frozenset[type] = frozenset()  # types of the modules that hold it, see `surround`
    problem: str = ""  # why it cannot be masked at all; an error if it is selected
    skip: str = ""  # why it is left dense, with a warning; read='weight' lifts it
    quiet: bool = False  # what no user takes for a Linear: skipped without a warning
    masked: bool = False  # already
    owners: list[nn.Module] = dataclasses.field(default_factory=list)  # that read .weight instead of calling it; itself, where it has a forward of its own
    tied_embedding: bool = False
    call: str = ""  # of a weight that its graph computes: its call's name, by which `explain` tells several of one module apart once they are masked
    lifted: str = ""  # of a call in the body of a region: the parameter that comes in as its weight, whose layer it is named by
    sized: bool = True  # the default exclusion of small weights holds for it
    product: bool = False  # no linear but a product with a parameter, which is never masked: `passes.finding.products`

    def stand_in(self) -> None:
        """Give it a module of its shape."""
        self.module = linear_like(self.weight)
        self.types = (*self.types, *nn.Linear.__mro__) if nn.Linear not in self.types else self.types

    @property
    def reads_itself(self) -> bool:
        """Whether it is a layer with a forward of its own, which reads the weight."""
        return self.module is not None and any(owner is self.module for owner in self.owners)

    @property
    def names(self) -> tuple[str, ...]:
        """By which a pattern names it exactly."""
        return (self.name, self.call) if self.call else (self.name,)

    def parameter(self, model: nn.Module) -> Tensor:
        """Its weight; of a call in the body of a region the parameter that comes in."""
        return resolve(model, self.lifted) if self.lifted else self.weight

    @property
    def held(self) -> bool:
        """Whether a graph module holds the weight, and does not compute it."""
        return bool(self.weight_path or self.lifted)

    @property
    def key(self) -> str:
        """By which `explain` finds what `apply` has said of it: with a colon, which no module's name has, the calls of one module are told apart."""
        return f"{self.name}:{self.call.rpartition('.')[2]}" if self.call else self.name


def base_of(m: nn.Module) -> Any:
    """The class of a module, of one that `fxmask.apply` has given another the class that it had."""
    return getattr(type(m), "_fxmask_base", type(m))


def linear_like(weight: Tensor) -> nn.Module:
    """A Linear of a weight's shape, without values: for patterns that look at a module."""
    return nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], device="meta")


def surround(found: list[Candidate], model: nn.Module | None) -> None:
    """Note for every candidate what modules hold it: by its path in the model, and by what the trace recorded of its calls."""
    paths = {} if model is None else {name: type(m).__mro__ for name, m in model.named_modules(remove_duplicate=False)}
    for c in found:
        parts = c.name.split(".")
        around = [paths.get(".".join(parts[:i]), ()) for i in range(len(parts))]
        around += [types for node in c.nodes for _, types in recorded_stack(node)]
        c.inside = frozenset(t for types in around for t in types)


def weight_problem(w: Tensor) -> str:
    """Why a weight cannot be masked; empty for one that can be."""
    if w.layout != torch.strided:
        return f"its weight is sparse ({w.layout}), as fxmask.finalize and PyTorch make them; mask the dense model"
    if w.is_complex():
        return f"its weight is complex ({w.dtype}), and masks are for real weights"
    if w.is_quantized or not w.is_floating_point() or w.element_size() == 1:
        return f"its weight is quantised ({w.dtype}); mask the float model first, then quantise"
    if is_traceable_wrapper_subclass(w):
        return f"its weight is a {type(w).__name__}; call fxmask.apply before sharding, quantising or wrapping"
    return ""


def join(prefix: str, name: str) -> str:
    """The path of what lies at `name` in the module at `prefix`."""
    return f"{prefix}.{name}" if prefix and name else prefix or name
