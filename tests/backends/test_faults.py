"""Death, stall, mismatch, abort: every rank gets an error, in time, that names the rank to inspect."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from tests.outcomes import NEVER, failing, set_timeout
from torchdist_ref.backends import base
from torchdist_ref.groups import world
from torchdist_ref.testing import RankError, fill, run
from torchdist_ref.transports import link

BOTH_EXECUTORS = pytest.mark.parametrize("executor", ["fast", "reference"], indirect=True)


@pytest.fixture
def executor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The executor of the ranks that a test starts."""
    name: str = request.param
    monkeypatch.setenv("TORCHDIST_REF_EXECUTOR", name)
    return name


def all_reduce() -> None:
    dist.all_reduce(torch.ones(100_000))


def receive() -> None:
    dist.recv(torch.ones(3), src=1)


CALLS = {"all_reduce": all_reduce, "barrier": dist.barrier, "recv": receive}


def survive(rank: int, name: str, victim: int) -> tuple[str, str]:
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return failing(CALLS[name])


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("name", ["all_reduce", "barrier"])
@BOTH_EXECUTORS
def test_every_survivor_names_the_dead_rank(name: str, victim: int, executor: str) -> None:
    with pytest.raises(RankError, match=f"rank {victim} of 3 was killed by SIGKILL") as caught:
        run(survive, 3, name, victim, ranks="processes")
    survivors = [outcome.value for rank, outcome in caught.value.outcomes.items() if rank != victim]
    assert len(survivors) == 2
    for kind, text in survivors:
        assert kind == "RankDiedError", text
        assert f"rank {victim} died" in text and f"call 1, {name}(" in text and "group 'world'" in text


MEETINGS = {
    "monitored_barrier": lambda: dist.monitored_barrier(timeout=NEVER),
    "new_group": lambda: dist.new_group([0, 1, 2]),
    "split_group": lambda: dist.split_group(split_ranks=[[0, 1, 2]]),
}


def meet_in_the_store(rank: int, name: str) -> tuple[str, str]:
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    outcome = failing(MEETINGS[name])
    # A survivor that exits before the other one has looked would count as dead too.
    dist.new_group([0, 2], use_local_synchronization=True)
    return outcome


@pytest.mark.parametrize("name", MEETINGS)
def test_a_wait_in_the_store_for_a_dead_rank_raises(name: str) -> None:
    with pytest.raises(RankError) as caught:
        run(meet_in_the_store, 3, name, ranks="processes")
    for rank in (0, 2):
        kind, text = caught.value.outcomes[rank].value
        assert (
            kind == "RankDiedError"
            and f"{name} on rank {rank}" in text
            and "rank 1 died (pid " in text
            and " was killed by SIGKILL)" in text
        )


def make_a_group_without_the_dead(rank: int) -> float:
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group = dist.new_group([0, 2], use_local_synchronization=True)
    tensor = fill(rank, (1,))
    dist.all_reduce(tensor, group=group)
    return float(tensor)


def test_ranks_that_do_not_need_the_dead_one_make_a_group() -> None:
    with pytest.raises(RankError) as caught:
        run(make_a_group_without_the_dead, 3, ranks="processes")
    expected = float(fill(0, (1,)) + fill(2, (1,)))
    assert [caught.value.outcomes[rank].value for rank in (0, 2)] == [expected, expected]


def test_a_receive_names_the_dead_sender() -> None:
    with pytest.raises(RankError) as caught:
        run(survive, 2, "recv", 1, ranks="processes")
    kind, text = caught.value.outcomes[0].value
    assert (kind, "rank 1 died" in text) == ("RankDiedError", True), text


def receive_from_any(rank: int, with_message: bool) -> tuple[str, str] | list[float]:
    """Rank 1 is killed, rank 2 lives; rank 0 receives from any rank."""
    if rank == 2 and with_message:
        dist.isend(fill(2, (3,)), 0)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        return failing(lambda: dist.recv(torch.zeros(3), 0))
    tensor = torch.zeros(3)
    if with_message:
        await_a_death()
        dist.recv(tensor)
        return tensor.tolist()
    return failing(lambda: dist.recv(tensor))


