"""Tensors in the memory layouts that users have, as views of larger buffers whose every byte is compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from torchdist_ref.testing import fill

# Rank whose data fills the buffers around the views; it must be unchanged after the call.
GUARD = 97
MARGIN = 5


class Placed:
    """Tensors and the buffers that they are views of.

    Args:
        layout: Name of the layout, one of `LAYOUTS` in `cases`.
        values: Values of the tensors.
    """

    def __init__(self, layout: str, values: Sequence[Tensor]) -> None:
        self.views: list[Tensor] = []
        self.buffers: list[Tensor] = []
        if layout == "columns" and len({v.shape for v in values}) == 1:
            self._columns(values)
            return
        for value in values:
            buffer, view = BUILDERS.get(layout, _contiguous)(value)
            view.copy_(value)
            self.buffers.append(buffer)
            self.views.append(view)

    def _columns(self, values: Sequence[Tensor]) -> None:
        """Place all tensors in one buffer, side by side, with a guard column between them."""
        buffer = _guarded((*values[0].shape, 2 * len(values) + 1), values[0].dtype)
        self.buffers = [buffer]
        self.views = [buffer.select(-1, 2 * index + 1) for index in range(len(values))]
        for view, value in zip(self.views, values, strict=True):
            view.copy_(value)


def _guarded(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return _guard(tuple(shape), dtype).clone()


@lru_cache(maxsize=1024)
def _guard(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return fill(GUARD, shape, dtype)


def _contiguous(value: Tensor) -> tuple[Tensor, Tensor]:
    buffer = _guarded((value.numel() + 2 * MARGIN,), value.dtype)
    return buffer, buffer[MARGIN : MARGIN + value.numel()].view(value.shape)


def _strided(value: Tensor) -> tuple[Tensor, Tensor]:
    if not value.dim():
        buffer = _guarded((5,), value.dtype)
        return buffer, buffer[3]
    buffer = _guarded((*value.shape[:-1], 3 * value.shape[-1] + 2), value.dtype)
    return buffer, buffer[..., 2::3]


def _transposed(value: Tensor) -> tuple[Tensor, Tensor]:
    if not value.dim():
        return _strided(value)
    buffer = _guarded(tuple(reversed(value.shape)), value.dtype)
    return buffer, buffer.permute(*reversed(range(value.dim())))


def _channels_last(value: Tensor) -> tuple[Tensor, Tensor]:
    if value.dim() != 4:
        return _transposed(value)
    n, c, h, w = value.shape
    buffer = _guarded((n, h, w, c), value.dtype)
    return buffer, buffer.permute(0, 3, 1, 2)


def _gapped(value: Tensor) -> tuple[Tensor, Tensor]:
    if not value.dim():
        return _strided(value)
    buffer = _guarded((*(size + 1 for size in value.shape[:-1]), value.shape[-1] + 3), value.dtype)
    inner = tuple(slice(0, size) for size in value.shape[:-1])
    return buffer, buffer[(*inner, slice(2, value.shape[-1] + 2))]


BUILDERS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "strided": _strided,
    "transposed": _transposed,
    "channels_last": _channels_last,
    "gapped": _gapped,
}
