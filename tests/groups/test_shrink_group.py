"""shrink_group: the remaining ranks continue, renumbered; mismatches, time-outs and misuse."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
import torch

import torchdist_ref as dist
from tests.ports import reserve_port
from torchdist_ref.testing import RankError, fill, run

# Measured below 0.5 s; on a busy machine it may be more. A wait for a time-out would take 30 minutes.
SHRINK_SECONDS = 10.0


def total(*ranks: int) -> list[float]:
    return torch.stack([fill(rank, (3,)) for rank in ranks]).sum(0).tolist()


def sum_of(rank: int, group: Any = None) -> list[float]:
    tensor = fill(rank, (3,))
    dist.all_reduce(tensor, group=group)
    return tensor.tolist()


def without_one(rank: int) -> Any:
    """Rank 1 ends; the others get an error in a call, shrink, and shrink again when rank 2 exits too."""
    pair = dist.new_group([0, 2, 3])
    dist.barrier()
    if rank == 1:
        return None
    if dist.get_backend() == "ref":
        # On Gloo, ranks that wait for each other would learn of the death only at the time-out.
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(torch.ones(3))
    first = dist.shrink_group([1])
    assert first is dist.group.WORLD and dist.get_process_group_ranks(first) == [0, 1, 2]
    place, seen = (dist.get_rank(), dist.get_world_size(), dist.get_backend()), [sum_of(rank)]
    with pytest.raises(dist.GroupAbortedError):
        dist.all_reduce(torch.ones(3), group=pair)
    seen.append(sum_of(rank, dist.new_group([2, 1])) if rank else total(2, 3))
    if rank == 2:
        return place, [*seen, total(0, 3)]
    dist.shrink_group([np.int64(1)])
    objects = [None, None]
    dist.all_gather_object(objects, rank)
    assert objects == [0, 3]
    return place, [*seen, sum_of(rank)]


@pytest.mark.parametrize(("backend", "ranks"), [("ref", "threads"), ("ref", "processes"), ("gloo", "processes")])
def test_remaining_ranks_continue(backend: str, ranks: str) -> None:
    sums = [total(0, 2, 3), total(2, 3), total(0, 3)]
    left = [((place, 3, backend), sums) for place in range(3)]
    assert run(without_one, 4, backend=backend, ranks=ranks) == [left[0], None, left[1], left[2]]


def without_the_server(rank: int, port: int, hosts: bool) -> Any:
    """Rank 0 dies, which served the store, then the one that served its successor."""
    if hosts:
        os.environ["TORCHDIST_REF_HOST_ID"] = f"host {rank % 2}"
    dist.init_process_group("ref", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=4)
    seen = [sum_of(rank)]
    for dying in (0, 1):
        if rank == dying:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(torch.ones(3))
        dist.shrink_group([0])
        dist.new_group()
        dist.monitored_barrier()
        seen.append(sum_of(rank))
    dist.destroy_process_group()
    return seen


@pytest.mark.parametrize("hosts", [False, True], ids=["shared memory", "TCP"])
def test_ranks_continue_without_the_one_that_served_the_store(hosts: bool) -> None:
    port = reserve_port()
    with pytest.raises(RankError) as caught:
        run(without_the_server, 4, port, hosts, ranks="processes", init=False)
    sums = [total(0, 1, 2, 3), total(1, 2, 3), total(2, 3)]
    assert [caught.value.outcomes[rank].value for rank in (2, 3)] == [sums, sums], caught.value


def a_smaller_group(rank: int) -> Any:
    group = dist.new_group([3, 1, 0])
    if rank in (1, 2):
        return sum_of(rank)
    smaller = dist.shrink_group([1], group)
    with pytest.raises(dist.GroupAbortedError):
        dist.barrier(group)
    assert dist.get_process_group_ranks(smaller) == [0, 3] and smaller is not dist.group.WORLD
    return sum_of(rank), sum_of(rank, smaller), dist.get_rank(smaller)


def test_a_subgroup_shrinks_without_the_other_ranks() -> None:
    world, pair = total(0, 1, 2, 3), total(0, 3)
    assert run(a_smaller_group, 4) == [(world, pair, 0), world, world, (world, pair, 1)]


def waits(rank: int) -> bool:
    """A call under way ends with the reason; the group of those that stay is not touched by it."""
    work = dist.all_reduce(torch.ones(3), async_op=True) if rank < 2 else None
    if rank == 2:
        return True
    dist.shrink_group([2], shrink_flags=1)
    assert work is not None
    with pytest.raises(dist.DistBackendError):
        work.wait()
    return sum_of(rank) == total(0, 1)


def test_pending_calls_can_be_aborted() -> None:
    assert run(waits, 3) == [True] * 3


def with_timeout(seconds: float) -> dist.ProcessGroup:
    """Return a group that shrinks within so many seconds. All ranks have to come when it is made: that has longer."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    group.timeout = seconds
    return group


def disagree(rank: int) -> str:
    group, kind = with_timeout(0.5), ""
    if rank < 3:
        with pytest.raises((dist.MismatchError, dist.RankStalledError), match="shrink_group") as caught:
            dist.shrink_group([3] if rank else [2, 3], group)
        kind = type(caught.value).__name__
    # One that leaves before is named at once.
    dist.barrier()
    return kind


def test_different_exclusions_are_a_mismatch() -> None:
    kinds = run(disagree, 4)
    assert kinds[3] == "" and "MismatchError" in kinds[:3]


def alone(rank: int) -> str:
    group = with_timeout(0.1)
    if rank == 0:
        with pytest.raises(dist.RankStalledError, match=r"shrink_group: of group 'group 1', ranks \[1\] did not come"):
            dist.shrink_group([2], group)
    # One that leaves before is named at once.
    dist.barrier()
    return "" if rank else "told"


def test_a_missing_rank_is_named_at_the_timeout() -> None:
    assert run(alone, 3) == ["told", "", ""]


MISUSE = [
    (lambda: dist.shrink_group((1,)), TypeError, r"'ranks_to_exclude'.*list of integers.*\(1,\)"),
    (lambda: dist.shrink_group(["1"]), TypeError, "list of integers"),
    (lambda: dist.shrink_group([]), ValueError, "at least one group rank from 0 to 1"),
    (lambda: dist.shrink_group([0, 1]), ValueError, "not all of them"),
    (lambda: dist.shrink_group([1, 1]), ValueError, "none twice"),
    (lambda: dist.shrink_group([2]), ValueError, "from 0 to 1"),
    (lambda: dist.shrink_group([1], shrink_flags=7), ValueError, "'shrink_flags'.*0 or 1.*7"),
    (lambda: dist.shrink_group([dist.get_rank()]), RuntimeError, "other ranks than this one.*end its process"),
    (lambda: dist.shrink_group([0], -100), ValueError, "a group that this rank is in"),
]


def misuse(rank: int, case: int) -> bool:
    call, kind, words = MISUSE[case]
    with pytest.raises(kind, match=words):
        call()
    return sum_of(rank) == total(0, 1)


@pytest.mark.parametrize("case", range(len(MISUSE)), ids=[case[2] for case in MISUSE])
def test_misuse_raises_and_the_group_remains_usable(case: int) -> None:
    assert run(misuse, 2, case) == [True, True]


def test_a_counter_that_anybody_may_write_divides_no_ranks() -> None:
    def program(rank: int) -> Any:
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        group.store.add(f"shrink/rounds/{rank}", 10 * rank)
        if rank == 2:
            return None
        return sum_of(rank, dist.shrink_group([2], group))

    assert run(program, 3) == [total(0, 1), total(0, 1), None]
