"""torch's own groups on `ref` at the end of a program: the others learn at once why, and no thread is left running."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d

import torchdist_ref as dist
from tests.backends.failing_ranks import CULPRIT, SURVIVORS, WORLD, errors_of_survivors
from torchdist_ref.processes import program_end
from torchdist_ref.testing import fill

# Threads of a group that run at the end may abort the process; once they did in three of four runs.
PROGRAM = """
import atexit, os, sys, threading
from datetime import timedelta
def report():
    print([thread.name for thread in threading.enumerate() if "world" in thread.name], flush=True)
    os._exit(5)
atexit.register(report)
import torch, torch.distributed as c10d
c10d.init_process_group("ref", init_method="file://" + sys.argv[1], rank=0, world_size=1, timeout=timedelta(seconds=9))
works = [c10d.all_reduce(torch.ones(3), async_op=True) for _ in range(8)]
futures = [work.get_future().then(lambda future: future.value()) for work in works]
assert [thread for thread in threading.enumerate() if "world" in thread.name]
sys.exit(3)
"""


def join(rank: int, path: str) -> None:
    timeout = timedelta(seconds=20)
    c10d.init_process_group("ref", init_method=f"file://{path}", rank=rank, world_size=WORLD, timeout=timeout)
    c10d.barrier()


def test_an_uncaught_exception_is_quoted_by_the_others(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        join(rank, str(tmp_path / "store"))
        if rank == CULPRIT:
            error = ValueError("no such layer")
            sys.excepthook(type(error), error, None)
        c10d.all_reduce(torch.ones(2))

    found = errors_of_survivors(program)
    for rank in SURVIVORS:
        assert found[rank].kind == "GroupAbortedError"
        assert "rank 1 aborted: its program ended with ValueError: no such layer" in found[rank].text


@pytest.mark.parametrize("how", ["dies", "leaves", "aborts"])
def test_a_rank_that_ends_before_it_calls_new_group_is_named(how: str, tmp_path: Path) -> None:
    """Once the others waited for torch's default time-out, 30 minutes: only ranks in the call were watched."""

    def program(rank: int) -> None:
        join(rank, str(tmp_path / "store"))
        if rank == CULPRIT and how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == CULPRIT:
            # The second one is torch's way to abort and forget a group.
            end: Any = c10d.destroy_process_group if how == "leaves" else c10d.distributed_c10d._abort_process_group
            end()
            signal.pause()
        c10d.new_group([0, 2, 1])

    found = errors_of_survivors(program)
    for rank in SURVIVORS:
        causes = {"dies": "died (pid ", "leaves": "destroyed the group", "aborts": "aborted: torch.distributed aborted"}
        cause = f"rank 1 {causes[how]}"
        assert found[rank].text.startswith(f"new_group on rank {rank}") and cause in found[rank].text, found[rank].text


def test_ranks_that_abort_a_group_and_keep_it_may_create_others_with_its_members(tmp_path: Path) -> None:
    """Rank 1 comes to each when rank 0 has looked twice for ranks that have left."""
    looks, looked = os.pipe()

    def new_group(rank: int, backend: Any) -> Any:
        find = backend.failure

        def look(*arguments: Any) -> BaseException | None:
            os.write(looked, b".")
            return find(*arguments)  # type: ignore[no-any-return]

        if rank == 0:
            backend.failure = look
        if rank == CULPRIT:
            assert all(os.read(looks, 1) for _ in range(2))
        made = c10d.new_group()
        backend.failure = find
        return made

    def program(rank: int) -> None:
        join(rank, str(tmp_path / "store"))
        world: Any = c10d.group.WORLD
        world.abort()
        group, tensor = new_group(rank, world.backend), fill(rank, (3,))
        c10d.all_reduce(tensor, group=group)
        assert torch.equal(tensor, torch.stack([fill(each, (3,)) for each in range(WORLD)]).sum(0))
        backend = world.backend
        del world
        pid = os.fork()
        if pid == 0:
            # The child's copies go; no member takes that for a leave.
            try:
                c10d.destroy_process_group()
                gc.collect()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        new_group(rank, backend)
        raise ValueError("all done")

    found = errors_of_survivors(program)
    os.close(looks)
    os.close(looked)
    assert {raised.text for raised in found.values()} == {"all done"}


def test_a_program_that_ends_leaves_its_groups(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        join(rank, str(tmp_path / "store"))
        if rank == CULPRIT:
            program_end._exit_all()
        c10d.all_reduce(torch.ones(2))

    found = errors_of_survivors(program)
    texts = [found[rank].text for rank in SURVIVORS]
    assert [found[rank].kind for rank in SURVIVORS] == ["GroupAbortedError"] * 2
    # The first one that looks passes on what it saw.
    assert all("the program of rank 1 ended without destroying the group" in text for text in texts), texts


def test_a_group_that_was_destroyed_before_the_program_ends_is_a_destroyed_one(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        join(rank, str(tmp_path / "store"))
        if rank == CULPRIT:
            world = c10d.group.WORLD
            assert world is not None
            kept = world._get_backend(torch.device("cpu"))
            c10d.destroy_process_group()
            program_end._exit_all()
            del kept
        c10d.all_reduce(torch.ones(2))

    found = errors_of_survivors(program)
    texts = [found[rank].text for rank in SURVIVORS]
    assert any("rank 1 destroyed the group" in text for text in texts), texts
    assert not any("program" in text for text in texts), texts


LEAVES: dict[str, Callable[[Any, Any], object]] = {
    "all groups": lambda failed, shared: c10d.destroy_process_group(),
    "one after the other": lambda failed, shared: [c10d.destroy_process_group(each) for each in (failed, shared)],
    "the shared group": lambda failed, shared: c10d.destroy_process_group(shared),
}


@pytest.mark.parametrize("leave", LEAVES)
def test_a_rank_that_leaves_after_a_death_elsewhere_passes_its_cause_on(leave: str, tmp_path: Path) -> None:
    """Rank 1 dies in a group with rank 0, which leaves. Rank 2 shares another group with rank 0 only."""

    def program(rank: int) -> None:
        join(rank, str(tmp_path / "store"))
        failed, shared = c10d.new_group([0, 1]), c10d.new_group([0, 2])
        c10d.barrier()
        if rank == CULPRIT:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 2:
            c10d.all_reduce(torch.ones(3), group=shared)
        with pytest.raises(dist.RankDiedError) as caught:
            c10d.all_reduce(torch.ones(3), group=failed)
        # No exception is handled here.
        LEAVES[leave](failed, shared)
        raise caught.value

    text = errors_of_survivors(program)[2].text
    assert "rank 0 destroyed the group" in text, text
    assert "It left after: RankDiedError: call 0, all_reduce" in text and "rank 1 died" in text, text


def test_a_rank_that_leaves_one_group_after_another_has_met_no_failure(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        join(rank, str(tmp_path / "store"))
        groups = [c10d.new_group([0, 1, 2]) for _ in range(2)]
        c10d.barrier()
        if rank == CULPRIT:
            for group in groups:
                c10d.destroy_process_group(group)
        c10d.all_reduce(torch.ones(2), group=groups[1])

    texts = [raised.text for raised in errors_of_survivors(program).values()]
    assert all("rank 1 destroyed the group" in text for text in texts), texts
    assert not any("after" in text for text in texts), texts


# Two seconds: a process of its own starts torch.
def test_no_thread_of_a_group_runs_when_the_interpreter_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (5, "[]\n"), ended.stderr
