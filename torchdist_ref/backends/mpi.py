"""MPI: an MPI library as the backend, through mpi4py; torch need not be rebuilt.

A call is one `match` arm: an MPI operation of the non-blocking kind on the bytes of our tensors, polled until it is
done (`mpi_work`). MPI can reduce only the types that it knows, so reductions have a table (`mpi_operands`); whatever
only moves data moves bytes. Every group gets a communicator of its own, made by its members alone.

Ranks are started by ``mpiexec``; which of them is which rank of ours is said through the group's store. MPI has no
errors for dead ranks: ``mpiexec`` ends the others. Don't add algorithms: choosing them is the MPI library's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from torchdist_ref.backends.base import Backend, Membership, nbytes_of, uncut
from torchdist_ref.backends.mpi_operands import counts, joined, operand, raw, split_into
from torchdist_ref.backends.mpi_work import Ended, Finish, MpiWork, Poller, Started
from torchdist_ref.backends.ranges import in_a_range
from torchdist_ref.backends.ref.callbacks import Callbacks
from torchdist_ref.backends.unfit import refuse_unfit
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
    GroupAbortedError,
    MismatchError,
    UnsupportedError,
    explain,
)
from torchdist_ref.stores import PrefixStore
from torchdist_ref.trace import Recorder
from torchdist_ref.work import Work

Tensors = Sequence[Tensor]


def load() -> Any:
    """The module ``mpi4py.MPI``, with MPI started.

    Raises:
        UnsupportedError: mpi4py or an MPI library is not there, or this MPI can't be called from several threads.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        missing = "mpi4py is not installed" if isinstance(error, ModuleNotFoundError) else "no MPI library was found"
        raise UnsupportedError(
            f"init_process_group: backend 'mpi' can't be used, since {missing} ({error}). Both come with "
            f"`pip install torchdist_ref[mpi]`; then start the ranks with `mpiexec -n 4 python program.py`. "
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
    """A communicator of MPI's for one group."""

    name = "mpi"

    def __init__(self, membership: Membership) -> None:
        self._membership = m = membership
        self._mpi = load()
        self._store = PrefixStore("mpi", m.store)
        self._comm = self._connect()
        self.recorder = Recorder()
        self._sequence = 0
        self._callbacks, self._poller = Callbacks(m.name), Poller(m.name)

    def _connect(self) -> Any:
        """A communicator of the members, in the order of the group; no other rank takes part."""
        m, world = self._membership, self._mpi.COMM_WORLD
        self._store.set(f"rank/{m.rank}", f"{world.rank} {world.size}")
        said = [value.decode().split() for value in self._store.multi_get([f"rank/{r}" for r in range(m.size)])]
        ranks = [int(rank) for rank, _ in said]
        if len(set(ranks)) < m.size:
            raise DistBackendError(
                f"init_process_group: group {m.name!r} has {m.size} ranks, and MPI knows {len(set(ranks))} of them "
                f"({self._here()} is MPI rank {world.rank} of {world.size}). Start them with `mpiexec -n {m.size} ...`."
            )
        return world.Create_group(world.group.Incl(ranks))

    def _here(self) -> str:
        m = self._membership
        return f"rank {m.rank} (global {m.members[m.rank]}) of group {m.name!r}"

    @in_a_range
    def submit(self, call: Call, inputs: Tensors, outputs: Tensors, wait: bool) -> Work:
        """See `Backend.submit`."""
        start = perf_counter()
        refuse_unfit(call, (*uncut(inputs), *uncut(outputs)), self.name, ("cpu",))
        try:
            started = self._start(call, [tensor.detach().contiguous() for tensor in inputs], outputs)
        except self._mpi.Exception as error:
            raise self._failed(call, error) from error
        work = MpiWork(
            f"{call} on {self._here()}",
            uncut(outputs),
            started,
            self._mpi.Status(),
            self._end(call, start, nbytes_of(inputs, outputs)),
            self._callbacks.runner(),
            self._membership.timeout,
            self._trouble,
        )
        return self._waited(work) if wait else self._watched(work)

    def _waited(self, work: MpiWork) -> Work:
        try:
            work.wait()
        except BaseException:
            # MPI may still use the tensors.
            self._watched(work)
            raise
        return work

    def _watched(self, work: MpiWork) -> Work:
        self._poller.watch(work)
        return work

    def _end(self, call: Call, start: float, nbytes: int) -> Ended:
        number = -1 if isinstance(call, Send | Recv) else self._sequence
        self._sequence += number >= 0

        def ended(error: BaseException | None) -> BaseException | None:
            self.recorder.add(number, call, nbytes, start, type(error).__name__ if error else "")
            return self._failed(call, error) if isinstance(error, self._mpi.Exception) else error

        return ended

    def _failed(self, call: Call, error: BaseException) -> DistBackendError:
        return DistBackendError(f"{call} on {self._here()} failed in MPI: {error}")

    def _trouble(self) -> BaseException | None:
        if not self._store.check(["aborted"]):
            return None
        return GroupAbortedError(f"{self._here()}: {self._store.get('aborted').decode()}")

    def _start(self, call: Call, inputs: list[Tensor], outputs: Tensors) -> Started:
        comm = self._comm
        match call:
            case AllReduce() | Reduce() | ReduceScatter():
                return self._reduce(call, inputs, outputs)
            case Broadcast():
                given = self._bytes(inputs[0])
                return Started(comm.Ibcast(given, call.root), (given,), _into(outputs, inputs[0]))
            case AllGather() | Gather() | Scatter() | AllToAll():
                return self._move(call, inputs, outputs)
            case Barrier():
                return Started(comm.Ibarrier(), (), _nothing)
            case Send():
                given = self._bytes(inputs[0])
                return Started(comm.Isend(given, call.dst, self._tag(call)), (given,), _nothing)
            case Recv():
                row, source = _row(outputs), self._mpi.ANY_SOURCE if call.src is None else call.src
                taken = self._bytes(row)
                return Started(comm.Irecv(taken, source, self._tag(call)), (taken,), self._received(call, outputs, row))
        raise UnsupportedError(f"{call.op}: backend 'mpi' has no such operation.")

    def _tag(self, call: Send | Recv) -> int:
        """MPI's tags end sooner than ours."""
        most = int(self._comm.Get_attr(self._mpi.TAG_UB))
        if call.tag > most:
            expected = f"at most {most} with this MPI library"
            raise ArgumentError(explain(call.op, "tag", expected, call.tag))
        return call.tag

    def _move(self, call: Call, inputs: list[Tensor], outputs: Tensors) -> Started:
        comm, row = self._comm, _row(outputs)
        given, taken = self._blocks(joined(inputs), inputs), self._blocks(row, outputs)
        match call:
            case AllGather():
                request = comm.Iallgatherv(given[:1] + given[2:], taken)
            case Gather():
                request = comm.Igatherv(given[:1] + given[2:], taken if outputs else None, call.root)
            case Scatter():
                request = comm.Iscatterv(given if inputs else None, taken[:1] + taken[2:], call.root)
            case _:
                request = comm.Ialltoallv(given, taken)
        return Started(request, (given, taken), _into(outputs, row))

    def _blocks(self, row: Tensor, tensors: Tensors) -> list[Any]:
        """One row that holds several tensors: its bytes, the bytes of each tensor, and their type."""
        return [raw(row), counts(tensors), self._mpi.BYTE]

    def _bytes(self, tensor: Tensor) -> list[Any]:
        return [raw(tensor), self._mpi.BYTE]

    def _reduce(self, call: AllReduce | Reduce | ReduceScatter, inputs: list[Tensor], outputs: Tensors) -> Started:
        mpi, comm = self._mpi, self._comm
        numbers = operand(inputs, call.reduction, call.op)
        spec, op = numbers.spec(mpi), getattr(mpi, numbers.op)
        divide = self._membership.size if call.reduction == "avg" else 0
        result = numbers.buffer
        if isinstance(call, AllReduce):
            request = comm.Iallreduce(mpi.IN_PLACE, spec, op)
        elif isinstance(call, Reduce):
            if call.root != self._membership.rank:
                return Started(comm.Ireduce(spec, None, op, call.root), (spec,), _nothing)
            request = comm.Ireduce(mpi.IN_PLACE, spec, op, call.root)
        else:
            result = result.new_empty(outputs[0].numel())
            sizes = [tensor.numel() for tensor in inputs]
            request = comm.Ireduce_scatter(spec, numbers.spec(mpi, result), sizes, op)
        return Started(request, (spec, result), _into(outputs, result, divide))

    def _received(self, call: Recv, outputs: Tensors, row: Tensor) -> Finish:
        """MPI is content with a message that is too short; we are not."""

        def finish(work: Work, status: Any) -> None:
            work.source = status.source
            got = status.Get_count(self._mpi.BYTE)
            if got != row.nbytes:
                raise MismatchError(
                    f"{call} on {self._here()}: the message of rank {status.source} has {got} bytes, "
                    f"and the tensor {row.nbytes}. Send and receive tensors of one size and dtype."
                )
            split_into(row, outputs)

        return finish

    def close(self) -> None:
        """See `Backend.close`."""
        self._poller.close()
        self._callbacks.close()
        if not self._mpi.Is_finalized():
            self._comm.Free()

    def abort(self, reason: str) -> None:
        """See `Backend.abort`. Members that wait look into the store now and then."""
        m = self._membership
        self._store.set("aborted", f"rank {m.rank} gave up: {reason}")


def _row(outputs: Tensors) -> Tensor:
    """Memory for all outputs, one after the other."""
    dtype = outputs[0].dtype if outputs else torch.uint8
    return torch.empty(sum(tensor.numel() for tensor in outputs), dtype=dtype)


def _nothing(work: Work, status: Any) -> None:
    """Nothing comes back."""


def _into(outputs: Tensors, row: Tensor, divide: int = 0) -> Finish:
    def finish(work: Work, status: Any) -> None:
        split_into(row.div_(divide) if divide else row, outputs)

    return finish
