"""The rank server: a process that has torch loaded and forks a rank in twenty milliseconds when asked to.

It stands between the kernel and the ranks for three reasons: importing torch once is faster than once per rank; the
kernel may have threads and CUDA, which must not be forked; and a parent that does nothing else hears at once when the
kernel dies, or a rank. It has one thread, starts no CUDA, and runs no code of the user. When the kernel closes the
socket or is gone, by ``kill -9`` even, it kills the ranks and ends; when it is killed itself, the ranks get SIGKILL.

``python -m`` is not how to start it: `torchdist_ref.notebook.pool` passes it one end of a socket pair.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import NoReturn

from torchdist_ref.notebook import rank as rank_side
from torchdist_ref.notebook.wire import receive_with_descriptors, send
from torchdist_ref.processes import Child, die_with_parent

PRELOAD = ("torch", "torch.distributed", "torchdist_ref.groups")


def main(channel: int, method: str, parent: int) -> None:
    """Serve until the kernel goes away.

    Args:
        channel: The descriptor of the socket to the kernel.
        method: ``"fork"`` or ``"spawn"``.
        parent: The kernel's process id.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=channel)
    try:
        if method == "fork":
            _preload()
    except Exception:
        send(control, ("failed", traceback.format_exc()))
        return
    # The kernel may be gone already, and with it the reader of this.
    with contextlib.suppress(ConnectionError):
        send(control, ("ready",))
        Server(control, method, parent).serve()
    # Nothing here wants tidying, and taking torch down takes half a second.
    os._exit(0)


def _preload() -> None:
    for name in PRELOAD:
        importlib.import_module(name)
    if sys.modules["torch"].cuda.is_initialized():
        raise RuntimeError("importing what ranks need has started CUDA, which a fork would break: start with 'spawn'")


class Server:
    """Starts ranks, signals them, and tells the kernel how each of them ended."""

    def __init__(self, control: socket.socket, method: str, parent: int) -> None:
        self._control = control
        self._method = method
        self._parent = parent
        self._pids: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        """Answer the kernel until it goes away; then let no rank live on."""
        kernel = os.pidfd_open(self._parent)
        self._selector.register(kernel, selectors.EVENT_READ, self._on_kernel_end)
        self._selector.register(self._control, selectors.EVENT_READ, self._on_request)
        try:
            while True:
                for key, _ in self._selector.select():
                    key.data()
        except (EOFError, ConnectionError):
            for rank in list(self._pids):
                self._signal(rank, signal.SIGKILL)

    def _on_kernel_end(self) -> None:
        raise EOFError

    def _on_request(self) -> None:
        (kind, rank, detail), descriptors = receive_with_descriptors(self._control)
        if kind == "start":
            self._start(rank, detail, descriptors)
        else:
            self._signal(rank, detail)
            send(self._control, ("signalled", rank, detail))

    def _start(self, rank: int, environment: Mapping[str, str], descriptors: Sequence[int]) -> None:
        start = self._fork if self._method == "fork" else _spawn
        pid = self._pids[rank] = start(descriptors, environment)
        with contextlib.suppress(OSError):
            # The rank does the same, whichever comes first: it may be signalled as a group from here on.
            os.setpgid(pid, pid)
        for descriptor in descriptors:
            os.close(descriptor)
        watch = os.pidfd_open(pid)
        self._selector.register(watch, selectors.EVENT_READ, functools.partial(self._on_end, rank, pid, watch))
        send(self._control, ("started", rank, pid))

    def _fork(self, descriptors: Sequence[int], environment: Mapping[str, str]) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_rank(parent, descriptors, environment)
        return pid

    def _become_rank(self, parent: int, descriptors: Sequence[int], environment: Mapping[str, str]) -> NoReturn:
        try:
            die_with_parent(parent)
            os.setpgid(0, 0)
            for key in list(self._selector.get_map().values()):
                os.close(key.fd)
            self._control.detach()
            self._selector.close()
            _new_randomness()
            rank_side.live(descriptors[0], descriptors[1], environment)
        finally:
            # Never back into the server's loop.
            os._exit(1)

    def _on_end(self, rank: int, pid: int, watch: int) -> None:
        status = Child(pid).wait() or 0
        self._signal(rank, signal.SIGKILL)
        self._selector.unregister(watch)
        os.close(watch)
        os.waitpid(pid, 0)
        del self._pids[rank]
        send(self._control, ("ended", rank, status))

    def _signal(self, rank: int, signum: int) -> None:
        # Not reaped as long as it is listed, so the number is its own; its group holds what it started.
        if rank in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pids[rank], signum)


def _new_randomness() -> None:
    """Give NumPy's global generator a fresh seed: forks would all draw the same. Python's own does it by itself."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _spawn(descriptors: Sequence[int], environment: Mapping[str, str]) -> int:
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "import json, os; from torchdist_ref.notebook.rank import live\n"
        f"live({descriptors[0]}, {descriptors[1]}, json.loads(sys.argv[1]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(dict(environment))],
        pass_fds=descriptors,
        process_group=0,
        preexec_fn=functools.partial(die_with_parent, os.getpid()),
    )
    # Watched and reaped like a forked one, by its number.
    process.returncode = 0
    return process.pid
