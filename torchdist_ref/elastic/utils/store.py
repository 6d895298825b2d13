"""Agreements through a store, for processes that have no group yet.

The keys are those of torch's functions of the same names, so that processes of both can meet. Nothing is deleted: each
prefix serves once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta

from torchdist_ref.errors import ArgumentError, StoreTimeoutError
from torchdist_ref.stores import Store

__all__ = ["barrier", "get_all", "store_timeout", "synchronize"]

_COUNT, _LAST = "/num_members", "/last_member"
_HERE, _TOLD = "/TRACE", "/TRACING_GATE"
# Naming a few is enough to know where to look, and asking for each takes time.
_MOST_NAMED = 16


@contextlib.contextmanager
def store_timeout(store: Store, timeout: float) -> Iterator[None]:
    """Give a store another time-out for a while.

    Args:
        store: The store.
        timeout: Seconds.

    Example:
        >>> from torchdist_ref.elastic.utils.store import store_timeout
        >>> from torchdist_ref.stores import HashStore
        >>> store = HashStore()
        >>> with store_timeout(store, 5):
        ...     print(store.timeout)
        0:00:05
    """
    former = store.timeout
    store.set_timeout(timedelta(seconds=timeout))
    try:
        yield
    finally:
        store.set_timeout(former)


def get_all(store: Store, rank: int, prefix: str, world_size: int) -> list[bytes]:
    """Read what every process has set under a prefix and its number.

    Args:
        store: The store that all share.
        rank: This process. Number 0, which often serves the store, returns last.
        prefix: The keys are this and a number from 0.
        world_size: How many there are.

    Returns:
        The values in order.

    Raises:
        StoreTimeoutError: A key is not there within the store's time-out, or somebody does not come to read.

    Example:
        >>> from torchdist_ref.elastic.utils.store import get_all
        >>> from torchdist_ref.stores import HashStore
        >>> store = HashStore()
        >>> store.multi_set(["host0", "host1"], ["a", "b"])
        >>> get_all(store, 1, "host", 2)
        [b'a', b'b']
    """
    found = store.multi_get([f"{prefix}{number}" for number in range(world_size)])
    done = _arrive(store, world_size, f"{prefix}/finished")
    if rank == 0:
        store.wait([done])
    return found


def synchronize(
    store: Store, data: bytes, rank: int, world_size: int, key_prefix: str, timeout: float = 300
) -> list[bytes]:
    """Give every process the data of all.

    Args:
        store: The store that all share.
        data: What this process has to say.
        rank: This process, from 0.
        world_size: How many there are.
        key_prefix: What the keys begin with.
        timeout: Seconds to wait for the others. Default: 300.

    Returns:
        The data of all, in order.

    Raises:
        StoreTimeoutError: Somebody did not come in time.

    Example:
        >>> from torchdist_ref.elastic.utils.store import synchronize
        >>> from torchdist_ref.stores import HashStore
        >>> synchronize(HashStore(), b"me", rank=0, world_size=1, key_prefix="who")
        [b'me']
    """
    with store_timeout(store, timeout):
        store.set(f"{key_prefix}{rank}", data)
        return get_all(store, rank, key_prefix, world_size)


def barrier(
    store: Store,
    world_size: int,
    key_prefix: str,
    barrier_timeout: float = 300,
    rank: int | None = None,
    rank_tracing_decoder: Callable[[int], str] | None = None,
    trace_timeout: float = 10,
) -> None:
    """Wait until every process is here.

    Args:
        store: The store that all share.
        world_size: How many are to come.
        key_prefix: What the keys begin with; one prefix for each barrier.
        barrier_timeout: Seconds to wait. Default: 300.
        rank: This process. If all tell theirs, a time-out names those that are missing (up to 16).
        rank_tracing_decoder: Makes a name of a rank, say that of its host. Default: the number.
        trace_timeout: Seconds that rank 0 waits for the others to report that they are here. Default: 10.

    Raises:
        StoreTimeoutError: Somebody did not come in time.
        ArgumentError: A decoder without a rank.

    Example:
        >>> from torchdist_ref.elastic.utils.store import barrier
        >>> from torchdist_ref.stores import HashStore
        >>> barrier(HashStore(), world_size=1, key_prefix="start")
    """
    if rank is None and rank_tracing_decoder is not None:
        raise ArgumentError("barrier: 'rank_tracing_decoder' names ranks, so 'rank' must be given on every process.")
    with store_timeout(store, barrier_timeout):
        done = _arrive(store, world_size, key_prefix)
        try:
            store.wait([done])
        except StoreTimeoutError as error:
            absent = (
                ""
                if rank is None
                else _absent(store, world_size, key_prefix, rank, trace_timeout, rank_tracing_decoder or str)
            )
            raise StoreTimeoutError(
                f"barrier {key_prefix!r}: not all {world_size} processes came within {barrier_timeout:g} s{absent}."
            ) from error


def _arrive(store: Store, world_size: int, prefix: str) -> str:
    """Count this process, and return the key that the last to come sets."""
    if store.add(prefix + _COUNT, 1) == world_size:
        store.set(prefix + _LAST, "<val_ignored>")
    return prefix + _LAST


def _absent(store: Store, world_size: int, prefix: str, rank: int, seconds: float, name: Callable[[int], str]) -> str:
    """Say who is missing; rank 0 finds out, and the others refer to it once it has been heard of."""
    store.set(f"{prefix}{rank}{_HERE}", "<val_ignored>")
    if rank == 0:
        missing = _missing(store, world_size, prefix, seconds)
        store.set(f"{prefix}{_TOLD}", "<val_ignored>")
        return f"; missing: {', '.join(map(name, missing)) or 'nobody, one was late'} (this is rank 0)"
    try:
        store.wait([f"{prefix}{_TOLD}"], timedelta(seconds=seconds + 1))
    except StoreTimeoutError:
        return f"; rank 0 ({name(0)}) is missing (this is rank {rank})"
    return f"; rank 0 ({name(0)}) says who is missing (this is rank {rank})"


def _missing(store: Store, world_size: int, prefix: str, seconds: float) -> list[int]:
    found: list[int] = []
    for other in range(1, world_size):
        try:
            # Once one is found missing, the others have had their time too.
            store.wait([f"{prefix}{other}{_HERE}"], timedelta(seconds=0.001 if found else seconds))
        except StoreTimeoutError:
            found.append(other)
        if len(found) == _MOST_NAMED:
            break
    return found
