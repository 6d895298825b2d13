"""Completion of a call is one event: after `wait`, or once `is_completed`, its future is done and callbacks have run.

The table has every asynchronous call, on every backend, through our functions and torch's. Each call is made many
times, and again while the thread for callbacks is occupied: then whatever needs that thread fails at each repetition.
torch's Gloo is a row of the table, as the oracle.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d
from torch import Tensor
from torch.futures import Future, collect_all

import torchdist_ref as dist
from tests.backends.nccl_stand_in import instead_of_nccl
from torchdist_ref.backends.worker_threads import CallbackThreads
from torchdist_ref.testing import fill, run
from torchdist_ref.work import Work

# The older names are the ones that torch 2.11 has too.
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

SIZE = 2
REPETITIONS = 20
# The handles of a call, the tensors that it writes, and their values.
Started = tuple[list[Any], list[Tensor], list[Tensor]]
Api = Any


def both(shift: int = 0) -> Tensor:
    return fill(shift, (4,)) + fill(1 + shift, (4,))


def all_reduce(api: Api, rank: int) -> Started:
    tensor = fill(rank, (4,))
    return [api.all_reduce(tensor, async_op=True)], [tensor], [both()]


def broadcast(api: Api, rank: int) -> Started:
    tensor = fill(rank, (4,))
    return [api.broadcast(tensor, 1, async_op=True)], [tensor], [fill(1, (4,))]


def reduce(api: Api, rank: int) -> Started:
    tensor = fill(rank, (4,))
    work = api.reduce(tensor, 0, async_op=True)
    return [work], [tensor] if rank == 0 else [], [both()] if rank == 0 else []


def all_gather(api: Api, rank: int) -> Started:
    outputs = [torch.zeros(4) for _ in range(SIZE)]
    return [api.all_gather(outputs, fill(rank, (4,)), async_op=True)], outputs, [fill(0, (4,)), fill(1, (4,))]


def all_gather_into_tensor(api: Api, rank: int) -> Started:
    output = torch.zeros(2 * SIZE)
    work = api.all_gather_into_tensor(output, fill(rank, (2,)), async_op=True)
    return [work], [output], [torch.cat([fill(0, (2,)), fill(1, (2,))])]


def gather(api: Api, rank: int) -> Started:
    outputs = [torch.zeros(4) for _ in range(SIZE)] if rank == 0 else []
    work = api.gather(fill(rank, (4,)), outputs or None, async_op=True)
    return [work], outputs, [fill(0, (4,)), fill(1, (4,))][: len(outputs)]


def scatter(api: Api, rank: int) -> Started:
    output, inputs = torch.zeros(3), [fill(7 * to, (3,)) for to in range(SIZE)] if rank == 0 else None
    return [api.scatter(output, inputs, async_op=True)], [output], [fill(7 * rank, (3,))]


def reduce_scatter(api: Api, rank: int) -> Started:
    output, inputs = torch.zeros(4), [fill(rank + 10 * block, (4,)) for block in range(SIZE)]
    return [api.reduce_scatter(output, inputs, async_op=True)], [output], [both(10 * rank)]


def reduce_scatter_tensor(api: Api, rank: int) -> Started:
    output = torch.zeros(2)
    return [api.reduce_scatter_tensor(output, fill(rank, (4,)), async_op=True)], [output], [both()[2 * rank :][:2]]


def all_to_all_single(api: Api, rank: int) -> Started:
    output = torch.zeros(4)
    blocks = [fill(r, (4,))[2 * rank :][:2] for r in range(SIZE)]
    return [api.all_to_all_single(output, fill(rank, (4,)), async_op=True)], [output], [torch.cat(blocks)]


def barrier(api: Api, rank: int) -> Started:
    return [api.barrier(async_op=True)], [], []


def isend_irecv(api: Api, rank: int) -> Started:
    received = torch.zeros(4)
    works = [api.isend(fill(rank, (4,)), 1 - rank), api.irecv(received, 1 - rank)]
    return works, [received], [fill(1 - rank, (4,))]


def batch_isend_irecv(api: Api, rank: int) -> Started:
    received, peer = torch.zeros(4), 1 - rank
    operations = [api.P2POp(api.isend, fill(rank, (4,)), peer), api.P2POp(api.irecv, received, peer)]
    return api.batch_isend_irecv(operations), [received], [fill(peer, (4,))]


def all_reduce_coalesced(api: Api, rank: int) -> Started:
    tensors = [fill(rank, (4,)), fill(rank + 3, (4,))]
    return [api.all_reduce_coalesced(tensors, async_op=True)], tensors, [both(), both(3)]


def all_gather_coalesced(api: Api, rank: int) -> Started:
    inputs = [fill(rank, (4,)), fill(rank + 3, (2,))]
    outputs = [[torch.zeros_like(tensor) for tensor in inputs] for _ in range(SIZE)]
    future = api.all_gather_coalesced(outputs, inputs, async_op=True)
    wanted = [fill(0, (4,)), fill(3, (2,)), fill(1, (4,)), fill(4, (2,))]
    return [future], [tensor for listed in outputs for tensor in listed], wanted


def coalescing_manager(api: Api, rank: int) -> Started:
    tensors = [fill(rank, (4,)), fill(rank + 3, (4,))]
    with api._coalescing_manager(async_ops=True) as coalesced:
        for tensor in tensors:
            api.all_reduce(tensor)
    return coalesced.works, tensors, [both(), both(3)]


def premultiplied(api: Api, rank: int) -> Started:
    tensor = fill(rank, (4,))
    return [api.all_reduce(tensor, api._make_nccl_premul_sum(2.0), async_op=True)], [tensor], [2 * both()]


def sparse(api: Api, rank: int) -> Started:
    tensor = fill(rank, (4,)).to_sparse()
    return [api.all_reduce(tensor, async_op=True)], [tensor], [both()]


COLLECTIVES = [
    all_reduce,
    broadcast,
    reduce,
    all_gather,
    all_gather_into_tensor,
    gather,
    scatter,
    reduce_scatter,
    reduce_scatter_tensor,
    all_to_all_single,
    barrier,
]
MESSAGES = [isend_irecv, batch_isend_irecv]
COALESCED = [all_reduce_coalesced, all_gather_coalesced]
WITHOUT_FUTURE_ON_GLOO = [reduce_scatter, reduce_scatter_tensor, *MESSAGES]
ON_TORCHS_GLOO = [call for call in COLLECTIVES if call not in WITHOUT_FUTURE_ON_GLOO]
MOST_REPEATED = [all_reduce, isend_irecv, all_reduce_coalesced, coalescing_manager]
Calls = list[Callable[[Api, int], Started]]


@contextmanager
def occupied_callbacks(api: Api, rank: int) -> Iterator[None]:
    """Keep one thread for callbacks of each rank occupied, by a callback that waits for the end of the context."""
    go, entered = threading.Event(), threading.Event()
    future = None
    for each in range(SIZE):
        if rank == each:
            work = api.all_reduce(torch.ones(1), async_op=True)
            future = work.get_future().then(lambda _: (entered.set(), go.wait(20)))
            # The call is not over when its callback is attached.
            api.send(torch.ones(1), 1 - rank)
        else:
            api.recv(torch.ones(1), each)
            api.all_reduce(torch.ones(1))
    assert entered.wait(20) and future is not None
    try:
        yield
    finally:
        go.set()
        future.wait()


def tensors_in(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [tensor for each in value for tensor in tensors_in(each)]


def as_future(work: Any) -> Any:
    return work if isinstance(work, Future) else work.get_future()


def check_done(api: Api, rank: int, call: Callable[[Api, int], Started], early: bool, polls: bool) -> None:
    """Make a call, wait for it, and look at once at its futures, which were made before or after that."""
    works, outputs, wanted = call(api, rank)
    futures = [as_future(work) for work in works] if early else []
    for work in works:
        if not polls:
            work.wait()
        while polls and not (work.done() if isinstance(work, Future) else work.is_completed()):
            # The threads that complete the call get the processor at once.
            os.sched_yield()
    futures = futures or [as_future(work) for work in works]
    assert [future.done() for future in futures] == [True] * len(works), call.__name__
    assert collect_all(futures).done()
    found = [tensor for future in futures for tensor in tensors_in(future.value())]
    assert found == [tensor for future in futures for tensor in tensors_in(future.wait())] or found
    for output, value in zip(outputs, wanted, strict=True):
        assert torch.equal(output.to_dense(), value), (call.__name__, output, value)
    if outputs:
        assert torch.equal(one_row(found), one_row(outputs)), call.__name__


def one_row(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.to_dense().reshape(-1) for tensor in tensors])


def check_calls(api: Api, calls: Calls, rank: int) -> None:
    for call in calls:
        for repetition in range(REPETITIONS if call in MOST_REPEATED else 3):
            check_done(api, rank, call, early=repetition % 2 == 0, polls=repetition % 10 == 2)


def check_occupied(api: Api, calls: Calls, rank: int) -> None:
    with occupied_callbacks(api, rank):
        for call in calls:
            for early, polls in ((True, False), (False, False), (False, True)):
                check_done(api, rank, call, early, polls)


def check_callbacks(api: Api, calls: Calls, rank: int) -> None:
    """Callbacks, what continues from them, and what continues in C++ have run after `wait` and once `is_completed`."""
    for call in calls:
        for polls in (False, True):
            works, _, _ = call(api, rank)
            for work in works:
                ran: list[str] = []
                future = as_future(work)
                future.add_done_callback(lambda _, ran=ran: ran.append("first"))
                following = future.then(lambda done, ran=ran: ran.append("second") or done.value())
                last = following.then(lambda done, ran=ran: ran.append("third") or len(done.value()))
                all_of_them = collect_all([future, last]).then(lambda _, ran=ran: ran.append("all"))
                if isinstance(work, Future):
                    # A wait for a future returns before its callbacks have run, as torch's.
                    all_of_them.wait()
                else:
                    while polls and not work.is_completed():
                        os.sched_yield()
                    assert polls or work.wait()
                assert sorted(ran) == ["all", "first", "second", "third"], (call.__name__, ran)
                assert ran.index("first") < ran.index("second") < ran.index("third") < ran.index("all")
                assert following.done() and last.done() and all_of_them.done()


def check_one_callback(api: Api, rank: int) -> None:
    """A call has completed only when its callback has returned: here it waits until the program has looked."""
    for each in range(SIZE):
        if rank != each:
            api.recv(torch.ones(1), each)
            api.all_reduce(fill(rank, (4,)))
            continue
        entered, go, threads = threading.Event(), threading.Event(), []

        def callback(_: Any, entered: Any = entered, go: Any = go, threads: Any = threads) -> None:
            entered.set()
            assert go.wait(20)
            threads.append(threading.get_ident())

        tensor = fill(rank, (4,))
        work = api.all_reduce(tensor, async_op=True)
        following = work.get_future().then(callback)
        api.send(torch.ones(1), 1 - rank)
        assert entered.wait(20)
        assert not work.is_completed() and not following.done() and work.get_future().done()
        with pytest.raises(RuntimeError, match=r"callback|timed out"):
            work.wait(timedelta(milliseconds=10))
        go.set()
        assert work.wait()
        assert len(threads) == 1 and threads[0] != threading.get_ident()
        assert work.is_completed() and following.done() and torch.equal(tensor, both())


def check_all(api: Api, calls: Calls, rank: int, callbacks_on_torchs_threads: bool = False) -> None:
    check_calls(api, calls, rank)
    # torch's barrier waits for all earlier calls, whose callbacks belong to them.
    check_occupied(api, [call for call in calls if not (callbacks_on_torchs_threads and call is barrier)], rank)
    check_callbacks(api, calls, rank)
    check_one_callback(api, rank)


OURS: Calls = [*COLLECTIVES, *MESSAGES, *COALESCED, premultiplied, sparse]
THROUGH_TORCH: Calls = [*COLLECTIVES, *MESSAGES, coalescing_manager]


def on_ours(rank: int, backend: str, path: str, hosts: bool, api: Api, calls: Calls) -> None:
    if hosts:
        os.environ["TORCHDIST_REF_HOST_ID"] = f"host {rank}"
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=SIZE)
    try:
        check_all(api, calls, rank)
    finally:
        dist.destroy_process_group()


def on_torchs(rank: int, backend: str, path: str, calls: Calls) -> None:
    c10d.init_process_group(
        backend, init_method=f"file://{path}", rank=rank, world_size=SIZE, timeout=timedelta(seconds=20)
    )
    try:
        check_all(c10d, calls, rank, callbacks_on_torchs_threads=backend == "gloo")
        c10d.barrier()
    finally:
        c10d.destroy_process_group()


@pytest.mark.parametrize("hosts", [False, True], ids=["one host", "two hosts"])
def test_calls_on_ref_complete_with_their_futures(hosts: bool, tmp_path: Path) -> None:
    run(on_ours, SIZE, "ref", f"{tmp_path}/meet", hosts, dist, OURS, init=False, ranks="processes")


def test_calls_on_ref_threads_complete_with_their_futures() -> None:
    run(partial(check_all, dist, OURS), SIZE)


def test_calls_on_gloo_complete_with_their_futures(tmp_path: Path) -> None:
    run(on_ours, SIZE, "gloo", f"{tmp_path}/meet", False, dist, OURS, init=False, ranks="processes")


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_torchs_functions_on_our_group_complete_with_their_futures(backend: str, tmp_path: Path) -> None:
    run(on_ours, SIZE, backend, f"{tmp_path}/meet", False, c10d, THROUGH_TORCH, init=False, ranks="processes")


def test_torchs_functions_on_torchs_ref_complete_with_their_futures(tmp_path: Path) -> None:
    run(on_torchs, SIZE, "ref", f"{tmp_path}/meet", THROUGH_TORCH, init=False, ranks="processes")


def test_torchs_gloo_is_the_oracle_of_this_table(tmp_path: Path) -> None:
    run(on_torchs, SIZE, "gloo", f"{tmp_path}/meet", ON_TORCHS_GLOO, init=False, ranks="processes")


def message_on_torchs_gloo(rank: int, path: str) -> tuple[bool, bool, bool]:
    c10d.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    work = c10d.irecv(torch.ones(1), 0) if rank else c10d.isend(fill(0, (1,)), 1)
    c10d.barrier()
    before = work.is_completed()
    try:
        has_future = bool(work.get_future())
    except RuntimeError:
        has_future = False
    work.wait()
    after = work.is_completed()
    c10d.destroy_process_group()
    return before, has_future, after


def test_a_message_of_torchs_gloo_is_completed_by_its_wait(tmp_path: Path) -> None:
    """So a program that polls never sees its end, and none in a future: on ours both do."""
    run_of = run(message_on_torchs_gloo, 2, f"{tmp_path}/meet", init=False, ranks="processes")
    assert run_of == [(False, False, True)] * 2


def on_nccl(rank: int, path: str) -> None:
    dist.init_process_group("nccl", init_method=f"file://{path}", rank=rank, world_size=SIZE)
    try:
        calls = [call for call in ON_TORCHS_GLOO if call is not all_to_all_single]
        check_calls(dist, calls, rank)
        check_occupied(dist, [call for call in calls if call is not barrier], rank)
        check_callbacks(dist, calls, rank)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def test_calls_on_nccl_complete_with_their_futures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the stand-in, some of whose calls have no futures. Once `get_future` waited for a lock that it held."""
    instead_of_nccl(monkeypatch)
    run(on_nccl, SIZE, f"{tmp_path}/meet", init=False, ranks="processes")


