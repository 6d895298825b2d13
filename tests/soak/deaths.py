"""Kill a rank at every line of a public function, and see every survivor raise an error that names it.

`python -m tests.soak.deaths` counts the lines of the package that one rank runs between call and return (a trace
function sees each), then repeats the call once for each of them, with a SIGKILL there. A line in a loop counts twice:
the rank dies when it comes there for the first time, or for the second. Options choose functions, transports and a
share of the points; `nox -s soak` runs all of them, and a run of all functions writes its row into the record.

Only a rank that has told the store its name can be missed by name: deaths before that end at the time-out, and are
counted apart.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import mmap
import multiprocessing
import os
import random
import select
import signal
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import torchdist_ref as dist
from tests.soak import proofs
from torchdist_ref.stores import TCPStore

WORLD, VISITS, BOUND_SECONDS, HANG_SECONDS = 3, 2, 0.1, 30.0
MISSED_SECONDS = 1.0
"""Time after which a survivor was not merely late, but had missed the death: it is not tried again."""
HEAD_START_SECONDS = 0.01
PACKAGE = str(Path(dist.__file__).parent)
TRANSPORTS = ("shared_memory", "tcp")
INIT_TIMEOUT = timedelta(seconds=9)
TIMEOUT = timedelta(seconds=12)

Prepare = Callable[[int], None]
Program = Callable[[int], Any]


def tensors(count: int = 1) -> list[torch.Tensor]:
    return [torch.arange(6.0) + index for index in range(count)]


def exclude_the_last(rank: int) -> None:
    dist.barrier()
    if rank == WORLD:
        os._exit(0)
    # Let the death arrive, as in a program that shrinks after an error.
    try:
        dist.barrier()
    except dist.DistError:
        pass


def exchange(rank: int) -> None:
    if rank == 0:
        dist.send(torch.arange(40_000.0), 1)
    elif rank == 1:
        dist.recv(torch.empty(40_000), 0)


def exchange_at_once(rank: int) -> None:
    right, left = (rank + 1) % WORLD, (rank - 1) % WORLD
    operations = [dist.P2POp(dist.isend, torch.ones(5), right), dist.P2POp(dist.irecv, torch.ones(5), left)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


FUNCTIONS: dict[str, Program] = {
    "init_process_group": lambda rank: None,
    "new_group": lambda rank: dist.new_group(list(range(WORLD))),
    "new_group (members only)": lambda rank: dist.new_group(list(range(WORLD)), use_local_synchronization=True),
    "split_group": lambda rank: dist.split_group(split_ranks=[list(range(WORLD))]),
    "shrink_group": lambda rank: dist.shrink_group([WORLD]),
    "monitored_barrier": lambda rank: dist.monitored_barrier(),
    "destroy_process_group": lambda rank: dist.destroy_process_group(),
    "all_reduce": lambda rank: dist.all_reduce(torch.arange(50_000.0)),
    "all_reduce (async)": lambda rank: dist.all_reduce(torch.arange(6.0), async_op=True).wait(),
    "broadcast": lambda rank: dist.broadcast(torch.arange(6.0), 1),
    "reduce": lambda rank: dist.reduce(torch.arange(6.0), 0),
    "barrier": lambda rank: dist.barrier(),
    "all_gather": lambda rank: dist.all_gather(tensors(WORLD), torch.arange(6.0)),
    "all_gather_into_tensor": lambda rank: dist.all_gather_into_tensor(torch.empty(6 * WORLD), torch.arange(6.0)),
    "gather": lambda rank: dist.gather(torch.arange(6.0), tensors(WORLD) if rank == 0 else None),
    "scatter": lambda rank: dist.scatter(torch.empty(6), tensors(WORLD) if rank == 0 else None),
    "reduce_scatter": lambda rank: dist.reduce_scatter(torch.empty(6), tensors(WORLD)),
    "reduce_scatter_tensor": lambda rank: dist.reduce_scatter_tensor(torch.empty(2), torch.arange(6.0)),
    "all_to_all": lambda rank: dist.all_to_all(tensors(WORLD), tensors(WORLD)),
    "all_to_all_single": lambda rank: dist.all_to_all_single(torch.empty(6), torch.arange(6.0)),
    "all_gather_object": lambda rank: dist.all_gather_object([None] * WORLD, {"rank": rank}),
    "broadcast_object_list": lambda rank: dist.broadcast_object_list([rank, "x"], 0),
    "gather_object": lambda rank: dist.gather_object({"rank": rank}, [None] * WORLD if rank == 0 else None),
    "scatter_object_list": lambda rank: dist.scatter_object_list([None], list("abc") if rank == 0 else None),
    "send and recv": exchange,
    "batch_isend_irecv": exchange_at_once,
}


@dataclass
class Outcome:
    """What the survivors of one death saw.

    Attributes:
        point: The point at which the rank died; 0 for its return.
        points: Points that the rank has passed.
        named: Points before the store knew the rank.
        error: What went wrong; empty if all is well.
        seconds: The longest time between the death, or the survivor's own call, and its error.
    """

    point: int
    points: int = 0
    named: int = 0
    error: str = ""
    seconds: float = 0.0


class Shared:
    """Memory that all ranks of one run share: the time of death, and counts of points."""

    layout = struct.Struct("dqq")

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def write(self, died: float, points: int, named: int) -> None:
        self.layout.pack_into(self._memory, 0, died, points, named)

    def read(self) -> tuple[float, int, int]:
        return self.layout.unpack_from(self._memory, 0)


def is_within(frame: FrameType | None, function: str) -> bool:
    """Return whether a function of this name called the one that runs."""
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


class Killer:
    """Trace function that counts the lines of the package that a thread runs, and ends the process at one of them."""

    def __init__(self, point: int, shared: Shared) -> None:
        self.point, self.shared, self.count, self.named = point, shared, 0, 0
        self._visits: Counter[tuple[str, int]] = Counter()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            line = frame.f_code.co_filename, frame.f_lineno
            self._visits[line] += 1
            self.count += self._visits[line] <= VISITS
            if self.count == self.point:
                self.kill()
            if not self.named and frame.f_code.co_name == "_skip_responses" and is_within(frame, "_announce"):
                self.named = self.count
        return self

    def kill(self) -> None:
        self.shared.write(time.monotonic(), self.count, self.named)
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()


_runs = itertools.count()


@dataclass
class Case:
    """One function on one transport, in which one rank dies.

    Attributes:
        function: Name in FUNCTIONS.
        transport: One of TRANSPORTS.
        victim: The rank that dies.
        port: Port of the store that `check` serves.
    """

    function: str
    transport: str
    victim: int
    port: int = field(default=0, repr=False, kw_only=True)

    @property
    def ranks(self) -> int:
        return WORLD + (self.function == "shrink_group")

    def run(self, point: int) -> Outcome:
        """Start the ranks, kill the victim at a point (0: when the function has returned), and gather reports."""
        shared, number = Shared(), next(_runs)
        sys.stdout.flush()
        children = {}
        for rank in range(self.ranks):
            receiver, sender = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(receiver)
                self._run_rank(rank, point, shared, number, sender)
            os.close(sender)
            children[rank] = (pid, receiver)
        reports = self._gather(children)
        died, points, named = shared.read()
        outcome = Outcome(point, points, named)
        for rank, report in reports.items():
            if rank < WORLD and rank != self.victim:
                self._judge(outcome, rank, report, died)
        return outcome

    def _gather(self, children: dict[int, tuple[int, int]]) -> dict[int, Any]:
        reports, deadline = {}, time.monotonic() + HANG_SECONDS
        for rank, (_, receiver) in children.items():
            poll = select.poll()
            poll.register(receiver, select.POLLIN)
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            data = os.read(receiver, 65536) if ready else b"hung"
            reports[rank] = json.loads(data) if data.startswith(b"[") else data.decode() or "ended without a report"
        for pid, receiver in children.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(receiver)
        return reports

    def _judge(self, outcome: Outcome, rank: int, report: Any, died: float) -> None:
        if isinstance(report, str):
            outcome.error = f"rank {rank} {report}"
            return
        began, ended, kind, text = report
        seconds = ended - max(began, died)
        outcome.seconds = max(outcome.seconds, seconds)
        if self.function == "destroy_process_group":
            if kind:
                outcome.error = f"rank {rank} raised {kind}: {text}"
        elif not kind:
            outcome.error = f"rank {rank} did not raise"
        elif not _names(text, self.victim):
            outcome.error = f"rank {rank} does not name the dead rank: {kind}: {text}"

    # In a child

    def _run_rank(self, rank: int, point: int, shared: Shared, number: int, sender: int) -> None:
        try:
            report = self._survive(rank, point, shared, number)
            os.write(sender, json.dumps(report).encode()[:65536])
        except BaseException as error:
            os.write(sender, f"failed in the preparation: {error!r}"[:4096].encode())
        finally:
            os.close(sender)
            # The dead rank alone has ended; the others stay until all have reported and are killed.
            signal.pause()
            os._exit(0)

    def _survive(self, rank: int, point: int, shared: Shared, number: int) -> tuple[float, float, str, str]:
        signal.alarm(int(HANG_SECONDS) + 5)
        torch.set_num_threads(1)
        if self.transport == "tcp":
            os.environ["TORCHDIST_REF_HOST_ID"] = f"host {rank}"
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port), TORCHELASTIC_USE_AGENT_STORE="True")
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        ready = TCPStore("127.0.0.1", self.port)
        first = self.function == "init_process_group"
        if not first:
            self._init(rank, number, TIMEOUT)
            if self.function == "shrink_group":
                exclude_the_last(rank)
        if ready.add(f"ready/{number}", 1) == WORLD:
            ready.set(f"all ready/{number}", b"")
        ready.wait([f"all ready/{number}"])
        if first:
            self._begin_in_order(rank, ready, number)
        ready.close()
        calls: list[Program] = [FUNCTIONS[self.function]]
        if first:
            calls = [lambda rank: self._init(rank, number, INIT_TIMEOUT)]
        if self.function != "destroy_process_group":
            calls.append(lambda rank: dist.barrier())
        killer = Killer(point, shared)
        began = time.monotonic()
        try:
            for call in calls:
                began = time.monotonic()
                if rank == self.victim:
                    sys.settrace(killer)
                group = call(rank)
                if rank == self.victim:
                    sys.settrace(None)
                    killer.kill()
                if isinstance(group, dist.ProcessGroup):
                    calls[-1] = lambda rank, made=group: dist.barrier(made)
        except dist.DistError as error:
            return began, time.monotonic(), type(error).__name__, str(error)
        return began, time.monotonic(), "", ""

    def _begin_in_order(self, rank: int, ready: TCPStore, number: int) -> None:
        """Let the victim begin last: a rank that comes after a death takes it for one of an earlier attempt."""
        if rank == self.victim:
            ready.wait([f"all began/{number}"])
            time.sleep(HEAD_START_SECONDS)
        elif ready.add(f"began/{number}", 1) == WORLD - 1:
            ready.set(f"all began/{number}", b"")

    def _init(self, rank: int, number: int, timeout: timedelta) -> None:
        store = TCPStore("127.0.0.1", self.port)
        dist.init_process_group(
            "ref", store=dist.PrefixStore(str(number), store), rank=rank, world_size=self.ranks, timeout=timeout
        )


def _names(text: str, victim: int) -> bool:
    return f"rank {victim} " in text or f"rank {victim}:" in text or f"ranks [{victim}]" in text


def points_of(case: Case, share: float, seed: int) -> tuple[int, int, list[int]]:
    """Return the number of points of a case, how many of them no one can notice, and those to try."""
    counts = [case.run(0) for _ in range(2)]
    points, named = max(each.points for each in counts), min(each.named for each in counts)
    known = list(range(named + 1, points + 1))
    chosen = random.Random(f"{seed} {case.function} {case.victim}").sample(known, max(2, round(share * len(known))))
    return points, named, sorted(chosen)


@dataclass
class Checked:
    """Deaths at the points of one case.

    Attributes:
        case: The case.
        points: Lines that the victim ran.
        named: Lines before the store knew the victim; it does not die there.
        outcomes: Outcome of each death.
        late_once: Deaths after which a survivor was late, and in time when the rank died there again.
    """

    case: Case
    points: int
    named: int
    outcomes: list[Outcome]
    late_once: int = 0

    @property
    def wrong(self) -> list[Outcome]:
        """The outcomes that are not as they should be."""
        return [each for each in self.outcomes if each.error]

    @property
    def times(self) -> list[float]:
        """Seconds to the last survivor's error, in ascending order."""
        return sorted(each.seconds for each in self.outcomes)

    def __str__(self) -> str:
        times = [1000 * seconds for seconds in self.times]
        return (
            f"{self.case.function:26} {self.case.transport:13} rank {self.case.victim}  {self.points:5} lines, "
            f"{self.named:4} before it is known, {len(self.outcomes):5} tried, {len(self.wrong):4} wrong, "
            f"{self.late_once:3} late once; median {times[len(times) // 2]:4.0f} ms, worst {times[-1]:5.0f} ms"
        )


