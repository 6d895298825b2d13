"""Checkpointing: what a partition computed is forgotten, and computed again when the backward pass gets there.

The second time has the same random numbers as the first. The CPU has one source of them for all threads, so
partitions on it take turns (`turn`) while numbers have to be repeatable.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["checkpoint", "is_checkpointing", "is_recomputing", "turn"]

Function = Callable[..., tuple[Any, ...]]


class _State(threading.local):
    checkpointing = False
    recomputing = False


_state = _State()
_cpu_turn = threading.RLock()


def is_checkpointing() -> bool:
    """Whether this forward pass will be repeated.

    Returns:
        True in a module's forward whose results are forgotten; False in the repetition, and outside pipelines.

    Example:
        >>> from torchdist_ref.pipeline.sync import is_checkpointing
        >>> is_checkpointing()
        False
    """
    return _state.checkpointing


def is_recomputing() -> bool:
    """Whether this forward pass is a repetition, so that what should happen once has happened already.

    Returns:
        True in a module's forward during the backward pass; False outside pipelines.

    Example:
        >>> from torchdist_ref.pipeline.sync import is_recomputing
        >>> is_recomputing()
        False
    """
    return _state.recomputing


@contextlib.contextmanager
def _saying(name: str) -> Iterator[None]:
    setattr(_state, name, True)
    try:
        yield
    finally:
        setattr(_state, name, False)


@contextlib.contextmanager
def turn(device: torch.device) -> Iterator[None]:
    """Draw random numbers alone, if the device's are those of the whole process."""
    with _cpu_turn if device.type == "cpu" else contextlib.nullcontext():
        yield


def _random_state(device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


@contextlib.contextmanager
def _random_numbers_of(device: torch.device, state: Tensor) -> Iterator[None]:
    former = _random_state(device)
    _set_random_state(device, state)
    try:
        yield
    finally:
        _set_random_state(device, former)


class _Checkpoint(torch.autograd.Function):
    """Runs a function without a graph; its backward pass runs it again, with one."""

    @staticmethod
    def forward(ctx: Any, phony: Tensor, function: Function, device: torch.device, *values: Any) -> tuple[Any, ...]:
        tensors = [value for value in values if isinstance(value, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.others = [None if isinstance(value, Tensor) else (value,) for value in values]
        ctx.function, ctx.device = function, device
        ctx.autocast = device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)
        with _saying("checkpointing"):
            ctx.random_state = _random_state(device)
            results = function(*values)
        whole = [r for r in results if isinstance(r, Tensor) and not (r.is_floating_point() or r.is_complex())]
        ctx.mark_non_differentiable(*whole)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        values = [_leaf(next(saved)) if other is None else other[0] for other in ctx.others]
        with turn(ctx.device), _random_numbers_of(ctx.device, ctx.random_state), _saying("recomputing"):
            with torch.enable_grad(), torch.autocast(*ctx.autocast):
                results = ctx.function(*values)
        pairs = [(r, g) for r, g in zip(results, grads, strict=True) if isinstance(r, Tensor) and r.requires_grad]
        torch.autograd.backward([result for result, _ in pairs], [grad for _, grad in pairs])
        return None, None, None, *(value.grad if isinstance(value, Tensor) else None for value in values)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def checkpoint(function: Function, device: torch.device, *values: Any) -> tuple[Any, ...]:
    """Run a function, and keep of it only what it was given.

    Args:
        function: Takes the values and returns a tuple.
        device: Where it draws random numbers.
        *values: Tensors and other things.

    Returns:
        What the function returns, with gradients.
    """
    # The first partition's inputs want no gradient, but its parameters do: something has to lead there.
    phony = torch.empty(0, requires_grad=True)
    results: tuple[Any, ...] = _Checkpoint.apply(phony, function, device, *values)  # type: ignore[no-untyped-call]
    return results
