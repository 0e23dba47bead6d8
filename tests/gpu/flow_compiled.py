"""What becomes of a masked model: compiled, exported, made permanent; see `flow_bodies.py`."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from gpu.flow_bodies import BLOCK, WIDTH, adamw, assert_masks_equal, assert_same_weights, batch, loss_of, masked_net, net
from gpu.flow_models import assert_results, results

import fxmask
from fxmask.kernels.grid import expand_mask


def check_export(device, impl):
    model = masked_net(device, impl).eval()
    x, _ = batch(device)
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-4)


def check_finalize(device, impl, form):
    model = masked_net(device, impl)
    with torch.no_grad():
        x, _ = batch(device)
        before = model(x)
        kept = {name: mask.clone() for name, mask in fxmask.masks(model).items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse BSR|bsr_dense_addmm", UserWarning)
            fxmask.finalize(model, form)
            close = 1e-4 if form == "dense" else 1e-2  # PyTorch's kernels of BSR weights may multiply in tf32
            torch.testing.assert_close(model(x), before, rtol=close, atol=close)
    if form == "dense":
        assert torch.equal(model[0].weight != 0, expand_mask(kept["0.weight"], (WIDTH, WIDTH), BLOCK))


def check_semi_structured(device, impl):
    """2:4 weights in float16, on CUDA alone; on a CPU it says so."""
    model = fxmask.apply(net(device, torch.float16), fxmask.NMMask(2, 4), include=["0", "2"]).eval()
    x, _ = batch(device, torch.float16)
    with torch.no_grad():
        before = model(x)
        if not x.is_cuda:
            with pytest.raises(fxmask.FxMaskError, match="CUDA device"):
                fxmask.finalize(model, "2:4")
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The PyTorch API of SparseSemiStructuredTensor", UserWarning)
            fxmask.finalize(model, "2:4")
            torch.testing.assert_close(model(x), before, rtol=1e-2, atol=1e-2)


def check_compiled_training(device, impl):
    """Inductor, one compile for a ramp of the ratio: the weights and masks of an eager run."""
    torch._dynamo.reset()
    options = {"schedule": fxmask.Schedule("cubic", steps=4), "ratio": 0.8}
    model, other = masked_net(device, impl, **options), masked_net("cpu", "reference", **options)
    opts = [adamw(m.parameters()) for m in (model, other)]
    for opt, m in zip(opts, (model, other), strict=True):
        fxmask.guard(opt, m)
    compiled = torch.compile(model, fullgraph=True)
    with warnings.catch_warnings(), torch._dynamo.config.patch(error_on_recompile=True):
        warnings.simplefilter("ignore")
        for _ in range(4):
            for opt, m, d in ((opts[0], compiled, device), (opts[1], other, "cpu")):
                opt.zero_grad()
                loss_of(m, *batch(d)).backward()
                opt.step()
    assert_same_weights(model, other)
    assert_masks_equal(model, other)


def check_backend(device, impl):
    """torch.compile(backend="fxmask"): the outputs and gradients of `apply`."""
    torch._dynamo.reset()
    if "fxmask" not in torch._dynamo.list_backends(()):  # what an installation registers, and a path does not
        from fxmask.compiler.backend import fxmask_backend  # here: it takes an import for a wish to compile

        torch._dynamo.register_backend(fxmask_backend, name="fxmask")
    dense, masked = net(device), masked_net(device, "reference")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(dense, backend="fxmask", options={"ratio": 0.5, "block": BLOCK, "impl": impl})
        x, _ = batch(device)
        assert_results(results(compiled, dense, x), results(masked, masked, x), 1e-4, {})
        assert len(fxmask.explain(compiled).rows) == 3


of = functools.partial
FLOWS = {
    "exported": check_export,
    "finalize": of(check_finalize, form="dense"),
    "finalize bsr": of(check_finalize, form="bsr"),
    "finalize 2:4": check_semi_structured,
    "compiled by Inductor": check_compiled_training,
    "backend": check_backend,
}
