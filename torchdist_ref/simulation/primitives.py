"""Locks, queues, threads and clocks of simulated ranks, and their installation in place of Python's own.

While a simulation runs, `time.sleep`, `time.monotonic`, `threading.Lock`, `queue.SimpleQueue`, `threading.Thread` and
their kind are replaced by functions that look who calls: a thread of a rank gets the simulated thing, any other thread
of the process (a notebook's kernel, a logger) gets the real one. Everything that Python's library makes of locks
(`Condition`, `Event`, `Semaphore`, `Barrier`, `queue.Queue`) is thereby simulated too, and so is everything that a
program does with them.

Names that a module has imported (`from time import sleep`) are replaced in that module. So ranks need no other code
than in a real run, and the library pays nothing for it outside a simulation.
"""

from __future__ import annotations

import _thread
import concurrent.futures.thread
import contextvars
import os
import queue
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from torchdist_ref.simulation.scheduler import Scheduler, SimulationEnded, Task, current_task
from torchdist_ref.timeouts import Clock

EPOCH = 1_000_000_000.0
"""`time.time()` at the beginning of each run."""
ORIGIN = 1.0
"""`time.perf_counter()` at the beginning of each run: not 0, which the flight recorder reads as "not yet"."""
NEVER = 3.0e7
"""Seconds after which nothing happens in a simulation: the run ends instead."""
_SLICES = {
    "backends.ref.tag_matching": NEVER,
    "transports.link": NEVER,
    "work": NEVER,
    "backends.worker_threads": 1.0,
}
"""Interval at which waits look for failures, by module. Those of links are woken when there is something to
see, so they need not look by themselves. Those of stores are in `store.stores_of`."""


def _step(is_noticed: bool = True) -> Task | None:
    """Note an operation of the calling thread, and return its task; None if it belongs to no simulation.

    Threads that are left when the run is over only release what they hold.

    Args:
        is_noticed: See `Scheduler.step_of`.
    """
    task = current_task()
    if task is not None and not (scheduler := task.scheduler).is_over:
        scheduler.step_of(task, is_noticed)
    return task


class SimulatedLock:
    """`threading.Lock` of simulated ranks. Those that wait get it in the order in which they came."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._locked = False
        self._owner: Task | None = None
        self._waiting: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See `threading.Lock.acquire`; the time-out is virtual."""
        task = _step(is_noticed=False)
        if not self._locked:
            self._locked, self._owner = True, task
            return True
        if not blocking or timeout == 0 or task is None:
            return False
        self._waiting.append(task)
        if self._scheduler.block(self, None if timeout < 0 else timeout):
            self._owner = task
            return True
        if task in self._waiting:
            self._waiting.remove(task)
        return False

    def release(self) -> None:
        """See `threading.Lock.release`."""
        if self._scheduler.is_over:
            # Nobody waits any more, and it may be another thread's.
            self._locked, self._owner = False, None
            return
        if not self._locked:
            raise RuntimeError("release unlocked lock")
        self._owner = None
        while self._waiting:
            task = self._waiting.popleft()
            if task.waits_for is self:
                # Handed over: nobody can take it in between.
                self._scheduler.wake(task)
                return
        self._locked = False

    def is_void(self) -> bool:
        """Return whether the run is over, so that nobody else uses the lock."""
        return self._scheduler.is_over

    def locked(self) -> bool:
        """See `threading.Lock.locked`."""
        return self._locked

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        """Unlock. Python calls this in the child of a fork, for each thread of the process that it still knows."""
        self._locked, self._owner = False, None
        self._waiting.clear()

    def __str__(self) -> str:
        owner = self._owner
        return "a lock" if owner is None else f"a lock of rank {owner.owner} ({owner.name})"


class SimulatedRLock:
    """`threading.RLock` of simulated ranks."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._lock = SimulatedLock(scheduler)
        self._owner: int | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See `threading.RLock.acquire`; the time-out is virtual."""
        me = _thread.get_ident()
        if self._owner != me:
            if not self._lock.acquire(blocking, timeout):
                return False
            self._owner = me
        self._count += 1
        return True

    def release(self) -> None:
        """See `threading.RLock.release`."""
        if self._lock.is_void():
            return
        if self._owner != _thread.get_ident():
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self._owner = None
            self._lock.release()

    def locked(self) -> bool:
        """See `threading.RLock.locked`, which Python has since 3.14."""
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    # The four that `threading.Condition` uses.

    def _at_fork_reinit(self) -> None:
        self._owner, self._count = None, 0
        self._lock._at_fork_reinit()  # noqa: SLF001 (Python's own name for it)

    def _is_owned(self) -> bool:
        return self._owner == _thread.get_ident()

    def _release_save(self) -> tuple[int, int | None]:
        state, self._count, self._owner = (self._count, self._owner), 0, None
        self._lock.release()
        return state

    def _acquire_restore(self, state: tuple[int, int | None]) -> None:
        self._lock.acquire()
        self._count, self._owner = state


