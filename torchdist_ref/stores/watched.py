"""WatchedStore: a part of a store whose waits end as soon as it is known that they are in vain.

A key that a dead rank was to set will not come, but a store can't know that: whoever waits would wait until the
time-out. This one waits in slices, and asks between them whether there is trouble. Who knows of trouble, and what it
is, does not belong here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torchdist_ref.errors import StoreTimeoutError
from torchdist_ref.stores.arguments import Text
from torchdist_ref.stores.base import POLL, Store
from torchdist_ref.stores.prefix import PrefixStore
from torchdist_ref.stores.waiting import Deadline

LOOK = 0.05
"""Seconds between two looks, and so the longest time that trouble stays unseen."""


class WatchedStore(PrefixStore):
    """A `PrefixStore` whose waits look for trouble.

    Args:
        prefix: As a `PrefixStore` has it.
        store: The store underneath.
        trouble: What to raise if the keys that are waited for will not come; None while they may.

    >>> from torchdist_ref.stores import HashStore
    >>> watched = WatchedStore("a", HashStore(), lambda: RuntimeError("rank 1 died"))
    >>> watched.get("address of rank 1")
    Traceback (most recent call last):
    RuntimeError: rank 1 died
    """

    def __init__(self, prefix: str, store: Store, trouble: Callable[[], BaseException | None]) -> None:
        super().__init__(prefix, store)
        self._trouble = trouble

    def get(self, key: Text) -> bytes:
        self.wait([key])
        return super().get(key)

    def multi_get(self, keys: Sequence[Text]) -> list[bytes]:
        self.wait(keys)
        return super().multi_get(keys)

    def wait(self, keys: Sequence[Text], timeout: timedelta | None = None) -> None:
        deadline = self._deadline("wait", timeout)
        while not self._came(keys, Deadline(min(LOOK, deadline.left()))):
            trouble = self._trouble()
            # What was waited for may have come just before the trouble did.
            if (trouble is not None or deadline.passed()) and not self.check(keys):
                raise trouble or self._timed_out("wait", self._missing(keys), deadline)

    def _came(self, keys: Sequence[Text], look: Deadline) -> bool:
        """Whether the keys come before the next look."""
        store: object = self._underlying_non_prefix_store
        if isinstance(store, Store):
            try:
                super().wait(keys, timedelta(seconds=look.seconds))
            except StoreTimeoutError:
                return False
            return True
        # torch's stores have several types of errors for a time-out, and put a line into the log for each.
        while not (here := self.check(keys)) and not look.passed():
            time.sleep(min(POLL, look.left()))
        return here

    def _missing(self, keys: Sequence[Text]) -> list[Text]:
        return [key for key in keys if not self.check([key])]

    def clone(self) -> WatchedStore:
        return WatchedStore(self.prefix, self.underlying_store.clone(), self._trouble)
