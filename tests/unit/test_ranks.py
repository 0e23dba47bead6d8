"""What wrappers of several processes do to a masked model, as far as one process shows it; `tests/distributed` has two."""

import copy
from functools import partial
from itertools import pairwise

import pytest
import torch
from sample_models import mlp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

import fxmask
from fxmask.errors import StateError, UnsupportedError
from fxmask.kernels.grid import expand_mask


def sharded(mesh, **options):
    torch.manual_seed(0)
    model = fxmask.apply(mlp(), **{"ratio": 0.6, "block": (16, 16), **options})
    return fully_shard(model, mesh=mesh)


def names(model):
    return list(fxmask.masks(model))


def train(model, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, model[0].in_features)).square().mean().backward()
        optimizer.step()


def test_a_guarded_step_leaves_masked_shards_as_they_are(mesh):
    model = sharded(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    guard = fxmask.guard(optimizer, model)
    assert set(guard.policies.values()) == {"freeze"}
    masks, before = fxmask.masks(model), {n: model.get_parameter(n).full_tensor().clone() for n in names(model)}
    train(model, optimizer, 1)
    for n, mask in masks.items():
        weight, kept = model.get_parameter(n), expand_mask(mask, before[n].shape, (16, 16))
        assert isinstance(weight, DTensor)
        assert torch.equal(weight.full_tensor()[~kept], before[n][~kept]) and not torch.equal(weight.full_tensor(), before[n])
        assert not optimizer.state[weight]["exp_avg"].full_tensor()[~kept].any()


def test_a_guard_finds_the_shards_behind_whole_weights_that_a_forward_has_left(mesh):
    model = fully_shard(fxmask.apply(mlp(), ratio=0.6), mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, 64))
    assert len(fxmask.guard(optimizer, model).policies) == 2


