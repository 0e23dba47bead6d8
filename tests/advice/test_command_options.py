"""`fxmask advise`: what it makes of a model on meta, and that what it was given reaches `fxmask.advise`."""

import pytest
import torch
from torch import nn

import fxmask
from fxmask import cli
from fxmask.advice import command
from fxmask.advice.advise import BLOCKS, RATIOS

CPU = torch.device("cpu")


def test_a_model_on_meta_gets_weights_of_the_usual_size():
    made = command.materialised(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).to("meta"), CPU)
    assert made[0].weight.std().item() == pytest.approx(0.02, rel=0.1) and made[0].bias.eq(1).all() and made[1].weight.eq(1).all()
    assert made[1].running_var.eq(1).all() and made[1].num_batches_tracked == 1


def test_a_model_whose_buffers_alone_are_on_meta_is_made_real():
    model = nn.BatchNorm1d(64)
    model.running_var = torch.ones(64, device="meta")
    assert {t.device for t in command.materialised(model, CPU).state_dict().values()} == {CPU}


def test_a_real_model_keeps_its_weights():
    model = nn.Linear(64, 64)
    before = model.weight.detach().clone()
    assert torch.equal(command.materialised(model, CPU).weight, before)


def test_inputs_are_filled_as_their_dtypes_allow():
    assert command.filled(torch.empty(64, 64, device="meta"), CPU).std().item() == pytest.approx(1, rel=0.1)
    for dtype in (torch.int64, torch.bool, torch.float8_e4m3fn):
        made = command.filled(torch.empty(4, dtype=dtype, device="meta"), CPU)
        assert made.dtype is dtype and not made.float().any()


def test_what_was_given_reaches_advise(monkeypatch, capsys):
    found = {}

    def advise(model, inputs, **options):
        found.update(options, inputs=[(tuple(t.shape), t.dtype) for t in inputs], autocast=torch.is_autocast_enabled("cpu"))
        return fxmask.Report("", [])

    monkeypatch.setattr(command, "advise", advise)
    call = ["advise", "torch.nn:Flatten", "--device", "cpu", "--input", "8x64"]
    more = ["--input", "2x3:int64", "--target", "2", "--ratios", "0.5", "--ratios", "0.7", "--blocks", "32", "64x16", "--refresh", "7", "--seconds", "9"]
    assert cli.main([*call, *more, "--include", "a", "b", "--exclude", "c"]) == 0
    assert found == {
        "inputs": [((8, 64), torch.float32), ((2, 3), torch.int64)], "autocast": False, "target": 2.0, "ratios": [0.5, 0.7], "blocks": [(32, 32), (64, 16)],
        "refresh": 7, "seconds": 9.0, "include": ["a", "b"], "exclude": ["c"],
    }  # fmt: skip
    found.clear()
    assert cli.main([*call, "--dtype", "bfloat16"]) == 0
    assert found["autocast"] and "ratios" not in found and found["blocks"] is None


@pytest.mark.parametrize(("usable", "name"), [(True, "cuda:3"), (False, "cuda"), (False, "cuda:0")])
def test_a_gpu_that_is_not_here_is_told(monkeypatch, capsys, usable, name):
    """A GPU whose driver is too old for this PyTorch is counted, and cannot be used."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert cli.main(["advise", "torch.nn:Flatten", "--device", name, "--input", "8x64"]) == 2
    assert f"--device: expected a device that is here, cpu or cuda, got {name!r}" in capsys.readouterr().err


def test_the_help_says_what_is_tried_by_default(capsys):
    with pytest.raises(SystemExit):
        cli.main(["advise", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    cpu, gpu = (" ".join(map(str, BLOCKS[device])) for device in ("cpu", "cuda"))
    assert f"({cpu}; on a GPU {gpu})" in said and f"({' '.join(map(str, RATIOS))})" in said
