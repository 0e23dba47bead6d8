"""Errors and the warning of fxmask, for `except` clauses. Defined in `kernels.errors`, below everything that raises them."""

from .kernels.errors import ConfigError as ConfigError
from .kernels.errors import FxMaskError as FxMaskError
from .kernels.errors import FxMaskWarning as FxMaskWarning
from .kernels.errors import ShapeError as ShapeError
from .kernels.errors import StateError as StateError
from .kernels.errors import UnsupportedError as UnsupportedError
