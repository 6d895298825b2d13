"""Simulated ranks: the library's values, virtual time, one history for a seed, and deadlocks without a wait."""

from __future__ import annotations

import ctypes
import gc
import linecache
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from torchdist_ref import simulation
from torchdist_ref.simulation import BlockedOutsideError, DeadlockError, Network, RankError, RankTimeoutError
from torchdist_ref.testing import fill
from torchdist_ref.testing import run as run_for_real

Program = Callable[[int], Any]
SEEDS = range(4)
HOSTS = Network(alpha=2e-5, hosts=(0, 0, 1, 1, 2))


def sums(size: int, count: int) -> torch.Tensor:
    return sum((fill(rank, (count,)) for rank in range(size)), torch.zeros(count))


def every_collective(rank: int) -> list[Any]:
    size = dist.get_world_size()
    summed, sent = fill(rank, (7,)), fill(0, (5,)) if rank == 0 else torch.zeros(5)
    dist.all_reduce(summed)
    dist.broadcast(sent, 0)
    gathered = [torch.zeros(3) for _ in range(size)]
    dist.all_gather(gathered, fill(rank, (3,)))
    part = torch.zeros(2)
    dist.reduce_scatter_tensor(part, fill(rank, (2 * size,)))
    exchanged = torch.zeros(size)
    dist.all_to_all_single(exchanged, fill(rank, (size,)))
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    work = dist.all_reduce(late := fill(rank, (4,)), async_op=True)
    doubled = work.get_future().then(lambda future: future.value()[0] * 2).wait()
    tensors = [summed, sent, *gathered, part, exchanged, late, doubled]
    return [*(tensor.tolist() for tensor in tensors), objects]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_values_are_those_of_real_ranks(size: int) -> None:
    real = run_for_real(every_collective, size)
    for seed in SEEDS:
        assert simulation.run(every_collective, size, seed=seed).values == real


