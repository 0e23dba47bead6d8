"""Figures that an independent count found wrong once: each beside that count."""

from __future__ import annotations

import pytest
import torch
from analysis.counted import Apply, analyze
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fxmask
from fxmask.compiler import backend_steps

F32 = 4  # bytes


def moved(f, *inputs):
    """Compulsory bytes of a function's forward."""
    return analyze(Apply(f), *inputs, phases=("fwd",)).summary["bytes_min"]["fwd"]


# ---- bytes: every distinct one once -------------------------------------------------------------------------------------------------------------------

X, IMAGE, TABLE, ROWS, INDEX = torch.randn(5, 64), torch.randn(1, 8, 8, 6), torch.randn(1000, 64), torch.randn(3, 64), torch.tensor([1, 5, 7])
EVERY = torch.zeros(3, 64, dtype=torch.long)
QUARTERS = [(i, j) for i in (0, 1) for j in (0, 1)]
BYTES = {
    "two slices": (lambda x: torch.mul(*x.chunk(2, -1)), (X,), 3 * 5 * 32 * F32),
    "slices that overlap": (lambda x: x[:, :40] + x[:, 24:], (X,), (5 * 64 + 5 * 40) * F32),
    "three that overlap": (lambda x: torch.cat([x[0, :40], x[0, 24:], x[0, 10:50]]), (X,), (64 + 120) * F32),
    "the same one twice": (lambda x: x * x, (X,), 2 * 5 * 64 * F32),
    "all rows, stacked": (lambda x: torch.stack(x.unbind(0)), (X,), 2 * 5 * 64 * F32),
    "patches merged": (lambda x: torch.cat([x[:, i::2, j::2] for i, j in QUARTERS], -1), (IMAGE,), 2 * 8 * 8 * 6 * F32),
    "windows that overlap": (lambda x: x.unfold(1, 4, 1) * 2, (X,), (5 * 64 + 5 * 61 * 4) * F32),
    "a slice into a slice": (lambda x: x[:, :10].copy_(x[:, 10:20]), (X,), 2 * 5 * 10 * F32),
    "a slice onto a slice": (lambda x: x[:, :10].add_(x[:, 10:20]), (X,), 3 * 5 * 10 * F32),
    "x x^T": (lambda x: x @ x.t(), (X,), (5 * 64 + 5 * 5) * F32),
    "windows multiplied": (lambda x, w: x[0].unfold(0, 4, 1) @ w, (X, torch.randn(4, 8)), (64 + 4 * 8 + 61 * 8) * F32),
    "two halves of x": (lambda x: x[:, :32] @ x[:, 32:].t(), (X,), (5 * 64 + 5 * 5) * F32),
    "rows put": (lambda t, v, i: t.index_put_((i,), v), (TABLE, ROWS, INDEX), 24 + 2 * ROWS.numel() * F32),
    "rows added": (lambda t, v, i: t.index_put_((i,), v, accumulate=True), (TABLE, ROWS, INDEX), 24 + 3 * ROWS.numel() * F32),
    "rows copied": (lambda t, v, i: t.index_copy_(0, i, v), (TABLE, ROWS, INDEX), 24 + 2 * ROWS.numel() * F32),
    "rows summed": (lambda t, v, i: t.index_add_(0, i, v), (TABLE, ROWS, INDEX), 24 + 3 * ROWS.numel() * F32),
    "columns filled": (lambda t, i: t.index_fill_(1, i, 0.0), (TABLE, INDEX), 24 + 3 * 1000 * F32),
    "elements": (lambda t, v, i: t.scatter_(0, i, v), (TABLE, ROWS, EVERY), 8 * EVERY.numel() + 2 * ROWS.numel() * F32),
    "elements added": (lambda t, v, i: t.scatter_add_(0, i, v), (TABLE, ROWS, EVERY), 8 * EVERY.numel() + 3 * ROWS.numel() * F32),
    "as many as a mask says": (lambda t, m: t.index_put_((m,), torch.tensor(0.0)), (TABLE, TABLE > 0), TABLE.numel() * (2 * F32 + 1) + F32),
}


@pytest.mark.parametrize("case", BYTES)
def test_distinct_bytes(case):
    f, inputs, expected = BYTES[case]
    assert moved(f, *(t.clone() for t in inputs)) == expected


def test_inputs_that_share_their_memory_are_held_once():
    x = torch.randn(2, 9, 64)
    held = lambda model, *inputs: analyze(model, *inputs).tables["footprint"][-1]["input"]  # noqa: E731
    assert held(nn.MultiheadAttention(64, 4, batch_first=True), x, x, x) == x.numel() * F32
    assert held(nn.Linear(64, 8), torch.randn(1, 64).expand(100, 64)) == 64 * F32
    many = torch.randn(100, 64)
    assert held(nn.Linear(64, 8), many[:5]) == 5 * 64 * F32 and held(Apply(torch.mul), many[:5], many[5:10]) == 10 * 64 * F32


