"""Programs in which the order of events matters, with what must hold in each order.

``python -m tests.simulation.orders NAME FIRST COUNT`` runs one with so many seeds, and prints the first one that fails,
the number of decisions that still make it fail, and the error.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

import torch

import torchdist_ref as dist
from torchdist_ref import simulation
from torchdist_ref.testing import fill


def total(size: int, number: int) -> torch.Tensor:
    return sum((fill(rank + number, (4,)) for rank in range(size)), torch.zeros(4))


def messages(rank: int) -> None:
    """Post receives in another order than that in which the messages come, and wait for the last one first."""
    size = dist.get_world_size()
    peers = [other for other in range(size) if other != rank]
    posted = [(other, tag, torch.zeros(3)) for tag in (2, 1) for other in peers]
    receives = [dist.irecv(tensor, other, tag=tag) for other, tag, tensor in posted]
    sends = [dist.isend(fill(rank + tag, (3,)), other, tag=tag) for other in reversed(peers) for tag in (1, 2)]
    for receive in reversed(receives):
        receive.wait()
    for send in sends:
        send.wait()
    for other, tag, tensor in posted:
        assert torch.equal(tensor, fill(other + tag, (3,))), (rank, other, tag)


def chained_messages(rank: int) -> None:
    """The message for the receive that was posted last comes first, and only its wait lets the other one be sent."""
    if rank == 0:
        late, soon = torch.zeros(2), torch.zeros(2)
        first, second = dist.irecv(late, 1, tag=1), dist.irecv(soon, 1, tag=2)
        second.wait()
        dist.send(soon, 1, tag=3)
        first.wait()
        assert torch.equal(late, soon + 1)
    elif rank == 1:
        dist.send(fill(0, (2,)), 0, tag=2)
        dist.recv(answer := torch.zeros(2), 0, tag=3)
        dist.send(answer + 1, 0, tag=1)


def receivers(rank: int) -> None:
    """Two threads of a rank receive from two others."""
    if rank:
        for number in range(3):
            dist.send(fill(rank + number, (2,)), 0, tag=rank)
        return
    found: dict[int, list[torch.Tensor]] = {1: [], 2: []}

    def receive(source: int) -> None:
        for _ in range(3):
            dist.recv(tensor := torch.zeros(2), source, tag=source)
            found[source].append(tensor)

    threads = [threading.Thread(target=receive, args=(source,)) for source in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(tensors) for tensors in found.values()] == [3, 3]
    for source, tensors in found.items():
        assert all(torch.equal(tensor, fill(source + number, (2,))) for number, tensor in enumerate(tensors))


def beside(rank: int) -> None:
    """A receive is posted beside a waiting one, whose message is sent only when the other one's has been received."""
    if rank == 2:
        dist.send(fill(2, (3,)), 0, tag=2)
        dist.send(fill(3, (3,)), 1)
        return
    if rank == 1:
        dist.recv(passed_on := torch.zeros(3), 2)
        dist.send(passed_on, 0, tag=1)
        return
    found: dict[int, torch.Tensor] = {}

    def receive(source: int) -> None:
        dist.recv(tensor := torch.zeros(3), source, tag=source)
        found[source] = tensor

    threads = [threading.Thread(target=receive, args=(source,)) for source in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(found[2], fill(2, (3,))) and torch.equal(found[1], fill(3, (3,)))


def to_itself(rank: int) -> None:
    """A thread sends to its own rank, while another one receives; a receive that comes too early is refused."""
    thread = threading.Thread(target=lambda: dist.isend(fill(rank, (3,)), rank).wait())
    thread.start()
    dist.barrier()
    tensor = torch.zeros(3)
    try:
        dist.recv(tensor, rank)
        thread.join()
    except dist.ArgumentError:
        thread.join()
        dist.recv(tensor, rank)
    assert torch.equal(tensor, fill(rank, (3,)))


def repeated(rank: int) -> None:
    """Calls follow each other at once, so that fast ranks write what slow ones may still read."""
    size = dist.get_world_size()
    for number in range(6):
        dist.broadcast(sent := fill(rank + number, (4,)), number % size)
        dist.all_reduce(summed := fill(rank + number, (4,)))
        assert torch.equal(sent, fill(number % size + number, (4,))), (rank, number)
        assert torch.equal(summed, total(size, number)), (rank, number)


_arrived: list[int] = []


def barriers(rank: int) -> None:
    """No rank passes a barrier before all have come to it; ranks of one process see each other's lists."""
    size, meet = dist.get_world_size(), (dist.barrier, dist.monitored_barrier)
    if rank == 0:
        _arrived.clear()
    dist.barrier()
    for number in range(4):
        _arrived.append(number)
        meet[number % 2]()
        assert _arrived.count(number) == size, (rank, number, _arrived)


def several_parts(rank: int) -> None:
    """Callbacks of calls on several tensors make calls, too."""
    size, tensors = dist.get_world_size(), [fill(rank, (3,)), fill(rank + 1, (4,))]
    work: Any = dist.all_reduce_coalesced(tensors, async_op=True)

    def again(future: Any) -> torch.Tensor:
        dist.all_reduce(inner := fill(rank + 5, (4,)))
        return inner

    future = work.then(again)
    dist.all_reduce(beside := fill(rank + 7, (4,)))
    work.wait()
    assert torch.equal(future.wait(), total(size, 5)) and torch.equal(beside, total(size, 7))
    assert torch.equal(tensors[1], total(size, 1))


def departure(rank: int) -> None:
    """A rank leaves the world while the others create a group with it; the others' errors name it."""
    if rank == 2:
        dist.destroy_process_group()
        return
    try:
        dist.new_group([0, 1, 2], use_local_synchronization=True)
    except dist.GroupAbortedError as error:
        assert "rank 2" in str(error), str(error)
    else:
        raise AssertionError("a group was made with a rank that had left")


def nested(rank: int) -> None:
    """Callbacks make calls, while the program makes others."""
    size, made = dist.get_world_size(), []
    for number in range(3):
        work = dist.all_reduce(tensor := fill(rank + number, (4,)), async_op=True)

        def again(future: Any, number: int = number) -> torch.Tensor:
            dist.all_reduce(inner := fill(rank + number + 10, (4,)))
            return inner

        made.append((number, tensor, work, work.get_future().then(again)))
    dist.all_reduce(synchronous := fill(rank + 20, (4,)))
    assert torch.equal(synchronous, total(size, 20))
    for number, tensor, work, future in reversed(made):
        work.wait()
        assert torch.equal(tensor, total(size, number))
        assert torch.equal(future.wait(), total(size, number + 10))


def queued(rank: int) -> None:
    """Synchronous calls follow asynchronous ones on the same tensor."""
    size = dist.get_world_size()
    tensor = torch.full((3,), float(rank + 1))
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
    dist.all_reduce(tensor)
    expected = size**3 * sum(range(1, size + 1))
    assert tensor.tolist() == [expected] * 3, tensor
    for work in works:
        assert work.is_completed()


def crosswise(rank: int) -> None:
    """Ranks make calls on two groups, and wait for them in different orders."""
    size = dist.get_world_size()
    groups = [dist.group.WORLD, dist.new_group()]
    tensors = [fill(rank + number, (4,)) for number in range(4)]
    works = [dist.all_reduce(tensor, group=groups[n % 2], async_op=True) for n, tensor in enumerate(tensors)]
    for work in reversed(works) if rank % 2 else works:
        work.wait()
    for number, tensor in enumerate(tensors):
        assert torch.equal(tensor, total(size, number))


def callbacks(rank: int) -> None:
    """Callbacks of a future run in their order, before the wait for the call returns."""
    seen: list[int] = []
    work = dist.all_reduce(fill(rank, (4,)), async_op=True)
    future = work.get_future()
    for number in range(3):
        future.add_done_callback(lambda _, number=number: seen.append(number))
    work.wait()
    future.wait()
    assert seen == [0, 1, 2], seen


def waiting_callbacks(rank: int) -> None:
    """A callback waits for another call, whose own callback is after it."""
    first = dist.all_reduce(fill(rank, (4,)), async_op=True)
    second = dist.all_reduce(fill(rank + 1, (4,)), async_op=True)
    chained = first.get_future().then(lambda _: second.wait())
    after = second.get_future().then(lambda future: future.value()[0] * 2)
    chained.wait()
    assert torch.equal(after.wait(), 2 * total(dist.get_world_size(), 1))


def threads(rank: int) -> None:
    """Two threads of each rank make calls, each on its own group."""
    size, found = dist.get_world_size(), {}
    groups = [dist.new_group(), dist.new_group()]

    def call(number: int) -> None:
        for step in range(2):
            dist.all_reduce(tensor := fill(rank + number + step, (4,)), group=groups[number])
            found[number, step] = tensor

    made = [threading.Thread(target=call, args=(number,)) for number in range(2)]
    for thread in made:
        thread.start()
    for thread in made:
        thread.join()
    assert len(found) == 4
    for (number, step), tensor in found.items():
        assert torch.equal(tensor, total(size, number + step))


def leaving(rank: int) -> None:
    """One rank raises; the others' errors name it."""
    try:
        dist.all_reduce(fill(rank, (4,)))
        if rank == 1:
            raise KeyError("the program's own error")
        dist.all_reduce(fill(rank, (4,)))
    except KeyError:
        dist.destroy_process_group()
    except (dist.GroupAbortedError, dist.RankDiedError) as error:
        assert "rank 1" in str(error) and "the program's own error" in str(error), str(error)
    else:
        raise AssertionError("nobody noticed")


def interrupted(rank: int) -> None:
    """A rank leaves with receives that were posted; its sender is told."""
    receive = dist.irecv(torch.zeros(3), (rank + 1) % dist.get_world_size())
    dist.barrier()
    dist.destroy_process_group()
    try:
        receive.wait()
    except dist.DistError:
        return
    raise AssertionError("a message that nobody sent has arrived")


PROGRAMS = {
    each.__name__: each
    for each in (
        messages,
        chained_messages,
        receivers,
        beside,
        to_itself,
        repeated,
        barriers,
        several_parts,
        departure,
        nested,
        queued,
        crosswise,
        callbacks,
        waiting_callbacks,
        threads,
        leaving,
        interrupted,
    )
}


def main(name: str, first: int, count: int) -> None:
    logging.disable()
    if count == 1:
        # Known to fail: not shortened.
        try:
            simulation.run(PROGRAMS[name], 3, seed=first)
        except simulation.RankError as error:
            print(f"seed {first}, {type(error.__cause__ or error).__name__}")
        else:
            print("none")
        return
    found = simulation.explore(PROGRAMS[name], 3, seeds=range(first, first + count))
    if found is None:
        print("none")
    else:
        error = type(found.error.__cause__ or found.error).__name__
        print(f"seed {found.seed}, {len(found.decisions)} decisions, {error}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
