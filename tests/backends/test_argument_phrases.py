"""Wrong operands of the methods of groups: an error of torch's type, with the phrase that torch's Gloo has for it.

torch's own Gloo group gets the same calls. Both backends are alone in their group, so that a call that begins by
mistake ends at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as theirs
from torch.distributed import distributed_c10d as c10d

import torchdist_ref as dist
from torchdist_ref.groups.world import thread_rank
from torchdist_ref.testing import fill, run


def rooted(kind: Any, rank: int, tensor: int = 0) -> Any:
    options = kind()
    options.rootRank = rank
    if tensor:
        options.rootTensor = tensor
    return options


def one(size: int = 3, dtype: Any = torch.float32) -> torch.Tensor:
    return fill(1, (size,), dtype)


# What is wrong, the call, and the phrase.
CASES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "allreduce of nothing": (lambda g: g.allreduce([]), "There were no tensor arguments to this function"),
    "allreduce of two sizes": (lambda g: g.allreduce([one(), one(4)]), "invalid tensor size at index 0"),
    "allreduce of two dtypes": (lambda g: g.allreduce([one(), one(3, torch.int32)]), "invalid tensor type at index 0"),
    "coalesced allreduce of nothing": (
        lambda g: g.allreduce_coalesced([]),
        "There were no tensor arguments to this function",
    ),
    "root of broadcast": (lambda g: g.broadcast([one()], rooted(c10d.BroadcastOptions, 5)), "invalid root rank: 5"),
    "negative root": (lambda g: g.broadcast([one()], rooted(c10d.BroadcastOptions, -1)), "invalid root rank: -1"),
    "root tensor": (lambda g: g.broadcast([one()], rooted(c10d.BroadcastOptions, 0, 2)), "invalid root tensor: 2"),
    "broadcast of nothing": (lambda g: g.broadcast([], c10d.BroadcastOptions()), "There were no tensor arguments"),
    "root of reduce": (lambda g: g.reduce([one()], rooted(c10d.ReduceOptions, 7)), "invalid root rank: 7"),
    "reduce of two": (
        lambda g: g.reduce([one(), one()], c10d.ReduceOptions()),
        "requires a single-element tensor list",
    ),
    "no lists for allgather": (
        lambda g: g.allgather([], [one()]),
        "requires input/output tensor lists to have the same length",
    ),
    "outputs of allgather": (
        lambda g: g.allgather([[one()] * 3], [one()]),
        r"invalid output tensor list at index 0 \(expected length 1, got 3\)",
    ),
    "dtype in allgather": (lambda g: g.allgather([[one(3, torch.int32)]], [one()]), "invalid tensor type at index 0"),
    "size in allgather": (lambda g: g.allgather([[one(4)]], [one()]), "invalid tensor size at index 0"),
    "root of gather": (lambda g: g.gather([[one()]], [one()], rooted(c10d.GatherOptions, 9)), "invalid root rank: 9"),
    "gather of two": (
        lambda g: g.gather([[one()]], [one(), one()], c10d.GatherOptions()),
        "requires a single-element input tensor list",
    ),
    "no lists for gather": (
        lambda g: g.gather([], [one()], c10d.GatherOptions()),
        "requires a single-element output list containing a list with 1 tensors",
    ),
    "outputs of gather": (
        lambda g: g.gather([[one()] * 3], [one()], c10d.GatherOptions()),
        "Incorrect output list size 3. Output list size should be 1",
    ),
    "dtype in gather": (
        lambda g: g.gather([[one(3, torch.int32)]], [one()], c10d.GatherOptions()),
        "invalid tensor type at index 0",
    ),
    "root of scatter": (
        lambda g: g.scatter([one()], [[one()]], rooted(c10d.ScatterOptions, 9)),
        "invalid root rank: 9",
    ),
    "scatter to two": (
        lambda g: g.scatter([one(), one()], [[one()]], c10d.ScatterOptions()),
        "requires a single-element output tensor list",
    ),
    "no lists for scatter": (
        lambda g: g.scatter([one()], [], c10d.ScatterOptions()),
        "requires a single-element input list containing a list with 1 tensors",
    ),
    "inputs of scatter": (
        lambda g: g.scatter([one()], [[one()] * 3], c10d.ScatterOptions()),
        "Incorrect input list size 3. Input list size should be 1",
    ),
    "inputs of reduce_scatter": (
        lambda g: g.reduce_scatter([one()], [[one()] * 3]),
        "invalid input tensor list size, must be world size",
    ),
    "reduce_scatter to two": (lambda g: g.reduce_scatter([one()] * 2, [[one()]] * 2), "only supports 1 output"),
    "alltoall of three": (
        lambda g: g.alltoall([one()] * 3, [one()] * 3),
        "input tensor list size 3 does not match world size 1",
    ),
    "send of two": (lambda g: g.send([one(), one()], 0, 0), "takes a single tensor"),
}


@pytest.fixture(scope="module")
def gloo() -> Iterator[Any]:
    """Return torch's own Gloo, as torch's group of one calls it."""
    group: Any = theirs.ProcessGroup(theirs.HashStore(), 0, 1)
    backend = theirs.ProcessGroupGloo(theirs.HashStore(), 0, 1)
    group._register_backend(torch.device("cpu"), theirs.ProcessGroup.BackendType.GLOO, backend)
    yield group


@pytest.mark.parametrize("case", CASES)
def test_wrong_operands_have_torchs_phrase(case: str, gloo: Any) -> None:
    call, phrase = CASES[case]
    with pytest.raises(RuntimeError, match=phrase):
        call(gloo)
    with thread_rank():
        dist.init_process_group("ref", store=dist.HashStore(), rank=0, world_size=1)
        with pytest.raises(RuntimeError, match=phrase) as caught:
            call(dist.group.WORLD)
        assert "on rank 0" in str(caught.value) or "'ref' supports one tensor" in str(caught.value)
        dist.destroy_process_group()


REDUCTIONS = {"SUM": sum, "MAX": max, "PRODUCT": lambda values: values[0] * values[1] * values[2] * values[3]}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_allreduce_of_several_tensors_reduces_those_of_each_rank_too(name: str) -> None:
    def program(rank: int) -> list[Any]:
        group: Any = dist.group.WORLD
        tensors = [fill(2 * rank + number, (5,)) for number in range(2)]
        options = c10d.AllreduceOptions()
        options.reduceOp = getattr(theirs.ReduceOp, name)
        group.allreduce(tensors, options).wait()
        return [tensor.tolist() for tensor in tensors]

    columns = zip(*(fill(number, (5,)).tolist() for number in range(4)), strict=True)
    expected = [REDUCTIONS[name](column) for column in columns]
    assert run(program, 2) == [[expected, expected]] * 2
