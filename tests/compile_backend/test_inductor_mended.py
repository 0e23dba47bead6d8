"""`kernels.inductor`: gradients through a max pooling are those of eager mode, where Inductor by itself would leave them zero."""

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor, nn

import fxmask
from fxmask.kernels import inductor


def network() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1024, 64))
    return nn.Sequential(*layers), torch.randn(2, 3, 16, 16)


def gradients(model: nn.Module, call, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    call(x).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, g in expected.items():
        assert g.any(), name
        torch.testing.assert_close(found[name], g, rtol=1e-4, atol=1e-4 * float(g.abs().max()))


@pytest.fixture(autouse=True)
def no_caches():
    """A graph that was compiled before would show nothing."""
    torch.compiler.reset()
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield
    torch.compiler.reset()


STE = pytest.param(fxmask.WeightMask(block=(16, 16), backward="ste"), marks=pytest.mark.slow)
CONFIGS = [fxmask.WeightMask(block=(16, 16)), STE, fxmask.NMMask(), fxmask.ActivationPruning(block=16)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{type(c).__name__}-{getattr(c, 'backward', '')}".rstrip("-"))
def test_an_applied_model(config):
    model, x = network()
    fxmask.apply(model, config)
    same(gradients(model, torch.compile(model), x), gradients(model, model, x))


def test_the_backend():
    model, x = network()
    found = gradients(model, torch.compile(model, backend="fxmask", options={"block": (16, 16)}), x)
    expected = gradients(model, torch.compile(model, backend="fxmask", options={"block": (16, 16), "inner": "aot_eager"}), x)
    same(found, expected)


def test_once_and_where_there_is_something_to_mend(monkeypatch):
    from torch._inductor.scheduler import SchedulerNode

    inductor.mend()
    now = SchedulerNode.recompute_size_and_body
    assert hasattr(now, "by_fxmask") == (torch.__version__ < "2.14")
    plain = getattr(now, "__wrapped__", now)
    monkeypatch.setattr(SchedulerNode, "recompute_size_and_body", plain)
    monkeypatch.setattr(inductor, "FIXED", "3.0")  # so that this PyTorch is before it
    with monkeypatch.context() as m:
        m.setattr(inductor, "FIXED", "2.0")
        inductor.mend()
        assert SchedulerNode.recompute_size_and_body is plain
    with monkeypatch.context() as m:
        m.delitem(sys.modules, "torch._inductor.scheduler")
        inductor.mend()
        assert SchedulerNode.recompute_size_and_body is plain
    inductor.mend()
    mended = SchedulerNode.recompute_size_and_body
    assert mended is not plain
    inductor.mend()
    assert SchedulerNode.recompute_size_and_body is mended


def test_reads_that_were_added_by_hand_stay_and_have_their_new_names(monkeypatch):
    """As of PyTorch 2.12: a node finds what its loop reads anew, and forgets the rest; both kinds of it, under the names that buffers have by then."""
    from torch._inductor.dependencies import ReadWrites, StarDep, WeakDep
    from torch.utils._ordered_set import OrderedSet

    loop, whole, order = StarDep("a"), StarDep("b"), WeakDep("c", "d")

    class SchedulerNode:
        def __init__(self):
            self.mutation_renames = {"a": "a2", "b": "b2", "c": "c2"}
            self.read_writes = ReadWrites(OrderedSet([whole, order]), OrderedSet(), OrderedSet())

        def recompute_size_and_body(self, constraints=None, body=None):
            self.asked, self.read_writes = (constraints, body), ReadWrites(OrderedSet([loop]), OrderedSet([StarDep("e")]), OrderedSet())

        def set_read_writes(self, found):
            self.read_writes = found

    monkeypatch.setitem(sys.modules, "torch._inductor.scheduler", SimpleNamespace(SchedulerNode=SchedulerNode))
    monkeypatch.setattr(inductor, "FIXED", "3.0")
    inductor.mend()
    node = SchedulerNode()
    node.recompute_size_and_body(1, body=2)
    assert node.asked == (1, 2) and set(node.read_writes.writes) == {StarDep("e")}
    assert set(node.read_writes.reads) == {StarDep("a2"), StarDep("b2"), WeakDep("c2", "d")}


@pytest.mark.parametrize("there", [{}, {"SchedulerNode": SimpleNamespace()}], ids=["no node", "no method"])
def test_a_scheduler_that_is_built_otherwise_is_left_alone(monkeypatch, there):
    scheduler = SimpleNamespace(**there)
    monkeypatch.setitem(sys.modules, "torch._inductor.scheduler", scheduler)
    monkeypatch.setattr(inductor, "FIXED", "3.0")
    inductor.mend()
    assert vars(scheduler) == there and not hasattr(there.get("SchedulerNode"), "recompute_size_and_body")


def test_every_op_of_ours_mends():
    """Each op's function for fake tensors is registered here, and not by `op.register_fake`."""
    kernels = Path(inductor.__file__).parent
    ops = fakes = 0
    for file in kernels.rglob("*.py"):
        text = file.read_text()
        ops += len(re.findall(r"^@torch\.library\.custom_op\(", text, re.MULTILINE))
        fakes += len(re.findall(r"^@register_fake\(", text, re.MULTILINE))
    assert ops == fakes > 10
