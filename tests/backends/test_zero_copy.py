"""Zero-copy calls on registered tensors: the same values as with staging, for any mix of registered and other tensors.

The tests also count the calls that ran zero-copy; the benchmark measures whether they were fast.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import torchdist_ref as dist
from tests.descriptors import left_shared_files, shared_files
from torchdist_ref.backends.ref.steps import Step
from torchdist_ref.backends.ref.zero_copy import DIVIDED, SCHEDULES, RegisteredPath
from torchdist_ref.schedules import verify
from torchdist_ref.schedules.schedule import Schedule
from torchdist_ref.testing import RankError, fill, run
from torchdist_ref.transports.registered_memory import handle_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int64)
Make = Callable[[int, torch.dtype], Tensor]


def count_of(dtype: torch.dtype) -> int:
    """Enough elements for zero-copy and for more than one window a rank; 2, 3 and 4 divide their number."""
    return 12 * (100_003 // dtype.itemsize)


COUNT = count_of(torch.float32)


def ordinary(count: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(count, dtype=dtype)


def at_an_odd_offset(count: int, dtype: torch.dtype) -> Tensor:
    return dist.empty_registered(count + 13, dtype=dtype)[7 : count + 7]


class Counted:
    """Counter of this rank's zero-copy calls."""

    def __init__(self) -> None:
        self.calls = 0
        found = RegisteredPath.phases

        def phases(path: RegisteredPath, locations: bytes) -> Iterable[Sequence[Step]]:
            self.calls += 1
            return found(path, locations)

        RegisteredPath.phases = phases  # type: ignore[method-assign]


def same(what: str, got: Tensor, wanted: Tensor) -> None:
    wrong = (got != wanted).nonzero()
    assert got.dtype == wanted.dtype and not len(wrong), f"{what} {got.dtype}: {len(wrong)} wrong, first {wrong[:1]}"


