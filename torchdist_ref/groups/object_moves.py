"""How parcels move: numbers first, then bytes of one width, as calls of the group's backend.

Here a parcel's error becomes an exception, on all ranks. What users call is in `objects`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchdist_ref.calls import AllGather, Broadcast, Gather, Scatter
from torchdist_ref.groups.collectives import submit
from torchdist_ref.groups.group import ProcessGroup
from torchdist_ref.groups.parcels import Parcel, Room, carried, reraise


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
