"""Survivors on Gloo, whose own errors name no rank, name the one that failed or left, and keep torch's text."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from tests.backends.failing_ranks import CULPRIT, WORLD, errors_of_survivors
from torchdist_ref.backends.base import Membership
from torchdist_ref.backends.torch_native.gloo import Gloo
from torchdist_ref.groups.world import current
from torchdist_ref.membership.blame import Wait
from torchdist_ref.membership.watch import MemberWatch
from torchdist_ref.parallel import DistributedDataParallel
from torchdist_ref.stores import HashStore, PrefixStore
from torchdist_ref.testing import fill, run


def raise_uncaught() -> None:
    """End as a program does that raises: by the hook for uncaught exceptions, while its sockets are open."""
    error = ValueError("no data on this rank")
    sys.excepthook(type(error), error, None)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exit_slowly() -> None:
    """End as a program does that exits with its group, in a process that takes longer to end than others look."""
    current().exit()
    signal.pause()


ENDS = {
    "exit": (exit_slowly, "GroupAbortedError", "failed: its program ended without destroying the group"),
    "raise": (raise_uncaught, "GroupAbortedError", "failed: its program ended with ValueError: no data on this rank"),
    "kill": (be_killed, "RankDiedError", "died (pid "),
}


def fail_between_calls(rank: int, end: str, meet: str) -> None:
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=WORLD)
    dist.all_reduce(torch.ones(3))
    if rank == CULPRIT:
        ENDS[end][0]()
        os._exit(1)
    dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize("end", ENDS)
def test_survivors_name_the_rank_that_failed(end: str, tmp_path: Path) -> None:
    meet = f"file://{tmp_path / 'store'}"
    for raised in errors_of_survivors(lambda rank: fail_between_calls(rank, end, meet)).values():
        assert raised.kind == ENDS[end][1], raised.trace
        assert f"rank {CULPRIT} {ENDS[end][2]}" in raised.text and "all_reduce" in raised.text, raised.text
        assert "onnection" in raised.text and "The above exception was the direct cause" in raised.trace


def fail_in_a_callback(rank: int, meet: str) -> None:
    """Train with a hook that continues from a future; the culprit is killed before the third step."""
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=WORLD)

    def hook(_, bucket):  # type: ignore[no-untyped-def]
        work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0]).then(lambda done: done.value() / WORLD)

    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    model.register_comm_hook(None, hook)
    for step in range(3):
        if step == 2 and rank == CULPRIT:
            be_killed()
        model(torch.ones(4)).sum().backward()


def test_callbacks_of_hooks_keep_the_type_of_the_error(tmp_path: Path) -> None:
    meet = f"file://{tmp_path / 'store'}"
    for raised in errors_of_survivors(lambda rank: fail_in_a_callback(rank, meet)).values():
        assert raised.kind == "RankDiedError", raised.trace
        assert f"rank {CULPRIT} died (pid " in raised.text and "all_reduce" in raised.text, raised.text


CALLS: dict[str, Callable[[Any], Any]] = {
    "new_group": lambda group: dist.new_group([0, 1, 2]),
    "split_group": lambda group: dist.split_group(group, split_ranks=[[0, 1, 2]]),
    "monitored_barrier": lambda group: dist.monitored_barrier(group),
    "all_reduce": lambda group: dist.all_reduce(torch.ones(3), group=group),
    # Compared in the store.
    "all_reduce at DETAIL": lambda group: dist.all_reduce(torch.ones(3), group=group),
}
LEAVES: dict[str, Callable[[Any], None]] = {
    "the world": lambda group: dist.destroy_process_group(),
    "a group": lambda group: dist.destroy_process_group(group),
}


def call_without_the_culprit(rank: int, meet: str, leave: str, name: str) -> None:
    if "DETAIL" in name:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=WORLD, timeout=timedelta(seconds=20))
    group: Any = dist.new_group() if leave == "a group" else dist.group.WORLD
    dist.barrier(group)
    if rank == CULPRIT:
        LEAVES[leave](group)
        signal.pause()
    CALLS[name](group)


@pytest.mark.parametrize(
    ("leave", "name"),
    [(leave, name) for leave in LEAVES for name in CALLS if (leave, name) != ("a group", "new_group")],
)
def test_a_rank_that_destroyed_its_group_is_named(leave: str, name: str, tmp_path: Path) -> None:
    """Once the others waited in the store for the time-out: another error, which named what they waited for."""
    meet = f"file://{tmp_path / 'store'}"
    for raised in errors_of_survivors(lambda rank: call_without_the_culprit(rank, meet, leave, name)).values():
        assert raised.kind == "GroupAbortedError", raised.trace
        operation = "call 1, all_reduce" if "DETAIL" in name else name
        assert operation in raised.text and f"rank {CULPRIT} destroyed the group" in raised.text, raised.text
        assert "init_process_group" not in raised.text, raised.text


def leave_after_a_death(rank: int, meet: str) -> None:
    """Rank 1 dies in a group with rank 0, which leaves. Rank 2 shares another group with rank 0 only."""
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=WORLD)
    failed, shared = dist.new_group([0, 1]), dist.new_group([0, 2])
    dist.barrier()
    if rank == CULPRIT:
        be_killed()
    if rank == 2:
        dist.monitored_barrier(shared)  # type: ignore[arg-type]
    with pytest.raises(dist.RankDiedError) as caught:
        dist.all_reduce(torch.ones(3), group=failed)
    dist.destroy_process_group()
    raise caught.value


def test_a_rank_that_leaves_after_a_death_elsewhere_passes_its_cause_on(tmp_path: Path) -> None:
    meet = f"file://{tmp_path / 'store'}"
    text = errors_of_survivors(lambda rank: leave_after_a_death(rank, meet))[2].text
    assert "rank 0 destroyed the group. It left after: RankDiedError: all_reduce" in text and "rank 1 died" in text, (
        text
    )


class ComesLast(HashStore):
    """Store in which rank 2 of a group tells that it has connected only once `release` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def set(self, key: Any, value: Any) -> None:
        if str(key).endswith("gone on/2"):
            assert self.release.wait(20)
        super().set(key, value)


