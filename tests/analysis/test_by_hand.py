"""What a product with W∘M, a computed weight, a layer that rests or a graph counts as: each beside a count by hand or a real run."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from analysis.counted import analyze, both, kept_of
from torch import nn
from torch.nn.utils import prune

import fxmask
from fxmask.kernels.grid import expand_mask, kept_elements

TOKENS, BLOCK = 8, (16, 16)


# ---- products with W∘M that somebody else reads -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["masked", "ste"])
def test_the_gradient_of_a_weight_that_its_owner_reads(mode):
    """MultiheadAttention multiplies densely, and dW outside of kept blocks is dropped or not, as the mode says."""
    torch.manual_seed(0)
    model = fxmask.apply(nn.MultiheadAttention(64, 4, batch_first=True), ratio=0.75, block=BLOCK, backward=mode)
    kept, size = kept_of(model, BLOCK)["out_proj.weight"]
    x = torch.randn(2, TOKENS, 64)
    report = fxmask.analyze(model, (x, x, x), kwargs={"need_weights": False}, device="h100-sxm")
    s, dense = report.summary["flop"]["bwd_dw"], report.summary["flop_dense"]["bwd_dw"]
    assert dense - s == (2 * 2 * TOKENS * (size - kept) if mode == "masked" else 0)
    assert report.summary["flop_executed"]["bwd_dw"] >= dense, "it is multiplied all the same"


class Reads(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.fc, self.how = nn.Linear(64, 64), forward

    def forward(self, x):
        return self.how(x, self.fc.weight)


# what is done with the weight, and the elements of it that are multiplied with each token
VIEWS = {
    "whole": (lambda x, w: F.linear(x, w), lambda e: e),
    "transposed": (lambda x, w: x @ w, lambda e: e),
    "reshaped": (lambda x, w: x[:, :32] @ w.reshape(128, 32).t(), lambda e: e),
    "heads": (lambda x, w: torch.einsum("bi,hdi->bhd", x, w.view(4, 16, 64)), lambda e: e),
    "copied": (lambda x, w: F.linear(x, w.t().contiguous()), lambda e: e),
    "rows": (lambda x, w: F.linear(x, w[5:40]), lambda e: e[5:40]),
    "columns": (lambda x, w: F.linear(x[:, :30], w[:, 30:60]), lambda e: e[:, 30:60]),
    "rows of a copy": (lambda x, w: F.linear(x, w.clone()[:24]), lambda e: e[:24]),
    "two parts": (lambda x, w: F.linear(F.linear(x, w[:48]), w[48:, :48]), lambda e: torch.cat([e[:48].flatten(), e[48:, :48].flatten()])),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_a_masked_weight(name):
    torch.manual_seed(0)
    read, part = VIEWS[name]
    model = fxmask.apply(Reads(read), ratio=0.6, block=BLOCK, overrides={"fc": {"read": "weight"}})
    mask = fxmask.masks(model)["fc.weight"]
    kept = int(part(expand_mask(mask, (64, 64), BLOCK)).sum())
    report = analyze(model, torch.randn(TOKENS, 64, requires_grad=True))
    s = report.summary
    assert {s["flop"][k] for k in ("fwd", "bwd_dx", "bwd_dw")} == {2 * TOKENS * kept}
    assert s["flop_dense"]["total"] == 3 * 2 * TOKENS * part(torch.ones(64, 64)).numel()
    assert s["params_kept"] == int(mask.sum()) * 256 + 64, "of all of the weight, though an op reads a part"


COPIES = {"part": lambda w: w[7:40].clone(), "transposed": lambda w: w.t().contiguous()[7:40], "twice": lambda w: w.t().contiguous().clone()[7:40]}


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_a_part_that_was_copied_counts_as_dense(copy):
    """Nothing says which elements it has; nor a part of a copy in which they lie otherwise."""
    model = fxmask.apply(Reads(lambda x, w: F.linear(x, copy(w))), ratio=0.6, block=BLOCK, overrides={"fc": {"read": "weight"}})
    s = analyze(model, torch.randn(TOKENS, 64)).summary
    assert s["flop"]["fwd"] == s["flop_dense"]["fwd"] == 2 * TOKENS * 33 * 64


class Reading(nn.Module):
    """Two masked Linears, read and multiplied as `forward` says, and what may be mixed in."""

    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.how = nn.Linear(64, 32, bias=False), nn.Linear(32, 64, bias=False), forward
        self.low, self.up, self.scale = (nn.Parameter(torch.randn(shape)) for shape in ((4, 64), (32, 4), (32, 1)))
        self.register_buffer("shift", torch.randn(32, 64))

    def forward(self, x):
        return self.how(self, x)


def reading(forward):
    torch.manual_seed(0)
    overrides = {"a": {"read": "weight", "ratio": 0.75}, "b": {"read": "weight", "ratio": 0.25}}
    return fxmask.apply(Reading(forward), ratio=0.5, block=BLOCK, overrides=overrides)


def test_an_op_of_two_masked_weights():
    model, x = reading(lambda m, x: F.linear(x, m.b.weight @ m.a.weight)), torch.randn(TOKENS, 64)
    report = fxmask.analyze(model, x, device="h100-sxm", masked_step=True)
    rest = 4 * 64 + 32 * 4 + 32
    assert report.summary["params_kept"] == 2048 // 4 + 3 * 2048 // 4 + rest
    assert {r["module"]: r["params_kept"] for r in report.tables["modules"] if r["module"] in "ab"} == {"a": 512, "b": 1536}
    assert [r["nnzb"] for r in report.tables["nodes"] if r["phase"] == "opt"] == [2, 6], "a row each, and none of what has no gradient"
    s = fxmask.analyze(reading(lambda m, x: F.linear(x, torch.cat([m.a.weight, m.b.weight.t()]))), x, device="h100-sxm").summary
    assert s["params_kept"] == 512 + 1536 + rest


def test_a_square_product_of_masked_weights_has_no_mask():
    model = reading(lambda m, x: F.linear(x[:, :32], m.a.weight @ m.a.weight.t()))
    s = analyze(model, torch.randn(TOKENS, 64)).summary
    assert s["flop_dense"]["fwd"] == 2 * 32 * 32 * 64 + 2 * TOKENS * 32 * 32 and s["flop"]["fwd"] == 2 * 32 * 32 * 64 // 4 + 2 * TOKENS * 32 * 32


MIXED = {
    "low rank": (lambda m: m.up @ m.low, 2 * 32 * 4 * 64),
    "weight": (lambda m: m.b.weight.t(), 0),
    "buffer": (lambda m: m.shift, 0),
    "number": (lambda m: 0.1, 0),
    "mean": (lambda m: m.a.weight.mean(), 0),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_is_added_to_a_masked_weight_is_multiplied_everywhere(name):
    """A LoRA merged in the forward, and the like: W∘M + D has no block of zeros, and the gradient of D is wanted everywhere."""
    more, made = MIXED[name]
    s = analyze(reading(lambda m, x: F.linear(x, m.a.weight + more(m))), torch.randn(TOKENS, 64)).summary
    assert s["flop"] == s["flop_dense"]
    assert (s["flop"]["fwd"], s["flop"]["bwd_dw"]) == (2 * TOKENS * 2048 + made, 2 * TOKENS * 2048 + 2 * made)


SCALED = {
    "multiplied": lambda m, w: m.scale * w,
    "fake quantised": lambda m, w: torch.fake_quantize_per_tensor_affine(w, torch.tensor(0.1), torch.tensor(0), -128, 127),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_masked_weight_that_is_scaled_keeps_its_blocks(name):
    s = analyze(reading(lambda m, x: F.linear(x, SCALED[name](m, m.a.weight))), torch.randn(TOKENS, 64)).summary
    assert s["flop"]["fwd"] == 2 * TOKENS * 512 and s["flop_dense"]["fwd"] == 2 * TOKENS * 2048


# ---- weights that are computed ------------------------------------------------------------------------------------------------------------------------

COMPUTED = {
    "weight norm": nn.utils.parametrizations.weight_norm,
    "spectral norm": nn.utils.parametrizations.spectral_norm,
    "pruned": lambda layer: prune.random_unstructured(layer, "weight", 0.3),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_ragged_masks_of_computed_weights(name):
    torch.manual_seed(0)
    model = fxmask.apply(nn.Sequential(COMPUTED[name](nn.Linear(40, 40))), ratio=0.5, block=BLOCK)
    (mask,) = fxmask.masks(model).values()
    kept = int(kept_elements(mask, (40, 40), BLOCK))
    assert kept != round(int(mask.sum()) / mask.numel() * 1600), "the edges count here"
    made = 3 * 2 * 1600 + 2 * 40 if name == "spectral norm" else 0  # two vectors by a step of a power iteration, and what is between them
    assert analyze(model, torch.randn(TOKENS, 40)).summary["flop"]["fwd"] == 2 * TOKENS * kept + made


class Merged(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.a, self.b = (nn.Parameter(torch.randn(shape)) for shape in ((64, 64), (4, 64), (64, 4)))

    def forward(self, x):
        return F.linear(x, self.w + self.b @ self.a)


def test_what_makes_a_weight_has_no_dx():
    """A merged LoRA: two products for the gradients of its factors, and none for the input's, which asks for none."""
    model, x = Merged(), torch.randn(TOKENS, 64)
    s = analyze(model, x).summary["flop"]
    one = 2 * 64 * 64 * 4
    assert (s["bwd_dx"], s["bwd_dw"]) == (0, 2 * TOKENS * 64 * 64 + 2 * one) and (s["fwd"], s["bwd_dw"]) == both(model, x)
    rows = analyze(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))), x).tables["nodes"]
    assert [r["phase"] for r in rows if "weight_norm" in r["op"]] == ["fwd", "dW"]


