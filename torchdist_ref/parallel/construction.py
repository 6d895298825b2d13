"""Looking at the module before it is wrapped: which parameters take part, where they are, what can't be.

Each check names the parameter or argument and says what to do; all of them run before ranks talk to
each other, so that a mistake made alike on all ranks fails at once on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from torchdist_ref import groups
from torchdist_ref.errors import ArgumentError, DistError, explain
from torchdist_ref.parallel.options import Entry

OPERATION = "DistributedDataParallel"


def entries(module: nn.Module, ignored: Collection[str]) -> list[Entry]:
    """The parameters that take part, each once, in the order of definition."""
    seen: set[torch.Tensor] = set()
    found = []
    for name, parameter, sparse in _all_parameters(module):
        if parameter.requires_grad and name not in ignored and parameter not in seen:
            seen.add(parameter)
            found.append(Entry(name, parameter, sparse))
    return found


def _all_parameters(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for prefix, owner in module.named_modules():
        sparse = isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.sparse
        for name, parameter in owner.named_parameters(recurse=False):
            yield f"{prefix}.{name}" if prefix else name, parameter, sparse


def check_parameters(module: nn.Module, found: Collection[Any]) -> None:
    """Raise where there is nothing to train, or something that can't be laid out yet."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise DistError(
                f"{OPERATION}: parameter {name!r} has no shape yet. Run one forward pass of the bare module first."
            )
    if not found:
        raise DistError(
            f"{OPERATION}: {type(module).__name__} has no parameter that requires a gradient: nothing to average. "
            "Use the module as it is."
        )


def check_devices(found: Sequence[Entry], device_ids: Any, output_device: Any) -> list[int] | None:
    """The one device that inputs go to, or None where the module stays where it is.

    Raises:
        ArgumentError: ``device_ids`` can't mean anything for this module.
    """
    devices = {entry.parameter.device for entry in found}
    if len({device.type for device in devices}) > 1:
        raise ArgumentError(f"{OPERATION}: the parameters are on unlike devices: {sorted(map(str, devices))}.")
    if device_ids is not None and len(device_ids) > 1:
        raise ArgumentError(explain(OPERATION, "device_ids", "None or a list of one device", list(device_ids)))
    if device_ids and _single_accelerator(devices):
        return [device_ids[0] if isinstance(device_ids[0], int) else torch.device(device_ids[0]).index]
    if device_ids or output_device is not None:
        hint = f"The parameters are on {sorted(map(str, devices))}."
        raise ArgumentError(explain(OPERATION, "device_ids", "left out for this module", device_ids, hint=hint))
    return None


def _single_accelerator(devices: set[torch.device]) -> bool:
    return len(devices) == 1 and next(iter(devices)).type != "cpu"


def check_batch_norm(module: nn.Module, device: torch.device) -> None:
    """Raise where a layer's own communication can't work: torch's SyncBatchNorm runs on accelerators only."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.SyncBatchNorm) and device.type == "cpu":
            raise ArgumentError(
                f"{OPERATION}: layer {name!r} is torch's SyncBatchNorm, which works on accelerators only. "
                "Use BatchNorm on CPU; its running statistics are taken from rank 0 before each forward pass."
            )


def choose_group(process_group: Any, device_mesh: Any) -> Any:
    """The group that one of the two arguments names; without either, the default group of this moment."""
    if device_mesh is None:
        return groups.world.default_group() if process_group is None else process_group
    if process_group is not None:
        raise ArgumentError(f"{OPERATION}: pass process_group or device_mesh, not both.")
    if device_mesh.ndim != 1:
        raise ArgumentError(explain(OPERATION, "device_mesh", "of one dimension", device_mesh.ndim))
    return device_mesh.get_group(0)


def delayed(named: Any, trigger: Any) -> list[tuple[str, torch.Tensor]]:
    """The parameters whose gradients wait for the trigger's.

    Raises:
        ArgumentError: One of the two arguments came without the other.
    """
    if (named is None) != (trigger is None):
        names = "delay_all_reduce_named_params and param_to_hook_all_reduce"
        raise ArgumentError(f"{OPERATION}: {names} need each other: the second sends the first. Pass both.")
    return list(named or ())


def mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Nested inputs, with every tensor in them changed.

    >>> mapped({"a": [torch.ones(1), "text"]}, lambda tensor: tensor * 2)
    {'a': [tensor([2.]), 'text']}
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(item, change) for item in value)
    if isinstance(value, dict):
        return type(value)((key, mapped(item, change)) for key, item in value.items())
    return value
