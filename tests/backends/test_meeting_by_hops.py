"""Groups of many ranks: they compare their calls in logarithmically many steps, before the first round.

The number of ranks from which they do is lowered here, so that every size from 3 on and both executors are covered.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from torchdist_ref import simulation
from torchdist_ref.backends.ref import plan
from torchdist_ref.groups.world import default_group
from torchdist_ref.testing import fill, run
from torchdist_ref.transports import link as links

WORLDS = (3, 4, 7)
EXECUTORS = ("fast", "reference")


@pytest.fixture(autouse=True)
def _few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MOST_MEETING_WITHIN_A_HOST", 2)
    monkeypatch.setattr(links, "MOST_MEETING_BETWEEN_HOSTS", 2)


def threads(program: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
    return run(program, world, *arguments)


def processes(program: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
    return run(program, world, *arguments, ranks="processes")


def simulated(program: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
    return simulation.run(program, world, *arguments, seed=world).values


def on_hosts(program: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
    network = simulation.Network(1e-5, 1e-9, hosts=tuple(rank // 2 for rank in range(world)))
    return simulation.run(program, world, *arguments, seed=world, network=network).values


WAYS = {"threads": threads, "processes": processes, "simulated": simulated, "on hosts": on_hosts}


# Each rank needs those of all ranks, in each turn, world and way: computed once, they take a third of the time.


@functools.cache
def data(rank: int, count: int) -> torch.Tensor:
    return fill(rank, (count,))


@functools.cache
def total(turn: int, count: int, world: int) -> torch.Tensor:
    """Return the sum of all ranks' data in a turn. It is exact: the data are small integers."""
    return torch.stack([data(rank + turn, count) for rank in range(world)]).sum(0)


@functools.cache
def everyone(turn: int, count: int, world: int) -> torch.Tensor:
    return torch.cat([data(rank * turn, count) for rank in range(world)])


def collectives(rank: int) -> None:
    """Several of each kind in a row, so that both parities of a call are used again and again."""
    world = dist.get_world_size()
    for turn in range(3):
        for count in (1, 1000, 70_001):
            tensor = data(rank + turn, count).clone()
            dist.all_reduce(tensor)
            assert torch.equal(tensor, total(turn, count, world)), f"all_reduce of {count}"
            gathered = torch.zeros(world * count)
            dist.all_gather_into_tensor(gathered, data(rank * turn, count).clone())
            assert torch.equal(gathered, everyone(turn, count, world))
            root = (turn + 1) % world
            tensor = data(rank, count).clone()
            dist.broadcast(tensor, root)
            assert torch.equal(tensor, data(root, count))
            dist.barrier()
    sizes = [(rank + 2 * target) % 4 for target in range(world)]
    arriving = [(source + 2 * rank) % 4 for source in range(world)]
    received = torch.zeros(sum(arriving))
    sent = torch.cat([fill(rank * world + t, (n,)) for t, n in enumerate(sizes)])
    dist.all_to_all_single(received, sent, arriving, sizes)
    assert torch.equal(received, torch.cat([fill(s * world + rank, (n,)) for s, n in enumerate(arriving)]))
    works = [dist.all_reduce(fill(rank, (7,)), async_op=True) for _ in range(4)]
    for work in works:
        work.wait()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_collectives_have_their_values(executor: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plan.EXECUTOR_VARIABLE, executor)
    for world in WORLDS if way != "processes" else (5,):
        WAYS[way](collectives, world)


def mismatched(rank: int, odd: int) -> tuple[str, list[float]]:
    dist.all_reduce(torch.ones(2))
    untouched = torch.full((3,), float(rank))
    with pytest.raises(dist.MismatchError) as caught:
        dist.all_reduce(untouched, dist.ReduceOp.MAX if rank == odd else dist.ReduceOp.SUM)
    assert untouched.tolist() == [float(rank)] * 3
    after = torch.tensor([float(rank * rank)])
    dist.all_reduce(after)
    return str(caught.value), after.tolist()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_all_ranks_see_one_difference_and_go_on(executor: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the rank that differs signals a given one only by way of others."""
    monkeypatch.setenv(plan.EXECUTOR_VARIABLE, executor)
    for world, odd in [(3, 0), (5, 3), (8, 7), (9, 4)] if way != "processes" else [(5, 2)]:
        for rank, (text, after) in enumerate(WAYS[way](mismatched, world, odd)):
            assert f"on rank {rank}" in text and "Nothing was written" in text
            assert re.findall(r"rank (\d+): all_reduce\(reduction=max\)", text) == [str(odd)], text
            assert after == [float(sum(r * r for r in range(world)))]


def test_a_rank_that_makes_no_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(rank: int) -> str:
        if rank == 3:
            return ""
        with pytest.raises(dist.DistBackendError) as caught:
            dist.all_reduce(torch.ones(4))
        return str(caught.value)

    texts = simulated(program, 5)
    assert all("rank 3" in text for rank, text in enumerate(texts) if rank != 3)


def test_the_first_call_of_many_ranks_posts_logarithmically_many_semaphores() -> None:
    """Count the semaphores that the first call of a rank uses: steps of the comparison, and of the algorithm."""
    world = 96

    def program(rank: int) -> int:
        tensor = torch.full((1,), float(rank * rank))
        dist.all_reduce(tensor)
        assert tensor.item() == sum(r * r for r in range(world))
        link = default_group().backend.link
        return len(link.ready_from) + len(link.released_by)

    counts = simulated(program, world)
    assert max(counts) <= 4 * 7
