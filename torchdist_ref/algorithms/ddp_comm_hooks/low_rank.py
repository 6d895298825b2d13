"""Linear algebra of PowerSGD: division of a bucket into matrices, the products of a step, and orthonormal columns.

A `CompressionPlan` is computed once per bucket: the parameters that are matrices worth compressing, and their locations
in flat memory. The products add in the order of torch's hook: error feedback amplifies rounding, so another order would
change the gradients of later steps. Do not add communication here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import torch

# Smallest norm that a column is divided by: a smaller one counts as zero, and stays zero.
SMALLEST_NORM = {torch.float16: 6e-5}


@dataclass(frozen=True, slots=True)
class Matrix:
    """One compressed parameter: its offset in the bucket, and M (n × m) ≈ P (n × r) Qᵀ (r × m)."""

    start: int
    n: int
    m: int
    r: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return M, as a view of a bucket's flat memory."""
        return flat[self.start : self.start + self.n * self.m].view(self.n, self.m)


@dataclass(frozen=True, slots=True)
class CompressionPlan:
    """Compressed `matrices` of a bucket, and ranges that are communicated as they are (`rest`)."""

    matrices: tuple[Matrix, ...]
    rest: tuple[tuple[int, int], ...]

    @property
    def rest_size(self) -> int:
        """Number of uncompressed elements."""
        return sum(stop - start for start, stop in self.rest)

    def ps(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the left factors, as views of flat memory."""
        return _factors([(matrix.n, matrix.r) for matrix in self.matrices], flat)

    def qs(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the right factors, as views of flat memory."""
        return _factors([(matrix.m, matrix.r) for matrix in self.matrices], flat)

    def sizes(self) -> tuple[int, int]:
        """Return the numbers of elements of all left and of all right factors."""
        return sum(x.n * x.r for x in self.matrices), sum(x.m * x.r for x in self.matrices)

    def draws(self, together: bool) -> list[int]:
        """Return how many random numbers are drawn at a time for the first Qs: for each of them, or for each shape."""
        if not together:
            return [x.m * x.r for x in self.matrices]
        return [sum(x.m * x.r for x in same) for _, same in groupby(self.matrices, lambda x: (x.n, x.m))]


# Name of this class in pickles of PowerSGDState from before it was renamed.
Plan = CompressionPlan


def _factors(shapes: Sequence[tuple[int, int]], flat: torch.Tensor) -> list[torch.Tensor]:
    pieces = torch.split(flat, [n * r for n, r in shapes])
    return [piece.view(n, r) for piece, (n, r) in zip(pieces, shapes, strict=True)]


def plan(gradients: Sequence[torch.Tensor], ranks_for: Sequence[Callable[[int, int], int]]) -> CompressionPlan:
    """Divide a bucket.

    Args:
        gradients: The bucket's gradients, in the order of its buffer.
        ranks_for: For each gradient, the rank r for a matrix of n × m; 0 leaves it uncompressed.

    Matrices of the same shape are adjacent, as in torch's hook: the first Qs are drawn in this order.

    >>> plan([torch.empty(3), torch.empty(8, 2, 4)], [lambda n, m: int(m > 1)] * 2)
    CompressionPlan(matrices=(Matrix(start=3, n=8, m=8, r=1),), rest=((0, 3),))
    """
    matrices: dict[tuple[int, int], list[Matrix]] = {}
    rest, start = [], 0
    for gradient, rank_for in zip(gradients, ranks_for, strict=True):
        n, m = matrix_shape(gradient)
        r = rank_for(n, m) if gradient.dim() else 0
        if r:
            matrices.setdefault((n, m), []).append(Matrix(start, n, m, r))
        else:
            rest.append((start, start + gradient.numel()))
        start += gradient.numel()
    return CompressionPlan(tuple(chain.from_iterable(matrices.values())), tuple(rest))


def matrix_shape(gradient: torch.Tensor) -> tuple[int, int]:
    """Return the shape n × m of a gradient as a matrix in memory: rows are the dimension with the longest stride."""
    if gradient.dim() == 0:
        return 1, 1
    n = gradient.size(max(range(gradient.dim()), key=lambda d: (gradient.stride(d), -d)))
    return n, gradient.numel() // n if n else 0


# ---- the three products of a step


def multiply(M: torch.Tensor, Q: torch.Tensor, P: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
    """Compute P ← M Q; before that M ← M + ``gradient``, if there is one."""
    if gradient is not None:
        M += gradient
    matmul(M, Q, P)


def multiply_transposed(M: torch.Tensor, P: torch.Tensor, Q: torch.Tensor) -> None:
    """Compute Q ← Mᵀ P."""
    matmul(M.t(), P, Q)


def decompress(P: torch.Tensor, Q: torch.Tensor, out: torch.Tensor, M: torch.Tensor | None = None) -> None:
    """Compute out ← P Qᵀ, and M ← M - out, if there is an M."""
    matmul(P, Q.t(), out)
    if M is not None:
        M -= out


def matmul(A: torch.Tensor, B: torch.Tensor, out: torch.Tensor) -> None:
    """Compute out ← A B with the bits of torch's hook.

    For one column, bits depend on the address of the memory, and ``torch.mm`` has others than ``torch.bmm``.
    """
    torch.bmm(A[None], B[None], out=out[None])


# ---- orthonormal columns


def orthonormalize(matrices: Sequence[torch.Tensor], epsilon: float = 0.0) -> None:
    """Make the columns of each matrix orthonormal, in place; a zero column stays zero.

    Up to two columns, and in 16-bit floats, by Gram-Schmidt; else by QR decomposition, which is faster and more exact.
    Both span the same spaces.

    Args:
        matrices: With at least as many rows as columns.
        epsilon: Added to every norm before it divides. Default 0.
    """
    for matrix in matrices:
        if matrix.size(1) <= 2 or matrix.dtype in (torch.float16, torch.bfloat16):
            rows = matrix.contiguous()
            _gram_schmidt(rows, epsilon)
            if rows is not matrix:
                matrix.copy_(rows)
        else:
            matrix.copy_(torch.linalg.qr(matrix).Q)


def _gram_schmidt(matrix: torch.Tensor, epsilon: float) -> None:
    smallest = SMALLEST_NORM.get(matrix.dtype, torch.finfo(matrix.dtype).tiny)
    for i in range(matrix.size(1)):
        column = matrix[:, i : i + 1]
        column /= torch.linalg.vector_norm(column).add_(epsilon).clamp_min_(smallest)
        rest = matrix[:, i + 1 :]
        if rest.size(1):
            rest -= column * (column * rest).sum(0, keepdim=True)