def test_a_momentum_that_lies_elsewhere_is_refused(mesh):
    model = sharded(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fxmask.guard(optimizer, model)
    train(model, optimizer, 1)
    weight = model.get_parameter(names(model)[0])
    whole = optimizer.state[weight]["momentum_buffer"].full_tensor()
    optimizer.state[weight]["momentum_buffer"] = distribute_tensor(whole, mesh, [Replicate()])
    with pytest.raises(UnsupportedError, match=r"'momentum_buffer' lies otherwise than its weight(.|\n)*masked_weights='free'"):
        train(model, optimizer, 1)


def test_an_optimiser_that_keeps_its_own_part(mesh):
    class Own(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                local = p.to_local()
                memory = self.state[p].setdefault("memory", torch.zeros_like(local))
                memory.add_(1)
                local.sub_(memory, alpha=0.01)

    model = sharded(mesh)
    optimizer = Own(model.parameters(), {})
    fxmask.guard(optimizer, model)
    masks = fxmask.masks(model)
    train(model, optimizer, 1)
    for n, mask in masks.items():
        weight = model.get_parameter(n)
        assert torch.equal(optimizer.state[weight]["memory"] != 0, expand_mask(mask, weight.shape, (16, 16)))


@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")  # torch.distributed.optim scripts its own code when it is imported
@pytest.mark.parametrize("returning", ["keep", "zero"])
def test_zero_redundancy(mesh, returning):
    """Momenta lie in an optimiser inside of it, and rest there as well: the bits of the plain one, while blocks leave and return."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ends = []
    for made in (torch.optim.AdamW, partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)):
        torch.manual_seed(0)
        model = fxmask.apply(mlp(), ratio=0.6)
        optimizer = made(model.parameters(), lr=0.005, weight_decay=0.1)
        fxmask.guard(optimizer, model, returning=returning)
        masks = []
        for _ in range(25):
            masks.append(fxmask.masks(model)["0.weight"])
            train(model, optimizer, 1)
        assert sum(int((old & ~now).sum()) for old, now in pairwise(masks)) > 3
        state = getattr(optimizer, "optim", optimizer).state
        ends.append([t for p in model.parameters() for t in (p, state[p]["exp_avg"])])
    assert len(ends[0]) == 12 and all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")
def test_momenta_that_each_rank_has_a_part_of(mesh, monkeypatch):
    """They are no scores for a mask that all ranks share; of one process they are all here."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = fxmask.apply(mlp(), ratio=0.6, criterion="momentum")
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    monkeypatch.setattr(fxmask.passes.state.ranks, "several", lambda: True)
    with pytest.raises(UnsupportedError, match=r"momentum' under ZeroRedundancyOptimizer.*: expected all of them on each.\n  where: 0.weight, 2.weight") as e:
        fxmask.guard(optimizer, model)
    assert "fix: use criterion='gradient' with average=0.9" in str(e.value)
    monkeypatch.undo()
    fxmask.guard(optimizer, model)
    train(model, optimizer, 3)


@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")
def test_zero_redundancy_within_ddp(mesh):
    """Its steps are made in DDP's hooks, where no guard is."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = fxmask.apply(mlp(), ratio=0.6)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, overlap_with_ddp=True)
    with pytest.raises(UnsupportedError, match=r"overlap_with_ddp=True(.|\n)*leave overlap_with_ddp out"):
        fxmask.guard(optimizer, model)


@pytest.mark.parametrize("refresh", [1, 2])
def test_the_step_that_makes_an_optimisers_state_is_no_step(mesh, refresh):
    model = sharded(mesh, refresh=refresh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    fxmask.guard(optimizer, model)
    before = {n: p.full_tensor().clone() for n, p in model.named_parameters()}
    saved = get_optimizer_state_dict(model, optimizer)
    assert optimizer.state and all(torch.equal(p.full_tensor(), before[n]) for n, p in model.named_parameters())
    assert {e["step"] for e in fxmask.state_dict(model)["masks"].values()} == {0}
    set_optimizer_state_dict(model, optimizer, saved)
    train(model, optimizer, 2)
    assert {e["step"] for e in fxmask.state_dict(model)["masks"].values()} == {2}


def test_apply_after_fully_shard_is_refused(mesh):
    model = fully_shard(mlp(), mesh=mesh)
    with pytest.raises(UnsupportedError, match=r"sharded by fully_shard(.|\n)*fxmask.apply on the plain module first"):
        fxmask.apply(model)
    with pytest.raises(UnsupportedError, match=r"is a DTensor; call fxmask\.apply before sharding"):
        fxmask.apply(model[0])


@pytest.mark.parametrize("refresh", [1, 0])
def test_a_forward_past_fully_shard_is_refused(mesh, refresh):
    model = sharded(mesh, refresh=refresh)
    with pytest.raises(UnsupportedError, match=r"runs on a sharded weight(.|\n)*where: 0.weight(.|\n)*the module that fully_shard was given"):
        model[0](torch.randn(8, model[0].in_features))


def test_restore_of_what_fully_shard_was_given(mesh):
    torch.manual_seed(0)
    model = fxmask.apply(nn.Sequential(nn.Linear(32, 32), nn.MultiheadAttention(32, 2)), ratio=0.5)
    fully_shard(model[1], mesh=mesh)
    with pytest.raises(UnsupportedError, match=r"class of 1 was changed after fxmask\.apply"):
        fxmask.restore(model)
    assert type(model[1]).__name__.startswith("FSDP")
    whole = sharded(mesh)
    dense = copy.deepcopy(mlp())
    fxmask.restore(whole)
    assert type(whole[0]) is type(dense[0])


def test_an_optimiser_made_before_fully_shard_is_refused(mesh):
    torch.manual_seed(0)
    model = fxmask.apply(mlp(), ratio=0.6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model, mesh=mesh)
    with pytest.raises(fxmask.errors.ConfigError, match="holds none of the masked weights"):
        fxmask.guard(optimizer, model)


@pytest.mark.parametrize("taken", ["flat", "freed"])
def test_a_weight_that_a_wrapper_has_taken(taken):
    """As FullyShardedDataParallel and ZeRO-3 leave weights between forwards."""
    model = fxmask.apply(mlp(), ratio=0.6, refresh=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if taken == "flat":
        model[0].weight.data = model[0].weight.data.flatten()[:100]
    else:
        model[0].weight.data.untyped_storage().resize_(0)
    for call in (lambda: fxmask.guard(optimizer, model), lambda: fxmask.step(model), lambda: fxmask.masks(model), lambda: fxmask.refresh(model)):
        with pytest.raises(UnsupportedError, match=r"flattened or freed this weight(.|\n)*0.weight(.|\n)*fully_shard or DistributedDataParallel"):
            call()


@pytest.mark.parametrize("refresh", [1, 2])
@pytest.mark.parametrize("taken", ["flat", "freed"])
def test_explain_says_of_a_weight_that_a_wrapper_has_taken_it(taken, refresh):
    model = fxmask.apply(mlp(), ratio=0.6, refresh=refresh)
    if taken == "flat":
        model[0].weight.data = model[0].weight.data.flatten()[:100]
    else:
        model[0].weight.data.untyped_storage().resize_(0)
    first, second = fxmask.explain(model).rows[:2]
    assert first["reason"] == "selected; a wrapper has flattened or freed its weight, which it gives the forward alone" and first["shape"] == "96x64"
    assert first["achieved_ratio"] is None and first["target_ratio"] == 0.6 and second["reason"] == "selected" and second["achieved_ratio"] is not None


def test_hooks_that_never_run_are_refused():
    """A wrapper that skips Optimizer.__init__ has a step that calls no hooks, whatever dicts it makes for them."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, base):
            self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
            self.base, self.param_groups, self.state = base, base.param_groups, {}

        def step(self, closure=None):
            return self.base.step(closure)

    class Hidden(Wrapper):
        def __init__(self, base):
            super().__init__(base)
            self.base = [base]

    model = fxmask.apply(mlp(), ratio=0.6)
    with pytest.raises(UnsupportedError, match=r"Hidden has no step hooks(.|\n)*fix: pass the optimiser that it wraps\."):
        fxmask.guard(Hidden(torch.optim.SGD(model.parameters(), lr=0.1)), model)
    with pytest.raises(UnsupportedError, match=r"Wrapper has no step hooks(.|\n)*fix: pass the optimiser that it wraps: optimizer\.base\."):
        fxmask.guard(Wrapper(torch.optim.SGD(model.parameters(), lr=0.1)), model)


def test_one_process_may_change_the_weights_of_a_cached_mask():
    """What several processes are told of is one's own business alone."""
    model = fxmask.apply(mlp(), ratio=0.6, refresh=0)
    with torch.no_grad():
        model[0].weight.copy_(torch.randn_like(model[0].weight))
    fxmask.guard(torch.optim.SGD(model.parameters(), lr=0.1), model)


def test_the_error_of_disagreeing_ranks(monkeypatch):
    """Two processes show it in tests/distributed; here its text."""
    monkeypatch.setattr("fxmask.passes.state.ranks.several", lambda: True)
    model = fxmask.apply(mlp(), ratio=0.6, refresh=0)
    fxmask.step(model, 0)
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight.flip(0))
    with pytest.raises(StateError, match=r"the same on all ranks(.|\n)*where: 0.weight(.|\n)*fxmask.refresh\(model\) on all ranks"):
        fxmask.step(model, 0)
    fxmask.refresh(model)
    fxmask.step(model, 0)


def test_a_mask_that_was_brought_may_be_another_one_until_it_is_built(monkeypatch):
    monkeypatch.setattr("fxmask.passes.state.ranks.several", lambda: True)
    model = fxmask.apply(mlp(), ratio=0.6, refresh=0)
    fxmask.load_state_dict(model, fxmask.state_dict(model))
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight.flip(0))
    fxmask.step(model, 0)
    fxmask.refresh(model)
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight.flip(0))
    with pytest.raises(StateError, match="the same on all ranks"):
        fxmask.step(model, 0)


@pytest.mark.parametrize("options", [dict(gain=True), dict(average=0.5), dict(phases={3: dict(criterion="taylor")})], ids=str)
def test_what_needs_whole_weights_between_steps_is_refused(mesh, options):
    model = sharded(mesh, **options)
    for announce in (lambda: fxmask.guard(torch.optim.SGD(model.parameters(), lr=0.1), model), lambda: fxmask.step(model, 0)):
        with pytest.raises(UnsupportedError, match=r"gain work on whole weights between steps(.|\n)*where: 0.weight(.|\n)*leave them out under fully_shard"):
            announce()
