"""GradBucket: the one thing that a communication hook sees.

A bucket is a flat buffer of gradients, with the same numbers also visible as one tensor per
parameter. The buffer is the truth and the per-parameter tensors are views of it, so a hook may work
on whichever form suits it. A sparse gradient is a buffer by itself, without views. Nothing here knows
reducers, hooks or groups, and nothing here may: that is why a hook can be tested with a bucket built
by hand, in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

__all__ = ["GradBucket"]


def _wrong(operation: str, argument: str, expected: str, got: object) -> ValueError:
    return ValueError(f"{operation}: argument {argument!r} must be {expected}, got {got!r}.")


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that a view into a flat buffer takes to stand for ``tensor`` element by element.

    A tensor that fills its memory without gaps (channels_last too) keeps its own strides; any other goes row by row.
    """
    if tensor.is_contiguous():
        return tensor.stride()
    dims = sorted((d for d in range(tensor.dim()) if tensor.size(d) > 1), key=tensor.stride)
    expected = 1
    for dim in dims:
        if tensor.stride(dim) != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= tensor.size(dim)
    return tensor.stride()


def width(tensor: torch.Tensor, buffer: torch.Tensor) -> int:
    """How many elements of ``buffer`` stand for one of ``tensor``: two where a complex number is two real ones."""
    return 2 if tensor.is_complex() and not buffer.is_complex() else 1


