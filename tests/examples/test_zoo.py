"""The zoo with tiny stand-ins: its checks see what they should, and nothing that a model does ends it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from zoo import captures, catalogue, compiled, equality, graphs, results, run, sources, summary
from zoo.catalogue import Entry
from zoo.checks import Subject, applied, chosen, in_float64
from zoo.compiled import by_aot_eager
from zoo.sources import Made

from fxmask.compiler import backend

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)  # of zoo_stand_ins; the models' processes inherit it


def zoo(path: Path, *names: str, more: tuple[str, ...] = (), code: int = 0) -> dict[str, results.Row]:
    """The rows of stand-ins, by name."""
    assert run.main(["--csv", str(path), "--own", *(f"zoo_stand_ins:{name}" for name in names), *more]) == code
    return {name.partition(":")[2]: row for (_, name), row in results.read(path).items()}


@pytest.mark.slow
def test_checks_limits_and_going_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One test for all of it, as the first process costs the imports."""
    path = tmp_path / "zoo.csv"
    cheap = ("--checks", "apply", "guard")
    small = zoo(path, "small")["small"]
    assert small["status"] == "ok" and small["input"] == "5x32"
    assert (small["linears"], small["eligible"], small["left_out"], small["apply"], small["unreached"]) == ("4", "3", "1 smaller than 16", "3", "1")
    assert (small["train"], small["eval"], small["guard"], small["analyze"], small["flop_equal"]) == ("bits", "bits", "yes", "yes", "yes")
    assert (small["trace"], small["graph"], small["export"], small["stock"], small["inductor"]) == ("2", "2", "yes", "1", "")
    assert (small["backend"], small["backend_equal"]) == ("2", "bits") and "unused" in small["backend_why"]

    rows = zoo(path, "both", "scaled", more=("--checks", "apply", "backend"))
    for name, told in (("both", "not by apply: unused.weight"), ("scaled", "not by apply: unused (a computed weight)")):
        assert tuple(rows[name][column] for column in ("apply", "backend", "backend_equal")) == ("2", "3", "bits") and told in rows[name]["backend_why"]

    rows = zoo(path, "bypass", "network", "broken", "hungry", "killed", more=(*cheap, "--gigabytes", "3"), code=1)
    assert rows["bypass"]["train"].startswith("no: ") and rows["bypass"]["eval"].startswith("no: ") and rows["bypass"]["guard"] == "no"
    assert rows["network"]["status"].startswith("skipped: needs files from a network")
    assert rows["broken"]["status"] == "build: ValueError: no such model"
    assert rows["hungry"]["apply_why"] == "out of memory"
    assert "SIGKILL" in rows["killed"]["apply_why"] and "SIGKILL" in rows["killed"]["guard_why"]  # the second check has a process of its own
    assert rows["small"] == small

    with path.open("a") as file:  # a run that was killed while it wrote
        file.write("own,zoo_stand_ins:slow,zoo_st")
    rows = zoo(path, "slow", more=("--checks", "apply", "--seconds", "4"))
    assert (rows["slow"]["apply"], rows["slow"]["apply_why"]) == ("no", "out of time: 4 s") and len(rows) == 9
    capsys.readouterr()
    zoo(path, "small", "slow", more=("--checks", "apply"))
    assert capsys.readouterr().out.startswith("0 models with something to do, 9 in ")
    page = path.with_suffix(".md").read_text()
    assert "needs files from a network" in page and "| own:zoo_stand_ins:bypass |" in page and "own:zoo_stand_ins:small" not in page
    assert "out of memory" in page and "out of time: N s" in page


