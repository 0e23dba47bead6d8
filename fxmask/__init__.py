"""fxmask: train PyTorch models with block-sparse linears, without editing the model.

    model = fxmask.apply(model, ratio=0.5, block=(16, 16))
    print(fxmask.explain(model))
"""

from .advice.advise import advise as advise
from .allocating import allocate as allocate
from .analysis.run import analyze as analyze
from .errors import FxMaskError as FxMaskError
from .errors import FxMaskWarning as FxMaskWarning
from .finalizing import finalize as finalize
from .graphing import graphed as graphed
from .guarding import guard as guard
from .health import HealthLog as HealthLog
from .inspection import explain as explain
from .inspection import masks as masks
from .kernels import grid as _grid  # noqa: F401  (fxmask.kernels is usable after `import fxmask`)
from .loss import feedback as feedback
from .margins import stability as stability
from .masking import apply as apply
from .masking import restore as restore
from .nm_layers import freeze as freeze
from .passes.activation_pruning import ActivationPruning as ActivationPruning
from .passes.block_dropout import BlockDropout as BlockDropout
from .passes.config import Feedback as Feedback
from .passes.config import Regrow as Regrow
from .passes.config import Schedule as Schedule
from .passes.config import WeightMask as WeightMask
from .passes.nm_mask import NMMask as NMMask
from .passes.registered import register_cost as register_cost
from .report import Report as Report
from .sources import tag_caches as _tag_caches
from .state import load_state_dict as load_state_dict
from .state import state_dict as state_dict
from .steps import dense as dense
from .steps import refresh as refresh
from .steps import step as step
from .version import __version__ as __version__

_tag_caches()

__all__ = [
    "ActivationPruning",
    "BlockDropout",
    "Feedback",
    "FxMaskError",
    "FxMaskWarning",
    "HealthLog",
    "NMMask",
    "Regrow",
    "Report",
    "Schedule",
    "WeightMask",
    "advise",
    "allocate",
    "analyze",
    "apply",
    "dense",
    "explain",
    "feedback",
    "finalize",
    "freeze",
    "graphed",
    "guard",
    "load_state_dict",
    "masks",
    "refresh",
    "register_cost",
    "restore",
    "stability",
    "state_dict",
    "step",
]
