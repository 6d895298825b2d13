"""Backends that others registered with torch, in Python or C++: by the name that they took there, on our groups.

torch keeps a function for each name, which makes a process group or a backend of torch's from a store, a rank and a
size; it gets one of our stores in torch's clothes. What comes back has torch's methods, so the rest is `torch_backend`.
Such backends differ in what they leave out: ending in order, futures. Don't add support for one of them by name.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor

from torchdist_ref.backends.base import Membership
from torchdist_ref.backends.profiler_ranges import profiled
from torchdist_ref.backends.torch_native.backend import TorchBackend, TorchWork
from torchdist_ref.calls import Call
from torchdist_ref.work import Work

log = logging.getLogger("torchdist_ref.backends")


class ThirdPartyWork(TorchWork):
    """A work that may have no future of its own; one is made by waiting then."""

    def get_future(self) -> torch.futures.Future[Any]:
        """See `Work.get_future`."""
        try:
            return super().get_future()
        except (RuntimeError, NotImplementedError, AttributeError):
            self._settled_by(self._theirs.wait)
            return super().get_future()


class ThirdParty(TorchBackend):
    """A backend of torch's plugin table, for one group.

    Args:
        name: As it was registered with ``torch.distributed.Backend.register_backend``, in any case.
        membership: The group's.
    """

    kind = ThirdPartyWork

    def __init__(self, name: str, membership: Membership) -> None:
        self.name, self.title = name, f"backend {name!r}"
        super().__init__(membership)

    def _connect(self) -> Any:
        m, plugin = self._membership, c10d.Backend._plugins[self.name.upper()]
        timeout = timedelta(seconds=m.timeout)
        if not plugin.extended_api:
            return plugin.creator_fn(self._store, m.rank, m.size, timeout)
        facts = torch._C._distributed_c10d._DistributedBackendOptions()
        facts.store, facts.group_rank, facts.group_size, facts.timeout = self._store, m.rank, m.size, timeout
        facts.group_id, facts.global_ranks_in_group = m.name, list(m.members)
        return plugin.creator_fn(facts, m.options)

    @profiled
    def submit(self, call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor], wait: bool) -> Work:
        """See `Backend.submit`. Backends of torch's own name their ranges by themselves; of these nobody knows."""
        return super().submit(call, inputs, outputs, wait)

    def close(self) -> None:
        """See `Backend.close`."""
        self._quietly(super().close)
        self._backend = None

    def abort(self, reason: str) -> None:
        """See `Backend.abort`."""
        self._quietly(lambda: super(ThirdParty, self).abort(reason))

    def _quietly(self, end: Any) -> None:
        """torch makes an error of ending where a backend has nothing to end."""
        try:
            end()
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            log.info("group %r on %s: %s", self._membership.name, self.title, error)
