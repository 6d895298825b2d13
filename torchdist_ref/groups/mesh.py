"""DeviceMesh: the ranks in a grid, with a process group along each dimension.

A mesh is a tensor of global ranks. Along each dimension, every line of the grid is a group; a rank belongs to one line
per dimension. All ranks create all groups in one order. Slices share these groups, so slicing does not communicate.
Do not add work done on a mesh (sharding, parallelism) here.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor

from torchdist_ref.errors import DistError, explain
from torchdist_ref.groups.lifecycle import init_process_group, is_initialized, new_group
from torchdist_ref.groups.queries import get_rank, get_world_size
from torchdist_ref.groups.world import ProcessGroup, default_group

Groups = tuple[ProcessGroup | int, ...]


class DeviceMesh:
    """The ranks of a job in a grid, with a group along each dimension.

    Every rank of the default group makes the same meshes in the same order. Groups count their ranks ascending.
    Initialises the default group from the environment if there is none.

    Args:
        device_type: What kind of device the ranks work on, such as ``"cpu"``.
        mesh: The global ranks, as a tensor or nested lists; each at most once. Ranks may be left out.
        mesh_dim_names: A name for each dimension, needed for slicing.
        backend_override: For each dimension the backend of its groups, alone or with options, which are ignored; None
            for that of the default group.

    Raises:
        DistError: Ranks twice, too many or out of range; names that don't fit the dimensions; a device with a number.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     mesh = dist.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replica", "shard"))
        ...     return mesh.get_coordinate(), dist.get_process_group_ranks(mesh["shard"].get_group())
        >>> run(program, 4)[2]
        ((1, 0), [2, 3])
    """

    def __init__(
        self,
        device_type: str,
        mesh: Tensor | Sequence[Any] | None = None,
        *,
        mesh_dim_names: Names = None,
        backend_override: Sequence[Any] | None = None,
    ) -> None:
        if not is_initialized():
            init_process_group()
        ranks = ranks_of(mesh)
        check_mesh(device_type, ranks, mesh_dim_names)
        backends = [backend_of(wish) for wish in backend_override or [None] * ranks.dim()]
        if len(backends) != ranks.dim():
            wrong("backend_override", f"one entry for each of {ranks.dim()} dimensions", backend_override)
        groups = tuple(group_along(ranks, dimension, backends[dimension]) for dimension in range(ranks.dim()))
        self._be(device_type, ranks, mesh_dim_names, groups)

    def _be(self, device_type: str, ranks: Tensor, names: Names, groups: Groups) -> None:
        self._device_type = device_type
        self._ranks = ranks
        self._names = None if names is None else tuple(names)
        self._groups = groups
        place = (ranks == get_rank()).nonzero()
        self._coordinate = tuple(place[0].tolist()) if len(place) else None

    @classmethod
    def _of(cls, device_type: str, ranks: Tensor, names: Names, groups: Groups) -> DeviceMesh:
        """A mesh of groups that exist."""
        mesh = cls.__new__(cls)
        mesh._be(device_type, ranks, names, groups)
        return mesh

    @staticmethod
    def from_group(
        group: ProcessGroup | list[ProcessGroup],
        device_type: str,
        mesh: Tensor | Sequence[Any] | None = None,
        *,
        mesh_dim_names: Names = None,
    ) -> DeviceMesh:
        """A mesh of groups that were made before; makes none.

        Args:
            group: One group, for a mesh of one dimension; or a list with this rank's group along each dimension.
            device_type: What kind of device the ranks work on.
            mesh: The global ranks. Needed for a list; default for one group: its members.
            mesh_dim_names: A name for each dimension.

        Returns:
            The mesh.

        Raises:
            DistError: The groups and the ranks don't fit.
        """
        groups = tuple(group) if isinstance(group, (list, tuple)) else (group,)
        if mesh is None and isinstance(group, ProcessGroup):
            mesh = list(group.members)
        ranks = ranks_of(mesh)
        check_mesh(device_type, ranks, mesh_dim_names)
        made = DeviceMesh._of(device_type, ranks, mesh_dim_names, groups)
        lines = [made._line(dimension) for dimension in range(ranks.dim())]
        if [sorted(line) for line in lines] != [sorted(each.members) for each in groups]:
            wrong("group", f"groups of the ranks {lines}", [list(each.members) for each in groups])
        return made

    def _line(self, dimension: int) -> list[int]:
        """The ranks of this rank's line along a dimension."""
        at: list[Any] = list(self._here())
        at[dimension] = slice(None)
        line: list[int] = self._ranks[tuple(at)].tolist()
        return line

    def _here(self) -> tuple[int, ...]:
        if self._coordinate is None:
            raise DistError(f"DeviceMesh: rank {get_rank()} is not in this mesh of ranks {self._ranks.tolist()}.")
        return self._coordinate

    @property
    def device_type(self) -> str:
        """What kind of device the ranks work on."""
        return self._device_type

    @property
    def mesh(self) -> Tensor:
        """The global ranks, in the shape of the mesh."""
        return self._ranks

    @property
    def mesh_dim_names(self) -> Names:
        """The dimensions' names, or None."""
        return self._names

    @property
    def ndim(self) -> int:
        """How many dimensions the mesh has."""
        return self._ranks.dim()

    @property
    def shape(self) -> tuple[int, ...]:
        """How long each dimension is."""
        return tuple(self._ranks.shape)

    def size(self, mesh_dim: int | None = None) -> int:
        """How long a dimension is; of the whole mesh, how many ranks it has."""
        return self._ranks.numel() if mesh_dim is None else self._ranks.shape[mesh_dim]

    def get_rank(self) -> int:
        """This rank's global rank."""
        return get_rank()

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Where this rank stands; None if it is not in the mesh."""
        return self._coordinate

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """This rank's rank in its group along one dimension, by number or name, which one dimension alone needs not.

        That is its coordinate, unless the mesh lists ranks in descending order: groups count theirs ascending.

        Raises:
            DistError: This rank is not in the mesh, or there are several dimensions and none is given.
            KeyError: No dimension has this name.
        """
        return self.get_group(self._dimension(mesh_dim, "get_local_rank")).rank()

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """The group of this rank's line along one dimension, by number or name.

        Raises:
            DistError: This rank is not in the mesh, or there are several dimensions and none is given.
            KeyError: No dimension has this name.
        """
        self._here()
        group = self._groups[self._dimension(mesh_dim, "get_group")]
        assert isinstance(group, ProcessGroup), "a rank of the mesh is in a line of each dimension"
        return group

    def get_all_groups(self) -> list[ProcessGroup]:
        """This rank's group along each dimension."""
        return [self.get_group(dimension) for dimension in range(self.ndim)]

    def _dimension(self, wanted: int | str | None, operation: str) -> int:
        if isinstance(wanted, str):
            return self._named(wanted)
        if wanted is None and self.ndim > 1:
            raise DistError(f"DeviceMesh.{operation}: give 'mesh_dim', since this mesh has {self.ndim} dimensions.")
        return wanted or 0

    def _named(self, name: str) -> int:
        if self._names is None or name not in self._names:
            raise KeyError(explain("DeviceMesh", "mesh_dim", f"one of the names {self._names}", name))
        return self._names.index(name)

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """The part of the mesh along some dimensions, by name and in their order, in which this rank is.

        Raises:
            DistError: The dimensions have no names, or this rank is not in the mesh.
            KeyError: No dimension has this name, or the names are in another order.
        """
        if self._names is None:
            raise DistError("DeviceMesh: a mesh without mesh_dim_names can't be sliced by name.")
        wanted = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        kept = [self._named(name) for name in wanted]
        if kept != sorted(set(kept)):
            raise KeyError(explain("DeviceMesh", "mesh_dim_names", f"each once, in the order of {self._names}", wanted))
        at = tuple(slice(None) if d in kept else place for d, place in enumerate(self._here()))
        return DeviceMesh._of(self._device_type, self._ranks[at], wanted, tuple(self._groups[d] for d in kept))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceMesh) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return self._device_type, self._names, self.shape, tuple(self._ranks.flatten().tolist())

    def __repr__(self) -> str:
        return f"DeviceMesh({self._device_type!r}, {self._ranks.tolist()}, mesh_dim_names={self._names})"


