"""NCCL: torch's backend for CUDA tensors, on our stores and groups. Calls run on CUDA streams.

A call is enqueued on a stream of NCCL's, and the host continues. Waiting for it makes the current stream wait: later
work on that stream sees the result, the host does not block, and other streams are not ordered. A call is complete, for
`is_completed` and in the flight recorder, once the event behind it on NCCL's stream has passed. torch's object asks the
event; nothing here waits for it, so the recorder learns of an end when the next call is made or when it is read.

``nccl`` is what the installed torch means by it: from 2.15 on the class that 2.15 also calls ``nccl2``, unless
``TORCH_DIST_USE_NCCL2=0`` says otherwise. It connects when the group is made, on the device that `device_id`,
``LOCAL_RANK`` or the rank names.

Do not add anything that depends on the device before a group is made: ranks would have to agree on it.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from time import perf_counter
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import distributed_c10d as options

from torchdist_ref.backends.base import Membership
from torchdist_ref.backends.torch_native.backend import TorchBackend, TorchWork
from torchdist_ref.backends.torch_native.third_party import make_from_table
from torchdist_ref.calls import AllReduce, Call, Recv, Reduce, ReduceScatter, Send
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, UnsupportedError, explain
from torchdist_ref.recorder import END, Entry
from torchdist_ref.torch_internals import torch_private
from torchdist_ref.work import Work

Tensors = Sequence[Tensor]
DEVICE = "cuda"
"""Type of NCCL's devices."""
_BITWISE = ("band", "bor", "bxor")


def is_usable() -> bool:
    """Return whether this process has a device for NCCL."""
    return c10d.is_nccl_available() and torch.cuda.is_available()


def check_usable() -> None:
    """Raise unless NCCL can be used in this process.

    Raises:
        UnsupportedError: torch was built without NCCL, or there is no CUDA device. The message names the remedy and
            the backends that need neither.
    """
    if not c10d.is_nccl_available():
        missing = f"this torch ({torch.__version__}) was built without NCCL"
        remedy = "Install a CUDA build of torch for Linux; pytorch.org names the index for each version of CUDA."
    elif not torch.cuda.is_available():
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        missing = f"no CUDA device is visible (CUDA_VISIBLE_DEVICES: {seen})"
        remedy = "Check that `nvidia-smi` lists one, and that its driver is recent enough for torch."
    else:
        return
    raise UnsupportedError(
        f"init_process_group: backend 'nccl' can't be used, since {missing}. {remedy} "
        f"Until then use backend 'ref' on one host, or 'gloo', with tensors on the CPU."
    )


