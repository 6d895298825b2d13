"""One run of a simulation: starts the ranks, applies the plan, watches over waits in vain, and concludes."""

from __future__ import annotations

import contextvars
import gc
import linecache
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from time import monotonic as real_monotonic
from types import FrameType
from typing import Any

import torch

from torchdist_ref import groups
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, RankStalledError, add_note, explain, rank_names
from torchdist_ref.groups import world as worlds
from torchdist_ref.ranks.outcomes import Outcome, RankError, RankTimeoutError, values_or_error
from torchdist_ref.simulation.faults import Cut, Delay, EndHost, EndStore, Fault, Kill, Slow, Stop, check_all
from torchdist_ref.simulation.network import Network, Wires
from torchdist_ref.simulation.primitives import building, installed
from torchdist_ref.simulation.refusals import SIMULATED_BACKENDS, refuse_backend, refuse_many_ranks, refusing
from torchdist_ref.simulation.result import BlockedOutsideError, DeadlockError, SimulatedRun
from torchdist_ref.simulation.scheduler import Policy, Scheduler, Task, current_task
from torchdist_ref.simulation.store import SimulatedStore, stores_of
from torchdist_ref.simulation.world import SimulatedWorld, transport

_one_at_a_time = threading.Lock()
"""Held during a run, which replaces names of modules."""
PROGRESS_SECONDS = 1.0
"""Real time between reports of progress."""
STUCK_SECONDS = 8.0
"""Real time after which a rank that neither computes nor reaches an operation is blocked outside the simulation."""
_PACKAGE, _SIMULATION = __name__.split(".")[0], __name__.rpartition(".")[0]


def simulated_store() -> SimulatedStore:
    """Return the store of the run that the calling rank is in.

    Raises:
        ArgumentError: The caller is not a simulated rank.
    """
    return _of_caller("simulated_store")[0].store


def simulated_operations() -> int:
    """Return the number of operations of the calling rank so far, as `Kill` counts them.

    A program that returns it before and after a call tells which operations belong to the call.

    Raises:
        ArgumentError: The caller is not a simulated rank.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref import simulation
        >>> def program(rank):
        ...     before = simulation.simulated_operations()
        ...     dist.barrier()
        ...     return simulation.simulated_operations() > before
        >>> simulation.run(program, 2).values
        [True, True]
    """
    run, task = _of_caller("simulated_operations")
    return run.operations[task.owner]


def _of_caller(function: str) -> tuple[OneRun, Task]:
    found, task = _run_of_rank.get(), current_task()
    if found is None or task is None:
        raise ArgumentError(explain(function, "caller", "a rank of simulation.run", "none"))
    return found, task


_run_of_rank: contextvars.ContextVar[OneRun | None] = contextvars.ContextVar("run of a simulated rank", default=None)


