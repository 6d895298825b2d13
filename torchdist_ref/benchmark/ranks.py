"""Ranks of a benchmark: forked, on two hosts of network namespaces, or started by ``mpiexec``; and what they share.

Forked ranks come from `torchdist_ref.testing.run`, so that none outlives the benchmark. MPI's ranks are started by
``mpiexec``: the parent leaves a pickled task in a folder, and this file, run as a module, is such a rank. A program
does not know the difference: it gets a `RankContext` with a start line, an exchange of values and a way to report.

Do not add here: anything that a backend could be measured with.
"""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, TypeVar

from torchdist_ref import processes
from torchdist_ref.benchmark.timing import LINE_BYTES, StartLine
from torchdist_ref.errors import DistBackendError, UnsupportedError
from torchdist_ref.testing import namespaces, run

T = TypeVar("T")
DAY_SECONDS = 86_400.0
TERMINATE_SECONDS = 5.0
HOSTS = 2
_TASK, _REPORTS = "task", "reports"


@dataclass(frozen=True)
class RankContext:
    """One rank of a benchmark.

    Attributes:
        rank: This rank.
        world: Number of ranks.
        folder: Folder for stores; it is removed when the ranks have ended.
        memory: Shared memory for the program, page-aligned.
        start_line: Barrier of all ranks.
        exchange: Function that gives every rank every rank's value, in rank order. It blocks without spinning.
    """

    rank: int
    world: int
    folder: str
    memory: memoryview
    start_line: StartLine
    exchange: Callable[[Any], list[Any]]
    _reports: Connection | None = None

    def wait(self) -> None:
        """Wait at the start line."""
        self.start_line.wait()

    def report(self, event: object, from_any_rank: bool = False) -> None:
        """Send the parent something; without `from_any_rank` only rank 0 does."""
        if self._reports is not None and (self.rank == 0 or from_any_rank):
            self._reports.send(event)


Program = Callable[[RankContext], Any]


def _ignore(event: Any) -> None:
    """Ignore a report."""


def run_ranks(
    program: Callable[[RankContext], T],
    world: int,
    on_report: Callable[[Any], None] = _ignore,
    timeout: float = DAY_SECONDS,
    extra: int = 0,
) -> list[T]:
    """Run a program on forked ranks.

    Args:
        program: Function of each rank.
        world: Number of ranks.
        on_report: Called here with each thing that rank 0 reports, in order, on another thread.
        timeout: Seconds until the ranks are stopped.
        extra: Bytes of `RankContext.memory`.

    Returns:
        Each rank's result.

    Raises:
        RankError: A rank failed.
    """
    memory = mmap.mmap(-1, segment_bytes(world, extra))
    pipes = [Pipe() for _ in range(world - 1)]

    def exchange(rank: int, value: Any) -> list[Any]:
        if rank:
            pipes[rank - 1][1].send(value)
            received: list[Any] = pipes[rank - 1][1].recv()
            return received
        values = [value, *(here.recv() for here, _ in pipes)]
        for here, _ in pipes:
            here.send(values)
        return values

    with _reports_to(on_report) as reports, tempfile.TemporaryDirectory(prefix="torchdist_ref-") as folder:

        def start(rank: int) -> T:
            return program(_context(rank, world, folder, memory, lambda value: exchange(rank, value), reports))

        try:
            return run(start, world, ranks="processes", init=False, timeout=timeout)
        finally:
            for end in (end for pair in pipes for end in pair):
                end.close()


