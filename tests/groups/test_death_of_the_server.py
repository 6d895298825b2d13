"""The rank that serves the store dies or fails while groups are made: the others name who is the cause."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from tests.backends.failing_ranks import CULPRIT, WORLD, errors_of_survivors
from tests.outcomes import failing
from tests.ports import reserve_port
from torchdist_ref import simulation
from torchdist_ref.membership.meeting import Presence
from torchdist_ref.membership.trust import KeyAgreement
from torchdist_ref.simulation import Kill, Network, SimulatedRun

FIRST = "10.0.0.1:29500"
WHERE = f"tcp://{FIRST}"
HOSTS = {"AAA": (0, 0, 0), "ABC": (0, 1, 2)}
ENDED = 5.0
"""Virtual time at which rank 0 dies, when all others wait."""


def initialize(rank: int, where: str, timeout: float = 20.0) -> None:
    dist.init_process_group("ref", where, timedelta(seconds=timeout), rank=rank, world_size=WORLD)


def simulated(program: Callable[[int], Any], hosts: str, *faults: Kill, seed: int = 0) -> SimulatedRun:
    """Run a program on simulated ranks, of which rank 0 serves the store over TCP."""
    network = Network(alpha=1e-4, hosts=HOSTS[hosts])
    return simulation.run(program, WORLD, init=False, network=network, faults=faults, seed=seed)


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("members", [[0, 1, 2], [1]])
@pytest.mark.parametrize("name", ["new_group", "split_group"])
def test_its_death_before_a_group_is_made_is_named(name: str, members: list[int], hosts: str) -> None:
    """Also where it is no member of the new group, and by a rank that is none either."""
    calls = {"new_group": lambda: dist.new_group(members), "split_group": lambda: dist.split_group(None, [members])}

    def program(rank: int) -> tuple[str, str] | None:
        initialize(rank, WHERE)
        dist.barrier()
        if rank == 0:
            time.sleep(60)
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(torch.ones(3))
        return failing(calls[name])

    for seed in range(3):
        for kind, text in simulated(program, hosts, Kill(rank=0, at=ENDED), seed=seed).values[1:]:
            assert kind == "RankDiedError" and name in text and "rank 0 died" in text, text


@pytest.mark.parametrize("hosts", HOSTS)
def test_its_death_at_any_moment_of_the_initialization_is_named(hosts: str) -> None:
    """Before the others have its round, they know only the address of the store."""

    def program(rank: int) -> Any:
        began = simulation.simulated_operations()
        try:
            initialize(rank, WHERE)
        except dist.DistError as error:
            return type(error).__name__, str(error), time.monotonic()
        ended = simulation.simulated_operations()
        time.sleep(30)
        return began, ended

    began, ended = simulated(program, hosts).values[0]
    assert ended - began > 8
    failed = 0
    for operation in range(began + 1, ended + 1):
        for found in simulated(program, hosts, Kill(rank=0, operation=operation)).values[1:]:
            if len(found) == 2:
                # The rank has met all others before.
                continue
            kind, text, at = found
            failed += 1
            assert "rank 0 died" in text or "rank 0, or the launcher" in text or "Check that rank 0" in text, (
                kind,
                text,
            )
            # A rank that has reached the store notices at once that it ends.
            assert at < (25.0 if "Check that rank 0" in text else 1.0), text
    assert failed > 10


@pytest.mark.parametrize("ends", ["dies", "fails"])
def test_its_end_before_it_opens_a_round_is_named(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the others took the server for that of the last world, and connected again until the time-out."""
    announce = Presence.announcement

    def end_first(presence: Presence) -> dict[str, str]:
        own = announce(presence)
        if "present/0" in own:
            # All others have looked.
            time.sleep(1.0)
            if ends == "dies":
                time.sleep(60)
            raise MemoryError
        return own

    def program(rank: int) -> tuple[str, str]:
        try:
            return failing(lambda: initialize(rank, WHERE, 3600.0))
        except MemoryError:
            return "MemoryError", ""

    monkeypatch.setattr(Presence, "announcement", end_first)
    faults = [Kill(rank=0, at=ENDED)] if ends == "dies" else []
    for rank, (_, text) in enumerate(simulated(program, "AAA", *faults).values[1:], 1):
        assert f"init_process_group on rank {rank}: TCPStore: the server at " in text, text
        assert "is gone" in text and "rank 0, or the launcher" in text, text


def test_its_failure_in_the_initialization_leaves_time_to_read_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2, of another host, looks seldom; the store with the cause once was gone by then."""
    where = f"tcp://127.0.0.1:{reserve_port()}"

    def program(rank: int) -> None:
        os.environ["TORCHDIST_REF_HOST_ID"] = f"host {'AAB'[rank]}"
        if rank == CULPRIT:
            monkeypatch.setattr(KeyAgreement, "complete", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        if rank == 2:
            monkeypatch.setattr("torchdist_ref.stores.prefix.CHECK_SECONDS", 0.13)
        initialize(rank, where)

    for rank, error in errors_of_survivors(program).items():
        assert f"init_process_group on rank {rank}: " in error.text and "rank 1 " in error.text, error.text
