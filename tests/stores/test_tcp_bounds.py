"""Bounds of the store's server: memory of everything that clients leave there, and the time of one client's turn."""

from __future__ import annotations

import gc
import random
import socket
import struct
import time
import weakref
from collections.abc import Iterator

import pytest

from tests.stores.test_tcp_protocol import RecordingClient, response_parts, validated
from torchdist_ref.errors import ArgumentError
from torchdist_ref.processes import forks
from torchdist_ref.stores import TCPStore
from torchdist_ref.stores.hash import KEYS_IN_PART
from torchdist_ref.stores.tcp import releases, server, sessions
from torchdist_ref.stores.tcp.memory import KEY_OVERHEAD_BYTES, QUEUE_OVERHEAD_BYTES
from torchdist_ref.stores.tcp.operations import MAX_FILED, Op, Operation
from torchdist_ref.stores.tcp.protocol import (
    MAGIC,
    MANY_VALUES,
    MAX_KEYS,
    MAX_VALUE_BYTES,
    ManyValues,
    Request,
    RequestDecoder,
    Status,
    write_request,
)
from torchdist_ref.stores.tcp.requests import RequestHandler
from torchdist_ref.stores.tcp.sessions import AWAITED_OVERHEAD_BYTES, SESSION_OVERHEAD_BYTES

HOST = "127.0.0.1"
MIB = 2**20
HANDSHAKE = write_request(Op.VALIDATE, MAGIC)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[TCPStore]:
    """A store with a budget of 1 MiB."""
    monkeypatch.setenv("TORCHDIST_REF_STORE_MEMORY", "1")
    store = TCPStore(HOST, 0, is_master=True)
    yield store
    store.close()


def test_the_default_budget_is_256_mib() -> None:
    assert RequestHandler().memory.budget == 256 * MIB