def test_calls_on_fake_are_complete_at_once() -> None:
    dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=SIZE)
    try:
        for call in OURS:
            for handle in call(dist, 1)[0]:
                future = as_future(handle)
                assert future.done() and future.then(lambda done: done.value() is not None).value()
                assert isinstance(handle, Future) or (handle.is_completed() and handle.wait())
    finally:
        dist.destroy_process_group()


# ---- code in callbacks


def in_a_callback(rank: int) -> list[float]:
    """Wait in a callback for calls of the program, whose callbacks come after this one on the same thread."""
    tensors, signals = [fill(rank + shift, (4,)) for shift in range(4)], [torch.ones(1), torch.ones(1)]
    ran: list[str] = []
    if rank == 1:
        # The calls of the other rank are not over when their callbacks are attached.
        dist.recv(signals[0], 0)
    works: list[Any] = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    futures = [work.get_future() for work in works]

    def callback(_: Any) -> list[Tensor]:
        seen = [work.wait() and work.is_completed() and work.get_future().done() for work in works[:3]]
        assert seen == [True] * 3
        # Here calls end in order, and the callbacks of the others come after this one.
        assert not ran or (rank, dist.get_backend()) != (0, "ref")
        while not futures[3].done():
            pass
        assert works[3].is_completed() and collect_all(futures).done() and works[3].get_future_result().value() == 0
        return [tensor for future in futures for tensor in (future.value()[0], future.wait()[0])]

    result = futures[0].then(callback)
    for future in futures[1:]:
        future.then(lambda _: ran.append("later"))
    if rank == 0:
        dist.send(signals[1], 1)
    for work in works:
        work.wait()
    assert ran == ["later"] * 3
    return [value for tensor in result.value()[::2] for value in tensor.tolist()]


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_a_callback_may_wait_for_calls_and_futures_of_the_program(backend: str) -> None:
    """Once a wait for such a future never ended: the thread that completes it was the one that waited."""
    wanted = [value for shift in range(4) for value in both(shift).tolist()]
    assert run(in_a_callback, SIZE, backend=backend) == [wanted] * SIZE


