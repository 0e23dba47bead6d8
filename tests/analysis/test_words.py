"""The notes of an analysis say where masking helps and where it cannot: a sentence stands where the numbers, worked out another way, say so, and only there."""

import re
from dataclasses import replace

import pytest
import torch
from analysis.counted import on_meta, s12
from torch import nn

import fxmask
from fxmask.analysis import devices
from fxmask.analysis.report import short

H100 = devices.device("h100-sxm")
SENTENCES = ("Activations dominate", "Launch-bound", "L2-bound", "GFLOP that the kernels issue", "Layers with impl masked_dense", "No layer is masked")


def mlp(width=4096, hidden=16384):
    return lambda: nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


IMAGES = torch.empty(128, 3, 224, 224, device="meta")
MODELS = {
    "s12": (s12, IMAGES),
    "mlp-64": (mlp(), torch.empty(64, 4096, device="meta")),
    "mlp-8192": (mlp(), torch.empty(8192, 4096, device="meta")),
    "tiny": (mlp(64, 128), torch.empty(8, 64, device="meta")),
}
A, LAUNCH, L2, ISSUE = SENTENCES[:4]
# what is said of 80 % masked, bf16, on an H100 whose L2 bandwidth nobody has measured
EXPECTED = {
    ("s12", 16): {A, L2, ISSUE}, ("s12", 64): {A}, ("s12", 128): {A},
    ("mlp-64", 16): {L2, ISSUE}, ("mlp-64", 64): {L2, ISSUE}, ("mlp-64", 128): {L2, ISSUE},
    ("mlp-8192", 16): {A, L2, ISSUE}, ("mlp-8192", 64): {A, L2}, ("mlp-8192", 128): {A, L2},
    ("tiny", 16): {LAUNCH, L2, ISSUE},
}  # fmt: skip


def analyze(name, block=None, device=H100, ratio=0.8, **options):
    make, x = MODELS[name]
    model = on_meta(make)
    if block:
        fxmask.apply(model, ratio=ratio, block=(block, block))
    return fxmask.analyze(model, x, device=device, dtype=torch.bfloat16, **options)


_known = {}


@pytest.fixture
def case(request):
    """(the masked model's report, the dense one's), made once."""
    name, block = request.param
    if request.param not in _known:
        plain = _known.setdefault(name, analyze(name))
        _known[request.param] = analyze(name, block), plain
    return name, block, *_known[request.param]


def said(report, start):
    found = [n for n in report.notes if start in n]
    assert len(found) <= 1
    return found[0] if found else ""


def number(pattern, text):
    match = re.search(pattern, text)
    assert match, (pattern, text)
    return float(match[1])


def least(row, device=H100):
    """Seconds of a row by its own numbers: arithmetic, DRAM, one launch."""
    t = max(row["flop_executed"] / 989.4e12, row["bytes_min"] / 3.35e12, 2e-6)
    return max(t, row["bytes_req"] / device.l2_bytes_s) if device.l2_bytes_s else t


def masked_rows(report):
    return [r for r in report.tables["nodes"] if r["nnzb"] is not None and r["m"]]


def making_rows(report):
    return [r for r in report.tables["nodes"] if r["op"] in ("fxmask.block_index", "fxmask.strip_lists")]


def dense_rows(plain, report):
    """The same ops of the dense model, which has other names for them."""
    wanted = {(r["module"], r["phase"]) for r in masked_rows(report)}
    return [r for r in plain.tables["nodes"] if r["m"] and (r["module"], r["phase"]) in wanted]


CASES = [pytest.param(c, id=f"{c[0]}-{c[1]}x{c[1]}", marks=[pytest.mark.slow] * (c in {("s12", 64), ("s12", 128)})) for c in EXPECTED]
cases = pytest.mark.parametrize("case", CASES, indirect=True)


@cases
def test_what_is_said(case):
    name, block, report, _ = case
    assert {s for s in SENTENCES if said(report, s)} == EXPECTED[name, block]


