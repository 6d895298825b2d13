"""Watch over the members that create a group together: what it asks of the store, and when the store has gone."""

from __future__ import annotations

from typing import Any

import pytest

from torchdist_ref.errors import DistNetworkError
from torchdist_ref.liveness import MemberWatch
from torchdist_ref.stores import HashStore, PrefixStore


class StoreThatLeaves(HashStore):
    """Store whose server takes one request to act on a disconnect, and ends with its rank before the second."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[str] = []

    def set_on_disconnect(self, key: Any, value: Any, now: Any = None) -> bool:
        self.requests.append(str(value))
        if len(self.requests) > 1:
            raise DistNetworkError("the server is gone")
        return True


def test_a_complete_group_does_not_need_the_store_any_more() -> None:
    store = StoreThatLeaves()
    watch = MemberWatch(PrefixStore("meeting", store), 1, (0, 1), "init_process_group", lambda ranks, description: None)
    with watch.published_on_disconnect():
        assert len(store.requests) == 1 and "has ended, or lost its connection" in store.requests[0]
    assert store.requests[1:] == [""]


def test_an_error_in_the_block_leaves_the_request_in_place() -> None:
    store = StoreThatLeaves()
    watch = MemberWatch(PrefixStore("meeting", store), 1, (0, 1), "init_process_group", lambda ranks, description: None)
    with pytest.raises(ValueError, match="in the block"), watch.published_on_disconnect():
        raise ValueError("in the block")
    assert len(store.requests) == 1
