"""`impl="auto"`, the default, on a device of compute capability 9: kernels where they pay, compiled, under autocast, captured, without a host sync."""

import pytest
import torch
from gpu.auto_bodies import check_auto_autocast, check_auto_compiled, check_choice, check_masked_dense, launched, layer
from gpu.test_graphs import no_sync

import fxmask
from fxmask.kernels.triton.device import LAUNCHES

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]
BF16, WIDTH, TOKENS = torch.bfloat16, 4096, 8192


@pytest.fixture(autouse=True)
def recorded():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the choice is recorded for compute capability 9")


@pytest.mark.parametrize("options", [{}, {"refresh": 0}, {"backward": "ste"}], ids=["every-forward", "kept", "ste"])
@pytest.mark.parametrize(("width", "kernels"), [(WIDTH, True), (64, False)])
def test_kernels_where_they_pay(width, kernels, options):
    check_choice("cuda", BF16, width, TOKENS, kernels, **options)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("block", [(16, 16), (64, 64), (3, 5)], ids=str)
@pytest.mark.parametrize("shape", [(300, 512, 384), (70, 257, 130)], ids=str)
def test_masked_dense_elsewhere(shape, block, dtype):
    check_masked_dense("cuda", dtype, shape, block)


@pytest.mark.filterwarnings("default")  # Inductor warns about the machine
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend):
    check_auto_compiled("cuda", BF16, WIDTH, TOKENS, backend)


def test_autocast():
    check_auto_autocast("cuda", BF16, WIDTH, TOKENS)


@pytest.mark.parametrize("options", [{}, {"refresh": 10}], ids=["every-forward", "cached"])
def test_in_a_cuda_graph(options):
    model = layer("cuda", BF16, **options)
    fxmask.step(model, 0)
    x = torch.randn(TOKENS, WIDTH, device="cuda", dtype=BF16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(x).square().mean().backward()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    LAUNCHES.clear()
    with torch.cuda.graph(graph):
        y = model(x)
        y.square().mean().backward()
    assert LAUNCHES["list_matmul_kernel"] == 1 and LAUNCHES["sampled_matmul_kernel"] == 1  # x needs no gradient
    graph.replay()
    assert torch.equal(y, model(x))


def test_no_sync():
    model = layer("cuda", BF16, schedule=fxmask.Schedule("cubic", steps=4), start=1)
    fxmask.step(model, 0)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    x, seen = torch.randn(TOKENS, WIDTH, device="cuda", dtype=BF16, requires_grad=True), []

    def one():
        optimiser.zero_grad(set_to_none=True)
        LAUNCHES.clear()
        x.grad = None
        model(x).square().mean().backward()
        optimiser.step()
        fxmask.step(model)
        seen.append(LAUNCHES["list_matmul_kernel"])

    launched(layer("cuda", BF16), x)  # compiles
    one()
    with no_sync():
        for _ in range(6):
            one()
    assert seen[0] == 0 and seen[-1] == 2
