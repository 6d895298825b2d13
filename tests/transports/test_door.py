"""The door at which ranks of other hosts call: who gets in, and who delays nobody."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from time import monotonic

import pytest

from torchdist_ref.errors import RankStalledError
from torchdist_ref.transports.connection import SECRET_BYTES, Acceptor, handshake_message

SECRET = bytes(range(SECRET_BYTES))


@contextmanager
def street() -> Iterator[tuple[Acceptor, ExitStack, tuple[str, int]]]:
    """A door, what closes callers in the end, and where to call."""
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as callers:
        with closing(Acceptor(server, SECRET)) as door:
            yield door, callers, server.getsockname()


def call(callers: ExitStack, address: tuple[str, int], *said: bytes) -> socket.socket:
    caller = callers.enter_context(socket.create_connection(address))
    for part in said:
        caller.sendall(part)
    return caller


def reset(caller: socket.socket) -> None:
    """What a port scanner leaves behind."""
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    caller.close()


STRANGERS = {
    "silent": lambda caller: None,
    "gone": lambda caller: caller.close(),
    "reset": reset,
    "reset in the middle": lambda caller: (caller.sendall(b"x"), reset(caller)),
    "half a greeting": lambda caller: (caller.sendall(SECRET), caller.shutdown(socket.SHUT_WR)),
    "noise": lambda caller: caller.sendall(b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n"),
    "another secret": lambda caller: caller.sendall(handshake_message(bytes(SECRET_BYTES), 1)),
    "another rank": lambda caller: (caller.sendall(handshake_message(SECRET, 7)), caller.shutdown(socket.SHUT_WR)),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_delays_nobody_and_ends_nothing(stranger: str) -> None:
    with street() as (door, callers, address):
        for _ in range(3):
            STRANGERS[stranger](call(callers, address))
        begin = monotonic()
        ours = call(callers, address, handshake_message(SECRET, 1))
        rank, sock = door.next([1, 2], begin + 20)
        with sock:
            assert rank == 1 and sock.getpeername() == ours.getsockname()
            # A greeting used to be waited for five seconds, each stranger's after the other's.
            assert monotonic() - begin < 4


def test_a_rank_may_speak_slowly_and_ranks_come_in_any_order() -> None:
    with street() as (door, callers, address):
        slow = call(callers, address, handshake_message(SECRET, 300)[:7])
        call(callers, address, handshake_message(SECRET, 2))
        rank, sock = door.next([2, 300], monotonic() + 20)
        sock.close()
        slow.sendall(handshake_message(SECRET, 300)[7:])
        late, other = door.next([300], monotonic() + 20)
        other.close()
        assert (rank, late) == (2, 300)


def test_what_follows_a_greeting_is_left_to_read() -> None:
    with street() as (door, callers, address):
        call(callers, address, handshake_message(SECRET, 1) + b"first frame")
        _, sock = door.next([1], monotonic() + 20)
        with sock:
            sock.setblocking(True)
            assert sock.recv(100) == b"first frame"


def test_who_does_not_come_is_named() -> None:
    with street() as (door, callers, address):
        call(callers, address)
        with pytest.raises(RankStalledError, match=r"ranks \[1, 3\] did not connect in time"):
            door.next({3, 1}, monotonic() + 0.05)