class SimulatedQueue:
    """`queue.SimpleQueue` of simulated ranks."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._items: deque[Any] = deque()
        self._waiting: deque[Task] = deque()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """See `queue.SimpleQueue.put`."""
        _step(is_noticed=False)
        self._items.append(item)
        while self._waiting:
            task = self._waiting.popleft()
            if task.waits_for is self:
                self._scheduler.wake(task)
                return

    put_nowait = put

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """See `queue.SimpleQueue.get`; the time-out is virtual."""
        task = _step(is_noticed=False)
        end = None if timeout is None else self._scheduler.now + timeout
        while not self._items:
            if not block or task is None or (end is not None and self._scheduler.now >= end):
                raise queue.Empty
            self._waiting.append(task)
            self._scheduler.block(self, None if end is None else end - self._scheduler.now)
            if task in self._waiting:
                self._waiting.remove(task)
        return self._items.popleft()

    def get_nowait(self) -> Any:
        """See `queue.SimpleQueue.get_nowait`."""
        return self.get(False)

    def empty(self) -> bool:
        """See `queue.SimpleQueue.empty`."""
        return not self._items

    def qsize(self) -> int:
        """See `queue.SimpleQueue.qsize`."""
        return len(self._items)

    def __str__(self) -> str:
        return "an item of a queue"


class SimulatedSemaphore:
    """Counting semaphore from one rank to another. A wait ends early, with False, at an alarm.

    Args:
        scheduler: The scheduler.
        source: Global rank that posts it; None if several do.
        kind: Kind of the semaphore, for reports.
    """

    def __init__(self, scheduler: Scheduler, source: int | None, kind: str) -> None:
        self._scheduler, self.source, self.kind = scheduler, source, kind
        self._count = 0
        self._waiting: deque[Task] = deque()

    def release(self) -> None:
        """See `transports.base.Semaphore.release`."""
        self._scheduler.activity += 1
        while self._waiting:
            task = self._waiting.popleft()
            if task.waits_for is self:
                self._scheduler.wake(task)
                return
        self._count += 1

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """See `transports.base.Semaphore.acquire`; the time-out is virtual.

        It is an operation only where it waits. Nobody else acquires the semaphore, so others cannot notice the rest.
        """
        may_wait = block and timeout != 0
        _step(is_noticed=may_wait and not self._count)
        if self._count:
            self._count -= 1
            return True
        if not may_wait:
            return False
        task = self._scheduler.running()
        if task.alarmed:
            task.alarmed = False
            return False
        self._waiting.append(task)
        task.alarmable += 1
        try:
            if self._scheduler.block(self, timeout):
                return True
        finally:
            task.alarmable -= 1
        task.alarmed = False
        if task in self._waiting:
            self._waiting.remove(task)
        return False

    def __str__(self) -> str:
        return f"rank {self.source}" if self.source is not None else "a message"


# ---- installation


def _scheduler_here() -> Scheduler | None:
    task = current_task()
    if task is not None:
        return task.scheduler
    return _building[-1] if _building and _building_thread == _thread.get_ident() else None


_building: list[Scheduler] = []
_building_thread = 0


@contextmanager
def building(scheduler: Scheduler) -> Iterator[None]:
    """Let the calling thread, which is not a task, make simulated locks in the block."""
    global _building_thread
    _building_thread = _thread.get_ident()
    _building.append(scheduler)
    try:
        yield
    finally:
        _building.pop()


def _made_by(real: Callable[..., Any], simulated: Callable[[Scheduler], Any]) -> Callable[..., Any]:
    def make(*arguments: Any, **named: Any) -> Any:
        scheduler = _scheduler_here()
        return real(*arguments, **named) if scheduler is None else simulated(scheduler)

    return make


def _clock(real: Callable[[], Any], virtual: Callable[[float], Any]) -> Callable[[], Any]:
    def now() -> Any:
        task = current_task()
        if task is None:
            return real()
        scheduler = task.scheduler
        if scheduler.compute and not scheduler.is_over:
            with suppress(SimulationEnded):
                scheduler.charge(task)
        return virtual(scheduler.now)

    return now


_real_sleep = time.sleep


def _sleep(seconds: float) -> None:
    task = current_task()
    if task is None:
        return _real_sleep(seconds)
    if seconds < 0:
        raise ValueError("sleep length must be non-negative")
    scheduler = task.scheduler
    scheduler.step()
    scheduler.activity += 1
    scheduler.sleep(seconds)


_real_eventfd_write, _wait = os.eventfd_write, Clock.wait
_at_descriptors: dict[Task, None] = {}
"""Tasks that wait for a descriptor. Those of ranks are eventfds, and become readable when a rank writes to them."""


def _write_eventfd(descriptor: int, value: int) -> None:
    _real_eventfd_write(descriptor, value)
    if (task := current_task()) is not None:
        for waiting in [*_at_descriptors]:
            task.scheduler.wake(waiting)


def _wait_for_descriptors(
    clock: Clock, descriptors: select.poll | Iterable[int], seconds: float | None = None
) -> list[int]:
    task = _step()
    if task is None:
        return _wait(clock, descriptors, seconds)
    scheduler = task.scheduler
    end = None if seconds is None else scheduler.now + seconds
    while not (ready := _wait(clock, descriptors, 0.0)) and (end is None or scheduler.now < end):
        _at_descriptors[task] = None
        scheduler.block("a descriptor", None if end is None else end - scheduler.now)
        del _at_descriptors[task]
    return ready


def _nanoseconds(now: float) -> int:
    return round(now * 1e9)


_Thread = threading.Thread
_start, _join, _is_alive = _Thread.start, _Thread.join, _Thread.is_alive
_current_thread = threading.current_thread
_TASK = "_torchdist_ref_task"


def _start_thread(thread: threading.Thread) -> None:
    task = current_task()
    if task is None:
        return _start(thread)
    scheduler, context = task.scheduler, contextvars.copy_context()

    def run() -> None:
        # A thread of a real rank sees the groups of its process.
        try:
            context.run(thread.run)
        except Exception:
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), thread)))

    made = scheduler.spawn(task.owner, thread.name, run)
    made.thread = thread
    setattr(thread, _TASK, made)
    scheduler.step()


def _join_thread(thread: threading.Thread, timeout: float | None = None) -> None:
    made: Task | None = getattr(thread, _TASK, None)
    if made is None:
        return _join(thread, timeout)
    task = current_task()
    if made.has_ended or task is None:
        return
    made.joiners.append(task)
    task.scheduler.block(f"the end of thread {thread.name!r}", timeout)
    if task in made.joiners:
        made.joiners.remove(task)


def _is_thread_alive(thread: threading.Thread) -> bool:
    made: Task | None = getattr(thread, _TASK, None)
    return _is_alive(thread) if made is None else not made.has_ended


def _thread_of_caller() -> threading.Thread:
    task = current_task()
    return _current_thread() if task is None else task.thread


_FutureWait = torch.futures.Future.wait


def _wait_for_future(future: Any) -> Any:
    """Wait for a future of torch's, whose own wait would block in C++ with the baton."""
    task = current_task()
    if task is not None and not future.done():
        scheduler = task.scheduler
        future.add_done_callback(lambda _: scheduler.wake(task))
        while not future.done():
            scheduler.block("a future of torch's")
    return _FutureWait(future)


