"""Gradient bucket that a communication hook receives.

A bucket is a flat buffer of gradients, which are also visible as one tensor per parameter. The buffer owns the memory
and the tensors are views of it, so a hook may use either form. A sparse gradient is a buffer by itself, without views.
Do not add reducers, hooks or groups here: a hook can be tested with a bucket built by hand, in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from torchdist_ref.algorithms.division import Divisor
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, explain

__all__ = ["GradBucket"]


def _unsuitable(operation: str, argument: str, expected: str, got: object) -> ArgumentError:
    return ArgumentError(explain(operation, argument, expected, got))


def _listed(argument: str, values: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    listed: list[object] = list(values) if isinstance(values, Iterable) else [values]
    tensors = [value for value in listed if isinstance(value, torch.Tensor)]
    if len(tensors) < len(listed):
        raise ArgumentTypeError(explain("GradBucket", argument, "a list of tensors", values))
    return tensors


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides that a view of a flat buffer needs to represent ``tensor`` element by element.

    A tensor that fills its memory without gaps (channels_last too) keeps its own strides; any other becomes row-major.
    """
    if tensor.is_contiguous():
        return tensor.stride()
    dims = sorted((d for d in range(tensor.dim()) if tensor.size(d) > 1), key=tensor.stride)
    expected = 1
    for dim in dims:
        if tensor.stride(dim) != expected:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").stride()
        expected *= tensor.size(dim)
    return tensor.stride()


def width(tensor: torch.Tensor, buffer: torch.Tensor) -> int:
    """Return how many elements of ``buffer`` hold one of ``tensor``: 2 for a complex number in a real buffer."""
    return 2 if tensor.is_complex() and not buffer.is_complex() else 1


