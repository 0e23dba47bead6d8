"""What a user asks of a masked model, saves of it, and moves between devices; see `flow_bodies.py`."""

from __future__ import annotations

import copy
import functools
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from gpu.flow_bodies import BLOCK, WIDTH, adamw, assert_masks_equal, assert_same_weights, batch, check_training, loss_of, masked_net, net, train
from gpu.flow_models import twin_of

import fxmask
from fxmask import Feedback, Regrow, Schedule

RUN = {"schedule": Schedule("cubic", steps=6), "refresh": 2}
KINDS = {
    "plain": {},
    "ramp": RUN,
    "taylor": {**RUN, "criterion": "taylor", "average": 0.9},
    "regrow": {"backward": "rigl", "refresh": 2, "dense_every": 2, "regrow": Regrow("gradient", 0.3)},
    "feedback": {"schedule": Feedback("flip_rate", every=2, goal=0.5, change=0.1), "refresh": 2},
    "soft": {**RUN, "soft": True},
}


def saved(folder, model, opt):
    path = Path(folder) / "run.pt"
    torch.save({"model": model.state_dict(), "masks": fxmask.state_dict(model), "optimizer": opt.state_dict()}, path)
    return path


def resumed(path, device, where, impl, options, steps=3):
    """A new model on `device` takes up a run, loaded to `where`, and goes on."""
    model = masked_net(device, impl, **options)
    found = torch.load(path, map_location=where, weights_only=True)
    model.load_state_dict(found["model"])
    fxmask.load_state_dict(model, found["masks"])

    def loaded(params):
        opt = adamw(params)
        opt.load_state_dict(found["optimizer"])
        return opt

    train(model, device, steps, loaded)
    return model


def check_resume(device, impl, options):
    """A run goes on as if it had not stopped: saved on either device, loaded to either, and run on either."""
    whole = masked_net("cpu", "reference", **options)
    train(whole, "cpu", 6, adamw)
    for first in dict.fromkeys((device, "cpu")):
        with tempfile.TemporaryDirectory() as folder:
            model = masked_net(first, impl if first == device else "reference", **options)
            path = saved(folder, model, train(model, first, 3, adamw)[0])
            for second, where in dict.fromkeys(((device, device), (device, "cpu"), ("cpu", "cpu"))):
                again = resumed(path, second, where, impl if second == device else "reference", options)
                assert_same_weights(again, whole)
                assert_masks_equal(again, whole)


def check_moves(device, impl, options, move):
    """A model that was moved trains on as one that was not."""
    model, other = masked_net("cpu", "auto", **options), masked_net("cpu", "reference", **options)
    for m in (model, other):
        train(m, "cpu", 2, guard=False)
    model = move(model, device)
    for m, where in ((model, next(model.parameters()).device), (other, "cpu")):
        train(m, where, 2, guard=False)
    assert_same_weights(model, other)
    assert_masks_equal(model, other)


def check_dense_and_refresh(device, impl):
    model = masked_net(device, impl, refresh=10).eval()
    x, _ = batch(device)
    dense = net(device)
    with fxmask.dense(model), torch.no_grad():
        torch.testing.assert_close(model(x), dense(x), rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        model[0].weight.mul_(torch.randn(WIDTH, 1, generator=torch.Generator().manual_seed(3)).to(device))
    before = fxmask.masks(model)["0.weight"].clone()
    fxmask.refresh(model)
    other = masked_net("cpu", "reference", refresh=10)
    other.load_state_dict({name: t.cpu() for name, t in model.state_dict().items()})
    assert_masks_equal(model, other)
    assert not torch.equal(before, fxmask.masks(model)["0.weight"])
    fxmask.restore(model)
    assert type(model[0]) is torch.nn.Linear and not any(row["masked"] for row in fxmask.explain(model).rows)


def check_reports(device, impl):
    """explain, analyze, stability, allocate: the same rows as on the CPU, as text, tables and files."""
    model, other = masked_net(device, "auto"), masked_net("cpu", "auto")
    x, y = batch(device)[0], batch()[0]
    assert str(fxmask.analyze(masked_net(device, impl), x))
    assert str(fxmask.explain(model)) and fxmask.explain(model).to_dict()
    a, b = (fxmask.analyze(m, t, device="h200", impl="triton", optimizer="adamw") for m, t in ((model, x), (other, y)))
    assert a.meta["mask_hash"] == b.meta["mask_hash"] and str(a) and a.to_dict() and a.table() and a.explain(a.tables["nodes"][0]["node"])
    for table in ("summary", "modules", "nodes", "traffic", "roofline", "footprint"):
        assert a.tables[table] == b.tables[table], table
    fxmask.analyze(model, x, optimizer=torch.optim.AdamW(model.parameters()), memory_model="thesis", dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        a.save(folder, ("csv", "json", "markdown", "html", "latex"))
        fxmask.explain(model).save(Path(folder) / "explain.csv")
        assert len(list(Path(folder).iterdir())) > 5
    found, others = (fxmask.allocate(net(d), 0.5, "flop", block=BLOCK, inputs=t) for d, t in ((device, x), ("cpu", y)))
    assert found == others and found.spent <= found.budget
    chain = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 10))
    bounds = [fxmask.stability(fxmask.apply(copy.deepcopy(chain).to(d), ratio=0.5, block=BLOCK, impl="reference"), t) for d, t in ((device, x), ("cpu", y))]
    torch.testing.assert_close(bounds[0].margin.cpu(), bounds[1].margin)
    assert str(bounds[0])