class OneRun:
    """One run: its ranks, their outcomes, and what the plan does to them."""

    def __init__(
        self,
        fn: Callable[..., Any],
        world_size: int,
        args: tuple[object, ...],
        seed: int,
        network: Network | None,
        compute: float | str | Sequence[float],
        faults: Sequence[Fault],
        timeout: float | None,
        backend: str | None,
        init: bool,
        decisions: dict[int, int] | None,
        made: dict[int, int] | None = None,
        progress: Callable[[float, int], None] | None = None,
    ) -> None:
        _check(fn, world_size, network, compute, backend, timeout)
        _check_order(seed, decisions, progress)
        hosts = range(world_size) if network is None or network.hosts is None else network.hosts
        check_all(faults, world_size, {0} if network is None else set(hosts))
        self.fn, self.size, self.args, self.seed, self.timeout = fn, world_size, args, seed, timeout
        self.backend, self.init, self.faults = backend, init, faults
        self.progress, self._reported = progress, real_monotonic()
        self.policy = Policy(seed or None, decisions)
        if made is not None:
            self.policy.made = made
        self.scheduler = Scheduler(self.policy, float(compute) if isinstance(compute, int | float) else 1.0)
        self.computed: list[float] = []
        recorded = not isinstance(compute, int | float | str)
        self.recorded: Sequence[float] | None = compute if recorded else None  # type: ignore[assignment]
        self.wires = Wires(network or Network(0.0, 0.0, 0.0, (0,) * world_size, 0.0, 0.0), world_size)
        self.world = SimulatedWorld(self.scheduler, self.wires, world_size)
        self.timeline = self.world.timeline
        self.outcomes: dict[int, Outcome] = {}
        self.times = [0.0] * world_size
        self.operations = [0] * world_size
        self.main: list[Task] = []
        self.deadlock = ""
        self._steps, self._seen_steps, self._since = 0, -1, real_monotonic()
        self._activity = -1
        self._next_collection = self._next_full_collection = _STEPS_PER_COLLECTION
        self._planned: dict[tuple[int, int], list[Fault]] = {}
        self._came: list[Fault] = []

    # The run

    def result(self) -> SimulatedRun:
        """Run, and return the result or raise the error that names the rank to look at."""
        if current_task() is not None:
            hint = "A simulation cannot start another one."
            expected = "outside of a simulation"
            raise ArgumentError(explain("simulation.run", "caller", expected, "a simulated rank", hint=hint))
        with _one_at_a_time:
            self._run()
        return self._conclude()

    def _run(self) -> None:
        scheduler = self.scheduler
        # A new thread computes on all cores, and may get other bits then.
        scheduler.on_task_start = lambda: torch.set_num_threads(1)
        scheduler.on_step, scheduler.on_quiet, scheduler.on_task_error = self._step, self._quiet, self._task_raised
        scheduler.on_computed = self._compute
        program = sys.modules.get(getattr(self.fn, "__module__", None) or "")
        programs = [program] if program else []
        with (
            _collected_at_fixed_points(),
            _one_thread(),
            refusing(),
            installed(programs),
            stores_of(self.world),
            transport(self.world),
        ):
            with building(scheduler):
                self.store = SimulatedStore(self.world)
            for rank in range(self.size):
                context = contextvars.copy_context()
                self.main.append(scheduler.spawn(rank, f"rank {rank}", partial(context.run, self._rank, rank)))
            for fault in self.faults:
                if fault.at is not None:
                    scheduler.at(fault.at, partial(self._apply, fault))
                else:
                    rank = fault.host if isinstance(fault, EndHost) else fault.ranks[0]
                    self._planned.setdefault((rank, fault.operation), []).append(fault)
            if self.timeout is not None:
                scheduler.at(self.timeout, scheduler.stop_run)
            try:
                scheduler.run(self._watch)
            finally:
                self._forget()

    def _forget(self) -> None:
        """Drop what refers to the groups of the ranks: as cycles of a run they would live long, with megabytes each."""
        world = self.world
        left: tuple[Any, ...] = (
            self.main,
            self.scheduler.tasks,
            world.on_death,
            world.held,
            world.segments,
            world.ends,
        )
        for each in left:
            each.clear()
        self.scheduler.forget_events()
        del self.store

    def _rank(self, rank: int) -> None:
        self.world.place(rank)
        _run_of_rank.set(self)
        try:
            with worlds.thread_rank():
                outcome = self._program(rank)
        except Exception as error:
            outcome = Outcome(rank, error=error)
        self.outcomes[rank], self.times[rank] = outcome, self.scheduler.now
        kind, facts = ("raised", (type(outcome.error).__name__,)) if outcome.error else ("returned", ())
        self.timeline.add(self.scheduler.now, rank, kind, *facts)

    def _program(self, rank: int) -> Outcome:
        try:
            if self.init:
                groups.init_process_group(self.backend, store=self.store, rank=rank, world_size=self.size)
            value = self.fn(rank, *self.args)
            if groups.is_initialized():
                groups.destroy_process_group()
        except Exception as error:
            outcome = Outcome(rank, error=error)
            # The others may be waiting for this rank, which makes no more calls.
            worlds.abort(f"rank {rank} {outcome}")
            return outcome
        return Outcome(rank, value)

    def _compute(self, seconds: float) -> float:
        """Return the time of a computation: that of the record, or the measured one."""
        if self.recorded is not None:
            if len(self.computed) == len(self.recorded):
                expected = "the record of a run with the same program, ranks, network, faults and seed"
                got = f"a record of {len(self.recorded)} computations, and there are more"
                raise ArgumentError(explain("simulation.run", "compute", expected, got))
            seconds = self.recorded[len(self.computed)]
        self.computed.append(seconds)
        return seconds

    # The plan

    def _step(self, task: Task) -> None:
        rank = task.owner
        self.operations[rank] = number = self.operations[rank] + 1
        self._steps += 1
        if self._steps == self._next_collection:
            self._collect()
        if self._planned:
            for fault in self._planned.get((rank, number), ()):
                self._apply(fault)

    def _collect(self) -> None:
        """Collect what has become garbage since the last time; everything when a run has become twice as long."""
        is_full = self._steps >= self._next_full_collection
        gc.collect(2 if is_full else 0)
        self._next_collection += _STEPS_PER_COLLECTION
        if is_full:
            self._next_full_collection *= 2

    def _apply(self, fault: Fault) -> None:
        scheduler, rank = self.scheduler, fault.ranks[0] if fault.ranks else 0
        self._came.append(fault)
        if isinstance(fault, Kill):
            if rank not in self.outcomes:
                self.world.kill(rank)
        elif isinstance(fault, Slow):
            scheduler.slow[rank] = fault.factor
        elif isinstance(fault, Stop):
            self.timeline.add(scheduler.now, rank, "stopped")
            scheduler.stop(rank)
            if fault.seconds is not None:
                scheduler.at(scheduler.now + fault.seconds, partial(self._continue, rank))
        elif isinstance(fault, EndStore):
            self.timeline.add(scheduler.now, rank, "store ended")
            self.store.end()
        elif isinstance(fault, EndHost):
            self._end_host(fault)
        elif isinstance(fault, Delay):
            self.timeline.add(scheduler.now, rank, "delayed")
            self._lengthen(fault, fault.longer)
            if fault.seconds is not None:
                scheduler.at(scheduler.now + fault.seconds, partial(self._lengthen, fault, -fault.longer))
        elif isinstance(fault, Cut):
            self.timeline.add(scheduler.now, rank, "cut off")
            self.wires.cut_off(fault.some, set(range(self.size)) - set(fault.some))
            if fault.seconds is not None:
                scheduler.at(scheduler.now + fault.seconds, partial(self._heal, fault))

    def _end_host(self, fault: EndHost) -> None:
        for ended in self.world.end_host(fault.host):
            self.timeline.add(self.scheduler.now, ended, "killed")
            if ended == 0:
                self.store.end()

    def _lengthen(self, fault: Delay, seconds: float) -> None:
        self.wires.lengthen(fault.some, set(range(self.size)) - set(fault.some), seconds)

    def _continue(self, rank: int) -> None:
        self.timeline.add(self.scheduler.now, rank, "continues")
        self.scheduler.go_on(rank)

    def _heal(self, fault: Cut) -> None:
        self.timeline.add(self.scheduler.now, fault.ranks[0], "connected again")
        self.wires.cut.clear()
        held, self.world.held = self.world.held, []
        for _, _, arrive in held:
            arrive()

    # Waits in vain

    def _quiet(self) -> None:
        """Note who waits for whom, when only time-outs are left; have the waits look once before that."""
        if self._activity != self.scheduler.activity:
            self._activity = self.scheduler.activity
            self.scheduler.alarm()
        elif self.deadlock:
            # A wait has looked for failures, and found none.
            return
        if not self.scheduler.can_continue:
            self.deadlock = self.deadlock or self._who_waits()
            self.world.share_waits()

    def _who_waits(self) -> str:
        """Return which rank waits for which others, in which call, as text; empty if no rank waits."""
        lines, awaited = [], {}
        for task in self.main:
            if task.ident and not task.has_ended and not self.scheduler.is_dead(task.owner):
                frame = task.frame
                awaited[task.owner] = ranks = self.world.awaited_by(task.owner, task.waits_for, frame)
                awaits = rank_names(ranks) if ranks else task.purpose or str(task.waits_for)
                lines.append(f"rank {task.owner} waits for {awaits} in {_place(frame)}")
        if not lines:
            return ""
        cycle = _cycle(awaited)
        circle = f" in a circle ({' → '.join(map(str, cycle))})" if cycle else ""
        more = [f"and {len(lines) - _MOST_LINES} more ranks"] if len(lines) > _MOST_LINES else []
        return "\n  ".join(
            [
                f"{circle}, and nothing else can happen, after {self.scheduler.now:g} s of virtual time:",
                *lines[:_MOST_LINES],
                *more,
            ]
        )

    def _task_raised(self, task: Task, text: str) -> None:
        self.outcomes.setdefault(task.owner, Outcome(task.owner, died=f"thread {task.name!r} raised:\n{text}"))

    # From outside

    def _watch(self) -> None:
        """Report progress, and raise if the running rank is blocked in something that is not simulated."""
        task, now = self.scheduler.current, real_monotonic()
        if self.progress is not None and now > self._reported + PROGRESS_SECONDS:
            self._reported = now
            self.progress(self.scheduler.now, len(self.outcomes))
        mark = self._steps + self.scheduler.switches + (_cpu_ticks(task.native_id) if task else 0)
        if mark != self._seen_steps:
            self._seen_steps, self._since = mark, now
        elif task is not None and now > self._since + STUCK_SECONDS:
            frame = task.frame
            stack = "".join(traceback.format_stack(frame)) if frame else ""
            raise BlockedOutsideError(
                f"rank {task.owner} has been blocked for {STUCK_SECONDS:g} s in something that is not simulated, "
                f"{_innermost(frame)}, in {_place(frame)}. Sockets, processes, C++ and threads that a rank did not "
                f"start have no virtual time.\n{stack}",
                task.owner,
            )

    def _conclude(self) -> SimulatedRun:
        """Return the result, or raise the error of the rank to look at. The plan's deaths are not failures."""
        killed = {rank for rank in range(self.size) if self.scheduler.is_dead(rank)}
        outcomes = {rank: outcome for rank, outcome in self.outcomes.items() if rank not in killed}
        left = [rank for rank in range(self.size) if rank not in outcomes and rank not in killed]
        failed = [outcome for outcome in outcomes.values() if outcome.failed]
        try:
            if self.deadlock and (left or any(isinstance(each.error, RankStalledError) for each in failed)):
                text = f"ranks wait for each other{self.deadlock}"
                raise DeadlockError(text, min(left, default=0), outcomes) from next(
                    (each.error for each in failed), None
                )
            if left and not failed:
                reason = (
                    f"did not return within {self.timeout:g} s of virtual time" if self.timeout else "cannot continue"
                )
                raise RankTimeoutError(f"{rank_names(left)} of {self.size} {reason}", left[0], outcomes)
            found = {**outcomes, **{rank: Outcome(rank) for rank in (*left, *killed)}}
            values = values_or_error(found, {}, self.size, self.timeout or 0.0)
        except RankError as error:
            add_note(error, f"To repeat it: simulation.run(..., seed={self.seed})")
            raise
        came = tuple(fault for fault in self.faults if fault in self._came)
        facts = self.timeline, self.scheduler.order.hexdigest(), self.seed, self.policy.made, self.operations, came
        return SimulatedRun(values, self.times, *facts, self.scheduler.switches, tuple(self.computed))


