"""``benchmark store``: how many sets, gets and adds a second a server answers, and how long a barrier takes.

Each server has a process of its own, and so has each client. Our clients ask our server, torch's clients torch's, and
bare clients a bare Python echo of as many bytes, which has no keys: the rest of the difference is the store.
torch's `set` does not wait for a response, so its rate is that of writing requests; ours is acknowledged.
"""

from __future__ import annotations

import argparse
import selectors
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch.distributed as torch_distributed

from torchdist_ref.benchmark import harness, report
from torchdist_ref.benchmark.harness import Result, take_turns
from torchdist_ref.benchmark.ranks import RankContext
from torchdist_ref.benchmark.report import show_micros, show_number
from torchdist_ref.benchmark.timing import Action, durations
from torchdist_ref.stores import TCPStore

HOST = "127.0.0.1"
VALUE = b"sixteen bytes..."
# Bytes.
ECHO_BYTES = 64
RECEIVE_BYTES = 4096
CALLS_PER_CLOCK_READ = 8
BARRIERS = 5
OPERATIONS = ("set", "get", "add")
BARRIER, ECHO = "barrier", "echo"
# torch's stubs leave it out.
_torch_store: Any = torch_distributed.TCPStore  # type: ignore[attr-defined]


class EchoServer:
    """Server that sends back what it receives, to any number of clients, on one thread.

    >>> server = EchoServer()
    >>> client = EchoClient(server.port)
    >>> client.echo() == bytes(64), client.close(), server.close()
    (True, None, None)
    """

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0), backlog=1024)
        self._stop, self._stopped = socket.socketpair()
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._stopped, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._serve, name="echo server")
        self._thread.start()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                key.data(key.fileobj)

    def _accept(self, listener: socket.socket) -> None:
        client, _ = listener.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(client, selectors.EVENT_READ, self._echo)

    def _echo(self, client: socket.socket) -> None:
        data = client.recv(RECEIVE_BYTES)
        if data:
            client.sendall(data)
        else:
            self._selector.unregister(client)
            client.close()

    def close(self) -> None:
        """Stop, and close all connections."""
        self._stop.send(b"stop")
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._stop.close()


class EchoClient:
    """Client of the echo."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection((HOST, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._message = bytes(ECHO_BYTES)

    def echo(self) -> bytes:
        """Send, and receive the same."""
        self._socket.sendall(self._message)
        return self._socket.recv(RECEIVE_BYTES)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def serve_ours() -> tuple[int, Action]:
    """Start our server; return its port, and the function that ends it."""
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    return store.port, store.close


def serve_torch() -> tuple[int, Action]:
    """Start torch's server, which ends with its last reference."""
    kept = [_torch_store(HOST, 0, None, True, wait_for_workers=False)]
    return int(kept[0].port), kept.clear


def serve_echo() -> tuple[int, Action]:
    """Start the echo server."""
    server = EchoServer()
    return server.port, server.close


@dataclass(frozen=True)
class MeasuredClient:
    """Connected client of one side.

    Attributes:
        actions: Operations by name, to be repeated.
        barrier: Function that waits at a key for so many clients; None without keys.
    """

    actions: dict[str, Action]
    barrier: Callable[[str, int], Any] | None


def of_ours(port: int, name: str) -> MeasuredClient:
    """Connect one of our clients to our server."""
    return _client(TCPStore(HOST, port), name)


def of_torch(port: int, name: str) -> MeasuredClient:
    """Connect one of torch's clients to torch's server."""
    return _client(_torch_store(HOST, port, None, False), name)


def of_echo(port: int, name: str) -> MeasuredClient:
    """Connect to the echo, which has one operation for all names."""
    return MeasuredClient(dict.fromkeys(OPERATIONS, EchoClient(port).echo), None)


def _client(store: Any, name: str) -> MeasuredClient:
    value, number = f"{name}/value", f"{name}/number"
    store.set(value, VALUE)
    actions: dict[str, Action] = {
        "set": lambda: store.set(value, VALUE),
        "get": lambda: store.get(value),
        "add": lambda: store.add(number, 1),
    }
    return MeasuredClient(actions, store.barrier if hasattr(store, "barrier") else _counted(store))


