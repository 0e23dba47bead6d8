"""FLOP and bytes of masked convolutions: kept elements times output positions, by hand and by PyTorch's counter of the dense model."""

import copy
import dataclasses

import pytest
import torch
from analysis.counted import pytorch_count
from torch import nn

import fxmask
from fxmask.analysis import devices
from fxmask.kernels import dense_cost
from fxmask.kernels.grid import expand_mask
from fxmask.passes.counting.calls import Call, Place
from fxmask.passes.counting.work import RULES, Target

BLOCK, N = (16, 16), 3


def net():
    """Layers with their output positions: 64, 16, 9, 4, 1."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 32, 1, stride=2), nn.ReLU(), nn.Conv2d(32, 16, 2), nn.ReLU(),
        nn.Conv2d(16, 24, 1, stride=2), nn.Flatten(), nn.Linear(96, 20),
    )  # fmt: skip


POSITIONS = {"0.weight": 64, "2.weight": 16, "4.weight": 9, "6.weight": 4, "8.weight": 1}
BOTH = (nn.Linear, nn.Conv2d)


def images():
    return torch.randn(N, 4, 8, 8)


def elements(model):
    """Kept elements of each weight, counted one by one."""
    return {n: int(expand_mask(m, model.get_parameter(n).shape, BLOCK).sum()) for n, m in fxmask.masks(model).items()}


def analyse(model, **options):
    return fxmask.analyze(model, images(), device="h100-sxm", **options)


def test_dense_as_pytorch_counts():
    model = net()
    forward = pytorch_count(model, images(), backward=False)
    found = analyse(model).summary["flop"]
    assert found["fwd"] == forward == sum(2 * N * p * model.get_parameter(n).numel() for n, p in POSITIONS.items())
    assert found["total"] == pytorch_count(model, images())


@pytest.mark.parametrize("impl", ["auto", "reference", "cpu"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("refresh", [1, 0])
def test_kept_elements_times_positions(impl, last, refresh):
    model = net().to(memory_format=torch.channels_last) if last else net()
    fxmask.apply(model, fxmask.WeightMask(0.5, BLOCK, impl=impl, refresh=refresh), layers=BOTH)
    kept = elements(model)
    report = analyse(model)
    by_hand = {n: 2 * N * POSITIONS[n] * kept[n] for n in POSITIONS}
    flop = report.summary["flop"]
    assert flop["fwd"] == flop["bwd_dw"] == sum(by_hand.values()) and flop["bwd_dx"] == sum(by_hand.values()) - by_hand["0.weight"]
    dense = {n: 2 * N * POSITIONS[n] * model.get_parameter(n).numel() for n in POSITIONS}
    for row in report.tables["nodes"]:
        if row["flop"]:
            name = f"{row['module']}.weight"
            assert (row["flop"], row["flop_dense"]) == (by_hand[name], dense[name]) and row["nnzb"] == int(fxmask.masks(model)[name].sum())
            skips = {"auto": ["8.weight"], "cpu": ["2.weight", "6.weight", "8.weight"], "reference": []}[impl]
            assert row["impl"] == ("triton" if name in skips else "masked_dense")
    assert {r["module"]: r["params_kept"] for r in report.tables["modules"]}["4"] == kept["4.weight"] + 16
    assert not [n for n in report.notes if "no values" in n] and report.tables["coverage"] == []


@pytest.mark.parametrize("mode", ["ste", "unmasked", "rigl"])
@pytest.mark.parametrize("impl", ["auto", "cpu"])
def test_backward_modes(mode, impl):
    model = fxmask.apply(net(), fxmask.WeightMask(0.5, BLOCK, backward=mode, impl=impl, dense_every=2), layers=nn.Conv2d, include="4")
    fxmask.step(model, 0)
    size, kept = model[4].weight.numel(), elements(model)["4.weight"]

    def rows():
        return {r["phase"]: r["flop"] for r in analyse(model).tables["nodes"] if r["module"] == "4" and r["flop"]}

    once = 2 * N * 9
    assert rows() == {
        "ste": {"fwd": once * kept, "dX": once * kept, "dW": once * size},
        "unmasked": {"fwd": once * size, "dX": once * size, "dW": once * size},  # its second forward product is the dense one
        "rigl": {"fwd": once * kept, "dX": once * kept, "dW": once * kept},
    }[mode]
    fxmask.step(model)  # the next step of rigl is dense
    assert rows()["dW"] == once * size


def test_bytes_of_a_convolution():
    """W∘M is as large as W: what a dense product reads and writes stays, and its making is counted beside it."""
    model = net()
    dense = {(r["module"], r["phase"]): r["bytes_min"] for r in analyse(model).tables["nodes"] if r["flop"]}
    fxmask.apply(model, ratio=0.5, block=BLOCK, layers=nn.Conv2d)
    found = analyse(model).tables["nodes"]
    assert {(r["module"], r["phase"]): r["bytes_min"] for r in found if r["flop"]} == dense
    assert dense["4", "fwd"] == 4 * (N * 32 * 16 + 16 * 32 * 4 + N * 16 * 9 + 16)
    size = 4 * 16 * 128
    assert [r["bytes_min"] for r in found if r["module"] == "4" and r["op"] == "aten.where" and r["phase"] == "fwd"] == [2 * size + size // 4 + 4]


def test_a_masked_step_and_allocation_count_convolutions():
    model = fxmask.apply(net(), ratio=0.8, block=(8, 16), layers=nn.Conv2d)
    rows = {r["node"]: r for r in analyse(model, masked_step=True).tables["nodes"] if r["phase"] == "opt"}
    assert rows["0.weight"]["impl"] == rows["4.weight"]["impl"] == "masked_step" and rows["8.weight"]["impl"] is None
    found = fxmask.allocate(copy.deepcopy(net()), 0.5, "flop", block=BLOCK, layers=BOTH, inputs=images())
    assert found.total == sum(2 * N * p * net().get_parameter(n).numel() for n, p in POSITIONS.items())


ORDERS = {  # what stands behind the weight, with a bias and groups, in the order of each op's schema
    "cudnn_convolution": lambda bias, groups: ([1, 1], [1, 1], [1, 1], groups, True, True, True),
    "mkldnn_convolution": lambda bias, groups: (bias, [1, 1], [1, 1], [1, 1], groups),
    "_slow_conv2d_forward": lambda bias, groups: ([3, 3], bias, [1, 1], [1, 1]),
    "convolution": lambda bias, groups: (bias, [1, 1], [1, 1], [1, 1], False, [0, 0], groups),
}
LACKS = {"cudnn_convolution": "bias", "_slow_conv2d_forward": "groups"}
TAKEN = [(op, g, b) for op in ORDERS for g in (1, 4) for b in (True, False) if not {"bias": b, "groups": g > 1}.get(LACKS.get(op, ""))]


@pytest.mark.parametrize(("op", "groups", "biased"), TAKEN)
def test_every_op_of_a_convolution_has_its_own_order_of_arguments(op, groups, biased):
    def place(*shape):
        return Place(shape, torch.empty(shape, device="meta").stride(), torch.float32, storage=len(shape))

    x, w, y, bias = place(2, 16, 8, 8), place(32, 16 // groups, 3, 3), place(2, 32, 8, 8), place(32) if biased else None
    call = Call(getattr(torch.ops.aten, op).default, (x, w, *ORDERS[op](bias, groups)), {}, [y], "", "", "")
    (work,) = RULES[call.op](call, Target())
    assert (work.m, work.n, work.k, work.batch) == (2 * 8 * 8, 32 // groups, 16 // groups * 9, groups)
    assert work.cost == dense_cost.convolution(
        2 * 8 * 8, 32, 16, (3, 3), 4, (128, 128), groups=groups, x=x.bytes, w=w.bytes, y=y.bytes, bias=32 if biased else 0
    )
    assert work.cost.flop_useful == 2 * work.m * work.n * work.k * groups and ("bias" in work.cost.reads) == biased


@pytest.mark.parametrize(("c_in", "c_out", "groups"), [(64, 256, 1), (256, 64, 1), (64, 256, 4)])
def test_products_of_a_backward_are_those_of_their_gemms(c_in, c_out, groups):
    """By hand, tiles of 128x128 of outputs that are larger: what is read again, and whose kernel slides, differ from the forward's."""
    model, x = nn.Conv2d(c_in, c_out, 3, padding=1, groups=groups, bias=False), torch.empty(4, c_in, 32, 32, requires_grad=True)
    report, m, g, f = fxmask.analyze(model, x, device=dataclasses.replace(devices.device("a30"), dense_tile=(128, 128))), 4 * 32 * 32, groups, 4
    i, o = c_in // g, c_out // g
    rows = {r["phase"]: r for r in report.tables["nodes"] if r["flop"]}
    assert {p: (r["m"], r["n"], r["k"], r["batch"]) for p, r in rows.items()} == {"fwd": (m, o, 9 * i, g), "dX": (m, i, 9 * o, g), "dW": (o, 9 * i, m, g)}
    assert len({r["flop"] for r in rows.values()}) == 1
    asked = {(r["phase"], r["operand"]): r["bytes_req"] for r in report.tables["traffic"] if r["direction"] == "read"}
    tiles = lambda n: -(-n // 128)  # noqa: E731
    assert asked["fwd", "x"] == f * g * m * 9 * i * tiles(o) and asked["fwd", "w"] == f * g * 9 * i * o * tiles(m)
    assert asked["dX", "dy"] == f * g * m * 9 * o * tiles(i) and asked["dX", "w"] == f * g * 9 * i * o * tiles(m)
    assert asked["dW", "dy"] == f * g * m * o * tiles(9 * i) and asked["dW", "x"] == f * g * m * 9 * i * tiles(o)


@pytest.mark.parametrize("groups", [1, 4])
def test_the_weights_gradient_of_a_transposed_convolution_slides_over_the_outputs(groups):
    model, x = nn.ConvTranspose2d(64, 256, 3, padding=1, groups=groups, bias=False), torch.empty(4, 64, 16, 16)
    report = fxmask.analyze(model, x, device=dataclasses.replace(devices.device("a30"), dense_tile=(128, 128)))
    m, i, o, tiles = 4 * 16 * 16, 64 // groups, 9 * 256 // groups, lambda n: -(-n // 128)
    (row,) = (r for r in report.tables["nodes"] if r["phase"] == "dW")
    assert (row["m"], row["n"], row["k"], row["batch"]) == (i, o, m, groups)
    asked = {r["operand"]: r["bytes_req"] for r in report.tables["traffic"] if (r["phase"], r["direction"]) == ("dW", "read")}
    assert asked == {"x": 4 * groups * m * i * tiles(o), "dy": 4 * groups * m * o * tiles(i)}


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups_lower_the_weights_gradient_as_they_do_the_forward(groups):
    """PyTorch's counter takes dW for that of a convolution without groups."""
    model, x = nn.Conv2d(8, 16, 3, groups=groups), torch.randn(2, 8, 6, 6)
    once, s = 2 * 2 * 16 * 16 * (8 // groups) * 9, fxmask.analyze(model, (x,), device="h100-sxm").summary["flop"]
    assert (s["fwd"], s["bwd_dw"]) == (once, once) and pytorch_count(model, x) == once + groups * once
