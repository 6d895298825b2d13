"""Fast executor: compiles plans, and runs what it has compiled in short loops.

It gives the bits that the reference executor (`execute`) gives, with these optimizations:

* Compiled rounds: operands are bound, semaphores looked up, and copies and reductions chosen when a call of its kind is
  made for the first time (`StagedRounds`, `steps`).
* Ring buffer: a rank writes a window while its peers still read the ones before (`RingBuffer`).
* Flow control by need: a call of one round and one window needs no release.
* Zero-copy: calls on registered tensors work on the peers' tensors in place (`zero_copy`).
* One GPU: ranks that share a device use staging buffers on it, not in host memory (`one_gpu`).

The table shows the time of an `all_reduce` of float32 between two processes without one of them, relative to the fast
executor: medians of 13 interleaved rounds on a busy host with two cores, where 0.1 is noise. For zero-copy the tensors
are registered; a `broadcast` of 16 MiB gains more, a factor of 2.4. One GPU has not been measured.

========================================  =====  ======  =====  ======
without                                   4 B    64 KiB  1 MiB  16 MiB
========================================  =====  ======  =====  ======
all of them (the reference executor)      3.0    2.1     1.5    1.7
compiled rounds (compiled in every call)  2.6    2.3     1.7    1.4
ring buffer (one cell)                    1.1    0.9     1.1    1.2
flow control by need (always release)     1.0    1.1     1.0    1.0
zero-copy                                 --     --      1.1    1.7
========================================  =====  ======  =====  ======

Every way to run a call has the same signature, `Run`. Do not add here: decisions; those are the plan's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchdist_ref.backends.ref.contiguous import copy_from_host, copy_to_host
from torchdist_ref.backends.ref.handshake import Handshake, SomeUnregisteredError
from torchdist_ref.backends.ref.one_gpu import DeviceBuffers, device_path
from torchdist_ref.backends.ref.plan import (
    EXECUTOR_VARIABLE,
    Pairs,
    Plan,
    Planner,
    exchange_of_sizes,
    executor_name,
    with_sizes,
)
from torchdist_ref.backends.ref.steps import Operand, Part, Scratch, Step, StepMaker
from torchdist_ref.backends.ref.zero_copy import ZeroCopyPath, memory_of_ranks, registered_path
from torchdist_ref.calls import Number
from torchdist_ref.schedules.schedule import Move, Slot
from torchdist_ref.torch_internals.torch_modes import outside_modes
from torchdist_ref.transports.base import Range, Semaphore
from torchdist_ref.transports.link import Link
from torchdist_ref.transports.segment import ANNOUNCEMENT_BYTES, COMPLETED, EAGER_BYTES, ring_bytes

if TYPE_CHECKING:
    from torchdist_ref.backends.ref.execute import ReferenceExecutor
    from torchdist_ref.transports.registered_memory import PeerMemory

Run = Callable[[Sequence[Tensor], bool], None]
"""Runs a call on its operands; the other argument is whether the peers' announcements have yet to be compared."""

# Programs that route tokens have other sizes in every call; compiled exchanges of all of them must not fill the memory.
MOST_EXCHANGES = 256


class Program(NamedTuple):
    """A plan, compiled for one link.

    Attributes:
        plan: The plan.
        run: Runs it in the best way.
        staged: Runs it through staging buffers: used where only some ranks' tensors can be accessed directly.
    """

    plan: Plan
    run: Run
    staged: Run


