"""Rendezvous: from a URL or the environment to a store, a rank and a world size.

``env://`` reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which launchers set; `processes.job_environment` derives
those that mpiexec or Slurm do not set. ``tcp://host:port`` and ``file:///path`` take rank and world size from the
arguments or the URL's query. Rank 0 starts the server of the store and all others connect to it. If
TORCHELASTIC_USE_AGENT_STORE is "True", the launcher runs the server and all ranks connect. A wrong rank, world size,
port or variable is an error before any wait.

Do not add a scheme that torch does not have: register a handler with `register_rendezvous_handler` instead.
"""

from __future__ import annotations

import ipaddress
import logging
import operator
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from types import ModuleType
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from torchdist_ref.errors import ArgumentTypeError, DistNetworkError, RendezvousError, explain, indexed
from torchdist_ref.processes.identity import simulated_place
from torchdist_ref.processes.job_environment import derived
from torchdist_ref.stores import FileStore, Store, TCPStore
from torchdist_ref.stores.addresses import parse_endpoint, parse_host
from torchdist_ref.timeouts import GROUP_TIMEOUT

logger = logging.getLogger("torchdist_ref.stores")

RendezvousResult = Iterator[tuple[Store, int, int]]
Handler = Callable[..., RendezvousResult]

_NO_PORT = -1
WINDOWS_DRIVE = re.compile(r"^/?([A-Za-z]:)[/\\]")

handlers: dict[str, Handler] = {}

__all__ = ["register_rendezvous_handler", "rendezvous"]


def register_rendezvous_handler(scheme: str, handler: Handler) -> None:
    """Register a handler for the URLs of a scheme.

    Args:
        scheme: text before ``://``.
        handler: function of the URL (rank and world size in its query) and the keyword arguments of `rendezvous`; it
            returns an iterator of (store, rank, world_size), and is usually a generator.

    Raises:
        RuntimeError: the scheme has a handler already.

    >>> from torchdist_ref.rendezvous import register_rendezvous_handler, rendezvous
    >>> from torchdist_ref.stores import HashStore
    >>> def alone(url, **options):
    ...     yield HashStore(), 0, 1
    >>> register_rendezvous_handler("alone", alone)
    >>> next(rendezvous("alone://"))
    (HashStore(), 0, 1)
    """
    if not isinstance(scheme, str):
        raise ArgumentTypeError(explain("register_rendezvous_handler", "scheme", "a str", scheme))
    if not callable(handler):
        raise ArgumentTypeError(explain("register_rendezvous_handler", "handler", "a function", handler))
    if scheme in handlers:
        raise indexed(RuntimeError(f"Rendezvous handler for {scheme}:// already registered; choose another scheme."))
    handlers[scheme] = handler


def rendezvous(url: str, rank: int = -1, world_size: int = -1, **options: Any) -> RendezvousResult:
    """Find the other ranks through a store.

    Args:
        url: ``env://``, ``tcp://host:port``, ``file:///path``, or a registered scheme.
        rank: rank of this process; -1 if the URL or the environment has it.
        world_size: number of ranks; -1 if the URL or the environment has it.
        options: passed to the handler. The built-in ones accept `timeout` (a timedelta, 30 minutes by default) and
            `wait_for_workers` (by default, rank 0 waits until all ranks have connected to its store), and those of TCP
            `serve` (by default, rank 0 runs the server unless a launcher does).

    Returns:
        An iterator whose first item is (store, rank, world_size).

    Raises:
        RendezvousError: rank, world size, URL or a variable is missing or wrong.
        DistNetworkError: the port is in use, the name does not resolve, or rank 0 does not respond.
        RuntimeError: the scheme has no handler.
    """
    _check_kinds(url, rank, world_size)
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise _wrong(url.partition(":")[0], f"{url!r} is not a URL: {error}") from None
    query = _query(parts)
    if (rank != -1 or world_size != -1) and query.keys() & {"rank", "world_size"}:
        raise RepeatedArgumentError(
            f"The url: {url} has node-specific arguments(rank, world_size) already. Give them in one place only."
        )
    if parts.scheme not in handlers:
        known = ", ".join(f"{scheme}://" for scheme in sorted(handlers))
        raise indexed(RuntimeError(f"No rendezvous handler for {parts.scheme}:// (in {url!r}). There are: {known}."))
    extra = {"rank": rank, "world_size": world_size}
    full = _with_query(url, parts, {**query, **{name: str(value) for name, value in extra.items() if value != -1}})
    return handlers[parts.scheme](full, **options)