_STEPS_PER_COLLECTION = 200_000
_MOST_LINES = 16
"""Ranks that the report of a deadlock lists."""


def _check(fn: Any, world_size: Any, network: Any, compute: Any, backend: Any, timeout: Any) -> None:
    operation = "simulation.run"
    if not callable(fn):
        raise ArgumentTypeError(explain(operation, "fn", "callable", fn))
    if type(world_size) is not int or world_size < 1:
        raise ArgumentError(explain(operation, "world_size", "a number of ranks, at least 1", world_size))
    refuse_many_ranks(world_size)
    if network is not None and not isinstance(network, Network):
        raise ArgumentTypeError(explain(operation, "network", "a simulation.Network", network))
    if network is not None and network.hosts is not None and len(network.hosts) != world_size:
        expected = f"one host for each of {world_size} ranks"
        raise ArgumentError(explain(operation, "network.hosts", expected, network.hosts))
    recorded = isinstance(compute, Sequence) and not isinstance(compute, str | bytes)
    if compute != "measured" and not all(map(_is_factor, compute if recorded else [compute])):
        expected = "a factor of 0 or more, 'measured', or the `computed` of an earlier run"
        raise ArgumentError(explain(operation, "compute", expected, compute))
    if backend is not None and backend not in SIMULATED_BACKENDS:
        refuse_backend(backend)
    if timeout is not None and not (_is_factor(timeout) and timeout > 0):
        raise ArgumentError(explain(operation, "timeout", "a positive number of virtual seconds", timeout))


