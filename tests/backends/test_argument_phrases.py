"""Wrong operands of the methods of groups: an error of torch's type, with the phrase that torch's Gloo has for it.

torch's own Gloo group gets the same calls. Both backends are alone in their group, so that a call that begins by
mistake ends at once, unless the mistake needs another rank. Lists of several tensors, which torch accepts, are here
too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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


def gloo_groups(size: int) -> list[Any]:
    """Return torch's groups of some ranks on its own Gloo."""
    store = theirs.HashStore()

    def member(rank: int) -> Any:
        group: Any = theirs.ProcessGroup(store, rank, size)
        backend = theirs.ProcessGroupGloo(store, rank, size)
        group._register_backend(torch.device("cpu"), theirs.ProcessGroup.BackendType.GLOO, backend)
        return group

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(member, range(size)))


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
    "negative root tensor": (
        lambda g: g.broadcast([one()], rooted(c10d.BroadcastOptions, 0, -1)),
        "invalid root tensor: -1",
    ),
    "root tensor of several": (
        lambda g: g.broadcast([one(), one()], rooted(c10d.BroadcastOptions, 0, 2)),
        "invalid root tensor: 2",
    ),
    "broadcast of two sizes": (lambda g: g.broadcast([one(), one(4)]), "invalid tensor size at index 0"),
    "broadcast of two dtypes": (lambda g: g.broadcast([one(), one(3, torch.int32)]), "invalid tensor type at index 0"),
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
    "lists for two inputs of allgather": (
        lambda g: g.allgather([[one()] * 2], [one()] * 2),
        "requires input/output tensor lists to have the same length",
    ),
    "outputs of the second input of allgather": (
        lambda g: g.allgather([[one()] * 2, [one()]], [one()] * 2),
        r"invalid output tensor list at index 1 \(expected length 2, got 1\)",
    ),
    "inputs of two sizes in allgather": (
        lambda g: g.allgather([[one()] * 2] * 2, [one(), one(4)]),
        "invalid tensor size at index 1",
    ),
    "inputs of two dtypes in allgather": (
        lambda g: g.allgather([[one()] * 2] * 2, [one(), one(3, torch.int32)]),
        "invalid tensor type at index 1",
    ),
    "outputs of two sizes in allgather": (
        lambda g: g.allgather([[one()] * 2, [one(), one(4)]], [one()] * 2),
        "invalid tensor size at index 1",
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
    "rows of the output of alltoall_base": (
        lambda g: g.alltoall_base(one(4), one(4), [3], [4]).wait(),
        "Split sizes doesn't match total dim 0 size",
    ),
    "rows of the input of alltoall_base": (
        lambda g: g.alltoall_base(one(4), one(4), [], [5]).wait(),
        "Split sizes doesn't match total dim 0 size",
    ),
    "numbers of alltoall_base": (
        lambda g: g.alltoall_base(one(4), one(4), [2, 2], [2, 2]).wait(),
        "Number of tensor splits not equal to group size",
    ),
    "send of two": (lambda g: g.send([one(), one()], 0, 0), "takes a single tensor"),
}


@pytest.fixture(scope="module")
def gloo() -> Iterator[Any]:
    """Return torch's own Gloo, as torch's group of one calls it."""
    yield gloo_groups(1)[0]


@pytest.fixture
def pair() -> Iterator[list[Any]]:
    """Return torch's two groups of two ranks on its own Gloo; a refused call counts on its rank only."""
    yield gloo_groups(2)


@pytest.mark.parametrize("case", CASES)
def test_wrong_operands_have_torchs_phrase(case: str, gloo: Any) -> None:
    call, phrase = CASES[case]
    with pytest.raises(RuntimeError, match=phrase):
        call(gloo)
    with thread_rank():
        dist.init_process_group("ref", store=dist.HashStore(), rank=0, world_size=1)
        with pytest.raises(RuntimeError, match=phrase) as caught:
            call(dist.group.WORLD)
        assert "on rank 0" in str(caught.value)
        dist.destroy_process_group()


