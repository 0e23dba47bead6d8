"""What several tests here ask for."""

import pytest
import torch


@pytest.fixture
def one_thread():
    """Sums in one order, and nothing compiled before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch.set_num_threads(threads)
