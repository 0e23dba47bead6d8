"""cover=True: exactly k blocks, no block row and no block column empty where k allows it; against the definition, block by block in plain Python."""

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property.often import examples
from sample_models import mlp
from torch import fx

import fxmask
from fxmask.errors import ConfigError, FxMaskWarning, UnsupportedError
from fxmask.kernels import ops
from fxmask.kernels.grid import grid_shape, keep_count
from fxmask.kernels.score import CRITERIA, block_keys
from fxmask.kernels.select import covering, select_blocks

SIDES = st.integers(1, 9)


@st.composite
def cases(draw, sides=SIDES, spread=None):
    """(keys int32 [NB, KB], k): few different keys, so that ties are everywhere, or many."""
    nb, kb = draw(sides), draw(sides)
    spread = spread or draw(st.sampled_from([1, 3, 2**31 - 1]))
    keys = draw(st.lists(st.integers(0, spread), min_size=nb * kb, max_size=nb * kb))
    return torch.tensor(keys, dtype=torch.int32).reshape(nb, kb), draw(st.integers(1, nb * kb))


def chosen(keys, k):
    return select_blocks(keys, torch.tensor(k), cover=True)


def by_definition(keys, k):
    """The set of kept (row, column), by loops: what comes first is better."""
    nb, kb = keys.shape
    better = {(i, j): (-int(keys[i, j]), i * kb + j) for i in range(nb) for j in range(kb)}
    of_row = {i: min(((i, j) for j in range(kb)), key=better.get) for i in range(nb)}
    empty = [j for j in range(kb) if j not in {j for _, j in of_row.values()}]
    of_column = {j: min(((i, j) for i in range(nb)), key=better.get) for j in empty}
    holds = {min((b for b in of_row.values() if b[1] == j), key=better.get) for j in range(kb) if j not in empty}
    rows = sorted((i for i in range(nb) if of_row[i] not in holds), key=lambda i: better[of_row[i]], reverse=True)  # least first
    columns = sorted(empty, key=lambda j: better[of_column[j]], reverse=True)
    must = {*of_row.values(), *of_column.values()}
    for i, j in zip(rows, columns, strict=False):
        if len(must) > k:
            must = (must - {of_row[i], of_column[j]}) | {(i, j)}
    rest = [b for b in sorted(better, key=better.get) if b not in must]
    return set([*sorted(must, key=better.get), *rest][:k])


@given(cases())
@examples(500)
def test_the_definition(case):
    keys, k = case
    mask = chosen(keys, k)
    assert {tuple(b) for b in mask.nonzero().tolist()} == by_definition(keys, k)


@given(cases())
@examples(500)
def test_exactly_k_and_nothing_empty(case):
    keys, k = case
    mask = chosen(keys, k)
    assert int(mask.sum()) == k
    if k >= max(keys.shape):
        assert mask.any(0).all() and mask.any(1).all()
    must = covering(keys, torch.tensor(k))
    assert int(must.sum()) == max(min(int(must.sum()), k), max(keys.shape))  # never more than k while k is enough
    assert not (must & ~mask).any() or k < max(keys.shape)


@given(cases())
@examples(200)
def test_room_for_all_is_the_plain_greedy(case):
    """Every row's best block and every column's own are kept; where the plain mask has them already, it is the mask."""
    keys, k = case
    nb, kb = keys.shape
    k = max(k, min(nb + kb - 1, nb * kb))
    mask, must = chosen(keys, k), covering(keys, torch.tensor(k))
    rows = {(i, int(row.argmax())) for i, row in enumerate(keys)}  # the first of equals
    columns = {(int(column.argmax()), j) for j, column in enumerate(keys.t()) if j not in {j for _, j in rows}}
    assert {tuple(b) for b in must.nonzero().tolist()} == rows | columns and not (must & ~mask).any()
    plain = select_blocks(keys, torch.tensor(k))
    assert torch.equal(mask, plain) or (must & ~plain).any()


@given(st.integers(1, 60), st.integers(1, 60), st.floats(0, 0.95), st.sampled_from(CRITERIA), st.integers(0, 99))
@examples(60)
def test_by_the_op_in_every_form(n, k, ratio, criterion, seed):
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    keep = torch.tensor(keep_count(grid_shape(w.shape, (8, 8))[0] * grid_shape(w.shape, (8, 8))[1], ratio))
    step = torch.tensor(3)
    expected = select_blocks(block_keys(w, (8, 8), criterion, step, 7), keep, cover=True)
    for impl in ("auto", "reference", "cpu"):
        assert torch.equal(ops.block_index(w, keep, step, 8, 8, criterion, "lowest", 7, impl, True), expected)
    assert torch.equal(ops.index(w, keep, step, (8, 8), criterion, "lowest", 7, "auto", True), expected)
    under = torch.vmap(lambda v: ops.index(v, keep, step, (8, 8), criterion, "lowest", 7, "auto", True))  # a transform gets the aten form
    assert torch.equal(under(w[None])[0], expected)
    assert torch.equal(torch.vmap(lambda v: ops.block_index(v, keep, step, 8, 8, criterion, "lowest", 7, "auto", True))(w[None])[0], expected)


def test_moves_where_the_greedy_has_too_many():
    """Rows agree on column 0, so rows and columns ask for five blocks; three are enough."""
    keys = torch.tensor([[9, 3, 2], [8, 2, 1], [7, 1, 5]], dtype=torch.int32)
    assert chosen(keys, 5).int().tolist() == [[1, 1, 0], [1, 0, 0], [1, 0, 1]]
    assert chosen(keys, 4).int().tolist() == [[1, 0, 0], [1, 0, 0], [0, 1, 1]]  # row 2 loses least, and column 1 has least to lose
    assert chosen(keys, 3).int().tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]
    assert chosen(keys, 1).int().tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)])
