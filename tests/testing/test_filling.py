"""`testing.fill`: data nonlinear in rank and position, and exact in every dtype."""

from __future__ import annotations

import pytest
import torch

from torchdist_ref.errors import ArgumentTypeError
from torchdist_ref.testing import fill

REAL = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
]


def test_equal_arguments_give_equal_values() -> None:
    assert fill(0, (4,)).tolist() == [1.0, -1.0, 7.0, 1.0]
    assert torch.equal(fill(3, (2, 5)), fill(3, (2, 5)))
    assert torch.equal(fill(3, (2, 5)).flatten(), fill(3, (10,)))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 4)])
def test_shape(shape: tuple[int, ...]) -> None:
    tensor = fill(1, shape)
    assert tensor.shape == shape and tensor.is_contiguous()


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_values_are_small_whole_numbers_in_every_type(dtype: torch.dtype) -> None:
    tensor = fill(2, (500,), dtype)
    assert tensor.dtype == dtype
    wanted = set(range(1, 17)) if not dtype.is_signed else set(range(-8, 9)) - {0}
    assert set(tensor.to(torch.float64).tolist()) == wanted


def test_ranks_differ_at_every_position() -> None:
    ranks = torch.stack([fill(rank, (1000,)) for rank in range(8)])
    assert all(len(set(column)) == 8 for column in ranks.T.tolist())


@pytest.mark.parametrize("world", [2, 3, 4, 8, 16])
def test_sums_differ_between_positions(world: int) -> None:
    total = sum((fill(rank, (1000,)) for rank in range(world)), torch.zeros(1000))
    for shift in (1, 2, 4, 8, 16, 250):
        assert (total[shift:] == total[:-shift]).float().mean() < 0.2


def test_values_are_nonlinear_in_rank_and_position() -> None:
    ranks = torch.stack([fill(rank, (1000,)) for rank in range(4)])
    for dim in (0, 1):
        assert (ranks.diff(n=2, dim=dim) == 0).float().mean() < 0.2


def test_bool_and_complex() -> None:
    truth = fill(0, (1000,), torch.bool)
    assert 400 < int(truth.sum()) < 600
    number = fill(1, (100,), torch.complex64)
    assert torch.equal(number.real, fill(1, (100,)))
    assert (number.real == number.imag).float().mean() < 0.2


def test_a_dtype_that_is_none_is_named() -> None:
    with pytest.raises(ArgumentTypeError, match=r"testing\.fill: argument 'dtype' must be a torch\.dtype, got 'float'"):
        fill(0, (2,), "float")  # type: ignore[arg-type]


def test_a_shape_that_is_a_number_is_named() -> None:
    text = r"testing\.fill: argument 'shape' must be a sequence of sizes, as in \(5,\), got 5"
    with pytest.raises(ArgumentTypeError, match=text):
        fill(0, 5)  # type: ignore[arg-type]


def test_a_long_tensor_continues_a_short_one_and_does_not_repeat() -> None:
    """Positions are hashed in parts of 32,768."""
    whole = fill(3, (70_001,), torch.int64)
    for count in (1, 32_767, 32_768, 32_769, 65_537):
        assert torch.equal(whole[:count], fill(3, (count,), torch.int64))
    for shift in (1, 32_767, 32_768, 65_536):
        assert (whole[shift:] == whole[:-shift]).double().mean() < 0.1
