"""monitored_barrier names all missing ranks on every survivor; and the debug level."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as theirs

import torchdist_ref as dist
from tests.waits import begin_together
from torchdist_ref import simulation
from torchdist_ref.debug.monitored import run_monitored_barrier
from torchdist_ref.membership.blame import Wait
from torchdist_ref.stores import HashStore, PrefixStore
from torchdist_ref.stores.sealed import SealedStore
from torchdist_ref.testing import fill, run

SHORT = timedelta(seconds=0.2)
KEY = bytes(range(32))


def stays_away(rank: int, absent: set[int]) -> tuple[str, list[float]]:
    text = ""
    if rank not in absent:
        with pytest.raises(dist.RankStalledError) as caught:
            dist.monitored_barrier(timeout=SHORT)
        text = str(caught.value)
    tensor = fill(rank, (3,))
    dist.all_reduce(tensor)
    return text, tensor.tolist()


@pytest.mark.parametrize("backend", ["ref", "gloo"])
@pytest.mark.parametrize("absent", [{0}, {2}, {1, 3}, {0, 1, 2}])
def test_every_waiting_rank_names_all_missing_ranks(
    absent: set[int], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_together(monkeypatch, "monitored", SHORT, 4 - len(absent))
    found = run(stays_away, 4, absent, backend=backend)
    word = "Ranks" if len(absent) > 1 else "Rank"
    for rank, (text, total) in enumerate(found):
        names = ", ".join(map(str, sorted(absent)))
        expected = f"[Rank {rank}]: {word} {names} failed to pass monitoredBarrier in 200 ms (group 'world')."
        assert text.startswith(expected) if rank not in absent else text == ""
        assert total == sum(fill(r, (3,)) for r in range(4)).tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("ranks", ["threads", "processes"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_repeated_barriers_pass(world_size: int, ranks: str) -> None:
    def program(rank: int) -> None:
        for _ in range(3):
            dist.monitored_barrier(wait_all_ranks=rank % 2 == 0)

    run(program, world_size, ranks=ranks)


def test_no_rank_passes_before_all_have_arrived() -> None:
    came: list[int] = []

    def program(rank: int) -> int:
        came.append(rank)
        dist.monitored_barrier()
        return len(came)

    assert run(program, 4) == [4] * 4


def test_a_late_rank_raises_and_the_next_barrier_passes() -> None:
    gave_up = threading.Event()

    def program(rank: int) -> str:
        if rank == 1:
            assert gave_up.wait(10)
        with pytest.raises(dist.RankStalledError) as caught:
            dist.monitored_barrier(timeout=SHORT)
        gave_up.set()
        dist.monitored_barrier()
        return str(caught.value)

    first, late = run(program, 2)
    assert "[Rank 0]: Rank 1 failed" in first and "Check whether these ranks are alive" in first
    assert "[Rank 1]: Rank 1 failed" in late and "after the others had timed out" in late


@pytest.mark.parametrize("how", ["destroy", "abort"])
def test_the_leave_of_a_rank_that_has_not_arrived_ends_the_wait(how: str) -> None:
    """Once the others waited for the time-out, which `run` does not allow here."""
    left = threading.Event()

    def program(rank: int) -> str:
        group = dist.new_group()
        if rank == 1:
            dist.destroy_process_group(group) if how == "destroy" else group.abort()  # type: ignore[union-attr]
            left.set()
            return ""
        if rank == 2:
            # The leave is found by a rank that waits already, and by one that comes later.
            assert left.wait(10)
        with pytest.raises(dist.GroupAbortedError) as caught:
            dist.monitored_barrier(group, timedelta(seconds=60))
        assert 1 in caught.value.ranks
        return str(caught.value)

    found = run(program, 3, timeout=20)
    verb = "destroyed the group" if how == "destroy" else "rank 1 aborted: "
    for rank in (0, 2):
        assert (
            found[rank].startswith(f"[Rank {rank}]: Rank") and "failed to pass monitoredBarrier (group " in found[rank]
        )
        assert f"monitored_barrier on rank {rank} of group " in found[rank] and verb in found[rank]


def test_a_rank_that_has_arrived_may_leave() -> None:
    """It was interrupted, say, when the last rank had yet to come."""
    store, asked = PrefixStore("group", HashStore()), []
    store.set("monitored/1/1", "")

    def left(ranks: Sequence[int], _: str, wait: Wait) -> BaseException | None:
        if wait is not Wait.PART:
            return None
        asked.append(list(ranks))
        if len(asked) == 2:
            store.set("monitored/1/2", "")
        return dist.GroupAbortedError("rank 1 left") if 1 in ranks else None

    run_monitored_barrier(store, 0, (0, 1, 2), timedelta(seconds=20), "world", left)
    assert asked == [[1, 2], [2]]


def test_a_rank_that_is_late_is_not_named_beside_one_that_has_died() -> None:
    def meet(rank: int) -> dist.RankDiedError | None:
        if rank == 3:
            time.sleep(5)
        if rank == 1:
            time.sleep(100)
        try:
            dist.monitored_barrier()
        except dist.RankDiedError as error:
            return error
        return None

    values = simulation.run(meet, 4, faults=[simulation.Kill(rank=1, at=1.0)]).values
    for rank in (0, 2, 3):
        assert values[rank].ranks == (1,) and f"[Rank {rank}]: Rank 1 failed to pass" in str(values[rank])


def in_a_subgroup(rank: int) -> str:
    group = dist.new_group([1, 3])
    said = ""
    if rank in (0, 2):
        with pytest.warns(UserWarning, match="monitored_barrier on global rank"):
            dist.monitored_barrier(group)
    if rank == 1:
        with pytest.raises(dist.RankStalledError) as caught:
            dist.monitored_barrier(group, SHORT)
        said = str(caught.value)
    dist.barrier()
    return said


def test_missing_ranks_are_global_ranks() -> None:
    assert run(in_a_subgroup, 4, ranks="processes")[1].startswith("[Rank 1]: Rank 3 failed to pass")


def test_only_keys_of_the_last_barrier_remain_in_the_store() -> None:
    def program(rank: int) -> int:
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        counts = []
        for _ in range(3):
            dist.monitored_barrier(group)
            dist.barrier(group)
            counts.append(len([key for key in group.store.list_keys() if "monitored/" in key]))
            dist.barrier(group)
        return counts[2] - counts[1]

    assert run(program, 3) == [0, 0, 0]


def barrier_alone(whole: HashStore) -> None:
    """Call the barrier as rank 0 of two ranks, the other one of which does not come."""
    store = PrefixStore("group", SealedStore(whole, KEY))
    run_monitored_barrier(store, 0, (0, 1), timedelta(milliseconds=30), "world", lambda *_: None)


def test_a_counter_that_anybody_may_increment_lets_no_rank_pass() -> None:
    whole = HashStore()
    whole.add("sealed/group/monitored/1/arrived", 1)
    with pytest.raises(dist.RankStalledError, match="Rank 1 failed to pass"):
        barrier_alone(whole)


@pytest.mark.parametrize("key", ["1/1", "1/verdict"])
def test_a_value_that_no_member_wrote_lets_no_rank_pass(key: str) -> None:
    whole = HashStore()
    whole.set(f"sealed/group/monitored/{key}", "{}")
    with pytest.raises(dist.AuthenticationError, match="was not written by a member of this job"):
        barrier_alone(whole)


def test_a_key_that_no_member_wrote_is_no_arrival_at_the_end() -> None:
    """The rank that waits for the verdict looks for the others' keys when its time is up."""
    whole = HashStore()
    whole.set("sealed/group/monitored/1/0", "")
    store = PrefixStore("group", SealedStore(whole, KEY))
    with pytest.raises(dist.AuthenticationError, match="was not written by a member of this job"):
        run_monitored_barrier(store, 1, (0, 1), timedelta(milliseconds=30), "world", lambda *_: None)


