"""The tables of `fxmask.analyze`: rows add up, levels are ordered, what is held is what a real run holds."""

import json
import math
import re

import pytest
import torch
from analysis.counted import SMALL, Attention, analyze, masked
from torch import nn

import fxmask
from fxmask import BlockDropout, WeightMask
from fxmask.analysis import devices
from fxmask.kernels.grid import kept_elements

PHASES = {"fwd": "fwd", "recompute": "recompute", "dX": "bwd_dx", "dW": "bwd_dw", "db": "bwd_db", "opt": "opt"}


CASES = {
    **{name: dict(name=name) for name in SMALL},
    "reference": dict(name="mixer", impl="reference"),
    "ste": dict(name="mixer", backward="ste"),
    "odd blocks": dict(name="vit", block=(7, 9)),
    "bf16": dict(name="gpt", dtype=torch.bfloat16),
    "elementwise": dict(name="vit", count_elementwise=True),
    "cpu lines": dict(name="mixer", device=devices.Device("own", {"fp32": 1e12}, 1e11, 1 << 16, 1e12, 1e-6, (64, 64), "made up", 64, 64)),
}


@pytest.fixture(scope="module", params=CASES)
def report(request):
    options = dict(CASES[request.param])
    how = {k: options.pop(k) for k in ("impl", "dtype", "count_elementwise", "device") if k in options}
    model, x = masked(**options)
    return analyze(model, x, **how)


def test_nodes_add_up_to_the_summary(report):
    nodes = report.tables["nodes"]
    for column in ("flop", "flop_dense", "flop_executed", "mac", "bytes_min", "bytes_req"):
        summary = report.summary[column]
        for phase, name in PHASES.items():
            assert sum(r[column] for r in nodes if r["phase"] == phase) == summary.get(name, 0), (column, phase)
        assert sum(r[column] for r in nodes) == summary["total"] == sum(v for k, v in summary.items() if k != "total")
        assert all(type(r[column]) is int and r[column] >= 0 for r in nodes)
    assert report.summary["weights_loaded"] == sum(r["weights_loaded"] for r in nodes)
    assert {r["phase"] for r in nodes} >= {"fwd", "dX", "dW", "db", "opt"}
    assert all(r["calls"] == 1 for r in nodes)


def group(rows, *columns):
    found = {}
    for r in rows:
        key = tuple(r[c] for c in ("node", "module", "op", "phase"))
        found[key] = [a + r[c] for a, c in zip(found.get(key, [0] * len(columns)), columns, strict=True)]
    return found


def test_traffic_adds_up_to_nodes(report):
    levels = ("bytes_min", "bytes_req")
    nodes, moved = group(report.tables["nodes"], *levels), group(report.tables["traffic"], *levels)
    assert {k: v for k, v in nodes.items() if any(v)} == moved
    for level in ("bytes_sector", "bytes_line", "bytes_dram_est"):
        assert sum(r[level] for r in report.tables["traffic"]) == report.summary[level]
    assert len(report.tables["roofline"]) == len(report.tables["nodes"])
    assert sum(r["flop"] for r in report.tables["roofline"]) == report.summary["flop"]["total"]


def test_levels_are_ordered(report):
    for r in report.tables["traffic"]:
        assert 0 <= r["bytes_min"] <= r["bytes_dram_est"] <= r["bytes_sector"], r
        assert r["bytes_min"] <= r["bytes_req"] <= r["bytes_sector"] <= r["bytes_line"], r
        assert r["direction"] in ("read", "write") and all(type(v) is int for k, v in r.items() if k.startswith("bytes"))
        assert r["reread"] >= 1 and 0 < r["sector_eff"] <= 1


def test_roofs(report):
    for r in report.tables["roofline"]:
        assert r["t_min_us"] > 0 and r["bound"] in ("compute", "dram", "l2", "launch")
        assert (r["speedup_bound"] is None) == (r["t_dense_min_us"] is None)
        if r["speedup_bound"] is not None:
            assert r["speedup_bound"] == pytest.approx(r["t_dense_min_us"] / r["t_min_us"])
    assert sum(r["t_min_us"] for r in report.tables["roofline"]) == pytest.approx(report.summary["t_min_us"])