def segment_bytes(world: int, extra: int) -> int:
    """Return the size of the shared memory: a cache line a rank, up to a whole page, and the program's bytes.

    >>> segment_bytes(2, 100)
    4196
    """
    return -(-world * LINE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE + extra


def _context(
    rank: int,
    world: int,
    folder: str,
    memory: mmap.mmap,
    exchange: Callable[[Any], list[Any]],
    reports: Connection | None,
) -> RankContext:
    whole, lines = memoryview(memory), segment_bytes(world, 0)
    line = StartLine(whole[:lines], rank, range(world))
    return RankContext(rank, world, folder, whole[lines:], line, exchange, reports)


@contextmanager
def _reports_to(on_report: Callable[[Any], None]) -> Iterator[Connection]:
    """Yield a connection to this process; a thread passes on what is sent, until the block ends."""
    here, there = Pipe(duplex=False)
    thread = threading.Thread(target=_listen, args=(here, on_report), name="benchmark listener")
    thread.start()
    try:
        yield there
    finally:
        there.send(None)
        thread.join()
        there.close()
        here.close()


def _listen(here: Connection, on_report: Callable[[Any], None]) -> None:
    while (event := here.recv()) is not None:
        try:
            on_report(event)
        except Exception:
            # A full terminal or a closed pipe must not stop the ranks, which would block on reporting.
            logging.getLogger("torchdist_ref.benchmark").exception("could not show %r", event)


@contextmanager
def on_hosts(program: Program, wanted: bool) -> Iterator[Program]:
    """Yield the program for ranks on two hosts, if that is wanted; the hosts exist while the block lasts.

    Raises:
        UnsupportedError: This machine has no network namespaces, or this process may not make them.
    """
    if not wanted:
        yield program
        return
    if reason := namespaces.missing():
        raise UnsupportedError(f"benchmark: ranks can't be put on two hosts: {reason}.")
    with namespaces.hosts(HOSTS) as pair:

        def on_host(context: RankContext) -> None:
            enter_host(pair, context.rank, context.world)
            program(context)

        yield on_host


def enter_host(hosts: Sequence[namespaces.Host], rank: int, world: int) -> namespaces.Host | None:
    """Move this rank's process to its host, if there are any: the first half of the ranks to the first."""
    if not hosts:
        return None
    host = hosts[rank * len(hosts) // world]
    host.enter()
    # Gloo and `ref` read this one.
    os.environ["GLOO_SOCKET_IFNAME"] = host.interface
    return host


@dataclass(frozen=True)
class MpiTask:
    """Program of MPI's ranks, the path of the shared memory, and the bytes of it that are the program's."""

    program: Program
    memory: str
    extra: int


def find_mpiexec() -> str:
    """Return the path of MPI's launcher, beside this Python or on the path; empty if there is none."""
    beside = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    return beside if os.access(beside, os.X_OK) else shutil.which("mpiexec") or ""


def run_mpi_ranks(program: Program, world: int, on_report: Callable[[Any], None], extra: int = 0) -> None:
    """Run a program, which can be pickled, on ranks under ``mpiexec``; otherwise as `run_ranks`.

    Raises:
        DistBackendError: A rank failed. Its own message is on standard error.
    """
    fd = os.memfd_create("torchdist_ref", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, segment_bytes(world, extra))
        with tempfile.TemporaryDirectory(prefix="torchdist_ref-") as folder:
            task = MpiTask(program, f"/proc/{os.getpid()}/fd/{fd}", extra)
            Path(folder, _TASK).write_bytes(pickle.dumps(task))
            with _reports_to(on_report) as reports, _relay(folder, reports):
                _launch(folder, world)
    finally:
        os.close(fd)


@contextmanager
def _relay(folder: str, reports: Connection) -> Iterator[None]:
    """Pass on the reports of rank 0, from before it starts until it has ended."""
    path = os.path.join(folder, _REPORTS)
    with Listener(path, "AF_UNIX") as listener:
        thread = threading.Thread(target=_pass_on, args=(listener, reports), name="benchmark relay")
        thread.start()
        try:
            yield
        finally:
            # In case that rank 0 never connected.
            with suppress(OSError), closing(Client(path, "AF_UNIX")):
                pass
            thread.join()


def _pass_on(listener: Listener, reports: Connection) -> None:
    with closing(listener.accept()) as rank_0, suppress(EOFError, OSError):
        while True:
            reports.send(rank_0.recv())


def _launch(folder: str, world: int) -> None:
    command = [find_mpiexec(), "-n", str(world), sys.executable, "-m", __name__, folder]
    # In a session of its own Ctrl-C reaches the ranks once, from here.
    child = processes.spawn(command, new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        code = child.wait()
    finally:
        child.terminate(TERMINATE_SECONDS)
    if code:
        raise DistBackendError(f"benchmark: ranks under mpiexec ended with exit code {code}; their output is above.")


def run_mpi_rank(folder: str) -> None:
    """Run the program of this process, which ``mpiexec`` started."""
    import torch
    from mpi4py import MPI

    torch.set_num_threads(1)
    rank, world = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    task: MpiTask = pickle.loads(Path(folder, _TASK).read_bytes())
    fd = os.open(task.memory, os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(fd, segment_bytes(world, task.extra))
    finally:
        os.close(fd)
    reports = Client(os.path.join(folder, _REPORTS), "AF_UNIX") if rank == 0 else None
    try:
        task.program(_context(rank, world, folder, memory, MPI.COMM_WORLD.allgather, reports))
    except BaseException as error:
        print(f"rank {rank} of {world} failed with {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        # The others wait for this rank, and only MPI can end them.
        MPI.COMM_WORLD.Abort(1)


if __name__ == "__main__":
    run_mpi_rank(sys.argv[1])
