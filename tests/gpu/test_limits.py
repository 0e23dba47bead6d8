"""Large tensors, and too little memory."""

import pytest
import torch
from gpu.bodies import check_many_elements, tokens_beyond
from gpu.training_bodies import check_usable_after

pytestmark = pytest.mark.gpu


@pytest.fixture
def clean_memory():
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


def test_offsets_beyond_32_bits(clean_memory):
    """Tensors with more than 2^31 elements."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free memory")
    check_many_elements("cuda", tokens_beyond(2**31, 4096), 4096, 64, torch.bfloat16)


def test_out_of_memory_leaves_the_model_usable(clean_memory):
    def fail(model):
        total = torch.cuda.mem_get_info()[1]
        allowed = torch.cuda.memory_reserved() + (256 << 20)
        torch.cuda.set_per_process_memory_fraction(allowed / total)
        try:
            x = torch.randn(700_000, 64, device="cuda")  # 180 MB, and 360 MB behind the first layer
            with pytest.raises(torch.cuda.OutOfMemoryError):
                model(x)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    check_usable_after("cuda", fail)
