"""Activation checkpointing: a partition's activations are dropped, and recomputed in the backward pass.

The recomputation draws the same random numbers. torch has one default generator for each device, from which all
threads draw. If partitions on one device run at the same time, `OwnRandomNumbers` gives each run of a partition its own
random numbers. So they depend neither on the order of the threads nor on whether a run is the first one or a
recomputation.

Do not add knowledge of micro-batches here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from torchdist_ref.torch_internals import torch_private

__all__ = ["OwnRandomNumbers", "checkpoint", "is_checkpointing", "is_recomputing", "random_state"]

Function = Callable[..., tuple[Any, ...]]


class _Phase(threading.local):
    """Phase of the forward pass that runs on this thread."""

    checkpointing = False
    recomputing = False


_phase = _Phase()
_generator_lock = threading.RLock()


def is_checkpointing() -> bool:
    """Whether this forward pass will be recomputed.

    Returns:
        True in a module's forward whose activations are dropped; False in the recomputation, and outside pipelines.

    Example:
        >>> from torchdist_ref.pipeline.sync import is_checkpointing
        >>> is_checkpointing()
        False

    Elsewhere:
        None in MPI, NCCL and JAX, where ``jax.checkpoint`` recomputes pure functions.
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

    Elsewhere:
        None in MPI, NCCL and JAX, where ``jax.checkpoint`` recomputes pure functions.
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


def random_state(device: torch.device) -> Tensor:
    """Return the state of a device's default generator."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _set_random_state(device: torch.device, state: Tensor) -> None:
    """Set the state of a device's default generator."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


@contextlib.contextmanager
def _with_random_state(device: torch.device, state: Tensor) -> Iterator[None]:
    """Set the state of a device's default generator for the duration of a block."""
    with _generator_lock:
        former = random_state(device)
        _set_random_state(device, state)
        try:
            yield
        finally:
            _set_random_state(device, former)


_DispatchMode: Any = torch_private.DISPATCH_MODE.get()


class OwnRandomNumbers(_DispatchMode):  # type: ignore[misc]
    """Mode in which a thread draws from a generator of its own in place of a device's default generator.

    The default generator has the state of this one only while an operation draws, so that other threads can compute.
    Operations that are passed a generator use that one.

    Args:
        device: The device.
        seed: Seed of the generator.

    Attributes:
        drawn: Whether random numbers were drawn.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        super().__init__()
        self._device, self._state = device, torch.Generator(device).manual_seed(seed).get_state()
        self.drawn = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, on this generator if it draws from the default one."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        with _with_random_state(self._device, self._state):
            result = func(*args, **kwargs)
            self._state, self.drawn = random_state(self._device), True
        return result


class _Checkpoint(torch.autograd.Function):
    """A function run without a graph, whose backward pass runs it again with one."""

    @staticmethod
    def forward(
        ctx: Any, phony: Tensor, function: Function, device: torch.device, own: bool, *values: Any
    ) -> tuple[Any, ...]:
        """Run the function and keep its inputs."""
        tensors = [value for value in values if isinstance(value, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.others = [None if isinstance(value, Tensor) else (value,) for value in values]
        ctx.function, ctx.device = function, device
        ctx.autocast = device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)
        with _in_phase("checkpointing"):
            ctx.random_state = None if own else random_state(device)
            results = function(*values)
        integers = [r for r in results if isinstance(r, Tensor) and not (r.is_floating_point() or r.is_complex())]
        ctx.mark_non_differentiable(*integers)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the function again, and its backward pass."""
        saved = iter(ctx.saved_tensors)
        values = [_leaf(next(saved)) if other is None else other[0] for other in ctx.others]
        same_numbers = (
            _with_random_state(ctx.device, ctx.random_state) if ctx.random_state is not None else nullcontext()
        )
        with same_numbers, _in_phase("recomputing"), torch.enable_grad(), torch.autocast(*ctx.autocast):
            results = ctx.function(*values)
        pairs = [(r, g) for r, g in zip(results, grads, strict=True) if isinstance(r, Tensor) and r.requires_grad]
        torch.autograd.backward([result for result, _ in pairs], [grad for _, grad in pairs])
        return None, None, None, None, *(value.grad if isinstance(value, Tensor) else None for value in values)


def _leaf(tensor: Tensor) -> Tensor:
    """Return a tensor as a leaf of a new graph."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def checkpoint(function: Function, device: torch.device, own: bool, *values: Any) -> tuple[Any, ...]:
    """Run a function, and keep only its inputs for the backward pass.

    Args:
        function: A function of the values that returns a tuple.
        device: The device whose random numbers it draws.
        own: Whether the function draws from a generator of its own, the same numbers each time it runs.
        *values: Tensors and other values.

    Returns:
        The results of the function, with gradients.
    """
    # The first partition's inputs need no gradient, but its parameters do: the phony connects them to the graph.
    phony = torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True)
    results: tuple[Any, ...] = _Checkpoint.apply(phony, function, device, own, *values)  # type: ignore[no-untyped-call]
    return results
