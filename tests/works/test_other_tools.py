"""The snippets of docs/other_tools.md, on a small model, against plain PyTorch."""

import copy
import io
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from sample_models import mlp
from torch import nn
from torch.nn.utils import prune

import fxmask
from fxmask.kernels.grid import expand_mask, to_blocks

BLOCK = (16, 16)
PAGE = (Path(__file__).resolve().parents[2] / "docs/other_tools.md").read_text()


def net():
    return mlp(sizes=(64, 96, 64, 32))


def train(model, steps=5, seed=1, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return optimizer


def linears_of(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def snippet(heading, number=0, **values):
    """Runs a snippet of the page, and gives what it has named."""
    section = PAGE.split(f"## {heading}")[1].split("\n## ")[0]
    names = {"fxmask": fxmask, "torch": torch, "nn": nn, "copy": copy, "to_blocks": to_blocks, "expand_mask": expand_mask, "block": BLOCK, "train": train}
    names |= {"linears": linears_of(values["model"]), **values} if "model" in values else values
    exec(section.split("```python\n")[1 + number].split("```")[0], names)
    return names


def same(masks, others):
    assert masks.keys() == others.keys()
    return all(torch.equal(m, others[name]) for name, m in masks.items())


def zeroed(model, masks):
    """The model with what is masked at zero, in plain PyTorch."""
    dense = net()
    dense.load_state_dict(model.state_dict())
    with torch.no_grad():
        for name, mask in masks.items():
            w = dense.get_parameter(name)
            w *= expand_mask(mask, w.shape, BLOCK)
    return dense


def test_constant_pruning():
    model, chosen = net(), fxmask.masks(fxmask.apply(net(), ratio=0.6, criterion="random", include=["0", "2"]))
    for name, mask in chosen.items():
        layer = model.get_submodule(name.removesuffix(".weight"))
        prune.custom_from_mask(layer, "weight", expand_mask(mask, layer.weight.shape, BLOCK))
        prune.remove(layer, "weight")
    dense = copy.deepcopy(model)
    snippet("The zeros that a checkpoint has", model=model)
    assert same(fxmask.masks(model), chosen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fxmask.guard(optimizer, model)
    train(model, 5, optimizer=optimizer)
    for name, mask in chosen.items():
        p = dense.get_parameter(name)
        p.register_hook(partial(torch.mul, expand_mask(mask, p.shape, BLOCK)))
    train(dense, 5)
    assert all(torch.allclose(p, q, atol=1e-6) for p, q in zip(model.parameters(), dense.parameters(), strict=True))
    with pytest.raises(fxmask.errors.ConfigError, match="got an empty one"):
        snippet("The zeros that a checkpoint has", model=net())


def test_rows_and_columns_of_prune():
    for dim, block in ((0, (1, 64)), (1, (96, 1))):
        model = net()
        prune.ln_structured(model[0], "weight", amount=0.5, n=2, dim=dim)
        prune.remove(model[0], "weight")
        zeros = model[0].weight == 0
        snippet("The zeros that a checkpoint has", model=model, block=block)
        assert torch.equal(~expand_mask(fxmask.masks(model)["0.weight"], (96, 64), block), zeros)


def test_torch_ao_pruning():
    from torch.ao.pruning import WeightNormSparsifier

    model = net()
    sparsifier = WeightNormSparsifier(sparsity_level=0.5, sparse_block_shape=BLOCK, zeros_per_block=256)
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "2.weight"}])
    sparsifier.step()
    sparsifier.squash_mask()
    zeros = model[0].weight == 0
    assert zeros.any()
    snippet("The zeros that a checkpoint has", model=model)
    assert torch.equal(~expand_mask(fxmask.masks(model)["0.weight"], (96, 64), BLOCK), zeros)


def test_two_of_four_of_ones_own():
    model = net()
    mask = torch.rand(96, 16, 4).argsort(-1) < 2
    with torch.no_grad():
        model[0].weight *= mask.reshape(96, 64)
    fxmask.apply(model, fxmask.NMMask(2, 4), include="0")
    fxmask.freeze(model)
    assert torch.equal(fxmask.masks(model)["0.weight"], mask.reshape(96, 64))


