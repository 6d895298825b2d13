"""Events of a group in its store: what a rank publishes of itself, and what the others find."""

from __future__ import annotations

import os
from typing import Any

from torchdist_ref.errors import DistNetworkError
from torchdist_ref.membership.blame import Wait
from torchdist_ref.membership.events import Published
from torchdist_ref.membership.group_events import GroupEvents
from torchdist_ref.processes.identity import host_identity
from torchdist_ref.stores import HashStore, PrefixStore
from torchdist_ref.stores.sealed import SealedStore


def test_a_reason_that_is_no_text_can_be_read() -> None:
    store = PrefixStore("group", HashStore())
    GroupEvents(store, 1, [0, 4]).publish(Published(4, text="no \udce9.pt"))
    assert r"rank 4 failed: no \udce9.pt" in str(GroupEvents(store, 0, [0, 4]).find("barrier"))


def test_a_member_that_has_done_its_part_may_fail() -> None:
    store = PrefixStore("group", HashStore())
    GroupEvents(store, 1, [0, 4, 6]).publish(Published(4, text="its program ended"))
    failures = GroupEvents(store, 0, [0, 4, 6])
    assert failures.known([2], "all_reduce", Wait.ELSEWHERE) is None
    found = failures.known([1, 2], "all_reduce", Wait.ELSEWHERE)
    assert str(found) == "all_reduce: rank 4 failed: its program ended" and found is not None and found.ranks == (4,)


def members_of(store: PrefixStore, count: int = 4) -> list[GroupEvents]:
    return [GroupEvents(store, rank, [0, 4, 6, 7][:count]) for rank in range(count)]


def test_ranks_that_leave_one_after_the_other_are_known() -> None:
    observer, *others = members_of(PrefixStore("group", HashStore()))
    assert observer.known([1, 2, 3], "barrier", Wait.PART) is None
    for left, rank in enumerate((3, 1, 2), 1):
        others[rank - 1].publish_leave()
        found = observer.known([1, 2, 3], "barrier", Wait.PART)
        assert found is not None and len(found.ranks) == left and [0, 4, 6, 7][rank] in found.ranks
    assert str(found) == "barrier: ranks 1 (global 4), 2 (global 6), 3 (global 7) destroyed the group"
    assert observer.known([0], "barrier", Wait.PART) is None


def test_a_rank_that_left_with_a_reason_is_named_before_those_without() -> None:
    observer, first, second, third = members_of(PrefixStore("group", HashStore()))
    second.publish(Published(6, text="no \udce9.pt"))
    second.explain_leave("something else")
    third.explain_leave("RankDiedError: x")
    for each in (first, second, third):
        each.publish_leave()
    found = observer.known([1, 2, 3], "barrier", Wait.PART)
    assert found is not None and found.ranks == (6,)
    assert str(found) == r"barrier: rank 6 failed: no \udce9.pt"


def test_a_leave_that_no_member_wrote_ends_no_wait() -> None:
    whole = HashStore()
    store = PrefixStore("group", SealedStore(whole, bytes(range(32))))
    for key in ("left/1", "last that left"):
        whole.set(f"sealed/group/{key}", "1")
    assert members_of(store)[0].known([1], "barrier", Wait.PART) is None


class Gone(HashStore):
    """Store whose server ends after one look for failures and leaves."""

    requests = 0

    def compare_set(self, *arguments: Any) -> bytes:
        self.requests += 1
        if self.requests > 4:
            raise DistNetworkError("the server is gone")
        return super().compare_set(*arguments)


def test_a_rank_that_left_before_the_store_ended_is_not_blamed_for_that() -> None:
    """Another rank served the store: the wait that fails finds that one."""
    observer, other = members_of(PrefixStore("group", Gone()), 2)
    other.publish_leave()
    assert observer.known([1], "new_group", Wait.PART) is not None
    assert observer.known([1], "new_group", Wait.PART) is None


def test_a_rank_that_left_before_its_process_ended_has_not_died() -> None:
    store = PrefixStore("group", HashStore())
    child = os.fork()
    if child == 0:
        os._exit(0)
    failures = GroupEvents(store, 0, [0, 4])
    failures.watch({1: f"{host_identity()}|{child}:0"})
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    GroupEvents(store, 1, [0, 4]).publish_leave()
    for found in (failures.known([1], "barrier", Wait.ELSEWHERE), failures.find("barrier")):
        assert str(found) == "barrier: rank 1 (global 4) destroyed the group"
    assert store.get_if_present("failure in the group") is None
    os.waitpid(child, 0)


def test_a_failure_counts_before_a_leave() -> None:
    store = PrefixStore("group", HashStore())
    members = [GroupEvents(store, rank, [0, 4, 6]) for rank in range(3)]
    members[1].publish_leave()
    assert "rank 1 (global 4) destroyed the group" in str(members[0].find("barrier"))
    members[2].publish(Published(6, text="no data"))
    assert str(members[0].find("barrier")) == "barrier: rank 6 failed: no data"
    assert str(members[0].met) == "barrier: rank 1 (global 4) destroyed the group"


def test_a_rank_that_ends_its_calls_to_continue_fails_no_meeting() -> None:
    store = PrefixStore("group", HashStore())
    GroupEvents(store, 1, [0, 4]).publish(Published(4, text="shrink_group", continues=True))
    other = GroupEvents(store, 0, [0, 4])
    assert other.known([1], "shrink_group", Wait.ELSEWHERE) is None
    assert str(other.find("all_reduce")) == "all_reduce: rank 4 failed: it continues in another group: shrink_group"
