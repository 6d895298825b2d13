"""TCPStore: the contract, torch's clients and servers, broken connections, silent servers, forks and threads."""

from __future__ import annotations

import gc
import os
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
import torch.distributed

from tests.ports import reserve_port
from tests.stores.store_helpers import LossyRelay, in_child, server, torch_tcp
from tests.stores.store_model import machine
from tests.torch_versions import needs_torch
from torchdist_ref import timeouts
from torchdist_ref.errors import ArgumentError, DistNetworkError, StoreTimeoutError
from torchdist_ref.stores import TCPStore, addresses
from torchdist_ref.stores.tcp import client as client_module
from torchdist_ref.testing.store_contract import check_store

HOST = "127.0.0.1"
"""Much less than the default time-out, and more than a busy machine takes, in seconds."""


@pytest.fixture
def master() -> Iterator[TCPStore]:
    store = TCPStore(HOST, 0, is_master=True)
    yield store
    store.close()


@pytest.fixture(scope="module")
def our_port() -> Iterator[int]:
    with server() as (port, _):
        yield port


@pytest.fixture(scope="module")
def their_port() -> Iterator[int]:
    with server(torch_tcp) as (port, _):
        yield port


class EmptiedStore:
    """A store client that starts as if on an empty store, and closes nothing but itself."""

    def __init__(self, store: Any) -> None:
        self.store = store
        for key in store.list_keys():
            store.delete_key(key)
        for key in ("a", "b", "", "a/b", "ключ"):
            while store.queue_len(key):
                store.queue_pop(key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@pytest.mark.usefixtures("clients_with_long_timeouts")
def test_store_contract() -> None:
    check_store(lambda: TCPStore(HOST, 0, is_master=True))


def test_model_of_our_client_at_our_server(our_port: int) -> None:
    machine(lambda: EmptiedStore(TCPStore(HOST, our_port))).TestCase().runTest()


def test_model_of_our_client_at_torchs_server(their_port: int) -> None:
    machine(lambda: EmptiedStore(TCPStore(HOST, their_port)), strict=False).TestCase().runTest()


def test_model_of_torchs_client_at_our_server(our_port: int) -> None:
    machine(lambda: EmptiedStore(torch_tcp(HOST, our_port)), strict=False).TestCase().runTest()


@pytest.mark.parametrize("ours_serves", [True, False])
def test_waits_of_torchs_and_our_clients_wake_each_other(our_port: int, their_port: int, ours_serves: bool) -> None:
    port = our_port if ours_serves else their_port
    ours, theirs = TCPStore(HOST, port), torch_tcp(HOST, port)
    got: list[Any] = []
    for waits, acts in ((ours, theirs), (theirs, ours)):
        key = f"late/{len(got)}"
        thread = threading.Thread(target=lambda waits=waits, key=key: got.append(waits.get(key)))
        thread.start()
        acts.set(key, "1")
        thread.join()
        thread = threading.Thread(target=lambda waits=waits, key=key: got.append(waits.queue_pop(key + "queue")))
        thread.start()
        acts.queue_push(key + "queue", "job")
        thread.join()
    assert got == [b"1", b"job"] * 2
    ours.close()


@pytest.mark.parametrize("ours_serves", [True, False])
@pytest.mark.parametrize("operation", ["get", "wait_get", "multi_get", "wait"])
def test_a_look_at_a_missing_key_ends_no_wait(
    our_port: int, their_port: int, ours_serves: bool, operation: str
) -> None:
    port = our_port if ours_serves else their_port
    waits, looks = TCPStore(HOST, port), TCPStore(HOST, port)
    key, got = f"looked for by {operation}", []

    def wait() -> None:
        if operation == "get":
            got.append(waits.get(key))
        elif operation == "wait_get":
            got.extend(waits.wait_get([key], timedelta(seconds=20)))
        elif operation == "multi_get":
            got.extend(waits.multi_get([key]))
        else:
            waits.wait([key])
            got.append(waits.get_if_present(key))

    thread = threading.Thread(target=wait)
    thread.start()
    seen = {looks.get_if_present(key) for _ in range(100)}
    looks.set(key, "here")
    thread.join()
    assert seen == {None} and got == [b"here"]
    looks.delete_key(key)
    waits.close()
    looks.close()


@needs_torch("2.13", "TCPStore.barrier")
@pytest.mark.parametrize("ours_serves", [True, False])
def test_torchs_and_our_clients_meet_at_a_barrier(our_port: int, their_port: int, ours_serves: bool) -> None:
    port = our_port if ours_serves else their_port
    ours, theirs = TCPStore(HOST, port), torch_tcp(HOST, port)
    for waits, acts in ((ours, theirs), (theirs, ours)):
        key = f"{type(waits).__module__} waits"
        thread = threading.Thread(target=lambda waits=waits, key=key: waits.barrier(key, 2))
        thread.start()
        acts.barrier(key, 2)
        thread.join()
    ours.close()


@pytest.mark.usefixtures("clients_with_long_timeouts")
@pytest.mark.parametrize("ours_serves", [True, False])
def test_clients_are_usable_after_a_timeout(our_port: int, their_port: int, ours_serves: bool) -> None:
    port = our_port if ours_serves else their_port
    for store in (TCPStore(HOST, port), torch_tcp(HOST, port)):
        with pytest.raises(RuntimeError, match=r"wait timeout after 70ms, keys: .*never"):
            store.wait(["never"], timedelta(milliseconds=70))
        store.set("k", "v")
        assert store.get("k") == b"v"
        if isinstance(store, TCPStore):
            store.close()


@needs_torch("2.13", "TCPStore.barrier, also in torch's server")
@pytest.mark.usefixtures("clients_with_long_timeouts")
@pytest.mark.parametrize("ours_serves", [True, False])
def test_clients_are_usable_after_a_timeout_of_a_barrier(our_port: int, their_port: int, ours_serves: bool) -> None:
    port = our_port if ours_serves else their_port
    for store in (TCPStore(HOST, port), torch_tcp(HOST, port)):
        with pytest.raises(RuntimeError, match="barrier timeout after 70ms"):
            store.barrier(f"few{ours_serves}{type(store).__module__}", 2, timedelta(milliseconds=70))
        store.set("k", "v")
        assert store.get("k") == b"v"
        if isinstance(store, TCPStore):
            store.close()


def join_as_worker(pipe: Connection, kind: Any, port: int) -> None:
    store = kind(HOST, port, 3)
    pipe.send(store.get("from master"))


def test_the_master_waits_for_torchs_and_our_workers() -> None:
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    with in_child(join_as_worker, TCPStore, port) as (one, _), in_child(join_as_worker, torch_tcp, port) as (two, _):
        master = TCPStore(HOST, port, 3, True, timedelta(seconds=20), master_listen_fd=listener.detach())
        master.set("from master", "hello")
        assert one.recv() == two.recv() == b"hello"
        assert master.num_keys() == 2 and master.list_keys() == ["from master"]
    master.close()


@pytest.mark.usefixtures("clients_with_long_timeouts")
def test_timeout_of_the_master_counts_the_workers() -> None:
    with pytest.raises(
        StoreTimeoutError, match=r"Timed out after 0\.2 seconds waiting for clients\. 1/3 clients joined"
    ):
        TCPStore(HOST, 0, 3, True, timedelta(seconds=0.2))


def test_get_set_and_add_are_one_round_trip(our_port: int) -> None:
    with LossyRelay(our_port) as relay:
        store = TCPStore(HOST, relay.port)
        for operation in (lambda: store.set("k", "v"), lambda: store.get("k"), lambda: store.add("n", 1)):
            before = relay.requests
            operation()
            assert relay.requests == before + 1
        store.close()


def test_nagles_algorithm_is_disabled(master: TCPStore) -> None:
    master.set("k", "v")
    mine = [each for each in _sockets() if _is_of(each, master.port)]
    assert len(mine) == 2
    assert all(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for each in mine)


def _sockets() -> list[socket.socket]:
    return [each for each in gc.get_objects() if type(each) is socket.socket and each.fileno() != -1]


def _is_of(sock: socket.socket, port: int) -> bool:
    """Whether it is one end of a connection with that port."""
    try:
        return port in (sock.getsockname()[1], sock.getpeername()[1])
    except (OSError, IndexError):
        return False


# Lost connections


def test_add_whose_response_is_lost_counts_once(our_port: int) -> None:
    with LossyRelay(our_port) as relay:
        store = TCPStore(HOST, relay.port)
        before = store.add("once", 0)
        for amount in (1, 10, 100):
            relay.lose_responses = 1
            before += amount
            assert store.add("once", amount) == before
        store.queue_push("q", "item")
        relay.lose_responses = 1
        assert store.queue_pop("q") == b"item"
        relay.lose_responses = 1
        store.append("text", "a")
        assert store.get("text") == b"a"
        assert relay.connections == 6
        store.close()


def test_wait_survives_a_broken_connection(our_port: int) -> None:
    with LossyRelay(our_port) as relay:
        store, direct = TCPStore(HOST, relay.port), TCPStore(HOST, our_port)
        got: list[bytes] = []
        thread = threading.Thread(target=lambda: got.append(store.get("after the cut")))
        before = relay.requests
        thread.start()
        _until(lambda: relay.requests > before)
        relay.break_connections()
        _until(lambda: relay.connections == 2)
        direct.set("after the cut", "1")
        thread.join()
        assert got == [b"1"]
        store.close()
        direct.close()


def _until(condition: Any) -> None:
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit
        threading.Event().wait(0.001)


def test_only_idempotent_requests_are_repeated_at_torchs_server(their_port: int) -> None:
    with LossyRelay(their_port) as relay:
        store = TCPStore(HOST, relay.port)
        store.set("k", "v")
        relay.break_connections()
        assert store.get("k") == b"v"
        relay.lose_responses = 1
        with pytest.raises(DistNetworkError, match=r"add: the connection .* broke .* may or may not have been done"):
            store.add("maybe", 1)
        assert store.add("sure", 1) == 1
        store.close()


def test_killed_server_is_detected_at_once() -> None:
    with server() as (port, process):
        store = TCPStore(HOST, port)
        failed: list[BaseException] = []

        def wait() -> None:
            try:
                store.get("never")
            except DistNetworkError as error:
                failed.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        store.set("k", "v")
        process.kill()
        thread.join()
        with pytest.raises(DistNetworkError, match=rf"the server at 127.0.0.1:{port} is gone"):
            store.get("k")
        assert len(failed) == 1
        store.close()


def test_restarted_server_is_detected() -> None:
    # The kernel would give the port to another test when the first server has closed it.
    first = TCPStore(HOST, reserve_port(), is_master=True)
    client = TCPStore(HOST, first.port)
    client.set("k", "v")
    first.close()
    second = TCPStore(HOST, first.port, is_master=True)
    for call in (lambda: client.get("k"), lambda: client.set("k", "w")):
        with pytest.raises(DistNetworkError, match="has been restarted"):
            call()
    assert not second.check(["k"])
    client.close()
    second.close()


def test_a_new_client_opens_its_session_with_its_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    master, sent, send = TCPStore(HOST, 0, is_master=True), [], client_module.DeadlineSocket.send
    master.set("k", "7.25")

    def counting(sock: Any, data: bytes, deadline: Any) -> None:
        sent.append(len(data))
        send(sock, data, deadline)

    monkeypatch.setattr(client_module.DeadlineSocket, "send", counting)
    client = TCPStore(HOST, master.port)
    assert client.get("k") == b"7.25" and len(sent) == 2
    assert client.compare_set("k", "7.25", "8.5") == b"8.5" and len(sent) == 3
    assert client.set_and_compare_set({"a": "1", "b": "2"}, "k", "8.5", "9.75") == b"9.75" and len(sent) == 4
    assert master.multi_get(["a", "b", "k"]) == [b"1", b"2", b"9.75"]
    client.close()
    master.close()


@pytest.mark.parametrize("kind", [TCPStore, torch_tcp], ids=["ours", "torch's"])
def test_stopped_server_is_a_timeout(kind: Any) -> None:
    with server(kind) as (port, process):
        store = TCPStore(HOST, port)
        store.set_timeout(timedelta(seconds=0.05))
        process_view = psutil.Process(process.pid)
        process_view.suspend()
        for call in (lambda: store.get("k"), lambda: store.set("k", "v"), lambda: store.add("n", 1)):
            with pytest.raises(StoreTimeoutError, match="the server does not respond at all"):
                call()
        store.set_timeout(timedelta(seconds=60))
        process_view.resume()
        store.set("k", "back")
        assert store.get("k") == b"back"
        store.close()


def test_a_client_that_does_not_run_until_its_deadline_takes_the_response(
    master: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it said that the server does not respond at all."""
    store, send = TCPStore(HOST, master.port), client_module.DeadlineSocket.send
    store.set("k", "v")
    store.set_timeout(timedelta(seconds=0.01))

    def send_and_sleep(sock: Any, data: bytes, until: float) -> None:
        send(sock, data, until)
        while (left := until - time.monotonic()) > 0:
            time.sleep(left)
        # No server answers a wait for a missing key.
        if data[-5:] != b"never":
            assert select.select([sock._socket], [], [], 20)[0]

    monkeypatch.setattr(client_module.DeadlineSocket, "send", send_and_sleep)
    store.set("k", "w")
    assert store.get("k") == b"w"
    with pytest.raises(StoreTimeoutError, match="No rank has set them yet"):
        store.get("never")
    store.close()


def test_listener_that_never_accepts_is_a_timeout() -> None:
    with socket.create_server((HOST, 0), backlog=1) as deaf:
        with pytest.raises(DistNetworkError, match=r"no connection to 127.0.0.1:\d+ within 0.3 s"):
            TCPStore(HOST, deaf.getsockname()[1], timeout=timedelta(seconds=0.3))


def test_a_server_that_is_not_reached_for_long_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Enough(Exception):
        """End of the attempts: it has been long since at least the first one."""

    attempts = count(1)

    def pause(_: float) -> None:
        time.sleep(0.01)
        if next(attempts) == 10:
            raise Enough

    monkeypatch.setattr(timeouts, "LONG_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(client_module, "sleep", pause)
    with socket.socket() as reserved:
        reserved.bind((HOST, 0))
        port = reserved.getsockname()[1]
        with pytest.raises(Enough):
            TCPStore(HOST, port, timeout=timedelta(seconds=300))
    [message] = caplog.messages
    assert message.startswith(f"TCPStore: no connection to {HOST}:{port} within 0.01 s ([Errno 111] ECONNREFUSED")
    assert re.search(r"trying for \d+ s more. Check that rank 0, which runs the store, is up", message)


def test_connection_refused_until_the_timeout() -> None:
    with socket.socket() as reserved:
        reserved.bind((HOST, 0))
        with pytest.raises(DistNetworkError, match=r"ECONNREFUSED.* Check that rank 0"):
            TCPStore(HOST, reserved.getsockname()[1], timeout=timedelta(seconds=0.3))


def test_host_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(host: str, port: int) -> list[addresses.Address]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(addresses, "look_up", unknown)
    for is_master in (False, True):
        with pytest.raises(DistNetworkError, match=r"'node0' did not resolve to an address.*Name or service not known"):
            TCPStore("node0", 29500, is_master=is_master, timeout=timedelta(seconds=0.1))


def test_no_time_to_connect_is_an_error_though_the_server_is_quick(our_port: int) -> None:
    """Once a third of the attempts succeeded."""
    for _ in range(50):
        with pytest.raises(DistNetworkError, match="argument 'timeout' is zero, which leaves no time to connect"):
            TCPStore("127.0.0.1", our_port, timeout=timedelta(0))


def test_resolver_that_does_not_respond_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(addresses, "look_up", lambda host, port: over.wait() and [])
    with pytest.raises(DistNetworkError, match=r"'node0' did not resolve .*the resolver did not respond in time"):
        TCPStore("node0", 29500, timeout=timedelta(seconds=0.2))
    over.set()


def test_another_service_at_the_port() -> None:
    def serve_http() -> None:
        connection = listener.accept()[0]
        connection.recv(100)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")
        connection.close()

    with socket.create_server((HOST, 0)) as listener:
        thread = threading.Thread(target=serve_http)
        thread.start()
        with pytest.raises(DistNetworkError, match=r"the service at .* is not a store"):
            TCPStore(HOST, listener.getsockname()[1], timeout=timedelta(seconds=60))
        thread.join()


def test_a_service_that_answers_nothing_at_the_port() -> None:
    with socket.create_server((HOST, 0)) as listener:
        words = r"no connection to .* within 0\.3 s \(a program accepts connections, but does not answer: "
        with pytest.raises(DistNetworkError, match=words):
            TCPStore(HOST, listener.getsockname()[1], timeout=timedelta(seconds=0.3))


def test_ctrl_c_interrupts_a_wait_and_the_store_remains_usable(master: TCPStore) -> None:
    def interrupt() -> None:
        master.get("go")
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        master.set("go", "1")
        master.get("never")
    thread.join()
    assert master.get("go") == b"1"


# Ports, processes and what stays behind


def test_port_in_use(master: TCPStore) -> None:
    with pytest.raises(
        DistNetworkError, match=rf"cannot listen on 127.0.0.1:{master.port}: Address already in use.*choose"
    ):
        TCPStore(HOST, master.port, is_master=True)


def test_masters_of_one_process_share_a_server() -> None:
    first = TCPStore(HOST, reserve_port(), is_master=True, multi_tenant=True)
    second = TCPStore(HOST, first.port, is_master=True, multi_tenant=True)
    second.set("k", "v")
    first.close()
    assert second.get("k") == b"v"
    second.close()
    with pytest.raises(OSError):
        socket.create_connection((HOST, second.port)).close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_loopback_stays_loopback(host: str) -> None:
    store = TCPStore(host, 0, is_master=True)
    here = psutil.Process().net_connections("tcp")
    listening = {each.laddr.ip for each in here if each.status == "LISTEN" and each.laddr.port == store.port}
    assert listening and listening <= {"127.0.0.1", "::1"}
    store.close()


def test_close_leaves_no_thread_descriptor_or_port() -> None:
    me = psutil.Process()
    TCPStore(HOST, 0, is_master=True).close()
    ports = [reserve_port(), reserve_port()]
    gc.collect()
    # The kernel may still know a thread that has been joined, for a moment.
    before, threads = me.num_fds(), {each.id for each in me.threads()}
    for collected, port in zip((False, True), ports, strict=True):
        store = TCPStore(HOST, port, is_master=True)
        other = TCPStore(HOST, store.port)
        other.set("k", "v")
        if not collected:
            other.close()
            store.close()
            with pytest.raises(DistNetworkError, match="has been closed"):
                other.get("k")
        del store, other
        gc.collect()
        _until(lambda: me.num_fds() == before and {each.id for each in me.threads()} <= threads)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port))


def test_close_interrupts_calls_of_other_threads(our_port: int) -> None:
    with LossyRelay(our_port) as relay:
        store = TCPStore(HOST, relay.port)
        before, failed = relay.requests, []

        def wait() -> None:
            try:
                store.get("never")
            except DistNetworkError as error:
                failed.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        _until(lambda: relay.requests > before)
        store.close()
        thread.join()
        assert len(failed) == 1


@pytest.mark.parametrize("moment", ["ClientConnection", "open_socket"])
def test_close_interrupts_a_call_that_is_about_to_connect(
    our_port: int, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it waited for its whole time-out, as the store had no socket yet to close."""
    with LossyRelay(our_port) as relay:
        store, failed = TCPStore(HOST, relay.port, timeout=timedelta(seconds=20)), list[str]()
        before, make = relay.requests, getattr(client_module, moment)

        def make_and_close(*arguments: Any) -> Any:
            made = make(*arguments)
            store.close()
            return made

        def wait() -> None:
            with pytest.raises(DistNetworkError) as caught:
                store.get("never")
            failed.append(str(caught.value))

        # The first call has the connection that there is.
        thread = threading.Thread(target=wait)
        thread.start()
        _until(lambda: relay.requests > before)
        monkeypatch.setattr(client_module, moment, make_and_close)
        wait()
        thread.join()
        assert len(failed) == 2


def use_inherited(pipe: Connection, store: TCPStore) -> None:
    pipe.send([store.add("n", 1) for _ in range(50)])
    store.close()


def test_forked_child_opens_its_own_connections(master: TCPStore) -> None:
    client = TCPStore(HOST, master.port)
    client.set("k", "v")
    with in_child(use_inherited, client) as (pipe, process):
        ours = [client.add("n", 1) for _ in range(50)]
        theirs = pipe.recv()
        process.join()
    assert sorted(ours + theirs) == list(range(1, 101))
    assert client.get("k") == b"v"
    client.close()


def hold(pipe: Connection) -> None:
    pipe.send("here")
    pipe.recv()


def test_forked_child_does_not_hold_the_port_open() -> None:
    store = TCPStore(HOST, reserve_port(), is_master=True)
    with in_child(hold) as (pipe, _):
        assert pipe.recv() == "here"
        store.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, store.port))