class Latents(nn.Module):
    """Queries that are made of a Parameter alone, as of a Perceiver or a DETR."""

    def __init__(self):
        super().__init__()
        self.latents, self.q, self.k = nn.Parameter(torch.randn(16, 64)), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return F.softmax(self.q(self.latents) @ self.k(x).T, -1)


@pytest.mark.parametrize("how", ["masked", "reference", "read", "dropped", "pruned"])
def test_phases_of_layers_of_parameters_are_those_of_the_dense_model(how):
    model, x = nn.Sequential(Latents()), torch.randn(TOKENS, 64)
    plain = analyze(model, x).summary["flop"]
    if how == "dropped":
        fxmask.apply(model, fxmask.BlockDropout(block=BLOCK, p=0.5), include=["0.q"])
    elif how == "pruned":
        fxmask.apply(model, fxmask.ActivationPruning(0.5, 16))
    else:
        fxmask.apply(model, ratio=0.5, block=BLOCK, overrides={"0.q": {"read": "weight"}} if how == "read" else {})
    assert analyze(model, x, impl="reference" if how == "reference" else None).summary["flop_dense"] == plain


@pytest.mark.parametrize(("width", "ragged"), [(64, False), (40, True)])
def test_the_note_on_drawn_masks_names_ragged_edges_where_there_are_some(width, ragged):
    model = fxmask.apply(nn.Sequential(nn.Linear(width, 64)).to("meta"), ratio=0.5, block=BLOCK)
    (said,) = (n for n in analyze(model, torch.randn(TOKENS, width)).notes if "drawn at random" in n)
    assert said.endswith(", but at ragged edges with another number of elements.") == ragged