def test_the_verdict_of_a_former_round_lets_no_rank_pass() -> None:
    whole = HashStore()
    stores = [PrefixStore("group", SealedStore(whole, KEY)) for _ in range(2)]

    def barrier(rank: int, seconds: float) -> None:
        run_monitored_barrier(stores[rank], rank, (0, 1), timedelta(seconds=seconds), "world", lambda *_: None)

    other = threading.Thread(target=barrier, args=(1, 10))
    other.start()
    barrier(0, 10)
    other.join()
    for rank in range(2):
        whole.add(f"sealed/group/monitored/rounds/{rank}", -1)
    with pytest.raises(dist.RankStalledError, match="Rank 1 failed to pass"):
        barrier(0, 0.03)


def test_a_rank_that_has_passed_needs_the_store_no_more() -> None:
    class Ending(HashStore):
        def delete_key(self, key: str | bytes) -> bool:
            raise dist.DistNetworkError("the server is gone")

    run_monitored_barrier(Ending(), 0, (0,), SHORT, "world", lambda *_: None)


class Gone(HashStore):
    """Store whose server has ended."""

    def wait_get(self, *_: Any) -> list[bytes]:
        raise dist.DistNetworkError("the server is gone")


def test_a_rank_that_ended_with_the_store_is_named() -> None:
    failures = iter([None, None, dist.RankDiedError("rank 4 died").naming([4])])
    with pytest.raises(dist.RankDiedError) as caught:
        run_monitored_barrier(Gone(), 1, (4, 5), SHORT, "world", lambda *_: next(failures))
    assert "[Rank 5]: Rank 4 failed to pass monitoredBarrier (group 'world'). rank 4 died" in str(caught.value)
    assert caught.value.ranks == (4,)
    with pytest.raises(dist.DistNetworkError, match="the server is gone"):
        run_monitored_barrier(Gone(), 1, (4, 5), SHORT, "world", lambda *_: None)


