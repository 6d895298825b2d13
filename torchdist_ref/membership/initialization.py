"""Initialization: the ways to the store on which the ranks of a world meet, by a URL or by a store of the caller's.

Do not add the meeting itself (`membership.meeting`) or rendezvous methods (`rendezvous`) here.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

from torchdist_ref.errors import (
    ArgumentTypeError,
    BackendArgumentError,
    DistError,
    DistNetworkError,
    UsageError,
    explain,
    of_operation,
)
from torchdist_ref.membership.meeting import OPERATION, Meeting
from torchdist_ref.rendezvous import rendezvous
from torchdist_ref.stores import HashStore, Store
from torchdist_ref.timeouts import STORE_TIMEOUT, Deadline

_RECONNECT_SECONDS = 0.001
_HOLDER_TIMEOUT = timedelta(seconds=1)


def meet(init_method: str | None, rank: int, world_size: int, seconds: float, alone: bool = False) -> Meeting:
    """Find the other ranks by a URL, as `init_process_group` does; `env://` by default.

    A rank that is `alone`, as those of backend `fake` are, has a store of its own if its rank and world size are given.
    """
    if alone and rank != -1 and world_size != -1:
        return meet_on(HashStore(), rank, world_size)
    if init_method is not None and not isinstance(init_method, str):
        raise ArgumentTypeError(explain(OPERATION, "init_method", "a URL, as text", init_method))
    url, timeout = init_method or "env://", min(timedelta(seconds=seconds), STORE_TIMEOUT)
    if not url.startswith(("env://", "tcp://")):
        store, rank, world_size = next(iter(rendezvous(url, rank, world_size, timeout=timeout)))
        return meet_on(store, rank, world_size)
    try:
        # The wait for the other ranks comes later, under watch.
        found = next(iter(rendezvous(url, rank, world_size, timeout=timeout, wait_for_workers=False)))
    except DistNetworkError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE:
            _claim_at_holder(url, rank, world_size)
        raise
    outlives_worlds = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if found[1] == 0 or outlives_worlds:
        return Meeting(*found, outlives_worlds, has_agent=outlives_worlds)
    return _meet_at_rank_0(url, found, timeout, seconds)


def _meet_at_rank_0(url: str, found: tuple[Store, int, int], timeout: timedelta, seconds: float) -> Meeting:
    """Meet on the store that rank 0 serves for this world: the first initialization on it."""
    began, deadline = monotonic(), Deadline(seconds)
    store, rank, world_size = found
    while True:
        meeting = Meeting(store, rank, world_size, False, began=began)
        try:
            if meeting.finds_new_round(deadline):
                return meeting
            # This is the server that rank 0 ran for the last world, which has not ended yet.
        except DistNetworkError as error:
            if meeting.store_is_new:
                # The server of the last world has its round, so this one was that of this world's rank 0.
                _close_store(store)
                raise of_operation(f"{OPERATION} on rank {rank}", error) from error
            # It ended just now.
            if deadline.passed():
                raise
        except BaseException:
            _close_store(store)
            raise
        _close_store(store)
        sleep(_RECONNECT_SECONDS)
        store, _, _ = next(iter(rendezvous(url, rank, world_size, timeout=timeout, wait_for_workers=False)))


def _claim_at_holder(url: str, rank: int, world_size: int) -> None:
    """Claim rank 0 on the store that holds the port, where another process may wait for its ranks as rank 0."""
    options: dict[str, Any] = {"timeout": _HOLDER_TIMEOUT, "wait_for_workers": False, "serve": False}
    with suppress(DistError):
        store, rank, world_size = next(iter(rendezvous(url, rank, world_size, **options)))
        Meeting(store, rank, world_size, outlives_worlds=False).claim()
        _close_store(store)


def _close_store(store: Store) -> None:
    close = getattr(store, "close", None)
    if close is not None:
        close()


def meet_on(store: Store, rank: int, world_size: int) -> Meeting:
    """Meet the other ranks on a store.

    Raises:
        ArgumentTypeError: The rank or the world size is not an integer.
        BackendArgumentError: The rank is too large.
        UsageError: The rank is negative, or the world has no rank.
    """
    for argument, value in (("rank", rank), ("world_size", world_size)):
        if not hasattr(value, "__index__"):
            hint = "Convert text from the environment with int()."
            raise ArgumentTypeError(explain(OPERATION, argument, "an int", value, hint=hint))
    if world_size < 1:
        raise UsageError(explain(OPERATION, "world_size", "at least 1 when a store is given", world_size))
    if not 0 <= rank < world_size:
        # torch asserts that it is not negative, and its backends that it is not too large.
        kind = UsageError if rank < 0 else BackendArgumentError
        raise kind(explain(OPERATION, "rank", f"from 0 to {world_size - 1}", rank))
    return Meeting(store, rank, world_size)
