"""Objects of ranks that are not authenticated: torch's own object collectives exchange plain data on groups of ours.

torch unpickles what arrives, and so do its checkpoints, FSDP's optimizer states and pipelines, which call its object
collectives. All of these convert objects with two functions of torch, which offers no hook. `limit_objects` puts
functions in their place that pickle as torch does where the group allows it (`CallsFromTorch.pickles_objects`).

A group that torch made on a backend of its own, below a default group of ours, follows the default group: its ranks
met on that group's store. Do not add communication here, nor this library's own object collectives (`groups.pickling`).
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor

from torchdist_ref import torch_private
from torchdist_ref.authentication import CURES
from torchdist_ref.errors import PicklingError, add_note
from torchdist_ref.plain_data import PLAIN_TYPES, NotPlainError, decode, encode


def not_plain(operation: str, group: Any, cause: NotPlainError) -> PicklingError:
    """Return the error for an object of this rank that is no plain data.

    Args:
        operation: Function that the program called.
        group: Group of ours whose ranks are not authenticated.
        cause: Part of the object that has no encoding.
    """
    return PicklingError(
        f"{operation}: rank {group.members[group.rank()]}'s object has {cause} in it. The ranks of group "
        f"{group.group_desc or group.group_name!r} are not authenticated, so they exchange plain data only "
        f"({PLAIN_TYPES}; not their subclasses): unpickling would run code of everybody who reaches the network. "
        f"{CURES}"
    )


def limit_objects() -> None:
    """Put functions in place of torch's two that convert objects, once; they stay until the process ends."""
    to_tensor, to_object = torch_private.OBJECT_TO_TENSOR.get(), torch_private.TENSOR_TO_OBJECT.get()
    if hasattr(to_tensor, "limits_objects"):
        return

    # torch 2.14 added an argument `weights_only`.
    @wraps(to_tensor)
    def object_to_tensor(obj: Any, device: Any, group: Any = None, *args: Any, **kwargs: Any) -> Any:
        limited = _limited(group)
        if limited is None:
            return to_tensor(obj, device, group, *args, **kwargs)
        try:
            data = encode(obj)
        except NotPlainError as cause:
            raise not_plain("torch.distributed", limited, cause) from None
        # A copy, since torch resizes it.
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device, copy=True)
        return tensor, torch.tensor([len(data)], dtype=torch.int64, device=device)

    @wraps(to_object)
    def tensor_to_object(tensor: Tensor, tensor_size: Any, group: Any = None, *args: Any, **kwargs: Any) -> Any:
        if _limited(group) is None:
            return to_object(tensor, tensor_size, group, *args, **kwargs)
        try:
            return decode(tensor.cpu().numpy().tobytes()[: int(tensor_size)])
        except NotPlainError as error:
            add_note(error, f"The ranks are not authenticated, so pickles are not loaded. {CURES}")
            raise

    object_to_tensor.limits_objects = True  # type: ignore[attr-defined]
    torch_private.OBJECT_TO_TENSOR.set(object_to_tensor)
    torch_private.TENSOR_TO_OBJECT.set(tensor_to_object)


def _limited(group: Any) -> Any:
    """Return the group of ours whose ranks may not unpickle what the others of this group send; None if they may."""
    ours = group if hasattr(group, "pickles_objects") else torch_private.TABLES.get().default_pg
    return None if getattr(ours, "pickles_objects", True) else ours
