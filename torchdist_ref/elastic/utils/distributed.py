"""A store for processes to meet at, and ports."""

from __future__ import annotations

import logging
from datetime import timedelta

from torchdist_ref.elastic.utils.api import get_socket_with_port
from torchdist_ref.elastic.utils.store import barrier
from torchdist_ref.errors import ArgumentError, explain
from torchdist_ref.stores import TCPStore

__all__ = ["create_c10d_store", "get_free_port", "get_socket_with_port"]

logger = logging.getLogger("torchdist_ref.elastic")

# torch's members count themselves under this name when they connect.
_MEETING = "_tcp_store/num_members"


def create_c10d_store(
    is_server: bool,
    server_addr: str,
    server_port: int = -1,
    world_size: int = 1,
    timeout: float = 600,
    wait_for_workers: bool = True,
    retries: int = 3,
    use_libuv: bool | None = None,
) -> TCPStore:
    """Serve a store, or connect to one, and wait until all have connected.

    Args:
        is_server: Whether this process serves it.
        server_addr: The server's host.
        server_port: Its port. -1 lets the server choose, which `port` of the store then tells; for several processes
            it must be given.
        world_size: How many processes will connect, the server included.
        timeout: Seconds to wait for them, and for missing keys. Default: 600.
        wait_for_workers: Whether to wait until all have connected. Default: True.
        retries: Accepted for torch's sake: a port that the server chooses is free, so nothing is tried again.
        use_libuv: Accepted for torch's sake; there is one kind of server here.

    Returns:
        The store.

    Raises:
        ArgumentError: No port, and several processes or a client.
        DistNetworkError: The port is taken, or nobody answers.
        StoreTimeoutError: Not all connected in time.

    Example:
        >>> from torchdist_ref.elastic.utils.distributed import create_c10d_store
        >>> store = create_c10d_store(is_server=True, server_addr="127.0.0.1")
        >>> store.port > 1023
        True
        >>> store.close()
    """
    if server_port == -1 and (world_size > 1 or not is_server):
        expected = "given, since other processes have to know it"
        raise ArgumentError(explain("create_c10d_store", "server_port", expected, server_port))
    wait = timedelta(seconds=timeout)
    port = max(server_port, 0)
    store = TCPStore(server_addr, port, world_size, is_server, timeout=wait, wait_for_workers=wait_for_workers)
    if wait_for_workers:
        barrier(store, world_size, _MEETING, barrier_timeout=timeout)
    logger.info("A store at %s:%d for %d processes", server_addr, store.port, world_size)
    return store


def get_free_port() -> int:
    """Find a port of this machine that nobody uses at the moment. It is not held: `get_socket_with_port` does that.

    Returns:
        The number.

    Raises:
        DistNetworkError: No port could be had.

    Example:
        >>> from torchdist_ref.elastic.utils.distributed import get_free_port
        >>> get_free_port() > 1023
        True
    """
    with get_socket_with_port() as held:
        port: int = held.getsockname()[1]
        return port
