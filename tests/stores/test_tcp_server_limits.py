"""Limits of the store's server on its clients' buffers, time, number and descriptors, and failures inside the server.

The server's loop runs on the thread of the test, one round at a time, with a clock of the test.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.stores.store_helpers import undelivered
from tests.stores.test_tcp_bounds import really_used, with_budget
from tests.stores.test_tcp_protocol import response_parts, validated
from torchdist_ref.errors import ArgumentError
from torchdist_ref.stores import TCPStore, sockets
from torchdist_ref.stores import hash as hash_module
from torchdist_ref.stores.hash import MAX_NUMBER_BYTES, StoreFullError, Table
from torchdist_ref.stores.tcp import server
from torchdist_ref.stores.tcp.operations import MAX_VALUE_BYTES, Op
from torchdist_ref.stores.tcp.protocol import MAGIC, MAX_KEYS, Request, Status, write_request
from torchdist_ref.stores.tcp.requests import RECONNECT_SECONDS, SESSION_OVERHEAD_BYTES, RequestHandler
from torchdist_ref.timeouts import Deadline

HANDSHAKE = write_request(Op.VALIDATE, MAGIC)
GREETING = write_request(Op.PING, 7)
MIB = 2**20


# Counters


def test_a_long_value_is_no_counter_and_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each request for a number parsed all of a value of 8 MiB."""
    parsed: list[int] = []

    def recorded(text: bytes) -> int:
        parsed.append(len(text))
        return int(text)

    monkeypatch.setattr(hash_module, "int", recorded, raising=False)
    table = Table()
    for text in (b"1" * MAX_VALUE_BYTES, b"0" * (MAX_NUMBER_BYTES + 1)):
        table.values[b"k"] = text
        with pytest.raises(ArgumentError, match="must be one that holds a number"):
            table.add(b"k", 1)
    table.values[b"k"] = b"-9223372036854775808"
    assert table.number(b"k") == -(2**63) and max(parsed) <= MAX_NUMBER_BYTES


def test_a_change_of_a_counter_is_parsed_once_for_all_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = RequestHandler()
    for number in range(50):
        handler.handle(validated(handler, b"%d" % number), Request(Op.WAIT_NUMBER, (b"n", 10 + number), 1))
    setter, number_of, parsed = validated(handler), Table.number, list[bytes]()
    monkeypatch.setattr(Table, "number", lambda table, key: (parsed.append(key), number_of(table, key))[1])
    handler.handle(setter, Request(Op.SET, (b"n", b"9")))
    assert parsed == [b"n"]


# The loop on the thread of the test


