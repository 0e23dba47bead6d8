"""What activation pruning leaves exact has the bits of the dense layer, however its input lies in memory."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from resmlp import PRESETS, Affine, Block
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fxmask
from fxmask import ActivationPruning, WeightMask
from fxmask.kernels import dense_linear

INPUTS = {
    "rows": lambda make: make(3, 20, 48),
    "one row": lambda make: make(48),
    "matrix": lambda make: make(60, 48),
    "turned matrix": lambda make: make(48, 60).t(),
    "turned": lambda make: make(3, 48, 20).transpose(1, 2),
    "turned, one sample": lambda make: make(1, 48, 7).transpose(1, 2),
    "turned, four axes": lambda make: make(2, 3, 48, 5).transpose(2, 3),
    "one token a sample": lambda make: make(4, 48).as_strided((4, 1, 48), (48, 1, 1)),
    "every second row": lambda make: make(3, 20, 48)[:, ::2],
    "images": lambda make: make(2, 48, 6, 5).permute(0, 2, 3, 1),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", INPUTS)
def test_y_dx_and_db(layout, dtype, bias):
    torch.manual_seed(0)
    dense = nn.Linear(48, 36, bias, dtype=dtype)
    pruned = fxmask.apply(copy.deepcopy(dense), ActivationPruning(0.5, 4))
    x = INPUTS[layout](lambda *shape: torch.randn(*shape, dtype=dtype))
    gy = torch.randn(*x.shape[:-1], 36, dtype=dtype)
    found = []
    for model in (dense, pruned):
        leaf = x.detach().requires_grad_()
        y = model(leaf * 1)
        (y * gy).sum().backward()
        found.append((y, leaf.grad, model.bias.grad if bias else y))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not torch.equal(dense.weight.grad, pruned.weight.grad)


def test_bits_of_inputs_that_lie_otherwise_in_many_sizes():
    """In which sizes two products, or sums, differ in a bit is the machine's."""
    torch.manual_seed(0)
    layouts = {
        "rows": lambda m, k: torch.randn(2, m, k), "matrix": lambda m, k: torch.randn(k, m).t(), "part": lambda m, k: torch.randn(k, m + 1).t()[:m],
        "sample": lambda m, k: torch.randn(1, k, m).mT, "samples": lambda m, k: torch.randn(2, k, m).mT,
    }  # fmt: skip
    for (name, make), n, k, m, biased, turned in itertools.product(layouts.items(), (1, 3, 8, 64), (1, 2, 5, 16), (1, 3, 7, 16, 33), *[(False, True)] * 2):
        x, w, bias = make(m, k).requires_grad_(), torch.randn(n, k, requires_grad=True), torch.randn(n, requires_grad=True) if biased else None
        y = F.linear(x, w, bias)
        gy = torch.randn_like(y).mT.contiguous().mT if turned else torch.randn(y.shape)
        y.backward(gy)
        assert torch.equal(y, dense_linear.forward(x.detach(), w.detach(), bias.detach() if biased else None)), (name, n, k, m, biased)
        assert torch.equal(x.grad, dense_linear.dx(gy, w.detach(), dense_linear.has_rows_inside(x))), (name, n, k, m, biased, turned)
        assert not biased or torch.equal(bias.grad, dense_linear.db(gy, x.is_contiguous())), (name, n, k, m, turned)


