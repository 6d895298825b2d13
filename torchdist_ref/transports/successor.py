"""Successor of a store that has ended with its rank: another rank serves a new, empty store to the group.

Without a launcher, rank 0 serves the store of a world. When it dies, the others still have the group's memory, or its
connections. The rank that serves the new store writes the address into its row of the status table, where only members
of the group write. The others read it there. Values in the new store are sealed with the session key, as before.

Do not add a choice of the rank here: all members have to name the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from time import sleep

from torchdist_ref.errors import RankStalledError
from torchdist_ref.membership.blame import Wait
from torchdist_ref.stores import PrefixStore, Store, TCPStore
from torchdist_ref.stores.addresses import loopback_address
from torchdist_ref.stores.sealed import innermost, sealed_below
from torchdist_ref.timeouts import Deadline, found_soon
from torchdist_ref.transports.link import Link
from torchdist_ref.transports.tcp import interface_address

_POLL_SECONDS = 0.001


def succeed(link: Link, store: Store, remaining: Sequence[int], timeout: float) -> PrefixStore | None:
    """Return a new store in place of one that has ended, with the same prefixes and the same session key.

    Args:
        link: Link of the group.
        store: Store of the group, below whose prefixes a `TCPStore` has ended.
        remaining: Group ranks that go on; the first serves the new store.
        timeout: Longest duration of a wait in seconds.

    Returns:
        The store; None if the old one is not a `TCPStore`.

    Raises:
        RankDiedError: A rank that was to go on has died.
        GroupAbortedError: The rank that serves the new store has left the group.
        RankStalledError: It did not start the new store in time.
    """
    old, (sealed, path) = innermost(store), sealed_below(store)
    if not isinstance(old, TCPStore) or sealed is None:
        return None
    if link.rank == remaining[0]:
        host = loopback_address() if link.hosts is None else interface_address(store)[1]
        new = TCPStore(host, 0, is_master=True, timeout=old.timeout, wait_for_workers=False)
        link.row.store_address = f"{host} {new.port}"
        link.publish_row()
    else:
        host, port = _await_address(link, remaining, Deadline(timeout)).split()
        new = TCPStore(host, int(port), timeout=min(old.timeout, timedelta(seconds=timeout)), wait_for_workers=False)
        new.set_timeout(old.timeout)
    return PrefixStore(path.rstrip("/"), sealed.over(new))


def _await_address(link: Link, remaining: Sequence[int], deadline: Deadline) -> str:
    operation, server = "shrink_group", remaining[0]
    while not (address := link.rows[server].store_address):
        if (failure := _failure(link, remaining, operation)) is not None:
            raise failure
        if deadline.passed():
            raise RankStalledError(
                f"{operation}: rank {link.members[server]} started no store in {deadline.seconds:g} s, in place of the "
                f"one that has ended. Check where it hangs."
            )
        sleep(_POLL_SECONDS)
    return address


def _failure(link: Link, remaining: Sequence[int], operation: str) -> BaseException | None:
    """Return the error for the death of a rank that was to go on, or for the leave of the one that serves; or None."""
    if (left := link.failure_elsewhere(remaining[:1], operation, Wait.PART)) is None:
        return link.failure_elsewhere(remaining, operation, Wait.ELSEWHERE)
    # It may have left because another one has died, of which news from another host may come later.
    found_soon(lambda: link.failure_elsewhere(remaining[1:], operation, Wait.ELSEWHERE))
    return link.failure_elsewhere(remaining, operation, Wait.ELSEWHERE) or left