def split(buffer: torch.Tensor, templates: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of ``buffer``, one after another, with the shapes and strides of ``templates``.

    In a buffer of real numbers, the view for a complex tensor is complex too; in one of bfloat16, which no complex
    dtype is made of, its last dimension counts real and imaginary part.
    """
    views, start = [], buffer.storage_offset()
    for template in templates:
        wide = width(template, buffer)
        if wide == 1:
            views.append(torch.as_strided(buffer, template.shape, dense_strides(template), start))
        else:
            strides = *(2 * stride for stride in dense_strides(template)), 1
            pairs = torch.as_strided(buffer, (*template.shape, 2), strides, start)
            views.append(pairs if buffer.dtype is torch.bfloat16 else torch.view_as_complex(pairs))
        start += wide * template.numel()
    return views


class GradBucket:
    """Gradients of some parameters in one flat tensor, as a communication hook receives them.

    Args:
        index: Place of the bucket in the order of communication. 0 holds the gradients that are
            ready first, those of the last layers. Default 0.
        buffer: One-dimensional tensor with every gradient of the bucket, one after another. The hook owns it
            until the Future that it returned is done. Or one sparse gradient, in coordinate format and in the shape
            of its parameter: it is not divided, and `gradients` of such a bucket are none, as on torch.
        gradients: One tensor per parameter; their shapes and strides say how ``buffer`` is divided, in
            order. They have to add up to the buffer's length, in which a complex number counts as two
            real ones if the buffer is real. Left out, the whole buffer is one gradient (none if it is sparse).
        parameters: The parameters to which the gradients belong, in the same order. Default: none.
        is_last: Whether this is the last bucket of the iteration. Default True.

    Raises:
        ValueError: The gradients or parameters don't fit the buffer.

    Example:
        A hook can be tried without any process group:

        >>> import torch
        >>> bucket = GradBucket(buffer=torch.arange(6.0), gradients=[torch.empty(2, 2), torch.empty(2)])
        >>> [g.tolist() for g in bucket.gradients()]
        [[[0.0, 1.0], [2.0, 3.0]], [4.0, 5.0]]
        >>> bucket.buffer().mul_(2)
        tensor([ 0.,  2.,  4.,  6.,  8., 10.])
        >>> bucket.gradients()[1]
        tensor([ 8., 10.])
    """

    __slots__ = (
        "_buffer",
        "_index",
        "_is_last",
        "_laid",
        "_layout",
        "_parameters",
        "_room",
        "_scale",
        "_templates",
        "_views",
    )

    def __init__(
        self,
        index: int = 0,
        buffer: torch.Tensor | None = None,
        gradients: Sequence[torch.Tensor] | None = None,
        parameters: Sequence[torch.Tensor] = (),
        is_last: bool = True,
    ) -> None:
        if buffer is None or not (buffer.is_sparse or buffer.dim() == 1):
            shape = None if buffer is None else tuple(buffer.shape)
            raise _wrong("GradBucket", "buffer", "a one-dimensional tensor, or sparse", shape)
        self._index = index
        self._buffer = buffer
        self._layout = buffer.layout
        whole = [] if buffer.is_sparse else [buffer]
        self._templates = whole if gradients is None else list(gradients)
        self._parameters = list(parameters)
        self._is_last = is_last
        self._views: list[torch.Tensor] | None = None
        self._scale = 1.0
        self._room: Callable[[torch.dtype], torch.Tensor] | None = None
        self._laid: torch.dtype | None = None
        self._check()

    @classmethod
    def of_views(
        cls,
        index: int,
        buffer: torch.Tensor,
        views: list[torch.Tensor],
        parameters: list[torch.Tensor],
        is_last: bool,
        scale: float = 1.0,
        room: Callable[[torch.dtype], torch.Tensor] | None = None,
        laid: torch.dtype | None = None,
    ) -> GradBucket:
        """A bucket whose ``views`` are known to divide ``buffer``: nothing is checked or computed.

        Args:
            scale: What gradients were multiplied by already, for hooks that say that they can take that.
            room: Gives memory of another dtype as long as the buffer, the same one at every step.
            laid: In which dtype gradients lie in that memory already, and not in the buffer, for hooks that say so too.
        """
        bucket = cls.__new__(cls)
        bucket._scale, bucket._room, bucket._laid = scale, room, laid
        bucket._index, bucket._buffer, bucket._is_last = index, buffer, is_last
        bucket._layout = torch.strided
        bucket._templates = bucket._views = views
        bucket._parameters = parameters
        return bucket

    def _check(self) -> None:
        if self._layout is torch.sparse_coo:
            self._check_sparse()
            return
        total = sum(width(template, self._buffer) * template.numel() for template in self._templates)
        if total != self._buffer.numel():
            expected = f"tensors of {self._buffer.numel()} elements together, like the buffer"
            raise _wrong("GradBucket", "gradients", expected, total)
        if self._parameters and len(self._parameters) != len(self._templates):
            expected = f"one per gradient ({len(self._templates)})"
            raise _wrong("GradBucket", "parameters", expected, len(self._parameters))

    def _check_sparse(self) -> None:
        if self._templates:
            raise _wrong("GradBucket", "gradients", "left out where the buffer is sparse", len(self._templates))
        shapes = [tuple(parameter.shape) for parameter in self._parameters]
        if shapes not in ([], [tuple(self._buffer.shape)]):
            expected = f"none, or one of shape {tuple(self._buffer.shape)} as the sparse buffer"
            raise _wrong("GradBucket", "parameters", expected, shapes)

    def index(self) -> int:
        """Place of the bucket in the order of communication; 0 holds the last layers' gradients."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """All gradients, flat, or a sparse one as it is. Not divided by the number of ranks: that is a hook's work."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """The same numbers as `buffer`, as one view per parameter, with that parameter's shape and strides."""
        if self._views is None:
            self._views = split(self._buffer, self._templates)
        return list(self._views)

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of this bucket, in the order of `gradients`."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Whether no bucket follows in this iteration. It holds the first layers' gradients."""
        return self._is_last

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Put another tensor in the buffer's place, say a compressed copy; `gradients` then views that one.

        Args:
            tensor: Of the buffer's shape; any dtype and device.

        Raises:
            ValueError: The tensor has another shape than the buffer.
        """
        if tensor.shape != self._buffer.shape:
            expected = f"a tensor of shape {tuple(self._buffer.shape)}, like the buffer"
            raise _wrong("GradBucket.set_buffer", "tensor", expected, tuple(tensor.shape))
        self._buffer = tensor
        self._views = None

    def __repr__(self) -> str:
        kind = f"{self._buffer.numel()} x {self._buffer.dtype} on {self._buffer.device}"
        last = ", last" if self._is_last else ""
        return f"GradBucket(index {self._index}{last}: {len(self._templates)} gradients, {kind})"