class Clock:
    """Clock that stands still until the test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def loop(clock: Clock) -> Iterator[server.ServerLoop]:
    made = server.ServerLoop([listen(), listen()], clock)
    yield made
    made.close_copies()


def listen() -> socket.socket:
    return sockets.listen("127.0.0.1", 0, Deadline(20))[0]


def dial(loop: server.ServerLoop, data: bytes = b"", receive_bytes: int = 0, first: bytes = HANDSHAKE) -> socket.socket:
    """Connect a client that has sent some bytes; the server has handled them."""
    client = socket.socket()
    if receive_bytes:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.connect(next(iter(loop.acceptor.listeners.values())).getsockname())
    deliver(loop, client, first + data)
    return client


def deliver(loop: server.ServerLoop, client: socket.socket, data: bytes) -> None:
    """Send bytes, which the server has read afterward, unless it has disconnected the client."""
    left = memoryview(data)
    client.setblocking(False)
    with contextlib.suppress(ConnectionError):
        while left or undelivered(client):
            with contextlib.suppress(BlockingIOError):
                left = left[client.send(left) :] if left else left
            loop.run_round(wait=False)
    # What the kernel has accepted is read in so many rounds at most.
    for _ in range(3 + len(data) // server.MAX_READ_BYTES):
        loop.run_round(wait=False)


def receive(client: socket.socket) -> bytes:
    assert select.select([client], [], [], 20)[0]
    return client.recv(64)


def is_closed(client: socket.socket) -> bool:
    try:
        while client.recv(MIB):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True


def becomes_closed(client: socket.socket) -> bool:
    """Return whether the connection ends within ten seconds; a busy kernel delivers the end later."""
    deadline = time.monotonic() + 10
    while not is_closed(client):
        if not select.select([client], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return False
    return True


def close(*clients: socket.socket) -> None:
    for client in clients:
        client.close()


# Buffers


def test_a_client_that_is_not_validated_holds_no_more_than_its_greeting(loop: server.ServerLoop) -> None:
    before = loop.handler.memory.used
    silent = [dial(loop, first=HANDSHAKE[: number % 5]) for number in range(20)]
    assert loop.handler.memory.used - before == 4 * (0 + 1 + 2 + 3 + 4)
    large = dial(loop, first=write_request(Op.SET, b"/k", bytes(1000)))
    assert becomes_closed(large) and len(loop.clients) == len(silent)
    close(large, *silent)


def test_requests_that_have_not_arrived_whole_count_in_the_budget(loop: server.ServerLoop) -> None:
    """Those that have not moved for the longest time are given up for others, and all memory comes back."""
    memory, part = loop.handler.memory, write_request(Op.SET, b"/part", bytes(7 * MIB))[:50_000]
    memory.limit = 500_000
    clients = [dial(loop, part) for _ in range(30)]
    assert 400_000 < memory.used <= 500_000
    gone = [is_closed(each) for each in clients]
    assert gone == sorted(gone, reverse=True) and 8 <= gone.count(False) <= 10, "the oldest are gone"
    honest = dial(loop, write_request(Op.SET, b"/k", bytes(400_000)) + GREETING)
    assert receive(honest) == GREETING[1:] and len(loop.handler.table.values[b"/k"]) == 400_000
    close(honest, *clients)
    for _ in range(3):
        loop.run_round(wait=False)
    assert not loop.clients and memory.used == really_used(loop.handler)


def test_a_long_request_arrives_in_many_parts_and_others_are_answered_between(loop: server.ServerLoop) -> None:
    keys = [b"/%06d" % number for number in range(MAX_KEYS)]
    request = memoryview(write_request(Op.MULTI_SET, [(key, b"") for key in keys]))
    long, brief = dial(loop), dial(loop)
    answers = 0
    while b"/000000" not in loop.handler.table.values:
        with contextlib.suppress(BlockingIOError):
            request = request[long.send(request) :] if request else request
        deliver(loop, brief, write_request(Op.ADD, b"/n", 1))
        answers += 1
        assert receive(brief) == answers.to_bytes(8, "little")
    assert len(loop.handler.table.values) == MAX_KEYS + 1 and answers > 10
    close(long, brief)


def test_a_long_reply_is_sent_in_parts_and_then_the_next_request_runs(loop: server.ServerLoop) -> None:
    value = bytes(range(256)) * (16 * 4096)
    loop.handler.table.values[b"/large"] = value
    reader = dial(loop, write_request(Op.GET, b"/large") + write_request(Op.ADD, b"/read", 1), receive_bytes=4096)
    other, received = dial(loop), bytearray()
    assert b"/read" not in loop.handler.table.values, "its requests wait until it has read the reply"
    for number in range(1, 10_000):
        deliver(loop, other, write_request(Op.ADD, b"/n", 1))
        assert receive(other) == number.to_bytes(8, "little")
        with contextlib.suppress(BlockingIOError):
            while data := reader.recv(MIB):
                received += data
        if len(received) == 8 + len(value) + 8:
            break
    assert received[8:-8] == value and number > 5 and loop.handler.table.values[b"/read"] == b"1"
    close(reader, other)


def test_replies_that_nobody_reads_do_not_fill_the_store(loop: server.ServerLoop) -> None:
    """Once one reply of 8 GB, of the same value a thousand times, let the store refuse the requests of all others."""
    handler = loop.handler
    handler.memory.limit = 20 * MIB
    handler.table.set(b"/k", bytes(MIB))
    greedy = dial(loop, write_request(Op.MULTI_GET, [b"/k"] * 100), receive_bytes=4096)
    assert handler.memory.used > handler.memory.limit
    honest = dial(loop, write_request(Op.SET, b"/a", b"b") + write_request(Op.ADD, b"/n", 3))
    assert receive(honest) == (3).to_bytes(8, "little") and handler.table.values[b"/a"] == b"b"
    assert becomes_closed(greedy) and len(loop.clients) == 1 and handler.memory.used == really_used(handler)
    slow = dial(loop, write_request(Op.MULTI_GET, [b"/k"] * 4), receive_bytes=4096)
    with pytest.raises(StoreFullError):
        handler.table.set(b"/too large", bytes(20 * MIB))
    assert len(loop.clients) == 2, "nobody is disconnected for what does not fit anyway"
    close(greedy, honest, slow)


def test_clients_that_do_not_read_are_disconnected_when_the_budget_is_used_up(loop: server.ServerLoop) -> None:
    """Once 60 clients held 504 MiB of values that had been replaced meanwhile."""
    size, handler = 6 * MIB, loop.handler
    handler.memory.limit = 20 * MIB
    clients, held = [], []
    for number in range(6):
        handler.table.set(b"/k", bytes([number]) * size)
        clients.append(dial(loop, write_request(Op.GET, b"/k"), receive_bytes=4096))
        held.append(sum(each.unsent for each in loop.clients.values()))
        assert handler.memory.used == really_used(handler) + held[-1] <= handler.memory.limit
    assert 6 * MIB < max(held) <= 20 * MIB and len(loop.clients) == 2
    reader, received = clients[-1], bytearray()
    while len(received) < size + 8:
        loop.run_round(wait=False)
        with contextlib.suppress(BlockingIOError):
            received += reader.recv(MIB)
    assert received.endswith(bytes([5]) * 100) and not loop.clients[max(loop.clients)].unsent
    close(*clients)
    for _ in range(3):
        loop.run_round(wait=False)
    assert not loop.clients and handler.memory.used == really_used(handler)


# Idle clients, time and descriptors


def test_clients_that_do_not_introduce_themselves_are_disconnected_in_time(
    loop: server.ServerLoop, clock: Clock
) -> None:
    silent = [dial(loop, first=HANDSHAKE[:number]) for number in range(5)]
    idle = dial(loop, GREETING)
    assert receive(idle) == GREETING[1:]
    clock.now += server.HANDSHAKE_SECONDS - 0.001
    later = dial(loop, first=b"")
    loop.run_round(wait=False)
    assert len(loop.clients) == 7
    clock.now += 0.002
    # Nobody sends anything: the poller need not report a client.
    loop.run_round(wait=False)
    assert all(becomes_closed(each) for each in silent) and len(loop.clients) == 2
    deliver(loop, later, HANDSHAKE + GREETING)
    clock.now += 3 * server.HANDSHAKE_SECONDS
    for each in (later, idle):
        deliver(loop, each, GREETING)
        assert receive(each), "a client that has introduced itself may be idle for any time"
    close(later, idle, *silent)


def test_clients_that_have_only_greeted_are_capped_and_others_stay(
    loop: server.ServerLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_NEWCOMERS", 3)
    user = dial(loop, GREETING + write_request(Op.SET, b"/k", b"v"))
    session = dial(loop, write_request(Op.HELLO, b"name"))
    waiter = dial(loop, write_request(Op.WAIT, [b"/missing"]))
    silent = [dial(loop, GREETING if number % 2 else b"", first=HANDSHAKE[: 5 * (number % 2)]) for number in range(5)]
    assert all(becomes_closed(each) for each in silent[:2]) and not any(is_closed(each) for each in silent[2:])
    deliver(loop, silent[2], HANDSHAKE + write_request(Op.GET, b"/k"))
    silent += [dial(loop, GREETING) for _ in range(3)]
    assert [becomes_closed(each) for each in silent[3:5]] == [True, True]
    assert not any(is_closed(each) for each in (silent[2], *silent[5:]))
    assert not any(is_closed(each) for each in (user, session, waiter))
    close(user, session, waiter, *silent)


def test_a_will_is_executed_when_its_client_stays_away_and_the_server_is_idle(
    loop: server.ServerLoop, clock: Clock
) -> None:
    """A busy server waits longer: the client may be among those whose requests it has not read."""
    name = write_request(Op.HELLO, b"name")
    will = write_request(Op.SET_ON_DISCONNECT, b"/gone", b"1", [(b"/now", b"2")], number=1)
    values, other = loop.handler.table.values, dial(loop)
    client = dial(loop, name + will)
    assert values == {b"/now": b"2"}
    client.close()
    loop.run_round(wait=False)
    clock.now += RECONNECT_SECONDS - 0.001
    client = dial(loop, name)
    clock.now += 10.0
    loop.run_round(wait=False)
    assert b"/gone" not in values, "it has connected again in time"
    client.close()
    loop.run_round(wait=False)
    clock.now += RECONNECT_SECONDS + 0.001
    other.sendall(GREETING)
    while undelivered(other):
        pass
    loop.run_round(wait=False)
    assert b"/gone" not in values, "the server is busy"
    loop.run_round(wait=False)
    assert values[b"/gone"] == b"1"
    other.close()


def test_a_busy_server_executes_wills_after_a_while(loop: server.ServerLoop, clock: Clock) -> None:
    will = write_request(Op.SET_ON_DISCONNECT, b"/gone", b"1", [], number=1)
    client, other = dial(loop, write_request(Op.HELLO, b"name") + will), dial(loop)
    client.close()
    loop.run_round(wait=False)
    clock.now += RECONNECT_SECONDS + server.BUSY_SECONDS + 0.001
    other.sendall(GREETING)
    while undelivered(other):
        pass
    loop.run_round(wait=False)
    assert loop.handler.table.values == {b"/gone": b"1"}
    other.close()


class WithoutDescriptors:
    """Listening socket of a process that has no descriptor left, except one that `os.close` gives back."""

    def __init__(self, listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
        self._listener, self._left, self.fileno, self.close = listener, 0, listener.fileno, listener.close
        self.getsockname, self.family, close = listener.getsockname, listener.family, os.close

        def counting(descriptor: int) -> None:
            self._left += 1
            close(descriptor)

        monkeypatch.setattr(os, "close", counting)

    def accept(self) -> tuple[socket.socket, Any]:
        if not self._left:
            raise OSError(errno.EMFILE, "too many open files")
        self._left -= 1
        return self._listener.accept()


def test_the_longest_idle_newcomer_gives_its_descriptor_and_others_turn_new_clients_away(
    loop: server.ServerLoop, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once 246 silent connections locked every new client out for ever."""
    user, *silent = [dial(loop, data) for data in (write_request(Op.SET, b"/k", b"v"), GREETING, GREETING)]
    first, listener = next(iter(loop.acceptor.listeners.items()))
    loop.acceptor.listeners[first] = WithoutDescriptors(listener, monkeypatch)  # type: ignore[assignment]
    new = [dial(loop)]
    assert all(becomes_closed(each) for each in silent), "one for each round"
    assert not is_closed(user)
    new += [dial(loop) for _ in range(2)]
    assert all(becomes_closed(each) for each in new), "each was accepted, and closed at once"
    assert not is_closed(user)
    assert caplog.text.count("cannot accept a connection") == 1
    close(user, *silent, *new)


