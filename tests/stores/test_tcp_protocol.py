"""The bytes: exactly torch's as recorded, read in any pieces, refused beyond the limits."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchdist_ref.errors import ArgumentError
from torchdist_ref.stores.tcp.operations import (
    MAX_KEY_BYTES,
    MAX_VALUE_BYTES,
    NONCE_MARK,
    OPERATIONS,
    Op,
    Operation,
    recognized,
)
from torchdist_ref.stores.tcp.protocol import (
    FRAMED,
    MAGIC,
    MAX_KEYS,
    MAX_MESSAGE_BYTES,
    REQUEST_HEADER,
    RESPONSE_HEADER,
    ManyValues,
    ProtocolError,
    Request,
    RequestDecoder,
    Status,
    read,
    receive,
    reply_kinds,
    write,
    write_request,
    write_response,
)
from torchdist_ref.stores.tcp.requests import RequestHandler, StoreClient

HANDSHAKE = bytes.fromhex("00cef7853c")

# Recorded between torch 2.13's client and server.
RECORDED = [
    (Op.VALIDATE, (MAGIC,), "00cef7853c"),
    (Op.PING, (0x3D73,), "0d733d0000"),
    (Op.SET, (b"/k", b"v"), "0102000000000000002f6b010000000000000076"),
    (Op.WAIT, ([b"/k"],), "06010000000000000002000000000000002f6b"),
    (Op.GET, (b"/k",), "0302000000000000002f6b"),
    (Op.ADD, (b"/n", -7), "0402000000000000002f6ef9ffffffffffffff"),
    (Op.ADD, (b"init/", 1), "040500000000000000696e69742f0100000000000000"),
    (Op.CANCEL_WAIT, (), "0c"),
    (Op.LIST_KEYS, (), "11"),
    (Op.QUEUE_POP, (b"/Q",), "0f02000000000000002f51"),
    (Op.BARRIER, (b"/B", 1), "1202000000000000002f420100000000000000"),
]


@pytest.mark.parametrize(("op", "fields", "expected"), RECORDED, ids=lambda value: getattr(value, "name", ""))
def test_requests_have_torchs_bytes(op: Operation, fields: tuple[Any, ...], expected: str) -> None:
    assert write_request(op, *fields).hex() == expected
    decoder = RequestDecoder()
    decoder.feed((b"" if op == Op.VALIDATE else HANDSHAKE) + bytes.fromhex(expected))
    if op != Op.VALIDATE:
        decoder.next()
    assert decoder.next() == Request(op, fields)


@pytest.mark.parametrize(
    ("op", "fields", "reply", "expected"),
    [
        (Op.GET, (b"/k",), (b"v",), "010000000000000076"),
        (Op.ADD, (b"/n", -7), (-2,), "feffffffffffffff"),
        (Op.QUEUE_POP, (b"/Q",), ((2, b"one"),), "020000000000000003000000000000006f6e65"),
        (Op.QUEUE_POP, (b"/Q",), ((0, None),), "0000000000000000"),
        (Op.LIST_KEYS, (), ([b"/k", b"init/"],), "020000000000000002000000000000002f6b0500000000000000696e69742f"),
        (Op.MULTI_GET, ([b"/a", b"/b"],), (b"1", b""), "0100000000000000310000000000000000"),
        (Op.CHECK, ([],), (1,), "01"),
    ],
)
def test_replies_have_torchs_bytes(
    op: Operation, fields: tuple[Any, ...], reply: tuple[Any, ...], expected: str
) -> None:
    data = b"".join(write(reply_kinds(op, fields), reply))
    assert data.hex() == expected
    taken = Source(data)
    assert receive(reply_kinds(op, fields), taken.take, len(data)) == reply
    assert taken.rest() == b""
    assert read(reply_kinds(op, fields), data) == reply


class Source:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def take(self, size: int) -> bytes:
        piece, self.data = self.data[:size], self.data[size:]
        return piece

    def rest(self) -> bytes:
        return self.data


BLOB = st.binary(max_size=40)
FIELD = {
    "k": BLOB,
    "v": BLOB,
    "i": st.integers(-(2**63), 2**63 - 1),
    "n": st.integers(0, 2**32 - 1),
    "K": st.lists(BLOB, max_size=4),
    "P": st.lists(st.tuples(BLOB, BLOB), max_size=4),
}
REQUEST = st.sampled_from(list(OPERATIONS.values())).flatmap(
    lambda op: st.builds(
        Request,
        st.just(op),
        st.tuples(*(FIELD[kind] for kind in op.request)),
        st.none() | st.integers(0, 2**64 - 1),
    )
)


def read_all(decoder: RequestDecoder) -> Iterator[Request]:
    """Yield the requests that have arrived."""
    while (request := decoder.next()) is not None:
        yield request


@settings(deadline=None, max_examples=150)
@given(st.lists(REQUEST, max_size=5), st.data())
def test_requests_split_anywhere_are_decoded(requests: list[Request], data: st.DataObject) -> None:
    stream = HANDSHAKE + b"".join(write_request(each.operation, *each.fields, number=each.number) for each in requests)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    decoder, found = RequestDecoder(), list[Request]()
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        decoder.feed(stream[start:end])
        found += read_all(decoder)
    assert found == [Request(Op.VALIDATE, (MAGIC,)), *requests]
    assert decoder.held == 0


def test_requests_arriving_byte_by_byte_are_decoded() -> None:
    decoder, found = RequestDecoder(), []
    for byte in HANDSHAKE + write_request(Op.MULTI_SET, [(b"a", b"1"), (b"b", b"")], number=7):
        decoder.feed(bytes([byte]))
        found.append(decoder.next())
    assert [each for each in found if each] == [
        Request(Op.VALIDATE, (MAGIC,)),
        Request(Op.MULTI_SET, ([(b"a", b"1"), (b"b", b"")],), 7),
    ]


def _u64(number: int) -> bytes:
    return struct.pack("<Q", number)


@pytest.mark.parametrize(
    "data",
    [
        bytes([Op.GET.code]) + _u64(MAX_KEY_BYTES + 1),
        bytes([Op.SET.code]) + _u64(1) + b"k" + _u64(MAX_VALUE_BYTES + 1),
        bytes([Op.WAIT.code]) + _u64(MAX_KEYS + 1),
        bytes([Op.MULTI_SET.code]) + _u64(2**63),
        bytes([Op.SET.code]) + _u64(2**64 - 1),
        bytes([Op.COMPARE_SET.code])
        + _u64(0)
        + _u64(MAX_VALUE_BYTES)
        + bytes(MAX_VALUE_BYTES)
        + _u64(MAX_MESSAGE_BYTES - MAX_VALUE_BYTES),
        b"\x13",
        b"\x7f",
        REQUEST_HEADER.pack(FRAMED, 1, 0, FRAMED),
        REQUEST_HEADER.pack(FRAMED, 1, 0, 0x99),
        REQUEST_HEADER.pack(FRAMED, 1, MAX_MESSAGE_BYTES + 1, Op.SET.code),
        REQUEST_HEADER.pack(FRAMED, 1, 8, Op.GET.code) + _u64(1),
        REQUEST_HEADER.pack(FRAMED, 1, 4, Op.GET.code) + _u64(0),
        REQUEST_HEADER.pack(FRAMED, 1, 9, Op.GET.code) + _u64(0) + b"\x00",
    ],
)
def test_oversized_or_unknown_requests_are_refused_before_they_are_held(data: bytes) -> None:
    decoder = RequestDecoder()
    decoder.feed(HANDSHAKE)
    decoder.next()
    decoder.feed(data)
    with pytest.raises(ProtocolError):
        decoder.next()


def test_the_first_message_must_be_validate() -> None:
    for first in range(1, 256):
        decoder = RequestDecoder()
        decoder.feed(bytes([first]))
        with pytest.raises(ProtocolError, match="not VALIDATE"):
            decoder.next()


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_random_bytes_leave_nothing_pending(data: bytes) -> None:
    decoder, handler, client = RequestDecoder(), RequestHandler(), RecordingClient()
    decoder.feed(HANDSHAKE + data)
    try:
        while (request := decoder.next()) is not None and not client.disconnected:
            handler.handle(client, request)
    except ProtocolError:
        pass
    handler.remove(client)
    assert handler.pending == {}


class RecordingClient(StoreClient):
    """Client without a socket."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.disconnected = ""
        self.on_send: Callable[[], Any] = lambda: None

    def send(self, pieces: Any) -> None:
        self.on_send()
        for piece in pieces:
            self.sent += b"".join(piece.pieces()) if isinstance(piece, ManyValues) else piece

    def disconnect(self, reason: str) -> None:
        self.disconnected = reason

    def replies(self) -> bytes:
        sent, self.sent = self.sent, b""
        return sent


