"""What is asked of every model, in eager mode: which linears, the numbers of `apply`, a guarded step, FLOP. Each check fills columns of its own."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

import fxmask
from zoo.equality import BLOCK, RATIO, Masks, Outcome, compare, element_masks, floats, masked_copy, run, settle, written_in, wrong_masks
from zoo.results import BEYOND, MISSED
from zoo.sources import Made

Columns = dict[str, Any]
NO, TIED, OUT_OF_MEMORY = "no", "tied to an Embedding", "out of memory"
FIRST = 3  # of a list of names, as many as are told


class Subject:
    """One model, as it was made; checks work on copies."""

    def __init__(self, made: Made) -> None:
        self.made, self.model = made, made.model

    @cached_property
    def eligible(self) -> dict[str, str]:
        """{weight's name: '' or why it stays dense by default} of every nn.Linear, written without fxmask, by its README."""
        tables = {id(p) for m in self.model.modules() if "Embedding" in type(m).__name__ and not isinstance(m, nn.Linear) for p in m._parameters.values()}
        found = {}
        for name, m in self.model.named_modules():
            if isinstance(m, nn.Linear):
                small, lora = min(m.in_features, m.out_features) < 16, {"lora_A", "lora_B"} & set(name.split("."))
                own = not is_linear(m)
                found[f"{name}.weight".removeprefix(".")] = (
                    TIED if id(m.weight) in tables else "smaller than 16" if small else "LoRA" if lora else "own forward" if own else ""
                )
        return found

    @cached_property
    def masks(self) -> Masks:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fxmask.FxMaskWarning)
            return element_masks(masked_copy(self.model))

    def masked(self) -> nn.Module:
        with warnings.catch_warnings():  # `applied` tells them
            warnings.simplefilter("ignore", fxmask.FxMaskWarning)
            return masked_copy(self.model)

    def dense(self) -> nn.Module:
        """W∘M written in, without fxmask."""
        return written_in(self.model, self.masks)