def _check_order(seed: Any, decisions: Any, progress: Any) -> None:
    operation = "simulation.run"
    if type(seed) is not int:
        raise ArgumentTypeError(explain(operation, "seed", "an int", seed))
    if decisions is not None and not isinstance(decisions, Mapping):
        raise ArgumentTypeError(explain(operation, "decisions", "the `decisions` of an earlier run", decisions))
    if progress is not None and not callable(progress):
        raise ArgumentTypeError(explain(operation, "progress", "callable", progress))


def _is_factor(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < inf


@contextmanager
def _collected_at_fixed_points() -> Iterator[None]:
    """Collect cyclic garbage at fixed points only: finalizers are operations, and have to come in one order.

    Objects that were there before are left alone. To look at those of a large program would take longer than the run.
    """
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        # Now, while only objects of this run are looked at: the next freeze would put off its garbage for long.
        gc.collect()
        gc.unfreeze()
        if enabled:
            gc.enable()


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _place(frame: FrameType | None) -> str:
    """Return the library's function that a program has called, and the line of the program."""
    called, found = "", frame
    while found is not None:
        module = found.f_globals.get("__name__", "").split(".")[0]
        if found.f_globals.get("__name__", "").startswith(_SIMULATION):
            pass
        elif module == _PACKAGE:
            called = found.f_code.co_name
        elif module not in sys.stdlib_module_names and module != "torch":
            where = f"{found.f_code.co_filename}:{found.f_lineno}"
            return f"{called} at {where}" if called else where
        found = found.f_back
    return called or "the library"


def _innermost(frame: FrameType | None) -> str:
    """Return the line of code at which a thread waits."""
    if frame is None:
        return "nobody knows where"
    code, line = frame.f_code, linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return f"at `{line}` of {code.co_qualname} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"


def _cycle(awaited: dict[int, list[int]]) -> list[int]:
    """Return ranks of which each waits for the next, and the last for the first; empty if there are none."""
    for first in sorted(awaited):
        chain = [first]
        while len(following := awaited.get(chain[-1], [])) == 1:
            if following[0] in chain:
                return [*chain[chain.index(following[0]) :], following[0]]
            chain.append(following[0])
    return []


def _cpu_ticks(native_id: int) -> int:
    """Return the processor time of a thread of this process, in ticks of the system; 0 where it is not known."""
    try:
        with open(f"/proc/self/task/{native_id}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])
    except OSError:
        return 0
