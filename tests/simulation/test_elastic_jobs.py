"""Elastic jobs on simulated hosts: ends of hosts and workers, successions, partitions, spares, and what is refused."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from torchdist_ref.errors import ArgumentError, ArgumentTypeError
from torchdist_ref.simulation import (
    Cut,
    Delay,
    EndHost,
    EndStore,
    Kill,
    Network,
    RankError,
    RankTimeoutError,
    SimulatedJob,
    run_job,
)
from torchdist_ref.testing import fill

STEPS = 4
NETWORK = Network(alpha=1e-3)


def steps(rank: int, saved: list[int], seconds: float = 1.0) -> tuple[int, int]:
    """Make steps of some seconds, of which rank 0 saves the number of workers."""
    for step in range(len(saved), STEPS):
        time.sleep(seconds)
        total = fill(rank + step, (5,), torch.int64)
        expected = [fill(each + step, (5,), torch.int64) for each in range(dist.get_world_size())]
        dist.all_reduce(total)
        assert torch.equal(total, torch.stack(expected).sum(0))
        if rank == 0:
            saved.append(dist.get_world_size())
        dist.barrier()
    return rank, len(saved)


def job(
    *faults: Any, hosts: int = 3, min_hosts: int = 2, saved: list[int] | None = None, **options: Any
) -> SimulatedJob:
    given = {"network": NETWORK, "timeout": 2000.0} | options
    return run_job(steps, hosts, [] if saved is None else saved, min_hosts=min_hosts, faults=faults, **given)


def test_a_job_without_faults_starts_once_and_tells_its_history() -> None:
    saved: list[int] = []
    found = job(saved=saved, workers=2)
    assert found.values == [(rank, STEPS) for rank in range(6)] and saved == [6] * STEPS
    [attempt] = found.attempts
    assert (attempt.world_size, attempt.hosts, attempt.restarts) == (6, (0, 1, 2), 0)
    assert found.codes == (0, 0, 0) and found.log == () and str(found) == ""
    assert STEPS < found.seconds < STEPS + 0.5
    again = job(workers=2)
    assert (again.digest, again.operations, again.seconds) == (found.digest, found.operations, found.seconds)
    other = job(workers=2, seed=3)
    assert other.values == found.values and other.digest != found.digest


@pytest.mark.parametrize("host", [0, 1, 2])
def test_the_end_of_a_host_restarts_the_workers_of_the_others(host: int) -> None:
    """Host 0 coordinates the job and serves its stores; another one takes its place."""
    saved: list[int] = []
    found = job(EndHost(host=host, at=2.5), saved=saved)
    left = tuple(each for each in range(3) if each != host)
    assert saved == [3, 3, 2, 2] and found.values == [(0, STEPS), (1, STEPS)]
    assert [attempt.hosts for attempt in found.attempts] == [(0, 1, 2), left]
    assert found.codes == tuple(None if each == host else 0 for each in range(3))
    # A silent agent is lost after a second, or its coordinator is.
    assert 2.5 < found.attempts[1].began < 4.0 and found.attempts[1].restarts == 0
    assert (2.5, host, "the host ends") in found.log
    assert any("host-1 coordinates the job now" in text for _, _, text in found.log) == (host == 0)


@pytest.mark.parametrize("host", [0, 1, 2])
def test_a_host_may_end_at_any_operation_of_its_agent(host: int) -> None:
    """Once the end of a coordinator between two requests of an agent that joined it ended that agent too.

    Only a job whose first host ends before the first attempt has no coordinator, and is given up by name.
    """
    whole = run_job(steps, 3, [], 0.1, min_hosts=2, network=NETWORK)
    continued = []
    for operation in range(1, whole.operations[host] + 1, 3):
        saved: list[int] = []
        fault = EndHost(host=host, operation=operation)
        try:
            found = run_job(steps, 3, saved, 0.1, min_hosts=2, network=NETWORK, faults=[fault], timeout=900.0)
        except RankError as error:
            assert host == 0 and not saved and not continued, operation
            assert "no agent answers at 10.0.0.1:29400" in str(error) and "gave up after 600 s" in str(error)
            continue
        continued.append(operation)
        # It may end when all is saved.
        assert len(saved) == STEPS and saved[-1] in (3, found.attempts[-1].world_size), operation
        assert len(found.values) == found.attempts[-1].world_size, operation
        assert [code for each, code in enumerate(found.codes) if each != host] == [0, 0], operation
    assert len(continued) >= 2


def test_a_killed_worker_restarts_all_within_the_limit() -> None:
    saved: list[int] = []
    found = job(Kill(rank=3, at=1.5), min_hosts=3, workers=2, max_restarts=1, saved=saved)
    assert saved == [6] * STEPS and found.codes == (0, 0, 0)
    assert [attempt.restarts for attempt in found.attempts] == [0, 1]
    assert any("rank 3 on host-1" in text and "killed by SIGKILL" in text for _, _, text in found.log)
    with pytest.raises(RankError, match=r"rank 3 on host-1 .* was killed by SIGKILL") as caught:
        job(Kill(rank=3, at=1.5), min_hosts=3, workers=2)
    assert caught.value.rank == 3


def test_an_exception_of_a_worker_is_the_cause_of_the_end() -> None:
    made: list[int] = []

    def program(rank: int) -> int:
        if rank == 1 and len(made) < 2:
            made.append(rank)
            raise KeyError("no such sample")
        dist.barrier()
        return rank

    assert run_job(program, 2, max_restarts=2).values == [0, 1]
    made.clear()
    with pytest.raises(RankError, match=r"rank 1 on host-1 .* exited with code 1: KeyError: 'no such") as caught:
        run_job(program, 2, max_restarts=1)
    assert caught.value.rank == 1 and isinstance(caught.value.__cause__, KeyError)


def test_too_few_hosts_end_the_job() -> None:
    with pytest.raises(RankError, match=r"2 of 3 hosts \(--nnodes\) have joined .*lost: host-1.* within 600 s"):
        job(EndHost(host=1, at=0.5), min_hosts=3)
    with pytest.raises(RankError, match="all hosts have ended"):
        job(EndHost(host=0, at=0.5), hosts=1, min_hosts=1)


def test_a_host_that_is_cut_off_joins_again() -> None:
    saved: list[int] = []
    found = job(Cut(some=(0,), at=1.5, seconds=2.0), saved=saved)
    assert [sorted(attempt.hosts) for attempt in found.attempts] == [[0, 1, 2], [1, 2], [0, 1, 2]]
    assert found.codes == (0, 0, 0) and saved[0] == 3 and 2 in saved


def test_the_smaller_part_of_a_divided_job_gives_up() -> None:
    """Two parts that both went on would train twice."""
    found = job(Cut(some=(0,), at=1.5))
    assert found.codes == (2, 0, 0) and [attempt.hosts for attempt in found.attempts] == [(0, 1, 2), (1, 2)]
    assert any("2 of 3 hosts of the job are out of reach" in text for _, host, text in found.log if host == 0)


def test_a_spare_takes_the_place_of_a_host_that_ends() -> None:
    found = job(EndHost(host=1, at=2.5), max_hosts=2)
    assert [attempt.hosts for attempt in found.attempts] == [(0, 1), (0, 2)] and found.codes == (0, None, 0)
    assert any("host-2 is a spare" in text for _, _, text in found.log)


def test_a_job_that_does_not_end_is_named() -> None:
    with pytest.raises(RankTimeoutError, match="agents of host-0, host-1 did not end within 3 s of virtual time"):
        job(hosts=2, timeout=3.0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"hosts": 0}, "hosts"),
        ({"workers": 1.5}, "workers"),
        ({"min_hosts": 4}, "min_hosts"),
        ({"max_hosts": 0}, "min_hosts"),
        ({"max_hosts": 9}, "max_hosts"),
        ({"max_restarts": -1}, "max_restarts"),
        ({"faults": [EndStore(at=1.0)]}, "faults"),
        ({"faults": [Delay(some=(0,), at=1.0)]}, "faults"),
        ({"faults": [EndHost(host=3, at=1.0)]}, "host"),
        ({"faults": [Kill(rank=3, at=1.0)]}, "rank"),
        ({"faults": [Kill(rank=0, operation=5)]}, "at"),
        ({"faults": [EndHost(host=0)]}, "at"),
        ({"timeout": -1.0}, "timeout"),
        ({"seed": "x"}, "seed"),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, Any], expected: str) -> None:
    given: dict[str, Any] = {"hosts": 3} | options
    with pytest.raises((ArgumentError, ArgumentTypeError), match=f"'{expected}'"):
        run_job(steps, given.pop("hosts"), [], **given)
