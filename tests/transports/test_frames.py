"""Acceptor of connections from other hosts, and the check of frames."""

from __future__ import annotations

import os
import resource
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from time import monotonic

import pytest

from tests.process_ends import answer_of_child
from torchdist_ref.errors import AuthenticationError, DistNetworkError, RankDiedError, RankStalledError
from torchdist_ref.transports import acceptor as acceptor_module
from torchdist_ref.transports.acceptor import Acceptor, authenticate_to
from torchdist_ref.transports.frames import check_ranges

KEY = bytes(range(32))
ACCEPTING = 5


@contextmanager
def acceptor_and_address() -> Iterator[tuple[Acceptor, ExitStack, tuple[str, int]]]:
    """Yield an acceptor, a stack that closes the clients in the end, and the address."""
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as clients:
        with closing(Acceptor(server, KEY, ACCEPTING)) as acceptor:
            yield acceptor, clients, server.getsockname()


def connect(clients: ExitStack, address: tuple[str, int], *parts: bytes) -> socket.socket:
    client = clients.enter_context(socket.create_connection(address))
    for part in parts:
        client.sendall(part)
    return client


def join(clients: ExitStack, address: tuple[str, int], rank: int, then: bytes = b"", key: bytes = KEY) -> socket.socket:
    """Connect and shake hands on another thread."""
    client = clients.enter_context(socket.create_connection(address))

    def run() -> None:
        with suppress(OSError, DistNetworkError):
            authenticate_to(client, key, rank, ACCEPTING, monotonic() + 20)
            client.sendall(then)

    threading.Thread(target=run, daemon=True).start()
    return client


