"""Backend interface: a backend takes a call and tensors, and returns a Work.

The differences between `ref`, `gloo`, `nccl` and `mpi` are below `submit`. The shared parts (ranks, argument errors,
default groups) are above it. `BackendWrapper` is the base of backends that record, compare or delay another's calls.
Names of backends are in `registry`.

Profiler ranges: each call of a backend appears as ``ref:all_reduce`` beside torch's own operators, from its start to
its end, also if it is asynchronous. torch's C++ backends make such ranges themselves. Without a profiler a call costs
one check, a tenth of a microsecond. A range that ends after its profiler has stopped writes into memory that the
profiler has freed, and the process crashes. So a range ends before any thread can see that the call has ended: waiting
for a call inside the profiled block is safe. If a call is still running when the profiler stops, its range stays open
and is shown without an end.

Do not add a method per operation here, nor numbers of bytes or ranks to a range: the recorder has them.
"""

from __future__ import annotations

import sys
import warnings
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial, wraps
from math import gcd, prod
from operator import attrgetter, is_not
from time import sleep
from typing import Any, TypeGuard, TypeVar, overload
from weakref import ref

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.futures import Future

from torchdist_ref.calls import Call
from torchdist_ref.errors import (
    ArgumentError,
    BackendArgumentError,
    UnsupportedError,
    explain,
    message_of,
    on_rank,
)
from torchdist_ref.membership.watch import MemberWatch
from torchdist_ref.recorder import Operands, Recorder
from torchdist_ref.stores import PrefixStore, Store
from torchdist_ref.timeouts import Deadline, found_soon
from torchdist_ref.torch_internals import torch_private
from torchdist_ref.torch_internals.torch_modes import dispatch_modes, is_traced, outside_modes
from torchdist_ref.work import Work

CLOSE_SECONDS, _CLOSE_POLL_SECONDS = 5.0, 0.001
"""Longest wait for the calls of groups that are destroyed, for all groups together, and interval of its checks."""


@dataclass(frozen=True, slots=True)
class Membership:
    """A group as its backend on one rank sees it.

    Attributes:
        store: Store with a prefix of this group only, shared by its members.
        rank: This rank in the group.
        members: The global rank of every member, in group order.
        name: The group's name, the same on all members.
        timeout: Upper limit of any wait in this group, in seconds.
        options: The caller's `pg_options`, for backends that accept options.
        device: The caller's `device_id`, for backends that bind a device.
        existing: torch's process group whose backend to use, where torch made the group; else None.
        watch: Watch over the members until the backend is made; the waits of `store` obey it already.
        recorder: The last calls of the group on this rank, for the backend's attribute `recorder`.
    """

    store: Store
    rank: int
    members: tuple[int, ...]
    name: str
    timeout: float
    options: Any = None
    device: Any = None
    existing: Any = None
    watch: MemberWatch | None = None
    recorder: Recorder = field(default_factory=Recorder, compare=False)

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.members)


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


