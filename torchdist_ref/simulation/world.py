"""World of a simulation: the transport of its ranks, and the news of deaths that they get."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torchdist_ref.backends.ref.tag_matching import PostedReceive, Receiver
from torchdist_ref.membership.events import KILLED, Ending
from torchdist_ref.processes.identity import simulated_place
from torchdist_ref.simulation.charges import charged
from torchdist_ref.simulation.network import Wires
from torchdist_ref.simulation.primitives import SimulatedSemaphore
from torchdist_ref.simulation.scheduler import Scheduler, current_task
from torchdist_ref.simulation.timeline import Timeline
from torchdist_ref.transports import selection
from torchdist_ref.transports.base import Range, Semaphore
from torchdist_ref.transports.link import Link
from torchdist_ref.transports.segment import ROW_BYTES, CommonSegment, SegmentLayout, StatusRow, window_for

HOST_PREFIX = "simulated host "
WINDOW_BYTES = 512 * 1024
"""Window between hosts, as over TCP."""
FIRST_PID = 1000
"""Number of the process of rank 0."""


class SimulatedWorld:
    """State that the ranks of a run share.

    Args:
        scheduler: The scheduler.
        wires: The network.
        size: Number of ranks.

    Attributes:
        segments: Memory of groups, by the key that their rank 0 publishes.
        dead: How each dead rank ended, from the moment at which the others know it.
        timeline: Entries of the run so far.
    """

    def __init__(self, scheduler: Scheduler, wires: Wires, size: int) -> None:
        self.scheduler, self.wires, self.size = scheduler, wires, size
        self.segments: dict[str, SimulatedSegment] = {}
        self.ends: dict[int, list[tuple[Link, SimulatedSegment]]] = {}
        self.dead: dict[int, Ending] = {}
        self.timeline = Timeline()
        self.on_death: list[Callable[[int], None]] = []
        self.held: list[tuple[int, int, Callable[[], None]]] = []
        scheduler.occupy = lambda rank, seconds: wires.occupy(scheduler.now, rank, seconds)

    def place(self, rank: int) -> None:
        """Let the calling context be that of a rank, with its host and its process."""
        simulated_place.set((f"{HOST_PREFIX}{self.wires.hosts[rank]}", FIRST_PID + rank))

    def record(self, rank: int, kind: str, *facts: Any) -> None:
        """Add an entry to the timeline."""
        self.timeline.add(self.scheduler.now, rank, kind, *facts)

    def awaited_by(self, rank: int, waits_for: object, frame: FrameType | None) -> list[int]:
        """Return the ranks that a rank waits for, as far as they are known.

        Args:
            rank: The rank that waits.
            waits_for: The semaphore or other thing that its task waits for.
            frame: Frame in which the task waits. Any peer posts the semaphore of a rank that waits for messages, so the
                receive that it is in says whom it waits for.
        """
        ends = self.ends.get(rank, [])
        while frame is not None:
            receive, taker = frame.f_locals.get("receive"), frame.f_locals.get("self")
            if isinstance(receive, PostedReceive) and isinstance(taker, Receiver):
                source, peers = receive.call.src, taker.link.peers
                owners = next((segment.owners for link, segment in ends if link is taker.link), ())
                return [owners[peer] for peer in (peers if source is None else [source])] if owners else []
            frame = frame.f_back
        waiting = ((segment, link.row.waiting_for(None)) for link, segment in ends)
        found = {segment.owners[peer] for segment, peer in waiting if peer is not None}
        source = getattr(waits_for, "source", None)
        return sorted(found) or ([] if source is None else [source])

    def share_waits(self) -> None:
        """Let all ranks see for whom each waits, as they do in memory that they share, and over a network in time."""
        for ends in self.ends.values():
            for link, segment in ends:
                if (peer := link.row.waiting_for(None)) is not None:
                    for rank in range(link.size):
                        segment.row_of(link.rank, rank).set_waiting_for(peer)

    def kill(self, rank: int) -> None:
        """Kill a rank, as SIGKILL does: it does nothing any more, and the others learn it from the system."""
        scheduler = self.scheduler
        if scheduler.is_dead(rank):
            return
        self.record(rank, "killed")
        scheduler.kill(rank)

        def known() -> None:
            self.dead[rank] = Ending(KILLED, FIRST_PID + rank, f"{HOST_PREFIX}{self.wires.hosts[rank]}", signal.SIGKILL)
            for react in self.on_death:
                react(rank)
            scheduler.alarm()

        others = [other for other in range(self.size) if other != rank]
        latest = max((self.wires.notice(scheduler.now, rank, other) for other in others), default=scheduler.now)
        scheduler.at(latest, known)


class SimulatedSegment(CommonSegment):
    """Memory of a group, with semaphores whose posts take the time that the network needs for their bytes.

    Data and messages lie in memory that all ranks share: nobody reads them before the semaphore that announces them,
    or overwrites them before the one that releases them. A row of the status table may be read at any time. So each
    rank has a copy of the table, and a change arrives with the semaphore that carries it, never before an earlier one.

    Attributes:
        owners: Rank of the run behind each rank of the group. Groups may number their members anew.
        tables: Copy of the status table of each rank.
    """

    kind = "threads"

    def __init__(self, world: SimulatedWorld, layout: SegmentLayout, owners: Sequence[int]) -> None:
        self._world, self.owners = world, tuple(owners)
        self.buffer = mmap.mmap(-1, layout.nbytes)
        self.bytes = memoryview(self.buffer)
        self._semaphores: dict[int, SimulatedSemaphore] = {}
        self._first_row, self._end_of_rows = layout.status_row(0), layout.status_row(layout.size)
        # One for each rank, which writes may reach before it has connected itself.
        self.tables = [bytearray(self._end_of_rows - self._first_row) for _ in owners]

    def join(self, rank: int) -> tuple[StatusRow, ...]:
        """Return the rows of the status table as a rank sees them."""
        table = self.tables[rank]
        return tuple(StatusRow(memoryview(table), r * ROW_BYTES) for r in range(len(self.owners)))

    def row_of(self, rank: int, seen_by: int) -> StatusRow:
        """Return the row of a rank in another rank's copy of the table."""
        return StatusRow(memoryview(self.tables[seen_by]), rank * ROW_BYTES)

    def _snapshot(self, rank: int, ranges: Sequence[Range]) -> list[tuple[int, bytes]]:
        """Return the parts of some ranges that lie in the status table, as this rank has written them."""
        table, first = self.tables[rank], self._first_row
        parts = [(offset - first, size) for offset, size in ranges if first <= offset < self._end_of_rows]
        return [(offset, bytes(table[offset : offset + size])) for offset, size in parts]

    def semaphore(self, layout: SegmentLayout, kind: str, source: int, target: int) -> Semaphore:
        """See `Segment.semaphore`. Created on first use."""
        at = layout.semaphore(kind, source, target)
        found = self._semaphores.get(at)
        if found is None:
            posted_by = None if kind == "doorbell" else self.owners[source]
            found = self._semaphores[at] = SimulatedSemaphore(self._world.scheduler, posted_by, kind)
        return found

    def make_signal(
        self, semaphore: Semaphore, kind: str, target: int, owner: int, ranges: Sequence[Range]
    ) -> Callable[[], Any]:
        """See `Segment.make_signal`. The semaphore is posted when the bytes have arrived."""
        world, to = self._world, self.owners[target]
        # Rows of the status table are announcements; what lies behind them are data.
        nbytes = sum(size for offset, size in ranges if offset >= self._end_of_rows)
        scheduler, wires = world.scheduler, world.wires
        alarm = kind == "status"

        def post() -> None:
            scheduler.step()
            task = current_task()
            source = to if task is None else task.owner
            rows = self._snapshot(self.owners.index(source), ranges) if ranges else []

            def arrive() -> None:
                if wires.is_cut(source, to):
                    world.held.append((source, to, arrive))
                    return
                for offset, content in rows:
                    self.tables[target][offset : offset + len(content)] = content
                if alarm:
                    scheduler.alarm(to)
                semaphore.release()

            arrival = wires.arrival(scheduler.now, source, to, nbytes, 0.0 if task is None else task.uncached)
            if nbytes:
                world.record(source, "sent", to, nbytes, arrival)
            if arrival > scheduler.now:
                scheduler.at(arrival, arrive)
            else:
                arrive()

        return post


