"""Pipe: a sequential model that runs as a pipeline, and the partitions that it consists of.

A partition is a run of consecutive modules on one device, which works on one micro-batch at a time. This module has the
user's class and its checks; `execution` runs the micro-batches. Do not add execution here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from torchdist_ref.errors import ArgumentError, ArgumentTypeError, BackendArgumentError, explain
from torchdist_ref.pipeline.batchnorm import DeferredBatchNorm
from torchdist_ref.pipeline.execution import Pipeline, gather, scatter
from torchdist_ref.pipeline.skip import verify_skippables
from torchdist_ref.torch_internals import torch_private

__all__ = [
    "BalanceError",
    "LocalResult",
    "Partition",
    "Pipe",
    "PipeSequential",
    "WithDevice",
    "partition_model",
    "split",
]

CPU = torch.device("cpu")

# The number of micro-batches whose activations are recomputed.
_CHECKPOINT: dict[str, Callable[[int], int]] = {
    "always": lambda chunks: chunks,
    "except_last": lambda chunks: chunks - 1,
    "never": lambda chunks: 0,
}


class BalanceError(ArgumentError):
    """Numbers of layers that do not fit the model."""


class WithDevice(nn.Module):
    """Wrapper of a child of a model for `Pipe` that states its device.

    `Pipe` takes a child without parameters as one on the CPU. In a model on accelerators this child would become a
    partition of its own, and tensors would be copied to the CPU and back.

    Args:
        module: The child. `Pipe` moves it to the device, and takes it out of the wrapper.
        device: The device.

    Example:
        >>> import torch
        >>> from torchdist_ref.pipeline.sync.pipe import Pipe, WithDevice
        >>> layers = torch.nn.Linear(2, 2, device="meta"), WithDevice(torch.nn.Dropout(), "meta")
        >>> Pipe(torch.nn.Sequential(*layers)).devices
        [device(type='meta')]
    """

    def __init__(self, module: nn.Module, device: Any) -> None:
        super().__init__()
        self._module = module
        self._device = torch.device(device)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Run the module."""
        return self._module(*inputs, **options)

    @property
    def module(self) -> nn.Module:
        """The child."""
        return self._module

    @property
    def device(self) -> torch.device:
        """The device."""
        return self._device


class Partition(nn.Sequential):
    """Sequence of modules of one partition; a tuple becomes the arguments of the next module."""

    def forward(self, *inputs: Any) -> Any:
        """Run all modules in order."""
        result: Any = inputs if len(inputs) != 1 else inputs[0]
        for module in self:
            result = module(*result) if isinstance(result, tuple) else module(result)
        return result


PipeSequential = Partition


def split(module: nn.Sequential) -> tuple[list[nn.Module], list[torch.device]]:
    """Split a model into partitions, as torch does.

    A child on the CPU is a partition of its own, and so is each partition that `partition_model` made. Elsewhere
    consecutive children on one device are a partition. The layers of a child that is a sequence are layers of the
    partition.

    Args:
        module: The model; each child on one device, which is the CPU if it has no parameters (see `WithDevice`).

    Returns:
        The partitions, which share their modules with the model, and the device of each.

    Raises:
        ArgumentTypeError: The model is not an ``nn.Sequential``.
        ArgumentError: A child is on several devices, or occurs twice.
    """
    if not isinstance(module, nn.Sequential):
        raise ArgumentTypeError(f"Pipe: module must be nn.Sequential to be partitioned, got {type(module).__name__}.")
    if len(list(module.children())) != len(module):
        raise ArgumentError("Pipe: module with duplicate children is not supported; copy the child.")
    partitions: list[list[nn.Module]] = []
    devices: list[torch.device] = []
    for name, child in module.named_children():
        if isinstance(child, WithDevice):
            device, layer = child.device, child.module.to(child.device)
        else:
            device, layer = _device(name, child), child
        if not devices or device != devices[-1] or device.type == "cpu" or isinstance(child, Partition):
            partitions.append([])
            devices.append(device)
        partitions[-1].extend(layer.children() if isinstance(layer, nn.Sequential) else [layer])
    made: list[nn.Module] = [Partition(*layers) for layers in partitions]
    _check_shared_parameters(made, devices)
    return made, devices


def _device(name: str, module: nn.Module) -> torch.device:
    """Return the device of a child's parameters and buffers; the CPU if it has none."""
    devices = {tensor.device for tensor in [*module.parameters(), *module.buffers()]}
    if len(devices) > 1:
        raise ArgumentError(
            f"Pipe: child {name!r} is on {sorted(map(str, devices))}: it should have all parameters on a single "
            f"device, please use .to() to place the module on a single device."
        )
    return next(iter(devices), CPU)


