"""Workers of this host: what they run and how, and `LocalWorkers.run`, which starts and supervises them once.

A job on one host calls it for each attempt; an agent of a job on several hosts calls it after each rendezvous. This
module knows neither hosts nor restarts. Do not add the choice of ranks here: they come as an `Assignment`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from string import Template
from types import TracebackType
from typing import Any

from torchdist_ref.elastic.attempt import Assignment, AttemptOutcome, Exit, LogsDest
from torchdist_ref.errors import ArgumentError, advice_on_limit
from torchdist_ref.launcher import orphans, timers
from torchdist_ref.launcher.environment import Job, one_device, worker_environment
from torchdist_ref.launcher.logs import DefaultLogsSpecs, LogsSpecs, outputs, temporary_folder
from torchdist_ref.launcher.memory import OutOfMemoryKills
from torchdist_ref.launcher.supervision import Supervision
from torchdist_ref.launcher.supervisor import Interrupts, Supervisor
from torchdist_ref.launcher.worker import Worker, WorkerPlan

DEFAULT_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
SIGNALS_VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
# torch's: the time between asking workers to stop and killing them.
SHUTDOWN_SECONDS = 30


@dataclass(frozen=True)
class WorkerSettings:
    """Properties of the workers of a job that do not change from attempt to attempt.

    Attributes:
        entrypoint: Function, or executable.
        args: Its arguments; in texts, ``${local_rank}`` becomes the local rank.
        job: Name and role of the job, and its limit of restarts.
        logs_specs: Rule of log files. Default None: failure records only, in a temporary folder that is removed.
        start_method: Start method of a function: ``"spawn"`` and ``"forkserver"`` start a new interpreter, ``"fork"``
            copies this process.
        signals: Names of the signals to forward to the workers, with commas between them.
        shutdown_timeout: Time from asking workers to stop to killing them, in seconds.
        prefix: Template of the start of each line on the console; ``${role_name}``, ``${rank}``, ``${local_rank}`` and
            ``${hostname}`` are replaced. Default: none for streams without a file, ``[role local_rank]:`` as torch's
            for others.
        duplicate_stdout_filters: Texts; lines of standard output that contain one go to the filtered file too.
        duplicate_stderr_filters: The same for standard error.
        virtual_local_rank: Whether each worker sees only its own GPU and has LOCAL_RANK 0.
        cpus: Function that returns the processors of a local rank. Default None: all.
        own_descendants: Whether all descendants of this process are the job's, as in a launcher's own process.
    """

    entrypoint: Callable[..., Any] | str
    args: Sequence[Any] = ()
    job: Job = field(default_factory=Job)
    logs_specs: LogsSpecs | None = None
    start_method: str = "spawn"
    signals: str = DEFAULT_SIGNALS
    shutdown_timeout: float = SHUTDOWN_SECONDS
    prefix: str | None = None
    duplicate_stdout_filters: Sequence[str] = ()
    duplicate_stderr_filters: Sequence[str] = ()
    virtual_local_rank: bool = False
    cpus: Callable[[int], tuple[int, ...]] | None = None
    own_descendants: bool = False


class LocalWorkers:
    """Workers of this host, started once or more often. Use it in a ``with`` block, which ends what is left of them.

    Signals are caught from the construction to the end of the block, so that none is lost between two attempts:
    `interrupts` reports those that arrive then.

    Args:
        settings: Properties of the workers.
        log: Function that receives a line about each event. Default: none is reported.

    Attributes:
        settings: Properties of the workers.
        interrupts: Signals to this process. Its `socket` becomes readable when one has arrived.

    Example:
        >>> import os
        >>> from torchdist_ref.elastic.attempt import Assignment
        >>> with LocalWorkers(WorkerSettings(os.getenv, ["RANK"])) as workers:
        ...     outcome = workers.run(Assignment([2, 3], 4, "127.0.0.1", 29500, group_rank=1, group_world_size=2))
        >>> outcome.code, outcome.return_values
        (0, {0: '2', 1: '3'})
    """

    def __init__(self, settings: WorkerSettings, log: Callable[[str], None] = lambda line: None) -> None:
        self.settings = settings
        self._log = log
        self._signals = parse_signals(settings.signals)
        self._mark = uuid.uuid4().hex
        self._folder = Path(temporary_folder("torchdist_ref"))
        self._logs = settings.logs_specs or DefaultLogsSpecs(str(self._folder / "logs"))
        self._timers: timers.TimerServer | None = None
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, self._folder, ignore_errors=True)
            self._guard = orphans.Guard(self._mark, str(self._folder))
            undo.callback(self._guard.close)
            if settings.own_descendants:
                orphans.become_subreaper()
            if timers.is_enabled(os.environ):
                path = os.environ.get(timers.FILE) or str(self._folder / "timers")
                self._timers = timers.TimerServer(path, log)
            self.interrupts = Interrupts(self._signals, children=settings.own_descendants)
            undo.pop_all()
        self._running: Supervisor | None = None

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End processes that workers have started, restore signal handlers and remove temporary files."""
        self._end_orphans()
        if self._timers is not None:
            self._timers.close()
        self._guard.close()
        self.interrupts.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, assignment: Assignment, stop: int | None = None) -> AttemptOutcome:
        """Start all workers and supervise them until they have ended.

        When one fails, a signal arrives or `stop` becomes readable, the others are asked to stop and killed after the
        shutdown time-out. Processes that workers have started are killed last, whatever their group or session.

        Args:
            assignment: Ranks of the workers and address of their store. The number of global ranks is the number of
                workers.
            stop: Descriptor whose readability asks to stop, such as an eventfd that another thread writes when a host
                joins or leaves. The caller reads it empty before the next attempt. Default: none.

        Returns:
            The outcome.

        Raises:
            ArgumentError: A worker cannot be started: the entry point cannot be executed, or a limit is reached.
        """
        environments = {rank: self._environment(assignment, rank) for rank in range(len(assignment.global_ranks))}
        logs = self._logs.reify(environments)
        plans = [self._plan(assignment, rank, environments[rank], logs) for rank in environments]
        kills = OutOfMemoryKills()
        supervisor = self._running = Supervisor(
            plans,
            Supervision(self.settings.shutdown_timeout),
            log=self._log,
            interrupts=self.interrupts,
            stop=stop,
            on_child_end=self._reap_orphans if self.settings.own_descendants else None,
        )
        try:
            supervisor.run()
        except OSError as error:
            if len(supervisor.workers) == len(plans):
                raise
            raise ArgumentError(self._start_error(plans[len(supervisor.workers)].rank, error)) from error
        finally:
            self._running = None
            self._end_orphans()
        return self._outcome(supervisor, logs, assignment, kills)

    def _start_error(self, rank: int, error: OSError) -> str:
        """Return the message about a worker that cannot be started."""
        advice, target = advice_on_limit(error), self.settings.entrypoint
        if isinstance(error, BlockingIOError):
            return f"the launcher cannot start rank {rank}: {error.strerror}"
        if advice or error.filename not in (None, target):
            where = f"{error.filename}: " if error.filename not in (None, target) else ""
            return f"the launcher cannot start rank {rank}: {where}{error.strerror}. {advice}".rstrip()
        return f"{target!r} cannot be executed: {error.strerror}."

    def _environment(self, assignment: Assignment, rank: int) -> dict[str, str]:
        found = worker_environment(os.environ, assignment, rank, self.settings.job)
        found |= {orphans.MARK: self._mark, SIGNALS_VARIABLE: self.settings.signals}
        found |= {timers.FILE: self._timers.path} if self._timers is not None else {}
        return found | (one_device(os.environ, rank) if self.settings.virtual_local_rank else {})

    def _plan(self, assignment: Assignment, rank: int, environment: Mapping[str, str], logs: LogsDest) -> WorkerPlan:
        settings = self.settings
        global_rank = assignment.global_ranks[rank]
        words = {
            "role_name": settings.job.role,
            "rank": global_rank,
            "local_rank": rank,
            "hostname": os.uname().nodename,
        }
        prefix = None if settings.prefix is None else Template(settings.prefix).safe_substitute(words).encode()
        prefixes = (prefix or b"", f"[{settings.job.role}{rank}]:".encode() if prefix is None else prefix)
        filters = settings.duplicate_stdout_filters, settings.duplicate_stderr_filters
        stdout, stderr = outputs(logs, rank, prefixes, filters)
        args = [_substituted(arg, rank) for arg in settings.args]
        return WorkerPlan(
            global_rank,
            rank,
            environment,
            *self._start(rank, args),
            stdout,
            stderr,
            logs.error_files.get(rank, ""),
            settings.cpus(rank) if settings.cpus else (),
        )

    def _start(self, rank: int, args: Sequence[Any]) -> tuple[list[str], Callable[[], int] | None]:
        """Return the command line, or the function to call in a fork."""
        target = self.settings.entrypoint
        if isinstance(target, str):
            return [target, *map(str, args)], None
        # Only a job that runs a function needs pickle.
        from torchdist_ref.launcher import entrypoint

        if self.settings.start_method == "fork":
            return [], partial(entrypoint.run, self._folder, rank, lambda: (target, args))
        entrypoint.write_call(self._folder, rank, target, args)
        return entrypoint.command(self._folder, rank), None

    def _outcome(
        self, supervisor: Supervisor, logs: LogsDest, assignment: Assignment, kills: OutOfMemoryKills
    ) -> AttemptOutcome:
        keeps_records = self.settings.logs_specs is not None
        exits = {id(worker): _exit(worker, keeps_records, kills) for worker in supervisor.workers}
        first, end = supervisor.first_failure, supervisor.decisions
        values: dict[int, Any] = {}
        if not end.code and not end.stopped:
            values = dict.fromkeys(range(len(exits)))
            if callable(self.settings.entrypoint):
                from torchdist_ref.launcher import entrypoint

                values = {rank: entrypoint.result(self._folder, rank) for rank in values}
        return AttemptOutcome(
            end.code or 0,
            tuple(exits.values()),
            exits[id(first)] if first else None,
            end.signal,
            end.stopped,
            values,
            logs,
            assignment=assignment,
            cause_is_elsewhere=end.cause_is_elsewhere,
        )

    def _own_pids(self) -> set[int]:
        workers = self._running.workers if self._running else []
        return {self._guard.pid, *(worker.process.pid for worker in workers)}

    def _reap_orphans(self) -> None:
        """Reap orphans that have become children of this process and have ended."""
        own = self._own_pids()
        for pid in orphans.children(os.getpid()):
            if pid not in own:
                orphans.reap(pid)

    def _end_orphans(self) -> None:
        if self.settings.own_descendants:
            left = orphans.end_all(lambda: orphans.descendants(os.getpid(), {self._guard.pid}))
        else:
            left = orphans.end_all(lambda: [pid for pid in orphans.marked(self._mark) if pid != self._guard.pid])
        if left:
            self._log(f"processes {', '.join(map(str, left))} did not end; they may wait for a device or a file system")