# What is wrong on rank 1 of two, the call, and the phrase.
CASES_OF_TWO: dict[str, tuple[Callable[[Any], Any], str]] = {
    "outputs of gather beside the root": (
        lambda g: g.gather([[one()] * 2], [one()], rooted(c10d.GatherOptions, 0)),
        "requires empty output on non-root",
    ),
    "an empty list of outputs of gather beside the root": (
        lambda g: g.gather([[]], [one()], rooted(c10d.GatherOptions, 0)),
        "requires empty output on non-root",
    ),
    "inputs of scatter beside the root": (
        lambda g: g.scatter([one()], [[one()] * 2], rooted(c10d.ScatterOptions, 0)),
        "requires empty input on non-root",
    ),
    "blocks of alltoall_base": (
        lambda g: g.alltoall_base(one(2), one(3), [1, 1], []).wait(),
        "Tensor's dim 0 does not divide equally across group size",
    ),
    "rows of alltoall_base": (
        lambda g: g.alltoall_base(one(4), one(4), [1, 1], [2, 2]).wait(),
        "Split sizes doesn't match total dim 0 size",
    ),
}


def test_wrong_operands_on_one_rank_of_two_have_torchs_phrase(pair: list[Any]) -> None:
    def program(rank: int) -> dict[str, str]:
        return {case: refusal(call, dist.group.WORLD) for case, (call, _) in CASES_OF_TWO.items()} if rank else {}

    ours = run(program, 2)[1]
    for case, (call, phrase) in CASES_OF_TWO.items():
        assert phrase in refusal(call, pair[1]), case
        assert phrase in ours[case] and "on rank 1" in ours[case], case


def refusal(call: Callable[[Any], Any], group: Any) -> str:
    with pytest.raises(RuntimeError) as caught:
        call(group)
    return str(caught.value)


def broadcast_several(rank: int, group: Any) -> list[Any]:
    results = []
    for root, entry in ((1, 0), (0, 2)):
        tensors = [fill(3 * rank + number, (2, 3)) for number in range(3)]
        options = rooted(c10d.BroadcastOptions, root, entry)
        options.asyncOp = bool(entry)
        group.broadcast(tensors, options).wait()
        results.append([tensor.tolist() for tensor in tensors])
    return results


def broadcast_parts(rank: int, group: Any) -> list[Any]:
    # Columns, so that the tensors are not contiguous.
    columns = fill(rank, (4, 2))
    group.broadcast([columns[:, 0].contiguous(), columns[:, 1]], rooted(c10d.BroadcastOptions, 1)).wait()
    return [columns.tolist()]


def allgather_several(rank: int, group: Any) -> list[Any]:
    inputs = [fill(2 * rank + number, (2, 3)) for number in range(2)]
    outputs = [[torch.zeros(2, 3) for _ in range(4)] for _ in inputs]
    group.allgather(outputs, inputs).wait()
    return [[output.tolist() for output in each] for each in outputs]


@pytest.mark.parametrize("program", [broadcast_several, broadcast_parts, allgather_several])
def test_lists_of_several_tensors_have_torchs_results(
    program: Callable[[int, Any], list[Any]], pair: list[Any]
) -> None:
    with ThreadPoolExecutor(2) as pool:
        expected = list(pool.map(program, range(2), pair))
    assert run(lambda rank: program(rank, dist.group.WORLD), 2) == expected


def test_a_call_on_several_tensors_can_be_asynchronous() -> None:
    def program(rank: int) -> tuple[float, list[Any]]:
        group: Any = dist.group.WORLD
        tensors, message = [fill(2 * rank + number, (5,)) for number in range(2)], torch.zeros(1)
        options = rooted(c10d.BroadcastOptions, 1)
        options.asyncOp = True
        if rank == 1:
            # Rank 0 sends this after it has started the broadcast.
            group.recv([message], 0, 0).wait()
        work = group.broadcast(tensors, options)
        if rank == 0:
            group.send([torch.ones(1)], 1, 0).wait()
        work.wait()
        return message.item(), [tensor.tolist() for tensor in work.get_future().value()]

    wanted = [fill(2, (5,)).tolist()] * 2
    assert run(program, 2) == [(0.0, wanted), (1.0, wanted)]


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
