"""Modules that read a layer's weight under another name; which layers, the docstring of each says."""

import torch
from torch import nn
from torch.nn import functional as F


class Held(nn.Module):
    """Five layers; which a subclass reads its docstring says, by name."""

    def __init__(self):
        super().__init__()
        self.fc, self.fc1, self.fc2 = (nn.Linear(32, 32) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.named = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)})
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(2))

    def help(self, x, w):
        return F.linear(x, w)


class Named(Held):
    """fc"""

    def forward(self, x):
        lin = self.fc
        return F.linear(x, lin.weight, lin.bias)


class WeightNamed(Held):
    """fc"""

    def forward(self, x):
        w = self.fc.weight
        return x @ w.t()


class Unpacked(Held):
    """fc1 fc2"""

    def forward(self, x):
        a, b = self.fc1, self.fc2
        return F.linear(F.linear(x, a.weight), b.weight)


class WeightsUnpacked(Held):
    """fc1"""

    def forward(self, x):
        w, b = self.fc1.weight, self.fc1.bias
        return self.help(x, w) + b


class Walrus(Held):
    """fc"""

    def forward(self, x):
        if (lin := self.fc) is not None:
            x = F.linear(x, lin.weight)
        return x


class Default(Held):
    """fc fc1"""

    def forward(self, x):
        def inner(x, v=self.fc1.weight, *, w=self.fc.weight):
            return F.linear(F.linear(x, v), w)

        return inner(x)


class Given(Held):
    """fc layers.0 layers.1"""

    def forward(self, x):
        def inner(x, *, fc=self.fc):
            return F.linear(x, fc.weight)

        x = inner(x)
        for layer in self.layers:
            x = (lambda x, layer=layer: F.linear(x, layer.weight))(x)
        return x


class Region(Held):
    """fc"""

    @torch.compiler.nested_compile_region
    def forward(self, x):
        return F.linear(x, self.fc.weight)


class Chained(Held):
    """blocks.0.0"""

    def forward(self, x):
        block = self.blocks[0]
        lin = block[0]
        return F.linear(x, lin.weight)


class Annotated(Held):
    """fc"""

    def forward(self, x):
        lin: nn.Linear = self.fc
        return F.linear(x, lin.weight)


class Chosen(Held):
    """fc1 fc2"""

    def forward(self, x):
        lin = self.fc1 if x.sum() > 0 else self.fc2
        return F.linear(x, lin.weight)


class Branched(Held):
    """fc1 fc2"""

    def forward(self, x):
        if x.sum() > 0:
            lin = self.fc1
        else:
            lin = self.fc2
        return F.linear(x, lin.weight)


class Got(Held):
    """fc"""

    def forward(self, x):
        return F.linear(x, getattr(self.fc, "weight"))  # noqa: B009


class GotByName(Held):
    """fc1 fc2"""

    def forward(self, x):
        for i in (1, 2):
            x = F.linear(x, getattr(self, f"fc{i}").weight)
        return x


class Submodule(Held):
    """blocks.0.0"""

    def forward(self, x):
        return F.linear(x, self.get_submodule("blocks.0.0").weight)


class Inner(Held):
    """fc"""

    def forward(self, x):
        lin = self.fc

        def run(y):
            return F.linear(y, lin.weight)

        return run(x)


class InMethod(Held):
    """fc"""

    def forward(self, x):
        return self._run(x)

    def _run(this, x):
        lin = this.fc
        return F.linear(x, lin.weight)


class Turned(Held):
    """fc1"""

    def forward(self, x):
        lin = None
        for _ in range(2):
            if lin is not None:
                x = F.linear(x, lin.weight)
            lin = self.fc1
        return x


class Cast(Held):
    """fc"""

    def forward(self, x):
        w = self.fc.weight.to(x.dtype)
        return F.linear(x, w)


class Matched(Held):
    """fc fc1"""

    def forward(self, x):
        match x.ndim:
            case 1:
                lin = self.fc
            case _:
                lin = self.fc1
        return F.linear(x, lin.weight)


class Tried(Held):
    """fc fc1"""

    def forward(self, x):
        try:
            lin = self.fc
        except RuntimeError:
            lin = self.fc1
        return F.linear(x, lin.weight)


class Copied(Held):
    """fc fc1"""

    def forward(self, x):
        new = torch.zeros(64, 32)
        new[:32] = self.fc.weight.data
        self.kept = self.fc1.weight
        return F.linear(x, new[:32]) + F.linear(x, self.kept)


class Rest(Held):
    """layers.0 layers.1"""

    def forward(self, x):
        first, *rest = self.layers
        for layer in rest:
            x = F.linear(x, layer.weight)
        return first(x)  # it may be any of them, too


class RestByPlace(Held):
    """fc fc1 fc2"""

    def forward(self, x):
        *some, last = self.fc, self.fc1, self.fc2
        return last(F.linear(F.linear(x, some[0].weight), some[1].weight))  # any of the three, as far as names tell


class WalrusInside(Held):
    """fc fc1"""

    def forward(self, x):
        return (y := F.linear(x, self.fc.weight)) + F.linear(y, (w := self.fc1.weight)) + w.sum()


class InADictMade(Held):
    """layers.0 layers.1"""

    def forward(self, x):
        return sum({i: F.linear(x, layer.weight) for i, layer in enumerate(self.layers)}.values())


class ByLambda(Held):
    """fc"""

    forward = lambda self, x: F.linear(x, self.fc.weight)  # noqa: E731
