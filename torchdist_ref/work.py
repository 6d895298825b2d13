"""Handle of a call that may still be running.

A backend creates a `Work`, returns it to the caller and completes it once, with `finish` or `fail`. The caller waits,
polls, or uses a `torch.futures.Future`. Callbacks of the future run on a thread of the backend for callbacks, never on
its progress thread, so a callback may wait for a new collective. Do not add knowledge of backends here.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from time import monotonic
from typing import Any, Protocol

from torch import Tensor
from torch.futures import Future

from torchdist_ref import torch_private
from torchdist_ref.calls import CallScope, numbered_in
from torchdist_ref.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendArgumentError,
    GroupAbortedError,
    RankStalledError,
    UnsupportedError,
    explain,
    on_rank,
)
from torchdist_ref.timeouts import CHECK_SECONDS

log = logging.getLogger("torchdist_ref.backends")
Awaited = Callable[[], tuple[str, Sequence[int]]]
"""Function that returns the ranks that a call waits for, as a sentence and as global ranks; both empty if none."""


class Runner(Protocol):
    """Function that runs callbacks on a thread of a backend."""

    def __call__(self, job: Callable[[], None], /) -> None:
        """Run a callback."""

    def start(self) -> None:
        """Start the thread, so that no later call can fail.

        Raises:
            RuntimeError: The system has no room for one more thread.
        """


# When Ctrl-C last interrupted a wait for a call.
_interrupted_at = -math.inf
# Number of forks between the first process and this one.
_forks = 0


def _after_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_after_fork)


def refuse_inherited(operation: str, forks: int) -> None:
    """Raise if something that another process completes was made before this process was forked.

    Args:
        operation: Name of the operation.
        forks: Value of `_forks` at that time.

    Raises:
        GroupAbortedError: It was.
    """
    if forks != _forks:
        raise GroupAbortedError(
            f"{operation}: this call was made before this process was forked, so only the parent's threads complete "
            f"it: wait for it in the parent."
        )


def interrupted_since(moment: float) -> bool:
    """Return whether Ctrl-C has interrupted a wait for a call since a time of `monotonic`."""
    return _interrupted_at >= moment


class InterruptibleFuture(Future[Any]):
    """Future whose `wait` Ctrl-C interrupts. torch's raises KeyboardInterrupt only after the future is done."""

    def __init__(self, *, devices: list[Any] | None = None) -> None:
        super().__init__(devices=devices)
        self._forks = _forks

    def wait(self) -> Any:
        """Block until the future is done; return its value or raise its exception."""
        if not self.done():
            refuse_inherited("Future.wait", self._forks)
            done_lock = threading.Lock()
            done_lock.acquire()
            super().add_done_callback(lambda _: done_lock.release())
            # If the future is done meanwhile, torch calls the function here, and drops a Ctrl-C that arrives in it.
            while not self.done() and not done_lock.acquire(timeout=CHECK_SECONDS):
                pass
        return super().wait()


