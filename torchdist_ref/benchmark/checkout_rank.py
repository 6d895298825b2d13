"""Rank of a comparison of checkouts: a script that measures the `torchdist_ref` that comes first on its path.

The measured checkout may be older than this file, so everything here uses the public API alone: `init_process_group`,
collectives, `DistributedDataParallel`, `TCPStore`. The operations, the models and the clocks are files of this
checkout; they are loaded by path and use the public API alone as well. The process blocks on a socket until
`checkouts` sends it a turn, so that only the ranks of one checkout are busy at a time.

Do not import `torchdist_ref.benchmark` here: an older checkout has another one, or none.
"""

from __future__ import annotations

import gc
import importlib.util
import mmap
import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

# The checkout that comes first on the path.
library: Any = importlib.import_module("torchdist_ref")
Times = list[tuple[float, float]]
Cell = Mapping[str, Any]
Run = Callable[[int, int], Times]
HOST = "127.0.0.1"
STORE_VALUE = b"sixteen bytes..."
# DDP rebuilds its buckets after the first step, and PowerSGD compresses from the third on.
DDP_WARM_UP_STEPS = 4
# One untimed call precedes every four timed ones: the caches hold another checkout's data when a turn begins.
CALLS_PER_WARM_UP_CALL = 4


def load_file(name: str) -> Any:
    """Load a module of this file's folder by its path, whatever `torchdist_ref` is imported."""
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"measured_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


timing = load_file("timing")


class CollectiveCells:
    """Calls of one operation at one size, each from the start line."""

    def __init__(self, rank: int, world: int, folder: str) -> None:
        self._rank, self._world, self._folder = rank, world, folder
        self._groups: dict[str, Any] = {}
        self._operations = load_file("operations").OPERATIONS

    def ranks(self, cell: Cell) -> range:
        """Return the ranks that measure a cell."""
        return range(self._world)

    def prepare(self, cell: Cell, line: Any) -> Run:
        """Make the tensors of a cell, check its result once, and return the function that times calls."""
        group, operation = self._group(cell["backend"]), self._operations[cell["op"]]
        buffers = operation.buffers(self._rank, self._world, cell["bytes"], torch.float32)
        action = operation.bind(library, group, buffers)
        operation.load(buffers)
        action()
        expected = operation.answer(buffers)
        if expected is not None and not torch.equal(buffers.result, expected):
            raise RuntimeError(f"{cell['op']} of {cell['bytes']} bytes on {cell['backend']} gives a wrong result")
        # Sums of zeros stay zeros, however often they are summed.
        buffers.source.zero_()
        buffers.result.zero_()
        return lambda calls, port: timed(timing.calls_apart, action, calls, line)

    def _group(self, backend: str) -> Any:
        """Return the group of a backend; the first one is the default group."""
        if backend not in self._groups:
            if self._groups:
                self._groups[backend] = library.new_group(backend=backend)
            else:
                init(f"file://{self._folder}/collectives", backend, self._rank, self._world)
                self._groups[backend] = library.group.WORLD
        return self._groups[backend]

    def close(self) -> None:
        """Destroy the groups."""
        if self._groups:
            library.destroy_process_group()


class TrainingCells:
    """Steps of one model with one communication hook, back to back after the start line."""

    def __init__(self, rank: int, world: int, folder: str) -> None:
        self._world = world
        init(f"file://{folder}/ddp", "ref", rank, world)
        self._models = load_file("ddp_models")

    def ranks(self, cell: Cell) -> range:
        """Return the ranks that measure a cell."""
        return range(self._world)

    def prepare(self, cell: Cell, line: Any) -> Run:
        """Build a model under DDP, take some steps, and return the function that times steps."""
        gc.collect()
        torch.manual_seed(0)
        model, batch = self._models.MODELS[cell["model"]]()
        wrapped = self._models.wrap(model, "ref", library.group.WORLD, self._models.HOOKS[cell["hook"]])

        def step() -> None:
            wrapped(batch).square().mean().backward()

        timing.calls_in_a_row(step, DDP_WARM_UP_STEPS, line.wait)
        return lambda calls, port: timed(timing.calls_in_a_row, step, calls, line)

    def close(self) -> None:
        """Destroy the group."""
        library.destroy_process_group()


