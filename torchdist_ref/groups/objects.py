"""Collectives and messages on Python objects: all_gather_object, send_object_list and others.

Each function is two collectives on tensors. The first one exchanges a header of three integers for each rank: payload
size in bytes, error kind (0: none), and object count. The second one moves the payloads (pickled bytes), padded to
one length. A rank that cannot pickle its object sends the error text as its payload. All ranks then raise the same
error, and the group remains usable.

Unpickling runs code that the sender chose. Ranks of one job trust each other; do not use this across trust boundaries.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from torchdist_ref.calls import AllGather, Broadcast, Gather, Recv, Scatter, Send
from torchdist_ref.errors import ArgumentError, EntryError, PicklingError, explain, on_rank
from torchdist_ref.groups.arguments import member_group, root_of
from torchdist_ref.groups.collectives import submit
from torchdist_ref.groups.world import ProcessGroup


def all_gather_object(object_list: list[Any], obj: Any, group: ProcessGroup | int | None = None) -> None:
    """Give every rank the objects of all ranks.

    Args:
        object_list: Output: entry `r` becomes rank `r`'s object.
        obj: Input: this rank's object; anything that can be pickled.
        group: Which ranks. Default: all.

    Raises:
        PicklingError: A rank's object can't be pickled. All ranks raise it, and the group can be used on.
        EntryError: The list has fewer entries than the group has ranks. The other ranks have their objects.
        NotInitializedError: There is no group yet.
        DistBackendError: A rank died, gave up, or did not come in time.

    Objects are unpickled, which runs code that the sending rank chose.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     everybody = [None, None]
        ...     dist.all_gather_object(everybody, {"rank": rank, "words": ["a", "b"][:rank]})
        ...     return everybody
        >>> run(program, 2)[0]
        [{'rank': 0, 'words': []}, {'rank': 1, 'words': ['a']}]
    """
    found = member_group("all_gather_object", group)
    if found is None:
        return
    parcel = pack("all_gather_object", obj, me(found))
    parts = all_gathered(found, parcel, headers_of(found, parcel))
    if len(object_list) < found.size():
        expected = f"a list of at least {found.size()} entries, one a rank"
        raise EntryError(explain("all_gather_object", "object_list", expected, len(object_list), rank=me(found)))
    for rank, part in enumerate(parts):
        object_list[rank] = unpack(part, "all_gather_object", found.members[rank])


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: ProcessGroup | int | None = None,
    group_dst: int | None = None,
) -> None:
    """Give one rank the objects of all ranks.

    Args:
        obj: Input: this rank's object; anything that can be pickled.
        object_gather_list: Output, on the destination only: a list with one entry for each rank.
        dst: The destination, as a global rank. Default: 0, if `group_dst` is not given.
        group: Which ranks. Default: all.
        group_dst: The destination, as a rank in the group.

    Raises:
        PicklingError: A rank's object can't be pickled. All ranks raise it, and the group can be used on.
        ArgumentError: A list where none belongs, or none or a short one where one does. All ranks raise it too.
        NotInitializedError: There is no group yet.
        DistBackendError: A rank died, gave up, or did not come in time.

    Objects are unpickled, which runs code that the sending rank chose.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     everybody = [None] * 3 if rank == 1 else None
        ...     dist.gather_object("abc"[rank] * (rank + 1), everybody, dst=1)
        ...     return everybody
        >>> run(program, 3)
        [None, ['a', 'bb', 'ccc'], None]
    """
    found = member_group("gather_object", group)
    if found is None:
        return
    root = root_of(found, "gather_object", 0 if dst is None and group_dst is None else dst, group_dst, "dst")
    wrong = _gather_list_error(found, root, object_gather_list)
    parcel = pack("gather_object", obj, me(found)) if wrong is None else sorry(wrong)
    headers = headers_of(found, parcel)
    if any(kind for _, kind, _ in headers):
        all_gathered(found, parcel, headers)
    parts = gathered(found, root, parcel, max(size for size, _, _ in headers))
    if object_gather_list is not None:
        for rank, part in enumerate(parts):
            object_gather_list[rank] = unpack(part, "gather_object", found.members[rank])


def _gather_list_error(group: ProcessGroup, root: int, given: list[Any] | None) -> ArgumentError | None:
    here = f"(the destination is group rank {root}, this is {group.rank()})"
    if group.rank() != root:
        text = f"gather_object: Argument ``object_gather_list`` must NOT be specified on non-destination ranks {here}."
        return ArgumentError(text) if given else None
    if not given:
        text = f"gather_object: Argument ``object_gather_list`` must be specified on destination rank {here}."
        return ArgumentError(text)
    if len(given) < group.size():
        expected = f"a list of at least {group.size()} entries, one a rank"
        return EntryError(explain("gather_object", "object_gather_list", expected, len(given), rank=me(group)))
    return None


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | int | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
) -> None:
    """Copy one rank's list of objects to all ranks of the group.

    Args:
        object_list: On the source the input, left as it is; on the others the output: each entry is replaced.
            All ranks give lists of one length.
        src: The source, as a global rank. Default: 0, if `group_src` is not given.
        group: Which ranks. Default: all.
        device: Where the bytes are put to be sent. Default: where the backend sends from.
        group_src: The source, as a rank in the group.

    Raises:
        PicklingError: An object can't be pickled. All ranks raise it, and the group can be used on.
        ArgumentError: This rank's list has another length than the source's, or the source is not in the group.
        NotInitializedError: There is no group yet.
        DistBackendError: A rank died, gave up, or did not come in time.

    Objects are unpickled, which runs code that the source chose.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     objects = ["settings", {"depth": 3}] if rank == 0 else [None, None]
        ...     dist.broadcast_object_list(objects, src=0)
        ...     return objects
        >>> run(program, 2)[1]
        ['settings', {'depth': 3}]
    """
    operation = "broadcast_object_list"
    found = member_group(operation, group)
    if found is None:
        return
    root = root_of(found, operation, 0 if src is None and group_src is None else src, group_src)
    own = pack(operation, list(object_list), me(found), len(object_list)) if found.rank() == root else None
    room, count = broadcasted(found, root, own, device)
    if own is None:
        replace(object_list, unpack(room.data, operation, found.members[root]), count, operation, me(found))


def replace(target: list[Any], objects: list[Any], count: int, operation: str, rank: int) -> None:
    """Put received objects in the caller's list; an error, without having changed it, if it has another length."""
    if len(target) != count:
        expected = f"as long as the sender's list, {count}"
        raise ArgumentError(explain(operation, "object_list", expected, len(target), rank=rank))
    target[:] = objects


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: ProcessGroup | int | None = None,
    group_src: int | None = None,
) -> None:
    """Give every rank its object of a list that one rank has.

    Args:
        scatter_object_output_list: Output: its first entry becomes this rank's object.
        scatter_object_input_list: Input, used on the source only: one object for each rank.
        src: The source, as a global rank. Default: 0, if `group_src` is not given.
        group: Which ranks. Default: all.
        group_src: The source, as a rank in the group.

    Raises:
        PicklingError: An object can't be pickled. All ranks raise it, and the group can be used on.
        ArgumentError: The output list is empty or no list; or the source gave no list, or one of the wrong length,
            which all ranks raise.
        NotInitializedError: There is no group yet.
        DistBackendError: A rank died, gave up, or did not come in time.

    Objects are unpickled, which runs code that the source chose.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     mine = [None]
        ...     dist.scatter_object_list(mine, ["first", {"second": 2}] if rank == 0 else None, src=0)
        ...     return mine
        >>> run(program, 2)
        [['first'], [{'second': 2}]]
    """
    operation = "scatter_object_list"
    found = member_group(operation, group)
    if found is None:
        return
    root = root_of(found, operation, 0 if src is None and group_src is None else src, group_src)
    parcels = _parcels(found, scatter_object_input_list) if found.rank() == root else []
    room = scattered(found, root, parcels)
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise ArgumentError(
            f"{operation}: Expected argument scatter_object_output_list to be a list of size at "
            f"least 1, got {scatter_object_output_list!r} (on rank {me(found)})."
        )
    scatter_object_output_list[0] = unpack(room.data, operation, found.members[root])


