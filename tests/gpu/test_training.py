"""Training on the device: autograd's thread, other streams and devices, autocast."""

import pytest
import torch
from gpu.training_bodies import check_autocast, check_backward_thread, check_set_aside, check_training

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("options", [{}, {"refresh": 0}, {"block": (8, 8)}, {"backward": "ste"}], ids=["default", "kept", "small-blocks", "ste"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.05), (torch.float16, 0.01)], ids=["fp32", "bf16", "fp16"])
def test_a_step_equals_the_reference(dtype, tolerance, options):
    check_training("cuda", dtype, tolerance, **options)


def test_backward_on_autograds_thread():
    check_backward_thread("cuda", expect_other=True)


def test_another_stream():
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        check_training("cuda")
    stream.synchronize()


def test_another_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    assert torch.cuda.current_device() == 0
    check_training("cuda:1")
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast(dtype):
    check_autocast("cuda", dtype)


@pytest.mark.parametrize("options", [{}, {"refresh": 2}, {"block": (3, 5)}, {"block": (128, 64)}], ids=["default", "kept", "odd-blocks", "large-blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_is_masked_is_set_aside(dtype, options):
    check_set_aside("cuda", dtype, **options)
