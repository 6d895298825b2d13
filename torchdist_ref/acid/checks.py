"""The class of a check, and the list of all checks, which their modules fill when they are imported."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from torchdist_ref.stores import FileStore, Store
from torchdist_ref.testing.filling import fill

DOCUMENTATION = "torch.distributed, documentation of torch"
INIT = "init_process_group and destroy_process_group"
"""Name of the first check; where it does not pass, no other can."""


class RankLeaves(BaseException):
    """A rank has done its part of a check, and ends at once, without cleaning up."""


@dataclass(frozen=True)
class Ranks:
    """The ranks of a check, as one of them sees them.

    Attributes:
        dist: Module whose functions are called: `torch.distributed`, or this library.
        rank: Rank of this process.
        world: Number of ranks.
        device: Device of the tensors.
        folder: Folder that all ranks of the check share.
        init: Function that makes the default group, for the checks that do so themselves; gets the time-out.
    """

    dist: Any
    rank: int
    world: int
    device: str
    folder: str
    init: Callable[[timedelta], None]

    @property
    def everyone(self) -> range:
        """All ranks."""
        return range(self.world)

    def data(self, rank: int, shape: tuple[int, ...] = (5,), dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the tensor that some rank begins with: nonlinear in the rank and in the position."""
        return fill(rank, shape, dtype).to(self.device)

    def mine(self, shape: tuple[int, ...] = (5,), dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the tensor that this rank begins with."""
        return self.data(self.rank, shape, dtype)

    def store(self, name: str) -> Store:
        """Return a store that the ranks of the check share, which is not the backend's."""
        return FileStore(f"{self.folder}/{name}", self.world)

    def empty(self, shape: tuple[int, ...] = (5,), dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor to receive into, full of ones, which no check expects."""
        return torch.ones(shape, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class Check:
    """A demand on a backend, and the function that makes the calls.

    Attributes:
        name: Name of the check, such as ``"all_reduce of integers"``.
        area: Name of the module that holds it.
        run: Function that each rank calls; an exception is a failure.
        demand: Duty of the backend, in one sentence.
        source: Document that says so.
        initialized: Whether the default group is made before the call and destroyed after it.
        ends: Function that returns the exit code that the process of a rank must have.
        needs_two: Whether the check makes no sense with one rank.
        large: Whether its tensors have more than 2 GiB, so that it runs only if asked for.
    """

    name: str
    area: str
    run: Callable[[Ranks], None]
    demand: str
    source: str
    initialized: bool = True
    ends: Callable[[int], int] = lambda rank: 0
    needs_two: bool = False
    large: bool = False

    @property
    def code(self) -> str:
        """The calls of the check, as they are written here."""
        return textwrap.dedent(inspect.getsource(self.run))


CHECKS: list[Check] = []
"""All checks, in the order in which they run."""


def check(
    name: str,
    demand: str,
    source: str = DOCUMENTATION,
    **options: Any,
) -> Callable[[Callable[[Ranks], None]], Callable[[Ranks], None]]:
    """Add a function to `CHECKS`; see `Check` for the arguments."""

    def add(function: Callable[[Ranks], None]) -> Callable[[Ranks], None]:
        area = function.__module__.rpartition(".")[2]
        CHECKS.append(Check(name, area, function, demand, source, **options))
        return function

    return add


def same(found: Tensor, expected: Tensor, what: str = "the result") -> None:
    """Raise unless two tensors are equal in dtype, shape and each value."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        raise AssertionError(
            f"{what} is {found.dtype} {list(found.shape)}, expected {expected.dtype} {list(expected.shape)}"
        )
    if not torch.equal(found, expected):
        shown, wanted = (each.flatten()[:6].tolist() for each in (found, expected))
        raise AssertionError(f"{what} is {shown}, expected {wanted} (the first {len(shown)} of {found.numel()})")


def total(ranks: Ranks, shape: tuple[int, ...] = (5,), dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the sum over all ranks of what they begin with; exact, as the values are small integers."""
    return torch.stack([ranks.data(rank, shape, dtype) for rank in ranks.everyone]).sum(0, dtype=dtype)


def raises(function: Callable[[], object], what: str) -> Exception:
    """Return the exception that a call raises; raise if it returns."""
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError(f"{what}: no exception was raised")
