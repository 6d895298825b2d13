"""Where completed futures run their callbacks: on a lane of their own, one lane for each depth.

A callback may make a new call and wait for that call's future. That future's own callbacks, and the future
itself, are settled one lane further down: the lane that the waiting callback occupies is not needed. On each lane
callbacks run one after the other, in the order in which their calls ended. Don't add knowledge of calls here.
"""

from __future__ import annotations

import contextvars

from torchdist_ref.backends.ref.progress import Lane
from torchdist_ref.work import Runner

# How many callbacks the running code is inside of.
_depth: contextvars.ContextVar[int] = contextvars.ContextVar("torchdist_ref_callback_depth", default=0)


class Callbacks:
    """The lanes of one group.

    >>> import threading
    >>> callbacks, done = Callbacks("a group"), threading.Event()
    >>> def outer():
    ...     inner = threading.Event()
    ...     callbacks.runner()(inner.set)
    ...     if inner.wait(5):
    ...         done.set()
    >>> callbacks.runner()(outer)
    >>> done.wait(5)
    True
    >>> callbacks.close()
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lanes: dict[int, Lane] = {}

    def runner(self) -> Runner:
        """For a call that is made now: what runs its callbacks, in the context of the caller."""
        depth, context = _depth.get(), contextvars.copy_context()
        context.run(_depth.set, depth + 1)
        lane = self._lanes.setdefault(depth, Lane(f"{self._name} callbacks"))
        return lambda job: lane.put(lambda: context.run(job))

    def close(self) -> None:
        """End all lanes; from a callback, only ask for the end."""
        for lane in list(self._lanes.values()):
            lane.close()
