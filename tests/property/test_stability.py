"""The stability bounds: searched for counterexamples just above each bound, against masks and moves chosen to do harm; where they say something; and where the
printed ones are wrong."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property.often import examples
from torch import nn

from fxmask.chains import Link, chain_of
from fxmask.margins import _logits, _run, bounds_of, together

ACTIVATIONS = [nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.LeakyReLU, nn.Identity]
CASES = st.tuples(st.integers(1, 4), st.sampled_from(ACTIVATIONS), st.booleans(), st.sampled_from([0.01, 0.1, 1.0]), st.integers(0, 2**31))


def chain(case) -> tuple[list[Link], torch.Tensor, torch.Generator]:
    """Links of 1 to 3 features, where norms are nearly met, or to 12; 2 to 4 classes; with biases or without; 3 inputs."""
    depth, activation, biased, scale, seed = case
    g = torch.Generator().manual_seed(seed)
    widths = [*torch.randint(1, 4 if seed % 2 else 13, (depth,), generator=g).tolist(), int(torch.randint(2, 5, (), generator=g))]
    parts: list[nn.Module] = []
    for i in range(depth):
        linear = nn.Linear(widths[i], widths[i + 1], dtype=torch.float64)
        linear.weight.data = scale * torch.randn(widths[i + 1], widths[i], dtype=torch.float64, generator=g)
        linear.bias.data = biased * torch.randn(widths[i + 1], dtype=torch.float64, generator=g)
        parts += [linear, activation()] if i < depth - 1 else [linear]
    return chain_of(nn.Sequential(*parts))[1], torch.randn(3, widths[0], dtype=torch.float64, generator=g), g


def barely_above(links, x, bound):
    """The chain with another bias at its end, under which the first input's margin is just above the bound; None where no margin is so large."""
    if not bound < 0.499:
        return None
    z = _logits(links, x[:1])[0]
    far = 2 * math.atanh(min(2 * bound * 1.000001 + 1e-12, 0.9999999))  # p1 - p2 = tanh(far / 2) where these two have all of the probability
    shift = torch.full_like(z, -60.0) - z
    shift[0], shift[1] = far - z[0], -z[1]
    bias = shift if links[-1].bias is None else links[-1].bias + shift
    return [*links[:-1], dataclasses.replace(links[-1], bias=bias)]


def harmful(links, j, x, g, moved=None):
    """Weights of layer j under a mask: at random, or without the elements that speak for class 0 against class 1, as far as a gradient tells."""
    base = links[j].weight if moved is None else links[j].weight + moved
    w = base.clone().requires_grad_()
    z = links[j](_logits(links[:j], x[:1]), w)
    z = _logits(links[j + 1 :], z)[0]
    (slope,) = torch.autograd.grad(z[0] - z[1], w)
    yield torch.where(slope * base > 0, 0, base)
    yield torch.zeros_like(base)
    for _ in range(4):
        yield torch.where(torch.rand(base.shape, generator=g) < torch.rand((), generator=g), base, 0)


def predicts(links, j, weight, x):
    h = x[:1]
    for i, link in enumerate(links):
        h = link(h, weight if i == j else None)
    return int(h.argmax())


@examples(40)
@given(CASES)
def test_above_a_bound_nothing_changes_the_prediction(case):
    links, x, g = chain(case)
    for j, link in enumerate(links):
        move = 0.3 * link.weight.abs().max() * torch.randn(link.weight.shape, dtype=torch.float64, generator=g)
        for weight in harmful(links, j, x, g):
            masked = [dataclasses.replace(part, masked=weight) if part is link else part for part in links]
            arrived = _run(links, x)[2]
            found = bounds_of(masked, arrived, {link.name: move}, literal=False)
            for which in ("3.4", "3.5"):
                _holds(masked, j, weight, x, found[which][link.name][0], 2)
        for weight in harmful(links, j, x, g, move):
            _holds(links, j, weight, x, bounds_of(links, arrived, {link.name: move}, literal=False)["3.6"][link.name][0], math.inf)


def _holds(links, j, weight, x, bound, norm):
    """The logits move by no more than the bound, which is more than the prediction needs, and the prediction stays where the margin is just above."""
    moved = _logits(links[j + 1 :], links[j](_logits(links[:j], x[:1]), weight)) - _logits(links, x[:1])
    assert moved.norm(p=norm) <= bound * (1 + 1e-9)
    above = barely_above(links, x, float(bound))
    if above is not None:
        margin, label, _ = _run(above, x)
        assert margin[0] > bound and label[0] == 0
        assert predicts(above, j, weight, x) == 0


