"""PyTorch's semi-structured weights, the hardware's 2:4 form."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.errors import UnsupportedError, message


def semi_structured(name: str, w: Tensor, made_by: str) -> Tensor:
    """A weight (N, K) as a SparseSemiStructuredTensor; UnsupportedError where it is no 2:4, or neither device nor PyTorch takes it."""
    most = int((w.reshape(-1, 4) != 0).sum(1).max()) if w.shape[1] % 4 == 0 and w.numel() else 4
    if most > 2:
        what = f"2:4 wants at most 2 nonzeros among 4 neighbours of a row: got {most}, with {made_by}."
        raise UnsupportedError(message(what, name, "use format='dense' or 'bsr'; masks of that pattern are those of fxmask.NMMask(2, 4)."))
    if not w.is_cuda or torch.cuda.get_device_capability(w.device) < (8, 0):
        raise UnsupportedError(message(f"semi-structured weights need a CUDA device of capability 8.0: got {w.device}.", name, "move the model there first."))
    try:
        return torch.sparse.to_sparse_semi_structured(w)
    except RuntimeError as e:  # it takes some dtypes and shapes only
        what = f"PyTorch cannot make a semi-structured weight of this one, {tuple(w.shape)} {w.dtype}: {str(e).splitlines()[0]}"
        raise UnsupportedError(message(what, name, "use format='dense'.")) from None
