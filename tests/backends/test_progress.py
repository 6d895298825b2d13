"""Asynchronous calls: their order, their futures, and callbacks that make calls."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.futures import Future

import torchdist_ref as dist
from torchdist_ref.backends import base
from torchdist_ref.backends.worker_threads import CallOrder, OutOfOrderError, WorkerThread
from torchdist_ref.groups import world
from torchdist_ref.testing import fill, run

premul_sum: Any = torch.distributed._make_nccl_premul_sum  # type: ignore[attr-defined]


def sum_of(size: int, shift: int, count: int) -> torch.Tensor:
    return torch.stack([fill(r + shift, (count,)) for r in range(size)]).sum(0)


def call_from_a_callback(rank: int, size: int) -> tuple[list[float], bool]:
    """Wait in a callback for a new collective, which works only if the callback does not block the progress thread."""
    first, second = fill(rank, (5,)), fill(rank + 4, (7,))
    where: list[str] = []

    def then(future: Future[list[torch.Tensor]]) -> torch.Tensor:
        where.append(threading.current_thread().name)
        dist.all_reduce(second)
        return future.value()[0] + second.sum()

    started = threading.Event()
    # Something long before it, so that the future is not done yet when the callback is attached.
    ahead = dist.all_reduce(torch.ones(2_000_000), async_op=True)
    work = dist.all_reduce(first, async_op=True)
    assert work is not None and ahead is not None
    result = work.get_future().then(then).wait()
    started.set()
    ahead.wait()
    wanted = sum_of(size, 0, 5) + sum_of(size, 4, 7).sum()
    return result.tolist(), torch.equal(result, wanted) and "progress" not in where[0]


def test_a_callback_may_wait_on_a_new_collective() -> None:
    for ranks in ("threads", "processes"):
        for values, right in run(call_from_a_callback, 2, 2, ranks=ranks):
            assert right, values


def mix(rank: int, size: int) -> bool:
    """Make synchronous calls after asynchronous ones: the second must see the results of the first."""
    for step in range(30):
        tensor = fill(rank + step, (20_000,))
        work = dist.all_reduce(tensor, async_op=True)
        dist.broadcast(tensor, step % size)
        assert work is not None and work.is_completed()
        if not torch.equal(tensor, sum_of(size, step, 20_000)):
            return False
    return True


def test_a_sync_call_comes_after_the_async_ones_before_it() -> None:
    for ranks in ("threads", "processes"):
        assert run(mix, 2, 2, ranks=ranks) == [True, True]


def from_a_plain_thread(rank: int) -> list[float]:
    """A thread that the user starts means the same world, as autograd's threads do."""
    tensor = fill(rank, (3,))
    thread = threading.Thread(target=dist.all_reduce, args=(tensor,))
    thread.start()
    thread.join()
    return tensor.tolist()


def test_a_plain_thread_uses_the_process_world() -> None:
    assert run(from_a_plain_thread, 2, ranks="processes") == [sum_of(2, 0, 3).tolist()] * 2


