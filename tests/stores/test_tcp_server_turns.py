"""An honest client among greedy ones: the turns of the server's loop, and the requests of others, before its answer.

The loop runs on the thread of the test, one turn at a time, so the counts depend on no clock.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from torchdist_ref.stores import sockets
from torchdist_ref.stores.hash import KEYS_IN_PART
from torchdist_ref.stores.tcp import connections, server
from torchdist_ref.stores.tcp.connections import ServerConnection
from torchdist_ref.stores.tcp.operations import Op
from torchdist_ref.stores.tcp.protocol import ITEMS_PER_TURN, MAGIC, MAX_KEYS, Request, write_reply, write_request
from torchdist_ref.stores.tcp.releases import PARTS_IN_TURN
from torchdist_ref.stores.tcp.requests import WOKEN_AT_ONCE, WOKEN_IN_TURN, RequestHandler
from torchdist_ref.stores.tcp.sessions import StoreClient
from torchdist_ref.timeouts import Deadline

HANDSHAKE = write_request(Op.VALIDATE, MAGIC)
KEYS = 300
MANY = 300
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
    for module, name in ((server, "monotonic"), (connections, "monotonic"), (connections, "thread_time")):
        monkeypatch.setattr(module, name, made.monotonic)
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


def crowd(loop: server.ServerLoop) -> list[socket.socket]:
    """Connect 300 clients that the loop has not accepted; each sends a request."""
    clients = [socket.create_connection(loop.listeners.sockets[0].getsockname()) for _ in range(300)]
    for each in clients:
        each.sendall(HANDSHAKE + write_request(Op.ADD, b"/%d" % each.fileno(), 1))
    return clients


def test_a_client_behind_many_new_ones_is_accepted_in_the_next_turn(loop: server.ServerLoop, clock: Clock) -> None:
    """Once 48 were accepted in a turn, and all the time of the others in it came before the next 48."""
    clients = crowd(loop)
    turn(loop)
    for each in clients:
        each.close()
    assert len(loop.connections) == len(clients)


def accept_slowly(monkeypatch: pytest.MonkeyPatch, clock: Clock, seconds: float) -> None:
    """Let a new connection take this time."""
    made = server.ServerConnection

    def slowly(*arguments: Any) -> server.ServerConnection:
        clock.now += seconds
        return made(*arguments)

    monkeypatch.setattr(server, "ServerConnection", slowly)


def test_a_client_that_says_nothing_is_timed_though_nobody_else_says_anything(loop: server.ServerLoop) -> None:
    silent = socket.create_connection(loop.listeners.sockets[0].getsockname())
    assert loop._poll_timeout() is None
    turn(loop)
    assert (loop._poll_timeout(), len(loop._unvalidated)) == (0.0, 0), (
        "the next poll tells whether it has sent anything"
    )
    turn(loop)
    timeout = loop._poll_timeout()
    assert timeout is not None and 0 < timeout <= server.HANDSHAKE_SECONDS
    silent.close()


def test_accepting_takes_at_most_its_share_of_a_turn(
    loop: server.ServerLoop, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept_slowly(monkeypatch, clock, 0.0004)
    clients = crowd(loop)
    counts = []
    while len(loop.connections) < len(clients):
        turn(loop)
        counts.append(len(loop.connections))
    served = sum(connection.validated for connection in loop.connections.values())
    for each in clients:
        each.close()
    # The kernel is asked for the owners of 48 at a time, and the last of these may end late.
    assert counts == [144, 288, 300]
    # Each turn serves 50 in its 10 ms, as each sends two requests; the last may end late.
    assert 150 <= served <= 156


def test_a_client_that_came_after_many_new_ones_is_answered_in_the_turn_of_its_acceptance(
    loop: server.ServerLoop, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the 300 before it were served first, and then its request waited for those of all, after its greeting.

    Its name used up a turn, too.
    """
    accept_slowly(monkeypatch, clock, 0.00005)
    greedy = [socket.create_connection(loop.listeners.sockets[0].getsockname()) for _ in range(300)]
    for each in greedy:
        each.sendall(HANDSHAKE + write_request(Op.ADD, b"/greedy", 1) * 40)
    honest = socket.create_connection(loop.listeners.sockets[0].getsockname())
    honest.sendall(HANDSHAKE + write_request(Op.ADD, b"/honest", 1))
    turn(loop)
    accepted, values = len(loop.connections), loop.handler.table.values
    assert (accepted, values[b"/honest"]) == (301, b"1")
    # In the other half of the turn, those that came first are served.
    validated = [each.validated for each in loop.connections.values()]
    assert validated[:20] == [True] * 20 and validated[150] is False
    honest.sendall(write_request(Op.HELLO, b"name") + write_request(Op.ADD, b"/honest", 1))
    turn(loop)
    assert values[b"/honest"] == b"2"
    for each in [*greedy, honest]:
        each.close()


