"""What `explain` tells of a HealthLog."""

import pytest
import torch
from torch import nn

import fxmask
from fxmask.errors import ConfigError


def test_explain_tells_of_health():
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), ratio=0.75, block=(16, 16))
    log = fxmask.HealthLog(model)
    w, mask = model[0].weight.detach().double(), fxmask.masks(model)["0.weight"]
    kept = mask.repeat_interleave(16, 0).repeat_interleave(16, 1)
    dense, plain = fxmask.explain(model).rows[1], fxmask.explain(model).rows[0]
    row = fxmask.explain(model, health=True).rows[0]
    assert "kept_norm_fraction" not in plain and {k: row[k] for k in plain} == plain
    assert row["kept_norm_fraction"] == pytest.approx(float((w * kept).square().sum() / w.square().sum()))
    assert row["dead_rows"] == float((~mask.any(1)).double().mean()) and row["dead_cols"] == float((~mask.any(0)).double().mean())
    log.update()
    with torch.no_grad():
        model[0].weight.copy_(torch.where(kept, 0.01 * model[0].weight, model[0].weight))
    log.update()
    rows = fxmask.explain(model, health=log).rows
    assert rows[0]["flip_rate"] == log.rows[-1]["flip_rate"] == 0.5 and rows[0]["age_max"] == 1
    assert rows[1] == dense and "flip_rate" in str(fxmask.explain(model, health=log))
    with pytest.raises(ConfigError, match=r"explain: health: expected True, False or a fxmask.HealthLog, got 1"):
        fxmask.explain(model, health=1)


def test_explain_knows_a_log_by_the_masks_and_not_by_their_names():
    """A part has other names than its model, so does the model that holds it, and what torch.compile gives."""
    part = nn.Sequential(nn.Linear(16, 16))
    whole = fxmask.apply(nn.Sequential(nn.Linear(16, 16), part), ratio=0.5, block=(4, 4))
    log, of_part = fxmask.HealthLog(whole), fxmask.HealthLog(part)
    for _ in range(2):
        log.update(), of_part.update()
        with torch.no_grad():
            whole[0].weight.copy_(whole[0].weight.flip(0))
    rates = [r["flip_rate"] for r in log.rows if r["update"] == 2]
    assert rates[0] > 0 == rates[1]

    def told(model, log):
        return [r["flip_rate"] for r in fxmask.explain(model, health=log).rows]

    assert told(whole, log) == told(torch.compile(whole, backend="eager"), log) == rates
    assert told(part, log) == [0.0] and told(whole, of_part) == [None, 0.0]