def test_workspace_is_one_tensor_and_a_copy_of_a_weight_is_made_once():
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), ratio=0.5)
    assert analyze(model, torch.randn(64, 64)).tables["footprint"][-1]["workspace"] == 64 * 64 * F32
    layer = fxmask.apply(nn.Linear(48, 48), ratio=0.5)
    for m in (layer, nn.Sequential(layer, layer, layer)):
        assert analyze(m, torch.randn(8, 48)).tables["footprint"][-1]["naive_mask"] == 48 * 48 * (1 + F32)


@pytest.mark.parametrize("momentum", [0, 0.9])
def test_a_centred_rmsprop_holds_another_tensor(momentum):
    layer = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.RMSprop(layer.parameters(), centered=True, momentum=momentum)
    layer(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    real = sum(t.nbytes for t in optimizer.state[layer.weight].values() if t.dim())
    report, weight = analyze(layer, torch.randn(8, 64), optimizer=optimizer), layer.weight.nbytes
    assert report.tables["footprint"][-1]["optimizer_state"] == real and report.summary["bytes_min"]["opt"] == 3 * weight + 2 * real


# ---- masks ---------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [(16, 16), (8, 16), (24, 32)])  # the kernels take some and mask the rest afterwards
def test_rigl_beside_pruning_wants_all_blocks_in_its_dense_steps_alone(block):
    configs = fxmask.WeightMask(0.5, block, backward="rigl", dense_every=2), fxmask.ActivationPruning(0.5, 16)
    model, x, found = fxmask.apply(nn.Sequential(nn.Linear(64, 96)), *configs, include="*"), torch.randn(2, 16, 64), set()
    for step in (0, 1):
        fxmask.step(model, step)
        with FlopCounterMode(display=False) as counter:
            model(x).sum().backward()
        counted = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}["fxmask.pruned_dw"]
        assert analyze(model, x).summary["flop"]["bwd_dw"] == counted
        found.add(counted)
    dense = 2 * 32 * 64 * 96
    assert found == {dense // 2, dense // 4}, "half of the inputs are saved; of the weight all blocks are wanted, or half"


@pytest.mark.parametrize("kind", ["called", "read", "convolution"])
def test_a_mask_that_covers(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 64, 3)) if kind == "convolution" else nn.Sequential(nn.Linear(72, 64, bias=False))
    with torch.no_grad():  # the largest blocks lie on the left, so that without `cover` whole columns are masked
        model[0].weight.mul_(1e-3).flatten(1)[:, :48] += 1
    options = {"read": "weight"} if kind == "read" else {}
    fxmask.apply(model, fxmask.WeightMask(0.4, cover=True, **options), layers=(nn.Linear, nn.Conv2d), include="*")
    x = torch.randn(1, 8, 6, 6) if kind == "convolution" else torch.randn(8, 72)
    tokens = 16 if kind == "convolution" else 8
    (mask,) = fxmask.masks(model).values()
    kept = int(mask.repeat_interleave(16, 0).repeat_interleave(16, 1)[:64, :72].sum())
    report = analyze(model, x)
    assert mask.any(0).all() and report.summary["flop"]["fwd"] == 2 * tokens * kept
    assert report.summary["weights_loaded"] == kept


@pytest.mark.parametrize("phases", [("dX", "dW"), ("dW",), ("opt",), ("fwd", "opt")])
def test_what_masks_keep_does_not_hang_on_the_phases(phases):
    model, x = fxmask.apply(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32)), ratio=0.75), torch.randn(8, 64)
    whole, part = (analyze(model, x, memory_model="thesis", **options) for options in ({}, {"phases": phases}))
    for name in ("params_kept", "density"):
        assert part.summary[name] == whole.summary[name] and whole.summary["density"] < 0.3
    assert part.meta["mask_hash"] == whole.meta["mask_hash"] and part.tables["thesis"] == whole.tables["thesis"]
    assert part.tables["footprint"][-1]["naive_mask"] == whole.tables["footprint"][-1]["naive_mask"] > 0


def test_totals_of_a_run_in_the_thesis_model():
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 64)), ratio=0.5)
    report = analyze(model, torch.randn(4, 64), memory_model="thesis", steps=2**18, phases=("fwd",))
    rows = report.tables["thesis"]
    assert all((r["steps"], r["total_gib"], r["dense_gib"]) == (2**18, r["total_bytes"] / 2**12, r["dense_bytes"] / 2**12) for r in rows) and rows
    assert "steps" not in analyze(model, torch.randn(4, 64), memory_model="thesis", phases=("fwd",)).tables["thesis"][0]
    assert rows[0]["dense_gib"] == 4.5 and "  4.50  " in report.text("thesis")  # 16 KiB of weights, 2 of four samples in and out


