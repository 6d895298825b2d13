"""Programs whose ranks fail, for the tests of verdicts. The tests compare the lines that recorded dumps hold.

After a change here, record the dumps again: ``RECORD_DUMPS=1 python -m pytest tests/debug/test_verdict.py``.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch

import torchdist_ref as dist
from torchdist_ref.debug import flight_recorder
from torchdist_ref.groups import world
from torchdist_ref.testing import fill

SOON = timedelta(seconds=2)


def blocked_in_the_system(read_end: int) -> None:
    os.read(read_end, 1)  # where it hangs


def wait_for_file(path: Path) -> None:
    while not path.exists():
        select.select([], [], [], 0.001)


def others_wait(culprit: int, folder: Path, pipe: tuple[int, int], pids: Path, rank: int) -> None:
    group = dist.new_group(timeout=SOON)
    if rank == culprit:
        pids.write_text(str(os.getpid()))
        dist.barrier()
        blocked_in_the_system(pipe[0])
        return
    dist.barrier()
    try:
        dist.all_reduce(fill(rank, (2, 5)), dist.ReduceOp.MAX, group=group)  # where they wait
    finally:
        if rank == (culprit + 1) % 3:
            [line] = flight_recorder.request([int(pids.read_text())])
            assert line.endswith("asked")
            wait_for_file(folder / f"rank{culprit}.json")
            os.write(pipe[1], b"x")


def chain(folder: Path, pipe: tuple[int, int], pids: Path, rank: int) -> None:
    """Rank 0 waits for 1, 1 for 2, 2 for 3, and 3 is in other code."""
    group = dist.new_group(timeout=SOON)
    if rank == 3:
        pids.write_text(str(os.getpid()))
        dist.barrier()
        blocked_in_the_system(pipe[0])
        return
    dist.barrier()
    try:
        dist.recv(torch.zeros(4), rank + 1, group=group)
    finally:
        if rank == 2:
            list(flight_recorder.request([int(pids.read_text())]))
            wait_for_file(folder / "rank3.json")
            os.write(pipe[1], b"x")


def waits_in_a_ring(rank: int) -> None:
    group = dist.new_group(timeout=SOON)
    dist.recv(torch.zeros(3), (rank + 1) % 3, group=group)  # the ring


def another_operation(rank: int) -> None:
    if rank == 2:
        dist.broadcast(fill(rank, (5,)), 1)  # the other call
    else:
        dist.all_reduce(fill(rank, (5,)))  # the usual call


def calls_in_order(orders: dict[int, str], rank: int) -> None:
    calls = {"a": lambda: dist.all_reduce(fill(rank, (3,))), "b": lambda: dist.broadcast(fill(rank, (2,)), 0)}
    calls["c"] = dist.barrier
    for letter in orders.get(rank, "abc"):
        with suppress(dist.MismatchError):
            calls[letter]()


def dies(rank: int) -> None:
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(fill(rank, (7,)))  # where it is missed


def dies_and_survivors_raise_their_own(rank: int) -> None:
    try:
        dies(rank)
    except dist.DistError as error:
        failure = RuntimeError("step 2 failed")
        failure.__cause__ = error
        flight_recorder.dump_failure(failure)
        raise failure from error


def gives_up_and_raises_its_own(folder: Path, rank: int) -> None:
    """Rank 1 is in other code; the others stop waiting before the call's time-out, and fail because of that."""
    if rank == 1:
        for other in (0, 2):
            wait_for_file(folder / f"rank{other}.json")
        os._exit(flight_recorder.dump() is None)
    work = dist.all_reduce(fill(rank, (7,)), async_op=True)
    try:
        work.wait(timedelta(milliseconds=1))
    except dist.DistBackendError as error:
        failure = ValueError("step 1 failed")
        failure.__cause__ = error
        flight_recorder.dump_failure(failure)
        raise failure from error


def raises(rank: int) -> None:
    try:
        if rank == 2:
            torch.ones(2) @ torch.ones(3)  # the cause
    except RuntimeError as error:
        flight_recorder.dump_failure(error)
        raise
    dist.all_reduce(fill(rank, (7,)))


def comes_late(rank: int) -> None:
    group, world = dist.new_group(timeout=SOON), dist.group.WORLD
    assert world is not None
    if rank == 1:
        world.store.wait(["gone"])
    try:
        dist.all_reduce(fill(rank, (5,)), group=group)
        flight_recorder.dump()
    finally:
        world.store.set("gone", "")


def leaves_before_the_last_call(rank: int) -> None:
    if rank != 1:
        dist.all_reduce(fill(rank, (4,)))
    dist.destroy_process_group()  # where it leaves


def dies_in_a_subgroup(rank: int) -> None:
    group = dist.new_group([1, 2])
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        dist.all_reduce(fill(rank, (4,)), group=group)


def leaves(rank: int) -> None:
    if rank == 1:
        dist.destroy_process_group()
    else:
        dist.barrier()


def ends(rank: int) -> None:
    if rank == 1:
        world.current().exit()
    else:
        dist.barrier()


def raises_without_a_dump(rank: int) -> None:
    if rank == 1:
        world.current().abort_with(KeyError("my bug"))
    else:
        dist.barrier()  # where it fails


def fails_outside(rank: int) -> None:
    """Rank 0 fails in a call that no recorder has, such as one of a program's own store."""
    if rank == 0:
        flight_recorder.dump_failure(dist.RankStalledError("get: rank 1 set nothing").naming([1]), rank)


def waits_in_the_store(call: Callable[[], object], folder: Path, pipe: tuple[int, int], pids: Path, rank: int) -> None:
    """Ranks 0 and 2 make a call through the store twice, rank 1 once."""
    call()
    if rank == 1:
        pids.write_text(str(os.getpid()))
        dist.barrier()
        blocked_in_the_system(pipe[0])
        return
    dist.barrier()
    try:
        call()
    finally:
        if rank == 2:
            list(flight_recorder.request([int(pids.read_text())]))
            wait_for_file(folder / "rank1.json")
            os.write(pipe[1], b"x")


def waits_for_an_excluded_rank(folder: Path, rank: int) -> None:
    """Rank 2 waits for a message of rank 0, which waits for rank 2 in a shrink without rank 1."""
    dist.new_group(timeout=SOON)
    group = dist.new_group(timeout=SOON)
    if rank == 0:
        dist.shrink_group([1], group)
    elif rank == 2:
        dist.recv(torch.zeros(3), 0, group=group)
    else:
        wait_for_file(folder / "rank0.json")