def response_parts(response: bytes) -> tuple[int, int, bytes]:
    number, size, status = RESPONSE_HEADER.unpack_from(response)
    assert len(response) == RESPONSE_HEADER.size + size
    return number, status, response[RESPONSE_HEADER.size :]


def validated(handler: RequestHandler, name: bytes = b"") -> RecordingClient:
    client = RecordingClient()
    handler.handle(client, Request(Op.VALIDATE, (MAGIC,)))
    if name:
        handler.handle(client, Request(Op.HELLO, (name,)))
        client.replies()
    return client


def test_handshake_nonce_distinguishes_our_clients_from_torchs() -> None:
    handler = RequestHandler()
    client = validated(handler)
    handler.handle(client, Request(Op.PING, (4194304,)))
    assert client.replies() == struct.pack("<I", 4194304)
    handler.handle(client, Request(Op.PING, (NONCE_MARK | 0x1234,)))
    assert client.replies() == struct.pack("<I", NONCE_MARK | (0x1234 ^ 0xFFFF))
    assert recognized(0x3D73) is None


def test_pending_request_completes_when_all_its_keys_exist() -> None:
    handler = RequestHandler()
    waiter, setter = validated(handler), validated(handler)
    handler.handle(waiter, Request(Op.WAIT, ([b"a", b"b", b"a"],)))
    for key in (b"a", b"c"):
        handler.handle(setter, Request(Op.SET, (key, b"1")))
        assert waiter.sent == b""
    handler.handle(setter, Request(Op.DELETE_KEY, (b"a",)))
    handler.handle(setter, Request(Op.SET, (b"b", b"1")))
    assert waiter.sent == b""
    handler.handle(setter, Request(Op.SET, (b"a", b"1")))
    assert waiter.replies() == b"\x00"