def test_a_masked_layer_s_row_by_hand():
    """128 x 64 in 16-bit floats, half of its 32 blocks kept, 256 tokens; the second layer has half of that."""
    torch.manual_seed(0)  # of some masks a column of blocks has none, and no x is loaded for it
    made = devices.Device("own", {"fp32": 1e12, "bf16": 4e12}, 1e11, 1 << 30, 5e11, 1e-6, (128, 128), "made up")
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 32)), block=(16, 16)).bfloat16()
    report = fxmask.analyze(model, torch.randn(256, 64, dtype=torch.bfloat16), device=made, impl="triton")
    node, least = (next(r for r in report.tables[t] if r["op"] == "fxmask.masked_linear" and r["module"] == "0") for t in ("nodes", "roofline"))
    assert (node["weights_loaded"], node["param_bytes"], node["flop"]) == (16 * 256, 16 * 256 * 2, 2 * 256 * 16 * 256)
    assert (node["m"], node["n"], node["k"]) == (256, 128, 64)
    own = [r for r in report.tables["traffic"] if all(r[c] == node[c] for c in ("node", "op", "phase"))]
    assert node["index_bytes"] == sum(r["bytes_min"] for r in own if r["direction"] == "read" and r["operand"] not in ("x", "w", "bias")) > 0
    assert [node[c] for c in ("dtype_in", "dtype_acc", "dtype_out")] == ["bfloat16", "float32", "bfloat16"]
    assert least["ai_dram"] == node["flop"] / node["bytes_min"] and least["ai_l2"] == node["flop"] / node["bytes_req"]
    assert (least["ridge_dram"], least["ridge_l2"], least["bound"]) == (40, 8, "dram")
    dense = 2 * (256 * 64 + 128 * 64 + 128 + 256 * 128) / 1e5  # us, by DRAM
    assert least["t_dense_min_us"] == pytest.approx(dense) and least["l2_bw_to_tie"] == pytest.approx(node["bytes_req"] / dense / 1e6)
    moved = sum(r["bytes_dram_est"] for r in own)
    assert least["dram_est_us"] == pytest.approx(moved / 1e5) and moved >= node["bytes_min"]
    root, first, second = report.tables["modules"]
    assert first["density"] == (16 * 256 + 128) / (32 * 256 + 128)
    assert first["flop_pct"] == pytest.approx(100 * 4 / 7) and second["flop_pct"] == pytest.approx(100 * 3 / 7)  # the first has no dX
    assert first["bytes_min_pct"] == pytest.approx(100 * first["bytes_min"] / root["bytes_min"]) and root["bytes_min_pct"] == 100


def test_modules_add_up(report):
    rows = report.tables["modules"]
    root, by_name = rows[0], {r["module"]: r for r in rows}
    assert root["module"] == "(model)" and root["depth"] == 0 and root["calls"] == 1 and root["flop_pct"] == 100
    for c in ("flop", "flop_dense", "bytes_min"):
        assert root[c] == report.summary[c]["total"]
    assert root["params"] == report.summary["params"] and root["params_kept"] == report.summary["params_kept"]
    own = group([r | {"node": "", "op": "", "phase": ""} for r in report.tables["nodes"]], "flop", "bytes_min")
    for name, row in by_name.items():
        inside = [v for (_, m, _, _), v in own.items() if name == "(model)" or m == name or m.startswith(f"{name}.")]
        assert [row["flop"], row["bytes_min"]] == [sum(v[i] for v in inside) for i in (0, 1)], name


def test_explain_prints_numbers_of_the_tables(report):
    nodes, moved = report.tables["nodes"], report.tables["traffic"]
    for node in dict.fromkeys(r["node"] for r in nodes):
        text = report.explain(node)
        for r in (r for r in nodes if r["node"] == node):
            assert r["op"] in text and f"compulsory {r['bytes_min']}, requested {r['bytes_req']}" in text
            assert not r["m"] or str(r["flop"]) in text
            if r["nnzb"] is not None and r["m"]:
                assert f"nnzb = {r['nnzb']}" in text and f"sparsity {r['sparsity']:.4f}" in text
        for r in (r for r in moved if r["node"] == node):
            assert f"{r['operand']:9} compulsory {r['bytes_min']} B, requested {r['bytes_req']} B" in text
            assert f"DRAM estimate {r['bytes_dram_est']} B" in text
        assert "formulas" in text and ("FLOP" in text or "B" in text)
        products = {int(flop): factors for factors, flop in re.findall(r"((?:\d+ \* )+\d+) = (\d+) FLOP", text)}
        assert all(math.prod(map(int, factors.split(" * "))) == flop for flop, factors in products.items())
        assert all(r["flop"] in products or "attention" in r["op"] for r in nodes if r["node"] == node and r["m"]), node
        roofs = re.findall(r"  roof     \w+ +(\S+) us = (\d+) (?:(?:B|FLOP) / (\S+) (?:B|FLOP)/s|x (\S+) s)", text)
        assert len(roofs) == text.count("  roof ")
        for t, amount, by, each in roofs:
            assert float(t) == pytest.approx(1e6 * (int(amount) / float(by) if by else int(amount) * float(each)), rel=1e-3)
    for row in report.tables["modules"]:
        assert report.explain(row["module"])


