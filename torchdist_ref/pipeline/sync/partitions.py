"""Partitions: consecutive modules of a model that live on one device, and so work on one micro-batch at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchdist_ref.errors import ArgumentError, ArgumentTypeError, explain

__all__ = ["Partition", "split"]

CPU = torch.device("cpu")


class Partition(nn.Sequential):
    """Modules that run one after the other; a tuple becomes the arguments of the next."""

    def forward(self, *inputs: Any) -> Any:
        """Run all modules."""
        result: Any = inputs if len(inputs) != 1 else inputs[0]
        for module in self:
            result = module(*result) if isinstance(result, tuple) else module(result)
        return result


def split(module: nn.Sequential) -> tuple[list[nn.Module], list[torch.device]]:
    """Cut a model where the device changes, and around the partitions that `partition_model` made.

    Args:
        module: The model; each child on one device. A child without parameters joins the one before it.

    Returns:
        The partitions, which share their modules with the model, and the device of each.

    Raises:
        ArgumentTypeError: No ``nn.Sequential``.
        ArgumentError: A child on several devices, or a child that is there twice.
    """
    if not isinstance(module, nn.Sequential):
        raise ArgumentTypeError(explain("Pipe", "module", "an nn.Sequential to be partitioned", type(module).__name__))
    children = list(module.children())
    if len(children) != len(module):
        raise ArgumentError("Pipe: a module with duplicate children is not supported; copy the child.")
    partitions: list[nn.Module] = []
    devices: list[torch.device] = []
    for name, child in module.named_children():
        device = _device(name, child)
        last = partitions[-1] if partitions else None
        if isinstance(child, Partition):
            partitions.append(child)
            devices.append(device or CPU)
        elif last is None or last in children or (device is not None and device != devices[-1]):
            partitions.append(Partition(child))
            devices.append(device or CPU)
        else:
            assert isinstance(last, Partition)
            last.append(child)
    return partitions, devices


def _device(name: str, module: nn.Module) -> torch.device | None:
    devices = {tensor.device for tensor in [*module.parameters(), *module.buffers()]}
    if len(devices) > 1:
        expected = "children each on one device"
        raise ArgumentError(explain("Pipe", "module", expected, f"child {name!r} on {sorted(map(str, devices))}"))
    return next(iter(devices), None)
