"""Rank server: a process with torch loaded that forks ranks in twenty milliseconds, and the kernel's interface to it.

It stands between the kernel and the ranks for three reasons. Importing torch once is faster than once per rank. The
kernel may have threads and CUDA, which must not be forked. A parent without other work notices the end of the kernel or
of a rank at once. It has one thread, does not initialize CUDA and runs no user code. When the kernel closes the
connection or ends, even by ``kill -9``, the server kills the ranks and exits. When the server itself is killed, the
ranks receive SIGKILL.

Messages are tuples that begin with their kind:

===============  ==================================================================================
kernel → server  ``start`` environment, followed by two descriptors · ``stop`` process ids
server → kernel  ``ready`` · ``failed`` traceback · ``started`` process id · ``ended`` process id, status · ``stopped``
===============  ==================================================================================
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NoReturn

from torchdist_ref.errors import ArgumentError, DistError, explain
from torchdist_ref.notebook import rank as rank_side
from torchdist_ref.notebook.output import OutputReader
from torchdist_ref.processes import control as processes
from torchdist_ref.processes.linux_calls import pidfd_open

METHODS = ("fork", "spawn")
_PRELOAD = ("torch", "torch.distributed", "torchdist_ref.groups")
_STOP_SECONDS = 5.0


@dataclass(slots=True)
class RankConnection:
    """Kernel's connection to one rank.

    Attributes:
        rank: Rank.
        pid: Process id. The server does not reap the process before `RankServer.stop_ranks`.
        messages: Connection for requests and results.
        output: Reader of its output.
    """

    rank: int
    pid: int
    messages: Connection
    output: OutputReader

    def signal(self, signum: int) -> None:
        """Send a signal to the rank and to the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signum)

    def ask(self, signum: int) -> None:
        """Send a signal to the rank, and not to the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signum)

    def close(self) -> None:
        """Close the connection, which ends an idle rank."""
        self.messages.close()
        self.output.close()


class RankServer:
    """Running rank server. It leads a session, so that an interrupt of the kernel does not reach it.

    Args:
        method: ``"fork"`` imports torch once, in the server, and forks ranks; ``"spawn"`` starts a new Python for each
            rank, which takes longer but is independent of the server's state.

    Attributes:
        method: Start method.
        connection: Kernel's end of the connection.
        pid: Process id of the server.
        ended: Exit status of each rank that has ended by itself, by process id, until it is stopped.

    Raises:
        ArgumentError: The method is unknown.
        DistError: The server did not start; the message contains its output.
    """

    def __init__(self, method: str = "fork") -> None:
        if method not in METHODS:
            raise ArgumentError(explain("RankServer", "method", "'fork' or 'spawn'", method))
        self.method = method
        self.ended: dict[int, int] = {}
        self._output = tempfile.TemporaryFile()
        self.connection, other_end = multiprocessing.Pipe()
        with other_end:
            self._process = self._start(other_end.fileno())
        self.pid = self._process.pid
        try:
            kind, *details = self._receive("did not start", "ready", "failed")
            if kind == "failed":
                raise DistError(f"the rank server could not load what ranks need:\n{details[0]}")
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        """Whether the server is running."""
        return self._process.wait(0) is None

    def start_rank(self, rank: int, environment: Mapping[str, str]) -> RankConnection:
        """Start a rank.

        Args:
            rank: Rank.
            environment: Whole environment.

        Returns:
            The connection to the rank.
        """
        messages, other_end = multiprocessing.Pipe()
        output, output_end = os.pipe()
        os.set_blocking(output, False)
        connection = RankConnection(rank, 0, messages, OutputReader(output))
        try:
            self.connection.send(("start", dict(environment)))
            for descriptor in (other_end.fileno(), output_end):
                send_handle(self.connection, descriptor, self.pid)
            _, connection.pid = self._receive(f"could not start rank {rank}", "started")
        except BaseException:
            connection.close()
            raise
        finally:
            other_end.close()
            os.close(output_end)
        return connection

    def stop_ranks(self, connections: Sequence[RankConnection]) -> None:
        """Kill ranks, in whatever state they are, and wait until they have ended."""
        for connection in connections:
            self.ended.pop(connection.pid, None)
        # Ranks have already ended if the server has.
        with contextlib.suppress(EOFError, ConnectionError):
            self.connection.send(("stop", [connection.pid for connection in connections]))
            while self.connection.poll(_STOP_SECONDS) and self.connection.recv()[0] != "stopped":
                continue

    def close(self) -> None:
        """End the server and all ranks that it started."""
        self.connection.close()
        self._process.wait(_STOP_SECONDS)
        self._process.signal(signal.SIGKILL)
        self._process.reap()
        self._output.close()

    def _start(self, descriptor: int) -> processes.Child:
        # Thread pools read OMP_NUM_THREADS when they are loaded: a pool in each rank would compete for the cores.
        return processes.spawn(
            _python(
                f"from torchdist_ref.notebook.server import main\nmain({descriptor}, {self.method!r}, {os.getpid()})"
            ),
            new_session=True,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            pass_fds=[descriptor],
        )

    def _receive(self, failure: str, *kinds: str) -> tuple[Any, ...]:
        try:
            message: tuple[Any, ...] = self.connection.recv()
            while message[0] not in kinds:
                if message[0] == "ended":
                    self.ended[message[1]] = message[2]
                message = self.connection.recv()
            return message
        except (EOFError, ConnectionError):
            self._output.seek(0)
            output = self._output.read().decode(errors="replace").strip()
            raise DistError(f"the rank server {failure}: it has ended{': ' + output if output else ''}") from None


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"]


def main(descriptor: int, method: str, kernel: int) -> None:
    """Run the server until the kernel ends.

    Args:
        descriptor: Descriptor of the connection to the kernel.
        method: ``"fork"`` or ``"spawn"``.
        kernel: Process id of the kernel.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(descriptor)
    try:
        if method == "fork":
            _preload()
    except Exception:
        connection.send(("failed", traceback.format_exc()))
        return
    # The kernel may already have ended.
    with contextlib.suppress(EOFError, ConnectionError):
        connection.send(("ready",))
        _ServerLoop(connection, method).run(kernel)
    # Taking down torch takes half a second, and nothing here needs it.
    os._exit(0)