class FastExecutor:
    """Executor of compiled plans, and the state of a link between calls."""

    name = "fast"

    def __init__(self, link: Link) -> None:
        self._link, self._handshake, self.ring = link, Handshake(link), RingBuffer(link)
        self._scratch = Scratch()
        self._exchanges: dict[tuple[torch.dtype, Pairs], Run] = {}

    # Of zero-copy calls, which many programs never make.

    @cached_property
    def _neighbors(self) -> tuple[PeerMemory, ...]:
        """The registered memory of every rank, including this one."""
        return memory_of_ranks(self._link)

    @cached_property
    def _device_buffers(self) -> DeviceBuffers:
        """The ranks' staging buffers on devices."""
        return DeviceBuffers(self._link, self._neighbors)

    def run(self, program: Program, tensors: Sequence[Tensor], number: Number) -> None:
        """Run a call, under its number, on tensors that are flat (`Plan.is_flat`).

        Raises:
            OutOfOrderError: Another call comes first, which a peer has begun. Nothing was written.
            MismatchError: A peer announced another call. Nothing was written, and the link remains usable.
            DistBackendError: A peer died, aborted or did not come; the link cannot be used any more.
        """
        handshake, ring, plan = self._handshake, self.ring, program.plan
        head = ring.head
        handshake.announce(handshake.sequence, plan.record, number)
        try:
            try:
                program.run(tensors, True)
            except SomeUnregisteredError:
                ring.head = head
                program.staged(tensors, False)
        except BaseException as error:
            ring.head = head
            handshake.fail(plan, error)
            raise
        # As `handshake.complete` does, but a call of a function shorter.
        handshake.fields[COMPLETED] = handshake.sequence
        handshake.sequence += 1

    def compile(self, plan: Plan) -> Program:
        """Return a plan as functions of a call's operands."""
        if plan.uneven:
            staged = self._uneven(plan)
        elif not plan.carries_data and (len(plan.rounds) < 2 or self._handshake.meets_by_hops):
            # A call without data is over when all ranks have seen each other begin it.
            staged = self._synchronizing(plan)
        else:
            staged = self.compile_staged(plan)
        if not plan.on_host:
            staged = self._through_host(plan, staged)
        path = self._direct_path(plan)
        run = staged if path is None else self._direct(plan, path, staged)
        if not plan.on_host:
            # Steps on a device are operations on the caller's tensors, not on views.
            run, staged = outside_modes()(run), outside_modes()(staged)
        return Program(plan, run, staged)

    def _direct_path(self, plan: Plan) -> ZeroCopyPath | None:
        """Return the path by which peers read the tensors themselves, or None if the call is staged."""
        if plan.uneven or plan.forced or self._link.hosts is not None or self._link.size == 1:
            return None
        if self._handshake.meets_by_hops:
            # Every rank would need the location of every other's tensors.
            return None
        if plan.on_host:
            # A call that fits an eager buffer is staged: it is over before zero-copy could save anything.
            eager = plan.most_staged * plan.stride <= EAGER_BYTES
            return None if eager else registered_path(plan, self._neighbors, self._scratch)
        return device_path(plan, self._device_buffers, self._scratch)

    def compile_staged(self, plan: Plan, repeated: bool = True) -> Run:
        """Return a function that runs a plan through staging buffers: write, signal, wait, compare, reduce, release.

        A call of one round and one window has no releases: the handshake of the next call replaces them.

        Args:
            plan: The plan.
            repeated: Whether calls of this kind are probably repeated, so that more is compiled now. Default True.
        """
        wait, operation, ring, handshake = self._link.acquire, plan.text, self.ring, self._handshake
        meet = partial(handshake.meet, plan) if handshake.meets_by_hops else None
        rounds = StagedRounds(self._link, plan, self._scratch, meet)
        count, announced = len(plan.rounds), self._handshake.announced
        windows = [(begin, rounds.by_location(begin, repeated)) for begin in plan.windows]
        nbytes = rounds.nbytes

        def run(tensors: Sequence[Tensor], check: bool) -> None:
            for begin, compiled in windows:
                location = ring.take(nbytes, count) if nbytes else ring.round % ring.cells
                for writes, signals, waits, steps, releases, readers in compiled[location]:
                    if writes:
                        if ring.readers:
                            ring.wait_for_readers(ring.round, operation)
                        for write in writes:
                            write(tensors, begin)
                    for signal in signals:
                        signal()
                    for semaphore, peer in waits:
                        if not semaphore.acquire(False):
                            wait(semaphore, peer, operation)
                    if check:
                        # As `handshake.compare`, but a call of a function shorter.
                        mine, theirs = announced[handshake.sequence & 1]
                        if theirs.count(mine) < len(theirs):
                            raise handshake.difference(plan)
                        check = False
                    if readers:
                        ring.read_by(readers)
                    ring.round += 1
                    for step in steps:
                        step(tensors, begin)
                    for release in releases:
                        release()

        return run

    def _direct(self, plan: Plan, path: ZeroCopyPath, staged: Run) -> Run:
        """Return what runs a plan on memory that peers access in place, if this rank's tensors are in such memory."""
        row, rows, handshake = self._link.row, tuple(self._link.rows), self._handshake
        synchronize = self._synchronizing(plan)

        def run(tensors: Sequence[Tensor], check: bool) -> None:
            location = path.location(tensors)
            if location is None:
                return staged(tensors, check)
            parity = handshake.sequence & 1
            row.announce_zero_copy(parity, path.mark, location)
            synchronize(tensors, True)
            for steps in path.phases(b"".join([each.handles[parity] for each in rows])):
                for step in steps:
                    step(tensors, 0)
                synchronize(tensors, False)

        return run

    def _synchronizing(self, plan: Plan) -> Run:
        """Return a function that signals all peers and waits for them, as the handshake of a call does."""
        link, operation, compare = self._link, plan.text, self._handshake.compare
        if self._handshake.meets_by_hops:
            meet = self._handshake.meet
            return lambda tensors, check: meet(plan)
        signals = [
            link.make_signal("ready", peer, [(link.layout.status_row(link.rank), ANNOUNCEMENT_BYTES)])
            for peer in link.peers
        ]
        waits = [(link.ready_from[peer], peer) for peer in link.peers]

        def synchronize(tensors: Sequence[Tensor], check: bool) -> None:
            for signal in signals:
                signal()
            for semaphore, peer in waits:
                if not semaphore.acquire(False):
                    link.acquire(semaphore, peer, operation)
            if check:
                compare(plan)

        return synchronize

    def _uneven(self, plan: Plan) -> Run:
        """Return what runs an uneven exchange: the ranks exchange sizes, then blocks of these sizes."""
        world, exchange = plan.schedule.world, self.compile_staged(exchange_of_sizes(plan))

        def run(tensors: Sequence[Tensor], check: bool) -> None:
            mine = torch.tensor([tensor.numel() for tensor in tensors], dtype=torch.int64, device="cpu")
            table = torch.empty(world, 2, world, dtype=torch.int64, device="cpu")
            exchange((mine, table), check)
            sent, expected = table[:, 0], table[:, 1].t()
            self._handshake.compare_sizes(plan, sent, expected)
            self._exchange(plan, tuple(map(tuple, sent.tolist())))(tensors, False)

        return run

    def _through_host(self, plan: Plan, run: Run) -> Run:
        """Return what runs a call on tensors of devices, by way of copies in the host's memory."""

        def through_host(tensors: Sequence[Tensor], check: bool) -> None:
            hosts = copy_to_host(plan, tensors, self._link)
            run(hosts, check)
            copy_from_host(plan, hosts, tensors)

        return through_host

    def close(self) -> None:
        """Release the memory of devices that peers share."""
        if "_device_buffers" in vars(self):
            self._device_buffers.close()

    def _exchange(self, plan: Plan, pairs: Pairs) -> Run:
        found = self._exchanges.get((plan.dtype, pairs))
        if found is None:
            if len(self._exchanges) >= MOST_EXCHANGES:
                self._exchanges.clear()
            found = self._exchanges[plan.dtype, pairs] = self.compile_staged(with_sizes(plan, pairs), repeated=False)
        return found


