"""Third-party backends that are registered with torch, in Python or C++, on our stores and groups.

torch keeps a factory for each name, which makes a process group or a backend of torch's from a store, a rank and a
size. It gets an adapter of our store; the object that it returns has torch's methods, so `TorchBackend` drives it. Such
backends differ in what they lack, such as an orderly end or futures. Do not add support for one of them by name.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from torchdist_ref.backends.base import Membership
from torchdist_ref.backends.observers import dispatched, profiled
from torchdist_ref.backends.torch_native.backend import TorchBackend, TorchWork
from torchdist_ref.calls import Call
from torchdist_ref.torch_internals import torch_private
from torchdist_ref.work import Work

log = logging.getLogger("torchdist_ref.backends")


def make_from_table(plugin: Any, membership: Membership, store: Any, device: torch.device | None = None) -> Any:
    """Return the object that an entry of torch's plugin table makes for a group.

    Args:
        plugin: The entry.
        membership: The group.
        store: Its store, as one of torch's.
        device: Device to bind the object to, for the table's own NCCL. Default: the object chooses.
    """
    m, timeout = membership, timedelta(seconds=membership.timeout)
    if not plugin.extended_api:
        return plugin.creator_fn(store, m.rank, m.size, timeout)
    opts = torch_private.PLUGIN_OPTIONS.get()()
    opts.store, opts.group_rank, opts.group_size, opts.timeout = store, m.rank, m.size, timeout
    opts.group_id, opts.global_ranks_in_group = m.name, list(m.members)
    if device is not None and hasattr(opts, "process_group"):
        bound: Any = torch.distributed.ProcessGroup(m.rank, m.size)  # type: ignore[call-arg]
        opts.process_group, bound.bound_device_id = bound, device
    return plugin.creator_fn(opts, m.options)


class ThirdPartyWork(TorchWork):
    """Work that may have no future of its own; then one is made by waiting."""

    def get_future(self) -> torch.futures.Future[Any]:
        """See `Work.get_future`."""
        try:
            return super().get_future()
        except (RuntimeError, NotImplementedError, AttributeError):
            self._complete_after(self._torch_work.wait)
            return super().get_future()


class ThirdParty(TorchBackend):
    """Backend of torch's plugin table for one group.

    Args:
        name: The name given to ``torch.distributed.Backend.register_backend``, in any case.
        membership: The group.
        made: The process group that the plugin has returned. Default: torch's plugin table is asked for one.
    """

    kind = ThirdPartyWork

    def __init__(self, name: str, membership: Membership, made: Any = None) -> None:
        self.name, self.title, self._made = name, f"backend {name!r}", made
        super().__init__(membership)

    def _connect(self) -> Any:
        if self._made is not None:
            return self._made
        return make_from_table(torch_private.PLUGINS.get()[self.name.upper()], self._membership, self._store)

    @dispatched
    @profiled
    def submit(self, call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor], wait: bool) -> Work:
        """See `Backend.submit`. torch's own backends make profiler ranges; third-party ones may not."""
        return super().submit(call, inputs, outputs, wait)

    def close(self) -> None:
        """See `Backend.close`."""
        self._ignoring_failure(super().close)
        self._backend = None

    def end_calls(self, reason: str) -> None:
        """See `Backend.end_calls`."""
        self._ignoring_failure(lambda: super(ThirdParty, self).end_calls(reason))

    def abort(self, reason: str) -> None:
        """See `Backend.abort`."""
        self._ignoring_failure(lambda: super(ThirdParty, self).abort(reason))

    def _ignoring_failure(self, end: Any) -> None:
        """End the backend; torch raises if a backend has no method for it, which is logged."""
        try:
            end()
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            log.info("group %r on %s: %s", self._membership.name, self.title, error)
