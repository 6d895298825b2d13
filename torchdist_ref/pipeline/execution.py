"""Execution of a pipeline: cut a batch into micro-batches, run them by GPipe's schedule, and join the results.

At each clock every partition that has a micro-batch works on it, each on its own thread. Micro-batch `i` is in
partition `j` at clock ``i + j``; between clocks micro-batches move to the next device. A tensor is cut along its first
dimension. Anything else, and a tensor in `NoChunk`, goes to every micro-batch unchanged.

Do not add checks of the user's model here: they are in `pipe`.
"""

from __future__ import annotations

import contextvars
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchdist_ref.errors import ArgumentTypeError, BackendArgumentError, add_note, explain
from torchdist_ref.pipeline.checkpoint import OwnRandomNumbers, checkpoint, random_state
from torchdist_ref.pipeline.skip import Skips, crossing, using
from torchdist_ref.torch_internals import accelerators

__all__ = ["Batch", "NoChunk", "Pipeline", "clock_cycles", "draw", "gather", "scatter"]


def clock_cycles(chunks: int, partitions: int) -> Iterator[list[tuple[int, int]]]:
    """Yield, for each clock, the pairs (micro-batch, partition) that are computed at that clock.

    Args:
        chunks: The number of micro-batches.
        partitions: The number of partitions.

    Yields:
        The pairs of one clock, which do not depend on each other. There are ``chunks + partitions - 1`` clocks.

    Example:
        >>> from torchdist_ref.pipeline.sync.schedule import clock_cycles
        >>> for pairs in clock_cycles(3, 2):
        ...     print(pairs)
        [(0, 0)]
        [(1, 0), (0, 1)]
        [(2, 0), (1, 1)]
        [(2, 1)]
    """
    for clock in range(chunks + partitions - 1):
        first, last = max(0, clock - chunks + 1), min(clock, partitions - 1)
        yield [(clock - partition, partition) for partition in range(first, last + 1)]


def draw(chunks: int, partitions: int) -> str:
    """Draw the schedule: a line for each partition, a column for each clock, and the micro-batch in each cell.

    Args:
        chunks: The number of micro-batches.
        partitions: The number of partitions.

    Returns:
        The lines.

    Example:
        >>> from torchdist_ref.pipeline.sync.schedule import draw
        >>> print(draw(4, 3))
        0: 0 1 2 3 . .
        1: . 0 1 2 3 .
        2: . . 0 1 2 3
    """
    clocks = [{partition: chunk for chunk, partition in pairs} for pairs in clock_cycles(chunks, partitions)]
    lines = ([str(clock.get(partition, ".")) for clock in clocks] for partition in range(partitions))
    return "\n".join(f"{partition}: {' '.join(line)}" for partition, line in enumerate(lines))


class NoChunk:
    """Wrapper of a tensor that every micro-batch gets whole.

    Args:
        inp: The tensor.

    Raises:
        ArgumentTypeError: The value is not a tensor; other values are never cut.

    Example:
        >>> import torch
        >>> from torchdist_ref.pipeline.sync import NoChunk
        >>> NoChunk(torch.zeros(2)).tensor
        tensor([0., 0.])

    Elsewhere:
        None in MPI, NCCL and JAX; an argument of ``jax.vmap`` with ``in_axes=None`` is the closest.
    """

    def __init__(self, inp: Tensor) -> None:
        if not isinstance(inp, Tensor):
            raise ArgumentTypeError(explain("NoChunk", "inp", "a tensor", type(inp).__name__))
        self._tensor = inp

    @property
    def tensor(self) -> Tensor:
        """The tensor."""
        return self._tensor