def two_groups(rank: int) -> bool:
    """Two threads, each with a group of its own, at once."""
    groups = [dist.new_group(), dist.new_group()]
    tensors = [fill(rank + shift, (1000,)) for shift in (0, 5)]

    def work(index: int) -> None:
        for _ in range(20):
            dist.all_reduce(tensors[index], dist.ReduceOp.MAX, groups[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = [torch.maximum(fill(shift, (1000,)), fill(1 + shift, (1000,))) for shift in (0, 5)]
    return all(torch.equal(a, b) for a, b in zip(tensors, wanted, strict=True))


def test_groups_work_side_by_side_from_several_threads() -> None:
    assert run(two_groups, 2, ranks="processes") == [True, True]


def fail_later(rank: int) -> str:
    tensor = torch.ones(5 + rank)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    try:
        work.wait()
    except dist.MismatchError as error:
        assert work.exception() is error and not work.is_success()
        future = work.get_future()
        return type(error).__name__ + ("" if future.done() else " but the future is not done")
    return "nothing"


def test_an_async_call_raises_in_wait() -> None:
    assert run(fail_later, 2) == ["MismatchError"] * 2


def cross(rank: int, size: int) -> bool:
    """On rank 0 the program's next call comes before the callback's, on the others after it: they match by number."""
    right = True
    for step in range(20):
        first, inner, last = fill(rank + step, (4,)), fill(rank + step + 1, (5,)), fill(rank + step + 2, (6,))

        def then(future: Future[list[torch.Tensor]], inner: torch.Tensor = inner) -> torch.Tensor:
            work = dist.all_reduce(inner, async_op=True)
            assert work is not None
            return work.get_future().wait()[0]

        work = dist.all_reduce(first, async_op=True)
        assert work is not None
        result = work.get_future().then(then)
        if (rank + step) % 2:
            result.wait()
        dist.all_reduce(last)
        right &= torch.equal(result.wait(), sum_of(size, step + 1, 5)) and torch.equal(last, sum_of(size, step + 2, 6))
    return right


def test_calls_of_callbacks_match_by_number_and_not_by_arrival() -> None:
    for ranks in ("threads", "processes"):
        assert run(cross, 3, 3, ranks=ranks) == [True] * 3


def chain(rank: int, size: int) -> bool:
    """Several futures in flight, each with a chain of callbacks that make calls, as gradient compression does."""
    tensors = [fill(rank + i, (50 + i,)) for i in range(5)]
    seconds = [fill(rank + i + 1, (7,)) for i in range(5)]
    thirds = [fill(rank + i + 2, (9,)) for i in range(5)]

    def reduce_more(tensor: torch.Tensor) -> torch.Tensor:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        return work.get_future().wait()[0]

    results = []
    for tensor, second, third in zip(tensors, seconds, thirds, strict=True):
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        future = work.get_future()
        if rank:
            # Done already on this rank, so its callbacks run on the program's thread.
            work.wait()
        following = future.then(lambda _, tensor=second: reduce_more(tensor))
        results.append(following.then(lambda _, tensor=third: reduce_more(tensor)))
    return all(torch.equal(r.wait(), sum_of(size, i + 2, 9)) for i, r in enumerate(results)) and all(
        torch.equal(t, sum_of(size, i + 1, 7)) for i, t in enumerate(seconds)
    )


def test_chains_of_callbacks_keep_their_order_on_any_thread() -> None:
    for ranks in ("threads", "processes"):
        assert run(chain, 3, 3, ranks=ranks) == [True] * 3


def test_a_callback_computes_on_as_many_cores_as_the_process_chose() -> None:
    """A new thread's first matrix product takes all cores, and two ranks on two cores keep each other from theirs."""
    helpers, matrix = [], torch.ones(400, 400)

    def work() -> None:
        before = len(os.listdir("/proc/self/task"))
        torch.mm(matrix, matrix)
        helpers.append(len(os.listdir("/proc/self/task")) - before)

    lane = WorkerThread("a worker")
    lane.put(work)
    lane.close()
    assert torch.get_num_threads() == 1 and helpers == [0]


@pytest.mark.parametrize("backend", ["ref", "gloo"])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_whatever_a_callback_raises_ends_its_future(kind: type[BaseException], backend: str) -> None:
    def program(rank: int) -> None:
        def raises(_: Any) -> None:
            raise kind("in a callback")

        work = dist.all_reduce(fill(rank, (3,)), async_op=True)
        assert work is not None
        with pytest.raises((ValueError, RuntimeError), match="in a callback"):
            work.get_future().then(raises).wait()

    run(program, 2, backend=backend, timeout=5)


def test_a_call_that_waits_and_comes_before_the_awaited_one_runs_first() -> None:
    """The callback that makes the awaited call may be behind the callback whose call waits; once both waited."""
    ran: list[str] = []

    def give_up(number: Any, seconds: float) -> None:
        assert seconds < 5, "the call of the first callback never runs"

    running = threading.Lock()
    order = CallOrder("a group", running, give_up)

    def first_callbacks_call() -> None:
        ran.append("1.1")
        order.later((2, 1), lambda: ran.append("2.1"))

    def third_call() -> None:
        if "2.1" not in ran:
            raise OutOfOrderError((2, 1))
        ran.append("3")

    assert running.acquire(False)
    order.later((1, 1), first_callbacks_call)
    order.run_in_order((3, 0), third_call)
    running.release()
    order.close()
    assert ran == ["1.1", "2.1", "3"]


def call_after(kind: str, attached: threading.Event, rank: int) -> list[float]:
    """Make a call in a callback, which runs on a thread of its own on rank 1, and on this one on rank 0."""
    tensor, inside, after = fill(rank, (4,)), fill(rank + 2, (2,)), fill(rank + 4, (2,))
    # The call of rank 1 is not over when its callback is attached.
    assert rank == 1 or attached.wait(5)
    if kind == "coalesced":
        future = dist.all_reduce_coalesced([tensor, fill(rank + 6, (3,))], async_op=True)
        work: Any = future
    else:
        op = premul_sum(2.0) if kind == "premultiplied" else dist.ReduceOp.SUM
        work = dist.all_reduce(tensor, op, async_op=True)
        if rank == 0:
            work.wait()
        future = work.get_future()
    program_goes_on = threading.Event()

    def callback(_: Any) -> None:
        # The program of rank 1 makes its next call first.
        assert rank == 0 or program_goes_on.wait(5)
        dist.all_reduce(inside)

    result = future.then(callback)
    attached.set()
    if rank == 0:
        result.wait()
    program_goes_on.set()
    dist.all_reduce(after)
    result.wait()
    work.wait()
    return [*tensor.tolist(), *inside.tolist(), *after.tolist()]


@pytest.mark.parametrize("kind", ["plain", "premultiplied", "coalesced"])
def test_calls_of_callbacks_have_one_number_on_any_thread(kind: str) -> None:
    """Once those of joined calls were numbered as the program's where the program completed the call."""
    factor = 2.0 if kind == "premultiplied" else 1.0
    wanted = [*(factor * sum_of(2, 0, 4)).tolist(), *sum_of(2, 2, 2).tolist(), *sum_of(2, 4, 2).tolist()]
    assert run(partial(call_after, kind, threading.Event()), 2, timeout=10) == [wanted] * 2


def wait_in_the_callback(rank: int) -> tuple[bool, list[float]]:
    tensor = fill(rank, (3,))
    work = dist.all_reduce(tensor, premul_sum(2.0), async_op=True)
    assert work is not None
    waited: bool = work.get_future().then(lambda _: work.wait(5)).wait()
    return waited, tensor.tolist()


def test_a_callback_may_wait_for_its_own_joined_call() -> None:
    assert run(wait_in_the_callback, 2, timeout=10) == [(True, (2 * sum_of(2, 0, 3)).tolist())] * 2


OUTSTANDING: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(2), async_op=True),
    "irecv": lambda: dist.irecv(torch.ones(2), 1),
    "isend": lambda: dist.isend(torch.ones(2), 1),
}


