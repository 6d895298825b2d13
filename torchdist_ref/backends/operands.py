"""Operands: the tensors of a call, as lists or as blocks of one tensor, and the tests that every backend makes of them.

A backend may write what it likes into memory, so it must know that a tensor is in memory (`is_in_memory`), that an
output does not overlap itself (`check_writable`), and that no output shares memory with another operand
(`without_overlap`). torch's own backends read memory that is not there in such cases, or give results that depend on
the order of copies. Do not add what a call does with its operands.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from math import gcd, prod
from operator import attrgetter, is_not
from typing import Any, overload

import torch
from torch import Tensor

from torchdist_ref.calls import Call
from torchdist_ref.errors import ArgumentError, BackendArgumentError, UnsupportedError, explain, on_rank
from torchdist_ref.recorder import Operands
from torchdist_ref.torch_internals import accelerators, torch_private
from torchdist_ref.torch_internals.torch_modes import outside_modes


class RowBlocks(Sequence[Tensor]):
    """One tensor as equal blocks, one for each rank: the inputs or outputs of a call.

    A backend that addresses blocks by offset takes `tensor` as it is. To any other this is a list of views, which are
    made on first use: making them takes as long as all other work of the public function.

    Args:
        tensor: A tensor that is contiguous, or whose first dimension divides by the count. Its number of elements
            divides by the count.
        count: The number of blocks.

    >>> [block.tolist() for block in RowBlocks(torch.arange(6), 3)]
    [[0, 1], [2, 3], [4, 5]]
    """

    __slots__ = ("_count", "_views", "tensor")

    def __init__(self, tensor: Tensor, count: int) -> None:
        self.tensor, self._count = tensor, count
        self._views: Sequence[Tensor] = ()

    @property
    def _blocks(self) -> Sequence[Tensor]:
        if not self._views:
            tensor, count = self.tensor, self._count
            by_rows = tensor.dim() and not tensor.shape[0] % count
            with outside_modes():
                self._views = tensor.chunk(count) if by_rows else tensor.view(count, -1).unbind()
        return self._views

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        return self._blocks[index]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._blocks)


def flat_operands(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the tensors of a list, or the one tensor behind `RowBlocks`."""
    return (tensors.tensor,) if type(tensors) is RowBlocks else tensors


PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter))
"""Types of most tensors, whose addresses may be asked for; those of others may be nowhere."""
operand_kind = attrgetter("dtype", "shape")


