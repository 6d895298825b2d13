"""Pipe: a sequential model that runs as a pipeline. The work is in `pipeline`; here are the module and its checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from torchdist_ref.errors import ArgumentError, ArgumentTypeError, explain
from torchdist_ref.pipeline.sync import microbatch
from torchdist_ref.pipeline.sync.batchnorm import DeferredBatchNorm
from torchdist_ref.pipeline.sync.partitions import split
from torchdist_ref.pipeline.sync.pipeline import Pipeline
from torchdist_ref.pipeline.sync.skip.skippable import verify_skippables

__all__ = ["LocalResult", "Pipe"]

_CHECKPOINT: dict[str, Callable[[int], int]] = {
    "always": lambda chunks: chunks,
    "except_last": lambda chunks: chunks - 1,
    "never": lambda chunks: 0,
}


class LocalResult:
    """What `Pipe` returns where torch's remote calls are not initialised: the part of an RRef that makes sense then.

    Args:
        value: The result.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def local_value(self) -> Any:
        """The result."""
        return self._value

    def to_here(self, timeout: float = -1.0) -> Any:
        """The result, which is here already."""
        return self._value

    def is_owner(self) -> bool:
        """True: it is here."""
        return True


class Pipe(nn.Module):
    """Runs a sequential model as a pipeline of micro-batches (GPipe).

    The batch, the first dimension of each input tensor, is cut in micro-batches; while one is in the second partition,
    the next is in the first. The result is that of the model itself, and so are gradients.

    Args:
        module: The model. Consecutive children on one device are a partition; `partition_model` makes partitions too.
        chunks: How many micro-batches. Default: 1.
        checkpoint: Which micro-batches forget their activations and compute them again in the backward pass, while
            training: ``"always"`` all, ``"except_last"`` all but the last (default), ``"never"`` none.
        deferred_batch_norm: Whether batch normalisation keeps statistics of whole batches: `DeferredBatchNorm`.

    Attributes:
        partitions: The parts of the model.
        devices: Where each is.
        chunks: As given.
        checkpoint: As given.

    Raises:
        ArgumentTypeError: No ``nn.Sequential``, or skip connections that don't fit.
        ArgumentError: A wrong number of micro-batches, an unknown way to checkpoint, a child on several devices.

    Example:
        >>> import torch
        >>> from torchdist_ref.pipeline.sync import Pipe
        >>> from torchdist_ref.pipeline.sync.utils import partition_model
        >>> layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> pipe = Pipe(partition_model(layers, [1, 2], ["cpu", "cpu"]), chunks=4)
        >>> batch = torch.arange(32.0).view(8, 4)
        >>> torch.allclose(pipe(batch).local_value(), layers(batch))
        True
    """

    def __init__(
        self,
        module: nn.Sequential,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(chunks, int) or chunks < 1:
            raise ArgumentError(explain("Pipe", "chunks", "a number of micro-batches, at least 1", chunks))
        if checkpoint not in _CHECKPOINT:
            raise ArgumentError(explain("Pipe", "checkpoint", f"one of {', '.join(_CHECKPOINT)}", checkpoint))
        if deferred_batch_norm:
            module = DeferredBatchNorm.convert_deferred_batch_norm(module, chunks)
        parts, self.devices = split(module)
        verify_skippables(nn.Sequential(*(layer for part in parts for layer in part.children())))
        self.partitions = nn.ModuleList(parts)
        self.chunks = chunks
        self.checkpoint = checkpoint
        self._pipeline = Pipeline(parts, self.devices)

    def __len__(self) -> int:
        """How many layers the model has."""
        return sum(len(list(part.children())) for part in self.partitions)

    def __iter__(self) -> Iterator[nn.Module]:
        """The layers, in order."""
        return (layer for part in self.partitions for layer in part.children())

    def __getitem__(self, index: int) -> nn.Module:
        """One layer."""
        return list(self)[index]

    def cuda(self, device: Any = None) -> NoReturn:
        """Refused: each partition has its device.

        Raises:
            ArgumentTypeError: Always.
        """
        raise _moved()

    def cpu(self) -> NoReturn:
        """Refused: each partition has its device.

        Raises:
            ArgumentTypeError: Always.
        """
        raise _moved()

    def to(self, *args: Any, **kwargs: Any) -> Pipe:
        """Change the dtype of parameters and buffers. Devices can't be changed.

        Args:
            *args: As for any module.
            **kwargs: As for any module.

        Returns:
            This module.

        Raises:
            ArgumentTypeError: A device was named.
        """
        named = isinstance(args[0], torch.device | int | str | Tensor) if args else False
        if named or kwargs.keys() & {"device", "tensor"}:
            raise _moved()
        return super().to(*args, **kwargs)

    def forward(self, *inputs: Any) -> Any:
        """Run a batch through the pipeline.

        Args:
            *inputs: Tensors with the batch as first dimension, or in `NoChunk`; and other things, which every
                micro-batch gets as they are.

        Returns:
            What holds the result, which its ``local_value()`` gives. It is torch's RRef where torch's remote calls are
            initialised, else a `LocalResult`. Tensors are on the last partition's device.

        Raises:
            ArgumentTypeError: There is no tensor to cut.
            ArgumentError: Tensors with different numbers of rows.
        """
        batches = microbatch.scatter(inputs, self.chunks)
        checkpointed = _CHECKPOINT[self.checkpoint](len(batches)) if self.training else 0
        return _result(microbatch.gather(self._pipeline.run(batches, checkpointed)))


def _result(value: Any) -> Any:
    from torch.distributed import rpc

    if rpc.is_available() and rpc._is_current_rpc_agent_set():  # type: ignore[attr-defined]
        return rpc.RRef(value)
    return LocalResult(value)


def _moved() -> ArgumentTypeError:
    return ArgumentTypeError("Pipe: its partitions have their devices; move the layers before they are given to Pipe.")
