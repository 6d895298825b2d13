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

from torchdist_ref.stores.waiting import SLICE, Deadline

_ROOM = 4096
_LARGE = 2**20


class Lost(Exception):
    """The connection broke while an answer was due."""


class Channel:
    """A socket that sends and takes bytes before a deadline."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._slice = 0.0
        self._last_no_longer_than(SLICE)
        self._buffer = bytearray()

    def send(self, data: bytes, deadline: Deadline) -> None:
        """Send everything, or raise Lost, or TimeoutError at the deadline."""
        sent = 0
        while sent < len(data):
            try:
                sent += self._sock.send(memoryview(data)[sent:] if sent else data)
            except (TimeoutError, BlockingIOError):
                self._wait_until(deadline)
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
        while True:
            if self._slice < SLICE or deadline.at - monotonic() < SLICE:
                self._wait_until(deadline)
            try:
                data = self._sock.recv(most)
            except (TimeoutError, BlockingIOError):
                continue
            except OSError as error:
                raise Lost(str(error)) from error
            if not data:
                raise Lost("the server closed the connection")
            return data

    def _wait_until(self, deadline: Deadline) -> None:
        """Let the next call last until the deadline, and for a slice at most."""
        left = min(deadline.at - monotonic(), SLICE)
        if left <= 0:
            raise TimeoutError
        if left != self._slice:
            self._last_no_longer_than(left)

    def _last_no_longer_than(self, seconds: float) -> None:
        # Not `settimeout`, which would have Python ask `poll` before every call.
        self._slice = seconds
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._sock.setsockopt(socket.SOL_SOCKET, option, _as_option(seconds))

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
    return struct.pack("@ll", 0, max(1, int(seconds * 1e6)))