def _substituted(arg: Any, local_rank: int) -> Any:
    return Template(arg).safe_substitute(local_rank=local_rank) if isinstance(arg, str) else arg


def _exit(worker: Worker, keeps_record: bool, kills: OutOfMemoryKills) -> Exit:
    plan, status = worker.plan, worker.process.status or 0
    return Exit(
        plan.rank,
        plan.local_rank,
        worker.process.pid,
        status,
        plan.error_file,
        keeps_record,
        plan.stderr.path if plan.stderr.path != os.devnull else "",
        any(relay.has_traceback for relay in worker.relays.values()),
        kills.explain_kill() if status == -signal.SIGKILL else "",
    )


def binding(numa_options: Any) -> Callable[[int], tuple[int, ...]] | None:
    """Return the function that binds a local rank to processors, if the options ask for it.

    Args:
        numa_options: Value with an attribute `affinity_mode`, or None.
    """
    if numa_options is None:
        return None
    from torchdist_ref.launcher.devices import processors_near_gpu

    mode = str(getattr(numa_options.affinity_mode, "value", numa_options.affinity_mode))
    return partial(processors_near_gpu, mode=mode)


def parse_signals(names: str) -> list[signal.Signals]:
    """Return the signals that a comma-separated list names.

    Raises:
        ArgumentError: A name is unknown, or names a signal that no process can catch.

    >>> [each.name for each in parse_signals("SIGTERM, SIGUSR1")]
    ['SIGTERM', 'SIGUSR1']
    """
    found: list[signal.Signals] = []
    for name in (word.strip() for word in names.split(",")):
        signum = signal.Signals.__members__.get(name)
        if signum is None or signum in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            reason = "is not a signal" if signum is None else "cannot be forwarded"
            raise ArgumentError(f"{name!r} {reason}; name signals as in {DEFAULT_SIGNALS},SIGUSR1")
        found.append(signum)
    return found