def test_a_full_store_names_its_budget_and_has_space_again(small: TCPStore) -> None:
    half = bytes(MIB // 2)
    small.set("a", half)
    small.set("a", bytes(half))
    full = r"store is full: keys, values, waiting requests and unread replies may use 1 MiB.*TORCHDIST_REF_STORE_MEMORY"
    calls = (
        lambda: small.set("b", half),
        lambda: small.compare_set("b", "", half),
        lambda: small.append("a", half),
        lambda: small.multi_set(["b", "c"], [half[:-300], b""]),
        lambda: small.queue_push("q", half),
    )
    for call in calls:
        with pytest.raises(ArgumentError, match=full):
            call()
    assert small.get("a") == half and small.list_keys() == ["a"]
    assert small.delete_key("a")
    small.queue_push("q", half)
    with pytest.raises(ArgumentError, match=full):
        small.set("a", half)
    assert small.queue_pop("q") == half
    small.set("a", half)


def test_a_client_of_torchs_that_fills_the_store_is_disconnected(small: TCPStore) -> None:
    with socket.create_connection((HOST, small.port), timeout=20) as client:
        client.sendall(HANDSHAKE + write_request(Op.SET, b"/k", bytes(2 * MIB)))
        try:
            assert client.recv(1) == b""
        except ConnectionResetError:
            pass
    assert small.num_keys() == 0


def test_a_value_does_not_grow_beyond_its_limit_by_appending() -> None:
    handler = RequestHandler()
    client = validated(handler, b"me")
    for number, size in enumerate((MAX_VALUE_BYTES - 1, 1), 1):
        handler.handle(client, Request(Op.APPEND, (b"a", bytes(size)), number))
        assert response_parts(client.replies())[1] == Status.DONE
    handler.handle(client, Request(Op.APPEND, (b"a", bytes(MIB)), 3))
    _, status, text = response_parts(client.replies())
    assert status == Status.REFUSED and b"longer than" in text
    assert len(handler.table.values[b"a"]) == MAX_VALUE_BYTES


def really_used(handler: RequestHandler) -> int:
    table = handler.table
    sizes = [len(key) + len(value) for key, value in table.values.items()]
    sizes += [len(value) for queue in table.queues.values() for value in queue]
    sessions = {*handler.sessions.sessions.values(), *handler.sessions.disconnected}
    sizes += [sum(map(len, each.on_disconnect)) for each in sessions if each.on_disconnect]
    waiting = {each for by_number in handler.pending.values() for several in by_number.values() for each in several}
    first_fields = [each.request.fields[0] for each in waiting]
    named = [len(key) for field in first_fields if isinstance(field, list) for key in field]
    single = [len(field) for field in first_fields if isinstance(field, bytes)]
    queues = sum(len(key) + QUEUE_OVERHEAD_BYTES for key in table.queues)
    awaited = sum(named + single) + AWAITED_OVERHEAD_BYTES * len(named)
    known = handler.sessions.sessions.values()
    kept = sum(len(each.name) + SESSION_OVERHEAD_BYTES for each in known)
    kept += sum(sum(map(len, each.response)) for each in known if each.response and len(each.response) > 1)
    for batch in handler.releases.batches:
        queues += sum(len(key) + QUEUE_OVERHEAD_BYTES for key, _ in batch.queues)
        sizes += [len(value) for _, queue in batch.queues for value in queue]
        kept += sum(len(prefix) - 1 + KEY_OVERHEAD_BYTES for prefix in batch.prefixes)
        kept += sum(len(key) + AWAITED_OVERHEAD_BYTES for key in batch.written)
    return sum(sizes) + KEY_OVERHEAD_BYTES * len(sizes) + queues + awaited + kept


def test_the_memory_of_random_requests_is_counted_exactly() -> None:
    handler, generator = RequestHandler(), random.Random(3)
    handler.memory.budget = 8000
    names = (b"a", b"b", b"c")
    clients = [validated(handler, name) for name in names]
    refused = 0
    for number in range(1, 3000):
        client = clients[number % 3]
        if client.pending is not None and generator.random() < 0.2:
            handler.remove(client)
            client = clients[number % 3] = validated(handler, names[number % 3])
        elif client.pending is not None:
            handler.handle(client, Request(Op.CANCEL_WAIT, ()))
        elif generator.random() < 0.05:
            handler.remove(client)
            handler.set_for_disconnected(float("inf"))
            client = clients[number % 3] = validated(handler, names[number % 3])
        key, value = generator.choice([b"x", b"yy", b"zzz"]), bytes(generator.randrange(900))
        request = generator.choice(
            [
                (Op.SET, (key, value)),
                (Op.COMPARE_SET, (key, b"", value)),
                (Op.ADD, (b"n", generator.randrange(10**9))),
                (Op.APPEND, (key, value)),
                (Op.MULTI_SET, ([(key, value), (b"yy", b"1"), (key, b"")],)),
                (Op.DELETE_KEY, (key,)),
                (Op.QUEUE_PUSH, (key, value)),
                (Op.QUEUE_POP, (key,)),
                (Op.WAIT_POP, (key,)),
                (Op.BARRIER, (b"barrier" + key, 2)),
                (Op.WAIT, ([key, b"n" * generator.randrange(700), b"yy"],)),
                (Op.WAIT_GET_ALL, ([b"absent", key],)),
                (Op.QUEUE_PUSH, (b"group/" + key, value)),
                (Op.RELEASE, (b"group", generator.choice([1, 3]))),
                (Op.SET_ON_DISCONNECT, (b"gone" + key, value[:400], [(b"yy", value[:5])])),
            ]
        )
        handler.handle(client, Request(*request, number))
        sent = client.replies()
        refused += bool(sent) and sent[struct.calcsize("<QQ")] == Status.REFUSED
        assert handler.memory.used == really_used(handler), request
        # Responses are kept after the request was run.
        assert handler.memory.used <= handler.memory.budget + 2000, request
    assert refused > 50


def test_keys_of_queues_and_what_is_set_at_the_end_of_clients_count_in_the_budget() -> None:
    """Once long keys of queues, and a value for each of 4096 clients, could fill the memory."""
    for request in (
        lambda number: Request(Op.QUEUE_PUSH, (b"%d" % number + bytes(8000), b"x"), 1),
        lambda number: Request(Op.SET_ON_DISCONNECT, (b"gone %d" % number, bytes(8000), []), 1),
    ):
        handler, statuses = RequestHandler(), list[int]()
        handler.memory.budget = 1 * MIB
        for number in range(200):
            client = validated(handler, b"client %d" % number)
            handler.handle(client, request(number))
            statuses.append(response_parts(client.replies())[1])
        done = statuses.count(Status.DONE)
        assert 100 < done < MIB // 8000 and set(statuses[done:]) == {Status.REFUSED}
        # A client may connect to a full store, to delete keys.
        session_bytes = 200 * (len(b"client 000") + SESSION_OVERHEAD_BYTES)
        assert handler.memory.used == really_used(handler) <= handler.memory.budget + session_bytes


def test_sessions_that_are_dropped_leave_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 3)
    monkeypatch.setattr(sessions, "SESSION_SECONDS", 0.0)
    handler = RequestHandler()
    for number in range(8):
        client = validated(handler, b"client %d" % number)
        handler.handle(client, Request(Op.SET_ON_DISCONNECT, (b"gone %d" % number, b"value", []), 1))
        handler.remove(client)
    assert len(handler.sessions.sessions) == 3 and handler.memory.used == really_used(handler)
    handler.set_for_disconnected(float("inf"))
    assert len(handler.table.values) == 8 and handler.memory.used == really_used(handler)


