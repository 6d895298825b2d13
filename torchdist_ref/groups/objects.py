"""Collectives on Python objects: a header that all ranks read, then the pickled bytes.

Every function is two collectives on tensors: numbers first, from which all ranks learn how much comes and whether
anybody has an error; then the bytes, filled up to one width. Pickling and errors are in `parcels`, the moves in
`object_moves`; messages from one rank to one other in `object_messages`.
"""

from __future__ import annotations

from typing import Any

import torch

from torchdist_ref.errors import ArgumentError, EntryError, explain
from torchdist_ref.groups.arguments import member_group, root_of
from torchdist_ref.groups.group import ProcessGroup
from torchdist_ref.groups.object_moves import all_gathered, broadcasted, gathered, headers_of, me, scattered
from torchdist_ref.groups.parcels import Parcel, pack, sorry, unpack


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
