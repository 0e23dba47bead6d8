"""How small tables reach a device."""

import pytest
import torch

from fxmask.errors import UnsupportedError


@pytest.fixture
def device():
    pytest.importorskip("triton")
    from fxmask.kernels.triton import device

    return device


class Sent:
    """A tensor that notes how it is copied."""

    def __init__(self):
        self.calls = []

    def pin_memory(self):
        self.calls.append("pinned")
        return self

    def to(self, device, non_blocking=False):
        self.calls.append((device.type, non_blocking))
        return self


@pytest.mark.parametrize(("where", "calls"), [("cpu", [("cpu", False)]), ("cuda", ["pinned", ("cuda", True)])])
def test_no_wait_for_a_copy(device, monkeypatch, where, calls):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    t = Sent()
    device.sent(t, torch.device(where))
    assert t.calls == calls


def test_no_copy_inside_a_graph(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedError, match="take a step that rebuilds the same masks before the capture"):
        device.sent(torch.zeros(1), torch.device("cuda"))
