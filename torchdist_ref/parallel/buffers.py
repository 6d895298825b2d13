"""Buffers during training: rank 0's before each forward pass, or whatever a buffer hook does, before or after it.

A buffer hook may start collectives and return their Futures, which are waited for at the end of backward. The part of
DDP that decides when is here; how buffers are packed and sent is in `states`. Gradients are none of its business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, cast

import torch

from torchdist_ref import groups
from torchdist_ref.errors import ArgumentTypeError, DistError, RankStalledError, explain
from torchdist_ref.parallel import agreement, joining
from torchdist_ref.parallel.exchange import ended_within, patience

if TYPE_CHECKING:
    from torchdist_ref.parallel.distributed_data_parallel import DistributedDataParallel


class _BufferCommHookLocation(Enum):
    """When a buffer hook is called, by torch's name."""

    PRE_FORWARD = 1
    POST_FORWARD = 2


class BufferHook:
    """A function that makes buffers alike in its own way, and the Futures that it has returned.

    Args:
        hook: ``hook(state, buffers)``, with a dict of names and tensors; returns None or a list of Futures.
        state: Handed to it as it is.
        location: Whether it is called before or after forward.
        group: Its time-out bounds the wait.
    """

    def __init__(self, hook: Callable[..., Any], state: Any, location: Any, group: Any) -> None:
        self.hook = hook
        self.state = state
        self.after_forward = location.name == _BufferCommHookLocation.POST_FORWARD.name
        self.group = group
        name = getattr(hook, "__name__", type(hook).__name__)
        self.name = f"DistributedDataParallel: buffer hook {name!r}, rank {groups.get_rank(group)}"
        self._under_way: list[Any] = []

    def start(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Call the hook."""
        try:
            self._under_way += self.hook(self.state, dict(buffers)) or ()
        except Exception as error:
            raise DistError(f"{self.name} raised {type(error).__name__}: {error}") from error

    def finish(self) -> None:
        """Wait for the Futures that the hook has returned."""
        under_way, self._under_way = self._under_way, []
        for future in under_way:
            if not ended_within(future, patience(self.group)):
                raise RankStalledError(f"{self.name}: a Future that it returned was not completed within the time-out.")
            try:
                future.wait()
            except Exception as error:
                raise DistError(f"{self.name}: a Future ended with {type(error).__name__}: {error}") from error


class SharedBuffers:
    """The part of DDP that keeps buffers alike. Names with an underscore are torch's: programs call them."""

    require_forward_param_sync: bool
    broadcast_buffers: bool

    def will_sync_module_buffers(self) -> bool:
        """Whether this iteration makes buffers alike: with a buffer hook as it does, else by taking rank 0's."""
        return self.require_forward_param_sync and self.broadcast_buffers and self._whole.states.has_buffers

    def _register_buffer_comm_hook(
        self, state: Any, hook: Callable[..., Any], comm_hook_location: Any = _BufferCommHookLocation.POST_FORWARD
    ) -> None:
        """Let ``hook`` make buffers alike, in place of taking rank 0's before each forward pass.

        Args:
            state: Handed to the hook.
            hook: ``hook(state, buffers: dict[str, Tensor])``. May change the buffers, and return None, or a list of
                Futures, which are waited for at the end of the backward pass.
            comm_hook_location: Whether it is called before or after forward; a member of `_BufferCommHookLocation`,
                ours or torch's. Default: after.

        Raises:
            ArgumentTypeError: The hook can't be called, or the location is none.
        """
        ddp = self._whole
        rank = groups.get_rank(ddp.process_group)
        operation = "_register_buffer_comm_hook"
        if not callable(hook):
            raise ArgumentTypeError(explain(operation, "hook", "callable", type(hook).__name__, rank=rank))
        if getattr(comm_hook_location, "name", None) not in _BufferCommHookLocation.__members__:
            expected = "a member of _BufferCommHookLocation"
            raise ArgumentTypeError(explain(operation, "comm_hook_location", expected, comm_hook_location, rank=rank))
        ddp._buffer_hook = BufferHook(hook, state, comm_hook_location, ddp.process_group)
        ddp.reducer.at_the_end = ddp._buffer_hook.finish

    def _check_sync_bufs_pre_fwd(self) -> bool:
        hook = self._whole._buffer_hook
        return self.will_sync_module_buffers() and (hook is None or not hook.after_forward)

    def _check_sync_bufs_post_fwd(self) -> bool:
        hook = self._whole._buffer_hook
        return self.will_sync_module_buffers() and hook is not None and hook.after_forward

    def _sync_buffers(self, working: bool = True) -> None:
        """Make buffers alike now. A rank without inputs says so, and its buffers are nobody's."""
        ddp = self._whole
        root = joining.common_rank(ddp, working) if ddp._join_config.enable else 0
        if ddp._buffer_hook is None:
            ddp.states.share_buffers(root)
            return
        with torch.no_grad():
            ddp._buffer_hook.start(ddp.states.buffers())

    def _default_broadcast_coalesced(
        self, bufs: Sequence[torch.Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        """Take one rank's tensors, by default all buffers: what buffer hooks call that watch, or choose."""
        ddp = self._whole
        chosen = list(ddp.states.buffers().values()) if bufs is None else bufs
        agreement.share(chosen, ddp.process_group, authoritative_rank)

    @property
    def _whole(self) -> DistributedDataParallel:
        return cast("DistributedDataParallel", self)
