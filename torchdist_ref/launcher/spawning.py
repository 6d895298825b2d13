"""`spawn` and its context and errors, with torch.multiprocessing's names: a function on several new processes.

The error names the process that failed first, not one that failed because of it. Do not add options that torch lacks
here: `torchdist_ref.launcher.contexts` has them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from torchdist_ref.errors import indexed
from torchdist_ref.launcher.child_failures import as_subclass_of_torchs
from torchdist_ref.launcher.contexts import MultiprocessContext, RunProcsResult
from torchdist_ref.processes.control import signal_name

_TORCHS = "torch.multiprocessing.spawn"


class ProcessException(Exception):
    """A process of `spawn` failed.

    Args:
        msg: Message.
        error_index: Index of the process that failed first.
        error_pid: Its process id.
    """

    def __init__(self, msg: str, error_index: int, error_pid: int) -> None:
        Exception.__init__(self, msg)
        indexed(self)
        self.msg, self.error_index, self.error_pid = msg, error_index, error_pid

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a class of this module and its arguments, for pickle."""
        if isinstance(self, ProcessExitedException):
            own = self.msg, self.error_index, self.error_pid, self.exit_code, self.signal_name
            return ProcessExitedException, own
        kind = ProcessRaisedException if isinstance(self, ProcessRaisedException) else ProcessException
        return kind, (self.msg, self.error_index, self.error_pid)


class ProcessRaisedException(ProcessException):
    """The function raised an exception in a process; the message contains the traceback."""


class ProcessExitedException(ProcessException):
    """A process was killed by a signal, or exited with a code other than 0.

    Args:
        msg: Message.
        error_index: Index of the process that failed first.
        error_pid: Its process id.
        exit_code: Its exit code, or the negative number of the signal.
        signal_name: Name of the signal. Default: None.
    """

    def __init__(
        self, msg: str, error_index: int, error_pid: int, exit_code: int, signal_name: str | None = None
    ) -> None:
        ProcessException.__init__(self, msg, error_index, error_pid)
        self.exit_code, self.signal_name = exit_code, signal_name


class ProcessContext:
    """Processes that `spawn` has started.

    Args:
        context: Started processes.
    """

    def __init__(self, context: MultiprocessContext) -> None:
        self._context = context

    @property
    def error_files(self) -> list[str]:
        """File of the failure record of each process."""
        return [self._context.error_files[index] for index in range(self._context.nprocs)]

    def pids(self) -> list[int]:
        """Return the process ids."""
        return list(self._context.pids().values())

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait until all processes have ended. When one fails, the others are stopped.

        Args:
            timeout: Longest time to wait, in seconds. Default None: no limit.
            grace_period: Time from asking the others to stop to killing them, in seconds. Default None: 30.

        Returns:
            Whether all have ended.

        Raises:
            ProcessRaisedException: The function raised an exception; that of the process that failed first.
            ProcessExitedException: A process was killed or exited with another code than 0. Both are torch's classes
                too if torch is imported.
        """
        if grace_period is not None:
            self._context.set_shutdown_timeout(grace_period)
        result = self._context.wait(-1 if timeout is None else timeout)
        if result is None:
            return False
        error = _error(result)
        if error is not None:
            raise error
        return True

    def close(self) -> None:
        """End the processes."""
        self._context.close()


class SpawnContext(ProcessContext):
    """`ProcessContext` by its former name."""

    def __init__(self, context: MultiprocessContext) -> None:
        warnings.warn("SpawnContext is renamed to ProcessContext since 1.4 release.", stacklevel=2)
        super().__init__(context)


def _error(result: RunProcsResult) -> ProcessException | None:
    """Return the error for a failure."""
    if not result.failures:
        return None
    index, failure = next(iter(result.failures.items()))
    if isinstance(failure.message, dict):
        text = f"\n\n-- Process {index} terminated with the following error:\n"
        text += failure.message["extraInfo"]["py_callstack"]
        raised: ProcessException = as_subclass_of_torchs(ProcessRaisedException, _TORCHS)(text, index, failure.pid)
        return raised
    kind, code = as_subclass_of_torchs(ProcessExitedException, _TORCHS), failure.exitcode
    name = signal_name(-code) if code < 0 else None
    how = f"signal {name}" if name else f"exit code {code}"
    exited: ProcessException = kind(f"process {index} terminated with {how}", index, failure.pid, code, name)
    return exited


def _call(function: Callable[..., Any], *args: Any) -> None:
    """Call a function and discard its result, which need not be picklable."""
    with suppress(KeyboardInterrupt):
        function(*args)


def start_processes(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """Run a function on several processes, see `spawn`.

    Args:
        fn: Function.
        args: Its arguments after the index.
        nprocs: Number of processes.
        join: Whether to wait for their end.
        daemon: Whether the end of this program ends them.
        start_method: ``"spawn"``, ``"forkserver"`` (the same), or ``"fork"``.
    """
    calls = {index: (fn, index, *args) for index in range(nprocs)}
    envs: dict[int, dict[str, str]] = {index: {} for index in range(nprocs)}
    name = getattr(fn, "__name__", "spawn")
    processes = MultiprocessContext(name, _call, calls, envs, start_method, None)
    context = ProcessContext(processes)
    try:
        processes.supervise(daemon)
        if not join:
            return context
        context.join()
    except BaseException:
        context.close()
        raise
    return None


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> ProcessContext | None:
    """Run a function on several new processes; process `i` calls ``fn(i, *args)``.

    When one fails, the others are stopped. No process is left when this program has ended, however it ends.

    Args:
        fn: Function that another process can import.
        args: Its arguments after the index. Queues, locks and tensors in shared memory are shared, as by
            `multiprocessing`.
        nprocs: Number of processes.
        join: Whether to wait for their end.
        daemon: Whether the end of this program ends them; otherwise it waits for them.
        start_method: As for torch, only ``"spawn"``; `start_processes` has others.

    Returns:
        None if `join`, else the context, whose `ProcessContext.join` waits.

    Raises:
        ProcessRaisedException: The function raised an exception; that of the process that failed first.
        ProcessExitedException: A process was killed or exited with another code than 0.

    Example:
        >>> from torchdist_ref.multiprocessing import spawn
        >>> spawn(print, args=("of", 2), nprocs=2)  # doctest: +SKIP
        0 of 2
        1 of 2
    """
    if start_method != "spawn":
        warnings.warn(f"spawn() ignores start_method={start_method!r}; use start_processes()", stacklevel=2)
    return start_processes(fn, args, nprocs, join, daemon, "spawn")
