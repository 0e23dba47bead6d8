"""`fxmask advise`: which block and ratio pay for a named model on this machine."""

from __future__ import annotations

import argparse
from pathlib import PurePath

import torch
from torch import Tensor, nn

from ..analysis import models
from ..analysis.devices import is_here
from ..errors import ConfigError
from ..report import FORMATS
from .advise import advise


def add_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", help="timm:resmlp_12_224, torchvision:vit_b_16, or package.module:callable")
    p.add_argument("--input", action="append", required=True, metavar="SHAPE", help="16x3x224x224 or 2x128:int64; once for each argument of the model")
    p.add_argument("--target", type=float, default=1.05, help="times as fast as dense that the step is to be (1.05)")
    p.add_argument("--ratios", type=float, action="extend", nargs="+", default=None, help="what is tried (0.5 0.7 0.8 0.9)")
    p.add_argument("--blocks", action="extend", nargs="+", default=None, metavar="OUTxIN", help="such as 64 or 128x32 (64 32 16; on a GPU 128 64 32)")
    p.add_argument("--refresh", type=int, default=10, help="steps between rebuilds of the masks (10)")
    p.add_argument("--include", action="extend", nargs="+", default=None, help="patterns of layers, as for apply; may be given again")
    p.add_argument("--exclude", action="extend", nargs="+", default=None)
    p.add_argument("--seconds", type=float, default=60.0, help="when the search stops (60)")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--dtype", default=None, help="bfloat16 or float16: steps under torch.autocast with it")
    p.add_argument("--threads", type=int, default=None, help="of a CPU")
    p.add_argument("-o", "--out", default=None, help=f"write the advice there, too: {', '.join(FORMATS)}")


def main(a: argparse.Namespace) -> int:
    """Build the model with random weights, advise, print."""
    if a.out is not None and PurePath(a.out).suffix not in FORMATS:
        raise ConfigError(f"-o: expected a file that ends in {', '.join(FORMATS)}, got {a.out!r}.")
    dtype = getattr(torch, a.dtype, None) if a.dtype else None
    if a.dtype and dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(f"--dtype: expected bfloat16 or float16, got {a.dtype!r}.")
    try:
        device = torch.device(a.device)
    except RuntimeError as e:
        raise ConfigError(f"--device: expected cpu or cuda, got {a.device!r}: {str(e).splitlines()[0]}") from None
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not is_here(device.index)):
        raise ConfigError(f"--device: expected a device that is here, cpu or cuda, got {a.device!r}.")
    if a.threads is not None:
        if a.threads < 1:
            raise ConfigError(f"--threads: expected at least 1, got {a.threads}.")
        torch.set_num_threads(a.threads)
    shapes = [models.make_input(s) for s in a.input]
    model = materialised(models.load(a.model), device)
    more = {} if a.ratios is None else {"ratios": a.ratios}
    with torch.autocast(device.type, dtype, enabled=dtype is not None):
        found = advise(
            model, tuple(filled(t, device) for t in shapes), target=a.target, blocks=None if a.blocks is None else [models.make_block(b) for b in a.blocks],
            refresh=a.refresh, include=a.include, exclude=a.exclude, seconds=a.seconds, **more,
        )  # fmt: skip
    print(found)  # first, as a file that cannot be written would lose what the search has found
    if a.out is not None:
        found.save(a.out)
    return 0


def materialised(model: nn.Module, device: torch.device) -> nn.Module:
    """The model on a real device; of one on meta with N(0, 0.02) in every weight, which is all that a time depends on."""
    if not any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        return model.to(device)
    model = model.to_empty(device=device)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.02) if p.dim() > 1 else p.fill_(1.0)
        for b in model.buffers():
            b.fill_(1)
    return model


def filled(t: Tensor, device: torch.device) -> Tensor:
    """N(0, 1) in a floating tensor, zeros in another, and in 8 bits, of which PyTorch draws none."""
    make = torch.randn if t.is_floating_point() and t.itemsize > 1 else torch.zeros
    return make(t.shape, dtype=t.dtype, device=device)
