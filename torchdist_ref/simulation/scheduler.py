"""Scheduler of a simulation: threads of which one runs at a time, on virtual time, in an order that one seed decides.

Each rank is a thread of this process, and so is each thread that a rank starts. They are *tasks*: a task runs only
while it has the baton. At each blocking point (a lock, a queue, a semaphore, a wait in a store, a sleep) it passes the
baton on, and the scheduler decides which task continues. So no two tasks ever run at the same time, and nothing
depends on the operating system's scheduler.

Time is virtual. While a task can run, no time passes, but for what the network and computation are said to cost. When
no task can run, the time jumps to the next event: the end of a sleep, the arrival of a message, a fault of the plan,
or at last a time-out. If only time-outs are left, no rank can come further by itself: that is a deadlock, and it is
noted (`on_quiet`) before the first time-out runs. If nothing at all is left, the run ends there.

Each place where more than one continuation is possible is a *decision*, counted from 0. The decision 0 is the plain
order: the running task goes on, and of the waiting ones the first continues. A policy makes the others from a seed, or
from a list, so that a run can be repeated and shortened.

Everything here runs with the baton, so it needs no locks. Do not add knowledge of ranks' programs or of networks here.
"""

from __future__ import annotations

import _thread
import heapq
import random
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from math import inf, nextafter
from time import monotonic as real_monotonic
from time import thread_time
from types import FrameType
from typing import Any, NoReturn

from torchdist_ref.simulation.generators import Generators

EVENT, TIMEOUT, CHECK = 0, 1, 2
"""Kinds of entries in the queue of times. Time-outs are not progress: where only they are left, ranks wait in vain. The
time-out of a wait that only looks for failures and goes on is a check."""
FAR_SECONDS = 1.0e7
"""Virtual seconds from now after which a time-out counts as none: four months."""
_PREEMPTION = 0.05
"""Share of the points at which a task could go on where a random policy lets another one continue."""
Decisions = Mapping[int, int]
"""Choices other than 0, by the number of the decision."""


class SimulationEnded(BaseException):
    """The run is over: ends the threads of ranks that are still in it, after everything that counts has happened."""


class Policy:
    """Source of decisions.

    Args:
        seed: Seed of random decisions; None for none.
        decisions: Decisions of an earlier run to repeat; all others are 0.

    Attributes:
        is_plain: Whether all decisions are 0.
        made: Decisions of this run that were not 0.
    """

    def __init__(self, seed: int | None = None, decisions: Decisions | None = None) -> None:
        self._random = None if seed is None or decisions is not None else random.Random(seed)
        self._repeated = decisions
        self.is_plain = self._random is None and not decisions
        self._count = 0
        self.made: dict[int, int] = {}

    def choose(self, count: int, stay: float = 0.0) -> int:
        """Return one of `count` continuations.

        Args:
            count: Number of continuations, at least 2.
            stay: Probability of the continuation 0, apart from its share among all.
        """
        number, self._count = self._count, self._count + 1
        if self._random is not None:
            chosen = 0 if stay and self._random.random() < stay else self._random.randrange(count)
        else:
            chosen = min((self._repeated or {}).get(number, 0), count - 1)
        if chosen:
            self.made[number] = chosen
        return chosen


class Task:
    """One thread of a simulation.

    Attributes:
        scheduler: Scheduler of the simulation.
        owner: Rank that the thread belongs to.
        name: Name of the thread.
        thread: Thread object that `threading.current_thread` returns.
        ident: Identifier of the thread of the operating system; 0 before it runs.
        native_id: The system's number of it.
        waits_for: Object or text that the task waits for, for reports; None while it can run.
        purpose: Description of its wait for reports, where `waits_for` says too little; empty otherwise.
        uncached: Part of the call that the task is in which memory limits.
        calls: Number of calls of the library that the task is in: their processor time is not computation.
        alarmed: Whether something has changed that a wait has to look at again.
        watched: Kind of the time-out of the next wait in the store if it is one that looks for failures; None if not.
        has_ended: Whether its function has returned.
        joiners: Tasks that wait for its end.
    """

    def __init__(self, scheduler: Scheduler, owner: int, name: str, run: Callable[[], object]) -> None:
        self.scheduler, self._run = scheduler, run
        self.owner, self.name = owner, name
        # Never started: it is what the program sees as its thread.
        self.thread = threading.Thread(name=name, daemon=True)
        self.ident = self.native_id = 0
        self.baton = _thread.allocate_lock()
        self.baton.acquire()
        self.waits_for: Any = None
        self.purpose = ""
        self.alarmed = self.has_ended = False
        self.watched: int | None = None
        self.joiners: list[Task] = []
        # The number of the wait that the task is in tells its time-out from those of earlier waits.
        self.wait_number = 0
        self.result = False
        self.alarmable = 0
        self.cpu = 0.0
        self.uncached, self.calls = 0.0, 0
        self._started = False

    def resume(self) -> None:
        """Hand the baton to this task; its thread starts with the first time."""
        if self._started:
            self.baton.release()
            return
        self._started = True
        _thread.start_new_thread(self._bootstrap, ())

    def _bootstrap(self) -> None:
        self.ident, self.native_id = _thread.get_ident(), _thread.get_native_id()
        TASKS[self.ident] = self
        self.scheduler.on_task_start()
        self.cpu = thread_time()
        try:
            self._run()
        except SimulationEnded:
            pass
        except BaseException:
            self.scheduler.on_task_error(self, traceback.format_exc())
        finally:
            del TASKS[self.ident]
            self.has_ended = True
            self.scheduler.end_task(self)

    @property
    def frame(self) -> FrameType | None:
        """Frame in which the thread is."""
        return sys._current_frames().get(self.ident)  # noqa: SLF001 (the documented name)