# ---- phases of a step, and the dense one ---------------------------------------------------------------------------------------------------------------

SYSTEMS = {
    "masked": fxmask.WeightMask(0.5),
    "pruned": fxmask.ActivationPruning(0.5, 16),
    "masked and pruned": (fxmask.WeightMask(0.5), fxmask.ActivationPruning(0.5, 16)),
    "masked and dropped": (fxmask.WeightMask(0.5), fxmask.BlockDropout(0.5, block=(16, 16))),
    "dropped": fxmask.BlockDropout(0.5, block=(16, 16)),
    "2:4": fxmask.NMMask(2, 4),
    "2:4, transposable": fxmask.NMMask(2, 4, transposable=True),
}


@pytest.mark.parametrize("case", SYSTEMS)
def test_the_dense_step_is_that_of_the_dense_model(case):
    make = lambda: nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))  # noqa: E731
    x, configs = torch.randn(8, 64), SYSTEMS[case]
    report = analyze(fxmask.apply(make(), *(configs if isinstance(configs, tuple) else (configs,)), include="*"), x)
    dense = analyze(make(), x)
    assert report.summary["t_dense_min_us"] == pytest.approx(dense.summary["t_min_us"])
    assert report.summary["flop_dense"]["total"] == dense.summary["flop"]["total"]
    assert report.summary["bytes_min"]["bwd_db"] == dense.summary["bytes_min"]["bwd_db"]


@pytest.mark.parametrize("train_weights", [False, True])
def test_patterns_that_are_drawn_are_no_dense_work(train_weights):
    make = lambda: nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))  # noqa: E731
    x, config = torch.randn(8, 64, requires_grad=True), fxmask.NMMask(mode="learned", train_weights=train_weights)
    flop = analyze(fxmask.apply(make(), config), x).summary
    dense, drawn = analyze(make(), x).summary["flop"], 2 * 2 * 64 * 96 // 4 * 6 * 4  # two layers, six patterns for each four weights
    assert flop["flop_dense"] == dense
    assert flop["flop"]["fwd"] == dense["fwd"] + drawn and flop["flop"]["bwd_dw"] == dense["bwd_dw"] + drawn


NM = {
    "2:4": dict(),
    "1:8": dict(n=1, m=8),
    "permuted": dict(mode="permuted"),
    "learned": dict(mode="learned"),
    "soft": dict(mode="learned", soft=True),
}


@pytest.mark.parametrize("how", ["train", "eval", "frozen"])
@pytest.mark.parametrize("case", NM)
def test_parameters_that_n_m_masks_keep(case, how):
    model = nn.Sequential(nn.Conv2d(16, 8, 1), nn.Flatten(), nn.Linear(32, 24))
    fxmask.apply(model, fxmask.NMMask(**NM[case]))
    kept = {name.partition(".")[0]: int(mask.sum()) for name, mask in fxmask.masks(model).items()}
    if how == "frozen":
        fxmask.freeze(model)
    elif case == "soft" and how == "train":  # a mixture of all patterns
        kept = {"0": 128, "2": 768}
    model.train(how != "eval")
    report = analyze(model, torch.randn(4, 16, 2, 2))
    logits = {name: getattr(model.get_submodule(name), "nm_logits", torch.empty(0)).numel() for name in kept}
    found = {r["module"]: r["params_kept"] - logits[r["module"]] for r in report.tables["modules"] if r["module"] in kept}
    assert found == {"0": kept["0"] + 8, "2": kept["2"] + 24}
    assert report.summary["params_kept"] == sum(found.values()) + sum(logits.values()) < report.summary["params"] or case == "soft"
    assert not any("No layer is masked" in note for note in report.notes)


@pytest.mark.parametrize("mode", ["magnitude", "permuted", "sr-ste", "learned"])
@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_that_n_m_masks_in_a_trace_keep(mode, frozen):
    model, x = fxmask.apply(nn.Sequential(nn.Linear(32, 24)), fxmask.NMMask(mode=mode)), torch.randn(4, 32)
    if frozen:
        fxmask.freeze(model)
    report = analyze(torch.export.export(model, (x,)).module(), x)
    known = frozen or mode == "permuted"
    assert report.summary["params"] - report.summary["params_kept"] == known * 16 * 24
    assert any("masked weights come without the number" in note for note in report.notes) == (not known)
    assert any("leave out no FLOP" in note for note in report.notes) and not any("No layer is masked" in note for note in report.notes)