def continue_after_all(rank: int, api: Api) -> list[float]:
    """Make a call and wait for it in a callback of `collect_all`, and in one of a future of coalesced calls."""
    tensors = [fill(rank + shift, (4,)) for shift in range(4)]

    def again(done: Any) -> Tensor:
        first = done.value()[0]
        tensor = first if isinstance(first, Tensor) else first.value()[0]
        return api.all_reduce(tensor, async_op=True).get_future().wait()[0]

    futures = [api.all_reduce(tensor, async_op=True).get_future() for tensor in tensors[:2]]
    first = collect_all(futures).then(again).wait().tolist()
    with api._coalescing_manager(async_ops=True) as coalesced:
        for tensor in tensors[2:]:
            api.all_reduce(tensor)
    return [*first, *coalesced.works[0].get_future().then(again).wait().tolist()]


def test_a_callback_of_several_futures_may_wait_for_a_new_call() -> None:
    wanted = [*(2 * both()).tolist(), *(2 * both(2)).tolist()]
    assert run(continue_after_all, SIZE, c10d, ranks="processes", timeout=20) == [wanted] * SIZE


# ---- one Work


@contextmanager
def occupied_thread() -> Iterator[tuple[Any, threading.Event]]:
    """Give the runner of a new call, whose thread for callbacks is occupied, and an event that frees the thread."""
    threads, go, entered = CallbackThreads("a group"), threading.Event(), threading.Event()
    threads.runner()(lambda: (entered.set(), go.wait(20)))
    assert entered.wait(20)
    try:
        yield threads.runner(), go
    finally:
        go.set()
        threads.close()