def test_a_layout_of_other_libraries():
    layout = torch.zeros(1, 4, 6, dtype=torch.int64)  # (heads, in, out)
    layout[0, [0, 1, 3], [5, 2, 0]] = 1
    model = fxmask.apply(net(), block=BLOCK, masks={"0": layout[0].t().bool()})
    w = model[0].weight * layout[0].repeat_interleave(16, 0).repeat_interleave(16, 1).t()
    x = torch.randn(3, 64)
    assert torch.allclose(model[0](x), nn.functional.linear(x, w, model[0].bias), atol=1e-6)


def test_pruning_by_epochs():
    model = net()
    snippet("Pruning by epochs", model=model, loader=range(4), start_epoch=1, end_epoch=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.3)
    handle, ratios = fxmask.guard(optimizer, model), []
    for _ in range(20):
        ratios.append(fxmask.explain(model).rows[0]["target_ratio"])
        train(model, 1, optimizer=optimizer)
    assert ratios[3] == 0 and 0 < ratios[5] < 0.8 and ratios[16:] == [0.8] * 4
    kept, momentum = fxmask.masks(model), optimizer.state[model[0].weight]["exp_avg"].clone()
    made = snippet("Pruning by epochs", 1, model=model, handle=handle, optimizer=optimizer)
    assert same(fxmask.masks(model), kept) and same(kept, made["kept"])
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], momentum)
    train(model, 5, optimizer=optimizer)
    assert same(fxmask.masks(model), kept)


def test_lottery_ticket():
    model, first = net(), net().state_dict()
    made = snippet("Lottery tickets", model=model)
    assert same(fxmask.masks(model), made["ticket"])
    assert not same(made["ticket"], fxmask.masks(fxmask.apply(net(), ratio=0.8)))  # it is not the mask of the first weights
    assert all(torch.equal(t, first[name]) for name, t in model.state_dict().items())


def test_one_threshold():
    model = net()
    model(torch.randn(8, 64)).square().mean().backward()
    snippet("One threshold", model=model)
    masks = fxmask.masks(model)
    total = sum(m.numel() for m in masks.values())
    assert set(masks) == {"0.weight", "2.weight", "4.weight"}
    assert sum(int(m.sum()) for m in masks.values()) == pytest.approx(0.2 * total, abs=3)


def test_regrowth_from_a_topology():
    model = mlp(sizes=(128, 128, 128))
    layout = {name: torch.rand(-(-m.out_features // 16), m.in_features // 16) < 0.5 for name, m in linears_of(model).items()}
    for k in layout.values():
        k[0, 0] = True
    snippet("RigL or SET", model=model, layout=layout)
    fxmask.step(model, 0)
    assert same(fxmask.masks(model), {f"{name}.weight": k for name, k in layout.items()})


@pytest.mark.filterwarnings("ignore")  # torch.ao.quantization is deprecated
def test_quantisation_aware_training():
    model = nn.Sequential(torch.ao.quantization.QuantStub(), *net(), torch.ao.quantization.DeQuantStub())
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
    fxmask.apply(model, ratio=0.6, block=BLOCK, include=["1", "3"])
    made = snippet("Quantisation-aware", model=model, linears=["1", "3"], optimizer_of=lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    for name, mask in made["kept"].items():
        weight = made["quantised"].get_submodule(name.removesuffix(".weight")).weight()
        assert (weight.int_repr()[~expand_mask(mask, weight.shape, BLOCK)] == 0).all()
        assert (weight.int_repr()[expand_mask(mask, weight.shape, BLOCK)] != 0).any()


@pytest.mark.filterwarnings("ignore:Sparse BSR tensor support is in beta state")
def test_files_of_kept_blocks(tmp_path):
    model = fxmask.apply(mlp(sizes=(256, 256, 256)), ratio=0.9, block=BLOCK, refresh=0)
    model_again, x = fxmask.apply(mlp(seed=4, sizes=(256, 256, 256)), ratio=0.9, block=BLOCK, refresh=0), torch.randn(3, 256)
    code = PAGE.split("## Files of kept blocks alone")[1].split("```python\n")[1].split("```")[0]
    save, load = code.split("\n\n")
    names = {"fxmask": fxmask, "torch": torch, "copy": copy, "path": tmp_path / "slim.pt"}
    with warnings.catch_warnings():
        exec(save, {**names, "model": model})
        exec(load, {**names, "model": model_again})
    assert torch.allclose(model(x), model_again(x), atol=1e-6)
    assert same(fxmask.masks(model), fxmask.masks(model_again))
    torch.save(model.state_dict(), whole := io.BytesIO())
    assert (tmp_path / "slim.pt").stat().st_size < 0.3 * len(whole.getvalue())
