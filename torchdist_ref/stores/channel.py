"""A client's end of a TCP connection: send all, take exactly so much, both before a deadline.

It knows nothing of what is said: that is `tcp_client`'s.
"""

from __future__ import annotations

import contextlib
import select
import socket

from torchdist_ref.stores.waiting import Deadline


class Lost(Exception):
    """The connection broke while an answer was due."""


class Channel:
    """A socket that sends and takes bytes before a deadline."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._buffer = bytearray()

    def send(self, data: bytes, deadline: Deadline) -> None:
        """Send everything, or raise Lost, or TimeoutError at the deadline."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._sock.send(rest) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)
            except OSError as error:
                raise Lost(str(error)) from error

    def take(self, size: int, deadline: Deadline) -> bytes:
        """Exactly `size` bytes, or Lost, or TimeoutError at the deadline."""
        while len(self._buffer) < size:
            self._wait(select.POLLIN, deadline)
            try:
                data = self._sock.recv(max(65536, min(size - len(self._buffer), 2**20)))
            except BlockingIOError:
                continue
            except OSError as error:
                raise Lost(str(error)) from error
            if not data:
                raise Lost("the server closed the connection")
            self._buffer += data
        piece = bytes(self._buffer[:size])
        del self._buffer[:size]
        return piece

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def abort(self) -> None:
        """Wake the thread that waits on this socket; it finds the connection lost."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _wait(self, event: int, deadline: Deadline) -> None:
        self._poll.modify(self._sock, event)
        while not self._poll.poll(deadline.slice() * 1000):
            if deadline.passed():
                raise TimeoutError
