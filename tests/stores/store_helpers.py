"""Helpers of the tests of stores: servers in other processes, and a TCP relay that breaks connections."""

from __future__ import annotations

import array
import contextlib
import fcntl
import multiprocessing
import socket
import termios
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch.distributed

from torchdist_ref.stores import TCPStore

FORK = multiprocessing.get_context("fork")


@contextlib.contextmanager
def in_child(body: Callable[..., None], *arguments: Any) -> Iterator[tuple[Connection, BaseProcess]]:
    """Run a function in a forked process, which is killed at the end; its first argument is its end of a pipe."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=body, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours, process
    finally:
        process.kill()
        process.join()
        ours.close()


def serve(pipe: Connection, kind: Callable[..., Any]) -> None:
    """Run a server until killed, and send its port."""
    store = kind("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


@contextlib.contextmanager
def server(kind: Callable[..., Any] = TCPStore) -> Iterator[tuple[int, BaseProcess]]:
    """Run a store server in another process; yield (port, process)."""
    with in_child(serve, kind) as (pipe, process):
        yield pipe.recv(), process


def torch_tcp(*arguments: Any, **options: Any) -> torch.distributed.TCPStore:
    return torch.distributed.TCPStore(*arguments, **options)


def undelivered(client: socket.socket) -> int:
    """Return the bytes that the other end's kernel has not accepted: a busy one does that later than the call."""
    unacknowledged = array.array("i", [0])
    fcntl.ioctl(client, termios.TIOCOUTQ, unacknowledged)
    return unacknowledged[0]


class LossyRelay:
    """TCP relay in front of a server, which counts requests and breaks connections.

    Attributes:
        lose_responses: number of responses (one read each) to drop; their connection is broken instead. The server has
            run the request, but the client does not know.
        cut_off: whether bytes of either side are dropped from now on, as in a network that is cut.
        requests: number of reads from clients.
        connections: number of connections.
    """

    def __init__(self, port: int) -> None:
        self.lose_responses = 0
        self.cut_off = False
        self.requests = 0
        self.connections = 0
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._threads = [self._start(self._accept)]

    def __enter__(self) -> LossyRelay:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        self.break_connections()
        for thread in self._threads:
            thread.join()

    def break_connections(self) -> None:
        """Break all connections."""
        for end in list(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _start(self, body: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=body, args=arguments, daemon=True)
        thread.start()
        return thread

    def _accept(self) -> None:
        while True:
            try:
                client = self._listener.accept()[0]
            except OSError:
                return
            # A client that has disconnected again must not end the relay for the others.
            with contextlib.suppress(OSError):
                upstream = socket.create_connection(("127.0.0.1", self._to))
                for end in (client, upstream):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.connections += 1
                self._open += [client, upstream]
                self._threads.append(self._start(self._relay, client, upstream, False))
                self._threads.append(self._start(self._relay, upstream, client, True))

    def _relay(self, source: socket.socket, target: socket.socket, responses: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.cut_off:
                    continue
                if not responses:
                    self.requests += 1
                elif self.lose_responses:
                    self.lose_responses -= 1
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
