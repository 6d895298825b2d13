"""A rank that destroys a group, or exits, while calls are pending: the others learn of it at once, and why."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from tests.outcomes import NEVER, failing
from torchdist_ref.backends import base, worker_threads
from torchdist_ref.groups import world
from torchdist_ref.testing import fill, run
from torchdist_ref.testing.virtual_clock import VirtualClock
from torchdist_ref.transports.segment import LEFT


@pytest.fixture(autouse=True)
def long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no destroy end by its limits for pending calls, and for threads that do not end."""
    monkeypatch.setattr(base, "CLOSE_SECONDS", NEVER.total_seconds())
    monkeypatch.setattr(worker_threads, "END_SECONDS", NEVER.total_seconds())


def link_of(group: Any = None) -> Any:
    backend: Any = (group or world.default_group()).backend
    return backend.link


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "the other rank did not get there"
        threading.Event().wait(0.001)


def leave_with_messages(rank: int, how: str) -> tuple[str, str]:
    """Rank 1 leaves with a receive and two sends that no rank answers; the others are in a collective."""
    dist.barrier()
    if rank != 1:
        return failing(lambda: dist.all_reduce(fill(rank, (4,))))
    dist.irecv(torch.zeros(4), 0)
    for peer in (0, 2):
        dist.isend(fill(rank, (4,)), peer, tag=5)
    try:
        if how == "raises":
            raise ValueError("no data left")
        if how.startswith("exits"):
            raise SystemExit(3 if how == "exits with a code" else 0)
    except (ValueError, SystemExit):
        dist.destroy_process_group()
    else:
        dist.destroy_process_group()
    return "", ""


LEAVING = {
    "returns": "rank 1 destroyed the group",
    "raises": "rank 1 aborted: it destroyed the group because of ValueError: no data left",
    "exits with a code": "rank 1 aborted: it destroyed the group because of SystemExit: 3",
    "exits": "rank 1 destroyed the group",
}


@pytest.mark.parametrize("ranks", ["threads", "processes"])
@pytest.mark.parametrize("how", LEAVING)
def test_the_others_learn_at_once_that_a_rank_leaves_with_pending_messages(how: str, ranks: str) -> None:
    """Once after 5 seconds for each of its threads, and an exception was not quoted."""
    outcomes = run(leave_with_messages, 3, how, ranks=ranks)
    for rank in (0, 2):
        kind, text = outcomes[rank]
        assert kind == "GroupAbortedError" and LEAVING[how] in text, text


@pytest.mark.parametrize("how", ["destroys", "exits"])
def test_a_receive_without_a_message_delays_nobody(how: str) -> None:
    """Once destroy waited for it; a process exits as `World.exit` does."""
    over = threading.Barrier(3)

    def program(rank: int) -> tuple[str, str]:
        dist.barrier()
        outcome = "", ""
        if rank == 0:
            outcome = failing(lambda: dist.all_reduce(fill(rank, (4,))))
        if rank == 1:
            dist.irecv(torch.zeros(4), 2)
            world.current().exit() if how == "exits" else dist.destroy_process_group()
        over.wait(20)
        return outcome

    kind, text = run(program, 3)[0]
    left = {
        "destroys": "rank 1 destroyed the group",
        "exits": "the program of rank 1 ended without destroying the group",
    }
    assert kind == "GroupAbortedError" and left[how] in text


def send_and_destroy(rank: int, count: int) -> list[float]:
    """Rank 1 destroys its group right after its sends; rank 0 receives only after it has learned of that."""
    if rank == 1:
        for index in range(count):
            dist.isend(fill(index, (3,)), 0)
        dist.destroy_process_group()
        return []
    link, received = link_of(), torch.zeros(count, 3)
    wait_until(lambda: link.rows[1].status == LEFT)
    assert link.failure([1], "a message") is None
    for index in range(count):
        dist.recv(received[index], 1)
    assert "rank 1 destroyed the group" in failing(lambda: dist.recv(torch.zeros(3), 1))[1]
    return received.flatten().tolist()


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_messages_sent_before_destroy_are_delivered_after_it_was_announced(ranks: str) -> None:
    received = run(send_and_destroy, 2, 3, ranks=ranks, timeout=10)[0]
    assert received == torch.cat([fill(index, (3,)) for index in range(3)]).tolist()


def test_a_receive_that_ends_with_its_group_ends_no_other_call() -> None:
    links, received = list[Any](), list[Any]()

    def program(rank: int) -> list[float]:
        tensor = torch.zeros(3)
        if rank == 1:
            links.append(link_of())
            received.append(dist.irecv(torch.zeros(1), 0))
            dist.isend(fill(1, (3,)), 0)
            dist.destroy_process_group()
            return []
        wait_until(lambda: bool(received) and received[0].is_completed())
        assert links[0].broken is None
        dist.recv(tensor, 1)
        return tensor.tolist()

    assert run(program, 2, timeout=10)[0] == fill(1, (3,)).tolist()