# Misuse


def test_constructor_arguments() -> None:
    for port in (-1, 70000, "29500", None):
        with pytest.raises(TypeError, match="TCPStore: argument 'port'"):
            TCPStore(HOST, port)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="host_name"):
        TCPStore(None, 29500)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="world_size"):
        TCPStore(HOST, 0, 0, True)
    with pytest.raises(ValueError, match="timeout"):
        TCPStore(HOST, 0, is_master=True, timeout=timedelta(seconds=-1))


def test_oversized_keys_and_values_are_refused_by_the_client(master: TCPStore) -> None:
    with pytest.raises(
        ArgumentError, match=r"set: argument 'value' must be at most 8388608 bytes long, got '8388609 bytes'"
    ):
        master.set("k", bytes(8 * 2**20 + 1))
    with pytest.raises(ArgumentError, match="argument 'key' must be at most 8191 bytes long"):
        master.get("k" * 8192)
    master.set("k" * 8191, bytes(8 * 2**20))
    assert master.get("k" * 8191) == bytes(8 * 2**20)


def test_properties(master: TCPStore) -> None:
    assert (master.host, master.libuvBackend, master.has_extended_api()) == (HOST, True, True)
    assert repr(master) == f"TCPStore(127.0.0.1:{master.port}, master)"
    assert torch.distributed.TCPStore(HOST, master.port).port == master.port


def gloo_rank(pipe: Connection, kind: Any, port: int, rank: int) -> None:
    store = kind(HOST, port, timeout=timedelta(seconds=20))
    if isinstance(store, TCPStore):
        store = ForTorch(store)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    tensor = torch.tensor([rank * rank + position**2 + 1 for position in range(5)])
    torch.distributed.all_reduce(tensor)
    torch.distributed.destroy_process_group()
    pipe.send(tensor.tolist())


class ForTorch(torch.distributed.Store):
    """As much of our store as torch's Gloo asks of one."""

    def __init__(self, inner: TCPStore) -> None:
        super().__init__()
        for name in ("set", "get", "add", "wait", "check"):
            setattr(self, name, getattr(inner, name))


@pytest.mark.parametrize("kinds", [(torch_tcp, torch_tcp), (torch_tcp, TCPStore)], ids=["torch's clients", "and ours"])
def test_torchs_gloo_starts_over_our_server(kinds: tuple[Any, Any]) -> None:
    with server() as (port, _):
        with in_child(gloo_rank, kinds[0], port, 0) as (one, _), in_child(gloo_rank, kinds[1], port, 1) as (two, _):
            assert one.recv() == two.recv() == [1 + 2 * position**2 + 2 for position in range(5)]
