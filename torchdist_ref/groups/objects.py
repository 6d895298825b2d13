"""Collectives and messages on Python objects: all_gather_object, send_object_list and others.

Each function is two collectives on tensors. The first one exchanges a header of three integers for each rank: payload
size in bytes, error kind (0: none), and object count. The second one moves the payloads, padded to one length. A rank
that cannot send its object sends the error text as its payload. All ranks then raise the same error, and the group
remains usable.

Ranks that have authenticated each other pickle objects: unpickling runs code that the sender chose, and ranks of one
job trust each other. Others exchange plain data only; see `pickling`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from torchdist_ref.backends.registry import by_device_type
from torchdist_ref.calls import AllGather, Broadcast, Call, Gather, Recv, Scatter, Send
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, DistError, EntryError, explain, message_of, on_rank
from torchdist_ref.groups.arguments import member_group, root_of
from torchdist_ref.groups.collectives import submit
from torchdist_ref.groups.pickling import (
    Payload,
    ReceiveBuffer,
    error_payload,
    next_exchange,
    next_message,
    pack,
    raise_error_of,
    unpack,
)
from torchdist_ref.groups.world import ProcessGroup, refuse_unusable

P = ParamSpec("P")
T = TypeVar("T")


def all_gather_object(
    object_list: list[Any], obj: Any, group: ProcessGroup | int | None = None, weights_only: bool = False
) -> None:
    """Gather the objects of all ranks in a list on every rank.

    Args:
        object_list: Output: a list with one entry for each rank; entry `r` becomes rank `r`'s object.
        obj: Input: this rank's object, which must be picklable.
        group: Process group. Default: all ranks.
        weights_only: Exchange plain data only (tensors, numbers, texts, and containers of them), which is decoded
            without running code. The same on all ranks. Since torch 2.14. Default: False, objects are pickled.

    Raises:
        PicklingError: A rank's object cannot be pickled, or is not plain data with `weights_only`. All ranks raise
            it, and the group remains usable.
        EntryError: The list has fewer entries than the group has ranks. The other ranks receive their objects.
        NotInitializedError: `init_process_group` was not called.
        DistBackendError: A rank died, aborted, or did not call in time.

    Ranks that are not authenticated exchange plain data only; see ``TORCHDIST_REF_TOKEN_FILE``.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     gathered = [None, None]
        ...     dist.all_gather_object(gathered, {"rank": rank, "words": ["a", "b"][:rank]})
        ...     return gathered
        >>> run(program, 2)[0]
        [{'rank': 0, 'words': []}, {'rank': 1, 'words': ['a']}]

    Differentiable:
        No: objects have no gradient.

    Elsewhere:
        ``Comm.allgather`` of mpi4py; none in NCCL; ``process_allgather`` of JAX's ``multihost_utils``, for
        arrays.
    """
    operation = "all_gather_object"
    found = member_group(operation, group)
    if found is None:
        return
    refuse_unusable(found, operation)
    error, exchange = _no_list(operation, "object_list", object_list, found), next_exchange(found, operation)
    payload = pack(found, operation, exchange, obj, weights_only) if error is None else error_payload(error)
    parts = _all_gather_payloads(found, payload, _all_gather_headers(found, payload))
    if len(object_list) < found.size():
        raise _too_few_entries(operation, "object_list", object_list, found)
    for rank, part in enumerate(parts):
        object_list[rank] = unpack(found, part, operation, exchange, rank, weights_only)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: ProcessGroup | int | None = None,
    group_dst: int | None = None,
    weights_only: bool = False,
) -> None:
    """Gather the objects of all ranks in a list on one rank, the destination.

    Args:
        obj: Input: this rank's object, which must be picklable.
        object_gather_list: Output on the destination: a list with one entry for each rank. None elsewhere.
        dst: Global rank of the destination. Default: 0, unless `group_dst` is given.
        group: Process group. Default: all ranks.
        group_dst: Group rank of the destination.
        weights_only: Exchange plain data only (tensors, numbers, texts, and containers of them), which is decoded
            without running code. The same on all ranks. Since torch 2.14. Default: False, objects are pickled.

    Raises:
        PicklingError: A rank's object cannot be pickled, or is not plain data with `weights_only`. All ranks raise
            it, and the group remains usable.
        ArgumentError: No list or a short one on the destination, or a list on another rank. All ranks raise it.
        NotInitializedError: `init_process_group` was not called.
        DistBackendError: A rank died, aborted, or did not call in time.

    Ranks that are not authenticated exchange plain data only; see ``TORCHDIST_REF_TOKEN_FILE``.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     gathered = [None] * 3 if rank == 1 else None
        ...     dist.gather_object("abc"[rank] * (rank + 1), gathered, dst=1)
        ...     return gathered
        >>> run(program, 3)
        [None, ['a', 'bb', 'ccc'], None]

    Differentiable:
        No: objects have no gradient.

    Elsewhere:
        ``Comm.gather`` of mpi4py; none in NCCL; none in JAX.
    """
    operation = "gather_object"
    found = member_group(operation, group)
    if found is None:
        return
    refuse_unusable(found, operation)
    root = root_of(found, operation, dst, group_dst, "dst", default=0)
    error, exchange = _gather_list_error(found, root, object_gather_list), next_exchange(found, operation)
    payload = pack(found, operation, exchange, obj, weights_only) if error is None else error_payload(error)
    headers = _all_gather_headers(found, payload)
    if any(kind for _, kind, _ in headers):
        _all_gather_payloads(found, payload, headers)
    parts = _gather_payloads(found, root, payload, max(size for size, _, _ in headers))
    if object_gather_list is not None:
        for rank, part in enumerate(parts):
            object_gather_list[rank] = unpack(found, part, operation, exchange, rank, weights_only)


def _gather_list_error(
    group: ProcessGroup, root: int, objects: list[Any] | None
) -> ArgumentError | ArgumentTypeError | None:
    ranks = f"(the destination is group rank {root}, this is {group.rank()})"
    if group.rank() != root:
        text = f"gather_object: Argument ``object_gather_list`` must NOT be specified on non-destination ranks {ranks}."
        return ArgumentError(text) if objects else None
    if objects is None or objects == []:
        text = f"gather_object: Argument ``object_gather_list`` must be specified on destination rank {ranks}."
        return ArgumentError(text)
    if (error := _no_list("gather_object", "object_gather_list", objects, group)) is not None:
        return error
    if len(objects) < group.size():
        return _too_few_entries("gather_object", "object_gather_list", objects, group)
    return None


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | int | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """Copy one rank's list of objects to all ranks of the group.

    Args:
        object_list: Input on the source, which is not changed. Output on the other ranks: each entry is replaced. All
            ranks pass lists of one length.
        src: Global rank of the source. Default: 0, unless `group_src` is given.
        group: Process group. Default: all ranks.
        device: Device for the transfer. Default: a device that the backend supports.
        group_src: Group rank of the source.
        weights_only: Exchange plain data only (tensors, numbers, texts, and containers of them), which is decoded
            without running code. The same on all ranks. Since torch 2.14. Default: False, objects are pickled.

    Raises:
        PicklingError: An object cannot be pickled, or is not plain data with `weights_only`. All ranks raise
            it, and the group remains usable.
        ArgumentError: This rank's list has another length than the source's, or the source is not in the group.
        NotInitializedError: `init_process_group` was not called.
        DistBackendError: A rank died, aborted, or did not call in time.

    Ranks that are not authenticated exchange plain data only; see ``TORCHDIST_REF_TOKEN_FILE``.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     objects = ["settings", {"depth": 3}] if rank == 0 else [None, None]
        ...     dist.broadcast_object_list(objects, src=0)
        ...     return objects
        >>> run(program, 2)[1]
        ['settings', {'depth': 3}]

    Differentiable:
        No: objects have no gradient.

    Elsewhere:
        ``Comm.bcast`` of mpi4py; none in NCCL; ``broadcast_one_to_all`` of JAX's ``multihost_utils``, for
        arrays.
    """
    _check_device("broadcast_object_list", device)
    operation = "broadcast_object_list"
    found = member_group(operation, group)
    if found is None:
        return
    refuse_unusable(found, operation)
    root, rank = root_of(found, operation, src, group_src, default=0), _global_rank(found)
    error, own = _no_list(operation, "object_list", object_list, found), None
    exchange = next_exchange(found, operation)
    if found.rank() == root:
        own = (
            error_payload(error)
            if error
            else pack(found, operation, exchange, list(object_list), weights_only, len(object_list))
        )
    received, count = _broadcast_payload(found, root, own, device)
    if error is not None:
        raise error
    if own is None:
        _replace(
            object_list, unpack(found, received.data, operation, exchange, root, weights_only), count, operation, rank
        )


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: ProcessGroup | int | None = None,
    group_src: int | None = None,
    weights_only: bool = False,
) -> None:
    """Scatter a list of objects of one rank, the source: every rank gets one of them.

    Args:
        scatter_object_output_list: Output: its first entry becomes this rank's object.
        scatter_object_input_list: Input on the source: one object for each rank. Ignored elsewhere.
        src: Global rank of the source. Default: 0, unless `group_src` is given.
        group: Process group. Default: all ranks.
        group_src: Group rank of the source.
        weights_only: Exchange plain data only (tensors, numbers, texts, and containers of them), which is decoded
            without running code. The same on all ranks. Since torch 2.14. Default: False, objects are pickled.

    Raises:
        PicklingError: An object cannot be pickled, or is not plain data with `weights_only`. All ranks raise
            it, and the group remains usable.
        ArgumentError: The output is empty or not a list. Or the source passed no list, or a list of the wrong length;
            then all ranks raise it.
        NotInitializedError: `init_process_group` was not called.
        DistBackendError: A rank died, aborted, or did not call in time.

    Ranks that are not authenticated exchange plain data only; see ``TORCHDIST_REF_TOKEN_FILE``.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     received = [None]
        ...     dist.scatter_object_list(received, ["first", {"second": 2}] if rank == 0 else None, src=0)
        ...     return received
        >>> run(program, 2)
        [['first'], [{'second': 2}]]

    Differentiable:
        No: objects have no gradient.

    Elsewhere:
        ``Comm.scatter`` of mpi4py; none in NCCL; none in JAX.
    """
    operation = "scatter_object_list"
    found = member_group(operation, group)
    if found is None:
        return
    refuse_unusable(found, operation)
    root = root_of(found, operation, src, group_src, default=0)
    exchange = next_exchange(found, operation)
    payloads = (
        _scatter_payloads_of(found, exchange, scatter_object_input_list, weights_only) if found.rank() == root else []
    )
    received = _scatter_payloads(found, root, payloads)
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise ArgumentError(
            f"{operation}: Expected argument scatter_object_output_list to be a list of size at "
            f"least 1, got {scatter_object_output_list!r} (on rank {_global_rank(found)})."
        )
    scatter_object_output_list[0] = unpack(
        found, received.data, operation, f"{exchange} to {found.rank()}", root, weights_only
    )


def _scatter_payloads_of(
    group: ProcessGroup, exchange: str, objects: list[Any] | None, weights_only: bool
) -> list[Payload]:
    """Return the payloads of the source, or a single one with an error."""
    operation, rank = "scatter_object_list", _global_rank(group)
    if not isinstance(objects, Sequence) or len(objects) != group.size():
        got = len(objects) if isinstance(objects, Sequence) else objects
        expected = f"a list of {group.size()} objects, one for each rank, on the source"
        text = explain(operation, "scatter_object_input_list", expected, got, rank=rank)
        return [error_payload(ArgumentError(text))]
    payloads = [
        pack(group, operation, f"{exchange} to {target}", value, weights_only) for target, value in enumerate(objects)
    ]
    return next(([payload] for payload in payloads if payload.error is not None), payloads)


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: ProcessGroup | int | None = None,
    device: torch.device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> None:
    """Send a list of objects to one rank, and return when that rank has received it.

    Args:
        object_list: Input: the objects to send, which must be picklable. The list of the receiver has the same length.
        dst: Global rank of the destination. Pass this or `group_dst`.
        group: Process group. Default: all ranks.
        device: Device for the transfer. Default: a device that the backend supports.
        group_dst: Group rank of the destination.
        use_batch: Accepted for compatibility with torch; the messages are the same.
        weights_only: Exchange plain data only (tensors, numbers, texts, and containers of them), which is decoded
            without running code. The same on all ranks. Since torch 2.14. Default: False, objects are pickled.

    Raises:
        PicklingError: An object cannot be pickled, or is not plain data with `weights_only`. The receiver raises too.
        ArgumentError: The destination is this rank, or not in the group.
        DistBackendError: The receiver died, aborted, or did not call in time.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     objects = ["words", 7] if rank == 0 else [None, None]
        ...     if rank == 0:
        ...         return dist.send_object_list(objects, dst=1)
        ...     return dist.recv_object_list(objects, src=0), objects
        >>> run(program, 2)
        [None, (0, ['words', 7])]

    Differentiable:
        No: objects have no gradient.

    Elsewhere:
        ``Comm.send`` of mpi4py; none in NCCL; none in JAX.
    """
    _check_device("send_object_list", device)
    operation = "send_object_list"
    found = member_group(operation, group)
    if found is None:
        return
    refuse_unusable(found, operation)
    peer = root_of(found, operation, dst, group_dst, "dst")
    _refuse_self(found, operation, peer, "destination")
    if (error := _no_list(operation, "object_list", object_list, found)) is not None:
        raise error
    message = next_message(found, found.rank(), peer)
    payload = pack(found, operation, message, list(object_list), weights_only, len(object_list))
    for tensor in (payload.header(), payload.tensor()):
        _on_device([tensor], found, device, lambda moved: found.backend.submit(Send(peer), (moved,), (), True))
    if payload.error is not None:
        raise payload.error


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | int | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
    weights_only: bool = False,
) -> int:
    """Receive a list of objects from one rank, or from the first rank that sends.

    Args:
        object_list: Output, as long as the list that is sent: each entry is replaced.
        src: Global rank of the source. Default: any rank, unless `group_src` is given.
        group: Process group. Default: all ranks.
        device: Device for the transfer. Default: a device that the backend supports.
        group_src: Group rank of the source.
        use_batch: Accepted for compatibility with torch; the messages are the same.
        weights_only: Exchange plain data only (tensors, numbers, texts, and containers of them), which is decoded
            without running code. The same on all ranks. Since torch 2.14. Default: False, objects are pickled.

    Returns:
        Global rank of the sender; -1, with a warning, if this rank is not in the group.

    Raises:
        PicklingError: The sender could not pickle an object, or it is not plain data with `weights_only`.
        ArgumentError: The list has another length than the sender's, or the source is this rank or not in the group.
        DistBackendError: The source died, aborted, or did not send in time.

    Ranks that are not authenticated exchange plain data only; see ``TORCHDIST_REF_TOKEN_FILE``.

    Example: see `send_object_list`.

    Differentiable:
        No: objects have no gradient.

    Elsewhere:
        ``Comm.recv`` of mpi4py; none in NCCL; none in JAX.
    """
    _check_device("recv_object_list", device)
    operation = "recv_object_list"
    found = member_group(operation, group)
    if found is None:
        return -1
    refuse_unusable(found, operation)
    peer = None if src is None and group_src is None else root_of(found, operation, src, group_src)
    _refuse_self(found, operation, peer, "source")
    if (error := _no_list(operation, "object_list", object_list, found)) is not None:
        raise error
    header = torch.zeros(3, dtype=torch.int64, device="cpu")
    source = _receive(found, peer, header, device)
    message = next_message(found, source, found.rank())
    size, kind, count = header.tolist()
    received = ReceiveBuffer(size)
    _receive(found, source, received.tensor, device)
    if kind:
        raise_error_of(kind, received.data, None)
    sender = found.members[source]
    objects = unpack(found, received.data, operation, message, source, weights_only)
    _replace(object_list, objects, count, operation, _global_rank(found))
    return sender


def _receive(group: ProcessGroup, peer: int | None, tensor: Tensor, device: torch.device | None) -> int:
    work = _on_device([tensor], group, device, lambda moved: group.backend.submit(Recv(peer), (), (moved,), True))
    source: int = work.source_rank()
    return source if peer is None else peer


def _refuse_self(group: ProcessGroup, operation: str, peer: int | None, role: str) -> None:
    if peer == group.rank():
        raise ArgumentError(
            f"{operation}: Invalid {role} rank: {role} rank should not be the same as the rank of "
            f"the current process{on_rank()}."
        )


def _no_list(operation: str, argument: str, value: Any, group: ProcessGroup) -> ArgumentTypeError | None:
    """Return the error for an argument that is not a list, or None."""
    if isinstance(value, list):
        return None
    return ArgumentTypeError(explain(operation, argument, "a list of objects", value, rank=_global_rank(group)))


def _global_rank(group: ProcessGroup) -> int:
    return group.members[group.rank()]


def _too_few_entries(operation: str, argument: str, objects: list[Any], group: ProcessGroup) -> EntryError:
    expected = f"a list of at least {group.size()} entries, one for each rank"
    return EntryError(explain(operation, argument, expected, len(objects), rank=_global_rank(group)))


def _replace(target: list[Any], objects: list[Any], count: int, operation: str, rank: int) -> None:
    """Replace the entries of the caller's list; raise, without changing it, if its length is not `count`."""
    if len(target) != count:
        expected = f"as long as the sender's list, {count}"
        raise ArgumentError(explain(operation, "object_list", expected, len(target), rank=rank))
    target[:] = objects