@pytest.mark.slow
def test_a_run_that_is_ended_ends_its_models(tmp_path: Path) -> None:
    path, pipe = tmp_path / "zoo.csv", tmp_path / "pipe"
    os.mkfifo(pipe)
    words = [run.__file__, "--csv", str(path), "--own", "zoo_stand_ins:waiting", "--checks", "masks"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]), "ZOO_WAITS": str(pipe)}
    with (tmp_path / "said").open("w") as said, subprocess.Popen([sys.executable, *words], env=environment, stderr=said) as process:
        model = int(pipe.read_text())
        process.terminate()
    gone = False
    try:
        os.kill(model, signal.SIGKILL)
    except ProcessLookupError:
        gone = True
    assert gone and process.returncode == 130 and not results.read(path)
    assert "the same command goes on" in (tmp_path / "said").read_text()


def test_a_comparison_fails_where_numbers_differ() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(5, 32), nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32))
    made = Made(model, (x,))
    subject = Subject(made)
    dense, masked = equality.run(subject.dense(), made), equality.run(subject.masked(), made)
    assert equality.compare(masked, dense, subject.masks) == "bits"
    assert equality.compare(equality.run(model, made), dense, subject.masks).startswith("no: ")
    assert equality.compare(dense, dense, {}) == "bits" and equality.compare(masked, dense, {}).startswith("no: ")  # dW of masked weights
    masked.outputs[0] += 1e-6 * masked.outputs[0]
    assert equality.compare(masked, dense, subject.masks) == "rounding"
    dense.outputs[0].fill_(torch.nan)
    assert "not finite" in equality.compare(masked, dense, subject.masks)


def two() -> Made:
    torch.manual_seed(0)
    return Made(nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32)), (torch.randn(5, 32),))


def test_what_float32_cannot_tell_is_compared_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.equality._distance", lambda a, b: float(a.dtype == torch.float32))
    monkeypatch.setattr("torch.equal", lambda a, b: False)
    assert applied(Subject(two()))["train"] == "rounding"
    monkeypatch.setattr("zoo.equality._distance", lambda a, b: 2.0 * (a.dtype == torch.float32))
    row = applied(Subject(two()))
    assert row["train"] == row["eval"] == "float64" and "float32 train: no" in row["apply_why"]


def test_a_fault_of_float32_alone_does_not_hide_behind_float64() -> None:
    subject = Subject(two())
    (masked, dense), wide, masks = (equality.run(m, subject.made) for m in (subject.masked(), subject.dense())), in_float64(subject, "train"), subject.masks
    assert equality.settle((masked, dense), wide, masks) == "float64"
    off = equality.Outcome([1.001 * y for y in masked.outputs], masked.gradients)
    assert equality.settle((off, dense), wide, masks).startswith("no: output 0 is ")
    rough = equality.Outcome([0.9995 * y for y in dense.outputs], dense.gradients)  # plain PyTorch itself is half as far off
    assert equality.settle((off, rough), wide, masks) == "float64"
    off.outputs[0][0] = torch.nan
    assert "inf times" in equality.settle((off, rough), wide, masks)
    assert equality.settle((equality.Outcome(2 * masked.outputs, {}), dense), wide, masks) == "no: 2 outputs for 1"
    assert equality.settle((masked, dense), (wide[0], equality.Outcome([2 * y for y in wide[1].outputs], wide[1].gradients)), masks).endswith("as rounding")


def test_so_is_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "compare_outputs", lambda a, b: "no: far")
    row = graphs.export_rewritten(Subject(two()))
    assert (row["graph"], row["graph_equal"]) == (2, "float64") and "float32: no: far" in row["graph_why"]
    monkeypatch.setattr(graphs, "settle", lambda narrow, wide, masks: "no: farther")
    assert graphs.export_rewritten(Subject(two()))["graph_equal"] == "no: farther"


