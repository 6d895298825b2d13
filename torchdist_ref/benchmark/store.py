"""``benchmark store``: how many sets, gets and adds a second a server answers, and how long a barrier takes.

Each server has a process of its own, and so has each client. Our clients ask our server, torch's clients torch's, and
bare clients a bare Python echo of as many bytes, which has no keys: the rest of the difference is the store.
torch's `set` does not wait for a response, so its rate is that of writing requests; ours is acknowledged.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch.distributed as torch_distributed

from torchdist_ref.benchmark.harness import Harness, Option, Settings, at_least, numbers
from torchdist_ref.benchmark.report import columns, show_micros, show_number
from torchdist_ref.benchmark.rounds import Action, RankContext, Result, durations, library, take_turns

HOST = "127.0.0.1"
VALUE = b"sixteen bytes..."
# Bytes.
ECHO_BYTES = 64
RECEIVE_BYTES = 4096
CALLS_PER_CLOCK_READ = 8
BARRIERS = 5
OPERATIONS = ("set", "get", "add")
BARRIER = "barrier"
OURS, TORCH, ECHO = "torchdist_ref", "torch", "echo"
OPTIONS = {
    "clients": Option("1,8,64", "numbers of clients", numbers),
    "repetitions": Option(5, "rounds", at_least(1)),
    "seconds": Option(0.3, "of a server's turn"),
}
# torch's stubs leave it out.
_torch_store: Any = torch_distributed.TCPStore  # type: ignore[attr-defined]


class EchoServer:
    """Server that sends back what it receives, on one thread, to any number of clients, until the last one leaves.

    >>> client = EchoClient(EchoServer().port)
    >>> client.echo() == bytes(64), client.socket.close()
    (True, None)
    """

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self._selector, self._clients = selectors.DefaultSelector(), 0
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        threading.Thread(target=self._serve, name="echo server", daemon=True).start()

    def _serve(self) -> None:
        with self._selector, self._listener:
            self._accept(self._listener)
            while self._clients:
                for key, _ in self._selector.select():
                    key.data(key.fileobj)

    def _accept(self, listener: socket.socket) -> None:
        client, _ = listener.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(client, selectors.EVENT_READ, self._echo)
        self._clients += 1

    def _echo(self, client: socket.socket) -> None:
        data = client.recv(RECEIVE_BYTES)
        if data:
            client.sendall(data)
        else:
            self._selector.unregister(client)
            self._clients -= 1
            client.close()


class EchoClient:
    """Client of the echo."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection((HOST, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._message = bytes(ECHO_BYTES)

    def echo(self) -> bytes:
        """Send, and receive the same."""
        self.socket.sendall(self._message)
        return self.socket.recv(RECEIVE_BYTES)


@dataclass(frozen=True)
class MeasuredClient:
    """Connected client of one side.

    Attributes:
        actions: Operations by name, to be repeated.
        barrier: Function that waits at a key for so many clients; None without keys.
    """

    actions: dict[str, Action]
    barrier: Callable[[str, int], Any] | None = None


def _client(store: Any, name: str) -> MeasuredClient:
    value, number = f"{name}/value", f"{name}/number"
    store.set(value, VALUE)
    actions: dict[str, Action] = {
        "set": lambda: store.set(value, VALUE),
        "get": lambda: store.get(value),
        "add": lambda: store.add(number, 1),
    }

    def counted(key: str, world: int) -> None:
        """Wait as programs do before torch 2.13: the last client sets a key that all wait for."""
        if store.add(key, 1) == world:
            store.set(f"{key}/all", b"")
        store.wait([f"{key}/all"])

    return MeasuredClient(actions, getattr(store, "barrier", counted))


# By the name of a side: the function that starts its server, and the one that connects a client to a port.
SIDES: dict[str, tuple[Callable[[], Any], Callable[[int, str], MeasuredClient]]] = {
    OURS: (
        lambda: library.TCPStore(HOST, 0, is_master=True, wait_for_workers=False),
        lambda port, name: _client(library.TCPStore(HOST, port), name),
    ),
    TORCH: (
        lambda: _torch_store(HOST, 0, None, True, wait_for_workers=False),
        lambda port, name: _client(_torch_store(HOST, port, None, False), name),
    ),
    # The echo has one operation for all names.
    ECHO: (EchoServer, lambda port, name: MeasuredClient(dict.fromkeys(OPERATIONS, EchoClient(port).echo))),
}