def split(buffer: torch.Tensor, templates: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return consecutive views of ``buffer`` with the shapes and strides of ``templates``.

    In a real buffer, the view for a complex tensor is complex too. In a bfloat16 buffer, which has no complex
    counterpart, the last dimension of the view counts real and imaginary part.
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


@dataclass(frozen=True, slots=True)
class Packing:
    """Result of packing a bucket.

    Attributes:
        views: One view of the buffer per parameter.
        scale: Factor that the gradients have been multiplied by.
        wire_dtype: Dtype of the gradients in ``wire_buffer(wire_dtype)``. None if they are in the buffer itself.
        wire_buffer: Returns the reusable communication buffer of a dtype, as long as the bucket.
    """

    views: list[torch.Tensor]
    scale: float = 1.0
    wire_dtype: torch.dtype | None = None
    wire_buffer: Callable[[torch.dtype], torch.Tensor] | None = None


class GradBucket:
    """Gradients of some parameters in one flat tensor, as a communication hook receives them.

    Args:
        index: Position of the bucket in the order of communication. 0 holds the gradients that are ready first, those
            of the last layers. Default 0.
        buffer: One-dimensional tensor with every gradient of the bucket, one after another. The hook owns it until
            the Future that it returned is done. Or one sparse gradient, in coordinate format and in the shape of its
            parameter: it is not divided, and `gradients` of such a bucket is empty, as in torch.
        gradients: One tensor per parameter, whose shapes and strides define the division of ``buffer``, in order. Their
            sizes add up to the buffer's length; a complex number counts as two real ones if the buffer is real.
            Default: the whole buffer is one gradient (none if it is sparse).
        parameters: The parameters to which the gradients belong, in the same order. Default: none.
        is_last: Whether this is the last bucket of the iteration. Default True.
        packing: Result of the reducer's packer, whose views are trusted. Default None: gradients are in the buffer.

    Raises:
        ArgumentError: The gradients or parameters do not fit the buffer.
        ArgumentTypeError: The index is not an int, or the gradients or parameters are not a list of tensors.

    Example:
        A hook can be tried without any process group:

        >>> from torchdist_ref import GradBucket
        >>> import torch
        >>> bucket = GradBucket(buffer=torch.arange(6.0), gradients=[torch.empty(2, 2), torch.empty(2)])
        >>> [g.tolist() for g in bucket.gradients()]
        [[[0.0, 1.0], [2.0, 3.0]], [4.0, 5.0]]
        >>> bucket.buffer().mul_(2)
        tensor([ 0.,  2.,  4.,  6.,  8., 10.])
        >>> bucket.gradients()[1]
        tensor([ 8., 10.])

    Elsewhere:
        None in MPI and NCCL; in JAX, the compiler XLA combines small all-reduces. Horovod calls it tensor fusion.
    """

    __slots__ = ("_buffer", "_index", "_is_last", "_layout", "_packing", "_parameters", "_templates", "_views")

    def __init__(
        self,
        index: int = 0,
        buffer: torch.Tensor | None = None,
        gradients: Sequence[torch.Tensor] | None = None,
        parameters: Sequence[torch.Tensor] = (),
        is_last: bool = True,
        packing: Packing | None = None,
    ) -> None:
        if not isinstance(buffer, torch.Tensor) or not (buffer.is_sparse or buffer.dim() == 1):
            got = tuple(buffer.shape) if isinstance(buffer, torch.Tensor) else buffer
            raise _unsuitable("GradBucket", "buffer", "a one-dimensional tensor, or sparse", got)
        self._index = index
        self._buffer = buffer
        self._layout = buffer.layout
        self._is_last = is_last
        self._packing = packing
        self._views: list[torch.Tensor] | None = None
        if packing is not None:
            self._templates = self._views = packing.views
            self._parameters = parameters
            return
        if not isinstance(index, int):
            raise ArgumentTypeError(explain("GradBucket", "index", "an int", index))
        whole = [] if buffer.is_sparse else [buffer]
        self._templates = whole if gradients is None else _listed("gradients", gradients)
        self._parameters = _listed("parameters", parameters)
        self._check()

    def _check(self) -> None:
        if self._layout is torch.sparse_coo:
            self._check_sparse()
            return
        total = sum(width(template, self._buffer) * template.numel() for template in self._templates)
        if total != self._buffer.numel():
            expected = f"tensors of {self._buffer.numel()} elements together, like the buffer"
            raise _unsuitable("GradBucket", "gradients", expected, total)
        if self._parameters and len(self._parameters) != len(self._templates):
            expected = f"one per gradient ({len(self._templates)})"
            raise _unsuitable("GradBucket", "parameters", expected, len(self._parameters))

    def _check_sparse(self) -> None:
        if self._templates:
            raise _unsuitable("GradBucket", "gradients", "left out if the buffer is sparse", len(self._templates))
        shapes = [tuple(parameter.shape) for parameter in self._parameters]
        if shapes not in ([], [tuple(self._buffer.shape)]):
            expected = f"left out, or one parameter of the sparse buffer's shape {tuple(self._buffer.shape)}"
            raise _unsuitable("GradBucket", "parameters", expected, shapes)

    def index(self) -> int:
        """Return the position of the bucket in the order of communication; 0 holds the last layers' gradients.

        >>> import torch
        >>> from torchdist_ref import GradBucket
        >>> GradBucket(buffer=torch.zeros(3)).index()
        0
        """
        return self._index

    def buffer(self) -> torch.Tensor:
        """Return all gradients, flat, or a sparse one as it is.

        They are not divided by the number of ranks: the hook divides. `scale` and `wire_dtype` are the exceptions that
        a hook asks for by its traits.

        >>> import torch
        >>> from torchdist_ref import GradBucket
        >>> GradBucket(buffer=torch.arange(3.0)).buffer()
        tensor([0., 1., 2.])
        """
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return one view of `buffer` per parameter, with that parameter's shape and strides.

        >>> import torch
        >>> from torchdist_ref import GradBucket
        >>> bucket = GradBucket(buffer=torch.arange(6.0), gradients=[torch.empty(2, 2), torch.empty(2)])
        >>> [tuple(gradient.shape) for gradient in bucket.gradients()]
        [(2, 2), (2,)]
        """
        if self._views is None:
            self._views = split(self._buffer, self._templates)
        return list(self._views)

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters of this bucket, in the order of `gradients`.

        >>> import torch
        >>> from torchdist_ref import GradBucket
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> GradBucket(buffer=torch.zeros(2), gradients=[weight], parameters=[weight]).parameters()[0] is weight
        True
        """
        return list(self._parameters)

    def is_last(self) -> bool:
        """Return whether no bucket follows in this iteration. The last holds the first layers' gradients.

        >>> import torch
        >>> from torchdist_ref import GradBucket
        >>> GradBucket(buffer=torch.zeros(3), is_last=False).is_last()
        False
        """
        return self._is_last

    @property
    def is_sparse(self) -> bool:
        """Whether DDP filled the bucket with one sparse gradient."""
        return self._layout is torch.sparse_coo

    @property
    def scale(self) -> float:
        """Factor that the gradients have been multiplied by; 1.0 unless the hook's traits declare ``only_averages``."""
        return 1.0 if self._packing is None else self._packing.scale

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """Dtype of the communication buffer that holds the gradients in place of `buffer`; None if `buffer` does.

        Only a hook whose traits name a ``wire_dtype`` gets such a bucket. `wire_buffer` returns the gradients.
        """
        return None if self._packing is None else self._packing.wire_dtype

    def wire_buffer(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the gradients in another dtype, in memory that a reducer keeps from step to step.

        Args:
            dtype: Dtype of the result. If it is `wire_dtype`, the gradients are there already; else they are copied.

        Example:
            >>> import torch
            >>> from torchdist_ref import GradBucket
            >>> GradBucket(buffer=torch.tensor([1 / 3])).wire_buffer(torch.float16)
            tensor([0.3333], dtype=torch.float16)
        """
        if self._packing is None or self._packing.wire_buffer is None:
            return self._buffer.to(dtype, copy=True)
        memory = self._packing.wire_buffer(dtype)
        return memory if self._packing.wire_dtype is dtype else memory.copy_(self._buffer)

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replace the buffer, say by a compressed copy; `gradients` then returns views of that one.

        Args:
            tensor: Of the buffer's shape; any dtype and device.

        Raises:
            ArgumentError: The tensor has another shape than the buffer.
            ArgumentTypeError: It is not a tensor.

        >>> import torch
        >>> from torchdist_ref import GradBucket
        >>> bucket = GradBucket(buffer=torch.ones(3))
        >>> bucket.set_buffer(bucket.buffer().bfloat16())
        >>> bucket.gradients()[0].dtype
        torch.bfloat16
        """
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentTypeError(explain("GradBucket.set_buffer", "tensor", "a tensor", tensor))
        if tensor.shape != self._buffer.shape:
            expected = f"a tensor of shape {tuple(self._buffer.shape)}, like the buffer"
            raise _unsuitable("GradBucket.set_buffer", "tensor", expected, tuple(tensor.shape))
        self._buffer = tensor
        self._views = None

    def __repr__(self) -> str:
        kind = f"{self._buffer.numel()} x {self._buffer.dtype} on {self._buffer.device}"
        last = ", last" if self._is_last else ""
        return f"GradBucket(index {self._index}{last}: {len(self._templates)} gradients, {kind})"


# ---- interface between the reducer and an exchange


class LaunchedBucket(Protocol):
    """Bucket of the reducer, as an exchange uses it."""

    index: int
    length: int

    @property
    def scale(self) -> float:
        """Factor that the gradients have been multiplied by."""

    def contents(self) -> torch.Tensor:
        """Return the gradients."""

    def grad_bucket(self) -> GradBucket:
        """Return the gradients as a hook receives them."""


class BucketExchange(Protocol):
    """Exchange of the contents of buckets. The reducer launches buckets in order, and waits for them in order."""

    @property
    def scale(self) -> float:
        """Factor for gradients when they are packed; 1.0 if the exchange divides."""

    @property
    def wire_dtype(self) -> torch.dtype | None:
        """Dtype in which gradients are packed, or None for their own; they are multiplied after that."""

    @property
    def keeps_buffer(self) -> bool:
        """Whether the result equals the contents."""

    @property
    def average_group(self) -> Any:
        """Group over which the exchange averages, if gradients may be averaged without it; None if it needs buckets."""

    @property
    def divisor(self) -> Divisor:
        """Divisor of sums over that group."""

    def launch(self, bucket: LaunchedBucket) -> Any:
        """Start, and return a handle for `wait`."""

    def wait(self, bucket: LaunchedBucket, handle: Any) -> torch.Tensor:
        """Return the result, as many elements as the bucket has."""
