"""Activation checkpointing: a partition's activations are dropped, and recomputed in the backward pass.

The recomputation draws the same random numbers. The CPU has one generator for all threads, so partitions on the CPU
draw one after the other (`random_numbers_alone`) while numbers have to be repeatable.

Do not add knowledge of micro-batches here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["checkpoint", "is_checkpointing", "is_recomputing", "random_numbers_alone"]

Function = Callable[..., tuple[Any, ...]]


class _Phase(threading.local):
    """Phase of the forward pass that runs on this thread."""

    checkpointing = False
    recomputing = False


_phase = _Phase()
_cpu_generator_lock = threading.RLock()


def is_checkpointing() -> bool:
    """Whether this forward pass will be recomputed.

    Returns:
        True in a module's forward whose activations are dropped; False in the recomputation, and outside pipelines.

    Example:
        >>> from torchdist_ref.pipeline.sync import is_checkpointing
        >>> is_checkpointing()
        False
    """
    return _phase.checkpointing


def is_recomputing() -> bool:
    """Whether this forward pass is a recomputation, so that side effects have happened already.

    Returns:
        True in a module's forward during the backward pass; False outside pipelines.

    Example:
        >>> from torchdist_ref.pipeline.sync import is_recomputing
        >>> is_recomputing()
        False
    """
    return _phase.recomputing


@contextlib.contextmanager
def _in_phase(name: str) -> Iterator[None]:
    """Set a phase for the duration of a block."""
    setattr(_phase, name, True)
    try:
        yield
    finally:
        setattr(_phase, name, False)


@contextlib.contextmanager
def random_numbers_alone(device: torch.device) -> Iterator[None]:
    """Let no other thread draw random numbers in a block, if the device's generator is that of the whole process."""
    with _cpu_generator_lock if device.type == "cpu" else contextlib.nullcontext():
        yield


def _random_state(device: torch.device) -> Tensor:
    """Return the state of a device's generator."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _set_random_state(device: torch.device, state: Tensor) -> None:
    """Set the state of a device's generator."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


@contextlib.contextmanager
def _with_random_state(device: torch.device, state: Tensor) -> Iterator[None]:
    """Set the state of a device's generator for the duration of a block."""
    former = _random_state(device)
    _set_random_state(device, state)
    try:
        yield
    finally:
        _set_random_state(device, former)


class _Checkpoint(torch.autograd.Function):
    """A function run without a graph, whose backward pass runs it again with one."""

    @staticmethod
    def forward(ctx: Any, phony: Tensor, function: Function, device: torch.device, *values: Any) -> tuple[Any, ...]:
        """Run the function and keep its inputs."""
        tensors = [value for value in values if isinstance(value, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.others = [None if isinstance(value, Tensor) else (value,) for value in values]
        ctx.function, ctx.device = function, device
        ctx.autocast = device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)
        with _in_phase("checkpointing"):
            ctx.random_state = _random_state(device)
            results = function(*values)
        integers = [r for r in results if isinstance(r, Tensor) and not (r.is_floating_point() or r.is_complex())]
        ctx.mark_non_differentiable(*integers)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the function again, and its backward pass."""
        saved = iter(ctx.saved_tensors)
        values = [_leaf(next(saved)) if other is None else other[0] for other in ctx.others]
        alone, same_numbers = random_numbers_alone(ctx.device), _with_random_state(ctx.device, ctx.random_state)
        with alone, same_numbers, _in_phase("recomputing"), torch.enable_grad(), torch.autocast(*ctx.autocast):
            results = ctx.function(*values)
        pairs = [(r, g) for r, g in zip(results, grads, strict=True) if isinstance(r, Tensor) and r.requires_grad]
        torch.autograd.backward([result for result, _ in pairs], [grad for _, grad in pairs])
        return None, None, None, *(value.grad if isinstance(value, Tensor) else None for value in values)


def _leaf(tensor: Tensor) -> Tensor:
    """Return a tensor as a leaf of a new graph."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def checkpoint(function: Function, device: torch.device, *values: Any) -> tuple[Any, ...]:
    """Run a function, and keep only its inputs for the backward pass.

    Args:
        function: A function of the values that returns a tuple.
        device: The device whose random numbers it draws.
        *values: Tensors and other values.

    Returns:
        The results of the function, with gradients.
    """
    # The first partition's inputs need no gradient, but its parameters do: the phony connects them to the graph.
    phony = torch.empty(0, requires_grad=True)
    results: tuple[Any, ...] = _Checkpoint.apply(phony, function, device, *values)  # type: ignore[no-untyped-call]
    return results
