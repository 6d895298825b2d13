"""``mpi4py`` as a contestant: MPI's own collectives on the tensors' memory, called by mpi4py, with nothing of ours.

What the backend ``mpi`` reaches at most, and what ``ref`` is compared to. The functions have the names and arguments
of the public ones as far as the benchmark uses them, so that the same table of operations binds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class Direct:
    """The functions, on a communicator of their own."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD.Dup()
        self._seen: dict[int, tuple[Tensor, Any]] = {}

    def _memory(self, tensor: Tensor) -> Any:
        """A tensor as mpi4py takes it; looked up after the first time."""
        found = self._seen.get(id(tensor))
        if found is None:
            array = tensor.numpy()
            found = self._seen[id(tensor)] = tensor, [array, self._mpi.Datatype.fromcode(array.dtype.char)]
        return found[1]

    def _whole(self, parts: Sequence[Tensor] | None) -> Any:
        """The one tensor that parts are views of, one after the other."""
        return self._memory(parts[0]._base) if parts and parts[0]._base is not None else None

    def all_reduce(self, tensor: Tensor, group: None = None) -> None:
        """Sum, in place."""
        self._comm.Allreduce(self._mpi.IN_PLACE, self._memory(tensor))

    def reduce(self, tensor: Tensor, dst: int, group: None = None) -> None:
        """Sum to one rank, in place."""
        if self._comm.rank == dst:
            self._comm.Reduce(self._mpi.IN_PLACE, self._memory(tensor), root=dst)
        else:
            self._comm.Reduce(self._memory(tensor), None, root=dst)

    def broadcast(self, tensor: Tensor, src: int, group: None = None) -> None:
        """Copy to all."""
        self._comm.Bcast(self._memory(tensor), root=src)

    def all_gather_single(self, output: Tensor, tensor: Tensor, group: None = None) -> None:
        """Everybody's block to all."""
        self._comm.Allgather(self._memory(tensor), self._memory(output))

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, group: None = None) -> None:
        """A block of the sum to each."""
        self._comm.Reduce_scatter_block(self._memory(tensor), self._memory(output))

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: None = None) -> None:
        """A block from each to each."""
        self._comm.Alltoall(self._whole(inputs), self._whole(outputs))

    def gather(self, tensor: Tensor, parts: Sequence[Tensor] | None, dst: int, group: None = None) -> None:
        """Everybody's block to one rank."""
        self._comm.Gather(self._memory(tensor), self._whole(parts), root=dst)

    def scatter(self, tensor: Tensor, parts: Sequence[Tensor] | None, src: int, group: None = None) -> None:
        """A block of one rank's to each."""
        self._comm.Scatter(self._whole(parts), self._memory(tensor), root=src)

    def send(self, tensor: Tensor, dst: int, group: None = None) -> None:
        """To one rank."""
        self._comm.Send(self._memory(tensor), dst)

    def recv(self, tensor: Tensor, src: int, group: None = None) -> None:
        """From one rank."""
        self._comm.Recv(self._memory(tensor), src)

    def barrier(self, group: None = None) -> None:
        """Until all are there."""
        self._comm.Barrier()
