"""DeviceMesh: coordinates and groups match torch's on the same ranks; its groups run calls; misuse is named."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as theirs

import torchdist_ref as dist
from tests.ports import reserve_port
from tests.torchs_world import start_torch
from torchdist_ref.testing import fill, run


def meshes(library: Any, rank: int) -> list[Any]:
    """Return what a rank sees of several meshes of a library."""
    grid = library.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    line = library.init_device_mesh("cpu", (4,))
    cube = library.init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("a", "b", "c"))
    part = library.DeviceMesh("cpu", [[3, 1]], mesh_dim_names=("x", "y"))
    column = library.DeviceMesh.from_group(grid.get_group("replica"), "cpu", mesh_dim_names=("replica",))
    both = library.DeviceMesh.from_group(
        [grid.get_group(0), grid.get_group(1)], "cpu", torch.arange(4).view(2, 2), mesh_dim_names=("replica", "shard")
    )
    found = []
    for mesh in (grid, line, cube, part, grid["replica"], grid["shard"], cube["a", "c"], column, both):
        seen = [mesh.mesh.tolist(), str(mesh.mesh.dtype), mesh.device_type, mesh.mesh_dim_names, mesh.ndim]
        seen += [tuple(mesh.shape), mesh.size(), mesh.size(0), mesh.get_rank(), mesh.get_coordinate()]
        if mesh.get_coordinate() is not None:
            seen += [[library.get_process_group_ranks(group) for group in mesh.get_all_groups()]]
            seen += [[mesh.get_local_rank(dimension) for dimension in range(mesh.ndim)]]
        found.append(seen)
    again = library.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    found.append([again == grid, hash(again) == hash(grid), again == line, grid == both, line.get_local_rank()])
    found.append([grid["replica", "shard"] == grid, line.get_group() is library.group.WORLD])
    return found


def beside_torch(rank: int, path: str) -> tuple[list[Any], list[Any]]:
    start_torch(store=theirs.FileStore(path, 4), rank=rank, world_size=4)
    try:
        return meshes(dist, rank), meshes(theirs, rank)
    finally:
        theirs.destroy_process_group()


def test_meshes_match_torchs(tmp_path: Path) -> None:
    for ours, oracle in run(beside_torch, 4, str(tmp_path / "store"), ranks="processes"):
        for mine, other in zip(ours, oracle, strict=True):
            assert mine == other


def sums(rank: int) -> tuple[list[float], list[float]]:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"), backend_override={"shard": "gloo"})
    assert [dist.get_backend(group) for group in mesh.get_all_groups()] == ["ref", "gloo"]
    tensors = fill(rank, (3,)), fill(rank, (3,))
    dist.all_reduce(tensors[0], group=mesh.get_group("replica"))
    dist.all_reduce(tensors[1], group=mesh["shard"].get_group())
    return tensors[0].tolist(), tensors[1].tolist()


def test_groups_of_a_mesh_carry_calls_along_one_dimension() -> None:
    every = [fill(rank, (3,)) for rank in range(4)]
    for rank, found in enumerate(run(sums, 4)):
        column, row = every[rank % 2] + every[rank % 2 + 2], every[rank // 2 * 2] + every[rank // 2 * 2 + 1]
        assert found == (column.tolist(), row.tolist())


def test_a_mesh_initializes_the_default_group(monkeypatch: pytest.MonkeyPatch) -> None:
    port = str(reserve_port())
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)

    def program(rank: int) -> list[int]:
        mesh = dist.init_device_mesh("cpu", (1,))
        found = dist.get_process_group_ranks(mesh.get_group())
        dist.destroy_process_group()
        return found

    assert run(program, 1, init=False) == [[0]]


def outside(rank: int) -> str:
    mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    if rank == 0:
        return "inside" if mesh.get_local_rank() == 0 else "lost"
    assert mesh.get_coordinate() is None
    with pytest.raises(RuntimeError, match="not in this mesh") as caught:
        mesh.get_group()
    return str(caught.value)


def test_a_rank_outside_the_mesh_raises() -> None:
    assert run(outside, 2) == ["inside", "DeviceMesh: rank 1 is not in this mesh of ranks [0]."]


def grid() -> dist.DeviceMesh:
    return dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))


MISUSE: list[tuple[str, Any, type[Exception], str]] = [
    ("too large", lambda: dist.init_device_mesh("cpu", (2, 2)), RuntimeError, "'mesh'.*0 to 1.*[[0, 1], [2, 3]]"),
    ("rank twice", lambda: dist.DeviceMesh("cpu", [0, 0]), RuntimeError, "'mesh'.*at most once"),
    ("no ranks", lambda: dist.DeviceMesh("cpu"), RuntimeError, "'mesh'.*got None"),
    ("numbered device", lambda: dist.init_device_mesh("cuda:0", (2,)), RuntimeError, "'device_type'.*'cuda:0'"),
    (
        "a name missing",
        lambda: dist.DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("a",)),
        RuntimeError,
        "2 different names",
    ),
    (
        "a name twice",
        lambda: dist.DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("a", "a")),
        RuntimeError,
        "2 different names",
    ),
    ("unknown name", lambda: grid()["c"], KeyError, "one of the names.*'a', 'b'.*'c'"),
    ("names out of order", lambda: grid()["b", "a"], KeyError, "in the order of"),
    ("nameless slice", lambda: dist.init_device_mesh("cpu", (2,))["a"], RuntimeError, "without mesh_dim_names"),
    ("no dimension", lambda: grid().get_group(), RuntimeError, "get_group: pass 'mesh_dim'.*2 dimensions"),
    ("unknown dimension", lambda: grid().get_local_rank("c"), KeyError, "'mesh_dim'.*'c'"),
    ("unknown override", lambda: dist.init_device_mesh("cpu", (2,), backend_override={3: "gloo"}), RuntimeError, "{3:"),
    ("odd group", lambda: dist.DeviceMesh.from_group(grid().get_group("a"), "cpu", [0, 1]), RuntimeError, "'group'"),
]


@pytest.mark.parametrize(("call", "kind", "words"), [case[1:] for case in MISUSE], ids=[case[0] for case in MISUSE])
def test_misuse_raises_a_clear_error(call: Any, kind: type[Exception], words: str) -> None:
    def program(rank: int) -> float:
        with pytest.raises(kind) as caught:
            call()
        assert all(word in str(caught.value) for word in words.split(".*")), str(caught.value)
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor)
        return tensor.item()

    assert run(program, 2) == [3.0, 3.0]


# torch warns that its root will not keep flattened dimensions in a later version.
@pytest.mark.filterwarnings("ignore:Slicing a flattened dim:UserWarning")
def test_a_flattened_dimension_is_found_by_its_name(tmp_path: Path) -> None:
    def program(rank: int) -> Any:
        mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
        mesh["a", "b"]._flatten("ab")
        found = mesh["ab"]
        tensor = fill(rank, (3,))
        dist.all_reduce(tensor, group=found.get_group())
        with pytest.raises(KeyError, match="one of the names"):
            mesh["none"]
        return found.size(), found.mesh.tolist(), tensor.tolist()

    total = (fill(0, (3,)) + fill(1, (3,))).tolist()
    assert run(program, 2, ranks="processes") == [(2, [0, 1], total)] * 2


def ordered(rank: int) -> tuple[Any, ...]:
    mesh = dist.DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("a", "b"), preserve_rank_order=True)
    line = dist.DeviceMesh("cpu", [3, 2, 1, 0], preserve_rank_order=True)
    tensors = [torch.zeros(3) for _ in range(2)]
    dist.all_gather(tensors, fill(rank, (3,)), group=mesh.get_group("b"))
    ranks = [dist.get_process_group_ranks(group) for group in (*mesh.get_all_groups(), line.get_group())]
    same = dist.DeviceMesh("cpu", [0, 1, 2, 3], preserve_rank_order=True).get_group() is dist.group.WORLD
    return ranks, mesh.get_local_rank("b"), mesh.get_coordinate(), line.get_local_rank(), tensors, same


def test_a_mesh_that_preserves_the_order_of_ranks_has_them_in_its_groups() -> None:
    for rank, (ranks, local, coordinate, place, tensors, same) in enumerate(run(ordered, 4)):
        row = [3, 1] if rank in (3, 1) else [0, 2]
        assert ranks == [[3, 0] if rank in (3, 0) else [1, 2], row, [3, 2, 1, 0]] and same
        assert local == coordinate[1] == row.index(rank) and place == 3 - rank
        assert all(torch.equal(each, fill(member, (3,))) for each, member in zip(tensors, row, strict=True))


def aborted(rank: int, begun: threading.Barrier) -> Any:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    with pytest.raises(RuntimeError, match="not supported on a submesh"):
        mesh["a"].abort()
    groups = mesh.get_all_groups()
    begun.wait(20)
    if rank == 0:
        mesh.abort()
        mesh.abort()
    else:
        # Along one dimension or the other, each waits for a call that is never made.
        with pytest.raises(dist.GroupAbortedError, match=r"DeviceMesh\.abort"):
            for group in groups:
                dist.all_reduce(torch.ones(1), group=group)
        return "ended"
    with pytest.raises(ValueError, match="was destroyed"):
        mesh.get_group("a")
    return dist.is_initialized(), [type(group.backend).__name__ for group in groups]


def test_abort_ends_the_calls_of_all_groups_of_a_mesh() -> None:
    found = run(aborted, 4, threading.Barrier(4))
    assert found[0] == (True, ["DestroyedBackend", "DestroyedBackend"])
    assert found[1:] == ["ended"] * 3


WRONG_GROUPS = {
    "no group": (lambda group: [], None, "Expects at least one ProcessGroup"),
    "a list without a mesh": (lambda group: [group, group], None, "Must pass mesh if passing multiple ProcessGroups"),
    "ranks of no group": (lambda group: group, [1, 0, 2], "(?i)mesh"),
    "other ranks": (lambda group: group, torch.tensor([0]), "(?i)invalid mesh .*for ProcessGroup with ranks"),
    "fractions": (lambda group: group, [0.5, 1.5], "(?i)mesh"),
}


@pytest.mark.parametrize("case", WRONG_GROUPS)
def test_groups_that_do_not_fit_are_a_value_error_as_in_torch(case: str) -> None:
    groups, mesh, words = WRONG_GROUPS[case]

    def program(rank: int) -> None:
        group = groups(dist.group.WORLD)
        # torch's function takes our groups.
        for kind in (theirs.device_mesh.DeviceMesh, dist.DeviceMesh):
            with pytest.raises(ValueError, match=words):
                kind.from_group(group, "cpu", mesh)

    run(program, 2)


def test_an_unknown_name_is_still_a_key_error() -> None:
    def program(rank: int) -> None:
        mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
        for call in (mesh.get_group, mesh.get_local_rank, mesh.__getitem__):
            with pytest.raises(KeyError, match="'ab'"):
                call("ab")

    run(program, 2)


def test_the_group_of_a_flattened_dimension_is_found_by_its_name() -> None:
    def program(rank: int) -> Any:
        seen: list[Any] = []
        # torch's mesh, whose groups are on our default group, is the oracle.
        for module in (dist, theirs.device_mesh):
            cube: Any = module.init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
            cube["a", "b"]._flatten("ab")
            tensor = fill(rank, (3,))
            group = cube.get_group("ab")
            dist.all_reduce(tensor, group=group)
            seen.append((tensor.tolist(), group.size(), cube.get_local_rank("ab"), cube["b"].get_group("ab") is group))
        return seen

    for rank, (ours, torchs) in enumerate(run(program, 4)):
        assert ours == torchs
        assert ours[0] == sum((fill(other, (3,)) for other in range(1, 4)), fill(0, (3,))).tolist()
        assert ours[1:3] == (4, rank)
