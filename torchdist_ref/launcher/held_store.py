"""The store through which the ranks of one job meet, held by the process that started them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torchdist_ref.stores import TCPStore

ADDRESS = "127.0.0.1"


@contextlib.contextmanager
def held_store(port: int) -> Iterator[int]:
    """Serve the ranks' store from before the first starts until after the last ends, so that no port is raced for.

    Args:
        port: Where; 0 takes a free one.

    Yields:
        The port.
    """
    store = TCPStore(ADDRESS, port, is_master=True, wait_for_workers=False)
    try:
        yield store.port
    finally:
        store.close()
