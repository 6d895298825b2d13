"""Running a pipeline: at each clock, every partition that has a micro-batch works on it, each on a thread of its own.

Between clocks micro-batches move on to the next device. Cutting and joining batches is in `microbatch`, who works
when in `schedule`.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from torchdist_ref.pipeline.sync.checkpoint import checkpoint, turn
from torchdist_ref.pipeline.sync.dependency import depend
from torchdist_ref.pipeline.sync.microbatch import Batch
from torchdist_ref.pipeline.sync.schedule import clock_cycles
from torchdist_ref.pipeline.sync.skip.layout import crossing
from torchdist_ref.pipeline.sync.skip.tracker import Skips, using

__all__ = ["Pipeline"]


class Pipeline:
    """Partitions on their devices.

    Args:
        partitions: The parts of the model.
        devices: Where each is.
    """

    def __init__(self, partitions: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
        self._partitions = partitions
        self._devices = devices
        self._crossing = crossing(partitions)

    def run(self, batches: list[Batch], checkpointed: int) -> list[Batch]:
        """Send micro-batches through all partitions.

        Args:
            batches: The micro-batches.
            checkpointed: How many of them, from the first on, forget what they compute and compute it again later.

        Returns:
            What comes out for each.
        """
        batches, skips = list(batches), [Skips() for _ in batches]
        with ExitStack() as stack:
            threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in self._partitions]
            for pairs in clock_cycles(len(batches), len(self._partitions)):
                for chunk, partition in pairs:
                    self._move(batches, chunk, partition)
                tasks = [self._task(batches[i], skips[i], j, i < checkpointed, checkpointed > 0) for i, j in pairs]
                futures = [threads[j].submit(task) for (_, j), task in zip(pairs, tasks, strict=True)]
                for (chunk, _), future in zip(pairs, futures, strict=True):
                    batches[chunk] = future.result()
        return batches

    def _move(self, batches: list[Batch], chunk: int, partition: int) -> None:
        """Bring a micro-batch to a partition, so that on the way back it gets there before the one ahead of it."""
        if chunk and partition:
            _order(batches, chunk)
        device = self._devices[partition]
        batches[chunk] = batches[chunk].map(lambda tensor: tensor.to(device, non_blocking=True))

    def _task(
        self, batch: Batch, skips: Skips, partition: int, checkpointed: bool, repeatable: bool
    ) -> Callable[[], Batch]:
        """Make what a partition's thread does with a micro-batch; the thread computes as this one would."""
        device, (taken, sent) = self._devices[partition], self._crossing[partition]
        arriving = [skips.pop(key) for key in taken]
        came = [None if skip is None else skip.to(device, non_blocking=True) for skip in arriving]
        module, count, single = self._partitions[partition], len(batch.values), [True]

        def function(*values: Any) -> tuple[Any, ...]:
            with using(dict(zip(taken, values[count:], strict=True))) as local:
                result = Batch.of(module(*values[:count]))
            single[0] = result.single
            return *result.values, *(local[key] for key in sent)

        def task() -> Batch:
            values = *batch.values, *came
            with turn(device) if repeatable else nullcontext():
                results = checkpoint(function, device, *values) if checkpointed else function(*values)
            skips.update(zip(sent, results[len(results) - len(sent) :], strict=True))
            return Batch(results[: len(results) - len(sent)], single[0])

        return _as_here(task, device)


def _order(batches: list[Batch], chunk: int) -> None:
    ahead, behind = batches[chunk - 1], batches[chunk]
    first, second = _with_gradient(ahead), _with_gradient(behind)
    if first is not None and second is not None:
        later, sooner = depend(first, second)
        batches[chunk - 1] = ahead.map(lambda tensor: later if tensor is first else tensor)
        batches[chunk] = behind.map(lambda tensor: sooner if tensor is second else tensor)


def _with_gradient(batch: Batch) -> Tensor | None:
    return next((v for v in batch.values if isinstance(v, Tensor) and v.requires_grad), None)


def _as_here(task: Callable[[], Batch], device: torch.device) -> Callable[[], Batch]:
    """Take along what torch and Python keep for each thread."""
    context, gradients = contextvars.copy_context(), torch.is_grad_enabled()
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)

    def there() -> Batch:
        with torch.set_grad_enabled(gradients), torch.autocast(device.type, dtype, enabled):
            return task()

    return lambda: context.run(there)
