"""Server of TCPStore under garbage, huge lengths, broken connections, idle and greedy clients: others are served."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import resource
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest

from tests.descriptors import use_all_descriptors
from tests.stores.store_helpers import LossyRelay, in_child
from torchdist_ref.errors import ArgumentError, DistNetworkError, DistStoreError
from torchdist_ref.stores import TCPStore, addresses, sockets
from torchdist_ref.stores.tcp import server
from torchdist_ref.stores.tcp.operations import NONCE_MARK, Op
from torchdist_ref.stores.tcp.protocol import MAGIC, Request, write_request
from torchdist_ref.stores.tcp.requests import RequestHandler, StoreClient
from torchdist_ref.stores.tcp.server import TCPServer
from torchdist_ref.testing import namespaces
from torchdist_ref.timeouts import Deadline

HOST = "127.0.0.1"
HANDSHAKE = write_request(Op.VALIDATE, MAGIC)
MB = 2**20


@pytest.fixture
def master() -> Iterator[TCPStore]:
    store = TCPStore(HOST, 0, is_master=True)
    yield store
    _serves_a_new_client_at_once(store)
    store.close()


def _serves_a_new_client_at_once(master: TCPStore) -> None:
    new_client = TCPStore(HOST, master.port)
    new_client.set("new_client", "1")
    assert new_client.get("new_client") == b"1"
    new_client.close()


def dial(master: TCPStore, first: bytes = b"") -> socket.socket:
    connection = socket.create_connection((HOST, master.port), timeout=20)
    connection.sendall(first)
    return connection


def closed_by_server(connection: socket.socket) -> bool:
    """Wait until the server closes the connection."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionError:
        pass
    connection.close()
    return True


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"\xff" * 4096,
    bytes(4096),
    HANDSHAKE + HANDSHAKE,
    HANDSHAKE + b"\x77",
    HANDSHAKE + write_request(Op.ADD, b"/n", 1, number=5),
    write_request(Op.SET, b"/k", b"intruder"),
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_disconnected(master: TCPStore, garbage: bytes) -> None:
    assert closed_by_server(dial(master, garbage))
    assert not master.check(["k"])


@pytest.mark.parametrize("length", [2**64 - 1, 2**63 - 1, 2**63, 2**40, 2**32])
def test_huge_lengths_are_disconnected(master: TCPStore, length: int) -> None:
    huge = struct.pack("<Q", length)
    starts = [bytes([op.code]) for op in (Op.SET, Op.GET, Op.WAIT, Op.MULTI_SET, Op.ADD, Op.HELLO, Op.WAIT_GET)]
    starts.append(bytes([Op.SET.code]) + struct.pack("<Q", 1) + b"k")
    for start in starts:
        assert closed_by_server(dial(master, HANDSHAKE + start + huge))


def test_mutated_requests_do_not_harm_other_clients(master: TCPStore) -> None:
    valid = HANDSHAKE + write_request(Op.PING, NONCE_MARK | 5) + write_request(Op.HELLO, b"x" * 16)
    valid += write_request(Op.SET, b"/a", b"1", number=1) + write_request(Op.WAIT_GET, b"/a", number=2)
    rng = random.Random(7)
    master.set("precious", "1")
    for _ in range(300):
        data = bytearray(valid)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(5, len(data))] = rng.randrange(256)
        with contextlib.suppress(ConnectionError):
            dial(master, bytes(data[: rng.randrange(len(data) + 1)])).close()
    assert master.get("precious") == b"1"


def test_requests_after_a_disconnect_are_not_run(master: TCPStore) -> None:
    master.set("text", "no number")
    refused, next_one = write_request(Op.ADD, b"/text", 1), write_request(Op.SET, b"/after", b"1")
    assert closed_by_server(dial(master, HANDSHAKE + refused + next_one))
    assert not master.check(["after"])


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_valid_requests_may_arrive_in_pieces(master: TCPStore, cut: int) -> None:
    session = HANDSHAKE + write_request(Op.PING, 77)
    connection = dial(master)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for piece in (session[:cut], session[cut : cut + 3], session[cut + 3 :]):
        connection.sendall(piece)
        master.num_keys()  # the server has run in between
    assert connection.recv(4) == struct.pack("<I", 77)
    connection.close()


