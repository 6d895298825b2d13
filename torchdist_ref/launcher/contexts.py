"""Processes that one call starts and another waits for: torch's `start_processes` with its contexts, and `spawn`.

A thread supervises them. So a failure is noticed and the others are stopped at once, whether or not the program waits,
and the failure reported is that of the process that failed first. Arguments of functions are passed by
`multiprocessing`: queues, locks and tensors in shared memory are shared. Do not add ranks, stores or restarts here:
they belong to `torchdist_ref.launcher.local_workers`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from torchdist_ref.errors import ArgumentError, BackendArgumentError, UsageError
from torchdist_ref.launcher import entrypoint as worker_entrypoint
from torchdist_ref.launcher import orphans
from torchdist_ref.launcher.child_failures import ProcessFailure, SignalException, as_torchs
from torchdist_ref.launcher.local_workers import (
    DEFAULT_SIGNALS,
    SHUTDOWN_SECONDS,
    SIGNALS_VARIABLE,
    binding,
    parse_signals,
)
from torchdist_ref.launcher.logs import DefaultLogsSpecs, LogsSpecs, outputs, temporary_folder
from torchdist_ref.launcher.supervision import Supervision
from torchdist_ref.launcher.supervisor import Interrupts, Supervisor
from torchdist_ref.launcher.worker import Worker, WorkerPlan

logger = logging.getLogger("torchdist_ref.launcher")


@dataclass
class RunProcsResult:
    """Result of processes that have ended. All fields have an entry for each local rank, but `failures`.

    Attributes:
        return_values: Results of the function, if all succeeded; None for each command.
        failures: `ProcessFailure` of the process that failed first, by its local rank. If `PContext.close` ended the
            processes, those of all that did not exit with 0.
        stdouts: Log file of standard output; an empty string for none.
        stderrs: The same for standard error.
    """

    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, Any] = field(default_factory=dict)
    stdouts: dict[int, str] = field(default_factory=dict)
    stderrs: dict[int, str] = field(default_factory=dict)

    def is_failed(self) -> bool:
        """Return whether a process failed."""
        return bool(self.failures)


class PContext(ABC):
    """Processes that `start_processes` has started.

    Args:
        name: Name of the processes, for the start of lines on the console.
        entrypoint: Function or command.
        args: Its arguments by local rank.
        envs: Variables by local rank that are added to the environment of this process.
        logs_specs: Rule of log files. None: failure records only, in a temporary folder that is removed.
        log_line_prefixes: Start of each line on the console that goes to a file too, by local rank. Default None:
            ``[name local_rank]:``.
        duplicate_stdout_filters: Texts; lines of teed standard output that contain one go to a file of their own too.
        duplicate_stderr_filters: The same for standard error.

    Attributes:
        nprocs: Number of processes.
        stdouts: Log file of standard output by local rank; an empty string for none.
        stderrs: The same for standard error.
        error_files: File of the failure record by local rank.

    Raises:
        BackendArgumentError: The local ranks of `args` or `envs` are not 0, 1, and so on.
    """

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any] | str,
        args: Mapping[int, Sequence[Any]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs | None,
        log_line_prefixes: Mapping[int, str] | None = None,
        duplicate_stdout_filters: Sequence[str] | None = None,
        duplicate_stderr_filters: Sequence[str] | None = None,
    ) -> None:
        for what, given in (("args", args), ("envs", envs)):
            if set(given) != set(range(len(args))):
                text = f"{what}, local rank mapping mismatch, expected: {set(range(len(args)))}, actual: {set(given)}"
                raise BackendArgumentError(f"start_processes: {text}")
        self.name, self.entrypoint, self.args, self.envs = name, entrypoint, args, envs
        self.nprocs, self._decisions = len(args), Supervision(float(SHUTDOWN_SECONDS))
        self._mark, self._folder = uuid.uuid4().hex, Path(temporary_folder("torchdist_ref"))
        self._logs = (logs_specs or DefaultLogsSpecs(str(self._folder / "logs"))).reify(envs)
        self.stdouts, self.stderrs, self.error_files = self._logs.stdouts, self._logs.stderrs, self._logs.error_files
        self._prefixes = log_line_prefixes or {}
        self._filters = (duplicate_stdout_filters or (), duplicate_stderr_filters or ())
        self._cpus: Callable[[int], tuple[int, ...]] | None = None
        self._started, self._ended = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._supervisor: Supervisor | None = None
        self._error: BaseException | None = None
        self._result: RunProcsResult | None = None
        self._stop, self._closing = os.eventfd(0, os.EFD_CLOEXEC), threading.RLock()
        self._former: dict[int, Any] = {}

    def start(self) -> None:
        """Start the processes. On the main thread, signals to this one raise `SignalException` until all have ended.

        The variable TORCHELASTIC_SIGNALS_TO_HANDLE names these signals.

        Raises:
            UsageError: They have been started already.
        """
        if self._thread is None and threading.current_thread() is threading.main_thread():
            signals = parse_signals(os.environ.get(SIGNALS_VARIABLE, DEFAULT_SIGNALS))
            self._former = {signum: signal.signal(signum, _raise_signal) for signum in signals}
        self.supervise()

    def supervise(self, daemon: bool = False) -> None:
        """Start the processes without handlers of signals.

        Args:
            daemon: Whether the end of this program ends them; otherwise it waits for them.
        """
        if self._thread is not None:
            raise UsageError(f"{self.name}: the processes have been started already; make a new context.")
        self._thread = threading.Thread(target=self._run, name=f"torchdist_ref {self.name}", daemon=daemon)
        try:
            self._thread.start()
        except RuntimeError:
            # The system has no room for one more thread: there is nothing to join.
            self._thread = None
            raise
        self._started.wait()
        if self._error is not None:
            self.close()
            raise self._error

    def wait(self, timeout: float = -1, period: float = 1) -> RunProcsResult | None:
        """Wait until all processes have ended: all succeeded, or one failed and the others have been stopped.

        Args:
            timeout: Longest time to wait, in seconds; with 0 this only checks. Default -1: no limit.
            period: Accepted for compatibility with torch, without effect: the end is noticed at once.

        Returns:
            The result; None if processes still run.
        """
        if not self._ended.wait(None if timeout < 0 else timeout):
            return None
        self.close()
        if self._error is not None:
            raise self._error
        return self._result

    def pids(self) -> dict[int, int]:
        """Return the process ids by local rank."""
        workers = self._supervisor.workers if self._supervisor else []
        return {worker.plan.local_rank: worker.process.pid for worker in workers}

    def set_shutdown_timeout(self, seconds: float) -> None:
        """Set the time from asking the others to stop, after a failure, to killing them. It is 30 s otherwise."""
        self._decisions.grace = seconds

    def close(self, death_sig: signal.Signals | None = None, timeout: float = SHUTDOWN_SECONDS) -> None:
        """End the processes and all that they started, remove temporary files and restore signal handlers.

        Args:
            death_sig: Signal that asks them to end. Default None: SIGTERM.
            timeout: Time from that signal to SIGKILL, in seconds.
        """
        if self._thread is not None:
            # Several threads may close this, and one that has waited does so at the same time.
            with self._closing:
                if not self._ended.is_set():
                    self._decisions.stop_signal, self._decisions.grace = death_sig or signal.SIGTERM, timeout
                    os.eventfd_write(self._stop, 1)
            self._thread.join()
        with self._closing:
            stop, self._stop = self._stop, -1
            if stop >= 0:
                os.close(stop)
        shutil.rmtree(self._folder, ignore_errors=True)
        if threading.current_thread() is threading.main_thread():
            former, self._former = self._former, {}
            for signum, handler in former.items():
                signal.signal(signum, handler)

    @abstractmethod
    def _plan(self, rank: int, **common: Any) -> WorkerPlan:
        """Return the description of one process."""

    @abstractmethod
    def _value(self, rank: int) -> Any:
        """Return the result of a process that has succeeded."""

    def _run(self) -> None:
        """Supervise the processes until all have ended; the thread's function."""
        ends = contextlib.ExitStack()
        ends.callback(self._ended.set)
        ends.callback(self._started.set)
        try:
            guard = orphans.Guard(self._mark, str(self._folder))
            ends.callback(guard.close)
            interrupts = Interrupts(())
            ends.callback(interrupts.close)
            supervisor = self._supervisor = Supervisor(
                [self._described(rank) for rank in range(self.nprocs)],
                self._decisions,
                log=logger.warning,
                interrupts=interrupts,
                stop=self._stop,
                on_start=self._started.set,
            )
            supervisor.run()
            orphans.end_all(lambda: [pid for pid in orphans.marked(self._mark) if pid != guard.pid])
            self._result = self._result_of(supervisor)
        except BaseException as error:
            self._error = error
        finally:
            ends.close()

    def _described(self, rank: int) -> WorkerPlan:
        given = {name: str(value) for name, value in self.envs[rank].items()}
        prefix = self._prefixes.get(rank, f"[{self.name}{rank}]:").encode()
        stdout, stderr = outputs(self._logs, rank, (b"", prefix), self._filters)
        return self._plan(
            rank,
            environment={**os.environ, **given, orphans.MARK: self._mark},
            stdout=stdout,
            stderr=stderr,
            error_file=self.error_files.get(rank, ""),
            cpus=self._cpus(rank) if self._cpus else (),
        )

    def _result_of(self, supervisor: Supervisor) -> RunProcsResult:
        first, workers = supervisor.first_failure, supervisor.workers
        failed = [first] if first else [worker for worker in workers if worker.process.status]
        values = {} if failed else {rank: self._value(rank) for rank in range(self.nprocs)}
        failures = {worker.plan.local_rank: _failure(worker) for worker in failed}
        return RunProcsResult(values, failures, self.stdouts, self.stderrs)