def refuse_unsupported(call: Call, inputs: Tensors, outputs: Tensors, backend: str, devices: Sequence[str]) -> None:
    """Raise if a tensor is on a device that the backend cannot use, is quantized, or is not in memory.

    torch's own backends read memory that is not there in these cases, and end the process. The public functions refuse
    layouts other than dense ones, since they know the argument's name.

    Args:
        call: The call.
        inputs: See `Backend.submit`.
        outputs: See `Backend.submit`.
        backend: The backend's name.
        devices: The types of devices whose memory the backend can use.

    Raises:
        UnsupportedError: There is such a tensor.
        BackendArgumentError: A tensor is not in memory.
    """
    named = [] if inputs is outputs else [(f"inputs[{i}]", tensor) for i, tensor in enumerate(flat_operands(inputs))]
    named += [(f"outputs[{i}]", tensor) for i, tensor in enumerate(flat_operands(outputs))]
    for name, tensor in named:
        if tensor.device.type not in devices:
            raise UnsupportedError(
                f"{call.op}: backend {backend!r} works on tensors of {' and '.join(devices)}, and this one is on "
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


class Backend(ABC):
    """A backend of one group on one rank.

    Attributes:
        name: The name that `get_backend` returns.
        recorder: The last calls of this group on this rank.
        group: Function that returns the group, or None: modes of torch's dispatcher see it as an argument of calls.
    """

    name: str
    recorder: Recorder
    group: Callable[[], Any] = staticmethod(lambda: None)

    def serve(self, group: Any) -> None:
        """Set the group whose calls the backend runs; the first one counts."""
        if self.group() is None:
            self.group = ref(group)

    @property
    def shares_memory(self) -> bool:
        """Whether ranks read each other's CPU tensors without a network: several ranks, on one host."""
        return False

    @abstractmethod
    def submit(self, call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor], wait: bool) -> Work:
        """Start a call.

        Args:
            call: The operation, with group ranks.
            inputs: Tensors that are read, as many as the call's contract says: a list, or `RowBlocks`.
            outputs: Tensors that are written. For in-place calls the same tensors as `inputs`.
            wait: Return only when the call is complete: the caller needs no Work, only its error.

        Returns:
            The call's Work, with the outputs as `flat_operands`; a completed one if `wait`.

        Raises:
            DistBackendError: With `wait`, the error of the call.
        """

    def submit_repeated(
        self, call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor], wait: bool
    ) -> Work | None:
        """Start a call of lists if its operands need no check, as one of their kinds and addresses has passed it.

        Checks of lists take as long as the rest of a small call, so public functions ask this first.

        Returns:
            As `submit`; None if the operands may be invalid. Nothing was started then.
        """
        return None

    def empty(self, size: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a new CPU tensor, in registered memory if this backend has such."""
        return torch.empty(size, dtype=dtype, device="cpu")

    def implementation(self, device_type: str | None) -> Any:
        """Return what `get_backend_impl` does: the object that runs the calls, by default this one.

        Args:
            device_type: Device type of the calls; None for all.
        """
        return self

    def set_timeout(self, seconds: float) -> None:
        """Set the time-out of the calls that begin from now on; by default warn that the backend cannot.

        Args:
            seconds: Upper limit of any wait, in seconds.
        """
        warnings.warn(
            f"set_timeout: backend {self.name!r} does not support changing its time-out, which stays what it was when "
            "the group was made. Pass timeout to init_process_group or new_group.",
            stacklevel=2,
        )

    def failure(self, ranks: Sequence[int], description: str) -> BaseException | None:
        """Return the error for the first of some group ranks known to have failed, or None.

        Args:
            ranks: The ranks that the caller waits for by other means than this backend's calls.
            description: The operation that waits, for the error's message.
        """
        return None

    def departure(self, ranks: Sequence[int], description: str) -> BaseException | None:
        """Return the error for the first of some group ranks known to have closed the group, or None.

        Args:
            ranks: The ranks that the caller waits for by other means, and that have yet to do their part.
            description: The operation that waits, for the error's message.
        """
        return None

    def end_soon(self, ranks: Sequence[int], description: str) -> BaseException | None:
        """Return `failure` or `departure` of the ranks once one is known, or None after a moment."""
        return found_soon(lambda: self.failure(ranks, description) or self.departure(ranks, description))

    def successor_store(self, store: Store, remaining: Sequence[int], timeout: float) -> PrefixStore | None:
        """Return a new, empty store in place of the group's, which has ended with the rank that served it.

        All members that remain call this.

        Args:
            store: The group's store.
            remaining: Group ranks of these members; the first serves the new store.
            timeout: Longest duration of a wait in seconds.

        Returns:
            The store; None if this backend has no way to find it.
        """
        return None

    def coalescing(self) -> AbstractContextManager[None]:
        """Return a context in which sends and receives may be held back, to be started as one group at its end.

        It does nothing, except for backends that start messages one after the other: there, two ranks that each send
        to the other before they receive would deadlock. The Works can be waited for after the context has ended.
        """
        return nullcontext()

    @property
    def broken(self) -> BaseException | None:
        """Error that ended the group on this rank; None while it is usable, or if the backend does not know."""
        return None

    def explain_leave(self, reason: str) -> None:  # noqa: B027 - a backend may have no way to publish it
        """Have the members that miss this rank read the failure after which it leaves. `leave` follows."""

    def announce_exit(self) -> None:  # noqa: B027 - simple backends announce it in `close`
        """Publish that this rank's program ends though the group exists. `close` follows."""

    def leave(self) -> bool:
        """Announce that this rank makes no new call, and return whether its calls have ended. `close` ends the others.

        Called until it returns True or a time-out has passed. Never blocks.
        """
        return True

    @abstractmethod
    def close(self) -> None:
        """Leave the group in an orderly way; calls that have not ended raise."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Leave the group at once; members that wait for this rank get an error with the reason."""

    def end_calls(self, reason: str) -> None:
        """End the group's calls as `abort` does, on a rank that then meets other members to make another group."""
        self.abort(reason)


def _forwarded(name: str) -> Any:
    """Return a method that calls the method of this name of the wrapped backend."""

    def method(self: BackendWrapper, *arguments: Any) -> Any:
        return getattr(self.wrapped, name)(*arguments)

    method.__doc__ = f"Call `Backend.{name}` of the wrapped backend."
    return method


class BackendWrapper(Backend):
    """Base of backends that act at each call of another backend, in `submit`, and forward everything else to it.

    Args:
        backend: The backend that runs the calls.
    """

    def __init__(self, backend: Backend) -> None:
        self.name, self.recorder, self.wrapped = backend.name, backend.recorder, backend

    def serve(self, group: Any) -> None:
        """See `Backend.serve`."""
        super().serve(group)
        self.wrapped.serve(group)

    shares_memory = property(lambda self: self.wrapped.shares_memory)
    broken = property(lambda self: self.wrapped.broken)
    empty, failure, coalescing, close, abort = map(_forwarded, ("empty", "failure", "coalescing", "close", "abort"))
    successor_store, announce_exit, end_calls = map(_forwarded, ("successor_store", "announce_exit", "end_calls"))
    departure, leave, explain_leave = map(_forwarded, ("departure", "leave", "explain_leave"))
    set_timeout, implementation = map(_forwarded, ("set_timeout", "implementation"))


# ---- the end of a group


def close_all(backends: Sequence[Backend]) -> None:
    """Close backends, after their calls have ended or 5 seconds have passed, whichever is first.

    While an exception is handled, as in the ``finally`` of a program that fails, the groups are aborted with it: its
    other members read it, and no call is waited for.
    """
    if is_failure(error := sys.exc_info()[1]):
        for backend in backends:
            with suppress(Exception):
                backend.abort(f"it destroyed the group because of {message_of(error)}")
    deadline = Deadline(CLOSE_SECONDS)
    try:
        # All of them, each time: the members of each group shall learn at once that this rank leaves.
        while not min([backend.leave() for backend in backends], default=True) and not deadline.passed():
            sleep(_CLOSE_POLL_SECONDS)
    finally:
        for backend in backends:
            backend.close()


def is_failure(error: BaseException | None) -> TypeGuard[BaseException]:
    """Return whether a program that ends with an exception has failed; `SystemExit` without a code is a success."""
    if isinstance(error, SystemExit):
        return bool(error.code)
    return error is not None and not isinstance(error, GeneratorExit)


AnyBackend = TypeVar("AnyBackend", bound=Backend)
Submit = Callable[[AnyBackend, Call, Tensors, Tensors, bool], Work]

# ---- modes of torch's dispatcher


def dispatched(submit: Submit[AnyBackend]) -> Submit[AnyBackend]:
    """Decorate the `submit` of a backend: modes of torch's dispatcher on the calling thread see its calls.

    >>> import torchdist_ref as dist
    >>> from torch.distributed.tensor.debug import CommDebugMode
    >>> from torchdist_ref.testing import run
    >>> def program(rank):
    ...     with CommDebugMode() as seen:
    ...         dist.all_reduce(torch.ones(2))
    ...     return {str(operator): count for operator, count in seen.get_comm_counts().items()}
    >>> run(program, 1)
    [{'c10d.allreduce_': 1}]
    """

    @wraps(submit)
    def submit_dispatched(self: AnyBackend, call: Call, inputs: Tensors, outputs: Tensors, wait: bool) -> Work:
        if dispatch_modes() or is_traced():
            return run_in_modes(self, call, inputs, outputs, wait, partial(submit, self, call, inputs, outputs, wait))
        return submit(self, call, inputs, outputs, wait)

    return submit_dispatched


def run_in_modes(
    backend: Backend, call: Call, inputs: Tensors, outputs: Tensors, wait: bool, start: Callable[[], Work]
) -> Work:
    """Pass a call to torch's dispatcher, at whose end `start` submits it, without modes.

    Raises:
        UnsupportedError: ``torch.jit.trace`` runs. Its trace would keep the data of the other ranks as constants.
    """
    if is_traced():
        raise UnsupportedError(
            f"{call.op}: Tried to trace a collective, which torch.jit.trace cannot record{on_rank()}. Use "
            f"torch.compile or torch.export, or call it outside the traced function."
        )
    group = backend.group()
    if group is None:
        return start()
    work: Work = group.dispatch(call, inputs, outputs, wait, start)
    return work


# ---- profiler ranges

# Ranges that outlived their profiler. They are kept, since destroying a range ends it.
_left_open: list[Future[None]] = []

is_profiling: Callable[[], bool] = torch_private.PROFILER_ENABLED.bind()
end_range_with: Callable[[Any, Future[None]], Any] = torch_private.END_RANGE_LATER.bind()


def profiled(submit: Submit[AnyBackend]) -> Submit[AnyBackend]:
    """Decorate the `submit` of a backend: its calls get ranges while a profiler of torch runs on the calling thread.

    >>> import torchdist_ref as dist
    >>> from torchdist_ref.testing import run
    >>> def program(rank):
    ...     with torch.autograd.profiler.profile() as seen:
    ...         dist.barrier()
    ...     return [event.name for event in seen.function_events if "barrier" in event.name]
    >>> run(program, 1)
    [['ref:barrier']]
    """

    @wraps(submit)
    def submit_profiled(self: AnyBackend, call: Call, inputs: Tensors, outputs: Tensors, wait: bool) -> Work:
        if is_profiling():
            return run_in_range(self, call, wait, partial(submit, self, call, inputs, outputs, wait))
        return submit(self, call, inputs, outputs, wait)

    return submit_profiled


def run_in_range(backend: Backend, call: Call, wait: bool, start: Callable[[], Work]) -> Work:
    """Start a call in a profiler range that ends with it; `start` submits the call."""
    with profiler.record_function(f"{backend.name}:{call.op}") as named:
        work = start()
        if not wait:
            end: Future[None] = Future()
            end_range_with(named, end)
            work.run_before_completion(partial(_end, end))
    return work


def _end(range_: Future[None]) -> None:
    """End a range if its profiler still runs."""
    if torch_private.PROFILER_RUNS.get():
        range_.set_result(None)
    else:
        _left_open.append(range_)
