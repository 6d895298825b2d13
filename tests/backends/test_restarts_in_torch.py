"""torch's own initialization on `ref` after a failed attempt, on the store that torchrun keeps for all attempts."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as c10d
import torch.testing._internal.distributed.fake_pg  # noqa: F401 - it registers "fake"

from tests.stores.store_helpers import server, torch_tcp
from torchdist_ref.errors import RankDiedError
from torchdist_ref.membership import meeting
from torchdist_ref.membership.trust import KeyAgreement
from torchdist_ref.membership.watch import MemberWatch
from torchdist_ref.testing import RankError, fill, run

WORLD, TIMEOUT = 2, timedelta(seconds=20)


def join(rank: int, port: int, backend: str = "ref") -> c10d.Store:
    store = torch_tcp("127.0.0.1", port, is_master=False)
    c10d.init_process_group(backend, store=store, rank=rank, world_size=WORLD, timeout=TIMEOUT)
    return store


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_a_call(rank: int, port: int) -> None:
    join(rank, port)
    c10d.new_group([0, 1], backend="ref")
    if rank == 1:
        die()
    with suppress(RankDiedError):
        c10d.all_reduce(torch.ones(2))
    die()


def die_while_they_meet(rank: int, port: int) -> None:
    """Rank 1 dies before it has a key, and rank 0 learns of it: the round stays open."""
    if rank == 1:
        KeyAgreement.complete = lambda *_: die()  # type: ignore[assignment, method-assign]
    with suppress(RankDiedError):
        join(rank, port)
    die()


def die_in_a_group_of_another_world(rank: int, port: int) -> None:
    join(rank, port, "fake")
    with suppress(RankDiedError):
        group = c10d.new_group([0, 1], backend="ref")
        if rank == 1:
            die()
        c10d.all_reduce(torch.ones(2), group=group)
    die()


def the_next_attempt(rank: int, port: int, world: str) -> tuple[list[float], list[float]]:
    """Rank 0 comes, each time, when rank 1 has looked at what the attempt before has left."""
    store = torch_tcp("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    if rank == 0:
        store.get("rank 1 looks for a world")
    else:
        sleep, failure = meeting.sleep, MemberWatch.failure
        meeting.sleep = lambda seconds: (store.set("rank 1 looks for a world", ""), sleep(seconds))[1]
        if world == "fake":
            # Its ranks wait for nobody.
            store.set("rank 1 looks for a world", "")
    join(rank, port, world)
    if rank == 0:
        store.get("rank 1 waits for a group")
    else:
        meeting.sleep = lambda seconds: (store.set("rank 1 waits for a group", ""), sleep(seconds))[1]
        MemberWatch.failure = lambda *given: (store.set("rank 1 waits for a group", ""), failure(*given))[1]  # type: ignore[method-assign]
    groups = [c10d.new_group([1, 0], backend="ref"), c10d.new_group([0, 1], backend="ref")]
    results = [fill(rank, (5,)), fill(rank + 2, (3,))]
    for group, tensor in zip(groups, results, strict=True):
        c10d.all_reduce(tensor, group=group)
    if world == "ref":
        c10d.all_reduce(results[0])
    c10d.destroy_process_group()
    return results[0].tolist(), results[1].tolist()


@pytest.mark.parametrize("attempt", [die_in_a_call, die_while_they_meet, die_in_a_group_of_another_world])
def test_ranks_meet_those_of_their_own_attempt(attempt: Callable[[int, int], None]) -> None:
    """Once rank 1 read the keys of the former rank 0, and failed with RankDiedError or AuthenticationError."""
    world = "fake" if attempt is die_in_a_group_of_another_world else "ref"
    sums = fill(0, (5,)) + fill(1, (5,)), fill(2, (3,)) + fill(3, (3,))
    expected = ((1 if world == "fake" else WORLD) * sums[0]).tolist(), sums[1].tolist()
    with server(torch_tcp) as (port, _):
        with pytest.raises(RankError, match="was killed by SIGKILL"):
            run(attempt, WORLD, port, init=False, ranks="processes", timeout=60)
        found = run(the_next_attempt, WORLD, port, world, init=False, ranks="processes", timeout=60)
    assert found == [expected] * WORLD
