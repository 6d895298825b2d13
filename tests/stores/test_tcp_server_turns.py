"""An honest client among greedy ones: the turns of the server's loop, and the requests of others, before its answer.

The loop runs on the thread of the test, one turn at a time, so the counts depend on no clock.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from torchdist_ref.stores import sockets
from torchdist_ref.stores.hash import KEYS_IN_PART
from torchdist_ref.stores.tcp import server
from torchdist_ref.stores.tcp.operations import Op
from torchdist_ref.stores.tcp.protocol import ITEMS_PER_TURN, MAGIC, MAX_KEYS, Request, write_request
from torchdist_ref.stores.tcp.releases import PARTS_IN_TURN
from torchdist_ref.stores.tcp.requests import RequestHandler
from torchdist_ref.stores.tcp.sessions import StoreClient
from torchdist_ref.timeouts import Deadline

HANDSHAKE = write_request(Op.VALIDATE, MAGIC)
KEYS = 300
COSTS = {Op.WAIT: 0.06, Op.LIST_KEYS: 0.05, Op.SET: 0.001}


class Greedy:
    """Client that sends its request again and again, and reads what it is sent.

    Args:
        port: Port of the server.
        request: Bytes to repeat.
    """

    def __init__(self, port: int, request: bytes) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setblocking(False)
        self._data = memoryview(HANDSHAKE + request)
        self._request = memoryview(request)
        self._sent = 0
        self.received = 0

    def push(self) -> None:
        """Send the rest of a request, or another one, and read what has come."""
        if self._sent == len(self._data):
            self._data, self._sent = self._request, 0
        try:
            while self._sent < len(self._data):
                self._sent += self.socket.send(self._data[self._sent :])
        except BlockingIOError:
            pass
        try:
            while data := self.socket.recv(1 << 20):
                self.received += len(data)
        except BlockingIOError:
            pass


@pytest.fixture
def loop() -> Iterator[server.ServerLoop]:
    made = server.ServerLoop(sockets.listen("127.0.0.1", 0, Deadline(20)))
    yield made
    made.close_copies()


def turn(loop: server.ServerLoop) -> None:
    loop._serve_all(loop._poller.poll(0))
    loop._check_limits(idle=False)


class Clock:
    """Clock of the server's loop, on which each request takes as long as its operation would at full size."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made, handle = Clock(), RequestHandler.handle

    def timed(handler: RequestHandler, client: StoreClient, request: Request) -> None:
        made.now += COSTS.get(request.operation, 0.0001)
        handle(handler, client, request)

    monkeypatch.setattr(RequestHandler, "handle", timed)
    monkeypatch.setattr(server, "monotonic", made.monotonic)
    return made


ATTACKS = {
    "wait": lambda: write_request(Op.WAIT, [b"/filler %d" % i for i in range(KEYS)]),
    "list": lambda: write_request(Op.LIST_KEYS),
    "set": lambda: write_request(Op.SET, b"/greedy", b"x" * 3000),
    "half": lambda: write_request(Op.SET, b"/half", b"x" * 7_000_000)[:6_000_000],
}


def turns_until_answered(loop: server.ServerLoop, honest: socket.socket, greedy: list[Greedy], number: int) -> int:
    for each in greedy:
        each.push()
    honest.sendall(write_request(Op.ADD, b"/honest", 1))
    for turns in range(1, 1000):
        turn(loop)
        try:
            answer = honest.recv(64)
        except BlockingIOError:
            continue
        assert int.from_bytes(answer, "little") == number
        return turns
    raise AssertionError("no answer in 1000 turns")


