"""FLOP of masked models: PyTorch's count of the dense model less what the masks leave out, by hand; and products of other kinds."""

import pytest
import torch
import torch.nn.functional as F
from analysis.counted import MODELS, SMALL, Apply, Attention, both, kept_of, left_out, masked, mlp, on_meta, sdpa, totals
from analysis.counted import analyze as count
from torch import nn
from torch.utils.flop_counter import flop_registry

import fxmask
from fxmask.passes.counting import shapes

CASES = [("resmlp_s12", (16, 16), 0.5), ("gpt", (32, 16), 0.7), pytest.param("mixer_s_16", (64, 64), 0.8, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("name", "block", "ratio"), CASES)
def test_masked(name, block, ratio):
    """Against PyTorch's count of the dense model on meta tensors, less what the masks leave out by hand."""
    make, x = MODELS[name]
    torch.manual_seed(0)
    model = fxmask.apply(make(), ratio=ratio, block=block)
    plain = on_meta(make)
    forward, backward = both(plain, x)
    less = left_out(model, plain, (x,), block, "masked")
    report = count(model, x)
    assert totals(report, "flop_dense")[:2] == (forward, backward)
    assert totals(report)[:2] == (forward - less["fwd"], backward - less["dX"] - less["dW"])
    sizes = kept_of(model, block)
    assert report.summary["params_kept"] == report.summary["params"] - sum(size - kept for kept, size in sizes.values())
    if name == "resmlp_s12":  # ragged: 196 = 12 x 16 + 4, 1000 = 62 x 16 + 8
        assert any(kept != round((1 - ratio) * size) for kept, size in sizes.values()), "the kept count is no other than the target here"


@pytest.mark.slow
def test_masked_vit_b_16():
    make, x = MODELS["vit_b_16"]
    model, plain = fxmask.apply(make(), ratio=0.5, block=(64, 64)), on_meta(make)
    forward, backward = both(plain, x)
    less = left_out(model, plain, (x,), (64, 64), "masked")
    assert totals(count(model, x))[:2] == (forward - less["fwd"], backward - less["dX"] - less["dW"])


def hand_attention(model, x):
    """FLOP of the attention in a small model on a CPU, less what PyTorch counts: nothing before 2.15, then also its scores in the backward."""
    found = [m for m in model.modules() if isinstance(m, Attention)]
    tokens = x.shape[1] if x.dim() == 2 else (x.shape[2] // 16) * (x.shape[3] // 16) + 1
    one = [sdpa(x.shape[0], m.heads, tokens, tokens, m.proj.out_features // m.heads) for m in found]
    forward, backward = sum(f for f, _ in one), sum(b for _, b in one)
    counted = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu in flop_registry
    return (0, -forward // 2) if counted else (forward, backward)


MODES = ("masked", "ste", "unmasked", "rigl", "rigl-dense")


@pytest.mark.parametrize(("name", "mode"), [*(("gpt", mode) for mode in MODES), ("vit", "masked"), ("vit", "unmasked"), ("mixer", "masked"), ("mixer", "ste")])
def test_masked_small(name, mode):
    """Ragged shapes, each backward mode: by hand, and as PyTorch counts the masked model's real run on a CPU."""
    make, x = SMALL[name]
    torch.manual_seed(0)
    mode, now = mode.partition("-")[::2]
    config = fxmask.WeightMask(ratio=0.6, block=(16, 32), backward=mode, dense_every=1 if now else 3)
    model = fxmask.apply(make(), config)
    if mode == "rigl":
        fxmask.step(model, 0)
    plain = on_meta(make)
    forward, backward = both(plain, x.to("meta"))
    less = left_out(model, plain, (x.to("meta"),), (16, 32), "ste" if now else mode)
    report = count(model, x)
    assert totals(report)[:2] == (forward - less["fwd"], backward - less["dX"] - less["dW"])
    s = report.summary
    assert s["flop_dense"]["bwd_dx"] - s["flop"]["bwd_dx"] == less["dX"] and s["flop_dense"]["bwd_dw"] - s["flop"]["bwd_dw"] == less["dW"]
    real = both(model, x)
    attention = hand_attention(model, x)
    assert totals(report)[:2] == (real[0] + attention[0], real[1] + attention[1])
    assert report.summary["flop_executed"]["total"] >= report.summary["flop"]["total"]


@pytest.mark.parametrize("block", [(16, 16), (64, 32), (3, 5), (40, 30)])
@pytest.mark.parametrize("impl", [None, "triton", "reference"])
def test_the_implementation_changes_no_useful_flop(block, impl):
    torch.manual_seed(1)
    with torch.no_grad():
        model = fxmask.apply(mlp(70, 90, 50), ratio=0.4, block=block, include="*")
    x = torch.randn(33, 70)
    kept = {n: k for n, (k, _) in kept_of(model, block).items()}
    report = count(model, x, impl=impl)
    expected = 2 * 33 * sum(kept.values())
    s = report.summary["flop"]
    assert (s["fwd"], s["bwd_dx"], s["bwd_dw"]) == (expected, 2 * 33 * kept["2.weight"], expected)
    executed = report.summary["flop_executed"]
    assert all(executed[k] >= s[k] for k in s)
    if impl == "reference":
        assert executed["fwd"] >= 2 * 33 * (70 * 90 + 90 * 50)


def test_a_mask_that_keeps_everything_is_dense():
    model = fxmask.apply(mlp(64, 96, 64), ratio=0.0, block=(16, 16))
    report = count(model, torch.randn(8, 64))
    assert report.summary["flop"] == report.summary["flop_dense"] and report.summary["params_kept"] == report.summary["params"]


@pytest.mark.parametrize("options", [{}, {"refresh": 2}, {"refresh": 0}], ids=["built", "cached", "once"])
def test_attention_that_reads_its_weight(options):
    """MultiheadAttention's out_proj gets W∘M and multiplies densely: kept elements are useful, the rest is issued."""
    torch.manual_seed(0)
    model = fxmask.apply(nn.MultiheadAttention(64, 4, batch_first=True), ratio=0.5, block=(16, 16), **options)
    if options.get("refresh"):
        fxmask.step(model, 0)

    class Self(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = model

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    kept, size = kept_of(model, (16, 16))["out_proj.weight"]
    assert size == 64 * 64 and kept == size // 2
    report = count(Self(), torch.randn(2, 10, 64))
    s, dense = report.summary["flop"], report.summary["flop_dense"]
    assert dense["fwd"] - s["fwd"] == 2 * 20 * (size - kept) and dense["bwd_dx"] - s["bwd_dx"] == 2 * 20 * (size - kept)
    assert s["fwd"] == 2 * 20 * (64 * 192 + kept) + sdpa(2, 4, 10, 10, 16)[0]


@pytest.mark.parametrize("meta", [False, True])
def test_weights_that_are_computed(meta):
    """A weight-normed layer has no weight to read a mask off while it runs: that is made before; without values its places are drawn, as a note says."""
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)), nn.GELU(), nn.Linear(64, 64)).to("meta" if meta else "cpu")
    report = count(fxmask.apply(model, ratio=0.5, block=(16, 16)), torch.randn(8, 64))
    assert report.summary["flop"]["fwd"] == 2 * 8 * 64 * 64 and report.summary["flop_dense"]["fwd"] == 2 * 2 * 8 * 64 * 64
    said = [n for n in report.notes if "drawn at random" in n]
    assert [n.startswith("2 weights have no values") for n in said] == [True] * meta


class Sorts(nn.Module):
    """Ops without products, which PyTorch does not tag as pointwise, as position codes and routers of language models have them."""

    def forward(self, x):
        places = torch.bucketize(x, torch.linspace(-1, 1, 5)) + torch.arange(64) // 16
        found = torch.zeros_like(x).scatter_reduce(1, places, x, "amax")
        turned = torch.view_as_real(torch.polar(found.abs(), x)).sum(-1)
        best = torch.cummax(turned, 1).values + torch.isin(places, torch.arange(3))
        return F.interpolate(best[None, None], size=(8, 20), mode="bilinear", antialias=True)


def test_ops_without_products_are_known():
    report = count(Sorts(), torch.randn(20, 64, requires_grad=True), strict=True)
    assert report.summary["flop"]["total"] == 0 and min(report.summary["coverage"].values()) == 100 and report.summary["bytes_min"]["total"] > 20 * 64 * 4


class Experts(nn.Module):
    """A mixture of experts: sorted tokens, each meets the matrix of its group."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 64, 96)), nn.Parameter(torch.randn(4, 96, 64))

    def forward(self, x, offs):
        return F.grouped_mm(F.grouped_mm(x, self.up, offs=offs).relu(), self.down, offs=offs)


@pytest.mark.parametrize("grad", [True, False])
def test_grouped_products(grad):
    """Each token meets one expert, however they are shared out; the shapes on fake tensors are those of the kernel."""
    torch.manual_seed(0)
    model, x, offs = Experts(), torch.randn(20, 64, requires_grad=grad), torch.tensor([3, 3, 11, 20], dtype=torch.int32)
    one = 2 * 20 * 64 * 96
    report = count(model, x, offs, strict=True)
    s = report.summary["flop"]
    assert (s["fwd"], s["bwd_dx"], s["bwd_dw"]) == (2 * one, (1 + grad) * one, 2 * one)
    y = model(x, offs)
    y.square().sum().backward()
    assert y.shape == (20, 64) and model.up.grad.shape == (4, 64, 96)
    for a, b in ((x, model.up), (x.t(), torch.randn(20, 96)), (torch.randn(4, 5, 64), model.up)):
        o = offs if a.dim() == 2 else None
        expected = F.grouped_mm(a, b, offs=o)
        found = shapes.grouped_mm(a, b, o)
        assert shapes.grouped_mm(a, b, o, out_dtype=torch.bfloat16).dtype == torch.bfloat16
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


def test_grouped_products_along_the_outputs():
    """(G, M, K) by (K, N), of whose columns each belongs to one group."""
    offs = torch.tensor([3, 3, 11, 20], dtype=torch.int32)
    report = count(Apply(lambda a, b: F.grouped_mm(a, b, offs=offs)), torch.randn(4, 5, 64), torch.randn(64, 20), phases=("fwd",))
    assert report.summary["flop"]["fwd"] == 2 * 5 * 64 * 20


def test_meta_weights_have_the_right_number_of_blocks():
    real = fxmask.apply(mlp(64, 96, 64), ratio=0.7, block=(16, 16))
    meta = fxmask.apply(on_meta(lambda: mlp(64, 96, 64)), ratio=0.7, block=(16, 16))
    x = torch.randn(8, 64)
    assert count(meta, x).summary["flop"] == count(real, x).summary["flop"]
    assert any("2 weights have no values" in n for n in count(meta, x).notes) and not any("no values" in n for n in count(real, x).notes)


@pytest.mark.parametrize("refresh", [0, 4])
def test_a_cached_mask_that_went_to_the_meta_device(refresh):
    """It has no values there: as many blocks as it keeps, wherever they lie."""
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 96)), ratio=0.75, refresh=refresh).to("meta")
    report = count(model, torch.empty(8, 64, device="meta"))
    assert report.summary["flop"]["fwd"] == 2 * 8 * 64 * 96 // 4 and report.summary["params_kept"] == 64 * 96 // 4 + 96
    assert model[0]._fxmask_mask.is_meta


@pytest.mark.parametrize("mode", ["masked", "ste", "unmasked"])
def test_blocks_and_density_of_a_row_agree(mode):
    """A gradient that a mode makes everywhere is one of all blocks, and not of as many as the mask keeps."""
    model, x = masked("vit", backward=mode)
    kept = {name.removesuffix(".weight"): (int(m.sum()), m.numel()) for name, m in fxmask.masks(model).items()}
    elements = {name.removesuffix(".weight"): (k, n) for name, (k, n) in kept_of(model, (16, 32)).items()}
    rows = [r for r in count(model, x).tables["nodes"] if r["nnzb"] is not None and r["m"]]
    assert {r["phase"] for r in rows} == {"fwd", "dX", "dW"}
    for r in rows:
        whole = (r["phase"], mode) in (("dX", "unmasked"), ("dW", "unmasked"), ("dW", "ste"))
        (blocks, all_blocks), (k, n) = kept[r["module"]], elements[r["module"]]
        assert (r["nnzb"], r["density"]) == ((all_blocks, 1.0) if whole else (blocks, k / n))
