"""Stores in other processes, and a wire in between that can be cut: what the tests of stores share."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
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
    """Run a function in a forked process; its first argument is its end of a pipe. Killed at the end."""
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
    """Hold a server until killed; say its port."""
    store = kind("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


@contextlib.contextmanager
def server(kind: Callable[..., Any] = TCPStore) -> Iterator[tuple[int, BaseProcess]]:
    """A store server in a process of its own: (port, process)."""
    with in_child(serve, kind) as (pipe, process):
        yield pipe.recv(), process


def torch_tcp(*arguments: Any, **options: Any) -> torch.distributed.TCPStore:
    return torch.distributed.TCPStore(*arguments, **options)


class Wire:
    """A TCP relay in front of a server. It counts what passes, and cuts connections when told.

    `cut_answers` many answers of the server (one read each) are swallowed, and their connection is cut instead:
    the server has acted, the client does not know.
    """

    def __init__(self, port: int) -> None:
        self.cut_answers = 0
        self.requests = 0
        self.connections = 0
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._threads = [self._start(self._accept)]

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join()

    def cut(self) -> None:
        """Cut all connections as they are."""
        for end in list(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _start(self, body: Callable[..., None], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=body, args=arguments, daemon=True)
        thread.start()
        return thread

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                upstream = socket.create_connection(("127.0.0.1", self._to))
                for end in (client, upstream):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.connections += 1
                self._open += [client, upstream]
                self._threads.append(self._start(self._relay, client, upstream, False))
                self._threads.append(self._start(self._relay, upstream, client, True))

    def _relay(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not answers:
                    self.requests += 1
                elif self.cut_answers:
                    self.cut_answers -= 1
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