def group_link() -> Any:
    backend: Any = world.default_group().backend
    return backend.link


def await_a_death() -> None:
    deadline = time.monotonic() + 10
    while not group_link().liveness.dead():
        assert time.monotonic() < deadline


def test_a_receive_from_any_rank_names_a_dead_one_of_several_senders() -> None:
    """Once it waited for the time-out, as long as another sender lived, and did not name the dead rank then."""
    with pytest.raises(RankError) as caught:
        run(receive_from_any, 3, False, ranks="processes")
    outcomes = {rank: outcome.value for rank, outcome in caught.value.outcomes.items() if rank != 1}
    for rank, kind in ((0, "RankDiedError"), (2, "GroupAbortedError")):
        assert outcomes[rank][0] == kind and "rank 1 died (pid " in outcomes[rank][1], outcomes


def test_a_receive_from_any_rank_takes_a_message_that_came_before_a_death() -> None:
    with pytest.raises(RankError) as caught:
        run(receive_from_any, 3, True, ranks="processes")
    assert caught.value.outcomes[0].value == fill(2, (3,)).tolist()


def receive_from_those_who_stay(rank: int) -> list[float]:
    """Rank 1 destroys its group; rank 0 receives from any rank, rank 2 sends when rank 0 has had time to fail."""
    group = dist.new_group()
    dist.barrier(group)
    tensor = torch.zeros(3)
    if rank == 1:
        dist.destroy_process_group(group)
    dist.barrier()
    if rank == 0:
        work: Any = dist.irecv(tensor, group=group)
        with pytest.raises(dist.RankStalledError):
            work.wait(0.1)
    dist.barrier()
    if rank == 2:
        dist.send(fill(2, (3,)), 0, group)
    if rank == 0:
        work.wait()
    dist.barrier()
    return tensor.tolist()


def test_a_receive_from_any_rank_ignores_one_that_left() -> None:
    assert run(receive_from_those_who_stay, 3, timeout=10)[0] == fill(2, (3,)).tolist()


def wait_for_one_who_lives(rank: int) -> str:
    """Rank 1 is killed; rank 2 lives, and does not send until rank 0 has given up."""
    group = dist.new_group()
    set_timeout(group, 0.3)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        dist.recv(torch.zeros(1), 0)
        return ""
    await_a_death()
    text = failing(lambda: dist.recv(torch.zeros(3), 2, group))[1]
    dist.send(torch.zeros(1), 2)
    return text


def test_the_error_of_a_stalled_call_names_ranks_that_have_died() -> None:
    with pytest.raises(RankError) as caught:
        run(wait_for_one_who_lives, 3, ranks="processes")
    text = caught.value.outcomes[0].value
    assert "rank 2 did not arrive within 0.3 s" in text and "Meanwhile rank 1 died (pid " in text


