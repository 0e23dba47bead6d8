"""One model in each form that apply takes, and an input of it, for the tests of findings."""

import pytest
import torch
from sample_models import mlp
from torch import fx

X = torch.randn(3, 64, generator=torch.Generator().manual_seed(9))
FORMS = pytest.mark.parametrize("form", ["module", "trace", "export"])


def formed(form, model=None):
    model = model or mlp()
    return {"module": lambda: model, "trace": lambda: fx.symbolic_trace(model), "export": lambda: torch.export.export(model, (X,)).module()}[form]()