def test_dict_is_plain(report):
    plain = json.loads(json.dumps(report.to_dict()))  # no default=: every value is plain data
    assert plain == json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert plain["schema_version"] == plain["meta"]["schema_version"] == "fxmask.analysis/1"
    assert set(plain["tables"]) >= {"summary", "modules", "nodes", "traffic", "roofline", "footprint", "coverage"}
    meta = plain["meta"]
    for key in ("utc", "model", "inputs", "optimizer", "mask_hash", "analysed_device", "peaks", "peaks_source", "dram_bytes_s"):
        assert key in meta, key
    assert meta["torch"] == torch.__version__ and meta["fxmask"]
    summary = {r["quantity"]: r for r in plain["tables"]["summary"]}
    assert summary["flop"]["total"] == report.summary["flop"]["total"] and summary["params"]["total"] == report.summary["params"]


# ---- what is held ----------------------------------------------------------------------------------------------------------------------------------------


DROPPED, CACHED = BlockDropout(0.5, (8, 16)), WeightMask(0.5, (8, 8), refresh=0)


def held_by_autograd(model, *inputs):
    """Bytes of the storages that a real forward saves for its backward, but for parameters, buffers and inputs."""
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers(), *inputs)}
    found = {}

    def pack(t):
        found[t.untyped_storage()._cdata] = t  # held, so that its address stays its own
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(*inputs)
    del out
    return sum(t.untyped_storage().nbytes() for key, t in found.items() if key not in own)