def check_advise(device, impl):
    found = fxmask.advise(net(device), batch(device)[0], ratios=(0.5,), blocks=(16,), impl=impl, seconds=0.5)
    assert found.rows and str(found) and found.to_dict()


def check_health(device, impl):
    """A log on the device has the rows of one on the CPU, is saved, loaded to either device, and drawn."""
    rows = []
    for d, i in ((device, impl), ("cpu", "reference")):
        with tempfile.TemporaryDirectory() as folder:
            model = masked_net(d, i, backward="ste", refresh=1)
            log = fxmask.HealthLog(model, Path(folder) / "health.csv")
            log.update()
            train(model, d, 2)
            log.update()
            torch.save(log.state_dict(), Path(folder) / "log.pt")
            log.load_state_dict(torch.load(Path(folder) / "log.pt", map_location=d, weights_only=True))
            rows.append(log.update().rows)
            assert str(log.report()) and (Path(folder) / "health.csv").stat().st_size
            if find_spec("matplotlib") is not None:
                assert log.plot(Path(folder) / "curves.png").stat().st_size and log.heatmap(Path(folder) / "blocks.png", ["0.weight"]).stat().st_size
    for row, other in zip(*rows, strict=True):
        assert {k: v for k, v in row.items() if k != "kept_norm_fraction"} == {k: v for k, v in other.items() if k != "kept_norm_fraction"}
        assert abs(row["kept_norm_fraction"] - other["kept_norm_fraction"]) < 1e-4


def check_ema(device, impl):
    """An average of the run's weights masks itself, and takes the run's masks where these are cached."""
    for options in ({}, RUN):
        model = masked_net(device, impl, **options)
        ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
        train(model, device, 3)
        ema.update_parameters(model)
        if options:
            fxmask.load_state_dict(ema.module, fxmask.state_dict(model))
            fxmask.step(ema.module, 0)
            assert_masks_equal(ema.module, model)
        dense = net(device)
        dense.load_state_dict(ema.module.state_dict())
        twin, _ = twin_of(dense, ema.module)
        with torch.no_grad():
            torch.testing.assert_close(ema(batch(device)[0]), twin(batch(device)[0]), rtol=1e-4, atol=1e-4)


def check_copies(device, impl):
    model = masked_net(device, impl, **RUN)
    train(model, device, 3, guard=False)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model, Path(folder) / "model.pt")
        copies = [copy.deepcopy(model), torch.load(Path(folder) / "model.pt", weights_only=False)]
    x, target = batch(device)
    for other in copies:
        assert_masks_equal(model, other)
        torch.testing.assert_close(loss_of(other, x, target), loss_of(model, x, target))
        train(other, device, 1, guard=False)
    assert not torch.equal(copies[0][0].weight, model[0].weight)


def back_and_forth(model, device):
    return model.to(device).to("cpu").to(device)


FLOWS = {
    **{f"saved and resumed, {name}": functools.partial(check_resume, options=options) for name, options in KINDS.items()},
    **{f"moved to the device, {name}": functools.partial(check_moves, options=o, move=lambda m, d: m.to(d)) for name, o in KINDS.items()},
    "moved back and forth": functools.partial(check_moves, options=RUN, move=back_and_forth),
    "moved to the device and back": functools.partial(check_moves, options=RUN, move=lambda m, d: m.to(d).cpu()),
    "moved by cuda()": functools.partial(check_moves, options=RUN, move=lambda m, d: m.cuda() if torch.device(d).type == "cuda" else m.cpu()),
    "told steps, then trained": functools.partial(check_training, options=RUN, guard=False),
    "dense, refresh, restore": check_dense_and_refresh,
    "reports": check_reports,
    "advise": check_advise,
    "health": check_health,
    "average of weights": check_ema,
    "copies": check_copies,
}