def test_a_failed_call_raises_from_its_future_at_once() -> None:
    with occupied_thread() as (runner, go):
        work = Work("all_reduce", [fill(0, (2,))], runner)
        future, everything = work.get_future(), work.get_future_result()
        work.fail(KeyError("the reason"))
        assert future.done()
        for read in (future.value, future.wait, collect_all([future]).wait):
            with pytest.raises(KeyError, match="the reason"):
                read()
        assert work.get_future_result().value() == 2
        go.set()
        assert everything.wait() == 2
        with pytest.raises(KeyError, match="the reason"):
            work.wait()


def test_callbacks_of_one_future_run_in_the_order_in_which_they_were_attached() -> None:
    """The fourth is attached when the call is over, and the thread for callbacks has yet to run the first."""
    ran: list[int] = []
    with occupied_thread() as (runner, go):
        work = Work("all_reduce", [fill(0, (2,))], runner)
        future = work.get_future()
        for number in range(3):
            future.add_done_callback(lambda _, number=number: ran.append(number))
        work.finish()
        assert future.done() and not work.is_completed()
        last = future.then(lambda _: ran.append(3))
        go.set()
        work.wait()
        assert ran == [0, 1, 2, 3] and last.done()
        future.add_done_callback(lambda _: ran.append(threading.get_ident()))
        assert ran[4:] == [threading.get_ident()]