def test_masks_of_other_blocks_are_wrong() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 70))  # 5 x 3 blocks, ragged
    masks = equality.element_masks(equality.masked_copy(model))
    kept = masks["0.weight"]
    assert equality.wrong_masks(model, masks) == [] and int(kept[::16, ::16].sum()) == 8
    (i, j), (m, n) = ((16 * t[0]).tolist() for t in (kept[::16, ::16].nonzero(), (~kept[::16, ::16]).nonzero()))
    element, less, other = kept.clone(), kept.clone(), kept.clone()
    element[i, j] = False
    less[i : i + 16, j : j + 16] = False
    other[i : i + 16, j : j + 16], other[m : m + 16, n : n + 16] = False, True
    for wrong in (element, less, other, torch.ones_like(kept)):
        assert equality.wrong_masks(model, {"0.weight": wrong}) == ["0.weight"]
    with torch.no_grad():
        model[0].weight.fill_(0.5)[64:] = 2.0  # whole blocks are equal
    assert equality.wrong_masks(model, equality.element_masks(equality.masked_copy(model))) == []


def test_a_row_of_wrong_masks_or_layers_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(Subject(two())) == {"masks": "yes", "masks_why": ""}
    monkeypatch.setattr("zoo.checks.wrong_masks", lambda model, masks: sorted(masks)[:1])
    assert chosen(Subject(two())) == {"masks": "no", "masks_why": "not the larger half of the blocks: 0.weight"}
    assert chosen(Subject(Made(nn.Sequential(nn.Linear(8, 8)))))["masks"] == "-"
    row = dict.fromkeys(results.COLUMNS, "") | {"eligible": "2", **{k: str(v) for k, v in applied(Subject(two())).items()}}
    assert summary.masked(row) and not any(summary.masked({**row, "apply_why": words + "x"}) for words in (results.MISSED, results.BEYOND))


def test_what_has_nothing_to_mask_shows_nothing() -> None:
    empty = dict.fromkeys(results.COLUMNS, "") | {"eligible": "0", "apply": "0", "train": "bits", "eval": "bits", "status": "ok"}
    full = {**empty, "eligible": "2", "apply": "2"}
    assert summary.asked_of([empty, full], "apply") == [full] and summary.asked_of([empty | {"eligible": "1"}], "apply")
    assert summary.masked(full) and not summary.masked(full | {"apply": "1"}) and not summary.masked(full | {"train": "no: far"})


def test_memory_is_not_stock_pytorch_s_fault() -> None:
    assert captures.by_stock_pytorch(MemoryError()) == "out of memory" and captures.by_stock_pytorch(ValueError("x")) == "stock PyTorch: ValueError: x"


def test_a_model_that_a_limit_kept_out_is_tried_again() -> None:
    for status in ("build: out of memory", "build: out of time: 4 s", "build: ended by SIGKILL, 8 GB allowed", "ok", ""):
        assert results.to_do({"status": status, "guard": "yes"}, ["apply", "guard"]) == ["apply"]
    for status in ("build: ValueError: no", "skipped: needs files from a network (x)"):
        assert results.to_do({"status": status, "source": "timm"}, ["apply"]) == []
        assert results.to_do({"status": status, "source": "own"}, ["apply"]) == ["apply"], "its owner may have mended it"


