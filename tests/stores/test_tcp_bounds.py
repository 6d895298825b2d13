"""Memory of the store's server: everything that clients leave there counts in one budget, exactly."""

from __future__ import annotations

import gc
import random
import socket
import struct
import weakref
from collections.abc import Iterator

import pytest

from tests.stores.test_tcp_protocol import RecordingClient, response_parts, validated
from torchdist_ref.errors import ArgumentError
from torchdist_ref.stores import TCPStore
from torchdist_ref.stores.hash import KEY_OVERHEAD_BYTES, QUEUE_OVERHEAD_BYTES
from torchdist_ref.stores.tcp.operations import MAX_FILED, MAX_VALUE_BYTES, Op
from torchdist_ref.stores.tcp.protocol import MAGIC, ManyValues, Request, RequestDecoder, Status, write_request
from torchdist_ref.stores.tcp.requests import (
    AWAITED_OVERHEAD_BYTES,
    SESSION_OVERHEAD_BYTES,
    SHORT_RESPONSE_BYTES,
    RequestHandler,
    SessionTable,
)

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
    assert RequestHandler().memory.limit == 256 * MIB


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


def with_budget(limit: int) -> RequestHandler:
    """A handler with so many bytes of memory."""
    handler = RequestHandler()
    handler.memory.limit = limit
    handler.sessions = SessionTable(handler.memory)
    return handler


def really_used(handler: RequestHandler) -> int:
    table = handler.table
    sizes = [len(key) + len(value) for key, value in table.values.items()]
    sizes += [len(value) for queue in table.queues.values() for value in queue]
    sessions = {*handler.sessions.sessions.values(), *handler.sessions.disconnected}
    sizes += [sum(map(len, each.will)) for each in sessions if each.will]
    waiting = {client for clients in handler.pending.values() for client in clients}
    first_fields = [each.waiting.fields[0] for each in waiting if each.waiting is not None]
    named = [len(key) for field in first_fields if isinstance(field, list) for key in field]
    single = [len(field) for field in first_fields if isinstance(field, bytes)]
    queues = sum(len(key) + QUEUE_OVERHEAD_BYTES for key in table.queues)
    awaited = sum(named + single) + AWAITED_OVERHEAD_BYTES * len(named)
    known = handler.sessions.sessions.values()
    kept = [sum(map(len, each.response)) for each in known if each.response]
    kept_bytes = sum(size for size in kept if size > SHORT_RESPONSE_BYTES)
    kept_bytes += sum(len(each.name) + SESSION_OVERHEAD_BYTES for each in known)
    return sum(sizes) + KEY_OVERHEAD_BYTES * len(sizes) + queues + awaited + kept_bytes


def test_the_memory_of_random_requests_is_counted_exactly() -> None:
    handler, generator = with_budget(16000), random.Random(3)
    names = (b"a", b"b", b"c")
    clients = [validated(handler, name) for name in names]
    refused = 0
    for number in range(1, 3000):
        client = clients[number % 3]
        if client.waiting is not None and generator.random() < 0.2:
            handler.remove(client)
            client = clients[number % 3] = validated(handler, names[number % 3])
        elif client.waiting is not None:
            handler.handle(client, Request(Op.CANCEL_WAIT, ()))
        elif generator.random() < 0.05:
            handler.remove(client)
            handler.execute_wills(float("inf"))
            client = clients[number % 3] = validated(handler, names[number % 3])
        key, value = generator.choice([b"x", b"yy", b"zzz"]), bytes(generator.randrange(1800))
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
                (Op.WAIT, ([key, b"n" * generator.randrange(1400), b"yy"],)),
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
        assert handler.memory.used <= handler.memory.limit + 2500, request
    assert refused > 50


def test_keys_of_queues_and_what_is_set_at_the_end_of_clients_count_in_the_budget() -> None:
    """Once long keys of queues, and a value for each of 4096 clients, could fill the memory."""
    for request in (
        lambda number: Request(Op.QUEUE_PUSH, (b"%d" % number + bytes(8000), b"x"), 1),
        lambda number: Request(Op.SET_ON_DISCONNECT, (b"gone %d" % number, bytes(8000), []), 1),
    ):
        handler, statuses = with_budget(MIB), list[int]()
        for number in range(200):
            client = validated(handler, b"client %d" % number)
            handler.handle(client, request(number))
            statuses.append(response_parts(client.replies())[1])
        done = statuses.count(Status.DONE)
        assert 100 < done < MIB // 8000 and set(statuses[done:]) == {Status.REFUSED}
        # A client may connect to a full store, to delete keys.
        session_bytes = 200 * (len(b"client 000") + SESSION_OVERHEAD_BYTES)
        assert handler.memory.used == really_used(handler) <= MIB + session_bytes


def test_sessions_that_are_dropped_leave_the_budget_and_their_wills_are_executed() -> None:
    handler = with_budget(4 * 3 * (SESSION_OVERHEAD_BYTES + 20))
    for number in range(8):
        client = validated(handler, b"client %d" % number)
        handler.handle(client, Request(Op.SET_ON_DISCONNECT, (b"gone %d" % number, b"value", []), 1))
        handler.remove(client)
    assert len(handler.sessions.sessions) == 3 and handler.memory.used == really_used(handler)
    handler.execute_wills(float("inf"))
    assert len(handler.table.values) == 8 and handler.memory.used == really_used(handler)


