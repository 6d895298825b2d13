"""Several tensors per rank: each ends as if it had been on a rank of its own, by formulas over all tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchdist_ref as dist
from tests.covering import covering
from torchdist_ref.testing import fill, run

EACH = 2
Op = dist.ReduceOp
FORMULAS: list[tuple[Any, Callable[[Tensor], Tensor]]] = [
    (Op.SUM, lambda data: data.sum(0)),
    (Op.PRODUCT, lambda data: data.prod(0)),
    (Op.MIN, lambda data: data.amin(0)),
    (Op.MAX, lambda data: data.amax(0)),
    (Op.AVG, lambda data: data.sum(0) / len(data)),
]


def tensors_of(rank: int, salt: int = 0, each: int = EACH, shape: tuple[int, ...] = (2, 3)) -> list[Tensor]:
    return [fill(20 * salt + each * rank + place, shape, torch.float64) for place in range(each)]


def every(size: int, salt: int = 0) -> Tensor:
    return torch.stack([tensor for rank in range(size) for tensor in tensors_of(rank, salt)])


def reduces(rank: int, size: int, async_op: bool) -> None:
    for salt, (op, formula) in enumerate(FORMULAS):
        tensors = tensors_of(rank, salt)
        ended(dist.all_reduce_multigpu(tensors, op, async_op=async_op), async_op, tensors)
        assert all(torch.equal(tensor, formula(every(size, salt))) for tensor in tensors), op
        for root, place in ((0, 1), (size - 1, 0)):
            tensors = tensors_of(rank, salt)
            ended(dist.reduce_multigpu(tensors, root, op, async_op=async_op, dst_tensor=place), async_op, tensors)
            wanted = tensors_of(rank, salt)
            if rank == root:
                wanted[place] = formula(every(size, salt))
            assert torch.equal(torch.stack(tensors), torch.stack(wanted)), (op, root)


def ended(work: Any, async_op: bool, outputs: Any) -> None:
    if not async_op:
        assert work is None
        return
    assert work.wait() is True and work.is_completed()
    assert len(work.get_future().wait()) == len(outputs)


def moves(rank: int, size: int, async_op: bool) -> None:
    for root, place in ((0, 1), (size - 1, 0)):
        base = torch.zeros(3, 4)
        tensors = [tensor.to(torch.float32) for tensor in tensors_of(rank)] + [base[::2, 1:]]
        given = fill(EACH * root + place, (2, 3))
        ended(dist.broadcast_multigpu(tensors, root, None, async_op, place), async_op, tensors)
        assert all(torch.equal(tensor, given) for tensor in tensors)
        base[::2, 1:] = 0
        assert not base.any(), "nothing outside the view was written"
    outputs = [[torch.zeros(2, 3, dtype=torch.float64) for _ in range(EACH * size)] for _ in range(EACH)]
    ended(dist.all_gather_multigpu(outputs, tensors_of(rank), async_op=async_op), async_op, outputs)
    assert all(torch.equal(torch.stack(output), every(size)) for output in outputs)


def scatters(rank: int, size: int, async_op: bool) -> None:
    for op, formula in FORMULAS:
        inputs = [blocks_of(EACH * rank + place, size) for place in range(EACH)]
        outputs = [torch.zeros(3, dtype=torch.float64) for _ in range(EACH)]
        ended(dist.reduce_scatter_multigpu(outputs, inputs, op, async_op=async_op), async_op, outputs)
        lists = [torch.stack(blocks_of(number, size)) for number in range(EACH * size)]
        wanted = formula(torch.stack(lists))[EACH * rank : EACH * rank + EACH]
        assert torch.equal(torch.stack(outputs), wanted), op


def blocks_of(number: int, size: int) -> list[Tensor]:
    """The list of tensors that belongs to one tensor, counted over all ranks."""
    return [fill(number + 30 * block, (3,), torch.float64) for block in range(EACH * size)]


@pytest.mark.parametrize(("world_size", "async_op", "backend"), covering((3, 2, 4, 1), (False, True), ("ref", "gloo")))
def test_two_tensors_per_rank_count_as_two_ranks(world_size: int, async_op: bool, backend: str) -> None:
    def program(rank: int) -> None:
        for part in (reduces, moves, scatters):
            part(rank, world_size, async_op)

    run(program, world_size, backend=backend)


def bits(rank: int) -> None:
    numbers = [fill(2 * rank + place, (9,), torch.uint8) for place in range(2)]
    every_number = [fill(number, (9,), torch.uint8) for number in range(4)]
    for op, combine in ((Op.BAND, torch.bitwise_and), (Op.BOR, torch.bitwise_or), (Op.BXOR, torch.bitwise_xor)):
        tensors = [number.clone() for number in numbers]
        dist.all_reduce_multigpu(tensors, op)
        wanted = every_number[0]
        for number in every_number[1:]:
            wanted = combine(wanted, number)
        assert torch.equal(tensors[0], wanted) and torch.equal(tensors[1], wanted), op


def test_bitwise_reductions_of_several_tensors() -> None:
    run(bits, 2)


def in_a_subgroup(rank: int) -> list[list[float]]:
    group = dist.new_group([0, 2])
    tensors = [fill(rank, (2,)), fill(rank + 7, (2,))]
    if rank == 1:
        with pytest.warns(UserWarning, match="all_reduce_multigpu on global rank 1"):
            dist.all_reduce_multigpu(tensors, group=group)
    else:
        dist.all_reduce_multigpu(tensors, group=group)
        dist.broadcast_multigpu(tensors[1:], 2, group)
    return [tensor.tolist() for tensor in tensors]


def test_subgroups_do_not_affect_other_ranks() -> None:
    zero, one, two = run(in_a_subgroup, 3, ranks="processes")
    total = sum(fill(r, (2,)) for r in (0, 2, 7, 9))
    assert isinstance(total, Tensor) and zero == two == [total.tolist()] * 2
    assert one == [fill(1, (2,)).tolist(), fill(8, (2,)).tolist()]


T, I64 = torch.ones(4), torch.ones(4, dtype=torch.int64)
MISUSE: list[tuple[str, Any, type[Exception], str]] = [
    ("tensor for a list", lambda: dist.all_reduce_multigpu(T), TypeError, "all_reduce_multigpu.*`tensor_list`"),
    ("empty list", lambda: dist.all_reduce_multigpu([]), ValueError, "'tensor_list'.*at least one tensor"),
    ("sizes differ", lambda: dist.all_reduce_multigpu([T, T[:2]]), ValueError, r"'tensor_list\[1\]'.*4 elements"),
    ("dtypes differ", lambda: dist.reduce_multigpu([T, I64], 0), ValueError, "reduce_multigpu.*different dtypes"),
    ("op as text", lambda: dist.all_reduce_multigpu([T], "sum"), TypeError, "'op'.*'sum'"),
    ("bits of floats", lambda: dist.all_reduce_multigpu([T, T], Op.BAND), ValueError, "BAND.*float32"),
    ("mean of integers", lambda: dist.all_reduce_multigpu([I64, I64], Op.AVG), ValueError, "AVG.*int64"),
    ("root too large", lambda: dist.broadcast_multigpu([T], 5), ValueError, "broadcast_multigpu.*'src'.*got 5"),
    ("short gather", lambda: dist.all_gather_multigpu([[T]], [T]), ValueError, r"lists\[0\]'.*2 tensors.*got 1"),
    ("too few lists", lambda: dist.all_gather_multigpu([], [T]), ValueError, "'output_tensor_lists'.*1 lists.*got 0"),
    ("another size", lambda: dist.all_gather_multigpu([[T[:2]] * 2], [T]), ValueError, r"lists\[0\]\[0\]'.*4 elements"),
    ("no lists", lambda: dist.reduce_scatter_multigpu([T], 3), ValueError, "'input_tensor_lists'.*got 3"),
]


@pytest.mark.parametrize(("call", "kind", "words"), [case[1:] for case in MISUSE], ids=[case[0] for case in MISUSE])
def test_misuse_raises_a_clear_error(call: Any, kind: type[Exception], words: str) -> None:
    def program(rank: int) -> float:
        with pytest.raises(kind, match=words):
            call()
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor)
        return tensor.item()

    assert run(program, 2) == [3.0, 3.0]


def test_an_index_outside_the_list_is_named() -> None:
    def program(rank: int) -> None:
        with pytest.raises(dist.ArgumentError, match=r"'dst_tensor'.*from 0 to 0, got 1"):
            dist.reduce_multigpu([T], 0, dst_tensor=1)

    run(program, 1)
