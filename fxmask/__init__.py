"""fxmask: train PyTorch models with block-sparse linears, without editing the model.

    model = fxmask.apply(model, ratio=0.5, block=(16, 16))
    print(fxmask.explain(model))
"""

from .advice.advise import advise as advise
from .allocating import allocate as allocate
from .analysis.run import analyze as analyze
from .compiler.sources import tag_caches as _tag_caches
from .cuda_graphs.graphing import graphed as graphed
from .errors import FxMaskError as FxMaskError
from .errors import FxMaskWarning as FxMaskWarning
from .explaining.inspection import explain as explain
from .explaining.inspection import masks as masks
from .finalizing import finalize as finalize
from .guards.guarding import guard as guard
from .health import HealthLog as HealthLog
from .kernels import grid as _grid  # noqa: F401  (fxmask.kernels is usable after `import fxmask`)
from .loss import feedback as feedback
from .margins import stability as stability
from .masking import apply as apply
from .masking import restore as restore
from .nm.nm_freezing import freeze as freeze
from .passes.counting.registered import register_cost as register_cost
from .passes.settings.activation_pruning import ActivationPruning as ActivationPruning
from .passes.settings.block_dropout import BlockDropout as BlockDropout
from .passes.settings.config import Feedback as Feedback
from .passes.settings.config import Regrow as Regrow
from .passes.settings.config import Schedule as Schedule
from .passes.settings.config import WeightMask as WeightMask
from .passes.settings.nm_mask import NMMask as NMMask
from .report import Report as Report
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
