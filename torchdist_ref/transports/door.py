"""Door: where ranks of other hosts call on this one, until each has said who it is.

All callers are heard at once, so a stranger who says nothing, says something else or breaks off delays nobody and ends
nothing: scanners try every port there is. Don't add what is done with a connection then: that is the mesh's.
"""

from __future__ import annotations

import hmac
import selectors
import socket
from collections.abc import Collection
from time import monotonic

from torchdist_ref.errors import RankStalledError

SECRET = 16
_GREETING = SECRET + 4


def greeting(secret: bytes, rank: int) -> bytes:
    """What a rank says at the door."""
    return secret + rank.to_bytes(4, "little")


class Door:
    """The callers at a listening socket.

    Args:
        server: Where they call.
        secret: What only ranks of the group know.
    """

    def __init__(self, server: socket.socket, secret: bytes) -> None:
        server.setblocking(False)
        self._server, self._secret = server, secret
        self._said: dict[socket.socket, bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)

    def next(self, awaited: Collection[int], deadline: float) -> tuple[int, socket.socket]:
        """The next caller that is one of these ranks.

        Raises:
            RankStalledError: None came before the deadline, a time of `monotonic`.
        """
        while (left := deadline - monotonic()) > 0:
            for key, _ in self._selector.select(left):
                caller = key.fileobj
                if not isinstance(caller, socket.socket) or caller is self._server:
                    self._let_in()
                elif (rank := self._heard(caller)) is not None:
                    self._forget(caller)
                    if rank in awaited:
                        return rank, caller
                    caller.close()
        raise RankStalledError(f"init_process_group: ranks {sorted(awaited)} did not connect in time.")

    def _let_in(self) -> None:
        try:
            caller, _ = self._server.accept()
        except OSError:
            # It has gone again.
            return
        caller.setblocking(False)
        self._said[caller] = b""
        self._selector.register(caller, selectors.EVENT_READ)

    def _heard(self, caller: socket.socket) -> int | None:
        """Which rank calls, once it has said so; -1 for a stranger, None as long as it is open."""
        more = _read(caller, _GREETING - len(self._said[caller]))
        if more is None:
            return None
        said = self._said[caller] = self._said[caller] + more
        if more and len(said) < _GREETING:
            return None
        known = len(said) == _GREETING and hmac.compare_digest(said[:SECRET], self._secret)
        return int.from_bytes(said[SECRET:], "little") if known else -1

    def _forget(self, caller: socket.socket) -> None:
        self._selector.unregister(caller)
        del self._said[caller]

    def close(self) -> None:
        """Send away whoever has not said enough."""
        for caller in [*self._said]:
            self._forget(caller)
            caller.close()
        self._selector.close()


def _read(caller: socket.socket, count: int) -> bytes | None:
    """What a caller has said since; nothing at its end, None if it may go on."""
    try:
        return caller.recv(count)
    except BlockingIOError:
        return None
    except OSError:
        return b""
