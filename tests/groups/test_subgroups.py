"""new_subgroups, split_group and unsorted members: values of calls in the groups, and torch beside."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as theirs

import torchdist_ref as dist
from tests.torch_versions import needs_torch
from tests.torchs_world import start_torch
from torchdist_ref.stores.sealed import innermost
from torchdist_ref.testing import fill, run

# A busy machine needs some of it; less than what `run` allows.
SHORT = timedelta(seconds=20)


def total_of(group: Any, rank: int) -> list[float]:
    tensor = fill(rank, (4,))
    dist.all_reduce(tensor, group=group)
    return tensor.tolist()


def wanted_of(members: list[int]) -> list[float]:
    return torch.stack([fill(rank, (4,)) for rank in members]).sum(0).tolist()


@pytest.mark.parametrize("backend", ["ref", "gloo"])
@pytest.mark.parametrize(("size", "world_size"), [(1, 2), (2, 4), (4, 4), (1, 1)])
def test_new_subgroups_of_equal_size_are_in_rank_order(size: int, world_size: int, backend: str) -> None:
    def program(rank: int) -> tuple[list[int], list[float], int]:
        mine, every = dist.new_subgroups(size)
        assert every[rank // size] is mine and every.count(-100) == len(every) - 1
        return dist.get_process_group_ranks(mine), total_of(mine, rank), len(every)

    for rank, found in enumerate(run(program, world_size, backend=backend)):
        members = list(range(rank - rank % size, rank - rank % size + size))
        assert found == (members, wanted_of(members), world_size // size)


def enumerated(library: Any, rank: int) -> list[Any]:
    mine, every = library.new_subgroups_by_enumeration([[3, 1], [2]])
    part = None if mine is None else library.get_process_group_ranks(mine)
    half, halves = library.new_subgroups(2)
    ranks = [library.get_rank(group) for group in (*every, *halves)]
    return [part, library.get_process_group_ranks(half), ranks]


def unsorted(library: Any, rank: int) -> int:
    found: int = library.get_rank(library.new_group([2, 0, 3], sort_ranks=False))
    return found


def beside_torch(rank: int, path: str, program: Any) -> tuple[Any, Any]:
    start_torch(store=theirs.FileStore(path, 4), rank=rank, world_size=4)
    try:
        found = program(dist, rank), program(theirs, rank)
        # A rank that left now would break the connections that others are still making.
        theirs.barrier()
        return found
    finally:
        theirs.destroy_process_group()


def test_groups_match_torchs(tmp_path: Path) -> None:
    found = run(beside_torch, 4, str(tmp_path / "store"), enumerated, ranks="processes")
    assert [ours for ours, _ in found] == [oracle for _, oracle in found]
    assert [ours[0] for ours, _ in found] == [None, [1, 3], [2], [1, 3]]


@needs_torch("2.13", "the argument sort_ranks of new_group")
def test_torch_keeps_the_same_order(tmp_path: Path) -> None:
    found = run(beside_torch, 4, str(tmp_path / "store"), unsorted, ranks="processes")
    assert found == [(rank, rank) for rank in (1, -1, 0, 2)]


def in_given_order(rank: int) -> list[float]:
    group = dist.new_group([2, 0, 1], sort_ranks=False)
    row = torch.zeros(6)
    dist.all_gather_into_tensor(row, fill(rank, (2,)), group)
    return row.tolist()


def test_unsorted_ranks_keep_their_order() -> None:
    wanted = torch.cat([fill(rank, (2,)) for rank in (2, 0, 1)]).tolist()
    assert run(in_given_order, 3) == [wanted] * 3


def split(rank: int) -> list[Any]:
    """Split the group of all, then one part of it, which does not involve the other ranks."""
    mine = dist.split_group(split_ranks=[[3, 0, 2], [1]], timeout=SHORT)
    assert mine is not None
    found: list[Any] = [dist.get_process_group_ranks(mine), total_of(mine, rank)]
    if rank != 1:
        half = dist.split_group(mine, [[2, 1]], group_desc="half")
        found += [half and dist.get_process_group_ranks(half), half and total_of(half, rank)]
        again = dist.split_group(mine, [[0], [1, 2]])
        assert again is not None and (half is None or (half.group_desc, again is not half) == ("half", True))
        found.append(total_of(again, rank))
        dist.destroy_process_group(again)
    return [*found, total_of(None, rank)]


@pytest.mark.parametrize("backend", ["ref", "gloo"])
@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_split_group_involves_only_members(ranks: str, backend: str) -> None:
    every = wanted_of([0, 1, 2, 3])
    first, both = [[0, 2, 3], wanted_of([0, 2, 3])], wanted_of([2, 3])
    assert run(split, 4, ranks=ranks, backend=backend) == [
        [*first, None, None, wanted_of([0]), every],
        [[1], wanted_of([1]), every],
        [*first, [2, 3], both, both, every],
        [*first, [2, 3], both, both, every],
    ]


def test_split_group_on_another_backend() -> None:
    def program(rank: int) -> tuple[str, list[float]]:
        mine = dist.split_group(split_ranks=[[0, 1]], backend="gloo")
        return dist.get_backend(mine), total_of(mine, rank)

    assert run(program, 2) == [("gloo", wanted_of([0, 1]))] * 2


def split_differently(rank: int) -> tuple[str, list[float]]:
    with pytest.raises(dist.DistBackendError) as caught:
        dist.split_group(split_ranks=[[0, 1]] if rank else [[0], [1]], timeout=SHORT)
        # A rank that publishes first, with a group of its own, learns nothing of the other rank.
        raise dist.MismatchError("split_group: alone, All ranks must pass the same.")
    return str(caught.value), total_of(None, rank)


def test_different_splits_are_a_mismatch() -> None:
    for text, total in run(split_differently, 2):
        assert "split_group" in text and "All ranks must pass the same" in text
        assert total == wanted_of([0, 1])


MISUSE: list[tuple[str, Any, str]] = [
    ("size of zero", lambda: dist.new_subgroups(0), "'group_size'.*from 1 to 2, got 0"),
    ("size too large", lambda: dist.new_subgroups(3), "'group_size'.*from 1 to 2, got 3"),
    ("no list", lambda: dist.new_subgroups_by_enumeration([]), "'ranks_per_subgroup_list'.*at least one"),
    ("shared rank", lambda: dist.new_subgroups_by_enumeration([[0, 1], [1]]), r"Rank 1 .*\[0, 1\] and \[1\]"),
    ("out of range", lambda: dist.new_subgroups_by_enumeration([[7]]), r"'ranks'.*0 to 1.*\[7\]"),
    ("no split", lambda: dist.split_group(split_ranks=[]), "'split_ranks'.*at least one list"),
    ("split too far", lambda: dist.split_group(split_ranks=[[0, 2]]), "'split_ranks'.*from 0 to 1"),
    ("split twice", lambda: dist.split_group(split_ranks=[[0], [1, 0]]), "'split_ranks'.*no rank twice"),
    ("empty split", lambda: dist.split_group(split_ranks=[[0, 1], []]), "'split_ranks'.*at least one rank each"),
    ("split of another's", lambda: dist.split_group(-100, [[0]]), "'parent_pg'.*that this rank is in"),
]


@pytest.mark.parametrize(("call", "words"), [case[1:] for case in MISUSE], ids=[case[0] for case in MISUSE])
def test_misuse_raises_a_clear_error(call: Any, words: str) -> None:
    def program(rank: int) -> list[float]:
        with pytest.raises(dist.ArgumentError, match=words):
            call()
        return total_of(None, rank)

    assert run(program, 2) == [wanted_of([0, 1])] * 2


def test_sizes_must_divide_and_a_default_needs_devices() -> None:
    def program(rank: int) -> None:
        with pytest.raises(ValueError, match="divisor of the 3 ranks, got 2"):
            dist.new_subgroups(2)
        if not torch.accelerator.device_count():
            with pytest.raises(ValueError, match="'group_size' is the number of accelerators"):
                dist.new_subgroups()

    run(program, 3)


def test_barrier_raises_at_its_own_timeout() -> None:
    def program(rank: int) -> None:
        if rank == 0:
            with pytest.raises(dist.RankStalledError, match=r"barrier: not done after 0\.05 s"):
                dist.barrier(timeout=timedelta(seconds=0.05))
            dist.send(torch.ones(1), 1)
            return
        dist.recv(torch.ones(1), 0)
        dist.barrier(timeout=SHORT)

    run(program, 2)


def test_ranks_missing_from_a_split_are_named_at_the_timeout() -> None:
    def program(rank: int) -> list[float]:
        if rank == 0:
            with pytest.raises(
                dist.RankStalledError, match=r"split_group.*ranks \[1, 2\] did not come in 0\.1 s.*rank 0"
            ):
                dist.split_group(split_ranks=[[0, 1, 2]], timeout=timedelta(seconds=0.1))
        return total_of(None, rank)

    assert run(program, 3) == [wanted_of([0, 1, 2])] * 3


def forge(group: dist.ProcessGroup, key: str) -> None:
    """Write a key below the sealed keys of this world, as a process without the key can."""
    whole = innermost(group.store)
    (met,) = (each for each in whole.list_keys() if each.endswith("/met"))
    whole.set(f"{met.removesuffix('met')}sealed/{key}", "")


def test_a_counter_that_anybody_may_write_divides_no_ranks() -> None:
    def program(rank: int) -> list[list[float]]:
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        found = []
        for _ in range(2):
            group.store.add(f"split/rounds/{rank}", 10 * rank)
            found.append(total_of(dist.split_group(group, split_ranks=[[1, 0]], timeout=SHORT), rank))
        dist.barrier()
        return found

    assert run(program, 2) == [[wanted_of([0, 1])] * 2] * 2


def test_a_key_that_no_member_wrote_is_no_arrival() -> None:
    def program(rank: int) -> None:
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        if rank == 0:
            forge(group, "split_group/group.1/1/0/came/1")
            with pytest.raises(dist.AuthenticationError, match=r"'split_group/group\.1/1/0/came/1' was not written by"):
                dist.split_group(group, split_ranks=[[0, 1]], timeout=SHORT)
        dist.barrier()

    run(program, 2)
