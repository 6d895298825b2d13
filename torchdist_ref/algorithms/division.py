"""Division by the number of ranks: the one place that says by what a sum of gradients is divided.

All share one `Divisor`. The exchanges and the hooks call `average`, which divides. The packers of `parallel.storage`
multiply by the divisor's `factor` while gradients are in the cache, as torch's reducer does. The two differ in the last
bit unless the divisor is a power of two. Do not divide by a world size elsewhere.
"""

from __future__ import annotations

import torch

__all__ = ["Divisor", "average"]


class Divisor:
    """Number by which a sum over ranks is divided.

    Each DDP has one such object, which the reducer, the packer and the exchange share. `Join` alone changes its value.

    Attributes:
        value: Number of ranks in the average.
        factor: Reciprocal of the value.

    Example:
        >>> divisor = Divisor(4)
        >>> divisor.factor
        0.25
        >>> average(torch.tensor([2.0, 8.0]), divisor)
        tensor([0.5000, 2.0000])
    """

    __slots__ = ("factor", "value")

    def __init__(self, value: float) -> None:
        self.change(value)

    def change(self, value: float) -> None:
        """Divide by another number from now on."""
        self.value = float(value)
        self.factor = 1.0 / self.value

    @property
    def factor_is_exact(self) -> bool:
        """Whether multiplying by the factor gives the bits of the division: for powers of two."""
        return self.value.is_integer() and not int(self.value) & (int(self.value) - 1)


def average(buffer: torch.Tensor, divisor: Divisor) -> torch.Tensor:
    """Divide a sum over ranks, or this rank's summand, by the divisor, in place.

    Args:
        buffer: Dense or sparse tensor. Dividing the summand keeps sums of 16-bit floats in range.
        divisor: Number of ranks.

    Returns:
        The buffer.
    """
    return buffer if divisor.value == 1.0 else buffer.div_(divisor.value)
