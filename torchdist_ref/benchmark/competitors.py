"""Backends by the names that ``--backends`` takes, each as an API and a group that the public functions are called on.

``ref``, ``gloo``, ``mpi`` and whatever else is registered go through this library's groups; ``torch:gloo`` is torch's
own ``torch.distributed``, untouched, ``mpi4py`` is MPI without us, and ``registered`` is ``ref`` on registered buffers.
How ranks come about is not here: see `crew`.
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
import torch.distributed as theirs

from torchdist_ref import groups
from torchdist_ref.backends.registry import names
from torchdist_ref.benchmark.crew import Place
from torchdist_ref.benchmark.mpi_direct import Direct
from torchdist_ref.benchmark.operations import Make
from torchdist_ref.errors import ArgumentError, UnsupportedError, explain
from torchdist_ref.stores import FileStore

PATIENCE = timedelta(minutes=5)
_TORCH = "torch:"
MPI, DIRECT, REGISTERED = "mpi", "mpi4py", "registered"
# Backends whose ranks `mpiexec` must start, and the package that they need.
UNDER_MPIEXEC = {MPI: "mpi4py", DIRECT: "mpi4py"}


@dataclass(frozen=True)
class Competitor:
    """A contestant: the functions to call, and the group to call them on.

    Attributes:
        name: As in ``--backends``.
        api: A module with `all_reduce` and so on.
        group: What to pass as `group`.
        make: What makes the tensors that it is called with, if not just any.
    """

    name: str
    api: Any
    group: Any
    make: Make | None = None


@dataclass(frozen=True)
class LeftOut:
    """A backend that was asked for and could not be made, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} is left out: {self.reason}"


def split(asked: Sequence[str], forked: bool = False) -> tuple[list[str], list[LeftOut]]:
    """Of the names asked for, those that may run here, and those that surely can't.

    Args:
        asked: Names as in ``--backends``.
        forked: Whether ranks are forked in any case, so that those of MPI can't be had.

    Raises:
        ArgumentError: A name that nobody knows.

    >>> split(["ref", "torch:gloo"])
    (['ref', 'torch:gloo'], [])
    """
    out = [LeftOut(name, reason) for name in dict.fromkeys(asked) if (reason := _missing(name, forked))]
    return [name for name in dict.fromkeys(asked) if name not in {each.name for each in out}], out


def _missing(name: str, forked: bool) -> str:
    if name == "torch:gloo":
        return "" if theirs.is_available() and theirs.is_gloo_available() else "this torch was built without Gloo"
    package = UNDER_MPIEXEC.get(name)
    if package and importlib.util.find_spec(package) is None:
        return f"needs the package {package}: pip install 'torchdist_ref[mpi]'"
    if package and forked:
        return "this benchmark forks its ranks, and MPI's are started by mpiexec"
    if package and not mpiexec():
        return "no mpiexec was found, which has to start the ranks"
    if name in (*names(), DIRECT, REGISTERED):
        return ""
    if package:
        return "this version of torchdist_ref has no such backend yet"
    expected = f"among {', '.join(dict.fromkeys([*names(), REGISTERED, *UNDER_MPIEXEC, 'torch:gloo']))}"
    raise ArgumentError(explain("benchmark", "--backends", expected, name))


def mpiexec() -> str:
    """Where MPI's launcher is: beside this Python, as pip installs it, or on the path. Empty where it is not."""
    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    return beside if os.access(beside, os.X_OK) else shutil.which("mpiexec") or ""


def join(asked: Sequence[str], place: Place) -> list[Competitor]:
    """Make a group on every backend, on a forked rank. All stay alive until `leave`.

    Returns:
        The backends that could be made on every rank. Of each other, rank 0 reports a `LeftOut`.
    """
    foreign = [name for name in asked if name.startswith(_TORCH) or name == DIRECT]
    ours = sorted(set(asked) - set(foreign), key=lambda name: (name in UNDER_MPIEXEC, asked.index(name)))
    return [backend for name in asked if (backend := _attempt(name, place, ours[:1] == [name]))]


def _attempt(name: str, place: Place, default: bool) -> Competitor | None:
    competitor, reason = None, ""
    try:
        competitor = _join_foreign(name, place) or _join_ours(name, place, default)
    except (ImportError, UnsupportedError) as error:
        reason = str(error)
    reasons = [f"rank {rank}: {text}" for rank, text in enumerate(place.exchange(reason)) if text]
    if reasons:
        place.report(LeftOut(name, reasons[0]))
    return None if reasons else competitor


def _join_ours(name: str, place: Place, default: bool) -> Competitor:
    chosen, group = "ref" if name == REGISTERED else name, None
    if default:
        store = FileStore(os.path.join(place.folder, "ours"), place.world)
        groups.init_process_group(chosen, store=store, rank=place.rank, world_size=place.world, timeout=PATIENCE)
    else:
        group = groups.new_group(backend=chosen, timeout=PATIENCE)
    return Competitor(name, groups, group, partial(_registered, group) if name == REGISTERED else None)


def _registered(group: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
    tensor: torch.Tensor = groups.empty_registered(count, dtype=dtype, group=group)
    return tensor


def _join_foreign(name: str, place: Place) -> Competitor | None:
    if name == DIRECT:
        return Competitor(name, Direct(), None)
    if not name.startswith(_TORCH):
        return None
    path = os.path.join(place.folder, "theirs")
    store = theirs.FileStore(path, place.world)  # type: ignore[attr-defined]
    theirs.init_process_group(
        name.removeprefix(_TORCH), store=store, rank=place.rank, world_size=place.world, timeout=PATIENCE
    )
    return Competitor(name, theirs, None)


def leave() -> None:
    """End what `join` began."""
    if groups.is_initialized():
        groups.destroy_process_group()
    if theirs.is_initialized():
        with suppress(RuntimeError):
            theirs.destroy_process_group()