SETTINGS = (EXECUTOR_VARIABLE, "TORCHDIST_REF_ALGORITHM")
"""Environment variables that choose the executor and the algorithms."""


def prepared(link: Link, executor: str, algorithms: str) -> tuple[FastExecutor | ReferenceExecutor, Planner]:
    """Return the executor of a link and the maker of its plans, as values of the two `SETTINGS` ask for.

    Raises:
        ArgumentError: No executor or no algorithm has such a name.
    """
    name = executor_name(executor)
    planner = Planner(link, name, algorithms)
    if name == FastExecutor.name:
        return FastExecutor(link), planner
    from torchdist_ref.backends.ref.execute import ReferenceExecutor

    return ReferenceExecutor(link), planner


# ---- staged rounds

Semaphores = tuple[tuple[Semaphore, int], ...]
"""Semaphores to acquire, each with the peer that posts it."""


class RingBuffer:
    """State of a link's staging buffers between rounds: where a round writes, and when it may.

    Every staging buffer is a ring of cells, besides a few small eager buffers for rounds of little data. All ranks
    count the rounds alike, and what they take of the ring, so locations need not be announced. A round may reuse the
    memory of the round `cells` rounds before it, once the readers of that one have released it: with several cells, a
    rank writes the next window while its peers still read the last one, and almost never waits.

    Attributes:
        round: Number of the next round.
        head: Offset in the ring at which the search for its location begins.
        cells: Number of rounds in a row that never overlap.
        readers: Rounds that are being read, each with the semaphores that its readers post. Semaphores carry
            no round number; they are posted in the order of the rounds.
    """

    def __init__(self, link: Link) -> None:
        self._link, self.cells = link, link.layout.cells
        self.round = self.head = 0
        self.readers: deque[tuple[int, Semaphores]] = deque()

    def take(self, nbytes: int, rounds: int) -> int:
        """Return the offset in every ring of the next window's first round: the same on all ranks."""
        location = self._link.layout.next_offset(self.head, nbytes)
        self.head = location + nbytes * rounds
        return location

    def wait_for_readers(self, number: int, operation: str) -> None:
        """Wait until nobody reads what was written `cells` rounds before round `number`, or earlier."""
        while self.readers and self.readers[0][0] <= number - self.cells:
            for semaphore, peer in self.readers.popleft()[1]:
                if not semaphore.acquire(False):
                    self._link.acquire(semaphore, peer, operation)

    def read_by(self, readers: Semaphores) -> None:
        """Announcement that peers read what the round under way writes."""
        self.readers.append((self.round, readers))