def test_new_clients_wait_to_be_accepted_while_too_many_have_had_no_turn(
    loop: server.ServerLoop, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them holds memory. None is closed: they have sent a request, unlike silent ones."""
    monkeypatch.setattr(server, "MAX_UNVALIDATED", 10)
    monkeypatch.setattr(server, "MAX_UNSERVED", 100)
    clients = crowd(loop)
    turns, waiting, add = 0, [0], loop._add

    def recorded(connection: server.ServerConnection) -> None:
        add(connection)
        waiting.append(len(loop._unserved))

    monkeypatch.setattr(loop, "_add", recorded)
    while len(loop.handler.table.values) < len(clients) and turns < 100:
        turn(loop)
        turns += 1
    open_connections = len(loop.connections)
    for each in clients:
        each.close()
    assert open_connections == len(clients), "none was closed"
    # They are accepted 48 at a time.
    assert 100 <= max(waiting) < 148


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


def test_a_client_pays_nothing_while_the_thread_is_not_running(
    loop: server.ServerLoop, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a client of a busy host came after all new ones, for seconds: each request had waited for the processor."""
    elapsed = Clock()
    monkeypatch.setattr(server, "monotonic", elapsed.monotonic)
    serve = loop._serve

    def slowly(connection: ServerConnection, events: int) -> None:
        elapsed.now += 0.05
        serve(connection, events)

    monkeypatch.setattr(loop, "_serve", slowly)
    honest = connect_honest(loop, loop.listeners.sockets[0].getsockname()[1])
    for number in range(1, 31):
        assert turns_until_answered(loop, honest, [], number) == 1
    [connection] = loop.connections.values()
    honest.close()
    assert connection.recent_seconds == pytest.approx(0.001, rel=0.1)  # ten times the cost of a request


def test_no_client_waits_in_vain_for_quicker_ones(loop: server.ServerLoop, clock: Clock) -> None:
    """Once a client with costly requests was served only when the others were idle."""
    port = loop.listeners.sockets[0].getsockname()[1]
    slow = connect_honest(loop, port)
    [connection] = loop.connections.values()
    quick = [Greedy(port, write_request(Op.SET, b"/quick", b"")) for _ in range(20)]
    for _ in range(5):
        for each in quick:
            each.push()
        turn(loop)
    most = 0
    for number in range(1, 6):
        connection.recent_seconds = 1.0
        most = max(most, turns_until_answered(loop, slow, quick, number))
    for sock in (slow, *(each.socket for each in quick)):
        sock.close()
    assert most <= 4  # the 20 others take 20 ms, and two halves of a turn 10


@pytest.mark.parametrize("kind", ["list", "check", "get", "append", "cancel"])
def test_requests_that_go_through_much_are_handled_one_a_turn(loop: server.ServerLoop, kind: str) -> None:
    """Once 200 clients that list 200,000 keys kept another waiting for seconds."""
    keys = [b"/filler %d" % number for number in range(KEYS)]
    loop.handler.table.values.update(dict.fromkeys(keys, b""))
    loop.handler.table.values[b"/long"] = bytes(KEYS << 10)
    requests = {
        "list": write_request(Op.LIST_KEYS),
        "check": write_request(Op.CHECK, keys),
        "get": write_request(Op.MULTI_GET, keys),
        "append": write_request(Op.APPEND, b"/long", b"x"),
        "cancel": write_request(Op.CANCEL_WAIT),
    }
    port = loop.listeners.sockets[0].getsockname()[1]
    honest, many = connect_honest(loop, port), [Greedy(port, b"") for _ in range(8)]
    for each in many:
        each.push()
    turn(loop)
    if kind == "cancel":
        for each in many:
            each.socket.sendall(write_request(Op.WAIT, [*keys, b"/missing"]))
        while sum(client.pending is not None for client in loop.connections.values()) < len(many):
            turn(loop)
    handled: list[int] = []
    handle = loop.handler.handle

    def recorded(client: StoreClient, request: Request) -> None:
        if request.operation not in (Op.VALIDATE, Op.ADD):
            handled.append(number)
        handle(client, request)

    loop.handler.handle = recorded  # type: ignore[method-assign]
    for each in many:
        each.socket.sendall(requests[kind])
    for number in range(1, 40):
        assert turns_until_answered(loop, honest, [], number) == 1
        if len(handled) == len(many):
            break
    for sock in (honest, *(each.socket for each in many)):
        sock.close()
    assert handled == list(range(handled[0], handled[0] + len(many)))


def test_waiting_clients_are_woken_in_turns_and_miss_no_key(loop: server.ServerLoop) -> None:
    """Once a SET answered 3,000 clients in one step. Those whose turn comes later see the key, though it is deleted."""
    total = 100
    port = loop.listeners.sockets[0].getsockname()[1]
    honest = connect_honest(loop, port)
    waiting = [socket.create_connection(("127.0.0.1", port)) for _ in range(total)]
    requests = [
        write_request(Op.WAIT_GET, b"/k"),
        write_request(Op.WAIT, [b"/k"]),
        write_request(Op.WAIT_GET_ALL, [b"/k"]),
    ]
    for number, sock in enumerate(waiting):
        sock.sendall(HANDSHAKE + requests[number % 3])
    while sum(client.pending is not None for client in loop.connections.values()) < total:
        turn(loop)
    honest.sendall(write_request(Op.SET, b"/k", b"value") + write_request(Op.DELETE_KEY, b"/k"))
    left: list[int] = []
    for _ in range(3):
        turn(loop)
        left.append(sum(client.pending is not None for client in loop.connections.values()))
    value = write_reply(Op.WAIT_GET, (b"value",))
    expected = [b"".join(value), b"\0", b"".join([(1).to_bytes(8, "little"), *value])]  # type: ignore[arg-type]
    for sock in waiting:
        sock.setblocking(False)
    answers = [sock.recv(64) for sock in waiting]
    for sock in (honest, *waiting):
        sock.close()
    assert left == [total - WOKEN_AT_ONCE - WOKEN_IN_TURN, 0, 0] and not loop.handler.pending
    assert answers == [expected[number % 3] for number in range(total)]


def test_a_large_answer_is_sent_in_several_turns(loop: server.ServerLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a client that read fast was sent megabytes in one turn."""
    elapsed = Clock()

    def monotonic() -> float:
        elapsed.now += connections.SERVICE_SECONDS
        return elapsed.now

    value = bytes(range(256)) * 4096
    loop.handler.table.values[b"/large"] = value
    client = connect_honest(loop, loop.listeners.sockets[0].getsockname()[1])
    monkeypatch.setattr(connections, "monotonic", monotonic)
    client.sendall(write_request(Op.GET, b"/large"))
    received, sizes = b"", []
    while len(received) < 8 + len(value):
        turn(loop)
        before = len(received)
        with contextlib.suppress(BlockingIOError):
            while data := client.recv(1 << 20):
                received += data
        sizes.append(len(received) - before)
    client.close()
    assert received[8:] == value and max(sizes) <= 2 * connections.SEND_BYTES


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


def test_clock_of_the_thread_stands_still_while_the_thread_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, thread = Clock(), Clock()
    monkeypatch.setattr(connections, "monotonic", wall.monotonic)
    monkeypatch.setattr(connections, "thread_time", thread.monotonic)
    clock = connections.ThreadClock()
    begin, brief = clock.read(), connections.BRIEF_SECONDS / 4
    for waited, worked in [(0.0, brief), (0.0, brief), (3.0, brief), (5.0, 0.0), (brief, 0.0), (0.0, 0.07)]:
        wall.now += waited + worked
        thread.now += worked
        assert abs(clock.read() - begin - thread.now) <= connections.BRIEF_SECONDS
    for _ in range(1000):
        wall.now += brief
        clock.read()
    wall.now, thread.now = wall.now + 2.0, thread.now + 2.0
    before = clock.read()
    wall.now, thread.now = wall.now + 2.0, thread.now + 2.0
    assert abs(clock.read() - before - 2.0) <= connections.BRIEF_SECONDS


def validated(loop: server.ServerLoop, port: int, number: int) -> list[socket.socket]:
    """Return clients that the server knows already, and that it takes to be the quickest."""
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(number)]
    for each in clients:
        each.sendall(HANDSHAKE + write_request(Op.PING, 1))
    while sum(each.validated for each in loop.connections.values()) < number or loop._unprocessed:
        turn(loop)
    for connection in loop.connections.values():
        connection.recent_seconds = connection.presumed_seconds = 0.0
    return clients


def test_a_new_client_comes_before_new_ones_whose_requests_pile_up(loop: server.ServerLoop, clock: Clock) -> None:
    """Once it waited for a request of each of them, for each of its own."""
    port = loop.listeners.sockets[0].getsockname()[1]
    piled = [socket.create_connection(("127.0.0.1", port)) for _ in range(MANY)]
    for each in piled:
        each.sendall(HANDSHAKE + write_request(Op.ADD, b"/piled", 1) * 50)
    honest = socket.create_connection(("127.0.0.1", port))
    honest.sendall(HANDSHAKE)
    honest.setblocking(False)
    while sum(each.validated for each in loop.connections.values()) < MANY + 1:
        turn(loop)
    turns = [turns_until_answered(loop, honest, [], number) for number in range(1, 11)]
    answers = int(loop.handler.table.values[b"/piled"])
    for sock in (honest, *piled):
        sock.close()
    assert turns == [1] * 10
    assert 0 < answers < MANY * 50, "they are served meanwhile, and have more"


def test_quick_clients_come_in_the_order_in_which_they_were_served(loop: server.ServerLoop, clock: Clock) -> None:
    """Once those with the smallest requests came first in one half of the turns, however many there were."""
    port = loop.listeners.sockets[0].getsockname()[1]
    quick = validated(loop, port, MANY)
    honest = connect_honest(loop, port)
    *_, connection = loop.connections.values()
    connection.recent_seconds, connection.served = 0.0005, -1.0
    for each in quick:
        each.sendall(write_request(Op.SET, b"/quick", b""))
    began = clock.now
    turns = turns_until_answered(loop, honest, [], 1)
    for sock in (honest, *quick):
        sock.close()
    assert (turns, connection.served - began) == (1, pytest.approx(0.0001))


def test_many_clients_are_served_for_less_time_each(loop: server.ServerLoop, clock: Clock) -> None:
    """Once 1,000 clients whose requests had piled up were each served for 0.2 ms, before one with one request."""
    piled = validated(loop, loop.listeners.sockets[0].getsockname()[1], MANY)
    for each in piled:
        each.sendall(write_request(Op.ADD, b"/%d" % each.fileno(), 1) * 50)
    turns = 0
    while len(loop.handler.table.values) < MANY:
        turn(loop)
        turns += 1
    for each in piled:
        each.close()
    assert turns <= MANY * 0.0001 / (2 * server.TURN_SECONDS) + 1.001  # one request of each client


def test_all_ready_clients_are_looked_at_in_each_turn(loop: server.ServerLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, epoll reports 1,023 descriptors, without a quick client among more."""
    limits: list[int] = []

    class Poller:
        def poll(self, timeout: float | None, maxevents: int = -1) -> list[tuple[int, int]]:
            limits.append(maxevents)
            return []

    with monkeypatch.context() as changed:
        changed.setattr(loop, "connections", dict.fromkeys(range(2000)))
        changed.setattr(loop, "_poller", Poller())
        loop._run_turn()
    assert limits == [2000 + len(loop.listeners.sockets) + 1]