@cases
def test_the_sentences_follow_from_the_numbers(case):
    name, block, report, plain = case
    rows, dense = masked_rows(report), dense_rows(plain, report)
    assert len(rows) == len(dense) and {r["dtype_in"] for r in rows} == {"bfloat16"}
    assert sum(r["flop"] for r in dense) == sum(r["flop_dense"] for r in rows)

    # what is left out
    line = said(report, "Masked layers:")
    flop, dense_flop = sum(r["flop"] for r in rows), sum(r["flop"] for r in dense)
    low, making = sum(r["bytes_min"] for r in rows), sum(r["bytes_min"] for r in making_rows(report))
    assert number(r"Masked layers: (-?[\d.]+)%", line) == pytest.approx(100 * (1 - flop / dense_flop), abs=0.051)
    # the dense matmuls of the tables, but for a transposed input's bias, which the dense layer adds apart
    before, after, bare = number(r"\(([\d.e+]+) ->", line), number(r"-> ([\d.e+]+) MB a step", line), number(r"\(-> ([\d.e+]+) MB\)", line)
    plain_bytes = sum(r["bytes_min"] for r in dense)
    assert before == pytest.approx(plain_bytes / 1e6, rel=1e-3)
    assert after == pytest.approx((low + making) / 1e6, rel=1e-3) and bare == pytest.approx(low / 1e6, rel=1e-3)
    for pattern, moved in ((r"and (-?[\d.]+)% of their compulsory", low + making), (r"a step\): (-?[\d.]+)%", low)):
        assert number(pattern, line) == pytest.approx(100 * (1 - moved / plain_bytes), abs=0.5 if name == "s12" else 0.051)

    # activations: the weights' part of the dense matmuls' bytes
    keys = {(r["node"], r["phase"], r["op"]) for r in dense}
    moved = [r for r in plain.tables["traffic"] if (r["node"], r["phase"], r["op"]) in keys]
    weights = sum(r["bytes_min"] for r in moved if r["operand"] in ("w", "dw"))
    share = weights / sum(r["bytes_min"] for r in moved)
    assert bool(said(report, A)) == (share < 0.5)
    if said(report, A):
        assert number(r"bytes ([\d.]+)% are activations", said(report, A)) == pytest.approx(100 * (1 - share), abs=0.06)

    # launches
    short = sum(least(r) == 2e-6 for r in rows)
    assert bool(said(report, LAUNCH)) == (short > len(rows) / 2)
    bound = said(report, "ops are bound by")
    assert f"their {len(rows)} ops" in bound and (f"launch {short}" in bound) == (short > 0)
    t, t_dense = sum(map(least, rows)), sum(map(least, dense))
    assert number(r"Least time ([\d.e+]+) us", bound) == pytest.approx(1e6 * t, rel=1e-3)
    assert number(r"dense ones ([\d.e+]+) us", bound) == pytest.approx(1e6 * t_dense, rel=1e-3)
    assert number(r": ([\d.]+) times as fast as dense, were both at theirs", bound) == pytest.approx(t_dense / t, abs=0.006)

    # the L2 cache
    need, known = max(r["bytes_req"] / least(r) for r in rows), max(r["bytes_req"] / least(r) for r in dense)
    assert bool(said(report, L2)) == (need > known)
    if said(report, L2):
        assert number(r"needs ([\d.]+) TB/s", said(report, L2)) == pytest.approx(need / 1e12, rel=6e-3)
        assert number(r"need ([\d.]+)\.", said(report, L2)) == pytest.approx(known / 1e12, rel=6e-3)
        slow, slow_dense = (sum(max(least(r), r["bytes_req"] / known) for r in some) for some in (rows, dense))
        assert number(r"would be ([\d.]+) times as fast", said(report, L2)) == pytest.approx(slow_dense / slow, abs=0.006)

    # tiles
    issued = sum(r["flop_executed"] for r in rows)
    assert bool(said(report, ISSUE)) == (issued > 1.5 * flop)
    if said(report, ISSUE):
        assert number(r"Of ([\d.e+-]+) GFLOP", said(report, ISSUE)) == pytest.approx(issued / 1e9, rel=1e-3)
        assert f"({block}x{block})" in said(report, ISSUE)


