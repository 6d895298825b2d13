"""Products of PowerSGD on the CPU, block by block: the bits of `low_rank.STRAIGHT` in less time.

BLAS rearranges a large matrix before it multiplies it; with few columns that takes longer than the product. The bits
matter because error feedback amplifies rounding: another order of additions changes twenty steps by 2e-6 and more.
`_same_bits` compares both ways once per process and number of columns, since not every BLAS need add in this order.
Do not add anything that changes results here.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import torch

from torchdist_ref.algorithms.ddp_comm_hooks.low_rank import STRAIGHT, Products, matmul

# Columns up to which a product of two or three of them has the bits of one of all columns (measured with MKL).
MOST_COLUMNS = 4
# Elements of a block, which is worked on while it is in a core's own cache.
BLOCK_ELEMENTS = 1 << 17
# Elements of a matrix below which the calls cost more than they save.
SMALLEST_ELEMENTS = 1 << 15
# Elements of a cache line.
LINE_ELEMENTS = 16


class _BlockedProducts:
    """Products of large float32 matrices and few columns in blocks; others as in `low_rank.STRAIGHT`."""

    def multiply(self, M: torch.Tensor, Q: torch.Tensor, P: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        """Compute P ← M Q; before that M ← M + ``gradient``, block by block, while each is in the cache.

        >>> M, Q, P = torch.arange(6.0).view(3, 2), torch.eye(2), torch.empty(3, 2)
        >>> BLOCKED.multiply(M, Q, P, gradient=torch.ones(3, 2))
        >>> P.tolist()
        [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
        """
        if _pays(M, P.size(1)):
            (_multiply_columns if P.size(1) > 1 else _multiply_one_column)(M, Q, P, gradient)
        else:
            STRAIGHT.multiply(M, Q, P, gradient)

    def multiply_transposed(self, M: torch.Tensor, P: torch.Tensor, Q: torch.Tensor) -> None:
        """Compute Q ← Mᵀ P.

        >>> M, P, Q = torch.eye(3)[:, :2].clone(), torch.arange(6.0).view(3, 2), torch.empty(2, 2)
        >>> BLOCKED.multiply_transposed(M, P, Q)
        >>> Q.tolist()
        [[0.0, 1.0], [2.0, 3.0]]
        """
        if P.size(1) > 1 and _pays(M, P.size(1)):
            _multiply_transposed_columns(M, P, Q)
        else:
            STRAIGHT.multiply_transposed(M, P, Q)

    def decompress(self, P: torch.Tensor, Q: torch.Tensor, out: torch.Tensor, M: torch.Tensor | None = None) -> None:
        """Compute out ← P Qᵀ and M ← M - out, block by block, while each is in the cache.

        >>> P, Q, out, M = torch.ones(2, 1), torch.tensor([[2.0], [3.0]]), torch.empty(2, 2), torch.full((2, 2), 5.0)
        >>> BLOCKED.decompress(P, Q, out, M)
        >>> out.tolist(), M.tolist()
        ([[2.0, 3.0], [2.0, 3.0]], [[3.0, 2.0], [3.0, 2.0]])
        """
        for rows in blocks(out):
            STRAIGHT.decompress(P[rows], Q, out[rows], None if M is None else M[rows])


BLOCKED: Products = _BlockedProducts()


def _multiply_one_column(M: torch.Tensor, Q: torch.Tensor, P: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Multiply block by block: BLAS does not rearrange the matrix for one column."""
    for rows in blocks(M):
        STRAIGHT.multiply(M[rows], Q, P[rows], None if gradient is None else gradient[rows])


def _multiply_columns(M: torch.Tensor, Q: torch.Tensor, P: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Multiply transposed blocks, as BLAS needs them, by two or three columns at a time."""
    columns = _column_major(P)
    for rows in blocks(M):
        block = M[rows]
        if gradient is not None:
            block += gradient[rows]
        transposed = transposed_copy(block)
        for pair in _column_slices(P.size(1)):
            torch.mm(transposed.t(), Q[:, pair], out=columns[pair, rows].t())
    P.copy_(columns.t())


def transposed_copy(M: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of Mᵀ.

    ``channel_shuffle`` of groups of channels is a transposition by vector instructions; ``contiguous`` uses none.

    >>> transposed_copy(torch.arange(6.0).view(2, 3)).tolist()
    [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    """
    n, m = M.shape
    pixel = M.as_strided((1, n * m, 1, 1), (n * m, 1, n * m, n * m))
    return torch.channel_shuffle(pixel, n).view(m, n)


def _multiply_transposed_columns(M: torch.Tensor, P: torch.Tensor, Q: torch.Tensor) -> None:
    """Continue the sums over rows from block to block, so that memory is read once for all columns."""
    columns = _column_major(Q)
    for rows in blocks(M):
        for pair in _column_slices(Q.size(1)):
            sums = columns[pair].t()
            torch.addmm(sums, M[rows].t(), P[rows, pair], beta=int(rows.start > 0), out=sums)
    Q.copy_(columns.t())


def _column_major(factor: torch.Tensor) -> torch.Tensor:
    """Return memory for the columns of a factor, each aligned to a cache line: else BLAS adds in another order."""
    n, r = factor.shape
    return factor.new_empty(r, math.ceil(n / LINE_ELEMENTS) * LINE_ELEMENTS)[:, :n]


def _column_slices(r: int) -> list[slice]:
    """Return slices of two columns, or of three if there are three: a product of four has other bits.

    >>> _column_slices(4)
    [slice(0, 2, None), slice(2, 4, None)]
    """
    width = 3 if r == 3 else 2
    return [slice(j, j + width) for j in range(0, r, width)]


def _pays(M: torch.Tensor, r: int) -> bool:
    large = r <= MOST_COLUMNS and M.numel() >= SMALLEST_ELEMENTS
    return large and M.device.type == "cpu" and M.dtype == torch.float32 and _same_bits(r)


@cache
def _same_bits(r: int) -> bool:
    """Return whether this processor's BLAS adds in the same order both ways."""
    random = torch.Generator("cpu").manual_seed(r)
    sizes = (1203, 1204), (1204, r), (1203, r)
    M, Q, P = (torch.randn(size, generator=random, dtype=torch.float32, device="cpu") for size in sizes)
    blocked, straight = torch.empty_like(P), torch.empty_like(P)
    (_multiply_columns if r > 1 else _multiply_one_column)(M, Q, blocked, None)
    matmul(M, Q, straight)
    if r == 1:
        return torch.equal(blocked, straight)
    blocked_q, straight_q = torch.empty_like(Q), torch.empty_like(Q)
    _multiply_transposed_columns(M, P, blocked_q)
    matmul(M.t(), P, straight_q)
    return torch.equal(blocked, straight) and torch.equal(blocked_q, straight_q)


def blocks(M: torch.Tensor) -> list[slice]:
    """Return ranges of rows of about `BLOCK_ELEMENTS`, none of few rows: BLAS adds those in another order.

    One range on an accelerator, where each costs a launch.

    >>> blocks(torch.empty(1024, 256))
    [slice(0, 512, None), slice(512, 1024, None)]
    """
    n, count = M.size(0), M.numel() // BLOCK_ELEMENTS if M.device.type == "cpu" else 1
    size = math.ceil(n / max(1, count) / LINE_ELEMENTS) * LINE_ELEMENTS
    starts = range(0, max(1, n - LINE_ELEMENTS + 1), size)
    return [slice(start, stop) for start, stop in pairwise([*starts, n])]
