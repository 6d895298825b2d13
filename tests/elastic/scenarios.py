"""What can happen to a job on three hosts; each scenario begins and ends with a worker on each of them.

The tests run each scenario once, `tests.soak.hosts` a hundred times each.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.elastic.agents import Agents, Start, is_running
from torchdist_ref.elastic.session import SILENCE_SECONDS
from torchdist_ref.testing.namespaces import Host

PORT = 29400
ALL = ("host-0", "host-1", "host-2")


def check_ranks(starts: Sequence[Start], sizes: Sequence[int], restarts: int) -> None:
    """Check the numbers of all workers of an attempt on hosts with so many workers each."""
    world = sum(sizes)
    expected = [(group, local) for group, size in enumerate(sizes) for local in range(size)]
    assert [start.rank for start in starts] == list(range(world))
    assert [(start.group_rank, start.local_rank) for start in starts] == expected
    assert {(start.world_size, start.group_world_size, start.restarts) for start in starts} == {
        (world, len(sizes), restarts)
    }
    assert [start.role_rank for start in starts] == list(range(world))
    assert len({(start.address, start.port, start.token) for start in starts}) == 1


class ThreeHosts:
    """Job on three hosts that goes on with two.

    Attributes:
        agents: Agents.
        hosts: Hosts.
        started: Workers of the present attempt, in rank order.
        restarts: Expected restart count.
        seconds: Times from an event to the start of all workers.
    """

    def __init__(self, agents: Agents, hosts: Sequence[Host]) -> None:
        self.agents, self.hosts, self.restarts = agents, hosts, 0
        self.seconds: list[float] = []
        for number in range(3):
            agents.start(number)
        self.started = agents.starts(3)
        check_ranks(self.started, (1, 1, 1), 0)

    @property
    def leader(self) -> str:
        """Host of the coordinator, which has the first rank."""
        return self.started[0].name

    @property
    def follower(self) -> str:
        """Host with the last rank."""
        return self.started[-1].name

    def worker(self, name: str) -> int:
        """Return the process of the worker of a host."""
        return next(start.pid for start in self.started if start.name == name)

    @contextmanager
    def back_at_work(self, names: Sequence[str]) -> Iterator[None]:
        """Wait after the block for the next attempt on these hosts; check it, and that no other worker is left."""
        before, since = self.started, time.monotonic()
        yield
        self.started = self.agents.starts(len(names))
        self.seconds.append(max(start.time for start in self.started) - since)
        check_ranks(self.started, (1,) * len(names), self.restarts)
        assert sorted(start.name for start in self.started) == sorted(names)
        assert not any(is_running(start.pid) for start in before if start.name in names)

    def comes_back(self, name: str) -> None:
        """Start an agent again, and wait until it takes part."""
        others = [start.name for start in self.started]
        self.agents.start(int(name[-1]))
        self.agents.log(f"{name} joins")
        with self.back_at_work([*others, name]):
            pass


def others(name: str) -> list[str]:
    return [each for each in ALL if each != name]


def set_link(host: Host, state: str) -> None:
    subprocess.run(["ip", "link", "set", host.interface, state], check=True, preexec_fn=host.enter)


def worker_killed(job: ThreeHosts) -> None:
    job.restarts += 1
    with job.back_at_work(ALL):
        os.kill(job.worker(job.follower), signal.SIGKILL)


def _ends(job: ThreeHosts, name: str, signum: int) -> None:
    worker = job.worker(name)
    with job.back_at_work(others(name)):
        job.agents.kill(name, signum)
    # The kernel kills it with its agent.
    assert not is_running(worker)
    job.agents.processes[name].wait()
    job.comes_back(name)


def agent_killed_and_joins(job: ThreeHosts) -> None:
    _ends(job, job.follower, signal.SIGKILL)


def agent_leaves_and_joins(job: ThreeHosts) -> None:
    _ends(job, job.follower, signal.SIGTERM)


def store_host_killed_and_joins(job: ThreeHosts) -> None:
    _ends(job, job.leader, signal.SIGKILL)


def store_host_leaves_and_joins(job: ThreeHosts) -> None:
    _ends(job, job.leader, signal.SIGTERM)


def _is_cut_off(job: ThreeHosts, name: str) -> None:
    worker, host = job.worker(name), job.hosts[int(name[-1])]
    try:
        with job.back_at_work(others(name)):
            set_link(host, "down")
        # The host that is cut off stops its own worker.
        job.agents.wait_until(lambda: not is_running(worker))
    finally:
        set_link(host, "up")
    # The time that the network needs to find the host again is not the job's.
    job.agents.log(f"{name} joins")
    with job.back_at_work(ALL):
        pass


def host_cut_off_and_back(job: ThreeHosts) -> None:
    _is_cut_off(job, job.follower)


def store_host_cut_off_and_back(job: ThreeHosts) -> None:
    _is_cut_off(job, job.leader)


SCENARIOS: dict[str, Callable[[ThreeHosts], None]] = {
    scenario.__name__: scenario
    for scenario in (
        worker_killed,
        agent_killed_and_joins,
        agent_leaves_and_joins,
        host_cut_off_and_back,
        store_host_killed_and_joins,
        store_host_leaves_and_joins,
        store_host_cut_off_and_back,
    )
}


@contextmanager
def three_hosts(folder: Path, hosts: Sequence[Host], silence: float = SILENCE_SECONDS) -> Iterator[ThreeHosts]:
    """Start a job on three hosts, each of which may be silent for some seconds."""
    rules = {"min": 2, "max": 3, "restarts": 1000, "last_call": 20.0}
    with Agents(folder, hosts, port=PORT, silence=silence, **rules) as agents:
        yield ThreeHosts(agents, hosts)
