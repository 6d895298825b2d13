"""Places where ranks meet: threads of one process, processes of one host, hosts on a network."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import NamedTuple

from torchdist_ref.errors import DistStoreError, MismatchError, RankStalledError, StoreTimeoutError
from torchdist_ref.stores import PrefixStore, Store
from torchdist_ref.transports import shared_memory, tcp, threads
from torchdist_ref.transports.base import Link

__all__ = ["Link", "connect", "refuse_to_meet", "share_a_host"]


_REFUSAL = b"!"
# More ranks are often on several hosts, and what a segment costs to make grows with their square: 1 ms for so many.
_READY = 16
log = logging.getLogger("torchdist_ref.transports")


def connect(store: Store, rank: int, members: Sequence[int], name: str, timeout: float) -> Link:
    """Find out where the ranks are, and make the link that fits.

    Every rank publishes its host and process, and rank 0 a segment besides; all read all, so all choose alike: threads
    where the processes are one, shared memory where the hosts are one.

    Raises:
        UnsupportedError: Shared memory is not available on this platform.
        DistNetworkError: Ranks of several hosts can't reach each other.
        RankStalledError: A rank did not come in time.
    """
    meeting, size = PrefixStore("link", store), len(members)
    with _segment(rank, size) as (memory, deed):
        places = _places(meeting, rank, size, timeout, deed)
        hosts = [place.host for place in places]
        if len({(place.host, place.process) for place in places}) == 1:
            return threads.connect(meeting, rank, members, name, timeout)
        if len(set(hosts)) > 1:
            if rank == 0:
                log.info("group %r spans %s: shared memory within each, TCP between them", name, _spans(set(hosts)))
            return tcp.connect(meeting, rank, members, name, timeout, hosts)
        if not places[0].deed:
            return shared_memory.connect(meeting, rank, members, name, timeout)
        layout = shared_memory.layout_for(size)
        memory = memory or shared_memory.attach(places[0].deed, layout)
        return shared_memory.meet(memory, layout, rank, members, name, timeout)


def _segment(rank: int, size: int) -> AbstractContextManager[tuple[shared_memory.SharedMemory | None, bytes]]:
    """What rank 0 has ready in case that all ranks share a host: the others then need not ask for it."""
    if rank or not 1 < size <= _READY or shared_memory.available():
        return nullcontext((None, b""))
    return shared_memory.made(shared_memory.layout_for(size))


def _spans(hosts: set[bytes]) -> str:
    machines = {host.partition(b"/")[0] for host in hosts}
    one = " on one machine (containers, say), which cannot share memory" if len(machines) == 1 else ""
    return f"{len(hosts)} {'sets of pid, ipc and user namespaces' if one else 'hosts'}{one}"


def share_a_host(store: Store, rank: int, size: int) -> bool:
    """Whether all ranks of a group can share memory. Every rank asks; all get the same answer."""
    return len({place.host for place in _places(PrefixStore("choice", store), rank, size)}) == 1


def refuse_to_meet(store: Store, rank: int, reason: str) -> None:
    """Tell the members that wait for this rank in `connect` that it will not come."""
    PrefixStore("link", store).set(f"place/{rank}", _REFUSAL + reason.encode())


class _Place(NamedTuple):
    """Where a rank is, and by what to find the segment that it has made, if it has."""

    host: bytes
    process: bytes
    deed: bytes


def _places(store: Store, rank: int, size: int, timeout: float | None = None, deed: bytes = b"") -> list[_Place]:
    """Where every rank is, as soon as all have said."""
    store.set(f"place/{rank}", b"|".join([shared_memory.host_identity().encode(), b"%d" % os.getpid(), deed]))
    keys = [f"place/{r}" for r in range(size)]
    try:
        answers = _values(store, keys, timeout)
    except StoreTimeoutError as error:
        absent = ", ".join(str(r) for r, key in enumerate(keys) if not store.check([key]))
        raise RankStalledError(
            f"init_process_group or new_group on rank {rank}: group ranks {absent} of {size} did not come in time. "
            f"Every member has to make the group."
        ) from error
    for answer in answers:
        if answer.startswith(_REFUSAL):
            raise MismatchError(answer.removeprefix(_REFUSAL).decode())
    return [_Place(*answer.rsplit(b"|", 2)) for answer in answers]


def _values(store: Store, keys: Sequence[str], timeout: float | None) -> list[bytes]:
    """What the keys hold, as soon as all are there: one question, if that comes before the store's time-out."""
    more = 0.0 if timeout is None else timeout - store.timeout.total_seconds()
    if more < 0 and timeout is not None:
        store.wait(keys, timedelta(seconds=timeout))
    try:
        return store.multi_get(keys)
    except DistStoreError:
        if more <= 0:
            raise
    store.wait(keys, timedelta(seconds=more))
    return store.multi_get(keys)
