"""Ranks in two network namespaces, joined by a virtual cable. See `test_tcp` for machines that allow none."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from torchdist_ref.errors import ArgumentError, DistNetworkError
from torchdist_ref.stores import HashStore, TCPStore
from torchdist_ref.testing import namespaces, run
from torchdist_ref.testing.backend_contract import CLAUSES
from torchdist_ref.testing.namespaces import Host
from torchdist_ref.transports.tcp import interface_address

MISSING = namespaces.missing()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
PORT = 29_500


def join(rank: int, hosts: Sequence[Host], address: str) -> None:
    """Enter this rank's host, and connect to the others through the first rank's store."""
    hosts[rank].enter()
    host = f"[{address}]" if ":" in address else address
    url = f"tcp://{host}:{PORT}"
    dist.init_process_group("ref", init_method=url, rank=rank, world_size=len(hosts), timeout=timedelta(seconds=20))


def whole_contract(rank: int, hosts: Sequence[Host], address: str) -> None:
    join(rank, hosts, address)
    for clause in CLAUSES:
        clause(rank, len(hosts))
    dist.destroy_process_group()


# Over a second: the whole contract of a backend, over sockets, with more ranks than cores.
@pytest.mark.parametrize(
    ("where", "family"),
    [
        pytest.param((0, 1), "ipv4", id="2 ranks, IPv4"),
        pytest.param((0, 1), "ipv6", id="2 ranks, IPv6", marks=pytest.mark.long),
        pytest.param((0, 0, 1, 1), "ipv6", id="2x2 ranks, IPv6", marks=pytest.mark.long),
    ],
)
def test_ref_keeps_the_contract_between_namespaces(where: tuple[int, ...], family: str) -> None:
    with namespaces.hosts(2) as pair:
        hosts = [pair[i] for i in where]
        address = getattr(pair[0], family)
        run(whole_contract, len(hosts), hosts, address, ranks="processes", init=False, timeout=60.0)


def own_address(rank: int, hosts: Sequence[Host], variable: str, names: str) -> tuple[int, str]:
    hosts[rank].enter()
    os.environ[variable] = names
    family, address = interface_address(HashStore())
    return int(family), address


@pytest.mark.parametrize("variable", ["TORCHDIST_REF_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"])
def test_the_named_interface_is_used(variable: str) -> None:
    with namespaces.hosts(2) as pair:
        found = run(own_address, 2, pair, variable, f"eth0,{namespaces.INTERFACE}", ranks="processes", init=False)
    assert found == [(socket.AF_INET, host.ipv4) for host in pair]


def connect_by_default_route(rank: int, hosts: Sequence[Host], path: str, routed: bool) -> float:
    """Connect through a file, which tells nothing of the network."""
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    hosts[rank].enter()
    assert not routed or os.system(f"ip route add default dev {namespaces.INTERFACE}") == 0
    for server in (None, "127.0.0.1", "::1", "localhost", hosts[rank].ipv4):
        outside = routed or server == hosts[rank].ipv4
        # The store of a rank 0 whose name /etc/hosts maps to its loopback.
        store: Any = SimpleNamespace(host=server)
        assert interface_address(store)[1] == (hosts[rank].ipv4 if outside else "127.0.0.1")
    timeout = timedelta(seconds=20)
    dist.init_process_group("ref", store=dist.FileStore(path, 2), rank=rank, world_size=2, timeout=timeout)
    dist.all_reduce(tensor := torch.tensor([rank + 1.0]))
    dist.destroy_process_group()
    return tensor.item()


def test_other_hosts_are_reached_by_the_default_route(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.mktemp("namespaces") / "store")
    with namespaces.hosts(2) as pair:
        found = run(connect_by_default_route, 2, pair, path, True, ranks="processes", init=False)
    assert found == [3.0, 3.0]


def test_without_a_default_route_the_loopback_is_used(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.mktemp("namespaces") / "store")
    with namespaces.hosts(2) as pair, pytest.raises(Exception) as caught:
        run(connect_by_default_route, 2, pair, path, False, ranks="processes", init=False)
    assert isinstance(caught.value.__cause__, DistNetworkError)


def address_without_ipv4(rank: int, hosts: Sequence[Host]) -> tuple[int, str]:
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    hosts[rank].enter()
    assert os.system(f"ip -4 addr flush dev {namespaces.INTERFACE}") == 0
    return own_address(rank, hosts, "TORCHDIST_REF_SOCKET_IFNAME", namespaces.INTERFACE)


def test_link_local_ipv6_addresses_are_not_used() -> None:
    # The kernel also gives every interface a link-local address (fe80), which needs a scope.
    with namespaces.hosts(2) as pair:
        found = run(address_without_ipv4, 2, pair, ranks="processes", init=False)
    assert found == [(socket.AF_INET6, host.ipv6) for host in pair]


def connect_on(rank: int, hosts: Sequence[Host], path: str, interface: str) -> float:
    """Connect through a file store, which has no address: only the interface is known."""
    hosts[rank].enter()
    os.environ["TORCHDIST_REF_SOCKET_IFNAME"] = interface
    store = dist.FileStore(path, 2)
    dist.init_process_group("ref", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.item()


def test_ranks_connect_on_the_named_interface(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.mktemp("namespaces") / "store")
    with namespaces.hosts(2) as pair:
        assert run(connect_on, 2, pair, path, namespaces.INTERFACE, ranks="processes", init=False) == [3.0, 3.0]


def test_an_interface_that_does_not_reach_the_other_host_is_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.mktemp("namespaces") / "store")
    with namespaces.hosts(2) as pair, pytest.raises(Exception) as caught:
        run(connect_on, 2, pair, path, "lo", ranks="processes", init=False)
    assert isinstance(caught.value.__cause__, DistNetworkError)
    assert "127.0.0.1" in str(caught.value.__cause__) and "TORCHDIST_REF_SOCKET_IFNAME" in str(caught.value.__cause__)


def reach(rank: int, hosts: Sequence[Host]) -> bytes:
    hosts[rank].enter()
    store = TCPStore(hosts[0].ipv4, PORT, len(hosts), rank == 0, timedelta(seconds=10))
    all_ranks = [str(r) for r in range(len(hosts))]
    store.set(f"{rank}", hosts[rank].name)
    found = b",".join(store.multi_get(all_ranks))
    store.set(f"{rank} has read", "")
    if rank == 0:
        # The store ends with this rank.
        store.wait([f"{r} has read" for r in all_ranks])
    return found


def test_three_hosts_share_one_bridge() -> None:
    with namespaces.hosts(3, bits_per_second=1e8) as all_three:
        assert run(reach, 3, all_three, ranks="processes", init=False) == [b"host 0,host 1,host 2"] * 3


@pytest.mark.parametrize("wrong", [(1, None), (251, None), (2, 0.0)])
def test_hosts_rejects_invalid_networks(wrong: tuple[int, float | None]) -> None:
    with pytest.raises(ArgumentError, match=r"count|bits_per_second"), namespaces.hosts(*wrong):
        raise AssertionError("there are none")
