"""Handle of a call that may still be running.

A backend creates a `Work`, returns it to the caller and completes it once, with `finish` or `fail`. The caller waits,
polls, or uses a `torch.futures.Future`. The future of a call that has completed is done: `WorkFuture` asks its Work.

Callbacks of the future run on a thread of the backend for callbacks, never on its progress thread, so a callback may
wait for a new collective. `wait` and `is_completed` count a call as completed once the callbacks that were attached
before its end have run, as torch's do. Code in a callback is the exception: it would wait for itself.

`JoinedWork` is one Work over several, and `WorkForTorch` is one of torch's type. Do not add knowledge of backends here.
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
from weakref import finalize

import torch.distributed as c10d
from torch import Tensor
from torch.futures import Future

from torchdist_ref.calls import CallScope, numbered_in
from torchdist_ref.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendArgumentError,
    GroupAbortedError,
    RankStalledError,
    ReportedFailure,
    UnsupportedError,
    explain,
    on_rank,
)
from torchdist_ref.timeouts import CHECK_SECONDS, Deadline
from torchdist_ref.torch_internals import accelerators, torch_private
from torchdist_ref.torch_internals.torch_modes import outside_modes

log = logging.getLogger("torchdist_ref.backends")
Awaited = Callable[[], tuple[str, ReportedFailure | None]]
"""Function that returns the ranks that a call waits for, as a sentence and as a value; empty and None if none."""


class Runner(Protocol):
    """Function that runs callbacks on a thread of a backend."""

    def __call__(self, job: Callable[[], None], /) -> None:
        """Run a callback."""

    def start(self) -> None:
        """Start the thread, so that no later call can fail.

        Raises:
            RuntimeError: The system has no room for one more thread.
        """

    def is_occupied_by_caller(self) -> bool:
        """Return whether the thread runs a callback that cannot return before the calling code does."""


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
        self._set_unwrap_func(_raise_if_failed)
        self._scope, self._devices = scope, devices

    def set_exception(self, result: BaseException) -> None:
        """Complete the future with an exception that readers in Python and in C++ raise."""
        self.set_result(FailedResult(result))

    def add_done_callback(self, callback: Callable[[Future[Any]], None]) -> None:
        """Call a function with the future once it is done: at once, on this thread, if it is.

        Raises:
            ArgumentTypeError: `callback` is not a function.
        """
        _check_callback("Future.add_done_callback", callback)
        if self.done():
            self._run_now(callback)
        else:
            super().add_done_callback(lambda _: self._run_in_scope(callback))

    def then(self, callback: Callable[[Future[Any]], Any]) -> Future[Any]:
        """Return a future of the result of a callback, which runs once this future is done.

        Raises:
            KeyboardInterrupt: Ctrl-C arrived while the callback ran on this thread.
            ArgumentTypeError: `callback` is not a function.
        """
        _check_callback("Future.then", callback)
        following = CallFuture(self._scope, self._devices)

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

    def _run_now(self, callback: Callable[[Future[Any]], None]) -> None:
        # Not through torch, which logs and drops every exception, of a Ctrl-C too.
        try:
            self._run_in_scope(callback)
        except Exception:
            log.exception("a callback of a future raised")

    def _run_in_scope(self, callback: Callable[[Future[Any]], None]) -> None:
        with nullcontext() if self._scope is None else numbered_in(self._scope):
            callback(self)


class WorkFuture(CallFuture):
    """Future of a Work. It is done, for its readers in Python, as soon as the call is over.

    Callbacks attached in Python are kept here until `run_callbacks` runs them, on the backend's thread for callbacks.
    Those attached in C++ (by ``torch.futures.collect_all``, or torch's DDP) are kept in torch's future, which runs
    them on the thread that completes it. A call ends on the progress thread, where no callback may run. So `complete`
    is left to the thread for callbacks, or to the first thread that asks for the outcome.

    Args:
        work: The Work, whose outputs or error are the outcome.
        scope: See `CallFuture`.
        devices: See `CallFuture`.

    Attributes:
        callbacks_ran: Event that is set once the callbacks that were attached before the end of the call have run.
    """

    def __init__(self, work: Work, scope: CallScope | None, devices: Sequence[Any]) -> None:
        super().__init__(scope, devices)
        self._work: Work | None = work
        self._lock = threading.Lock()
        # None: the call is over and no earlier callback has yet to begin, so new ones run at once.
        self._callbacks: list[Callable[[Future[Any]], None]] | None = []
        self._thread: int | None = None
        self.callbacks_ran = threading.Event()

    def done(self) -> bool:
        """Return whether the call is over. Never blocks."""
        work = self._work
        if work is not None and work.is_over():
            self.complete()
        return super().done()

    def value(self) -> Any:
        """Return the value, or raise the error, of a call that is over."""
        self.done()
        return super().value()

    def wait(self) -> Any:
        """Block until the call is over; return its value or raise its error. Callbacks may still run."""
        work = self._work
        if work is not None:
            work.await_over(None)
            self.complete()
        return super().wait()

    def add_done_callback(self, callback: Callable[[Future[Any]], None]) -> None:
        """See `CallFuture.add_done_callback`."""
        _check_callback("Future.add_done_callback", callback)
        with self._lock:
            if self._callbacks is not None:
                self._callbacks.append(callback)
                return
        self._run_now(callback)

    def call_is_over(self) -> None:
        """Let callbacks attached from now on run at once, unless earlier ones wait for `run_callbacks`."""
        with self._lock:
            if not self._callbacks:
                self._callbacks = None
                self.callbacks_ran.set()

    def complete(self) -> None:
        """Complete torch's future with the outcome of the call, which is over; C++ continues on this thread."""
        work = self._work
        if work is None:
            return
        if not super().done():
            try:
                self.set_result(work.outcome())
            except RuntimeError:
                # Another thread has done it meanwhile.
                if not super().done():
                    raise
        self._work = None

    def run_callbacks(self) -> None:
        """Complete torch's future, and run the callbacks that were attached before the end of the call."""
        self._thread = threading.get_ident()
        try:
            self.complete()
            with self._lock:
                callbacks, self._callbacks = self._callbacks or [], None
            for callback in callbacks:
                self._run_one(callback)
        finally:
            self._thread = None
            self.callbacks_ran.set()

    def _run_one(self, callback: Callable[[Future[Any]], None]) -> None:
        try:
            self._run_in_scope(callback)
        except BaseException:
            # The others run whatever it was.
            log.exception("a callback of a future raised")

    def runs_callbacks_here(self) -> bool:
        """Return whether the calling thread is in `run_callbacks`."""
        return self._thread == threading.get_ident()


def _check_callback(operation: str, callback: Any) -> None:
    if not callable(callback):
        raise ArgumentTypeError(explain(operation, "callback", "a function of the future", callback))


def _raise_if_failed(value: Any) -> Any:
    if isinstance(value, FailedResult):
        raise value.error
    return value


class Work:
    """Handle of a call: `wait` blocks until it has completed, `is_completed` does not block.

    A call is *over* once its outputs or its error are known. It has *completed* once also the callbacks of its future
    that were attached before have run.

    Args:
        name: Name of the operation. A Work without one belongs to no call: `wait` refuses to wait for it.
        outputs: Output tensors.
        callbacks: Function that runs callbacks of the future on the backend's thread; by default they run on the
            thread that completes the call.
        scope: Numbering of the calls that callbacks make; None if they are not numbered.

    Attributes:
        source: For a receive, group rank of the sender; -1 as long as it is not known.
        awaited: Function that returns the ranks that the call waits for; None where the backend does not know them.

    >>> from torchdist_ref import Work
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
    _future: WorkFuture | None = None
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
            True. The outputs hold the result, and the future is done. Callbacks that were attached before the end of
            the call have run, unless this method is called in a callback.

        Raises:
            RankStalledError: The time-out passed first. The call, or a callback, is still running.
            DistError: The error of the call.
            ArgumentTypeError: `timeout` is neither a timedelta nor a number.
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
        if not self.name and not self.is_over():
            raise ArgumentError(
                f"Work.wait: this Work belongs to no call, so nothing completes it{on_rank()}. Wait for the Work that "
                f"a call with async_op=True returned; a backend makes one with the name of its operation, as in "
                f"Work('all_reduce')."
            )
        end = None if seconds is None else monotonic() + seconds
        if not self.await_over(seconds):
            awaited = self.awaited
            found, stalled = awaited() if awaited is not None else ("", None)
            text = f"{self.name}: not done after {seconds} s of waiting; the call itself is still running. {found}"
            raise RankStalledError(text.rstrip()).reporting(stalled)
        if self._future is not None and not self._await_callbacks(self._future, end):
            raise RankStalledError(
                f"{self.name}: the call is over, but after {seconds} s of waiting a callback of its future is still "
                f"running{on_rank()}. Look for what the callback waits for, or pass a longer timeout."
            )
        if self._error is not None:
            raise self._error
        return True

    def await_over(self, seconds: float | None) -> bool:
        """Wait until the call is over, or for so many seconds, and return whether it is over. For backends.

        The error of the call is not raised.

        Raises:
            GroupAbortedError: The call was made before this process was forked.
        """
        if not self._over:
            refuse_inherited(self.name, self._forks)
        try:
            return self._await_until(None if seconds is None else monotonic() + seconds)
        except KeyboardInterrupt:
            global _interrupted_at
            _interrupted_at = monotonic()
            raise

    def _await_until(self, end: float | None) -> bool:
        """Wait until the call is over, or until a time; look from time to time, so that Ctrl-C interrupts it."""
        while not self._over:
            if self._running.acquire(timeout=_check_seconds(end)):
                # For the next waiting thread.
                self._running.release()
            elif end is not None and monotonic() >= end:
                return False
        return True

    def _await_callbacks(self, future: WorkFuture, end: float | None) -> bool:
        """Wait until the callbacks of a call that is over have run, or until a time; return whether they have run."""
        while not self._have_callbacks_run(future):
            refuse_inherited(self.name, self._forks)
            if not future.callbacks_ran.wait(_check_seconds(end)) and end is not None and monotonic() >= end:
                return False
        return True

    def _have_callbacks_run(self, future: WorkFuture) -> bool:
        """Return whether the callbacks of a call that is over have run, or can't before the calling code returns."""
        future.complete()
        if future.callbacks_ran.is_set():
            return True
        runner = self._run_callbacks
        return future.runs_callbacks_here() if runner is None else runner.is_occupied_by_caller()

    def is_over(self) -> bool:
        """Return whether the call is over; its callbacks may not have run. For backends."""
        return self._over

    def is_completed(self) -> bool:
        """Return whether the call has completed, with or without an error. Never blocks.

        If so, `wait` returns at once.

        Elsewhere:
            ``MPI_Test`` in MPI; ``cudaStreamQuery`` with NCCL; ``jax.Array.is_ready`` in JAX.
        """
        return self.is_over() and (self._future is None or self._have_callbacks_run(self._future))

    def is_success(self) -> bool:
        """Return whether the call is over without an error."""
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

    def block_current_stream(self) -> None:
        """Order what the current stream runs from now on after the call, as `wait` does.

        torch's Gloo raises a RuntimeError here on a build without accelerators, since it blocks a stream and no thread.
        """
        self.wait()

    def boxed(self) -> Any:
        """Return this Work as a ``torch.ScriptObject``, which operators and torch's C++ accept; see `unbox`.

        Example:
            >>> import torch, torchdist_ref as dist
            >>> from torchdist_ref.testing import run
            >>> def program(rank):
            ...     work = dist.all_reduce(torch.tensor([rank]), async_op=True)
            ...     return dist.Work.unbox(work.boxed()) is work, work.wait()
            >>> run(program, 2)
            [(True, True), (True, True)]

        Elsewhere:
            None in MPI, NCCL and JAX.
        """
        held = WorkForTorch(self)
        box = held.boxed()
        finalize(box, _keep_until_now, held).atexit = False
        return box

    @staticmethod
    def unbox(obj: Any) -> Any:
        """Return the Work in a ``torch.ScriptObject`` that `boxed` returned, as the same object.

        Args:
            obj: Box of a Work of this library or of torch.

        Raises:
            ArgumentTypeError: Not a box of a Work.
        """
        try:
            held: Any = c10d.Work.unbox(obj)
        except (RuntimeError, TypeError):
            expected = "a torch.ScriptObject from Work.boxed"
            raise ArgumentTypeError(explain("Work.unbox", "obj", expected, obj)) from None
        return held.work if type(held) is WorkForTorch else held

    def get_future_result(self) -> Future[Any]:
        """Return a future of how the call ended, as the number of torch's ``WorkResult``.

        Returns:
            A future of 0 (success), 1 (time-out) or 2 (another error). It never has an exception.
        """
        if not self.is_over():
            return self.get_future().then(lambda _: self._result_number())
        result: Future[Any] = Future()
        result.set_result(self._result_number())
        return result

    def _result_number(self) -> int:
        error = self.exception()
        return 0 if error is None else 1 if isinstance(error, RankStalledError) else 2

    def get_future(self) -> Future[Any]:
        """Return a `torch.futures.Future` whose value is the list of output tensors.

        The future is done once the call is over, so in any case after `wait`. Waiting for it, or a callback that reads
        its value, raises the error of a call that failed.

        Callbacks run one after the other, in the order in which the calls of the group end, and may wait for new calls.
        A callback that is attached after the end of the call runs at once, on the thread that attaches it, unless an
        earlier one has yet to run. As on torch's Gloo, `wait` returns after the callbacks that were attached before, so
        a callback must not need a lock that the waiting thread holds.

        Example:
            >>> import torch, torchdist_ref as dist
            >>> from torchdist_ref.testing import run
            >>> def program(rank):
            ...     work = dist.all_reduce(torch.tensor([rank, 10]), async_op=True)
            ...     total = work.get_future().then(lambda future: future.value()[0].sum().item())
            ...     work.wait()
            ...     return work.get_future().done(), total.done(), total.value()
            >>> run(program, 2)
            [(True, True, 21), (True, True, 21)]

        Elsewhere:
            None in MPI and NCCL; in JAX each ``jax.Array`` is a future.
        """
        if self._run_callbacks is not None and not self._over:
            # When the call ends, nobody could be told that its callbacks have no thread.
            self._run_callbacks.start()
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = WorkFuture(self, self._scope, devices_of(self.outputs))
            over = self._over
            if over:
                future.call_is_over()
        if over:
            future.complete()
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
            future = self._future
            if future is not None:
                future.call_is_over()
            self._over = True
            # A Work that is kept does not keep the memory of its group.
            self.awaited = None
            self._running.release()
        if future is None:
            return
        if self._run_callbacks is None:
            future.run_callbacks()
        else:
            self._run_callbacks(future.run_callbacks)

    def outcome(self) -> Any:
        """Return the value of the future of a call that is over: its outputs, or a tensor that raises its error.

        For `WorkFuture`.
        """
        if self._error is None:
            return list(self.outputs)
        error = self._error if isinstance(self._error, Exception) else RuntimeError(f"{self.name}: {self._error!r}")
        return FailedResult(error)


def _keep_until_now(held: WorkForTorch) -> None:
    """Do nothing: the finalizer of a box holds a Work, since C++ does not keep the half of it that is in Python."""


class WorkForTorch(c10d.Work):
    """Work of torch's type over one of ours.

    Args:
        work: Our Work.

    Attributes:
        work: The argument.
    """

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        """See `Work.wait`; C++ passes a time-out of zero for none."""
        return self.work.wait(timeout or None)

    def synchronize(self) -> None:
        """See `Work.synchronize`."""
        self.wait()

    block_current_stream = synchronize

    def get_future(self) -> Future[Any]:
        """See `Work.get_future`."""
        return self.work.get_future()

    def is_completed(self) -> bool:
        """See `Work.is_completed`."""
        return self.work.is_completed()

    def is_success(self) -> bool:
        """See `Work.is_success`."""
        return self.work.is_success()

    def exception(self) -> BaseException | None:
        """See `Work.exception`."""
        return self.work.exception()

    def result(self) -> list[Any]:
        """See `Work.result`."""
        return self.work.result()

    def source_rank(self) -> int:
        """See `Work.source_rank`."""
        return self.work.source_rank()

    _source_rank = source_rank


class JoinedWork(Work):
    """Work of a function that needs several backend calls, and possibly a local step after them.

    It is over when all parts are and the local step has run; it fails with the first part's error. Its progress does
    not depend on a callback, so that a callback may wait for it.

    Args:
        name: Name of the public function.
        outputs: Value of the future: the caller's outputs.
        parts: Works of the backend calls.
        after: Local step to run once all parts have succeeded. Default: none.
    """

    def __init__(
        self, name: str, outputs: Sequence[Any], parts: Sequence[Work], after: Callable[[], Any] | None = None
    ) -> None:
        super().__init__(name, outputs)
        if parts:
            # Callbacks run on the same thread as the last part's, and number their calls below that.
            last = parts[-1]
            self._run_callbacks, self._scope = last._run_callbacks, last._scope  # noqa: SLF001 - of its own class
        self._parts = tuple(parts)
        self._after = after
        self._once, self._concluded = threading.Lock(), False

    def await_over(self, seconds: float | None) -> bool:
        """See `Work.await_over`. The error of a part is raised at the end: the other parts still write to tensors."""
        deadline = None if seconds is None else Deadline(seconds)
        for part in self._parts:
            if not part.await_over(None if deadline is None else deadline.remaining()):
                self.awaited = part.awaited
                return False
        self._conclude()
        return super().await_over(None)

    def is_over(self) -> bool:
        """See `Work.is_over`."""
        if not self._over and all(part.is_over() for part in self._parts):
            self._conclude()
        return self._over

    def is_success(self) -> bool:
        """See `Work.is_success`."""
        return self.is_over() and super().is_success()

    def exception(self) -> BaseException | None:
        """See `Work.exception`."""
        return super().exception() if self.is_over() else None

    def get_future(self) -> Future[Any]:
        """See `Work.get_future`."""
        future = super().get_future()
        if not self.is_over():
            for part in self._parts:
                part.get_future().add_done_callback(self._on_part_done)
        return future

    def _on_part_done(self, _: Future[Any]) -> None:
        self.is_over()

    def _conclude(self) -> None:
        with self._once:
            if self._concluded:
                return
            error = next((part.exception() for part in self._parts if part.exception() is not None), None)
            try:
                if error is None and self._after is not None:
                    with outside_modes():
                        self._after()
            except Exception as failure:
                error = failure
            self._concluded = True
        # Without the lock: a callback may run here, and another thread may wait for what the callback does.
        self.finish() if error is None else self.fail(error)


def _check_seconds(end: float | None) -> float:
    """Return how long to wait before the next check for Ctrl-C, or for a time, in seconds."""
    return CHECK_SECONDS if end is None else min(CHECK_SECONDS, max(0.0, end - monotonic()))


def seconds_of(timeout: timedelta | float | None) -> float | None:
    """Return the time-out of a wait in seconds.

    Raises:
        ArgumentTypeError: It is neither a timedelta nor a number.

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
    return list(accelerators.devices_of(output for output in outputs if isinstance(output, Tensor)))


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
