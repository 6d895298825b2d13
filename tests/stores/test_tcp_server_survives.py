"""Failures inside the store's server: its thread survives them, and clients other than the cause notice nothing."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

import pytest

from tests.stores.store_helpers import wait_until_delivered
from torchdist_ref.stores import TCPStore, sockets
from torchdist_ref.stores.sockets import READ
from torchdist_ref.stores.tcp import server
from torchdist_ref.stores.tcp.operations import Op
from torchdist_ref.stores.tcp.protocol import MAGIC, write_request
from torchdist_ref.timeouts import Deadline

HANDSHAKE = write_request(Op.VALIDATE, MAGIC)


def listen() -> socket.socket:
    return sockets.listen("127.0.0.1", 0, Deadline(20))[0]


@pytest.fixture
def loop() -> Iterator[server.ServerLoop]:
    """Loop of a server with two listeners, which runs on the thread of the test."""
    made = server.ServerLoop([listen(), listen()])
    yield made
    made.close_copies()


class FullPoller:
    """Poller of a kernel that watches no further descriptor."""

    def __init__(self, loop: server.ServerLoop) -> None:
        self.poll, self.unregister, self.close = loop._poller.poll, loop._poller.unregister, loop._poller.close

    def register(self, fd: int, eventmask: int) -> None:
        raise OSError(errno.ENOSPC, "no space")


def dial(listener: socket.socket) -> socket.socket:
    client = socket.create_connection(listener.getsockname(), timeout=20)
    client.sendall(HANDSHAKE)
    wait_until_delivered(client)
    return client


def test_two_listeners_without_descriptors_in_one_turn_are_paused_and_resumed(
    loop: server.ServerLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the second one ended the server's thread: it was no longer registered."""
    clients = [dial(listener) for listener in loop.listeners.sockets]
    real, listeners = [listener.fileno() for listener in loop.listeners.sockets], loop.listeners.sockets
    os.close(loop.listeners._reserve)  # type: ignore[arg-type]
    loop.listeners._reserve = None

    class Refusing:
        def __init__(self, listener: socket.socket) -> None:
            self.fileno, self.close = listener.fileno, listener.close

        def accept(self) -> None:
            raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as without:
        without.setattr(loop.listeners, "_reopen_reserve", lambda: None)
        without.setattr(loop.listeners, "sockets", [Refusing(each) for each in listeners])
        loop._serve_all([(descriptor, READ) for descriptor in real])
        assert loop._poller.poll(0) == [], "neither is watched for the time being"
        without.setattr(loop.listeners, "sockets", listeners)
        without.setattr(server, "monotonic", lambda: loop.listeners.retry_at)
        loop._check_limits(idle=True)
    loop._serve_all(loop._poller.poll(0))
    assert len(loop.connections) == 2
    for client in clients:
        client.close()


def test_a_connection_that_cannot_be_watched_is_closed(
    loop: server.ServerLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, poller = dial(loop.listeners.sockets[0]), loop._poller
    monkeypatch.setattr(loop, "_poller", FullPoller(loop))
    loop._run_turn()
    assert not loop.connections and not loop._unvalidated
    with pytest.raises(ConnectionError):
        client.recv(1) or client.sendall(bytes(2**20))
    client.close()
    monkeypatch.setattr(loop, "_poller", poller)
    paused = dial(loop.listeners.sockets[0])
    loop._run_turn()
    [connection] = loop.connections.values()
    loop._poller.unregister(connection.descriptor)
    loop._paused[connection] = None
    monkeypatch.setattr(loop, "_poller", FullPoller(loop))
    loop._check_limits(idle=True)
    assert not loop.connections and not loop._paused
    paused.close()


@pytest.mark.parametrize("place", ["_accept", "_check_limits"])
def test_an_internal_error_does_not_end_the_thread(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True)
    assert store.server is not None
    loop = store.server._loop
    real, failures = getattr(loop, place), [1]

    def fail_once(*arguments: object, **options: object) -> None:
        if failures:
            failures.pop()
            raise RuntimeError("planted")
        real(*arguments, **options)

    monkeypatch.setattr(server, "ERROR_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(loop, place, fail_once)
    # The limits are checked while there is a client that has said nothing.
    silent = socket.create_connection(("127.0.0.1", store.port), timeout=20)
    client = socket.create_connection(("127.0.0.1", store.port), timeout=20)
    client.sendall(b"garbage")
    client.close()
    for number in range(10):
        store.set("k", str(number))
    other = TCPStore("127.0.0.1", store.port)
    assert other.get("k") == b"9" and not failures and "internal error" in caplog.text
    silent.close()
    other.close()
    store.close()
