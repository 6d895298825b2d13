"""A rank that starts another program in its process (`exec`): the process lives on, and the others name it at once."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest
import torch

import torchdist_ref as dist
from tests.backends.failing_ranks import CULPRIT, SURVIVORS, WORLD, Raised, errors_of_survivors
from tests.outcomes import NEVER
from torchdist_ref.membership.group_events import GroupEvents
from torchdist_ref.membership.meeting import Presence
from torchdist_ref.processes.identity import process_identity
from torchdist_ref.stores import FileStore, PrefixStore

# A loose bound: a test on a busy machine must not be a timer. Without the witness the time-out ends the calls.
SOON, TIMEOUT = 2.0, 5
REPLACED = "lives, but has started another program (exec)"


def replace_program() -> None:
    """Call `exec` with a program that ends only when it is killed."""
    os.execv("/bin/sh", ["sh", "-c", "kill -STOP $$"])


def all_reduce() -> None:
    dist.all_reduce(torch.ones(3))


CALLS = {
    "all_reduce": all_reduce,
    "recv": lambda: dist.recv(torch.ones(3), src=CULPRIT),
    "new_group": lambda: dist.new_group([0, 1, 2]),
}


def errors(folder: Path, name: str, backend: str = "ref", hosts: str = "") -> dict[int, Raised]:
    """Return the errors of the survivors of a rank that calls `exec`."""

    def program(rank: int) -> None:
        if hosts:
            os.environ["TORCHDIST_REF_HOST_ID"] = hosts[rank]
        store = FileStore(str(folder / "store"), WORLD)
        dist.init_process_group(backend, store=store, rank=rank, world_size=WORLD, timeout=NEVER)
        dist.barrier()
        if rank == CULPRIT:
            replace_program()
        CALLS[name]()

    return errors_of_survivors(program)


@pytest.mark.parametrize("name", CALLS)
def test_every_survivor_names_the_rank_that_runs_another_program(name: str, tmp_path: Path) -> None:
    found = errors(tmp_path, name)
    for rank in SURVIVORS:
        assert found[rank].kind == "RankDiedError", found[rank].text
        assert "rank 1 died (pid " in found[rank].text and REPLACED in found[rank].text


def test_ranks_of_its_host_and_of_others_name_it(tmp_path: Path) -> None:
    found = errors(tmp_path, "all_reduce", hosts="aab")
    assert REPLACED in found[0].text
    assert "rank 1 died (its connection to " in found[2].text


def forked(program: object) -> int:
    """Fork a process that calls a function and then `exec`, and return its number once it has."""
    started, starts = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            program()  # type: ignore[operator]
            replace_program()
        finally:
            os._exit(1)
    os.close(starts)
    # `exec` closes the other end of the pipe.
    os.read(started, 1)
    os.close(started)
    return pid


def end(pid: int) -> None:
    os.kill(pid, 9)
    os.waitpid(pid, 0)


def test_a_rank_that_runs_another_program_while_the_world_forms_is_named(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"))

    def announce() -> None:
        [(key, value)] = Presence(store, 1, 2).announcement().items()
        store.set(key, value)

    pid = forked(announce)
    with closing(Presence(store, 0, 2)) as presence:
        found = presence.failure([1], "init_process_group")
    end(pid)
    assert f"rank 1 died (pid {pid} on " in str(found) and REPLACED in str(found)


def test_a_member_that_runs_another_program_is_found_after_a_failure_of_the_backend(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"))
    pid = forked(lambda: store.set("identity", process_identity()))
    failures = GroupEvents(PrefixStore("group", store), 0, [0, 4])
    failures.watch({1: store.get("identity").decode()})
    found = failures.find("all_reduce")
    end(pid)
    assert f"all_reduce: rank 1 (global 4) died (pid {pid} on " in str(found) and REPLACED in str(found)
