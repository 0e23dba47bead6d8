"""Names behind a graph break are those of the submodule where the graph begins: whatever goes by names says so."""

import copy
import functools
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from compile_backend.helpers import OPTIONS, Wrap, compiled, failing
from sample_models import mlp
from torch import nn

import fxmask
from fxmask.compiler import backend
from fxmask.errors import FxMaskWarning, UnsupportedError


class Block(nn.Module):
    def __init__(self, breaks):
        super().__init__()
        self.fc, self.breaks = nn.Linear(64, 64), breaks

    def forward(self, x):
        if self.breaks:
            torch._dynamo.graph_break()
        return self.fc(x).relu()


class Net(nn.Module):
    def __init__(self, breaks=True):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(breaks) for _ in range(3)), nn.Linear(64, 64)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def in_place(model, **options):
    model.compile(backend=backend.fxmask_backend, options={**options, "inner": "eager"})
    return model


BY_NAME = {"exclude": dict(exclude=["fc", nn.Conv2d]), "overrides": dict(overrides={"fc": dict(ratio=0.5)}), "criterion='random'": dict(criterion="random")}


@pytest.mark.filterwarnings("ignore:backend='fxmask' masked nothing", "ignore:exclude")
@pytest.mark.parametrize("call", [compiled, in_place])
@pytest.mark.parametrize("what", BY_NAME)
def test_names_of_a_submodule_are_told(what, call):
    text = rf"(?s)begins inside of the compiled model.*names of its own: fc\.weight for blocks\.\d\.fc\.weight\. {what} goes by these.*fxmask\.apply"
    with pytest.warns(FxMaskWarning, match=text) as told:
        call(Net(), **OPTIONS, **BY_NAME[what])(torch.randn(4, 64))
    assert not any("share this graph" in str(w.message) for w in told)  # which says the same again


