"""Several epochs as one iterator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

__all__ = ["CyclingIterator"]

T = TypeVar("T")


class CyclingIterator(Iterator[T], Generic[T]):
    """Goes through one epoch after the other.

    Args:
        n: The number of epochs, those before ``start_epoch`` included.
        generator_fn: Called with an epoch's number, gives what to go through in it.
        start_epoch: The epoch to begin with. Default: 0.

    Example:
        >>> from torchdist_ref.elastic.utils.data import CyclingIterator
        >>> list(CyclingIterator(3, lambda epoch: iter([epoch, 10 * epoch]), start_epoch=1))
        [1, 10, 2, 20]
    """

    def __init__(self, n: int, generator_fn: Callable[[int], Iterator[T]], start_epoch: int = 0) -> None:
        self._n = n
        self._generator_fn = generator_fn
        self._epoch = start_epoch
        self._current = generator_fn(start_epoch)

    def __next__(self) -> T:
        while True:
            try:
                return next(self._current)
            except StopIteration:
                if self._epoch >= self._n - 1:
                    raise
            # An epoch may be empty, and there may be many of those: hence a loop.
            self._epoch += 1
            self._current = self._generator_fn(self._epoch)
