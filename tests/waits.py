"""Waits of ranks that are threads: so ordered that what a rank reports at its time-out does not depend on its speed."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta

import pytest

from torchdist_ref.stores.base import Text
from torchdist_ref.stores.prefix import WatchedStore

# Far more than a busy machine needs until the last rank has come.
LONGEST_SECONDS = 20.0


def begin_together(monkeypatch: pytest.MonkeyPatch, prefix: str, longest: timedelta, ranks: int) -> None:
    """Let the time-out of a wait begin once so many ranks wait there, each of which has published its own key.

    Otherwise a rank whose time is up also names one that was late to the same wait.

    Args:
        monkeypatch: The test's.
        prefix: Prefix of the watched store of these waits.
        longest: Longest time-out of these waits; longer ones begin as usual.
        ranks: Number of ranks that wait.
    """
    together, wait_get = threading.Barrier(ranks), WatchedStore.wait_get

    def wait_get_together(
        store: WatchedStore,
        keys: Sequence[Text],
        timeout: timedelta,
        publish: Mapping[str, Text] | None = None,
        on_disconnect: tuple[str, Text] | None = None,
    ) -> list[bytes]:
        if store._prefix == prefix and timeout <= longest:
            for key, value in (publish or {}).items():
                store.set(key, value)
            together.wait(LONGEST_SECONDS)
        return wait_get(store, keys, timeout, publish, on_disconnect)

    monkeypatch.setattr(WatchedStore, "wait_get", wait_get_together)
