"""Store of a simulation, on the host of rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torchdist_ref.errors import DistNetworkError
from torchdist_ref.simulation.connections import Ports, connected
from torchdist_ref.simulation.scheduler import CHECK, TIMEOUT, Scheduler, Task, current_task
from torchdist_ref.simulation.world import SimulatedWorld
from torchdist_ref.stores import HashStore
from torchdist_ref.stores.base import Text, quote_keys
from torchdist_ref.stores.hash import Table
from torchdist_ref.stores.prefix import WatchedStore
from torchdist_ref.timeouts import Deadline


class _Changes:
    """Condition of a simulated store. It has no lock, which a killed rank could hold, and needs none."""

    def __init__(self, scheduler: Scheduler, table: Table) -> None:
        self._scheduler, self._table = scheduler, table
        # By the key that they wait for: in a large group, many ranks wait for one key, and keys come one by one.
        self._waiting: dict[bytes, dict[Task, None]] = {}
        self.has_ended = False

    def __enter__(self) -> None:
        self.raise_if_ended()

    def raise_if_ended(self) -> None:
        """Raise DistNetworkError if the store has ended."""
        if self.has_ended and current_task() is not None:
            raise DistNetworkError(
                "The connection to the store of the simulation has ended: its server is gone. No rank serves it, so "
                "none can serve another one in its place; for that, have ranks meet on a TCPStore, with init=False."
            )

    def __exit__(self, *_: object) -> None:
        pass

    def wait_for(self, key: bytes, seconds: float, kind: int = TIMEOUT) -> None:
        """Wait until a change after which a key is there, an alarm, or the time-out."""
        task = self._scheduler.running()
        self._waiting.setdefault(key, {})[task] = None
        self._scheduler.block(self, seconds, kind)
        if (waiting := self._waiting.get(key)) is not None:
            waiting.pop(task, None)
            if not waiting:
                del self._waiting[key]

    def notify_all(self) -> None:
        values, queues = self._table.values, self._table.queues
        for key in [key for key in self._waiting if self.has_ended or key in values or key in queues]:
            for task in self._waiting.pop(key):
                if task.waits_for is self:
                    self._scheduler.wake(task)

    def __str__(self) -> str:
        return "a change of the store"


class SimulatedStore(HashStore):
    """Store of a simulation, on the host of rank 0. Each request takes a message there and one back.

    A wait of a `WatchedStore` ends at an alarm as at its next check, so that it looks for failures.

    Args:
        world: The world.
    """

    def __init__(self, world: SimulatedWorld) -> None:
        super().__init__()
        self._world = world
        self._changes = _Changes(world.scheduler, self._table)
        self._changed = self._changes  # type: ignore[assignment]
        self._wills: dict[int, tuple[str, Text]] = {}
        self.session_key = bytes(32)
        world.on_death.append(self._fulfil)

    def set_on_disconnect(self, key: Text, value: Text, now: Mapping[str, Text] | None = None) -> bool:
        """See `Store.set_on_disconnect`."""
        for name, text in (now or {}).items():
            self.set(name, text)
        task = current_task()
        if task is not None:
            if value:
                self._wills[task.owner] = str(key), value
            else:
                self._wills.pop(task.owner, None)
        return True

    def wait_get(
        self,
        keys: Sequence[Text],
        timeout: timedelta,
        publish: Mapping[str, Text] | None = None,
        on_disconnect: tuple[str, Text] | None = None,
    ) -> list[bytes]:
        """See `Store.wait_get`."""
        task = current_task()
        if on_disconnect is not None and task is not None:
            self._wills[task.owner] = on_disconnect
        return super().wait_get(keys, timeout, publish)

    def _fulfil(self, rank: int) -> None:
        """Set the key that a dead rank has left for this case."""
        if (will := self._wills.pop(rank, None)) is not None and not self._changes.has_ended:
            key, value = will
            name = key.encode()
            self._table.values.setdefault(name, value if isinstance(value, bytes) else str(value).encode())
            self._changed.notify_all()

    def end(self) -> None:
        """Fail all requests from now on, those that wait included."""
        self._changes.has_ended = True
        self._changes.notify_all()

    def _change(self, action: Callable[[Any], Any]) -> Any:
        self._travel()
        return super()._change(action)

    def _travel(self) -> None:
        """Let the time of a request to the store and of its response pass."""
        task = current_task()
        if task is not None:
            scheduler, wires = self._world.scheduler, self._world.wires
            scheduler.step()
            there = wires.notice(scheduler.now, task.owner, 0) - scheduler.now
            if there and task.owner:
                scheduler.sleep(2 * there)

    def _wait_for(self, operation: str, deadline: Deadline, missing: Callable[[Any], list[bytes]]) -> None:
        task = current_task()
        if task is None:
            return super()._wait_for(operation, deadline, missing)
        kind, task.watched = task.watched, None
        watched = kind is not None
        while absent := missing(self._table):
            if deadline.passed() or (watched and task.alarmed):
                task.alarmed = task.alarmed and not watched
                raise self._timed_out(operation, absent, deadline)
            task.alarmable += watched
            task.purpose = f"keys in the store ({quote_keys(absent)})"
            try:
                # Of several keys the last one is probably set last.
                self._changes.wait_for(absent[-1], deadline.remaining(), TIMEOUT if kind is None else kind)
            finally:
                task.alarmable, task.purpose = task.alarmable - watched, ""
            self._changes.raise_if_ended()
        return None


@contextmanager
def stores_of(world: SimulatedWorld) -> Iterator[None]:
    """Let stores of simulated ranks work in virtual time in the block."""
    with _watched_waits(), connected(Ports(world)):
        yield


@contextmanager
def _watched_waits() -> Iterator[None]:
    """Let waits of watched stores look for failures at longer and longer intervals of virtual time, in the block.

    Deaths wake them. A check finds what a living rank publishes, and a death that an earlier wait did not need.
    """
    real = WatchedStore.next_check

    def next_check(self: WatchedStore, deadline: Deadline) -> float:
        task, first = current_task(), real(self, deadline)
        if task is None:
            return first
        remaining = deadline.remaining()
        seconds = max(first, min(_GROWTH * (deadline.seconds - remaining), remaining))
        task.watched = CHECK if seconds < remaining else TIMEOUT
        return seconds

    WatchedStore.next_check = next_check  # type: ignore[method-assign]
    try:
        yield
    finally:
        WatchedStore.next_check = real  # type: ignore[method-assign]


_GROWTH = 4.0
"""Time until the next check of a wait, as a multiple of the time for which it has waited."""
