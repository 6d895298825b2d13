"""Dtypes and factors beyond the other tests: unsigned integers, rounding of averages, and factors of PREMUL_SUM."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchdist_ref as dist
from torchdist_ref.testing import fill, run

BACKENDS = [("ref", "threads"), ("gloo", "processes")]
# ReduceOp.PREMUL_SUM(factor) is new in torch 2.13; this name is older.
premul_sum: Any = torch.distributed._make_nccl_premul_sum  # type: ignore[attr-defined]
LARGE = 2**63


def unsigned(rank: int) -> dict[str, list[int]]:
    found = {}
    for op in ("MIN", "MAX", "SUM", "PRODUCT", "BXOR"):
        tensor = torch.tensor([LARGE + 5 * rank, LARGE if rank else 2], dtype=torch.uint64)
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
        found[op] = tensor.tolist()
    output = torch.zeros(1, dtype=torch.uint64)
    inputs = [torch.tensor([value], dtype=torch.uint64) for value in (LARGE + rank, LARGE * rank + 3)]
    dist.reduce_scatter(output, inputs, dist.ReduceOp.MAX)
    return {**found, "reduce_scatter": output.tolist()}


@pytest.mark.parametrize(("backend", "ranks"), BACKENDS)
def test_large_unsigned_numbers_compare_as_unsigned(backend: str, ranks: str) -> None:
    for rank, found in enumerate(run(unsigned, 2, backend=backend, ranks=ranks)):
        assert found["MIN"] == [LARGE, 2] and found["MAX"] == [LARGE + 5, LARGE]
        # Sums and products wrap at 64 bits.
        assert found["SUM"] == [5, LARGE + 2] and found["PRODUCT"] == [LARGE * (LARGE + 5) % 2**64, 0]
        assert found["BXOR"] == [5, LARGE + 2] and found["reduce_scatter"] == [[LARGE + 1], [LARGE + 3]][rank]


WRONG: list[tuple[torch.Tensor, Any, type[Exception], str]] = [
    (torch.ones(2, dtype=torch.int64), 0.5, ValueError, "PREMUL_SUM requires floating.*int64.*rank 0"),
    (torch.ones(2), torch.tensor(0.5, dtype=torch.float64), ValueError, "factor of torch.float32, got torch.float64"),
    (torch.ones(2, dtype=torch.complex64), torch.tensor(1j), ValueError, "factor of torch.float32.*complex64"),
    (torch.ones(2), None, TypeError, "PREMUL_SUM needs a factor"),
]


@pytest.mark.parametrize(("tensor", "factor", "kind", "words"), WRONG)
def test_an_invalid_premul_sum_factor_is_an_error(
    tensor: torch.Tensor, factor: Any, kind: type[Exception], words: str
) -> None:
    def program(rank: int) -> None:
        op = dist.ReduceOp.PREMUL_SUM if factor is None else premul_sum(factor)
        with pytest.raises(kind, match=words):
            dist.all_reduce(tensor, op)

    run(program, 1)


def several_tensors(rank: int) -> list[Any]:
    """The functions beside all_reduce that take a reduction."""
    op, tensors = premul_sum(rank + 0.5), [torch.tensor([2.0]), torch.tensor([4.0, 6.0])]
    dist.all_reduce_coalesced(tensors, op)
    pair = [torch.tensor([2.0]), torch.tensor([4.0])]
    dist.all_reduce_multigpu(pair, op)
    on_root = torch.tensor([2.0])
    work = dist.reduce(on_root, 1, op, async_op=True)
    assert work is not None and work.wait()
    return [*(t.tolist() for t in (*tensors, *pair)), on_root.tolist() if rank == 1 else None]


def test_every_reducing_function_supports_premul_sum() -> None:
    assert run(several_tensors, 2)[1] == [[4.0], [8.0, 12.0], [12.0], [12.0], [4.0]]


def halves(rank: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Numbers of which two are too large to be added, and most sums have to be rounded."""
    values = fill(rank, (count,)) / 3
    values[0] = 60000.0
    return values.to(dtype)


