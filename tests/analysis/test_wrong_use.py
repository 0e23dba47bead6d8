"""What `fxmask.analyze` cannot serve: each error says what was expected, where, and how to go on."""

import builtins
import logging
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import fxmask
from fxmask.analysis import plots
from fxmask.errors import ConfigError, FxMaskError, UnsupportedError
from fxmask.passes.counting.fakes import quiet

X = torch.randn(3, 16)


def net():
    return nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 8))


def analyze(model, inputs, **options):
    return fxmask.analyze(model, inputs, **{"device": "h100-sxm", **options})


WRONG = {
    "device": ({"device": "h1000"}, r"unknown device: expected one of a30, .*h100-sxm.*, or cpu, got 'h1000'"),
    "cuda": ({"device": "cuda:99"}, r"no such device here: expected one of .* got 'cuda:99'"),
    "phases": ({"phases": ("fwd", "backward")}, r"phases: expected a sequence of fwd, dX, dW, opt, got \('fwd', 'backward'\)"),
    "phase as a string": ({"phases": "fwd"}, r"phases: expected a sequence of .* got 'fwd'"),
    "no phases": ({"phases": ()}, r"phases: expected a sequence of .* got \(\)"),
    "impl": ({"impl": "cuda"}, r"impl: expected one of triton, reference or None, got 'cuda'"),
    "optimizer": ({"optimizer": "adamm"}, r"optimizer: expected one of adamw, .*, an instance of one of them, or None, got 'adamm'"),
    "no optimizer": ({"optimizer": object}, r"optimizer: expected one of"),
    "dtype": ({"dtype": torch.int8}, r"dtype: expected a floating dtype, such as torch.bfloat16, or None, got torch.int8"),
    "dtype by name": ({"dtype": "bfloat16"}, r"dtype: expected a floating dtype.* got 'bfloat16'"),
    "steps": ({"steps": -1}, r"steps: expected a number of steps or None, got -1"),
    "steps by name": ({"steps": "10"}, r"steps: expected a number of steps or None, got '10'"),
    "half a step": ({"steps": 0.5}, r"steps: expected a number of steps"),
    "masked step": ({"masked_step": 1}, r"masked_step: expected True, False or None, got 1"),
    "strict": ({"strict": 1}, r"strict: expected True or False, got 1"),
    "elementwise": ({"count_elementwise": None}, r"count_elementwise: expected True or False, got None"),
    "memory model": ({"memory_model": "thesis2"}, r"memory_model: expected one of .*thesis.*, got 'thesis2'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_options(case):
    options, text = WRONG[case]
    with pytest.raises(ConfigError, match=text):
        analyze(net(), X, **options)


@pytest.mark.parametrize("error", [ConfigError("so it is"), FxMaskError("so it is")], ids=["config", "root"])
def test_an_error_of_the_house_stays_what_it_is(error):
    """It says by itself what is wrong, where, and how to fix it."""

    class Refuses(nn.Identity):
        def forward(self, x):
            raise error

    with pytest.raises(FxMaskError) as caught:
        analyze(nn.Sequential(nn.Linear(16, 16), Refuses()), X)
    assert caught.value is error


def test_an_optimizer_that_is_not_known():
    model = net()
    with pytest.raises(ConfigError, match=r"optimizer: expected one of .*, got an instance of LBFGS\.\n  fix: name the one"):
        analyze(model, X, optimizer=torch.optim.LBFGS(model.parameters()))
    assert analyze(model, X, optimizer="adamm", phases=("fwd",)).summary["optimizer"] == "none"


@pytest.mark.parametrize("model", [None, lambda x: x, nn.Linear, "timm:vit", torch.zeros(2)], ids=["none", "function", "class", "name", "tensor"])
def test_what_is_no_model(model):
    with pytest.raises(ConfigError, match=r"analyze takes an nn.Module, an fx.GraphModule or a torch.export.ExportedProgram: got \w+"):
        analyze(model, X)


@pytest.mark.parametrize("inputs", [None, (), {}, (3, 16), "1x3", [[1.0]]], ids=repr)
def test_what_is_no_input(inputs):
    with pytest.raises(ConfigError, match=r"inputs: expected a tensor, a tuple of arguments or a dict .* with at least one tensor in it, got \w+"):
        analyze(net(), inputs)


@pytest.mark.parametrize("inputs", [(3, 16), [3, 16], torch.Size((3, 16))], ids=repr)
def test_a_shape_is_told_which_tensor_it_is(inputs):
    with pytest.raises(ConfigError, match=r"in it, got a shape; its tensor is torch\.empty\(\(3, 16\), device='meta'\)\."):
        analyze(net(), inputs)
    assert analyze(net(), torch.empty((3, 16), device="meta")).rows


class Refuses(nn.Module):
    def forward(self, x):
        raise ValueError("an image of another size was expected")


def test_inputs_of_the_wrong_shape():
    """The message names the layer that broke and the shapes."""
    with pytest.raises(UnsupportedError, match=r"(?s)got \[5, 17\] X \[16, 24\].*where: 0, after .*fix: check the inputs' shapes"):
        analyze(net(), torch.randn(5, 17))
    model = net()
    model[2] = nn.Linear(23, 8)
    with pytest.raises(UnsupportedError, match=r"(?s)got \[3, 24\] X \[23, 8\].*where: 2, after aten"):
        analyze(model, X)
    with pytest.raises(UnsupportedError, match=r"(?s)TypeError.*takes 2 positional arguments but 3 were given"):
        analyze(net(), (X, X))
    with pytest.raises(UnsupportedError, match=r"(?s)unexpected keyword argument 'pixels'"):
        analyze(net(), {"pixels": X})
    gm = torch.fx.symbolic_trace(net())
    with pytest.raises(UnsupportedError, match=r"(?s)\[5, 17\].*where: _0, after"):
        analyze(gm, torch.randn(5, 17))
    with pytest.raises(UnsupportedError, match=r"where: \(model\), after nothing"):
        analyze(Refuses(), X)
    makes = nn.Identity()
    makes.forward = lambda x: nn.Linear(5, 5)(x)  # it has no name
    with pytest.raises(UnsupportedError, match=r"(?s)got \[3, 24\] X \[5, 5\].*where: 1, after aten"):
        analyze(nn.Sequential(nn.Linear(16, 24), makes), X)


class Reads(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.fc, self.how = nn.Linear(16, 8), how

    def forward(self, x):
        x = self.fc(x)
        if self.how == "item":
            return x * x.sum().item()
        if self.how == "if":
            return x if x.sum() > 0 else -x
        if self.how == "list":
            return x * max(x.flatten().tolist())
        if self.how == "numpy":
            return x + torch.from_numpy(x.detach().numpy())
        return x[x > 0]


@pytest.mark.parametrize("how", ["item", "if", "list", "numpy", "index"])
def test_models_that_read_values(how):
    if how == "index":  # a boolean index makes a shape of values
        with pytest.raises(UnsupportedError, match=r"(?s)cannot run on fake tensors.*where: \(model\), after aten.*fix: .*pass the part of the model that"):
            analyze(Reads(how), X)
        return
    with pytest.raises(UnsupportedError, match=r"(?s)the model cannot run on fake tensors.*where: .*fix: .*\.item\(\), an if over a tensor.*symbolic_trace"):
        analyze(Reads(how), X)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return torch.cond(x.sum() > 0, self.a, self.b, (x,))


@pytest.mark.parametrize("form", [lambda m: m, lambda m: torch.export.export(m, (X,)).module()], ids=["module", "exported"])
def test_bodies_that_values_choose(form):
    with pytest.raises(UnsupportedError, match=r"no values: .*the bodies of cond are not counted, as which of them run.*\n  where: .*, after aten\.\w+\n"):
        analyze(form(Branches()), X)


class Raises(nn.Module):
    def forward(self, x):
        raise ValueError


def test_a_model_that_raises_before_any_op_and_without_a_word():
    """The innermost module is named."""
    with pytest.raises(UnsupportedError, match=r"have shapes and no values: ValueError: \n  where: 0\.1, after nothing\n"):
        analyze(nn.Sequential(nn.Sequential(nn.Identity(), Raises())), X)


def test_wrapped_and_lazy_parameters():
    model = nn.Linear(16, 8)
    model.weight = nn.Parameter(TwoTensor(torch.zeros(8, 16), torch.zeros(8, 16)))
    with pytest.raises(UnsupportedError, match=r"(?s)plain fake tensors: expected none of a wrapper class, got .*before fully_shard"):
        analyze(model, X)
    sparse = nn.Linear(16, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, once a process: sparse tensors are in beta
        sparse.weight = nn.Parameter(sparse.weight.detach().to_sparse_bsr((8, 8)), requires_grad=False)
    with pytest.raises(UnsupportedError, match=r"(?s)expected strided tensors, got one with layout torch.sparse_bsr.*before fxmask.finalize"):
        analyze(sparse, X)
    lazy = nn.Sequential(nn.LazyLinear(8))
    with pytest.raises(UnsupportedError, match=r"(?s)expected none that is lazy.*run one forward first"):
        analyze(lazy, X)
    lazy(X)
    assert analyze(lazy, X).summary["flop"]["fwd"] == 2 * 3 * 16 * 8


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_inputs(layout):
    nested = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(2, 16)], layout=layout)
    with pytest.raises(UnsupportedError, match=r"expected plain ones, got a nested tensor\.\n  fix: give it a padded one"):
        analyze(nn.Linear(16, 16), nested)


@pytest.mark.parametrize("layer", [nn.Embedding(16, 32, sparse=True), nn.EmbeddingBag(16, 32, sparse=True)], ids=["Embedding", "EmbeddingBag"])
def test_sparse_gradients(layer):
    """How many rows they have is a value. The forward has none of them, and without `sparse` the layer is counted."""
    model, x = nn.Sequential(layer, nn.Linear(32, 32)), torch.zeros(4, 3, dtype=torch.long)
    with pytest.raises(UnsupportedError, match=r"(?s)counts no gradients with layout torch.sparse_coo.*where: 0\n.*sparse=False.*phases=\('fwd',\)"):
        analyze(model, x)
    assert analyze(model, x, phases=("fwd",)).summary["flop"]["fwd"] > 0
    layer.sparse = False
    assert analyze(model, x).summary["flop"]["bwd_dw"] > 0


# ---- of the result -----------------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def report():
    return analyze(net(), X)


def test_unknown_names(report):
    with pytest.raises(ConfigError, match=r"no node or module 'fc1' in this analysis: expected one of its 2 nodes, such as 0:addmm, 2:addmm, or a"):
        report.explain("fc1")
    with pytest.raises(ConfigError, match=r"no table 'nope': expected one of summary, modules, nodes, traffic"):
        report.text("nope")
    with pytest.raises(ConfigError, match=r"no table 'energy'"):
        report.printed("energy")
    with pytest.raises(ConfigError, match=r"format: expected one of csv, json, markdown, html, latex, text, got 'xml'"):
        report.printed("nodes", "xml")


def test_files_that_cannot_be_written(report, tmp_path):
    for formats in (("csv", "xml"), "xml", ()):
        with pytest.raises(ConfigError, match=r"Analysis.save: expected formats among csv, json, .* got ('xml'|none)"):
            report.save(tmp_path / "out", formats=formats)
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "file" / "below.json"):
        with pytest.raises(ConfigError, match=r"(?s)the output folder cannot be written: .*where: .*fix: name a folder that you may write to"):
            report.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "mine"


def test_measurements_of_something_else(report):
    with pytest.raises(ConfigError, match=r"timings: expected seconds above 0, got 0"):
        report.attach_measurements(timings={"0": 0})
    with pytest.raises(ConfigError, match=r"measurements are named fc9: expected nodes or modules of this analysis, such as"):
        report.attach_measurements(timings={"fc9": 1e-3})
    with pytest.raises(ConfigError, match=r"energy: expected a row, as fxmask.analysis.energy.measure_energy gives one, got 2\.5\."):
        report.attach_measurements(timings={"0": 1e-3}, energy=2.5)
    assert "measured" not in report.tables and "energy" not in report.tables


def test_without_optional_packages(report, monkeypatch, tmp_path):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] in ("matplotlib", "pandas"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UnsupportedError, match=r"(?s)plots need matplotlib.*pip install 'fxmask\[plot\]'"):
        plots.roofline(report, tmp_path / "a.png")
    with pytest.raises(ImportError, match="pandas"):
        report.to_pandas("nodes")
    assert report.text("nodes") and not list(tmp_path.iterdir())