class NcclWork(TorchWork):
    """Work of a call on a stream. Each wait makes the current stream of the waiting thread wait for it."""

    _copied_event: Any = None
    _torchs_future: torch.futures.Future[Any] | None = None

    def started(self, torch_work: Any) -> None:
        """Set torch's work at the end of a group of coalesced calls, when the call is on its stream."""
        self._torch_work = torch_work

    def await_over(self, seconds: float | None) -> bool:
        """Make the current stream wait for the call. The host does not block, unless there is a time-out."""
        self._order_stream(seconds)
        return True

    def has_ended(self) -> bool:
        """Return whether NCCL's stream is done with the call: torch's work asks an event. Never blocks."""
        return self._torch_work is not None and bool(self._torch_work.is_completed())

    def is_over(self) -> bool:
        """Return whether the call has ended on its stream; if so, the current stream may use the outputs."""
        if not self.has_ended():
            return False
        self._order_stream(None)
        return True

    def is_success(self) -> bool:
        """Return whether the call has ended without an error."""
        return self.is_over() and super().is_success()

    def _order_stream(self, seconds: float | None) -> None:
        if not self._over:
            self._complete_after(lambda: self._wait_for_torch(seconds))
        elif self._error is None:
            self._wait_for_torch(seconds)
            self._wait_for_copies()

    def _copy_results(self) -> bool:
        copied = super()._copy_results()
        if copied:
            self._copied_event = torch.cuda.Event()
            self._copied_event.record()
        return copied

    def _wait_for_copies(self) -> None:
        """Make the current stream wait for copies to strided outputs, which ran on the stream that waited first."""
        if self._copied_event is not None:
            self._copied_event.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return torch's own future.

        It completes once the call is on its stream; callbacks run on streams ordered after it.
        """
        if self._torchs_future is None:
            # Without the lock: the callback runs at once if the call is on its stream, and then completes this work.
            future = self._torch_work.get_future().then(self._value)
            with self._lock:
                self._torchs_future = self._torchs_future or future
        return self._torchs_future

    def _value(self, done: torch.futures.Future[Any]) -> list[Any]:
        if not self._over:
            self._complete_after(done.value)
        if self._error is not None:
            raise self._error
        self._wait_for_copies()
        return list(self.outputs)


class Nccl(TorchBackend):
    """Backend of torch's NCCL for one group.

    Attributes:
        device: The kind of device whose tensors it accepts.
        name: Name of the backend; one of `registry.NCCL_NAMES`.
        used: Device of the tensors of the last call that had some; None before it.
    """

    title = "NCCL"
    kind = NcclWork
    device = DEVICE
    waited_is_ended = False

    def __init__(self, membership: Membership, name: str = "nccl") -> None:
        self.name = name
        self._coalesced: list[NcclWork] | None = None
        self.used: torch.device | None = None
        # Calls on their stream whose end has not been seen, in order. Another thread may read the recorder.
        self._running: deque[tuple[NcclWork, Entry]] = deque()
        self._noting = threading.Lock()
        super().__init__(membership)
        note = WeakMethod(self.note_ends)
        self.recorder.before_reading = lambda: None if (alive := note()) is None else alive()

    def _connect(self) -> Any:
        check_usable()
        m, chosen = self._membership, self._nccl_options()
        # torch 2.14 and later register their own backends when they are asked for.
        available = c10d.is_backend_available(self.name)
        plugin = torch_private.PLUGINS.get().get(self.name.upper()) if available else None
        if plugin is None:
            return c10d.ProcessGroupNCCL(self._store, m.rank, m.size, chosen)
        device = None if m.device is None else self._own_device()
        return make_from_table(plugin, replace(m, options=chosen), self._store, device)

    def _nccl_options(self) -> Any:
        """Return the caller's options, completed with facts of the group."""
        m, kind = self._membership, c10d.ProcessGroupNCCL.Options
        chosen = kind() if m.options is None else m.options
        if not isinstance(chosen, kind):
            expected = "a torch.distributed.ProcessGroupNCCL.Options for backend 'nccl'"
            raise ArgumentTypeError(explain("init_process_group", "pg_options", expected, m.options, rank=m.rank))
        # torch's constructor takes the time-out from here, and its own code sets it so.
        chosen._timeout = timedelta(seconds=m.timeout)  # noqa: SLF001
        chosen.global_ranks_in_group = list(m.members)
        chosen.group_name = m.name  # type: ignore[assignment]
        return chosen

    def _after_connect(self) -> None:
        """Connect the ranks now if the device is known, so that failures show now; else at the first call."""
        if self._membership.device is not None:
            self._backend.eager_connect_single_device(self._own_device())

    def _own_device(self) -> torch.device:
        """Return the device that `device_id` names, else the current device."""
        given = self._membership.device
        if given is None:
            return torch.device(self.device, torch.cuda.current_device())
        found = torch.device(self.device, given) if isinstance(given, int) else torch.device(given)
        if found.type != self.device or found.index is None:
            expected = f"a {self.device} device with its number"
            raise ArgumentError(explain("init_process_group", "device_id", expected, str(given)))
        return found

    def submit(self, call: Call, inputs: Tensors, outputs: Tensors, wait: bool) -> Work:
        """See `Backend.submit`. With `wait`, the current stream waits for the call."""
        self.note_ends()
        work = super().submit(call, inputs, outputs, wait)
        if self._coalesced is not None and isinstance(work, NcclWork):
            self._coalesced.append(work)
        return work

    def _call_started(self, work: TorchWork, entry: Entry) -> None:
        """See `TorchBackend`: the call is on its stream now."""
        if isinstance(work, NcclWork):
            self._running.append((work, entry))

    def note_ends(self) -> None:
        """Record the ends of calls that their stream is done with. It runs them in order."""
        with self._noting:
            while self._running and self._running[0][0].has_ended():
                _, entry = self._running.popleft()
                entry[END] = entry[END] or perf_counter()

    @contextmanager
    def coalescing(self) -> Iterator[None]:
        """See `Backend.coalescing`. Alone, a send keeps the receive after it from starting, on both ranks."""
        works = self._coalesced = []
        torch_private.START_COALESCING.of(self._backend)()
        try:
            yield
        finally:
            self._coalesced = None
            torch_work = torch_private.END_COALESCING.of(self._backend)()
            for work in works:
                work.started(torch_work)

    def _flat(self, call: Call, tensor: Tensor) -> Tensor:
        self.used = tensor.device
        if tensor.device.type != self.device:
            raise UnsupportedError(
                f"{call.op}: backend 'nccl' works on CUDA tensors, and this one is on {tensor.device} "
                f"({self._location()}). Move it with .cuda(), or make the group with backend 'cpu:gloo,cuda:nccl'."
            )
        return super()._flat(call, tensor)

    def _reduce_op(self, call: AllReduce | Reduce | ReduceScatter) -> Any:
        if call.reduction in _BITWISE:
            raise UnsupportedError(
                f"{call.op}: NCCL has no reduction {call.reduction!r}. Use backend 'ref' or 'gloo' with CPU tensors."
            )
        return super()._reduce_op(call)

    def _barrier_options(self) -> Any:
        chosen = options.BarrierOptions()
        chosen.device = self._device_of_barrier()
        return chosen

    def _device_of_barrier(self) -> torch.device:
        """Return the device that the group's calls use, so that a barrier does not begin on another one.

        Without an earlier call and a `device_id`, it is the current device if the program has set one. Else, or on a
        thread that has not, it follows from the launcher's local rank or the rank, as in torch.
        """
        if self.used is not None:
            return self.used
        index = torch.cuda.current_device()
        if self._membership.device is not None or index:
            return self._own_device()
        local = os.environ.get("LOCAL_RANK", "")
        number = int(local) if local.isdecimal() else self._global_rank
        return torch.device(self.device, number % max(1, torch.cuda.device_count()))

    def _message(self, call: Send | Recv, tensors: list[Tensor]) -> list[Tensor]:
        """Refuse tags and receives from any rank: NCCL matches messages only by their order.

        Raises:
            UnsupportedError: The message has a tag, or no source.
        """
        if call.tag or (isinstance(call, Recv) and call.src is None):
            wanted = f"tag {call.tag}" if call.tag else "receive from any rank"
            raise UnsupportedError(
                f"{call.op}: NCCL has no {wanted}: between two ranks, messages arrive in the order of sending. "
                f"Leave the tag at 0 and name the source, or use backend 'ref' or 'gloo' with CPU tensors."
            )
        return tensors