@cases
def test_the_whole_step(case):
    """What a mask does not touch bounds the whole: Amdahl, with the dense step's own least time, which builds no masks."""
    name, _, report, plain = case
    whole = said(report, "the whole step is")
    t, t_dense = report.summary["t_min_us"], report.summary["t_dense_min_us"]
    assert number(r"is ([\d.]+) times as fast as dense, were all at theirs\.", whole) == pytest.approx(t_dense / t, abs=0.006)
    made = 1e-6 * sum(r["t_min_us"] for r in report.tables["roofline"] if r["op"] in ("fxmask.block_index", "fxmask.strip_lists"))
    bare = t_dense / (t - 1e6 * made)
    assert ("Making the masks" in whole) == (f"{bare:.2f}" != f"{t_dense / t:.2f}")
    if "Making the masks" in whole:
        assert number(r"takes ([\d.e+]+) us", whole) == pytest.approx(1e6 * made, rel=1e-3)
        assert number(r"have: ([\d.]+) times without it\.", whole) == pytest.approx(bare, abs=0.006)
    if name != "s12":  # there the dense layers of transposed inputs add their bias in an op of its own
        assert t_dense == pytest.approx(plain.summary["t_min_us"], rel=1e-9)


def test_masks_that_every_forward_makes_are_counted():
    """Few tokens: the whole weight is read for its mask, and the sentences say it; by hand, 2 x 4096 x 16384 bf16 weights are 268.4 MB."""
    report, plain = analyze("mlp-64", 64, ratio=0.9), _known.setdefault("mlp-64", analyze("mlp-64"))
    line, whole = said(report, "Masked layers:"), said(report, "the whole step is")
    assert "without making the masks (block_index, strip_lists), which moves 269 MB. Masks are made in every forward; refresh=N makes them" in line
    assert "Making the masks (block_index, strip_lists) takes" in whole
    moved = [sum(r["bytes_min"] for r in a.tables["traffic"] if r["phase"] != "opt") / 1e6 for a in (plain, report)]
    before, after = number(r"\(([\d.e+]+) ->", line), number(r"-> ([\d.e+]+) MB a step", line)
    assert before - after == pytest.approx(moved[0] - moved[1], abs=0.2), "what the tables say that a step saves"


def small(refresh, backward="masked"):
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)), ratio=0.5, block=(32, 32), refresh=refresh, backward=backward)
    fxmask.step(model, 0)
    return model


def test_rebuilds_of_cached_masks_are_named():
    """What is left out of the tables is said, with as many bytes as a forward that makes the masks would move."""
    x = torch.empty(8, 64)
    each = sum(r["bytes_min"] for r in making_rows(fxmask.analyze(small(1), x, device=H100))) / 1e6
    report = fxmask.analyze(small(10), x, device=H100)
    assert not making_rows(report)
    line = said(report, "rebuilt every 10 steps")
    assert line.startswith("2 masks are cached and rebuilt every 10 steps (refresh=10), which no table and no sentence here counts")
    assert number(r"a rebuild moves ([\d.]+) MB", line) == pytest.approx(each, rel=1e-3)
    assert number(r", ([\d.]+) MB a step", line) == pytest.approx(each / 10, rel=1e-3)
    assert "compulsory" in said(report, "Masked layers:") and "making" not in said(report, "Masked layers:")
    for model, options in ((small(0), {}), (small(1), {}), (small(10), {"phases": ("fwd",)})):
        assert not said(fxmask.analyze(model, x, device=H100, **options), "rebuilt every")
    plain = said(fxmask.analyze(small(10), x, device=H100, impl="reference"), "rebuilt every 10 steps")
    assert number(r"a rebuild moves ([\d.]+) MB", plain) < each, "no lists"


