"""Deaths of a simulated rank before each operation of a call, one after the other, and what every survivor sees.

A run without a death counts the operations of each rank within the call, and keeps the values. Then each rank dies in
its turn, before each of its operations and after the last, in a run of its own. A survivor may complete the call, with
the value that it has without a death; else its error names exactly the rank that died. The next call of each survivor
that has completed this one fails, and names it too. A survivor that waits for another one alone, which has aborted,
says so, and that this one did because of the death. Nobody waits for a time-out.

Only a rank that has registered at the store can be missed by name before that. Deaths in an initialization before this
are counted apart: they end at the time-out, which names the ranks that did not join.

``python -m tests.simulation.deaths`` tries all of them. Options choose calls, sizes and seeds.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

import torchdist_ref as dist
from torchdist_ref import simulation
from torchdist_ref.membership.events import ABORTED
from torchdist_ref.simulation import Kill, Network
from torchdist_ref.testing import fill

SIZES = (2, 3, 4, 5)
PROMPT_SECONDS = 1.0
"""Virtual time after which an error is that of a time-out."""
STAY_SECONDS = 10.0
"""Virtual time that a survivor stays after its call, so that no leave is taken for the cause."""
LARGE = 70_000
"""Elements that exceed the eager buffers."""

Program = Callable[[int, int], Any]


@cache
def original(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    return fill(rank, shape)


def data(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a rank's tensor. Thousands of runs need the same ones, and to compute them took a tenth of a run."""
    return original(rank, shape).clone()


def tensors(rank: int, size: int) -> list[torch.Tensor]:
    return [data(rank + 10 * number, (3,)) for number in range(size)]


def empty(size: int) -> list[torch.Tensor]:
    return [torch.zeros(3) for _ in range(size)]


def value_of(result: Any) -> Any:
    """Return a value that can be compared, of whatever a call has written."""
    if isinstance(result, torch.Tensor):
        return result.tolist() if result.numel() < 100 else (result.double().sum().item(), result[-1].item())
    return [value_of(each) for each in result] if isinstance(result, list | tuple) else result


def all_reduce(rank: int, size: int) -> Any:
    dist.all_reduce(tensor := data(rank, (5,)))
    return tensor


def all_reduce_of_much(rank: int, size: int) -> Any:
    dist.all_reduce(tensor := data(rank, (LARGE,)))
    return tensor


def all_reduce_async(rank: int, size: int) -> Any:
    work = dist.all_reduce(tensor := data(rank, (5,)), async_op=True)
    work.wait()
    return tensor


def broadcast(rank: int, size: int) -> Any:
    dist.broadcast(tensor := data(rank, (5,)), 1)
    return tensor


def reduce(rank: int, size: int) -> Any:
    dist.reduce(tensor := data(rank, (5,)), 0)
    return tensor if rank == 0 else None


def barrier(rank: int, size: int) -> Any:
    return dist.barrier()


def all_gather(rank: int, size: int) -> Any:
    dist.all_gather(gathered := empty(size), data(rank, (3,)))
    return gathered


def all_gather_into_tensor(rank: int, size: int) -> Any:
    dist.all_gather_into_tensor(gathered := torch.zeros(3 * size), data(rank, (3,)))
    return gathered


def gather(rank: int, size: int) -> Any:
    dist.gather(data(rank, (3,)), gathered := empty(size) if rank == 0 else None)
    return gathered


def scatter(rank: int, size: int) -> Any:
    dist.scatter(tensor := torch.zeros(3), tensors(rank, size) if rank == 0 else None)
    return tensor


def reduce_scatter(rank: int, size: int) -> Any:
    dist.reduce_scatter(tensor := torch.zeros(3), tensors(rank, size))
    return tensor


def reduce_scatter_tensor(rank: int, size: int) -> Any:
    dist.reduce_scatter_tensor(tensor := torch.zeros(3), data(rank, (3 * size,)))
    return tensor


def all_to_all(rank: int, size: int) -> Any:
    dist.all_to_all(exchanged := empty(size), tensors(rank, size))
    return exchanged


def all_to_all_single(rank: int, size: int) -> Any:
    dist.all_to_all_single(exchanged := torch.zeros(3 * size), data(rank, (3 * size,)))
    return exchanged


def all_gather_object(rank: int, size: int) -> Any:
    dist.all_gather_object(objects := [None] * size, {"rank": rank})
    return objects


def broadcast_object_list(rank: int, size: int) -> Any:
    dist.broadcast_object_list(objects := [rank, "x"], 0)
    return objects


def gather_object(rank: int, size: int) -> Any:
    dist.gather_object({"rank": rank}, objects := [None] * size if rank == 0 else None)
    return objects


