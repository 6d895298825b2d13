"""Monitored barrier: a barrier through the store that names the missing ranks, for any backend.

Every rank sets a key. Rank 0 waits for the keys of all ranks and writes the verdict that none is missing. A rank whose
time-out passes writes the list of missing ranks instead. `compare_set` keeps the first verdict, so either all ranks
pass, or all that arrived name the same missing ranks, rank 0 or others. A rank that arrives after the verdict fails as
too late. The keys of a round are deleted after the next one.

Verdicts follow from sealed values only. Counters of a store cannot be sealed, so anybody who reaches it could let ranks
pass: neither arrivals nor rounds are counted there. Do not add calls of a backend here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

from torchdist_ref.errors import (
    DistBackendError,
    DistNetworkError,
    GroupAbortedError,
    RankDiedError,
    RankStalledError,
    StoreTimeoutError,
)
from torchdist_ref.membership.blame import Wait
from torchdist_ref.membership.events import Failure, Value, failure_of
from torchdist_ref.membership.words import error_of
from torchdist_ref.stores.base import Store, limit_requests
from torchdist_ref.stores.prefix import PrefixStore, WatchedStore
from torchdist_ref.timeouts import Deadline, found_soon

_rounds: WeakKeyDictionary[Store, Counter[int]] = WeakKeyDictionary()
"""Rounds so far by the store of a group and the rank; ranks that are threads may share a store."""
_OPERATION = "monitored_barrier"


def run_monitored_barrier(
    store: Store,
    rank: int,
    members: tuple[int, ...],
    timeout: timedelta,
    name: str,
    find_failure: Callable[[Sequence[int], str, Wait], BaseException | None],
) -> None:
    """Wait until all members of a group have called this.

    Args:
        store: Store for keys of this group only.
        rank: This rank in the group.
        members: Global ranks of all members.
        timeout: Time to wait for the others.
        name: Name of the group, for errors.
        find_failure: Function that finds members that have failed or left: `Backend.failure`.

    Raises:
        RankStalledError: Ranks did not arrive in time; the message names all of them, on every rank that arrived.
        RankDiedError: A member has died before all had arrived; the message names the dead ones only.
        GroupAbortedError: A member that had not arrived has left the group; the message names it.

    A rank that cannot reach the store raises RankStalledError too, which says so.
    """
    rounds = _rounds.setdefault(store, Counter())
    rounds[rank] += 1
    number, plain = rounds[rank], PrefixStore("monitored", store)
    others = [other for other in range(len(members)) if other != rank]

    def end() -> BaseException | None:
        if (found := find_failure(others, _OPERATION, Wait.ELSEWHERE)) is not None:
            return found
        if find_failure(others, _OPERATION, Wait.PART) is None:
            return None
        # A rank that has arrived may leave.
        absent = [other for other in others if not plain.check([f"{number}/{other}"])]
        return find_failure(absent, _OPERATION, Wait.PART)

    store = WatchedStore("monitored", store, end)
    with limit_requests(timeout.total_seconds()) as deadline:
        try:
            verdict = _verdict(store, number, rank, members, deadline)
        except StoreTimeoutError as error:
            raise _cut_off_error(rank, members, timeout, name, error) from error
        except DistNetworkError as error:
            # The store may have ended with the rank that serves it.
            if (found := found_soon(end)) is None:
                raise
            absent = [members.index(each) for each in getattr(found, "ranks", ()) if each in members]
            raise _missing_error(absent, rank, members, timeout, name, found) from error
        if verdict.absent:
            found = end()
            if found is None and verdict.failure is not None:
                # The rank that has written the verdict has seen it a little earlier.
                found = error_of(verdict.failure, _OPERATION, members)
            raise _missing_error([*verdict.absent], rank, members, timeout, name, found)
        _delete_round(store, number - 1, rank)


@dataclass(frozen=True)
class _Verdict(Value):
    """Verdict of a round, the same on all ranks.

    Attributes:
        absent: Group ranks that did not arrive; if some of them have failed, those.
        failure: Failure for which the round ended before its time-out; None if there was none.
    """

    absent: tuple[int, ...] = ()
    failure: Failure | None = None


def _verdict(store: Store, number: int, rank: int, members: tuple[int, ...], deadline: Deadline) -> _Verdict:
    """Return the verdict of a round."""
    size = len(members)

    def agreed(own: _Verdict) -> _Verdict:
        return _Verdict.from_json(json.loads(store.compare_set(key, "", json.dumps(own.to_json()))))

    key, own = f"{number}/verdict", f"{number}/{rank}"
    keys = [f"{number}/{other}" for other in range(size)]
    try:
        if rank == 0 and not store.check([key]):
            store.wait_get(keys, timedelta(seconds=deadline.remaining()), {own: ""})
            return agreed(_Verdict())
        [known] = store.wait_get([key], timedelta(seconds=deadline.remaining()), {own: ""})
        return _Verdict.from_json(json.loads(known))
    except (StoreTimeoutError, RankDiedError, GroupAbortedError) as error:
        absent = tuple(other for other in range(size) if store.get_if_present(keys[other]) is None)
        failure = failure_of(error)
        if absent and failure is not None:
            # The ranks that have failed keep the others from passing. One that lives may only be late.
            absent = tuple(members.index(each) for each in failure.ranks if each in members) or absent
        return agreed(_Verdict(absent, failure))


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
) -> DistBackendError:
    names = ", ".join(str(members[position]) for position in absent)
    ranks = f"Rank{'s' if len(absent) > 1 else ''} {names}"
    here = f"[Rank {members[rank]}]: {ranks} failed to pass monitoredBarrier"
    missing = [members[position] for position in absent]
    if failure is not None:
        kind = GroupAbortedError if isinstance(failure, GroupAbortedError) else RankDiedError
        return kind(f"{here} (group {name!r}). {failure}").reporting(failure_of(failure)).naming(missing)
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
    # This rank has passed: it need not know that the one with the store has ended meanwhile.
    with suppress(RuntimeError):
        store.delete_key(f"{number}/{rank}")
        if rank == 0:
            store.delete_key(f"{number}/verdict")
