"""TCPStore's server as its owner sees it: made, reached at a port, closed.

The server ends when the `TCPServer` object is closed or collected: no thread, descriptor or port stays behind.
A forked child closes its copies of the sockets at once, so that the port is free when the parent's server ends.
The serving itself is in `tcp_loop`.
"""

from __future__ import annotations

import os
import weakref

from torchdist_ref.stores.sockets import adopt, listen
from torchdist_ref.stores.tcp_loop import Loop
from torchdist_ref.timeouts import Deadline


class TCPServer:
    """A running store server. It stops when closed, or when the last reference to it goes.

    Args:
        host: the address to listen on, or a name for it.
        port: 0 lets the system choose; `port` then tells which.
        descriptor: a listening socket to take over instead.
        timeout: seconds in which the host's name must be found.
    """

    def __init__(self, host: str, port: int, descriptor: int | None = None, timeout: float = 300.0) -> None:
        listeners = listen(host, port, Deadline(timeout)) if descriptor is None else adopt(descriptor)
        self.port: int = listeners[0].getsockname()[1]
        self.owner = os.getpid()
        loop = Loop(listeners)
        _loops.add(loop)
        self._finalizer = weakref.finalize(self, _stop, loop, self.owner)
        loop.thread.start()

    def close(self) -> None:
        """Stop now; clients see their connections close."""
        self._finalizer()


def _stop(loop: Loop, owner: int) -> None:
    if os.getpid() == owner:
        loop.stop()


_loops: weakref.WeakSet[Loop] = weakref.WeakSet()


def _abandon_all() -> None:
    for loop in list(_loops):
        loop.abandon()
    _loops.clear()


os.register_at_fork(after_in_child=_abandon_all)