def reset(client: socket.socket) -> None:
    """Reset the connection, as a port scanner does."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def hello(rank: int) -> bytes:
    return rank.to_bytes(4, "little") + bytes(16)


UNAUTHENTICATED = {
    "silent": lambda client: None,
    "gone": lambda client: client.close(),
    "reset": reset,
    "reset in the middle": lambda client: (client.sendall(b"x"), reset(client)),
    "half a handshake": lambda client: (client.sendall(hello(1)), client.shutdown(socket.SHUT_WR)),
    "garbage": lambda client: client.sendall(b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n" * 4),
    "no proof": lambda client: client.sendall(hello(1) + bytes(32)),
}


@pytest.mark.parametrize("kind", UNAUTHENTICATED)
def test_an_unauthenticated_client_does_not_delay_or_abort_others(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Handshakes once ran one after the other, for up to that time each.
    monkeypatch.setattr(acceptor_module, "HANDSHAKE_SECONDS", 60.0)
    with acceptor_and_address() as (acceptor, clients, address):
        for _ in range(3):
            UNAUTHENTICATED[kind](connect(clients, address))
        ours = join(clients, address, 1)
        rank, sock = acceptor.next([1, 2], monotonic() + 20)
        with sock:
            assert rank == 1 and sock.getpeername() == ours.getsockname()


@pytest.mark.parametrize("wrong", ["key", "rank"])
def test_a_client_with_another_key_or_an_unexpected_rank_is_not_accepted(wrong: str) -> None:
    with acceptor_and_address() as (acceptor, clients, address):
        join(clients, address, 7 if wrong == "rank" else 1, key=bytes(32) if wrong == "key" else KEY)
        with pytest.raises(RankStalledError):
            acceptor.next([1], monotonic() + 0.2)


def record(client: socket.socket, relay: socket.socket, recorded: list[bytes]) -> None:
    """Pass on one handshake between a client and an acceptor, and record what the client says."""
    with suppress(OSError):
        for size, source, target in ((20, client, relay), (48, relay, client), (32, client, relay)):
            data = source.recv(size, socket.MSG_WAITALL)
            if source is client:
                recorded.append(data)
            target.sendall(data)


def test_a_recorded_handshake_does_not_authenticate_again() -> None:
    with acceptor_and_address() as (acceptor, clients, address):
        with socket.create_server(("127.0.0.1", 0)) as tap:
            join(clients, tap.getsockname(), 1)
            client, relay, recorded = tap.accept()[0], connect(clients, address), []
            clients.enter_context(client)
            threading.Thread(target=record, args=(client, relay, recorded), daemon=True).start()
            rank, sock = acceptor.next([1], monotonic() + 20)
            sock.close()
            assert rank == 1 and [len(data) for data in recorded] == [20, 32]
        connect(clients, address, *recorded)
        with pytest.raises(RankStalledError):
            acceptor.next([1], monotonic() + 0.2)


def test_a_rank_recognizes_an_acceptor_without_the_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as clients:
        client = connect(clients, server.getsockname())
        impostor = clients.enter_context(server.accept()[0])
        # The first message of the real acceptor of another group, or its own challenge sent back, proves nothing.
        impostor.sendall(bytes(48))
        with pytest.raises(AuthenticationError, match="is not rank 5 of this group"):
            authenticate_to(client, KEY, 1, ACCEPTING, monotonic() + 20)
        assert len(impostor.recv(1000)) == 20, "the rank has not proved anything to an impostor"


def test_a_handshake_may_be_slow_and_ranks_may_connect_in_any_order() -> None:
    with acceptor_and_address() as (acceptor, clients, address):
        with socket.create_server(("127.0.0.1", 0)) as tap:
            join(clients, tap.getsockname(), 300)
            slow, relay = clients.enter_context(tap.accept()[0]), connect(clients, address)
            first = slow.recv(20, socket.MSG_WAITALL)
            relay.sendall(first[:7])
            join(clients, address, 2)
            rank, sock = acceptor.next([2, 300], monotonic() + 20)
            sock.close()
            relay.sendall(first[7:])
            threading.Thread(target=finish, args=(slow, relay), daemon=True).start()
            late, other = acceptor.next([300], monotonic() + 20)
            other.close()
            assert (rank, late) == (2, 300)


def finish(client: socket.socket, relay: socket.socket) -> None:
    with suppress(OSError):
        client.sendall(relay.recv(48, socket.MSG_WAITALL))
        for byte in client.recv(32, socket.MSG_WAITALL):
            relay.sendall(bytes([byte]))


def test_bytes_after_a_handshake_stay_in_the_socket() -> None:
    with acceptor_and_address() as (acceptor, clients, address):
        join(clients, address, 1, then=b"first frame")
        _, sock = acceptor.next([1], monotonic() + 20)
        with sock:
            sock.setblocking(True)
            assert sock.recv(100) == b"first frame"


def test_ranks_that_do_not_connect_are_named() -> None:
    with acceptor_and_address() as (acceptor, clients, address):
        connect(clients, address)
        with pytest.raises(RankStalledError, match=r"ranks \[1, 3\] did not connect in time"):
            acceptor.next({3, 1}, monotonic() + 0.05)


def is_closed(client: socket.socket) -> bool:
    """Return whether the other end has closed the connection."""
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False


def test_silent_clients_are_closed_and_never_fill_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor_module, "HANDSHAKE_SECONDS", 0.05)
    monkeypatch.setattr(acceptor_module, "MAX_HANDSHAKES", 4)
    with acceptor_and_address() as (acceptor, clients, address):
        silent = [connect(clients, address) for _ in range(9)]
        # One call closes all, unless the machine is busy: silence ends in 0.05 s.
        deadline = monotonic() + 20
        for client in silent:
            client.settimeout(0.01)
            while not is_closed(client):
                assert monotonic() < deadline and len(acceptor.handshakes) <= 4
                with pytest.raises(RankStalledError):
                    acceptor.next([1], monotonic() + 0.3)


def test_a_lack_of_descriptors_costs_the_oldest_handshake_and_no_processor_time() -> None:
    """Once it kept honest ranks out for the whole time-out, while the acceptor spun."""
    with acceptor_and_address() as (acceptor, clients, address):
        for _ in range(20):
            connect(clients, address)
        ours = join(clients, address, 1)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = max(map(int, os.listdir("/proc/self/fd"))) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 3, hard))
        try:
            rank, sock = acceptor.next([1], monotonic() + 20)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        with sock:
            assert rank == 1 and sock.getpeername() == ours.getsockname()


def test_an_acceptor_without_descriptors_or_handshakes_raises_at_once() -> None:
    """Once it waited for the time-out, and then blamed the rank that had connected."""
    with acceptor_and_address() as (acceptor, clients, address):
        connect(clients, address)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket() as last:
            # Lower numbers that are free.
            filled = [os.dup(last.fileno()) for _ in range(last.fileno())]
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(filled) + 1, hard))
            try:
                with pytest.raises(OSError, match="Too many open files"):
                    acceptor.next([1], monotonic() + 20)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                for descriptor in filled:
                    os.close(descriptor)


def test_ranges_outside_the_allowed_ones_are_rejected() -> None:
    check_ranges([(10, 5), (100, 1)], [(8, 8), (100, 4)])
    for wrong in [(7, 2), (10, 7), (200, 1), (2**63, 8)]:
        with pytest.raises(DistNetworkError, match="not its part"):
            check_ranges([wrong], [(8, 8), (100, 4)])


class FailedWatch:
    """Watch that knows of a failure."""

    def failure(self, ranks: object) -> BaseException:
        return RankDiedError(f"one of {ranks} died")


def test_a_failure_is_found_while_clients_connect_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with acceptor_and_address() as (acceptor, clients, address):
        # Something to accept at every look, as while many clients connect.
        monkeypatch.setattr(acceptor, "accept", lambda: None)
        connect(clients, address)
        with pytest.raises(RankDiedError, match="one of"):
            acceptor.next([1, 2], monotonic() + 3600, FailedWatch())  # type: ignore[arg-type]


def test_a_forked_child_closes_its_copies_of_the_acceptors_sockets() -> None:
    with acceptor_and_address() as (acceptor, clients, address):
        connect(clients, address, b"s")
        deadline = monotonic() + 20
        while not acceptor.handshakes and monotonic() < deadline:
            with suppress(RankStalledError):
                acceptor.next({1}, monotonic() + 0.05)
        [handshake] = acceptor.handshakes.values()
        states = answer_of_child(lambda: f"{acceptor.listener.fileno()} {handshake.sock.fileno()}")
        assert states == "-1 -1" and handshake.sock.fileno() != -1