@pytest.mark.filterwarnings("error::fxmask.errors.FxMaskWarning")
@pytest.mark.parametrize("computed", [False, True])
def test_names_of_a_container_are_those_of_the_model(computed):
    """Its `compile()` wraps the call of it from PyTorch 2.14 on, so that the graph is of a function that holds a bound method."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Sequential(nn.Linear(64, 64)), nn.Linear(64, 64))
    if computed:
        torch.nn.utils.parametrizations.weight_norm(model[3])
    bound = torch._dynamo.external_utils.wrap_inline(model._call_impl)
    compiled(bound, **OPTIONS, exclude="2.*", overrides={"3": dict(ratio=0.5)})(torch.randn(4, 64))
    assert {row["name"]: row["target_ratio"] for row in fxmask.explain(model).rows if row["masked"]} == {"0": 0.75, "3": 0.5}


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self._net = nn.Sequential(nn.Linear(64, 64), torch.nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)))

    def forward(self, x):
        return self._net(x)


class Trainer:
    def __init__(self, model):
        self.models = [model]

    def step(self, x):
        return self.models[0](x)


def of_global(model):
    global held
    held = model
    return lambda x: held(x)


def of_closure(model):
    def inner(x):
        return model(x)

    return lambda x: inner(x)


@pytest.mark.filterwarnings("error::fxmask.errors.FxMaskWarning")
@pytest.mark.parametrize(
    ("way", "prefix"),
    [(lambda m: m, ""), (of_global, ""), (of_closure, ""), (lambda m: Trainer(m).step, "models.0.")],
    ids=["itself", "global", "closure", "list"],
)
@pytest.mark.parametrize("out", [0, 1], ids=["plain", "computed"])
def test_a_weight_that_is_computed_has_the_name_of_its_layer_as_others_have(way, prefix, out):
    model = Normed()
    compiled(way(model), **OPTIONS, exclude=f"{prefix}_net.{out}")(torch.randn(4, 64))
    assert {row["name"]: row["masked"] for row in fxmask.explain(model).rows} == {f"_net.{out}": False, f"_net.{1 - out}": True}


class Keyed(nn.Module):
    """Of keys that no attribute could have."""

    def __init__(self):
        super().__init__()
        norm, keys = torch.nn.utils.parametrizations.weight_norm, ["to[0]", "it's", "1x1"]
        self.plain = nn.ModuleDict({key: nn.Linear(64, 64) for key in keys})
        self.computed = nn.ModuleDict({key: norm(nn.Linear(64, 64)) for key in keys})

    def forward(self, x):
        for layer in (*self.plain.values(), *self.computed.values()):
            x = layer(x)
        return x


@pytest.mark.filterwarnings("error::fxmask.errors.FxMaskWarning")
@pytest.mark.parametrize("way", ["backend", "export", "strict export"])
def test_keys_with_brackets_and_quotes_are_names_as_others_are(way):
    model, x = Keyed(), torch.randn(4, 64)
    left = [f"{kind}.{key}" for kind in ("plain", "computed") for key in ("to[0]", "it's")]
    if way == "backend":
        compiled(model, **OPTIONS, exclude=left)(x)
    else:
        model = fxmask.apply(torch.export.export(model, (x,), strict=way.startswith("strict")).module(), **OPTIONS, exclude=left)
    assert [row["name"] for row in fxmask.explain(model).rows if not row["masked"]] == left


@pytest.mark.filterwarnings("error::fxmask.errors.FxMaskWarning")
def test_names_of_the_model_and_what_goes_by_no_names_are_not():
    x = torch.randn(4, 64)
    compiled(Net(breaks=False), **OPTIONS, criterion="random", exclude="head")(x)
    compiled(Wrap(mlp()), **OPTIONS, include="inner.*")(x)
    compiled(Net(), **OPTIONS)(x)
    block = Net().blocks[0]
    compiled(block, **OPTIONS, criterion="random")(x)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "exclude: <class 'torch.nn.modules.conv.Conv2d'> matches nothing")
        compiled(Net(), **OPTIONS, exclude=nn.Conv2d)(x)


def test_a_random_mask_that_several_layers_share_is_told_once():
    """Regional compilation: each block is the root of its names, so nothing shows when the graph is captured."""
    blocks = nn.ModuleList(in_place(Wrap(nn.Linear(64, 64)), **OPTIONS, criterion="random") for _ in range(3))
    x = torch.eye(64)
    blocks[0](x)
    with pytest.warns(FxMaskWarning, match=r"(?s)several layers.*share this graph.*where: inner.*use fxmask\.apply") as told:
        [blocks[i](x) for i in (1, 2, 0)]
    assert len(told) == 1


@pytest.mark.filterwarnings("error::fxmask.errors.FxMaskWarning")
@pytest.mark.parametrize("criterion", ["fro", "random"])
def test_a_weight_that_a_layer_is_given_later_shares_no_mask(criterion):
    block = in_place(Wrap(nn.Linear(64, 64)), **OPTIONS, criterion=criterion)
    block(torch.eye(64))
    block.load_state_dict({k: v.clone() for k, v in block.state_dict().items()}, assign=True)
    block(torch.eye(64))
    if criterion == "fro":  # goes by the weight
        in_place(Wrap(nn.Linear(64, 64)), **OPTIONS)(torch.eye(64))


class Halves(nn.Module):
    """Two graphs of one model, a linear in each."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        x = self.a(x)
        torch._dynamo.graph_break()
        return self.b(x)


@pytest.mark.filterwarnings("error::fxmask.errors.FxMaskWarning")
@pytest.mark.parametrize("options", [dict(include=["a", "b"]), dict(overrides={"a": dict(ratio=0.75), "re:b$": dict(ratio=0.25)})])
def test_a_pattern_for_another_graph_matches_something(options):
    compiled(Halves(), **OPTIONS, **options)(torch.randn(4, 64))