def test_wait_for_a_key_ignores_its_number() -> None:
    handler = RequestHandler()
    getter, counter, adder = validated(handler, b"me"), validated(handler, b"you"), validated(handler)
    handler.handle(getter, Request(Op.WAIT_GET, (b"n",), 1))
    handler.handle(counter, Request(Op.WAIT_NUMBER, (b"n", 2), 1))
    handler.handle(adder, Request(Op.ADD, (b"n", -5)))
    assert response_parts(getter.replies()) == (1, Status.DONE, b"".join(write("r", [b"-5"])))
    handler.handle(adder, Request(Op.ADD, (b"n", 6)))
    assert counter.replies() == b""
    handler.handle(adder, Request(Op.ADD, (b"n", 1)))
    assert response_parts(counter.replies()) == (1, Status.DONE, b"".join(write("i", [2])))


def test_queue_push_wakes_one_pending_request() -> None:
    handler = RequestHandler()
    first, second, pusher = validated(handler), validated(handler), validated(handler)
    for waiter in (first, second):
        handler.handle(waiter, Request(Op.WAIT, ([b"q"],)))
    handler.handle(pusher, Request(Op.QUEUE_PUSH, (b"q", b"1")))
    assert (first.replies(), second.replies()) == (b"\x00", b"")
    handler.handle(pusher, Request(Op.QUEUE_PUSH, (b"q", b"2")))
    assert second.replies() == b"\x00"


def test_a_wait_for_a_queue_leaves_its_value_to_the_next_pop() -> None:
    """Once the wake-up of a push ended with the wait, and the pop waited though there was a value."""
    handler = RequestHandler()
    waiting, popping, second = (validated(handler, name) for name in (b"waiting", b"popping", b"second"))
    handler.handle(waiting, Request(Op.WAIT, ([b"q"],), 1))
    for each in (popping, second):
        handler.handle(each, Request(Op.WAIT_POP, (b"q",), 1))
    handler.handle(pusher := validated(handler), Request(Op.QUEUE_PUSH, (b"q", b"the value")))
    assert response_parts(waiting.replies())[1] == Status.DONE
    assert response_parts(popping.replies())[2].endswith(b"the value") and second.replies() == b""
    handler.handle(pusher, Request(Op.QUEUE_PUSH, (b"q", b"another")))
    assert response_parts(second.replies())[2].endswith(b"another") and handler.table.length(b"q") == 0


def test_waiting_clients_run_in_order_and_before_the_next_request() -> None:
    """The key that a change sets is there for all that wait for it, though the next request deletes it."""
    handler, order = RequestHandler(), list[int]()
    operations = [(Op.WAIT_GET, b"k"), (Op.WAIT, [b"k"]), (Op.WAIT_GET_ALL, [b"k"])]
    waiting = [validated(handler) for _ in range(30)]
    for number, client in enumerate(waiting):
        operation, keys = operations[number % 3]
        handler.handle(client, Request(operation, (keys,)))
        client.on_send = lambda number=number: order.append(number)  # type: ignore[misc]
    setter = validated(handler)
    handler.handle(setter, Request(Op.SET, (b"k", b"value")))
    handler.handle(setter, Request(Op.DELETE_KEY, (b"k",)))
    value = b"".join(write("r", [b"value"]))
    expected = [value, b"\0", (1).to_bytes(8, "little") + value]
    assert [client.replies() for client in waiting] == [expected[number % 3] for number in range(30)]
    assert order == list(range(30)) and not handler.pending


