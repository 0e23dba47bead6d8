import pytest
import torch


@pytest.fixture(autouse=True)
def fresh():
    """Nothing compiled before, and nothing left behind."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
