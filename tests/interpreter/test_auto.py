"""`impl="auto"` where a GPU is faked: which forwards launch kernels, and what the compiler makes of the choice."""

import pytest
import torch
from gpu.auto_bodies import check_auto_autocast, check_auto_compiled, check_choice, check_masked_dense
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import fxmask
from fxmask.kernels import availability, gpu_choice, ops
from fxmask.kernels.grid import as_matrix
from fxmask.kernels.triton import refresh
from fxmask.kernels.triton.device import LAUNCHES

ENOUGH = 32  # tokens


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """The interpreter's CPU says that it is of compute capability 9; kernels pay from `ENOUGH` tokens where half of the blocks are masked."""
    for module in (gpu_choice, availability):
        monkeypatch.setattr(module, "capability", lambda device: (9, 0))
    monkeypatch.setattr(availability, "_TRIED", {})
    monkeypatch.setattr(gpu_choice, "pays_from", lambda shape, block, density, *rest: ENOUGH if density <= 0.5 else gpu_choice.NEVER)
    torch._dynamo.reset()


def model(dtype=torch.float16, **options):
    torch.manual_seed(0)
    options = {"ratio": 0.75, "block": (16, 16), **options}
    return fxmask.apply(nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 32)).to(dtype), **options)


def train(call, tokens=40, dtype=torch.float16):
    """Kernels' launches of a forward and a backward."""
    LAUNCHES.clear()
    x = torch.randn(tokens, 48, dtype=dtype, requires_grad=True)
    call(x).float().square().mean().backward()
    assert x.grad.isfinite().all()
    return {name: LAUNCHES[f"{name}_kernel"] for name in ("list_matmul", "sampled_matmul", "strip_lists")}


BOTH = {"list_matmul": 4, "sampled_matmul": 2, "strip_lists": 2}
NONE = dict.fromkeys(BOTH, 0)


def test_forward_and_backward_by_kernels_where_that_pays():
    m = model()
    assert train(m) == BOTH
    assert train(m, tokens=20) == NONE and LAUNCHES["block_keys_kernel"] == 2  # masks are made by kernels, whatever multiplies
    assert LAUNCHES["mask_cast_kernel"] == 4 and LAUNCHES["zero_masked_kernel"] == 2  # and so is W∘M
    assert train(model(torch.float32), dtype=torch.float32) == NONE
    assert train(model(impl="reference")) == NONE and not LAUNCHES
    assert train(model(block=(16, 12))) == NONE
    assert train(model(ratio=0.25)) == NONE


@pytest.mark.parametrize("options", [{}, {"refresh": 0}, {"backward": "ste"}], ids=["every-forward", "kept", "ste"])
def test_bodies_of_the_gpu_tests(options):
    check_choice("cpu", torch.float16, 64, 40, True, block=(16, 16), **options)
    check_choice("cpu", torch.float16, 64, 20, False, block=(16, 16), ratio=0.25, **options)


@pytest.mark.parametrize("block", [(16, 16), (3, 5)])
def test_masked_dense_of_the_gpu_tests(block):
    check_masked_dense("cpu", torch.float16, (20, 57, 30), block)


def test_cached_masks_bring_their_lists():
    m = model(refresh=2)
    fxmask.step(m, 0)
    assert train(m) == {**BOTH, "strip_lists": 0} and m[0]._fxmask_lists is not None
    assert train(m, tokens=20) == NONE


def test_a_cached_mask_of_fake_weights_is_fake():
    assert availability.kernels_run(torch.device("cpu"))
    for impl in ("auto", "triton"):
        with FakeTensorMode():
            m = fxmask.apply(nn.Sequential(nn.Linear(48, 32)), ratio=0.75, block=(16, 16), refresh=0, impl=impl)
            assert m(torch.randn(40, 48)).shape == (40, 32)


