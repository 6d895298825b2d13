"""One Work for several calls of a backend, for functions that one call can't carry out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

from torch.futures import Future

from torchdist_ref.errors import RankStalledError
from torchdist_ref.work import Work


class Joined(Work):
    """Done when all its parts are, and what remains to do after them has been done here; fails as the first did.

    It never relies on a callback to make progress, so that it can be waited for inside one.
    """

    def __init__(
        self, name: str, outputs: Sequence[Any], parts: Sequence[Work], after: Callable[[], Any] | None = None
    ) -> None:
        super().__init__(name, outputs)
        self._parts = tuple(parts)
        self._after = after
        self._once = threading.Lock()

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """See `Work.wait`."""
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        end = None if seconds is None else monotonic() + seconds
        for part in self._parts:
            self._wait_for(part, None if end is None else max(0.0, end - monotonic()), seconds)
        self._conclude()
        return super().wait()

    def _wait_for(self, part: Work, left: float | None, allowed: float | None) -> None:
        try:
            part.wait(left)
        except Exception:
            # A part that failed is heard at the end: the others still write to the caller's tensors.
            if not part.is_completed():
                raise RankStalledError(
                    f"{self.name}: not done after {allowed} s of waiting; the call goes on."
                ) from None

    def is_completed(self) -> bool:
        """See `Work.is_completed`."""
        if not self._over and all(part.is_completed() for part in self._parts):
            self._conclude()
        return self._over

    def is_success(self) -> bool:
        """See `Work.is_success`."""
        return self.is_completed() and super().is_success()

    def exception(self) -> BaseException | None:
        """See `Work.exception`."""
        return super().exception() if self.is_completed() else None

    def get_future(self) -> Future[Any]:
        """See `Work.get_future`."""
        future = super().get_future()
        if not self.is_completed():
            for part in self._parts:
                part.get_future().add_done_callback(self._part_done)
        return future

    def _part_done(self, _: Future[Any]) -> None:
        self.is_completed()

    def _conclude(self) -> None:
        with self._once:
            if self._over:
                return
            error = next((part.exception() for part in self._parts if part.exception() is not None), None)
            try:
                if error is None and self._after is not None:
                    self._after()
            except Exception as failure:
                error = failure
            self.finish() if error is None else self.fail(error)


def joined(
    name: str,
    outputs: Sequence[Any],
    parts: Sequence[Work | None],
    async_op: bool,
    after: Callable[[], Any] | None = None,
) -> Work | None:
    """The parts as one Work for the caller who wants one; else None, once all is done."""
    work = Joined(name, outputs, [part for part in parts if part is not None], after)
    if async_op:
        return work
    work.wait()
    return None
