"""Call numbers, by which ranks match their calls, and futures whose callbacks number their calls.

A call made by the program takes the next number of its group: 0, 1, 2, ... A call made inside a completion callback is
numbered under the call that completed (5.1, 5.2, below that 5.1.1). Callbacks run at a different time on each rank, and
on the program's thread if the call had completed already, so the order of calls alone would not match. If ranks are at
different calls, they run the one with the smallest number first: the callbacks of a call before the next call of the
program.

`CallFuture` is a `torch.futures.Future` that runs its callbacks, and those of the futures derived from it, in the scope
of its call. Do not add the order in which calls run: it belongs to the backends.
"""

from __future__ import annotations

import contextvars
import itertools
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.futures import Future

from torchdist_ref.errors import DistBackendError

Number = tuple[int, int]
"""(count of the program's calls, path below it): two integers that compare as the dotted number does."""

# A path has three levels of 21 bits in one 64-bit integer.
_LEVELS, _BITS = 3, 21


class CallScope:
    """Numbering of the calls that callbacks of one call make.

    Args:
        group: Key of the group of the call.
        number: Number of the call.

    >>> scope = CallScope(1, (5, 0))
    >>> first, second = scope.next(1), scope.next(1)
    >>> (5, 0) < first < CallScope(1, first).next(1) < second < (6, 0)
    True
    """

    def __init__(self, group: int, number: Number) -> None:
        self._group, self._number = group, number
        self._depth = sum(1 for level in range(_LEVELS) if number[1] >> level * _BITS & (1 << _BITS) - 1)
        self._counts: defaultdict[int, Iterator[int]] = defaultdict(lambda: itertools.count(1))

    def next(self, group: int) -> Number:
        """Return the number of the next call on a group in this scope.

        Raises:
            DistBackendError: Callbacks are nested too deeply, or make too many calls.
        """
        count = next(self._counts[group])
        main, path = self._number
        if group != self._group:
            # On another group it precedes the calls of the program there; the order of two such calls does not matter.
            return -1 - zlib.crc32(repr((self._group, self._number)).encode()), count
        if self._depth == _LEVELS or count >> _BITS:
            raise DistBackendError(f"callbacks of call {main} make calls more than {_LEVELS} levels deep, or too many.")
        return main, path | count << _BITS * (_LEVELS - 1 - self._depth)


_scope: contextvars.ContextVar[CallScope | None] = contextvars.ContextVar("torchdist_ref_scope", default=None)


class Numbers:
    """Numbers for the calls of one group on one rank.

    >>> numbers = Numbers("world")
    >>> numbers.next(), numbers.next()
    ((0, 0), (1, 0))
    """

    def __init__(self, name: str) -> None:
        self._group = zlib.crc32(name.encode())
        self._program = itertools.count()

    def next(self) -> Number:
        """Return the number of a call made now on this thread."""
        scope = _scope.get()
        return (next(self._program), 0) if scope is None else scope.next(self._group)

    def scope(self, number: Number) -> CallScope:
        """Return the scope of the callbacks of a call."""
        return CallScope(self._group, number)


class InterruptibleFuture(Future[Any]):
    """Future whose `wait` Ctrl-C interrupts. torch's raises KeyboardInterrupt only after the future is done."""

    def wait(self) -> Any:
        """Block until the future is done; return its value or raise its exception."""
        if not self.done():
            done_lock = threading.Lock()
            done_lock.acquire()
            super().add_done_callback(lambda _: done_lock.release())
            done_lock.acquire()
        return super().wait()


class CallFuture(InterruptibleFuture):
    """Future whose callbacks run in the scope of a call.

    Args:
        scope: CallScope of the call.
        devices: Accelerators that the value may be on.
    """

    def __init__(self, scope: CallScope, devices: Sequence[Any] = ()) -> None:
        super().__init__(devices=list(devices))
        self._scope, self._devices = scope, devices

    def add_done_callback(self, callback: Callable[[Future[Any]], None]) -> None:
        """Call a function with the future once it is done."""
        super().add_done_callback(lambda _: self._run_in_scope(lambda: callback(self)))

    def then(self, callback: Callable[[Future[Any]], Any]) -> Future[Any]:
        """Return a future of the result of a callback, which runs once this future is done."""
        following = type(self)(self._scope, self._devices)

        def follow(done: Future[Any]) -> None:
            try:
                value = callback(done)
            except BaseException as error:
                # A future accepts subclasses of Exception only, but its waiters must see a KeyboardInterrupt too.
                following.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            else:
                following.set_result(value)

        self.add_done_callback(follow)
        return following

    def _run_in_scope(self, function: Callable[[], None]) -> None:
        previous = _scope.set(self._scope)
        try:
            function()
        finally:
            _scope.reset(previous)
