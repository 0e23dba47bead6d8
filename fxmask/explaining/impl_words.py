"""What `explain` says of a layer's implementation: what runs it, and why; with the numbers of the choices where some were made."""

from __future__ import annotations

from torch import Tensor, nn

from ..conv_layers import LISTS, why_dense
from ..kernels import gpu_choice
from ..kernels.cpu import deciding
from ..kernels.grid import matrix_shape
from ..kernels.lists import LISTED, skips
from ..kernels.tune import Choice
from ..passes.settings.config import WeightMask
from ..passes.state.site import Site
from . import gpu_words

OPS = ("forward", "dx", "dw", "backward")  # as `kernels.cpu` names them


def runs(c: WeightMask, weight: Tensor | None, mask: Tensor | None, site: Site | None = None) -> dict[str, str]:
    """{"impl", "why"} of a layer, or of a linear in a graph (without `site`)."""
    if c.read == "weight":
        return {"impl": "reference", "why": "its owner reads W∘M"}
    if isinstance(site, nn.Conv2d) and weight is not None:
        dense = why_dense(site, weight)
        if dense or c.impl not in LISTS:
            why = dense or ("asked for" if c.impl == "reference" else "no recorded run of a convolution shows a faster one")
            return {"impl": "masked_dense", "why": f"PyTorch's convolution of W∘M: {why}"}
    if c.impl == "auto" and weight is not None and gpu_choice.capability(weight.device) is not None:
        return gpu_words.runs(site, weight.device)
    if weight is None:
        return {"impl": c.impl, "why": "the graph computes its weight"}
    if c.impl not in ("auto", "cpu") or weight.device.type != "cpu":
        auto = {"impl": "reference", "why": "no kernels for its device"}
        return auto if c.impl == "auto" else {"impl": c.impl, "why": asked_for(c.impl, c.block, weight)}
    density = 1.0 if mask is None or not mask.numel() else float(mask.count_nonzero()) / mask.numel()
    if density == 1:
        return {"impl": "masked_dense", "why": "no block is masked"}
    found = {op: deciding.made(op, matrix_shape(weight.shape), c.block, density, c.impl == "cpu") for op in OPS}
    ran = {op: f for op, f in found.items() if f}
    if not ran:
        return {"impl": c.impl, "why": "chosen when it first runs"}
    why = "; ".join(f"{op} {_reasons_of(choice)}" for op, f in ran.items() for choice in f.values())
    return {"impl": ", ".join(f"{op} {_names_of(f)}" for op, f in ran.items()), "why": why}


def asked_for(impl: str, block: tuple[int, int], weight: Tensor) -> str:
    """Of the kernels with the products in which they skip nothing, and multiply densely by W∘M."""
    products = {"forward": "forward", "dX": "dx", "dW": "dw"} if impl == "triton" else {}
    dense = [name for name, op in products.items() if not skips(op, matrix_shape(weight.shape), block)]
    takes = f"kernels skip blocks with sides of {', '.join(map(str, LISTED))}, in even numbers of features"
    return f"asked for; dense in {', '.join(dense)}: {takes}" if dense else "asked for"


def _names_of(choices: dict[int, Choice]) -> str:
    """The plan; where calls of layers of this kind differ in tokens and plans, each with its number of tokens."""
    if len({c.name for c in choices.values()}) == 1:
        return next(iter(choices.values())).name
    return " or ".join(f"{c.name} ({f'about {tokens:,} tokens' if tokens else 'few tokens'})" for tokens, c in choices.items())


def _reasons_of(choice: Choice) -> str:
    """A choice's times in ms, fastest first, and over how many tokens."""
    times = sorted(choice.times.items(), key=lambda t: t[1])[:4]
    busy = ", on a busy machine: will be repeated" if choice.busy else ""
    return f"{choice.why} over {choice.tokens:,} tokens{busy}: " + ", ".join(f"{name} {1e3 * t:.3g} ms" for name, t in times)
