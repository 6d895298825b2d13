"""Ports that tests reserve are theirs alone."""

from __future__ import annotations

import socket

import pytest

import torchdist_ref as dist
from tests import ports
from torchdist_ref.testing import run


def test_a_reserved_port_is_free_and_none_of_the_kernels() -> None:
    port = ports.reserve_port()
    others = ports.PORTS.difference(ports.given_by_kernel())
    assert port in (others or ports.PORTS)
    socket.create_server(("127.0.0.1", port)).close()


def test_processes_reserve_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    # No other test reserves these.
    four = list(range(9_000, 9_004))
    monkeypatch.setattr(ports, "PORTS", frozenset(four))

    def reserve(rank: int) -> list[int]:
        mine = [ports.reserve_port(), ports.reserve_port()]
        ports_of_all: list[list[int] | None] = [None, None]
        dist.all_gather_object(ports_of_all, mine)
        return mine

    found = run(reserve, 2, ranks="processes")
    assert sorted(found[0] + found[1]) == four


def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    free = ports.reserve_port()
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(ports, "PORTS", frozenset([server.getsockname()[1], free]))
        with pytest.raises(AssertionError, match="no port is free"):
            ports.reserve_port()
