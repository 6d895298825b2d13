"""Stand-in for torch's NCCL on Gloo and CPU tensors, to test backend `nccl` without a GPU.

It has the constructor, the options and the behavior of ProcessGroupNCCL that `nccl` relies on: coalesced calls
return nothing, and the end of the group returns one work for all. It has no streams; events are logged.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as c10d

from torchdist_ref.backends.torch_native.nccl import Nccl


class OnStream:
    """Work of a call on a stream: waiting orders the current stream and returns, whether its event has passed or not.

    Args:
        work: The work of Gloo, which has ended.

    Attributes:
        passed: Whether the events behind the calls have passed.
    """

    passed = False

    def __init__(self, work: Any) -> None:
        work.wait()

    def wait(self, *timeout: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return OnStream.passed


class CoalescedWork:
    """One work of several calls, which can be waited for repeatedly, unlike Gloo's."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self, *timeout: Any) -> bool:
        while self._works:
            self._works.pop(0).wait(*timeout)
        return True


class StandIn:
    """Gloo with the interface of ProcessGroupNCCL."""

    made: ClassVar[list[StandIn]] = []
    ended: ClassVar[list[str]] = []
    barriers: ClassVar[list[Any]] = []

    class Options:
        """Options for `pg_options`."""

        is_high_priority_stream = False
        _timeout: Any = None
        global_ranks_in_group: Any = None
        group_name = ""

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self.options = options
        self.connected: Any = None
        self._gloo = c10d.ProcessGroupGloo(store, rank, size, options._timeout)
        self._coalesced: list[Any] | None = None
        self.made.append(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gloo, name)

    def shutdown(self) -> None:
        self.ended.append("shutdown")
        self._gloo.shutdown()

    def barrier(self, opts: Any) -> Any:
        self.barriers.append(opts.device)
        return self._gloo.barrier(c10d.distributed_c10d.BarrierOptions())

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected = device

    def send(self, *arguments: Any) -> Any:
        return self._start(self._gloo.send(*arguments))

    def recv(self, *arguments: Any) -> Any:
        return self._start(self._gloo.recv(*arguments))

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> CoalescedWork:
        """Exchange blocks of any sizes, which Gloo's own refuses and NCCL's sends one by one."""
        me = self._gloo.rank()
        outputs[me].copy_(inputs[me])
        peers = [peer for peer in range(self._gloo.size()) if peer != me]
        sends = [self._gloo.send([inputs[peer]], peer, 0) for peer in peers if inputs[peer].numel()]
        return CoalescedWork(
            sends + [self._gloo.recv([outputs[peer]], peer, 0) for peer in peers if outputs[peer].numel()]
        )

    def _start(self, work: Any) -> Any:
        if self._coalesced is None:
            return work
        self._coalesced.append(work)
        return None

    def _start_coalescing(self) -> None:
        self._coalesced = []

    def _end_coalescing(self) -> CoalescedWork:
        works, self._coalesced = self._coalesced or [], None
        return CoalescedWork(works)


class Event:
    """CUDA event that logs its use."""

    log: ClassVar[list[str]] = []

    def record(self) -> None:
        self.log.append("record")

    def wait(self) -> None:
        self.log.append("wait")


class TableStandIn(StandIn):
    """The stand-in as torch's table of backends makes it, which binds a device in the constructor (torch 2.15)."""

    bound: Any = None


def create(opts: Any, options: Any) -> TableStandIn:
    """Make a stand-in as torch 2.15 makes its NCCL."""
    made = TableStandIn(opts.store, opts.group_rank, opts.group_size, options)
    group = getattr(opts, "process_group", None)
    made.bound = group and group.bound_device_id
    return made


class Plugin:
    """Entry of torch's table of backends."""

    creator_fn = staticmethod(create)
    extended_api = True


NCCL_OF_TABLE = ("NCCL", "NCCL2", "NCCL-LAZY", "NCCL-LEGACY")


def instead_of_nccl(monkeypatch: pytest.MonkeyPatch, in_table: bool = False) -> None:
    """Let this process, and those forked from it, use the stand-in as NCCL and the CPU as a GPU.

    It is torch's class, as before torch 2.14, or `in_table`: an entry of torch's table of backends, as since then.
    """
    table = {name: plugin for name, plugin in c10d.Backend._plugins.items() if name not in NCCL_OF_TABLE}
    monkeypatch.setattr(c10d.Backend, "_plugins", table | dict.fromkeys(NCCL_OF_TABLE, Plugin) if in_table else table)
    monkeypatch.setattr(c10d, "is_backend_available", lambda name: name.upper() in c10d.Backend._plugins)
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", StandIn, raising=False)
    monkeypatch.setattr(c10d, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Nccl, "device", "cpu")
    monkeypatch.setattr(StandIn, "made", [])
    monkeypatch.setattr(StandIn, "ended", [])
    monkeypatch.setattr(StandIn, "barriers", [])
    monkeypatch.setattr(Event, "log", [])
