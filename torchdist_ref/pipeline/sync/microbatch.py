"""Micro-batches: cutting the inputs of a model into them, and joining what comes out.

A tensor is cut along its first dimension; anything else, and a tensor in `NoChunk`, goes to every micro-batch as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchdist_ref.errors import ArgumentError, ArgumentTypeError, explain

__all__ = ["Batch", "NoChunk", "gather", "scatter"]


class NoChunk:
    """Wraps a tensor that every micro-batch gets whole.

    Args:
        inp: The tensor.

    Raises:
        ArgumentTypeError: It is no tensor; other things are never cut.

    Example:
        >>> import torch
        >>> from torchdist_ref.pipeline.sync import NoChunk
        >>> NoChunk(torch.zeros(2)).tensor
        tensor([0., 0.])
    """

    def __init__(self, inp: Tensor) -> None:
        if not isinstance(inp, Tensor):
            raise ArgumentTypeError(explain("NoChunk", "inp", "a tensor", type(inp).__name__))
        self._tensor = inp

    @property
    def tensor(self) -> Tensor:
        """The tensor."""
        return self._tensor


@dataclass(frozen=True)
class Batch:
    """What goes from one partition to the next for one micro-batch: one value, or the values of a tuple."""

    values: tuple[Any, ...]
    single: bool

    @classmethod
    def of(cls, result: Any) -> Batch:
        """Wrap what a module returned."""
        return cls(result, False) if isinstance(result, tuple) else cls((result,), True)

    def unwrap(self) -> Any:
        """What the module returned."""
        return self.values[0] if self.single else self.values

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Apply a function to each tensor."""
        return Batch(tuple(function(v) if isinstance(v, Tensor) else v for v in self.values), self.single)


def scatter(inputs: Sequence[Any], chunks: int) -> list[Batch]:
    """Cut the inputs.

    Args:
        inputs: The arguments of a model, at least one of them a tensor that is cut.
        chunks: How many micro-batches at most; there are fewer where there are fewer rows.

    Returns:
        The micro-batches.

    Raises:
        ArgumentTypeError: There is no tensor to cut.
        ArgumentError: Tensors with different numbers of rows.

    Example:
        >>> import torch
        >>> [batch.values for batch in scatter([torch.arange(3), "all"], 2)]
        [(tensor([0, 1]), 'all'), (tensor([2]), 'all')]
    """
    pieces = [value.chunk(chunks) if isinstance(value, Tensor) else None for value in inputs]
    counts = {len(piece) for piece in pieces if piece is not None}
    if not counts:
        raise ArgumentTypeError("Pipe: at least one input must be a tensor, outside NoChunk, to be cut.")
    if len(counts) > 1:
        raise ArgumentError(f"Pipe: inputs are cut in different numbers of micro-batches, {sorted(counts)}.")
    whole = [value.tensor if isinstance(value, NoChunk) else value for value in inputs]
    columns = [piece or [value] * max(counts) for piece, value in zip(pieces, whole, strict=True)]
    return [Batch(values, len(values) == 1) for values in zip(*columns, strict=True)]


def gather(batches: Sequence[Batch]) -> Any:
    """Join the results of the micro-batches.

    Args:
        batches: The results, in order.

    Returns:
        What the model without micro-batches returns: tensors are put together along their first dimension; of other
        things there is a list.

    Example:
        >>> import torch
        >>> gather([Batch((torch.zeros(1), "a"), False), Batch((torch.ones(1), "b"), False)])
        (tensor([0., 1.]), ['a', 'b'])
    """
    columns = zip(*(batch.values for batch in batches), strict=True)
    joined = [torch.cat(column) if isinstance(column[0], Tensor) else list(column) for column in columns]
    return joined[0] if batches[0].single else tuple(joined)