def _parcels(group: ProcessGroup, objects: list[Any] | None) -> list[Parcel]:
    """The source's objects, packed; or one parcel with what is wrong."""
    if objects is None or len(objects) != group.size():
        got = None if objects is None else len(objects)
        expected = f"a list of {group.size()} objects, one a rank, on the source"
        text = explain("scatter_object_list", "scatter_object_input_list", expected, got, rank=me(group))
        return [sorry(ArgumentError(text))]
    parcels = [pack("scatter_object_list", value, me(group)) for value in objects]
    return next(([parcel] for parcel in parcels if parcel.error is not None), parcels)


def me(group: ProcessGroup) -> int:
    """This rank's global rank."""
    return group.members[group.rank()]


def _do(
    group: ProcessGroup, call: Any, inputs: list[Tensor], outputs: list[Tensor], device: torch.device | None = None
) -> None:
    """One collective on whichever device the backend works."""
    count = len(inputs)
    shared = outputs is inputs or (outputs and inputs and outputs[0] is inputs[0])
    tensors = inputs if shared else [*inputs, *outputs]
    carried(
        tensors,
        group,
        device,
        lambda *there: submit(group, call, there[:count], there if shared else there[count:], False),
    )


def headers_of(group: ProcessGroup, parcel: Parcel) -> list[list[int]]:
    """Size, kind of error and count of every rank."""
    headers = [torch.zeros(3, dtype=torch.int64) for _ in range(group.size())]
    _do(group, AllGather(), [parcel.header()], headers)
    return [header.tolist() for header in headers]


