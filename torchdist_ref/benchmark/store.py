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
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any

import torch.distributed as torch_distributed

from torchdist_ref.benchmark.harness import AddOption, Harness, Settings, at_least, many
from torchdist_ref.benchmark.report import cell, figure, ratio, table, time
from torchdist_ref.benchmark.rounds import Action, RankContext, Result, calls_in_a_row, durations, library

HOST = "127.0.0.1"
VALUE = b"sixteen bytes..."
# Of the echo. Bytes.
MESSAGE = bytes(64)
RECEIVE_BYTES = 4096
CALLS_PER_CLOCK_READ = 8
BARRIERS = 5
OPERATIONS = ("set", "get", "add")
BARRIER = "barrier"
SIDES = OURS, TORCH, ECHO = "torchdist_ref", "torch", "echo"
# torch's stubs leave its store out.
STORES: dict[str, Any] = {OURS: library.TCPStore, TORCH: torch_distributed.TCPStore}  # type: ignore[attr-defined]
Client = dict[str, Callable[..., Any]]


class EchoServer:
    """Server that sends back what it receives, on one thread, to so many clients, until the last one leaves.

    >>> with connected(EchoServer(1).port) as client:
    ...     echo(client) == MESSAGE
    True
    """

    def __init__(self, clients: int) -> None:
        self._listener = socket.create_server((HOST, 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, args=(clients,), name="echo server", daemon=True).start()

    def _serve(self, clients: int) -> None:
        with selectors.DefaultSelector() as selector, self._listener:
            for _ in range(clients):
                client, _ = self._listener.accept()
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                selector.register(client, selectors.EVENT_READ, client)
            while selector.get_map():
                for client in [key.data for key, _ in selector.select()]:
                    if data := client.recv(RECEIVE_BYTES):
                        client.sendall(data)
                    else:
                        selector.unregister(client)
                        client.close()


def connected(port: int) -> socket.socket:
    """Return a new client of the echo."""
    client = socket.create_connection((HOST, port))
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def echo(client: socket.socket) -> bytes:
    """Send a message, and receive the same."""
    client.sendall(MESSAGE)
    return client.recv(RECEIVE_BYTES)


def _server(side: str, clients: int) -> Any:
    """Start the server of a side."""
    return EchoServer(clients) if side == ECHO else STORES[side](HOST, 0, is_master=True, wait_for_workers=False)


def _client(side: str, port: int, name: str) -> Client:
    """Return the operations of a connected client; the echo has one for all names, and no barrier."""
    if side == ECHO:
        return dict.fromkeys(OPERATIONS, partial(echo, connected(port)))
    store = STORES[side](HOST, port)
    value, number = f"{name}/value", f"{name}/number"
    store.set(value, VALUE)

    def counted(key: str, world: int) -> None:
        """Wait as programs do before torch 2.13: the last client sets a key that all wait for."""
        if store.add(key, 1) == world:
            store.set(f"{key}/all", b"")
        store.wait([f"{key}/all"])

    return {
        "set": lambda: store.set(value, VALUE),
        "get": lambda: store.get(value),
        "add": lambda: store.add(number, 1),
        BARRIER: getattr(store, "barrier", counted),
    }


def add_options(add: AddOption) -> None:
    """Add the options of the command."""
    add("--clients", default="1,8,64", type=many(at_least(1)), help="numbers of clients")
    add("--repetitions", default=5, type=at_least(1), help="rounds")
    add("--seconds", default=0.3, type=float, help="of a server's turn")


def measure(context: RankContext, settings: Settings) -> None:
    """Measure on one rank: the first ranks are servers, the others clients. Reports results."""
    sides, number = settings.sides, context.rank - len(settings.sides)
    server = _server(sides[context.rank], context.world - len(sides)) if number < 0 else None
    ports = context.exchange(server.port if server else None)
    own = {name: _client(name, ports[i], f"client {number}") for i, name in enumerate(sides)} if number >= 0 else {}
    for clients in settings.clients:
        active = own if 0 <= number < clients else {}
        context.report(f"{clients} clients")
        for operation in (*OPERATIONS, BARRIER):
            turns = _turns(context, settings, active, operation, clients)
            context.compare({"operation": operation, "clients": clients}, turns, settings.repetitions)
    context.exchange(None)


def _turns(
    context: RankContext, settings: Settings, active: Mapping[str, Client], operation: str, clients: int
) -> dict[str, Callable[[], list[float]]]:
    """Return the turns of all sides, in which they take the seconds of a call of all clients, or of a barrier."""
    numbers = count()

    def calls(name: str) -> list[float]:
        context.exchange(None)
        own = _rate(active[name][operation], settings.seconds) if active else 0.0
        return [1 / sum(context.exchange(own))]

    def barrier(name: str) -> None:
        # All clients count alike.
        active[name][BARRIER](f"barrier/{clients}/{next(numbers)}", clients)

    def barriers(name: str) -> list[float]:
        context.exchange(None)
        meet = partial(barrier, name)
        # A first one lines up the clients.
        times = context.exchange(calls_in_a_row(meet, BARRIERS, wait=meet) if active else [])
        return durations([each for each in times if each], BARRIERS)

    if operation == BARRIER:
        return {name: partial(barriers, name) for name in settings.sides if name != ECHO}
    return {name: partial(calls, name) for name in settings.sides}


def _rate(action: Action, seconds: float) -> float:
    """Return the calls a second of one client, over at least so many seconds."""
    calls, begin = 0, perf_counter()
    while (passed := perf_counter() - begin) < seconds:
        for _ in range(CALLS_PER_CLOCK_READ):
            action()
        calls += CALLS_PER_CLOCK_READ
    return calls / passed


def run(harness: Harness) -> None:
    """Measure all sides; of checkouts, our server and clients."""
    settings = harness.settings
    settings.sides = [OURS] if harness.against else [*SIDES]
    harness.run(partial(measure, settings=settings), len(settings.sides) + max(settings.clients))


def rate(side: str) -> tuple[str, Callable[[Result], str]]:
    """Return the column of the calls a second of all clients of a side."""
    return figure(f"{side} /s", [side], lambda result: 1 / result.median(side))


def show(harness: Harness, results: Sequence[Result]) -> str:
    """Return both tables: rates, then barriers."""
    counted, barriers = [[each for each in results if (each.cell["operation"] == BARRIER) == b] for b in (False, True)]
    names = [cell("operation"), cell("clients", "clients")]
    ratios = [ratio(f"rate / {TORCH}", TORCH, OURS), ratio(f"time / {ECHO}", OURS, ECHO)]
    rates = table([*names, *map(rate, SIDES), *ratios], counted)
    times = [time(OURS, "us"), time(TORCH, "us"), ratio(f"time / {TORCH}", OURS, TORCH)]
    return f"{rates}\n\ntorch's set is not acknowledged; ours is.\n\n{table([*names, *times], barriers)}"