class SubprocessContext(PContext):
    """Processes that run a command, whose arguments are converted to texts.

    The arguments are those of `PContext`, and `numa_options`: a value with an attribute `affinity_mode`, such as
    torch's `NumaOptions`.
    """

    def __init__(
        self,
        name: str,
        entrypoint: str,
        args: Mapping[int, Sequence[Any]],
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
        log_line_prefixes: Mapping[int, str] | None = None,
        numa_options: Any = None,
        duplicate_stdout_filters: Sequence[str] | None = None,
        duplicate_stderr_filters: Sequence[str] | None = None,
    ) -> None:
        filters = duplicate_stdout_filters, duplicate_stderr_filters
        super().__init__(name, entrypoint, args, envs, logs_specs, log_line_prefixes, *filters)
        self._cpus = binding(numa_options)

    def _plan(self, rank: int, **common: Any) -> WorkerPlan:
        # A single text is one argument, not one for each letter.
        args = self.args[rank]
        given = [args] if isinstance(args, str) else map(str, args)
        return WorkerPlan(rank, rank, command=[str(self.entrypoint), *given], **common)

    def _value(self, rank: int) -> Any:
        return None


class MultiprocessContext(PContext):
    """Processes that call a function. Its exceptions are recorded, as `record` does it.

    Args:
        name: See `PContext`, as for all others.
        entrypoint: Function; with ``"spawn"`` another process can import it.
        args: Arguments.
        envs: Variables.
        start_method: ``"spawn"`` or ``"forkserver"`` (both start a new interpreter), or ``"fork"``.
        logs_specs: Rule of log files.
        log_line_prefixes: Starts of lines.
        numa_options: Binding to processors.
        duplicate_stdout_filters: Texts.
        duplicate_stderr_filters: Texts.
    """

    def __init__(
        self,
        name: str,
        entrypoint: Callable[..., Any],
        args: Mapping[int, Sequence[Any]],
        envs: dict[int, dict[str, str]],
        start_method: str,
        logs_specs: LogsSpecs | None,
        log_line_prefixes: Mapping[int, str] | None = None,
        numa_options: Any = None,
        duplicate_stdout_filters: Sequence[str] | None = None,
        duplicate_stderr_filters: Sequence[str] | None = None,
    ) -> None:
        filters = duplicate_stdout_filters, duplicate_stderr_filters
        super().__init__(name, entrypoint, args, envs, logs_specs, log_line_prefixes, *filters)
        self._cpus = binding(numa_options)
        if start_method not in ("spawn", "fork", "forkserver"):
            raise ArgumentError(f"cannot find context for {start_method!r}; give 'spawn', 'fork' or 'forkserver'")
        self.start_method = start_method

    def _plan(self, rank: int, **common: Any) -> WorkerPlan:
        call = partial(worker_entrypoint.run, self._folder, rank, partial(_pair, self.entrypoint, self.args[rank]))
        method = "fork" if self.start_method == "fork" else "spawn"
        return WorkerPlan(rank, rank, function=call, start_method=method, **common)

    def _value(self, rank: int) -> Any:
        return worker_entrypoint.result(self._folder, rank)


