"""Backend `mpi`: an MPI library through mpi4py; torch need not be rebuilt.

A call is one `match` arm: a non-blocking MPI operation on the bytes of our tensors, polled until it completes (`work`).
MPI reduces only its own types (`operands`); all other calls move bytes. Every group has a communicator of its own,
created by its members alone.

``mpiexec`` starts the ranks, and the ranks of a group exchange their MPI ranks through the group's store. MPI reports
no error for dead ranks: ``mpiexec`` ends the others. Do not add algorithms: the MPI library chooses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from torchdist_ref.backends.base import Backend, Membership
from torchdist_ref.backends.mpi.operands import counts, joined, operand, raw, split_into
from torchdist_ref.backends.mpi.work import Ended, Finish, MpiWork, RequestPoller, Started
from torchdist_ref.backends.observers import dispatched, profiled
from torchdist_ref.backends.operands import flat_operands, operands_of, refuse_unsupported
from torchdist_ref.backends.worker_threads import CallbackThreads
from torchdist_ref.calls import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Call,
    Gather,
    Recv,
    Reduce,
    ReduceScatter,
    Scatter,
    Send,
)
from torchdist_ref.errors import (
    ArgumentError,
    DistBackendError,
    MismatchError,
    UnsupportedError,
    explain,
)
from torchdist_ref.membership.group_events import GroupEvents
from torchdist_ref.recorder import END, Entry
from torchdist_ref.torch_internals.torch_modes import outside_modes
from torchdist_ref.work import Work

Tensors = Sequence[Tensor]


def load() -> Any:
    """Return the module ``mpi4py.MPI``, with MPI initialized.

    Raises:
        UnsupportedError: mpi4py or an MPI library is missing, or this MPI does not support calls from several threads.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        missing = "mpi4py is not installed" if isinstance(error, ModuleNotFoundError) else "no MPI library was found"
        raise UnsupportedError(
            f"init_process_group: backend 'mpi' can't be used, since {missing} ({error}). Both come with "
            f"`pip install 'torchdist_ref[mpi]'`; then start the ranks with `mpiexec -n 4 python program.py`. "
            f"Without MPI, use backend 'ref' on one host, or 'gloo'."
        ) from error
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise UnsupportedError(
            f"init_process_group: backend 'mpi' polls from several threads, and MPI was started with thread level "
            f"{MPI.Query_thread()} (needs MPI_THREAD_MULTIPLE, {MPI.THREAD_MULTIPLE}). Set mpi4py.rc.thread_level to "
            f"'multiple' before the first import of mpi4py.MPI."
        )
    return MPI


