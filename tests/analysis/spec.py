"""A module of models, as the commands are given its name. It lies on the path of each test of a file that imports `models`."""

import sys

import pytest
from torch import nn

SPEC = "spec_models"
SOURCE = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.fc = nn.Embedding(50, 32), nn.Linear(32, 50)
    def forward(self, words, more):
        return self.fc(self.table(words) + more)

made = net()
number = 3

def nothing():
    return None

def breaks():
    raise RuntimeError("no such luck")

def masked():
    import fxmask
    return fxmask.apply(net(), ratio=0.5)

class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.rates = [r.item() for r in torch.linspace(0, 0.1, 2)]  # as timm builds stochastic depth
        self.fc = nn.Linear(64, 64)
    def forward(self, x):
        return self.fc(x) if self.rates[1] > 0 else x
"""


@pytest.fixture(autouse=True)
def models(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("models")
    (folder / f"{SPEC}.py").write_text(SOURCE)
    (folder / "broken_models.py").write_text("import nowhere_at_all\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, SPEC, raising=False)  # a test may have masked its model
    monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))


def net():
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))