def test_a_wrong_input_is_told_of_once():
    """PyTorch's fake tensors log a traceback of their own: not during the run, and as before after it; another thread's are not ours to hide."""
    log, seen = logging.getLogger("torch._subclasses.fake_tensor"), []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    before = list(log.filters), log.level, log.disabled
    log.addHandler(handler)
    try:
        with pytest.raises(UnsupportedError, match=r"a and b must have same reduction dim"):
            fxmask.analyze(nn.Linear(64, 32), torch.empty(7, 65), device="h100-sxm")
        assert not seen and (list(log.filters), log.level, log.disabled) == before
        log.error("afterwards")
        with quiet():
            log.error("here")
            log.warning("no error")
            other = threading.Thread(target=log.error, args=("there",))
            other.start()
            other.join()
        assert seen == ["afterwards", "no error", "there"]
    finally:
        log.removeHandler(handler)


def test_all_errors_have_one_root():
    assert issubclass(ConfigError, (FxMaskError, ValueError)) and issubclass(UnsupportedError, FxMaskError)


# ---- arguments of the wrong kind -----------------------------------------------------------------------------------------------------------------------

KINDS = {
    "no phases at all": ({"phases": None}, r"phases: expected a sequence of .* got None"),
    "a number of phases": ({"phases": 3}, r"phases: expected a sequence of .* got 3"),
    "kwargs in a list": ({"kwargs": [1]}, r"kwargs: expected a dict of the forward's keyword arguments, or None, got \[1\]"),
    "kwargs by number": ({"kwargs": {1: 2}}, r"kwargs: expected a dict of the forward's keyword arguments, or None, got \{1: 2\}"),
    "progress": ({"progress": 3}, r"progress: expected a function of the number of ops so far, or None, got 3"),
}