def _preload() -> None:
    for name in _PRELOAD:
        importlib.import_module(name)
    if importlib.import_module("torchdist_ref.torch_internals.accelerators").is_initialized():
        raise RuntimeError("importing what ranks need has started the accelerator, which no fork survives: use 'spawn'")


class _ServerLoop:
    """Loop of the server process: starts ranks, stops them, and reports the end of each."""

    def __init__(self, connection: Connection, method: str) -> None:
        self._connection = connection
        self._start = self._fork if method == "fork" else self._spawn
        self._children: dict[int, processes.Child] = {}
        self._selector = selectors.DefaultSelector()

    def run(self, kernel: int) -> None:
        """Serve until the kernel ends; then kill all ranks."""
        self._selector.register(pidfd_open(kernel), selectors.EVENT_READ, self._on_kernel_end)
        self._selector.register(self._connection, selectors.EVENT_READ, self._on_request)
        try:
            while True:
                for key, _ in self._selector.select():
                    # An earlier event of the same round may have stopped this rank.
                    if key.fd in self._selector.get_map():
                        key.data()
        finally:
            self._stop(list(self._children))

    def _on_kernel_end(self) -> None:
        raise EOFError

    def _on_request(self) -> None:
        kind, detail = self._connection.recv()
        if kind == "stop":
            self._stop(detail)
            self._connection.send(("stopped",))
            return
        descriptors = [recv_handle(self._connection) for _ in range(2)]
        child = self._start(descriptors, detail)
        for descriptor in descriptors:
            os.close(descriptor)
        self._children[child.pid] = child
        self._selector.register(child.descriptor, selectors.EVENT_READ, functools.partial(self._on_end, child))
        self._connection.send(("started", child.pid))

    def _fork(self, descriptors: Sequence[int], environment: Mapping[str, str]) -> processes.Child:
        def run() -> NoReturn:
            for key in list(self._selector.get_map().values()):
                os.close(key.fd)
            self._selector.close()
            _reseed_numpy()
            rank_side.serve(descriptors[0], descriptors[1], environment)

        return processes.fork(run)

    def _spawn(self, descriptors: Sequence[int], environment: Mapping[str, str]) -> processes.Child:
        code = (
            "import json; from torchdist_ref.notebook.rank import serve\n"
            f"serve({descriptors[0]}, {descriptors[1]}, json.loads(sys.argv[1]))"
        )
        return processes.spawn([*_python(code), json.dumps(dict(environment))], pass_fds=descriptors)

    def _on_end(self, child: processes.Child) -> None:
        self._selector.unregister(child.descriptor)
        status = child.wait()
        child.signal(signal.SIGKILL)
        self._connection.send(("ended", child.pid, status))

    def _stop(self, pids: Iterable[int]) -> None:
        stopped = [self._children.pop(pid) for pid in pids]
        for child in stopped:
            child.signal(signal.SIGKILL)
        for child in stopped:
            if child.descriptor in self._selector.get_map():
                self._selector.unregister(child.descriptor)
            child.reap()


def _reseed_numpy() -> None:
    """Seed NumPy's global generator: otherwise all forks draw the same numbers. Python's own does so by itself."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
