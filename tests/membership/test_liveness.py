"""Watch over the members that create a group together: what it asks of the store, and when the store has gone."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import closing
from typing import Any

import pytest

from torchdist_ref.errors import DistNetworkError, MismatchError, RankDiedError, RendezvousError, message_of
from torchdist_ref.membership import liveness
from torchdist_ref.membership.liveness import (
    MemberWatch,
    PeerProcesses,
    host_identity,
    read_failure,
)
from torchdist_ref.membership.meeting import Meeting
from torchdist_ref.membership.presence import Presence
from torchdist_ref.membership.rounds import Attendee
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
    store.set("failure", "1|RankDiedError|killed")
    assert "killed" in str(read_failure(store, "new_group"))
    assert store.check(["failure"]) and read_failure(store, "new_group") is None


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


class Unprintable(Exception):
    def __str__(self) -> str:
        raise LookupError


@pytest.mark.parametrize("error", [ValueError("no \udce9.pt"), Unprintable()])
def test_an_error_without_a_text_is_published(error: BaseException) -> None:
    store = PrefixStore("group", HashStore())
    with pytest.raises(type(error)), MemberWatch(store, 1, [0, 4], "new_group").published():
        raise error
    assert str(read_failure(store, "new_group", [0, 4])) == f"new_group: rank 4 failed: {message_of(error)}"


@pytest.mark.parametrize("place", ["this thread", "another thread"])
def test_processes_that_are_closed_during_a_look_are_released_after_it(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a signal handler that destroyed the group waited for the look that it had interrupted, for ever."""
    processes, watched = PeerProcesses({0: os.getpid(), 1: os.getppid()}), []

    def close(*_: object) -> bool:
        closing = threading.Thread(target=processes.close)
        if place == "this thread":
            processes.close()
        else:
            closing.start()
            closing.join()
        watched.append(len(processes._fds))
        return False

    monkeypatch.setattr(liveness, "is_gone", close)
    looking = threading.Thread(target=processes.dead, daemon=True)
    looking.start()
    looking.join(10.0)
    assert not looking.is_alive() and watched == [2, 2] and processes._fds == []
    assert processes.dead() == []


@pytest.mark.parametrize("pid", [-1, 0, 2**31, 2**70])
def test_an_announcement_of_no_process_is_none(pid: int) -> None:
    store = HashStore()
    store.set("present/1", Attendee(host_identity(), pid, 0, 2, "", "n").encode())
    with closing(Presence(store, 0, 2)) as presence:
        with pytest.raises(RendezvousError, match=f"{pid}.*announces no rank. Another program writes to the store"):
            presence.failure([1], "init_process_group")


def test_a_thread_is_no_process() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    assert thread.native_id is not None
    with closing(PeerProcesses({1: thread.native_id})) as peers:
        assert peers.dead() == [1]
    done.set()
    thread.join()


def test_ranks_in_one_process_end_with_it_for_all_who_watch_it() -> None:
    child = os.fork()
    if child == 0:
        signal.pause()
    with closing(PeerProcesses({1: child})), closing(PeerProcesses({1: child, 2: child})) as peers:
        assert peers.dead() == []
        os.kill(child, signal.SIGKILL)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert peers.dead() == [1, 2]
    os.waitpid(child, 0)


@pytest.mark.parametrize("kind", [RendezvousError, MismatchError])
def test_an_error_of_all_ranks_has_one_text_on_all(kind: type[Exception]) -> None:
    shared = PrefixStore("group/1", HashStore())
    MemberWatch(shared, 1, [0, 1], "new_group").publish(kind("two processes claim rank 1"))
    found = MemberWatch(shared, 0, [0, 1], "new_group").failure()
    assert type(found) is kind and str(found) == "two processes claim rank 1"
