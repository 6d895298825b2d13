"""Which of many descriptors are ready: the kernel's `epoll` where there is one, else `selectors` behind the same face.

`selectors` would do everywhere, but it looks up and wraps each event in Python, which costs a server of small requests
a tenth of its time. Nothing here knows what the descriptors are.
"""

from __future__ import annotations

import select
import selectors
from typing import Protocol

READ, WRITE = 1, 4
"""To be read from, to be written to; the kernel's numbers. Other bits of an event mean an error."""


class Poller(Protocol):
    """As much of `select.epoll` as the server needs."""

    def register(self, fd: int, eventmask: int, /) -> None:
        """Begin to watch a descriptor for these events."""

    def modify(self, fd: int, eventmask: int, /) -> None:
        """Watch it for others."""

    def unregister(self, fd: int, /) -> None:
        """Watch it no longer."""

    def poll(self, timeout: float | None, /) -> list[tuple[int, int]]:
        """Wait so many seconds at most, for ever if None: what is ready, and for what."""

    def close(self) -> None:
        """Give the kernel's list back; the descriptors stay open."""


class Selected:
    """The same where the kernel has no `epoll`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def register(self, fd: int, eventmask: int) -> None:
        self._selector.register(fd, _as_events(eventmask))

    def modify(self, fd: int, eventmask: int) -> None:
        self._selector.modify(fd, _as_events(eventmask))

    def unregister(self, fd: int) -> None:
        self._selector.unregister(fd)

    def poll(self, timeout: float | None) -> list[tuple[int, int]]:
        return [(key.fd, _as_mask(events)) for key, events in self._selector.select(timeout)]

    def close(self) -> None:
        self._selector.close()


def poller() -> Poller:
    """The fastest there is on this machine."""
    return select.epoll() if hasattr(select, "epoll") else Selected()


def _as_events(mask: int) -> int:
    return (selectors.EVENT_READ if mask & READ else 0) | (selectors.EVENT_WRITE if mask & WRITE else 0)


def _as_mask(events: int) -> int:
    return (READ if events & selectors.EVENT_READ else 0) | (WRITE if events & selectors.EVENT_WRITE else 0)