class RepeatedArgumentError(RendezvousError, AssertionError):
    """Rank or world size are in the URL and in the arguments. torch raises an AssertionError."""


def _check_kinds(url: str, rank: int, world_size: int) -> None:
    if not isinstance(url, str):
        raise UrlTypeError(f"rendezvous: `url` must be a string. {type(url)}: {url!r}")
    for name, value in (("rank", rank), ("world_size", world_size)):
        try:
            operator.index(value)
        except TypeError:
            raise UrlTypeError(f"rendezvous: `{name}` must be an integer. {value!r}") from None


class UrlTypeError(ArgumentTypeError, RuntimeError):
    """An argument of `rendezvous` has a wrong type. torch raises a RuntimeError."""


def _query(parts: SplitResult) -> dict[str, str]:
    return dict(parse_qsl(parts.query, keep_blank_values=True))


def _with_query(url: str, parts: SplitResult, query: Mapping[str, str]) -> str:
    # Not urlunsplit: it drops the slashes of "env://" and of file URLs with no host.
    bare = url.partition("#")[0].partition("?")[0]
    text = "&".join(f"{name}={value}" for name, value in query.items())
    return f"{bare}?{text}" if text else bare


# Shared by all handlers


def _wrong(scheme: str, problem: str) -> RendezvousError:
    return RendezvousError(f"Error initializing torch.distributed using {scheme}:// rendezvous: {problem}")


