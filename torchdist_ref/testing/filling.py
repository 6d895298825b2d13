"""Test data that reveals wrong collectives.

With constant tensors, a collective that swaps two chunks passes. With data linear in the rank, a sum passes that counts
one rank twice and omits its neighbors. So `fill` mixes rank and position: the position selects a shuffle of sixteen
small integers, the rank selects one of them. Do not add ranks or groups here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from torchdist_ref.errors import ArgumentTypeError, explain

_VALUES = 16
# Half as many as values: sixteen ranks with all sixteen values would have the same sum at every position.
_RANKS = 8
# Odd 63-bit numbers: multiplying by one is a bijection on 64-bit integers, so no two positions are merged.
_STEP, _MIX, _BLOCK = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB
_SHUFFLE = (6, 13, 1, 10, 15, 4, 8, 3, 11, 0, 14, 7, 2, 9, 5, 12)


# Positions that are hashed at once: their temporary tensors stay in the cache, and the allocator keeps their memory.
_TOGETHER = 32_768
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _indices(rank: int, count: int) -> torch.Tensor:
    """Return the index into `_SHUFFLE` of each position."""
    starts = range(0, max(count, 1), _TOGETHER)
    parts = [_indices_between(rank, start, min(start + _TOGETHER, count)) for start in starts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _indices_between(rank: int, start: int, end: int) -> torch.Tensor:
    block, of_block = divmod(rank, _RANKS)
    mixed = torch.arange(start + 1, end + 1, dtype=torch.int64, device="cpu").mul_(_STEP) + (block * _BLOCK) % 2**63
    mixed.bitwise_xor_(mixed >> 31).mul_(_MIX)
    # All further steps need the lowest bits only.
    low = mixed.bitwise_xor_(mixed >> 29).to(torch.int16)
    # With an odd stride, the ranks of a block have different numbers at every position.
    stride = (low >> 8).bitwise_and_(_RANKS - 1).mul_(2) + 1
    return (low + stride.mul_(of_block)).bitwise_and_(_VALUES - 1).to(torch.int32)


def _values(dtype: torch.dtype) -> torch.Tensor:
    """Return the values of the indices."""
    shuffled = torch.tensor(_SHUFFLE, dtype=torch.int64, device="cpu")
    if dtype == torch.bool:
        return shuffled < _VALUES // 2
    if not dtype.is_signed:
        return (shuffled + 1).to(dtype)
    half = _VALUES // 2
    return torch.where(shuffled < half, shuffled - half, shuffled - half + 1).to(dtype)


def fill(rank: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor whose values depend on rank and position, and are linear in neither.

    The values are integers from -8 to 8 without 0 (1 to 16 for unsigned types). Every dtype of torch represents them
    exactly, including 8-bit floats. So sums over up to 16 ranks are exact from bfloat16 upwards, and products over up
    to 8 ranks are exact in float32. At each position, ranks 0 to 7 have eight different numbers.

    Args:
        rank: Rank of the data, from 0.
        shape: Shape of the tensor; ``()`` and empty shapes are allowed.
        dtype: Data type. Complex types have a different imaginary part.

    Returns:
        A new contiguous tensor on the CPU. Equal arguments give equal values in every process.

    Example:
        >>> import torch
        >>> from torchdist_ref.testing import fill
        >>> fill(0, (4,)).tolist()
        [1.0, -1.0, 7.0, 1.0]
        >>> fill(1, (4,), torch.int64).tolist()
        [5, -2, 5, -8]
    """
    if not isinstance(dtype, torch.dtype):
        raise ArgumentTypeError(explain("testing.fill", "dtype", "a torch.dtype", dtype))
    if not isinstance(shape, Iterable):
        raise ArgumentTypeError(explain("testing.fill", "shape", "a sequence of sizes, as in (5,)", shape))
    shape = tuple(shape)
    count = torch.Size(shape).numel()
    if dtype.is_complex:
        parts = [fill(rank, (count,), dtype.to_real()), fill(rank, (2 * count,), dtype.to_real())[count:]]
        return torch.complex(*parts).reshape(shape)
    # Not every dtype can be indexed, but its bits can.
    bits = _values(dtype).view(_BITS[dtype.itemsize])
    return bits.index_select(0, _indices(rank, count)).view(dtype).reshape(shape)