def check(case: Case, share: float, seed: int = 0, bound: float = BOUND_SECONDS) -> Checked:
    """Kill the victim at each of the points, with a store for them alone: the dead leave keys behind, for good."""
    with store_server() as port:
        case = replace(case, port=port)
        points, named, chosen = points_of(case, share, seed)
        outcomes = [case.run(point) for point in chosen]
        late_once = 0
        for number, each in enumerate(outcomes):
            if bound < each.seconds < MISSED_SECONDS and not each.error:
                # The machine may have been busy; a line at which survivors wait makes them late each time.
                outcomes[number] = case.run(each.point)
                late_once += outcomes[number].seconds <= bound
    if case.function == "init_process_group":
        # A run differs from the counted ones: on a busy machine rank 0 begins late, and this point comes too early.
        outcomes = [each for each in outcomes if each.named]
    for each in outcomes:
        if not each.error and each.seconds > bound:
            each.error = f"a survivor took {each.seconds * 1000:.0f} ms"
    return Checked(case, points, named, outcomes, late_once)


def summary(found: list[Checked]) -> proofs.Outcome:
    """Return what the record has of the cases of one transport."""
    result = proofs.Outcome()
    times = sorted(seconds for each in found for seconds in each.times)
    for each in found:
        result.done += len(each.outcomes)
        result.failed += len(each.wrong)
        result.counts[each.case.function] += len(each.outcomes)
        result.counts["late once, and in time when repeated"] += each.late_once
    result.counts["median milliseconds to the error"] = round(1000 * times[len(times) // 2])
    result.counts["worst milliseconds to the error"] = round(1000 * times[-1])
    return result


def warm_up() -> None:
    """Import everything that ranks use: each of them is a fork of this process, and would import it again."""
    dist.init_process_group("ref", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(3), async_op=True).wait()
    dist.destroy_process_group()
    # A collection in a rank would write to, and so copy, every page that it shares with this process.
    gc.collect()
    gc.freeze()


@contextmanager
def store_server() -> Iterator[int]:
    """Serve a store for the ranks from a process of its own, and yield its port.

    A thread of this process that holds a lock while a rank is forked would leave the rank a lock that nobody releases.
    """
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(receiver)
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(sender, str(store.port).encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(sender)
    try:
        yield int(os.read(receiver, 64))
    finally:
        os.close(receiver)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def main() -> int:
    """Run the cases that the options choose, and return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("functions", nargs="*", help="names of functions; all by default")
    parser.add_argument("--transport", choices=TRANSPORTS, action="append")
    parser.add_argument("--share", type=float, default=1.0, help="share of the points, at most 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="cases to run at a time")
    options = parser.parse_args()
    warm_up()
    failed = 0
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        for transport in options.transport or TRANSPORTS:
            limits, found = proofs.Limits(0, options.seed), []
            cases = [
                Case(function, transport, victim) for function in options.functions or FUNCTIONS for victim in (0, 1)
            ]
            for checked in pool.imap(partial(check, share=options.share, seed=options.seed), cases):
                found.append(checked)
                print(checked, flush=True)
                for each in checked.wrong[:5]:
                    print(f"    at point {each.point}: {each.error}", flush=True)
            failed += sum(len(each.wrong) for each in found)
            if options.share == 1 and not options.functions:
                limits.count = sum(each.points - each.named for each in found)
                proofs.write_row(f"lines, {transport}", limits, summary(found))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