def test_a_client_that_is_disconnected_by_a_wake_up_does_not_disturb_the_others() -> None:
    handler = RequestHandler()
    first, second, third = (validated(handler) for _ in range(3))
    for client in (first, second, third):
        handler.handle(client, Request(Op.WAIT, ([b"k"],)))
    first.on_send = lambda: handler.remove(second)
    handler.handle(validated(handler), Request(Op.SET, (b"k", b"1")))
    assert (first.sent, second.sent, third.sent) == (b"\0", b"", b"\0") and not handler.pending


def test_a_barrier_counts_each_caller_once() -> None:
    handler = RequestHandler()
    named, unnamed, last = validated(handler, b"me"), validated(handler), validated(handler)
    handler.handle(named, Request(Op.BARRIER, (b"b", 3), 1))
    handler.handle(unnamed, Request(Op.BARRIER, (b"b", 3)))
    assert not named.sent and not unnamed.sent
    handler.handle(last, Request(Op.BARRIER, (b"b", 3)))
    assert (unnamed.sent, last.sent, handler.table.values[b"b"]) == (b"\0", b"\0", b"3")
    assert response_parts(named.replies()) == (1, Status.DONE, b"")


@pytest.mark.parametrize(
    ("request_", "key"),
    [
        (Request(Op.ADD, (b"n", 5), 3), b"n"),
        (Request(Op.APPEND, (b"n", b"5"), 3), b"n"),
        (Request(Op.BARRIER, (b"n", 5), 3), b"n"),
        (Request(Op.COMPARE_SET, (b"n", b"", b"5"), 3), b"n"),
    ],
)
def test_request_repeated_after_reconnecting_runs_once(request_: Request, key: bytes) -> None:
    handler = RequestHandler()
    before = validated(handler, b"me")
    handler.handle(before, request_)
    done, first = handler.table.values[key], before.replies()
    handler.remove(before)
    after = validated(handler, b"me")
    handler.handle(after, request_)
    assert handler.table.values[key] == done and after.replies() == first
    handler.handle(after, Request(Op.CANCEL_WAIT, ()))
    after.replies()
    handler.handle(after, Request(Op.ADD, (b"other", 1), 4))
    assert handler.table.values[b"other"] == b"1"


def test_popped_value_is_kept_for_a_client_that_reconnects() -> None:
    handler = RequestHandler()
    handler.table.push(b"q", b"item")
    before = validated(handler, b"me")
    handler.handle(before, Request(Op.WAIT_POP, (b"q",), 1))
    after = validated(handler, b"me")
    assert before.disconnected == "its client has connected again"
    handler.handle(after, Request(Op.WAIT_POP, (b"q",), 1))
    assert b"item" in after.replies() and handler.table.length(b"q") == 0


def test_canceled_request_reports_the_missing_keys() -> None:
    handler = RequestHandler()
    handler.table.values[b"there"] = b"1"
    client = validated(handler, b"me")
    handler.handle(client, Request(Op.WAIT_GET_ALL, ([b"there", b"gone"],), 9))
    handler.handle(client, Request(Op.CANCEL_WAIT, ()))
    assert response_parts(client.replies()) == (9, Status.CANCELED, b"".join(write("L", [[b"gone"]])))
    handler.handle(client, Request(Op.CANCEL_WAIT, ()))
    assert client.replies() == b"" and handler.pending == {}


def test_refused_request_keeps_our_client_and_disconnects_torchs() -> None:
    handler = RequestHandler()
    handler.table.values[b"/n"] = b"text"
    ours, theirs = validated(handler, b"me"), validated(handler)
    handler.handle(ours, Request(Op.ADD, (b"/n", 1), 1))
    number, status, body = response_parts(ours.replies())
    assert (number, status) == (1, Status.REFUSED) and b"one that holds a number" in body and not ours.disconnected
    handler.handle(theirs, Request(Op.ADD, (b"/n", 1)))
    assert "one that holds a number" in theirs.disconnected


@pytest.mark.parametrize(
    "request_",
    [Request(Op.VALIDATE, (MAGIC,)), Request(Op.ADD, (b"n", 1), 5), Request(Op.GET, (b"k",))],
    ids=["second VALIDATE", "number without a session", "request while one is pending"],
)
def test_requests_in_the_wrong_state_are_refused(request_: Request) -> None:
    handler = RequestHandler()
    client = validated(handler)
    if request_.operation is Op.GET:
        handler.handle(client, Request(Op.WAIT, ([b"missing"],)))
    with pytest.raises(ProtocolError):
        handler.handle(client, request_)


def test_response_has_number_status_and_reply() -> None:
    pieces = write_response(2**40, Status.DONE, write(Op.ADD.reply, (-1,)))
    assert response_parts(b"".join(pieces)) == (2**40, Status.DONE, b"\xff" * 8)


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 2**70])
def test_a_number_beyond_64_bits_is_not_written(number: int) -> None:
    with pytest.raises(ArgumentError, match=rf"ADD: .*64 bits, got .*{number}"):
        write_request(Op.ADD, b"/k", number)
