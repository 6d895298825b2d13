"""Backends by the names of ``--backends``, each as an API and a group on which the public functions are called.

``ref``, ``gloo``, ``mpi`` and other registered ones go through this library's groups; ``torch:gloo`` is torch's own
``torch.distributed``, ``mpi4py`` is MPI alone (`DirectMpi`), and ``registered`` is ``ref`` on registered buffers.

Ranks of an older library run this file too: use the library's public API alone. Do not add here: the start of ranks
(`ranks`).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch import Tensor

from torchdist_ref.benchmark.operations import Make
from torchdist_ref.benchmark.rounds import RankContext, library
from torchdist_ref.errors import ArgumentError, UnsupportedError, explain

TIMEOUT = timedelta(minutes=5)
TORCH_PREFIX = "torch:"
MPI, MPI4PY, REGISTERED = "mpi", "mpi4py", "registered"
# Backends whose ranks `mpiexec` must start, and the package that they need.
UNDER_MPIEXEC = {MPI: "mpi4py", MPI4PY: "mpi4py"}


@dataclass(frozen=True)
class Competitor:
    """Contestant: the functions to call, and the group to call them on.

    Attributes:
        name: As in ``--backends``.
        api: A module with `all_reduce` and so on.
        group: Argument `group` of the functions.
        make: Function that allocates the tensors, if not just any will do.
    """

    name: str
    api: Any
    group: Any
    make: Make | None = None


@dataclass(frozen=True)
class LeftOut:
    """Backend that could not be made, and the reason."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} is left out: {self.reason}"


def torch_has_gloo() -> bool:
    """Return whether torch was built with Gloo."""
    return torch_distributed.is_available() and torch_distributed.is_gloo_available()


def available(asked: tuple[str, ...] | list[str], forked: bool = False) -> tuple[list[str], list[LeftOut]]:
    """Return the names that may run here, and those that can't.

    Args:
        asked: Names as in ``--backends``.
        forked: Whether ranks are forked in any case, so that those of MPI can't be had.

    Raises:
        ArgumentError: A name is unknown.

    >>> available(["ref", "torch:gloo"])
    (['ref', 'torch:gloo'], [])
    """
    out = [LeftOut(name, reason) for name in dict.fromkeys(asked) if (reason := _obstacle(name, forked))]
    return [name for name in dict.fromkeys(asked) if name not in {each.name for each in out}], out


def _obstacle(name: str, forked: bool) -> str:
    """Return why a backend cannot run here; empty if it can."""
    from torchdist_ref.backends.registry import names

    if name == "torch:gloo":
        return "" if torch_has_gloo() else "this torch was built without Gloo"
    package = UNDER_MPIEXEC.get(name)
    if package and importlib.util.find_spec(package) is None:
        return f"needs the package {package}: pip install -e '.[mpi]'"
    if package and forked:
        return "this benchmark forks its ranks, and MPI's are started by mpiexec"
    if package and not find_mpiexec():
        return "no mpiexec was found, which has to start the ranks"
    others = (MPI4PY, REGISTERED)
    if name in (*names(), *others):
        return ""
    if package:
        return "this version of torchdist_ref has no such backend yet"
    expected = f"among {', '.join(dict.fromkeys([*names(), others[1], *UNDER_MPIEXEC, 'torch:gloo']))}"
    raise ArgumentError(explain("benchmark", "--backends", expected, name))


def find_mpiexec() -> str:
    """Return the path of MPI's launcher, beside this Python or on the path; empty if there is none."""
    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    return beside if os.access(beside, os.X_OK) else shutil.which("mpiexec") or ""


def join(asked: Sequence[str], context: RankContext) -> list[Competitor]:
    """Make a group on every backend. All stay alive until `leave`.

    Returns:
        The backends that could be made on every rank. Of each other, rank 0 reports a `LeftOut`.
    """
    foreign = [name for name in asked if name.startswith(TORCH_PREFIX) or name == MPI4PY]
    ours = sorted(set(asked) - set(foreign), key=lambda name: (name in UNDER_MPIEXEC, asked.index(name)))
    # A process has one default group, known to both libraries: ours makes it.
    joined = {name: _attempt(name, context, ours[:1] == [name]) for name in [*ours, *foreign]}
    return [backend for name in asked if (backend := joined[name])]


def _attempt(name: str, context: RankContext, default: bool) -> Competitor | None:
    competitor, reason = None, ""
    try:
        competitor = _join_foreign(name, context) or _join_ours(name, context, default)
    except (ImportError, UnsupportedError) as error:
        reason = str(error)
    reasons = [f"rank {rank}: {text}" for rank, text in enumerate(context.exchange(reason)) if text]
    if reasons and context.sides > 1:
        # The other sides would wait for its turns.
        raise UnsupportedError(f"{name}: {reasons[0]}")
    if reasons:
        context.report(LeftOut(name, reasons[0]))
    return None if reasons else competitor