def _check_device(operation: str, device: Any) -> None:
    if device is not None:
        try:
            torch.empty(0, dtype=torch.uint8, device=device)
        except (RuntimeError, TypeError, AssertionError) as error:
            raise ArgumentError(explain(operation, "device", "a device that torch can use here", device)) from error


def _on_device(
    tensors: Sequence[Tensor], group: ProcessGroup, device: torch.device | None, transfer: Callable[..., Any]
) -> Any:
    """Call `transfer` on these tensors, or on copies on a device that the backend supports, which are copied back."""
    kinds = by_device_type(group.backend.name) if device is None else {}
    where = torch.device(next(iter(kinds))) if kinds and "cpu" not in kinds else device
    moved = list(tensors) if where is None else [tensor.to(where) for tensor in tensors]
    result = transfer(*moved)
    for tensor, copy in zip(tensors, moved, strict=True):
        if copy is not tensor:
            tensor.copy_(copy)
    return result


def _run(
    group: ProcessGroup, call: Call, inputs: list[Tensor], outputs: list[Tensor], device: torch.device | None = None
) -> None:
    """Run one collective on a device that the backend supports."""
    count = len(inputs)
    in_place = bool(outputs is inputs or (outputs and inputs and outputs[0] is inputs[0]))
    tensors = inputs if in_place else [*inputs, *outputs]
    _on_device(
        tensors,
        group,
        device,
        lambda *moved: submit(group, call, moved[:count], moved if in_place else moved[count:], False),
    )