def test_cached_masks_are_built_at_once_where_weights_lie_as_rows(monkeypatch):
    """A table holds addresses, and a weight that is copied first has another one each time: none in which a CUDA graph could find its table."""
    m = nn.Sequential(*(nn.Linear(64, 48, bias=False) for _ in range(3)), *(nn.Conv2d(16, 48, kernel, bias=False) for kernel in (2, 2, 1)))
    m[1].weight = nn.Parameter(torch.randn(64, 48).t())
    m[2].weight = nn.Parameter(torch.randn(48, 100)[:, :64])
    m[4:].to(memory_format=torch.channels_last)
    asked, real = [], refresh.group_of
    monkeypatch.setattr(refresh, "group_of", lambda places, *rest: asked.append([p.address for p in places]) or real(places, *rest))
    fxmask.apply(m, ratio=0.75, block=(16, 16), refresh=2, layers=(nn.Linear, nn.Conv2d))
    for _ in range(2):
        fxmask.step(m, 2)
    assert {a for addresses in asked for a in addresses} == {m[i].weight.data_ptr() for i in (0, 2, 3, 5)} and len(asked[-1]) == 4
    for name, mask in fxmask.masks(m).items():
        w = as_matrix(m.get_parameter(name).detach())
        assert torch.equal(mask, ops.block_index(w, mask.sum(), torch.tensor(0), 16, 16, "fro", "lowest", 0, "reference"))


def test_compiled_and_under_autocast():
    check_auto_compiled("cpu", torch.float16, 64, 40, "eager", block=(16, 16))
    check_auto_autocast("cpu", torch.float16, 64, 40, block=(16, 16))


def test_what_no_kernel_can_run_does_not_raise():
    m, x = model(), torch.randn(40, 48, dtype=torch.float16)
    LAUNCHES.clear()
    params = dict(m.named_parameters())
    torch.func.grad(lambda p: torch.func.functional_call(m, p, (x,)).float().sum())(params)
    torch.func.vmap(m)(x[None])
    exported = torch.export.export(m, (x,)).module()
    assert exported(x).shape == (40, 32) and not LAUNCHES["list_matmul_kernel"]


@pytest.mark.parametrize("refresh", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_compiled_ramp_recompiles_once(refresh):
    m = model(schedule=fxmask.Schedule("cubic", steps=6), start=1, refresh=refresh)
    fxmask.step(m, 0)
    counter = CompileCounterWithBackend("eager")
    compiled, seen = torch.compile(m, backend=counter, fullgraph=True), []
    for _ in range(9):
        seen.append((train(compiled)["list_matmul"], counter.frame_count))
        fxmask.step(m)
    assert seen[0] == (0, 1) and seen[-1] == (4, 2)


def test_compiled_tokens_may_vary():
    m = model()
    compiled = torch.compile(m, backend="eager", fullgraph=True, dynamic=True)
    assert [train(compiled, tokens)["list_matmul"] for tokens in (40, 20, 60)] == [4, 0, 4]
    x = torch.randn(40, 48, dtype=torch.float16)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    LAUNCHES.clear()
    torch.compile(m, backend="eager", fullgraph=True)(x)  # nobody knows how many there are
    assert not LAUNCHES["list_matmul_kernel"]


def test_explain_says_which_and_why():
    m = model()
    rows = fxmask.explain(m).rows
    assert rows[0]["impl"] == "triton" and rows[0]["why"].startswith("from 32 tokens of 16 bits a forward on, else masked-dense; over 8,192 tokens predicted ")
    assert "fitted to an H200's runs" in rows[0]["why"]
    for options, why in (({"ratio": 0.25}, "masked-dense: the kernels are over 8,192"), ({"block": (16, 12)}, "do not take this block")):
        row = fxmask.explain(model(**options)).rows[0]
        assert row["impl"] == "masked_dense" and why in row["why"]
    traced = fxmask.apply(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(64, 64))), ratio=0.75, block=(16, 16))
    assert "have no choice" in fxmask.explain(traced).rows[0]["why"]


def test_a_graph_module_and_a_convolution_stay_masked_dense():
    LAUNCHES.clear()
    traced = fxmask.apply(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(64, 64))), ratio=0.75, block=(16, 16), refresh=2)
    fxmask.step(traced, 0)
    conv = fxmask.apply(nn.Sequential(nn.Conv2d(16, 64, 2, 2)), ratio=0.75, block=(16, 16), layers=nn.Conv2d)
    attention = fxmask.apply(nn.MultiheadAttention(64, 4, batch_first=True), ratio=0.75, block=(16, 16))
    x = torch.randn(2, 40, 64)
    traced(x), conv(torch.randn(2, 16, 8, 8)), attention(x, x, x)
    assert not LAUNCHES["list_matmul_kernel"] and all(m._fxmask_lists is None for m in traced.modules() if hasattr(m, "_fxmask_lists"))