def _wait_all(futures: Sequence[Any]) -> list[Any]:
    return [future.wait() for future in futures]


_FUNCTIONS: dict[Any, Any] = {
    time.sleep: _sleep,
    time.monotonic: _clock(time.monotonic, lambda now: now),
    time.perf_counter: _clock(time.perf_counter, lambda now: ORIGIN + now),
    time.time: _clock(time.time, lambda now: EPOCH + now),
    time.monotonic_ns: _clock(time.monotonic_ns, _nanoseconds),
    time.perf_counter_ns: _clock(time.perf_counter_ns, lambda now: _nanoseconds(ORIGIN) + _nanoseconds(now)),
    time.time_ns: _clock(time.time_ns, lambda now: _nanoseconds(EPOCH) + _nanoseconds(now)),
    threading.Lock: _made_by(threading.Lock, SimulatedLock),
    _thread.allocate_lock: _made_by(_thread.allocate_lock, SimulatedLock),
    threading.RLock: _made_by(threading.RLock, SimulatedRLock),
    os.eventfd_write: _write_eventfd,
    queue.SimpleQueue: _made_by(queue.SimpleQueue, SimulatedQueue),
    threading.current_thread: _thread_of_caller,
    torch.futures.wait_all: _wait_all,
}
_METHODS: tuple[tuple[Any, str, Any], ...] = (
    (_Thread, "start", _start_thread),
    (_Thread, "join", _join_thread),
    (_Thread, "is_alive", _is_thread_alive),
    (Clock, "wait", _wait_for_descriptors),
    (torch.futures.Future, "wait", _wait_for_future),
)
_OF_PYTHON = (
    "os",
    "threading",
    "queue",
    "time",
    "concurrent.futures._base",
    "concurrent.futures.thread",
    "torch.futures",
)
"""Modules of Python and torch in which names are replaced, beside those of this library and of the program."""


