"""The linear algebra of PowerSGD: how a bucket divides into matrices, and orthonormal columns.

`Plan` is computed once per bucket: which parameters are matrices worth compressing, and where their
parts lie in flat memory. Nothing here communicates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, groupby, pairwise

import torch

# Smallest norm that a column is divided by: what is smaller counts as zero, and stays zero.
TINY = {torch.float16: 6e-5}
# Columns up to which a product by twos or threes has the same bits as one of all columns (measured with MKL).
FEW = 4
# Elements of a matrix that are worked on while they stay in a processor's own cache.
BLOCK = 1 << 17
# Elements below which calls cost more than they save.
SMALL = 1 << 15
# Elements of a line of the cache.
LINE = 16


@dataclass(frozen=True, slots=True)
class Matrix:
    """One compressed parameter: its place in the bucket, and M (n × m) ≈ P (n × r) Qᵀ (r × m)."""

    start: int
    n: int
    m: int
    r: int

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
        return _factors([(matrix.n, matrix.r) for matrix in self.matrices], flat)

    def qs(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The right factors, as views of flat memory."""
        return _factors([(matrix.m, matrix.r) for matrix in self.matrices], flat)

    def sizes(self) -> tuple[int, int]:
        """Elements of all left and of all right factors."""
        return sum(x.n * x.r for x in self.matrices), sum(x.m * x.r for x in self.matrices)

    def draws(self, together: bool) -> list[int]:
        """How many random numbers are drawn at a time for the first Qs: for each of them, or for all of one shape."""
        if not together:
            return [x.m * x.r for x in self.matrices]
        return [sum(x.m * x.r for x in same) for _, same in groupby(self.matrices, lambda x: (x.n, x.m))]


def _factors(shapes: Sequence[tuple[int, int]], flat: torch.Tensor) -> list[torch.Tensor]:
    pieces = torch.split(flat, [n * r for n, r in shapes])
    return [piece.view(n, r) for piece, (n, r) in zip(pieces, shapes, strict=True)]


def plan(gradients: Sequence[torch.Tensor], ranks_for: Sequence[Callable[[int, int], int]]) -> Plan:
    """Divide a bucket.

    Args:
        gradients: The bucket's gradients, in the order in which they lie in its buffer.
        ranks_for: For each gradient, the rank r for a matrix of n × m; 0 leaves it uncompressed.

    Matrices of the same shape stand next to each other, as in torch's hook: the first Qs are drawn in this order.

    >>> plan([torch.empty(3), torch.empty(8, 2, 4)], [lambda n, m: 1] * 2)
    Plan(matrices=(Matrix(start=3, n=8, m=8, r=1),), rest=((0, 3),))
    """
    matrices: dict[tuple[int, int], list[Matrix]] = {}
    rest, start = [], 0
    for gradient, rank_for in zip(gradients, ranks_for, strict=True):
        n, m = matrix_shape(gradient)
        r = rank_for(n, m) if gradient.dim() > 1 else 0
        if r:
            matrices.setdefault((n, m), []).append(Matrix(start, n, m, r))
        else:
            rest.append((start, start + gradient.numel()))
        start += gradient.numel()
    return Plan(tuple(chain.from_iterable(matrices.values())), tuple(rest))


def matrix_shape(gradient: torch.Tensor) -> tuple[int, int]:
    """A gradient as a matrix of n × m, as it lies in memory: rows are the dimension with the longest stride."""
    if gradient.dim() == 0:
        return 1, 1
    n = gradient.size(max(range(gradient.dim()), key=lambda d: (gradient.stride(d), -d)))
    return n, gradient.numel() // n if n else 0


# The three products of a step. Each has the bits of one call of torch.bmm, as torch's hook makes it, but in less time:
# BLAS rearranges a large matrix before it multiplies it, and with few columns that takes longer than the product. Bits
# matter because error feedback magnifies rounding: another order of additions moves twenty steps by 2e-6 and more.


def product(M: torch.Tensor, Q: torch.Tensor, P: torch.Tensor, added: torch.Tensor | None = None) -> None:
    """P ← M Q; before that M ← M + ``added``, part by part, while each is in the cache.

    >>> M, Q, P = torch.arange(6.0).view(3, 2), torch.eye(2), torch.empty(3, 2)
    >>> product(M, Q, P, added=torch.ones(3, 2))
    >>> P.tolist()
    [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    """
    if _cut_pays(M, P.size(1)):
        return (_by_blocks if P.size(1) > 1 else _by_rows)(M, Q, P, added)
    if added is not None:
        M += added
    _whole(M, Q, P)


def _by_rows(M: torch.Tensor, Q: torch.Tensor, P: torch.Tensor, added: torch.Tensor | None = None) -> None:
    """Rows by rows, which is all that one column needs: BLAS does not rearrange the matrix for it."""
    for rows in blocks(M):
        block = M[rows]
        if added is not None:
            block += added[rows]
        _whole(block, Q, P[rows])


