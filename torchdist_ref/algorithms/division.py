"""Division by the number of ranks: the one place that says by what a sum of gradients is divided.

All share one `Divisor`. The reducer and the hooks call `average`; `storage.DenseBucket` multiplies by its `factor`
while it packs. Do not divide by a world size elsewhere.
"""

from __future__ import annotations

import torch

__all__ = ["Divisor", "average"]


class Divisor:
    """Number by which a sum over ranks is divided.

    Each DDP has one such object, which the reducer, the packer and the exchange share. `Join` alone changes its value.

    Attributes:
        value: Number of ranks in the average.

    Example:
        >>> divisor = Divisor(4)
        >>> divisor.factor
        0.25
        >>> average(torch.tensor([2.0, 8.0]), divisor)
        tensor([0.5000, 2.0000])
    """

    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = float(value)

    @property
    def factor(self) -> float:
        """Reciprocal, by which a packer multiplies while it copies."""
        return 1.0 / self.value

    @property
    def factor_is_exact(self) -> bool:
        """Whether multiplying by the factor gives the bits of the division: for powers of two."""
        return self.value.is_integer() and not int(self.value) & (int(self.value) - 1)


def average(buffer: torch.Tensor, divisor: Divisor, by_factor: bool = False) -> torch.Tensor:
    """Divide a sum over ranks, or this rank's summand, by the divisor, in place.

    Args:
        buffer: Dense or sparse tensor. Dividing the summand keeps sums of 16-bit floats in range.
        divisor: Number of ranks.
        by_factor: Multiply by the reciprocal, as the packer does. The last bit may differ from a division unless the
            divisor is a power of two; torch's reducer multiplies, and torch's hooks divide. Default False.

    Returns:
        The buffer.
    """
    if divisor.value == 1.0:
        return buffer
    return buffer.mul_(divisor.factor) if by_factor else buffer.div_(divisor.value)