def is_linear(m: nn.Linear) -> bool:
    """Whether a layer computes x W^T + b, tried and not read off its class."""
    if type(m).forward is nn.Linear.forward:
        return True
    x = torch.randn(3, m.in_features, generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            return torch.equal(copy.deepcopy(m).float()(x), F.linear(x, m.weight.float(), None if m.bias is None else m.bias.float()))
    except Exception:  # it takes more than an input
        return False


def some(names: Any) -> str:
    """The first of some names, and how many there are."""
    listed = sorted(names)
    return ", ".join(listed[:FIRST]) + (f" and {len(listed) - FIRST} more" if len(listed) > FIRST else "")


def told(caught: list[warnings.WarningMessage]) -> list[str]:
    """fxmask's own warnings, one line each, once."""
    return list(dict.fromkeys(" ".join(str(w.message).split())[:160] for w in caught if issubclass(w.category, fxmask.FxMaskWarning)))


def chosen(s: Subject) -> Columns:
    """Whether the masks of `apply` are those that the norms say."""
    if not s.masks:
        return {"masks": "-", "masks_why": "nothing is masked"}
    wrong = wrong_masks(s.model, s.masks)
    return {"masks": NO if wrong else "yes", "masks_why": f"not the larger half of the blocks: {some(wrong)}" if wrong else ""}


def applied(s: Subject) -> Columns:
    """`apply`: what it masks, and outputs and gradients in train and eval against the dense copy; see `settle` where float32 rounds too much."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        masked = masked_copy(s.model)
    dense, wanted = s.dense(), {name for name, reason in s.eligible.items() if not reason}
    why, row = told(caught), {"apply": len(s.masks)}
    for words, names in ((MISSED, wanted - set(s.masks)), (BEYOND, set(s.masks) - wanted)):
        why += [words + some(names)] * bool(names)
    for mode in ("train", "eval"):
        pair = (run(masked.train(mode == "train"), s.made), run(dense.train(mode == "train"), s.made))
        row[mode] = compare(*pair, s.masks)
        if mode == "eval":
            row["unreached"] = sum(pair[1].gradients.get(name) is None for name in s.masks)
        if row[mode].startswith(NO):
            why.append(f"float32 {mode}: {row[mode]}")
            row[mode] = settle(pair, in_float64(s, mode), s.masks)
    return {**row, "apply_why": "; ".join(why)}


def in_float64(s: Subject, mode: str) -> tuple[Outcome, Outcome]:
    """Masked and dense in float64; masks are of the float32 weights' values, which that holds exactly."""
    masked = copy.deepcopy(s.model).double().train(mode == "train")
    dense = written_in(masked, s.masks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxmask.FxMaskWarning)
        fxmask.apply(masked, ratio=RATIO, block=BLOCK)
    return run(masked, s.made, dtype=torch.float64), run(dense, s.made, dtype=torch.float64)


def guarded(s: Subject) -> Columns:
    """One step of SGD with momentum and decay under a guard: masked weights keep their bits, kept ones move, nothing warns."""
    masked = s.masked().train()
    if not s.masks:
        return {"guard": "-", "guard_why": "nothing is masked"}
    optimizer = torch.optim.SGD((p for p in masked.parameters() if p.requires_grad), lr=1e-3, momentum=0.9, weight_decay=0.1)
    fxmask.guard(optimizer, masked)
    before = {name: masked.get_parameter(name).detach().clone() for name in s.masks}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(masked, s.made)
        optimizer.step()
    why = told(caught)
    for name, kept in s.masks.items():
        now = masked.get_parameter(name)
        if not torch.equal(now[~kept], before[name][~kept]):
            why.append(f"{name}: masked weights moved")
        if now.grad is not None and bool(now.grad.any()) and torch.equal(now, before[name]):
            why.append(f"{name}: kept weights rested")
    return {"guard": NO if why else "yes", "guard_why": "; ".join(why[:FIRST])}


# ---- FLOP ------------------------------------------------------------------------------------------------------------------------------------------------


def counted(s: Subject) -> Columns:
    """`analyze` of the dense model in training, beside PyTorch's FlopCounterMode on meta tensors; on real ones where a model reads values."""
    report = fxmask.analyze(copy.deepcopy(s.model).train(), s.made.args, kwargs=s.made.kwargs, device="h100-sxm")
    flop, unknown = report.summary["flop"], report.tables["coverage"]
    forward, total = flop["fwd"], flop["total"]
    row: Columns = {"analyze": "yes", "flop": total, "coverage": report.summary["coverage"]["bytes_pct"]}
    why = [f"unknown: {some(r['op'] for r in unknown)}"] * bool(unknown)
    try:
        theirs, ops = pytorch_count(s, "meta")
    except Exception as error:
        theirs, ops = pytorch_count(s, "cpu")
        why.append(f"PyTorch counted on real tensors, as on meta tensors: {reason(error)}")
    row["coverage"] = min(row["coverage"], 100.0 * min(1.0, forward / theirs[0]) if theirs[0] else 100.0)
    same = "yes" if (forward, total) == theirs else "forward" if forward == theirs[0] else NO
    if same == "forward" and not grouped(s.model):
        same, why = NO, [*why, f"backward {total - forward}, PyTorch {theirs[1] - theirs[0]}"]
    elif same == NO:
        ours = Counter[str]()
        for r in report.tables["nodes"]:
            if r["phase"] == "fwd" and r["flop"]:
                ours[r["op"]] += r["flop"]
        alone = {op: n for op, n in ours.items() if op not in ops and "_scaled_dot_product" not in op}  # of fused attention it counts the products
        if alone and forward - sum(alone.values()) == theirs[0]:
            return {**row, "flop_equal": "-", "analyze_why": "; ".join([*why, f"PyTorch counts all but {some(alone)}"])}
        differ = [f"{op} {ours[op]}, PyTorch {ops[op]}" for op in sorted({*ours, *ops}) if ours[op] != ops[op]]
        why.append("forward: " + ", ".join(differ[:FIRST]))
    return {**row, "flop_equal": same, "analyze_why": "; ".join(why)}


def pytorch_count(s: Subject, device: str) -> tuple[tuple[int, int], Counter[str]]:
    """(forward, forward and backward) by FlopCounterMode, and its forward by op. Attention by its plain products: of the CPU's fused one it counts nothing."""
    model = copy.deepcopy(s.model).train().to(device)
    args, kwargs = tree_map(lambda t: t.to(device) if isinstance(t, torch.Tensor) else t, (s.made.args, s.made.kwargs))
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        ys = [y for y in floats(model(*args, **kwargs)) if y.requires_grad]
        forward = counter.get_total_flops()
        ops = Counter({str(op): n for op, n in counter.get_flop_counts()["Global"].items()})
        torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
    return (forward, counter.get_total_flops()), ops


def grouped(model: nn.Module) -> bool:
    """Whether there are grouped convolutions, whose dW PyTorch counts once for each group."""
    return any(getattr(m, "groups", 1) not in (1, None) for m in model.modules())


def reason(error: BaseException) -> str:
    """An error in one line. What torch.compile wraps is told by its cause."""
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, BaseException):
        error = inner
    text = " ".join(str(error).split()) or "no text"
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        return OUT_OF_MEMORY
    return f"{type(error).__name__}: {text}"[:200]


CHECKS: dict[str, Callable[[Subject], Columns]] = {"masks": chosen, "apply": applied, "guard": guarded, "analyze": counted}


def facts(s: Subject) -> Columns:
    """What does not depend on any check."""
    left = [reason for reason in s.eligible.values() if reason]
    return {
        "parameters": sum(p.numel() for p in s.model.parameters()),
        "input": s.made.shapes(),
        "note": s.made.note,
        "linears": len(s.eligible),
        "eligible": len(s.eligible) - len(left),
        "left_out": ", ".join(f"{left.count(r)} {r}" for r in dict.fromkeys(left)),
    }