@dataclass(frozen=True)
class Batch:
    """Values of one micro-batch between two partitions: one value, or the values of a tuple."""

    values: tuple[Any, ...]
    single: bool

    @classmethod
    def of(cls, result: Any) -> Batch:
        """Wrap the result of a module.

        Raises:
            ArgumentTypeError: There is no tensor in it.
        """
        batch = cls(result, False) if isinstance(result, tuple) else cls((result,), True)
        if not any(isinstance(value, Tensor) for value in batch.values):
            raise ArgumentTypeError(
                f"Pipe: No tensor found! A partition returned {type(result).__name__}: {result!r:.80}."
            )
        return batch

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return this batch with a function applied to each tensor."""
        return Batch(tuple(function(v) if isinstance(v, Tensor) else v for v in self.values), self.single)


def scatter(inputs: Sequence[Any], chunks: int) -> list[Batch]:
    """Cut the inputs of a model into micro-batches.

    Args:
        inputs: The arguments of a model, at least one of them a tensor that is cut.
        chunks: The largest number of micro-batches; there are fewer if there are fewer rows.

    Returns:
        The micro-batches.

    Raises:
        ArgumentTypeError: There is no tensor to cut.
        ArgumentError: Tensors with different numbers of rows, or without rows.

    Example:
        >>> import torch
        >>> [batch.values for batch in scatter([torch.arange(3), "all"], 2)]
        [(tensor([0, 1]), 'all'), (tensor([2]), 'all')]
    """
    rows = [len(value) if value.dim() else None for value in inputs if isinstance(value, Tensor)]
    if not rows:
        raise ArgumentTypeError("Pipe: inputs do not have any tensors to be cut: pass one outside NoChunk.")
    if None in rows:
        raise BackendArgumentError("Pipe: chunk expects at least a 1-dimensional tensor; pass a scalar in NoChunk.")
    if len(set(rows)) > 1:
        hint = "Pass those that are not batches in NoChunk."
        raise BackendArgumentError(f"Pipe: inputs have different numbers of rows, {rows}, to be cut in chunks. {hint}")
    pieces = [value.chunk(chunks) if isinstance(value, Tensor) else None for value in inputs]
    whole = [value.tensor if isinstance(value, NoChunk) else value for value in inputs]
    count = next(len(piece) for piece in pieces if piece is not None)
    columns = [[value] * count if piece is None else piece for piece, value in zip(pieces, whole, strict=True)]
    return [Batch(values, len(values) == 1) for values in zip(*columns, strict=True)]


def gather(batches: Sequence[Batch]) -> Any:
    """Join the results of the micro-batches.

    Args:
        batches: The results, in order.

    Returns:
        The result of the model without micro-batches: tensors are joined along their first dimension, and other values
        are collected in a list.

    Example:
        >>> import torch
        >>> gather([Batch((torch.zeros(1), "a"), False), Batch((torch.ones(1), "b"), False)])
        (tensor([0., 1.]), ['a', 'b'])
    """
    columns = list(zip(*(batch.values for batch in batches), strict=True))
    if any(isinstance(value, Tensor) and not value.dim() for value in batches[0].values):
        raise BackendArgumentError(
            "Pipe: zero-dimensional results of micro-batches cannot be concatenated; unsqueeze()."
        )
    joined = [torch.cat(column) if isinstance(column[0], Tensor) else list(column) for column in columns]
    return joined[0] if batches[0].single else tuple(joined)


class Pipeline:
    """Partitions of a model on their devices.

    Args:
        partitions: The parts of the model.
        devices: The device of each.
    """

    def __init__(self, partitions: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
        self._partitions = partitions
        self._devices = devices
        self._crossing = crossing(partitions)

    def run(self, batches: list[Batch], checkpointed: int) -> list[Batch]:
        """Run micro-batches through all partitions.

        Args:
            batches: The micro-batches.
            checkpointed: The number of micro-batches, from the first on, whose activations are recomputed later.

        Returns:
            The result of each micro-batch.
        """
        batches, skips = list(batches), [Skips() for _ in batches]
        seeds = _Seeds(self._devices if len(batches) > 1 else [])
        with ExitStack() as stack:
            threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in self._partitions]
            for pairs in clock_cycles(len(batches), len(self._partitions)):
                for chunk, partition in pairs:
                    self._move(batches, chunk, partition)
                tasks = [self._task(batches[i], skips[i], (i, j), i < checkpointed, seeds) for i, j in pairs]
                futures = [threads[j].submit(task) for (_, j), task in zip(pairs, tasks, strict=True)]
                for (chunk, _), future in zip(pairs, futures, strict=True):
                    batches[chunk] = future.result()
        seeds.advance()
        return batches

    def _move(self, batches: list[Batch], chunk: int, partition: int) -> None:
        """Copy a micro-batch to a partition's device; in the backward pass it precedes the micro-batch ahead of it."""
        if chunk and partition:
            _order_backward(batches, chunk)
        device = self._devices[partition]
        batches[chunk] = batches[chunk].map(lambda tensor: tensor.to(device, non_blocking=True))

    def _task(
        self, batch: Batch, skips: Skips, cell: tuple[int, int], checkpointed: bool, seeds: _Seeds
    ) -> Callable[[], Batch]:
        """Return the function that a partition's thread runs on a micro-batch, in the modes of the calling thread."""
        device, (popped, stashed) = self._devices[cell[1]], self._crossing[cell[1]]
        arriving = [skips.pop(key) for key in popped]
        on_device = [None if skip is None else skip.to(device, non_blocking=True) for skip in arriving]
        module, count, single = self._partitions[cell[1]], len(batch.values), [True]

        def function(*values: Any) -> tuple[Any, ...]:
            with using(dict(zip(popped, values[count:], strict=True))) as local, seeds.numbers_of(device, cell):
                result = Batch.of(module(*values[:count]))
            single[0] = result.single
            return *result.values, *(local[key] for key in stashed)

        def task() -> Batch:
            values = *batch.values, *on_device
            try:
                if checkpointed:
                    results = checkpoint(function, device, device in seeds.shared, *values)
                else:
                    results = function(*values)
            except Exception as error:
                add_note(error, f"Pipe: raised by partition {cell[1]}, in micro-batch {cell[0]}.")
                raise
            skips.update(zip(stashed, results[len(results) - len(stashed) :], strict=True))
            return Batch(results[: len(results) - len(stashed)], single[0])

        return _in_callers_modes(task, device)


