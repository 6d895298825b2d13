"""Parsers of the store's protocol and of the mesh's frames against a second, obvious one (`second_parser`).

A run is one stream of bytes, honest or mutated, cut at random places. Both parsers must find the same messages with the
same values, end in the same state, and write the same bytes to the same places.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.soak import second_parser as second
from tests.soak.proofs import Limits, Outcome, mutated, pieces
from torchdist_ref.errors import DistNetworkError
from torchdist_ref.stores.tcp import protocol
from torchdist_ref.stores.tcp.operations import OPERATIONS
from torchdist_ref.transports import frames
from torchdist_ref.transports.mesh import ConnectionMesh
from torchdist_ref.transports.segment import MESSAGE_HEADER_BYTES, ROW_BYTES, SegmentLayout

BATCH = 1000
HANDSHAKE = second.encoded("n", (protocol.MAGIC,))
VALIDATED = bytes([second.VALIDATE]) + HANDSHAKE
REPLIES = sorted({reply for _, reply in second.OPERATIONS.values() if reply and reply != "*"} | {"rrr"})


def value(rng: random.Random, most: int = 24) -> bytes:
    return rng.randbytes(int(rng.random() ** 2 * most))


def random_field(kind: str, rng: random.Random) -> Any:
    """Return a value for a field of a kind."""
    if kind in "kvr":
        return value(rng)
    if kind == "i":
        return rng.choice((0, 1, -1, 2**63 - 1, -(2**63), rng.getrandbits(32)))
    if kind in "nba":
        return rng.getrandbits(32 if kind == "n" else 8)
    if kind in "KL":
        return [value(rng, 9) for _ in range(int(rng.random() * 4))]
    if kind == "P":
        return [(value(rng, 9), value(rng)) for _ in range(int(rng.random() * 4))]
    length = rng.choice((-1, 0, 1, 5, 2**62))
    return length, value(rng) if length > 0 else None


def request_pool(rng: random.Random) -> list[bytes]:
    """Return requests, framed and not; the library's writer must write the same bytes."""
    pool = []
    for _ in range(150):
        code = rng.choice(list(second.OPERATIONS))
        kinds = second.OPERATIONS[code][0]
        fields = tuple(random_field(kind, rng) for kind in kinds)
        number = rng.getrandbits(64) if rng.random() < 0.6 else None
        body = second.encoded(kinds, fields)
        head = b"" if number is None else b"\x81" + number.to_bytes(8, "little") + len(body).to_bytes(4, "little")
        message = head + bytes([code]) + body
        written = protocol.write_request(OPERATIONS[code], *fields, number=number)
        if written != message:
            raise AssertionError(f"a request is written as {written.hex()}, expected {message.hex()}")
        pool.append(message)
    return pool


def stream_of(parts: list[bytes], rng: random.Random) -> bytes:
    data = b"".join(rng.choice(parts) for _ in range(1 + int(rng.random() * 3)))
    return data if rng.random() < 0.3 else mutated(data, rng)


def check_requests(stream: bytes, cut: list[bytes]) -> str:
    """Return a difference between the server's parser and the second one; empty if there is none."""
    decoder, found, verdict = protocol.RequestDecoder(), [], "open"
    try:
        for piece in cut:
            decoder.feed(piece)
            while (request := decoder.next()) is not None:
                found.append((request.operation.code, request.fields, request.number))
    except protocol.ProtocolError:
        verdict = "refused"
    expected, expected_verdict, at = second.requests(stream)
    if found != expected or verdict != expected_verdict:
        return f"requests {found} {verdict}, expected {expected} {expected_verdict}"
    if verdict == "open" and decoder.held != len(stream) - at:
        return f"{decoder.held} bytes held, expected {len(stream) - at}"
    return ""


def check_reply(kinds: str, data: bytes) -> str:
    """Return a difference between the client's parsers and the second one."""
    try:
        found: Any = protocol.read(kinds, data)
    except protocol.ProtocolError:
        found = "refused"
    try:
        expected: Any = second.fields(kinds, data)
    except second.Refused:
        expected = "refused"
    if found != expected:
        return f"a reply {kinds} is {found}, expected {expected}"
    return check_received(kinds, data)


