"""Peers: the ranks that a hook talks to, whichever DDP it was registered on.

The hooks of this library run on our DistributedDataParallel and, as they are, on torch's. A group of
ours is asked through `torchdist_ref.groups`, a group of torch's through `torch.distributed`; None is the
default group of whoever made the bucket. The decorator `comm_hook` takes care of the other
difference: torch's DDP refuses hooks whose annotations name a bucket that is not its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed
from torch._C._distributed_c10d import GradBucket as TorchBucket
from torch.futures import Future

from torchdist_ref import groups

HookType = TypeVar("HookType", bound=Callable[..., Any])


def comm_hook(hook: HookType) -> HookType:
    """Give a hook a signature without annotations, which every DDP accepts. What it is called with doesn't change."""
    bare = [p.replace(annotation=p.empty) for p in inspect.signature(hook).parameters.values()]
    vars(hook)["__signature__"] = inspect.Signature(bare)
    return hook


def promises(hook: Any) -> dict[str, Any]:
    """What a hook says of itself to our DDP: ``only_averages``, ``takes_rounded``, ``changes_nothing``.

    One that only averages takes gradients divided already (`Peers.divided`), and has a group or None for its state.
    It doesn't hold for a function that wraps the hook, even if that has taken over its attributes.
    """
    return {} if hasattr(hook, "__wrapped__") else getattr(hook, "__dict__", {})


def uses_torch(group: Any, bucket: Any) -> bool:
    """Whether torch's own backend is meant: by the group, or, where that is None, by the bucket."""
    if group is None:
        return isinstance(bucket, TorchBucket)
    return isinstance(group, torch.distributed.ProcessGroup)


class Peers:
    """The group of a hook, with the calls that hooks make.

    Args:
        group: A group of ours or of torch's; None for the default group.
        bucket: The bucket at hand, which says whose default group None is.
    """

    def __init__(self, group: Any, bucket: Any) -> None:
        self.group = group
        self.api: ModuleType = torch.distributed if uses_torch(group, bucket) else groups
        self.size: int = self.api.get_world_size(group)

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return int(self.api.get_rank(self.group))

    def divided(self, bucket: Any, gradients: torch.Tensor) -> torch.Tensor:
        """The bucket's gradients divided by the number of ranks, in place; our DDP may have done so on their way in."""
        left = self.size * getattr(bucket, "_scale", 1.0)
        return gradients if left == 1.0 else gradients.div_(left)

    def sum(self, tensor: torch.Tensor) -> Future[list[torch.Tensor]]:
        """Begin to add up ``tensor`` over all ranks, in place."""
        future: Future[list[torch.Tensor]] = self.api.all_reduce(tensor, group=self.group, async_op=True).get_future()
        return future

    def sum_now(self, tensor: torch.Tensor) -> None:
        """Add up ``tensor`` over all ranks, in place."""
        self.api.all_reduce(tensor, group=self.group)

    def gather(self, tensor: torch.Tensor) -> tuple[list[torch.Tensor], Future[Any]]:
        """Begin to collect every rank's ``tensor``: where they arrive, in rank order, and when they are there."""
        everyone = [torch.empty_like(tensor) for _ in range(self.size)]
        return everyone, self.api.all_gather(everyone, tensor, group=self.group, async_op=True).get_future()


def rounded(bucket: Any, dtype: torch.dtype) -> torch.Tensor:
    """The gradients in another dtype. Our DDP keeps memory for them, and may have laid them there on their way in."""
    kept = getattr(bucket, "_room", None)
    buffer: torch.Tensor = bucket.buffer()
    if kept is None:
        return buffer.to(dtype, copy=True)
    memory: torch.Tensor = kept(dtype)
    return memory if bucket._laid is dtype else memory.copy_(buffer)


def restored(bucket: Any, buffer: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``value`` in the precision of ``buffer``, and there; as it is where our DDP converts it on the way out.

    That is, from the dtype in which it laid gradients out: a wrapper inside another one has that for its buffer.
    """
    laid = getattr(bucket, "_laid", None)
    return buffer.copy_(value) if laid is None or laid is buffer.dtype else value


def only(future: Future[list[torch.Tensor]]) -> torch.Tensor:
    """The one tensor of a finished collective."""
    return future.value()[0]