@pytest.mark.parametrize("end", ["leave", "death"])
def test_a_rank_that_ends_after_its_part_of_a_new_group_fails_no_other(end: str) -> None:
    """Rank 1 has the group, and leaves its parent or ends. Rank 0 still waits for rank 2."""
    store, done, looks = ComesLast(), threading.Event(), []

    def found(ranks: Sequence[int], _: str, wait: Wait) -> BaseException | None:
        ended = done.is_set() and 1 in ranks and (end == "death" or wait is Wait.PART)
        return dist.GroupAbortedError("rank 1 ended") if ended else None

    def look(ranks: Sequence[int], operation: str, wait: Wait) -> BaseException | None:
        """Look for the end; after two looks since rank 1 has ended, rank 2 goes on."""
        looks.append(done.is_set())
        if sum(looks) > 1:
            store.release.set()
        return found(ranks, operation, wait)

    def make(rank: int) -> str:
        watch = MemberWatch(PrefixStore("g", store), rank, (0, 1, 2), "new_group", look if rank == 0 else found)
        if rank == 2:
            watch = MemberWatch(PrefixStore("g", store), rank, (0, 1, 2), "new_group")
        backend = Gloo(Membership(watch.store, rank, (0, 1, 2), "g", 20.0, watch=watch))
        if rank == 1:
            done.set()
        assert store.release.wait(20)
        backend.close()
        return backend.name

    assert run(make, 3, init=False) == ["gloo"] * 3


def test_a_backend_that_connects_later_does_not_need_members_in_the_parent_group() -> None:
    """NCCL, and Gloo with ``TORCH_GLOO_LAZY_INIT``, read the store at the first call."""

    def left(ranks: Sequence[int], _: str, wait: Wait) -> BaseException | None:
        return dist.GroupAbortedError("rank 1 left the parent group") if wait is Wait.PART else None

    watch = MemberWatch(PrefixStore("g", HashStore()), 0, (0,), "split_group", left)
    Gloo(Membership(watch.store, 0, (0,), "g", 20.0, watch=watch)).close()
    with pytest.raises(dist.DistStoreError, match="wait timeout after 50ms"):
        watch.store.wait(["address of rank 1"], timedelta(seconds=0.05))


def test_ranks_that_abort_their_calls_to_shrink_do_not_fail_each_other() -> None:
    """Rank 1 comes when the others have looked for failures twice. Rank 3 is excluded."""
    looks = threading.Semaphore(0)

    def program(rank: int) -> list[float]:
        dist.barrier()
        if rank == 3:
            return []
        backend: Any = dist.group.WORLD.backend  # type: ignore[union-attr]
        find = backend.failure

        def look(*arguments: Any) -> BaseException | None:
            looks.release()
            return find(*arguments)  # type: ignore[no-any-return]

        backend.failure = look
        if rank == 1:
            assert all(looks.acquire(timeout=20) for _ in range(4))
        dist.shrink_group([3], shrink_flags=1)
        tensor = fill(rank, (3,))
        dist.all_reduce(tensor)
        return tensor.tolist()

    total = sum(fill(rank, (3,)) for rank in range(3)).tolist()  # type: ignore[union-attr]
    assert run(program, 4, backend="gloo") == [total, total, total, []]