@examples(40)
@given(CASES)
def test_all_masks_at_once(case):
    links, x, g = chain(case)
    for _ in range(3):
        masked = []
        for j, link in enumerate(links):
            weights = list(harmful(links, j, x, g))
            masked.append(dataclasses.replace(link, masked=weights[int(torch.randint(len(weights), (), generator=g))]))
        bound = together(masked, _run(links, x)[2])[0]
        moved = _logits(masked, x, masked)[0] - _logits(masked, x)[0]
        assert moved.norm() <= bound * (1 + 1e-9)
        above = barely_above(masked, x, float(bound))
        assert above is None or int(_logits(above, x[:1], above).argmax()) == 0


@examples(60)
@given(CASES)
def test_the_printed_bounds_are_never_below_ours_where_they_hold(case):
    links, x, _ = chain(case)
    links = [dataclasses.replace(link, masked=torch.where(link.weight > 0, link.weight, 0)) for link in links]
    arrived = _run(links, x)[2]
    ours, printed = (bounds_of(links, arrived, {}, literal) for literal in (False, True))
    for j, link in enumerate(links):
        if all(part.keeps_zero() for part in links[:j]):
            for which in ("3.4", "3.6"):
                assert (ours[which][link.name] <= printed[which][link.name] * (1 + 1e-9)).all()


def test_the_bounds_say_something():
    """A sure classifier behind a small hidden layer: all three are met, by every input, and hardly more noise ends that."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    for p in model.parameters():
        p.data *= 0.2
    model[2].bias.data = torch.tensor([4.0, 0.0, 0.0])
    links, x = chain_of(model)[1], 0.5 * torch.rand(50, 8, dtype=torch.float64)
    links = [dataclasses.replace(link, masked=torch.where(link.weight > 0, link.weight, 0)) for link in links]
    margin, _, arrived = _run(links, x)
    found = bounds_of(links, arrived, {link.name: 0.1 * link.weight for link in links}, literal=False)
    for which in ("3.4", "3.5", "3.6"):
        for link in links:
            assert (margin > found[which][link.name]).all(), (which, link.name)
    assert (margin > together(links, arrived)).all()


def test_a_bias_in_front_makes_the_printed_bounds_wrong():
    """At x = 0 they say that nothing can change. The bias of the first layer passes through the masked second one."""
    first = Link("0", torch.eye(2, dtype=torch.float64), None, torch.ones(2, dtype=torch.float64))
    w = torch.tensor([[2.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    links = [first, dataclasses.replace(first, name="1", weight=w, masked=torch.diag(w.diagonal() * torch.tensor([0, 1])), bias=None)]
    x = torch.zeros(1, 2, dtype=torch.float64)
    margin, label, arrived = _run(links, x)
    printed, ours = (bounds_of(links, arrived, {}, literal) for literal in (True, False))
    assert margin > 0 and all(float(printed[which]["1"]) == 0 for which in ("3.4", "3.5", "3.6"))
    assert int(_logits(links, x, links[1:]).argmax()) != int(label)
    assert float(ours["3.4"]["1"]) == pytest.approx(2 * math.sqrt(2)) and margin < ours["3.4"]["1"]


def test_zeros_in_an_orthogonal_matrix_make_the_printed_3_5_wrong():
    """Half of a Hadamard matrix of 64 has four times its norm: the margin exceeds the printed bound, and the prediction changes."""
    h = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(6):
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    small = 1e-4
    u = torch.full((64,), 1 / 8, dtype=torch.float64)
    x = u[None]
    kept = torch.where(h < 0, small * h, 0)  # without its positive elements
    first = Link("0", small * h, kept, None)
    second = Link("1", torch.stack([u, -u]), None, None)
    arrived = _run([first, second], x)[2]
    links = [first, dataclasses.replace(second, bias=torch.tensor([25 * small, -25 * small]) - second(arrived[1])[0])]
    margin, label, arrived = _run(links, x)
    printed, ours = (float(bounds_of(links, arrived, {}, literal)["3.5"]["0"]) for literal in (True, False))
    assert printed < margin < ours and int(_logits(links, x, links[:1]).argmax()) != int(label)
