"""Watch over the members that create a group together: what it asks of the store, and when the store has gone."""

from __future__ import annotations

import os
from contextlib import closing
from typing import Any

import pytest

from torchdist_ref.errors import DistNetworkError, MismatchError, RankDiedError, RendezvousError, message_of
from torchdist_ref.membership.events import DIED, LOST, Ending, Published, decode, encode
from torchdist_ref.membership.meeting import Meeting, Presence
from torchdist_ref.membership.rounds import Attendee
from torchdist_ref.membership.watch import MemberWatch, read_failure
from torchdist_ref.processes.identity import host_identity
from torchdist_ref.stores import HashStore, PrefixStore


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


class KeysThatGo(HashStore):
    """Store in which another rank leaves, and deletes its key, right after a check for it."""

    def check(self, keys: Any) -> bool:
        found = super().check(keys)
        for key in keys:
            self.delete_key(key)
        return found

    def get(self, key: Any) -> bytes:
        assert super().check([key]), f"waits for {key!r}"
        return super().get(key)


def test_no_rank_waits_for_the_announcement_of_one_that_has_left() -> None:
    store = KeysThatGo()
    with closing(Presence(store, 0, 2)) as presence:
        for key, value in Presence(HashStore(), 1, 2, nonce="n").announcement().items():
            store.set(key, value)
        assert presence.failure([1], "init_process_group") is None
        assert not presence.is_another_process() and not presence.is_announced()


def test_a_rank_that_died_before_there_was_a_group_is_named_for_the_flight_recorder() -> None:
    """Once the verdict on the dumps was that a rank died in init_process_group."""
    store, pid = HashStore(), os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    [(key, value)] = Presence(HashStore(), 1, 2).announcement().items()
    store.set(key, Attendee.parse(value.encode())._replace(pid=pid).encode())
    with closing(Presence(store, 0, 2)) as presence:
        failure = presence.failure([1], "init_process_group")
    assert isinstance(failure, RankDiedError) and failure.ranks == (1,)


def test_no_rank_waits_for_a_published_failure_that_has_gone() -> None:
    store = KeysThatGo()
    store.set("failure", encode(Published(1, DIED, text="killed")))
    assert "killed" in str(read_failure(store, "new_group"))
    assert store.check(["failure"]) and read_failure(store, "new_group") is None


def test_a_complete_group_does_not_need_the_store_any_more() -> None:
    store = StoreThatLeaves()
    with Meeting(store, 0, 1).watched(5.0):
        [(key, text)] = store.requests
        assert key == "failure"
        assert decode(text) == Published(0, DIED, ending=Ending(LOST, os.getpid(), os.uname().nodename))
    assert store.requests[1:] == [("failure", "")]


def test_an_error_in_the_block_leaves_the_request_in_place() -> None:
    store = StoreThatLeaves()
    with pytest.raises(ValueError, match="in the block"), Meeting(store, 0, 1).watched(5.0):
        raise ValueError("in the block")
    assert len(store.requests) == 1


class Unprintable(Exception):
    def __str__(self) -> str:
        raise LookupError


@pytest.mark.parametrize("error", [ValueError("no \udce9.pt"), Unprintable()])
def test_an_error_without_a_text_is_published(error: BaseException) -> None:
    store = PrefixStore("group", HashStore())
    with pytest.raises(type(error)), MemberWatch(store, 1, [0, 4], "new_group").published():
        raise error
    assert str(read_failure(store, "new_group")) == f"new_group: rank 4 failed: {message_of(error)}"


@pytest.mark.parametrize("pid", [-1, 0, 2**31, 2**70])
def test_an_announcement_of_no_process_is_none(pid: int) -> None:
    store = HashStore()
    store.set("present/1", Attendee(host_identity(), pid, 0, 2, "", "n").encode())
    with closing(Presence(store, 0, 2)) as presence:
        with pytest.raises(RendezvousError, match=f"{pid}.*announces no rank. Another program writes to the store"):
            presence.failure([1], "init_process_group")


@pytest.mark.parametrize("kind", [RendezvousError, MismatchError])
def test_an_error_of_all_ranks_has_one_text_on_all(kind: type[Exception]) -> None:
    shared = PrefixStore("group/1", HashStore())
    MemberWatch(shared, 1, [0, 1], "new_group").publish(kind("two processes claim rank 1"))
    found = MemberWatch(shared, 0, [0, 1], "new_group").failure()
    assert type(found) is kind and str(found) == "two processes claim rank 1"