def operands_of(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Operands:
    """Return the dtypes and shapes of a call's operands on this rank, for recorders.

    >>> import torch
    >>> from torchdist_ref.backends.operands import operands_of
    >>> operands_of([], [torch.zeros(2), torch.zeros(3)])
    ((), ((torch.float32, torch.Size([2])), (torch.float32, torch.Size([3]))))
    """
    return tuple(map(operand_kind, flat_operands(inputs))), tuple(map(operand_kind, flat_operands(outputs)))


Tensors = Sequence[Tensor]
Request = tuple[Call, Tensors, Tensors]
"""A call, its inputs and its outputs: the arguments of `Backend.submit`."""


# Names of the outputs of functions whose output has another name than `output`.
_OUTPUTS = {
    "all_gather": "tensor_list",
    "all_gather_into_tensor": "output_tensor",
    "all_gather_single": "output_tensor",
    "all_to_all": "output_tensor_list",
    "gather": "gather_list",
    "gather_into_tensor": "gather_tensor",
    "gather_single": "gather_tensor",
    "scatter": "tensor",
}


def without_overlap(rank: int, requests: Sequence[Request]) -> tuple[Sequence[Request], Callable[[], None] | None]:
    """Return requests whose outputs share no memory, and a function that copies their results to the given outputs.

    Inputs are read before any output is written, and where outputs share memory, the later output of the list stays.
    An input may be exactly this rank's own block of the outputs, or the reverse: such calls are in place. Requests with
    a tensor that is not in memory (`is_in_memory`) are returned as they are: the backend decides what they mean.

    Args:
        rank: This rank in the group.
        requests: Calls that are in progress at once.

    Returns:
        The requests themselves and None if nothing overlaps. Else requests on copies, and the function to call once
        they are complete.
    """
    operands = (each for _, inputs, outputs in requests for each in (*flat_operands(inputs), *flat_operands(outputs)))
    if not all(map(is_in_memory, operands)) or not _overlap(rank, requests):
        return requests, None
    copies: list[Request] = []
    results: list[tuple[Tensor, Tensor]] = []
    for call, inputs, outputs in requests:
        read = _copied(inputs)
        written = read if inputs is outputs else _copied(outputs)
        copies.append((call, read, written))
        results += zip(flat_operands(outputs), flat_operands(written), strict=True)

    @outside_modes()
    def copy_back() -> None:
        for output, result in results:
            output.copy_(result)

    return copies, copy_back


def are_apart(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Return whether no two tensors share memory, for every call: False where only `without_overlap` can tell.

    >>> row = torch.zeros(4)
    >>> are_apart((row[:2],), (row[2:],)), are_apart((row[:3],), (row[2:],))
    (True, False)
    >>> are_apart((row[:1], row[1:2]), (row[2:],)), are_apart((row[:1], row[1:3]), (row[2:],))
    (True, False)
    """
    read = (inputs.tensor,) if type(inputs) is RowBlocks else inputs
    tensors = (*read, outputs.tensor) if type(outputs) is RowBlocks else (*read, *outputs)
    try:
        if len(tensors) == 2:
            # One input and one output: half of the time of the general case.
            one, other = tensors
            if not (type(one) in PLAIN_TYPES and type(other) in PLAIN_TYPES):
                return False
            begin, start = one.data_ptr(), other.data_ptr()
            apart = begin + one.nbytes <= start or start + other.nbytes <= begin
            return apart and one.is_contiguous() and other.is_contiguous()
        extents = []
        for tensor in tensors:
            if not (type(tensor) in PLAIN_TYPES and tensor.is_contiguous()):
                return False
            extents.append((tensor.data_ptr(), tensor.nbytes))
    except RuntimeError:
        return False
    extents.sort()
    last = 0
    for begin, nbytes in extents:
        if begin < last:
            return False
        last = begin + nbytes
    return True


def output_names(operation: str, count: int) -> list[str]:
    """Return the names of a call's outputs in the public function, for messages.

    >>> output_names("gather", 2), output_names("scatter", 1)
    (['gather_list[0]', 'gather_list[1]'], ['tensor'])
    """
    argument = _OUTPUTS.get(operation, "output")
    return [f"{argument}[{index}]" if argument.endswith("_list") else argument for index in range(count)]


def check_distinct(operation: str, names: Sequence[str], outputs: Sequence[Tensor]) -> None:
    """Raise if two outputs share memory, so that the later block would overwrite the other, or a part of it."""
    # Tensors without memory share none.
    named = [(name, tensor) for name, tensor in zip(names, outputs, strict=True) if is_in_memory(tensor)]
    pair = sharing_pair([tensor for _, tensor in named])
    if pair is not None:
        one, other = (named[index][0] for index in pair)
        raise ArgumentError(
            f"{operation}: {one} and {other} share memory, so only the later block would remain there{on_rank()}. "
            "Allocate each output, as in [torch.empty_like(tensor) for _ in range(world_size)]."
        )


def check_distinct_outputs(requests: Sequence[Request]) -> None:
    """Raise if two outputs of some calls share memory; calls in place may, as the coalesced ones of torch."""
    parts = [(call.op, flat_operands(outputs)) for call, inputs, outputs in requests if inputs is not outputs]
    names = [
        name if len(requests) == 1 else f"{name} of part {part}"
        for part, (operation, outputs) in enumerate(parts)
        for name in output_names(operation, len(outputs))
    ]
    if parts:
        check_distinct(parts[0][0], names, [tensor for _, outputs in parts for tensor in outputs])


@outside_modes()
def _copied(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in flat_operands(tensors)]
    return RowBlocks(copies[0], len(tensors)) if type(tensors) is RowBlocks else copies


def _overlap(rank: int, requests: Iterable[Request]) -> bool:
    """Return whether an output shares memory with another output, or with an input that is not its own block.

    Addresses from the first element to the last are compared, so views that interleave count as overlapping.
    """
    written: list[tuple[int, int]] = []
    read: list[tuple[int, int]] = []
    for _, inputs, outputs in requests:
        written += [_extent(tensor) for tensor in flat_operands(outputs)]
        if inputs is not outputs and outputs:
            read += [_extent(tensor) for tensor in _not_in_place(rank, inputs, outputs)]
    if len(written) == 1:
        start, stop = written[0]
        return start < stop and any(begin < stop and start < end for begin, end in read)
    # Two empty tensors may have one address.
    written = sorted(extent for extent in written if extent[0] < extent[1])
    last = 0
    for begin, end in written:
        if begin < last:
            return True
        last = end
    for begin, end in read:
        after = bisect_left(written, (end, 0))
        if begin < end and after and written[after - 1][1] > begin:
            return True
    return False


def _not_in_place(rank: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the inputs, without this rank's block if that is exactly where the output is."""
    if len(inputs) == 1:
        return () if _extent(inputs[0]) == _extent_of_block(rank, outputs) else inputs
    if not inputs or len(outputs) > 1 or _extent(outputs[0]) != _extent_of_block(rank, inputs):
        return flat_operands(inputs)
    return () if type(inputs) is RowBlocks else [tensor for i, tensor in enumerate(inputs) if i != rank]


def _extent_of_block(rank: int, blocks: Sequence[Tensor]) -> tuple[int, int]:
    if type(blocks) is RowBlocks and blocks.tensor.is_contiguous():
        nbytes = blocks.tensor.nbytes // len(blocks)
        begin = blocks.tensor.data_ptr() + rank * nbytes
        return begin, begin + nbytes
    return _extent(blocks[rank if len(blocks) > 1 else 0])


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the byte after its last one."""
    begin, nbytes = tensor.data_ptr(), tensor.nbytes
    if tensor.is_contiguous() or not nbytes:
        return begin, begin + nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.itemsize


def is_in_memory(tensor: Tensor) -> bool:
    """Return whether all elements of a tensor are in memory, where its address and its strides say.

    Those of fake, functional and most wrapping tensors (DTensor) are elsewhere or nowhere, and those of a tensor whose
    storage was resized, as FSDP does, may be gone.

    >>> freed = torch.zeros(3)
    >>> _ = freed.untyped_storage().resize_(0)
    >>> is_in_memory(torch.zeros(3)), is_in_memory(torch.zeros(0)), is_in_memory(freed)
    (True, True, False)
    """
    if not tensor.numel():
        return True
    try:
        storage = tensor.untyped_storage()
        # The storage of a fake tensor is on no device. torch warns where its address is asked for.
        if storage.device != tensor.device or not tensor.data_ptr():
            return False
        begin, end = _extent(tensor)
        return tensor.storage_offset() * tensor.itemsize + end - begin <= storage.nbytes()
    except RuntimeError:
        # Tensors without storage raise it, such as those of `torch.vmap`.
        return False


def check_writable(operation: str, argument: str, tensor: Tensor) -> None:
    """Raise if two elements of an output share memory."""
    if tensor.is_contiguous():
        return
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            # Each dimension steps over all elements of those with smaller strides, or elements may share memory.
            if stride <= reach and _overlaps_itself(tuple(tensor.shape), tensor.stride()):
                expected = "a tensor whose elements do not overlap (use .clone())"
                raise ArgumentError(explain(operation, argument, expected, f"strides {tensor.stride()}"))
            reach += (size - 1) * stride


@lru_cache(maxsize=64)
@outside_modes()
def _overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether two elements of a view share memory: each writes its number, and one number is lost."""
    if any(stride == 0 and size > 1 for stride, size in zip(strides, shape, strict=True)):
        return True
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    numbers = torch.arange(prod(shape), dtype=torch.int64, device="cpu").view(shape)
    view = torch.zeros(reach + 1, dtype=torch.int64, device="cpu").as_strided(shape, strides)
    return not torch.equal(view.copy_(numbers), numbers)


def sharing_pair(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Return the indices of two tensors that share an element, or None; all tensors are in memory.

    >>> table = torch.zeros(2, 4)
    >>> sharing_pair([table[:, :2], table[:, 2:]]), sharing_pair([table[:, :2], table[:, 1:]])
    (None, (0, 1))
    """
    extents = sorted((*_extent(tensor), index) for index, tensor in enumerate(tensors) if tensor.numel())
    cluster: list[tuple[int, int, int]] = []
    reach = 0
    for extent in (*extents, None):
        if extent is not None and extent[0] < reach:
            cluster.append(extent)
            reach = max(reach, extent[1])
            continue
        if len(cluster) > 1 and (pair := _pair_of([tensors[i] for *_, i in cluster])) is not None:
            first, second = sorted(cluster[i][2] for i in pair)
            return first, second
        if extent is not None:
            cluster, reach = [extent], extent[1]
    return None


def _pair_of(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Return the indices of two tensors that share an element; the first tensor has the lowest address."""
    offsets = [tensor.data_ptr() - tensors[0].data_ptr() for tensor in tensors]
    unit = gcd(*offsets, *(tensor.itemsize for tensor in tensors))
    return _pair_of_views(
        tuple(
            (
                offset // unit,
                (*tensor.shape, tensor.itemsize // unit),
                (*(stride * tensor.itemsize // unit for stride in tensor.stride()), 1),
            )
            for offset, tensor in zip(offsets, tensors, strict=True)
        )
    )


@lru_cache(maxsize=64)
@outside_modes()
def _pair_of_views(views: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]) -> tuple[int, int] | None:
    """Return the indices of two views that share an element: each writes its number, from 1 up, where none is."""
    ends = [
        offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        for offset, shape, strides in views
    ]
    memory = torch.zeros(max(ends) + 1, dtype=torch.int32, device="cpu")
    for index, (offset, shape, strides) in enumerate(views):
        view = memory.as_strided(shape, strides, offset)
        other = int(view.max())
        if other:
            return other - 1, index
        view.fill_(index + 1)
    return None


def refuse_unsupported(
    call: Call, inputs: Tensors, outputs: Tensors, backend: str, devices: Sequence[str] | None = None
) -> None:
    """Raise if a tensor is on a device that the backend cannot use, is quantized, or is not in memory.

    torch's own backends read memory that is not there in these cases, and end the process. The public functions refuse
    layouts other than dense ones, since they know the argument's name.

    Args:
        call: The call.
        inputs: See `Backend.submit`.
        outputs: See `Backend.submit`.
        backend: The backend's name.
        devices: The types of devices whose memory the backend can use. Default: the CPU and each accelerator.

    Raises:
        UnsupportedError: There is such a tensor.
        BackendArgumentError: A tensor is not in memory.
    """
    named = [] if inputs is outputs else [(f"inputs[{i}]", tensor) for i, tensor in enumerate(flat_operands(inputs))]
    named += [(f"outputs[{i}]", tensor) for i, tensor in enumerate(flat_operands(outputs))]
    for name, tensor in named:
        device = tensor.device
        if not (tensor.is_cpu or accelerators.is_accelerator(device) if devices is None else device.type in devices):
            kinds = ("the CPU", "accelerators") if devices is None else devices
            raise UnsupportedError(
                f"{call.op}: backend {backend!r} works on tensors of {' and '.join(kinds)}, and this one is on "
                f"{tensor.device}{on_rank()}. Move it with .cpu()."
            )
        if tensor.is_quantized:
            hint = "Send .int_repr(), and the scale and zero point once."
            raise UnsupportedError(f"{call.op}: no backend works on quantized tensors{on_rank()}. {hint}")
        if tensor.is_nested:
            expected = "a dense tensor (send each of .unbind(), or torch.nested.to_padded_tensor)"
            raise UnsupportedError(explain(call.op, name if len(named) > 1 else "tensor", expected, "a nested tensor"))
        if not is_in_memory(tensor):
            raise BackendArgumentError(
                f"{call.op}: Cannot access data pointer of Tensor that doesn't have storage, or whose storage is too "
                f"small: argument {name if len(named) > 1 else 'tensor'!r}, {type(tensor).__name__} of "
                f"{list(tensor.shape)}{on_rank()}. Pass a tensor with memory, such as DTensor.to_local()."
            )


def unwrapped(operands: Any) -> Any:
    """Return operands with the tensors in memory that some of theirs wrap, or the operands themselves if none does.

    Those of results of functional collectives are waited for. Those in transforms of torch.func (`grad`, `jvp`,
    `functionalize`) are what torch's dispatcher passes to backends of C++.

    >>> operands = (torch.zeros(1),)
    >>> unwrapped(operands) is operands
    True
    """
    if isinstance(operands, (list, tuple)):
        inside = [*map(unwrapped, operands)]
        return inside if any(map(is_not, inside, operands)) else operands
    if type(operands) is RowBlocks:
        whole = unwrapped(operands.tensor)
        return operands if whole is operands.tensor else RowBlocks(whole, len(operands))
    if not isinstance(operands, Tensor):
        return operands
    names = torch_private
    if names.ASYNC_TENSOR.exists() and isinstance(operands, names.ASYNC_TENSOR.get()):
        return operands.trigger_wait()
    functional = names.IS_FUNCTIONAL.get()(operands)
    if functional:
        # Changes of other views of its memory.
        names.SYNC_VIEWS.get()(operands)
    elif not names.IS_TRANSFORMED.get()(operands):
        return operands
    return unwrapped(names.UNWRAPPED.get()(operands))
