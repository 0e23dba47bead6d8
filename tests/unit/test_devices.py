"""The table of devices, and this machine's own."""

import copy
import pickle
import time

import pytest
import torch

from fxmask.analysis import devices
from fxmask.analysis.cpu_speed import last_cache_bytes
from fxmask.analysis.devices import DEVICES, Device, cpu, device, of_machine
from fxmask.errors import ConfigError

# SMs, dense FLOP a clock and SM in 16 bits with tensor cores, boost clock: the chips' own arithmetic, which no datasheet's asterisk can double
CHIPS = {
    "a30": (56, 2048, 1.44e9),
    "a100-sxm": (108, 2048, 1.41e9),
    "a100-sxm-40gb": (108, 2048, 1.41e9),
    "a100-pcie": (108, 2048, 1.41e9),
    "a100-pcie-40gb": (108, 2048, 1.41e9),
    "h100-sxm": (132, 4096, 1.83e9),
    "h100-pcie": (114, 4096, 1.62e9),
    "h200": (132, 4096, 1.83e9),
}


@pytest.mark.parametrize("name", DEVICES)
def test_peaks_are_dense(name):
    entry, (sms, flop, hertz) = DEVICES[name], CHIPS[name]
    assert entry.peak("bf16") == pytest.approx(sms * flop * hertz, rel=0.005)
    assert entry.peak(torch.float16) == entry.peak(torch.bfloat16)
    assert entry.peak("tf32") == pytest.approx(entry.peak("bf16") / 2, rel=0.002)
    assert entry.peak(torch.float8_e4m3fn) == (pytest.approx(2 * entry.peak("bf16"), rel=0.001) if name[0] == "h" else None)
    assert entry.peak(torch.float32) < entry.peak("tf32") and entry.peak(torch.float64) is None


@pytest.mark.parametrize("name", DEVICES)
def test_an_entry_says_where_it_is_from(name):
    entry = DEVICES[name]
    assert entry.name == name and "NVIDIA" in entry.source and "assumption" in entry.source and "dense_tile" in entry.source
    assert entry.l2_bytes_s is None  # no datasheet has it
    assert (entry.line_bytes, entry.sector_bytes) == (128, 32)
    assert entry.dense_tile == ((256, 256) if name[0] == "h" else (128, 256))
    assert set(devices.CUDA_NAMES.values()) == set(DEVICES)
    assert pickle.loads(pickle.dumps(entry)) == copy.deepcopy(entry) == entry and hash(entry)


def test_bandwidths():
    gb = {name: d.dram_bytes_s / 1e9 for name, d in DEVICES.items()}
    assert gb == {
        "a30": 933,
        "a100-sxm": 2039,
        "a100-sxm-40gb": 1555,
        "a100-pcie": 1935,
        "a100-pcie-40gb": 1555,
        "h100-sxm": 3350,
        "h100-pcie": 2000,
        "h200": 4800,
    }


def test_a_device_by_name_or_as_it_is():
    own = Device("b200", {"bf16": 2.25e15}, 8e12, 126 << 20, None, 2e-6, (256, 256), "its datasheet")
    assert device(own) is own
    assert device("h200") is device(" H200 ") is DEVICES["h200"]
    assert device("cpu") is device(torch.device("cpu")) is cpu()


@pytest.mark.parametrize("name", ["b200", "h100", torch.device("meta"), "", "cuda:x"])
def test_an_unknown_device_lists_the_known(name):
    with pytest.raises(ConfigError, match=r"unknown device: expected one of a30, a100-sxm, .*h200, or cpu, got .*\n.*fix: .*Device"):
        device(name)


def _gpu(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: name)


def test_the_gpu_at_hand(monkeypatch):
    _gpu(monkeypatch, "NVIDIA H100 80GB HBM3")
    assert of_machine() is device("cuda") is device(torch.device("cuda", 0)) is DEVICES["h100-sxm"]
    with pytest.raises(ConfigError, match=r"no such device here.*got 'cuda:3', and this process sees 1 CUDA devices"):
        device("cuda:3")


@pytest.mark.parametrize("name", ["NVIDIA H100 NVL", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA L4"])
def test_a_gpu_that_the_table_lacks(monkeypatch, name):
    _gpu(monkeypatch, name)
    assert of_machine() is None
    with pytest.raises(ConfigError, match=f"no figures for this GPU: expected one of .*, got 'cuda', a '{name}'"):
        device("cuda")


def test_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert of_machine() is None
    with pytest.raises(ConfigError, match="no such device here"):
        device(torch.device("cuda"))


def test_this_cpu_is_measured():
    devices._measured.cache_clear()
    state, start = torch.get_rng_state(), time.thread_time()  # not the clock on the wall: others may be at work
    entry = cpu()
    assert time.thread_time() - start < 2
    assert torch.equal(torch.get_rng_state(), state)
    assert entry.name.startswith("cpu (") and f"measured here, {torch.get_num_threads()} threads" in entry.source and "load" in entry.source
    # what no CPU does and what every one does: a factor of a thousand lost shows
    assert 1e9 < entry.peak("fp32") < 1e14 and 1e8 < entry.dram_bytes_s < 1e13 and 1e-8 < entry.launch_s < 1e-3
    assert entry.peak(torch.bfloat16) is None
    start = time.thread_time()
    assert cpu() is entry and time.thread_time() - start < 0.01


def test_the_last_cache(tmp_path):
    assert last_cache_bytes(tmp_path) is None
    for i, size in enumerate(["48K", "1280K", "33M", "what"]):
        (tmp_path / f"index{i}").mkdir()
        (tmp_path / f"index{i}" / "size").write_text(f"{size}\n")
    assert last_cache_bytes(tmp_path) == 33 << 20
