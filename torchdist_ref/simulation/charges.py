"""Time that calls take on simulated ranks: the calls themselves, copies and reductions, as the network's numbers say.

Messages take their time on the way (`network.Wires`). The rest is work of a rank: the call itself (`overhead`), copies
to staging buffers (`copy`), reductions (`gamma`), and reads of other ranks' registered tensors (`local_beta`). It is
charged where the executor does it. Computation is what a program does between its calls; where that is measured, the
processor time of calls does not count, since their numbers are in the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from torchdist_ref.backends.ref.backend import Ref
from torchdist_ref.backends.ref.fast import FastExecutor, Program, StagedRounds, StagedSlots
from torchdist_ref.backends.ref.steps import Addresses, Step, StepMaker
from torchdist_ref.schedules.network import COPIED, STAGED, WRITTEN, Network
from torchdist_ref.schedules.schedule import Move
from torchdist_ref.simulation.scheduler import Scheduler, current_task


@contextmanager
def charged(scheduler: Scheduler, network: Network) -> Iterator[None]:
    """Let calls take the time that the network has for them, in the block."""
    found = _Charges(scheduler, network)
    work: list[tuple[Any, str, Any]] = [(FastExecutor, "run", found.run)]
    if network.copy:
        work.append((StagedRounds, "staging_copies", found.staging_copies))
    if network.copy or network.gamma or network.local_beta:
        work.append((StepMaker, "of_moves", found.of_moves))
    if scheduler.compute:
        work += [(Ref, "submit", found.submit), (Ref, "submit_repeated", found.submit_repeated)]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in work]
    try:
        for owner, name, function in work:
            setattr(owner, name, function)
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


class _Charges:
    """Methods that take the place of the library's in a run: each does the same, and charges the rank for it."""

    def __init__(self, scheduler: Scheduler, network: Network) -> None:
        self._scheduler, self._network = scheduler, network
        self._run, self._submit, self._submit_repeated = FastExecutor.run, Ref.submit, Ref.submit_repeated
        self._of_moves, self._staging_copies = StepMaker.of_moves, StagedRounds.staging_copies

    @property
    def run(self) -> Callable[..., None]:
        """`FastExecutor.run`: charges for the call."""
        scheduler, network, original = self._scheduler, self._network, self._run

        def run(executor: FastExecutor, program: Program, tensors: Sequence[Tensor], number: Any) -> None:
            task = current_task()
            if task is None:
                return original(executor, program, tensors, number)
            with scheduler.in_call(task):
                task.uncached = network.uncached(_bytes_of(program, tensors))
                scheduler.work(network.overhead)
                original(executor, program, tensors, number)

        return run

    @property
    def submit(self) -> Callable[..., Any]:
        """`Ref.submit`: its processor time is not computation."""
        return self._in_call(self._submit)

    @property
    def submit_repeated(self) -> Callable[..., Any]:
        """`Ref.submit_repeated`: as `submit`."""
        return self._in_call(self._submit_repeated)

    def _in_call(self, method: Callable[..., Any]) -> Callable[..., Any]:
        scheduler = self._scheduler

        def call(backend: Ref, *arguments: Any, **named: Any) -> Any:
            task = current_task()
            if task is None:
                return method(backend, *arguments, **named)
            with scheduler.in_call(task):
                return method(backend, *arguments, **named)

        return call

    @property
    def staging_copies(self) -> Callable[..., list[Step]]:
        """`StagedRounds.staging_copies`: charges for them."""
        network, original = self._network, self._staging_copies

        def staging_copies(rounds: StagedRounds, number: int, begin: int, slots: StagedSlots) -> list[Step]:
            plan, made = rounds.plan, original(rounds, number, begin, slots)
            mine = plan.staged(number, plan.rank) if made else ()
            nbytes = sum(plan.length(plan.rank, slot, begin) for slot in mine) * plan.dtype.itemsize
            # Later rounds copy what this rank has just changed.
            accesses = 0 if number else STAGED
            return [*made, self._charge(_Work(nbytes, network.copy, accesses))] if nbytes else made

        return staging_copies

    @property
    def of_moves(self) -> Callable[..., Iterator[Step]]:
        """`StepMaker.of_moves`: charges for reductions, own copies, and reads of tensors that were not staged."""
        network, original = self._network, self._of_moves

        def of_moves(
            maker: StepMaker, number: int, moves: Iterable[Move], addresses: Addresses, begin: int
        ) -> Iterator[Step]:
            moves = list(moves)
            yield from original(maker, number, moves, addresses, begin)
            is_staged = isinstance(addresses, StagedSlots)
            reduced = {(move.dst, move.write) for move in moves if move.reduce}
            work = []
            for move in moves:
                nbytes = addresses.count(move.dst, move.write, begin) * maker.itemsize
                is_own = move.src == move.dst
                if move.reduce:
                    work.append(_Work(nbytes, network.gamma, STAGED if is_own else 0))
                elif is_own:
                    # The first addition to a copy reads the original: there is no pass through memory before it.
                    apart = (move.dst, move.write) not in reduced
                    work.append(_Work(nbytes, network.copy, COPIED if apart else STAGED))
                if not is_own and not is_staged:
                    # The other rank's tensor is in memory, too.
                    work.append(_Work(nbytes, network.local_beta, STAGED + WRITTEN))
            if work:
                yield self._charge(*work)

        return of_moves

    def _charge(self, *work: _Work) -> Step:
        scheduler, network = self._scheduler, self._network

        def step(tensors: Any, begin: int) -> None:
            task = current_task()
            if task is not None:
                uncached = task.uncached
                scheduler.work(sum(n * network.per_byte(each, accesses, uncached) for n, each, accesses in work))

        return step


class _Work(NamedTuple):
    """Copy or reduction: bytes, seconds per byte in the cache, and accesses of memory per byte beyond it."""

    nbytes: int
    seconds: float
    accesses: int


def _bytes_of(program: Program, tensors: Sequence[Tensor]) -> int:
    """Return the bytes of a rank's tensors in a call; if only the root has all blocks, those of two blocks.

    Ranks of a host share a cache, so the mean over the ranks counts.
    """
    if program.plan.op in ("gather", "scatter"):
        return 2 * program.plan.sizes.largest * program.plan.dtype.itemsize
    return sum(t.nbytes for t in tensors)
