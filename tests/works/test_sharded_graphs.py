"""torch.compile(backend="fxmask") under fully_shard: graphs are given gathered Parameters, optimisers and `explain` have shards."""

import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
from sample_models import mlp
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from works.test_sharded import one_process  # noqa: F401

import fxmask
from fxmask.compiler import backend_missed, shards
from fxmask.errors import FxMaskWarning, UnsupportedError

AROUND = "though no masked graph ran since the last one"
GAP = r"(?s)gradients of b of a model that is compiled by backend='fxmask', and no graph has reached it.*where: FSDPThree.*fxmask\.apply.* before fully_shard"


class Three(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        return self.c(self.b(self.a(x).relu()).relu())


def compiled(model, **options):
    return torch.compile(model, backend="fxmask", options={**dict(ratio=0.75, block=(16, 16), inner="aot_eager"), **options})


def steps(model, call, n=1):
    """Steps that zero gradients in place, and the share of zeros in each linear's last gradient."""
    for m in (m for m in model.modules() if isinstance(m, FSDPModule)):
        m.reshard()
    held = dict(model.named_parameters())
    optimizer = torch.optim.SGD(held.values(), 0.01)
    for _ in range(n):
        optimizer.zero_grad(set_to_none=False)
        call(torch.randn(32, 64)).float().square().mean().backward()
        shares = {k: p.grad.full_tensor().eq(0).float().mean().item() for k, p in held.items() if p.dim() == 2}
        optimizer.step()
    return shares


def masked(call):
    return {row["name"]: row["achieved_ratio"] for row in fxmask.explain(call).rows if row["masked"]}


@pytest.fixture
def by_itself(one_process):  # noqa: F811
    model = Three()
    fully_shard(model.b, mesh=one_process)
    return fully_shard(model, mesh=one_process)


def test_a_linear_that_is_sharded_by_itself_is_told_once(by_itself):
    call = compiled(by_itself)
    with pytest.warns(FxMaskWarning, match=GAP) as told:
        shares = steps(by_itself, call, 5)
    assert len(told) == 1
    assert masked(call) == {"a": 0.75, "c": 0.75} and shares["b.weight"] < 0.6 < min(shares["a.weight"], shares["c.weight"])
    by_itself.to(torch.float64)  # nothing refers to its shards


def test_require_makes_it_an_error(by_itself):
    with pytest.raises(UnsupportedError, match=r"gradients of b of a model.*and require=True wants them masked"):
        steps(by_itself, compiled(by_itself, require=True))
    torch._dynamo.reset()


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("stays", [False, True], ids=["resharded", "gathered"])
def test_what_graphs_mask_is_not_told(one_process, policy, stays):  # noqa: F811
    model = fully_shard(Three(), mesh=one_process, mp_policy=policy)
    model.set_reshard_after_backward(not stays)
    call = compiled(model, require=True)
    shares = steps(model, call, 3)
    assert masked(call) == dict.fromkeys("abc", 0.75) and min(shares.values()) > 0.7


@pytest.mark.parametrize("stays", [False, True], ids=["resharded", "gathered"])
def test_eager_code_from_the_first_step_and_later(one_process, stays):  # noqa: F811
    model = fully_shard(Three(), mesh=one_process)
    model.set_reshard_after_backward(not stays)
    call = compiled(model)
    with torch.compiler.set_stance("force_eager"), pytest.warns(FxMaskWarning, match=r"gradients of a, b, c of a model.*no graph has reached it"):
        steps(model, call)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(model, call, 2)
    with torch.compiler.set_stance("force_eager"), pytest.warns(FxMaskWarning, match=f"gradients of a, b, c {AROUND}"):
        steps(model, call)


def test_weights_that_are_loaded_in_their_place(one_process):  # noqa: F811
    model = fully_shard(Three(), mesh=one_process)
    call = compiled(model, require=True)
    steps(model, call)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    steps(model, call)
    assert masked(call) == dict.fromkeys("abc", 0.75)


@pytest.mark.parametrize("where", ["process", "parameter"])
def test_a_version_that_does_not_show_what_it_gathers(one_process, monkeypatch, where):  # noqa: F811
    if where == "process":
        monkeypatch.setattr(shards, "_all_kept", lambda: iter(()))
    else:
        monkeypatch.setattr(shards, "gathered", lambda w: None)
        for module in (backend_missed, fxmask.compiler.backend_watch):
            monkeypatch.setattr(module, "gathered", lambda w: None)
    shards._kept.clear()
    model = fully_shard(Three(), mesh=one_process)
    text = r"gradients of a, b, c of a model.*does not show whether graphs have masked them"
    with pytest.warns(FxMaskWarning, match=text) as told:
        steps(model, compiled(model), 3)
    assert len(told) == 1
    torch._dynamo.reset()
    model = fully_shard(Three(), mesh=one_process)
    with pytest.raises(UnsupportedError, match=f"{text}, and require=True"):
        steps(model, compiled(model, require=True))


@pytest.mark.parametrize("name", ["sharded_param", "_sharded_post_forward_param"])
def test_a_tensor_that_has_a_shards_old_id_is_no_shard(monkeypatch, name):
    t, kept = torch.zeros(2), nn.Module()
    setattr(kept, name, torch.zeros(2))
    monkeypatch.setitem(shards._kept, id(t), weakref.ref(kept))
    assert shards._of(t) is None
    setattr(kept, name, t)
    assert shards._of(t) is kept


@pytest.mark.parametrize("groups", [lambda g: {"_fsdp_param_group": g}, lambda g: {"_fsdp_param_groups": [g]}], ids=["one", "several"])
def test_what_fully_shard_keeps_under_both_of_its_names(monkeypatch, groups):
    """One group of a module's, and, as in PyTorch 2.13, a list of them."""
    kept, state = object(), nn.Module()
    state.__dict__.update(groups(SimpleNamespace(fsdp_params=[kept])))
    monkeypatch.setattr("torch.distributed._composable_state._module_state_mapping", {"module": weakref.ref(state), "alias": weakref.ref(state)})
    assert list(shards._all_kept()) == [kept]


def test_weights_that_fully_shard_was_told_to_leave(one_process):  # noqa: F811
    """It gathers neither a tensor-parallel layer nor a plain one, so that nothing of them is hidden."""
    model = Three()
    parallelize_module(model, one_process, {"c": ColwiseParallel()})
    fully_shard(model, mesh=one_process, ignored_params={*model.b.parameters(), *model.c.parameters()})
    left = [model.b.weight, model.c.weight]
    shards._kept.clear()
    assert shards.is_unread(model) and [shards.is_unknown(w, True) for w in left] == [False, True]
    shards.look(model.parameters())
    assert not shards.is_unread(model) and not any(shards.is_unknown(w, False) for w in left)


def test_explain_before_any_step(one_process):  # noqa: F811
    model = fully_shard(Three(), mesh=one_process)
    call = compiled(model)
    shards._kept.clear()
    call(torch.randn(32, 64))
    model.reshard()
    assert masked(call) == dict.fromkeys("abc", 0.75)


def test_what_graphs_cannot_mask_is_not_told(one_process):  # noqa: F811
    """Shards of tensor parallelism."""
    model = parallelize_module(mlp(), one_process, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    weights = [model[0].weight, model[2].weight]
    call = compiled(model, require=True)
    shards.look(weights)
    assert backend_missed.missed(weights) == [] and not any(shards.is_unknown(w, False) for w in weights)
    del call


def test_what_apply_has_decided_is_not_told(one_process):  # noqa: F811
    model = fxmask.apply(Three(), ratio=0.75, block=(16, 16), exclude="b")
    fully_shard(model.b, mesh=one_process)
    fully_shard(model, mesh=one_process)
    steps(model, torch.compile(model, backend="fxmask", options={"inner": "aot_eager"}))
