"""Destroyed groups, groups of an earlier job, and ranks that disagree: one error soon, and nothing is written."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as theirs
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
import torch.distributed.device_mesh as their_mesh
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DistributedSampler

import torchdist_ref as dist
from tests.outcomes import NEVER
from torchdist_ref.groups.torch_tables import GroupsInTorch
from torchdist_ref.testing import fill, run


def raised(call: Callable[[], Any], kind: type[BaseException], words: str) -> None:
    with pytest.raises(kind, match=words):
        call()


def uses(group: Any, mesh: Any, path: str) -> list[Callable[[], Any]]:
    """Return functions that use a group, or a mesh of it, in both libraries."""
    tensor, linear = fill(0, (2,)), nn.Linear(2, 2)
    return [
        lambda: dist.all_reduce(tensor, group=group),
        lambda: dist.DeviceMesh.from_group(group, "cpu"),
        lambda: dist.DistributedDataParallel(linear, process_group=group),
        lambda: nn.parallel.DistributedDataParallel(linear, process_group=group),
        lambda: distribute_tensor(fill(1, (4, 2)), mesh, [Shard(0)]),
        lambda: functional.all_reduce(tensor, "sum", (mesh, 0)),
        lambda: fully_shard(nn.Linear(2, 2), mesh=mesh)(tensor),
    ]


def files(path: str) -> dict[str, bytes]:
    """Return the files of a checkpoint."""
    return {each.name: each.read_bytes() for each in Path(path).iterdir()}


def destroyed(rank: int, path: str) -> bool:
    pair: Any = dist.new_group([0, 1], group_desc="pair")
    mesh = dist.DeviceMesh.from_group(pair, "cpu", mesh_dim_names=("x",))
    theirs_pair: Any = theirs.new_group([0, 1])
    checkpoint.save({"a": fill(5, (2,))}, checkpoint_id=path, process_group=pair)
    dist.barrier()
    kept = files(path)
    dist.destroy_process_group(pair)
    for use in uses(pair, mesh, path):
        raised(use, dist.ArgumentError, "group 'pair' was destroyed")
    # torch's own checks come first here.
    raised(lambda: checkpoint.save({"a": fill(1, (2,))}, checkpoint_id=path, process_group=pair), ValueError, "'pair'")
    raised(lambda: theirs.all_reduce(fill(1, (2,)), group=pair), ValueError, "'pair'")
    name = theirs_pair.group_name
    theirs.destroy_process_group(theirs_pair)
    raised(lambda: dist.all_reduce(fill(1, (2,)), group=theirs_pair), dist.ArgumentError, f"'{name}'.*was destroyed")
    tensor = fill(rank, (2,))
    dist.all_reduce(tensor)
    assert torch.equal(tensor, fill(0, (2,)) + fill(1, (2,)))
    return bool(kept) and files(path) == kept


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_a_destroyed_group_is_named_and_nothing_is_written(backend: str, tmp_path: Any) -> None:
    assert run(destroyed, 2, str(tmp_path), backend=backend, ranks="processes") == [True, True]


def of_an_earlier_job(rank: int, path: str, backend: str) -> None:
    store = dist.FileStore(os.path.join(path, "store"), 2)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2)
    earlier, mesh = dist.group.WORLD, dist.init_device_mesh("cpu", (2,))
    made_by_torch: Any = theirs.new_group([0, 1])
    sampler = DistributedSampler(range(7), shuffle=False)
    dist.barrier()
    dist.destroy_process_group()
    raised(lambda: DistributedSampler(range(7)), ValueError, "Default process group has not been initialized")
    dist.init_process_group(backend, store=store, rank=rank, world_size=2)
    for use in uses(earlier, mesh, path):
        raised(use, dist.ArgumentError, "group 'world' was destroyed")
    raised(lambda: dist.all_reduce(fill(1, (2,)), group=made_by_torch), dist.ArgumentError, "earlier default group")
    again = DistributedSampler(range(7), shuffle=False)
    assert list(again) == list(sampler)
    tensor = fill(rank, (2,))
    theirs.all_reduce(tensor, group=theirs.new_group([0, 1]))
    assert torch.equal(tensor, fill(0, (2,)) + fill(1, (2,)))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_groups_and_meshes_of_an_earlier_job_are_refused(backend: str, tmp_path: Any) -> None:
    run(of_an_earlier_job, 2, str(tmp_path), backend, ranks="processes", init=False)


def disagreeing(rank: int, path: str, backends: list[str]) -> str:
    store = dist.FileStore(os.path.join(path, "store"), len(backends))
    with pytest.raises(dist.MismatchError) as caught:
        dist.init_process_group(backends[rank] or None, None, NEVER, len(backends), rank, store)
    assert not dist.is_initialized() and not theirs.is_initialized()
    return str(caught.value)


@pytest.mark.parametrize("ranks", ["processes", "threads"])
@pytest.mark.parametrize("backends", ["ref gloo", "gloo ref ref", "ref ref gloo", " ref"])
def test_ranks_that_disagree_on_the_backend_raise_one_error_soon(backends: str, ranks: Any, tmp_path: Any) -> None:
    names = backends.split(" ")
    found = run(disagreeing, len(names), str(tmp_path), names, ranks=ranks, init=False)
    for text in found:
        assert text.startswith("init_process_group: rank ") and text.count("uses backend") == 1
        assert all(repr(name or "(default)") in text for name in names)


def disagreeing_in_new_group(rank: int) -> float:
    with pytest.raises(dist.MismatchError, match=r"new_group: rank \d uses backend '(ref|gloo)', rank \d uses"):
        dist.new_group([0, 1], backend=["ref", "gloo"][rank])
    tensor = fill(rank, (1,))
    dist.all_reduce(tensor)
    return tensor.item()


def first_as_no_member(rank: int) -> str:
    if rank == 2:
        dist.new_group([0, 1], backend="gloo")
    dist.barrier()
    if rank == 2:
        dist.new_group([0, 1], backend="ref")
        dist.barrier()
        return ""
    group = dist.new_group([0, 1], backend="ref")
    dist.barrier()
    with pytest.raises(dist.MismatchError, match=r"new_group: rank \d uses backend"):
        dist.new_group([0, 1], backend=["ref", "gloo"][rank])
    return str(dist.get_backend(group))


def test_the_backend_of_a_rank_that_is_no_member_does_not_count() -> None:
    assert run(first_as_no_member, 3, timeout=60.0) == ["ref", "ref", ""]


def test_new_group_names_both_backends_and_the_default_group_works_on() -> None:
    total = (fill(0, (1,)) + fill(1, (1,))).item()
    assert run(disagreeing_in_new_group, 2, ranks="processes") == [total, total]


def two_libraries(rank: int) -> None:
    """Make a mesh of torch's over a subgroup of ours, and slice ours with torch's functions."""
    pair = dist.new_group([0, 1])
    assert isinstance(pair, dist.ProcessGroup)
    mesh = their_mesh.DeviceMesh.from_group(pair, "cpu", mesh_dim_names=("x",))
    assert mesh.get_group() is pair and mesh["x"].get_group("x") is pair


def test_a_mesh_of_torchs_returns_our_group() -> None:
    run(two_libraries, 2, ranks="processes")


def test_threads_use_groups_that_torch_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once one thread looked through the groups in use while another added one, or both made a group of ours for it."""
    make, made = GroupsInTorch.make_counterpart, list[Any]()

    def recorded(self: GroupsInTorch, group: Any) -> Any:
        made.append(group)
        # The others come to the same group meanwhile.
        threading.Event().wait(0.002)
        return make(self, group)

    def program(rank: int) -> tuple[int, list[float]]:
        groups: list[Any] = [theirs.new_group([0]) for _ in range(60)]
        sys.setswitchinterval(1e-6)
        together = threading.Barrier(3)

        def use(own: torch.Tensor) -> torch.Tensor:
            together.wait()
            for group in groups:
                dist.all_reduce(own, group=group)
            return own

        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(use, [fill(thread, (2,)) for thread in range(3)]))
        return len(made), torch.stack(found).flatten().tolist()

    monkeypatch.setattr(GroupsInTorch, "make_counterpart", recorded)
    expected = torch.stack([fill(thread, (2,)) for thread in range(3)]).flatten().tolist()
    assert run(program, 1, ranks="processes") == [(60, expected)]