def average_of(rank: int, dtype: torch.dtype, count: int, registered: bool) -> tuple[torch.Tensor, torch.Tensor]:
    size, data = dist.get_world_size(), halves(rank, dtype, count)
    tensor = dist.empty_registered(count, dtype=dtype).copy_(data) if registered else data.clone()
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    scattered = torch.empty(count // size, dtype=dtype)
    dist.reduce_scatter_tensor(scattered, data[: count // size * size], dist.ReduceOp.AVG)
    return tensor, scattered


# Large enough for registered memory to be lent, and for windows.
@pytest.mark.parametrize(("size", "count", "registered"), [(2, 7, False), (3, 12, False), (2, 1_200_002, True)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_averages_of_float16_are_rounded_once(dtype: torch.dtype, size: int, count: int, registered: bool) -> None:
    exact = sum(halves(rank, dtype, count).double() for rank in range(size)) / size
    assert isinstance(exact, torch.Tensor)
    for rank, (whole, part) in enumerate(run(average_of, size, dtype, count, registered, ranks="processes")):
        # To be rounded to float32 first changes one number in thousands.
        assert whole.isfinite().all() and (whole != exact.to(dtype)).double().mean() < 1e-3
        share = count // size
        wanted = exact[rank * share : (rank + 1) * share].to(dtype)
        assert part.isfinite().all() and (part != wanted).double().mean() < 1e-3


def integer_averages(rank: int, dtype: torch.dtype, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    size, data = dist.get_world_size(), integers(rank, dtype, count)
    dist.all_reduce(whole := data.clone(), dist.ReduceOp.AVG)
    part = torch.empty(count // size, dtype=dtype)
    dist.reduce_scatter_tensor(part, data[: count // size * size], dist.ReduceOp.AVG)
    return whole, part


def integers(rank: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """Return small numbers of either sign, whose sum no dtype overflows."""
    numbers = fill(rank, (count,), torch.float64).long() % 41
    return (numbers if dtype is torch.uint8 else numbers - 20).to(dtype)


# As by NCCL; Gloo refuses. Lightning averages the sizes of batches on all backends but Gloo.
@pytest.mark.parametrize(("size", "count"), [(2, 7), (3, 12), (3, 700_001)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64])
def test_averages_of_integers_are_rounded_toward_zero(dtype: torch.dtype, size: int, count: int) -> None:
    exact = torch.stack([integers(rank, dtype, count).double() for rank in range(size)]).mean(0).trunc().to(dtype)
    share = count // size
    for rank, (whole, part) in enumerate(run(integer_averages, size, dtype, count)):
        assert torch.equal(whole, exact) and torch.equal(part, exact[rank * share : (rank + 1) * share])


STORED_ONLY = [torch.bits8, torch.bits16, torch.uint1, torch.int4, torch.float4_e2m1fn_x2]
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def views(rank: int, dtype: torch.dtype) -> list[Any]:
    """Return the bytes of a gathered and of a received tensor, and the errors of a sum and of a broadcast."""
    tensor = torch.arange(8, dtype=INTEGERS[dtype.itemsize]).mul_(rank + 1).view(dtype)
    errors = []
    for call in (lambda: dist.all_reduce(tensor), lambda: dist.broadcast(tensor, 1)):
        try:
            call()
            errors.append("")
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    found = tensor.view(torch.uint8).tolist()
    dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
    return [errors, found, tensor.view(torch.uint8).tolist()]


@pytest.mark.parametrize("dtype", STORED_ONLY, ids=str)
def test_dtypes_without_arithmetic_are_sent_and_not_added(dtype: torch.dtype) -> None:
    first, second = (
        torch.arange(8, dtype=INTEGERS[dtype.itemsize]).mul_(rank + 1).view(torch.uint8).tolist() for rank in range(2)
    )
    for errors, found, received in run(views, 2, dtype):
        assert errors[0].startswith("BackendArgumentError") and str(dtype) in errors[0] and not errors[1]
        assert found == received == second != first


# A rank died of SIGSEGV.
@pytest.mark.parametrize("dtype", [torch.qint8, torch.qint32, torch.quint4x2], ids=str)
def test_a_plain_tensor_viewed_as_a_quantized_one_is_refused(dtype: torch.dtype) -> None:
    first = torch.arange(8, dtype=INTEGERS[dtype.itemsize]).view(torch.uint8).tolist()
    for errors, found, received in run(views, 2, dtype, ranks="processes"):
        for error in errors:
            assert error.startswith("UnsupportedError") and str(dtype) in error and ".view(torch.uint8)" in error
        assert received == first and len(found) == len(first)
