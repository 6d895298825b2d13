"""Acceptor of connections from other hosts, and the check of frames."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from time import monotonic

import pytest

from torchdist_ref.errors import DistNetworkError, RankStalledError
from torchdist_ref.transports.connection import SECRET_BYTES, Acceptor, check_ranges, handshake_message

SECRET = bytes(range(SECRET_BYTES))


@contextmanager
def acceptor_and_address() -> Iterator[tuple[Acceptor, ExitStack, tuple[str, int]]]:
    """Yield an acceptor, a stack that closes the clients in the end, and the address."""
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as clients:
        with closing(Acceptor(server, SECRET)) as acceptor:
            yield acceptor, clients, server.getsockname()


def connect(clients: ExitStack, address: tuple[str, int], *parts: bytes) -> socket.socket:
    client = clients.enter_context(socket.create_connection(address))
    for part in parts:
        client.sendall(part)
    return client


def reset(client: socket.socket) -> None:
    """Reset the connection, as a port scanner does."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


UNAUTHENTICATED = {
    "silent": lambda client: None,
    "gone": lambda client: client.close(),
    "reset": reset,
    "reset in the middle": lambda client: (client.sendall(b"x"), reset(client)),
    "half a handshake": lambda client: (client.sendall(SECRET), client.shutdown(socket.SHUT_WR)),
    "garbage": lambda client: client.sendall(b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n"),
    "another secret": lambda client: client.sendall(handshake_message(bytes(SECRET_BYTES), 1)),
    "another rank": lambda client: (client.sendall(handshake_message(SECRET, 7)), client.shutdown(socket.SHUT_WR)),
}


@pytest.mark.parametrize("kind", UNAUTHENTICATED)
def test_an_unauthenticated_client_does_not_delay_or_abort_others(kind: str) -> None:
    with acceptor_and_address() as (acceptor, clients, address):
        for _ in range(3):
            UNAUTHENTICATED[kind](connect(clients, address))
        begin = monotonic()
        ours = connect(clients, address, handshake_message(SECRET, 1))
        rank, sock = acceptor.next([1, 2], begin + 20)
        with sock:
            assert rank == 1 and sock.getpeername() == ours.getsockname()
            # Handshakes once ran one after the other, for up to five seconds each.
            assert monotonic() - begin < 4


def test_a_handshake_may_be_slow_and_ranks_may_connect_in_any_order() -> None:
    with acceptor_and_address() as (acceptor, clients, address):
        slow = connect(clients, address, handshake_message(SECRET, 300)[:7])
        connect(clients, address, handshake_message(SECRET, 2))
        rank, sock = acceptor.next([2, 300], monotonic() + 20)
        sock.close()
        slow.sendall(handshake_message(SECRET, 300)[7:])
        late, other = acceptor.next([300], monotonic() + 20)
        other.close()
        assert (rank, late) == (2, 300)


def test_bytes_after_a_handshake_stay_in_the_socket() -> None:
    with acceptor_and_address() as (acceptor, clients, address):
        connect(clients, address, handshake_message(SECRET, 1) + b"first frame")
        _, sock = acceptor.next([1], monotonic() + 20)
        with sock:
            sock.setblocking(True)
            assert sock.recv(100) == b"first frame"


def test_ranks_that_do_not_connect_are_named() -> None:
    with acceptor_and_address() as (acceptor, clients, address):
        connect(clients, address)
        with pytest.raises(RankStalledError, match=r"ranks \[1, 3\] did not connect in time"):
            acceptor.next({3, 1}, monotonic() + 0.05)


def test_ranges_outside_the_allowed_ones_are_rejected() -> None:
    check_ranges([(10, 5), (100, 1)], [(8, 8), (100, 4)])
    for wrong in [(7, 2), (10, 7), (200, 1), (2**63, 8)]:
        with pytest.raises(DistNetworkError, match="not its part"):
            check_ranges([wrong], [(8, 8), (100, 4)])
