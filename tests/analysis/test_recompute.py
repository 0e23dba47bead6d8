"""`analyze` of checkpointed models that are masked, pruned, dropped: the second forward is `recompute`, and its masks count as in the first."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxmask
from fxmask import ActivationPruning, BlockDropout, WeightMask

MASK, DROPPED, PRUNED = WeightMask(0.5, (8, 8)), BlockDropout(0.5, (8, 16)), ActivationPruning(0.5, 8)
CONFIGS = {
    **{"-".join(map(str, o.values())): (WeightMask(0.5, (8, 8), **o),) for o in ({"backward": "masked"}, {"backward": "ste"}, {"refresh": 0}, {"impl": "cpu"})},
    "dropped": (DROPPED,), "pruned": (PRUNED,), "mask and dropped": (MASK, DROPPED), "mask and pruned": (MASK, PRUNED),
}


class Net(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.conv, self.fc1, self.fc2, self.reentrant = nn.Conv2d(16, 16, 3), nn.Linear(16, 48), nn.Linear(48, 16), reentrant

    def body(self, x):
        return self.fc2(self.fc1(self.conv(x).flatten(2).mT).relu())

    def forward(self, x):
        return self.body(x) if self.reentrant is None else checkpoint(self.body, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_second_forward_counts_as_the_first(name, reentrant):
    plain, configs = Net(), CONFIGS[name]
    options = dict(layers=(nn.Linear, nn.Conv2d)) if isinstance(configs[0], WeightMask) else {}
    again = Net(reentrant)
    again.load_state_dict(plain.state_dict())
    x = torch.randn(2, 16, 8, 8, requires_grad=True)
    once, twice = (fxmask.analyze(fxmask.apply(m, *configs, **options), (x,), device="h100-sxm") for m in (plain, again))
    flop = copy.deepcopy(twice.summary["flop"])
    assert flop.pop("recompute") == flop["fwd"] and flop.pop("total") == once.summary["flop"]["total"] + flop["fwd"]
    assert flop == {k: once.summary["flop"][k] for k in flop}
    assert "recompute" not in once.summary["flop"]
    loaded = [[r["param_bytes"] for r in twice.tables["nodes"] if r["phase"] == phase and r["m"]] for phase in ("fwd", "recompute")]
    assert loaded[0] == loaded[1] and len(loaded[0]) == 3 and all(loaded[0])
    executed = twice.summary["flop_executed"]
    assert executed["recompute"] == executed["fwd"]