# ---- what does not run, and what a graph calls --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("meta", "options"), [(False, {}), (True, {}), (False, {"refresh": 0})])
def test_a_layer_that_never_runs_keeps_what_its_mask_keeps(meta, options):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to("meta" if meta else "cpu")
    model.forward = lambda x: model[0](x)
    fxmask.apply(model, ratio=0.75, block=BLOCK, **options)
    report = analyze(model, torch.randn(TOKENS, 64))
    assert report.summary["params_kept"] == 2 * (1024 + 64) and [r["calls"] for r in report.tables["modules"]] == [1, 1, 0]


def test_whole_numbers_keep_their_size_in_another_dtype():
    foot = analyze(nn.Embedding(8, 4), torch.zeros(3, dtype=torch.int64), dtype=torch.bfloat16).tables["footprint"][-1]
    assert (foot["input"], foot["weights"]) == (8 * 3, 2 * 32)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(2))

    def forward(self, x):
        return self.b(self.a(self.a(x)))


@pytest.mark.parametrize("trace", [torch.fx.symbolic_trace, lambda m: torch.export.export(m, (torch.randn(TOKENS, 64),))])
def test_calls_of_modules_in_graphs(trace):
    model, x = Nested(), torch.randn(TOKENS, 64)
    calls = {"(model)": 1, "a": 2, "a.0": 2, "a.1": 2, "b": 1, "b.0": 1, "b.1": 1}
    for m in (model, trace(model)):
        assert {r["module"]: r["calls"] for r in analyze(m, x).tables["modules"]} == calls


def test_calls_of_a_graph_that_was_edited_since():
    """Of a call that was written into it no trace says whose it is; what ran counts."""
    gm, x = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(64, 64))), torch.randn(TOKENS, 64)
    (call,) = (n for n in gm.graph.nodes if n.op == "call_module")
    with gm.graph.inserting_after(call):
        again = gm.graph.call_module("0", (call,))
    call.replace_all_uses_with(again, delete_user_cb=lambda n: n is not again)
    gm.recompile()
    assert {r["module"]: r["calls"] for r in analyze(gm, x).tables["modules"]} == {"(model)": 1, "0": 2}


class Tanh(nn.Linear):
    def forward(self, x):
        return torch.tanh(F.linear(x, self.weight, self.bias)) * 2


def test_a_layer_with_ops_of_its_own_does_them_densely_too():
    model, x = nn.Sequential(Tanh(64, 64)), torch.randn(TOKENS, 64)
    plain = analyze(model, x).summary["t_min_us"]
    fxmask.apply(model, ratio=0.5, block=BLOCK, overrides={"0": {"read": "weight"}})
    assert analyze(model, x).summary["t_dense_min_us"] == plain