@pytest.mark.filterwarnings("ignore:backend='fxmask' masked nothing")
def test_a_pattern_for_no_graph_is_told():
    with pytest.warns(FxMaskWarning, match="exclude: 'c' matches nothing; there are: [ab]"):
        compiled(Halves(), **OPTIONS, exclude=["a", "c"])(torch.randn(4, 64))


@pytest.mark.filterwarnings("ignore:backend='fxmask' masked nothing")
@pytest.mark.parametrize("option", ["exclude", "include"])
def test_the_other_name_of_a_tied_layer_has_no_effect_and_is_told(option):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    with pytest.warns(FxMaskWarning, match=f"{option}: 'inner.1' matches nothing; there are: inner.0. A weight that .* here: inner.0"):
        compiled(Wrap(model), **OPTIONS, **{option: "inner.1"})(torch.randn(4, 64))


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("error::fxmask.errors.FxMaskWarning")
@pytest.mark.parametrize("splits", [False, True])
def test_names_under_ddp_are_the_model_s(one_rank, splits):
    """Dynamo skips DDP's own forward: the graph begins in what it wraps, without any break. DDP splits it, and gives its parts fake inputs."""
    torch.manual_seed(0)
    wide, x = Wrap(nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512))), torch.randn(4, 64)
    options, parts = {**OPTIONS, "overrides": {"inner.0": {"ratio": 0.25}}, "criterion": "random"}, []
    plain = fxmask.apply(copy.deepcopy(wide), **options)(x)

    def inner(gm, inputs):
        parts.append(gm)
        return gm.forward

    ddp = nn.parallel.DistributedDataParallel(wide, bucket_cap_mb=1)
    with torch._dynamo.config.patch(optimize_ddp=splits):
        assert torch.equal(compiled(ddp, inner, **options)(x), plain) and (len(parts) > 1) == splits
        torch._dynamo.reset()
        assert torch.equal(compiled(ddp, "aot_eager", **options)(x), plain)  # whose parts are called with fake inputs, too


class Mixed(nn.Module):
    """Parts of their own under DDP: convolutions, and each of two layers."""

    def __init__(self, layer=nn.Linear):
        super().__init__()
        self.c, self.d, self.a, self.b = nn.Conv2d(64, 512, 3), nn.Conv2d(512, 64, 3), layer(64, 512), layer(512, 512)

    def forward(self, x):
        return self.b(self.a(self.d(self.c(x).relu()).mean((2, 3))).relu())


NOTHING = "backend='fxmask' masked nothing in a graph: "
SAID = {  # options: what is said of the parts, the first of which has no linear
    "masks": ({}, []),
    "require": (dict(require=True), []),
    "a layer": (dict(require="b"), []),
    "left out": (dict(exclude=["a", "b"]), [f"{NOTHING}a: in exclude.", f"{NOTHING}b: in exclude."]),
    "half": (dict(exclude="a"), [f"{NOTHING}a: in exclude."]),
}


@pytest.mark.filterwarnings("ignore:Profiler record function")
@pytest.mark.parametrize("case", SAID)
def test_a_part_under_ddp_without_a_linear_says_nothing_where_others_have_some(case, one_rank):
    options, said = SAID[case]
    parts = []
    with torch._dynamo.config.patch(optimize_ddp=True), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FxMaskWarning)
        model = compiled(nn.parallel.DistributedDataParallel(Mixed(), bucket_cap_mb=1), lambda gm, _: parts.append(gm) or gm.forward, ratio=0.5, **options)
        model(torch.randn(2, 64, 6, 6))
    assert len(parts) == 3 and [str(w.message).split("\n")[0] for w in caught if w.category is FxMaskWarning] == said


def test_a_model_without_a_linear_is_told_of_under_ddp(one_rank):
    model = nn.parallel.DistributedDataParallel(Mixed(lambda *_: nn.Identity()), bucket_cap_mb=1)
    with torch._dynamo.config.patch(optimize_ddp=True), pytest.warns(FxMaskWarning, match=f"{NOTHING}it has no linear"):
        compiled(model, ratio=0.5)(torch.randn(2, 64, 6, 6))