def test_the_keys_of_waiting_requests_count_in_the_budget() -> None:
    """Once each of 1000 clients could leave 16 MiB of keys in a server."""
    handler = RequestHandler()
    handler.memory.budget = 1 * MIB
    keys = [b"absent %d" % number for number in range(2000)]
    clients = [validated(handler, b"client %d" % number) for number in range(20)]
    statuses = []
    for client in clients:
        handler.handle(client, Request(Op.WAIT, (keys,), 1))
        statuses.append(response_parts(sent)[1:] if (sent := client.replies()) else None)
    held = statuses.count(None)
    assert held == 8 and handler.memory.used <= handler.memory.budget
    assert all(status == Status.REFUSED and b"the store is full" in text for status, text in statuses[held:])
    handler.handle(clients[0], Request(Op.CANCEL_WAIT, ()))
    handler.handle(clients[-1], Request(Op.WAIT, (keys,), 2))
    assert clients[-1].pending is not None
    for client in clients:
        handler.remove(client)
    assert handler.memory.used == 0 and not handler.pending


def test_kept_responses_of_clients_that_have_gone_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once 600 gone clients kept 605 MiB."""
    monkeypatch.setattr(sessions, "KEPT_RESPONSE_BYTES", 10 * MIB)
    handler = RequestHandler()
    for number in range(40):
        client = validated(handler, b"client %d" % number)
        handler.handle(client, Request(Op.COMPARE_SET, (b"k%d" % number, b"", bytes(MIB)), 1))
        assert len(client.replies()) > MIB
        handler.handle(client, Request(Op.DELETE_KEY, (b"k%d" % number,), 2) if number % 2 else Request(Op.PING, (7,)))
        handler.remove(client)
        kept = [sum(map(len, each.response)) for each in handler.sessions.sessions.values() if each.response]
        assert sum(kept) == handler.sessions._kept_bytes <= 10 * MIB


def test_a_request_that_was_broken_off_leaves_no_memory() -> None:
    """Once a reference cycle kept it until Python's oldest generation was collected."""
    decoder = RequestDecoder()
    decoder.feed(HANDSHAKE + write_request(Op.SET, b"/k", bytes(MIB))[:-1])
    while decoder.next() is not None:
        pass
    assert decoder.held > MIB // 2
    gone = weakref.ref(decoder)
    gc.disable()
    try:
        decoder.clear()
        assert decoder.held == 0
        del decoder
        assert gone() is None
    finally:
        gc.enable()


