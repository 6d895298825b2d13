"""Addresses of a store in all forms in which users write them, on hosts whose /etc/hosts says various things."""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

import torchdist_ref as dist
from tests import private_mounts
from torchdist_ref.elastic.agent_settings import agent_settings
from torchdist_ref.elastic.roster import Rules
from torchdist_ref.errors import ArgumentError, DistNetworkError, RendezvousError
from torchdist_ref.launcher import LaunchConfig, elastic_launch
from torchdist_ref.launcher.options import config_from_args, parse_args
from torchdist_ref.rendezvous import rendezvous
from torchdist_ref.stores import TCPStore, sockets
from torchdist_ref.stores.addresses import parse_endpoint, parse_host
from torchdist_ref.testing import fill, namespaces, run
from torchdist_ref.testing.namespaces import Host
from torchdist_ref.timeouts import Deadline

MISSING = namespaces.missing() or private_mounts.missing()
needs_namespaces = pytest.mark.skipif(bool(MISSING), reason=MISSING)
SOON = timedelta(seconds=20)
ENDPOINTS = ["node0", "node0:1", " node0:1 ", "10.0.0.5:1", "[::1]", "[fd77::1]:400", "fd77::1:9"]
WRONG_ENDPOINTS = ["node0:", "node0:x", "node0:65536", ":1", "no de:1", "tcp://node0:1", "node0:-1", "no/de:1"]


@pytest.mark.parametrize("text", ENDPOINTS)
def test_endpoints_are_read_as_torch_reads_them(text: str) -> None:
    assert parse_endpoint(text, 29400) == parse_rendezvous_endpoint(text, 29400)