def _check_shared_parameters(partitions: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
    """Raise if two partitions on different devices have a parameter in common."""
    owner: dict[int, int] = {}
    for index, partition in enumerate(partitions):
        for name, parameter in partition.named_parameters():
            other = owner.setdefault(id(parameter), index)
            if devices[other] != devices[index]:
                raise ArgumentError(
                    f"Pipe: module with duplicate parameters on distinct devices is not supported: {name} of "
                    f"partition {index} on {devices[index]} is in partition {other} on {devices[other]}."
                )


def partition_model(module: nn.Sequential, balance: list[int], devices: Sequence[Any] | None = None) -> nn.Sequential:
    """Split a model's layers into partitions, and move each partition to its device.

    Args:
        module: The model.
        balance: The number of layers of each partition; the sum is the number of layers.
        devices: The device of each partition, as ``torch.device`` or a value that makes one; devices may repeat.
            Default: the accelerators by number, or the CPU for all if there is none.

    Returns:
        A model for `Pipe`: a sequence of partitions.

    Raises:
        ArgumentError: Numbers that do not fit the model, or too few devices.

    Example:
        >>> import torch
        >>> from torchdist_ref.pipeline.sync.utils import partition_model
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
        >>> [len(partition) for partition in partition_model(model, [2, 1], ["cpu", "cpu"])]
        [2, 1]

    Elsewhere:
        None in MPI, NCCL and JAX.
    """
    if sum(balance) != len(module) or min(balance, default=0) < 1:
        expected = f"positive numbers that sum up to the {len(module)} layers"
        raise BalanceError(explain("partition_model", "balance", expected, balance))
    chosen = _default_devices(len(balance)) if devices is None else list(devices)
    if len(chosen) < len(balance):
        raise ArgumentError(explain("partition_model", "devices", f"{len(balance)} devices", devices))
    layers = iter(module)
    parts = [Partition(*(next(layers) for _ in range(count))) for count in balance]
    return nn.Sequential(*(part.to(device) for part, device in zip(parts, chosen, strict=False)))


def _default_devices(count: int) -> list[Any]:
    """Return a device for each of several partitions."""
    accelerated = torch.accelerator.is_available()
    return list(range(count)) if accelerated else [torch.device("cpu")] * count


class LocalResult:
    """Result of `Pipe` where torch's RPC is not initialized: the methods of an RRef that need no RPC.

    Args:
        value: The result.
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def local_value(self) -> Any:
        """Return the result."""
        return self._value

    def to_here(self, timeout: float = -1.0) -> Any:
        """Return the result, which is on this process already."""
        return self._value

    def is_owner(self) -> bool:
        """Return True: the result is on this process."""
        return True

    def confirmed_by_owner(self) -> bool:
        """Return True: the result is on this process."""
        return True

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run the backward pass of a result of one element, such as a loss.

        Args:
            dist_autograd_ctx_id: The context of torch's distributed autograd, which needs RPC. Default: none.
            retain_graph: Whether the graph is kept for another backward pass. Default: False.

        Raises:
            ArgumentError: A context is given, or the result is not one tensor of one element with a gradient.
        """
        value = self._value
        if dist_autograd_ctx_id != -1:
            expected = "-1 where torch's RPC is not initialized"
            raise BackendArgumentError(explain("backward", "dist_autograd_ctx_id", expected, dist_autograd_ctx_id))
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            got = f"{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            expected = "one tensor of one element that requires a gradient"
            raise BackendArgumentError(f"LocalResult.backward: the result must be {expected}, and is {got}.")
        value.backward(retain_graph=retain_graph)


class Pipe(nn.Module):
    """Sequential model that runs as a pipeline of micro-batches (GPipe).

    The batch, the first dimension of each input tensor, is cut into micro-batches; while one is in the second
    partition, the next is in the first. The result is that of the model itself, and so are gradients.

    Args:
        module: The model. On the CPU each child is a partition, elsewhere consecutive children on one device are;
            `partition_model` makes partitions too.
        chunks: The number of micro-batches. Default: 1.
        checkpoint: The micro-batches whose activations are recomputed in the backward pass, while training:
            ``"always"`` all, ``"except_last"`` all but the last (default), ``"never"`` none.
        deferred_batch_norm: Whether batch normalization keeps statistics of whole batches: `DeferredBatchNorm`.

    Attributes:
        partitions: The parts of the model.
        devices: The device of each.
        chunks: The argument.
        checkpoint: The argument.

    Raises:
        ArgumentTypeError: The model is not an ``nn.Sequential``, or skip connections do not fit.
        ArgumentError: A wrong number of micro-batches, an unknown ``checkpoint``, or a child on several devices.

    Example:
        >>> import torch
        >>> from torchdist_ref.pipeline.sync import Pipe
        >>> from torchdist_ref.pipeline.sync.utils import partition_model
        >>> layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> pipe = Pipe(partition_model(layers, [1, 2], ["cpu", "cpu"]), chunks=4)
        >>> batch = torch.arange(32.0).view(8, 4)
        >>> torch.allclose(pipe(batch).local_value(), layers(batch))
        True

    Elsewhere:
        None in MPI, NCCL and JAX, where a program writes the schedule, with ``jax.lax.ppermute`` between stages. The
        package ``torchgpipe`` has the same model.
    """

    def __init__(
        self,
        module: nn.Sequential,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        count = _integer(chunks)
        if count is None or count < 1:
            raise ArgumentError(f"Pipe: number of chunks must be positive integer, got {chunks!r}.")
        chunks, checkpoint = count, str(checkpoint)
        if checkpoint not in _CHECKPOINT:
            raise ArgumentError(
                f"Pipe: checkpoint is not one of 'always', 'except_last', or 'never', got {checkpoint!r}."
            )
        if deferred_batch_norm:
            module = DeferredBatchNorm.convert_deferred_batch_norm(module, chunks)
        parts, self.devices = split(module)
        verify_skippables(nn.Sequential(*(layer for part in parts for layer in part.children())))
        self.partitions = nn.ModuleList(parts)
        self.chunks = chunks
        self.checkpoint = checkpoint
        self._pipeline = Pipeline(parts, self.devices)

    def __len__(self) -> int:
        """Return the number of layers."""
        return sum(len(list(part.children())) for part in self.partitions)

    def __iter__(self) -> Iterator[nn.Module]:
        """Return an iterator over the layers, in order."""
        return (layer for part in self.partitions for layer in part.children())

    def __getitem__(self, index: int) -> nn.Module:
        """Return one layer."""
        return list(self)[index]

    def cuda(self, device: Any = None) -> NoReturn:
        """Raise an error: each partition keeps its device.

        Raises:
            ArgumentTypeError: Always.
        """
        raise _moved()

    def cpu(self) -> NoReturn:
        """Raise an error: each partition keeps its device.

        Raises:
            ArgumentTypeError: Always.
        """
        raise _moved()

    def to(self, *args: Any, **kwargs: Any) -> Pipe:
        """Change the dtype of parameters and buffers. Devices cannot be changed.

        Args:
            *args: Arguments of ``nn.Module.to``.
            **kwargs: Keyword arguments of ``nn.Module.to``.

        Returns:
            This module.

        Raises:
            ArgumentTypeError: The arguments name a device.
        """
        named = isinstance(args[0], torch.device | int | str | Tensor) if args else False
        if named or kwargs.keys() & {"device", "tensor"}:
            raise _moved()
        return super().to(*args, **kwargs)

    def forward(self, *inputs: Any) -> Any:
        """Run a batch through the pipeline.

        Args:
            *inputs: Tensors with the batch as first dimension, or in `NoChunk`; and other values, which every
                micro-batch gets unchanged.

        Returns:
            A holder of the result, which its ``local_value()`` returns. It is torch's RRef where torch's RPC is
            initialized, else a `LocalResult`. Tensors are on the last partition's device.

        Raises:
            ArgumentTypeError: There is no tensor to cut.
            ArgumentError: Tensors have different numbers of rows, or are on another device than the first partition.
        """
        if not self.devices:
            scatter(inputs, 1)
            return _result(inputs[0] if len(inputs) == 1 else inputs)
        for index, value in enumerate(inputs):
            if isinstance(value, Tensor) and value.device != self.devices[0]:
                raise ArgumentError(
                    f"Pipe: All inputs should be on the same device as the first partition, {self.devices[0]}; "
                    f"input {index} is on {value.device}."
                )
        batches = scatter(inputs, self.chunks)
        checkpointed = _CHECKPOINT[self.checkpoint](len(batches)) if self.training else 0
        return _result(gather(self._pipeline.run(batches, checkpointed)))


def _integer(value: Any) -> int | None:
    """Return a number that is an integer, 42.0 too, as an integer; None for others."""
    try:
        return int(value) if not isinstance(value, str) and int(value) == value else None
    except (TypeError, ValueError, OverflowError):
        return None


def _result(value: Any) -> Any:
    """Return a holder of the result."""
    from torch.distributed import rpc

    if rpc.is_available() and torch_private.RPC_RUNS.get()():
        return rpc.RRef(value)
    return LocalResult(value)


def _moved() -> ArgumentTypeError:
    """Return the error of calls that would move a Pipe."""
    return ArgumentTypeError(
        "Pipe: denied to move parameters and buffers: its partitions have their devices; move the layers before they "
        "are passed to Pipe."
    )
