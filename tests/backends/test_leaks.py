"""Nothing is left: no descriptor, no thread, no shared memory, however often groups come and go."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

import torchdist_ref as dist
from tests.descriptors import left_shared_files, shared_files
from torchdist_ref.backends.ref import Ref
from torchdist_ref.backends.ref.backend import MOST_PLANS
from torchdist_ref.groups.world import default_group
from torchdist_ref.membership.peer_processes import PeerProcesses
from torchdist_ref.testing import RankError, fill, run


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def use_a_group(rank: int, size: int) -> None:
    group = dist.new_group()
    tensor = fill(rank, (50,))
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    work.get_future().then(lambda future: future.value()).wait()
    assert torch.equal(tensor, sum(fill(r, (50,)) for r in range(size)))
    dist.destroy_process_group(group)


def cycles(rank: int, size: int) -> tuple[int, list[str]]:
    use_a_group(rank, size)
    before = open_files()
    for _ in range(40):
        use_a_group(rank, size)
    names = [thread.name for thread in threading.enumerate() if "progress" in thread.name or "callbacks" in thread.name]
    return open_files() - before, names


def test_groups_that_were_destroyed_leave_no_descriptor_and_no_thread() -> None:
    for more, threads in run(cycles, 2, 2, ranks="processes"):
        assert more <= 0
        assert threads == []


def keep_groups(rank: int) -> int:
    before = open_files()
    groups = [dist.new_group() for _ in range(10)]
    for group in groups:
        dist.all_reduce(torch.ones(10), group=group)
    return open_files() - before


def test_groups_on_one_host_use_no_descriptors() -> None:
    """Once each used one for the segment and one for each of the other ranks."""
    assert run(keep_groups, 3, ranks="processes") == [0, 0, 0]


def die_together(rank: int) -> None:
    dist.all_reduce(torch.ones(10_000))
    os.kill(os.getpid(), signal.SIGKILL)


def test_no_shared_memory_outlives_ranks_that_are_all_killed() -> None:
    before = shared_files()
    with pytest.raises(RankError):
        run(die_together, 3, ranks="processes")
    assert left_shared_files(before) == set()


def keep_a_result(rank: int) -> list[float]:
    output = torch.zeros(2, 8)
    dist.all_gather_into_tensor(output, fill(rank, (8,)))
    dist.destroy_process_group()
    return output.sum(0).tolist()


def test_results_outlive_the_group() -> None:
    wanted = (fill(0, (8,)) + fill(1, (8,))).tolist()
    assert run(keep_a_result, 2, ranks="processes") == [wanted, wanted]


def mapped() -> int:
    return sum("memfd:torchdist_ref" in line for line in Path("/proc/self/maps").read_text().splitlines())


def count_mappings(rank: int) -> int:
    before = mapped()
    use_a_group(rank, 2)
    return mapped() - before


def test_the_mapping_goes_with_the_group() -> None:
    assert run(count_mappings, 2, ranks="processes") == [0, 0]


def ask_from_many_threads(rank: int) -> bool:
    peers = PeerProcesses({1 - rank: os.getppid()})
    answers: list[list[int]] = []
    threads = [threading.Thread(target=lambda: answers.extend(peers.dead() for _ in range(3000))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    peers.close()
    return answers == [[]] * 9000


def test_many_threads_may_ask_who_is_dead() -> None:
    assert run(ask_from_many_threads, 2, ranks="processes", init=False) == [True, True]


def invent_shapes(rank: int) -> int:
    for count in range(MOST_PLANS + 40):
        dist.all_reduce(torch.ones(count))
    tensor = fill(rank, (6,))
    dist.all_reduce(tensor)
    assert torch.equal(tensor, fill(0, (6,)) + fill(1, (6,)))
    backend = default_group().backend
    assert isinstance(backend, Ref)
    return len(backend.plans)


def test_plans_are_forgotten_when_there_are_too_many() -> None:
    assert all(count <= MOST_PLANS for count in run(invent_shapes, 2))
