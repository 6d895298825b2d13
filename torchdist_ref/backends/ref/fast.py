"""Fast executor: compiles plans, and runs what it has compiled in short loops.

It gives the bits that the reference executor (`execute`) gives, with these optimizations:

* Compiled rounds: operands are bound, semaphores looked up, and copies and reductions chosen when a call of its kind is
  made for the first time (`ring_buffer`, `steps`).
* Ring buffer: a rank writes a window while its peers still read the ones before.
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

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchdist_ref.backends.ref.execute import ReferenceExecutor
from torchdist_ref.backends.ref.mismatches import Handshake, SomeUnregisteredError
from torchdist_ref.backends.ref.one_gpu import DeviceBuffers, device_path
from torchdist_ref.backends.ref.plan import EXECUTOR_VARIABLE, Pairs, Plan, exchange_of_sizes, executor_name, with_sizes
from torchdist_ref.backends.ref.ring_buffer import RingBuffer, StagedRounds
from torchdist_ref.backends.ref.staging import copy_from_host, copy_to_host
from torchdist_ref.backends.ref.zero_copy import ZeroCopyPath, registered_path
from torchdist_ref.calls import Number
from torchdist_ref.torch_internals.torch_modes import outside_modes
from torchdist_ref.transports.link import Link
from torchdist_ref.transports.registered_memory import PeerMemory
from torchdist_ref.transports.segment import ANNOUNCEMENT_BYTES, COMPLETED, EAGER_BYTES

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
        self._link, self._handshake, self._ring = link, Handshake(link), RingBuffer(link)
        self._neighbors = tuple(PeerMemory(line.pid) for line in link.rows)
        self._device_buffers = DeviceBuffers(link, self._neighbors)
        self._exchanges: dict[tuple[torch.dtype, Pairs], Run] = {}

    def run(self, program: Program, tensors: Sequence[Tensor], number: Number) -> None:
        """Run a call, under its number, on tensors that are flat (`Plan.is_flat`).

        Raises:
            OutOfOrderError: Another call comes first, which a peer has begun. Nothing was written.
            MismatchError: A peer announced another call. Nothing was written, and the link remains usable.
            DistBackendError: A peer died, aborted or did not come; the link cannot be used any more.
        """
        handshake, ring, plan = self._handshake, self._ring, program.plan
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
        elif not plan.carries_data and len(plan.rounds) < 2:
            # A call without data is over when all ranks have seen each other begin it.
            staged = self._synchronizing(plan)
        else:
            staged = self._staged(plan)
        if not plan.on_host:
            staged = _through_host(plan, staged)
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
        if plan.on_host:
            # A call that fits an eager buffer is staged: it is over before zero-copy could save anything.
            eager = plan.most_staged * plan.stride <= EAGER_BYTES
            return None if eager else registered_path(plan, self._neighbors)
        return device_path(plan, self._device_buffers)

    def _staged(self, plan: Plan, repeated: bool = True) -> Run:
        """Return a function that runs a plan through staging buffers: write, signal, wait, compare, reduce, release.

        A call of one round and one window has no releases: the handshake of the next call replaces them.

        Args:
            plan: The plan.
            repeated: Whether calls of this kind are probably repeated, so that more is compiled now. Default True.
        """
        wait, operation, ring, handshake = self._link.acquire, plan.text, self._ring, self._handshake
        rounds, count, announced = StagedRounds(self._link, plan), len(plan.rounds), self._handshake.announced
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
        row, rows, handshake = self._link.row, self._link.rows, self._handshake
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
        world, exchange = plan.schedule.world, self._staged(exchange_of_sizes(plan))

        def run(tensors: Sequence[Tensor], check: bool) -> None:
            mine = torch.tensor([tensor.numel() for tensor in tensors], dtype=torch.int64, device="cpu")
            table = torch.empty(world, 2, world, dtype=torch.int64, device="cpu")
            exchange((mine, table), check)
            sent, expected = table[:, 0], table[:, 1].t()
            self._handshake.compare_sizes(plan, sent, expected)
            self._exchange(plan, tuple(map(tuple, sent.tolist())))(tensors, False)

        return run

    def _exchange(self, plan: Plan, pairs: Pairs) -> Run:
        found = self._exchanges.get((plan.dtype, pairs))
        if found is None:
            if len(self._exchanges) >= MOST_EXCHANGES:
                self._exchanges.clear()
            found = self._exchanges[plan.dtype, pairs] = self._staged(with_sizes(plan, pairs), repeated=False)
        return found


def _through_host(plan: Plan, run: Run) -> Run:
    """Return what runs a call on tensors of devices, by way of copies in the host's memory."""

    def through_host(tensors: Sequence[Tensor], check: bool) -> None:
        hosts = copy_to_host(plan, tensors)
        run(hosts, check)
        copy_from_host(plan, hosts, tensors)

    return through_host


def executor_for(link: Link) -> FastExecutor | ReferenceExecutor:
    """Return the executor that the environment asks for; see `plan.executor_name`."""
    name = executor_name(os.environ.get(EXECUTOR_VARIABLE, ""))
    return ReferenceExecutor(link) if name == ReferenceExecutor.name else FastExecutor(link)
