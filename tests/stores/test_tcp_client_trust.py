"""What a client believes of a server: that of its own user on loopback, and responses that fit their requests."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.stores.store_helpers import in_child, torch_tcp
from torchdist_ref.errors import ArgumentError, AuthenticationError, DistNetworkError
from torchdist_ref.stores import TCPStore, sockets
from torchdist_ref.stores.tcp.operations import recognized
from torchdist_ref.stores.tcp.protocol import IDENTITY_BYTES, MAX_VALUE_BYTES, RESPONSE_HEADER, Status

HOST, NOBODY = "127.0.0.1", 65534
HUGE = 2**39
TIMEOUT = timedelta(seconds=20)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="acting as another user needs root")


def test_the_kernel_is_asked_for_the_owner_of_every_server_but_the_one_that_is_opened_with_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When the client connects again, its server may have ended, and another user may listen there."""
    asked, ask = [], sockets.refused_server

    def recorded(sock: socket.socket) -> int | None:
        asked.append(sock.getpeername())
        return ask(sock)

    monkeypatch.setattr(sockets, "refused_server", recorded)
    opened = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    with contextlib.closing(opened) as master:
        master.set("k", "v")
        assert asked == []
        with contextlib.closing(TCPStore(HOST, master.port)) as client:
            assert client.get("k") == b"v" and asked == [(HOST, master.port)]
        [connection] = master._pool._idle
        connection.close()
        assert master.get("k") == b"v" and asked == [(HOST, master.port)] * 2