class Mixed(nn.Module):
    """A linear of transposed inputs under autocast: a dense one casts its weight and adds its bias in ops of their own."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(32, 32)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.mix(x.transpose(1, 2))


@pytest.mark.parametrize("case", ["2:4", "2:4, transposable"])
def test_the_dense_step_casts_and_adds_as_before(case):
    x = torch.randn(4, 32, 16)
    report, dense = analyze(fxmask.apply(Mixed(), SYSTEMS[case]), x), analyze(Mixed(), x)
    assert report.summary["t_dense_min_us"] == pytest.approx(dense.summary["t_min_us"])


@pytest.mark.parametrize("padding", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("config", [fxmask.WeightMask(0.5), fxmask.NMMask(2, 4)])
def test_the_dense_step_of_convolutions_and_their_weights_gradient(config, padding):
    make = lambda: nn.Sequential(nn.Conv2d(16, 32, 3, padding=1, padding_mode=padding))  # noqa: E731
    x = torch.randn(2, 16, 8, 8)
    report, dense = analyze(fxmask.apply(make(), config, layers=nn.Conv2d), x), analyze(make(), x)
    assert report.summary["t_dense_min_us"] == pytest.approx(dense.summary["t_min_us"])
    found = [r.summary["bytes_min"]["bwd_dx"] for r in (report, dense)]
    assert found == [0, 0], "the input needs no gradient: what is masked is that of the weight"


@pytest.mark.parametrize("impl", [None, "reference"])
@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.9])
def test_blocks_at_a_ragged_edge_have_as_few_elements_as_they_have(ratio, impl):
    """196 features in blocks of 64: the fourth has 4, a low norm, and is the first to go; what a real input keeps, element by element."""
    model, x = fxmask.apply(nn.Sequential(nn.Linear(196, 100)), fxmask.ActivationPruning(ratio, 64)), torch.randn(8, 7, 196)
    _, index = torch.ops.fxmask.compress(x, 64, 28 - round(28 * ratio), False)
    flop = 2 * 100 * int(torch.where(index % 4 == 3, 4, 64).sum())
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    counted = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}["fxmask.pruned_dw"]
    assert analyze(model, x, impl=impl).summary["flop"]["bwd_dw"] == counted == flop < 2 * 56 * 196 * 100


def test_lists_of_a_mask_are_made_beside_pruning_too():
    ops = []
    for more in ((), (fxmask.ActivationPruning(0.5, 16),)):
        model = fxmask.apply(nn.Sequential(nn.Linear(64, 96)), fxmask.WeightMask(0.5), *more, include="*")
        ops.append({row["op"] for row in analyze(model, torch.randn(2, 8, 64)).tables["nodes"] if row["phase"] == "fwd"})
    assert "fxmask.strip_lists" in ops[0] and "fxmask.strip_lists" in ops[1]


def test_masks_of_the_backend_are_said_to_be_missing(monkeypatch):
    monkeypatch.setattr(backend_steps, "_installed", [None])  # or steps of other tests would be told that no graph came
    model = nn.Sequential(nn.Linear(64, 64))
    compiled = torch.compile(model, backend="fxmask", options={"ratio": 0.5})
    assert any("compiled by backend='fxmask'" in note for note in analyze(compiled, torch.randn(8, 64)).notes)
    for other in (model, torch.compile(model), torch.compile(model, backend="eager")):
        assert not any("compiled by" in note for note in analyze(other, torch.randn(8, 64)).notes)


def test_words_on_masks_that_leave_out_no_flop_and_on_what_has_no_blocks():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU()), torch.randn(8, 64)
    said = lambda report: [n for n in report.notes if "No layer is masked" in n or "leave out no FLOP" in n]  # noqa: E731
    assert said(analyze(model, x)) == ["No layer is masked: dense and useful FLOP agree."]
    (line,) = said(analyze(fxmask.apply(model, fxmask.NMMask(2, 4)), x))
    assert line.startswith("Masks leave out no FLOP here")
    pruned = fxmask.apply(nn.Sequential(nn.Linear(1024, 1024)), fxmask.ActivationPruning(0.8, 64))
    assert not any("()" in note for note in analyze(pruned, torch.empty(4, 512, 1024), dtype=torch.bfloat16).notes)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_gradient_that_is_wanted_everywhere_is_one_product(impl):
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 64)), fxmask.WeightMask(0.5, backward="ste"))
    rows = [r for r in analyze(model, torch.randn(8, 64), impl=impl).tables["roofline"] if r["phase"] == "dW" and r["op"].startswith("fxmask")]
    assert [round(r["t_min_us"], 6) for r in rows] == [2.0] and rows[0]["speedup_bound"] == 1


class Doubled(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight * 2, self.bias)


def test_words_on_masks_of_weights_that_a_graph_computes():
    x = torch.randn(8, 64)
    graph = fxmask.apply(torch.export.export(Doubled(64, 64), (x,)).module(), ratio=0.5, include="*")
    notes = analyze(graph, x).notes
    assert [n for n in notes if n.startswith("1 weights are computed in every forward")] and not [n for n in notes if "have no values" in n]
