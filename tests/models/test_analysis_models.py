"""`fxmask.analyze` on other people's models: PyTorch's own count on meta tensors, forward and backward, with every op known."""

import json
from pathlib import Path

import pytest
import torch
from analysis.counted import calls_of_linears, kept_of, pytorch_count, totals

import fxmask
from fxmask.cli import main

pytestmark = pytest.mark.models
IMAGES = torch.empty(2, 3, 224, 224, device="meta")
WORDS = torch.zeros(2, 12, dtype=torch.int64, device="meta")


@pytest.fixture(scope="module")
def make(torchvision):
    """A maker of models on the meta device, by source and name. timm and transformers import torchvision, which beside a CPU build wants its shim first."""

    def build(source, name, **options):
        if source == "timm":
            import timm

            return lambda: timm.create_model(name, **options)
        if source == "torchvision":
            return lambda: getattr(torchvision.models, name)(**options)
        import transformers

        config = getattr(transformers, options.pop("config"))(vocab_size=99, **options)
        return lambda: getattr(transformers, name)(config)

    def on(source, name, device="meta", **options):
        fresh = build(source, name, **options)
        torch.manual_seed(0)
        try:
            with torch.device(device):
                return fresh()
        except (RuntimeError, NotImplementedError):  # code that reads values while it builds
            return fresh().to(device)

    return on


def check(model, *inputs, grouped=False, **kwargs):
    """Compare with PyTorch; `grouped`: it counts dW of grouped convolutions once for each group, so the backward is compared without convolutions."""
    report = fxmask.analyze(model, inputs, kwargs=kwargs, device="h100-sxm", strict=True)
    assert min(report.summary["coverage"].values()) == 100
    forward = pytorch_count(model, *inputs, backward=False, **kwargs)
    assert totals(report)[0] == forward > 0
    if not grouped:
        assert totals(report)[2] == pytorch_count(model, *inputs, **kwargs)
    nodes = report.tables["nodes"]
    assert sum(r["flop"] for r in nodes) == report.summary["flop"]["total"] == report.tables["modules"][0]["flop"]
    assert sum(r["bytes_min"] for r in nodes) == report.summary["bytes_min"]["total"]
    return report


TIMM = ("resmlp_12_224", "mixer_s16_224", "vit_small_patch16_224", "beit_base_patch16_224", "eva02_tiny_patch14_224", "swin_tiny_patch4_window7_224")


@pytest.mark.parametrize("name", TIMM)
def test_timm(make, name):
    check(make("timm", name), IMAGES)


@pytest.mark.parametrize("name", ["convnext_tiny", "mobilenetv3_small_100"])
def test_timm_with_grouped_convolutions(make, name):
    """dW of a grouped convolution has the products of its forward; dX too."""
    report = check(make("timm", name), IMAGES, grouped=True)
    s = report.summary["flop"]
    first = next(r for r in report.tables["nodes"] if r["op"] == "aten.convolution")
    assert s["bwd_dw"] == s["fwd"] and s["bwd_dx"] == s["fwd"] - first["flop"]


@pytest.mark.parametrize("name", ["resnet18", "vit_b_16", "swin_t"])
def test_torchvision(make, name):
    check(make("torchvision", name), IMAGES)


def test_torchvision_convnext(make):
    s = check(make("torchvision", "convnext_tiny"), IMAGES, grouped=True).summary["flop"]
    assert s["bwd_dw"] == s["fwd"]