def check_received(kinds: str, data: bytes) -> str:
    """Compare the reader of replies without a length, which takes bytes from a socket."""
    at = 0

    def take(size: int) -> bytes:
        nonlocal at
        if at + size > len(data):
            raise second.Incomplete
        at += size
        return data[at - size : at]

    found, expected, cursor = None, None, second.Cursor(data)
    try:
        found = protocol.receive(kinds, take, protocol.UNLIMITED), at
    except (second.Incomplete, protocol.ProtocolError):
        pass
    try:
        expected = tuple(cursor.field(kind) for kind in kinds), cursor.at
    except (second.Incomplete, second.Refused):
        pass
    return "" if found == expected else f"a received reply {kinds} is {found}, expected {expected}"


class Pieces:
    """Socket that delivers given pieces, and would then block."""

    def __init__(self, cut: list[bytes]) -> None:
        self._left = [piece for piece in reversed(cut) if piece]
        self._waits = False

    def recv_into(self, target: memoryview) -> int:
        if self._waits or not self._left:
            self._waits = False
            raise BlockingIOError
        piece = self._left.pop()
        count = min(len(piece), len(target))
        target[:count] = piece[:count]
        if count < len(piece):
            self._left.append(piece[count:])
        else:
            # The next bytes arrive later.
            self._waits = True
        return count

    @property
    def left(self) -> bool:
        return bool(self._left)

    def setblocking(self, _: bool) -> None:
        """Do nothing: it never blocks."""

    def setsockopt(self, *_: int) -> None:
        """Do nothing: there is no socket."""

    def getpeername(self) -> tuple[str, int]:
        return "127.0.0.1", 0

    def fileno(self) -> int:
        return 0