def test_a_layer_that_is_read_and_called_has_no_ops_of_its_own():
    """linear1 of an encoder layer; the 0 that the mask of out_proj writes is the mask's, too."""
    model, x = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), torch.randn(2, TOKENS, 64)
    plain = analyze(model, x).summary["t_min_us"]
    assert analyze(fxmask.apply(model, ratio=0.5, block=BLOCK), x).summary["t_dense_min_us"] == pytest.approx(plain)


# ---- bytes --------------------------------------------------------------------------------------------------------------------------------------------


class Self(nn.Module):
    def forward(self, q, k=None):
        k = q if k is None else k
        return F.scaled_dot_product_attention(q, k, k)


def test_attention_reads_an_operand_that_is_another_once():
    q, k = (torch.randn(2, 4, 32, 16, requires_grad=True) for _ in range(2))
    size = q.numel() * 4

    def read(phase, *inputs):
        rows = analyze(Self(), *inputs).tables["traffic"]
        return sum(r["bytes_min"] for r in rows if "attention" in r["op"] and r["phase"] == phase and r["operand"] in "qkv" and r["direction"] == "read")

    assert [read(phase, q) for phase in ("fwd", "dX")] == [size] * 2 and [read(phase, q, k) for phase in ("fwd", "dX")] == [2 * size] * 2


def held(model, x):
    """Bytes of the storages that autograd still holds after a real forward, but for parameters and inputs."""
    own, alive = {t.untyped_storage()._cdata for t in (*model.parameters(), x)}, weakref.WeakSet()

    class Saved:
        def __init__(self, t):
            self.t = t
            alive.add(self)

    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.t):
        out = model(x)
    storages = {s.t.untyped_storage()._cdata: s.t.untyped_storage().nbytes() for s in alive if out is not None}
    return sum(size for key, size in storages.items() if key not in own)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("ratio", [None, 0.5])
def test_what_an_encoder_layer_holds_in_eval_with_gradients(train, ratio):
    """Its fast path reads W∘M to look at it; what that saves is free before the forward ends."""
    model, x = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0).train(train), torch.randn(2, 8, 64)
    if ratio:
        fxmask.apply(model, ratio=ratio, block=BLOCK)
    assert analyze(model, x).tables["footprint"][-1]["saved_activations"] == held(model, x)


# ---- block dropout, formulas --------------------------------------------------------------------------------------------------------------------------


def dropping(**options):
    return fxmask.apply(nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 64)), fxmask.BlockDropout(block=BLOCK, **options))


def test_a_drawn_mask_is_one_launch_where_kernels_are_counted():
    x = torch.randn(32, 64)
    drawn = {impl: [r["op"] for r in analyze(dropping(), x, impl=impl, phases=("fwd",)).tables["nodes"]] for impl in (None, "triton", "reference")}
    wanted = ["aten.randint", "fxmask.drop_mask", "fxmask.dropped_linear", "fxmask.strip_lists"]
    assert drawn[None] == drawn["triton"] == wanted and len(drawn["reference"]) > 40
    assert [r["op"] for r in analyze(dropping(impl="reference"), x, phases=("fwd",)).tables["nodes"]] == drawn["reference"]
    notes = analyze(dropping(), x).notes
    assert [n for n in notes if n.startswith("impl='auto' of block dropout is counted as its kernels")]
    assert not [n for n in analyze(dropping(impl="reference"), x).notes if "block dropout" in n]
    assert not dropping()(x).isnan().any(), "and runs as before"


def test_formulas_are_those_that_were_counted_by():
    x = torch.randn(32, 64)
    pruned = fxmask.apply(nn.Sequential(nn.Linear(64, 64)), fxmask.ActivationPruning(0.5, 16))
    said = {impl: analyze(pruned, x, impl=impl).explain("0:pruned_linear") for impl in (None, "reference")}
    assert "dW from a pruned input. E_s" in said[None] and "without the kernel, from `values` kept elements" in said["reference"]
    assert "Writing what of an input" in analyze(pruned, x).explain("0:compress")
    odd = fxmask.apply(nn.Sequential(nn.Linear(64, 63)), fxmask.ActivationPruning(0.5, 16))
    assert "without the kernel, from `values` kept elements" in analyze(odd, x).explain("0:pruned_linear")
    dropped = analyze(dropping(), x, impl="reference").explain("1:dropped_linear")
    assert "(1 - p) of the dense op's" in dropped and "The list matmul" not in dropped
    odd = fxmask.apply(nn.Sequential(nn.Linear(64, 64)), ratio=0.5, block=(24, 16))
    assert "One op by PyTorch over W∘M" in analyze(odd, x, phases=("fwd",)).explain("0:masked_linear")
    read = fxmask.apply(Reads(F.linear), ratio=0.5, block=BLOCK, overrides={"fc": {"read": "weight"}})
    assert "times the share of the view's elements" in analyze(read, x, phases=("fwd",)).explain("(model):mm")