def init_device_mesh(
    device_type: str,
    mesh_shape: tuple[int, ...],
    *,
    mesh_dim_names: tuple[str, ...] | None = None,
    backend_override: dict[int | str, Any] | None = None,
) -> DeviceMesh:
    """A mesh of the first ranks of the job, counted row by row.

    Args:
        device_type: What kind of device the ranks work on, such as ``"cpu"``.
        mesh_shape: How long each dimension is.
        mesh_dim_names: A name for each dimension, needed for slicing.
        backend_override: For some dimensions, by number or name, the backend of their groups, alone or with options,
            which are ignored.

    Returns:
        The mesh.

    Raises:
        DistError: A mesh larger than the job; names that don't fit the dimensions; a device with a number.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
        ...     return [dist.get_process_group_ranks(group) for group in mesh.get_all_groups()]
        >>> run(program, 4)[1]
        [[1, 3], [0, 1]]
    """
    overrides = dict(backend_override or {})
    backends = [overrides.pop(d, overrides.pop((mesh_dim_names or {d: d})[d], None)) for d in range(len(mesh_shape))]
    if overrides:
        wrong("backend_override", f"about dimensions of {mesh_dim_names or mesh_shape}, each once", backend_override)
    ranks = torch.arange(prod(mesh_shape), dtype=torch.int).view(tuple(mesh_shape))
    return DeviceMesh(device_type, ranks, mesh_dim_names=mesh_dim_names, backend_override=backends)


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