class CompiledRound(NamedTuple):
    """Functions that one round of one window calls.

    Attributes:
        writes: Copies to the staging buffer.
        signals: Functions that post the semaphores of the peers that read it.
        waits: Semaphores to acquire before reading.
        steps: Copies and reductions of this rank's slots.
        releases: Functions that post the semaphores of the peers that have been read from.
        readers: Semaphores to acquire before this memory is written again.
    """

    writes: tuple[Step, ...]
    signals: tuple[Callable[[], Any], ...]
    waits: Semaphores
    steps: tuple[Step, ...]
    releases: tuple[Callable[[], Any], ...]
    readers: Semaphores


CompiledWindow = tuple[CompiledRound, ...]


class StagedRounds:
    """Compiler of a plan's rounds by way of the staging buffers.

    Attributes:
        nbytes: Bytes of the ring that each round takes in every staging buffer; 0 if it uses an eager buffer.

    Args:
        link: This rank's end of the group.
        plan: The plan.
        partial_results: Memory for partial results.
        meet: Function with which many ranks compare a call before they signal in its first round. None: they do it in
            that round. Default None.
    """

    def __init__(
        self, link: Link, plan: Plan, partial_results: Scratch, meet: Callable[[], None] | None = None
    ) -> None:
        self.link, self.plan, self._meet = link, plan, meet
        self.nbytes = ring_bytes(plan.most_staged * plan.stride if plan.carries_data else 0)
        scratch = [slot for slot in plan.slots if slot[0] == "tmp"]
        self.scratch = {slot: torch.empty(plan.window, dtype=plan.dtype, device="cpu") for slot in scratch}
        self._maker = StepMaker(plan, partial_results)
        # With one round nobody needs to release: a rank that announces its next call has read this one's data, and the
        # next call is written elsewhere.
        self._flow_control = plan.carries_data and max(len(plan.rounds), len(plan.windows)) > 1
        self._compiled: dict[tuple[int, int], CompiledWindow] = {}

    def by_location(self, begin: int, repeated: bool = True) -> dict[int, CompiledWindow]:
        """Return the compiled rounds of a window by location; a lookup costs less than a call of `window`.

        Those for the eager buffers are compiled now if calls of this kind are repeated, since the next ones use these
        buffers in turn. Those for the ring buffer, which has many locations, are compiled when one is used for the
        first time.
        """
        found = _ByLocation(self, begin)
        if repeated and not self.nbytes:
            found.update((cell, self.window(begin, cell)) for cell in range(self.link.layout.cells))
        return found

    def window(self, begin: int, location: int) -> CompiledWindow:
        """Return the compiled rounds of a window; compile them at the first call with this location.

        Args:
            begin: Element of each slot with which the window begins.
            location: Location of the first round in the staging buffers, the same on every rank.
        """
        # Full windows after the first one differ in nothing but the element with which they begin.
        key = (-1 if 0 < begin <= self.plan.smallest - self.plan.window else begin, location)
        found = self._compiled.get(key)
        if found is None:
            numbers = self.plan.rounds
            # Tensors made under inference mode could not be changed after it.
            with torch.inference_mode(False):
                found = tuple(self.compile_round(n, begin, self._after(location, n)) for n in numbers)
            self._compiled[key] = found
        return found

    def _after(self, first: int, number: int) -> int:
        """Return the location of round `number` of a window whose first round is at `first`."""
        layout = self.link.layout
        location = first + number * (self.nbytes or 1)
        return layout.next_offset(location, self.nbytes) if self.nbytes else location % layout.cells

    def compile_round(self, number: int, begin: int, location: int) -> CompiledRound:
        """Compile one round of the window that begins there, for one location."""
        link, plan = self.link, self.plan
        first = number == 0 and begin == 0
        handshake, meet = first and self._meet is None, (self._meet,) if first and self._meet else ()
        sources, targets = plan.sources[number], plan.targets[number]
        slots = StagedSlots(self, location)
        moves = plan.moves_into(number) if plan.carries_data else ()
        return CompiledRound(
            writes=tuple(self.staging_copies(number, begin, slots)),
            signals=(
                *meet,
                *(
                    link.make_signal("ready", peer, slots.shown_to(number, peer, begin, handshake))
                    for peer in (link.peers if handshake else targets)
                ),
            ),
            waits=tuple((link.ready_from[peer], peer) for peer in (link.peers if handshake else sources)),
            steps=(*self._maker.of_moves(number, moves, slots, begin), *self._divisions(number, begin, slots)),
            releases=tuple(link.make_signal("released", peer) for peer in sources if self._flow_control),
            readers=tuple((link.released_by[peer], peer) for peer in targets if self._flow_control),
        )

    def staging_copies(self, number: int, begin: int, slots: StagedSlots) -> list[Step]:
        """Return the copies of a round from this rank's tensors to its staging buffer."""
        plan = self.plan
        mine = plan.staged(number, plan.rank) if plan.carries_data else ()
        return [
            self._maker.copy(slots.view(number, plan.rank, slot, begin), slots.target(plan.rank, slot, begin), count)
            for slot in mine
            if (count := plan.length(plan.rank, slot, begin))
        ]

    def _divisions(self, number: int, begin: int, slots: StagedSlots) -> list[Step]:
        """Return the divisions of AVG that follow the last round; empty for other reductions and earlier rounds.

        A window is divided while it is in the cache. With a single reducing round, its reductions divide instead.
        """
        plan = self.plan
        if not plan.divisor or plan.divides_at_once or number < len(plan.rounds) - 1:
            return []
        return [
            self._maker.divide(slots.target(plan.rank, slot, begin), count, plan.divisor)
            for slot in plan.results
            if (count := plan.length(plan.rank, slot, begin))
        ]