@pytest.mark.parametrize("text", WRONG_ENDPOINTS)
def test_endpoints_that_torch_refuses_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_rendezvous_endpoint(text, 29400)
    with pytest.raises(ArgumentError, match=re.escape(f"--rdzv-endpoint {text!r}: ")):
        agent_settings(Rules("job", 2, 2), text, 1)
    expected = f"config.rdzv_endpoint' must be HOST:PORT with a port from 0 to 65535, got {text!r}"
    with pytest.raises(ArgumentError, match=re.escape(expected)):
        elastic_launch(LaunchConfig(1, 1, 1, rdzv_endpoint=text), os.getenv)("RANK")
    with pytest.raises(SystemExit):
        parse_args(["--rdzv-endpoint", text, __file__])


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("[fe80::1%25eth0]", "fe80::1%eth0"),
        (" [ ::1 ] ", "::1"),
        ("\t127.0.0.1\n", "127.0.0.1"),
        ("::ffff:127.0.0.1", "127.0.0.1"),
        ("bücher.example", "bücher.example"),
        ("under_score.", "under_score."),
    ],
)
def test_a_host_is_read_without_what_surrounds_it(text: str, host: str) -> None:
    assert parse_host(text) == host
    assert parse_endpoint(f"{text.strip()}:1", 0) == (host, 1)
    assert agent_settings(Rules("job", 2, 2), f"{text}:1", 1, local_addr=text).local_addr == host


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("127.0.0.1:29500", "leave out the port behind the host"),
        ("tcp://127.0.0.1", "leave out the scheme in front of the host"),
        ("fe80::1", r"a link-local address needs the name of this host's interface, as in fe80::1%eth0"),
        ("127.0.0.1 127.0.0.2", "neither a host name nor an IPv4 or IPv6 address"),
        ("[::1", "neither a host name nor an IPv4 or IPv6 address"),
        (" ", "it is empty"),
    ],
)
def test_a_host_that_is_none_is_refused_at_once_with_the_reason(
    text: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client once tried to resolve these until its time-out."""
    with pytest.raises(ArgumentError, match=rf"TCPStore: argument 'host_name' must be a host name.*{reason}"):
        TCPStore(text, 29500, timeout=timedelta(seconds=60))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": text, "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RendezvousError, match=rf"environment variable MASTER_ADDR must be a host name.*{reason}"):
        next(rendezvous("env://"))


@pytest.mark.parametrize(
    "url", ["tcp://[::1]:{}", "tcp:// 127.0.0.1 : {} ", "tcp://user@127.0.0.1:0{}", "tcp://::1:{}"]
)
def test_a_url_has_any_form_of_host(url: str) -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as free:
        port = free.getsockname()[1]
    found, *_ = next(rendezvous(url.format(port), 0, 1))
    assert found.port == port and found.host in ("127.0.0.1", "::1")  # type: ignore[attr-defined]
    found.close()  # type: ignore[attr-defined]


def test_the_launchers_options_have_blanks_and_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NODE_RANK", " 1 ")
    args = parse_args(["--nnodes", "2", "--master-addr", " [::1] ", "--master-port", " 029501 ", __file__])
    config, *_ = config_from_args(args)
    assert parse_endpoint(config.rdzv_endpoint, 0) == ("::1", 29501)
    assert config.rdzv_configs["rank"] == 1
    with pytest.raises(SystemExit):
        parse_args(["--master-addr", "127.0.0.1:29500", __file__])


@pytest.mark.parametrize("endpoint", ["", "localhost", "[::1]:0", " 127.0.0.1:0 "])
def test_a_launch_serves_its_store_at_the_endpoint(endpoint: str) -> None:
    """One without a port once ended with a ValueError of `int`."""
    config = LaunchConfig(1, 1, 1, rdzv_endpoint=endpoint, start_method="fork")
    found = elastic_launch(config, os.getenv)("MASTER_ADDR")
    assert found == {0: "::1" if "::1" in endpoint else "127.0.0.1"}


# Names of one host

NAMES = """
127.0.0.1 localhost
127.0.1.1 debian
::1 six
::1 both
127.0.0.1 both
192.0.2.7 partly
fd00::77 partly
127.0.1.1 partly
"""
LISTENS_ON = {
    "localhost": {"127.0.0.1"},
    "debian": {"127.0.1.1"},
    "six": {"::1"},
    "both": {"::1", "127.0.0.1"},
    "partly": {"127.0.1.1"},
    "[::1]": {"::1"},
    "127.1": {"127.0.0.1"},
    "0.0.0.0": {"0.0.0.0"},
    "::": {"::"},
    "::ffff:127.0.0.1": {"127.0.0.1"},
}


def serve_each_name(rank: int, hosts: Sequence[Host]) -> dict[str, tuple[Any, set[str], list[str]]]:
    hosts[0].enter()
    private_mounts.use_hosts_file(NAMES)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torchdist_ref.stores")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    found = {}
    for name in LISTENS_ON:
        if "[" not in name:
            # The oracle: torch's store works with all of these.
            theirs = torch.distributed.TCPStore(name, 0, is_master=True, wait_for_workers=False, timeout=SOON)
            torch.distributed.TCPStore(name, theirs.port, timeout=SOON).set("key", name)
            assert theirs.get("key") == name.encode()
        del messages[:]
        master = TCPStore(name, 0, is_master=True, timeout=SOON)
        TCPStore(name, master.port, timeout=SOON).set("key", name)
        assert master.server is not None
        listening = {str(address[0]) for address in master.server.addresses}
        found[name] = master.get("key"), listening, [text for text in messages if "only this host reaches" in text]
        master.close()
    return found


@needs_namespaces
def test_a_store_listens_on_the_addresses_of_each_name() -> None:
    """A name that /etc/hosts maps to loopback, Debian's default, was once an error; torch's store works with it."""
    with namespaces.hosts(2) as pair:
        [found] = run(serve_each_name, 1, pair, ranks="processes", init=False)
    assert {name: listening for name, (_, listening, _) in found.items()} == LISTENS_ON
    assert all(value == name.encode() for name, (value, _, _) in found.items())
    assert [name for name, (_, _, said) in found.items() if said] == ["debian", "six", "both", "partly", "127.1"]


# Names of two hosts


def reduce_at(
    rank: int, hosts: Sequence[Host], addresses: Sequence[str], names: Sequence[str], seconds: float
) -> list[float] | str:
    """Reduce by a store at the address that this rank has for rank 0, with a hosts file of this rank."""
    hosts[rank].enter()
    private_mounts.use_hosts_file(names[rank])
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR=addresses[rank], MASTER_PORT=" 029500 ")
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    if "%" in addresses[rank]:
        interface = namespaces.INTERFACE
        add = f"ip -6 addr add fe80::a{rank}/64 dev {interface} nodad".split()
        subprocess.run(["ip", "-4", "addr", "flush", "dev", interface], check=True)
        subprocess.run(add, check=True)
    try:
        dist.init_process_group("ref", timeout=timedelta(seconds=seconds))
    except dist.DistError as error:
        return f"{type(error).__name__}: {error}"
    value = fill(rank, (1000,), torch.float32)
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value.tolist()  # type: ignore[no-any-return]


WORKING = {
    "brackets and blanks": (" [fd77::1] ", "", ""),
    "loopback and an interface": ("node0", "127.0.1.1 node0\n10.77.0.1 node0", "10.77.0.1 node0"),
    "an address without a host": ("node0", "10.77.0.1 node0\nfd77::1 node0", "10.77.0.99 node0\nfd77::1 node0"),
    "an address without a route": ("node0", "10.77.0.1 node0", "192.0.2.9 node0\n10.77.0.1 node0"),
    "a scope": ("fe80::a0%veth0", "", ""),
}


@needs_namespaces
@pytest.mark.parametrize("case", WORKING)
def test_ranks_of_two_hosts_meet(case: str) -> None:
    address, *names = WORKING[case]
    with namespaces.hosts(2) as pair:
        found = run(reduce_at, 2, pair, [address] * 2, names, 20.0, ranks="processes", init=False)
    assert found == [(fill(0, (1000,), torch.float32) + fill(1, (1000,), torch.float32)).tolist()] * 2


@needs_namespaces
@pytest.mark.parametrize("wrong", [0, 1])
def test_a_name_that_is_loopback_on_one_of_two_hosts_is_said_there_and_to_the_other(wrong: int) -> None:
    """A second: both wait for their time-out."""
    names = ["10.77.0.1 node0", "10.77.0.1 node0"]
    names[wrong] = "127.0.1.1 node0"
    with namespaces.hosts(2) as pair:
        first, second = run(reduce_at, 2, pair, ["node0"] * 2, names, 1.0, ranks="processes", init=False)
    assert first.startswith("RankStalledError") and second.startswith("DistNetworkError")
    assert ("The store listens on 127.0.1.1, which only this host reaches" in first) is (wrong == 0)
    if wrong:
        assert "node0 is 127.0.1.1 here, which is this host itself: if rank 0 runs on another host" in second
    else:
        assert "node0 is 10.77.0.1 here. If it is a loopback address on rank 0's host" in second


def on_ipv6_alone(rank: int, hosts: Sequence[Host]) -> str:
    hosts[0].enter()
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    subprocess.run("ip -4 addr flush dev lo".split(), check=True)
    found = elastic_launch(LaunchConfig(1, 1, 1, start_method="fork"), os.getenv)("MASTER_ADDR")
    with pytest.raises(DistNetworkError, match=r"127\.0\.0\.1, an address that no interface of this host has"):
        TCPStore("127.0.0.1", 0, is_master=True, timeout=SOON)
    return found[0]  # type: ignore[no-any-return]


@needs_namespaces
def test_a_launch_on_a_host_with_ipv6_alone() -> None:
    with namespaces.hosts(2) as pair:
        assert run(on_ipv6_alone, 1, pair, ranks="processes", init=False) == ["::1"]


def launch_at(rank: int, hosts: Sequence[Host], names: Sequence[str]) -> tuple[Any, str]:
    hosts[rank].enter()
    private_mounts.use_hosts_file(names[rank])
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torchdist_ref.launcher").addHandler(handler)
    endpoint, options = " node0:029411 ", {"join_timeout": 20}
    config = LaunchConfig(2, 2, 1, None, "7", "r", endpoint, "c10d", options, start_method="fork")
    return elastic_launch(config, os.getenv)("MASTER_ADDR"), " ".join(messages)


@needs_namespaces
def test_launchers_meet_at_a_name_that_is_loopback_and_an_interface() -> None:
    names = ["127.0.1.1 node0\n10.77.0.1 node0", "10.77.0.1 node0"]
    with namespaces.hosts(2) as pair:
        found = run(launch_at, 2, pair, names, ranks="processes", init=False)
    # Ranks follow the order of joining.
    assert sorted(rank for each, _ in found for rank in each) == [0, 1]
    assert all(list(each.values()) == ["node0"] for each, _ in found)
    # The others reach the first host, so only the warning about the job token is left.
    assert "any program that reaches node0 can join" in found[0][1] and "loopback" not in found[0][1]


# Attempts to connect


def silent() -> socket.socket:
    """Return a listening socket whose queue is full, so that further attempts to connect get no response."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    for _ in range(3):
        full = socket.socket()
        full.setblocking(False)
        full.connect_ex(listener.getsockname())
        FILLERS.append(full)
    return listener


FILLERS: list[socket.socket] = []


def test_an_address_that_does_not_respond_does_not_delay_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it used up its share of the time-out, half of 30 minutes for two addresses."""
    monkeypatch.setattr(sockets, "_SILENT_SECONDS", 0.1)
    with silent() as first, socket.create_server(("127.0.0.1", 0)) as second, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        addresses = [(socket.AF_INET, each.getsockname()) for each in (first, closed, second)]
        with sockets.connect(addresses, Deadline(10.0)) as found:
            assert found.getpeername() == second.getsockname()
        with pytest.raises(ConnectionRefusedError, match=r"127\.0\.0\.1: no response.*; 127\.0\.0\.1: ECONNREFUSED"):
            sockets.connect(addresses[:2], Deadline(10.0))
        with pytest.raises(TimeoutError, match="no response"):
            sockets.connect(addresses[:1], Deadline(0.1))
    while FILLERS:
        FILLERS.pop().close()
