"""Limits of the store's server beyond single requests: releases, wake-ups, unread replies, idle clients, sessions.

Steps and bytes are counted on the thread of the test, so nothing depends on a clock.
"""

from __future__ import annotations

import errno
import os
import random
import select
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.stores.store_helpers import wait_until_delivered
from tests.stores.test_tcp_bounds import really_used
from tests.stores.test_tcp_protocol import RecordingClient, response_parts, validated
from torchdist_ref.errors import ArgumentError
from torchdist_ref.stores import hash as hash_module
from torchdist_ref.stores import sockets
from torchdist_ref.stores.hash import KEYS_IN_PART, MAX_NUMBER_BYTES, Table
from torchdist_ref.stores.tcp import releases, server, sessions
from torchdist_ref.stores.tcp.connections import SERVICE_SECONDS
from torchdist_ref.stores.tcp.operations import MAX_FILED, Op
from torchdist_ref.stores.tcp.protocol import MAGIC, MAX_VALUE_BYTES, ProtocolError, Request, Status, write_request
from torchdist_ref.stores.tcp.requests import RequestHandler
from torchdist_ref.timeouts import Deadline

HANDSHAKE = write_request(Op.VALIDATE, MAGIC)
MIB = 2**20


def finish(handler: RequestHandler) -> int:
    """Do all work that is done in turns; return their number."""
    turns = 0
    while handler.busy:
        handler.take_turn()
        turns += 1
    return turns


# Steps


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


def long_waiters(handler: RequestHandler, count: int) -> list[RecordingClient]:
    """Clients that wait for one missing key among many that exist."""
    setter = validated(handler)
    names = [b"k%d" % number for number in range(MAX_FILED + 1)]
    handler.handle(setter, Request(Op.MULTI_SET, ([(name, b"") for name in names],)))
    waiters = [validated(handler, b"waiter %d" % number) for number in range(count)]
    for waiter in waiters:
        handler.handle(waiter, Request(Op.WAIT, ([*names, b"last"],), 1))
    return waiters


def test_long_requests_that_one_change_wakes_are_answered_in_turns() -> None:
    """Once 36 clients that waited for 131072 keys each were answered in one step of 1.2 s."""
    handler = RequestHandler()
    waiters, brief, setter = long_waiters(handler, 5), validated(handler, b"brief"), validated(handler)
    handler.handle(brief, Request(Op.WAIT_GET, (b"last",), 1))
    handler.handle(setter, Request(Op.SET, (b"last", b"x")))
    assert response_parts(brief.replies())[1] == Status.DONE, "others cannot delete the key before"
    assert not any(waiter.sent for waiter in waiters)
    for turn in range(5):
        handler.take_turn()
        assert [bool(waiter.sent) for waiter in waiters] == [number <= turn for number in range(5)]
    assert not handler.busy and handler.memory.used == really_used(handler)


def test_a_request_that_is_ready_is_answered_before_it_is_canceled_and_forgotten_with_its_client() -> None:
    handler = RequestHandler()
    first, second, third = long_waiters(handler, 3)
    handler.handle(validated(handler), Request(Op.SET, (b"last", b"x")))
    handler.handle(second, Request(Op.CANCEL_WAIT, ()))
    assert response_parts(second.replies())[:2] == (1, Status.DONE)
    handler.remove(third)
    assert finish(handler) == 1 and response_parts(first.replies())[1] == Status.DONE and third.sent == b""
    assert handler.memory.used == really_used(handler)


@pytest.fixture
def loop() -> Iterator[server.ServerLoop]:
    made = server.ServerLoop(sockets.listen("127.0.0.1", 0, Deadline(20)))
    yield made
    made.close_copies()


def dial(loop: server.ServerLoop, data: bytes = b"", receive_bytes: int = 0) -> socket.socket:
    """Connect a client that has sent some bytes; the server has handled them."""
    client = socket.socket()
    if receive_bytes:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.connect(loop.listeners.sockets[0].getsockname())
    client.sendall(HANDSHAKE + data)
    wait_until_delivered(client)
    client.setblocking(False)
    for _ in range(3):
        turn(loop)
    return client