class _Seeds:
    """Seeds of the random numbers of each micro-batch in each partition, for devices that several partitions share.

    They depend on the state of the device's default generator, which changes only if numbers were drawn: a model
    without dropout leaves it alone. Where a device has one partition, or there is one micro-batch, all numbers are
    drawn in order from the default generator.

    Args:
        devices: The device of each partition.

    Attributes:
        shared: The devices of more than one partition.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.shared = {device for device, count in Counter(devices).items() if count > 1}
        self._states = {device: random_state(device).numpy(force=True).tobytes() for device in self.shared}
        self._drawn: set[torch.device] = set()

    @contextmanager
    def numbers_of(self, device: torch.device, cell: tuple[int, int]) -> Iterator[None]:
        """Let a thread draw the random numbers of a (micro-batch, partition) in a block, the same at each use."""
        if device not in self.shared:
            yield
            return
        digest = hashlib.blake2b(self._states[device] + repr(cell).encode(), digest_size=7).digest()
        with OwnRandomNumbers(device, int.from_bytes(digest, "little")) as numbers:
            yield
        if numbers.drawn:
            self._drawn.add(device)

    def advance(self) -> None:
        """Draw from the default generators that were replaced, so that the next run has other numbers."""
        for device in self._drawn:
            torch.rand(1, dtype=torch.float32, device=device)


def _order_backward(batches: list[Batch], chunk: int) -> None:
    """Let the backward pass of the micro-batch ahead of one begin only after its own has ended."""
    ahead, behind = batches[chunk - 1], batches[chunk]
    first, second = _with_gradient(ahead), _with_gradient(behind)
    if first is not None and second is not None:
        later, sooner = depend(first, second)
        batches[chunk - 1] = ahead.map(lambda tensor: later if tensor is first else tensor)
        batches[chunk] = behind.map(lambda tensor: sooner if tensor is second else tensor)


def _with_gradient(batch: Batch) -> Tensor | None:
    """Return the first tensor of a batch that requires a gradient."""
    return next((v for v in batch.values if isinstance(v, Tensor) and v.requires_grad), None)


def _in_callers_modes(task: Callable[[], Batch], device: torch.device) -> Callable[[], Batch]:
    """Return a function for another thread that runs a task in this thread's modes.

    They are the context, the gradient mode, autocast, and the stream of the task's device: another thread's current one
    would not wait for what this thread has submitted.
    """
    stream = accelerators.current_stream(device) if accelerators.is_accelerator(device) else None
    context, gradients = contextvars.copy_context(), torch.is_grad_enabled()
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)

    def run() -> Batch:
        on_stream = nullcontext() if stream is None else accelerators.on_stream(stream)
        with torch.set_grad_enabled(gradients), torch.autocast(device.type, dtype, enabled), on_stream:
            return task()

    return lambda: context.run(run)


class _Fork(torch.autograd.Function):
    """A tensor, and an empty tensor (a *phony*) that depends on it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tensor and the phony."""
        return tensor.detach(), torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Return the gradient of the tensor."""
        return grads[0]


class _Join(torch.autograd.Function):
    """A tensor that depends on a phony."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, phony: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the tensor."""
        return grads[0], None


def depend(later: Tensor, sooner: Tensor) -> tuple[Tensor, Tensor]:
    """Order two backward passes where the graph leaves the order open, by an edge without data.

    Args:
        later: A tensor whose gradient is passed on only when that of the other has been.
        sooner: The other tensor.

    Returns:
        The same two, to be used in place of them. Without gradients nothing changes.
    """
    if not (torch.is_grad_enabled() and later.requires_grad and sooner.requires_grad):
        return later, sooner
    later, phony = _Fork.apply(later)  # type: ignore[no-untyped-call]
    joined: Tensor = _Join.apply(sooner, phony)  # type: ignore[no-untyped-call]
    return later, joined
