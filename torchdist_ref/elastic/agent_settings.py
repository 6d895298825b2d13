"""Settings of one host's agent, and how the options of a launcher become settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeVar

from torchdist_ref.elastic.roster import Rules
from torchdist_ref.errors import ArgumentError
from torchdist_ref.membership.trust import job_secret
from torchdist_ref.stores.addresses import parse_endpoint, parse_host

T = TypeVar("T")
_PORT = 29400


@dataclass(frozen=True)
class AgentSettings:
    """Settings of one host's agent.

    Attributes:
        rules: Settings that are the same on all hosts.
        host: Host of the rendezvous, as all hosts reach it.
        port: Its port.
        workers: Number of workers on this host.
        node_rank: Rank of this host; -1 if the order of joining decides.
        serves: Whether this host serves the rendezvous; None if it does where `host` is its own address.
        role: Role of the workers.
        local_addr: Address of this host for the others. Default: that of its route to `host`.
        secret: Job token; empty for none.
    """

    rules: Rules
    host: str
    port: int
    workers: int
    node_rank: int = -1
    serves: bool | None = None
    role: str = "default"
    local_addr: str = ""
    secret: bytes = field(default=b"", repr=False)


def agent_settings(
    rules: Rules,
    endpoint: str,
    workers: int,
    backend: str = "c10d",
    options: Mapping[str, Any] = MappingProxyType({}),
    role: str = "default",
    local_addr: str | None = None,
) -> AgentSettings:
    """Return the settings that the options of a launcher mean.

    Args:
        rules: Name of the job, numbers of hosts and restarts; time-outs are taken from `options`.
        endpoint: ``HOST:PORT`` of the rendezvous; without a port it is 29400.
        workers: Number of workers on this host.
        backend: ``c10d``, where hosts come and go, or ``static``, where each has the rank ``rank`` of `options`.
        options: Options of the rendezvous: ``join_timeout`` (600) or, if static, ``timeout``; ``last_call_timeout``
            (30), both in seconds; ``is_host``.
        role: Role of the workers.
        local_addr: Address of this host for the others.

    Raises:
        ArgumentError: A value is wrong.
        AuthenticationError: The job token cannot be read.

    >>> found = agent_settings(Rules("job", 2, 2), "[fd77::1]:400", 4, "static", {"rank": 1, "timeout": 60})
    >>> found.host, found.port, found.node_rank, found.serves, found.rules.join_seconds
    ('fd77::1', 400, 1, False, 60.0)
    """
    if backend not in ("c10d", "static"):
        raise ArgumentError(f"--rdzv-backend {backend!r} is not available; give c10d, or static with --node-rank.")
    host, port = _parsed("--rdzv-endpoint", endpoint, lambda text: parse_endpoint(text, _PORT))
    is_static = backend == "static"
    node_rank = _number(options, "rank", 0) if is_static else -1
    join = _number(options, "timeout", 900.0) if is_static else _number(options, "join_timeout", rules.join_seconds)
    last_call = _number(options, "last_call_timeout", rules.last_call_seconds)
    is_host = options.get("is_host")
    serves = node_rank == 0 if is_static else None
    if is_host is not None:
        serves = str(is_host).lower() in ("1", "true", "t", "yes", "y")
    return AgentSettings(
        replace(rules, join_seconds=float(join), last_call_seconds=float(last_call)),
        host,
        port,
        workers,
        int(node_rank),
        serves,
        role,
        _parsed("--local-addr", local_addr, parse_host) if local_addr else "",
        job_secret(),
    )


def _parsed(option: str, text: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(text)
    except ValueError as error:
        raise ArgumentError(f"{option} {text!r}: {error}.") from None


def _number(options: Mapping[str, Any], name: str, default: float) -> float:
    try:
        return float(options.get(name, default))
    except ValueError:
        raise ArgumentError(f"--rdzv-conf {name}={options[name]!r} is not a number.") from None