def test_a_long_wait_is_logged_once_for_each_group(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until the time-out, half an hour by default, a rank that waited in vain said nothing."""
    monkeypatch.setattr(link, "LONG_WAIT_SECONDS", 0.01)
    logged = [threading.Event() for _ in range(3)]

    # Rank 1 waits for that time too where a busy machine stops rank 0.
    def is_of_rank_0(message: str) -> bool:
        return "has waited" in message and "on rank 0" in message

    class Notice(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if is_of_rank_0(record.getMessage()):
                next(event for event in logged if not event.is_set()).set()

    def come_late(rank: int) -> None:
        groups = [dist.new_group(), dist.new_group()]
        for number in range(3):
            # The third wait is long, too.
            assert rank == 0 or logged[number].wait(20 if number < 2 else 0.1) == (number < 2)
            dist.all_reduce(torch.ones(2), group=groups[number % 2])

    notice = Notice()
    link.log.addHandler(notice)
    try:
        run(come_late, 2, ranks="threads")
    finally:
        link.log.removeHandler(notice)
    first, second = filter(is_of_rank_0, caplog.messages)
    assert first.startswith("call 0, all_reduce(reduction=sum) of float32 [2] on rank 0 of group 'group 1' has waited")
    assert "has waited 0.01 s for rank 1, which has made no collective on this group yet. To see where all" in first
    assert f"python -m torchdist_ref.debug --request PID ... with their pids (this one is {os.getpid()})" in first
    assert "of group 'group 2'" in second


def ignore_a_death_elsewhere(rank: int) -> list[float]:
    """Exchange messages between ranks 0 and 1 after rank 2 has died."""
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    tensor = fill(0, (5,)) if rank == 0 else torch.zeros(5)
    dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0)
    return tensor.tolist()


def test_messages_between_the_living_go_on() -> None:
    with pytest.raises(RankError) as caught:
        run(ignore_a_death_elsewhere, 3, ranks="processes")
    assert caught.value.outcomes[1].value == fill(0, (5,)).tolist()


def call_differently(rank: int, variant: str) -> tuple[str, str, list[float], list[float]]:
    tensor = fill(rank, (6,))
    calls = {
        "op": lambda: dist.all_reduce(tensor) if rank else dist.broadcast(tensor, 0),
        "root": lambda: dist.broadcast(tensor, rank),
        "reduction": lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM),
        "shape": lambda: dist.all_reduce(tensor.view(2, 3) if rank else tensor.view(3, 2)),
        "size": lambda: dist.all_reduce(tensor[:4] if rank else tensor),
        "dtype": lambda: dist.all_reduce(tensor.view(torch.int32) if rank else tensor),
        "large": lambda: dist.all_reduce(torch.ones(500_000) if rank else tensor),
    }
    kind, text = failing(calls[variant])
    after = fill(rank, (6,))
    dist.all_reduce(after)
    return kind, text, tensor.tolist(), after.tolist()


VARIANTS = ["op", "root", "reduction", "shape", "size", "dtype", "large"]


@pytest.mark.parametrize("ranks", ["threads", "processes"])
@pytest.mark.parametrize("variant", VARIANTS)
@BOTH_EXECUTORS
def test_a_mismatch_raises_on_both_sides_and_writes_nothing(variant: str, ranks: str, executor: str) -> None:
    size = 3
    for rank, result in enumerate(run(call_differently, size, variant, ranks=ranks)):
        kind, text, tensor, after = result
        assert kind == "MismatchError", text
        assert "rank 0: " in text and "rank 1: " in text
        assert tensor == fill(rank, (6,)).tolist(), "a mismatched call must not write"
        assert after == sum(fill(r, (6,)) for r in range(size)).tolist(), "the group must stay usable"


def mismatch(rank: int) -> tuple[str, str, list[float]]:
    tensor = fill(3, (6,)) if rank == 0 else torch.zeros(8)
    outcome = failing(lambda: dist.send(tensor, 1) if rank == 0 else dist.recv(tensor, 0))
    again = fill(4, (6,)) if rank == 0 else torch.zeros(6)
    dist.send(again, 1) if rank == 0 else dist.recv(again, 0)
    return outcome[0], outcome[1], [*tensor.tolist(), *again.tolist()]


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_a_message_of_the_wrong_size_raises_on_both_sides(ranks: str) -> None:
    sent, received = run(mismatch, 2, ranks=ranks)
    assert (sent[0], received[0]) == ("MismatchError", "MismatchError"), (sent, received)
    assert "6 x float32" in received[1] and "8 x float32" in received[1] and "8 x float32" in sent[1]
    assert received[2] == [0.0] * 8 + fill(4, (6,)).tolist()


def stall(rank: int) -> tuple[str, str]:
    group = dist.new_group([0, 1, 2])
    dist.barrier(group)
    released = dist.new_group([0, 1, 2])
    set_timeout(group, 0.3)
    if rank == 1:
        dist.barrier(released)
        return "", ""
    outcome = failing(lambda: dist.all_reduce(torch.ones(5), group=group))
    dist.barrier(released)
    return outcome


@pytest.mark.parametrize("ranks", ["threads", "processes"])
@BOTH_EXECUTORS
def test_a_rank_that_does_not_come_is_named_at_the_deadline(ranks: str, executor: str) -> None:
    results = run(stall, 3, ranks=ranks, timeout=10)
    kinds = {results[0][0], results[2][0]}
    # The rank that reaches the deadline first aborts, and the other one learns of that.
    assert kinds <= {"RankStalledError", "GroupAbortedError"} and "RankStalledError" in kinds
    for rank in (0, 2):
        text = results[rank][1]
        assert "rank 1 did not arrive within 0.3 s" in text, text
        assert "completed call 0, barrier(), and has made no other" in text


def interrupted(rank: int) -> tuple[str, str]:
    if rank == 0:
        recorder = world.default_group().backend.recorder

        def interrupt() -> None:
            while not recorder.events():
                threading.Event().wait(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        # The alarm comes while the rank is blocked; a timer thread, since a test must not sleep.
        dist.set_timeout(NEVER)
        threading.Timer(0.1, interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            dist.barrier()
        return "KeyboardInterrupt", ""
    return failing(lambda: dist.recv(torch.ones(1), src=0))


@BOTH_EXECUTORS
def test_ctrl_c_ends_a_blocked_call_and_the_others_learn_the_reason(executor: str) -> None:
    first, second = run(interrupted, 2, ranks="processes")
    assert first[0] == "KeyboardInterrupt"
    assert second[0] == "GroupAbortedError" and "KeyboardInterrupt in barrier" in second[1], second


def use_after_failure(rank: int) -> tuple[str, str]:
    group = dist.new_group()
    if rank == 0:
        set_timeout(group, 0.2)
        failing(lambda: dist.barrier(group))
        set_timeout(group, NEVER.total_seconds())
        return failing(lambda: dist.all_reduce(torch.ones(1), group=group))
    return "", ""


@BOTH_EXECUTORS
def test_a_failed_group_raises_at_once(executor: str) -> None:
    kind, text = run(use_after_failure, 2)[0]
    assert kind == "GroupAbortedError" and "ended with an earlier failure" in text


def leave_early(rank: int) -> tuple[str, str]:
    group = dist.new_group()
    dist.barrier(group)
    if rank == 1:
        dist.destroy_process_group(group)
        dist.barrier()
        return "", ""
    outcome = failing(lambda: dist.barrier(group))
    dist.barrier()
    return outcome


@pytest.mark.parametrize("ranks", ["threads", "processes"])
@BOTH_EXECUTORS
def test_a_group_that_another_rank_destroyed_raises(ranks: str, executor: str) -> None:
    kind, text = run(leave_early, 2, ranks=ranks)[0]
    assert kind == "GroupAbortedError" and "rank 1 destroyed the group" in text, text


def ring_after_a_death(rank: int, world: int, told: list[int]) -> tuple[str, str]:
    """Each survivor stays until all have their errors; `told` has an eventfd for each rank."""
    dist.barrier()
    if rank == 1:
        # Time for all to wait.
        threading.Event().wait(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    outcome = failing(lambda: dist.recv(torch.ones(3), src=(rank - 1) % world))
    for descriptor in told:
        os.eventfd_write(descriptor, 1)
    others = 1
    while others < world:
        others += os.eventfd_read(told[rank])
    dist.destroy_process_group()
    return outcome


def test_a_death_is_passed_on_along_a_ring_of_receives() -> None:
    world = 6
    told = [os.eventfd(0) for _ in range(world)]
    with pytest.raises(RankError) as caught:
        run(ring_after_a_death, world, world, told, ranks="processes")
    for descriptor in told:
        os.close(descriptor)
    for rank in set(range(world)) - {1}:
        kind, text = caught.value.outcomes[rank].value
        assert kind == ("RankDiedError" if rank == 2 else "GroupAbortedError"), text
        # The cause, once: not a chain of what each rank heard from the one before it.
        assert "rank 1 died (pid " in text and text.count("aborted") == (rank != 2)


def close_with_a_pending_call(rank: int) -> bool:
    group = dist.new_group(timeout=NEVER)
    # This process is the rank's own.
    base.CLOSE_SECONDS = NEVER.total_seconds()
    if rank == 1:
        dist.barrier()
        return True
    works = [dist.all_reduce(torch.ones(3), group=group, async_op=True) for _ in range(20)]
    try:
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        works[0].wait()
    except (KeyboardInterrupt, dist.DistError):
        pass
    # Not in the block above: while an exception is handled, the group is aborted with it.
    dist.destroy_process_group(group)
    dist.barrier()
    return all(work.is_completed() and not work.is_success() for work in works)


def test_destroying_a_group_after_ctrl_c_does_not_wait_for_its_calls() -> None:
    assert run(close_with_a_pending_call, 2, ranks="processes") == [True, True]


def fail_in_the_middle(rank: int, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    if rank == 1:

        def exhausted(*_: object, **__: object) -> None:
            raise MemoryError("no room for the payloads")

        monkeypatch.setattr("torchdist_ref.groups.objects.ReceiveBuffer", exhausted)
    try:
        outcome = failing(lambda: dist.all_gather_object([None] * 2, {"rank": rank}))
    except MemoryError:
        outcome = failing(dist.barrier)
    return outcome


def test_a_rank_that_fails_between_two_steps_tells_the_others() -> None:
    monkeypatch = pytest.MonkeyPatch()
    first, second = run(fail_in_the_middle, 2, monkeypatch, ranks="processes")
    assert first[0] == "GroupAbortedError" and "rank 1 aborted: a call with objects failed" in first[1]
    assert "MemoryError: no room for the payloads" in first[1]
    assert second[0] == "GroupAbortedError" and "ended with an earlier failure" in second[1]


def test_a_receive_with_another_tag_says_so() -> None:
    def program(rank: int) -> str:
        group = dist.new_group()
        if rank:
            work = dist.isend(torch.ones(2), 0, group, tag=3)
            dist.barrier()
            dist.barrier()
            assert work is not None and work.wait()
            return ""
        dist.barrier()
        set_timeout(group, 0.3)
        text = failing(lambda: dist.recv(torch.ones(2), 1, group, tag=4))[1]
        set_timeout(group, NEVER.total_seconds())
        dist.recv(torch.ones(2), 1, group, tag=3)
        dist.barrier()
        return text

    assert "rank 1 sent one with tag 3. Pass the same tag" in run(program, 2)[0]


def test_a_message_with_another_tag_is_named_when_its_sender_has_left() -> None:
    def program(rank: int) -> str:
        if rank:
            work = dist.isend(torch.ones(2), 0, tag=3)
            dist.destroy_process_group()
            assert work is not None
            return ""
        with pytest.raises(dist.GroupAbortedError) as caught:
            dist.recv(torch.ones(2), 1, tag=4)
        return "\n".join(caught.value.__notes__)

    left = "No message with tag 4 came, but rank 1 sent one with tag 3. Pass the same tag to send and recv.\nSee: "
    assert run(program, 2)[0].startswith(left)


class NoMemory:
    """Executor that runs no call."""

    def __init__(self, executor: Any) -> None:
        self.compile = executor.compile

    def run(self, *_: object) -> None:
        raise MemoryError

    def close(self) -> None:
        """Release nothing."""


@pytest.mark.parametrize("name", ["all_reduce", "recv"])
def test_the_others_learn_of_a_failure_before_it_is_recorded(name: str) -> None:
    """The recorder may write a file, which delayed a chain of receives by that time for each rank."""

    def program(rank: int) -> list[bool]:
        told: list[bool] = []
        dist.barrier()
        if rank == 1:
            dist.destroy_process_group()
            return told
        backend: Any = world.default_group().backend
        backend.recorder.on_failure = lambda _: told.append(backend.link.broken is not None)
        backend.wrap_executor(NoMemory)
        with pytest.raises((MemoryError, dist.GroupAbortedError)):
            CALLS[name]()
        return told

    assert run(program, 2)[0] == [True]