def test_idle_connections_do_not_delay_others(master: TCPStore) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(400, (soft - 200) // 2)
    idle = [dial(master, HANDSHAKE) for _ in range(count)]
    _serves_a_new_client_at_once(master)
    for connection in idle:
        connection.close()
    assert hard >= soft


def test_large_values_from_many_clients_all_arrive(master: TCPStore) -> None:
    def work(number: int) -> None:
        client = TCPStore(HOST, master.port)
        client.set(f"v{number}", bytes([number]) * (3 * MB))
        client.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [master.get(f"v{number}") == bytes([number]) * (3 * MB) for number in range(6)] == [True] * 6


def test_connection_resets_leave_nothing() -> None:
    loop = server.ServerLoop(sockets.listen(HOST, 0, Deadline(5)))
    [listener] = loop.acceptor.listeners.values()
    for number in range(100):
        connection = socket.create_connection(listener.getsockname())
        connection.sendall((HANDSHAKE + write_request(Op.WAIT, [b"/never"]))[: 5 + number % 30])
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if number % 3:
            loop.run_round(wait=False)
        connection.close()
    # Each reset is an event; after the last one nothing is left, and no time-out is due.
    while loop.clients or loop.newcomers:
        loop.run_round()
    assert loop.handler.pending == {} and not loop.silent and loop.handler.memory.used == 0
    loop.close_copies()


def few_descriptors(pipe: object) -> None:
    use_all_descriptors(free=60)
    store = TCPStore(HOST, 0, is_master=True)
    pipe.send(store.port)  # type: ignore[attr-defined]
    pipe.recv()  # type: ignore[attr-defined]


def test_server_without_descriptors_drops_unvalidated_connections() -> None:
    with in_child(few_descriptors) as (pipe, _):
        port = pipe.recv()
        regular = TCPStore(HOST, port)
        unvalidated = [socket.create_connection((HOST, port)) for _ in range(200)]
        regular.set("k", "v")
        new_client = TCPStore(HOST, port)
        assert new_client.get("k") == b"v"
        for each in unvalidated:
            each.close()
        regular.close()
        new_client.close()


def connect_raw(port: int, host: str = "127.0.0.1") -> str:
    """Return what a client of torch's dialect gets: its number, or that it was disconnected."""
    with socket.socket() as sock:
        # `create_connection` may load a codec, whose file another user may not read.
        sock.connect((host, port))
        try:
            sock.sendall(write_request(Op.VALIDATE, MAGIC) + write_request(Op.PING, 7))
            return "answered" if sock.recv(4, socket.MSG_WAITALL) else "disconnected"
        except OSError:
            return "disconnected"


@pytest.mark.skipif(os.geteuid() != 0, reason="acting as another user needs root")
def test_a_client_of_another_user_is_disconnected(
    master: TCPStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def as_nobody(pipe: Connection) -> None:
        os.setgid(65534)
        os.setuid(65534)
        pipe.send(connect_raw(master.port))

    with in_child(as_nobody) as (pipe, _):
        assert pipe.recv() == "disconnected"
    assert connect_raw(master.port) == "answered"
    assert "refused a client of user 65534" in caplog.text
    monkeypatch.setenv("TORCHDIST_REF_TRUST_NETWORK", "1")
    with in_child(as_nobody) as (pipe, _):
        assert pipe.recv() == "answered"


@pytest.mark.skipif(bool(namespaces.missing()), reason="needs network namespaces")
@pytest.mark.parametrize("number, found", [(0, "disconnected"), (1, "answered")])
def test_a_client_of_another_user_is_known_at_an_address_of_this_host_too(number: int, found: str) -> None:
    with namespaces.hosts(2) as hosts:

        def serve(pipe: Connection) -> None:
            hosts[0].enter()
            with contextlib.closing(TCPStore(hosts[0].ipv4, 0, is_master=True, wait_for_workers=False)) as store:
                pipe.send(store.port)
                pipe.recv()

        def as_nobody(pipe: Connection, port: int) -> None:
            hosts[number].enter()
            os.setgid(65534)
            os.setuid(65534)
            pipe.send(connect_raw(port, hosts[0].ipv4))

        with in_child(serve) as (server_pipe, _), in_child(as_nobody, server_pipe.recv()) as (pipe, _):
            assert pipe.recv() == found
            server_pipe.send("end")


@pytest.mark.skipif(bool(namespaces.missing()), reason="needs network namespaces")
def test_a_client_of_this_host_that_has_gone_is_not_taken_for_one_of_another_host() -> None:
    with namespaces.hosts(2) as hosts:

        def accept(pipe: Connection) -> None:
            hosts[0].enter()
            with socket.create_server((hosts[0].ipv4, 0)) as listener:
                client = socket.create_connection(listener.getsockname())
                sock, peer = listener.accept()
                client.sendall(b"bytes")
                client.close()
                pipe.send(sockets.refused_users(sockets.SocketOwners(), listener, [(sock, peer)]))
                sock.close()

        with in_child(accept) as (pipe, _):
            assert pipe.recv() == [-1]


def test_clients_that_have_gone_are_not_taken_for_root() -> None:
    """The kernel is asked for all at once, and again over the same socket."""
    with socket.create_server(("127.0.0.1", 0)) as listener, closing(sockets.SocketOwners()) as owners:
        clients = [socket.create_connection(listener.getsockname()) for _ in range(5)]
        peers = [listener.accept() for _ in clients]
        assert sockets.refused_users(owners, listener, peers) == [None] * 5
        for number in (1, 4):
            clients[number].close()
        assert sockets.refused_users(owners, listener, peers) == [None, -1, None, None, -1]
        for each, _ in peers:
            each.close()
        for each in clients:
            each.close()


class FullSocket:
    """Socket to the kernel that has no memory left for the second answer, or says that it is not there."""

    def __init__(self, netlink: socket.socket, error: int = errno.ENOBUFS) -> None:
        self.send, self.close, self._recv = netlink.send, netlink.close, netlink.recv
        self._answers, self._error = 0, error

    def recv(self, size: int, flags: int) -> bytes:
        self._answers += 1
        if self._answers == 2:
            raise OSError(self._error, "refused")
        return self._recv(size, flags)


def test_clients_are_refused_while_the_kernel_has_no_memory_to_say_whose_they_are() -> None:
    """Once they counted as clients of another host, and were admitted."""
    with socket.create_server(("127.0.0.1", 0)) as listener, closing(sockets.SocketOwners()) as owners:
        clients = [socket.create_connection(listener.getsockname()) for _ in range(3)]
        peers = [listener.accept() for _ in clients]
        assert sockets.refused_users(owners, listener, peers[:1]) == [None]
        owners._netlink = FullSocket(owners._netlink)  # type: ignore[arg-type,assignment]
        refused = sockets.refused_users(owners, listener, peers)
        assert all(user is not None and user < 0 for user in refused)
        # Answers that nobody has read do not count for the next clients.
        clients[0].close()
        assert sockets.refused_users(owners, listener, peers) == [-1, None, None]
        for each, _ in peers:
            each.close()
        for each in clients[1:]:
            each.close()


@pytest.mark.parametrize("refused", [errno.ENOBUFS, errno.EAGAIN, errno.EMFILE])
def test_a_client_without_memory_to_ask_whose_the_server_is_says_so(
    refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once each of these was said to be a process without file descriptors."""
    owners = sockets.SocketOwners()
    kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, sockets._SOCK_DIAG)
    owners._netlink = FullSocket(kernel, refused)  # type: ignore[assignment]
    advice = "file descriptor" if refused == errno.EMFILE else "memory"
    with kernel, closing(TCPServer("127.0.0.1", 0)) as server:
        monkeypatch.setattr(sockets, "SocketOwners", lambda: owners)
        with pytest.raises(DistNetworkError, match=f"no socket to 127.0.0.1:{server.port} can be opened.*{advice}"):
            TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=5))


@pytest.mark.parametrize("host", ["192.0.2.1", "myself.example"])
def test_a_store_listens_on_no_other_interface_than_asked(
    host: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An address that no interface has is an error; a name that /etc/hosts maps to loopback means loopback alone."""
    real = addresses.look_up
    monkeypatch.setattr(addresses, "look_up", lambda name, port: real("127.0.1.1" if "example" in name else name, port))
    caplog.set_level(logging.INFO)
    if host == "192.0.2.1":
        with pytest.raises(DistNetworkError, match=r"cannot listen on the interface that was asked for.*use 127\.0\.0"):
            sockets.listen(host, 0, Deadline(5.0))
    else:
        [listener] = sockets.listen(host, 0, Deadline(5.0))
        assert listener.getsockname()[0] == "127.0.1.1"
        listener.close()
        assert "'myself.example' is 127.0.1.1 on this host, which only this host reaches" in caplog.text
    monkeypatch.setenv("TORCHDIST_REF_TRUST_NETWORK", "1")
    for listener in sockets.listen(host, 0, Deadline(5.0)):
        assert listener.getsockname()[0] in ("::", "0.0.0.0")
        listener.close()


def test_release_forgets_the_will_of_its_client() -> None:
    """The key of a group that is released must not come back when a member disconnects."""
    server = TCPStore("127.0.0.1", 0, is_master=True)
    clients = [TCPStore("127.0.0.1", server.port) for _ in range(2)]
    clients[0].multi_set(["a/b/1", "a/b/2", "a/bc"], ["1", "2" * 1000, "3"])
    clients[0].queue_push("a/b/queue", "4" * 100)
    clients[1].set_on_disconnect("a/b/left", "1")
    assert clients[0].set_on_disconnect("a/bc/left", "1")
    assert [client.release("a/b", 2) for client in clients] == [False, True]
    assert server.list_keys() == ["a/bc"] and not server.queue_len("a/b/queue")
    clients[1].close()
    clients[0].close()
    assert server.wait_get(["a/bc/left"], timedelta(seconds=20)) == [b"1"]
    assert server.list_keys() == ["a/bc", "a/bc/left"]
    server.close()


def test_keys_are_published_and_awaited_in_one_write() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True)
    with LossyRelay(server.port) as relay:
        client = TCPStore("127.0.0.1", relay.port)
        server.set("theirs", "1")
        before = relay.requests
        assert client.wait_get(["theirs", "own"], timedelta(seconds=5), {"own": "2" * 5000}) == [b"1", b"2" * 5000]
        assert relay.requests - before <= 2, "5,000 bytes may take two reads"
        relay.lose_responses = 1
        assert client.wait_get(["own"], timedelta(seconds=5), {"own": "3"}) == [b"3"]
        client.close()
    server.close()


def test_a_posted_request_does_not_confuse_the_next_responses() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True)
    client = TCPStore("127.0.0.1", server.port)
    for number in range(3):
        client.set_on_disconnect("gone", "")
        client.set_on_disconnect("gone", str(number))
        assert client.add("count", 1) == number + 1
        assert client.wait_get(["count"], timedelta(seconds=5), {"other": "x"}) == [b"%d" % (number + 1)]
    client.set_on_disconnect("gone", "at last")
    client.close()
    assert server.wait_get(["gone"], timedelta(seconds=5)) == [b"at last"]
    server.close()


def test_a_full_store_refuses_what_is_sent_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDIST_REF_STORE_MEMORY", "1")
    server = TCPStore("127.0.0.1", 0, is_master=True)
    with pytest.raises(ArgumentError, match="the store is full"):
        server.wait_get([], timedelta(seconds=5), {"big": "x" * 2**21})
    server.set("small", "x")
    assert server.list_keys() == ["small"]
    server.close()


def test_a_client_that_gives_up_a_silent_server_is_not_taken_for_one_that_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    master = TCPStore("127.0.0.1", 0, is_master=True)
    client, other = (TCPStore("127.0.0.1", master.port) for _ in range(2))
    assert client.set_on_disconnect("gone", "1", {"present": "1"})
    responsive, handle = threading.Event(), RequestHandler.handle

    def handle_later(handler: RequestHandler, sender: StoreClient, request: Request) -> None:
        responsive.wait(30)
        handle(handler, sender, request)

    with monkeypatch.context() as silent:
        silent.setattr(RequestHandler, "handle", handle_later)
        with pytest.raises(DistStoreError):
            client.wait(["missing"], timedelta(seconds=0.01))
        responsive.set()
    client.set("here", "1")
    assert other.get("here") == b"1" and not other.check(["gone"])
    client.close()
    assert other.wait_get(["gone"], timedelta(seconds=20)) == [b"1"]
    other.close()
    master.close()
