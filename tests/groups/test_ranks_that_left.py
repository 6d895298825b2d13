"""A rank that has left the world is named at once by those who create a group with it, and so is why it left."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdist_ref as dist
import torchdist_ref.groups.world
from tests.backends.failing_ranks import CULPRIT, SURVIVORS, errors_of_survivors
from tests.covering import covering
from tests.outcomes import NEVER, failing
from tests.ports import reserve_port
from torchdist_ref.processes.linux_calls import pidfd_open
from torchdist_ref.testing import RankError, run

CALLS: dict[str, Callable[[], Any]] = {
    "new_group": lambda: dist.new_group([0, 1, 2]),
    "split_group": lambda: dist.split_group(split_ranks=[[0, 1, 2]]),
}
HOSTS = ["AAA", "AAB", "ABA"]


def initialize(rank: int, port: int, hosts: str) -> None:
    os.environ["TORCHDIST_REF_HOST_ID"] = f"host {hosts[rank]}"
    where, size = f"tcp://127.0.0.1:{port}", len(hosts)
    dist.init_process_group("ref", init_method=where, rank=rank, world_size=size, timeout=NEVER)


def errors_without_the_culprit(hosts: str, leave: Callable[[], None], call: Callable[[], Any]) -> list[str]:
    """Return the errors of a call of the survivors, after the culprit has left; its process lives on."""
    port = reserve_port()

    def program(rank: int) -> None:
        initialize(rank, port, hosts)
        dist.barrier()
        if rank == CULPRIT:
            leave()
            signal.pause()
        call()

    found = errors_of_survivors(program)
    return [found[rank].text for rank in SURVIVORS]


def leave_with_an_error() -> None:
    try:
        raise ValueError("no data")
    except ValueError:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("hosts", HOSTS)
def test_a_rank_that_destroyed_the_world_is_named_at_once(hosts: str, name: str) -> None:
    for text in errors_without_the_culprit(hosts, dist.destroy_process_group, CALLS[name]):
        assert name in text and "rank 1 destroyed the group" in text, text


@pytest.mark.parametrize("hosts", HOSTS)
def test_the_error_with_which_a_rank_left_the_world_is_passed_on(hosts: str) -> None:
    for text in errors_without_the_culprit(hosts, leave_with_an_error, CALLS["new_group"]):
        assert "new_group" in text and "rank 1 aborted: " in text and "no data" in text, text


LEAVES: dict[str, Callable[[Any, Any], None]] = {
    "all groups": lambda failed, shared: dist.destroy_process_group(),
    "the shared group": lambda failed, shared: dist.destroy_process_group(shared),
    "one after the other": lambda failed, shared: [dist.destroy_process_group(each) for each in (failed, shared)],
}
WAITS: dict[str, Callable[[Any], Any]] = {
    "recv": lambda shared: dist.recv(torch.ones(3), 0, shared),
    "all_reduce": lambda shared: dist.all_reduce(torch.ones(3), group=shared),
    "new_group": lambda shared: dist.new_group([0, 2]),
}


@pytest.mark.parametrize(
    ("leave", "wait", "hosts"),
    covering(
        [("all groups", "new_group"), *((leave, wait) for leave in LEAVES for wait in list(WAITS)[:2])],
        ("AAA", "ABC"),
    ),
)
def test_a_rank_that_leaves_after_a_death_elsewhere_passes_its_cause_on(leave: str, wait: str, hosts: str) -> None:
    """Rank 1 dies in a group with rank 0, which leaves. Rank 2 shares another group with rank 0 only."""
    port = reserve_port()

    def program(rank: int) -> None:
        initialize(rank, port, hosts)
        failed, shared = dist.new_group([0, 1]), dist.new_group([0, 2])
        dist.barrier()
        if rank == CULPRIT:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 2:
            WAITS[wait](shared)
        with pytest.raises(dist.RankDiedError) as caught:
            dist.all_reduce(torch.ones(3), group=failed)
        # No exception is handled here.
        LEAVES[leave](failed, shared)
        raise caught.value

    text = errors_of_survivors(program)[2].text
    assert wait in text and "rank 0 destroyed the group" in text, text
    assert "It left after: RankDiedError: call 0, all_reduce" in text and "rank 1 died" in text, text


def leave_after_a_shrink(rank: int) -> str:
    """Rank 2 aborts, the others go on without it. Then rank 0 leaves in good order, and rank 1 misses it."""
    with pytest.raises(dist.DistBackendError):
        if rank == 2:
            torchdist_ref.groups.world.abort("no data")
        dist.all_reduce(torch.ones(3))
    if rank == 2:
        return ""
    dist.shrink_group([2])
    dist.barrier()
    if rank == 0:
        dist.destroy_process_group()
        return ""
    with pytest.raises(dist.GroupAbortedError) as caught:
        dist.all_reduce(torch.ones(3))
    return str(caught.value)


def test_a_failure_that_was_mended_is_not_passed_on() -> None:
    text = run(leave_after_a_shrink, 3)[1]
    assert "rank 0 destroyed the group" in text and "after" not in text, text


def destroy_at_once(rank: int) -> list[int]:
    found = []
    for _ in range(20):
        group = dist.new_group([0, 1, 2])
        found.append(dist.get_rank(group))
        parts = dist.split_group(group, split_ranks=[[0, 1, 2]])
        dist.destroy_process_group(group)
        found.append(dist.get_world_size(parts))
    return found


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_a_rank_that_leaves_after_its_part_fails_no_other(ranks: str) -> None:
    assert run(destroy_at_once, 3, ranks=ranks) == [[rank, 3] * 20 for rank in range(3)]


def shrink_when_rank_0_has_ended(rank: int, port: int, hosts: str) -> tuple[str, str]:
    """Rank 1 dies, then rank 2. Rank 0, which served the store, finds that out and ends before rank 3 calls."""
    initialize(rank, port, hosts)
    pids: list[Any] = [None] * 4
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(3))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        with pytest.raises(dist.RankDiedError, match="rank 2 died"):
            dist.shrink_group([1])
        dist.destroy_process_group()
        os._exit(7)
    assert select.select([pidfd_open(pids[0])], [], [], 20)[0]
    return failing(lambda: dist.shrink_group([1]))


@pytest.mark.parametrize("hosts", ["AAAA", "ABAB", "ABAC"])
def test_a_second_death_is_named_by_a_rank_that_shrinks_late(hosts: str) -> None:
    with pytest.raises(RankError) as caught:
        run(shrink_when_rank_0_has_ended, 4, reserve_port(), hosts, ranks="processes", init=False)
    kind, text = caught.value.outcomes[3].value
    assert kind == "RankDiedError" and "shrink_group" in text and "rank 2 died" in text, (kind, text, caught.value)
