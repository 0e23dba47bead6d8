"""Weights that are shared out among processes: fully_shard after apply is right, before it and tensor parallelism are clear errors."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from resmlp import Affine
from sample_models import mlp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from works.twin import check, gradients, pair, results, some

import fxmask
from fxmask.errors import UnsupportedError

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}
TENSOR_PARALLEL = r"runs on a sharded weight(.|\n)*where: 0.weight(.|\n)*exclude layers that are tensor-parallel"


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


FORMS = [pytest.param({}, False, id="eager"), pytest.param({}, True, id="compiled", marks=pytest.mark.slow)]
FORMS += [pytest.param(dict(refresh=0), False, id="cached-eager"), pytest.param(dict(refresh=0), True, id="cached-compiled")]


@pytest.mark.parametrize(("options", "compiled"), FORMS)
def test_tensor_parallel_raises(one_process, options, compiled):
    model = parallelize_module(fxmask.apply(mlp(), ratio=0.75, **options), one_process, PLAN)
    call = torch.compile(model, backend="aot_eager") if compiled else model
    with pytest.raises(UnsupportedError, match=TENSOR_PARALLEL):
        call(some(6, 64))


OTHERS = {
    "N:M": (fxmask.NMMask(), "a layer with an N:M mask"),
    "N:M, fixed": (fxmask.NMMask(mode="permuted"), "a layer with an N:M mask"),
    "pruned": (fxmask.ActivationPruning(0.5, 16), "a layer whose input is saved pruned"),
    "dropout": (fxmask.BlockDropout(0.5, (16, 16)), "a layer with block dropout"),
}


@pytest.mark.parametrize(("config", "what"), OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("compiled", [False, True])
def test_other_systems_that_are_tensor_parallel_raise(one_process, config, what, compiled):
    model = parallelize_module(fxmask.apply(mlp(), config), one_process, PLAN)
    call = torch.compile(model, backend="aot_eager") if compiled else model
    with pytest.raises(UnsupportedError, match=rf"{what} runs on a sharded weight(.|\n)*exclude layers that are tensor-parallel"):
        call(some(6, 64))


def test_a_product_whose_input_is_saved_pruned_raises(one_process):
    model = fxmask.apply(nn.Sequential(Affine(64)), fxmask.ActivationPruning(0.5, 16, affine=True))
    p = model[0]._fxmask_product.a
    setattr(model[0], p, nn.Parameter(distribute_tensor(getattr(model[0], p).detach(), one_process)))
    with pytest.raises(UnsupportedError, match="a layer whose input is saved pruned runs on a sharded weight"):
        model(some(6, 64))


@pytest.mark.parametrize("config", [fxmask.ActivationPruning(0.5, 16), fxmask.BlockDropout(0.5, (16, 16))])
def test_where_they_do_nothing_they_run(one_process, config):
    model = parallelize_module(fxmask.apply(mlp(), config), one_process, PLAN).eval()
    with torch.no_grad():
        assert torch.equal(model(some(6, 64)), mlp()(some(6, 64)))


def test_tensor_parallel_then_apply_raises(one_process):
    model = parallelize_module(mlp(), one_process, PLAN)
    with pytest.raises(UnsupportedError, match=r"cannot change '0': its weight is a DTensor; call fxmask.apply before sharding"):
        fxmask.apply(model, ratio=0.75)
    model(some(6, 64))  # as it was


def test_fully_shard_then_apply_raises(one_process):
    model = mlp()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=one_process)
    with pytest.raises(UnsupportedError, match=r"expected a plain nn.Module, got one that is sharded by fully_shard"):
        fxmask.apply(model, ratio=0.75)


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_the_older_fsdp_then_apply_raises(one_process):
    model = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))
    with pytest.raises(UnsupportedError, match=r"got one that is wrapped by FSDP(.|\n)*where: FullyShardedDataParallel"):
        fxmask.apply(model, ratio=0.75)


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.parametrize("original", [True, False])
def test_apply_then_the_older_fsdp_is_refused_by_what_needs_weights(one_process, original):
    model = FullyShardedDataParallel(fxmask.apply(mlp(), ratio=0.75), device_id=torch.device("cpu"), use_orig_params=original)
    with pytest.raises(UnsupportedError, match=r"flattened or freed this weight(.|\n)*fully_shard or DistributedDataParallel"):
        fxmask.guard(torch.optim.SGD(model.parameters()), model)


def test_apply_then_fully_shard_is_right(one_process):
    masked, twin, kept = pair(mlp())
    for layer in (masked[0], masked[2]):
        fully_shard(layer, mesh=one_process)
    fully_shard(masked, mesh=one_process)
    x = some(6, 64)
    found = results(masked, masked, x)
    check({name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in found.items()}, results(twin, twin, x), kept)
    with pytest.raises(UnsupportedError, match=r"the class of 0 was changed after fxmask.apply"):
        fxmask.restore(masked)
    with pytest.raises(UnsupportedError, match=r"fxmask.finalize needs whole weights, and this one is a DTensor"):
        fxmask.finalize(masked)


def on_two(rank, folder):
    """A rank of two: the sharded model is its twin, tensor parallelism raises on both."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    masked, twin, kept = pair(mlp())
    for layer in (masked[0], masked[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(masked, mesh=mesh)
    x = some(8, 64)
    (masked(x.chunk(2)[rank]).square().mean()).backward()
    twin(x).square().mean().backward()
    check({name: g.full_tensor() for name, g in gradients(masked).items()}, gradients(twin), kept)
    model = parallelize_module(fxmask.apply(mlp(), ratio=0.75), mesh, PLAN)
    with pytest.raises(UnsupportedError, match=TENSOR_PARALLEL):
        model(x)
    dist.destroy_process_group()
    print(f"rank {rank} done")
    open(f"{folder}/done{rank}", "w").close()


@pytest.mark.slow
def test_two_processes(tmp_path):
    mp.spawn(on_two, (str(tmp_path),), nprocs=2)
    assert sorted(p.name for p in tmp_path.glob("done*")) == ["done0", "done1"]
