"""Faults of a plan: what follows a rank's death, and stops and cuts."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from tests.simulation.deaths import on_rank
from torchdist_ref import simulation
from torchdist_ref.simulation import Cut, Kill, Network, Slow, Stop
from torchdist_ref.testing import fill

CULPRIT = 1
ENDED = (dist.RankDiedError, dist.GroupAbortedError)


def continued(rank: int) -> tuple[int, float]:
    """Train on the ranks that are left, which get other numbers."""
    weight, steps = torch.tensor([4.0]), 0
    while steps < 10:
        gradient = weight * (1 + rank)
        try:
            dist.all_reduce(gradient)
        except dist.RankDiedError as error:
            dist.shrink_group(list(error.ranks), shrink_flags=1)
            # One survivor may have completed a step that another one has not.
            dist.broadcast(state := torch.tensor([weight.item(), float(steps)]), 0)
            weight, steps = state[:1], int(state[1])
            continue
        weight -= 0.01 * gradient
        steps += 1
    return dist.get_world_size(), dist.get_rank()


def test_the_survivors_of_a_death_continue_under_new_numbers() -> None:
    result = simulation.run(continued, 4, faults=[Kill(rank=1, operation=40)])
    assert result.faults and result.values == [(3, 0), None, (3, 1), (3, 2)]


def test_the_news_of_a_death_arrives_while_others_are_busy() -> None:
    def program(rank: int) -> float:
        dist.barrier()
        if rank == 0:
            with pytest.raises(dist.RankDiedError):
                dist.recv(torch.zeros(2), CULPRIT)
            return time.monotonic()
        time.sleep(100)
        return time.monotonic()

    values = simulation.run(program, 3, faults=[Kill(rank=CULPRIT, at=1.0)]).values
    assert 1.0 <= values[0] < 1.1 and values[2] == 100.0


def test_killed_ranks_leave_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for operation in (4, 7, 10, 30):
        plan = [Kill(rank=CULPRIT, operation=operation)]
        with suppress(simulation.RankError):
            simulation.run(on_rank, 3, "all_reduce", 3, init=False, faults=plan)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_death_ends_no_wait_of_a_program_in_the_store() -> None:
    """A wait that looks for failures ended early at the news of a death; so did that of a program, which does not."""

    def program(rank: int) -> float:
        store = simulation.simulated_store()
        if rank == 0:
            store.wait(["late"], timedelta(seconds=100))
            return time.monotonic()
        time.sleep(50)
        if rank == 2:
            store.set("late", "")
        return time.monotonic()

    plan = [Kill(rank=CULPRIT, at=5.0)]
    assert simulation.run(program, 3, init=False, faults=plan).values == [50.0, None, 50.0]


def test_a_stopped_rank_continues() -> None:
    def program(rank: int) -> tuple[float, float]:
        dist.all_reduce(tensor := fill(rank, (3,)))
        return float(tensor[0]), time.monotonic()

    result = simulation.run(program, 3, faults=[Stop(rank=2, operation=3, seconds=40.0)])
    expected = float(sum(fill(rank, (3,))[0] for rank in range(3)))
    assert result.values == [(expected, 40.0)] * 3
    assert [each.kind for each in result.timeline if each.rank == 2 and each.kind != "sent"] == [
        "stopped",
        "continues",
        "returned",
    ]


def test_a_network_that_heals_delivers_what_was_sent() -> None:
    def program(rank: int) -> float:
        dist.barrier()
        time.sleep(1.0)
        dist.all_reduce(fill(rank, (3,)))
        return time.monotonic()

    network = Network(hosts=(0, 1, 1))
    result = simulation.run(program, 3, network=network, faults=[Cut(some=(0,), at=0.5, seconds=20.0)])
    assert all(20.5 <= now < 21.0 for now in result.values)


def test_a_cut_that_does_not_heal_is_a_stalled_rank() -> None:
    def program(rank: int) -> str:
        dist.barrier()
        time.sleep(1.0)
        with pytest.raises(ENDED + (dist.RankStalledError,)) as raised:
            dist.all_reduce(fill(rank, (3,)))
        return str(raised.value)

    result = simulation.run(program, 2, network=Network(hosts=(0, 1)), faults=[Cut(some=(0,), at=0.5)])
    assert all("did not arrive within 1800 s" in text for text in result.values)


def test_messages_of_a_delayed_rank_take_longer_until_it_heals() -> None:
    def program(rank: int) -> list[float]:
        times = []
        for start in (1.0, 20.0, 60.0):
            time.sleep(start - time.monotonic())
            if rank == 0:
                dist.recv(tensor := torch.zeros(3), 2)
                assert torch.equal(tensor, fill(2, (3,)))
            if rank == 2:
                dist.send(fill(2, (3,)), 0)
            times.append(time.monotonic() - start)
        return times

    plan = [simulation.Delay(some=(2,), at=10.0, seconds=30.0, longer=4.0)]
    before, delayed, healed = simulation.run(program, 3, network=Network(hosts=(0, 0, 1)), faults=plan).values[0]
    assert before == pytest.approx(healed) and before < 1e-3
    # The message and the ring of its doorbell may each be late, one after the other.
    assert 4.0 <= delayed < 8.1


def test_groups_outlive_their_store_and_meetings_in_it_fail() -> None:
    def program(rank: int) -> tuple[list[float], str]:
        time.sleep(5)
        dist.all_reduce(tensor := fill(rank, (3,)))
        with pytest.raises((dist.DistNetworkError, dist.DistBackendError)) as raised:
            dist.new_group([0, 1, 2])
        assert time.monotonic() < 30
        # One that leaves is a reason for the others, too.
        time.sleep(30)
        return tensor.tolist(), str(raised.value)

    expected = sum(fill(rank, (3,)) for rank in range(3)).tolist()
    for network in (Network(hosts=(0, 0, 0)), Network(hosts=(0, 1, 2))):
        for seed in range(3):
            plan = [simulation.EndStore(at=2.0)]
            values = simulation.run(program, 3, seed=seed, network=network, faults=plan).values
            for tensor, text in values:
                assert tensor == expected and "store of the simulation has ended" in text, text


def test_a_wait_in_the_store_ends_with_the_store() -> None:
    def program(rank: int) -> float:
        with pytest.raises(dist.DistNetworkError, match="its server is gone"):
            simulation.simulated_store().wait(["never"], timedelta(hours=1))
        return time.monotonic()

    values = simulation.run(program, 2, init=False, faults=[simulation.EndStore(at=3.0)]).values
    assert values == [3.0, 3.0]


def test_a_slow_rank_computes_longer() -> None:
    def program(rank: int) -> float:
        dist.barrier()
        began = time.monotonic()
        sum(number * number for number in range(200_000))
        dist.barrier()
        return time.monotonic() - began

    def seconds(*faults: simulation.Fault) -> float:
        values: list[Any] = simulation.run(program, 2, compute="measured", faults=faults).values
        return max(values)

    assert seconds(Slow(rank=1, at=0.0, factor=50.0)) > 5 * seconds()


def test_a_wait_shorter_than_a_microsecond_ends() -> None:
    """A time-out that is 0.1 µs away was no time at all, so that virtual time stood still before it."""

    def program(rank: int) -> str:
        try:
            store, limit = simulation.simulated_store(), timedelta(seconds=10)
            dist.init_process_group("ref", store=store, rank=rank, world_size=2, timeout=limit)
        except dist.RankStalledError as error:
            return str(error)
        return ""

    plan = [Kill(rank=CULPRIT, operation=1)]
    result = simulation.run(program, 2, init=False, faults=plan, network=Network(hosts=(0, 0)))
    assert "did not join in time" in result.values[0]