def test_own_models_have_their_own_csv_and_are_made_or_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And are tried again, whatever the first run found. No process here."""
    readme = tmp_path / "README.md"
    readme.write_bytes(run.README.read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "README", readme)
    monkeypatch.setattr(run, "CSV", tmp_path / "zoo.csv")
    made = {"linears": "0", "eligible": "0", "apply": "0"}
    monkeypatch.setattr(run, "one", lambda entry, row, checks, a: {**results.blank(entry), "status": status, **(made if status == "ok" else {})})
    for status, code in (("build: ValueError: no such model", 1), ("ok", 0), ("build: never asked", 0)):
        assert run.main(["--own", "a.b:model", "--checks", "apply"]) == code
        said = capsys.readouterr()
        assert ("1 models with" in said.out) == (status != "build: never asked") and ("zoo: a.b:model: build: ValueError" in said.err) == bool(code)
    assert list(results.read(tmp_path / run.OWN_CSV)) == [("own", "a.b:model")] and (tmp_path / run.OWN_CSV).with_suffix(".md").exists()
    assert not run.CSV.exists() and readme.read_bytes() == (Path(run.__file__).parents[2] / "README.md").read_bytes()


@pytest.mark.parametrize(("name", "got"), [("alone", "Sequential"), ("untupled", "(Linear, Tensor)")])
def test_what_an_own_model_has_to_come_as(name: str, got: str) -> None:
    with pytest.raises(TypeError, match=rf"expected \(model, args\).* from zoo_stand_ins:{name}, got {re.escape(got)}$"):
        sources.make(Entry("own", "zoo_stand_ins", f"zoo_stand_ins:{name}"))


@pytest.mark.parametrize("name", ["named", "encoded", "made"])
def test_inputs_of_an_own_model_by_name(name: str) -> None:
    made = sources.make(Entry("own", "zoo_stand_ins", f"zoo_stand_ins:{name}"))
    assert made.shapes() == "input 5x32" and type(made.kwargs) is dict


def test_the_readme_counts_no_own_models() -> None:
    rows = list(results.read(run.CSV).values())
    assert summary.into(run.README.read_text(), [*rows, {**rows[0], "source": "own", "name": "a:b"}]) == run.README.read_text()


def test_two_runs_with_one_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "zoo.csv"
    with results.alone(path):
        assert run.main(["--csv", str(path), "--own", "zoo_stand_ins:small"]) == 2
    assert "another run appends to it" in capsys.readouterr().err and not path.exists()
    with results.alone(path):
        pass


def test_nothing_is_run_where_no_model_or_no_package_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "zoo.csv"
    assert run.main(["--csv", str(path), "--only", "resnet1o1"]) == 2 and "no model of the list is called resnet1o1" in capsys.readouterr().err
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    assert run.main(["--csv", str(path), "--source", "timm", "--limit", "1"]) == 2 and "no package timm" in capsys.readouterr().err
    assert not path.exists()


def test_stock_inductor_stands_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model: model)
    assert compiled.by_stock_inductor(Subject(two())) == {"inductor_stock": "bits", "inductor_stock_why": ""}
    monkeypatch.setattr(torch, "compile", lambda model: lambda x: 2 * model(x))
    row = compiled.by_stock_inductor(Subject(two()))
    assert row["inductor_stock"] == "no" and row["inductor_stock_why"].startswith("no: ")
    monkeypatch.setattr(torch, "compile", lambda model: 1 / 0)
    assert compiled.by_stock_inductor(Subject(two())) == {"inductor_stock": "no", "inductor_stock_why": "ZeroDivisionError: division by zero"}


def test_a_graph_that_float64_cannot_have_keeps_what_float32_says(monkeypatch: pytest.MonkeyPatch) -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.to(torch.float32))

    monkeypatch.setattr(graphs, "compare_outputs", lambda a, b: "no: far")
    row = graphs.export_rewritten(Subject(Made(Narrow(), (torch.randn(5, 32),))))
    assert (row["graph"], row["graph_equal"]) == (1, "no: far") and "float64: " in row["graph_why"]


def test_a_graph_is_compared_with_itself_where_it_masks_more_than_apply() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.extra = nn.Linear(32, 48), nn.Parameter(torch.randn(40, 48))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(self.linear(x), self.extra)

    torch.manual_seed(0)
    row = graphs.export_rewritten(Subject(Made(Both(), (torch.randn(5, 32),))))
    assert row["graph"] == 2 and row["graph_equal"] in ("bits", "rounding")
    assert "masked, and not by apply: extra" in row["graph_why"] and "apply: no: " in row["graph_why"]


def test_weights_that_a_graph_computes_are_named_and_left_out_of_the_comparison() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.experts = nn.Linear(32, 48), nn.Parameter(torch.randn(2, 40, 48))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            return nn.functional.linear(x, self.experts[0]) + nn.functional.linear(x, self.experts[1])

    torch.manual_seed(0)
    row = graphs.export_rewritten(Subject(Made(Experts(), (torch.randn(5, 32),))))
    assert row["graph_equal"] == "bits" and row["graph_why"].count(captures.COMPUTED) == 2


def test_a_graph_that_is_no_longer_the_model_is_not_the_pass_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter(["no: far", "bits"])  # from `apply`, and from the same graph with W∘M written in
    monkeypatch.setattr(graphs, "compare_outputs", lambda a, b: next(said))
    monkeypatch.setattr(graphs, "settle", lambda narrow, wide, masks: "no: farther")
    row = graphs.export_rewritten(Subject(two()))
    assert row["graph"] == "no" and row["graph_why"].startswith(captures.STOCK) and "no: farther" in row["graph_why"]


@torch._dynamo.disable
def eagerly(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Behind a graph break."""
    out: torch.Tensor = m(x)
    return out