def test_an_input_is_given_alone_in_a_tuple_in_a_list_or_by_name():
    model = nn.Linear(16, 8)
    found = [fxmask.analyze(model, given).summary for given in (X, (X,), [X], {"input": X})]
    assert all(summary == found[0] for summary in found)


@pytest.mark.parametrize("case", KINDS)
def test_options_of_another_kind(case):
    options, text = KINDS[case]
    with pytest.raises(ConfigError, match=text):
        analyze(net(), X, **options)
    assert analyze(net(), X, phases=(p for p in ("fwd", "dX")), kwargs={}).summary["flop"]["bwd_dx"] > 0


def test_an_optimizer_of_another_model():
    other = torch.optim.SGD(net().parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"(?s)optimizer: expected one that holds parameters of the analysed model, got SGD of 4 others.*fix: make it of"):
        analyze(net(), X, optimizer=other)
    model = net()
    part = torch.optim.SGD(model[0].parameters(), lr=0.1)
    assert analyze(model, X, optimizer=part).summary["bytes_min"]["opt"] == 3 * 4 * (16 * 24 + 24)


@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")
def test_scripted_modules():
    for model, where in ((torch.jit.trace(net(), X), r"\(model\)"), (nn.Sequential(nn.Linear(16, 16), torch.jit.trace(net(), X)), "1")):
        with pytest.raises(UnsupportedError, match=rf"(?s)expected none that torch.jit has compiled.*where: {where}\n.*fix: analyse the model that was"):
            analyze(model, X)


def test_what_an_analysis_is_asked_with(report):
    with pytest.raises(ConfigError, match=r"explain: expected the name of a node or a module, got 3"):
        report.explain(3)
    with pytest.raises(ConfigError, match=r"compare: expected another analysis, as fxmask.analyze gives one, got 3"):
        report.compare(3)
    with pytest.raises(ConfigError, match=r"timings: expected seconds above 0, got 'a' for '0'"):
        report.attach_measurements(timings={"0": "a"})
    with pytest.raises(ConfigError, match=r"timings: expected a dict of seconds by node or module, got 3"):
        report.attach_measurements(timings=3)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_factors_of_two_dtypes_are_noted(masked, dtype):
    model = nn.Sequential(nn.Linear(16, 16))
    model = fxmask.apply(model, ratio=0.5, block=(8, 8)) if masked else model
    noted = [n for n in analyze(model, X.to(dtype)).notes if "two dtypes" in n]
    assert len(noted) == 1 and noted[0].startswith("1 products") and f"such as 0 of {str(dtype)[6:]} and float32" in noted[0]
    assert not [n for n in analyze(model, X).notes if "two dtypes" in n]
