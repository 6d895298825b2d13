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
import socket
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from torchdist_ref.benchmark import competitors, started_rank
from torchdist_ref.benchmark.rounds import HUB, ParentAddress, RankContext
from torchdist_ref.errors import DistBackendError
from torchdist_ref.processes import control as processes
from torchdist_ref.testing import namespaces, run

Program = Callable[[RankContext], Any]
OnReport = Callable[[int, Any], None]
TERMINATE_SECONDS = 5.0


def run_ranks(
    program: Program, world: int, on_report: OnReport = lambda *_: None, hosts: Sequence[namespaces.Host] = ()
) -> list[Any]:
    """Run a program on forked ranks.

    Args:
        program: Function of each rank.
        world: Number of ranks.
        on_report: Called here with the side and each thing that rank 0 reports, in order, on another thread.
        hosts: As of `ParentAddress`.

    Returns:
        Each rank's result.

    Raises:
        RankError: A rank failed.
    """
    with hub(world, on_report, hosts=hosts) as address:

        def start(rank: int) -> Any:
            return program(RankContext(address, rank))

        return run(start, world, ranks="processes", init=False, timeout=started_rank.DAY_SECONDS)


def run_programs(
    program: Program,
    world: int,
    on_report: OnReport,
    checkouts: Mapping[str, Path],
    mpi: bool = False,
    hosts: Sequence[namespaces.Host] = (),
) -> None:
    """Run a program, which can be pickled, on ranks of several checkouts at once; one of them has a turn at a time.

    Args:
        program: Function of each rank.
        world: Number of ranks of a checkout.
        on_report: As of `run_ranks`.
        checkouts: Folders by names.
        mpi: Whether ``mpiexec`` starts the ranks.
        hosts: As of `ParentAddress`.

    Raises:
        DistBackendError: A rank failed.
    """
    with hub(world, on_report, len(checkouts), hosts) as address, ExitStack() as stack:
        running: dict[Any, tuple[processes.Child, str, int]] = {}
        for side, (name, checkout) in enumerate(checkouts.items()):
            child = start_child(address, program, checkout, side, mpi)
            stack.callback(child.terminate, TERMINATE_SECONDS)
            running[child.descriptor] = child, name, side
        while running:
            for ready in wait([*running]):
                child, name, side = running.pop(ready)
                if code := child.wait():
                    error = Path(address.folder, str(side), started_rank.ERROR)
                    reason = error.read_text() if error.exists() else f"the process ended with exit code {code}"
                    raise DistBackendError(f"benchmark: the checkout {name!r} failed: {reason}")


def start_child(address: ParentAddress, program: Program, checkout: Path, side: int, mpi: bool) -> processes.Child:
    """Start the ranks of one side from a checkout."""
    folder = os.path.join(address.folder, str(side))
    Path(folder, started_rank.TASK).write_bytes(pickle.dumps((str(checkout), address, side, program)))
    launcher = [competitors.find_mpiexec(), "-n", str(address.world)] if mpi else []
    # torch would call the function that the installed package names; an older checkout may have another.
    set_here = {"PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    # -P keeps the folder of the script off the path.
    command = [*launcher, sys.executable, "-P", started_rank.__file__, folder, *(["mpi"] if mpi else [])]
    inherited = [host.namespace for host in address.hosts]
    # In a session of its own Ctrl-C reaches MPI's ranks once, from here.
    return processes.spawn(command, new_session=mpi, env={**os.environ, **set_here}, pass_fds=inherited)


@contextmanager
def hub(
    world: int, on_report: OnReport, sides: int = 1, hosts: Sequence[namespaces.Host] = ()
) -> Iterator[ParentAddress]:
    """Serve ranks until the block ends, when they have ended: yield the address to which they connect."""
    (stopped, stop), listener = Pipe(duplex=False), socket.socket(socket.AF_UNIX)
    with tempfile.TemporaryDirectory(prefix="torchdist_ref-") as folder, stopped, stop, listener:
        for side in range(sides):
            os.mkdir(os.path.join(folder, str(side)))
        listener.bind(os.path.join(folder, HUB))
        listener.listen(world * sides)
        thread = threading.Thread(target=_serve, args=(listener, stopped, world, on_report), name="benchmark hub")
        thread.start()
        try:
            yield ParentAddress(folder, world, sides, tuple(hosts))
        finally:
            stop.send(None)
            thread.join()


def _serve(listener: socket.socket, stopped: Connection, world: int, on_report: OnReport) -> None:
    """Accept ranks, pass on reports, and answer exchanges that are complete, until stopped and no message is left."""
    numbers: dict[Any, int] = {}
    values: defaultdict[range, dict[int, Any]] = defaultdict(dict)
    while (ready := wait([stopped, listener, *numbers])) != [stopped]:
        if listener in ready:
            joined = Connection(listener.accept()[0].detach())
            # A rank may be killed between its connection and its number.
            with suppress(EOFError, OSError):
                numbers[joined] = joined.recv()
        for each in numbers.keys() & set(ready):
            try:
                members, value = each.recv()
            except (EOFError, OSError):
                del numbers[each]
                each.close()
                continue
            if members is None:
                try:
                    on_report(numbers[each] // world, value)
                except Exception:
                    # A full terminal or a closed pipe must not stop the ranks.
                    logging.getLogger("torchdist_ref.benchmark").exception("could not show %r", value)
                continue
            found = values[members]
            found[numbers[each]] = value
            if len(found) == len(members):
                for rank in [rank for rank, number in numbers.items() if number in members]:
                    # A rank that has ended is reported by whatever started it.
                    with suppress(OSError):
                        rank.send([found[number] for number in sorted(found)])
                del values[members]
    for connection in numbers:
        connection.close()
