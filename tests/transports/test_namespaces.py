"""Ranks in two network namespaces: nothing but a cable between them joins the hosts. See `test_hosts` for elsewhere."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta

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


def join(rank: int, places: Sequence[Host], address: str) -> None:
    """Go to this rank's host and meet the others at the first rank's."""
    places[rank].enter()
    host = f"[{address}]" if ":" in address else address
    where = f"tcp://{host}:{PORT}"
    dist.init_process_group("ref", init_method=where, rank=rank, world_size=len(places), timeout=timedelta(seconds=20))


def whole_contract(rank: int, places: Sequence[Host], address: str) -> None:
    join(rank, places, address)
    for clause in CLAUSES:
        clause(rank, len(places))
    dist.destroy_process_group()


# Over a second: the whole contract of a backend, over sockets, with more ranks than cores.
@pytest.mark.parametrize(
    ("where", "family"),
    [((0, 1), "ipv4"), ((0, 1), "ipv6"), ((0, 0, 1, 1), "ipv6")],
    ids=["2 ranks, IPv4", "2 ranks, IPv6", "2x2 ranks, IPv6"],
)
def test_ref_keeps_the_contract_between_namespaces(where: tuple[int, ...], family: str) -> None:
    with namespaces.hosts(2) as pair:
        places = [pair[i] for i in where]
        address = getattr(pair[0], family)
        run(whole_contract, len(places), places, address, ranks="processes", init=False, timeout=60.0)


def own_address(rank: int, places: Sequence[Host], variable: str, names: str) -> tuple[int, str]:
    places[rank].enter()
    os.environ[variable] = names
    family, address = interface_address(HashStore())
    return int(family), address


@pytest.mark.parametrize("variable", ["TORCHDIST_REF_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"])
def test_the_interface_named_is_the_one_taken(variable: str) -> None:
    with namespaces.hosts(2) as pair:
        found = run(own_address, 2, pair, variable, f"eth0,{namespaces.INTERFACE}", ranks="processes", init=False)
    assert found == [(socket.AF_INET, host.ipv4) for host in pair]


def address_without_ipv4(rank: int, places: Sequence[Host]) -> tuple[int, str]:
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    places[rank].enter()
    assert os.system(f"ip -4 addr flush dev {namespaces.INTERFACE}") == 0
    return own_address(rank, places, "TORCHDIST_REF_SOCKET_IFNAME", namespaces.INTERFACE)


def test_an_interface_with_ipv6_alone_gives_the_address_that_other_hosts_can_use() -> None:
    # The kernel gives every interface an address that begins with fe80 as well, which is of no use without a scope.
    with namespaces.hosts(2) as pair:
        found = run(address_without_ipv4, 2, pair, ranks="processes", init=False)
    assert found == [(socket.AF_INET6, host.ipv6) for host in pair]


def meet_on(rank: int, places: Sequence[Host], path: str, interface: str) -> float:
    """Through a file, which tells nothing of the way: only the named interface does."""
    places[rank].enter()
    os.environ["TORCHDIST_REF_SOCKET_IFNAME"] = interface
    store = dist.FileStore(path, 2)
    dist.init_process_group("ref", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=1))
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.item()


def test_ranks_meet_on_the_interface_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.mktemp("meet") / "store")
    with namespaces.hosts(2) as pair:
        assert run(meet_on, 2, pair, path, namespaces.INTERFACE, ranks="processes", init=False) == [3.0, 3.0]


def test_an_interface_that_does_not_reach_the_other_host_is_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = str(tmp_path_factory.mktemp("meet") / "store")
    with namespaces.hosts(2) as pair, pytest.raises(Exception) as caught:
        run(meet_on, 2, pair, path, "lo", ranks="processes", init=False)
    assert isinstance(caught.value.__cause__, DistNetworkError)
    assert "127.0.0.1" in str(caught.value.__cause__) and "TORCHDIST_REF_SOCKET_IFNAME" in str(caught.value.__cause__)


def reach(rank: int, places: Sequence[Host]) -> bytes:
    places[rank].enter()
    store = TCPStore(places[0].ipv4, PORT, len(places), rank == 0, timedelta(seconds=10))
    everybody = [str(r) for r in range(len(places))]
    store.set(f"{rank}", places[rank].name)
    found = b",".join(store.multi_get(everybody))
    store.set(f"{rank} has read", "")
    if rank == 0:
        # The store ends with this rank.
        store.wait([f"{r} has read" for r in everybody])
    return found


def test_more_than_two_hosts_hang_on_one_bridge() -> None:
    with namespaces.hosts(3, bits_per_second=1e8) as all_three:
        assert run(reach, 3, all_three, ranks="processes", init=False) == [b"host 0,host 1,host 2"] * 3


@pytest.mark.parametrize("wrong", [(1, None), (251, None), (2, 0.0)])
def test_hosts_refuses_what_makes_no_network(wrong: tuple[int, float | None]) -> None:
    with pytest.raises(ArgumentError, match=r"count|bits_per_second"), namespaces.hosts(*wrong):
        raise AssertionError("there are none")
