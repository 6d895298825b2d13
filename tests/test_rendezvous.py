"""Rendezvous: environment, URLs and files, beside ranks of torch; and errors before any wait."""

from __future__ import annotations

import importlib
import itertools
import socket
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from tests.outcomes import NEVER
from tests.stores.store_helpers import in_child, server
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, DistNetworkError, RendezvousError
from torchdist_ref.rendezvous import register_rendezvous_handler, rendezvous
from torchdist_ref.stores import FileStore, HashStore, Store, TCPStore

# As in torch, the package's `rendezvous` is the function, and hides the module of that name.
module = importlib.import_module("torchdist_ref.rendezvous")

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
QUICK = timedelta(seconds=0.3)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def port() -> Iterator[int]:
    """Reserve a port on which no process listens."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


def join(pipe: Connection, run_rendezvous: Any, url: str, rank: int, world_size: int) -> None:
    """Run a rendezvous, exchange values with the neighbors, and send back rank and world size."""
    store, rank, world_size = next(run_rendezvous(url, rank, world_size, timeout=timedelta(seconds=20)))
    store.set(f"from {rank}", str(rank * rank + 1))
    pipe.send((type(store).__module__, rank, world_size, store.get(f"from {(rank + 1) % world_size}")))
    pipe.recv()


def join_by_environment(pipe: Connection, run_rendezvous: Any, settings: dict[str, str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        join(pipe, run_rendezvous, "env://", -1, -1)


def settings_of(rank: int, port: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@pytest.mark.parametrize("theirs", [(), (1,), (0, 2)], ids=["ours", "torch's among ours", "ours among torch's"])
@pytest.mark.parametrize("scheme", ["env", "tcp"])
def test_rendezvous_of_three_ranks_some_of_them_torchs(port: int, scheme: str, theirs: tuple[int, ...]) -> None:
    def arguments(rank: int) -> tuple[Any, ...]:
        run_rendezvous = torch.distributed.rendezvous if rank in theirs else rendezvous
        if scheme == "env":
            return join_by_environment, run_rendezvous, settings_of(rank, port)
        return join, run_rendezvous, f"tcp://127.0.0.1:{port}", rank, 3

    with in_child(*arguments(0)) as (a, _), in_child(*arguments(1)) as (b, _), in_child(*arguments(2)) as (c, _):
        found = [pipe.recv() for pipe in (a, b, c)]
    assert [each[1:] for each in found] == [(0, 3, b"2"), (1, 3, b"5"), (2, 3, b"1")]
    assert [each[0].startswith("torchdist_ref") for each in found] == [rank not in theirs for rank in range(3)]


def test_file_rendezvous_some_of_the_ranks_torchs(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/rendezvous%20file"
    with in_child(join, rendezvous, url, 0, 2) as (a, _), in_child(join, rendezvous, url, 1, 2) as (b, _):
        assert [pipe.recv()[1:] for pipe in (a, b)] == [(0, 2, b"2"), (1, 2, b"1")]
    url = f"file://{tmp_path}/other"
    with (
        in_child(join, rendezvous, url, 0, 2) as (a, _),
        in_child(join, torch.distributed.rendezvous, url, 1, 2) as (b, _),
    ):
        assert [pipe.recv()[1:] for pipe in (a, b)] == [(0, 2, b"2"), (1, 2, b"1")]
    assert (tmp_path / "rendezvous file").exists()


def test_rank_and_world_size_in_the_query(port: int) -> None:
    store, rank, world_size = next(rendezvous(f"tcp://127.0.0.1:{port}?rank=0&world_size=1"))
    assert isinstance(store, TCPStore) and (rank, world_size, store.port) == (0, 1, port)
    assert store.timeout == timedelta(minutes=30)
    store.close()


def test_arguments_override_the_environment(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    for name, value in settings_of(2, port).items():
        monkeypatch.setenv(name, value)
    store, rank, world_size = next(rendezvous("env://", 0, 1))
    assert (rank, world_size) == (0, 1)
    store.close()  # type: ignore[attr-defined]


def test_rank_0_is_a_client_of_the_agent_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with server() as (port, _):
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2))
        assert repr(store) == f"TCPStore(127.0.0.1:{port})"
        assert store.num_keys() == 1
        store.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_rank_0_says_that_it_serves_no_store_beside_the_launchers(
    elsewhere: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with server() as (port, _):
        launchers = port % 60_000 + 1 if elsewhere else port
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        monkeypatch.setenv("MASTER_PORT", str(launchers))
        for rank in range(2):
            next(rendezvous(f"tcp://127.0.0.1:{port}", rank, 2))[0].close()  # type: ignore[attr-defined]
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == elsewhere
    for text in said:
        assert f"connects to 127.0.0.1:{port} and serves no store" in text and f"port {launchers}. Pass no" in text


def test_second_rendezvous_of_one_iterator_is_refused(port: int, tmp_path: Path) -> None:
    for url in (f"tcp://127.0.0.1:{port}", f"file://{tmp_path}/meeting"):
        results = rendezvous(url, 0, 1)
        store = next(results)[0]
        with pytest.raises(RuntimeError, match=r"Unable to perform re-?rendezvous using"):
            next(results)
        store.close()  # type: ignore[attr-defined]


# What is wrong is said at once, in torch's words and more


def refused(url: str, rank: Any = -1, world_size: Any = -1, kind: Any = RendezvousError) -> str:
    with pytest.raises(kind) as caught:
        next(rendezvous(url, rank, world_size, timeout=NEVER))
    return str(caught.value)


def test_missing_environment_variables_are_named_in_torchs_order(monkeypatch: pytest.MonkeyPatch) -> None:
    start = "Error initializing torch.distributed using env:// rendezvous: environment variable"
    for name, value in settings_of(0, 29500).items():
        assert refused("env://").startswith(f"{start} {name} expected, but not set")
        monkeypatch.setenv(name, "")
        assert f"{name} expected, but not set" in refused("env://")
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
@pytest.mark.parametrize("value", ["abc", "1.5", "0x10"])
def test_malformed_environment_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    for variable, good in {**settings_of(0, 29500), name: value}.items():
        monkeypatch.setenv(variable, good)
    assert f"environment variable {name} must be an integer, got {value!r}" in refused("env://")


@pytest.mark.parametrize(("rank", "world_size"), [(3, 3), (-1, 3), (5, 1)])
def test_rank_out_of_range_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    said = f"rank {rank} is out of range: with world size {world_size}, ranks are 0 to {world_size - 1}"
    query = f"?rank={rank}&world_size={world_size}"
    for variable, value in {**settings_of(rank, 29500), "WORLD_SIZE": str(world_size)}.items():
        monkeypatch.setenv(variable, value)
    for url in ("env://", f"tcp://127.0.0.1:29500{query}", f"file:///tmp/never{query}"):
        assert said in refused(url)


@pytest.mark.parametrize("world_size", [0, -2])
def test_world_size_zero_is_refused(world_size: int) -> None:
    assert f"world size must be 1 or more, got {world_size}" in refused("tcp://127.0.0.1:29500", 0, world_size)


@pytest.mark.parametrize(
    ("url", "rank", "world_size", "said"),
    [
        ("tcp://127.0.0.1", 0, 1, "using tcp:// rendezvous: port number missing"),
        ("tcp://:29500", 0, 1, "host name missing"),
        ("tcp://127.0.0.1:29500", -1, 1, "using tcp:// rendezvous: rank parameter missing"),
        ("tcp://127.0.0.1:29500", 0, -1, "using tcp:// rendezvous: world size parameter missing"),
        ("tcp://127.0.0.1:29500?rank=x&world_size=1", -1, -1, "rank in the URL must be an integer, got 'x'"),
        ("tcp://127.0.0.1:0", 0, 1, "port must have value from 1 to 65535 but was 0"),
        ("tcp://127.0.0.1:99999", 0, 1, "port in '127.0.0.1:99999' is wrong"),
        ("file://", 0, 1, "using file:// rendezvous: path missing"),
        ("file:///tmp/never", -1, 1, "using file:// rendezvous: rank parameter missing"),
        ("file:///tmp/never", 0, -1, "using file:// rendezvous: world size parameter missing"),
    ],
)
def test_incomplete_urls_are_refused(url: str, rank: int, world_size: int, said: str) -> None:
    assert said in refused(url, rank, world_size)


def test_errors_have_torchs_types() -> None:
    text = refused("tcp://127.0.0.1:29500?rank=0", 0, 1, kind=AssertionError)
    assert "has node-specific arguments(rank, world_size) already." in text
    assert "No rendezvous handler for foo://" in refused("foo://x", 0, 1, kind=RuntimeError)
    assert "`url` must be a string" in refused(7, kind=RuntimeError)  # type: ignore[arg-type]
    assert "`rank` must be an integer" in refused("env://", "0", kind=RuntimeError)
    assert "`world_size` must be an integer" in refused("env://", 0, 1.5, kind=RuntimeError)
    assert issubclass(RendezvousError, ArgumentError) and issubclass(RendezvousError, ValueError)


def test_a_port_in_use_names_host_and_port(port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{number}" in refused(f"tcp://127.0.0.1:{number}", 0, 1, DistNetworkError)


def test_rendezvous_without_a_server_ends_at_the_timeout(port: int, request: pytest.FixtureRequest) -> None:
    with pytest.raises(DistNetworkError, match=rf"no connection to 127.0.0.1:{port} within 0.3 s"):
        next(rendezvous(f"tcp://127.0.0.1:{port}", 1, 2, timeout=QUICK))
    request.getfixturevalue("clients_with_long_timeouts")
    with pytest.raises(RuntimeError, match="1/2 clients joined"):
        next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=QUICK))


# Handlers of one's own, and files named the Windows way


def test_registered_handler() -> None:
    seen: list[Any] = []

    def handler(url: str, **options: Any) -> Iterator[tuple[Store, int, int]]:
        seen.append((url, options))
        for turn in itertools.count():
            yield HashStore(), turn, 9

    register_rendezvous_handler("own", handler)
    results = rendezvous("own://place?colour=red", 4, 9, timeout=QUICK)
    assert [next(results)[1:] for _ in range(2)] == [(0, 9), (1, 9)]
    assert seen == [("own://place?colour=red&rank=4&world_size=9", {"timeout": QUICK})]
    with pytest.raises(RuntimeError, match="own:// already registered"):
        register_rendezvous_handler("own", handler)


@pytest.mark.parametrize("host", ["239.1.2.3", "[ff02::1]"])
def test_multicast_address_is_refused(host: str) -> None:
    for rank in (0, 1):
        with pytest.raises(RendezvousError, match=r"multicast address.*rank 0's host"):
            next(rendezvous(f"tcp://{host}:29500", rank, 2, timeout=NEVER))


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:///c:/tmp/meeting", "c:/tmp/meeting"),
        ("file:///D:\\tmp\\meeting", "D:\\tmp\\meeting"),
        ("file://machine/share/meeting", "//machine/share/meeting"),
        ("file:////machine/share/meeting", "//machine/share/meeting"),
        ("file://localhost/tmp/meeting", "/tmp/meeting"),
        ("file:///tmp/a%20b", "/tmp/a b"),
    ],
)
def test_forms_of_file_names(monkeypatch: pytest.MonkeyPatch, url: str, path: str) -> None:
    created: list[tuple[str, int]] = []

    class Noted(HashStore):
        def __init__(self, name: str, world_size: int) -> None:
            super().__init__()
            created.append((name, world_size))

    monkeypatch.setattr(module, "FileStore", Noted)
    store, rank, world_size = next(rendezvous(url, 1, 2, timeout=QUICK))
    assert created == [(path, 2)] and (rank, world_size) == (1, 2) and store.timeout == QUICK
    assert FileStore is not Noted


@pytest.mark.parametrize(
    ("scheme", "handler", "named"), [(5, print, "'scheme'.* got 5"), ("x", None, "'handler'.* got None")]
)
def test_a_handler_that_cannot_be_called_is_refused(scheme: Any, handler: Any, named: str) -> None:
    with pytest.raises(ArgumentTypeError, match=rf"register_rendezvous_handler: argument {named}"):
        register_rendezvous_handler(scheme, handler)
