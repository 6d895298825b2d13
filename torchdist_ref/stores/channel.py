"""A client's end of a TCP connection: send all, take exactly so much, both before a deadline.

The socket blocks, for a slice of time at most: one system call sends, one waits and reads. Ctrl-C is answered between
slices (see `waiting`). It knows nothing of what is said: that is `tcp_client`'s.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from time import monotonic

from torchdist_ref.timeouts import CHECK_SECONDS, Deadline, max_sleep

_ROOM = 4096
_LARGE = 2**20


class Lost(Exception):
    """The connection broke while an answer was due."""


class Channel:
    """A socket that sends and takes bytes before a deadline."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, _as_option(CHECK_SECONDS))
        self._limit = CHECK_SECONDS
        self._buffer = bytearray()

    def send(self, data: bytes, deadline: Deadline) -> None:
        """Send everything, or raise Lost, or TimeoutError at the deadline."""
        sent = 0
        while sent < len(data):
            try:
                sent += self._sock.send(memoryview(data)[sent:] if sent else data)
            except (TimeoutError, BlockingIOError):
                if deadline.passed():
                    raise TimeoutError from None
            except OSError as error:
                raise Lost(str(error)) from error

    def take(self, size: int, deadline: Deadline) -> bytes:
        """Exactly `size` bytes, or Lost, or TimeoutError at the deadline."""
        while len(self._buffer) < size:
            self._buffer += self.receive(deadline, max(_ROOM, min(size - len(self._buffer), _LARGE)))
        piece = bytes(self._buffer[:size])
        del self._buffer[:size]
        return piece

    def receive(self, deadline: Deadline, most: int = _ROOM) -> bytes:
        """What comes next from the socket, some bytes at least, or Lost, or TimeoutError at the deadline."""
        longest = CHECK_SECONDS
        while True:
            if self._limit != longest or deadline.at - monotonic() < longest:
                self._limit_wait(deadline, longest)
            try:
                data = self._sock.recv(most)
            except (TimeoutError, BlockingIOError):
                longest = max_sleep()
                continue
            except OSError as error:
                raise Lost(str(error)) from error
            if not data:
                raise Lost("the server closed the connection")
            return data

    def _limit_wait(self, deadline: Deadline, longest: float) -> None:
        """Let the next read block until the deadline, and for `longest` seconds at most."""
        seconds = min(deadline.at - monotonic(), longest)
        if seconds <= 0:
            raise TimeoutError
        if seconds != self._limit:
            # Not `settimeout`, which would have Python call `poll` before every read and write.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _as_option(seconds))
            self._limit = seconds

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def abort(self) -> None:
        """Wake the thread that waits on this socket; it finds the connection lost."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


def _as_option(seconds: float) -> bytes:
    if os.name == "nt":
        return struct.pack("@L", max(1, int(seconds * 1000)))
    return struct.pack("@ll", int(seconds), max(1, int(seconds % 1 * 1e6)))
