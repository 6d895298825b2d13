"""Memory of gradients during communication: flat buckets, sparse buckets, and gradients averaged in place.

`DenseBucket.copy_in` packs a parameter's gradient, multiplied and rounded as the exchange asks; `DenseBucket.copy_out`
unpacks the result. With ``gradient_as_bucket_view`` the parameter's ``.grad`` is a view of the bucket: results need not
be copied out, and gradients need not be copied in where autograd accumulates in place. `SparseBucket` holds one sparse
gradient as it is.

`InPlaceGradients` replaces the last dense bucket between ranks that share memory. The last bucket is full only when
backward is over, so no computation overlaps with its communication, and packing it would cost about as much as the sum
itself. Therefore its gradients are averaged where they are, piece by piece. Do not add launch order here: `reducer`
decides it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from torchdist_ref import groups
from torchdist_ref.algorithms.bucket import GradBucket, Packing, dense_strides, split
from torchdist_ref.algorithms.division import Divisor
from torchdist_ref.calls import AllReduce
from torchdist_ref.errors import DistError
from torchdist_ref.parallel.bucketing import ParameterEntry, ReducerOptions
from torchdist_ref.torch_internals import torch_private

copy_many, scale_many = torch_private.COPY_MANY.bind(), torch_private.SCALE_MANY.bind()

_SUM = AllReduce()
# Up to this number of elements, a call of a copy costs more than the copy itself. Such gradients wait until the bucket
# is full, and one call copies all of them.
SMALL_GRADIENT_ELEMENTS = 4096
# Bytes from which on a gradient averaged in place has collectives of its own; smaller ones are packed together.
LARGE_GRADIENT_BYTES = 512 * 1024
# Bytes that are divided and summed at a time, while they are in a core's cache.
PIECE_BYTES = 2 * 1024 * 1024


class CommunicationBuffers:
    """Reusable communication buffers of one bucket, one per dtype.

    A class of its own because a `GradBucket` refers to it. If a `GradBucket` referred to the bucket, the two would form
    a reference cycle, and the memory would outlive its reducer until the next garbage collection.

    Args:
        parameters: The bucket's parameters.
        length: Elements of the bucket.
        group: Group that communicates it.
    """

    def __init__(self, parameters: list[torch.Tensor], length: int, group: Any) -> None:
        self.parameters = parameters
        self.length = length
        self.group = group
        self._allocated: dict[torch.dtype, tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def flat(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the buffer of a dtype, flat."""
        return self._get(dtype)[0]

    def views(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the buffer of a dtype as one view per parameter."""
        return self._get(dtype)[1]

    def release(self) -> None:
        """Free the buffers; those that others refer to live on."""
        self._allocated.clear()

    def _get(self, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
        found = self._allocated.get(dtype)
        if found is None:
            memory = _allocate(self.length, self.parameters[0], self.group, dtype)
            found = self._allocated[dtype] = memory, split(memory, self.parameters)
        return found


class DenseBucket:
    """Flat buffer of some parameters' gradients, with the number of gradients that are pending.

    Args:
        index: Position in the order of communication.
        members: Indices of the parameters in the reducer.
        parameters: The parameters, in the same order, of one dtype and device.
        is_last: Whether this is the last bucket of the iteration.
        gradient_as_view: Whether ``.grad`` of the parameters is a view of the buffer.
        group: Group that communicates it; on the CPU the buffer is registered with it.
        lazy: Whether the buffer is allocated with the first gradient of an iteration, and freed at its end.

    Attributes:
        pending: Number of members whose gradients are not ready.
        launched: Handle of the exchange in progress, or None.
        length: Elements of the buffer.
        wire_dtype: Dtype of the communication buffer in use; None if gradients are packed into the buffer itself.
        scale: Factor that gradients are multiplied by when they are packed.
    """

    def __init__(
        self,
        index: int,
        members: list[int],
        parameters: list[torch.Tensor],
        is_last: bool,
        gradient_as_view: bool,
        group: Any,
        lazy: bool = False,
    ) -> None:
        self.index = index
        self.members = members
        self.parameters = parameters
        self.is_last = is_last
        self.gradient_as_view = gradient_as_view
        # Complex gradients are communicated as real numbers: a hook that rounds would lose their imaginary parts.
        self._dtype = parameters[0].dtype.to_real()
        self._complex = self._dtype is not parameters[0].dtype
        self.length = sum(parameter.numel() for parameter in parameters) * (2 if self._complex else 1)
        self.wire_buffers = CommunicationBuffers(parameters, self.length, group)
        # With a wire dtype, gradients are packed into `wire_buffers` and nothing writes here. The operating system
        # provides memory for pages that are written, so this buffer then costs none.
        self._own = CommunicationBuffers(parameters, self.length, group)
        self._lazy = lazy
        if not lazy:
            self._own.flat(self._dtype)
        on_cpu = parameters[0].device.type == "cpu"
        self._small = [on_cpu and parameter.numel() <= SMALL_GRADIENT_ELEMENTS for parameter in parameters]
        self._postponed: list[tuple[int, torch.Tensor]] = []
        self._targets: list[torch.Tensor] = []
        self.reset()
        self.set_packing()

    @property
    def buffer(self) -> torch.Tensor:
        """Packed gradients, flat; allocated now if they are not."""
        return self._own.flat(self._dtype)

    @property
    def views(self) -> list[torch.Tensor]:
        """The buffer as one view per parameter."""
        return self._own.views(self._dtype)

    def reset(self) -> None:
        """Make every gradient pending again."""
        self.pending = len(self.members)
        self.launched: Any = None

    def release(self) -> None:
        """Drop the result of an iteration, and the buffers too if they are allocated anew in each."""
        self.launched = None
        if self._lazy:
            self._targets = []
            self._own.release()
            self.wire_buffers.release()

    def set_packing(self, scale: float = 1.0, wire_dtype: torch.dtype | None = None) -> None:
        """Set scale and dtype for packing; call before the first gradient of an iteration.

        Args:
            scale: Factor for gradients, applied while they are in the cache. Default 1.0.
            wire_dtype: Dtype in which they are packed and then multiplied. They stay in the buffer, neither rounded nor
                multiplied, if ``.grad`` is a view of it, has that dtype or is complex. Default None: their own.
        """
        unrounded = self.gradient_as_view or self._complex or wire_dtype is self._dtype
        self.wire_dtype = None if unrounded else wire_dtype
        self.scale = scale if self.wire_dtype is wire_dtype else 1.0
        self._targets = []
        # torch converts a Python number to a tensor in every call, which costs more than to multiply a small gradient.
        dtype = _exact(self._dtype)
        self._factor = None if self.scale == 1.0 else torch.tensor(self.scale, dtype=dtype, device="cpu")
        self._postponed.clear()

    def _packed(self) -> list[torch.Tensor]:
        """Return the buffer that gradients are packed into, as one view per parameter; kept until it is freed."""
        found = self.views if self.wire_dtype is None else self.wire_buffers.views(self.wire_dtype)
        self._targets = found
        return found

    def copy_in(self, slot: int) -> None:
        """Pack the gradient of one parameter; zeros if it has none.

        Small gradients are postponed until the bucket is launched: one call costs more than their copies.
        """
        gradient, target = self.parameters[slot].grad, (self._targets or self._packed())[slot]
        if gradient is None:
            target.zero_()
            return
        if gradient is target and self._factor is None:
            return
        if gradient.requires_grad:
            gradient = gradient.detach()
        if self._small[slot]:
            self._postponed.append((slot, gradient))
            return
        self._pack(target, gradient)
        if self.gradient_as_view:
            self._replace_by_view(slot, gradient)

    def _pack(self, view: torch.Tensor, gradient: torch.Tensor) -> None:
        if self._factor is not None and self.wire_dtype is None:
            torch.mul(gradient, self._factor, out=view)
            return
        if gradient is not view:
            view.copy_(gradient)
        if self._factor is not None:
            view.mul_(self._factor)

    def _pack_postponed(self) -> None:
        """Copy the gradients that were postponed, all at once."""
        if not self._postponed:
            return
        targets = self._packed()
        views = [targets[slot] for slot, _ in self._postponed]
        copy_many(views, [gradient for _, gradient in self._postponed])
        if self._factor is not None:
            scale_many(views, self._factor)
        if self.gradient_as_view:
            for slot, gradient in self._postponed:
                self._replace_by_view(slot, gradient)
        self._postponed.clear()

    def _replace_by_view(self, slot: int, gradient: torch.Tensor) -> None:
        # In mixed precision the gradient has the low dtype until the end of backward. Then the parameters are restored,
        # and `copy_out` makes the view the gradient.
        if gradient is not self.views[slot] and gradient.dtype == self.views[slot].dtype:
            self.parameters[slot].grad = self.views[slot]

    def contents(self) -> torch.Tensor:
        """Return the packed gradients, flat."""
        self._pack_postponed()
        return self.buffer

    def grad_bucket(self) -> GradBucket:
        """Return the packed gradients as a communication hook receives them."""
        self._pack_postponed()
        packing = Packing(self.views, self.scale, self.wire_dtype, self.wire_buffers.flat)
        return GradBucket(self.index, self.buffer, None, self.parameters, self.is_last, packing)

    def zero(self) -> None:
        """Replace the gradients by zeros, the contribution of a rank without inputs."""
        self.set_packing()
        self.buffer.zero_()

    def copy_out(self, value: torch.Tensor, untouched: Collection[int] = (), unchanged: bool = False) -> None:
        """Make the result of the exchange the gradients of the parameters.

        Args:
            value: As many elements as the buffer; the buffer itself, if the exchange was in place.
            untouched: Indices of parameters whose ``.grad`` is left as it is.
            unchanged: Whether the value equals what was packed, so that ``.grad`` holds it already.
        """
        slots: Sequence[int] = range(len(self.members))
        if untouched:
            slots = [slot for slot, member in enumerate(self.members) if member not in untouched]
        if unchanged:
            slots = [slot for slot in slots if self.parameters[slot].grad is None]
        sources = self._unpacked(value)
        if self.gradient_as_view:
            views = self.views
            for slot in slots:
                parameter, view = self.parameters[slot], views[slot]
                if parameter.grad is not view:
                    parameter.grad = view
        else:
            self._copy_to_gradients(slots, sources)

    def _unpacked(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Return the value as one tensor per parameter; in the buffer itself if gradients are views of it."""
        location = value.data_ptr(), value.dtype
        if location == (self.buffer.data_ptr(), self.buffer.dtype):
            return self.views
        if self.wire_dtype is not None:
            wire = self.wire_buffers.flat(self.wire_dtype)
            if location == (wire.data_ptr(), self.wire_dtype):
                return self._packed()
        if self.gradient_as_view or self._complex:
            self.buffer.copy_(value.detach().reshape(-1))
            return self.views
        return split(value.detach().contiguous().view(-1), self.parameters)

    def _copy_to_gradients(self, slots: Sequence[int], sources: Sequence[torch.Tensor]) -> None:
        """Copy results to the gradients of parameters, which may have none yet."""
        targets = []
        for slot in slots:
            parameter = self.parameters[slot]
            if parameter.grad is None:
                parameter.grad = torch.empty_like(self.views[slot])
            targets.append(parameter.grad)
        if targets:
            copy_many(targets, [sources[slot] for slot in slots])

    def adopt_gradients(self) -> None:
        """Move existing gradients into the buffer, if they have to be views of it."""
        if not self.gradient_as_view or self._lazy:
            return
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is not None and parameter.dtype == view.dtype:
                view.copy_(parameter.grad)
                parameter.grad = view


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a factor loses nothing when tensors of ``dtype`` are multiplied by it."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def _allocate(length: int, like: torch.Tensor, group: Any, dtype: torch.dtype) -> torch.Tensor:
    if like.device.type == "cpu":
        return groups.empty_registered(length, dtype=dtype, group=group)
    return torch.empty(length, dtype=dtype, device=like.device)


class SparseBucket:
    """One parameter's sparse gradient, as embeddings with ``sparse=True`` have it; used like a `DenseBucket`.

    Each rank has gradients of other rows, so sparse gradients fit no flat buffer. `backends.reductions.start_sum` sums
    them.

    Args:
        index: Position in the order of communication.
        member: Index of the parameter in the reducer.
        entry: The parameter, and its name for error messages.
        is_last: Whether this is the last bucket of the iteration.
    """

    scale = 1.0

    def __init__(self, index: int, member: int, entry: ParameterEntry, is_last: bool) -> None:
        self.index = index
        self.members = [member]
        self.entry = entry
        self.is_last = is_last
        self.length = entry.parameter.numel()
        self.reset()

    def reset(self) -> None:
        """Make the gradient pending again."""
        self.pending = 1
        self.launched: Any = None
        self._zeros = False

    def release(self) -> None:
        """Drop the result of an iteration."""
        self.launched = None

    def set_packing(self, scale: float = 1.0, wire_dtype: torch.dtype | None = None) -> None:
        """Ignore scale and dtype: gradients are neither divided nor rounded here."""

    def copy_in(self, slot: int) -> None:
        """Check the gradient.

        Raises:
            DistError: The gradient is dense, though the module announces a sparse one.
        """
        gradient = self.entry.parameter.grad
        if gradient is not None and not gradient.is_sparse:
            raise DistError(
                f"DistributedDataParallel: parameter {self.entry.name!r} of an embedding with sparse=True got a dense "
                "gradient. Use it in that embedding only, or build the embedding with sparse=False."
            )

    def contents(self) -> torch.Tensor:
        """Return a copy of the gradient; without rows if there is none."""
        gradient = self.entry.parameter.grad
        return self._empty() if gradient is None or self._zeros else gradient.detach().clone()

    def grad_bucket(self) -> GradBucket:
        """Return the gradient as a communication hook receives it."""
        return GradBucket(self.index, self.contents(), None, [self.entry.parameter], self.is_last)

    def zero(self) -> None:
        """Communicate no rows until the next reset, the contribution of a rank without inputs."""
        self._zeros = True

    def _empty(self) -> torch.Tensor:
        # An embedding's gradient consists of whole rows. The empty one needs the same layout, to be summed with others.
        parameter = self.entry.parameter
        indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
        rows = parameter.new_empty((0, *parameter.shape[1:]))
        return torch.sparse_coo_tensor(
            indices,
            rows,
            parameter.shape,
            dtype=parameter.dtype,
            device=parameter.device,
            is_coalesced=True,
            check_invariants=False,
        )

    def copy_out(self, value: torch.Tensor, untouched: Collection[int] = (), unchanged: bool = False) -> None:
        """Make the result the gradient, unless it has to be left alone or equals the gradient already."""
        parameter = self.entry.parameter
        if self.members[0] not in untouched and not (unchanged and parameter.grad is not None):
            parameter.grad = value.detach().to(parameter.dtype)


ReducerBucket = DenseBucket | SparseBucket


class InPlaceGradients:
    """Dense gradients on the CPU, of one dtype, that are averaged where they are.

    Args:
        parameters: Parameters in an order that is the same on all ranks.
        group: Group that averages.
        dtype: Dtype in which values are divided and summed. Default None: their own.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], group: Any, dtype: torch.dtype | None = None) -> None:
        self.parameters = parameters
        self.group = group
        self._dtype = dtype or (parameters[0].dtype if parameters else torch.float32)
        self._piece = PIECE_BYTES // self._dtype.itemsize
        self._large = [parameter for parameter in parameters if parameter.nbytes >= LARGE_GRADIENT_BYTES]
        small = [parameter for parameter in parameters if parameter.nbytes < LARGE_GRADIENT_BYTES]
        self._packed = [_PackedGradients(small, self._dtype)] if small else []
        rounds = any(parameter.dtype is not self._dtype for parameter in self._large)
        self._rounded = groups.empty_registered(self._piece, dtype=self._dtype, group=group) if rounds else None

    def average(self, divisor: Divisor) -> None:
        """Replace every gradient by the sum of all ranks' over the divisor; a missing one counts as zeros."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for parameter in self._large:
            flat = _flat_gradient(parameter)
            if flat is not None:
                self._sum(flat, divisor)
            else:
                self._sum_packed(_PackedGradients([parameter], self._dtype), divisor)
        for packed in self._packed:
            self._sum_packed(packed, divisor)

    def participate_with_zeros(self) -> None:
        """Contribute zeros, for a rank without inputs, and leave its gradients as they are."""
        for parameter in self._large:
            self._sum(parameter.new_zeros(parameter.numel()), Divisor(1))
        for packed in self._packed:
            self._sum(packed.flat.zero_(), Divisor(1))

    def _sum_packed(self, packed: _PackedGradients, divisor: Divisor) -> None:
        """Average packed gradients, and copy them back."""
        packed.load()
        self._sum(packed.flat, divisor)
        packed.store()

    def _sum(self, flat: torch.Tensor, divisor: Divisor) -> None:
        """Average a flat tensor over the group, piece by piece."""
        for piece in flat.split(self._piece):
            operand = piece
            if self._rounded is not None and piece.dtype is not self._dtype:
                operand = self._rounded[: len(piece)].copy_(piece)
            # Divided before the sum, so that sums of 16-bit floats stay in range.
            if divisor.factor != 1.0:
                operand.mul_(divisor.factor)
            self.group.backend.submit(_SUM, (operand,), (operand,), True)
            if operand is not piece:
                piece.copy_(operand)


class _PackedGradients:
    """Gradients of some parameters copied one after another, each in its parameter's layout."""

    def __init__(self, parameters: list[torch.Tensor], dtype: torch.dtype) -> None:
        self.parameters = parameters
        self.flat = parameters[0].new_empty(sum(parameter.numel() for parameter in parameters), dtype=dtype)
        self._views = split(self.flat, parameters)

    def load(self) -> None:
        """Copy the gradients in."""
        copy_many(self._views, self._gradients())

    def store(self) -> None:
        """Copy the gradients out."""
        copy_many(self._gradients(), self._views)

    def _gradients(self) -> list[torch.Tensor]:
        """Return the gradients themselves."""
        return [parameter.grad.detach() for parameter in self.parameters if parameter.grad is not None]


def _flat_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a parameter as a flat view, or None if its dtype or layout is not the parameter's."""
    gradient = parameter.grad
    if gradient is None or gradient.dtype is not parameter.dtype or gradient.is_sparse:
        return None
    contiguous = gradient.is_contiguous() and parameter.is_contiguous()
    alike = contiguous or gradient.stride() == dense_strides(parameter)
    return gradient.detach().as_strided((parameter.numel(),), (1,)) if alike else None


def build_buckets(
    assignment: Sequence[list[int]],
    entries: Sequence[ParameterEntry],
    options: ReducerOptions,
    group: Any,
    average_group: Any = None,
    wire_dtype: torch.dtype | None = None,
) -> tuple[list[ReducerBucket], InPlaceGradients]:
    """Return the buckets of an assignment, in the order of communication, and the gradients averaged in place.

    Args:
        assignment: Indices into ``entries``; a sparse parameter is alone.
        entries: The parameters.
        options: Arguments of DDP.
        group: Group that communicates the buckets.
        average_group: Group over which the last dense bucket is averaged in place. Default None: it has a buffer.
        wire_dtype: Dtype of that average.
    """
    dense = [members for members in assignment if not entries[members[0]].sparse]
    in_place = dense[-1] if average_group is not None and dense else []
    buffered = [members for members in assignment if members is not in_place]
    last = len(buffered) - 1
    with torch.no_grad():
        buckets = [_build(i, members, entries, i == last, options, group) for i, members in enumerate(buffered)]
    gradients = InPlaceGradients([entries[member].parameter for member in in_place], average_group, wire_dtype)
    return buckets, gradients


def _build(
    index: int,
    members: list[int],
    entries: Sequence[ParameterEntry],
    is_last: bool,
    options: ReducerOptions,
    group: Any,
) -> ReducerBucket:
    if entries[members[0]].sparse:
        return SparseBucket(index, members[0], entries[members[0]], is_last)
    parameters = [entries[member].parameter for member in members]
    bucket = DenseBucket(index, members, parameters, is_last, options.gradient_as_view, group, options.lazy_buckets)
    bucket.adopt_gradients()
    return bucket
