"""Python objects from one rank to one other: a header, then the pickled bytes, as two messages with tag 0."""

from __future__ import annotations

from typing import Any

import torch

from torchdist_ref.calls import Recv, Send
from torchdist_ref.errors import ArgumentError, on_rank
from torchdist_ref.groups.arguments import member_group, root_of
from torchdist_ref.groups.group import ProcessGroup
from torchdist_ref.groups.objects import replace
from torchdist_ref.groups.parcels import Room, carried, pack, reraise, unpack


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