# Failures inside the server: only the client that is concerned is disconnected


def test_a_connection_that_cannot_be_watched_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    poller, full = select.epoll(), list[int]()

    class FullPoller:
        """Poller of a kernel that watches no further descriptor once it is full."""

        modify, unregister, poll, close = poller.modify, poller.unregister, poller.poll, poller.close

        def register(self, fd: int, eventmask: int) -> None:
            if full:
                raise OSError(errno.ENOSPC, "no space")
            poller.register(fd, eventmask)

    monkeypatch.setattr(select, "epoll", FullPoller)
    loop = server.ServerLoop([listen()])
    first = dial(loop)
    full.append(1)
    second = dial(loop, GREETING)
    assert becomes_closed(second) and len(loop.clients) == 1
    deliver(loop, first, GREETING)
    assert receive(first) == GREETING[1:]
    close(first, second)
    loop.close_copies()


@pytest.mark.parametrize("place", [(RequestHandler, "handle"), (sockets.StoreAcceptor, "accept")])
def test_an_internal_error_does_not_end_the_thread(
    place: tuple[type, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    owner, name = place
    real, failures = getattr(owner, name), list[int]()

    def fail_once(*arguments: Any) -> Any:
        if failures:
            failures.pop()
            raise RuntimeError("planted")
        return real(*arguments)

    monkeypatch.setattr(server, "ERROR_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(owner, name, fail_once)
    store = TCPStore("127.0.0.1", 0, is_master=True)
    store.set("k", "0")
    failures.append(1)
    with (
        contextlib.suppress(ConnectionError),
        socket.create_connection(("127.0.0.1", store.port), timeout=20) as client,
    ):
        client.sendall(HANDSHAKE + GREETING)
        client.recv(4)
    store.set("k", "9")
    other = TCPStore("127.0.0.1", store.port)
    assert other.get("k") == b"9" and not failures and "internal error" in caplog.text
    other.close()
    store.close()


def test_a_server_whose_thread_could_not_start_is_stopped() -> None:
    """Once its end was a second error, about a thread that is joined before it has started."""
    loop = server.ServerLoop([listen()])
    loop.stop()
    assert not loop.thread.is_alive()
    loop.close_copies()


# Sessions


def test_a_session_outlives_thousands_of_others() -> None:
    """Once an ADD whose response was lost ran again after 4096 other clients had come and gone."""
    handler, request = RequestHandler(), Request(Op.ADD, (b"n", 1), 1)
    lost = validated(handler, b"lost")
    handler.handle(lost, request)
    handler.remove(lost)
    for number in range(5000):
        for name, repeats in ((b"greets %d", 0), (b"adds %d", number % 2)):
            client = validated(handler, name % number)
            for _ in range(repeats):
                handler.handle(client, Request(Op.ADD, (b"other", 1), 1))
            handler.remove(client)
    assert len(handler.sessions.sessions) == 2501, "what nobody can need is dropped at once"
    again = validated(handler, b"lost")
    handler.handle(again, request)
    assert int.from_bytes(response_parts(again.replies())[2], "little") == 1
    assert handler.memory.used == really_used(handler)


def test_sessions_of_clients_that_have_gone_use_a_quarter_of_the_budget() -> None:
    handler = with_budget(400_000)
    for number in range(300):
        client = validated(handler, b"client %03d" % number)
        handler.handle(client, Request(Op.ADD, (b"n", 1), 1))
        handler.remove(client)
    kept = list(handler.sessions.sessions)
    assert 100 < len(kept) < 100_000 / SESSION_OVERHEAD_BYTES and kept[-1] == b"client 299"
    assert handler.memory.used == really_used(handler)


def test_a_response_that_cannot_be_kept_is_an_error_when_its_request_is_repeated() -> None:
    """Once each connected client could keep 8 MiB."""
    handler = with_budget(40 * MIB)
    clients = [validated(handler, b"client %d" % number) for number in range(12)]
    for number, client in enumerate(clients):
        handler.handle(client, Request(Op.COMPARE_SET, (b"k%d" % number, b"", bytes(MIB)), 1))
        client.replies()
        assert handler.memory.used == really_used(handler)
    handler.table.values[b"k0"] = handler.table.values[b"k11"] = b"changed"
    for client in (clients[0], clients[11]):
        handler.handle(client, Request(Op.COMPARE_SET, (b"k0", b"", bytes(MIB)), 1))
    assert len(response_parts(clients[0].replies())[2]) > MIB
    number, status, text = response_parts(clients[11].replies())
    assert (number, status) == (1, Status.REFUSED) and b"its response was dropped" in text
    assert handler.table.values[b"k0"] == b"changed"
    handler.handle(clients[11], Request(Op.COMPARE_SET, (b"k0", b"changed", b"new"), 2))
    assert response_parts(clients[11].replies())[1] == Status.DONE and handler.table.values[b"k0"] == b"new"