def _abort_on_failure(step: Callable[Concatenate[ProcessGroup, P], T]) -> Callable[Concatenate[ProcessGroup, P], T]:
    """Return a step that ends the group if it fails on this rank only: the others would wait for its collective."""

    @wraps(step)
    def run(group: ProcessGroup, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return step(group, *args, **kwargs)
        except BaseException as error:
            if not (isinstance(error, DistError) or getattr(error, "definite", False)):
                reason = message_of(error).removesuffix(": ")
                group.backend.abort(f"a call with objects failed between its collectives: {reason}")
            raise

    return cast("Callable[Concatenate[ProcessGroup, P], T]", run)


def _all_gather_headers(group: ProcessGroup, payload: Payload) -> list[list[int]]:
    """Return size, error kind and object count of every rank."""
    headers = [torch.zeros(3, dtype=torch.int64, device="cpu") for _ in range(group.size())]
    _run(group, AllGather(), [payload.header()], headers)
    return [header.tolist() for header in headers]


@_abort_on_failure
def _all_gather_payloads(group: ProcessGroup, payload: Payload, headers: list[list[int]]) -> list[memoryview]:
    """Return all ranks' payloads; raise the first rank's error on all ranks if there is one."""
    width = max(size for size, _, _ in headers)
    received = ReceiveBuffer(width * group.size())
    outputs = list(received.tensor.view(group.size(), width).unbind())
    _run(group, AllGather(), [payload.tensor(width)], outputs)
    parts = received.parts(group.size())
    for rank, (size, kind, _) in enumerate(headers):
        if kind:
            raise_error_of(kind, bytes(parts[rank][:size]), payload.error if rank == group.rank() else None)
    return parts


@_abort_on_failure
def _gather_payloads(group: ProcessGroup, root: int, payload: Payload, width: int) -> list[memoryview]:
    """Return all ranks' payloads on the root, and an empty list elsewhere."""
    if group.rank() != root:
        _run(group, Gather(root), [payload.tensor(width)], [])
        return []
    received = ReceiveBuffer(width * group.size())
    outputs = list(received.tensor.view(group.size(), width).unbind())
    _run(group, Gather(root), [payload.tensor(width)], outputs)
    return received.parts(group.size())


@_abort_on_failure
def _broadcast_payload(
    group: ProcessGroup, root: int, own: Payload | None, device: torch.device | None
) -> tuple[ReceiveBuffer, int]:
    """Return the source's payload and object count; raise the source's error on all ranks if there is one."""
    header = torch.zeros(3, dtype=torch.int64, device="cpu") if own is None else own.header()
    _run(group, Broadcast(root), [header], [header], device)
    size, kind, count = header.tolist()
    received = ReceiveBuffer(size)
    if own is not None:
        received.data[:] = own.data
    _run(group, Broadcast(root), [received.tensor], [received.tensor], device)
    if kind:
        raise_error_of(kind, received.data, None if own is None else own.error)
    return received, count


@_abort_on_failure
def _scatter_payloads(group: ProcessGroup, root: int, payloads: list[Payload]) -> ReceiveBuffer:
    """Return this rank's one of the source's payloads."""
    header = torch.zeros(3, dtype=torch.int64, device="cpu")
    if payloads:
        header = payloads[0].header()
        header[0] = max(len(payload.data) for payload in payloads)
    _run(group, Broadcast(root), [header], [header])
    if header[1]:
        _broadcast_payload(group, root, payloads[0] if payloads else None, None)
    width = int(header[0])
    received = ReceiveBuffer(width)
    _run(group, Scatter(root), [payload.tensor(width) for payload in payloads], [received.tensor])
    return received
