"""Successor of a store that has ended with its rank: another rank serves a new, empty store to the group.

Without a launcher, rank 0 serves the store of a world. When it dies, the others still have the group's memory, or its
connections. The rank that serves the new store writes the address into its row of the status table, where only members
of the group write. The others read it there. Values in the new store are sealed with the session key, as before.

Do not add a choice of the rank here: all members have to name the same one.
"""

from __future__ import annotations

from datetime import timedelta
from time import sleep

from torchdist_ref.errors import RankStalledError
from torchdist_ref.stores import PrefixStore, Store, TCPStore
from torchdist_ref.stores.sealed import innermost, sealed_below
from torchdist_ref.timeouts import Deadline
from torchdist_ref.transports.link import Link
from torchdist_ref.transports.tcp import interface_address

_LOOPBACK = "127.0.0.1"
_POLL_SECONDS = 0.001


def succeed(link: Link, store: Store, server: int, timeout: float) -> PrefixStore | None:
    """Return a new store in place of one that has ended, with the same prefixes and the same session key.

    Args:
        link: Link of the group.
        store: Store of the group, below whose prefixes a `TCPStore` has ended.
        server: Group rank that serves the new store.
        timeout: Longest duration of a wait in seconds.

    Returns:
        The store; None if the old one is not a `TCPStore`.

    Raises:
        RankDiedError: The rank that serves the new store has died.
        RankStalledError: It did not start the new store in time.
    """
    old, (sealed, path) = innermost(store), sealed_below(store)
    if not isinstance(old, TCPStore) or sealed is None:
        return None
    if link.rank == server:
        host = _LOOPBACK if link.hosts is None else interface_address(store)[1]
        new = TCPStore(host, 0, is_master=True, timeout=old.timeout, wait_for_workers=False)
        link.row.store_address = f"{host} {new.port}"
        link.publish_row()
    else:
        host, port = _await_address(link, server, Deadline(timeout)).split()
        new = TCPStore(host, int(port), timeout=min(old.timeout, timedelta(seconds=timeout)), wait_for_workers=False)
        new.set_timeout(old.timeout)
    return PrefixStore(path.rstrip("/"), sealed.over(new))


def _await_address(link: Link, server: int, deadline: Deadline) -> str:
    operation = "shrink_group"
    while not (address := link.rows[server].store_address):
        if (failure := link.process_failure([server], operation)) is not None:
            raise failure
        if deadline.passed():
            raise RankStalledError(
                f"{operation}: rank {link.members[server]} started no store in {deadline.seconds:g} s, in place of the "
                f"one that has ended. Check where it hangs."
            )
        sleep(_POLL_SECONDS)
    return address
