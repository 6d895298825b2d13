"""Work: the handle of a call that may still be running.

A backend makes a `Work`, hands it to the caller and later finishes it, once, with `finish` or `fail`.
The caller waits, asks, or takes a `torch.futures.Future`, whose callbacks run on a thread that
backends provide for that: never on the thread that has to make progress, so that a callback may wait
on a new collective. Don't add knowledge of backends here: how a call runs is theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

from torch.futures import Future

from torchdist_ref.errors import RankStalledError, UnsupportedError, on_rank
from torchdist_ref.numbers import CallFuture, InterruptibleFuture, Scope
from torchdist_ref.timeouts import CHECK_SECONDS

Runner = Callable[[Callable[[], None]], None]


class Work:
    """A call on its way. `wait` for it, or carry on and ask `is_completed`.

    >>> work = Work("all_reduce", [])
    >>> work.is_completed()
    False
    >>> work.finish()
    >>> work.wait(), work.is_completed(), work.exception()
    (True, True, None)
    """

    def __init__(
        self, name: str, outputs: Sequence[Any], callbacks: Runner | None = None, scope: Scope | None = None
    ) -> None:
        self.name = name
        self.outputs = outputs
        self.source = -1
        self._run_callbacks = callbacks
        self._scope = scope
        self._error: BaseException | None = None
        # Shut until the call is over; a `threading.Event` would take twenty times as long to make.
        self._gate = threading.Lock()
        self._gate.acquire()
        self._over = False
        self._lock = threading.Lock()
        self._future: Future[Any] | None = None
        self._last: Callable[[], None] | None = None

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Block until the call is done.

        Args:
            timeout: How long at most, as a timedelta or in seconds. None: as long as the call's own deadline allows.

        Returns:
            True. The outputs hold the result.

        Raises:
            RankStalledError: The time-out passed first. The call goes on.
            DistError: What the call failed with.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if not self._await(seconds):
            raise RankStalledError(f"{self.name}: not done after {seconds} s of waiting; the call itself goes on.")
        if self._error is not None:
            raise self._error
        return True

    def _await(self, seconds: float | None) -> bool:
        end = None if seconds is None else monotonic() + seconds
        while not self._over:
            if self._gate.acquire(
                timeout=CHECK_SECONDS if end is None else min(CHECK_SECONDS, max(0.0, end - monotonic()))
            ):
                # For the next one who waits.
                self._gate.release()
            elif end is not None and monotonic() >= end:
                return False
        return True

    def is_completed(self) -> bool:
        """Whether the call has ended, well or badly. Never blocks."""
        return self._over

    def is_success(self) -> bool:
        """Whether the call has ended well."""
        return self._over and self._error is None

    def exception(self) -> BaseException | None:
        """What the call failed with, or None."""
        return self._error

    def result(self) -> list[Any]:
        """The output tensors, once the call is done."""
        self.wait()
        return list(self.outputs)

    def source_rank(self) -> int:
        """For a receive: the group rank that sent; -1 as long as that is not known.

        Raises:
            UnsupportedError: It is no receive.
        """
        if not self.name.startswith("recv"):
            raise UnsupportedError(
                f"source_rank: only a receive has a source, and this Work is of {self.name or 'a call that has ended'}"
                f"{on_rank()}. Ask the Work that irecv returns."
            )
        return self.source

    def get_future(self) -> Future[Any]:
        """A `torch.futures.Future` whose value is the list of output tensors."""
        with self._lock:
            future = self._future
            if future is None:
                devices = devices_of(self.outputs)
                scope = self._scope
                made = InterruptibleFuture(devices=devices) if scope is None else CallFuture(scope, devices)
                future = self._future = made
                settled = self._over
            else:
                settled = False
        if settled:
            self._settle(future)
        return future

    def before_the_end(self, act: Callable[[], None]) -> None:
        """Backends: call this, which must not raise, before anybody can see that the call has ended."""
        with self._lock:
            if not self._over:
                self._last = act
                return
        act()

    def finish(self) -> None:
        """Backends: the outputs hold the result."""
        self._complete()

    def fail(self, error: BaseException) -> None:
        """Backends: the call ended with this."""
        self._error = error
        self._complete()

    def _complete(self) -> None:
        with self._lock:
            if self._last is not None:
                self._last()
            self._over = True
            self._gate.release()
            future = self._future
        if future is None:
            return
        if self._run_callbacks is None:
            self._settle(future)
        else:
            self._run_callbacks(lambda: self._settle(future))

    def _settle(self, future: Future[Any]) -> None:
        if isinstance(self._error, Exception):
            future.set_exception(self._error)
        elif self._error is not None:
            future.set_exception(RuntimeError(f"{self.name}: {self._error!r}"))
        else:
            future.set_result(list(self.outputs))


def devices_of(outputs: Sequence[Any]) -> list[Any]:
    """The accelerators that outputs are on: a future holds such tensors only if it was made for their devices."""
    return list({output.device for output in outputs if getattr(output, "is_cuda", False)})


class Done(Work):
    """What a finished call returns at once: nothing left to wait for."""

    def __init__(self, name: str = "", outputs: Sequence[Any] = (), source: int = -1) -> None:
        # Not the base's: there is nothing to wait for.
        self.name, self.outputs, self.source = name, outputs, source
        self._run_callbacks, self._scope, self._error, self._future, self._last = None, None, None, None, None
        self._over, self._lock = True, threading.Lock()