def test_a_collective_that_nobody_joins_is_completed_by_a_destroy_of_all() -> None:
    def program(rank: int) -> list[float]:
        tensor = fill(rank, (3,))
        dist.all_reduce(tensor, async_op=True)
        dist.destroy_process_group()
        return tensor.tolist()

    assert run(program, 2) == [(fill(0, (3,)) + fill(1, (3,))).tolist()] * 2


def test_the_calls_of_all_threads_and_groups_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each thread of each group had 5 seconds of its own."""
    clock, over = VirtualClock(), threading.Event()
    monkeypatch.setattr(base, "CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(base, "monotonic", clock.now)
    monkeypatch.setattr(base, "sleep", clock.sleep)

    def program(rank: int) -> bool:
        groups = [dist.new_group() for _ in range(3)]
        if rank:
            return over.wait(20)
        works: list[Any] = []
        for group in groups:
            works += [dist.all_reduce(torch.ones(2), group=group, async_op=True)]
            works += [dist.isend(torch.ones(2), peer, group) for peer in (1, 2)]
        began = clock.now()
        dist.destroy_process_group()
        assert 0.0 < clock.now() - began < 1.01 * base.CLOSE_SECONDS
        over.set()
        return all(work.is_completed() and "this rank destroyed" in str(work.exception()) for work in works)

    assert run(program, 3) == [True] * 3


def after_a_call(rank: int, callback: Callable[[Any], None]) -> None:
    """Run a callback on a thread for callbacks, and wait for it."""
    backend: Any = world.default_group().backend
    attached = threading.Event()
    # The call is not over when its callback is attached.
    backend.order.progress.put(attached.wait)
    work: Any = dist.all_reduce(fill(rank, (2,)), async_op=True)
    future = work.get_future().then(callback)
    attached.set()
    future.wait()


def destroy_in_callbacks(rank: int) -> bool:
    """Destroy in a callback whose caller is another callback, which waits for it."""
    after_a_call(rank, lambda _: after_a_call(rank, lambda _: dist.destroy_process_group()))
    return dist.is_initialized()


def test_a_callback_that_destroys_its_group_does_not_wait_for_itself() -> None:
    assert run(destroy_in_callbacks, 2, ranks="processes") == [False] * 2


def test_only_failures_count_as_such_at_destroy() -> None:
    failures = [ValueError(), KeyboardInterrupt(), SystemExit(1), SystemExit("no data")]
    assert [base.is_failure(error) for error in failures] == [True] * 4
    assert [base.is_failure(error) for error in (None, SystemExit(), SystemExit(0), GeneratorExit())] == [False] * 4


def refuse_threads(rank: int, call: str) -> tuple[str, str]:
    """On rank 1 no thread can be started."""
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(fill(rank, (2,)), async_op=True),
        "isend": lambda: (dist.isend if rank else dist.irecv)(torch.ones(2), 1 - rank),
        "irecv": lambda: (dist.irecv if rank else dist.isend)(torch.ones(2), 1 - rank),
    }
    dist.barrier()
    if rank == 0:
        return failing(lambda: calls[call]().wait())
    with pytest.MonkeyPatch.context() as patch:

        def fail(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start new thread") as caught:
            calls[call]()
        assert "ulimit -u" in caught.value.__notes__[0]
    return failing(dist.barrier)


@pytest.mark.parametrize("call", ["all_reduce", "isend", "irecv"])
def test_a_thread_that_cannot_start_ends_the_group_at_once(call: str) -> None:
    """Once the call was queued for a thread that never ran, and everybody waited, for ever or for the time-out."""
    first, second = run(refuse_threads, 2, call, ranks="processes")
    assert first[0] == "GroupAbortedError", first
    assert "rank 1 aborted: RuntimeError in " in first[1] and "can't start new thread. No thread" in first[1]
    assert "ended with an earlier failure" in second[1]


def refuse_callback_threads(rank: int) -> list[float]:
    tensor, other = fill(rank, (2,)), fill(rank + 2, (2,))
    first: Any = dist.all_reduce(torch.ones(2), async_op=True)
    first.wait()
    # Not before the other rank has got its future, or the call may have completed.
    work: Any = dist.all_reduce(tensor, async_op=True) if rank else None
    if rank:
        with pytest.MonkeyPatch.context() as patch:

            def fail(_: threading.Thread) -> None:
                raise RuntimeError("can't start new thread")

            patch.setattr(threading.Thread, "start", fail)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                work.get_future()
    dist.isend(torch.ones(1), 0).wait() if rank else dist.recv(torch.ones(1), 1)
    work = work or dist.all_reduce(tensor, async_op=True)
    result: list[float] = work.get_future().then(lambda future: future.value()[0].tolist()).wait()
    dist.all_reduce(other)
    return [*result, *other.tolist()]


def test_a_future_whose_callbacks_have_no_thread_is_refused() -> None:
    """Once the future was never completed, since its thread was missed only when the call had ended."""
    sums = [(fill(shift, (2,)) + fill(shift + 1, (2,))).tolist() for shift in (0, 2)]
    assert run(refuse_callback_threads, 2, ranks="processes") == [[*sums[0], *sums[1]]] * 2
