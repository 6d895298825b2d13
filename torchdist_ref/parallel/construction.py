"""Checks of DDP's arguments and module: parameters that take part, devices, group.

Each check names the parameter or argument and the remedy. All of them run before ranks communicate, so that a mistake
made alike on all ranks fails at once on all ranks. Do not add communication here.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from torchdist_ref import groups
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, DistError, explain
from torchdist_ref.parallel.bucketing import ParameterEntry

OPERATION = "DistributedDataParallel"


def entries(module: nn.Module, ignored: Collection[str]) -> list[ParameterEntry]:
    """Return the parameters that take part, each once, in the order of definition.

    Raises:
        ArgumentTypeError: Not a module.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(explain(OPERATION, "module", "a torch.nn.Module", module))
    seen: set[torch.Tensor] = set()
    found = []
    for name, parameter, sparse in _all_parameters(module):
        if parameter.requires_grad and name not in ignored and parameter not in seen:
            seen.add(parameter)
            found.append(ParameterEntry(name, parameter, sparse))
    return found


def _all_parameters(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, bool]]:
    for prefix, owner in module.named_modules():
        sparse = isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) and owner.sparse
        for name, parameter in owner.named_parameters(recurse=False):
            yield f"{prefix}.{name}" if prefix else name, parameter, sparse


def check_parameters(module: nn.Module, found: Collection[Any]) -> None:
    """Raise if there is no parameter to train, or one that has no shape yet."""
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


def check_devices(found: Sequence[ParameterEntry], device_ids: Any, output_device: Any) -> list[int] | None:
    """Return the one device to which inputs are moved, or None if they are not.

    Raises:
        ArgumentError: ``device_ids`` does not apply to this module.
        ArgumentTypeError: It is not a list.
    """
    devices = {entry.parameter.device for entry in found}
    if len({device.type for device in devices}) > 1:
        raise ArgumentError(
            f"{OPERATION}: the parameters are on different kinds of devices: {sorted(map(str, devices))}."
        )
    if device_ids is not None and not isinstance(device_ids, list | tuple):
        raise ArgumentTypeError(explain(OPERATION, "device_ids", "None or a list of one device", device_ids))
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
    """Raise if a layer cannot communicate: torch's SyncBatchNorm runs on accelerators only."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.SyncBatchNorm) and device.type == "cpu":
            raise ArgumentError(
                f"{OPERATION}: layer {name!r} is torch's SyncBatchNorm, which works on accelerators only. "
                "Use BatchNorm on CPU; its running statistics are taken from rank 0 before each forward pass."
            )


def choose_group(process_group: Any, device_mesh: Any) -> Any:
    """Return the group that one of the two arguments names; without either, the current default group."""
    if device_mesh is None:
        return groups.world.resolve_member(process_group, OPERATION, "process_group")
    if process_group is not None:
        raise ArgumentError(f"{OPERATION}: pass process_group or device_mesh, not both.")
    if not hasattr(device_mesh, "ndim") or not hasattr(device_mesh, "get_group"):
        raise ArgumentTypeError(explain(OPERATION, "device_mesh", "a DeviceMesh", device_mesh))
    if device_mesh.ndim != 1:
        raise ArgumentError(explain(OPERATION, "device_mesh", "of one dimension", device_mesh.ndim))
    return groups.world.resolve_member(device_mesh.get_group(0), OPERATION, "device_mesh")


def delayed(named: Any, trigger: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the names and parameters of ``delay_all_reduce_named_params``.

    Raises:
        ArgumentError: One of the two arguments is missing.
        ArgumentTypeError: The second is not a tensor.
    """
    if trigger is not None and not isinstance(trigger, torch.Tensor):
        raise ArgumentTypeError(explain(OPERATION, "param_to_hook_all_reduce", "a parameter of the module", trigger))
    if (named is None) != (trigger is None):
        names = "delay_all_reduce_named_params and param_to_hook_all_reduce"
        raise ArgumentError(f"{OPERATION}: {names} need each other: the second sends the first. Pass both.")
    return list(named or ())


def _replaced(value: Any, changed: dict[str, Any]) -> Any:
    """Return a copy of a dataclass, which may be frozen or compute some fields itself."""
    made = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(made, name, item)
    return made


def mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return nested inputs with every tensor changed.

    >>> mapped({"a": [torch.ones(1), "text"]}, lambda tensor: tensor * 2)
    {'a': [tensor([2.]), 'text']}
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, PackedSequence):
        # Its sizes stay on the host; its indices move with the data.
        data = change(value.data)
        return (value.to(data.device) if data.device != value.data.device else value)._replace(data=data)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: mapped(getattr(value, field.name), change) for field in dataclasses.fields(value)}
        return _replaced(value, changed)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(item, change) for item in value)
    if isinstance(value, dict):
        return type(value)((key, mapped(item, change)) for key, item in value.items())
    return value
