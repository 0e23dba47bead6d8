"""Forwards that go on after they have returned, as generators and coroutines: their steps count as the forward's, what runs between them does not."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .lost_writes import refuse_lost_writes
from .reading import count

if TYPE_CHECKING:
    from .swap import ReadWeight

_LATE = (GeneratorType, CoroutineType, AsyncGeneratorType)


def ended(found: Any, layers: list[ReadWeight], owner: nn.Module) -> Any:
    """What a forward returns. Each step of a generator or coroutine is the forward's: other code runs between them, and reads the Parameter."""
    if isinstance(found, _LATE):
        return _noted(found, layers, owner)
    refuse_lost_writes(layers, owner)
    if type(found) in (tuple, list) and any(isinstance(part, _LATE) for part in found):
        return type(found)([_noted(part, layers, owner) if isinstance(part, _LATE) else part for part in found])
    return found


def _noted(inner: Any, layers: list[ReadWeight], owner: nn.Module) -> Any:
    make: Any = _generator if isinstance(inner, GeneratorType) else _coroutine if isinstance(inner, CoroutineType) else _async_generator
    made = make(inner, layers, owner)
    if not torch.compiler.is_dynamo_compiling():
        made.__name__, made.__qualname__ = inner.__name__, inner.__qualname__
    return made


def _steps(inner: Any, layers: list[ReadWeight]) -> Generator[Any, Any, Any]:
    """A generator, or what is awaited, with each of its steps counted."""
    call, given = inner.send, None
    while True:
        compiled = torch.compiler.is_dynamo_compiling()
        try:
            count(layers, 1, compiled)
            item = call(given)
        except StopIteration as e:
            return e.value
        finally:
            count(layers, -1, compiled)
        try:
            given = yield item
            call = inner.send
        except GeneratorExit:
            try:
                count(layers, 1, compiled)
                inner.close()
            finally:
                count(layers, -1, compiled)
            raise
        except BaseException as e:
            call, given = inner.throw, e


class _Awaited:
    """What is awaited, step by step."""

    def __init__(self, inner: Any, layers: list[ReadWeight]) -> None:
        self.steps = _steps(inner, layers)

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.steps


def _generator(inner: Any, layers: list[ReadWeight], owner: nn.Module) -> Generator[Any, Any, Any]:
    value = yield from _steps(inner, layers)
    refuse_lost_writes(layers, owner)
    return value


async def _coroutine(inner: Any, layers: list[ReadWeight], owner: nn.Module) -> Any:
    value = await _Awaited(inner, layers)
    refuse_lost_writes(layers, owner)
    return value


async def _async_generator(inner: Any, layers: list[ReadWeight], owner: nn.Module) -> AsyncGenerator[Any, Any]:
    step = inner.asend(None)
    while True:
        try:
            item = await _Awaited(step, layers)
        except StopAsyncIteration:
            break
        try:
            step = inner.asend((yield item))
        except GeneratorExit:
            await _Awaited(inner.aclose(), layers)
            raise
        except BaseException as e:
            step = inner.athrow(e)
    refuse_lost_writes(layers, owner)