class Mpi(Backend):
    """MPI communicator of one group."""

    name = "mpi"

    def __init__(self, membership: Membership) -> None:
        self._membership = m = membership
        self._mpi = load()
        self._comm = self._connect()
        self._events = GroupEvents(m.store, m.rank, m.members)
        self.recorder = m.recorder
        self._sequence = 0
        self._callbacks, self._poller = CallbackThreads(m.name), RequestPoller(m.name)

    def _connect(self) -> Any:
        """Return a communicator of the members, in the order of the group; no other rank takes part."""
        m, world = self._membership, self._mpi.COMM_WORLD
        m.store.set(f"mpi/{m.rank}", str(world.rank))
        ranks = [int(value) for value in m.store.multi_get([f"mpi/{rank}" for rank in range(m.size)])]
        if len(set(ranks)) < m.size:
            raise DistBackendError(
                f"init_process_group: group {m.name!r} has {m.size} ranks, and MPI knows {len(set(ranks))} of them "
                f"({self._location()} is MPI rank {world.rank} of {world.size}). "
                f"Start them with `mpiexec -n {m.size} ...`."
            )
        return world.Create_group(world.group.Incl(ranks))

    def _location(self) -> str:
        """Return the rank and the group, for messages."""
        m = self._membership
        return f"rank {m.rank} (global {m.members[m.rank]}) of group {m.name!r}"

    @dispatched
    @profiled
    def submit(self, call: Call, inputs: Tensors, outputs: Tensors, wait: bool) -> Work:
        """See `Backend.submit`."""
        refuse_unsupported(call, inputs, outputs, self.name, ("cpu",))
        entry = self.recorder.begin((self._next_number(call), 0), call, operands_of(inputs, outputs))
        try:
            with outside_modes():
                started = self._start(call, [tensor.contiguous() for tensor in inputs], outputs)
        except BaseException as error:
            self.recorder.fail(entry, error)
            if isinstance(error, self._mpi.Exception):
                raise self._failed(call, error) from error
            raise
        work = MpiWork(
            f"{call} on {self._location()}",
            flat_operands(outputs),
            started,
            self._mpi.Status(),
            self._finisher(call, entry),
            self._callbacks.runner(),
            self._membership.timeout,
            self._failure,
        )
        return self._wait_for(work) if wait else self._watch(work)

    def _wait_for(self, work: MpiWork) -> Work:
        """Wait for a work, and return it."""
        try:
            work.wait()
        except BaseException:
            # MPI may still use the tensors.
            self._watch(work)
            raise
        return work

    def _watch(self, work: MpiWork) -> Work:
        """Let the poller complete a work, and return it."""
        self._poller.watch(work)
        return work

    def _next_number(self, call: Call) -> int:
        """Return the number of a call: messages have none, which is -1."""
        if isinstance(call, Send | Recv):
            return -1
        number, self._sequence = self._sequence, self._sequence + 1
        return number

    def _finisher(self, call: Call, entry: Entry) -> Ended:
        """Return the function that records the end of a call and translates its error."""

        def ended(error: BaseException | None) -> BaseException | None:
            if error is None:
                entry[END] = perf_counter()
                return None
            self.recorder.fail(entry, error)
            return self._failed(call, error) if isinstance(error, self._mpi.Exception) else error

        return ended

    def _failed(self, call: Call, error: BaseException) -> DistBackendError:
        """Return our error for one of MPI's."""
        return DistBackendError(f"{call} on {self._location()} failed in MPI: {error}")

    def _failure(self) -> BaseException | None:
        """Return the error of a member that has aborted the group, if any."""
        return self._events.published_failure(self._location())

    def _start(self, call: Call, inputs: list[Tensor], outputs: Tensors) -> Started:
        """Start a call's MPI operation."""
        comm = self._comm
        match call:
            case AllReduce() | Reduce() | ReduceScatter():
                return self._reduce(call, inputs, outputs)
            case Broadcast():
                sent = self._bytes(inputs[0])
                return Started(comm.Ibcast(sent, call.root), (sent,), _copy_row(outputs, inputs[0]))
            case AllGather() | Gather() | Scatter() | AllToAll():
                return self._move(call, inputs, outputs)
            case Barrier():
                return Started(comm.Ibarrier(), (), _copy_nothing)
            case Send():
                sent = self._bytes(inputs[0])
                return Started(comm.Isend(sent, call.dst, self._tag(call)), (sent,), _copy_nothing)
            case Recv():
                row, source = _row(outputs), self._mpi.ANY_SOURCE if call.src is None else call.src
                received = self._bytes(row)
                request = comm.Irecv(received, source, self._tag(call))
                return Started(request, (received,), self._copy_message(call, outputs, row))
        raise UnsupportedError(f"{call.op}: backend 'mpi' does not support this operation.")

    def _tag(self, call: Send | Recv) -> int:
        """Return the tag of a message.

        Raises:
            ArgumentError: It is larger than MPI's largest tag.
        """
        largest = int(self._comm.Get_attr(self._mpi.TAG_UB))
        if call.tag > largest:
            expected = f"at most {largest} with this MPI library"
            raise ArgumentError(explain(call.op, "tag", expected, call.tag))
        return call.tag

    def _move(self, call: Call, inputs: list[Tensor], outputs: Tensors) -> Started:
        """Start a call that moves blocks of bytes."""
        comm, row = self._comm, _row(outputs)
        sent, received = self._blocks(joined(inputs), inputs), self._blocks(row, outputs)
        match call:
            case AllGather():
                request = comm.Iallgatherv(sent[:1] + sent[2:], received)
            case Gather():
                request = comm.Igatherv(sent[:1] + sent[2:], received if outputs else None, call.root)
            case Scatter():
                request = comm.Iscatterv(sent if inputs else None, received[:1] + received[2:], call.root)
            case _:
                request = comm.Ialltoallv(sent, received)
        return Started(request, (sent, received), _copy_row(outputs, row))

    def _blocks(self, row: Tensor, tensors: Tensors) -> list[Any]:
        """Return several tensors in one row for mpi4py: the bytes, the number of bytes of each tensor, and the type."""
        return [raw(row), counts(tensors), self._mpi.BYTE]

    def _bytes(self, tensor: Tensor) -> list[Any]:
        """Return a tensor's bytes for mpi4py."""
        return [raw(tensor), self._mpi.BYTE]

    def _reduce(self, call: AllReduce | Reduce | ReduceScatter, inputs: list[Tensor], outputs: Tensors) -> Started:
        """Start a reduction."""
        mpi, comm = self._mpi, self._comm
        numbers = operand(inputs, call.reduction, call.op)
        spec, op = numbers.spec(mpi), getattr(mpi, numbers.op)
        divide = self._membership.size if call.reduction == "avg" else 0
        result = numbers.buffer
        if isinstance(call, AllReduce):
            request = comm.Iallreduce(mpi.IN_PLACE, spec, op)
        elif isinstance(call, Reduce):
            if call.root != self._membership.rank:
                return Started(comm.Ireduce(spec, None, op, call.root), (spec,), _copy_nothing)
            request = comm.Ireduce(mpi.IN_PLACE, spec, op, call.root)
        else:
            result = result.new_empty(outputs[0].numel())
            sizes = [tensor.numel() for tensor in inputs]
            request = comm.Ireduce_scatter(spec, numbers.spec(mpi, result), sizes, op)
        return Started(request, (spec, result), _copy_row(outputs, result, divide))

    def _copy_message(self, call: Recv, outputs: Tensors, row: Tensor) -> Finish:
        """Return the function that checks a message's size, since MPI accepts one that is too short, and copies it."""

        def finish(work: Work, status: Any) -> None:
            work.source = status.source
            got = status.Get_count(self._mpi.BYTE)
            if got != row.nbytes:
                raise MismatchError(
                    f"{call} on {self._location()}: the message from rank {status.source} has {got} bytes, "
                    f"and the tensor {row.nbytes}. Send and receive tensors of one size and dtype."
                )
            split_into(row, outputs)

        return finish

    def set_timeout(self, seconds: float) -> None:
        """See `Backend.set_timeout`."""
        self._membership = replace(self._membership, timeout=seconds)

    def close(self) -> None:
        """See `Backend.close`."""
        self._poller.close()
        self._callbacks.close()
        if not self._mpi.Is_finalized():
            self._comm.Free()

    def abort(self, reason: str) -> None:
        """See `Backend.abort`. Waiting members look for the reason from time to time."""
        self._events.abort(reason)


def _row(outputs: Tensors) -> Tensor:
    """Return new memory for all outputs, one after the other."""
    dtype = outputs[0].dtype if outputs else torch.uint8
    return torch.empty(sum(tensor.numel() for tensor in outputs), dtype=dtype, device="cpu")


def _copy_nothing(work: Work, status: Any) -> None:
    """Do nothing: the call has no results."""


def _copy_row(outputs: Tensors, row: Tensor, divide: int = 0) -> Finish:
    """Return the function that copies a row to the outputs, divided if that is asked for."""

    def finish(work: Work, status: Any) -> None:
        split_into(row.div_(divide) if divide else row, outputs)

    return finish
