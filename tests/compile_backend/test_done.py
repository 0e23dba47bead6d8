"""What a graph does to a weight, put together from its uses: masked in one, dense or pruned in another, in any order."""

from itertools import permutations
from types import SimpleNamespace

import pytest
import torch

import fxmask
from fxmask.compiler.backend import _done
from fxmask.compiler.backend_watch import Done
from fxmask.passes.graphs.graph_calls import LINEARS

MASK, W = fxmask.WeightMask(ratio=0.5), torch.zeros(4, 4)
CALL, READ = (SimpleNamespace(target=t) for t in (next(iter(LINEARS)), "reader"))


def use(name, config=None, reason="", product=False, nodes=(CALL,), weight=W):
    candidate = SimpleNamespace(name=name, weight=weight, product=product, param_name=f"{name}.weight", nodes=nodes)
    return SimpleNamespace(candidate=candidate, config=config, reason=reason)


def done(*uses, masked=(), words=None):
    """[(name, what is done)] of the weights, in order."""
    words = {id(u): w for u, w in (words or [])}
    return [(name, d) for name, _, d in _done(list(uses), {id(u) for u in masked}, words, {})]


def test_a_use_that_stays_dense_says_why_beside_one_that_is_masked():
    a, b = use("a", MASK), use("b", reason="in exclude")
    both = Done(mask=MASK, stream_name="a.weight", dense="in exclude")
    assert done(a, b, masked=[a]) == done(b, a, masked=[a]) == [("a", both)]
    assert done(b) == [("b", Done(dense="in exclude"))]


def test_the_first_use_that_changes_the_graph_names_the_weight():
    a, b, c = use("a", reason="dense"), use("b", MASK), use("c", reason="dense")
    assert {done(*order, masked=[b])[0][0] for order in permutations((a, b, c))} == {"b"}
    assert done(a, c)[0][0] == "c"


def test_a_reader_that_takes_the_weight_as_an_argument():
    called, both, read = use("a", MASK), use("a", MASK, nodes=(READ, CALL)), use("a", MASK, nodes=(READ,))
    assert [done(u, masked=[u])[0][1].called for u in (called, both, read)] == [True, True, False]
    (_, alone), = done(read)
    assert alone.dense.startswith("its reader takes the weight as an argument") and alone.mask is None


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_pruned_inputs_of_one_use_are_no_gap_and_outlive_the_others(order):
    uses = use("a", MASK), use("b", reason="default exclusion"), use("c", reason="dense")
    (_, d), = done(*(uses[i] for i in order), masked=uses[:1], words=[(uses[1], "0.5 in blocks of 2")])
    assert d == Done(mask=MASK, stream_name="a.weight", activations="0.5 in blocks of 2", dense="dense")


def test_a_product_is_one_in_all_of_its_uses():
    linear, product = use("a"), use("b", product=True)
    assert [done(*uses)[0][1].product for uses in ((product, product), (product, linear), (linear, product))] == [True, False, False]


def test_weights_are_told_apart():
    a, b = use("a", MASK), use("b", reason="dense", weight=torch.zeros(4, 4))
    assert done(a, b, masked=[a]) == [("a", Done(mask=MASK, stream_name="a.weight")), ("b", Done(dense="dense"))]
