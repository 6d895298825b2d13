"""Monitored barrier: a barrier through the store that names the missing ranks, for any backend.

Every rank registers its arrival and increments a counter. The last rank writes the verdict that all arrived. A rank
whose time-out passes writes the list of missing ranks instead. `compare_set` keeps the first verdict, so either all
ranks pass, or all that arrived name the same missing ranks, rank 0 or others. A rank that arrives after the verdict
fails as too late. Every rank counts the rounds itself; the keys of a round are deleted after the next one. Do not add
calls of a backend here.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from torchdist_ref.errors import RankDiedError, RankStalledError, StoreTimeoutError
from torchdist_ref.stores.base import Store, limit_requests
from torchdist_ref.stores.prefix import WatchedStore
from torchdist_ref.timeouts import Deadline

_ALL_ARRIVED = "all arrived"


def run_monitored_barrier(
    store: Store,
    rank: int,
    members: tuple[int, ...],
    timeout: timedelta,
    name: str,
    failure: Callable[[], BaseException | None],
) -> None:
    """Wait until all members of a group have called this.

    Args:
        store: Store for keys of this group only.
        rank: This rank in the group.
        members: Global ranks of all members.
        timeout: Time to wait for the others.
        name: Name of the group, for errors.
        failure: Function that returns the error of a member that has failed, or None.

    Raises:
        RankStalledError: Ranks did not arrive in time; the message names all of them, on every rank that arrived.
        RankDiedError: The same before the time-out, because a member has failed.

    A rank that cannot reach the store raises RankStalledError too, which says so.
    """
    store = WatchedStore("monitored", store, failure)
    with limit_requests(timeout.total_seconds()) as deadline:
        try:
            number = store.add(f"rounds/{rank}", 1)
            verdict = _verdict(store, number, rank, len(members), deadline)
        except StoreTimeoutError as error:
            raise _cut_off_error(rank, members, timeout, name, error) from error
        if verdict != _ALL_ARRIVED:
            absent = [int(position) for position in verdict.split(",")]
            raise _missing_error(absent, rank, members, timeout, name, failure())
        _delete_round(store, number - 1, rank)


def _verdict(store: Store, number: int, rank: int, size: int, deadline: Deadline) -> str:
    """Return the verdict of a round, the same on all ranks."""
    key = f"{number}/verdict"
    store.set(f"{number}/{rank}", "")
    if store.add(f"{number}/arrived", 1) == size:
        return store.compare_set(key, "", _ALL_ARRIVED).decode()
    try:
        store.wait([key], timedelta(seconds=deadline.remaining()))
        return store.get(key).decode()
    except (StoreTimeoutError, RankDiedError):
        absent = [str(other) for other in range(size) if not store.check([f"{number}/{other}"])]
        return store.compare_set(key, "", ",".join(absent) or _ALL_ARRIVED).decode()


def _cut_off_error(
    rank: int, members: tuple[int, ...], timeout: timedelta, name: str, error: StoreTimeoutError
) -> RankStalledError:
    return RankStalledError(
        f"[Rank {members[rank]}]: Rank {members[rank]} failed to pass monitoredBarrier in "
        f"{timeout.total_seconds() * 1000:.0f} ms (group {name!r}): it cannot reach the store, so it does not know "
        f"which ranks arrived. {error}"
    )


def _missing_error(
    absent: list[int], rank: int, members: tuple[int, ...], timeout: timedelta, name: str, failure: BaseException | None
) -> RankStalledError | RankDiedError:
    names = ", ".join(str(members[position]) for position in absent)
    ranks = f"Rank{'s' if len(absent) > 1 else ''} {names}"
    here = f"[Rank {members[rank]}]: {ranks} failed to pass monitoredBarrier"
    missing = [members[position] for position in absent]
    if failure is not None:
        return RankDiedError(f"{here} (group {name!r}). {failure}").naming(missing)
    text = f"{here} in {timeout.total_seconds() * 1000:.0f} ms (group {name!r})."
    if rank in absent:
        late = "This rank arrived after the others had timed out in monitoredBarrier."
        return RankStalledError(f"{text} {late}").naming(missing)
    reached = f"Rank {members[rank]} successfully reached monitoredBarrier, but received errors while waiting"
    return RankStalledError(
        f"{text} {reached}: {ranks} timed out in monitoredBarrier. Check whether these ranks are alive, and at which "
        "call they are."
    ).naming(missing)


def _delete_round(store: Store, number: int, rank: int) -> None:
    """Delete the keys of a round that no rank reads any more."""
    store.delete_key(f"{number}/{rank}")
    if rank == 0:
        store.delete_key(f"{number}/arrived")
        store.delete_key(f"{number}/verdict")