class Mesh:
    """Receiving rank of a mesh beside its second implementation; both keep their own memory."""

    RANK, PEER = 1, 2

    def __init__(self) -> None:
        layout = self.layout = SegmentLayout(3, window=4096, cells=2, mailbox_bytes=0)
        self.memory, self.expected = bytearray(layout.nbytes), bytearray(layout.nbytes)
        self.view = memoryview(self.memory)
        header = layout.message_header(self.PEER, self.RANK)
        mailbox = layout.mailbox_ring(self.PEER, self.RANK) + layout.mailbox_ring_bytes - header
        self.allowed = {
            self.PEER: [
                (layout.status_row(self.PEER), ROW_BYTES),
                (layout.eager_buffer(self.PEER, 0), layout.staging_bytes),
                (header, mailbox),
            ],
            self.RANK: [(layout.message_header(self.RANK, self.PEER), MESSAGE_HEADER_BYTES)],
        }

    def range_of(self, owner: int, rng: random.Random) -> tuple[int, int]:
        """Return a range that the peer may write; now and then one beside it."""
        begin, size = rng.choice(self.allowed[owner])
        length = int(rng.random() * 40) if rng.random() < 0.9 else int(rng.random() * size)
        offset = rng.choice((0, size - length, int(rng.random() * (size - length))))
        choice = rng.random()
        if choice < 0.02:
            return begin - 1, length
        if choice < 0.04:
            return begin + size, length
        if choice < 0.06:
            return begin + size - length, length + 1
        return begin + offset, length

    def frame(self, posted: list[int], rng: random.Random) -> bytes:
        """Return the bytes of a frame; `posted` has the sizes of the buffers that no earlier frame has filled."""
        owner = self.PEER if rng.random() < 0.8 else rng.choice((self.RANK, 0, 77))
        kind = int(rng.random() * 8) if rng.random() < 0.97 else rng.getrandbits(8)
        ranges = []
        if posted and rng.random() < 0.5:
            ranges = [(second.POSTED, posted.pop(0))]
        elif owner in self.allowed:
            ranges = [self.range_of(owner, rng) for _ in range(int(rng.random() * 4))]
        if rng.random() < 0.02:
            ranges.append((second.POSTED, int(rng.random() * 20)))
        data = bytes([kind, len(ranges)]) + owner.to_bytes(4, "little")
        data += b"".join(begin.to_bytes(8, "little") + size.to_bytes(8, "little") for begin, size in ranges)
        return data + b"".join(rng.randbytes(size) for _, size in ranges)

    def stream(self, rng: random.Random) -> tuple[bytes, list[int]]:
        """Return a stream of frames, and the sizes of the buffers that the receiver has posted."""
        sizes = [int(rng.random() * 30) if rng.random() < 0.95 else 9000 for _ in range(int(rng.random() * 3))]
        left = list(sizes)
        data = b"".join(self.frame(left, rng) for _ in range(1 + int(rng.random() * 3)))
        return (data if rng.random() < 0.4 else mutated(data, rng)), sizes

    def check(self, stream: bytes, sizes: list[int], cut: list[bytes]) -> str:
        """Return a difference between the receiving end and the second one."""
        source, doorbells = Pieces(cut), []
        mesh = ConnectionMesh(self.RANK, self.layout, lambda _: self.view)
        mesh.ring_doorbell = lambda: doorbells.append(1)
        mesh.add(self.PEER, source)
        buffers, copies = [bytearray(size) for size in sizes], [bytearray(size) for size in sizes]
        mesh.posted_receives[self.PEER].extend(map(memoryview, buffers))
        verdict, connection = "open", mesh.connections[self.PEER]
        try:
            while source.left:
                connection.receive()
        except DistNetworkError:
            verdict = "refused"
        expected = second.Peer(self.PEER, self.allowed, list(copies))
        expected_verdict = expected.read(stream)
        counts = {kind: count for (kind, _), count in mesh.counts.items()}
        if doorbells:
            counts["doorbell"] = len(doorbells)
        if verdict != expected_verdict or counts != expected.counts:
            return f"frames: {verdict} {counts}, expected {expected_verdict} {expected.counts}"
        if buffers != copies or len(mesh.posted_receives[self.PEER]) != len(expected.posted):
            return "frames: posted buffers differ"
        for begin, written in expected.writes:
            self.expected[begin : begin + len(written)] = written
        for begin, written in expected.writes:
            if self.view[begin : begin + len(written)] != self.expected[begin : begin + len(written)]:
                return f"frames: the memory at {begin} differs"
        return ""

    def check_memory(self) -> str:
        """Return a difference in the whole memory."""
        return "" if self.memory == self.expected else "frames: memory differs outside the ranges written"


@contextmanager
def small_buffers(size: int = 8192) -> Iterator[None]:
    """Receive frames into small buffers, so that short streams reach these paths, too."""
    was, frames._BUFFER_BYTES = frames._BUFFER_BYTES, size
    try:
        yield
    finally:
        frames._BUFFER_BYTES = was


def batch(seed: int, count: int, report: Callable[[str], None]) -> None:
    """Compare the parsers on `count` streams."""
    rng, mesh = random.Random(seed), Mesh()
    pool = request_pool(rng)
    for index in range(count):
        choice = rng.random()
        if choice < 0.5:
            stream = VALIDATED + stream_of(pool, rng) if choice < 0.48 else stream_of([VALIDATED, *pool], rng)
            found = check_requests(stream, pieces(stream, rng))
        elif choice < 0.65:
            kinds = rng.choice(REPLIES)
            stream = second.encoded(kinds, tuple(random_field(kind, rng) for kind in kinds))
            stream = stream if rng.random() < 0.3 else mutated(stream, rng)
            found = check_reply(kinds, stream)
        else:
            stream, sizes = mesh.stream(rng)
            found = mesh.check(stream, sizes, pieces(stream, rng))
        if found:
            report(f"seed {seed}, run {index}: {found}; stream {stream[:200].hex()}")
            mesh = Mesh()
    if found := mesh.check_memory():
        report(f"seed {seed}: {found}")


def prove(limits: Limits) -> Outcome:
    """Compare the parsers on random streams."""
    outcome = Outcome()
    with small_buffers():
        for seed, count in limits.seeds(BATCH):
            batch(seed, count, outcome.fail)
            outcome.done += count
    return outcome
