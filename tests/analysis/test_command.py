"""`fxmask analyze` from a command line: what it prints and writes, and how it ends where it cannot."""

import csv
import json
import os
import re
import subprocess
import sys
from unittest import mock

import pytest
import torch
from analysis.spec import SPEC, models, net  # noqa: F401

import fxmask
from fxmask.analysis import command
from fxmask.analysis.report import TABLES
from fxmask.cli import main

BELONGS = f"fix: install the torchvision that belongs to torch {torch.__version__}"


def run(capsys, *args):
    code = main(["analyze", "--device", "h100-sxm", *map(str, args)])
    out = capsys.readouterr()
    return code, out.out, out.err


def of(model=None, **options):
    return fxmask.analyze(model or net(), torch.empty(7, 64), device="h100-sxm", **options)


def test_it_prints_totals_and_modules(capsys):
    code, out, err = run(capsys, f"{SPEC}:net", "--input", "7x64")
    assert code == 0 and not err
    assert out == f"{of()}\n"
    assert not os.listdir("."), "it wrote files that nobody asked for"


def test_masked(capsys):
    code, out, _ = run(capsys, f"{SPEC}:net", "--input", "7x64", "--ratio", "0.5", "--block", "32", "--format", "json", "--steps", "10")
    report = json.loads(out)
    kept = (3 + 2) * 32 * 32  # of 3 x 2 and of 1 x 3 blocks
    assert code == 0 and report["summary"]["flop"]["fwd"] == 2 * 7 * kept and report["summary"]["run"]["steps"] == 10
    assert {(r["block_n"], r["block_k"]) for r in report["tables"]["nodes"] if r["nnzb"]} == {(32, 32)}


@pytest.mark.parametrize("spec", ["net", "made", "Reads"])
def test_kinds_of_models(capsys, spec):
    code, out, _ = run(capsys, f"{SPEC}:{spec}", "--input", "7x64", "--format", "json")
    assert code == 0 and json.loads(out)["summary"]["flop"]["fwd"] == 2 * 7 * (64 * 96 + 96 * 32 if spec != "Reads" else 64 * 64)


def test_weights_without_values_are_told_of(capsys):
    """The command builds on the meta device; a model that cannot be built there has its weights, and so has one that is there already."""
    masked = ("--input", "7x64", "--ratio", "0.5", "--block", "32")
    what = "This command builds its model on the meta device: weights that its code seeds or loads have no values here"
    for form in ([], ["--compare"], ["--format", "json"]):
        code, out, _ = run(capsys, f"{SPEC}:net", *masked, *form)
        assert code == 0 and out.count(what) == 1 and out.count("drawn at random") == 1
    assert what not in run(capsys, f"{SPEC}:made", *masked)[1] and what not in run(capsys, f"{SPEC}:Reads", *masked)[1]
    assert what not in run(capsys, f"{SPEC}:net", "--input", "7x64")[1], "nothing is masked"