@pytest.mark.parametrize("operation", OUTSTANDING)
def test_calls_that_nobody_joins_end_with_their_group(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once they waited for the time-out after `destroy_process_group`."""
    monkeypatch.setattr(base, "CLOSE_SECONDS", 0.05)
    over = threading.Event()

    def program(rank: int) -> str:
        if rank == 1:
            over.wait(10)
            return ""
        try:
            work = OUTSTANDING[operation]()
            dist.destroy_process_group()
            with pytest.raises(dist.GroupAbortedError) as caught:
                work.wait(5)
            return str(caught.value)
        finally:
            over.set()

    assert "this rank destroyed the group meanwhile" in run(program, 2)[0]


@pytest.mark.parametrize("where", ["record", "begin"])
def test_a_signal_between_number_and_start_of_a_call_ends_the_group(where: str) -> None:
    """Once the call's number was used up, or the lock taken, and the next call waited in vain."""

    def program(rank: int) -> str:
        dist.all_reduce(fill(rank, (2,)))
        backend: Any = world.default_group().backend
        part, name = (backend.recorder, "record") if where == "record" else (backend, "_begin")
        real = getattr(part, name)

        def then_interrupted(*arguments: Any) -> None:
            setattr(part, name, real)
            real(*arguments)
            raise KeyboardInterrupt

        if rank == 0:
            setattr(part, name, then_interrupted)
            with pytest.raises(KeyboardInterrupt):
                dist.all_reduce(fill(rank, (2,)))
        with pytest.raises(dist.GroupAbortedError) as caught:
            dist.all_reduce(fill(rank, (2,)))
        return str(caught.value)

    own, other = run(program, 2, timeout=10)
    assert "the group ended with an earlier failure (KeyboardInterrupt" in own
    assert "rank 0 aborted: KeyboardInterrupt" in other


def wait_a_little(rank: int, late: threading.Event) -> tuple[str, tuple[int, ...]]:
    """Make a call that rank 2 makes later, on a group whose ranks have other numbers; give up on it."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return "", ()
    if rank == 2:
        assert late.wait(10)
    tensor = fill(rank, (5,))
    work: Any = dist.all_reduce(tensor, group=group, async_op=True)
    text, ranks = "", ()
    if rank == 1:
        # A rank notes whom it waits for once it has waited a moment.
        while not work.awaited()[1]:
            pass
        with pytest.raises(dist.RankStalledError) as caught:
            work.wait(0.01)
        text, ranks = str(caught.value), caught.value.ranks
        late.set()
    work.wait()
    assert torch.equal(tensor, fill(1, (5,)) + fill(2, (5,))) and work.awaited is None
    return text, ranks


def test_a_wait_that_gives_up_names_the_rank_that_has_not_called() -> None:
    text, ranks = run(wait_a_little, 3, threading.Event())[1]
    assert text.startswith("all_reduce: not done after 0.01 s of waiting; the call itself is still running. ")
    assert text.endswith("It waits for rank 1 (global 2) of group 'group 1'.") and ranks == (2,)


@pytest.mark.parametrize("through", ["wait", "is_completed"])
@pytest.mark.parametrize("kind", ["plain", "premultiplied"])
@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_callbacks_do_not_run_on_the_thread_that_waits(backend: str, kind: str, through: str) -> None:
    """The waiting thread continues once they have run."""

    def program(rank: int) -> tuple[list[bool], list[float]]:
        threads: list[int] = []
        tensor = fill(rank, (3,))
        if rank == 1:
            # The other rank has its callback before this call.
            dist.recv(torch.zeros(1), 0)
        work = dist.all_reduce(tensor, op, async_op=True)
        if rank == 1:
            return [not work.wait()], tensor.tolist()
        work.get_future().add_done_callback(lambda _: threads.append(threading.get_ident()))
        dist.send(torch.zeros(1), 1)
        if through == "wait":
            work.wait()
        while not work.is_completed():
            pass
        return [thread == threading.get_ident() for thread in threads], tensor.tolist()

    op = dist.ReduceOp.SUM if kind == "plain" else dist._make_nccl_premul_sum(2.0)
    expected = ((fill(0, (3,)) + fill(1, (3,))) * (1 if kind == "plain" else 2)).tolist()
    assert run(program, 2, backend=backend) == [([False], expected)] * 2


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_callbacks_leave_no_thread(backend: str) -> None:
    def program(rank: int) -> list[int]:
        if rank == 1:
            dist.recv(torch.zeros(1), 0)
        work = dist.all_reduce(fill(rank, (3,)), async_op=True)
        ran = threading.Event()
        work.get_future().add_done_callback(lambda _: ran.set())
        if rank == 0:
            dist.send(torch.zeros(1), 1)
        work.wait()
        assert ran.wait(10.0)
        counts = [sum("callbacks" in thread.name for thread in threading.enumerate())]
        dist.destroy_process_group()
        return [*counts, sum("callbacks" in thread.name for thread in threading.enumerate())]

    assert run(program, 2, backend=backend, ranks="processes")[0] == [1, 0]