def measure(context: RankContext, settings: Settings) -> None:
    """Measure on one rank: the first ranks are servers, the others clients. Reports results and numbers."""
    sides, number = settings.sides, context.rank - len(settings.sides)
    server = SIDES[sides[context.rank]][0]() if number < 0 else None
    ports = context.exchange(server.port if server else None)
    own = {name: SIDES[name][1](ports[i], f"client {number}") for i, name in enumerate(sides)} if number >= 0 else {}
    for clients in settings.clients:
        active = own if 0 <= number < clients else {}
        context.report(f"{clients} clients")
        for operation in (*OPERATIONS, BARRIER):
            context.report(_result(context, settings, active, operation, clients))
            context.report(1)
    context.exchange(None)


def _result(
    context: RankContext, settings: Settings, active: Mapping[str, MeasuredClient], operation: str, clients: int
) -> Result:
    """Return the seconds of a call of all clients together, or of a barrier."""
    rounds = dict.fromkeys(settings.sides, 0)

    def calls(name: str) -> list[float]:
        context.exchange(None)
        own = _rate(active[name].actions[operation], settings.seconds) if active else 0.0
        return [1 / sum(context.exchange(own))]

    def barriers(name: str) -> list[float]:
        context.exchange(None)
        rounds[name] += 1
        times = context.exchange(_barriers(active[name], f"{clients}/{rounds[name]}", clients) if active else [])
        return durations([each for each in times if each], BARRIERS)[:1]

    turn = barriers if operation == BARRIER else calls
    turns = {name: partial(turn, name) for name in settings.sides if (operation, name) != (BARRIER, ECHO)}
    samples, disturbed = take_turns(context, turns, settings.repetitions)
    return Result({"operation": operation, "clients": clients}, samples, disturbed)


def _rate(action: Action, seconds: float) -> float:
    """Return the calls a second of one client, over at least so many seconds."""
    calls, begin = 0, perf_counter()
    while (passed := perf_counter() - begin) < seconds:
        for _ in range(CALLS_PER_CLOCK_READ):
            action()
        calls += CALLS_PER_CLOCK_READ
    return calls / passed


def _barriers(client: MeasuredClient, key: str, clients: int) -> list[tuple[float, float]]:
    """Time some barriers in a row, after one that lines up the clients."""
    assert client.barrier is not None
    client.barrier(f"barrier/{key}/first", clients)
    begin = perf_counter()
    for number in range(BARRIERS):
        client.barrier(f"barrier/{key}/{number}", clients)
    return [(begin, perf_counter())]


def run(harness: Harness) -> None:
    """Measure all sides; of checkouts, our server and clients."""
    settings = harness.settings
    settings.sides = [OURS] if harness.compares_checkouts else [*SIDES]
    harness.begin(len(settings.clients) * (len(OPERATIONS) + 1))
    harness.run(partial(measure, settings=settings), len(settings.sides) + max(settings.clients))


def entries(harness: Harness) -> list[dict[str, Any]]:
    """Return the results; those of sets, gets and adds as calls a second."""
    found = []
    for each in harness.results:
        counts = each.cell["operation"] != BARRIER
        shown = {side: [1 / one if counts else one for one in samples] for side, samples in each.samples.items()}
        medians = {side: 1 / each.median(side) if counts else each.median(side) for side in shown}
        unit = "calls_per_second" if counts else "seconds"
        found.append({**each.entry(), "samples": shown, "unit": unit, "medians": medians})
    return found


def show(harness: Harness, results: Sequence[Result]) -> str:
    """Return both tables: rates, then barriers."""
    rates, barriers = [], []
    for each in results:
        cells = [each.cell["operation"], str(each.cell["clients"])]
        if each.cell["operation"] == BARRIER:
            cells += [*map(show_micros, map(each.median, (OURS, TORCH))), show_number(each.ratio(OURS, TORCH))]
            barriers.append(cells)
        else:
            cells += [show_number(1 / each.median(side)) for side in SIDES]
            rates.append([*cells, show_number(each.ratio(TORCH, OURS)), show_number(each.ratio(OURS, ECHO))])
    titles = ["", "clients", *(f"{side} /s" for side in SIDES), f"rate / {TORCH}", f"time / {ECHO}"]
    below = columns(["", "clients", f"{OURS} us", f"{TORCH} us", f"time / {TORCH}"], barriers)
    return f"{columns(titles, rates)}\n\ntorch's set is not acknowledged; ours is.\n\n{below}"