def _pair(function: Any, args: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    return function, args


def _failure(worker: Worker) -> Any:
    kind = as_torchs(ProcessFailure, "errors")
    return kind(worker.plan.local_rank, worker.process.pid, worker.process.status or 0, worker.plan.error_file)


def _raise_signal(signum: int, frame: FrameType | None) -> None:
    received = signal.Signals(signum)
    raise as_torchs(SignalException, "api")(f"Process {os.getpid()} got signal: {received.name}", received)


def start_processes(
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: Mapping[int, Sequence[Any]],
    envs: dict[int, dict[str, str]],
    logs_specs: LogsSpecs,
    log_line_prefixes: Mapping[int, str] | None = None,
    start_method: str = "spawn",
    numa_options: Any = None,
    duplicate_stdout_filters: Sequence[str] | None = None,
    duplicate_stderr_filters: Sequence[str] | None = None,
) -> PContext:
    """Start one process for each local rank and return at once.

    Args:
        name: Name of the processes, for the start of lines on the console.
        entrypoint: Function, or name of a command.
        args: Its arguments by local rank 0, 1, and so on.
        envs: Variables by local rank that are added to the environment of this process.
        logs_specs: `LogsSpecs`, ours or torch's: which streams go to a file, and which also to the console.
        log_line_prefixes: Start of each line on the console that goes to a file too. Default None:
            ``[name local_rank]:``.
        start_method: ``"spawn"`` or ``"forkserver"`` (both start a new interpreter), or ``"fork"``; for functions.
        numa_options: Value with an attribute `affinity_mode`. Default None: all processors.
        duplicate_stdout_filters: Texts; lines of teed standard output that contain one go to a file of their own too.
        duplicate_stderr_filters: The same for standard error.

    Returns:
        The context. Its method `PContext.wait` waits for the end and returns the result.

    Raises:
        BackendArgumentError: The local ranks of `args` or `envs` are not 0, 1, and so on.

    Example:
        >>> from torchdist_ref.elastic.multiprocessing import DefaultLogsSpecs, start_processes
        >>> args, envs = {0: (2, 10), 1: (3, 4)}, {0: {}, 1: {}}
        >>> context = start_processes("powers", pow, args, envs, DefaultLogsSpecs())
        >>> context.wait().return_values
        {0: 1024, 1: 81}
    """
    more = {"log_line_prefixes": log_line_prefixes, "numa_options": numa_options}
    more |= {"duplicate_stdout_filters": duplicate_stdout_filters, "duplicate_stderr_filters": duplicate_stderr_filters}
    context: PContext
    if isinstance(entrypoint, str):
        context = SubprocessContext(name, entrypoint, args, envs, logs_specs, **more)
    else:
        context = MultiprocessContext(name, entrypoint, args, envs, start_method, logs_specs, **more)
    try:
        context.start()
    except BaseException:
        context.close()
        raise
    return context