def scatter_object_list(rank: int, size: int) -> Any:
    dist.scatter_object_list(objects := [None], [*"abcde"[:size]] if rank == 0 else None)
    return objects


def messages(rank: int, size: int) -> Any:
    right, left, received = (rank + 1) % size, (rank - 1) % size, torch.zeros(4)
    operations = [dist.P2POp(dist.isend, data(rank, (4,)), right), dist.P2POp(dist.irecv, received, left)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def monitored_barrier(rank: int, size: int) -> Any:
    return dist.monitored_barrier()


def destroy_process_group(rank: int, size: int) -> Any:
    dist.destroy_process_group()


def new_group(rank: int, size: int) -> Any:
    return dist.new_group(list(range(size)))


def new_group_of_members(rank: int, size: int) -> Any:
    return dist.new_group(list(range(size)), use_local_synchronization=True)


def split_group(rank: int, size: int) -> Any:
    return dist.split_group(split_ranks=[list(range(size))])


def shrink_group(rank: int, size: int) -> Any:
    return dist.shrink_group([size])


COLLECTIVES: tuple[Program, ...] = (
    all_reduce,
    all_reduce_of_much,
    all_reduce_async,
    broadcast,
    reduce,
    barrier,
    all_gather,
    all_gather_into_tensor,
    gather,
    scatter,
    reduce_scatter,
    reduce_scatter_tensor,
    all_to_all,
    all_to_all_single,
    all_gather_object,
    broadcast_object_list,
    gather_object,
    scatter_object_list,
    messages,
)
MAKE_GROUPS: tuple[Program, ...] = (new_group, new_group_of_members, split_group, shrink_group)
MEET: tuple[Program, ...] = (monitored_barrier, destroy_process_group)


def init_process_group(rank: int, size: int) -> Any:
    store = simulation.simulated_store()
    dist.init_process_group("ref", store=store, rank=rank, world_size=size)


CALLS = {each.__name__: each for each in (init_process_group, *MAKE_GROUPS, *MEET, *COLLECTIVES)}


@dataclass
class Seen:
    """What one rank saw.

    Attributes:
        begun: Operations of the rank before the call.
        ended: Operations of the rank when it had returned.
        value: Value of the call.
        errors: Errors of the call and of the next one, without their tracebacks, which hold the groups; None for none.
        at: Virtual time at which the last of them was raised or returned.
    """

    begun: int = 0
    ended: int = 0
    value: Any = None
    errors: list[dist.DistError | None] = field(default_factory=list)
    at: float = 0.0


def on_rank(rank: int, name: str, size: int) -> Seen | None:
    """Make a call on a rank, and then a barrier of the group that it has made, or of the world."""
    seen, is_init, members = Seen(), name == "init_process_group", size + (name == "shrink_group")
    if not is_init:
        init_process_group(rank, members)
        if rank == size:
            # The rank that others leave out ends before.
            dist.barrier()
            return None
        if members > size:
            dist.barrier()
    seen.begun = simulation.simulated_operations()
    try:
        made = CALLS[name](rank, size)
        seen.value = None if isinstance(made, dist.ProcessGroup) else value_of(made)
        seen.ended = simulation.simulated_operations()
        seen.errors.append(None)
        if name != "destroy_process_group":
            dist.barrier(made if isinstance(made, dist.ProcessGroup) else None)
            seen.errors.append(None)
    except dist.DistError as error:
        seen.errors.append(without_traceback(error))
    seen.at = time.monotonic()
    time.sleep(STAY_SECONDS)
    if dist.is_initialized():
        dist.destroy_process_group()
    return seen


def without_traceback(error: dist.DistError) -> dist.DistError:
    """Return an equal error that refers to no frame."""
    bare = type(error)(str(error))
    if isinstance(bare, dist.DistBackendError) and isinstance(error, dist.DistBackendError):
        bare.naming(error.ranks).failure = error.failure
    return bare


@dataclass
class Counts:
    """Deaths of one kind of call.

    Attributes:
        deaths: Deaths that were tried.
        failed: Survivors whose call failed.
        completed: Survivors whose call was complete.
        unknown: Deaths of ranks of which the store knew nothing yet.
        bad: Deaths after which a survivor saw something else than it should, in words.
    """

    deaths: int = 0
    failed: int = 0
    completed: int = 0
    unknown: int = 0
    bad: list[str] = field(default_factory=list)

    def add(self, other: Counts) -> None:
        self.deaths += other.deaths
        self.failed += other.failed
        self.completed += other.completed
        self.unknown += other.unknown
        self.bad += other.bad


def hosts_of(size: int) -> Iterator[tuple[int, ...]]:
    """Yield the hosts of the ranks: one for all, and one for each."""
    yield (0,) * size
    yield tuple(range(size))


def deaths(name: str, size: int, hosts: Sequence[int], seed: int, victims: Iterable[int] | None = None) -> Counts:
    """Let each rank die at each of its operations in a call."""
    members = size + (name == "shrink_group")
    network = Network(hosts=(*hosts, hosts[-1])[:members])

    def run(*faults: simulation.Fault) -> simulation.SimulatedRun:
        return simulation.run(on_rank, members, name, size, init=False, seed=seed, network=network, faults=faults)

    alive, counts = run().values, Counts()
    for victim in range(size) if victims is None else victims:
        for operation in range(alive[victim].begun + 1, alive[victim].ended + 2):
            counts.deaths += 1
            where = f"{name}, {size} ranks on hosts {tuple(hosts)}, seed {seed}: rank {victim} at operation {operation}"
            try:
                result = run(Kill(rank=victim, operation=operation))
            except simulation.RankError as error:
                counts.bad.append(f"{where}: {str(error)[:600]}")
                continue
            assert result.faults, where
            _judge(counts, where, name, victim, alive, result)
    return counts


def _judge(
    counts: Counts, where: str, name: str, victim: int, alive: list[Seen], result: simulation.SimulatedRun
) -> None:
    died = next(each.time for each in result.timeline if each.kind == "killed")
    survivors = {rank: seen for rank, seen in enumerate(result.values) if seen is not None}
    errors = [error for seen in survivors.values() for error in seen.errors if error]
    if name == "init_process_group" and errors and all(is_unknown(error, victim) for error in errors):
        counts.unknown += 1
        if len(errors) < len(survivors):
            counts.bad.append(f"{where}: {len(errors)} of {len(survivors)} survivors noticed")
        return
    for rank, seen in survivors.items():
        text = ""
        completed = seen.errors[0] is None
        counts.completed += completed
        counts.failed += not completed
        if completed and seen.value != alive[rank].value:
            text = f"its value is {seen.value!r} in place of {alive[rank].value!r}"
        elif seen.at > died + PROMPT_SECONDS:
            text = f"it took {seen.at - died:.3g} s"
        elif name == "destroy_process_group":
            text = "" if completed else f"it raised {seen.errors[0]!r}"
        elif (error := seen.errors[-1]) is None:
            text = "the call after it did not raise"
        else:
            text = named_wrongly(error, victim)
        if text:
            counts.bad.append(f"{where}: on rank {rank}, {text}")


def is_unknown(error: dist.DistError, victim: int) -> bool:
    """Return whether an error is that of a time-out which names the rank among those that did not join."""
    return (
        isinstance(error, dist.DistBackendError) and f"rank {victim} of" in str(error) and "did not join" in str(error)
    )


def named_wrongly(error: dist.DistError, victim: int) -> str:
    """Return what is wrong with an error that should name a rank; empty if nothing is."""
    text = str(error)
    failure = error.failure if isinstance(error, dist.DistBackendError) else None
    if isinstance(error, dist.GroupAbortedError) and failure is not None and victim not in failure.ranks:
        # A survivor that this one waits for has aborted because of the death, and says so.
        passed_on = failure.kind == ABORTED and text.count("aborted") == 1 and f"rank {victim} died (pid" in text
        return "" if passed_on and "RankDiedError in" in text else f"it raised {error!r}"
    if not isinstance(error, dist.RankDiedError):
        return f"it raised {error!r}"
    if error.ranks != (victim,) or failure is None or failure.ranks != (victim,):
        return f"the error is of ranks {error.ranks}: {error}"
    if f"rank {victim} " not in text or f"pid {1000 + victim} on simulated host" not in text:
        return f"the text does not name it: {error}"
    return ""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Let simulated ranks die before each operation of each call.")
    parser.add_argument("calls", nargs="*", default=[*CALLS], help="names of calls; all by default")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of ranks")
    parser.add_argument("--seeds", type=int, default=3, help="number of orders, the plain one first")
    chosen = parser.parse_args(arguments)
    logging.disable()
    total, began = Counter[str](), time.monotonic()
    for name in chosen.calls:
        started, found = time.monotonic(), Counts()
        for size in chosen.sizes:
            for hosts in hosts_of(size):
                for seed in range(chosen.seeds):
                    found.add(deaths(name, size, hosts, seed))
        print(
            f"{name:24} {found.deaths:6} deaths, {found.unknown:4} unknown, {found.failed:6} survivors failed, "
            f"{found.completed:6} completed, {len(found.bad):4} bad, {time.monotonic() - started:5.0f} s",
            flush=True,
        )
        for text in found.bad[:10]:
            print(f"    {text}", flush=True)
        total.update(deaths=found.deaths, bad=len(found.bad))
    print(f"{total['deaths']} deaths, {total['bad']} bad, {time.monotonic() - began:.0f} s")
    return bool(total["bad"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
