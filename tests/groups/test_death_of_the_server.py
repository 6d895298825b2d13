"""The rank that serves the store dies or fails while groups are made: the others name who is the cause."""

from __future__ import annotations

import multiprocessing
import os
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from tests.backends.failing_ranks import CULPRIT, SURVIVORS, WORLD, errors_of_survivors
from tests.ports import reserve_port
from torchdist_ref.membership.meeting import Presence
from torchdist_ref.membership.rounds import Attendance, Round
from torchdist_ref.membership.trust import KeyAgreement
from torchdist_ref.stores import PrefixStore

HOSTS = ["AAA", "ABC"]


def initialize(rank: int, port: int, hosts: str) -> None:
    os.environ["TORCHDIST_REF_HOST_ID"] = f"host {hosts[rank]}"
    where, timeout = f"tcp://127.0.0.1:{port}", timedelta(seconds=20)
    dist.init_process_group("ref", init_method=where, rank=rank, world_size=WORLD, timeout=timeout)


def end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("members", [[0, 1, 2], [1]])
@pytest.mark.parametrize("name", ["new_group", "split_group"])
def test_its_death_before_a_group_is_made_is_named(name: str, members: list[int], hosts: str) -> None:
    """Also where it is no member of the new group, and by a rank that is none either."""
    port = reserve_port()
    calls = {"new_group": lambda: dist.new_group(members), "split_group": lambda: dist.split_group(None, [members])}

    def program(number: int) -> None:
        # The culprit is rank 0.
        rank = (number - CULPRIT) % WORLD
        initialize(rank, port, hosts)
        dist.barrier()
        if rank == 0:
            end()
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(torch.ones(3))
        calls[name]()

    for error in errors_of_survivors(program).values():
        assert error.kind == "RankDiedError" and name in error.text and "rank 0 died" in error.text, error.text


@pytest.mark.parametrize("hosts", HOSTS)
def test_its_death_in_the_initialization_is_named(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have read only the round of rank 0, which tells its process."""
    port, gate = reserve_port(), multiprocessing.get_context("fork").Barrier(2)
    enter = Attendance.enter

    def enter_round_of_a_dead_rank_0(self: Attendance, opened: Round) -> None:
        if self.rank != 0:
            gate.wait(20)
            os.kill(opened.pid, signal.SIGKILL)
        enter(self, opened)

    monkeypatch.setattr(Attendance, "enter", enter_round_of_a_dead_rank_0)
    found = errors_of_survivors(lambda number: initialize((number - CULPRIT) % WORLD, port, hosts))
    for number in SURVIVORS:
        text = found[number].text
        assert text.startswith(f"init_process_group on rank {(number - CULPRIT) % WORLD}: "), text
        if hosts == "AAA":
            assert "rank 0 died" in text, text
        else:
            assert "rank 0, or the launcher" in text, text


@pytest.mark.parametrize("ends", ["dies", "fails"])
def test_its_end_before_it_opens_a_round_is_named(ends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the others took the server for that of the last world, and connected again until the time-out."""
    port, all_looked = reserve_port(), multiprocessing.get_context("fork").Barrier(WORLD)
    look = PrefixStore.get_if_present

    def look_at_once(store: PrefixStore, key: Any) -> bytes | None:
        found = look(store, key)
        if key == "round":
            all_looked.wait(20)
        return found

    announce = Presence.announcement

    def end_first(presence: Presence) -> dict[str, str]:
        own = announce(presence)
        if "present/0" in own:
            all_looked.wait(20)
            if ends == "dies":
                end()
            raise MemoryError
        return own

    monkeypatch.setattr(PrefixStore, "get_if_present", look_at_once)
    monkeypatch.setattr(Presence, "announcement", end_first)
    found = errors_of_survivors(lambda number: initialize((number - CULPRIT) % WORLD, port, "AAA"))
    for number, error in found.items():
        assert f"init_process_group on rank {(number - CULPRIT) % WORLD}: TCPStore: the server at " in error.text
        assert "is gone" in error.text and "rank 0, or the launcher" in error.text, error.text


def test_its_failure_in_the_initialization_leaves_time_to_read_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2, of another host, looks seldom; the store with the cause once was gone by then."""
    port = reserve_port()

    def program(rank: int) -> None:
        if rank == CULPRIT:
            monkeypatch.setattr(KeyAgreement, "complete", lambda *_: end())
        if rank == 2:
            monkeypatch.setattr("torchdist_ref.stores.prefix.CHECK_SECONDS", 0.13)
        initialize(rank, port, "AAB")

    for rank, error in errors_of_survivors(program).items():
        assert f"init_process_group on rank {rank}: " in error.text and "rank 1 " in error.text, error.text
