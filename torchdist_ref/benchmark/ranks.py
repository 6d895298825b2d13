"""Starting the ranks of a benchmark: forked, under ``mpiexec``, or on several checkouts; and the hub that joins them.

Forked ranks come from `torchdist_ref.testing.run`, so that none outlives the benchmark. The others are started by
`started_rank`, with a pickled program. A program does not know the difference: it gets a `RankContext`. A thread of
the parent, the hub, passes on reports, and gives each rank the values of all.

Do not add here: anything that a backend could be measured with.
"""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torchdist_ref
from torchdist_ref import processes
from torchdist_ref.benchmark import started_rank
from torchdist_ref.benchmark.rounds import CONNECTED, EVERYONE, REPORT, ParentAddress, RankContext, segment_bytes
from torchdist_ref.errors import DistBackendError
from torchdist_ref.testing import namespaces, run

T = TypeVar("T")
Program = Callable[[RankContext], Any]
OnReport = Callable[[int, Any], None]
DAY_SECONDS = 86_400.0
TERMINATE_SECONDS = 5.0
HOSTS = 2


def _ignore(side: int, event: Any) -> None:
    """Ignore a report."""


def run_ranks(
    program: Callable[[RankContext], T],
    world: int,
    on_report: OnReport = _ignore,
    timeout: float = DAY_SECONDS,
    extra: int = 0,
    hosts: Sequence[namespaces.Host] = (),
) -> list[T]:
    """Run a program on forked ranks.

    Args:
        program: Function of each rank.
        world: Number of ranks.
        on_report: Called here with the side and each thing that rank 0 reports, in order, on another thread.
        timeout: Seconds until the ranks are stopped.
        extra: Bytes of `RankContext.memory`.
        hosts: Hosts of the ranks: the first part of them is on the first host. Default: this machine.

    Returns:
        Each rank's result.

    Raises:
        RankError: A rank failed.
    """
    with hub(world, on_report, extra) as address:

        def start(rank: int) -> T:
            host = hosts[rank * len(hosts) // world] if hosts else None
            context = address.connect(rank, host=host)
            if host:
                host.enter()
                # Gloo and `ref` read this one.
                os.environ["GLOO_SOCKET_IFNAME"] = host.interface
            return program(context)

        return run(start, world, ranks="processes", init=False, timeout=timeout)


def run_mpi_ranks(program: Program, world: int, on_report: OnReport, extra: int = 0) -> None:
    """Run a program, which can be pickled, on ranks under ``mpiexec``; otherwise as `run_ranks`.

    Raises:
        DistBackendError: A rank failed. Its own message is on standard error.
    """
    here = Path(torchdist_ref.__file__).parents[1]
    with hub(world, on_report, extra) as address, start_child(address, program, here, mpi=True) as child:
        if code := child.wait():
            text = f"ranks under mpiexec ended with exit code {code}; their output is above."
            raise DistBackendError(f"benchmark: {text}")


def run_checkouts(program: Program, world: int, on_report: OnReport, checkouts: Mapping[str, Path]) -> None:
    """Run a program, which can be pickled, on ranks of several checkouts at once; one of them has a turn at a time.

    Raises:
        DistBackendError: A rank failed.
    """
    with hub(world, on_report, sides=len(checkouts)) as address, ExitStack() as stack:
        running: dict[Any, tuple[processes.Child, str, int]] = {}
        for side, (name, checkout) in enumerate(checkouts.items()):
            child = stack.enter_context(start_child(address, program, checkout, side=side))
            running[child.descriptor] = child, name, side
        while running:
            for ready in wait([*running]):
                child, name, side = running.pop(ready)
                if code := child.wait():
                    error = Path(address.folder, str(side), started_rank.ERROR)
                    reason = error.read_text() if error.exists() else f"the process ended with exit code {code}"
                    raise DistBackendError(f"benchmark: the checkout {name!r} failed: {reason}")


@contextmanager
def start_child(
    address: ParentAddress, program: Program, checkout: Path, side: int = 0, mpi: bool = False
) -> Iterator[processes.Child]:
    """Start the ranks of one side from a checkout; they have ended when the block ends."""
    folder = os.path.join(address.folder, str(side))
    Path(folder, started_rank.TASK).write_bytes(pickle.dumps((str(checkout), address, side, program)))
    launcher = [find_mpiexec(), "-n", str(address.world)] if mpi else []
    environment = {**os.environ, "PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1"}
    # -P keeps the folder of the script off the path.
    command = [*launcher, sys.executable, "-P", started_rank.__file__, folder, *(["mpi"] if mpi else [])]
    # In a session of its own Ctrl-C reaches MPI's ranks once, from here.
    child = processes.spawn(command, new_session=mpi, env=environment)
    try:
        yield child
    finally:
        child.terminate(TERMINATE_SECONDS)


def find_mpiexec() -> str:
    """Return the path of MPI's launcher, beside this Python or on the path; empty if there is none."""
    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    return beside if os.access(beside, os.X_OK) else shutil.which("mpiexec") or ""


@contextmanager
def hub(world: int, on_report: OnReport, extra: int = 0, sides: int = 1) -> Iterator[ParentAddress]:
    """Serve ranks until the block ends, when they have ended: yield the address to which they connect."""
    down, up = ([Pipe(duplex=False) for _ in range(world * sides)] for _ in range(2))
    stopped, stop = Pipe(duplex=False)
    memory = os.memfd_create("torchdist_ref", os.MFD_CLOEXEC)
    os.ftruncate(memory, sides * segment_bytes(world, extra))
    thread = threading.Thread(target=_serve, args=(down, up, stopped, world, on_report), name="benchmark hub")
    with tempfile.TemporaryDirectory(prefix="torchdist_ref-") as folder:
        for side in range(sides):
            os.mkdir(os.path.join(folder, str(side)))
        ends = [(reads.fileno(), writes.fileno()) for (reads, _), (_, writes) in zip(down, up, strict=True)]
        thread.start()
        try:
            yield ParentAddress(os.getpid(), folder, world, sides, extra, memory, ends)
        finally:
            stop.send(None)
            thread.join()
            for end in (stopped, stop, *(end for pair in (*down, *up) for end in pair)):
                end.close()
            os.close(memory)


Pipes = Sequence[tuple[Connection, Connection]]


def _serve(down: Pipes, up: Pipes, stopped: Connection, world: int, on_report: OnReport) -> None:
    """Pass on reports, and answer exchanges that are complete, until stopped and no message is left."""
    readers = {reads: number for number, (reads, _) in enumerate(up)}
    values: defaultdict[range, dict[int, Any]] = defaultdict(dict)
    while (ready := wait([stopped, *readers])) != [stopped]:
        for reader in ready:
            if reader is stopped:
                continue
            assert isinstance(reader, Connection)
            number = readers[reader]
            try:
                kind, value = reader.recv()
            except (EOFError, OSError):
                del readers[reader]
                continue
            if kind == REPORT:
                _handle(on_report, number // world, value)
            elif kind == CONNECTED:
                # With these open, the end of the rank would go unnoticed here.
                down[number][0].close()
                up[number][1].close()
            else:
                first = number // world * world
                members = range(len(up)) if kind == EVERYONE else range(first, first + world)
                values[members][number] = value
                if len(values[members]) == len(members):
                    _answer([down[member][1] for member in members], [values[members][each] for each in members])
                    del values[members]


def _handle(on_report: OnReport, side: int, event: Any) -> None:
    try:
        on_report(side, event)
    except Exception:
        # A full terminal or a closed pipe must not stop the ranks.
        logging.getLogger("torchdist_ref.benchmark").exception("could not show %r", event)


def _answer(ranks: Sequence[Connection], values: Sequence[Any]) -> None:
    for rank in ranks:
        # A rank that has ended is reported by whatever started it.
        with suppress(OSError):
            rank.send(values)
