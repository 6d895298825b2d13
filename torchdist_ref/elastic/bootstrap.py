"""Helpers for processes that have no group yet: the environment, ports, loggers, and agreements through a store.

Launchers and their workers use them at torch's paths, ``elastic.utils`` and below. The keys in a store
are those of torch's functions of the same names, so that processes of both can meet. No key is deleted: each prefix
serves once. Do not add anything that needs torch here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from string import Template
from typing import Any

from torchdist_ref.errors import ArgumentError, DistNetworkError, StoreTimeoutError, explain
from torchdist_ref.stores import Store, TCPStore
from torchdist_ref.stores.addresses import is_local, look_up

__all__ = [
    "barrier",
    "create_c10d_store",
    "get_all",
    "get_env_variable_or_raise",
    "get_free_port",
    "get_log_level",
    "get_logger",
    "get_socket_with_port",
    "macros",
    "store_timeout",
    "synchronize",
]

logger = logging.getLogger("torchdist_ref.elastic")

# torch's members count themselves under this key when they connect.
_CONNECTED_PREFIX = "_tcp_store/num_members"
_COUNT, _LAST = "/num_members", "/last_member"
_ARRIVED, _REPORTED = "/TRACE", "/TRACING_GATE"
# The error lists only so many missing ranks: each one costs a wait.
_MAX_MISSING_NAMED = 16


def get_env_variable_or_raise(env_name: str) -> str:
    """Return the value of an environment variable that must be set.

    Args:
        env_name: The name.

    Returns:
        The value.

    Raises:
        ArgumentError: The variable is not set.

    Example:
        >>> import os
        >>> from torchdist_ref.elastic.utils import get_env_variable_or_raise
        >>> os.environ["EXAMPLE_OF_A_VARIABLE"] = "7"
        >>> get_env_variable_or_raise("EXAMPLE_OF_A_VARIABLE")
        '7'

    Elsewhere:
        None in MPI, NCCL and JAX.
    """
    value = os.environ.get(env_name)
    if value is None:
        raise ArgumentError(
            f"Environment variable {env_name} expected, but not set. Launchers set it; see the page Environment."
        )
    return value


def get_socket_with_port() -> socket.socket:
    """Open a socket on a free port of this machine, to reserve the port while the socket is open.

    Returns:
        The listening socket, on the address of ``localhost``. Close it just before the port is used.

    Raises:
        DistNetworkError: No port could be opened.

    Example:
        >>> from torchdist_ref.elastic.utils import get_socket_with_port
        >>> with get_socket_with_port() as held:
        ...     held.getsockname()[1] > 1023
        True

    Elsewhere:
        ``MPI_Open_port`` in MPI; ``ncclGetUniqueId`` in NCCL opens a port of its own; none in JAX, whose caller chooses
        the port.
    """
    try:
        found = look_up("localhost", 0)
        family, where = next((address for address in found if is_local(address)), found[0])
        held = socket.socket(family, socket.SOCK_STREAM)
        try:
            held.bind(where)
            held.listen(0)
        except BaseException:
            held.close()
            raise
        return held
    except OSError as error:
        raise DistNetworkError(f"get_socket_with_port: no free port on localhost could be opened: {error}.") from error


class macros:
    """Macros in the arguments of a command, which a launcher replaces for each rank.

    Attributes:
        local_rank: The macro for the local rank.

    Elsewhere:
        None in MPI, NCCL and JAX. Slurm replaces ``%t`` by the rank in the names of files.
    """

    local_rank = "${local_rank}"

    @staticmethod
    def substitute(args: Iterable[Any], local_rank: str) -> list[Any]:
        """Replace the macros.

        Args:
            args: The arguments; those that are not text are not changed.
            local_rank: The text that replaces `local_rank`.

        Returns:
            The arguments of one rank.

        Example:
            >>> from torchdist_ref.elastic.utils import macros
            >>> macros.substitute(["--rank", "${local_rank}", 5, "$HOME"], "3")
            ['--rank', '3', 5, '$HOME']
        """
        return [Template(arg).safe_substitute(local_rank=local_rank) if isinstance(arg, str) else arg for arg in args]


def get_log_level() -> str:
    """Return the level of loggers if LOGLEVEL is not set.

    Returns:
        ``"WARNING"``.

    Example:
        >>> from torchdist_ref.elastic.utils.log_level import get_log_level
        >>> get_log_level()
        'WARNING'

    Elsewhere:
        None in MPI; ``NCCL_DEBUG`` in NCCL; ``JAX_LOGGING_LEVEL`` in JAX.
    """
    return "WARNING"


def get_logger(name: str | None = None) -> logging.Logger:
    """Return a logger at the level that the environment variable LOGLEVEL names.

    Args:
        name: The logger's name. Default: the name of the calling module.

    Returns:
        The logger.

    Example:
        >>> from torchdist_ref.elastic.utils.logging import get_logger
        >>> get_logger("my_launcher").name
        'my_launcher'

    Elsewhere:
        None in MPI and NCCL; JAX logs under the name ``jax``.
    """
    # The standard library's way to the caller; `inspect` would read source files.
    caller = sys._getframe(1).f_globals.get("__name__")  # noqa: SLF001
    found = logging.getLogger(name or caller)
    found.setLevel(os.environ.get("LOGLEVEL", get_log_level()))
    return found


def get_free_port() -> int:
    """Return a port of this machine that is free at the moment. It is not reserved; see `get_socket_with_port`.

    Returns:
        The port number.

    Raises:
        DistNetworkError: No port could be opened.

    Example:
        >>> from torchdist_ref.elastic.utils.distributed import get_free_port
        >>> get_free_port() > 1023
        True

    Elsewhere:
        ``MPI_Open_port`` in MPI; ``ncclGetUniqueId`` in NCCL opens a port of its own; none in JAX, whose caller chooses
        the port.
    """
    with get_socket_with_port() as held:
        port: int = held.getsockname()[1]
        return port


@contextlib.contextmanager
def store_timeout(store: Store, timeout: float) -> Iterator[None]:
    """Change a store's time-out for the duration of a block.

    Args:
        store: The store.
        timeout: The time-out in seconds.

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
    """Return the values that all processes have set, each under a prefix and its number.

    Args:
        store: The store that all processes share.
        rank: The number of this process. Number 0, which often serves the store, returns last.
        prefix: The prefix of the keys, before a number from 0.
        world_size: The number of processes.

    Returns:
        The values, in order.

    Raises:
        StoreTimeoutError: A key is not set, or a process does not read, within the store's time-out.

    Example:
        >>> from torchdist_ref.elastic.utils.store import get_all
        >>> from torchdist_ref.stores import HashStore
        >>> store = HashStore()
        >>> store.multi_set(["host0", "host1"], ["a", "b"])
        >>> get_all(store, 1, "host", 2)
        [b'a', b'b']

    Elsewhere:
        ``PMIx_Get`` of each rank's value in PMIx; none in NCCL; ``key_value_dir_get`` of JAX's coordination client,
        which is not public.
    """
    found = store.multi_get([f"{prefix}{number}" for number in range(world_size)])
    done = _arrive(store, world_size, f"{prefix}/finished")
    if rank == 0:
        store.wait([done])
    return found