class Norms(nn.Module):
    """BatchNorm, dropout, pooling, a convolution: what saves more than its inputs."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.1), nn.Flatten(), nn.Linear(8 * 49, 40))

    def forward(self, x):
        return self.body(x).log_softmax(-1)


HELD = {
    "norms": (Norms, torch.randn(2, 3, 16, 16)),
    "mixer": SMALL["mixer"],
    "packed": (lambda: Attention(48, 3, False), torch.randn(2, 9, 48)),  # q, k and v are views of one storage
}


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("ratio", [None, 0.6])
def test_saved_activations_are_those_of_a_real_run(name, ratio):
    make, x = HELD[name]
    model = make()
    if ratio is not None:
        fxmask.apply(model, ratio=ratio, block=(16, 16), impl="reference")
    foot = analyze(model, x).tables["footprint"][-1]
    assert foot["module"] == "(total)"
    # a mask that each forward builds is saved, too; the optimiser's part is of another moment
    assert foot["saved_activations"] == held_by_autograd(model, x)


@pytest.mark.parametrize("by_x", [False, True])
@pytest.mark.parametrize("configs", [(DROPPED,), (WeightMask(0.5, (8, 8)), DROPPED), (CACHED, DROPPED)], ids=("alone", "mask", "cached"))
def test_what_a_forward_draws_is_held_too(configs, by_x):
    """The masks of block dropout, whole elements beside a weight mask; a cached weight mask is metadata, and counts there alone."""
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)), *configs)
    if len(configs) > 1:
        fxmask.step(model, 0)
    x = torch.randn(32, 64, requires_grad=by_x)
    foot = analyze(model, x).tables["footprint"][-1]
    assert foot["saved_activations"] + foot["metadata"] == held_by_autograd(model, x)
    assert foot["metadata"] == (192 if configs[0] == CACHED else 0)


def test_footprint_adds_up():
    model, x = masked("gpt", refresh=2, impl="auto")
    fxmask.step(model, 0)
    foot = analyze(model, x).tables["footprint"]
    total = foot[-1]
    columns = [c for c in total if c not in ("module", "total", "naive_mask")]
    assert total["module"] == "(total)" and [r["module"] for r in foot].count("(total)") == 1
    for c in (*columns, "total", "naive_mask"):
        assert total[c] == sum(r[c] for r in foot[:-1])
    assert all(r["total"] == sum(r[c] for c in columns) for r in foot)
    params = sum(p.numel() for p in model.parameters())  # the head's weight is the table's: once
    assert total["weights"] == total["gradients"] == 4 * params and total["optimizer_state"] == 8 * params
    assert total["input"] == 8 * x.numel()
    sizes = {n: model.get_parameter(n).numel() for n in fxmask.masks(model)}
    assert total["metadata"] == sum(m.numel() for m in fxmask.masks(model).values())
    assert total["naive_mask"] == 5 * sum(sizes.values())


def test_a_shared_weight_is_held_once_and_multiplied_every_time():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(self.a(x)))

    model = fxmask.apply(M(), ratio=0.5, block=(16, 16))
    report = analyze(model, torch.randn(4, 32))
    s = report.summary
    assert s["params"] == 32 * 32 and s["params_kept"] == 32 * 32 // 2 and s["flop"]["fwd"] == 3 * 2 * 4 * 512
    foot = report.tables["footprint"]
    assert foot[-1]["weights"] == 4 * 32 * 32 and foot[-1]["optimizer_state"] == 8 * 32 * 32
    assert [r["node"] for r in report.tables["nodes"] if r["phase"] == "opt"] == ["a.weight"]


# ---- options ---------------------------------------------------------------------------------------------------------------------------------------------

# tensors of a parameter's size that a step moves: parameter and gradient read, parameter written, state read and written
STEPS = {"adamw": 7, "adam": 7, "sgd": 3, "sgd_momentum": 5, "adagrad": 5, "rmsprop": 5, "lion": 5}


@pytest.mark.parametrize("name", STEPS)
def test_optimiser_bytes(name):
    model, x = masked("mixer")
    report = analyze(model, x, optimizer=name)
    params = sum(p.numel() for p in model.parameters())
    assert report.summary["bytes_min"]["opt"] == report.summary["bytes_req"]["opt"] == STEPS[name] * 4 * params
    assert report.tables["footprint"][-1]["optimizer_state"] == (STEPS[name] - 3) // 2 * 4 * params
    assert report.summary["optimizer"] == name and len([r for r in report.tables["nodes"] if r["phase"] == "opt"]) == len(list(model.parameters()))


def test_optimiser_instances():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False)), torch.randn(2, 8)
    made = {
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9): 5 * 136,
        torch.optim.SGD(model.parameters(), 0.1): 3 * 136,
        torch.optim.Adam(model.parameters(), amsgrad=True): 9 * 136,
        torch.optim.AdamW(model[1].parameters()): 7 * 64,  # what it was not given, it does not move
    }
    for optimizer, numbers in made.items():
        report = analyze(model, x, optimizer=optimizer)
        assert report.summary["bytes_min"]["opt"] == 4 * numbers
        assert not optimizer.state, "the optimiser was stepped"
    assert "opt" not in analyze(model, x, optimizer=None).summary["bytes_min"]


def test_parameters_without_a_gradient_are_not_stepped():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

        def forward(self, x):
            return self.frozen(self.used(x))

    report = analyze(M(), torch.randn(2, 8))
    assert [r["node"] for r in report.tables["nodes"] if r["phase"] == "opt"] == ["used.weight", "used.bias"]
    foot = report.tables["footprint"][-1]
    assert (foot["weights"], foot["gradients"], foot["optimizer_state"]) == (4 * 3 * 72, 4 * 72, 8 * 72)


def test_steps():
    model, x = masked("mixer")
    report = analyze(model, x, steps=391)
    run, s = report.summary["run"], report.summary
    assert run["steps"] == 391
    assert run["flop_dense"] == 391 * s["flop_dense"]["total"] and run["flop_adjusted"] == 391 * s["flop"]["total"]
    assert run["flop_saved"] == run["flop_dense"] - run["flop_adjusted"] > 0
    assert run["bytes_min"] == 391 * s["bytes_min"]["total"] and run["weights_loaded"] == 391 * s["weights_loaded"]
    assert "run" not in analyze(model, x).summary


def test_loaded_weights_are_kept_elements():
    model, x = masked("mixer")
    kept = sum(int(kept_elements(m, tuple(model.get_parameter(n).shape), (16, 32))) for n, m in fxmask.masks(model).items())
    dense = model.patch.weight.numel()
    rest = sum(m.weight.numel() for n, m in model.named_modules() if isinstance(m, nn.Linear) and f"{n}.weight" not in fxmask.masks(model))
    assert analyze(model, x).summary["weights_loaded"] == kept + dense + rest


def test_dtype():
    model, x = masked("mixer")
    wide, narrow = analyze(model, x, optimizer="sgd"), analyze(model, x, dtype=torch.bfloat16, optimizer="sgd")
    assert wide.summary["flop"] == narrow.summary["flop"]
    assert {(r["dtype_in"], r["dtype_acc"]) for r in narrow.tables["nodes"] if r["m"]} == {("bfloat16", "float32")}
    assert narrow.summary["bytes_min"]["opt"] * 2 == wide.summary["bytes_min"]["opt"]
    for c in ("weights", "gradients", "input"):
        assert 2 * narrow.tables["footprint"][-1][c] == wide.tables["footprint"][-1][c], c
    saved = [r.tables["footprint"][-1]["saved_activations"] for r in (narrow, wide)]
    assert saved[0] < 0.6 * saved[1]
    half = analyze(model.to(torch.bfloat16), x.to(torch.bfloat16), optimizer="sgd")
    assert half.summary["bytes_min"] == narrow.summary["bytes_min"] and half.tables["footprint"] == narrow.tables["footprint"]
    assert model.head.weight.dtype == torch.bfloat16


ALL = {"fwd", "dX", "dW", "db", "opt"}


@pytest.mark.parametrize(
    ("phases", "expected"),
    [(("fwd",), {"fwd"}), (("dX",), {"dX"}), (("dW",), {"dW", "db"}), (("opt",), {"opt"}), (("fwd", "opt"), {"fwd", "opt"}), (("opt", "dW", "fwd", "dX"), ALL)],
    ids=lambda names: " ".join(sorted(names)),  # a set has an order of its own in each process
)
def test_phases(phases, expected):
    model, x = masked("mixer")
    whole, part = analyze(model, x), analyze(model, x, phases=phases)
    assert {r["phase"] for r in part.tables["nodes"]} == expected
    for table in ("nodes", "traffic"):
        assert part.tables[table] == [r for r in whole.tables[table] if r["phase"] in expected]
    for name in ("fwd", "bwd_dx", "bwd_dw"):
        phase = {v: k for k, v in PHASES.items()}[name]
        assert part.summary["flop"][name] == (whole.summary["flop"][name] if phase in expected else 0)


def test_elementwise():
    class M(nn.Module):
        def forward(self, x):
            return (x.relu() + 1).sum(-1)

    x = torch.randn(6, 10)
    assert analyze(M(), x).summary["flop"]["total"] == 0
    report = analyze(M(), x, count_elementwise=True)
    assert report.summary["flop"]["total"] == report.summary["flop_executed"]["total"] == 3 * 60
    model, x = masked("mixer")
    plain, counted = analyze(model, x), analyze(model, x, count_elementwise=True)
    products = [(r["node"], r["phase"], r["flop"]) for r in plain.tables["nodes"] if r["m"]]
    assert products == [(r["node"], r["phase"], r["flop"]) for r in counted.tables["nodes"] if r["m"]]
    assert counted.summary["mac"]["total"] == plain.summary["mac"]["total"]
    assert plain.summary["mac"] == {k: v // 2 for k, v in plain.summary["flop"].items()}
    for report in (plain, counted):  # a MAC is a product's
        assert sum(r["mac"] for r in report.tables["nodes"]) == plain.summary["mac"]["total"]


def test_compare():
    model, x = masked("mixer")
    plain = analyze(SMALL["mixer"][0](), x)
    report = analyze(model, x)
    both = plain.compare(report)
    rows = {r["module"]: r for r in both.rows}
    mine, its = ({r["module"]: r for r in a.tables["modules"]} for a in (plain, report))
    assert rows.keys() == mine.keys() | its.keys()
    for name, r in rows.items():
        assert (r["flop_a"], r["flop_b"], r["params_kept_b"]) == (mine[name]["flop"], its[name]["flop"], its[name]["params_kept"])
        assert r["flop_ratio"] is None or r["flop_ratio"] == r["flop_b"] / r["flop_a"]
    assert rows["(model)"]["flop_ratio"] < 1 and rows["(model)"]["bytes_min_ratio"] is not None
    assert "A FLOP ratio is not a speed-up" in str(both) and json.dumps(both.to_dict())
