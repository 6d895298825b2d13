"""Calls whose kind has passed the checks before: what the kind does not tell is still looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import torchdist_ref as dist
from torchdist_ref.testing import fill, run

Operands = Sequence[Tensor]
Shape = tuple[int, ...]


def all_gather(read: Operands, written: Operands, rank: int) -> None:
    dist.all_gather(list(written), read[0])


def gather(read: Operands, written: Operands, rank: int) -> None:
    dist.gather(read[0], list(written) if rank == 0 else None)


def scatter(read: Operands, written: Operands, rank: int) -> None:
    dist.scatter(written[0], list(read) if rank == 0 else None)


def reduce_scatter(read: Operands, written: Operands, rank: int) -> None:
    dist.reduce_scatter(written[0], list(read))


def all_to_all(read: Operands, written: Operands, rank: int) -> None:
    dist.all_to_all(list(written), list(read))


def all_gather_into_tensor(read: Operands, written: Operands, rank: int) -> None:
    output = written[0].new_zeros(2 * len(read[0]), *read[0].shape[1:])
    dist.all_gather_into_tensor(output, read[0])
    for block, result in zip(written, output.chunk(2), strict=True):
        block.copy_(result)


CALLS = [all_gather, gather, scatter, reduce_scatter, all_to_all, all_gather_into_tensor]


def plain(rank: int, shape: Shape) -> tuple[list[Tensor], list[Tensor]]:
    return [fill(rank * 5 + i, shape) for i in range(2)], [torch.zeros(shape) for _ in range(2)]


def strided(rank: int, shape: Shape) -> tuple[list[Tensor], list[Tensor]]:
    read, written = plain(rank, shape)
    return [t.mT.contiguous().mT for t in read], [t.mT for t in written]


def with_gradients(rank: int, shape: Shape) -> tuple[list[Tensor], list[Tensor]]:
    read, written = plain(rank, shape)
    return [t.requires_grad_() for t in read], written


def negative(rank: int, shape: Shape) -> tuple[list[Tensor], list[Tensor]]:
    # Imaginary parts of conjugates: their minus sign is not in memory.
    read, written = plain(rank, shape)
    return [torch.complex(t, -t).conj().imag for t in read], written


@pytest.mark.parametrize("make, shape", [(strided, (2, 2)), (with_gradients, (3,)), (negative, (3,)), (negative, (1,))])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_values_after_a_plain_call(call: Callable[..., None], make: Callable[..., Any], shape: Shape) -> None:
    def program(rank: int) -> tuple[list[Any], list[Any]]:
        read, written = plain(rank, shape)
        for _ in range(2):
            call(read, written, rank)
        again, results = make(rank, shape)
        call(again, results, rank)
        return [t.tolist() for t in written], [t.tolist() for t in results]

    for expected, got in run(program, 2):
        assert got == expected


def no_list(rank: int) -> None:
    dist.gather(fill(rank, (2,)), torch.zeros(2, 2) if rank == 0 else None)  # type: ignore[arg-type]


def one_output_twice(rank: int) -> None:
    output = torch.zeros(2)
    dist.all_gather([output, output], fill(rank, (2,)))


def sparse_input(rank: int) -> None:
    dist.all_gather([torch.zeros(2) for _ in range(2)], torch.eye(2)[0].to_sparse())


def overlapping_output(rank: int) -> None:
    dist.all_gather([torch.zeros(1).expand(2), torch.zeros(2)], fill(rank, (2,)))


@pytest.mark.parametrize("wrong", [no_list, one_output_twice, sparse_input, overlapping_output])
def test_errors_after_a_valid_call(wrong: Callable[[int], None]) -> None:
    def program(rank: int) -> str:
        for _ in range(2):
            lists = [torch.zeros(2) for _ in range(2)]
            dist.all_gather(lists, fill(rank, (2,)))
            dist.gather(fill(rank, (2,)), lists if rank == 0 else None)
        if wrong is no_list and rank == 1:
            return "TypeError"
        try:
            wrong(rank)
        except (TypeError, ValueError, RuntimeError) as error:
            return "TypeError" if isinstance(error, TypeError) else type(error).__name__
        return "accepted"

    expected = {
        no_list: "TypeError",
        one_output_twice: "ArgumentError",
        sparse_input: "UnsupportedError",
        overlapping_output: "ArgumentError",
    }
    assert run(program, 2) == [expected[wrong]] * 2


def test_complex_tensor_scattered_after_real_ones() -> None:
    """The source has complex blocks, the other ranks real tensors of their parts."""

    def program(rank: int) -> list[float]:
        blocks = [fill(i, (2, 2)) for i in range(2)]
        for _ in range(2):
            dist.scatter(torch.zeros(2, 2), blocks if rank == 0 else None)
        output = torch.zeros(2, dtype=torch.complex64) if rank == 0 else torch.zeros(2, 2)
        parts = [torch.view_as_complex(block) for block in blocks]
        dist.scatter(output, parts if rank == 0 else None)
        values: list[float] = (torch.view_as_real(output) if rank == 0 else output).flatten().tolist()
        return values

    assert run(program, 2) == [fill(i, (2, 2)).flatten().tolist() for i in range(2)]


def test_output_that_overlaps_itself_where_a_plain_one_was() -> None:
    def program(rank: int) -> str:
        tensor, first, second = fill(rank, (2,)), torch.zeros(2), torch.zeros(2)
        for _ in range(2):
            dist.all_gather([first, second], tensor)
        with pytest.raises(ValueError, match="must be a tensor whose elements do not overlap"):
            dist.all_gather([first[:1].expand(2), second], tensor)
        return "refused"

    assert run(program, 2) == ["refused"] * 2


def test_lists_of_another_length_after_one_tensor_of_that_size() -> None:
    """A plan of the form for one tensor is that of a list of one, which the lists' form refuses."""

    def program(rank: int) -> list[str]:
        output, block = torch.zeros(4), fill(rank, (2,))
        for _ in range(2):
            dist.all_gather_into_tensor(output, block)
            dist.reduce_scatter_tensor(torch.zeros(2), output)
            dist.all_to_all_single(torch.zeros(4), output)
        calls: list[Callable[[], Any]] = [
            lambda: dist.all_gather([output], block),
            lambda: dist.reduce_scatter(torch.zeros(2), [output]),
            lambda: dist.all_to_all([torch.zeros(4)], [output]),
        ]
        found = []
        for call in calls:
            with pytest.raises(ValueError, match="must be a list of 2 tensors") as caught:
                call()
            found.append(type(caught.value).__name__)
        return found

    assert run(program, 2) == [["BackendArgumentError"] * 3] * 2


