"""ByDevice: one group with a backend for each kind of device, chosen call by call by where the tensors are.

``"cpu:gloo,cuda:nccl"`` is what a program names that keeps its data on a GPU and its bookkeeping on the CPU. The
backends know nothing of each other; a call without tensors goes to the first named. Don't add moving of tensors
between devices: a call on a device that no backend was named for is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from torchdist_ref.backends.base import Backend, Membership, create
from torchdist_ref.calls import Call
from torchdist_ref.errors import UnsupportedError
from torchdist_ref.stores import PrefixStore
from torchdist_ref.trace import Recorder
from torchdist_ref.work import Work

Tensors = Sequence[Tensor]


class ByDevice(Backend):
    """Several backends as one.

    Args:
        backends: The name of a backend for each kind of device.
        membership: The group's.

    >>> import torch, torchdist_ref as dist
    >>> dist.init_process_group("cpu:ref,meta:fake", store=dist.HashStore(), rank=0, world_size=1)
    >>> dist.all_reduce(torch.ones(2)), dist.all_reduce(torch.ones(2, device="meta")), dist.get_backend()
    (None, None, 'cpu:ref,meta:fake')
    >>> dist.destroy_process_group()
    """

    def __init__(self, backends: Mapping[str, str], membership: Membership) -> None:
        self.name = ",".join(f"{device}:{backend}" for device, backend in backends.items())
        self.recorder = Recorder()
        self._backends: dict[str, Backend] = {}
        for device, backend in backends.items():
            self._backends[device] = create(backend, _part(membership, device))
            self._backends[device].recorder = self.recorder
        self._first = next(iter(self._backends.values()))

    def submit(self, call: Call, inputs: Tensors, outputs: Tensors, wait: bool) -> Work:
        """See `Backend.submit`."""
        return self._backend(call, inputs or outputs).submit(call, inputs, outputs, wait)

    def _backend(self, call: Call, tensors: Tensors) -> Backend:
        if not tensors:
            return self._first
        found = self._backends.get(tensors[0].device.type)
        if found is None:
            device = tensors[0].device
            raise UnsupportedError(
                f"{call.op}: No backend type associated with device type {device.type}: this tensor is on {device}, "
                f"and the group's backends are {self.name!r}. Name one for it in init_process_group, or move it."
            )
        return found

    @property
    def shares_memory(self) -> bool:
        """See `Backend.shares_memory`."""
        return self._backends.get("cpu", self._first).shares_memory

    def empty(self, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """See `Backend.empty`."""
        return self._backends.get("cpu", self._first).empty(size, dtype)

    def trouble(self, ranks: Sequence[int], doing: str) -> BaseException | None:
        """See `Backend.trouble`."""
        return next(filter(None, (backend.trouble(ranks, doing) for backend in self._backends.values())), None)

    @contextmanager
    def together(self) -> Iterator[None]:
        """See `Backend.together`."""
        with ExitStack() as stack:
            for backend in self._backends.values():
                stack.enter_context(backend.together())
            yield

    def close(self) -> None:
        """See `Backend.close`."""
        for backend in self._backends.values():
            backend.close()

    def abort(self, reason: str) -> None:
        """See `Backend.abort`."""
        for backend in self._backends.values():
            backend.abort(reason)


def _part(membership: Membership, device: str) -> Membership:
    """The group as one of its backends sees it. CPU backends meet where they would meet alone: see `default_name`."""
    if device == "cpu":
        return replace(membership, options=None, device=None)
    return replace(membership, store=PrefixStore(device, membership.store))