_LIBRARY, _SIMULATION = __name__.partition(".")[0], __name__.rpartition(".")[0]
_listed: list[list[str]] = [[], []]
"""Names of all modules of the process, and of those in which names are replaced."""
_found: dict[ModuleType, tuple[int, tuple[str, ...]]] = {}
"""Names to replace in modules other than the program's, with the number of names that the module had."""


def _modules() -> Sequence[ModuleType]:
    """Return the modules in which names are replaced, apart from the program's; chosen again once others are loaded."""
    if _listed[0] != (names := [*sys.modules]):
        own = [name for name in names if name.startswith(_LIBRARY) and not name.startswith(_SIMULATION)]
        _listed[:] = names, [name for name in (*_OF_PYTHON, *own) if name in sys.modules]
    return [sys.modules[name] for name in _listed[1]]


def _names(module: ModuleType) -> tuple[str, ...]:
    """Return the names of a module that hold a function to replace, or are called like one."""
    return tuple(name for name, value in vars(module).items() if id(value) in _FUNCTION_IDS or name in _FUNCTION_NAMES)


def _places(programs: Sequence[ModuleType]) -> Iterator[tuple[ModuleType, str]]:
    """Yield modules and the names of theirs to replace, if they hold such a function now.

    To look at each name of 180 modules would take longer than the ranks of a small world need to start. So a module
    is looked at again only when it has more names or fewer.
    """
    for module in _modules():
        found = _found.get(module)
        if found is None or found[0] != len(vars(module)):
            found = _found[module] = len(vars(module)), _names(module)
        for name in found[1]:
            yield module, name
    for module in programs:
        if module not in _found:
            for name in _names(module):
                yield module, name


@contextmanager
def installed(programs: Sequence[ModuleType] = ()) -> Iterator[None]:
    """Replace Python's locks, queues, threads and clocks in the block.

    Args:
        programs: Modules of the program, in which names that they have imported are replaced too.
    """
    replaced: list[tuple[Any, str, Any]] = []

    def replace(where: Any, name: str, value: Any) -> None:
        replaced.append((where, name, getattr(where, name)))
        setattr(where, name, value)

    try:
        for module, name in _places(programs):
            if id(value := vars(module).get(name)) in _FUNCTION_IDS:
                replace(module, name, _FUNCTIONS[value])
        for owner, name, value in _METHODS:
            replace(owner, name, value)
        for path, seconds in _SLICES.items():
            replace(import_module(f"torchdist_ref.{path}"), "CHECK_SECONDS", seconds)
        replace(import_module("torchdist_ref.transports.link"), "_WAITING_EXPIRES_SECONDS", NEVER)
        yield
    finally:
        for where, name, value in reversed(replaced):
            setattr(where, name, value)
        _at_descriptors.clear()
        _forget_workers()


def _forget_workers() -> None:
    """Remove simulated workers of executors from the threads that Python joins when it exits: they have never run."""
    workers: Any = concurrent.futures.thread._threads_queues  # noqa: SLF001 (no other name)
    for thread in [*workers]:
        if hasattr(thread, _TASK):
            del workers[thread]


_FUNCTION_IDS = frozenset(map(id, _FUNCTIONS))
_FUNCTION_NAMES = frozenset(function.__name__ for function in _FUNCTIONS)
