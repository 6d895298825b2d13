"""Deaths of simulated ranks at each operation of each call; `nox -s nightly` tries them on more worlds and orders."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

import torchdist_ref as dist
from tests.simulation.deaths import CALLS, COLLECTIVES, SIZES, deaths, hosts_of, named_wrongly
from torchdist_ref.membership.events import ABORTED, DIED, Ending, Failure

COLLECTIVE_NAMES = [each.__name__ for each in COLLECTIVES]


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    """A wait of half an hour is logged after a minute, also in virtual time."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def check(name: str, size: int, hosts: tuple[int, ...], seed: int) -> None:
    found = deaths(name, size, hosts, seed)
    assert not found.bad, "\n".join([f"{len(found.bad)} of {found.deaths} deaths:", *found.bad[:5]])
    # Each rank dies before each operation and after the last.
    assert found.deaths > 2 * size
    assert found.unknown == 0 or name == "init_process_group"
    assert found.failed + found.completed + found.unknown * (size - 1) == found.deaths * (size - 1)
    if name != "destroy_process_group":
        assert found.failed > 0


@pytest.mark.parametrize("hosts", ["one", "each"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [name for name in CALLS if name not in COLLECTIVE_NAMES])
def test_a_death_where_ranks_meet_is_named_by_every_survivor(name: str, size: int, hosts: str) -> None:
    """Each world takes a second: it is run once for each operation of each rank."""
    one, each = hosts_of(size)
    check(name, size, one if hosts == "one" else each, seed=size % 3)


@pytest.mark.parametrize(("number", "name"), list(enumerate(COLLECTIVE_NAMES)))
def test_a_death_in_a_collective_is_named_by_every_survivor(number: int, name: str) -> None:
    """CI has one world of each call, so that all sizes, hosts and orders occur. Each takes a second or two."""
    size = SIZES[number % len(SIZES)]
    check(name, size, [*hosts_of(size)][number // len(SIZES) % 2], seed=number % 3)


def test_the_death_of_rank_0_while_many_ranks_meet_is_named_by_every_survivor() -> None:
    """Of more than 16 ranks, rank 0 alone reads the endpoint of each, and publishes all as one value."""
    found = deaths("init_process_group", 17, (0,) * 17, seed=0, victims=[0])
    assert not found.bad, "\n".join([f"{len(found.bad)} of {found.deaths} deaths:", *found.bad[:5]])
    assert found.deaths > 6 and found.failed > 0 and found.unknown < found.deaths


def test_a_wait_whose_alarm_an_earlier_one_has_used_up_sees_the_death() -> None:
    """A survivor of three saw it when another one left, after 10 s."""
    check("shrink_group", 3, (0, 0, 0), seed=0)


def test_the_check_sees_a_wrong_culprit() -> None:
    def died(rank: int, text: str) -> dist.RankDiedError:
        return dist.RankDiedError(text).reporting(Failure(DIED, (rank,), (Ending("killed", 1000 + rank, "h"),)))

    right = died(1, "rank 1 died (pid 1001 on simulated host 0 was killed by SIGKILL)")
    assert named_wrongly(right, 1) == ""
    assert "is of ranks (1,)" in named_wrongly(right, 2)
    assert "does not name it" in named_wrongly(died(1, "rank 1 died (pid 71 on node)"), 1)
    assert "it raised" in named_wrongly(dist.RankStalledError("rank 1 did not arrive").naming([1]), 1)
    aborted = dist.GroupAbortedError(
        "rank 3 aborted: RankDiedError in recv: rank 1 died (pid 1001 on simulated host 0)"
    )
    aborted.reporting(Failure(ABORTED, (3,), error="RankDiedError"))
    assert named_wrongly(aborted, 1) == "" and "it raised" in named_wrongly(aborted, 2)