@pytest.mark.parametrize("async_op", [False, True])
def test_tensors_of_inference_mode_are_reduced_outside_it(async_op: bool) -> None:
    """Metrics are often made in inference mode; once the group ended."""

    def program(rank: int) -> list[list[float]]:
        with torch.inference_mode():
            mine, metric = fill(rank, (4,)), torch.zeros(2)
            columns = fill(rank + 3, (3, 2)).t()
            gathered = [torch.zeros(2), torch.zeros(2)]
        works = [dist.all_reduce(mine, async_op=async_op), dist.all_reduce(columns, async_op=async_op)]
        for work in filter(None, works):
            work.wait()
        for each in (
            dist.reduce_scatter(metric, [mine[:2], mine[2:]], async_op=async_op),
            dist.all_gather(gathered, mine[:2], async_op=async_op),
        ):
            assert each is None or each.wait()
        return [mine.tolist(), columns.flatten().tolist(), metric.tolist(), gathered[1].tolist()]

    total = fill(0, (4,)) + fill(1, (4,))
    columns = (fill(3, (3, 2)) + fill(4, (3, 2))).t().flatten()
    for rank, result in enumerate(run(program, 2)):
        expected = [total, columns, 2 * total[2 * rank :][:2], total[:2]]
        assert result == [each.tolist() for each in expected]
