"""Every public thing that a user does, once, with model and data on the device: the outcome is that of the CPU, or of plain PyTorch."""

import pytest
from gpu.flow_bodies import default_impl
from gpu.flows import FLOWS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS.keys())
def test_flow(flow):
    flow("cuda", default_impl("cuda"))
