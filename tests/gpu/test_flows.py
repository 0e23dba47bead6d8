"""Every public thing that a user does, once, with model and data on the device: the outcome is that of the CPU, or of plain PyTorch."""

import pytest
from gpu import flow_bodies, flow_models, flow_systems
from gpu.flow_bodies import default_impl
from gpu.flows import FLOWS

pytestmark = pytest.mark.gpu
ANY_IMPL = {**flow_bodies.MODES, **flow_models.FLOWS, **flow_systems.FLOWS}


@pytest.mark.parametrize("flow", FLOWS.values(), ids=FLOWS.keys())
def test_flow(flow):
    flow("cuda", default_impl("cuda"))


@pytest.mark.parametrize("flow", ANY_IMPL.values(), ids=ANY_IMPL.keys())
def test_flow_of_the_default_impl(flow):
    flow("cuda", "auto")