class Half(nn.Module):
    """Two linears, the second in eager code alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return eagerly(self.second, self.first(x))


def test_the_backend_is_asked_for_what_a_graph_has_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs in eager code is named; what a graph has and the backend leaves dense is wrong."""
    torch.manual_seed(0)
    x = torch.randn(5, 32)
    half = by_aot_eager(Subject(Made(Half(), (x,))))
    assert (half["backend"], half["backend_equal"]) == (1, "bits") and "not masked: second.weight" in half["backend_why"]
    whole = Made(nn.Sequential(nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32))), (x,))
    assert by_aot_eager(Subject(whole))["backend"] == 2
    find = backend.find_lifted
    for kept in (0, 1):
        monkeypatch.setattr(backend, "find_lifted", lambda *args, kept=kept: find(*args)[:kept])
        row = by_aot_eager(Subject(whole))
        assert row["backend"] == kept and row["backend_equal"].startswith("no: ")


def test_the_list() -> None:
    entries = catalogue.listed()
    families = {e.family for e in entries if e.source == "timm"}
    count = {s: sum(e.source == s for e in entries) for s in catalogue.SOURCES}
    assert len(families) >= 60 and count["timm"] >= 200 and count["huggingface"] >= 50 and count["torchvision"] >= 70
    assert len({(e.source, e.name) for e in entries}) == len(entries)
    assert [e.name for e in catalogue.chosen(entries, ["torchvision"], ["resnet1*"])] == ["resnet18", "resnet101", "resnet152"]
    assert len(catalogue.smallest_of_families(entries, 60)) == 60
    small = catalogue.smallest_of_families(entries, 45)
    assert [sum(e.source == source for e in small) for source in catalogue.SOURCES[:3]] == [15, 15, 15]  # each in turn: parameters of tiny configurations are 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--jobs", "0"], "--jobs: expected more than 0"),
        (["--limit", "0"], "--limit: expected more than 0"),
        (["--seconds", "inf"], "--seconds: expected more than 0, and a finite number, got inf"),
        (["--gigabytes", "nan"], "--gigabytes: expected more than 0, and a finite number, got nan"),
        (["--own", "nothing"], "expected module:callable"),
    ],
)
def test_wrong_arguments(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(words)
    assert text in capsys.readouterr().err


def test_another_csv_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "zoo.csv"
    for held in (b"a,b\n1,2\n", b"\xff\xfe\x00"):
        path.write_bytes(held)
        assert run.main(["--csv", str(path)]) == 2
        assert "expected a csv of the zoo" in capsys.readouterr().err and path.read_bytes() == held


def test_who_wants_a_network_is_told_by_what_it_came_from() -> None:
    error = OSError("cannot load the files")
    assert not sources.wants_network(error)
    error.__cause__ = ConnectionError("no")
    assert sources.wants_network(error)


def test_the_pages_are_those_of_the_csv() -> None:
    rows = list(results.read(run.CSV).values())
    assert run.CSV.with_suffix(".md").read_text() == summary.page(rows)
    assert run.README.read_text() == summary.into(run.README.read_text(), rows)