class StoreCells:
    """Operations of clients on one server, which is rank 0."""

    def __init__(self, rank: int, world: int, folder: str) -> None:
        self._rank, self._port_file = rank, Path(folder, "port")
        if rank == 0:
            self._store = library.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
            partial = self._port_file.with_suffix(".partial")
            partial.write_text(str(self._store.port))
            partial.rename(self._port_file)
        else:
            while not self._port_file.exists():
                os.sched_yield()
            self._store = library.TCPStore(HOST, int(self._port_file.read_text()))

    def ranks(self, cell: Cell) -> range:
        """Return the ranks that measure a cell: the first clients."""
        return range(1, 1 + int(cell["clients"]))

    def prepare(self, cell: Cell, line: Any) -> Run:
        """Return the function that times an operation of this client."""
        store, value, number = self._store, f"{self._rank}/value", f"{self._rank}/number"
        store.set(value, STORE_VALUE)
        barriers = 0

        def barrier() -> None:
            nonlocal barriers
            barriers += 1
            store.barrier(f"barrier/{cell['clients']}/{barriers}", cell["clients"])

        actions: dict[str, Callable[[], Any]] = {
            "set": lambda: store.set(value, STORE_VALUE),
            "get": lambda: store.get(value),
            "add": lambda: store.add(number, 1),
            "barrier": barrier,
        }
        return lambda calls, port: timed(timing.calls_in_a_row, actions[cell["operation"]], calls, line)

    def close(self) -> None:
        """Close the client or the server."""
        self._store.close()


class StartCells:
    """`init_process_group` at a TCP address, alone or with `destroy_process_group`."""

    def __init__(self, rank: int, world: int, folder: str) -> None:
        self._rank = rank

    def ranks(self, cell: Cell) -> range:
        """Return the ranks that measure a cell: the first ones."""
        return range(cell["world"])

    def prepare(self, cell: Cell, line: Any) -> Run:
        """Return the function that times one cycle."""

        def cycle(calls: int, port: int) -> Times:
            line.wait()
            begin = perf_counter()
            init(f"tcp://{HOST}:{port}", cell["backend"], self._rank, cell["world"])
            made = perf_counter()
            # The rank that serves the store must not leave while others are still joining.
            line.wait()
            library.destroy_process_group()
            return [(begin, made if cell["operation"] == "init" else perf_counter())]

        return cycle

    def close(self) -> None:
        """Do nothing: every cycle ends with its group destroyed."""


KINDS: dict[str, Any] = {
    "collectives": CollectiveCells,
    "ddp": TrainingCells,
    "store": StoreCells,
    "start": StartCells,
}


def init(method: str, backend: str, rank: int, world: int) -> None:
    """Make the default group."""
    library.init_process_group(backend, init_method=method, rank=rank, world_size=world)


def timed(repeat: Callable[..., Times], action: Callable[[], Any], calls: int, line: Any) -> Times:
    """Warm up, then time calls."""
    for _ in range(-(-calls // CALLS_PER_WARM_UP_CALL)):
        action()
    return repeat(action, calls, line.wait)


def serve(connection: Connection, memory_fd: int) -> None:
    """Run the turns that the parent sends, until it sends None."""
    task = connection.recv()
    rank, world, checkout = task["rank"], task["world"], Path(task["checkout"]).resolve()
    imported = Path(str(library.__file__)).resolve()
    if not imported.is_relative_to(checkout):
        raise RuntimeError(f"imported {imported}, which is not in the checkout {checkout}")
    torch.set_num_threads(1)
    memory = memoryview(mmap.mmap(memory_fd, task["cells"] * world * timing.LINE_BYTES))
    kind = KINDS[task["benchmark"]](rank, world, task["folder"])
    connection.send(None)
    run: Run | None = None
    while (order := connection.recv()) is not None:
        if "cell" in order:
            run = None
            ranks = kind.ranks(order["cell"])
            begin = order["number"] * world * timing.LINE_BYTES
            line = timing.StartLine(memory[begin : begin + world * timing.LINE_BYTES], rank, ranks)
            run = kind.prepare(order["cell"], line) if rank in ranks else None
            connection.send(None)
            continue
        gc.disable()
        connection.send([] if run is None else run(order["calls"], order["port"]))
        gc.enable()
    kind.close()


def main(connection_fd: int, memory_fd: int) -> int:
    """Serve, and send the parent the text of an error."""
    connection = Connection(connection_fd)
    try:
        serve(connection, memory_fd)
    except EOFError:
        return 1
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