class _ByLocation(dict[int, CompiledWindow]):
    """Compiled rounds of one window, by location."""

    def __init__(self, rounds: StagedRounds, begin: int) -> None:
        super().__init__()
        self._rounds, self._begin = rounds, begin

    def __missing__(self, location: int) -> CompiledWindow:
        found = self[location] = self._rounds.window(self._begin, location)
        return found


class StagedSlots:
    """Addresses of slots in a round that is at one location of the staging buffers.

    Args:
        rounds: The plan's rounds.
        location: Offset in every ring, or number of the eager buffer.
    """

    def __init__(self, rounds: StagedRounds, location: int) -> None:
        self._rounds, self._plan, self._link, self._location = rounds, rounds.plan, rounds.link, location

    def count(self, rank: int, slot: Slot, begin: int) -> int:
        """See `steps.Addresses`."""
        return self._plan.length(rank, slot, begin)

    def target(self, rank: int, slot: Slot, begin: int) -> Operand:
        """See `steps.Addresses`."""
        if slot[0] == "tmp":
            return self._rounds.scratch[slot][: self._plan.length(rank, slot, begin)]
        return Part(*self._plan.address_of(slot))

    def source(self, number: int, move: Move, begin: int) -> Operand:
        """See `steps.Addresses`."""
        if move.src == self._plan.rank and move.read not in self._plan.staged(number, move.src):
            return self.target(move.src, move.read, begin)
        return self.view(number, move.src, move.read, begin)

    def view(self, number: int, rank: int, slot: Slot, begin: int) -> Tensor:
        """Return a slot in a rank's staging buffer."""
        plan = self._plan
        offset = self._begin_of(rank) + plan.staging_offset(number, rank, slot)
        buffer, count = self._link.segment.buffer_of(rank), plan.length(rank, slot, begin)
        return torch.frombuffer(buffer, dtype=plan.dtype, count=count, offset=offset)

    def shown_to(self, number: int, peer: int, begin: int, handshake: bool) -> list[Range]:
        """Return the memory that a peer reads once it is signaled, in a handshake the announcement too."""
        first = self._begin_of(self._plan.rank)
        announcement = [(self._link.layout.status_row(self._link.rank), ANNOUNCEMENT_BYTES)] if handshake else []
        staged = self._plan.staged_for(number, peer, begin)
        return announcement + [(first + offset, nbytes) for offset, nbytes in staged]

    def _begin_of(self, rank: int) -> int:
        """Return the offset in the segment of this round's part of a rank's staging buffer."""
        layout = self._link.layout
        return layout.ring(rank, self._location) if self._rounds.nbytes else layout.eager_buffer(rank, self._location)