@contextlib.contextmanager
def scripted_server(ours: bool, *replies: bytes) -> Iterator[int]:
    """Serve one client: the handshake of our server or of torch's, then a reply to each of its messages.

    It keeps the connection, so the client cannot take its end for an answer.
    """
    done = threading.Event()

    def serve() -> None:
        client, _ = listener.accept()
        with client:
            nonce = struct.unpack_from("<I", client.recv(10, socket.MSG_WAITALL), 6)[0]
            client.sendall(struct.pack("<I", recognized(nonce) or 0 if ours else nonce))
            for reply in replies:
                client.recv(4096)
                client.sendall(reply)
            done.wait()

    with socket.create_server((HOST, 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            done.set()
            thread.join()


def identity() -> bytes:
    return struct.pack("<Q", IDENTITY_BYTES) + bytes(IDENTITY_BYTES)


def response(body: bytes = b"", number: int = 1, status: int = Status.DONE, size: int | None = None) -> bytes:
    return RESPONSE_HEADER.pack(number, len(body) if size is None else size, status) + body


def value(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


Call = Callable[[TCPStore], Any]


@pytest.mark.parametrize(
    ("call", "reply", "problem"),
    [
        (lambda s: s.get("k"), struct.pack("<Q", HUGE), f"a length of {HUGE + 8}, where at most 24 is allowed"),
        (lambda s: s.get("k"), value(b"short") + response(value(b"")), "an identity of 5 bytes instead of 16"),
        (lambda s: s.get("k"), identity() + response(size=HUGE), f"where at most {16 + MAX_VALUE_BYTES} are allowed"),
        (
            lambda s: s.multi_get(["a", "b"]),
            identity() + response(size=HUGE),
            f"at most {24 + 2 * MAX_VALUE_BYTES} are",
        ),
        (lambda s: s.list_keys(), identity() + response(size=HUGE), "TORCHDIST_REF_STORE_MEMORY sets the limit"),
        (lambda s: s.add("k", 1), identity() + response(size=HUGE), "where at most 65536 are allowed"),
        (lambda s: s.get("k"), identity() + response(size=HUGE, status=Status.REFUSED), "at most 65536"),
        (lambda s: s.get("k"), identity() + response(size=HUGE, status=Status.CANCELED), "at most 65536"),
        (lambda s: s.get("k"), identity() + response(value(b""), number=99), "response 99 to request 1"),
        (lambda s: s.get("k"), identity() + response(status=7), "a response of status 7"),
        (lambda s: s.get("k"), identity() + response(b"\xff\xff\xff"), "ends inside a field"),
        (lambda s: s.get("k"), identity() + response(), "ends inside a field"),
        (lambda s: s.set("k", "v"), identity() + response(b"\0"), "longer or shorter than its fields"),
        (lambda s: s.get("k"), identity() + response(b"\xff", status=Status.REFUSED), "a refusal that is not text"),
        (lambda s: s.get("k"), identity() + response(b"\xff", status=Status.CANCELED), "ends inside a field"),
        (lambda s: s.multi_get(["a", "b"]), identity() + response(bytes(8)), "0 values of 2 keys"),
    ],
)
def test_what_is_no_response_is_an_error_of_the_network(call: Call, reply: bytes, problem: str) -> None:
    with scripted_server(True, reply) as port:
        store = TCPStore(HOST, port, timeout=TIMEOUT)
        with pytest.raises(DistNetworkError, match=f"the server at {HOST}:{port} sent an invalid response.*{problem}"):
            call(store)
        store.close()


def test_a_refusal_that_is_text_is_an_error_of_the_argument() -> None:
    with scripted_server(True, identity() + response(b"no number", status=Status.REFUSED)) as port:
        store = TCPStore(HOST, port, timeout=TIMEOUT)
        with pytest.raises(ArgumentError, match="no number"):
            store.add("k", 1)
        store.close()


def test_a_response_to_a_posted_request_has_a_limit() -> None:
    with scripted_server(True, identity() + response(struct.pack("<q", 1)), response(number=2, size=HUGE)) as port:
        store = TCPStore(HOST, port)
        assert store.add("k", 1) == 1
        assert store.set_on_disconnect("left", "1")
        with pytest.raises(DistNetworkError, match=f"add: .*a response of {HUGE} bytes to a request without"):
            store.add("k", 1)
        store.close()


@pytest.mark.parametrize(
    ("call", "reply"),
    [
        (lambda s: s.queue_pop("k", block=False), struct.pack("<qQ", 1, HUGE)),
        (lambda s: s.list_keys(), struct.pack("<QQ", 1, HUGE)),
        (lambda s: s.compare_set("k", "a", "b"), struct.pack("<Q", HUGE)),
    ],
)
def test_replies_of_torchs_servers_have_a_limit(call: Call, reply: bytes) -> None:
    with scripted_server(False, reply) as port:
        store = TCPStore(HOST, port, timeout=TIMEOUT)
        with pytest.raises(DistNetworkError, match=rf"sent an invalid response \(a length of {HUGE + 8}|{HUGE + 16}"):
            call(store)
        store.close()


@pytest.mark.parametrize("kind", [TCPStore, torch_tcp])
def test_the_longest_values_are_read(kind: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    master = kind(HOST, 0, is_master=True, wait_for_workers=False)
    store = TCPStore(HOST, master.port)
    longest = bytes(MAX_VALUE_BYTES)
    store.set("k", longest)
    assert store.get("k") == longest
    assert store.multi_get(["k", "k"]) == [longest] * 2
    assert store.compare_set("k", "", "x") == longest
    monkeypatch.setenv("TORCHDIST_REF_STORE_MEMORY", "9")
    with pytest.raises(DistNetworkError, match=r"where at most|a length of"):
        store.multi_get(["k", "k"])
    store.close()
    close = getattr(master, "close", None)
    if close is not None:
        close()


def serve_as_nobody(pipe: Connection, accepts: bool, listener: socket.socket | None) -> None:
    """Listen as another user, or only accept as one; send the port, and then what the client sent."""
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    listener = listener or socket.create_server((HOST, 0))
    pipe.send(listener.getsockname()[1])
    if accepts:
        client, _ = listener.accept()
        pipe.send(client.recv(100))
    pipe.recv()


@as_root
@pytest.mark.parametrize("accepts", [True, False])
def test_a_client_sends_nothing_to_a_server_of_another_user(accepts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with in_child(serve_as_nobody, accepts, None) as (pipe, _):
        port = pipe.recv()
        with pytest.raises(AuthenticationError, match=f"{HOST}:{port} belongs to user {NOBODY}, and this process to"):
            TCPStore(HOST, port, timeout=TIMEOUT)
        if accepts:
            assert pipe.recv() == b""
        monkeypatch.setenv("TORCHDIST_REF_TRUST_NETWORK", "1")
        with socket.create_connection((HOST, port)) as trusted:
            assert sockets.refused_server(trusted) is None


@as_root
def test_who_has_accepted_a_connection_counts_more_than_who_listens() -> None:
    with (
        socket.create_server((HOST, 0)) as listener,
        in_child(serve_as_nobody, True, listener) as (pipe, _),
        socket.create_connection((HOST, pipe.recv())) as client,
    ):
        client.sendall(b"x")
        assert pipe.recv() == b"x"
        assert sockets.refused_server(client) == NOBODY


@pytest.mark.parametrize("host", [HOST, "::1"])
def test_the_owner_of_a_server_is_known_before_and_after_it_accepts(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip("this host has no such address")
    with listener, socket.create_connection(listener.getsockname()[:2]) as client:
        ends = client.getpeername(), client.getsockname()
        owners = sockets.SocketOwners()
        assert owners.find(family, [(ends[0], None), ends]) == [os.geteuid(), sockets._UNACCEPTED]
        with listener.accept()[0]:
            assert owners.find(family, [ends]) == [os.geteuid()]
        assert owners.find(family, [ends]) == [sockets._CLOSED]
    assert owners.find(family, [(ends[0], None)]) == [sockets._CLOSED]
    owners.close()


def test_a_socket_of_both_families_knows_the_users_of_its_clients() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    with (
        socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener,
        socket.create_connection((HOST, listener.getsockname()[1])) as client,
    ):
        sock, peer = listener.accept()
        with sock:
            assert sockets.is_loopback(peer[0])
            owners = sockets.SocketOwners()
            assert owners.find(sock.family, [(peer, sock.getsockname())]) == [os.geteuid()]
            client.close()
            assert sockets.refused_users(owners, listener, [(sock, peer)]) == [sockets._CLOSED]
            owners.close()
