"""Modules that read the weights of layers held in lists and dicts, in loops and by index; which layers, the docstring of each says."""

import itertools

from torch.nn import functional as F
from unit.reads_by_name import Held


class Last(Held):
    """layers.1"""

    def forward(self, x):
        return F.linear(self.layers[0](x), self.layers[-1].weight)


class LastOfTwo(Held):
    """layers.1"""

    def forward(self, x):
        both = self.layers[0], self.layers[1]
        return F.linear(both[0](x), both[-1].weight)


class Key(Held):
    """named.a"""

    def forward(self, x):
        return F.linear(x, self.named["a"].weight)


class Counted(Held):
    """layers.0 layers.1"""

    def forward(self, x):
        for i in range(2):
            x = F.linear(x, self.layers[i].weight)
        return x


class Looped(Held):
    """layers.0 layers.1"""

    def forward(self, x):
        for layer in self.layers:
            x = F.linear(x, layer.weight)
        return x


class Enumerated(Held):
    """layers.0 layers.1"""

    def forward(self, x):
        for i, layer in enumerate(reversed(self.layers)):
            x = F.linear(x, layer.weight) * i
        return x


class Zipped(Held):
    """layers.0 layers.1"""

    def forward(self, x):
        for scale, layer in zip((1, 2), self.layers, strict=True):
            x = F.linear(x, layer.weight) * scale
        return x


class Sliced(Held):
    """layers.0 layers.1"""

    def forward(self, x):
        for layer in self.layers[:1]:
            x = F.linear(x, layer.weight)
        return x


class Values(Held):
    """named.a named.b"""

    def forward(self, x):
        for layer in self.named.values():
            x = F.linear(x, layer.weight)
        return x


class Items(Held):
    """named.a named.b"""

    def forward(self, x):
        for _, layer in self.named.items():  # noqa: PERF102
            x = F.linear(x, layer.weight)
        return x


class NamedChildren(Held):
    """named.a named.b"""

    def forward(self, x):
        for _, layer in self.named.named_children():
            x = F.linear(x, layer.weight)
        return x


class Next(Held):
    """layers.0 layers.1"""

    def forward(self, x):
        layers = iter(self.layers)
        return F.linear(x, next(layers).weight)


class InADict(Held):
    """fc fc1"""

    def forward(self, x):
        found = {0: self.fc1, "a": self.fc}
        for layer in found.values():
            x = F.linear(x, layer.weight)
        return x


class InADictByKey(Held):
    """fc fc1"""

    def forward(self, x):
        found = {1: self.fc, 0: self.fc1}
        return F.linear(x, found[1].weight)


class Some(Held):
    """fc fc2"""

    def forward(self, x):
        for layer in (self.fc, self.fc2):
            x = F.linear(x, layer.weight)
        return x


class Pairs(Held):
    """fc1"""

    def forward(self, x):
        for read, called in [(self.fc1, self.fc2)]:
            x = called(F.linear(x, read.weight))
        return x


class Comprehended(Held):
    """layers.0 layers.1"""

    def forward(self, x):
        return F.linear(x, sum(layer.weight for layer in self.layers))


class Listed(Held):
    """blocks.0.0 blocks.1.0"""

    def forward(self, x):
        firsts = [block[0] for block in self.blocks]
        weights = [lin.weight for lin in firsts]
        for w in weights:
            x = F.linear(x, w)
        return x


class Added(Held):
    """layers.0 layers.1 named.a named.b"""

    def forward(self, x):
        for layer in list(self.layers) + list(self.named.values()):
            x = F.linear(x, layer.weight)
        return x


class InARow(Held):
    """fc layers.0 layers.1"""

    def forward(self, x):
        for layer in itertools.chain([self.fc], self.layers):
            x = F.linear(x, layer.weight)
        return x


class Carried(Held):
    """layers.0"""

    def forward(self, x):
        before = None
        for _ in range(2):
            if before is not None:
                x = F.linear(x, before.weight)
            before = self.layers[0]
        return x


class Awaited(Held):
    """layers.0"""

    def forward(self, x):
        before, turns = None, 0
        while turns < 2:
            if before is not None:
                x = F.linear(x, before.weight)
            before, turns = self.layers[0], turns + 1
        return x