def _join_ours(name: str, context: RankContext, default: bool) -> Competitor:
    chosen, group = "ref" if name == REGISTERED else name, None
    if default:
        store = library.FileStore(os.path.join(context.folder, "ours"), context.world)
        library.init_process_group(chosen, store=store, rank=context.rank, world_size=context.world, timeout=TIMEOUT)
    else:
        group = library.new_group(backend=chosen, timeout=TIMEOUT)
    return Competitor(name, library, group, partial(_registered, group) if name == REGISTERED else None)


def _registered(group: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
    tensor: torch.Tensor = library.empty_registered(count, dtype=dtype, group=group)
    return tensor


def _join_foreign(name: str, context: RankContext) -> Competitor | None:
    if name == MPI4PY:
        return Competitor(name, DirectMpi(), None)
    if not name.startswith(TORCH_PREFIX):
        return None
    backend = name.removeprefix(TORCH_PREFIX)
    if torch_distributed.is_initialized():
        return Competitor(name, torch_distributed, torch_distributed.new_group(backend=backend, timeout=TIMEOUT))
    path = os.path.join(context.folder, "theirs")
    store = torch_distributed.FileStore(path, context.world)  # type: ignore[attr-defined]
    torch_distributed.init_process_group(
        backend, store=store, rank=context.rank, world_size=context.world, timeout=TIMEOUT
    )
    return Competitor(name, torch_distributed, None)


def leave() -> None:
    """Destroy the groups of `join`."""
    if library.is_initialized():
        library.destroy_process_group()
    if torch_distributed.is_initialized():
        with suppress(RuntimeError):
            torch_distributed.destroy_process_group()


class DirectMpi:
    """MPI's own collectives, called by mpi4py on the tensors' memory, on a communicator of their own.

    The backend ``mpi`` reaches these times at most. The functions have the names and arguments of the public ones, as
    far as the benchmark uses them.
    """

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD.Dup()
        self._arrays: dict[int, tuple[Tensor, Any]] = {}

    def _memory(self, tensor: Tensor) -> Any:
        """Return a tensor as mpi4py takes it; cached."""
        found = self._arrays.get(id(tensor))
        if found is None:
            array = tensor.numpy()
            found = self._arrays[id(tensor)] = tensor, [array, self._mpi.Datatype.fromcode(array.dtype.char)]
        return found[1]

    def _whole(self, parts: Sequence[Tensor] | None) -> Any:
        """Return the one tensor that parts are consecutive views of."""
        base = parts[0]._base if parts else None  # noqa: SLF001  torch has no other name for it
        return None if base is None else self._memory(base)

    def all_reduce(self, tensor: Tensor, group: None = None) -> None:
        """Sum on all ranks, in place."""
        self._comm.Allreduce(self._mpi.IN_PLACE, self._memory(tensor))

    def reduce(self, tensor: Tensor, dst: int, group: None = None) -> None:
        """Sum to one rank, in place."""
        if self._comm.rank == dst:
            self._comm.Reduce(self._mpi.IN_PLACE, self._memory(tensor), root=dst)
        else:
            self._comm.Reduce(self._memory(tensor), None, root=dst)

    def broadcast(self, tensor: Tensor, src: int, group: None = None) -> None:
        """Copy one rank's tensor to all."""
        self._comm.Bcast(self._memory(tensor), root=src)

    def all_gather_single(self, output: Tensor, tensor: Tensor, group: None = None) -> None:
        """Copy every rank's block to all."""
        self._comm.Allgather(self._memory(tensor), self._memory(output))

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, group: None = None) -> None:
        """Sum, and keep one block on each rank."""
        self._comm.Reduce_scatter_block(self._memory(tensor), self._memory(output))

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: None = None) -> None:
        """Copy a block from each rank to each."""
        self._comm.Alltoall(self._whole(inputs), self._whole(outputs))

    def gather(self, tensor: Tensor, parts: Sequence[Tensor] | None, dst: int, group: None = None) -> None:
        """Copy every rank's block to one rank."""
        self._comm.Gather(self._memory(tensor), self._whole(parts), root=dst)

    def scatter(self, tensor: Tensor, parts: Sequence[Tensor] | None, src: int, group: None = None) -> None:
        """Copy one block of one rank to each."""
        self._comm.Scatter(self._whole(parts), self._memory(tensor), root=src)

    def send(self, tensor: Tensor, dst: int, group: None = None) -> None:
        """Send to one rank."""
        self._comm.Send(self._memory(tensor), dst)

    def recv(self, tensor: Tensor, src: int, group: None = None) -> None:
        """Receive from one rank."""
        self._comm.Recv(self._memory(tensor), src)

    def barrier(self, group: None = None) -> None:
        """Wait for all ranks."""
        self._comm.Barrier()
