"""What lines of a method say of weights, whether they could run or not: reads and writes in every statement that Python has."""

import textwrap

import pytest

from fxmask.passes.finding.said import said

READS = {
    "given by name": ("F.linear(x, self.get_parameter('a.weight'))", "a"),
    "once, however often": ("self.a.weight.sum() + self.a.weight.sum()", "a"),
    "the second of two names": ("v = w = self.a.weight\nreturn w.sum()", "a"),
    "a name in an expression": ("return (w := self.a.weight).sum()", "a"),
    "inside one": ("return (y := F.linear(x, self.a.weight))", "a"),
    "a layer's name in a call": ("self.run(m := self.a)\nm.weight.sum()", "a"),
    "a name of the other branch": ("m = self.a\nif x:\n    m = self.b\nelse:\n    m.weight.sum()", "a"),
    "a loop that may not run": ("m = self.a\nwhile x:\n    m = self.b\nm.weight.sum()", "a b"),
    "a turn before": ("m = self.a\nfor n in self.layers:\n    m.weight.sum()\n    m = n", "a layers.*"),
    "what a loop goes over": ("for row in F.relu(self.a.weight):\n    pass", "a"),
    "a match that may fit nothing": ("m = self.a\nmatch x:\n    case 1:\n        m = self.b\nm.weight.sum()", "a b"),
    "what a match is of": ("match F.relu(self.a.weight):\n    case _:\n        pass", "a"),
    "a context": ("with held(self.a.weight):\n    pass", "a"),
    "a default by name": ("return (lambda *, w=self.a.weight: w)()", "a"),
}
NONE = {
    "whether it is there": "return self.a.weight is None or self.a.weight is not None",
    "an unused rest": "y, *rest = x, self.a.weight",
    "an argument by place alone": "m = self.a\nreturn (lambda m, /: m.weight)(x)",
    "an argument by name alone": "m = self.a\nreturn (lambda *, m: m.weight)(m=x)",
}
WRITES = {
    "by a name": ("w = self.a.weight\nw += 1", {("a",)}),
    "of a sum": ("y = x\ny += 1", set()),
    "a lookup with a norm": ("F.embedding(x, self.a.weight, None, 1.0)", {("a",)}),
    "a lookup without one": ("F.embedding(x, self.a.weight, None, None)", set()),
}


def of(body: str):
    return said([f"def forward(self, x):\n{textwrap.indent(body, '    ')}"])


@pytest.mark.parametrize("case", READS)
def test_reads(case):
    body, layers = READS[case]
    assert sorted(".".join(path) for path in of(body).reads) == layers.split()


@pytest.mark.parametrize("case", NONE)
def test_no_reads(case):
    assert of(NONE[case]).reads == []


@pytest.mark.parametrize("case", WRITES)
def test_writes(case):
    body, layers = WRITES[case]
    assert of(body).writes == layers


def test_what_cannot_be_parsed_says_nothing_and_hides_nothing():
    assert said(["def forward(self:", "def forward(self):\n    return self.a.weight.sum()"]).reads == [("a",)]