def all_gathered(group: ProcessGroup, parcel: Parcel, headers: list[list[int]]) -> list[memoryview]:
    """Everybody's bytes; raises on all ranks what any rank has to complain of."""
    width = max(size for size, _, _ in headers)
    room = Room(width * group.size())
    _do(group, AllGather(), [parcel.tensor(width)], list(room.tensor.view(group.size(), width).unbind()))
    parts = room.parts(group.size())
    for rank, (size, kind, _) in enumerate(headers):
        if kind:
            reraise(kind, bytes(parts[rank][:size]), parcel.error if rank == group.rank() else None)
    return parts


def gathered(group: ProcessGroup, root: int, parcel: Parcel, width: int) -> list[memoryview]:
    """On the root, everybody's bytes."""
    here = group.rank() == root
    room = Room(width * group.size() if here else 1)
    outputs = list(room.tensor.view(group.size(), width).unbind()) if here else []
    _do(group, Gather(root), [parcel.tensor(width)], outputs)
    return room.parts(group.size()) if here else []


def broadcasted(group: ProcessGroup, root: int, own: Parcel | None, device: torch.device | None) -> tuple[Room, int]:
    """The source's bytes and how many objects they hold; raises on all ranks what the source has to complain of."""
    header = own.header() if own is not None else torch.zeros(3, dtype=torch.int64)
    _do(group, Broadcast(root), [header], [header], device)
    size, kind, count = header.tolist()
    room = Room(size)
    if own is not None:
        room.tensor.copy_(own.tensor())
    _do(group, Broadcast(root), [room.tensor], [room.tensor], device)
    if kind:
        reraise(kind, room.data, own.error if own is not None else None)
    return room, count


def scattered(group: ProcessGroup, root: int, parcels: list[Parcel]) -> Room:
    """This rank's bytes of those that the source has."""
    header = torch.zeros(3, dtype=torch.int64)
    if parcels:
        header = parcels[0].header()
        header[0] = max(len(parcel.data) for parcel in parcels)
    _do(group, Broadcast(root), [header], [header])
    if header[1]:
        broadcasted(group, root, parcels[0] if parcels else None, None)
    width = int(header[0])
    room = Room(width)
    _do(group, Scatter(root), [parcel.tensor(width) for parcel in parcels], [room.tensor])
    return room


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: ProcessGroup | int | None = None,
    device: torch.device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    """Send a list of objects to one rank; back when that rank has received it.

    Args:
        object_list: What to send; anything that can be pickled.
        dst: The destination, as a global rank. Give this or `group_dst`.
        group: Which ranks. Default: all.
        device: Where the bytes are put to be sent. Default: where the backend sends from.
        group_dst: The destination, as a rank in the group.
        use_batch: Accepted for torch's sake; the messages are the same.

    Raises:
        PicklingError: An object can't be pickled. The receiver raises it too, and the group can be used on.
        ArgumentError: The destination is this rank, or not in the group.
        DistBackendError: The receiver died, gave up, or did not come in time.

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
    """
    operation = "send_object_list"
    found = member_group(operation, group)
    if found is None:
        return
    peer = _other(found, operation, root_of(found, operation, dst, group_dst, "dst"), "destination")
    parcel = pack(operation, list(object_list), found.members[found.rank()], len(object_list))
    for tensor in (parcel.header(), parcel.tensor()):
        carried([tensor], found, device, lambda moved: found.backend.submit(Send(peer), (moved,), (), True))
    if parcel.error is not None:
        raise parcel.error


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | int | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
) -> int:
    """Receive a list of objects from one rank, or from whichever sends first.

    Args:
        object_list: Output, as long as the list that is sent; each entry is replaced.
        src: The source, as a global rank. None, with `group_src` None: any rank.
        group: Which ranks. Default: all.
        device: Where the bytes are received. Default: where the backend receives.
        group_src: The source, as a rank in the group.
        use_batch: Accepted for torch's sake; the messages are the same.

    Returns:
        The global rank that sent; -1, with a warning, if this rank is not in the group.

    Raises:
        PicklingError: The sender could not pickle an object.
        ArgumentError: The list has another length than the sender's, or the source is this rank or not in the group.
        DistBackendError: The source died, gave up, or did not send in time.

    Objects are unpickled, which runs code that the source chose. Example: see `send_object_list`.
    """
    operation = "recv_object_list"
    found = member_group(operation, group)
    if found is None:
        return -1
    peer = None if src is None and group_src is None else root_of(found, operation, src, group_src)
    peer = peer if peer is None else _other(found, operation, peer, "source")
    header = torch.zeros(3, dtype=torch.int64)
    source = _receive(found, peer, header, device)
    size, kind, count = header.tolist()
    room = Room(size)
    _receive(found, source, room.tensor, device)
    if kind:
        reraise(kind, room.data, None)
    sender = found.members[source]
    replace(object_list, unpack(room.data, operation, sender), count, operation, found.members[found.rank()])
    return sender


