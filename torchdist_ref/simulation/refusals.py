"""Refusal, on simulated ranks, of functions that wait where no virtual time reaches them.

A rank that waits in C++ or at a socket would stop all others, and some of torch's functions keep Python's lock while
they wait, so that nobody could report it. So they are refused before they wait, and each error says what to use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NoReturn

import torch.distributed as c10d

from torchdist_ref.backends import registry
from torchdist_ref.errors import ArgumentError, UsageError, explain
from torchdist_ref.groups.torch_tables import adapt_torch
from torchdist_ref.simulation import memory
from torchdist_ref.simulation.scheduler import current_task

SIMULATED_BACKENDS = ("ref", "fake")
_factory_of = registry.factory_of


def refuse_backend(name: object) -> NoReturn:
    """Raise for a backend that has no virtual time."""
    hint = "torch's backends and MPI wait in C++, where no virtual time reaches them."
    raise ArgumentError(explain("simulation.run", "backend", "'ref' or 'fake' on simulated ranks", name, hint=hint))


def refuse_many_ranks(world_size: int) -> None:
    """Raise if this machine has less memory left than so many ranks need."""
    needed, available = memory.needed_bytes(world_size), memory.available_bytes()
    if available is not None and needed > available:
        expected = (
            f"a number of ranks that fit in memory: {world_size} need about {_size(needed)} besides their tensors"
        )
        hint = f"This machine has {_size(available)} left."
        raise ArgumentError(explain("simulation.run", "world_size", expected, world_size, hint=hint))


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.3g} GiB"


def _factory_on_rank(name: str) -> registry.Factory:
    if name not in SIMULATED_BACKENDS and name in registry.BUILT_IN | registry.NCCL_NAMES and current_task():
        refuse_backend(name)
    return _factory_of(name)


def _refused(real: Callable[..., Any], text: str) -> Callable[..., Any]:
    @wraps(real)
    def call(*arguments: Any, **named: Any) -> Any:
        if current_task() is not None:
            raise UsageError(f"{text} (on simulated rank {current_task().owner}).")  # type: ignore[union-attr]
        return real(*arguments, **named)

    return call


_INIT = (
    "torch.distributed.init_process_group: it connects by sockets of torch's, which have no virtual time. "
    "Simulated ranks have a default group already, which torch.distributed uses too; leave out this call"
)


@contextmanager
def refusing() -> Iterator[None]:
    """Refuse such functions in the block, on simulated ranks alone."""
    # It replaces one of these names itself, for good.
    adapt_torch()
    places: list[tuple[Any, str, Any]] = [
        (registry, "factory_of", _factory_on_rank),
    ]
    init = _refused(c10d.init_process_group, _INIT)
    places += [(where, "init_process_group", init) for where in (c10d, c10d.distributed_c10d)]
    before = [(where, name, getattr(where, name)) for where, name, _ in places]
    try:
        for where, name, value in places:
            setattr(where, name, value)
        yield
    finally:
        for where, name, value in before:
            setattr(where, name, value)
