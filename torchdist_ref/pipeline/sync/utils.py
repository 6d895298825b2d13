"""Cutting a model into partitions by numbers of layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchdist_ref.errors import ArgumentError, explain
from torchdist_ref.pipeline.sync.partitions import Partition

__all__ = ["partition_model"]


def partition_model(module: nn.Sequential, balance: list[int], devices: Sequence[Any] | None = None) -> nn.Sequential:
    """Put a model's layers in partitions, and each partition on its device.

    Args:
        module: The model.
        balance: How many layers each partition gets; together all of them.
        devices: The device of each, as ``torch.device`` or what makes one; they may be the same. Default: the
            accelerators by number, or the CPU for all where there is none.

    Returns:
        A model for `Pipe`: a sequence of partitions.

    Raises:
        ArgumentError: Numbers that don't fit the model, or too few devices.

    Example:
        >>> import torch
        >>> from torchdist_ref.pipeline.sync.utils import partition_model
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
        >>> [len(partition) for partition in partition_model(model, [2, 1], ["cpu", "cpu"])]
        [2, 1]
    """
    if sum(balance) != len(module) or min(balance) < 1:
        expected = f"positive numbers that sum up to the {len(module)} layers"
        raise ArgumentError(explain("partition_model", "balance", expected, balance))
    places = _default(len(balance)) if devices is None else list(devices)
    if len(places) < len(balance):
        raise ArgumentError(explain("partition_model", "devices", f"{len(balance)} devices", devices))
    layers = iter(module)
    parts = [Partition(*(next(layers) for _ in range(count))) for count in balance]
    return nn.Sequential(*(part.to(place) for part, place in zip(parts, places, strict=False)))


def _default(count: int) -> list[Any]:
    accelerated = torch.accelerator.is_available()
    return list(range(count)) if accelerated else [torch.device("cpu")] * count
