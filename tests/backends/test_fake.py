"""Backend `fake`: it records calls, and its results follow its one rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from torchdist_ref.groups.world import default_group, thread_rank
from torchdist_ref.testing import fill

SIZE, RANK = 8, 3


@pytest.fixture(autouse=True)
def playing_one_rank() -> Iterator[None]:
    with thread_rank():
        dist.init_process_group("fake", store=dist.HashStore(), rank=RANK, world_size=SIZE)
        yield


def recorded(group: Any = None) -> list[str]:
    return [str(event.call) for event in (group or default_group()).recorder]


REDUCED = {
    "SUM": lambda t: t * SIZE,
    "AVG": lambda t: t,
    "MIN": lambda t: t,
    "MAX": lambda t: t,
    "PRODUCT": lambda t: t**SIZE,
}


@pytest.mark.parametrize("op", REDUCED)
def test_reductions_are_over_copies_of_this_rank(op: str) -> None:
    data, scattered = fill(0, (4, 2), torch.float64), torch.zeros(3, dtype=torch.float64)
    tensor, blocks = data.clone(), [fill(block, (3,), torch.float64) for block in range(SIZE)]
    dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
    assert torch.equal(tensor, REDUCED[op](data))
    dist.reduce_scatter(scattered, blocks, getattr(dist.ReduceOp, op))
    assert torch.equal(scattered, REDUCED[op](blocks[RANK]))


def test_blocks_of_other_ranks_are_copies_of_this_ranks() -> None:
    row, received = torch.zeros(SIZE, 5), [torch.zeros(2) for _ in range(SIZE)]
    dist.all_gather_into_tensor(row, fill(RANK, (5,)))
    assert torch.equal(row, fill(RANK, (5,)).expand(SIZE, 5))
    dist.all_to_all(received, [fill(to, (2,)) for to in range(SIZE)])
    assert all(torch.equal(block, fill(RANK, (2,))) for block in received)
    mine = torch.zeros(2)
    dist.scatter(mine, [fill(to, (2,)) for to in range(SIZE)], src=RANK)
    assert torch.equal(mine, fill(RANK, (2,)))


def test_tensors_that_only_other_ranks_can_fill_keep_their_values() -> None:
    for call in (lambda t: dist.broadcast(t, 1), lambda t: dist.scatter(t, None, 1), lambda t: dist.recv(t, 1)):
        tensor = fill(5, (3,))
        call(tensor)
        assert torch.equal(tensor, fill(5, (3,)))
    assert dist.recv(torch.zeros(1), 6) == 6


def test_calls_are_recorded_with_their_bytes_in_order() -> None:
    work = dist.all_reduce(torch.zeros(5), dist.ReduceOp.MAX, async_op=True)
    dist.barrier()
    dist.send(torch.zeros(2), 7, tag=4)
    assert work is not None and work.wait() and work.is_completed()
    assert recorded() == ["all_reduce(reduction=max)", "barrier()", "send(dst=7, tag=4)"]
    events = list(default_group().recorder)
    assert [event.nbytes for event in events] == [20, 0, 8]
    assert [event.sequence for event in events] == [0, 1, -1]


def test_groups_have_group_ranks_and_call_numbers_of_their_own() -> None:
    group = dist.new_group([1, 3, 6])
    tensor = fill(1, (2,))
    dist.all_reduce(tensor, group=group)
    assert dist.get_rank(group) == 1 and torch.equal(tensor, fill(1, (2,)) * 3)
    dist.broadcast(tensor, 6, group)
    assert recorded(group)[1] == "broadcast(root=2)" and recorded() == []
    assert dist.new_group([0, 1]) == dist.GroupMember.NON_GROUP_MEMBER


def test_an_undefined_reduction_is_an_error() -> None:
    with pytest.raises(dist.ArgumentError, match="BAND"):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND)
    assert recorded() == []


def test_a_training_step_equals_that_of_a_single_process() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    wrapped = dist.DistributedDataParallel(model)
    wrapped(fill(RANK, (3, 4))).square().sum().backward()
    assert model.weight.grad is not None
    gradient = model.weight.grad.clone()
    model.zero_grad()
    model(fill(RANK, (3, 4))).square().sum().backward()
    torch.testing.assert_close(gradient, model.weight.grad)
    assert any(call.startswith("all_reduce") for call in recorded())


@pytest.mark.parametrize("arguments", [{}, {"init_method": "tcp://localhost:1"}, {"store": dist.HashStore()}])
def test_no_store_and_no_address_are_needed(arguments: Any) -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=5, world_size=6, **arguments)
    row = torch.zeros(6, 3)
    dist.all_gather_into_tensor(row, fill(5, (3,)))
    assert (dist.get_rank(), dist.get_world_size()) == (5, 6)
    assert torch.equal(row, fill(5, (3,)).expand(6, 3))


@pytest.mark.parametrize("rank", [6, -2])
def test_a_rank_outside_the_world_is_an_error(rank: int) -> None:
    with thread_rank(), pytest.raises(dist.UsageError if rank < 0 else dist.BackendArgumentError, match="from 0 to 5"):
        dist.init_process_group("fake", rank=rank, world_size=6)


def test_local_tensors_of_torchs_hold_every_rank_without_a_store() -> None:
    local = pytest.importorskip("torch.distributed._local_tensor", reason="torch 2.11 and older have no LocalTensor")
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=4)
    with local.LocalTensorMode(4):
        tensor = local.LocalTensor({rank: fill(rank, (3,)) for rank in range(4)})
        dist.all_reduce(tensor)
        shown = str(tensor)
    total = fill(0, (3,)) + fill(1, (3,)) + fill(2, (3,)) + fill(3, (3,))
    assert shown.count(str(total)) >= 4