def test_the_help_says_what_is_built(capsys):
    with pytest.raises(SystemExit):
        main(["analyze", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "built on the meta device where it can be" in out and "the values of its weights, seeded and loaded ones included" in out


def test_a_wrong_input_is_one_message():
    """In a process of its own, whose error stream PyTorch's log writes to."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    args = [sys.executable, "-m", "fxmask", "analyze", f"{SPEC}:net", "--input", "7x65", "--device", "h100-sxm"]
    done = subprocess.run(args, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 2 and done.stderr.startswith("fxmask: ") and len(done.stderr.splitlines()) == 3, done.stderr


def test_several_inputs(capsys):
    code, out, _ = run(capsys, f"{SPEC}:Words", "--input", "2x9:int64", "--input", "2x9x32", "--eval", "--table", "nodes", "--format", "csv")
    rows = list(csv.DictReader(out.splitlines()))
    assert code == 0 and {r["phase"] for r in rows} == {"fwd"} and sum(int(r["flop"]) for r in rows) == 2 * 18 * 32 * 50


def test_options_reach_the_analysis(capsys):
    code, out, _ = run(capsys, f"{SPEC}:net", "--input", "7x64", "--optimizer", "sgd", "--dtype", "bfloat16", "--format", "json")
    found, expected = json.loads(out), of(optimizer="sgd", dtype=torch.bfloat16)
    assert code == 0 and found["summary"] == json.loads(json.dumps(expected.summary)) and found["title"].endswith("counted in bfloat16")
    code, out, _ = run(capsys, f"{SPEC}:net", "--input", "7x64", "--optimizer", "none", "--format", "json")
    assert code == 0 and "opt" not in json.loads(out)["summary"]["bytes_min"]
    for impl in ("triton", "reference"):
        code, out, _ = run(capsys, f"{SPEC}:net", "--input", "7x64", "--ratio", "0.5", "--impl", impl, "--format", "json")
        kinds = {r["impl"] for r in json.loads(out)["tables"]["nodes"] if r["nnzb"] and r["m"]}
        assert kinds == {"triton" if impl == "triton" else "masked_dense"}


def test_backward_modes(capsys):
    shares = {}
    for mode in ("masked", "ste", "unmasked", "rigl"):
        code, out, _ = run(capsys, f"{SPEC}:net", "--input", "7x64", "--ratio", "0.5", "--backward", mode, "--format", "json")
        s = json.loads(out)["summary"]["flop"]
        assert code == 0
        shares[mode] = (s["bwd_dx"] / (2 * 7 * 96 * 32), s["bwd_dw"] / (2 * 7 * (64 * 96 + 96 * 32)))
    assert shares == {"masked": (0.5, 0.5), "ste": (0.5, 1), "unmasked": (1, 1), "rigl": (0.5, 0.5)}


def test_explain_and_compare(capsys):
    code, out, _ = run(capsys, f"{SPEC}:net", "--input", "7x64", "--ratio", "0.5", "--explain", "0:masked_linear")
    assert code == 0 and "2 * tokens * kept = 2 * 7 * 3072 = 43008 FLOP" in out and "Useful FLOP   2 M kept" in out
    code, out, _ = run(capsys, f"{SPEC}:net", "--input", "7x64", "--ratio", "0.5", "--compare")
    assert code == 0 and "flop_ratio" in out and "A FLOP ratio is not a speed-up." in out and "0.5" in out


def test_a_comparison_in_every_form(capsys):
    compared = ("--input", "7x64", "--ratio", "0.5", "--compare", "--format")
    text, data = (run(capsys, f"{SPEC}:net", *compared, form)[1] for form in ("text", "json"))
    found = json.loads(data)
    assert [r["module"] for r in found["rows"]] == ["(model)", "0", "1", "2"] and all(n in text for n in found["notes"]) and len(found["notes"]) > 3
    rows = list(csv.DictReader(run(capsys, f"{SPEC}:net", *compared, "csv")[1].splitlines()))
    assert [float(r["flop_ratio"]) for r in rows if r["module"] in "02"] == [r["flop_ratio"] for r in found["rows"] if r["module"] in "02"]


@pytest.mark.parametrize("args", [["analyze", "nowhere:net", "--input", "7x64"], ["explain", "nowhere:net"]], ids=lambda a: a[0])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-o", "y.json", "--format", "csv"], "--format: expected json, as the file of -o is by its name, got csv."),
        (["-o", "y.json", "--format", "json", "--format", "csv"], "--format: expected json, as the file of -o is by its name, got json, csv."),
        (["--format", "json", "--format", "csv"], "--format: expected one form to print, got json, csv."),
    ],
    ids=["another", "two", "printed"],
)
def test_forms_that_would_be_ignored(capsys, args, options, said):
    """Before the model is looked for."""
    assert main([*args, *options]) == 2 and capsys.readouterr().err.startswith(f"fxmask: {said}\n  fix: ") and not os.listdir(".")


def test_formulas_are_printed_as_text_alone(capsys):
    assert main(["analyze", "nowhere:net", "--input", "7x64", "--explain", "0", "--format", "json"]) == 2
    assert "--explain prints text: expected no --format without -o, got json.\n  fix: leave it out, or give -o DIR, too." in capsys.readouterr().err


def test_a_table_in_one_form_beside_a_file_of_another(capsys, tmp_path):
    code, out, _ = run(capsys, f"{SPEC}:net", "--input", "7x64", "-o", tmp_path / "y.json", "--table", "nodes", "--format", "csv")
    assert code == 0 and out.startswith("node,") and json.loads((tmp_path / "y.json").read_text())["tables"]["nodes"]


def test_files(capsys, tmp_path):
    code, out, _ = run(capsys, f"{SPEC}:net", "--input", "7x64", "-o", tmp_path / "a" / "b", "--plot", "--format", "csv", "--format", "json")
    assert code == 0 and out == f"{of()}\n"
    names = {p.name for p in (tmp_path / "a" / "b").iterdir()}
    assert names == {"analysis.json", "roofline.png", "traffic.png", *(f"{t}.csv" for t in TABLES if t not in ("coverage", "thesis"))}
    assert (tmp_path / "a" / "b" / "roofline.png").read_bytes()[:4] == b"\x89PNG"


REFUSED = {
    "no colon": (["net", "--input", "7x64"], r"model: expected timm:NAME, torchvision:NAME or package.module:CALLABLE, got 'net'"),
    "no name": ([f"{SPEC}:", "--input", "7x64"], r"model: expected timm:NAME"),
    "no module": (["no_such_module:net", "--input", "7x64"], r"no_such_module cannot be imported: ModuleNotFoundError"),
    "broken module": (["broken_models:net", "--input", "7x64"], r"broken_models cannot be imported: ModuleNotFoundError: No module named 'nowhere_at_all'"),
    "no attribute": ([f"{SPEC}:nett", "--input", "7x64"], r"spec_models has no 'nett'"),
    "no callable": ([f"{SPEC}:number", "--input", "7x64"], r"expected 'spec_models:number' to be callable, got int"),
    "no model": ([f"{SPEC}:nothing", "--input", "7x64"], r"expected 'spec_models:nothing' to give an nn.Module, got NoneType"),
    "does not build": ([f"{SPEC}:breaks", "--input", "7x64"], r"'spec_models:breaks' cannot be built: RuntimeError: no such luck"),
    "input": ([f"{SPEC}:net", "--input", "7,64"], r"input: expected sizes and maybe a dtype, such as 1x3x224x224 or 2x128:int64, got '7,64'"),
    "input dtype": ([f"{SPEC}:net", "--input", "7x64:float33"], r"input: expected sizes and maybe a dtype"),
    "input no dtype": ([f"{SPEC}:net", "--input", "7x64:nn"], r"input: expected sizes and maybe a dtype"),
    "input shape": ([f"{SPEC}:net", "--input", "7x65"], r"got \[7, 65\] X \[64, 96\](?s:.*)where: 0"),
    "too many inputs": ([f"{SPEC}:net", "--input", "7x64", "--input", "7x64"], r"takes 2 positional arguments but 3 were given"),
    "block": ([f"{SPEC}:net", "--input", "7x64", "--ratio", "0.5", "--block", "16by16"], r"block: expected out x in, such as 16x16, got '16by16'"),
    "block without size": ([f"{SPEC}:net", "--input", "7x64", "--ratio", "0.5", "--block", "0x16"], r"block must be two positive ints"),
    "ratio": ([f"{SPEC}:net", "--input", "7x64", "--ratio", "1.5"], r"ratio is the fraction of blocks that are masked"),
    "backward": ([f"{SPEC}:net", "--input", "7x64", "--ratio", "0.5", "--backward", "none"], r"unknown backward mode: expected one of"),
    "dtype": ([f"{SPEC}:net", "--input", "7x64", "--dtype", "float99"], r"--dtype: expected a floating dtype of torch, such as bfloat16, got 'float99'"),
    "integer dtype": ([f"{SPEC}:net", "--input", "7x64", "--dtype", "int8"], r"dtype: expected a floating dtype"),
    "optimizer": ([f"{SPEC}:net", "--input", "7x64", "--optimizer", "adamm"], r"optimizer: expected one of adamw"),
    "steps": ([f"{SPEC}:net", "--input", "7x64", "--steps", "-3"], r"steps: expected a number of steps"),
    "explain": ([f"{SPEC}:net", "--input", "7x64", "--explain", "fc9"], r"no node or module 'fc9' in this analysis"),
    "several": ([f"{SPEC}:net", "--input", "7x64", "--table", "nodes", "--compare", "--ratio", "0.5"], r"one of them, got --table and --compare\.\n"),
    "compare without ratio": ([f"{SPEC}:net", "--input", "7x64", "--compare"], r"^fxmask: --compare: needs --ratio, .* got none; add --ratio 0.5.\n$"),
    "compare, masked": ([f"{SPEC}:masked", "--input", "7x64", "--compare"], r"--compare: needs --ratio, which asks for masks: expected one in \[0, 1\), got"),
    "block without ratio": ([f"{SPEC}:net", "--input", "7x64", "--block", "16"], r"^fxmask: --block: needs --ratio, .* got none; add --ratio 0.5.\n$"),
    "unread block": ([f"{SPEC}:net", "--input", "7x64", "--block", "16by", "--backward", "ste"], r"--block, --backward: needs --ratio"),
    "impl without ratio": ([f"{SPEC}:net", "--input", "7x64", "--impl", "triton"], r"--impl: needs --ratio, .* or a model that has masks, got none"),
    "step without ratio": ([f"{SPEC}:net", "--input", "7x64", "--masked-step"], r"--masked-step: needs --ratio"),
    "plot nowhere": ([f"{SPEC}:net", "--input", "7x64", "--plot"], r"--plot writes into a folder: expected -o DIR"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_requests_that_cannot_be_served(capsys, tmp_path, case):
    """Exit code 2, one message, and no files: neither in the output folder nor anywhere else."""
    args, text = REFUSED[case]
    folder = [] if case == "plot nowhere" else ["-o", tmp_path / "out"]
    code, out, err = run(capsys, *args, *folder)
    assert code == 2 and not out and err.startswith("fxmask: ")
    assert re.search(text, err), err
    assert "Traceback" not in err and not list(tmp_path.iterdir()) and not os.listdir(".")


def test_unknown_device(capsys, tmp_path):
    assert main(["analyze", f"{SPEC}:net", "--input", "7x64", "--device", "h1000", "-o", str(tmp_path / "out")]) == 2
    assert "unknown device: expected one of a30" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(capsys, tmp_path):
    (tmp_path / "file").write_text("mine")
    code, _, err = run(capsys, f"{SPEC}:net", "--input", "7x64", "-o", tmp_path / "file" / "below")
    assert code == 2 and "the output folder cannot be written" in err
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "mine"


def test_plots_without_matplotlib(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(capsys, f"{SPEC}:net", "--input", "7x64", "-o", tmp_path / "out", "--plot")
    assert code == 2 and "plots need matplotlib" in err and not list(tmp_path.iterdir())


def test_strict(capsys, tmp_path):
    (tmp_path / "custom_model.py").write_text(
        "import torch\nfrom torch import nn\n"
        "op = torch.library.custom_op('fxmask_command::twice', mutates_args=())\n"
        "def twice(x: torch.Tensor) -> torch.Tensor:\n    return 2 * x\n"
        "twice = op(twice)\ntwice.register_fake(torch.empty_like)\n"
        "class Net(nn.Module):\n    def forward(self, x):\n        return twice(x)\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        code, out, _ = run(capsys, "custom_model:Net", "--input", "7x64")
        assert code == 0 and "fxmask_command.twice" in out and ">=" in out
        code, _, err = run(capsys, "custom_model:Net", "--input", "7x64", "--strict")
        assert code == 2 and "register_cost(torch.ops.fxmask_command.twice)" in err
    finally:
        sys.path.remove(str(tmp_path))


@pytest.mark.parametrize("args", [[], [f"{SPEC}:net"], *([f"{SPEC}:net", "--input", "7x64", *o] for o in (["--format", "xml"], ["--impl", "x"]))], ids=str)
def test_what_argparse_refuses(capsys, args):
    with pytest.raises(SystemExit) as e:
        main(["analyze", *args])
    assert e.value.code == 2 and "usage: fxmask" in capsys.readouterr().err


def test_progress_is_for_terminals(capsys, monkeypatch):
    assert run(capsys, f"{SPEC}:net", "--input", "7x64")[2] == ""
    monkeypatch.setattr(command.sys.stderr, "isatty", lambda: True, raising=False)
    with command._progress("model") as tick:
        for ops in range(1, 401):
            tick(ops)
    err = capsys.readouterr().err
    assert "model: 200 ops" in err and err.endswith("\x1b[K")


def test_a_model_that_has_masks_needs_no_ratio(capsys):
    code, out, _ = run(capsys, f"{SPEC}:masked", "--input", "7x64", "--impl", "reference", "--masked-step", "--format", "json")
    assert code == 0 and {r["impl"] for r in json.loads(out)["tables"]["nodes"] if r["nnzb"] and r["m"]} == {"masked_dense"}


def test_the_version(capsys):
    with pytest.raises(SystemExit) as e:
        main(["--version"])
    assert e.value.code == 0 and capsys.readouterr().out == f"fxmask {fxmask.__version__}\n"


def test_the_help_names_explain(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "what becomes of every linear of a model" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("error", "fixes"),
    [
        (ModuleNotFoundError("No module named 'torchvision'", name="torchvision"), ("fix: pip install torchvision\n", BELONGS)),
        (ModuleNotFoundError("No module named 'PIL'", name="PIL"), ("fix: pip install torchvision\n", "fix: pip install timm\n")),  # and what it lacks
        (RuntimeError("operator torchvision::nms does not exist"), (BELONGS, BELONGS)),
    ],
)
def test_a_package_that_is_there_and_does_not_load(error, fixes, capsys, monkeypatch):
    monkeypatch.setattr("fxmask.analysis.models.importlib.import_module", mock.Mock(side_effect=error))
    for model, package, fix in zip(("torchvision:vit_b_16", "timm:resmlp_12_224"), ("torchvision.models", "timm"), fixes, strict=True):
        code, _, err = run(capsys, model, "--input", "1x3x224x224")
        assert code == 2 and f"{package} cannot be imported: {type(error).__name__}: {error}" in err and fix in err
