"""The linear algebra of PowerSGD: how a bucket divides into matrices, and orthonormal columns.

`Plan` is computed once per bucket: which parameters are matrices worth compressing, and where their
parts lie in flat memory. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

# Smallest norm that a column is divided by: what is smaller counts as zero, and stays zero.
TINY = {torch.float16: 6e-5}
# Elements from which on a matrix counts as large: below, a product takes less than a millisecond.
LARGE = 1 << 20


@dataclass(frozen=True, slots=True)
class Matrix:
    """One compressed parameter: its place in the bucket, and M (n × m) ≈ P (n × r) Qᵀ (r × m)."""

    start: int
    n: int
    m: int
    r: int

    @property
    def large(self) -> bool:
        """Whether products with it take so long that the layout of the factors matters."""
        return self.r > 1 and self.n * self.m >= LARGE

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """M, as a view of a bucket's flat memory."""
        return flat[self.start : self.start + self.n * self.m].view(self.n, self.m)


@dataclass(frozen=True, slots=True)
class Plan:
    """What of a bucket is compressed (`matrices`), and which ranges travel as they are (`rest`)."""

    matrices: tuple[Matrix, ...]
    rest: tuple[tuple[int, int], ...]

    @property
    def rest_size(self) -> int:
        """How many elements travel uncompressed."""
        return sum(stop - start for start, stop in self.rest)

    def ps(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The left factors, as views of flat memory."""
        return _factors([(matrix.n, matrix.r, matrix.large) for matrix in self.matrices], flat)

    def qs(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The right factors, as views of flat memory."""
        return _factors([(matrix.m, matrix.r, matrix.large) for matrix in self.matrices], flat)

    def sizes(self) -> tuple[int, int]:
        """Elements of all left and of all right factors."""
        return sum(x.n * x.r for x in self.matrices), sum(x.m * x.r for x in self.matrices)


def _factors(shapes: Sequence[tuple[int, int, bool]], flat: torch.Tensor) -> list[torch.Tensor]:
    """Factors as views of flat memory: of large matrices column after column, of others row after row.

    Column after column, products with r > 1 are three times faster. But they add up in another order than torch's hook,
    and error feedback magnifies the rounding. So matrices for which the time doesn't matter keep to torch's numbers.
    """
    pieces = torch.split(flat, [n * r for n, r, _ in shapes])
    return [
        piece.view(r, n).t() if large else piece.view(n, r)
        for piece, (n, r, large) in zip(pieces, shapes, strict=True)
    ]


def plan(gradients: Sequence[torch.Tensor], ranks_for: Sequence[Callable[[int, int], int]]) -> Plan:
    """Divide a bucket.

    Args:
        gradients: The bucket's gradients, in the order in which they lie in its buffer.
        ranks_for: For each gradient, the rank r for a matrix of n × m; 0 leaves it uncompressed.

    >>> plan([torch.empty(3), torch.empty(8, 2, 4)], [lambda n, m: 1] * 2)
    Plan(matrices=(Matrix(start=3, n=8, m=8, r=1),), rest=((0, 3),))
    """
    matrices, rest, start = [], [], 0
    for gradient, rank_for in zip(gradients, ranks_for, strict=True):
        n, m = matrix_shape(gradient)
        r = rank_for(n, m) if gradient.dim() > 1 else 0
        if r:
            matrices.append(Matrix(start, n, m, r))
        else:
            rest.append((start, start + gradient.numel()))
        start += gradient.numel()
    return Plan(tuple(matrices), tuple(rest))


def matrix_shape(gradient: torch.Tensor) -> tuple[int, int]:
    """A gradient as a matrix of n × m, as it lies in memory: rows are the dimension with the longest stride."""
    if gradient.dim() == 0:
        return 1, 1
    n = gradient.size(max(range(gradient.dim()), key=lambda d: (gradient.stride(d), -d)))
    return n, gradient.numel() // n if n else 0


def orthonormalize(matrices: Sequence[torch.Tensor], epsilon: float = 0.0) -> None:
    """Make the columns of each matrix orthonormal, in place; a zero column stays zero.

    Up to two columns, and in half precision, by Gram-Schmidt; else by QR decomposition, which is faster and
    more exact. Both span the same spaces.

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
    smallest = TINY.get(matrix.dtype, torch.finfo(matrix.dtype).tiny)
    for i in range(matrix.size(1)):
        column = matrix[:, i : i + 1]
        column /= torch.linalg.vector_norm(column).add_(epsilon).clamp_min_(smallest)
        rest = matrix[:, i + 1 :]
        if rest.size(1):
            rest -= column * (column * rest).sum(0, keepdim=True)
