"""A barrier that knows who is missing, for any backend: it goes through the store and touches no backend.

Every rank puts down that it came and counts itself. Whoever comes last writes the verdict "all came"; whoever has
waited long enough looks who is missing and writes that. The first verdict stands (compare_set decides), and all go by
it: so either all pass or all that came name the same missing ranks, whatever their number, rank 0 among them or
not. A rank that comes after the verdict is told that it came too late. Rounds are counted by every rank for itself,
and a round's keys go when the next one is over.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from torchdist_ref.errors import RankDiedError, RankStalledError, StoreTimeoutError
from torchdist_ref.stores import Store
from torchdist_ref.stores.prefix import WatchedStore

_ALL_CAME = "all came"


def run_monitored_barrier(
    store: Store,
    rank: int,
    members: tuple[int, ...],
    timeout: timedelta,
    name: str,
    trouble: Callable[[], BaseException | None],
) -> None:
    """Wait until all members of a group have called this.

    Args:
        store: Keys of this group only.
        rank: This rank in the group.
        members: The global rank of every member.
        timeout: How long to wait for the others.
        name: The group's name, for errors.
        trouble: What to raise if it is known that some will never come.

    Raises:
        RankStalledError: Some did not come in time; all of them are named, on every rank that came.
        RankDiedError: The same, before the time is over, since some never will.
    """
    store = WatchedStore("monitored", store, trouble)
    number = store.add(f"rounds/{rank}", 1)
    verdict = _verdict(store, number, rank, len(members), timeout)
    if verdict != _ALL_CAME:
        absent = [int(position) for position in verdict.split(",")]
        raise _missing(absent, rank, members, timeout, name, trouble())
    _forget(store, number - 1, rank)


def _verdict(store: Store, number: int, rank: int, size: int, timeout: timedelta) -> str:
    """What this round came to, the same on all ranks."""
    key = f"{number}/verdict"
    store.set(f"{number}/{rank}", "")
    if store.add(f"{number}/came", 1) == size:
        return store.compare_set(key, "", _ALL_CAME).decode()
    try:
        store.wait([key], timeout)
        return store.get(key).decode()
    except (StoreTimeoutError, RankDiedError):
        absent = [str(other) for other in range(size) if not store.check([f"{number}/{other}"])]
        return store.compare_set(key, "", ",".join(absent) or _ALL_CAME).decode()


def _missing(
    absent: list[int], rank: int, members: tuple[int, ...], timeout: timedelta, name: str, trouble: BaseException | None
) -> RankStalledError | RankDiedError:
    who = ", ".join(str(members[position]) for position in absent)
    ranks = f"Rank{'s' if len(absent) > 1 else ''} {who}"
    here = f"[Rank {members[rank]}]: {ranks} failed to pass monitoredBarrier"
    if trouble is not None:
        return RankDiedError(f"{here} (group {name!r}). {trouble}")
    text = f"{here} in {timeout.total_seconds() * 1000:.0f} ms (group {name!r})."
    if rank in absent:
        return RankStalledError(f"{text} This rank came, but after the others had given up.")
    return RankStalledError(f"{text} See what these ranks do: whether they live, and at which call they are.")


def _forget(store: Store, number: int, rank: int) -> None:
    """Everybody is in the next round, so nobody reads the last one any more."""
    store.delete_key(f"{number}/{rank}")
    if rank == 0:
        store.delete_key(f"{number}/came")
        store.delete_key(f"{number}/verdict")