def test_a_cached_mask_of_no_weight_element_has_words():
    layer = nn.Linear(64, 64)
    layer.weight, layer.bias = nn.Parameter(torch.empty(0, 64)), nn.Parameter(torch.empty(0))
    model = fxmask.apply(nn.Sequential(layer), refresh=10, include=["0"])
    line = said(fxmask.analyze(model, torch.empty(8, 64), device=H100), "rebuilt every 10 steps")
    assert number(r"a rebuild moves ([\d.e-]+) MB", line) < 1e-4, "lists alone"


def test_dense_models_have_their_own_words():
    for name in ("s12", "tiny"):
        report = _known.setdefault(name, analyze(name))
        assert {s for s in SENTENCES if said(report, s)} == {"No layer is masked"}
        assert report.notes[0].startswith("A FLOP ratio is not a speed-up; t_min is a lower bound")
        assert not said(report, "no values") and not said(report, "impl='auto'")


def test_masked_dense_says_so():
    report = analyze("mlp-64", 64, impl="reference")
    assert said(report, "Layers with impl masked_dense") and not said(report, ISSUE) and not said(report, "impl='auto'")
    assert "-" in said(report, "Masked layers:").partition("and ")[2][:3], "it moves more bytes than a dense layer"
    assert said(analyze("mlp-64", 64), "impl='auto'")


@pytest.mark.parametrize("bandwidth", [1e12, 1.07e12, 40e12])
def test_a_measured_l2(bandwidth):
    """A bandwidth in the table is a roof of the least times, so that no op needs more for its own."""
    report = analyze("mlp-8192", 64, replace(H100, l2_bytes_s=bandwidth))
    roofs = [r for r in report.tables["roofline"] if r["speedup_bound"] is not None]
    assert not said(report, L2)
    if bandwidth < 2e12:  # the roof holds every op down to it, dense and masked
        assert {r["bound"] for r in roofs} == {"l2"} and f"{roofs[0]['bound']} 5" in said(report, "ops are bound by")
    else:
        assert "l2" not in {r["bound"] for r in roofs}
    rows = masked_rows(report)
    assert sum(r["t_min_us"] for r in roofs) == pytest.approx(1e6 * sum(least(r, replace(H100, l2_bytes_s=bandwidth)) for r in rows))


CPU = devices.Device("cpu (made up)", {"fp32": 1e11}, 2e10, 1 << 25, None, 1e-6, (256, 256), "made up", 64, 64, is_cpu=True)


def test_a_cpu_bounds_no_speed_up():
    """What runs there is not what is counted: least times of GPU kernels were beaten, so that none is called a bound."""
    model = fxmask.apply(nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)), ratio=0.9, block=(16, 16), refresh=0)
    x = torch.empty(512, 1024)
    report, gpu = (fxmask.analyze(model, x, device=d, optimizer=None) for d in (CPU, H100))
    text = "\n".join(report.notes)
    for words in ("times as fast", "L2", "tensor cores", "impl='auto'", "CUDA", "bound by"):
        assert words not in text and (words in "\n".join(gpu.notes)), words
    assert said(report, "No bound of the speed-up is stated for a CPU: what masks leave out runs there by strips of PyTorch's own matmuls")
    assert "t_min is a lower bound where nothing is masked" in report.notes[0]
    assert said(report, "Masked layers:") == said(gpu, "Masked layers:") and not said(gpu, "No bound")
    for r, g in zip(report.tables["roofline"], gpu.tables["roofline"], strict=True):
        assert r["speedup_bound"] is None and r["l2_bw_to_tie"] is None and (g["speedup_bound"] is None) == (r["t_dense_min_us"] is None)
    plain = fxmask.analyze(model, x, device=CPU, optimizer=None, impl="reference")
    assert said(plain, "Layers with impl masked_dense") and said(plain, "No bound of the speed-up is stated for a CPU, whose caches")
    assert not said(plain, "at most")
    dense = fxmask.analyze(nn.Linear(64, 64), torch.empty(4, 64), device=CPU)
    assert not said(dense, "No bound") and "t_min is a lower bound;" in dense.notes[0]
    assert devices.cpu().is_cpu and not any(d.is_cpu for d in devices.DEVICES.values())