class FailedResult(Tensor):
    """Value of a failed future, for readers in C++: a tensor of which every use raises the error.

    `torch.futures.Future.set_exception` stores the exception itself as the value. torch's reducer reads that value as
    a tensor and crashes (SIGSEGV), or reports that it cannot cast it. A tensor it can read; its first use raises the
    error with its type, in the thread that waits for the gradients.

    Args:
        error: Exception of the call.
    """

    error: BaseException

    @staticmethod
    def __new__(cls, error: BaseException) -> FailedResult:
        """Make a tensor without storage; subclasses of tensors are made here, not in `__init__`."""
        made: FailedResult = torch_private.MAKE_WRAPPER.get()(cls, ())
        made.error = error
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FailedResult({self.error!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise the error of the first operand that has one."""
        raise next(
            operand.error for operand in torch_private.TREE_LEAVES.get()((args, kwargs)) if isinstance(operand, cls)
        )


class CallFuture(InterruptibleFuture):
    """Future whose callbacks run in the scope of a call. Its errors keep their type in chains and in torch's C++.

    Args:
        scope: CallScope of the call; None if its backend does not number the calls of callbacks below it.
        devices: Accelerators that the value may be on.
    """

    def __init__(self, scope: CallScope | None, devices: Sequence[Any] = ()) -> None:
        super().__init__(devices=list(devices))
        self._scope, self._devices = scope, devices

    def set_exception(self, result: BaseException) -> None:
        """Complete the future with an exception that readers in Python and in C++ raise."""
        self._set_unwrap_func(_raise_if_failed)
        self.set_result(FailedResult(result))

    def add_done_callback(self, callback: Callable[[Future[Any]], None]) -> None:
        """Call a function with the future once it is done: at once, on this thread, if it is.

        Raises:
            ArgumentTypeError: `callback` is no function.
        """
        _check_callback("Future.add_done_callback", callback)
        if not self.done():
            super().add_done_callback(lambda _: self._run_in_scope(callback))
            return
        # Not through torch, which logs and drops every exception, of a Ctrl-C too.
        try:
            self._run_in_scope(callback)
        except Exception:
            log.exception("a callback of a future raised")

    def then(self, callback: Callable[[Future[Any]], Any]) -> Future[Any]:
        """Return a future of the result of a callback, which runs once this future is done.

        Raises:
            KeyboardInterrupt: Ctrl-C arrived while the callback ran on this thread.
            ArgumentTypeError: `callback` is no function.
        """
        _check_callback("Future.then", callback)
        following = type(self)(self._scope, self._devices)

        def follow(done: Future[Any]) -> None:
            value: Any = None
            error: Exception | None = RuntimeError("the callback was interrupted")
            try:
                value, error = callback(done), None
            except BaseException as raised:
                # A future accepts subclasses of Exception only, but its waiters must see a KeyboardInterrupt too.
                error = raised if isinstance(raised, Exception) else RuntimeError(repr(raised))
                # `current_thread` would leave an entry for each thread of Gloo's.
                if isinstance(raised, KeyboardInterrupt) and threading.get_ident() == threading.main_thread().ident:
                    raise
            finally:
                following.set_result(value) if error is None else following.set_exception(error)

        self.add_done_callback(follow)
        return following

    def _run_in_scope(self, callback: Callable[[Future[Any]], None]) -> None:
        with nullcontext() if self._scope is None else numbered_in(self._scope):
            callback(self)


def _check_callback(operation: str, callback: Any) -> None:
    if not callable(callback):
        raise ArgumentTypeError(explain(operation, "callback", "a function of the future", callback))


def _raise_if_failed(value: Any) -> Any:
    if isinstance(value, FailedResult):
        raise value.error
    return value


class Work:
    """Handle of a call: `wait` blocks until it has completed, `is_completed` does not block.

    Args:
        name: Name of the operation. A Work without one belongs to no call: `wait` refuses to wait for it.
        outputs: Output tensors.
        callbacks: Function that runs callbacks of the future on the backend's thread; by default they run on the
            thread that completes the call.
        scope: Numbering of the calls that callbacks make; None if they are not numbered.

    Attributes:
        source: For a receive, group rank of the sender; -1 as long as it is not known.
        awaited: Function that returns the ranks that the call waits for; None where the backend does not know them.

    >>> work = Work("all_reduce", [])
    >>> work.is_completed()
    False
    >>> work.finish()
    >>> work.wait(), work.is_completed(), work.exception()
    (True, True, None)

    Elsewhere:
        ``MPI_Request`` in MPI; a CUDA stream or event in NCCL; in JAX each ``jax.Array`` is a future.
    """

    source = -1
    awaited: Awaited | None = None
    _over = False
    _error: BaseException | None = None
    _future: Future[Any] | None = None
    _before_completion: Callable[[], None] | None = None
    _run_callbacks: Runner | None = None
    _scope: CallScope | None = None

    def __init__(
        self,
        name: str = "",
        outputs: Sequence[Any] = (),
        callbacks: Runner | None = None,
        scope: CallScope | None = None,
    ) -> None:
        self.name = name
        self.outputs = outputs
        self._run_callbacks = callbacks
        self._scope = scope
        self._forks = _forks
        # Locked until the call completes; a `threading.Event` takes twenty times as long to create.
        self._running = threading.Lock()
        self._running.acquire()
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Block until the call has completed.

        Args:
            timeout: Longest wait, as a timedelta or in seconds. None: until the deadline of the call itself.

        Returns:
            True. The outputs hold the result.

        Raises:
            RankStalledError: The time-out passed first. The call is still running.
            DistError: The error of the call.
            ArgumentTypeError: `timeout` is no time.
            ArgumentError: The Work belongs to no call.

        Example:
            >>> import torch, torchdist_ref as dist
            >>> from torchdist_ref.testing import run
            >>> def program(rank):
            ...     tensor = torch.tensor([rank, 10])
            ...     work = dist.all_reduce(tensor, async_op=True)
            ...     return work.wait(), work.is_completed(), tensor.tolist()
            >>> run(program, 2)
            [(True, True, [1, 20]), (True, True, [1, 20])]

        Elsewhere:
            ``MPI_Wait`` in MPI; ``cudaStreamWaitEvent`` with NCCL; ``jax.block_until_ready`` in JAX.
        """
        seconds = seconds_of(timeout)
        if not self.name and not self._over:
            raise ArgumentError(
                f"Work.wait: this Work belongs to no call, so nothing completes it{on_rank()}. Wait for the Work that "
                f"a call with async_op=True returned; a backend makes one with the name of its operation, as in "
                f"Work('all_reduce')."
            )
        if not self._over:
            refuse_inherited(self.name, self._forks)
        if not self._await(seconds):
            awaited = self.awaited
            found, ranks = awaited() if awaited is not None else ("", ())
            text = f"{self.name}: not done after {seconds} s of waiting; the call itself is still running. {found}"
            raise RankStalledError(text.rstrip()).naming(ranks)
        if self._error is not None:
            raise self._error
        return True

    def _await(self, seconds: float | None) -> bool:
        """Wait until the call is over, or for so many seconds; return whether it is over."""
        try:
            return self._await_until(None if seconds is None else monotonic() + seconds)
        except KeyboardInterrupt:
            global _interrupted_at
            _interrupted_at = monotonic()
            raise

    def _await_until(self, end: float | None) -> bool:
        """Wait until the call is over, or until a time; look from time to time, so that Ctrl-C interrupts it."""
        while not self._over:
            if self._running.acquire(
                timeout=CHECK_SECONDS if end is None else min(CHECK_SECONDS, max(0.0, end - monotonic()))
            ):
                # For the next waiting thread.
                self._running.release()
            elif end is not None and monotonic() >= end:
                return False
        return True

    def is_completed(self) -> bool:
        """Return whether the call has completed, with or without an error. Never blocks.

        Elsewhere:
            ``MPI_Test`` in MPI; ``cudaStreamQuery`` with NCCL; ``jax.Array.is_ready`` in JAX.
        """
        return self._over

    def is_success(self) -> bool:
        """Return whether the call has completed without an error."""
        return self._over and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error of the call, or None."""
        return self._error

    def result(self) -> list[Any]:
        """Wait for the call, and return its output tensors."""
        self.wait()
        return list(self.outputs)

    def source_rank(self) -> int:
        """Return the group rank of the sender of a receive; -1 as long as it is not known.

        Raises:
            UnsupportedError: The call is not a receive.
        """
        if not self.name.startswith("recv"):
            raise UnsupportedError(
                f"source_rank: only a receive has a source, and this Work is of {self.name or 'a call that has ended'}"
                f"{on_rank()}. Ask the Work that irecv returns."
            )
        return self.source

    def _source_rank(self) -> int:
        """Return `source_rank`, which torch has under this name too."""
        return self.source_rank()

    def synchronize(self) -> None:
        """Wait for the call, and raise its error; torch's name for `wait` without a time-out."""
        self.wait()

    def get_future_result(self) -> Future[Any]:
        """Return a future of how the call ended, as the number of torch's ``WorkResult``.

        Returns:
            A future of 0 (success), 1 (time-out) or 2 (another error). It never has an exception.
        """
        result: Future[Any] = Future()
        self.get_future().add_done_callback(lambda _: result.set_result(self._result_number()))
        return result

    def _result_number(self) -> int:
        error = self.exception()
        return 0 if error is None else 1 if isinstance(error, RankStalledError) else 2

    def get_future(self) -> Future[Any]:
        """Return a `torch.futures.Future` whose value is the list of output tensors.

        Waiting for it, or a callback that reads its value, raises the error of a call that failed.

        Example:
            >>> import torch, torchdist_ref as dist
            >>> from torchdist_ref.testing import run
            >>> def program(rank):
            ...     work = dist.all_reduce(torch.tensor([rank, 10]), async_op=True)
            ...     return work.get_future().then(lambda future: future.value()[0].tolist()).wait()
            >>> run(program, 2)
            [[1, 20], [1, 20]]

        Elsewhere:
            None in MPI and NCCL; in JAX each ``jax.Array`` is a future.
        """
        if self._run_callbacks is not None and not self._over:
            # When the call ends, nobody could be told that its callbacks have no thread.
            self._run_callbacks.start()
        with self._lock:
            future = self._future
            if future is None:
                devices = devices_of(self.outputs)
                future = self._future = CallFuture(self._scope, devices)
                completed = self._over
            else:
                completed = False
        if completed:
            self._complete_future(future)
        return future

    def run_before_completion(self, function: Callable[[], None]) -> None:
        """Run a function, which must not raise, before the call is visibly completed. For backends."""
        with self._lock:
            if not self._over:
                self._before_completion = function
                return
        function()

    def finish(self) -> None:
        """Complete the call: the outputs hold the result. For backends."""
        self._complete()

    def fail(self, error: BaseException) -> None:
        """Complete the call with an error. For backends."""
        self._error = error
        self._complete()

    def _complete(self) -> None:
        with self._lock:
            if self._before_completion is not None:
                self._before_completion()
            self._over = True
            # A Work that is kept does not keep the memory of its group.
            self.awaited = None
            self._running.release()
            future = self._future
        if future is None:
            return
        if self._run_callbacks is None:
            self._complete_future(future)
        else:
            self._run_callbacks(lambda: self._complete_future(future))

    def _complete_future(self, future: Future[Any]) -> None:
        if isinstance(self._error, Exception):
            future.set_exception(self._error)
        elif self._error is not None:
            future.set_exception(RuntimeError(f"{self.name}: {self._error!r}"))
        else:
            future.set_result(list(self.outputs))


def seconds_of(timeout: timedelta | float | None) -> float | None:
    """Return the time-out of a wait in seconds.

    Raises:
        ArgumentTypeError: It is no time.

    >>> seconds_of(timedelta(minutes=1))
    60.0
    """
    if timeout is None or isinstance(timeout, timedelta):
        return None if timeout is None else timeout.total_seconds()
    try:
        # Of any type with this method: NumPy's numbers and tensors of one element too.
        seconds = timeout.__float__()
    except AttributeError:
        expected = "a timedelta, a number of seconds or None"
        raise ArgumentTypeError(explain("wait", "timeout", expected, timeout)) from None
    if seconds != seconds:
        raise BackendArgumentError(explain("wait", "timeout", "a number of seconds", timeout))
    return seconds


def devices_of(outputs: Sequence[Any]) -> list[Any]:
    """Return the accelerators of the outputs, which a future must know to hold such tensors."""
    return list({output.device for output in outputs if getattr(output, "is_cuda", False)})


class Done(Work):
    """Handle of a call that has completed.

    Args:
        name: Name of the operation.
        outputs: Output tensors.
        source: For a receive, group rank of the sender.
    """

    _over = True

    def __init__(self, name: str = "", outputs: Sequence[Any] = (), source: int = -1) -> None:
        # Not the base class's: the lock that waits acquire would take as long to create as all of this.
        self.name, self.outputs, self.source = name, outputs, source
        self._lock = threading.Lock()
