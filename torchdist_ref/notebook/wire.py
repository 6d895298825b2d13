"""How the kernel, the rank server and the ranks talk: pickled messages with a length, over Unix socket pairs.

All ends belong to one user and were made by the kernel, so pickles are trusted. A message is a tuple that begins with
its kind. What kinds there are, and who sends them:

====================  =========================================================================
kernel → server       ``start`` rank, environment (with two descriptors) · ``signal`` rank, number
server → kernel       ``ready`` · ``failed`` why · ``started`` rank, process id · ``signalled`` rank, number ·
                      ``ended`` rank, status
kernel → rank         ``run`` source, file name · ``get`` name · ``put`` name, pickle
rank → kernel         ``begun`` · ``display`` MIME bundle · ``done`` failure or None, value or None
====================  =========================================================================

A rank's output does not come this way but through a pipe, so that what C code and subprocesses print comes too.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

_HEAD = struct.Struct("!Q")
_MOST_DESCRIPTORS = 2

Message = tuple[Any, ...]


def send(channel: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send one message, and with it open files."""
    body = pickle.dumps(message)
    socket.send_fds(channel, [_HEAD.pack(len(body))], descriptors)
    channel.sendall(body)


def receive(channel: socket.socket) -> Message:
    """Wait for one message.

    Raises:
        EOFError: If the other side is gone.
    """
    return receive_with_descriptors(channel)[0]


def receive_with_descriptors(channel: socket.socket) -> tuple[Message, list[int]]:
    """Wait for one message and take the open files that came with it.

    Raises:
        EOFError: If the other side is gone.
    """
    try:
        head, descriptors, _, _ = socket.recv_fds(channel, _HEAD.size, _MOST_DESCRIPTORS)
        (length,) = _HEAD.unpack(head + _exactly(channel, _HEAD.size - len(head) if head else 1))
        return pickle.loads(_exactly(channel, length)), list(descriptors)
    except ConnectionError as error:
        raise EOFError from error


def _exactly(channel: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = channel.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