@pytest.mark.parametrize(("linears", "require", "wanted"), [(False, True, "anything at all"), (False, "b", "'b'"), (True, "nobody", "'nobody'")])
def test_what_no_part_under_ddp_has_is_missed(linears, require, wanted, one_rank):
    model = Mixed() if linears else Mixed(lambda *_: nn.Identity())
    with torch._dynamo.config.patch(optimize_ddp=True):
        error = failing(nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1), torch.randn(2, 64, 6, 6), ratio=0.5, require=require)
    assert f"require: expected {wanted} to be masked in this graph, got nothing" in str(error)


class Early(nn.Module):
    """Computes its last layer's weight first."""

    def __init__(self):
        super().__init__()
        self.v, self.fc = nn.Parameter(torch.randn(64, 512)), nn.Linear(512, 512)

    def forward(self, x):
        w = self.v * 2
        return nn.functional.linear(self.fc(x), w)


@pytest.mark.filterwarnings("ignore:backend='fxmask' masked nothing in a graph")
def test_a_weight_that_one_part_of_a_graph_of_ddp_makes_for_another_is_refused(one_rank):
    with torch._dynamo.config.patch(optimize_ddp=True):
        error = failing(nn.parallel.DistributedDataParallel(Early(), bucket_cap_mb=1), torch.randn(4, 512), ratio=0.5)
    assert isinstance(error, UnsupportedError)
    assert re.search(r"no real tensor for w, as where DDP splits graphs(.|\n)*fix: set torch._dynamo.config.optimize_ddp = False, or use", str(error))


class Second(Halves):
    """Calls one of two layers that share a weight: what the graph calls it is the model's second name of it."""

    def forward(self, x):
        return self.b(x)


@pytest.mark.filterwarnings("error::fxmask.errors.FxMaskWarning")
def test_each_name_of_a_tied_weight_is_the_model_s():
    model = Second()
    model.b.weight = model.a.weight
    compiled(model, **OPTIONS, include="b", criterion="random")(torch.randn(4, 64))


class Named(nn.Module):
    """A layer whose name is that of the other one's call in a graph."""

    def __init__(self):
        super().__init__()
        self.first, self.linear = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.linear(self.first(x).relu())


def test_a_layer_does_not_go_by_the_name_of_its_call():
    model = compiled(Named(), "aot_eager", **OPTIONS, include="linear")
    model(torch.randn(2, 64))
    assert [row["name"] for row in fxmask.explain(model).rows if row["masked"]] == ["linear"]


def handed_on(forward):
    """As decorators around a forward do it, those of transformers among them."""

    @functools.wraps(forward)
    def wrapper(*args, **kwargs):
        return forward(*args, **kwargs)

    return wrapper


class Decorated(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.made = nn.Linear(64, 64), nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))

    @handed_on
    def forward(self, x, q, k):
        return self.made(self.fc(x)) + F.linear(q, k)


@pytest.mark.parametrize("call", [compiled, in_place])
@pytest.mark.parametrize("by_name", [False, True])
def test_names_behind_a_decorator_are_the_model_s_and_what_it_hands_on_are_inputs(by_name, call):
    model, x, q, k = Decorated(), *(torch.randn(64, 64) for _ in range(3))
    placed, named = ((x,), {"q": q, "k": k}) if by_name else ((x, q, k), {})
    masked = call(model, **OPTIONS, overrides={"fc": False, "made": dict(ratio=0.5)})
    with pytest.warns(FxMaskWarning, match=r"^linear(_\d)? stays dense: its weight is a plain tensor, not a parameter\.$") as told:
        masked(*placed, **named)
    assert len(told) == 1 and [(r["name"], r["masked"]) for r in fxmask.explain(model).rows] == [("fc", False), ("made", True)]