def _integer(scheme: str, name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise _wrong(scheme, f"{name} must be an integer, got {text!r}") from None


def _check_rank(scheme: str, rank: int, world_size: int) -> tuple[int, int]:
    if world_size < 1:
        raise _wrong(scheme, f"world size must be 1 or more, got {world_size}")
    if not 0 <= rank < world_size:
        raise _wrong(
            scheme, f"rank {rank} is out of range: with world size {world_size}, ranks are 0 to {world_size - 1}"
        )
    return rank, world_size


def _rank_from_query(scheme: str, query: Mapping[str, str]) -> tuple[int, int]:
    if "rank" not in query:
        raise _wrong(scheme, "rank parameter missing. Pass rank=, or add ?rank=...&world_size=... to the URL")
    if "world_size" not in query:
        raise _wrong(scheme, "world size parameter missing. Pass world_size=, or add &world_size=... to the URL")
    rank, size = (_integer(scheme, f"{name} in the URL", query[name]) for name in ("rank", "world_size"))
    return _check_rank(scheme, rank, size)


def _make_tcp_store(
    scheme: str,
    host: str,
    port: int,
    rank: int,
    world_size: int,
    timeout: timedelta,
    wait_for_workers: bool,
    serve: bool,
) -> TCPStore:
    if not 0 < port < 2**16:
        hint = ". The system would choose the port, and the other ranks could not know it" if port == 0 else ""
        raise _wrong(scheme, f"port must have value from 1 to 65535 but was {port}{hint}")
    serves = serve and rank == 0
    if serves and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        serves = False
        if scheme == "tcp":
            _warn_if_beside_the_launchers(host, port)
    try:
        return TCPStore(host, port, world_size, serves, timeout, wait_for_workers, multi_tenant=serves)
    except DistNetworkError:
        beside_torchs = serves and simulated_place.get() is None
        shared = _store_of_torchs_server(host, port, timeout) if beside_torchs else None
        if shared is None:
            raise
    store = TCPStore(host, port, world_size, False, timeout, wait_for_workers)
    store.keeps_alive = shared
    return store


def _store_of_torchs_server(host: str, port: int, timeout: timedelta) -> Any:
    """Return a store of torch's on a server that torch runs in this process at this port; None if there is none.

    torch's RPC starts one at MASTER_PORT, and all stores of torch's in a process share it.
    """
    torchs = sys.modules.get("torch.distributed")
    try:
        options = {"is_master": True, "timeout": timeout, "wait_for_workers": False, "multi_tenant": True}
        return None if torchs is None else torchs.TCPStore(host, port, **options)
    except RuntimeError:
        return None


def _warn_if_beside_the_launchers(host: str, port: int) -> None:
    """Tell the user that no rank serves a store at an address where the launcher serves none either."""
    launchers = os.environ.get("MASTER_PORT") or str(port)
    if launchers != str(port):
        logger.warning(
            "rendezvous: rank 0 connects to %s:%d and serves no store there, as TORCHELASTIC_USE_AGENT_STORE is True: "
            "the launcher serves one at MASTER_ADDR:MASTER_PORT, port %s. Pass no init_method, and ranks use that one.",
            host,
            port,
            launchers,
        )


# The handlers


def _tcp(
    url: str, timeout: timedelta = GROUP_TIMEOUT, wait_for_workers: bool = True, serve: bool = True, **_: Any
) -> RendezvousResult:
    parts = urlsplit(url)
    host, port = _endpoint(parts)
    if _is_multicast(host):
        raise _wrong("tcp", f"{host} is a multicast address. Use an address of rank 0's host")
    rank, world_size = _rank_from_query("tcp", _query(parts))
    store = _make_tcp_store("tcp", host, port, rank, world_size, timeout, wait_for_workers, serve)
    yield store, rank, world_size
    raise indexed(RuntimeError("Unable to perform re-rendezvous using tcp:// method"))


def _is_multicast(host: str) -> bool:
    # The first versions of torch supported these; its documentation lists them as unsupported now.
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_multicast
    except ValueError:
        return False


def _endpoint(parts: SplitResult) -> tuple[str, int]:
    """Return host and port of a URL."""
    text = parts.netloc.rpartition("@")[2]
    if text[:1] in ("", ":") and text.count(":") < 2:
        raise _wrong("tcp", f"host name missing in {parts.geturl()!r}")
    try:
        host, port = parse_endpoint(text, _NO_PORT)
    except ValueError as error:
        raise _wrong("tcp", f"host or port in {text!r} is wrong: {error}") from None
    if port == _NO_PORT:
        raise _wrong("tcp", f"port number missing in {text!r}; write tcp://host:port")
    return host, port


def _env(
    url: str, timeout: timedelta = GROUP_TIMEOUT, wait_for_workers: bool = True, serve: bool = True, **_: Any
) -> RendezvousResult:
    query = _query(urlsplit(url))
    rank, world_size = (_from_query_or_env(query, name) for name in ("rank", "world_size"))
    _check_rank("env", rank, world_size)
    given = _variable("MASTER_ADDR")
    try:
        host = parse_host(given)
    except ValueError as error:
        expected = "environment variable MASTER_ADDR must be a host name or an address"
        raise _wrong("env", f"{expected}, got {given!r}: {error}") from None
    port = _integer("env", "environment variable MASTER_PORT", _variable("MASTER_PORT"))
    yield _make_tcp_store("env", host, port, rank, world_size, timeout, wait_for_workers, serve), rank, world_size
    raise indexed(RuntimeError("Unable to perform re-rendezvous using env:// method"))


def _from_query_or_env(query: Mapping[str, str], name: str) -> int:
    if name in query:
        return _integer("env", name, query[name])
    return _integer("env", f"environment variable {name.upper()}", _variable(name.upper()))


def _variable(name: str) -> str:
    value = os.environ.get(name) or derived(os.environ).get(name)
    if not value:
        raise _wrong(
            "env",
            f"environment variable {name} expected, but not set. A launcher sets it (python -m torchdist_ref.launch "
            f"--nproc-per-node N script.py); by hand, set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
        )
    return value


def _file(url: str, timeout: timedelta = GROUP_TIMEOUT, **_: Any) -> RendezvousResult:
    parts = urlsplit(url)
    path = _path_of(parts)
    if not path:
        raise _wrong("file", f"path missing in {url!r}; write file:///path/to/a/new/file")
    rank, world_size = _rank_from_query("file", _query(parts))
    store = FileStore(path, world_size)
    store.set_timeout(timeout)
    yield store, rank, world_size
    raise indexed(RuntimeError("Unable to perform rerendezvous using file:// method"))


def _path_of(parts: SplitResult) -> str:
    # A drive (file:///C:/tmp/f) loses the slash in front, a share (file://host/share/f) keeps its host.
    path = unquote(parts.path)
    if WINDOWS_DRIVE.match(path):
        return path.removeprefix("/")
    return f"//{parts.netloc}{path}" if parts.netloc not in ("", "localhost") else path


register_rendezvous_handler("tcp", _tcp)
register_rendezvous_handler("env", _env)
register_rendezvous_handler("file", _file)


class _CallableModule(ModuleType):
    """Module that can be called: `torchdist_ref.rendezvous` is the module, and the function of users of torch."""

    __call__ = staticmethod(rendezvous)


sys.modules[__name__].__class__ = _CallableModule
