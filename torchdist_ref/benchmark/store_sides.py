"""The two sides of each store that is measured: ours, torch's, and a bare echo of as many bytes.

The echo is what a request and its answer cost at least in Python over a socket: a server that sends back what it got,
a client that sends and receives. It knows nothing of keys.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as theirs

from torchdist_ref.stores import TCPStore

HOST = "127.0.0.1"
VALUE = b"sixteen bytes..."
_MESSAGE = 64
_ROOM = 4096
_STOP = b"stop"
# torch's stubs leave it out.
_torch_store: Any = theirs.TCPStore  # type: ignore[attr-defined]

Action = Callable[[], Any]


class EchoServer:
    """Sends back what it receives, to any number of clients, on one thread.

    >>> server = EchoServer()
    >>> client = EchoClient(server.port)
    >>> client.echo() == bytes(64), client.close(), server.close()
    (True, None, None)
    """

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0), backlog=1024)
        self._stop, self._stopped = socket.socketpair()
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._stopped, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._serve, name="echo server")
        self._thread.start()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                key.data(key.fileobj)

    def _accept(self, listener: socket.socket) -> None:
        client, _ = listener.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(client, selectors.EVENT_READ, self._echo)

    def _echo(self, client: socket.socket) -> None:
        data = client.recv(_ROOM)
        if data:
            client.sendall(data)
        else:
            self._selector.unregister(client)
            client.close()

    def close(self) -> None:
        """Stop, and close all connections."""
        self._stop.send(_STOP)
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._stop.close()


class EchoClient:
    """The other end."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection((HOST, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._message = bytes(_MESSAGE)

    def echo(self) -> bytes:
        """There and back."""
        self._socket.sendall(self._message)
        return self._socket.recv(_ROOM)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


def serve_ours() -> tuple[int, Action]:
    """Start our server: its port, and how to end it."""
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    return store.port, store.close


def serve_torch() -> tuple[int, Action]:
    """Start torch's server. It ends when nothing refers to it any more."""
    kept = [_torch_store(HOST, 0, None, True, wait_for_workers=False)]
    return int(kept[0].port), kept.clear


def serve_echo() -> tuple[int, Action]:
    """Start the echo."""
    server = EchoServer()
    return server.port, server.close


@dataclass(frozen=True)
class Client:
    """One client, connected.

    Attributes:
        actions: What it can do over and over, by name.
        barrier: Meet so many clients at a key; None where there are no keys.
    """

    actions: dict[str, Action]
    barrier: Callable[[str, int], Any] | None


def of_ours(port: int, name: str) -> Client:
    """Connect one of our clients to our server."""
    return _client(TCPStore(HOST, port), name)


def of_torch(port: int, name: str) -> Client:
    """Connect one of torch's clients to torch's server."""
    return _client(_torch_store(HOST, port, None, False), name)


def of_echo(port: int, name: str) -> Client:
    """Connect to the echo, which does the same whatever is asked."""
    return Client(dict.fromkeys(OPERATIONS, EchoClient(port).echo), None)


def _client(store: Any, name: str) -> Client:
    value, number = f"{name}/value", f"{name}/number"
    store.set(value, VALUE)
    actions: dict[str, Action] = {
        "set": lambda: store.set(value, VALUE),
        "get": lambda: store.get(value),
        "add": lambda: store.add(number, 1),
    }
    return Client(actions, store.barrier if hasattr(store, "barrier") else _counted(store))


def _counted(store: Any) -> Callable[[str, int], None]:
    """A barrier as programs made it before torch 2.13 had one: the last to come sets a key that all wait for."""

    def barrier(key: str, world: int) -> None:
        if store.add(key, 1) == world:
            store.set(f"{key}/all", b"")
        store.wait([f"{key}/all"])

    return barrier


OPERATIONS = ("set", "get", "add")
ECHO = "echo"
Side = tuple[Callable[[], tuple[int, Action]], Callable[[int, str], Client]]
SIDES: dict[str, Side] = {
    "torchdist_ref": (serve_ours, of_ours),
    "torch": (serve_torch, of_torch),
    ECHO: (serve_echo, of_echo),
}
