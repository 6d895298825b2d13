"""Ranks that ``mpiexec`` starts, because MPI knows no others. To a benchmark's program they are like forked ones.

The parent makes the memory and the line, as for forked ranks, and leaves word of both in a file; a rank opens the
memory under /proc and exchanges figures through MPI, outside of what is timed. Run as a module, this file is such a
rank.
"""

from __future__ import annotations

import mmap
import os
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from torchdist_ref import processes
from torchdist_ref.benchmark.circle import Circle, segment
from torchdist_ref.benchmark.competitors import mpiexec
from torchdist_ref.benchmark.crew import Place, listening
from torchdist_ref.errors import DistBackendError

_TASK, _LINE = "task", "line"
_PATIENCE = 5.0


@dataclass(frozen=True)
class Task:
    """What a rank needs to know: its program, where the shared memory is, and how much of it is for the program."""

    program: Callable[[Place], Any]
    memory: str
    extra: int


def go(program: Callable[[Place], Any], world: int, hear: Callable[[Any], None], extra: int = 0) -> None:
    """Run a program on ranks under ``mpiexec``.

    Args:
        program: What each rank does; a function that can be pickled.
        world: How many ranks.
        hear: Called here with each thing that rank 0 reports, on another thread.
        extra: Bytes of memory to share.

    Raises:
        DistBackendError: A rank failed. Its own words are on standard error.
    """
    fd = os.memfd_create("torchdist_ref", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, segment(world, extra))
        with tempfile.TemporaryDirectory(prefix="torchdist_ref-") as folder:
            task = Task(program, f"/proc/{os.getpid()}/fd/{fd}", extra)
            Path(folder, _TASK).write_bytes(pickle.dumps(task))
            with listening(hear) as line, _relay(folder, line):
                _launch(folder, world)
    finally:
        os.close(fd)


@contextmanager
def _relay(folder: str, line: Connection) -> Iterator[None]:
    """Pass on what rank 0 says, from before it starts until it has ended."""
    with Listener(os.path.join(folder, _LINE), "AF_UNIX") as listener:
        relay = threading.Thread(target=_pass_on, args=(listener, line), name="benchmark relay")
        relay.start()
        try:
            yield
        finally:
            # In case that rank 0 never came.
            with suppress(OSError), closing(Client(os.path.join(folder, _LINE), "AF_UNIX")):
                pass
            relay.join()


def _pass_on(listener: Listener, line: Connection) -> None:
    with closing(listener.accept()) as heard, suppress(EOFError, OSError):
        while True:
            line.send(heard.recv())


def _launch(folder: str, world: int) -> None:
    command = [mpiexec(), "-n", str(world), sys.executable, "-m", __name__, folder]
    # A session of its own, so that Ctrl-C reaches the ranks once, from us.
    child = processes.spawn(command, new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        code = child.wait()
    finally:
        child.terminate(_PATIENCE)
    if code:
        raise DistBackendError(f"benchmark: ranks under mpiexec ended with exit code {code}; what they said is above.")


def be_rank(folder: str) -> None:
    """Be the rank that MPI says that this process is."""
    import torch
    from mpi4py import MPI

    torch.set_num_threads(1)
    rank, world = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    task: Task = pickle.loads(Path(folder, _TASK).read_bytes())
    circle = Circle(world, found=(_map(task, world), MPI.COMM_WORLD.allgather))
    line = Client(os.path.join(folder, _LINE), "AF_UNIX") if rank == 0 else None
    try:
        task.program(Place(rank, world, circle, folder, line))
    except BaseException as error:
        print(f"rank {rank} of {world} failed with {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        # The others wait for this rank, and only MPI can tell them.
        MPI.COMM_WORLD.Abort(1)


def _map(task: Task, world: int) -> mmap.mmap:
    fd = os.open(task.memory, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, segment(world, task.extra))
    finally:
        os.close(fd)


if __name__ == "__main__":
    be_rank(sys.argv[1])
