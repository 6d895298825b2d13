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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchdist_ref.backends.base import Backend, Membership, flat_operands, nbytes_of, refuse_unsupported
from torchdist_ref.backends.mpi.work import Ended, Finish, MpiWork, Poller, Started
from torchdist_ref.backends.profiler_ranges import profiled
from torchdist_ref.backends.reductions import WIDENED, check
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
        self._callbacks, self._poller = CallbackThreads(m.name), Poller(m.name)

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

    @profiled
    def submit(self, call: Call, inputs: Tensors, outputs: Tensors, wait: bool) -> Work:
        """See `Backend.submit`."""
        start = perf_counter()
        refuse_unsupported(call, (*flat_operands(inputs), *flat_operands(outputs)), self.name, ("cpu",))
        try:
            started = self._start(call, [tensor.detach().contiguous() for tensor in inputs], outputs)
        except self._mpi.Exception as error:
            raise self._failed(call, error) from error
        work = MpiWork(
            f"{call} on {self._here()}",
            flat_operands(outputs),
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


# The names of MPI's types and operations, as mpi4py has them.
_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
}


_OPS = {
    "sum": "SUM",
    "premul_sum": "SUM",
    "avg": "SUM",
    "product": "PROD",
    "min": "MIN",
    "max": "MAX",
    "band": "BAND",
    "bor": "BOR",
    "bxor": "BXOR",
}


# What a reduction of truth values is on the bytes 0 and 1.
_OF_BOOL = {"sum": "MAX", "product": "MIN"}


class Operand(NamedTuple):
    """Numbers that MPI can reduce.

    Attributes:
        buffer: The numbers, in one row.
        type: The name of their MPI type.
        op: The name of the MPI operation.
    """

    buffer: Tensor
    type: str
    op: str

    def spec(self, mpi: Any, buffer: Tensor | None = None) -> list[Any]:
        """The operand, or another tensor like it, as mpi4py takes it."""
        numbers = self.buffer if buffer is None else buffer
        return [raw(numbers), numbers.numel(), getattr(mpi, self.type)]


def operand(tensors: Sequence[Tensor], name: str, call: str) -> Operand:
    """Copies of the tensors, one after the other, in a type that MPI can reduce.

    Raises:
        ArgumentError: The reduction makes no sense for the dtype.
        UnsupportedError: MPI has neither this reduction nor this dtype.
    """
    dtype = tensors[0].dtype
    check(name, dtype, call)
    stand_in = torch.float32 if dtype in WIDENED else torch.uint8 if dtype is torch.bool else dtype
    if stand_in not in _TYPES:
        raise UnsupportedError(f"{call}: MPI can't reduce {dtype}; use .float(), or backend 'ref'.")
    op = _OF_BOOL.get(name, _OPS[name]) if dtype is torch.bool else _OPS[name]
    return Operand(joined(tensors).to(stand_in), _TYPES[stand_in], op)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """A copy of the tensors in one row."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)


def raw(tensor: Tensor) -> Any:
    """The bytes of a contiguous tensor, as an array over its own memory."""
    # One element, or none, may have any stride and count as contiguous.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()


def counts(tensors: Sequence[Tensor]) -> list[int]:
    """Bytes of each tensor."""
    return [tensor.nbytes for tensor in tensors]


def split_into(row: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a row to the tensors that it holds, one after the other."""
    for part, tensor in zip(row.view(-1).split([tensor.numel() for tensor in tensors]), tensors, strict=True):
        tensor.detach().copy_(part.view(tensor.shape))