def _by_blocks(M: torch.Tensor, Q: torch.Tensor, P: torch.Tensor, added: torch.Tensor | None = None) -> None:
    """Rows by rows, turned so that BLAS finds neighbours where it needs them, and columns by twos or threes."""
    columns = _columns(P)
    for rows in blocks(M):
        block = M[rows]
        if added is not None:
            block += added[rows]
        turned = _turned(block)
        for pair in _pairs(P.size(1)):
            torch.mm(turned.t(), Q[:, pair], out=columns[pair, rows].t())
    P.copy_(columns.t())


def _turned(M: torch.Tensor) -> torch.Tensor:
    """Mᵀ, laid out anew. Channels in groups, shuffled, are just that, by vector instructions; ``contiguous`` has none.

    >>> _turned(torch.arange(6.0).view(2, 3)).tolist()
    [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    """
    n, m = M.shape
    pixel = M.as_strided((1, n * m, 1, 1), (n * m, 1, n * m, n * m))
    return torch.channel_shuffle(pixel, n).view(m, n)


def transposed_product(M: torch.Tensor, P: torch.Tensor, Q: torch.Tensor) -> None:
    """Q ← Mᵀ P.

    >>> M, P, Q = torch.eye(3)[:, :2].clone(), torch.arange(6.0).view(3, 2), torch.empty(2, 2)
    >>> transposed_product(M, P, Q)
    >>> Q.tolist()
    [[0.0, 1.0], [2.0, 3.0]]
    """
    if P.size(1) > 1 and _cut_pays(M, P.size(1)):
        _as_it_lies(M, P, Q)
    else:
        _whole(M.t(), P, Q)


def _as_it_lies(M: torch.Tensor, P: torch.Tensor, Q: torch.Tensor) -> None:
    """Sums over rows go on from block to block, so each block is read once from afar for all columns."""
    columns = _columns(Q)
    for rows in blocks(M):
        for pair in _pairs(Q.size(1)):
            sums = columns[pair].t()
            torch.addmm(sums, M[rows].t(), P[rows, pair], beta=int(rows.start > 0), out=sums)
    Q.copy_(columns.t())


def _columns(factor: torch.Tensor) -> torch.Tensor:
    """Memory for a factor column by column, each at the beginning of a `LINE`: elsewhere BLAS adds in another order."""
    n, r = factor.shape
    return factor.new_empty(r, math.ceil(n / LINE) * LINE)[:, :n]


def _pairs(r: int) -> list[slice]:
    """Columns by twos, or three at once: four at once have other bits.

    >>> _pairs(4)
    [slice(0, 2, None), slice(2, 4, None)]
    """
    width = 3 if r == 3 else 2
    return [slice(j, j + width) for j in range(0, r, width)]


def approximate(P: torch.Tensor, Q: torch.Tensor, out: torch.Tensor, error: torch.Tensor | None) -> None:
    """out ← P Qᵀ, and ``error`` becomes what is left of it after that; block by block, while a block is in the cache.

    >>> P, Q, out, error = torch.ones(2, 1), torch.tensor([[2.0], [3.0]]), torch.empty(2, 2), torch.full((2, 2), 5.0)
    >>> approximate(P, Q, out, error)
    >>> out.tolist(), error.tolist()
    ([[2.0, 3.0], [2.0, 3.0]], [[3.0, 2.0], [3.0, 2.0]])
    """
    for rows in blocks(out):
        _whole(P[rows], Q.t(), out[rows])
        if error is not None:
            error[rows] -= out[rows]


def _whole(A: torch.Tensor, B: torch.Tensor, out: torch.Tensor) -> None:
    # With one column bits depend on where memory begins, and torch.mm has others than torch.bmm.
    torch.bmm(A[None], B[None], out=out[None])


def _cut_pays(M: torch.Tensor, r: int) -> bool:
    if not (r <= FEW and M.numel() >= SMALL and M.device.type == "cpu" and M.dtype == torch.float32):
        return False
    return _cut_keeps_bits(r)


@cache
def _cut_keeps_bits(r: int) -> bool:
    """Whether this processor's BLAS adds in the same order either way: not every one need do."""
    random = torch.Generator().manual_seed(r)
    M, Q, P = (torch.randn(size, generator=random) for size in ((1203, 1204), (1204, r), (1203, r)))
    cut, whole, cut_t, whole_t = torch.empty_like(P), torch.empty_like(P), torch.empty_like(Q), torch.empty_like(Q)
    (_by_blocks if r > 1 else _by_rows)(M, Q, cut)
    _whole(M, Q, whole)
    if r == 1:
        return torch.equal(cut, whole)
    _as_it_lies(M, P, cut_t)
    _whole(M.t(), P, whole_t)
    return torch.equal(cut, whole) and torch.equal(cut_t, whole_t)


def blocks(M: torch.Tensor) -> list[slice]:
    """Ranges of rows of about `BLOCK` elements, none of a few rows only (BLAS adds those in another order).

    One range on an accelerator, where each costs a launch.

    >>> blocks(torch.empty(1024, 256))
    [slice(0, 512, None), slice(512, 1024, None)]
    """
    n, count = M.size(0), M.numel() // BLOCK if M.device.type == "cpu" else 1
    size = math.ceil(n / max(1, count) / LINE) * LINE
    starts = range(0, max(1, n - LINE + 1), size)
    return [slice(start, stop) for start, stop in pairwise([*starts, n])]


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
