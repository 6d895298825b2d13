"""What a mesh is made of: checked ranks, and a group along each line. The mesh itself is in `mesh`."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from torchdist_ref.errors import DistError, explain
from torchdist_ref.groups.group import ProcessGroup
from torchdist_ref.groups.lifecycle import new_group
from torchdist_ref.groups.queries import get_world_size
from torchdist_ref.groups.world import default_group

Names = tuple[str, ...] | None


def ranks_of(mesh: Any) -> Tensor:
    """The ranks as a tensor, from a tensor or nested lists."""
    if mesh is None:
        wrong("mesh", "a tensor or nested lists of ranks", None)
    return torch.as_tensor(mesh, dtype=torch.int, device="cpu").detach().clone()


def check_mesh(device_type: str, ranks: Tensor, names: Names) -> None:
    """Raise unless these can be a mesh of the current job."""
    if not isinstance(device_type, str) or not device_type.isalpha():
        wrong("device_type", "the name of a device, without a number", device_type)
    listed, world = ranks.flatten().tolist(), get_world_size()
    if len(set(listed)) != len(listed) or not all(0 <= rank < world for rank in listed):
        wrong("mesh", f"ranks from 0 to {world - 1}, each at most once", ranks.tolist())
    if names is not None and (len(names) != ranks.dim() or len(set(names)) != len(names)):
        wrong("mesh_dim_names", f"{ranks.dim()} names, one for each dimension, none twice", names)


def wrong(argument: str, expected: str, got: Any) -> NoReturn:
    """Raise what is wrong with an argument of a mesh."""
    # torch raises RuntimeError for all of these.
    raise DistError(explain("DeviceMesh", argument, expected, got))


def backend_of(wish: Any) -> str | None:
    """The backend that a caller wants for a dimension; None for the default group's."""
    name = wish[0] if isinstance(wish, tuple) else wish
    return name if isinstance(name, str) else None


def group_along(ranks: Tensor, dimension: int, backend: str | None) -> ProcessGroup | int:
    """Make the groups of all lines along a dimension, on all ranks; this rank's is the one that counts."""
    if ranks.dim() == 1 and backend is None and ranks.tolist() == list(default_group().members):
        return default_group()
    lines = ranks.movedim(dimension, -1).reshape(-1, ranks.shape[dimension]).tolist()
    made = [new_group(line, backend=backend) for line in lines]
    return next((group for group in made if isinstance(group, ProcessGroup)), -100)
