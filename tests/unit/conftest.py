"""What several tests here ask for."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


@pytest.fixture
def one_thread(one_thread):
    """And nothing compiled before."""
    torch._dynamo.reset()


@pytest.fixture
def mesh():
    """One process, and a mesh of it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
