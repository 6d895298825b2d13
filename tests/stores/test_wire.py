"""The bytes: exactly torch's as recorded, read in any pieces, refused beyond the limits."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchdist_ref.stores.tcp_parse import Decoder, read, take_whole
from torchdist_ref.stores.tcp_service import Peer, Service
from torchdist_ref.stores.tcp_wire import (
    ANSWER_HEAD,
    LONGEST_KEY,
    LONGEST_MESSAGE,
    LONGEST_VALUE,
    MAGIC,
    MARK,
    MOST_KEYS,
    REPLIES,
    REQUESTS,
    TRACKED_HEAD,
    Op,
    Request,
    Status,
    WireError,
    recognised,
    reply_shape,
    write,
    write_answer,
    write_request,
)

GREETING = bytes.fromhex("00cef7853c")

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
def test_requests_are_torchs_bytes(op: Op, fields: tuple[Any, ...], expected: str) -> None:
    assert write_request(op, *fields).hex() == expected
    decoder = Decoder()
    decoder.feed((b"" if op == Op.VALIDATE else GREETING) + bytes.fromhex(expected))
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
def test_replies_are_torchs_bytes(op: Op, fields: tuple[Any, ...], reply: tuple[Any, ...], expected: str) -> None:
    data = b"".join(write(reply_shape(op, fields), reply))
    assert data.hex() == expected
    taken = Source(data)
    assert take_whole(reply_shape(op, fields), taken.take) == reply
    assert taken.rest() == b""
    assert read(reply_shape(op, fields), data) == reply


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
REQUEST = st.sampled_from([op for op in Op if op in REQUESTS]).flatmap(
    lambda op: st.builds(
        Request,
        st.just(op),
        st.tuples(*(FIELD[kind] for kind in REQUESTS[op])),
        st.none() | st.integers(0, 2**64 - 1),
    )
)


@settings(deadline=None, max_examples=150)
@given(st.lists(REQUEST, max_size=5), st.data())
def test_any_requests_cut_anywhere_are_read_whole(requests: list[Request], data: st.DataObject) -> None:
    stream = GREETING + b"".join(write_request(each.op, *each.fields, number=each.number) for each in requests)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    decoder, found = Decoder(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        decoder.feed(stream[start:end])
        while (request := decoder.next()) is not None:
            found.append(request)
    assert found == [Request(Op.VALIDATE, (MAGIC,)), *requests]
    assert decoder.held == 0


def test_byte_by_byte() -> None:
    decoder, found = Decoder(), []
    for byte in GREETING + write_request(Op.MULTI_SET, [(b"a", b"1"), (b"b", b"")], number=7):
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
        bytes([Op.GET]) + _u64(LONGEST_KEY + 1),
        bytes([Op.SET]) + _u64(1) + b"k" + _u64(LONGEST_VALUE + 1),
        bytes([Op.WAIT]) + _u64(MOST_KEYS + 1),
        bytes([Op.MULTI_SET]) + _u64(2**63),
        bytes([Op.SET]) + _u64(2**64 - 1),
        bytes([Op.COMPARE_SET])
        + _u64(0)
        + _u64(LONGEST_VALUE)
        + bytes(LONGEST_VALUE)
        + _u64(LONGEST_MESSAGE - LONGEST_VALUE),
        b"\x13",
        b"\x7f",
        TRACKED_HEAD.pack(Op.TRACKED, 1, 0, Op.TRACKED),
        TRACKED_HEAD.pack(Op.TRACKED, 1, 0, 0x99),
        TRACKED_HEAD.pack(Op.TRACKED, 1, LONGEST_MESSAGE + 1, Op.SET),
        TRACKED_HEAD.pack(Op.TRACKED, 1, 8, Op.GET) + _u64(1),
        TRACKED_HEAD.pack(Op.TRACKED, 1, 4, Op.GET) + _u64(0),
        TRACKED_HEAD.pack(Op.TRACKED, 1, 9, Op.GET) + _u64(0) + b"\x00",
    ],
)
def test_what_is_too_large_or_unknown_is_refused_before_it_is_held(data: bytes) -> None:
    decoder = Decoder()
    decoder.feed(GREETING)
    decoder.next()
    decoder.feed(data)
    with pytest.raises(WireError):
        decoder.next()


def test_a_stranger_can_open_with_nothing_but_the_greeting() -> None:
    for first in range(1, 256):
        decoder = Decoder()
        decoder.feed(bytes([first]))
        with pytest.raises(WireError, match="not VALIDATE"):
            decoder.next()


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_no_bytes_confuse_parser_or_service(data: bytes) -> None:
    decoder, service, peer = Decoder(), Service(), Recorder()
    decoder.feed(GREETING + data)
    try:
        while (request := decoder.next()) is not None and not peer.was_cut:
            service.handle(peer, request)
    except WireError:
        pass
    service.leave(peer)
    assert service._waiting == {}


class Recorder(Peer):
    """A peer without a socket."""

    def __init__(self) -> None:
        self.sent = b""
        self.was_cut = ""

    def send(self, pieces: Any) -> None:
        self.sent += b"".join(pieces)

    def cut(self, why: str) -> None:
        self.was_cut = why

    def answers(self) -> bytes:
        sent, self.sent = self.sent, b""
        return sent


def taken_apart(answer: bytes) -> tuple[int, int, bytes]:
    number, size, status = ANSWER_HEAD.unpack_from(answer)
    assert len(answer) == ANSWER_HEAD.size + size
    return number, status, answer[ANSWER_HEAD.size :]


def guest(service: Service, name: bytes = b"") -> Recorder:
    peer = Recorder()
    service.handle(peer, Request(Op.VALIDATE, (MAGIC,)))
    if name:
        service.handle(peer, Request(Op.HELLO, (name,)))
        peer.answers()
    return peer


def test_the_nonce_tells_our_peers_from_torchs() -> None:
    service = Service()
    peer = guest(service)
    service.handle(peer, Request(Op.PING, (4194304,)))
    assert peer.answers() == struct.pack("<I", 4194304)
    service.handle(peer, Request(Op.PING, (MARK | 0x1234,)))
    assert peer.answers() == struct.pack("<I", MARK | (0x1234 ^ 0xFFFF))
    assert recognised(0x3D73) is None


def test_a_waiter_is_answered_once_all_its_keys_are_there() -> None:
    service = Service()
    waiter, setter = guest(service), guest(service)
    service.handle(waiter, Request(Op.WAIT, ([b"a", b"b", b"a"],)))
    for key in (b"a", b"c"):
        service.handle(setter, Request(Op.SET, (key, b"1")))
        assert waiter.sent == b""
    service.handle(setter, Request(Op.DELETE_KEY, (b"a",)))
    service.handle(setter, Request(Op.SET, (b"b", b"1")))
    assert waiter.sent == b""
    service.handle(setter, Request(Op.SET, (b"a", b"1")))
    assert waiter.answers() == b"\x00"


def test_who_waits_for_a_key_does_not_care_what_number_it_holds() -> None:
    service = Service()
    getter, counter, adder = guest(service, b"me"), guest(service, b"you"), guest(service)
    service.handle(getter, Request(Op.WAIT_GET, (b"n",), 1))
    service.handle(counter, Request(Op.WAIT_NUMBER, (b"n", 2), 1))
    service.handle(adder, Request(Op.ADD, (b"n", -5)))
    assert taken_apart(getter.answers()) == (1, Status.DONE, b"".join(write("r", [b"-5"])))
    service.handle(adder, Request(Op.ADD, (b"n", 6)))
    assert counter.answers() == b""
    service.handle(adder, Request(Op.ADD, (b"n", 1)))
    assert taken_apart(counter.answers()) == (1, Status.DONE, b"".join(write("i", [2])))


def test_one_push_wakes_one_waiter() -> None:
    service = Service()
    first, second, pusher = guest(service), guest(service), guest(service)
    for waiter in (first, second):
        service.handle(waiter, Request(Op.WAIT, ([b"q"],)))
    service.handle(pusher, Request(Op.QUEUE_PUSH, (b"q", b"1")))
    assert (first.answers(), second.answers()) == (b"\x00", b"")
    service.handle(pusher, Request(Op.QUEUE_PUSH, (b"q", b"2")))
    assert second.answers() == b"\x00"


@pytest.mark.parametrize(
    ("request_", "key"),
    [
        (Request(Op.ADD, (b"n", 5), 3), b"n"),
        (Request(Op.APPEND, (b"n", b"5"), 3), b"n"),
        (Request(Op.BARRIER, (b"n", 5), 3), b"n"),
        (Request(Op.COMPARE_SET, (b"n", b"", b"5"), 3), b"n"),
    ],
)
def test_what_is_asked_again_after_a_break_is_done_once(request_: Request, key: bytes) -> None:
    service = Service()
    before = guest(service, b"me")
    service.handle(before, request_)
    done, first = service.table.values[key], before.answers()
    service.leave(before)
    after = guest(service, b"me")
    service.handle(after, request_)
    assert service.table.values[key] == done and after.answers() == first
    service.handle(after, Request(Op.CANCEL_WAIT, ()))
    after.answers()
    service.handle(after, Request(Op.ADD, (b"other", 1), 4))
    assert service.table.values[b"other"] == b"1"


def test_an_item_popped_for_a_client_that_did_not_hear_is_kept_for_it() -> None:
    service = Service()
    service.table.push(b"q", b"item")
    before = guest(service, b"me")
    service.handle(before, Request(Op.WAIT_POP, (b"q",), 1))
    after = guest(service, b"me")
    assert before.was_cut == "its client has connected again"
    service.handle(after, Request(Op.WAIT_POP, (b"q",), 1))
    assert b"item" in after.answers() and service.table.length(b"q") == 0


def test_a_cancelled_request_says_what_was_missing() -> None:
    service = Service()
    service.table.values[b"there"] = b"1"
    peer = guest(service, b"me")
    service.handle(peer, Request(Op.WAIT_GET_ALL, ([b"there", b"gone"],), 9))
    service.handle(peer, Request(Op.CANCEL_WAIT, ()))
    assert taken_apart(peer.answers()) == (9, Status.CANCELLED, b"".join(write("L", [[b"gone"]])))
    service.handle(peer, Request(Op.CANCEL_WAIT, ()))
    assert peer.answers() == b"" and service._waiting == {}


def test_a_refused_request_keeps_a_numbered_peer_and_cuts_torchs() -> None:
    service = Service()
    service.table.values[b"/n"] = b"text"
    ours, theirs = guest(service, b"me"), guest(service)
    service.handle(ours, Request(Op.ADD, (b"/n", 1), 1))
    number, status, body = taken_apart(ours.answers())
    assert (number, status) == (1, Status.REFUSED) and b"one that holds a number" in body and not ours.was_cut
    service.handle(theirs, Request(Op.ADD, (b"/n", 1)))
    assert "one that holds a number" in theirs.was_cut


@pytest.mark.parametrize(
    "request_",
    [Request(Op.VALIDATE, (MAGIC,)), Request(Op.ADD, (b"n", 1), 5), Request(Op.GET, (b"k",))],
    ids=["second greeting", "number without a name", "question while one is out"],
)
def test_what_is_out_of_turn_is_refused(request_: Request) -> None:
    service = Service()
    peer = guest(service)
    if request_.op == Op.GET:
        service.handle(peer, Request(Op.WAIT, ([b"missing"],)))
    with pytest.raises(WireError):
        service.handle(peer, request_)


def test_an_answer_carries_number_status_and_reply() -> None:
    pieces = write_answer(2**40, Status.DONE, write(REPLIES[Op.ADD], (-1,)))
    assert taken_apart(b"".join(pieces)) == (2**40, Status.DONE, b"\xff" * 8)