def _counted(store: Any) -> Callable[[str, int], None]:
    """Return the barrier of programs before torch 2.13 had one: the last client sets a key that all wait for."""

    def barrier(key: str, world: int) -> None:
        if store.add(key, 1) == world:
            store.set(f"{key}/all", b"")
        store.wait([f"{key}/all"])

    return barrier


Side = tuple[Callable[[], tuple[int, Action]], Callable[[int, str], MeasuredClient]]
SIDES: dict[str, Side] = {
    "torchdist_ref": (serve_ours, of_ours),
    "torch": (serve_torch, of_torch),
    ECHO: (serve_echo, of_echo),
}


def measure(context: RankContext, settings: argparse.Namespace) -> None:
    """Measure on one rank: the first ranks are servers, the others clients. Reports results and numbers."""
    sides = list(SIDES)
    port, close = SIDES[sides[context.rank]][0]() if context.rank < len(sides) else (0, None)
    ports, number = context.exchange(port), context.rank - len(sides)
    own = {name: SIDES[name][1](ports[i], f"client {number}") for i, name in enumerate(sides)} if number >= 0 else {}
    for clients in settings.clients:
        active = own if 0 <= number < clients else {}
        context.report(f"{clients} clients")
        for operation in (*OPERATIONS, BARRIER):
            context.report(_result(context, settings, active, operation, clients))
            context.report(1)
    context.exchange(None)
    if close:
        close()


def _result(
    context: RankContext,
    settings: argparse.Namespace,
    active: Mapping[str, MeasuredClient],
    operation: str,
    clients: int,
) -> Result:
    """Return calls a second of all clients together; of barriers, the seconds of one."""
    rounds = dict.fromkeys(SIDES, 0)

    def rate(name: str) -> list[float]:
        context.exchange(None)
        own = _rate(active[name].actions[operation], settings.seconds) if active else 0.0
        return [sum(context.exchange(own))]

    def barriers(name: str) -> list[float]:
        context.exchange(None)
        rounds[name] += 1
        times = context.exchange(_barriers(active[name], f"{clients}/{rounds[name]}", clients) if active else [])
        return durations([each for each in times if each], BARRIERS)[:1]

    turn = barriers if operation == BARRIER else rate
    turns = {name: partial(turn, name) for name in SIDES if (operation, name) != (BARRIER, ECHO)}
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


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's options."""
    harness.add_options(
        parser,
        clients=("1,8,64", "numbers of clients"),
        repetitions=(5, "rounds"),
        seconds=(0.3, "of a server's turn"),
    )


def main(options: argparse.Namespace) -> int:
    """Measure and print."""
    options.clients = harness.numbers("benchmark store", "--clients", options.clients)
    bar = report.ProgressBar(len(options.clients) * (len(OPERATIONS) + 1))
    results = harness.collect(partial(measure, settings=options), len(SIDES) + max(options.clients), bar)
    print(show(results))
    report.write(options.json, report.report("store", harness.settings_of(options), list(map(_entry, results))))
    return 0


def _entry(result: Result) -> dict[str, Any]:
    unit = "seconds" if result.cell["operation"] == BARRIER else "calls_per_second"
    return {**result.entry(), "unit": unit, "medians": {side: result.median(side) for side in result.samples}}


def show(results: Sequence[Result]) -> str:
    """Return both tables: rates, then barriers."""
    ours, torchs, _ = SIDES
    rates, barriers = [], []
    for each in results:
        cells = [each.cell["operation"], str(each.cell["clients"])]
        if each.cell["operation"] == BARRIER:
            cells += [*map(show_micros, map(each.median, (ours, torchs))), show_number(each.ratio(ours, torchs))]
            barriers.append(cells)
        else:
            cells += [*map(show_number, map(each.median, SIDES)), show_number(each.ratio(ours, torchs))]
            rates.append([*cells, show_number(each.ratio(ECHO, ours))])
    titles = ["", "clients", f"{ours} /s", f"{torchs} /s", f"{ECHO} /s", f"rate / {torchs}", f"time / {ECHO}"]
    below = report.columns(["", "clients", f"{ours} us", f"{torchs} us", f"time / {torchs}"], barriers)
    return f"{report.columns(titles, rates)}\n\ntorch's set is not acknowledged; ours is.\n\n{below}"