TASKS: dict[int, Task] = {}
"""Tasks of all running simulations, by the identifier of their threads."""


def current_task() -> Task | None:
    """Return the task of the calling thread; None if it belongs to no simulation."""
    return TASKS.get(_thread.get_ident())


class Scheduler:
    """Baton, virtual time and queue of events of one run.

    Args:
        policy: Source of decisions.
        compute: Virtual seconds for each second of processor time that a task uses; 0 for computation that takes none.

    Attributes:
        now: Virtual time in seconds.
        current: Task with the baton.
        on_quiet: Function to call when only time-outs are left.
        on_task_start: Function to call on the thread of each task, when it starts.
        on_step: Function to call with the running task before each operation that others can notice.
        on_task_error: Function that gets a task that raised, and the traceback as text.
        on_computed: Function that returns the time of a computation, from the time that was measured.
        is_over: Whether the run has ended, so that tasks which are still there have to leave.
        switches: Number of times that the baton has changed hands.
        activity: Number of messages, of sleeps of programs, and of time-outs. A look for failures is none of these.
        order: Digest of the order in which ranks had the baton.
        slow: Factor of the time that computation takes, by rank.
        occupy: Function that returns when a rank's processor has done some work, from the rank and the seconds.
    """

    def __init__(self, policy: Policy, compute: float = 0.0) -> None:
        self.policy, self.compute = policy, compute
        self.now = 0.0
        self.current: Task | None = None
        self.tasks: list[Task] = []
        self._of_rank: dict[int, list[Task]] = {}
        self.on_quiet: Callable[[], None] = lambda: None
        self.on_task_start: Callable[[], None] = lambda: None
        self.on_step: Callable[[Task], None] = lambda task: None
        self.on_task_error: Callable[[Task, str], None] = lambda task, text: None
        self.on_computed: Callable[[float], float] = lambda seconds: seconds
        self.is_over = False
        self.switches = self.activity = 0
        self.order = sha256()
        self.slow: dict[int, float] = {}
        self.occupy: Callable[[int, float], float] = lambda owner, seconds: self.now + seconds
        self._ready: deque[Task] = deque()
        self._generators = Generators()
        self._held: dict[int, list[Task]] = {}
        self._dead: set[int] = set()
        self._events: list[tuple[float, int, int, Callable[[], object] | tuple[Task, int]]] = []
        self._sequence = 0
        self._pending = 0
        self._is_quiet = False
        self._over = _thread.allocate_lock()
        self._over.acquire()

    # Tasks

    def spawn(self, owner: int, name: str, run: Callable[[], object]) -> Task:
        """Add a task that can run. Its thread starts when it gets the baton first."""
        task = Task(self, owner, name, run)
        self.tasks.append(task)
        self._of_rank.setdefault(owner, []).append(task)
        self._make_ready(task)
        return task

    def end_task(self, task: Task) -> None:
        """Pass the baton on for the last time; called by the task's own thread."""
        for joiner in task.joiners:
            self.wake(joiner)
        if self.is_over:
            return
        self._pass_on(self._next())

    def _make_ready(self, task: Task) -> None:
        if task.owner in self._dead:
            return
        if task.owner in self._held:
            self._held[task.owner].append(task)
        else:
            self._ready.append(task)

    # Waiting

    def block(self, waits_for: Any, seconds: float | None = None, kind: int = TIMEOUT) -> bool:
        """Let others run until this task is woken; return the argument of `wake`, or False after the time-out.

        Args:
            waits_for: Description of the wait, for reports.
            seconds: Longest wait in virtual seconds; None for no limit.
            kind: Kind of this limit, `TIMEOUT` or `CHECK`.
        """
        task = self.running()
        task.waits_for, task.result = waits_for, False
        task.wait_number += 1
        if seconds is not None:
            self._push(self._after(seconds), kind, (task, task.wait_number))
        self._switch(task)
        return task.result

    def sleep(self, seconds: float) -> None:
        """Let so much virtual time pass for the calling task."""
        task = self.running()
        task.waits_for, task.result = f"{seconds:g} s to pass", False
        task.wait_number += 1
        number = task.wait_number

        def end() -> None:
            if task.wait_number == number:
                self.wake(task)

        self.at(self._after(seconds), end)
        self._switch(task)

    def _after(self, seconds: float) -> float:
        """Return the time after so many seconds: later than now, however few, so that a wait for the rest ends."""
        return max(self.now + seconds, nextafter(self.now, inf)) if seconds > 0 else self.now

    def wake(self, task: Task, result: bool = True) -> None:
        """Let a blocked task continue; without effect on one that is not."""
        if task.waits_for is not None:
            task.waits_for, task.result = None, result
            self._make_ready(task)

    def alarm(self, owner: int | None = None) -> None:
        """Have the waits of a rank, or of all ranks, look again for a reason to end."""
        for task in self.tasks if owner is None else self._of_rank.get(owner, ()):
            task.alarmed = True
            if task.alarmable:
                self.wake(task, False)

    def step(self) -> None:
        """Note an operation that other ranks can notice: time for computation, for a fault, or for another task.

        If the run ends meanwhile, the operation still takes place: it may be one that closes what the task holds.
        """
        self.step_of(self.running())

    def step_of(self, task: Task, is_noticed: bool = True) -> None:
        """Do the same for the running task, which the caller has looked up.

        Args:
            task: The task.
            is_noticed: Whether other ranks can notice what follows. The locks and queues of a rank are its own: another
                of its threads may come first, but a death before one is a death before the next operation.
        """
        if task is not self.current:
            self._refuse()
        # By far the most frequent call of a run: a context manager would double its time.
        try:
            if self.compute:
                self.charge(task)
            if is_noticed:
                self.on_step(task)
            if self.is_over or task.owner in self._dead or task.owner in self._held:
                self._set_aside(task)
            elif self._ready and not self.policy.is_plain:
                self._let_another_continue(task)
        except SimulationEnded:
            pass

    def _let_another_continue(self, task: Task) -> None:
        chosen = self.policy.choose(len(self._ready) + 1, stay=1 - _PREEMPTION)
        if chosen:
            following = self._ready[chosen - 1]
            del self._ready[chosen - 1]
            self._ready.append(task)
            self._hand_over(task, following)

    def work(self, seconds: float) -> None:
        """Let the virtual time pass that some work of the calling task's rank takes, once its processor is free."""
        if seconds > 0:
            task = self.running()
            end = self.occupy(task.owner, seconds * self.slow.get(task.owner, 1.0))
            self.sleep(end - self.now)

    def charge(self, task: Task) -> None:
        """Let the virtual time pass that a task has computed since it was charged last."""
        used = thread_time() - task.cpu
        if not task.calls:
            self.work(self.on_computed(used * self.compute))
        task.cpu = thread_time()

    @contextmanager
    def in_call(self, task: Task) -> Iterator[None]:
        """Count the processor time of the block as the library's, not as computation."""
        if self.compute:
            self.charge(task)
        task.calls += 1
        try:
            yield
        finally:
            task.calls -= 1
            if self.compute:
                task.cpu = thread_time()

    def _set_aside(self, task: Task) -> None:
        """Take the baton from a task whose rank was killed or stopped just now."""
        if task.owner in self._held:
            self._held[task.owner].append(task)
        task.waits_for = None
        self._switch(task)

    # Times

    def at(self, time: float, event: Callable[[], object]) -> None:
        """Call a function at a time; of equal times, in the order of these calls."""
        self._pending += 1
        self._push(time, EVENT, event)

    def _push(self, time: float, kind: int, what: Callable[[], object] | tuple[Task, int]) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (time, self._sequence, kind, what))

    def forget_events(self) -> None:
        """Drop what would still happen; for a run that is over."""
        self._events.clear()
        self._ready.clear()
        self._held.clear()

    # Ranks

    def kill(self, owner: int) -> None:
        """Let no task of a rank run any more. Its threads stay where they are until the run ends."""
        self._dead.add(owner)
        self._held.pop(owner, None)
        self._ready = deque(task for task in self._ready if task.owner != owner)
        for task in self.tasks:
            if task.owner == owner:
                task.waits_for = None

    def stop(self, owner: int) -> None:
        """Let no task of a rank run until `go_on`."""
        self._held[owner] = [task for task in self._ready if task.owner == owner]
        self._ready = deque(task for task in self._ready if task.owner != owner)

    def go_on(self, owner: int) -> None:
        """Let the tasks of a stopped rank run again."""
        self._ready.extend(self._held.pop(owner, ()))

    @property
    def can_continue(self) -> bool:
        """Whether a task can run now."""
        return bool(self._ready)

    def is_dead(self, owner: int) -> bool:
        """Return whether a rank was killed."""
        return owner in self._dead

    # The baton

    def running(self) -> Task:
        """Return the task with the baton, which is the caller."""
        task = self.current
        if task is None or task.ident != _thread.get_ident():
            self._refuse()
        if self.is_over:
            raise SimulationEnded
        return task

    def _refuse(self) -> NoReturn:
        if self.is_over:
            raise SimulationEnded
        raise RuntimeError(
            f"thread {threading.current_thread().name!r} is not part of the simulation, and uses a lock or queue of a "
            f"rank. Start it in the program of a rank."
        )

    def _switch(self, task: Task) -> None:
        """Give up the baton, and return when this task has it again."""
        if self.is_over:
            raise SimulationEnded
        self._hand_over(task, self._next())

    def _hand_over(self, task: Task, following: Task | None) -> None:
        if following is not task:
            self._pass_on(following)
            task.baton.acquire()
        self.current = task
        if self.is_over:
            raise SimulationEnded
        if self.compute:
            task.cpu = thread_time()

    def _pass_on(self, following: Task | None) -> None:
        self.current, self.switches = following, self.switches + 1
        if following is None:
            self.stop_run()
            return
        self.order.update(b"%d;" % following.owner)
        self._generators.change_to(following.owner)
        following.resume()

    def _next(self) -> Task | None:
        """Return the task that continues, after as many events as it takes; None if none ever can."""
        while not self.is_over:
            ready = self._ready
            if ready:
                self._is_quiet = False
                count = len(ready)
                chosen = 0 if count == 1 or self.policy.is_plain else self.policy.choose(count)
                if not chosen:
                    return ready.popleft()
                task = ready[chosen]
                del ready[chosen]
                return task
            if not self._pending and not self._is_quiet:
                self._drop_old_timeouts()
                self._is_quiet = True
                self.on_quiet()
                continue
            if not self._events or self._events[0][0] > self.now + FAR_SECONDS:
                return None
            self._next_event()
        return None

    def _next_event(self) -> None:
        time, _, kind, what = heapq.heappop(self._events)
        if isinstance(what, tuple):
            task, number = what
            if task.wait_number == number and task.waits_for is not None:
                self.now = max(self.now, time)
                self.activity += kind == TIMEOUT
                self.wake(task, False)
            return
        self._pending -= kind == EVENT
        self.now = max(self.now, time)
        what()

    def _drop_old_timeouts(self) -> None:
        """Forget the time-outs of waits that are over, so that those of real ones are all that is left."""

        def counts(entry: tuple[float, int, int, Any]) -> bool:
            task, number = entry[3]
            return bool(task.wait_number == number and task.waits_for is not None)

        self._events = [entry for entry in self._events if entry[2] == EVENT or counts(entry)]
        heapq.heapify(self._events)

    # The run, from outside

    def run(self, watch: Callable[[], None]) -> None:
        """Run until all tasks have ended, or none can continue. Called by a thread that is not a task.

        Args:
            watch: Function to call from time to time; what it raises ends the run.
        """
        first = self._next()
        if first is None:
            return
        self.current = first
        self._generators.change_to(first.owner)
        first.resume()
        stuck: Task | None = None
        try:
            while not self._over.acquire(timeout=_WATCH_SECONDS):
                watch()
        except Exception:
            # What `watch` says of the running task: it reacts to nothing.
            stuck = self.current
            raise
        finally:
            self.finish(stuck)
            self._generators.restore()

    def stop_run(self) -> None:
        """End the run: no task continues."""
        if not self.is_over:
            self.is_over = True
            self._over.release()

    def finish(self, stuck: Task | None = None) -> None:
        """End the threads that are left, one after the other. Their last operations reach nobody.

        Args:
            stuck: Task that does not end; it is left behind.
        """
        self.is_over = True
        end = real_monotonic() + END_SECONDS
        for task in self.tasks:
            if task.ident and not task.has_ended and task is not stuck:
                self.current = task
                if task.baton.locked():
                    task.baton.release()
                while not task.has_ended and real_monotonic() < end:
                    _pause()


_WATCH_SECONDS, END_SECONDS = 0.25, 5.0
_lock_of_pause = _thread.allocate_lock()
_lock_of_pause.acquire()


def _pause() -> None:
    """Wait a moment of real time; `time.sleep` may be the simulation's."""
    _lock_of_pause.acquire(timeout=0.0002)
