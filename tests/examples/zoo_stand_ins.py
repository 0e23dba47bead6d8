"""Tiny models for tests of the zoo: what works, what wants a network, and what breaks a limit."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import UserDict

import torch
import torch.nn.functional as F
from torch import nn
from zoo.sources import Made


class Small(nn.Module):
    """Two linears that are masked, one that is too small, one that nothing reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.few, self.unused = nn.Linear(32, 48), nn.Linear(48, 32), nn.Linear(32, 3), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.few(self.b(self.a(x).relu()))


class Bypass(Small):
    """A linear whose weight is used past its mask, where no source shows it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.few(self.b(x @ self.a._parameters["weight"].t()))


def small():
    return Small(), (torch.randn(5, 32),)


def bypass():
    return Bypass(), (torch.randn(5, 32),)


class Other(nn.Module):
    """A linear of another class: the compiler backend meets its call, `apply` does not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class Both(Small):
    def __init__(self) -> None:
        super().__init__()
        self.unused = Other()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.unused(x))


def both():
    return Both(), (torch.randn(5, 32),)


class Scaled(Other):
    """The same with a weight that the forward computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, 2 * self.weight)


def scaled():
    model = Both()
    model.unused = Scaled()
    return model, (torch.randn(5, 32),)


def network():
    with socket.create_server(("127.0.0.1", 0)) as there:  # somebody who would answer
        socket.create_connection(there.getsockname()).close()
    return small()


def broken():
    raise ValueError("no such\nmodel")


class Slow(Small):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(60)
        return super().forward(x)


def slow():
    return Slow(), (torch.randn(5, 32),)


class Hungry(Small):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.zeros(10**9)[:1]  # 4 GB, which are never touched: a limit alone refuses them


def hungry():
    return Hungry(), (torch.randn(5, 32),)


class Killed(Small):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), 9)
        return x


def killed():
    return Killed(), (torch.randn(5, 32),)


def alone():
    return nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32))


def untupled():
    return nn.Linear(32, 48), torch.randn(5, 32)


def named():
    return nn.Linear(32, 48), (), {"input": torch.randn(5, 32)}


def encoded():
    return nn.Linear(32, 48), (), UserDict(input=torch.randn(5, 32))  # as a tokenizer's BatchEncoding


def made():
    return Made(*named())


def waiting():
    """Says who it is, and never comes to an end."""
    with open(os.environ["ZOO_WAITS"], "w") as pipe:
        pipe.write(str(os.getpid()))
    signal.pause()