def test_dx_of_a_turned_matrix_that_is_a_part_of_a_wider_one():
    torch.manual_seed(0)
    dense = nn.Linear(48, 36, False).double()
    pruned, gy, x, found = fxmask.apply(copy.deepcopy(dense), ActivationPruning(0.5, 4)), torch.randn(20, 36).double(), torch.randn(48, 60).double(), []
    for model in (dense, pruned):
        leaf = x.clone().requires_grad_()
        (model(leaf[:, :20].t()) * gy).sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_block_of_resmlp_s12(dtype):
    torch.manual_seed(0)
    block = Block(PRESETS["s12"]).to(dtype)
    pruned = fxmask.apply(copy.deepcopy(block), ActivationPruning(0.8, 64))
    x, found = torch.randn(2, 196, 384, dtype=dtype), []
    for model in (block, pruned):
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        y.square().sum().backward()
        found.append((y, leaf.grad, *(m.bias.grad for m in model.modules() if isinstance(m, nn.Linear))))
    assert len(found[0]) == 5 and all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_noise_leaves_what_a_checkpoint_draws_behind_it_alone(reentrant, masked, training):
    """Where the first forward of a reentrant checkpoint saves nothing, it draws as the second one does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
    fxmask.apply(model, *([WeightMask(0.5, (16, 16))] if masked else []), ActivationPruning(0.5, 16, noise=2.0))
    model[0].train(training)
    x = torch.randn(4, 10, 64, requires_grad=True)
    y = checkpoint(model, x, use_reentrant=reentrant)
    y.sum().backward()
    torch.testing.assert_close(model[0].bias.grad, (y != 0).sum((0, 1)) * 2.0)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_evaluation_without_gradients_draws_nothing(without):
    """Under inference mode not even in a reentrant checkpoint, whose part runs no second time there."""
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 64)), ActivationPruning(0.5, 16, noise=2.0)).eval()
    x, before = torch.randn(4, 64, requires_grad=True), torch.get_rng_state()
    with without():
        model(x)
        if without is torch.inference_mode:
            checkpoint(model, x, use_reentrant=True)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("reentrant", [False, True])
def test_noise_of_a_product_leaves_what_a_checkpoint_draws_behind_it_alone(reentrant, training):
    torch.manual_seed(0)
    model = fxmask.apply(nn.Sequential(Affine(64), nn.Dropout(0.5)), ActivationPruning(0.5, 16, noise=2.0, affine=True))
    model[0].train(training)
    y = checkpoint(model, torch.randn(4, 10, 64, requires_grad=True), use_reentrant=reentrant)
    y.sum().backward()
    torch.testing.assert_close(model[0].beta.grad, (y != 0).sum((0, 1)) * 2.0)


class Twice(nn.Module):
    """Its checkpointed part runs once without gradients by itself."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def part(self, x):
        with torch.no_grad():
            self.fc(x)
        return torch.nn.functional.dropout(self.fc(x), 0.5)

    def forward(self, x):
        return checkpoint(self.part, x, use_reentrant=True)


def test_noise_of_a_part_without_gradients_inside_of_a_checkpoint():
    torch.manual_seed(0)
    model, x = fxmask.apply(Twice(), ActivationPruning(0.5, 16, noise=2.0)).eval(), torch.randn(4, 10, 64, requires_grad=True)
    y = model(x)
    y.sum().backward()
    torch.testing.assert_close(model.fc.bias.grad, (y != 0).sum((0, 1)) * 2.0)


@pytest.mark.parametrize("masks", [(), (WeightMask(0.5, (16, 16)),)], ids=["alone", "masked"])
def test_without_noise_in_eval_for_frozen_weights_or_uncounted_steps_nothing_is_drawn(masks):
    x = torch.randn(4, 10, 64)
    noisy, later = (ActivationPruning(0.5, 16, noise=2.0, start=start) for start in (0, 3))
    for config, training, trains in ((ActivationPruning(0.5, 16), True, True), (noisy, False, True), (noisy, True, False), (later, True, True)):
        model, state = fxmask.apply(nn.Linear(64, 64), *masks, config).train(training).requires_grad_(trains), torch.get_rng_state()
        for grads in (False, not trains):
            with torch.set_grad_enabled(grads):
                model(x)
        assert torch.equal(torch.get_rng_state(), state)


def test_a_forward_without_gradients_draws_nothing_where_one_with_them_would_not():
    """Of one block a sample nothing is dropped."""
    model, state = fxmask.apply(nn.Linear(64, 64), ActivationPruning(0.5, 64, noise=2.0)), torch.get_rng_state()
    with torch.no_grad():
        model(torch.ones(4, 64))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("width", [4, 16])
def test_dw_of_both_counts_the_wanted_share(width, turned):
    """analyze and PyTorch's counter, which the op tells its FLOP."""
    x = torch.randn(2, 64, 64)
    layer = fxmask.apply(nn.Linear(64, 64), WeightMask(0.75, (16, 16)), ActivationPruning(0.5, width))
    x = x.transpose(1, 2) if turned else x
    with FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    flop = fxmask.analyze(copy.deepcopy(layer), x).summary["flop"]
    assert (flop["fwd"], flop["bwd_dw"]) == (2 * 128 * 64 * 16, 128 * 64 * 16)
    assert counter.get_total_flops() == flop["fwd"] + flop["bwd_dw"]
