"""Misuse raises one clear exception: the function, the argument, the expected value, and the rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from torchdist_ref.testing import run

T = torch.ones(4)
L = [torch.ones(4), torch.ones(4)]
I64 = torch.ones(4, dtype=torch.int64)

# (name, call, exception, words that must be in the message)
CASES: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    ("list for tensor", lambda: dist.all_reduce(L), TypeError, "all_reduce.*`tensor`.*list"),
    ("number for op", lambda: dist.all_reduce(T, 0), TypeError, "all_reduce.*'op'.*ReduceOp.*got 0"),
    ("text for op", lambda: dist.all_reduce(T, "sum"), TypeError, "'op'.*'sum'"),
    ("bits of floats", lambda: dist.all_reduce(T, dist.ReduceOp.BAND), ValueError, "all_reduce.*BAND.*float32"),
    ("mean of booleans", lambda: dist.all_reduce(T.bool(), dist.ReduceOp.AVG), ValueError, "AVG.*bool"),
    ("expanded output", lambda: dist.all_reduce(torch.ones(1).expand(4)), ValueError, "overlap"),
    ("root too large", lambda: dist.broadcast(T, 2), ValueError, r"broadcast.*'src'.*\[0, 1\].*got 2.*rank"),
    ("root negative", lambda: dist.broadcast(T, -1), ValueError, "'src'.*got -1"),
    ("root missing", lambda: dist.broadcast(T), ValueError, "Must specify src or group_src"),
    ("root twice", lambda: dist.broadcast(T, 0, group_src=0), ValueError, "both src and group_src"),
    ("group root too large", lambda: dist.broadcast(T, group_src=2), ValueError, "'group_src'.*0 to 1.*got 2"),
    ("destination too large", lambda: dist.reduce(T, 5), ValueError, "reduce.*'dst'.*got 5"),
    ("short list", lambda: dist.all_gather(L[:1], T), ValueError, "all_gather.*'tensor_list'.*2 tensors.*got 1"),
    ("list of numbers", lambda: dist.all_gather([1, 2], T), TypeError, "all_gather.*`tensor_list`"),
    ("two dtypes", lambda: dist.all_gather(L, I64), ValueError, "different dtypes.*float32.*int64"),
    ("entry of wrong size", lambda: dist.all_gather([torch.ones(3)] * 2, T), ValueError, r"tensor_list\[\d\]'.*4 elem"),
    ("small output", lambda: dist.all_gather_into_tensor(torch.ones(7), T), ValueError, "'output_tensor'.*8 elements"),
    ("block of wrong size", lambda: dist.reduce_scatter(torch.ones(3), L), ValueError, r"input_list\[\d\]"),
    ("input too small", lambda: dist.reduce_scatter_tensor(T, torch.ones(7)), ValueError, "'input'.*8 elements"),
    ("no list on the root", lambda: dist.gather(T, None, dist.get_rank()), ValueError, "``gather_list`` must be spec"),
    ("list off the root", lambda: dist.gather(T, L, 1 - dist.get_rank()), ValueError, "must NOT be specified"),
    ("no list to scatter", lambda: dist.scatter(T, None, dist.get_rank()), ValueError, "``scatter_list`` must be sp"),
    ("uneven exchange", lambda: dist.all_to_all(L, [T, torch.ones(3)]), ValueError, r"input_tensor_list\[1\]"),
    ("send to oneself", lambda: dist.send(T, dist.get_rank()), ValueError, "should not be the same as the rank"),
    ("send too far", lambda: dist.send(T, 99), ValueError, "send.*'dst'.*got 99"),
    ("odd tag", lambda: dist.isend(T, 1 - dist.get_rank(), tag=-3), ValueError, "isend.*'tag'.*got -3"),
    ("tag as text", lambda: dist.recv(T, 0, tag="a"), TypeError, "recv.*'tag'.*got 'a'"),
    ("a group that is none", lambda: dist.barrier("workers"), ValueError, "'group'.*new_group.*'workers'"),
    ("members twice", lambda: dist.new_group([0, 0]), ValueError, r"duplicate.*\[0, 0\]"),
    ("members out of range", lambda: dist.new_group([0, 3]), ValueError, r"'ranks'.*0 to 1.*\[0, 3\]"),
    ("description as number", lambda: dist.new_group(group_desc=5), TypeError, "'group_desc'.*got 5"),
    ("part's description", lambda: dist.split_group(None, [[0, 1]], group_desc=5), TypeError, "'group_desc'.*got 5"),
    ("time-out as number", lambda: dist.new_group(timeout=5), TypeError, "timedelta, got 5"),
    ("time-out of zero", lambda: dist.new_group(timeout=timedelta(0)), ValueError, "'timeout'.*more than zero"),
    ("init twice", lambda: dist.init_process_group("ref"), ValueError, "twice"),
    ("no such member", lambda: dist.get_global_rank(world(), 4), ValueError, "Group rank 4 is not part"),
    ("no such rank", lambda: dist.get_group_rank(world(), 7), ValueError, "Global rank 7 is not part"),
    ("backend of no group", lambda: dist.get_backend(-100), ValueError, "get_backend.*'group'"),
]


def world() -> dist.ProcessGroup:
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    return group


@pytest.mark.parametrize(("call", "kind", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_misuse_raises_a_clear_error(call: Callable[[], Any], kind: type[Exception], words: str) -> None:
    def program(rank: int) -> float:
        try:
            call()
        except kind as error:
            assert re.search(words, str(error), re.S), str(error)
        else:
            raise AssertionError("nothing was raised")
        # All ranks made the same mistake, and none of them has hurt the group.
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor)
        return tensor.item()

    assert run(program, 2) == [3.0, 3.0]


BEFORE = [
    lambda: dist.all_reduce(T),
    lambda: dist.get_rank(),
    lambda: dist.get_world_size(),
    lambda: dist.barrier(),
    lambda: dist.new_group(),
    lambda: dist.destroy_process_group(),
    lambda: dist.send(T, 1),
    lambda: dist.get_backend(),
]


@pytest.mark.parametrize("call", BEFORE)
def test_a_call_before_init_process_group_raises(call: Callable[[], Any]) -> None:
    with pytest.raises(dist.NotInitializedError, match="init_process_group"):
        call()


INITS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"backend": "smoke-signals"}, ValueError, "'backend'.*gloo.*ref.*'smoke-signals'"),
    ({"backend": 7}, ValueError, "'backend'.*got 7"),
    ({"rank": 2}, RuntimeError, "'rank'.*0 to 1.*got 2"),
    ({"rank": -1}, ValueError, "'rank'.*got -1"),
    ({"world_size": 0}, ValueError, "'world_size'.*got 0"),
    ({"timeout": 3.0}, TypeError, "timedelta, got 3.0"),
    ({"timeout": timedelta(seconds=-1)}, ValueError, "'timeout'"),
    ({"store": "a store"}, TypeError, "'store'.*got 'a store'"),
    ({"init_method": "env://"}, ValueError, "'store' or 'init_method', not both"),
]


@pytest.mark.parametrize(("change", "kind", "words"), INITS, ids=[str(case[0]) for case in INITS])
def test_wrong_arguments_of_init_are_named(change: dict[str, Any], kind: type[Exception], words: str) -> None:
    arguments = {"backend": "ref", "store": dist.HashStore(), "rank": 0, "world_size": 2} | change
    with pytest.raises(kind, match=words):
        dist.init_process_group(**arguments)
    assert not dist.is_initialized()


def outside(rank: int) -> object:
    group = dist.new_group([0])
    if rank == 0:
        dist.barrier(group)
        return None
    with pytest.warns(UserWarning, match="all_reduce on global rank 1 which does not belong"):
        assert dist.all_reduce(T, group=group) is None
    assert (dist.get_rank(group), dist.get_world_size(group), group) == (-1, -1, dist.GroupMember.NON_GROUP_MEMBER)
    return None


def test_a_rank_outside_a_group_gets_a_warning_and_none() -> None:
    run(outside, 2, ranks="processes")


def different_members(rank: int) -> tuple[str, float]:
    try:
        dist.new_group([0, 1, 2] if rank else [1, 0])
    except dist.MismatchError as error:
        text = str(error)
    else:
        text = ""
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    return text, tensor.item()


def test_new_group_with_different_members_is_a_mismatch_on_all_ranks() -> None:
    for text, total in run(different_members, 3):
        assert "[0,1,2]" in text and "[0,1]" in text and "same order" in text
        assert total == 6.0


def test_tensors_of_other_devices_are_refused_by_name() -> None:
    def program(rank: int) -> None:
        with pytest.raises(dist.UnsupportedError, match=r"'ref' works on tensors of the CPU and accelerators.*on meta"):
            dist.all_reduce(torch.ones(3, device="meta"))

    run(program, 1)


def use_after_destroy(rank: int) -> str:
    group = dist.new_group()
    dist.destroy_process_group(group)
    with pytest.raises(dist.GroupAbortedError, match=r"all_reduce.*destroyed") as caught:
        dist.all_reduce(torch.ones(2), group=group)
    return type(caught.value).__name__


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_a_destroyed_group_raises_on_use(backend: str) -> None:
    assert run(use_after_destroy, 2, backend=backend) == ["DestroyedGroupError"] * 2


def stay_away(rank: int) -> str:
    if rank == 0:
        with pytest.raises(dist.RankStalledError, match="on rank 0: rank 1 of 2 did not join in time"):
            dist.new_group(timeout=timedelta(seconds=0.2))
    # One that leaves before is named at once.
    dist.barrier()
    return "" if rank else "RankStalledError"


def test_new_group_names_a_missing_rank_at_its_timeout() -> None:
    assert run(stay_away, 2) == ["RankStalledError", ""]


def test_the_longest_time_out_is_one_that_clocks_accept() -> None:
    def program(rank: int) -> float:
        group = dist.new_group(timeout=timedelta.max)
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor, group=group)
        return tensor.item()

    assert run(program, 2) == [3.0, 3.0]
