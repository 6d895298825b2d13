"""Places where ranks meet: threads of one process, processes of one host, hosts on a network."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from datetime import timedelta

from torchdist_ref.errors import MismatchError, RankStalledError, StoreTimeoutError
from torchdist_ref.stores import PrefixStore, Store
from torchdist_ref.transports import shared_memory, tcp, threads
from torchdist_ref.transports.base import Link

__all__ = ["Link", "connect", "refuse_to_meet", "share_a_host"]


_REFUSAL = b"!"
log = logging.getLogger("torchdist_ref.transports")


def connect(store: Store, rank: int, members: Sequence[int], name: str, timeout: float) -> Link:
    """Find out where the ranks are, and make the link that fits.

    Every rank publishes its host and process; all read all, so all choose alike: threads where the
    processes are one, shared memory where the hosts are one.

    Raises:
        UnsupportedError: Shared memory is not available on this platform.
        DistNetworkError: Ranks of several hosts can't reach each other.
        RankStalledError: A rank did not come in time.
    """
    meeting = PrefixStore("link", store)
    places = _places(meeting, rank, len(members), timeout)
    if len(set(places)) == 1:
        return threads.connect(meeting, rank, members, name, timeout)
    hosts = [host for host, _ in places]
    if len(set(hosts)) > 1:
        if rank == 0:
            log.info("group %r spans %s: shared memory within each, TCP between them", name, _spans(set(hosts)))
        return tcp.connect(meeting, rank, members, name, timeout, hosts)
    return shared_memory.connect(meeting, rank, members, name, timeout)


def _spans(hosts: set[bytes]) -> str:
    machines = {host.partition(b"/")[0] for host in hosts}
    one = " on one machine (containers, say), which cannot share memory" if len(machines) == 1 else ""
    return f"{len(hosts)} {'sets of pid, ipc and user namespaces' if one else 'hosts'}{one}"


def share_a_host(store: Store, rank: int, size: int) -> bool:
    """Whether all ranks of a group can share memory. Every rank asks; all get the same answer."""
    return len({host for host, _ in _places(PrefixStore("choice", store), rank, size)}) == 1


def refuse_to_meet(store: Store, rank: int, reason: str) -> None:
    """Tell the members that wait for this rank in `connect` that it will not come."""
    PrefixStore("link", store).set(f"place/{rank}", _REFUSAL + reason.encode())


def _places(store: Store, rank: int, size: int, timeout: float | None = None) -> list[tuple[bytes, bytes]]:
    """Host and process of every rank, as soon as all have said."""
    store.set(f"place/{rank}", f"{shared_memory.host_identity()}|{os.getpid()}".encode())
    keys = [f"place/{r}" for r in range(size)]
    try:
        store.wait(keys) if timeout is None else store.wait(keys, timedelta(seconds=timeout))
    except StoreTimeoutError as error:
        absent = ", ".join(str(r) for r, key in enumerate(keys) if not store.check([key]))
        raise RankStalledError(
            f"init_process_group or new_group on rank {rank}: group ranks {absent} of {size} did not come in time. "
            f"Every member has to make the group."
        ) from error
    answers = store.multi_get(keys)
    for answer in answers:
        if answer.startswith(_REFUSAL):
            raise MismatchError(answer.removeprefix(_REFUSAL).decode())
    return [(host, process) for host, _, process in (answer.rpartition(b"|") for answer in answers)]