class SimulatedLiveness:
    """`Liveness` of simulated ranks: those that the plan has killed, once the others can know it."""

    def __init__(self, world: SimulatedWorld, owners: Sequence[int]) -> None:
        self._world, self._owners = world, owners

    def dead(self) -> list[int]:
        """See `Liveness.dead`."""
        return [rank for rank, owner in enumerate(self._owners) if owner in self._world.dead]

    def ending(self, rank: int) -> Ending | None:
        """See `Liveness.ending`."""
        return self._world.dead.get(self._owners[rank])

    def close(self) -> None:
        """See `Liveness.close`."""


def connect(world: SimulatedWorld, group: selection.GroupEndpoints) -> Link:
    """Connect a rank to the others of its group, as `transports.selection.Transport.connect`."""
    rank, members = group.rank, group.members
    owners = tuple(int(endpoint.process) - FIRST_PID for endpoint in group.endpoints)
    hosts = tuple(world.wires.hosts[owner] for owner in owners)
    # The windows of the real transports: the times of copies and messages depend on them.
    window = window_for(len(members)) if len(set(hosts)) == 1 else WINDOW_BYTES
    layout = SegmentLayout(len(members), window=window, cells=2, mailbox_bytes=0)
    if rank:
        segment = world.segments[group.store.get("segment").decode()]
    else:
        key = f"{group.name}, {len(world.segments)}"
        segment = world.segments[key] = SimulatedSegment(world, layout, owners)
        group.store.set("segment", key)
    link = Link(segment, layout, rank, members, group.name, group.timeout)
    link.spins = link.yields = 0
    link.liveness = SimulatedLiveness(world, owners)
    link.rows = segment.join(rank)
    link.row = link.rows[rank]
    link.hosts = hosts if len(set(hosts)) > 1 else None
    link.row.join(os.getpid())
    world.ends.setdefault(owners[rank], []).append((link, segment))
    with link.joining():
        link.handshake(group.watch)
    return link


@contextmanager
def transport(world: SimulatedWorld) -> Iterator[None]:
    """Let simulated ranks find the transport of their world in the block, and calls take the time of its network."""
    row = selection.Transport(
        lambda endpoints: endpoints[0].host.startswith(HOST_PREFIX.encode()), lambda group: connect(world, group)
    )
    before = selection.TRANSPORTS
    selection.TRANSPORTS = {"simulated": row, **before}
    try:
        with charged(world.scheduler, world.wires.network):
            yield
    finally:
        selection.TRANSPORTS = before
