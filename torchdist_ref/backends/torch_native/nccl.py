"""NCCL: torch's backend for CUDA tensors, driven by our stores and groups. Calls run on streams; done means ordered.

A call is put on a stream of NCCL's and the host goes on. To wait for it is to order the current stream behind it: what
that stream does next sees the result, the host has not waited, and other streams know nothing of it. So a call is
complete, in the sense of `is_completed`, as soon as it is on its stream: the one who asks may use the outputs at once.

What all of torch's backends share is in `torch_backend`. Don't add anything that a device has to tell before a group is
made: ranks would then have to agree on it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import distributed_c10d as options

from torchdist_ref.backends.base import Membership
from torchdist_ref.backends.torch_native.backend import TorchBackend, TorchWork
from torchdist_ref.calls import AllReduce, Call, Recv, Reduce, ReduceScatter, Send
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, UnsupportedError, explain
from torchdist_ref.work import Work

Tensors = Sequence[Tensor]
_BITWISE = ("band", "bor", "bxor")


def check_usable() -> None:
    """Raise unless NCCL can be used in this process.

    Raises:
        UnsupportedError: torch was built without NCCL, or there is no CUDA device; with how to get it and what does
            without.
    """
    if not c10d.is_nccl_available():
        missing = f"this torch ({torch.__version__}) was built without NCCL"
        remedy = "Install a CUDA build of torch for Linux; pytorch.org names the index for each version of CUDA."
    elif not torch.cuda.is_available():
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        missing = f"no CUDA device is to be seen (CUDA_VISIBLE_DEVICES: {seen})"
        remedy = "See whether `nvidia-smi` lists one, and whether its driver is as new as torch wants it."
    else:
        return
    raise UnsupportedError(
        f"init_process_group: backend 'nccl' can't be used, since {missing}. {remedy} "
        f"Until then use backend 'ref' on one host, or 'gloo', with tensors on the CPU."
    )


class NcclWork(TorchWork):
    """A call on a stream. Whoever waits has the stream that is current there ordered behind it, each time."""

    _copied: Any = None

    def begin(self, theirs: Any) -> None:
        """The backend, at the end of a batch: the call is on its stream now."""
        self._theirs = theirs

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Order the current stream behind the call. The host goes on at once, unless there is a time-out.

        Args:
            timeout: If given, the host waits too, and at most so long.

        Returns:
            True. On the current stream, the outputs hold the result.

        Raises:
            DistBackendError: What the call failed with, as far as that is known by now.
        """
        self._order(timeout)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether the call is on its stream. If so, the current stream is ordered behind it, to use the outputs."""
        if self._theirs is None:
            return False
        self._order(None)
        return True

    def _order(self, timeout: timedelta | float | None) -> None:
        if not self._over:
            self._settled_by(lambda: self._wait_for_theirs(timeout))
        elif self._error is None:
            self._wait_for_theirs(timeout)
            self._after_copies()

    def _bring_back(self) -> bool:
        copied = super()._bring_back()
        if copied:
            self._copied = torch.cuda.Event()
            self._copied.record()
        return copied

    def _after_copies(self) -> None:
        """Strided outputs were filled on the stream that waited first; others come after it."""
        if self._copied is not None:
            self._copied.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """See `Work.get_future`. Complete once the call is on its stream; callbacks run on streams behind it."""
        with self._lock:
            if self._future is None:
                self._future = self._theirs.get_future().then(self._value)
            return self._future

    def _value(self, done: torch.futures.Future[Any]) -> list[Any]:
        if not self._over:
            self._settled_by(done.value)
        if self._error is not None:
            raise self._error
        self._after_copies()
        return list(self.outputs)


class Nccl(TorchBackend):
    """torch's NCCL backend for one group.

    Attributes:
        device: The kind of device whose tensors it takes.
    """

    name = "nccl"
    title = "NCCL"
    kind = NcclWork
    device = "cuda"

    def __init__(self, membership: Membership) -> None:
        self._batch: list[NcclWork] | None = None
        super().__init__(membership)

    def _connect(self) -> Any:
        check_usable()
        m = self._membership
        return c10d.ProcessGroupNCCL(self._store, m.rank, m.size, self._chosen())

    def _chosen(self) -> Any:
        """The caller's options, completed by what the group knows."""
        m, kind = self._membership, c10d.ProcessGroupNCCL.Options
        chosen = kind() if m.options is None else m.options
        if not isinstance(chosen, kind):
            expected = "a torch.distributed.ProcessGroupNCCL.Options for backend 'nccl'"
            raise ArgumentTypeError(explain("init_process_group", "pg_options", expected, m.options, rank=m.rank))
        chosen._timeout = timedelta(seconds=m.timeout)
        chosen.global_ranks_in_group = list(m.members)
        chosen.group_name = m.name  # type: ignore[assignment]
        return chosen

    def _settle_in(self) -> None:
        """With a device named, ranks connect now and hear of trouble now; without, at the first call."""
        if self._membership.device is not None:
            self._backend.eager_connect_single_device(self._own_device())

    def _own_device(self) -> torch.device:
        """The device that `device_id` named, else the one that is current."""
        given = self._membership.device
        if given is None:
            return torch.device(self.device, torch.cuda.current_device())
        found = torch.device(self.device, given) if isinstance(given, int) else torch.device(given)
        if found.type != self.device or found.index is None:
            expected = f"a {self.device} device with its number"
            raise ArgumentError(explain("init_process_group", "device_id", expected, str(given)))
        return found

    def submit(self, call: Call, inputs: Tensors, outputs: Tensors, wait: bool) -> Work:
        """See `Backend.submit`. With `wait`, the current stream is ordered behind the call."""
        work = super().submit(call, inputs, outputs, wait)
        if self._batch is not None and isinstance(work, NcclWork):
            self._batch.append(work)
        return work

    @contextmanager
    def coalescing(self) -> Iterator[None]:
        """See `Backend.coalescing`. Alone, a send keeps the receive after it from starting, on both ranks."""
        batch = self._batch = []
        self._backend._start_coalescing()
        try:
            yield
        finally:
            self._batch = None
            theirs = self._backend._end_coalescing()
            for work in batch:
                work.begin(theirs)

    def _plain(self, call: Call, tensor: Tensor) -> Tensor:
        if tensor.device.type != self.device:
            raise UnsupportedError(
                f"{call.op}: backend 'nccl' works on CUDA tensors, and this one is on {tensor.device} "
                f"({self._here()}). Move it with .cuda(), or make the group with backend 'cpu:gloo,cuda:nccl'."
            )
        return super()._plain(call, tensor)

    def _operation(self, call: AllReduce | Reduce | ReduceScatter) -> Any:
        if call.reduction in _BITWISE:
            raise UnsupportedError(
                f"{call.op}: NCCL knows no reduction {call.reduction!r}. Use backend 'ref' or 'gloo' with CPU tensors."
            )
        return super()._operation(call)

    def _barrier(self) -> Any:
        chosen = options.BarrierOptions()
        chosen.device = self._own_device()
        return chosen

    def _message(self, call: Send | Recv, tensors: list[Tensor]) -> list[Tensor]:
        """NCCL matches messages by their order alone, so it could not honour a tag, nor take them from anybody."""
        if call.tag or (isinstance(call, Recv) and call.src is None):
            wanted = f"tag {call.tag}" if call.tag else "receive from any rank"
            raise UnsupportedError(
                f"{call.op}: NCCL has no {wanted}: between two ranks, messages come in the order of sending. "
                f"Leave the tag at 0 and name the source, or use backend 'ref' or 'gloo' with CPU tensors."
            )
        return tensors