def _receive(group: ProcessGroup, peer: int | None, tensor: torch.Tensor, device: torch.device | None) -> int:
    work = carried([tensor], group, device, lambda moved: group.backend.submit(Recv(peer), (), (moved,), True))
    source: int = work.source_rank()
    return source if peer is None else peer


def _other(group: ProcessGroup, operation: str, peer: int, word: str) -> int:
    if peer == group.rank():
        raise ArgumentError(
            f"{operation}: Invalid {word} rank: {word} rank should not be the same as the rank of "
            f"the current process{on_rank()}."
        )
    return peer


_KINDS: tuple[type[Exception], ...] = (PicklingError, ArgumentError, EntryError)


class Parcel:
    """Bytes of one rank, or its error.

    Attributes:
        data: The bytes; never empty.
        error: Why there is no object in it; its text is in `data` then.
        count: How many objects there are.
    """

    def __init__(self, data: bytes | bytearray, error: Exception | None = None, count: int = 1) -> None:
        self.data = bytearray(data)
        self.error = error
        self.count = count

    def header(self) -> Tensor:
        """Size, kind of error and count."""
        kind = 0 if self.error is None else 1 + _KINDS.index(type(self.error))
        return torch.tensor([len(self.data), kind, self.count])

    def tensor(self, width: int = 0) -> Tensor:
        """The bytes as a tensor, of at least this many; what is added is never read."""
        return torch.frombuffer(self.data.ljust(width, b"\0"), dtype=torch.uint8)


def pack(operation: str, value: Any, rank: int, count: int = 1) -> Parcel:
    """Pickle one value of a global rank; an error in the parcel if it can't be."""
    try:
        return Parcel(pickle.dumps(value), count=count)
    except Exception as cause:
        error = PicklingError(
            f"{operation}: the object that rank {rank} gives can't be pickled ({type(cause).__name__}: {cause}). "
            f"No rank got anything, and the group can be used on. Give plain data, or names of modules' own functions."
        )
        error.__cause__ = cause
        return sorry(error, count)


def sorry(error: Exception, count: int = 1) -> Parcel:
    """A parcel that tells all ranks what this rank's caller did wrong."""
    return Parcel(str(error).encode(), error, count)


def unpack(buffer: bytes | bytearray | memoryview, operation: str, source: int) -> Any:
    """The object in a parcel's bytes; a failure says whose object it was."""
    try:
        # Unpickling stops where the object ends, so the width to which bytes were filled up does not matter.
        return pickle.loads(buffer)
    except Exception as error:
        error.add_note(f"{operation}: the object came whole from rank {source}, but can't be unpickled here.")
        raise


def reraise(kind: int, text: bytes | bytearray, own: Exception | None) -> NoReturn:
    """Raise here what a rank's header and bytes say was wrong there."""
    if own is not None:
        raise own
    raise _KINDS[kind - 1](text.rstrip(b"\0").decode())


class Room:
    """Space for bytes that will come, and a tensor over it."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)
        self.tensor = torch.frombuffer(self.data, dtype=torch.uint8)

    def parts(self, count: int) -> list[memoryview]:
        """The space in equal parts."""
        width = len(self.data) // count
        return [memoryview(self.data)[i * width : (i + 1) * width] for i in range(count)]


def carried(
    tensors: Sequence[Tensor], group: ProcessGroup, device: torch.device | None, move: Callable[..., Any]
) -> Any:
    """Do `move` on these tensors where the backend can reach them, and bring back what came."""
    where = torch.device("cuda") if device is None and group.backend.name == "nccl" else device
    there = list(tensors) if where is None else [tensor.to(where) for tensor in tensors]
    result = move(*there)
    for tensor, moved in zip(tensors, there, strict=True):
        if moved is not tensor:
            tensor.copy_(moved)
    return result
