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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch.distributed as torch_distributed
from torch import Tensor

from torchdist_ref.benchmark.operations import Buffers, Make, MeasuredOperation
from torchdist_ref.benchmark.rounds import RankContext, library
from torchdist_ref.errors import ArgumentError, UnsupportedError, explain

TIMEOUT = timedelta(minutes=5)
TORCH_GLOO, MPI, MPI4PY, REGISTERED = "torch:gloo", "mpi", "mpi4py", "registered"
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

    def bind(self, operation: MeasuredOperation, buffers: Buffers) -> Callable[[], Any]:
        """Return the call to time."""
        return operation.bind(self.api, self.group, buffers)


class Note(str):
    """Remark that a rank reports, such as the reason why a backend was left out."""


def available(asked: Sequence[str], forked: bool = False) -> tuple[list[str], list[str]]:
    """Return the names that may run here, and a remark for each that can't.

    Args:
        asked: Names as in ``--backends``.
        forked: Whether ranks are forked in any case, so that those of MPI can't be had.

    Raises:
        ArgumentError: A name is unknown.

    >>> available(["ref", "torch:gloo"])
    (['ref', 'torch:gloo'], [])
    """
    reasons = {name: _obstacle(name, forked) for name in asked}
    left_out = [f"{name} is left out: {reason}" for name, reason in reasons.items() if reason]
    return [name for name, reason in reasons.items() if not reason], left_out


def _obstacle(name: str, forked: bool) -> str:
    """Return why a backend cannot run here; empty if it can."""
    from torchdist_ref.backends.registry import names

    known = dict.fromkeys([*names(), REGISTERED, *UNDER_MPIEXEC, TORCH_GLOO])
    if name not in known:
        raise ArgumentError(explain("benchmark", "--backends", f"among {', '.join(known)}", name))
    if name == TORCH_GLOO and not (torch_distributed.is_available() and torch_distributed.is_gloo_available()):
        return "this torch was built without Gloo"
    package = UNDER_MPIEXEC.get(name)
    if package and importlib.util.find_spec(package) is None:
        return f"needs the package {package}: pip install 'torchdist_ref[mpi]'"
    if package and forked:
        return "this benchmark forks its ranks, and MPI's are started by mpiexec"
    return "no mpiexec was found, which has to start the ranks" if package and not find_mpiexec() else ""


def find_mpiexec() -> str:
    """Return the path of MPI's launcher, beside this Python or on the path; empty if there is none."""
    beside = os.path.dirname(sys.executable)
    return shutil.which("mpiexec", path=beside) or shutil.which("mpiexec") or ""


def join(asked: Sequence[str], context: RankContext) -> list[Competitor]:
    """Make a group on every backend. All stay alive until `leave`.

    Returns:
        The backends that could be made on every rank. For each other, rank 0 reports a `Note`.
    """
    # A process has one default group, known to both libraries: ours makes it, if it can be without MPI.
    order = sorted(asked, key=lambda name: (name in (TORCH_GLOO, MPI4PY), name in UNDER_MPIEXEC))
    joined = {name: _attempt(name, context) for name in order}
    return [backend for name in asked if (backend := joined[name])]


def _attempt(name: str, context: RankContext) -> Competitor | None:
    competitor, reason = None, ""
    try:
        competitor = _join(name, context)
    except (ImportError, UnsupportedError) as error:
        reason = str(error)
    reasons = [f"rank {rank}: {text}" for rank, text in enumerate(context.exchange(reason)) if text]
    if reasons and context.sides > 1:
        # The other sides would wait for its turns.
        raise UnsupportedError(f"{name}: {reasons[0]}")
    if reasons:
        context.report(Note(f"{name} is left out: {reasons[0]}"))
    return None if reasons else competitor


def _join(name: str, context: RankContext) -> Competitor:
    if name == MPI4PY:
        return Competitor(name, DirectMpi(), None)
    api: Any = torch_distributed if name == TORCH_GLOO else library
    backend = {TORCH_GLOO: "gloo", REGISTERED: "ref"}.get(name, name)
    group = None
    if api.is_initialized():
        group = api.new_group(backend=backend, timeout=TIMEOUT)
    else:
        store = api.FileStore(os.path.join(context.folder, f"store of {backend}"), context.world)
        api.init_process_group(backend, store=store, rank=context.rank, world_size=context.world, timeout=TIMEOUT)
    make = partial(library.empty_registered, group=group) if name == REGISTERED else None
    return Competitor(name, api, group, make)


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

        comm = MPI.COMM_WORLD.Dup()

        # Keeps the tensors too, so that no other one gets the identity of a key.
        @cache
        def memory(tensor: Tensor) -> Any:
            array = tensor.numpy()
            return [array, MPI.Datatype.fromcode(array.dtype.char)]

        def whole(parts: Sequence[Tensor] | None) -> Any:
            # The one tensor that parts are consecutive views of.
            base = parts[0]._base if parts else None  # noqa: SLF001  torch has no other name for it
            return None if base is None else memory(base)

        def source(tensor: Tensor, dst: int) -> Any:
            return MPI.IN_PLACE if comm.rank == dst else memory(tensor)

        self.reduce = lambda tensor, dst, group: comm.Reduce(source(tensor, dst), memory(tensor), root=dst)
        self.all_reduce = lambda tensor, group: comm.Allreduce(MPI.IN_PLACE, memory(tensor))
        self.broadcast = lambda tensor, src, group: comm.Bcast(memory(tensor), root=src)
        self.all_gather_single = lambda output, tensor, group: comm.Allgather(memory(tensor), memory(output))
        self.reduce_scatter_single = lambda out, tensor, group: comm.Reduce_scatter_block(memory(tensor), memory(out))
        self.all_to_all = lambda outputs, inputs, group: comm.Alltoall(whole(inputs), whole(outputs))
        self.gather = lambda tensor, parts, dst, group: comm.Gather(memory(tensor), whole(parts), root=dst)
        self.scatter = lambda tensor, parts, src, group: comm.Scatter(whole(parts), memory(tensor), root=src)
        self.send = lambda tensor, dst, group: comm.Send(memory(tensor), dst)
        self.recv = lambda tensor, src, group: comm.Recv(memory(tensor), src)
        self.barrier = lambda group: comm.Barrier()
