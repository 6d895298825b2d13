"""Checks of order: messages, asynchronous calls, groups, and calls of several threads."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch

from torchdist_ref.acid.checks import Ranks, check, same, total


@check("send and recv around a ring", "Each rank gets the tensor of the one before it.", needs_two=True)
def _(ranks: Ranks) -> None:
    right, left = (ranks.rank + 1) % ranks.world, (ranks.rank - 1) % ranks.world
    found = ranks.empty((1025,))
    if ranks.rank == 0:
        ranks.dist.send(ranks.mine((1025,)), right)
        ranks.dist.recv(found, left)
    else:
        ranks.dist.recv(found, left)
        ranks.dist.send(ranks.mine((1025,)), right)
    same(found, ranks.data(left, (1025,)))


@check("isend and irecv in both directions", "Messages that cross each other all arrive.", needs_two=True)
def _(ranks: Ranks) -> None:
    found = {rank: ranks.empty((70_001,)) for rank in ranks.everyone if rank != ranks.rank}
    works = [ranks.dist.irecv(tensor, rank) for rank, tensor in found.items()]
    works += [ranks.dist.isend(ranks.mine((70_001,)) + rank, rank) for rank in found]
    for work in works:
        work.wait()
    for rank, tensor in found.items():
        same(tensor, ranks.data(rank, (70_001,)) + ranks.rank, f"the message of rank {rank}")


@check("messages of one pair keep their order", "The first message sent is the first received.", needs_two=True)
def _(ranks: Ranks) -> None:
    if ranks.rank == 0:
        for number in range(20):
            ranks.dist.send(ranks.mine((3,)) * number, 1)
    elif ranks.rank == 1:
        for number in range(20):
            found = ranks.empty((3,))
            ranks.dist.recv(found, 0)
            same(found, ranks.data(0, (3,)) * number, f"message {number}")


@check("tags", "A receive takes the message with its tag, whatever was sent before.", needs_two=True)
def _(ranks: Ranks) -> None:
    if ranks.rank == 0:
        works = [ranks.dist.isend(ranks.mine((3,)) + tag, 1, tag=tag) for tag in (4, 9)]
        for work in works:
            work.wait()
    elif ranks.rank == 1:
        for tag in (9, 4):
            found = ranks.empty((3,))
            ranks.dist.recv(found, 0, tag=tag)
            same(found, ranks.data(0, (3,)) + tag, f"the message with tag {tag}")


@check("recv from any rank", "It returns the rank that sent the message.", needs_two=True)
def _(ranks: Ranks) -> None:
    if ranks.rank:
        ranks.dist.send(ranks.mine((3,)), 0)
        return
    sources = []
    for _ in ranks.everyone[1:]:
        found = ranks.empty((3,))
        sources.append(ranks.dist.recv(found))
        same(found, ranks.data(sources[-1], (3,)), f"the message of rank {sources[-1]}")
    assert sorted(sources) == [*ranks.everyone[1:]], sources


@check("batch_isend_irecv", "A batch starts all its messages before it waits for one.", needs_two=True)
def _(ranks: Ranks) -> None:
    right, left = (ranks.rank + 1) % ranks.world, (ranks.rank - 1) % ranks.world
    found = ranks.empty((100_003,))
    operations = [
        ranks.dist.P2POp(ranks.dist.isend, ranks.mine((100_003,)), right),
        ranks.dist.P2POp(ranks.dist.irecv, found, left),
    ]
    for work in ranks.dist.batch_isend_irecv(operations):
        work.wait()
    same(found, ranks.data(left, (100_003,)))


@check("async_op returns a Work", "The tensor has the result after wait().")
def _(ranks: Ranks) -> None:
    tensor = ranks.mine((10_007,))
    work = ranks.dist.all_reduce(tensor, async_op=True)
    assert work is not None and work.wait() in (True, None)
    same(tensor, total(ranks, (10_007,)))
    assert work.is_completed()


@check("ten calls at once", "Calls complete in the order in which they were made, on each rank.")
def _(ranks: Ranks) -> None:
    tensors = [ranks.mine((257,)) * number for number in range(10)]
    works = [ranks.dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    for number, tensor in enumerate(tensors):
        same(tensor, total(ranks, (257,)) * number, f"call {number}")


@check("get_future and then", "A callback of the future sees the result.")
def _(ranks: Ranks) -> None:
    tensor = ranks.mine()
    future = ranks.dist.all_reduce(tensor, async_op=True).get_future()
    value = future.then(lambda done: done.value()[0] * 2).wait()
    same(value, total(ranks) * 2)


@check("wait on another thread", "A thread that did not make the call can wait for it.")
def _(ranks: Ranks) -> None:
    tensor = ranks.mine()
    work = ranks.dist.all_reduce(tensor, async_op=True)
    waiter = threading.Thread(target=work.wait)
    waiter.start()
    waiter.join()
    same(tensor, total(ranks))


@check("barrier", "No rank leaves before the last has arrived.")
def _(ranks: Ranks) -> None:
    store = ranks.store("barrier")
    for number in range(5):
        store.add(f"arrived {number}", 1)
        ranks.dist.barrier()
        assert store.add(f"arrived {number}", 0) == ranks.world, f"barrier {number} was left too early"


@check("a group of some ranks", "Its members are numbered anew; the others take no part.", needs_two=True)
def _(ranks: Ranks) -> None:
    members = [*ranks.everyone[1:]]
    group = ranks.dist.new_group(members)
    if ranks.rank in members:
        tensor = ranks.mine()
        ranks.dist.all_reduce(tensor, group=group)
        same(tensor, total(ranks) - ranks.data(0))
        assert ranks.dist.get_rank(group) == ranks.rank - 1 and ranks.dist.get_world_size(group) == len(members)
        found = ranks.mine() if ranks.rank == members[-1] else ranks.empty()
        ranks.dist.broadcast(found, members[-1], group=group)
        same(found, ranks.data(members[-1]))


@check("two groups in turn", "Calls of two groups do not mix.")
def _(ranks: Ranks) -> None:
    groups = [ranks.dist.new_group([*ranks.everyone]) for _ in range(2)]
    tensors = [ranks.mine((33,)) * number for number in range(8)]
    works = [ranks.dist.all_reduce(each, group=groups[n % 2], async_op=True) for n, each in enumerate(tensors)]
    for work in works:
        work.wait()
    for number, tensor in enumerate(tensors):
        same(tensor, total(ranks, (33,)) * number, f"call {number}")


@check("two threads on two groups", "Each thread of a rank may use a group of its own.")
def _(ranks: Ranks) -> None:
    groups = [ranks.dist.new_group([*ranks.everyone]) for _ in range(2)]
    results: dict[int, torch.Tensor] = {}

    def calls(number: int) -> None:
        tensor = ranks.mine((129,)) + number
        for _ in range(20):
            ranks.dist.all_reduce(tensor, group=groups[number])
            tensor /= ranks.world
        results[number] = tensor

    threads = [threading.Thread(target=calls, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        mean = total(ranks, (129,)) / ranks.world + number
        assert torch.allclose(results[number], mean), f"group {number}"


@check("a group of one rank", "Calls of a rank alone return its own values.")
def _(ranks: Ranks) -> None:
    groups = [ranks.dist.new_group([rank]) for rank in ranks.everyone]
    tensor, found = ranks.mine(), [ranks.empty()]
    ranks.dist.all_reduce(tensor, group=groups[ranks.rank])
    ranks.dist.all_gather(found, tensor, group=groups[ranks.rank])
    same(found[0], ranks.mine())


@check("a call of a rank that is not a member", "It raises or warns, and the members' calls go on.", needs_two=True)
def _(ranks: Ranks) -> None:
    group = ranks.dist.new_group([0])
    tensor = ranks.mine()
    try:
        ranks.dist.all_reduce(tensor, group=group)
    except (ValueError, RuntimeError):
        assert ranks.rank != 0
    same(tensor, ranks.mine())


@check("destroy and initialize again", "A process can make the default group twice.")
def _(ranks: Ranks) -> None:
    ranks.dist.barrier()
    ranks.dist.destroy_process_group()
    ranks.init(timedelta(seconds=30))
    tensor = ranks.mine()
    ranks.dist.all_reduce(tensor)
    same(tensor, total(ranks))


@check("1,000 calls use no more memory", "The resident memory grows by less than 16 MiB.", "none; a leak ends a job")
def _(ranks: Ranks) -> None:
    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * 4096

    tensor = ranks.mine((1024,))
    for _ in range(200):
        ranks.dist.all_reduce(tensor)
    before = resident()
    for _ in range(1000):
        ranks.dist.all_reduce(tensor)
        tensor.zero_()
    grown = resident() - before
    assert grown < 16 << 20, f"it grew by {grown >> 20} MiB"