@pytest.mark.parametrize(("config", "extra"), [(fxmask.ActivationPruning(0.5, 16), "compress"), (fxmask.BlockDropout(0.5, block=(16, 16)), "drop_mask")])
def test_other_systems(config, extra):
    """Their extra work is named by its ops, and no refresh makes it rarer; a CPU bounds no speed-up of theirs either."""
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64)), config)
    gpu, cpu = (fxmask.analyze(model, torch.empty(64, 64), device=d) for d in (H100, CPU))
    line = said(gpu, "Masked layers:")
    assert "without the extra work of masks (" in line and extra in line and "refresh" not in line
    text = "\n".join(cpu.notes)
    assert "No bound of the speed-up is stated for a CPU" in text and "at most" not in text and "CUDA" not in text


def test_a_schedule_on_its_way():
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 64)), ratio=0.8, block=(16, 16), schedule=fxmask.Schedule("linear", steps=10))
    fxmask.step(model, 5)
    report = fxmask.analyze(model, torch.empty(4, 64), device=H100)
    assert said(report, "a ratio of 0.4") and "at its end it is 0.8" in said(report, "Masks are as they are now")
    fxmask.step(model, 10)
    assert not said(fxmask.analyze(model, torch.empty(4, 64), device=H100), "Masks are as they are now")


@pytest.mark.parametrize("config", [fxmask.WeightMask(0.5), fxmask.ActivationPruning(0.5, 16), fxmask.BlockDropout(0.5, (16, 16))])
def test_only_a_weight_mask_is_said_to_shrink_no_activation(config):
    """What the other two leave out are activations."""
    model = fxmask.apply(mlp(64, 128)(), config, include="*")
    report = fxmask.analyze(model, torch.empty(4096, 64), device=H100)
    assert bool(said(report, "Activations dominate")) == isinstance(config, fxmask.WeightMask)


def test_least_times_of_a_step_are_those_of_its_ops():
    """As the table roofline has them: of dense ops where a mask leaves something out, and of all others, which have no dense ones."""
    model = fxmask.apply(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 512)), ratio=0.5, block=(16, 16))
    report = fxmask.analyze(model, torch.randn(4096, 512), device="h100-sxm", optimizer=None)
    nodes, rows = report.tables["nodes"], [r for r in report.tables["roofline"] if r["t_min_us"]]
    masked, others = ([r for r in rows if (r["t_dense_min_us"] is None) == plain] for plain in (False, True))
    t, t_dense, rest = sum(r["t_min_us"] for r in masked), sum(r["t_dense_min_us"] for r in masked), sum(r["t_min_us"] for r in others)
    assert len(masked) == sum(r["nnzb"] is not None and bool(r["m"]) for r in nodes) == 5 and others
    assert all((r["l2_bw_to_tie"] is None) == (r["speedup_bound"] is None) == (r in others) for r in rows)
    extra = sum(r["t_min_us"] for r in others if r["op"] in ("fxmask.block_index", "fxmask.strip_lists"))
    found = next(n for n in report.notes if "of the dense step's least time" in n)
    assert f"take {(rest - extra) / (t_dense + rest - extra):.0%} of the dense step's least time" in found
    assert f"the whole step is {(t_dense + rest - extra) / (t + rest):.2f} times as fast" in found


def test_numbers_are_printed_by_their_unit():
    assert [short(c, v) for c, v in (("flop", 1_500_000), ("bytes_min", 2_000), ("mac", 999), ("m", 4096), ("flop", True))] == [
        "1.50 M", "2.00 kB", "999", 4096, True
    ]
