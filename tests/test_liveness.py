"""Watch over the members that create a group together: what it asks of the store, and when the store has gone."""

from __future__ import annotations

from typing import Any

import pytest

from torchdist_ref.errors import DistNetworkError
from torchdist_ref.groups.meeting import Meeting
from torchdist_ref.stores import HashStore


class StoreThatLeaves(HashStore):
    """Store whose server ends with its rank when the ranks have met."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[str, str]] = []

    def wait_get(self, *arguments: Any) -> list[bytes]:
        key, value = arguments[3]
        self.requests.append((key.rpartition("/")[2], str(value)))
        return super().wait_get(*arguments)

    def set_on_disconnect(self, key: Any, value: Any, now: Any = None) -> bool:
        self.requests.append((key.rpartition("/")[2], str(value)))
        raise DistNetworkError("the server is gone")


def test_a_complete_group_does_not_need_the_store_any_more() -> None:
    store = StoreThatLeaves()
    with Meeting(store, 0, 1).watched(5.0):
        [(key, text)] = store.requests
        assert key == "failure" and "has ended, or lost its connection" in text
    assert store.requests[1:] == [("failure", "")]


def test_an_error_in_the_block_leaves_the_request_in_place() -> None:
    store = StoreThatLeaves()
    with pytest.raises(ValueError, match="in the block"), Meeting(store, 0, 1).watched(5.0):
        raise ValueError("in the block")
    assert len(store.requests) == 1