SIZES = dict(num_hidden_layers=2, hidden_size=64, intermediate_size=160, num_attention_heads=4)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_bert(make, attention):
    model = make("hf", "BertForPreTraining", config="BertConfig", attn_implementation=attention, **SIZES)
    check(model, input_ids=WORDS)
    padded = fxmask.analyze(model, {"input_ids": WORDS, "attention_mask": torch.ones_like(WORDS)}, device="h100-sxm", strict=True)
    assert totals(padded) == totals(fxmask.analyze(model, {"input_ids": WORDS}, device="h100-sxm"))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_llama(make, attention):
    model = make("hf", "LlamaForCausalLM", config="LlamaConfig", num_key_value_heads=2, attn_implementation=attention, **SIZES)
    linears = 2 * 24 * (2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160) + 64 * 99)
    report = fxmask.analyze(model, {"input_ids": WORDS}, device="h100-sxm", strict=True)
    rotary = sum(r["flop"] for r in report.tables["nodes"] if r["phase"] == "fwd" and "rotary" in r["module"])  # angles, a matmul in their code
    products = sum(r["flop"] for r in report.tables["nodes"] if r["phase"] == "fwd" and r["op"] in ("aten.mm", "aten.addmm"))
    attention_flop = 2 * 2 * 2 * 2 * 4 * 12 * 12 * 16
    assert products == linears and report.summary["flop"]["fwd"] == linears + rotary + attention_flop
    if attention == "eager":
        assert totals(report)[2] == pytorch_count(model, input_ids=WORDS)


def test_t5(make):
    model = make("hf", "T5ForConditionalGeneration", config="T5Config", d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
    check(model, input_ids=WORDS, decoder_input_ids=WORDS)


@pytest.mark.parametrize("name", ["timm:resmlp_12_224", "timm:beit_base_patch16_224", "torchvision:vit_b_16", "torchvision:swin_t"])
def test_masked(make, name):
    """Real weights, ragged blocks: forward less what the masks leave out, layers whose weight is read among them."""
    source, name = name.split(":")
    model = fxmask.apply(make(source, name, device="cpu").train(), ratio=0.6, block=(32, 64))
    plain = pytorch_count(make(source, name).train(), IMAGES, backward=False)
    tokens = {n: t for n, (t, _) in calls_of_linears(make(source, name), IMAGES).items()}
    kept = kept_of(model, (32, 64))
    report = fxmask.analyze(model, IMAGES, device="h100-sxm")
    assert totals(report, "flop_dense")[0] == plain
    less = sum(2 * tokens[n.removesuffix(".weight")] * (size - k) for n, (k, size) in kept.items() if n.removesuffix(".weight") in tokens)
    read = {n: v for n, v in kept.items() if n.removesuffix(".weight") not in tokens}  # weights that their owner reads
    rest = sum(r["flop_dense"] - r["flop"] for r in report.tables["nodes"] if r["phase"] == "fwd" and r["impl"] == "masked_dense")
    assert plain - report.summary["flop"]["fwd"] == less + rest
    assert (rest > 0) == bool(read) and kept


def test_the_command(make, capsys, tmp_path):
    for spec in ("timm:resmlp_12_224", "torchvision:vit_b_16"):
        out = tmp_path / spec.replace(":", "_")
        assert main(["analyze", spec, "--input", "1x3x224x224", "--ratio", "0.5", "--device", "a30", "-o", str(out), "--format", "json"]) == 0
        saved = json.loads((out / "analysis.json").read_text())
        report = fxmask.analyze(fxmask.apply(make(*spec.split(":")).train(), ratio=0.5), IMAGES[:1], device="a30")
        assert saved["summary"] == json.loads(json.dumps(report.summary)) and saved["meta"]["analysed_device"] == "a30"
    capsys.readouterr()
    for spec, text in (("timm:resmlp_13", "timm has no 'resmlp_13'"), ("torchvision:vit", "torchvision has no 'vit'")):
        assert main(["analyze", spec, "--input", "1x3x224x224", "-o", str(tmp_path / "no")]) == 2
        assert text in capsys.readouterr().err and not (tmp_path / "no").exists()


def test_what_docs_say_that_resmlp_s12_holds(make):
    page, held = (Path(__file__).parents[2] / "docs" / "systems.md").read_text(), []
    for ratio in (0.0, 0.5, 0.8):
        model = make("timm", "resmlp_12_224")
        if ratio:
            fxmask.apply(model, fxmask.ActivationPruning(ratio, 64))
        total = fxmask.analyze(model, torch.empty(32, 3, 224, 224, device="meta")).tables["footprint"][-1]
        held.append(total["saved_activations"] / 2**20)
    cells = [f"{h:,.0f}" + (f" ({100 * h / held[0] - 100:.1f} %)" if h < held[0] else "") for h in held]
    assert f"| timm's at 224 | {' | '.join(cells)} |" in page