def connect_honest(loop: server.ServerLoop, port: int) -> socket.socket:
    honest = socket.create_connection(("127.0.0.1", port))
    honest.sendall(HANDSHAKE)
    honest.setblocking(False)
    for _ in range(3):
        turn(loop)
    return honest


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_honest_client_is_answered_in_the_next_turn(loop: server.ServerLoop, clock: Clock, attack: str) -> None:
    loop.handler.table.values.update((b"/filler %d" % i, b"") for i in range(KEYS))
    port = loop.listeners.sockets[0].getsockname()[1]
    honest = connect_honest(loop, port)
    most = 0
    greedy: list[Greedy] = []
    for number in range(1, 21):
        if number % 5 == 1:
            # The first requests of new clients must not come before those of a client that is known to be quick.
            greedy += [Greedy(port, ATTACKS[attack]()) for _ in range(4)]
            turn(loop)
        most = max(most, turns_until_answered(loop, honest, greedy, number))
        for _ in range(3):
            turn(loop)
    progress = sum(each.received for each in greedy) + (b"/greedy" in loop.handler.table.values) + loop._held
    for each in greedy:
        each.socket.close()
    honest.close()
    assert progress, "the greedy clients were not served"
    assert most == 1


def test_the_time_of_accepting_new_clients_is_not_that_of_a_quick_one(
    loop: server.ServerLoop, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = loop.listeners.sockets[0].getsockname()[1]
    honest = connect_honest(loop, port)
    greedy: list[Greedy] = []
    assert turns_until_answered(loop, honest, greedy, 1) == 1
    accept = loop._accept

    def slowly(descriptor: int) -> None:
        clock.now += 0.05
        accept(descriptor)

    monkeypatch.setattr(loop, "_accept", slowly)
    greedy = [Greedy(port, ATTACKS["list"]()) for _ in range(8)]
    most = max(turns_until_answered(loop, honest, greedy, number) for number in range(2, 6))
    for each in greedy:
        each.socket.close()
    honest.close()
    assert most == 1


@pytest.mark.parametrize("kind", ["wait", "check", "multi_get", "multi_set"])
def test_a_request_of_131072_keys_is_read_in_turns_and_others_are_answered_in_each(
    loop: server.ServerLoop, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [b"/%06d" % number for number in range(MAX_KEYS)]
    request = write_request(getattr(Op, kind.upper()), [(key, b"") for key in many] if kind == "multi_set" else many)
    handled: list[tuple[int, str]] = []
    handle = RequestHandler.handle

    def recorded(handler: RequestHandler, client: StoreClient, request: Request) -> None:
        if request.operation not in (Op.VALIDATE, Op.ADD):
            assert [key[0] if kind == "multi_set" else key for key in request.fields[0]] == many
            handled.append((turns, request.operation.name.lower()))
        handle(handler, client, request)

    monkeypatch.setattr(RequestHandler, "handle", recorded)
    monkeypatch.setattr(server, "monotonic", lambda: 0.0)
    port = loop.listeners.sockets[0].getsockname()[1]
    honest = connect_honest(loop, port)
    long = [Greedy(port, request) for _ in range(2)]
    arrived: list[int] = []
    for turns in range(1, 10_000):
        for each in long:
            if each._sent < len(each._data):
                each.push()
        assert turns_until_answered(loop, honest, [], turns) == 1
        if not arrived and loop._long:
            arrived.append(turns)
        if len(handled) == len(long):
            break
    for sock in (honest, *(each.socket for each in long)):
        sock.close()
    parts = MAX_KEYS // ITEMS_PER_TURN
    assert [name for _, name in handled] == [kind] * 2
    assert handled[0][0] - arrived[0] >= parts and handled[1][0] - handled[0][0] >= parts


def test_others_are_answered_in_each_turn_of_a_deletion(loop: server.ServerLoop) -> None:
    parts = 5
    keys = parts * PARTS_IN_TURN * KEYS_IN_PART
    loop.handler.table.values.update((b"group/%d" % number, b"") for number in range(keys))
    port = loop.listeners.sockets[0].getsockname()[1]
    honest = connect_honest(loop, port)
    last = Greedy(port, write_request(Op.RELEASE, b"group", 1))
    last.push()
    while not loop.handler.busy:
        turn(loop)
    for turns in range(1, 100):
        assert loop._poll_timeout() == 0.0
        assert turns_until_answered(loop, honest, [], turns) == 1
        if not loop.handler.busy:
            break
    for sock in (honest, last.socket):
        sock.close()
    assert turns >= parts - 1 and list(loop.handler.table.values) == [b"/honest"]