@pytest.mark.parametrize(
    ("timeout", "kind", "words"),
    [(3, TypeError, "timedelta, got 3"), (timedelta(0), ValueError, "'timeout'.*more than zero")],
)
def test_misuse_raises_a_clear_error(timeout: Any, kind: type[Exception], words: str) -> None:
    def program(rank: int) -> None:
        with pytest.raises(kind, match=words):
            dist.monitored_barrier(timeout=timeout)

    run(program, 1)


@pytest.fixture
def level_as_before() -> Any:
    before = theirs.get_debug_level()
    yield
    theirs.set_debug_level(before)


@pytest.mark.parametrize(("said", "name"), [("detail", "DETAIL"), ("Info", "INFO"), ("OFF", "OFF"), (None, "OFF")])
def test_the_environment_sets_the_level(
    said: str | None, name: str, monkeypatch: pytest.MonkeyPatch, level_as_before: None
) -> None:
    monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG", raising=False)
    if said is not None:
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", said)
    dist.set_debug_level_from_env()
    assert dist.get_debug_level() == theirs.get_debug_level() == getattr(theirs.DebugLevel, name)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "INFO")
    assert dist.get_debug_level() == getattr(dist.DebugLevel, name), "read by set_debug_level_from_env only"
    theirs.set_debug_level_from_env()
    assert dist.get_debug_level() == dist.DebugLevel.INFO


@pytest.mark.parametrize(("first", "second"), [(dist, theirs), (theirs, dist)])
@pytest.mark.parametrize("name", ["OFF", "INFO", "DETAIL"])
def test_a_level_that_one_library_sets_is_the_others(first: Any, second: Any, name: str, level_as_before: None) -> None:
    level = getattr(dist.DebugLevel, name)
    first.set_debug_level(level)
    assert second.get_debug_level() == first.get_debug_level() == level


@pytest.mark.long
def test_the_level_of_the_environment_is_both_libraries() -> None:
    # In a new interpreter, 2 s: torch reads the variable when it is imported.
    program = "import torchdist_ref as dist; print(dist.get_debug_level().name); import torch.distributed as theirs; "
    program += "print(theirs.get_debug_level().name)"
    environment = {**os.environ, "TORCH_DISTRIBUTED_DEBUG": "detail"}
    command = [sys.executable, "-c", program]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.split() == ["DETAIL", "DETAIL"]


@pytest.mark.parametrize("said", ["", "LOUD", "1"])
def test_unknown_levels_are_refused_as_by_torch(
    said: str, monkeypatch: pytest.MonkeyPatch, level_as_before: None
) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", said)
    dist.set_debug_level(dist.DebugLevel.INFO)
    for library in (dist, theirs):
        with pytest.raises(ValueError, match="TORCH_DISTRIBUTED_DEBUG must be OFF, INFO, or DETAIL"):
            library.set_debug_level_from_env()
    assert dist.get_debug_level() == dist.DebugLevel.INFO


def test_set_debug_level_requires_a_debug_level() -> None:
    with pytest.raises(TypeError, match=r"set_debug_level.*'level'.*'INFO'"):
        dist.set_debug_level("INFO")  # type: ignore[arg-type]