def test_a_callback_that_raises_anything_leaves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    threads, ran = CallbackThreads("a group"), []
    work = Work("all_reduce", [], threads.runner())

    def exits(_: Any) -> None:
        raise SystemExit("in a callback")

    work.get_future().add_done_callback(exits)
    work.get_future().add_done_callback(lambda _: ran.append("second"))
    work.finish()
    assert work.wait() and ran == ["second"] and "SystemExit: in a callback" in caplog.text
    threads.close()


def test_a_wait_that_gives_up_on_a_callback_says_so() -> None:
    with occupied_thread() as (runner, go):
        work = Work("all_reduce", [], runner)
        work.get_future().add_done_callback(lambda _: None)
        work.finish()
        with pytest.raises(
            dist.RankStalledError, match=r"all_reduce: the call is over, .* after 0\.01 s .* a callback"
        ):
            work.wait(0.01)
        go.set()
        assert work.wait(20)


def test_a_callback_may_wait_for_its_own_call_without_a_thread_for_callbacks() -> None:
    work = Work("all_reduce", [fill(0, (2,))])
    waited = work.get_future().then(lambda _: work.wait(1.0) and work.is_completed())
    work.finish()
    assert waited.value() is True and work.wait()


def test_several_threads_see_a_future_done_once() -> None:
    """Each completes torch's future, which accepts that once."""
    with occupied_thread() as (runner, _):
        for _ in range(50):
            work, together, values = Work("all_reduce", [fill(0, (2,))], runner), threading.Barrier(4), []
            future = work.get_future()

            def look(together: Any = together, work: Any = work, future: Any = future, values: Any = values) -> None:
                together.wait(20)
                values.append((work.wait(), future.done(), future.value()[0].tolist()))

            waiting = [threading.Thread(target=look) for _ in range(3)]
            for thread in waiting:
                thread.start()
            together.wait(20)
            work.finish()
            for thread in waiting:
                thread.join(20)
            assert values == [(True, True, fill(0, (2,)).tolist())] * 3


def test_callbacks_run_in_callbacks_when_their_threads_have_ended() -> None:
    """Once the inner one was dropped: Python enters a context once at a time."""
    threads, ran = CallbackThreads("a group"), []
    runner = threads.runner()
    threads.close()
    runner(lambda: runner(lambda: ran.append("inner")))
    assert ran == ["inner"]