def test_a_will_of_a_key_that_exists_is_forgotten() -> None:
    handler = RequestHandler()
    client, other = validated(handler, b"me"), validated(handler, b"other")
    handler.handle(client, Request(Op.SET_ON_DISCONNECT, (b"left", b"by its will", []), 1))
    handler.handle(other, Request(Op.SET, (b"left", b"in time"), 1))
    handler.remove(client)
    handler.execute_wills(float("inf"))
    assert handler.table.values == {b"left": b"in time"} and handler.memory.used == really_used(handler)


def test_the_keys_of_waiting_requests_count_in_the_budget() -> None:
    """Once each of 1000 clients could leave 16 MiB of keys in a server."""
    handler = with_budget(MIB)
    keys = [b"absent %d" % number for number in range(2000)]
    clients = [validated(handler, b"client %d" % number) for number in range(20)]
    statuses = []
    for client in clients:
        handler.handle(client, Request(Op.WAIT, (keys,), 1))
        statuses.append(response_parts(sent)[1:] if (sent := client.replies()) else None)
    held = statuses.count(None)
    assert held == 8 and handler.memory.used <= MIB
    assert all(status == Status.REFUSED and b"the store is full" in text for status, text in statuses[held:])
    handler.handle(clients[0], Request(Op.CANCEL_WAIT, ()))
    handler.handle(clients[-1], Request(Op.WAIT, (keys,), 2))
    assert clients[-1].waiting is not None
    for client in clients:
        handler.remove(client)
    assert handler.memory.used == 0 and not handler.pending


def test_kept_responses_of_clients_that_have_gone_use_a_quarter_of_the_budget() -> None:
    """Once 600 gone clients kept 605 MiB."""
    handler = with_budget(40 * MIB)
    for number in range(40):
        client = validated(handler, b"client %d" % number)
        handler.handle(client, Request(Op.COMPARE_SET, (b"k%d" % number, b"", bytes(MIB)), 1))
        assert len(client.replies()) > MIB
        handler.handle(client, Request(Op.DELETE_KEY, (b"k%d" % number,), 2) if number % 2 else Request(Op.PING, (7,)))
        handler.handle(validated(handler), Request(Op.DELETE_KEY, (b"k%d" % number,)))
        handler.remove(client)
        kept = [sum(map(len, each.response)) for each in handler.sessions.sessions.values() if each.response]
        assert sum(kept) <= 10 * MIB and handler.memory.used == really_used(handler)
    assert kept[-1] < 100 < MIB < kept[-2], "the latest are kept"


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


# Long requests


def test_a_wait_for_many_keys_is_filed_under_a_few_at_a_time() -> None:
    handler = RequestHandler()
    waiter, setter = validated(handler, b"me"), validated(handler)
    keys = [b"/k%d" % number for number in range(3 * MAX_FILED)]
    handler.handle(waiter, Request(Op.WAIT, (keys,), 1))
    assert len(handler.pending) == MAX_FILED
    for key in reversed(keys[1:]):
        handler.handle(setter, Request(Op.SET, (key, b"")))
    assert waiter.sent == b""
    handler.handle(setter, Request(Op.SET, (keys[0], b"")))
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
    value, client, sent = bytes(MAX_VALUE_BYTES), validated(handler), list[object]()
    handler.table.values[b"/k"] = value
    client.send = sent.extend  # type: ignore[method-assign]
    handler.handle(client, Request(Op.MULTI_GET, ([b"/k"] * 1000,)))
    assert isinstance(sent[-1], ManyValues) and len(sent[-1]) == 1000 * (8 + len(value))
    assert sum(piece is value for piece in sent[-1].pieces()) == 1000, "a reply of 8 GB holds no copy of the value"


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


# Releases

RELEASE = Request(Op.RELEASE, (b"group", 1), 5)


def group() -> RequestHandler:
    """A store of keys and a queue of a group, and keys whose names only begin alike."""
    handler = RequestHandler()
    client = validated(handler)
    pairs = [(b"group/%d" % i if i % 3 else b"groups/%d" % i, b"x" * (i % 50)) for i in range(300)]
    handler.handle(client, Request(Op.MULTI_SET, (pairs,)))
    for i in range(50):
        handler.handle(client, Request(Op.QUEUE_PUSH, (b"group/queue", b"%d" % i)))
    return handler


def test_the_last_user_of_a_prefix_deletes_its_keys() -> None:
    handler = group()
    first, last = (validated(handler, name) for name in (b"first", b"last"))
    handler.handle(first, Request(Op.RELEASE, (b"group", 2), 1))
    assert response_parts(first.replies()) == (1, Status.DONE, b"\0") and len(handler.table.values) == 301
    handler.handle(last, Request(Op.RELEASE, (b"group", 2), 1))
    assert response_parts(last.replies()) == (1, Status.DONE, b"\1") and not handler.table.queues
    assert set(handler.table.values) == {b"groups/%d" % i for i in range(0, 300, 3)}
    assert handler.memory.used == really_used(handler)


def test_a_release_that_is_repeated_after_reconnecting_runs_once() -> None:
    handler = group()
    before = validated(handler, b"me")
    handler.handle(before, RELEASE)
    handler.remove(before)
    handler.handle(validated(handler), Request(Op.SET, (b"group/new", b"x")))
    after = RecordingClient()
    handler.handle(after, Request(Op.VALIDATE, (MAGIC,)))
    handler.handle(after, Request(Op.HELLO, (b"me",)))
    after.replies()
    handler.handle(after, RELEASE)
    assert response_parts(after.replies()) == (5, Status.DONE, b"\1") and b"group/new" in handler.table.values