def turn(loop: server.ServerLoop) -> None:
    loop._serve_all(loop._poller.poll(0))
    loop._check_limits(idle=False)


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


def test_requests_that_arrive_together_end_with_the_turn(
    loop: server.ServerLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once 64 KiB of requests were handled in one turn, whatever they cost."""
    now, handled, handle, total = SimpleNamespace(seconds=0.0), list[bytes](), RequestHandler.handle, 100

    def timed(handler: RequestHandler, client: RecordingClient, request: Request) -> None:
        now.seconds += SERVICE_SECONDS / 5
        if request.operation is Op.APPEND:
            handled.append(request.fields[1])
        handle(handler, client, request)

    clients = [dial(loop) for _ in range(2)]
    monkeypatch.setattr(server, "monotonic", lambda: now.seconds)
    monkeypatch.setattr(RequestHandler, "handle", timed)
    clients[0].sendall(b"".join(write_request(Op.APPEND, b"/k", b"%03d" % number) for number in range(total)))
    wait_until_delivered(clients[0])
    turns = 0
    while len(handled) < total:
        before = len(handled)
        clients[1].sendall(write_request(Op.PING, turns))
        wait_until_delivered(clients[1])
        turn(loop)
        assert (0 <= len(handled) - before <= 6 and loop._poll_timeout() == 0.0) or len(handled) == total
        turns += 1
        assert turns <= total, "the requests that are left wait for no event"
        assert receive(clients[1]), "others are served in each turn"
    assert turns >= total / 6 and handled == [b"%03d" % number for number in range(total)]
    turn(loop)
    assert not loop._unprocessed and not any(each.unprocessed for each in loop.connections.values())
    for client in clients:
        client.close()


# Releases

DELETED_IN_TURN = releases.PARTS_IN_TURN * KEYS_IN_PART


def releasing(prefix: bytes = b"big") -> tuple[RequestHandler, RecordingClient]:
    """A handler that deletes many keys, and the client that waits for that."""
    handler = RequestHandler()
    client = validated(handler, b"releaser")
    pairs = [(prefix + b"/%d" % number, b"") for number in range(3 * DELETED_IN_TURN)]
    handler.handle(client, Request(Op.MULTI_SET, (pairs,), 1))
    return handler, client


def test_a_release_during_another_deletes_the_keys_of_its_own_step() -> None:
    """Once it deleted also what was set until its turn came, such as the next generation's keys and count."""
    handler, first = releasing()
    last, other = validated(handler, b"last"), validated(handler)
    handler.handle(other, Request(Op.MULTI_SET, ([(b"g/a", b"old"), (b"g/b", b"old"), (b"g/count", b"7")],)))
    handler.handle(other, Request(Op.QUEUE_PUSH, (b"g/queue", b"old")))
    handler.handle(first, Request(Op.RELEASE, (b"big", 1), 2))
    handler.handle(last, Request(Op.RELEASE, (b"g", 1), 1))
    assert last.sent == b"" and handler.busy
    for request, reply in (
        (Request(Op.CHECK, ([b"g/b"],)), b"\1"),
        (Request(Op.QUEUE_LEN, (b"g/queue",)), bytes(8)),
        (Request(Op.QUEUE_PUSH, (b"g/queue", b"new")), b""),
        (Request(Op.SET, (b"g/a", b"new")), b""),
        (Request(Op.SET, (b"g/new", b"new")), b""),
        (Request(Op.ADD, (b"g/count", 1)), (1).to_bytes(8, "little")),
    ):
        other.replies()
        handler.handle(other, request)
        assert other.replies() == reply, request
    next_generation = validated(handler, b"next")
    handler.handle(next_generation, Request(Op.RELEASE, (b"g", 2), 1))
    assert response_parts(next_generation.replies()) == (1, Status.DONE, b"\0")
    assert handler.memory.used == really_used(handler)
    finish(handler)
    assert response_parts(last.replies()) == (1, Status.DONE, b"\1")
    assert set(handler.table.values) == {b"g/a", b"g/new", b"g/count", b"g/released"}
    assert list(handler.table.queues[b"g/queue"]) == [b"new"] and handler.memory.used == really_used(handler)


def test_many_releases_cost_one_look_through_all_keys_and_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each looked through all keys, and stayed after its client had gone."""
    handler, first = releasing()
    looks, delete_in_parts = list[Any](), Table.delete_in_parts
    monkeypatch.setattr(
        Table, "delete_in_parts", lambda table, *rest: (looks.append(rest), delete_in_parts(table, *rest))[1]
    )
    before = handler.memory.used
    handler.handle(first, Request(Op.RELEASE, (b"big", 1), 2))
    for number in range(releases.MAX_PREFIXES + 100):
        client = validated(handler)
        handler.handle(client, Request(Op.RELEASE, (b"none %d" % number, 1)))
        handler.remove(client)
    assert handler.memory.used == really_used(handler) > before - handler.memory.budget
    assert len(handler.releases.batches[1].prefixes) == releases.MAX_PREFIXES and not handler._queued_releases
    finish(handler)
    assert len(looks) == 2 and not handler.table.values and handler.memory.used == really_used(handler) < 2000


def test_a_release_of_keys_that_another_release_deletes_waits_and_takes_no_effect_before() -> None:
    handler, first = releasing()
    second, gone = validated(handler, b"second"), validated(handler, b"gone")
    first.replies()
    handler.handle(first, Request(Op.RELEASE, (b"big", 1), 2))
    handler.handle(second, Request(Op.SET, (b"big/later", b"x"), 1))
    second.replies()
    before = handler.memory.used
    for client in (second, gone):
        handler.handle(client, Request(Op.RELEASE, (b"big", 1), 2))
    assert second.pending is not None and handler.memory.used == before + 2 * len(b"big") + (
        len(b"big/released") + sessions.AWAITED_OVERHEAD_BYTES
    )
    handler.remove(gone)
    assert handler.table.values[b"big/later"] == b"x" and list(handler._queued_releases) == [second.pending]
    finish(handler)
    assert not handler.table.values and gone.sent == b"" and handler.memory.used == really_used(handler)
    assert [response_parts(each.replies())[::2] for each in (first, second)] == [(2, b"\1")] * 2


def test_a_release_cannot_be_canceled() -> None:
    handler, client = releasing()
    handler.handle(client, Request(Op.RELEASE, (b"big", 1), 2))
    with pytest.raises(ProtocolError, match="cannot be canceled"):
        handler.handle(client, Request(Op.CANCEL_WAIT, ()))
    handler.remove(client)
    assert finish(handler) and not handler.table.values


def test_random_requests_see_releases_as_if_they_took_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model runs each request at once, on a table of its own."""
    monkeypatch.setattr(hash_module, "KEYS_IN_PART", 2)
    monkeypatch.setattr(releases, "PARTS_IN_TURN", 1)
    handler, model, generator = RequestHandler(), Table(), random.Random(5)
    client, released = validated(handler), 0
    prefixes = (b"a", b"a/b", b"b", b"", b"aa")
    for step in range(6000):
        key = generator.choice(prefixes) + b"/%d" % generator.randrange(6)
        fields = {Op.SET: (key, b"%d" % step), Op.ADD: (key + b"n", 1), Op.QUEUE_PUSH: (key, b"%d" % step)}
        fields |= {Op.GET: (key,), Op.CHECK: ([key, key + b"n"],), Op.QUEUE_POP: (key,), Op.DELETE_KEY: (key,)}
        fields |= {Op.APPEND: (key, b"+"), Op.COMPARE_SET: (key, b"", b"x"), Op.MULTI_GET: ([key, b"a/1"],)}
        fields |= {Op.MULTI_SET: ([(key, b"m"), (b"b/2", b"m")],)}
        operation = generator.choice(list(fields))
        if generator.random() < 0.05:
            other, prefix = validated(handler, b"user %d" % step), generator.choice(prefixes)
            users = generator.choice([1, 1, 2])
            if not (handler.releases.accepts(prefix) or model.number(prefix + b"/released") + 1 < users):
                continue
            handler.handle(other, Request(Op.RELEASE, (prefix, users), 1))
            released += model.release(prefix, users)
        else:
            assert operation.execute is not None
            expected = RecordingClient()
            handler.handle(client, Request(operation, fields[operation]))
            reply = client.replies()
            handler._respond(
                expected, Request(operation, fields[operation]), operation.execute(model, *fields[operation])
            )
            assert reply == expected.sent, (step, operation.name, fields[operation])
        if generator.random() < 0.3 and handler.busy:
            handler.take_turn()
        assert handler.memory.used == really_used(handler)
    finish(handler)
    assert handler.table.values == model.values and handler.table.queues == model.queues and released > 50


# Replies that are not read, and responses that are kept


def test_replies_that_nobody_reads_do_not_fill_the_store(loop: server.ServerLoop) -> None:
    """Once one reply of 8 GB, of the same value a thousand times, let the store refuse the requests of all others."""
    handler = loop.handler
    handler.memory.budget = 20 * MIB
    handler.memory.run(Op.SET, (b"/k", bytes(MIB)))
    greedy = dial(loop, write_request(Op.MULTI_GET, [b"/k"] * 100), receive_bytes=4096)
    assert handler.memory.used > handler.memory.budget
    honest = dial(loop, write_request(Op.SET, b"/a", b"b") + write_request(Op.ADD, b"/n", 3))
    assert receive(honest) == (3).to_bytes(8, "little") and handler.table.values[b"/a"] == b"b"
    assert becomes_closed(greedy) and len(loop.connections) == 1 and loop._unsent == 0
    slow = dial(loop, write_request(Op.MULTI_GET, [b"/k"] * 4), receive_bytes=4096)
    with pytest.raises(ArgumentError, match="the store is full"):
        handler.memory.run(Op.SET, (b"/too large", bytes(20 * MIB)))
    assert len(loop.connections) == 2, "nobody is disconnected for what does not fit anyway"
    for client in (greedy, honest, slow):
        client.close()


def test_clients_that_do_not_read_are_disconnected_when_the_budget_is_used_up(loop: server.ServerLoop) -> None:
    """Once 60 clients held 504 MiB of values that had been replaced meanwhile."""
    size, handler = 6 * MIB, loop.handler
    handler.memory.budget = 20 * MIB
    clients, held = [], []
    for number in range(6):
        handler.memory.run(Op.SET, (b"/k", bytes([number]) * size))
        clients.append(dial(loop, write_request(Op.GET, b"/k"), receive_bytes=4096))
        held.append(sum(each.unsent for each in loop.connections.values()))
        assert handler.memory.used <= handler.memory.budget and loop._unsent == held[-1]
    assert 6 * MIB < max(held) <= 20 * MIB and len(loop.connections) == 2
    reader, received = clients[-1], bytearray()
    while len(received) < size + 8:
        turn(loop)
        try:
            received += reader.recv(MIB)
        except BlockingIOError:
            continue
    assert received.endswith(bytes([5]) * 100) and not loop.connections[max(loop.connections)].unsent
    for client in clients:
        client.close()
    for _ in range(3):
        turn(loop)
    assert not loop.connections and loop._unsent == 0 and not loop._readers


def test_kept_responses_of_connected_clients_are_bounded_and_a_dropped_one_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once each connected client could keep 8 MiB."""
    monkeypatch.setattr(sessions, "KEPT_RESPONSE_BYTES", 10 * MIB)
    handler = RequestHandler()
    clients = [validated(handler, b"client %d" % number) for number in range(12)]
    for number, client in enumerate(clients):
        handler.handle(client, Request(Op.COMPARE_SET, (b"k%d" % number, b"", bytes(MIB)), 1))
        client.replies()
        assert handler.memory.used == really_used(handler) and handler.sessions._kept_bytes <= 10 * MIB
    handler.table.values[b"k0"] = handler.table.values[b"k11"] = b"changed"
    for client in (clients[0], clients[11]):
        handler.handle(client, Request(Op.COMPARE_SET, (b"k0", b"", bytes(MIB)), 1))
    number, status, text = response_parts(clients[0].replies())
    assert (number, status) == (1, Status.REFUSED) and b"its response was dropped" in text
    assert len(response_parts(clients[11].replies())[2]) > MIB and handler.table.values[b"k0"] == b"changed"
    handler.handle(clients[0], Request(Op.COMPARE_SET, (b"k0", b"changed", b"new"), 2))
    assert response_parts(clients[0].replies())[1] == Status.DONE and handler.table.values[b"k0"] == b"new"


# Idle connections and descriptors

GREETING = write_request(Op.PING, 7)


def test_clients_that_have_only_greeted_are_capped_and_others_stay(
    loop: server.ServerLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_NEWCOMERS", 3)
    user = dial(loop, GREETING + write_request(Op.SET, b"/k", b"v"))
    session = dial(loop, write_request(Op.HELLO, b"name"))
    waiter = dial(loop, write_request(Op.WAIT, [b"/missing"]))
    silent = [dial(loop, GREETING) for _ in range(5)]
    assert all(becomes_closed(each) for each in silent[:2]) and not any(is_closed(each) for each in silent[2:])
    silent[2].sendall(write_request(Op.GET, b"/k"))
    wait_until_delivered(silent[2])
    turn(loop)
    silent += [dial(loop, GREETING) for _ in range(3)]
    assert [becomes_closed(each) for each in silent[3:5]] == [True, True]
    assert not any(is_closed(each) for each in (silent[2], *silent[5:]))
    assert not any(is_closed(each) for each in (user, session, waiter))
    for each in (user, session, waiter, *silent):
        each.close()


class WithoutDescriptors:
    """Listening socket of a process that has no descriptor left, except one that `os.close` gives back."""

    def __init__(self, listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
        self._listener, self._left, self.fileno, self.close = listener, 0, listener.fileno, listener.close
        self.getsockname, close = listener.getsockname, os.close

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
    loop.listeners.sockets[0] = WithoutDescriptors(loop.listeners.sockets[0], monkeypatch)  # type: ignore[call-overload]
    new = [dial(loop)]
    assert all(becomes_closed(each) for each in silent), "one for each turn"
    assert not is_closed(user)
    new += [dial(loop) for _ in range(2)]
    assert all(becomes_closed(each) for each in new), "each was accepted, and closed at once"
    assert not is_closed(user) and loop.listeners._listening and loop.listeners._reserve is not None
    assert caplog.text.count("cannot accept a connection") == 1
    for each in (user, *silent, *new):
        each.close()


# Sessions


def test_a_session_outlives_thousands_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once an ADD whose response was lost ran again after 4096 other clients had come and gone."""
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 3)
    handler, request = RequestHandler(), Request(Op.ADD, (b"n", 1), 1)
    lost = validated(handler, b"lost")
    handler.handle(lost, request)
    handler.remove(lost)
    for number in range(10):
        for name, repeats in ((b"greets %d", 0), (b"adds %d", 1)):
            client = validated(handler, name % number)
            for _ in range(repeats):
                handler.handle(client, Request(Op.ADD, (b"other", 1), 1))
            handler.remove(client)
    assert len(handler.sessions.sessions) == 11, "what nobody can need is dropped at once"
    again = validated(handler, b"lost")
    handler.handle(again, request)
    assert int.from_bytes(response_parts(again.replies())[2], "little") == 1
    assert handler.memory.used == really_used(handler)


def test_sessions_of_clients_that_have_gone_use_a_quarter_of_the_budget() -> None:
    handler = RequestHandler()
    handler.memory.budget = 400_000
    for number in range(300):
        client = validated(handler, b"client %03d" % number)
        handler.handle(client, Request(Op.ADD, (b"n", 1), 1))
        handler.remove(client)
    kept = list(handler.sessions.sessions)
    assert 100 < len(kept) < 100_000 / sessions.SESSION_OVERHEAD_BYTES and kept[-1] == b"client 299"
    assert handler.memory.used == really_used(handler)