def synchronize(
    store: Store, data: bytes, rank: int, world_size: int, key_prefix: str, timeout: float = 300
) -> list[bytes]:
    """Exchange data: return the data of all processes.

    Args:
        store: The store that all processes share.
        data: The data of this process.
        rank: The number of this process, from 0.
        world_size: The number of processes.
        key_prefix: The prefix of the keys.
        timeout: Time-out of the wait for the others, in seconds. Default: 300.

    Returns:
        The data of all, in order.

    Raises:
        StoreTimeoutError: A process did not arrive in time.

    Example:
        >>> from torchdist_ref.elastic.utils.store import synchronize
        >>> from torchdist_ref.stores import HashStore
        >>> synchronize(HashStore(), b"me", rank=0, world_size=1, key_prefix="who")
        [b'me']

    Elsewhere:
        ``PMIx_Fence`` with ``PMIX_COLLECT_DATA`` in PMIx; none in NCCL; ``process_allgather`` of JAX's
        ``multihost_utils``, for arrays.
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
    """Wait until every process has arrived.

    Args:
        store: The store that all processes share.
        world_size: The number of processes.
        key_prefix: The prefix of the keys; each barrier needs its own.
        barrier_timeout: Time-out in seconds. Default: 300.
        rank: The number of this process. If all processes give it, the error names the missing ones (up to 16).
        rank_tracing_decoder: Function from a rank to a name, such as that of its host. Default: the number.
        trace_timeout: Time in seconds that rank 0 waits for the others to report their arrival. Default: 10.

    Raises:
        StoreTimeoutError: A process did not arrive in time.
        ArgumentError: A decoder is given without a rank.

    Example:
        >>> from torchdist_ref.elastic.utils.store import barrier
        >>> from torchdist_ref.stores import HashStore
        >>> barrier(HashStore(), world_size=1, key_prefix="start")

    Elsewhere:
        ``PMIx_Fence`` in PMIx; none in NCCL; ``wait_at_barrier`` of JAX's coordination client, which is not public.
    """
    if rank is None and rank_tracing_decoder is not None:
        raise ArgumentError("barrier: 'rank_tracing_decoder' names ranks, so 'rank' must be given on every process.")
    with store_timeout(store, barrier_timeout):
        done = _arrive(store, world_size, key_prefix)
        try:
            store.wait([done])
        except StoreTimeoutError as error:
            missing = (
                ""
                if rank is None
                else _describe_missing(store, world_size, key_prefix, rank, trace_timeout, rank_tracing_decoder or str)
            )
            raise StoreTimeoutError(
                f"barrier {key_prefix!r}: not all {world_size} processes arrived within {barrier_timeout:g} s{missing}."
            ) from error


def _arrive(store: Store, world_size: int, prefix: str) -> str:
    """Count this process, and return the key that the last one to arrive sets."""
    if store.add(prefix + _COUNT, 1) == world_size:
        store.set(prefix + _LAST, "<val_ignored>")
    return prefix + _LAST


def _describe_missing(
    store: Store, world_size: int, prefix: str, rank: int, seconds: float, name: Callable[[int], str]
) -> str:
    """Describe the missing processes; rank 0 finds them, and the others refer to it once it has reported."""
    store.set(f"{prefix}{rank}{_ARRIVED}", "<val_ignored>")
    if rank == 0:
        missing = _missing(store, world_size, prefix, seconds)
        store.set(f"{prefix}{_REPORTED}", "<val_ignored>")
        return f"; missing: {', '.join(map(name, missing)) or 'none, one was late'} (this is rank 0)"
    try:
        store.wait([f"{prefix}{_REPORTED}"], timedelta(seconds=seconds + 1))
    except StoreTimeoutError:
        return f"; rank 0 ({name(0)}) is missing (this is rank {rank})"
    return f"; rank 0 ({name(0)}) names the missing ones (this is rank {rank})"


def _missing(store: Store, world_size: int, prefix: str, seconds: float) -> list[int]:
    """Return the ranks that have not reported their arrival."""
    found: list[int] = []
    for other in range(1, world_size):
        try:
            # All ranks have had the full time once the first missing rank has been waited for.
            store.wait([f"{prefix}{other}{_ARRIVED}"], timedelta(seconds=0.001 if found else seconds))
        except StoreTimeoutError:
            found.append(other)
        if len(found) == _MAX_MISSING_NAMED:
            break
    return found


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
    """Serve a store or connect to one, and wait until all processes have connected.

    Args:
        is_server: Whether this process serves the store.
        server_addr: The server's host.
        server_port: The server's port. With -1 the server chooses one, which is `port` of the store; with several
            processes the port must be given.
        world_size: The number of processes that will connect, including the server.
        timeout: Time-out in seconds for their connections, and for missing keys. Default: 600.
        wait_for_workers: Whether to wait until all have connected. Default: True.
        retries: Accepted for compatibility with torch: a port that the server chooses is free, so there is no retry.
        use_libuv: Accepted for compatibility with torch; there is one kind of server here.

    Returns:
        The store.

    Raises:
        ArgumentError: There is no port, and there are several processes or this one is a client.
        DistNetworkError: The port is in use, or no server responds.
        StoreTimeoutError: Not all processes connected in time.

    Example:
        >>> from torchdist_ref.elastic.utils.distributed import create_c10d_store
        >>> store = create_c10d_store(is_server=True, server_addr="127.0.0.1")
        >>> store.port > 1023
        True
        >>> store.close()

    Elsewhere:
        The PMIx server of MPI's launchers; the address ``NCCL_COMM_ID`` in NCCL; the coordinator of
        ``jax.distributed.initialize`` in JAX.
    """
    if server_port == -1 and (world_size > 1 or not is_server):
        expected = "given, since other processes have to know it"
        raise ArgumentError(explain("create_c10d_store", "server_port", expected, server_port))
    port = max(server_port, 0)
    store = TCPStore(
        server_addr, port, world_size, is_server, timeout=timedelta(seconds=timeout), wait_for_workers=wait_for_workers
    )
    if wait_for_workers:
        barrier(store, world_size, _CONNECTED_PREFIX, barrier_timeout=timeout)
    logger.info("A store at %s:%d for %d processes", server_addr, store.port, world_size)
    return store
