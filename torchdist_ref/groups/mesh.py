"""DeviceMesh: the ranks in a grid, with a process group along each dimension.

A mesh is a tensor of global ranks. Along each dimension, every line of the grid is a group; a rank belongs to one line
per dimension. All ranks create all groups in one order. Slices share these groups, so slicing does not communicate.
`DeviceMesh` is a subclass of torch's, so FSDP2, DTensor and the like take it as their mesh.
Do not add work done on a mesh (sharding, parallelism) here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from threading import get_ident
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from torchdist_ref.backends.base import DestroyedBackend
from torchdist_ref.errors import ArgumentTypeError, DistError, EntryError, explain, indexed, on_rank
from torchdist_ref.groups.creation import init_process_group, is_initialized, new_group
from torchdist_ref.groups.queries import get_rank, get_world_size
from torchdist_ref.groups.tracing import read_as
from torchdist_ref.groups.world import (
    ProcessGroup,
    as_integer,
    default_group,
    is_thread_rank,
    refuse_destroyed,
    resolve,
)


class MeshError(DistError, ValueError):
    """A wrong argument of a mesh. torch raises a ValueError in `DeviceMesh.from_group`, else a RuntimeError."""


Names = tuple[str, ...] | None
Groups = tuple[ProcessGroup | int, ...]


class DeviceMesh(TorchMesh):
    """Grid of the ranks of a job, with a process group along each dimension.

    Every rank of the default group creates the same meshes in the same order. Groups list their ranks in ascending
    order, unless `preserve_rank_order`. The default group is initialized from the environment if there is none.

    Args:
        device_type: Device type that the ranks use, such as ``"cpu"``; without an index.
        mesh: Global ranks, as a tensor or nested lists; each at most once. Ranks may be left out.
        mesh_dim_names: One name per dimension, needed for slicing. Default: no names.
        backend_override: For each dimension the backend of its groups, alone or in a tuple with options, which are
            ignored; None for the default group's. Default: the default group's backend everywhere.
        preserve_rank_order: Whether groups list their ranks as the mesh does, so that group ranks are coordinates.
            Since torch 2.15. Default: False.

    Raises:
        DistError: Duplicate ranks, ranks out of range, names that do not match the dimensions, or a device type with
            an index.

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
        preserve_rank_order: bool = False,
    ) -> None:
        if not is_initialized():
            init_process_group()
        ranks = _ranks_of(mesh)
        _check_mesh(device_type, ranks, mesh_dim_names)
        backends = [_backend_of(override) for override in backend_override or [None] * ranks.dim()]
        if len(backends) != ranks.dim():
            _refuse("backend_override", f"one entry for each of {ranks.dim()} dimensions", backend_override)
        groups = tuple(
            _group_along(ranks, dimension, backends[dimension], preserve_rank_order) for dimension in range(ranks.dim())
        )
        self._make(device_type, ranks, mesh_dim_names, groups, preserve_rank_order)

    def _make(
        self, device_type: str, ranks: Tensor, names: Names, groups: Groups, preserve_rank_order: bool = False
    ) -> None:
        """Make this a mesh of existing groups, for torch's functions too."""
        self._set(ranks, names, groups)
        super().__init__(device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=get_rank())
        # torch 2.15 reads it where it makes other meshes of this one.
        self._preserve_rank_order = bool(preserve_rank_order)
        # torch compares meshes in caches that ranks share where they are threads.
        self._thread_id = get_ident() if is_thread_rank() else None
        own = [group for group in groups if isinstance(group, ProcessGroup)]
        self._dim_group_names = [group.group_name for group in own]
        self._pg_registry = {group.group_name: group.original or group for group in own}

    def _set(self, ranks: Tensor, names: Names, groups: Groups) -> None:
        self._ranks = ranks
        self._names = None if names is None else tuple(names)
        self._groups = groups
        index = (ranks == get_rank()).nonzero()
        self._coordinate = tuple(index[0].tolist()) if len(index) else None

    @classmethod
    def from_group(  # type: ignore[override]
        cls,
        group: ProcessGroup | list[ProcessGroup],
        device_type: str,
        mesh: Tensor | Sequence[Any] | None = None,
        *,
        mesh_dim_names: Names = None,
    ) -> DeviceMesh:
        """Return a mesh of existing groups, without creating any.

        Args:
            group: One group, for a mesh of one dimension; or a list with this rank's group along each dimension.
            device_type: Device type that the ranks use.
            mesh: Global ranks. Required for a list; default for one group: its members.
            mesh_dim_names: One name per dimension. Default: no names.

        Returns:
            The mesh.

        Raises:
            DistError: The groups do not match the ranks, or there is none, or there is a list without `mesh`. It is a
                ValueError too.
        """
        several = isinstance(group, (list, tuple))
        if several and not group:
            _refuse("group", "a group, or a list of them. Expects at least one ProcessGroup to be passed", group)
        if several and mesh is None:
            _refuse("mesh", "the ranks. Must pass mesh if passing multiple ProcessGroups", mesh)
        groups = tuple(_existing(each) for each in (group if several else [group]))  # type: ignore[union-attr]
        if mesh is None and not several:
            mesh = list(groups[0].members)
        ranks = _ranks_of(mesh)
        _check_mesh(device_type, ranks, mesh_dim_names)
        made = cls.__new__(cls)
        made._make(device_type, ranks, mesh_dim_names, groups)
        is_in = made.get_coordinate() is not None
        lines = [made._line(dimension) for dimension in range(ranks.dim())] if is_in else []  # noqa: SLF001
        if [sorted(line) for line in lines] != [sorted(each.members) for each in groups]:
            members = [list(each.members) for each in groups]
            _refuse("group", f"groups of the ranks {lines}, or invalid mesh for ProcessGroup with ranks", members)
        return made

    def _line(self, dimension: int) -> list[int]:
        """Return the global ranks that differ from this rank only in one dimension of the mesh."""
        index: list[Any] = list(self._require_coordinate())
        index[dimension] = slice(None)
        line: list[int] = self._ranks[tuple(index)].tolist()
        return line

    def _require_coordinate(self) -> tuple[int, ...]:
        if self._coordinate is None:
            raise DistError(f"DeviceMesh: rank {get_rank()} is not in this mesh of ranks {self._ranks.tolist()}.")
        return self._coordinate

    @property
    def device_type(self) -> str:
        """Device type that the ranks use."""
        return self._device_type

    @property
    def mesh(self) -> Tensor:
        """Global ranks, int32, in the shape of the mesh."""
        return self._ranks

    @property
    def mesh_dim_names(self) -> Names:
        """Names of the dimensions, or None."""
        return self._names

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self._ranks.dim()

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dimension."""
        return tuple(self._ranks.shape)

    def size(self, mesh_dim: int | None = None) -> int:
        """Return the size of a dimension, or by default the number of ranks in the mesh."""
        return self._ranks.numel() if mesh_dim is None else self._ranks.shape[self._index(mesh_dim, "size", "an int")]

    def get_rank(self) -> int:
        """Return this rank's global rank."""
        return get_rank()

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return this rank's index in the mesh, or None if it is not in the mesh."""
        return self._coordinate

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return this rank's group rank along one dimension, given by index or name; optional for a single dimension.

        It equals the coordinate unless the mesh lists ranks in descending order: groups list theirs in ascending order,
        unless the mesh has `preserve_rank_order`.

        Raises:
            DistError: This rank is not in the mesh, or there are several dimensions and none is given.
            KeyError: No dimension has this name.
        """
        flattened = self._flattened(mesh_dim)
        if flattened is not None:
            return int(flattened.get_local_rank())
        return self.get_group(self._dimension(mesh_dim, "get_local_rank")).rank()

    def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
        """Return the group of this rank's line along one dimension, given by index or name.

        The name may be that of a dimension that ``_flatten`` has made.

        Raises:
            DistError: This rank is not in the mesh, or there are several dimensions and none is given.
            KeyError: No dimension has this name.
        """
        self._require_coordinate()
        flattened = self._flattened(mesh_dim)
        if flattened is not None:
            return flattened.get_group()  # type: ignore[no-any-return]
        group = self._groups[self._dimension(mesh_dim, "get_group")]
        assert isinstance(group, ProcessGroup), "a rank of the mesh is in a line of each dimension"
        refuse_destroyed(group, "DeviceMesh.get_group")
        return group

    def get_all_groups(self) -> list[ProcessGroup]:  # type: ignore[override]
        """Return this rank's group along each dimension."""
        return [self.get_group(dimension) for dimension in range(self.ndim)]

    def abort(self) -> None:
        """Abort all groups of this mesh and of its flattened dimensions, and destroy them. Since torch 2.15.

        For a rank that learns that another one has failed: the calls of all members end with an error. A rank that
        is not in the mesh has nothing to abort.

        Raises:
            DistError: This is a slice of another mesh, whose other groups would remain.

        Example:
            >>> import torchdist_ref as dist
            >>> from torchdist_ref.testing import run
            >>> def program(rank):
            ...     mesh = dist.init_device_mesh("cpu", (2, 2))
            ...     mesh.abort()
            ...     return dist.get_world_size()
            >>> run(program, 4)
            [4, 4, 4, 4]
        """
        if self._root_mesh is not None:
            raise DistError(
                "DeviceMesh.abort: abort() is not supported on a submesh, whose groups are a part of its mesh's"
                f"{on_rank()}. Call abort() on the root mesh instead."
            )
        flattened = [mesh.get_group() for mesh in vars(self).get("_flatten_mapping", {}).values()]
        groups = dict.fromkeys(filter(None, map(resolve, [*self._groups, *flattened])))
        for group in groups:
            group.backend.abort("DeviceMesh.abort was called")
        for group in groups:
            # Destroying the default group also destroys all other groups.
            if not isinstance(group.backend, DestroyedBackend):
                group.shutdown()

    def _dimension(self, wanted: int | str | None, operation: str) -> int:
        if isinstance(wanted, str):
            return self._named(wanted)
        if wanted is None and self.ndim > 1:
            raise DistError(f"DeviceMesh.{operation}: pass 'mesh_dim', since this mesh has {self.ndim} dimensions.")
        return 0 if wanted is None else self._index(wanted, operation, "an int or a name")

    def _index(self, wanted: Any, operation: str, kind: str) -> int:
        number = as_integer(wanted)
        if number is None:
            raise ArgumentTypeError(explain(f"DeviceMesh.{operation}", "mesh_dim", f"{kind} of a dimension", wanted))
        if not -self.ndim <= number < self.ndim:
            expected = f"one of this mesh's {self.ndim} dimensions, from 0 up"
            raise EntryError(explain(f"DeviceMesh.{operation}", "mesh_dim", expected, wanted))
        return number

    def _flattened(self, name: Any) -> Any:
        """Return the mesh of a dimension that ``_flatten`` has made; None if there is none of this name.

        torch keeps them at the mesh from which others are slices.
        """
        root = self if self._root_mesh is None else self._root_mesh
        return vars(root).get("_flatten_mapping", {}).get(name) if isinstance(name, str) else None

    def _named(self, name: str) -> int:
        if self._names is None or name not in self._names:
            raise indexed(KeyError(explain("DeviceMesh", "mesh_dim", f"one of the names {self._names}", name)))
        return self._names.index(name)

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """Return the slice along some dimensions, by name and in their order, that contains this rank.

        Raises:
            DistError: The dimensions have no names, or this rank is not in the mesh.
            KeyError: No dimension has this name, or the names are in another order.
        """
        if self._names is None:
            raise DistError("DeviceMesh: a mesh without mesh_dim_names cannot be sliced by name.")
        if not isinstance(mesh_dim_names, str | Sequence):
            raise ArgumentTypeError(explain("DeviceMesh", "mesh_dim_names", "one or more names", mesh_dim_names))
        wanted = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        if not set(wanted) <= set(self._names):
            # Names of dimensions that `_flatten` has made, which torch keeps.
            with suppress(KeyError):
                flattened: Any = super().__getitem__(mesh_dim_names)
                return flattened  # type: ignore[no-any-return]
        kept = [self._named(name) for name in wanted]
        if kept != sorted(set(kept)):
            raise indexed(
                KeyError(
                    explain("DeviceMesh", "mesh_dim_names", f"different names, in the order of {self._names}", wanted)
                )
            )
        index = tuple(slice(None) if d in kept else i for d, i in enumerate(self._require_coordinate()))
        if len(kept) == self.ndim:
            return self
        # torch's slice knows its root, which FSDP2 and DTensor look for.
        made = DeviceMesh.__new__(DeviceMesh)
        vars(made).update(vars(super().__getitem__(wanted)), _thread_id=self._thread_id)
        made._names_of_groups = vars(made).pop("_dim_group_names")  # noqa: SLF001 - the same class
        made._set(self._ranks[index], wanted, tuple(self._groups[d] for d in kept))  # noqa: SLF001 - the same class
        return made

    _names_of_groups: list[Any]

    @property
    def _dim_group_names(self) -> list[Any]:
        # torch's functions ask for the names before they communicate. A later group may have the same name.
        for group in self._groups:
            if isinstance(group, ProcessGroup):
                refuse_destroyed(group, "DeviceMesh")
        return self._names_of_groups

    @_dim_group_names.setter
    def _dim_group_names(self, names: list[Any]) -> None:
        # Not in `vars` under the property's own name: torch 2.11's compiler would look for it there without end.
        self._names_of_groups = names

    def __getstate__(self) -> dict[str, Any]:
        # Groups cannot be pickled; torch finds them again by name.
        return {name: value for name, value in super().__getstate__().items() if name != "_groups"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._groups = ()
        if "_dim_group_names" in state:
            # A pickle of an earlier release.
            state = {**state, "_names_of_groups": state["_dim_group_names"]}
            del state["_dim_group_names"]
        super().__setstate__(state)
        found: dict[Any, Any] = self._pg_registry
        self._groups = tuple(resolve(found[name]) or -100 for name in self._names_of_groups if name in found)

    def __repr__(self) -> str:
        return f"DeviceMesh({self._device_type!r}, {self._ranks.tolist()}, mesh_dim_names={self._names})"


def init_device_mesh(
    device_type: str,
    mesh_shape: tuple[int, ...],
    *,
    mesh_dim_names: tuple[str, ...] | None = None,
    backend_override: dict[int | str, Any] | None = None,
) -> DeviceMesh:
    """Return a mesh of the first ranks of the job, in row-major order.

    Args:
        device_type: Device type that the ranks use, such as ``"cpu"``; without an index.
        mesh_shape: Size of each dimension.
        mesh_dim_names: One name per dimension, needed for slicing. Default: no names.
        backend_override: For some dimensions, by index or name, the backend of their groups, alone or in a tuple with
            options, which are ignored. Default: the default group's backend everywhere.

    Returns:
        The mesh.

    Raises:
        DistError: A mesh larger than the job, names that do not match the dimensions, or a device type with an index.

    Example:
        >>> import torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
        ...     return [dist.get_process_group_ranks(group) for group in mesh.get_all_groups()]
        >>> run(program, 4)[1]
        [[1, 3], [0, 1]]

    Elsewhere:
        ``MPI_Cart_create`` in MPI, ``jax.make_mesh`` in JAX; none in NCCL.
    """
    if not isinstance(mesh_shape, Sequence):
        raise ArgumentTypeError(explain("init_device_mesh", "mesh_shape", "a tuple of numbers of ranks", mesh_shape))
    if backend_override is not None and not isinstance(backend_override, Mapping):
        raise ArgumentTypeError(explain("init_device_mesh", "backend_override", "a dict", backend_override))
    if mesh_dim_names is not None:
        _check_names(mesh_dim_names, len(mesh_shape))
    overrides = dict(backend_override or {})
    backends = [overrides.pop(d, overrides.pop((mesh_dim_names or {d: d})[d], None)) for d in range(len(mesh_shape))]
    if overrides:
        _refuse(
            "backend_override",
            f"a dict with each dimension of {mesh_dim_names or mesh_shape} at most once",
            backend_override,
        )
    if not all(isinstance(size, int) and size > 0 and size is not True for size in mesh_shape):
        _refuse("mesh_shape", "positive numbers of ranks", mesh_shape)
    ranks = torch.arange(prod(mesh_shape), dtype=torch.int, device="cpu").view(tuple(mesh_shape))
    return DeviceMesh(device_type, ranks, mesh_dim_names=mesh_dim_names, backend_override=backends)


def _ranks_of(mesh: Any) -> Tensor:
    """Return the ranks of a tensor or nested lists as an int32 CPU tensor."""
    if mesh is None:
        _refuse("mesh", "a tensor or nested lists of ranks", None)
    try:
        given = torch.as_tensor(mesh, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentTypeError(explain("DeviceMesh", "mesh", "a tensor or nested lists of ranks", mesh)) from None
    ranks = given.to(torch.int, copy=True)
    if not ranks.numel() or not torch.equal(ranks.to(given.dtype), given):
        _refuse("mesh", "one or more ranks, which are whole numbers", mesh)
    return ranks


def _existing(group: Any) -> ProcessGroup:
    """Return a group that this rank is in, for one of ours or of torch's."""
    found = resolve(group, "DeviceMesh.from_group")
    if found is None:
        _refuse("group", "groups that this rank is in", group)
    refuse_destroyed(found, "DeviceMesh.from_group")
    return found


def _check_mesh(device_type: str, ranks: Tensor, names: Names) -> None:
    """Raise unless these describe a mesh of the current job."""
    if not isinstance(device_type, str) or not device_type.isalpha():
        _refuse("device_type", "a device type without an index", device_type)
    try:
        torch.device(device_type)
    except RuntimeError:
        _refuse("device_type", "a device type that torch has", device_type)
    listed, world = ranks.flatten().tolist(), get_world_size()
    if len(set(listed)) != len(listed) or not all(0 <= rank < world for rank in listed):
        _refuse("mesh", f"ranks from 0 to {world - 1}, each at most once", ranks.tolist())
    if names is not None:
        _check_names(names, ranks.dim())


def _check_names(names: Any, dimensions: int) -> None:
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ArgumentTypeError(explain("DeviceMesh", "mesh_dim_names", "a tuple of names, which are str", names))
    if len(names) != dimensions or len(set(names)) != len(names):
        _refuse("mesh_dim_names", f"{dimensions} different names, one for each dimension", names)


def _refuse(argument: str, expected: str, got: Any) -> NoReturn:
    raise MeshError(explain("DeviceMesh", argument, expected, got))


def _backend_of(override: Any) -> str | None:
    """Return the backend of an entry of `backend_override`, or None for the default group's."""
    name = override[0] if isinstance(override, tuple) else override
    if isinstance(name, int | float | bytes):
        _refuse("backend_override", "names of backends, alone or in tuples with options", override)
    return name if isinstance(name, str) else None


def _group_along(ranks: Tensor, dimension: int, backend: str | None, as_listed: bool) -> ProcessGroup | int:
    """Create the groups of all lines along a dimension, and return this rank's."""
    if ranks.dim() == 1 and backend is None and ranks.tolist() == list(default_group().members):
        return default_group()
    lines = ranks.movedim(dimension, -1).reshape(-1, ranks.shape[dimension]).tolist()
    made = [new_group(line, backend=backend, sort_ranks=not as_listed) for line in lines]
    return next((group for group in made if isinstance(group, ProcessGroup)), -100)


for _name in ("__getitem__", "get_group"):
    read_as(vars(DeviceMesh)[_name], vars(TorchMesh)[_name])
