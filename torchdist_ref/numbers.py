"""Numbers: how ranks recognise a call as the same one, whenever and wherever each of them makes it.

A call made by the program takes the next number of its group: 0, 1, 2, ... A call made inside a completion callback
is numbered under the call that completed (5.1, 5.2, below that 5.1.1): callbacks run at different moments on each
rank, and on the thread of the program where the call had completed already. Where ranks are at different calls, they
carry out the one with the smallest number first: a call's callbacks before what the program does next.

`CallFuture` is a `torch.futures.Future` that runs its callbacks, and those of the futures made from it, in the scope
of its call. Don't add what to do where numbers differ: that is the backend's order.
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
"""(the program's count, the path below it): two words that compare as the dotted number does."""

# A path has three levels of 21 bits in one word; callbacks of callbacks of callbacks end there.
_LEVELS, _BITS = 3, 21


class Scope:
    """The calls that are made while callbacks of one call run.

    Args:
        group: A key of the group that the call is on.
        number: The call's.

    >>> scope = Scope(1, (5, 0))
    >>> first, second = scope.next(1), scope.next(1)
    >>> (5, 0) < first < Scope(1, first).next(1) < second < (6, 0)
    True
    """

    def __init__(self, group: int, number: Number) -> None:
        self._group, self._number = group, number
        self._depth = sum(1 for level in range(_LEVELS) if number[1] >> level * _BITS & (1 << _BITS) - 1)
        self._made: defaultdict[int, Iterator[int]] = defaultdict(lambda: itertools.count(1))

    def next(self, group: int) -> Number:
        """The number of the next call on a group that is made in this scope.

        Raises:
            DistBackendError: Callbacks nest too deep, or make too many calls.
        """
        count = next(self._made[group])
        main, path = self._number
        if group != self._group:
            # On another group it comes before what the program does there; which of two such goes first is no matter.
            return -1 - zlib.crc32(repr((self._group, self._number)).encode()), count
        if self._depth == _LEVELS or count >> _BITS:
            raise DistBackendError(f"callbacks of call {main} make calls more than {_LEVELS} levels deep, or too many.")
        return main, path | count << _BITS * (_LEVELS - 1 - self._depth)


_scope: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("torchdist_ref_scope", default=None)


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
        """The number of the call that is made here and now."""
        scope = _scope.get()
        return (next(self._program), 0) if scope is None else scope.next(self._group)

    def scope(self, number: Number) -> Scope:
        """The scope of the callbacks of a call."""
        return Scope(self._group, number)


class InterruptibleFuture(Future[Any]):
    """A future that answers Ctrl-C while it is waited for. torch's own does when it is done, not before."""

    def wait(self) -> Any:
        """Block until the future is done; its value, or the exception that it was given."""
        if not self.done():
            gate = threading.Lock()
            gate.acquire()
            super().add_done_callback(lambda _: gate.release())
            gate.acquire()
        return super().wait()


class CallFuture(InterruptibleFuture):
    """A future whose callbacks run in the scope of a call."""

    def __init__(self, scope: Scope, devices: Sequence[Any] = ()) -> None:
        super().__init__(devices=list(devices))
        self._scope, self._devices = scope, devices

    def add_done_callback(self, callback: Callable[[Future[Any]], None]) -> None:
        """Call this with the future once it is done."""
        super().add_done_callback(lambda _: self._within(lambda: callback(self)))

    def then(self, callback: Callable[[Future[Any]], Any]) -> Future[Any]:
        """A future of what the callback returns, or raises, once this one is done."""
        following = CallFuture(self._scope, self._devices)

        def follow(done: Future[Any]) -> None:
            try:
                value = callback(done)
            except BaseException as error:
                # A future takes exceptions of programs only; whoever waits for it learns of a KeyboardInterrupt too.
                following.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            else:
                following.set_result(value)

        self.add_done_callback(follow)
        return following

    def _within(self, act: Callable[[], None]) -> None:
        token = _scope.set(self._scope)
        try:
            act()
        finally:
            _scope.reset(token)