def test_empty_weights(shape):
    assert ops.block_index(torch.empty(shape), torch.tensor(1), torch.tensor(0), 16, 16, "fro", "lowest", 0, "auto", True).numel() == 0


def test_opcheck():
    args = (torch.randn(64, 40), torch.tensor(5), torch.tensor(0), 16, 16, "fro", "lowest", 7, "auto", True)
    torch.library.opcheck(ops.block_index, args)


# ---- models ---------------------------------------------------------------------------------------------------------------------------------------------


def lame():
    """A model whose weights have rows and columns so weak that no plain mask keeps them."""
    model = mlp()
    for layer in (model[0], model[2]):
        layer.weight.data[16:32] *= 1e-3
        layer.weight.data[:, 32:48] *= 1e-3
    return model


@pytest.mark.parametrize("form", [lambda m: m, fx.symbolic_trace], ids=["module", "graph"])
@pytest.mark.parametrize("refresh", [1, 2])
def test_models(form, refresh):
    plain = fxmask.masks(fxmask.apply(lame(), ratio=0.7))
    model = fxmask.apply(form(lame()), fxmask.WeightMask(ratio=0.7, refresh=refresh, cover=True))
    masks = fxmask.masks(model)
    for name, mask in masks.items():
        assert int(mask.sum()) == int(plain[name].sum()) == keep_count(24, 0.7)
        assert mask.any(0).all() and mask.any(1).all() and not plain[name].any(0).all()
    fxmask.step(model, 0)
    dense = lame()
    for name, mask in masks.items():
        w = dense.get_parameter(name)
        w.data.mul_(mask.repeat_interleave(16, 0).repeat_interleave(16, 1))
    torch.testing.assert_close(model(torch.ones(2, 64)), dense(torch.ones(2, 64)))


def test_a_compiled_ramp_stays_covered():
    """One compile, and the masks of eager mode, while k moves down to max(rows, columns)."""
    torch.compiler.reset()
    schedule = fxmask.Schedule("linear", steps=8)
    models = [fxmask.apply(lame(), fxmask.WeightMask(ratio=0.75, schedule=schedule, cover=True)) for _ in range(2)]
    optimisers = [torch.optim.SGD(m.parameters(), 0.1) for m in models]
    for model, optimiser in zip(models, optimisers, strict=True):
        fxmask.guard(optimiser, model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        calls = [torch.compile(models[0], backend="aot_eager", fullgraph=True), models[1]]
        for _ in range(10):
            for call, optimiser in zip(calls, optimisers, strict=True):
                optimiser.zero_grad()
                call(torch.ones(2, 64)).square().mean().backward()
                optimiser.step()
            a, b = fxmask.masks(models[0]), fxmask.masks(models[1])
            assert all(torch.equal(m, b[name]) and m.any(0).all() and m.any(1).all() for name, m in a.items())
    assert {int(m.sum()) for m in a.values()} == {6}


def test_the_compiler_backend():
    torch.compiler.reset()
    model = lame()
    compiled = torch.compile(model, backend="fxmask", options={"ratio": 0.7, "cover": True, "inner": "eager"})
    masked = fxmask.apply(lame(), fxmask.WeightMask(ratio=0.7, cover=True))
    torch.testing.assert_close(compiled(torch.ones(2, 64)), masked(torch.ones(2, 64)))


def test_states_of_before():
    state = fxmask.state_dict(fxmask.apply(lame(), ratio=0.7, refresh=2))
    for entry in state["masks"].values():
        assert entry["settings"].pop("cover") is False
    torch.save(state, buffer := io.BytesIO())
    state = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    fxmask.load_state_dict(fxmask.apply(lame(), ratio=0.7, refresh=2), state)
    with pytest.raises(fxmask.FxMaskError, match="cover: True here, False saved"):
        fxmask.load_state_dict(fxmask.apply(lame(), fxmask.WeightMask(ratio=0.7, refresh=2, cover=True)), state)


def test_wrong_use(monkeypatch):
    with pytest.raises(ConfigError, match="cover: expected a bool, and ties='lowest' with True, got True with ties='keep'"):
        fxmask.WeightMask(cover=True, ties="keep")
    with pytest.raises(ConfigError, match=r"cover: expected a bool.* got 1"):
        fxmask.WeightMask(cover=1)
    with pytest.raises(ConfigError, match="cover=True keeps exactly k blocks: expected ties='lowest', got 'keep'"):
        select_blocks(torch.ones(2, 2, dtype=torch.int32), torch.tensor(2), "keep", cover=True)
    with pytest.warns(FxMaskWarning, match=r"cover=True with fewer blocks than rows or columns, so some stay empty: 0 \(3 blocks kept of 6x4\), 2"):
        fxmask.apply(mlp(), fxmask.WeightMask(ratio=0.9, cover=True))
    monkeypatch.setattr("fxmask.passes.settings.config.check_available", lambda impl: None)  # as where there is a GPU
    with pytest.raises(UnsupportedError, match="impl='triton' has no kernel for cover=True: expected impl='auto' or impl='reference'"):
        fxmask.WeightMask(cover=True, impl="triton")


def test_triton_refuses():
    triton = pytest.importorskip("fxmask.kernels.triton.implementation", exc_type=ImportError)
    w = torch.randn(32, 32)
    assert triton.groups(w, (16, 16), "fro", "lowest") and not triton.groups(w, (16, 16), "fro", "lowest", True)
    with pytest.raises(UnsupportedError, match="no kernel for cover=True"):
        triton.block_index(w, torch.tensor(2), torch.tensor(0), (16, 16), "fro", "lowest", 0, True)