def test_the_server_clears_what_a_client_left_unfinished(monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[int] = []
    real = RequestDecoder.clear
    monkeypatch.setattr(RequestDecoder, "clear", lambda self: (cleared.append(self.held), real(self)))
    store = TCPStore(HOST, 0, is_master=True)
    with socket.create_connection((HOST, store.port), timeout=20) as client:
        client.sendall(HANDSHAKE + write_request(Op.SET, b"/k", bytes(1000))[:-1])
        store.get("x") if store.check(["x"]) else store.set("x", "")
    deadline = time.monotonic() + 5
    while not cleared and time.monotonic() < deadline:
        store.num_keys()
    assert cleared and 0 < cleared[0] < 1100
    store.close()


def test_silent_connections_are_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_UNVALIDATED", 8)
    store = TCPStore(HOST, 0, is_master=True)
    silent = [socket.create_connection((HOST, store.port), timeout=20) for _ in range(20)]
    assert silent[0].recv(1) == b"", "the oldest is closed, long before its time"
    store.set("k", "v")
    loops = [owner for owner in forks._owners if isinstance(owner, server.ServerLoop)]
    assert len([loop for loop in loops if loop.listeners.sockets[0].fileno() != -1][-1].connections) <= 10
    for each in silent:
        each.close()
    store.close()


# Big requests take turns


def test_a_wait_for_many_keys_is_filed_under_a_few_at_a_time() -> None:
    handler = RequestHandler()
    waiter, setter = validated(handler, b"me"), validated(handler)
    keys = [b"/k%d" % number for number in range(3 * MAX_FILED)]
    handler.handle(waiter, Request(Op.WAIT, (keys,), 1))
    assert sum(map(len, handler.pending.values())) == MAX_FILED
    for key in reversed(keys[1:]):
        handler.handle(setter, Request(Op.SET, (key, b"")))
    assert waiter.sent == b""
    handler.handle(setter, Request(Op.SET, (keys[0], b"")))
    while handler.busy:
        handler.take_turn()
    assert response_parts(waiter.replies())[1] == Status.DONE and not handler.pending


def test_a_canceled_wait_reports_all_missing_keys() -> None:
    handler = RequestHandler()
    waiter = validated(handler, b"me")
    handler.table.values[b"/k5"] = b""
    keys = [b"/k%d" % number for number in range(2 * MAX_FILED)]
    handler.handle(waiter, Request(Op.WAIT_GET_ALL, (keys,), 1))
    handler.handle(waiter, Request(Op.CANCEL_WAIT, ()))
    _, status, body = response_parts(waiter.replies())
    assert status == Status.CANCELED and body.count(b"/k") == 2 * MAX_FILED - 1 and not handler.pending


def test_a_long_reply_is_written_while_it_is_sent() -> None:
    handler = RequestHandler()
    handler.table.values.update((b"/%d" % number, b"") for number in range(2 * MANY_VALUES))
    sent = []
    client = validated(handler)
    client.send = sent.extend  # type: ignore[method-assign]
    handler.handle(client, Request(Op.LIST_KEYS, ()))
    assert isinstance(sent[-1], ManyValues) and len(list(sent[-1].pieces())) == 2


def test_long_replies_arrive_whole_and_nobody_waits_for_their_reader() -> None:
    store = TCPStore(HOST, 0, is_master=True)
    names = [f"{'long' * 50} {number:06d}" for number in range(20_000)]
    for begin in range(0, len(names), 1000):
        part = names[begin : begin + 1000]
        store.multi_set(part, [name[-3:] for name in part])
    with socket.create_connection((HOST, store.port), timeout=20) as slow:
        slow.sendall(HANDSHAKE + bytes([Op.LIST_KEYS.code]) * 3)
        assert store.list_keys() == names
        assert store.multi_get(names) == [name[-3:].encode() for name in names]
        data, expected = bytearray(), 3 * (8 + sum(9 + len(name) for name in names))
        while len(data) < expected:
            data += slow.recv(MIB)
    assert len(data) == expected and data.endswith(f"/{names[-1]}".encode())
    store.close()


@pytest.mark.parametrize("operation", [Op.WAIT, Op.CHECK, Op.MULTI_SET])
def test_one_turn_on_the_largest_request_is_short(operation: Operation) -> None:
    """The parser is given what the server reads at once."""
    keys = [b"/never%07d" % number for number in range(MAX_KEYS)]
    message = write_request(operation, [(key, b"") for key in keys] if operation is Op.MULTI_SET else keys)
    decoder, handler, client, longest = RequestDecoder(), RequestHandler(), RecordingClient(), 0.0
    handled, client.validated = 0, True
    decoder.feed(HANDSHAKE)
    decoder.next()
    for begin in range(0, len(message), server.MAX_READ_BYTES):
        start = time.thread_time()
        decoder.feed(message[begin : begin + server.MAX_READ_BYTES])
        request = decoder.next()
        while request is not None or decoder.reading:
            if request is not None:
                handler.handle(client, request)
                handled += 1
            longest, start = max(longest, time.thread_time() - start), time.thread_time()
            request = decoder.resume() if decoder.reading else None
    assert handled == 1 and longest < 0.1


# The keys of a prefix are deleted in turns

DELETED_IN_TURN = releases.PARTS_IN_TURN * KEYS_IN_PART
RELEASE = Request(Op.RELEASE, (b"group", 1), 5)


def large_group() -> RequestHandler:
    """A store of three turns of keys, every third of them not in the group, and a queue of two turns."""
    handler = RequestHandler()
    client = validated(handler)
    pairs = [(b"group/%d" % i if i % 3 else b"groups/%d" % i, b"x" * (i % 50)) for i in range(3 * DELETED_IN_TURN)]
    handler.handle(client, Request(Op.MULTI_SET, (pairs,)))
    for i in range(2 * DELETED_IN_TURN):
        handler.handle(client, Request(Op.QUEUE_PUSH, (b"group/queue", b"%d" % i)))
    return handler


def test_the_keys_of_a_prefix_are_deleted_in_turns_and_then_its_last_user_is_answered() -> None:
    handler = large_group()
    first, last, other = (validated(handler, name) for name in (b"first", b"last", b"other"))
    handler.handle(first, Request(Op.RELEASE, (b"group", 2), 1))
    assert response_parts(first.replies()) == (1, Status.DONE, b"\0") and not handler.busy
    handler.handle(last, Request(Op.RELEASE, (b"group", 2), 1))
    for turn in range(1, 7):
        assert handler.busy and last.sent == b"" and handler.memory.used == really_used(handler)
        handler.handle(other, Request(Op.ADD, (b"group/new", 1), turn))
        assert response_parts(other.replies())[:2] == (turn, Status.DONE)
        handler.handle(other, Request(Op.DELETE_KEY, (b"group/%d" % turn,)))
        other.replies()
        handler.take_turn()
        if not handler.busy:
            break
    assert turn == 5, "two of the turns are for the queue"
    assert response_parts(last.replies()) == (1, Status.DONE, b"\1") and last.pending is None
    left = {key for key in handler.table.values if not key.startswith(b"groups/")}
    assert left == {b"group/new"} and len(handler.table.values) == DELETED_IN_TURN + 1 and not handler.table.queues
    assert handler.table.values[b"group/new"] == b"5" and handler.memory.used == really_used(handler)


def test_a_deletion_that_has_begun_ends_before_the_next_one_begins() -> None:
    """Each holds a list of all keys."""
    handler = large_group()
    clients = [validated(handler, name) for name in (b"a", b"b")]
    handler.handle(clients[0], RELEASE)
    handler.handle(clients[1], Request(Op.RELEASE, (b"groups", 1), 5))
    answered = []
    while handler.busy:
        handler.take_turn()
        answered += [index for index, client in enumerate(clients) if client.replies()]
    assert answered == [0, 1] and not handler.table.values and handler.memory.used == really_used(handler)


@pytest.mark.parametrize("reconnects", ["during the deletion", "after it"])
def test_a_release_that_is_repeated_after_reconnecting_runs_once(reconnects: str) -> None:
    handler = large_group()
    before = validated(handler, b"me")
    handler.handle(before, RELEASE)
    handler.remove(before)
    after = RecordingClient()
    if reconnects == "during the deletion":
        after = validated(handler, b"me")
        handler.handle(after, RELEASE)
        assert len(handler.releases.batches[0].requests) == 1 and after.sent == b""
    while handler.busy:
        handler.take_turn()
    if reconnects == "after it":
        after = validated(handler, b"me")
        handler.handle(after, RELEASE)
    assert response_parts(after.replies()) == (5, Status.DONE, b"\1") and not handler.busy
    assert len(handler.table.values) == DELETED_IN_TURN and handler.memory.used == really_used(handler)
    handler.handle(after, Request(Op.ADD, (b"next", 1), 6))
    assert response_parts(after.replies())[:2] == (6, Status.DONE)


@pytest.mark.parametrize("name", [b"me", b""])
def test_a_deletion_ends_after_its_client_has_gone(name: bytes) -> None:
    handler = large_group()
    client = validated(handler, name)
    handler.handle(client, RELEASE if name else Request(*RELEASE[:2], None))
    handler.remove(client)
    if name:
        handler.handle(again := validated(handler, name), Request(Op.ADD, (b"next", 1), 6))
        assert response_parts(again.replies())[:2] == (6, Status.DONE)
    while handler.busy:
        handler.take_turn()
    assert not any(key.startswith(b"group/") for key in handler.table.values) and client.sent == b""
    if name:
        assert again.sent == b"", "it does not expect the response to an older request"


def test_one_turn_of_the_deletion_of_a_million_keys_is_short() -> None:
    """Takes a second: the store is as full as its budget admits."""
    handler = RequestHandler()
    handler.table.values.update((b"group/%d" % number, b"") for number in range(1_200_000))
    client, longest = validated(handler, b"me"), 0.0
    start = time.thread_time()
    handler.handle(client, RELEASE)
    while handler.busy:
        longest, start = max(longest, time.thread_time() - start), time.thread_time()
        handler.take_turn()
    assert max(longest, time.thread_time() - start) < 0.1 and not handler.table.values