def groups_and_messages(rank: int) -> list[Any]:
    size, found = dist.get_world_size(), []
    evens = dist.new_group(list(range(0, size, 2)))
    own = dist.split_group(split_ranks=[list(range(size // 2)), list(range(size // 2, size))])
    dist.monitored_barrier()
    if rank % 2 == 0:
        dist.all_reduce(tensor := fill(rank, (3,)), group=evens)
        found.append(tensor.tolist())
    received = torch.zeros(6)
    requests = [dist.isend(fill(rank, (6,)), (rank + 1) % size), dist.irecv(received, (rank - 1) % size)]
    for request in requests:
        request.wait()
    return [*found, received.tolist(), dist.get_process_group_ranks(own)]


def test_groups_and_messages_are_those_of_real_ranks() -> None:
    real = run_for_real(groups_and_messages, 5)
    for network in (None, HOSTS):
        for seed in SEEDS:
            assert simulation.run(groups_and_messages, 5, seed=seed, network=network).values == real


def train(rank: int) -> list[Any]:
    model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))
    with torch.no_grad():
        # Ranks that are threads share torch's generator.
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(fill(number, tuple(parameter.shape)) / 40)
    parallel = dist.DistributedDataParallel(model, bucket_cap_mb=0.0001)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        parallel(fill(rank + 3 * step, (4, 6))).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_ddp_trains_as_on_real_ranks() -> None:
    """The last bits of a product of matrices depend on the addresses of its operands, in each run of torch."""
    real = run_for_real(train, 3)
    for seed in SEEDS:
        simulated = simulation.run(train, 3, seed=seed).values
        assert all(torch.equal(a, b) for a, b in zip(*simulated[:2], strict=True))
        torch.testing.assert_close(simulated, real, rtol=1e-5, atol=1e-7)


# ---- one history


def history(seed: int, network: Network | None = HOSTS) -> str:
    return simulation.run(groups_and_messages, 5, seed=seed, network=network).digest


def test_one_seed_is_one_history_and_others_are_others() -> None:
    digests = [history(seed) for seed in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert digests[::2] == digests[1::2] and len(set(digests)) == 4


def test_a_history_depends_on_neither_the_load_nor_the_process_nor_the_order_of_sets() -> None:
    # In a new interpreter, 2 s: the order of a set follows from the seed of its hashes, which is another one there.
    program = "from tests.simulation.test_running import history\nprint(history(0), history(5))"
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    with contended():
        under_load = f"{history(0)} {history(5)}\n"
    assert found == under_load == f"{history(0)} {history(5)}\n"


@contextmanager
def contended() -> Iterator[None]:
    """Have a thread compete for the interpreter, and hand it over at other points of a program than otherwise."""
    ended: list[bool] = []

    def compete() -> None:
        while not ended:
            pass

    before, competitor = sys.getswitchinterval(), threading.Thread(target=compete)
    sys.setswitchinterval(1e-5)
    competitor.start()
    try:
        yield
    finally:
        ended.append(True)
        competitor.join()
        sys.setswitchinterval(before)


def test_decisions_repeat_a_run() -> None:
    first = simulation.run(groups_and_messages, 5, seed=7, network=HOSTS)
    again = simulation.run(groups_and_messages, 5, decisions=first.decisions, network=HOSTS)
    assert first.decisions and again.digest == first.digest and again.times == first.times


def racing(rank: int) -> None:
    if rank:
        dist.send(torch.tensor([rank]), 0)
        return
    order = [dist.recv(torch.zeros(1, dtype=torch.int64)) for _ in range(2)]
    assert order == [2, 1], f"they came in the order {order}"


def test_explore_finds_the_order_in_which_a_program_fails_and_shortens_it() -> None:
    found = simulation.explore(racing, 3)
    assert found is not None and "they came in the order [1, 2]" in str(found.error)
    with pytest.raises(RankError, match="they came in the order"):
        simulation.run(racing, 3, decisions=found.decisions)
    assert len(found.decisions) <= 2
    assert simulation.explore(lambda rank: dist.barrier(), 3, seeds=range(5)) is None


# ---- time


def waits(rank: int) -> Any:
    if rank == 1:
        time.sleep(3600)
        return time.monotonic(), time.time() - 1e9
    try:
        dist.monitored_barrier(timeout=timedelta(minutes=30))
    except dist.RankStalledError as error:
        return str(error), time.monotonic()
    return None


@pytest.mark.parametrize("seed", SEEDS)
def test_each_rank_draws_its_own_random_numbers(seed: int) -> None:
    def program(rank: int) -> list[float]:
        torch.manual_seed(5)
        drawn = [torch.rand(1).item()]
        for number in range(3):
            dist.barrier()
            # Ranks run in turns here, and draw unequally often.
            drawn.extend(torch.rand(1 + rank * number % 2).tolist()[:1])
        return drawn

    def alone(rank: int) -> list[float]:
        generator = torch.Generator().manual_seed(5)
        counts = [1, *(1 + rank * number % 2 for number in range(3))]
        return [torch.rand(count, generator=generator)[0].item() for count in counts]

    before = torch.get_rng_state()
    assert simulation.run(program, 4, seed=seed).values == [alone(rank) for rank in range(4)]
    assert torch.equal(torch.get_rng_state(), before)
    untouched = simulation.run(lambda rank: torch.rand(1).item(), 3, seed=seed).values
    assert untouched == [torch.rand(1).item()] * 3


def test_a_time_out_of_half_an_hour_passes_in_virtual_time() -> None:
    values = simulation.run(waits, 3).values
    assert values[1] == (3600.0, 3600.0)
    for text, now in (values[0], values[2]):
        assert "Rank 1 failed to pass monitoredBarrier in 1800000 ms" in text and now == 1800.0


def python_s_own(rank: int) -> list[Any]:
    items: queue.Queue[int] = queue.Queue()
    ready, lock = threading.Event(), threading.Lock()

    def produce() -> None:
        time.sleep(5)
        with lock:
            items.put(10 * rank + threading.active_count() * 0)
        ready.set()

    thread = threading.Thread(target=produce)
    thread.start()
    in_time = ready.wait(2), time.monotonic()
    with pytest.raises(queue.Empty):
        items.get(timeout=2)
    got = items.get(), time.monotonic()
    thread.join()
    return [in_time, got, ready.is_set(), thread.is_alive(), lock.acquire(timeout=1)]


def test_locks_queues_and_threads_of_a_program_obey_virtual_time() -> None:
    expected = [[(False, 2.0), (10 * rank, 5.0), True, False, True] for rank in range(3)]
    assert simulation.run(python_s_own, 3, init=False).values == expected


def test_simulated_locks_and_queues_have_the_methods_of_this_python() -> None:
    """Python 3.14 gave `RLock` a method that its `Condition` reads, so no group started there."""

    def missing(rank: int) -> list[set[str]]:
        made: list[Any] = [threading.Lock(), threading.RLock(), queue.SimpleQueue()]
        return [public(kind) - public(type(each)) for kind, each in zip(kinds, made, strict=True)]

    def public(kind: type) -> set[str]:
        # Lock has each method a second time, under a name of Python 1.
        return {name for name in dir(kind) if not name.startswith("_") and not name.endswith("_lock")}

    kinds: list[type] = [type(threading.Lock()), type(threading.RLock()), queue.SimpleQueue]
    assert simulation.run(missing, 1, init=False).values == [[set(), set(), set()]]
    assert all(map(public, kinds))


def calls_on_a_thread(rank: int) -> Any:
    found: list[Any] = []

    def call() -> None:
        dist.all_reduce(tensor := fill(rank, (3,)))
        found.append(tensor.tolist())

    def fail() -> None:
        raise KeyError("on a thread")

    for target in (call, fail):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    return found


@pytest.mark.parametrize("make", [lambda: threading.Thread(target=print), logging.Handler])
def test_a_fork_after_a_run_resets_the_locks_that_ranks_made(
    make: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the child, Python resets the locks of each thread and each handler of the log that still exists."""
    kept, raised = simulation.run(lambda rank: make(), 2).values, list[Any]()
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    child = os.fork()
    if child == 0:
        os._exit(len(raised))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(kept) == 2


def test_threads_of_a_rank_see_its_group_and_report_what_they_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: raised.append(arguments.exc_type))
    expected = sums(2, 3).tolist()
    assert simulation.run(calls_on_a_thread, 2).values == [[expected], [expected]]
    assert raised == [KeyError, KeyError]


def test_other_threads_of_the_process_keep_real_time() -> None:
    begun, seen = threading.Event(), []

    def look() -> None:
        begun.wait(60)
        for _ in range(2):
            seen.append(time.monotonic())
            time.sleep(0.001)

    def program(rank: int) -> float:
        begun.set()
        while len(seen) < 2:
            # No operation of the simulation: the run goes on until the other thread has looked twice.
            sum(range(1000))
        time.sleep(100)
        return time.monotonic()

    outside, before = threading.Thread(target=look), time.monotonic()
    outside.start()
    assert simulation.run(program, 1, init=False).values == [100.0]
    outside.join()
    assert before <= seen[0] < seen[1] <= time.monotonic()


@pytest.mark.parametrize(("count", "alpha", "beta"), [(1, 0.25, 0.0), (1000, 0.0, 0.001), (1000, 0.5, 0.002)])
def test_a_message_takes_the_time_of_the_network(count: int, alpha: float, beta: float) -> None:
    def program(rank: int) -> float:
        dist.barrier()
        began = time.monotonic()
        if rank == 0:
            dist.send(fill(0, (count,)), 1)
        else:
            dist.recv(torch.zeros(count), 0)
        return time.monotonic() - began

    network = Network(alpha=alpha, beta=beta, gamma=0.0, hosts=(0, 1))
    seconds = simulation.run(program, 2, network=network).values[1]
    payload = alpha + 4 * count * beta
    # A header of 1 KiB travels with the message, and a doorbell after it.
    assert payload <= seconds <= 2 * alpha + payload + 1100 * beta


# ---- deadlocks


def ring(rank: int) -> None:
    size = dist.get_world_size()
    dist.recv(torch.zeros(3), (rank - 1) % size)
    dist.send(torch.zeros(3), (rank + 1) % size)


@pytest.mark.parametrize("size", [2, 5, 64])
def test_a_circle_of_receives_is_named(size: int) -> None:
    with pytest.raises(DeadlockError) as raised:
        simulation.run(ring, size)
    text = str(raised.value)
    assert f"rank 1 waits for rank 0 in recv at {__file__}" in text and "in a circle" in text
    assert isinstance(raised.value.__cause__, dist.RankStalledError)


def crossed(rank: int) -> None:
    dist.barrier()
    if rank == 2:
        dist.recv(torch.zeros(1), 0)
    elif rank != 3:
        dist.all_reduce(torch.zeros(2), group=dist.group.WORLD)


def test_a_deadlock_of_some_ranks_is_named() -> None:
    with pytest.raises(RankError, match=r"rank 3 destroyed the group"):
        simulation.run(crossed, 4)


def locks(rank: int) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def test_a_wait_without_a_time_out_ends_the_run() -> None:
    with pytest.raises(DeadlockError, match=r"rank 0 waits for a lock of rank 0 \(rank 0\) in "):
        simulation.run(locks, 2, init=False)


def test_ranks_that_need_longer_than_they_may_are_named() -> None:
    def program(rank: int) -> None:
        time.sleep(100 * rank)

    with pytest.raises(RankTimeoutError, match=r"ranks 1, 2 of 3 did not return within 50 s of virtual time"):
        simulation.run(program, 3, timeout=50, init=False)


def blocks_at_a_socket(rank: int) -> None:
    if rank == 1:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(3)
            server.accept()


def blocks_at_a_process(rank: int) -> None:
    if rank == 1:
        subprocess.run(["sleep", "3"], check=True)


def blocks_in_c(rank: int) -> None:
    if rank == 1:
        ctypes.CDLL(None).sleep(3)


def seconds_at(line: str) -> Iterator[float]:
    """Yield the times of a clock that stands until a thread is at the line, and then shows each time 9 s more."""
    now = 0.0
    while True:
        frames = sys._current_frames().values()
        at_line = any(line in linecache.getline(each.f_code.co_filename, each.f_lineno) for each in frames)
        now += 9.0 * at_line
        del frames
        yield now


@pytest.mark.parametrize(
    ("program", "line"),
    [(blocks_at_a_socket, "accept()"), (blocks_at_a_process, "os.waitpid("), (blocks_in_c, "sleep(3)")],
)
def test_a_rank_that_blocks_outside_the_simulation_is_named(
    monkeypatch: pytest.MonkeyPatch, program: Program, line: str
) -> None:
    monkeypatch.setattr(simulation.one_run, "real_monotonic", partial(next, seconds_at(line)))
    with pytest.raises(BlockedOutsideError) as raised:
        simulation.run(program, 2, init=False)
    text = str(raised.value).partition("\n")[0]
    assert text.startswith("rank 1 has been blocked for 8 s in something that is not simulated, at `")
    assert line in text and f"in {__file__}:" in text


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (
            lambda rank: dist.new_group(backend="gloo"),
            "argument 'backend' must be 'ref' or 'fake' on simulated ranks, got 'gloo'",
        ),
        (
            lambda rank: torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:1", rank=rank),
            "torch.distributed.init_process_group: it connects by sockets of torch's, which have no virtual time.",
        ),
    ],
)
def test_waits_without_virtual_time_are_refused_in_one_sentence(program: Program, text: str) -> None:
    with pytest.raises(RankError) as raised:
        simulation.run(program, 2)
    assert text in str(raised.value.__cause__)


def test_what_ranks_may_not_use_works_beside_them() -> None:
    """Other threads of the process make stores as always."""
    begun, ports = threading.Event(), []

    def look() -> None:
        begun.wait(60)
        ports.append(dist.TCPStore("127.0.0.1", 0, 1, True).port)

    def program(rank: int) -> None:
        begun.set()
        while not ports:
            sum(range(1000))

    outside = threading.Thread(target=look)
    outside.start()
    simulation.run(program, 1, init=False)
    outside.join()
    assert ports[0] > 0


# ---- arguments


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"world_size": 0}, "argument 'world_size' must be a number of ranks, at least 1, got 0"),
        ({"backend": "gloo"}, "argument 'backend' must be 'ref' or 'fake' on simulated ranks, got 'gloo'"),
        ({"compute": -1}, "argument 'compute' must be a factor of 0 or more"),
        ({"timeout": 0}, "argument 'timeout' must be a positive number"),
        ({"network": Network(hosts=(0, 1))}, "argument 'network.hosts' must be one host for each of 3 ranks"),
        ({"faults": [simulation.Kill(rank=3, at=1.0)]}, "argument 'rank' must be a rank from 0 to 2, got 3"),
        ({"faults": [simulation.Kill(rank=1)]}, "argument 'at' must be a time, or operation="),
        ({"faults": [simulation.Kill(rank=1, at=1.0, operation=2)]}, "argument 'at' must be a time, or operation="),
        ({"faults": [simulation.Kill(rank=1, at=-1.0)]}, "argument 'at' must be a time of 0 s or later"),
        ({"faults": [simulation.Kill(rank="1", at=1.0)]}, "argument 'rank' must be a rank from 0 to 2, got '1'"),
        ({"faults": [simulation.Slow(rank=1, at=1.0, factor=-2)]}, "argument 'factor' must be a positive number, got"),
        ({"faults": [simulation.Stop(rank=1, at=1.0, seconds=-2)]}, "argument 'seconds' must be a positive number"),
        ({"faults": [simulation.Cut(some=(1,), at=1.0, seconds=0)]}, "argument 'seconds' must be a positive number"),
        ({"faults": [simulation.Delay(some=(1,), at=1.0, longer=-1)]}, "Delay: argument 'longer' must be a positive"),
        ({"faults": [simulation.Delay(some=(), at=1.0)]}, "simulation.Delay: argument 'some' must be some of 3 ranks"),
        ({"faults": [simulation.EndStore(rank=4, at=1.0)]}, "argument 'rank' must be a rank from 0 to 2, got 4"),
        ({"faults": [simulation.Cut(some=(), at=1.0)]}, "argument 'some' must be some of 3 ranks, and not all"),
        ({"faults": [simulation.Cut(some=(0, 1, 2), at=1.0)]}, "argument 'some' must be some of 3 ranks, and not all"),
        ({"faults": [simulation.Cut(some=(0, 7), at=1.0)]}, "argument 'rank' must be a rank from 0 to 2, got 7"),
        ({"timeout": "1"}, "argument 'timeout' must be a positive number"),
        ({"seed": "x"}, "argument 'seed' must be an int, got 'x'"),
        ({"decisions": [1]}, "argument 'decisions' must be the `decisions` of an earlier run, got [1]"),
        ({"progress": 3}, "argument 'progress' must be callable, got 3"),
        ({"faults": simulation.Kill(rank=1, at=1.0)}, "argument 'faults' must be a sequence of faults, got Kill"),
        ({"faults": [simulation.Kill(rank=1, operation=1.5)]}, "argument 'at' must be a time of 0 s or later, or the"),
        ({"faults": [simulation.Kill(rank=1, at=float("nan"))]}, "argument 'at' must be a time of 0 s or later, or"),
        ({"faults": [simulation.Slow(rank=1, at=0.0, factor=float("inf"))]}, "argument 'factor' must be a positive"),
        ({"faults": [simulation.Delay(some=(1,), at=0.0, longer=True)]}, "argument 'longer' must be a positive number"),
        ({"faults": ["kill rank 1"]}, "argument 'faults' must be Kill, Stop, Slow, Cut, Delay, EndHost or EndStore"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], text: str) -> None:
    arguments = {"world_size": 3, **options}
    with pytest.raises((dist.ArgumentError, dist.ArgumentTypeError)) as raised:
        simulation.run(lambda rank: None, **arguments)
    assert text in str(raised.value)


def test_operations_are_counted_as_the_plan_counts_them() -> None:
    def program(rank: int) -> tuple[int, int]:
        before = simulation.simulated_operations()
        dist.barrier()
        return before, simulation.simulated_operations()

    alive = simulation.run(program, 3)
    for rank, (before, after) in enumerate(alive.values):
        assert 0 < before < after <= alive.operations[rank]
        # Before the first operation of the barrier, the rank had returned from nothing that follows.
        died = simulation.run(program, 3, faults=[simulation.Kill(rank=rank, operation=alive.operations[rank] + 1)])
        assert not died.faults and died.operations == alive.operations
    for function in (simulation.simulated_operations, simulation.simulated_store):
        with pytest.raises(dist.ArgumentError, match=f"{function.__name__}: argument 'caller' must be a rank of"):
            function()


def test_seeds_are_several() -> None:
    with pytest.raises(
        dist.ArgumentTypeError, match=r"argument 'seeds' must be several seeds, such as range\(100\), got"
    ):
        simulation.explore(lambda rank: None, 2, seeds=3)  # type: ignore[arg-type]


def test_a_rank_starts_no_simulation() -> None:
    with pytest.raises(RankError, match="argument 'caller' must be outside of a simulation"):
        simulation.run(lambda rank: simulation.run(lambda inner: inner, 1), 2)


def test_runs_of_two_threads_follow_each_other() -> None:
    found: dict[int, list[Any]] = {}

    def start(number: int) -> None:
        found[number] = simulation.run(lambda rank: (time.sleep(5 * number), time.monotonic())[1], 2, init=False).values

    threads = [threading.Thread(target=start, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {1: [5.0, 5.0], 2: [10.0, 10.0]} and time.sleep.__module__ == "time"


def test_a_run_draws_itself_and_is_a_table() -> None:
    result = simulation.run(lambda rank: dist.all_reduce(fill(rank, (300,))), 3, network=Network(hosts=(0, 0, 1)))
    drawn = result._repr_svg_()  # noqa: SLF001 (the name that notebooks call)
    assert drawn.startswith("<svg") and all(f"rank {rank}" in drawn for rank in range(3))
    sent = [event for event in result.trace if event.kind == "send"]
    assert sum(event.nbytes for event in sent) == sum(map(result.timeline.sent_bytes, range(3))) > 1200
    rows = str(result).splitlines()
    assert len(rows) == 4 and rows[1].split()[0] == "0" and f"{result.timeline.sent_bytes(0):,}" in rows[1]


def test_the_runner_of_tests_has_simulated_ranks() -> None:
    assert run_for_real(every_collective, 3, ranks="simulated", seeds=3) == run_for_real(every_collective, 3)


def test_a_run_collects_its_own_garbage() -> None:
    """Else the next run would put it off: objects that are there before a run are left alone in it, and long after."""

    class Node:
        own: Node

    made: list[weakref.ref[Node]] = []

    def program(rank: int) -> None:
        node = Node()
        node.own = node
        made.append(weakref.ref(node))

    enabled = gc.isenabled()
    gc.disable()
    try:
        simulation.run(program, 2)
        assert [each() for each in made] == [None, None]
    finally:
        if enabled:
            gc.enable()