def every_operation(rank: int, size: int, make: Make, dtype: torch.dtype) -> int:
    """Run all operations on tensors of one kind; return their number."""
    count = count_of(dtype)
    data = [fill(r, (count,), dtype) for r in range(size)]
    total = torch.stack(data).sum(0, dtype=dtype)
    last, mine = size - 1, make(count, dtype)

    def fresh() -> Tensor:
        return mine.copy_(data[rank])

    dist.all_reduce(fresh())
    same("all_reduce", mine, total)
    dist.reduce(fresh(), last)
    if rank == last:
        same("reduce", mine, total)
    dist.broadcast(fresh(), last)
    same("broadcast", mine, data[last])
    out = make(count * size, dtype)
    dist.all_gather_into_tensor(out, fresh())
    same("all_gather", out, torch.cat(data))
    rows = [ordinary(count, dtype) for _ in data] if rank == last else None
    dist.gather(fresh(), rows, dst=last)
    if rows is not None:
        same("gather", torch.cat(rows), torch.cat(data))
    part = make(count // size, dtype)
    dist.reduce_scatter_tensor(part, fresh())
    same("reduce_scatter", part, total.view(size, -1)[rank])
    out = make(count, dtype)
    dist.all_to_all_single(out, fresh())
    same("all_to_all", out, torch.cat([given.view(size, -1)[rank] for given in data]))
    same("what all_to_all reads", mine, data[rank])
    return 7


def with_everybody_alike(rank: int, size: int) -> tuple[int, int]:
    counted, made = Counted(), 0
    for dtype in DTYPES:
        made += every_operation(rank, size, at_an_odd_offset, dtype)
    return counted.calls, made


def with_some(rank: int, size: int, registered_rank: int) -> int:
    counted = Counted()
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        every_operation(rank, size, at_an_odd_offset if rank == registered_rank else ordinary, dtype)
    return counted.calls


# Over a second with more ranks than cores: 35 calls of megabytes.
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_operation_and_dtype_on_processes(size: int) -> None:
    for calls, made in run(with_everybody_alike, size, size, ranks="processes"):
        assert calls == (made if size > 1 else 0)


@pytest.mark.parametrize("size", [2, 3])
def test_every_operation_on_threads(size: int) -> None:
    assert run(lambda rank: every_operation(rank, size, at_an_odd_offset, torch.float16), size) == [7] * size


@pytest.mark.parametrize(("size", "registered_rank"), [(2, 0), (2, 1), (3, 1)])
def test_where_only_one_rank_has_registered_tensors_all_stage(size: int, registered_rank: int) -> None:
    assert run(with_some, size, size, registered_rank, ranks="processes") == [0] * size


def averages_and_others(rank: int, size: int) -> None:
    data = [fill(r, (COUNT,)) for r in range(size)]
    tensor = at_an_odd_offset(COUNT, torch.float32)
    for op, wanted in {
        dist.ReduceOp.AVG: torch.stack(data).sum(0) / size,
        dist.ReduceOp.MAX: torch.stack(data).amax(0),
        dist.ReduceOp.PRODUCT: torch.stack(data).prod(0),
    }.items():
        dist.all_reduce(tensor.copy_(data[rank]), op)
        same(f"all_reduce {op}", tensor, wanted)
        part = ordinary(COUNT // size, torch.float32)
        dist.reduce_scatter_tensor(part, tensor.copy_(data[rank]), op)
        same(f"reduce_scatter {op}", part, wanted.view(size, -1)[rank])
        dist.reduce(tensor.copy_(data[rank]), 0, op)
        if rank == 0:
            same(f"reduce {op}", tensor, wanted)


def test_averages_are_divided_once_and_every_reduction_is_the_one_asked_for() -> None:
    run(averages_and_others, 3, 3, ranks="processes")


def sums_of_any_numbers(rank: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rank)
    ours = torch.randn(COUNT)
    registered, staged = at_an_odd_offset(COUNT, torch.float32).copy_(ours), ours.clone()
    dist.all_reduce(registered)
    dist.all_reduce(staged)
    return registered.clone(), staged


@pytest.mark.parametrize("size", [2, 3])
def test_sums_have_the_same_bits_as_with_staging_on_every_rank(size: int) -> None:
    results = run(sums_of_any_numbers, size, ranks="processes")
    assert all(torch.equal(got, results[0][1]) for pair in results for got in pair)


def overwrite_at_once(rank: int) -> None:
    """Overwrite a tensor as soon as its call returns: no peer reads or writes it any more."""
    size, count = 2, 300_000
    tensor, out = dist.empty_registered(count), torch.empty(size * count)
    for turn in range(240):  # a fault here is a race, which a round shows now and then
        tensor.fill_(rank + 2 * turn)
        dist.all_gather_into_tensor(out, tensor)
        tensor.fill_(-1)
        assert out.view(size, -1).amin(1).tolist() == out.view(size, -1).amax(1).tolist() == [2 * turn, 2 * turn + 1]
        tensor.fill_(rank + turn)
        dist.reduce(tensor, turn % 2)
        kept = tensor.clone()
        tensor.fill_(-2)
        assert rank != turn % 2 or kept.eq(2 * turn + 1).all()
        tensor.fill_(turn if rank == 1 else -3)
        dist.broadcast(tensor, 1)
        kept = tensor.clone()
        tensor.fill_(-4)
        assert kept.eq(turn).all()


def test_a_tensor_may_be_overwritten_as_soon_as_its_call_returns() -> None:
    run(overwrite_at_once, 2, ranks="processes")


def free_and_allocate(rank: int) -> int:
    counted = Counted()
    for turn in range(40):
        tensor = dist.empty_registered(300_000 + 1000 * (turn % 3)).fill_(rank + turn)
        dist.all_reduce(tensor)
        assert tensor.eq(2 * turn + 1).all(), f"turn {turn}: {tensor}"
        ordinary_now = torch.full((300_000 + 1000 * (turn % 3),), float(rank))
        del tensor
        dist.all_reduce(ordinary_now)
        assert ordinary_now.eq(1).all()
    return counted.calls


def test_freed_memory_is_never_confused_with_new_memory() -> None:
    assert run(free_and_allocate, 2, ranks="processes") == [40, 40]


def keep_after_the_group(rank: int) -> tuple[float, float]:
    tensor = dist.empty_registered(300_000).fill_(rank + 1)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    before = float(tensor.sum())
    tensor.fill_(rank)
    return before, float(tensor.sum())


def test_results_outlive_their_group() -> None:
    assert run(keep_after_the_group, 2, ranks="processes") == [(900_000.0, 0.0), (900_000.0, 300_000.0)]


def several_on_their_way(rank: int) -> int:
    counted = Counted()
    tensors = [dist.empty_registered(300_000 + 5_000 * n).fill_(rank + n) for n in range(6)]
    plain = [torch.full((300_000,), float(rank + n)) for n in range(6)]
    works = []
    for one, other in zip(tensors, plain, strict=True):
        works += [dist.all_reduce(one, async_op=True), dist.all_reduce(other, async_op=True)]
    for work in works:
        assert work is not None
        work.wait()
    for n, (one, other) in enumerate(zip(tensors, plain, strict=True)):
        assert one.eq(2 * n + 1).all() and other.eq(2 * n + 1).all()
    return counted.calls


def test_overlapping_calls() -> None:
    assert run(several_on_their_way, 2, ranks="processes") == [6, 6]


def in_subgroups(rank: int) -> int:
    counted = Counted()
    group, other = dist.new_group([0, 2]), dist.new_group()
    tensor = dist.empty_registered(300_000).fill_(rank)
    if rank != 1:
        dist.all_reduce(tensor, group=group)
        assert tensor.eq(2).all()
    dist.broadcast(tensor, 1, group=other)
    assert tensor.eq(1).all()
    return counted.calls


def test_the_memory_serves_every_group_of_the_process() -> None:
    assert run(in_subgroups, 3, ranks="processes") == [2, 1, 2]


def on_one_tensor(rank: int) -> int:
    """Use inputs as outputs: where peers read what is written, the call stages."""
    counted, size, count = Counted(), 2, 60_000
    data = [fill(r, (size * count,)) for r in range(size)]
    tensor = dist.empty_registered(size * count)
    tensor.copy_(data[rank])
    dist.all_to_all_single(tensor, tensor)
    same("all_to_all in place", tensor, torch.cat([given.view(size, -1)[rank] for given in data]))
    assert counted.calls == 0
    row = tensor.view(size, -1)[rank]
    row.copy_(data[rank][:count])
    dist.all_gather_into_tensor(tensor, row)
    same("all_gather in place", tensor, torch.cat([given[:count] for given in data]))
    tensor.copy_(data[rank])
    dist.reduce_scatter_tensor(row, tensor)
    same("reduce_scatter in place", row, sum(data).view(size, -1)[rank])  # type: ignore[union-attr]
    assert counted.calls == 2
    tensor.copy_(data[rank])
    dist.reduce_scatter_tensor(tensor.view(size, -1)[1 - rank], tensor)
    same("reduce_scatter over another block", tensor.view(size, -1)[1 - rank], sum(data).view(size, -1)[rank])  # type: ignore[union-attr]
    return counted.calls


def test_outputs_may_overlap_inputs() -> None:
    assert run(on_one_tensor, 2, ranks="processes") == [2, 2]


def disagree(rank: int) -> str:
    tensor = dist.empty_registered(300_000 + rank).fill_(rank)
    with pytest.raises(dist.MismatchError) as caught:
        dist.all_reduce(tensor)
    assert tensor.eq(rank).all()
    tensor = dist.empty_registered(300_000).fill_(rank)
    dist.all_reduce(tensor)
    assert tensor.eq(1).all()
    return str(caught.value)


def test_a_mismatch_writes_nothing_and_leaves_the_group_as_it_was() -> None:
    for text in run(disagree, 2, ranks="processes"):
        assert "[300000]" in text and "[300001]" in text


def survive(rank: int) -> str:
    tensor = dist.empty_registered(300_000).fill_(rank)
    dist.all_reduce(tensor)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.RankDiedError) as caught:
        dist.all_reduce(tensor)
    tensor.fill_(5)
    return f"{caught.value} {tensor.sum():.0f}"


def test_survivors_name_the_dead_rank_and_nothing_is_left() -> None:
    before = shared_files()
    with pytest.raises(RankError, match="rank 1 of 3 was killed by SIGKILL") as caught:
        run(survive, 3, ranks="processes")
    for rank in (0, 2):
        assert "rank 1 died" in caught.value.outcomes[rank].value
        assert caught.value.outcomes[rank].value.endswith(" 1500000")
    assert left_shared_files(before) == set()


def between_hosts(rank: int, path: str) -> bool:
    os.environ["TORCHDIST_REF_HOST_ID"] = "ab"[rank]
    dist.init_process_group("ref", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    tensor = dist.empty_registered(300_000).fill_(rank)
    dist.all_reduce(tensor)
    assert tensor.eq(1).all()
    dist.destroy_process_group()
    return handle_of(tensor) is None


def test_between_hosts_tensors_are_ordinary(tmp_path: Path) -> None:
    assert run(between_hosts, 2, str(tmp_path / "store"), ranks="processes", init=False) == [True, True]


def with_a_backend_for_each_device(rank: int) -> bool:
    tensor = dist.empty_registered(300_000).fill_(rank)
    dist.all_reduce(tensor)
    assert tensor.eq(1).all()
    return handle_of(tensor) is not None


def test_with_a_backend_for_each_device_the_cpu_backend_allocates() -> None:
    program = with_a_backend_for_each_device
    assert run(program, 2, backend="cpu:ref,meta:fake", ranks="processes") == [True, True]


def conflicts(schedule: Schedule, divided: bool) -> list[str]:
    """Return the slots that one rank writes in a round in which another one reads or writes them."""
    found = []
    for number, moves in enumerate(schedule.rounds):
        by = {move: move.write[1] if divided else move.dst for move in moves}
        for one in moves:
            for other in moves:
                touched = {(other.src, other.read), (other.dst, other.write)}
                if by[one] != by[other] and (one.dst, one.write) in touched:
                    found.append(f"round {number}: {one} on {by[one]}, {other} on {by[other]}")
    return found


@pytest.mark.parametrize("world", [2, 3, 5, 8])
@pytest.mark.parametrize("op", SCHEDULES)
def test_no_rank_writes_what_another_one_reads(op: str, world: int) -> None:
    for root in (0, world - 1):
        schedule = SCHEDULES[op](world, root)
        assert not conflicts(schedule, op in DIVIDED)
        verify(schedule, op, root)


def test_schedules_for_staging_have_conflicts() -> None:
    from torchdist_ref.schedules import build

    assert conflicts(build("all_reduce", "direct", 3), False)


ERRORS = {
    "a text": (lambda: dist.empty_registered("3"), TypeError, "'size'.*integers"),  # type: ignore[arg-type]
    "a negative size": (lambda: dist.empty_registered(2, -1), ValueError, "'size'.*at least 0"),
    "not a member": (lambda: dist.empty_registered(2, group=dist.GroupMember.NON_GROUP_MEMBER), ValueError, "'group'"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_wrong_arguments(name: str) -> None:
    call, kind, words = ERRORS[name]

    def program(rank: int) -> None:
        with pytest.raises(kind, match=words):
            call()

    run(program, 1)


def test_shapes_are_given_as_to_torch() -> None:
    def program(rank: int) -> list[object]:
        made = [
            dist.empty_registered(2, 3),
            dist.empty_registered((2, 3)),
            dist.empty_registered([4]),
            dist.empty_registered(()),
            dist.empty_registered(torch.Size([0, 2]), dtype=torch.int8),
        ]
        gradient = dist.empty_registered(3, requires_grad=True)
        assert gradient.requires_grad and gradient.is_leaf
        return [(tuple(tensor.shape), tensor.dtype) for tensor in made]

    shapes = [(2, 3), (2, 3), (4,), ()]
    assert run(program, 2)[0] == [*((shape, torch.float32) for shape in shapes), ((0, 2), torch.int8)]


def test_registered_memory_needs_a_group() -> None:
    with pytest.raises(dist.NotInitializedError):
        dist.empty_registered(3)
