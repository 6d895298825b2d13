"""World of a simulation: the transport of its ranks, and the news of deaths that they get."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

from torchdist_ref.backends.ref.tag_matching import PostedReceive, Receiver
from torchdist_ref.membership.events import KILLED, Ending
from torchdist_ref.processes.identity import simulated_place
from torchdist_ref.simulation.charges import charged
from torchdist_ref.simulation.network import Wires
from torchdist_ref.simulation.primitives import SimulatedSemaphore
from torchdist_ref.simulation.scheduler import Scheduler
from torchdist_ref.simulation.timeline import Timeline
from torchdist_ref.transports import selection
from torchdist_ref.transports.base import Range, Semaphore
from torchdist_ref.transports.link import MOST_MEETING_WITHIN_A_HOST, Link
from torchdist_ref.transports.segment import (
    ABORTED,
    ROW_BYTES,
    CommonSegment,
    SegmentLayout,
    StatusRow,
    StatusRows,
    window_for,
)

HOST_PREFIX = "simulated host "
WINDOW_BYTES = 512 * 1024
"""Window between hosts, as over TCP."""
CELLS = 2
"""Windows in the staging buffer of a rank."""
FIRST_PID = 1000
"""Number of the process of rank 0."""
# Of mmap(2): no memory is set aside before it is used. Python has a name for it from 3.13 on.
_MAP_NORESERVE = 0x4000


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

    def add_rank(self, host: int) -> int:
        """Add a rank that starts later, on a host, and return its number."""
        self.size += 1
        return self.wires.add(host)

    def exit(self, rank: int) -> None:
        """Let the process of a rank end, whose program has: what is left of it does nothing any more."""
        self.scheduler.kill(rank)
        for react in self.on_death:
            react(rank)

    def end_host(self, host: int) -> list[int]:
        """End a host as by a power failure: its ranks stop, and nobody is notified. Return these ranks."""
        ranks = [rank for rank, its_host in enumerate(self.wires.hosts) if its_host == host]
        self.wires.silent |= set(ranks)
        for rank in ranks:
            self.scheduler.kill(rank)
        return ranks

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


class SimulatedSegment:
    """Memory of a group, with semaphores whose posts take the time that the network needs for their bytes.

    Data and messages lie in memory that all ranks share: nobody reads them before the semaphore that announces them,
    or overwrites them before the one that releases them. A row of the status table may be read at any time. So each
    rank has copies of the rows, and a change arrives with the semaphore that carries it, never before an earlier one.

    Args:
        world: The world.
        layout: Offsets in the segment.
        owners: Rank of the run behind each rank of the group. Groups may number their members anew.

    Attributes:
        owners: As the argument.
        hosts: Host of each rank of the group.
        owners_on: Ranks of the run, by the host that they are on.
        buffer: The memory. Untouched pages use none.
    """

    def __init__(self, world: SimulatedWorld, layout: SegmentLayout, owners: Sequence[int]) -> None:
        self.world, self.layout, self.owners = world, layout, tuple(owners)
        self.buffer = mmap.mmap(-1, layout.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        self.bytes = memoryview(self.buffer)
        self.hosts = tuple(world.wires.hosts[owner] for owner in owners)
        self.owners_on: dict[int, list[int]] = {}
        for owner in owners:
            self.owners_on.setdefault(world.wires.hosts[owner], []).append(owner)
        self._semaphores: dict[int, SimulatedSemaphore] = {}
        # By owner and then by the rank that sees it. A rank that was sent a row alone has a copy of its own; all others
        # of a host see what was published there last.
        self._copies: list[dict[int, bytearray]] = [{} for _ in owners]
        self._published: list[dict[int, bytes]] = [{} for _ in owners]

    def row_memory(self, owner: int, seen_by: int) -> bytearray:
        """Return a rank's copy of the row of another one, or its own row."""
        found = self._copies[owner].get(seen_by)
        if found is None:
            host = self.world.wires.hosts[self.owners[seen_by]]
            found = bytearray(self._published[owner].get(host) or ROW_BYTES)
            self._copies[owner][seen_by] = found
        return found

    def row_of(self, owner: int, seen_by: int) -> StatusRow:
        """Return the row of a rank in another rank's copy of the table."""
        return StatusRow(memoryview(self.row_memory(owner, seen_by)), 0)

    def show(self, owner: int, host: int, content: bytes) -> None:
        """Let the ranks of a host see a row."""
        self._published[owner][host] = content
        for seen_by, copy in self._copies[owner].items():
            if seen_by != owner and self.world.wires.hosts[self.owners[seen_by]] == host:
                copy[:] = content

    def semaphore(self, layout: SegmentLayout, kind: str, source: int, target: int) -> SimulatedSemaphore:
        """Return a semaphore. Created on first use."""
        at = layout.semaphore(kind, source, target)
        found = self._semaphores.get(at)
        if found is None:
            posted_by = None if kind == "doorbell" else self.owners[source]
            found = self._semaphores[at] = SimulatedSemaphore(self.world.scheduler, posted_by, kind)
        return found


class SimulatedSignal:
    """Posts of a semaphore by one rank to another, each of which arrives with the bytes that it announces.

    Args:
        shared: Memory of the group.
        semaphore: The semaphore.
        kind: Kind of the semaphore.
        rank: Rank of the group that posts.
        target: Rank of the group that receives the bytes.
        ranges: Offset and size of each piece of memory that the post announces.
    """

    __slots__ = (
        "_alarms",
        "_nbytes",
        "_owner",
        "_rank",
        "_release",
        "_row",
        "_shared",
        "_shown",
        "_target",
        "_target_owner",
    )

    def __init__(
        self,
        shared: SimulatedSegment,
        semaphore: Semaphore,
        kind: str,
        rank: int,
        target: int,
        ranges: Sequence[Range],
    ) -> None:
        self._shared, self._rank, self._target = shared, rank, target
        self._owner, self._target_owner = shared.owners[rank], shared.owners[target]
        end_of_rows, at = shared.layout.status_row(len(shared.owners)), shared.layout.status_row(rank)
        # Rows of the status table are announcements; what lies behind them are data.
        self._nbytes = sum(size for offset, size in ranges if offset >= end_of_rows)
        self._shown = max((size for offset, size in ranges if offset == at), default=0)
        self._row = shared.row_memory(rank, rank)
        self._release, self._alarms = semaphore.release, kind == "status"

    def post(self) -> None:
        """Post the semaphore: the other rank receives it, and the bytes, when the network has carried them."""
        world, source, to, nbytes = self._shared.world, self._owner, self._target_owner, self._nbytes
        scheduler = world.scheduler
        scheduler.step()
        content = bytes(self._row[: self._shown]) if self._shown else b""
        task, now = scheduler.current, scheduler.now
        arrival = world.wires.arrival(now, source, to, nbytes, 0.0 if task is None else task.uncached)
        if nbytes:
            world.record(source, "sent", to, nbytes, arrival)
        if arrival > now:
            scheduler.at(arrival, partial(self._arrive, content))
        else:
            self._arrive(content)

    def _arrive(self, content: bytes) -> None:
        shared = self._shared
        world = shared.world
        if world.wires.is_cut(self._owner, self._target_owner):
            world.held.append((self._owner, self._target_owner, partial(self._arrive, content)))
            return
        if content:
            shared.row_memory(self._rank, self._target)[: self._shown] = content
        if self._alarms:
            world.scheduler.alarm(self._target_owner)
        self._release()


class SimulatedEnd(CommonSegment):
    """One rank's access to the memory of a group.

    Args:
        shared: The memory.
        rank: Rank of the group.

    Attributes:
        shared: As the argument.
    """

    kind = "threads"

    def __init__(self, shared: SimulatedSegment, rank: int) -> None:
        self.shared, self._rank = shared, rank
        self.buffer, self.bytes = shared.buffer, shared.bytes
        self._row = shared.row_memory(rank, rank)

    def rows(self) -> StatusRows:
        """Return the rows of the status table as the rank sees them."""
        return StatusRows(len(self.shared.owners), lambda owner: self.shared.row_of(owner, self._rank))

    def semaphore(self, layout: SegmentLayout, kind: str, source: int, target: int) -> Semaphore:
        """See `Segment.semaphore`."""
        return self.shared.semaphore(layout, kind, source, target)

    def make_signal(
        self, semaphore: Semaphore, kind: str, target: int, owner: int, ranges: Sequence[Range]
    ) -> Callable[[], Any]:
        """See `Segment.make_signal`. The semaphore is posted when the bytes have arrived."""
        return SimulatedSignal(self.shared, semaphore, kind, self._rank, target, ranges).post

    def publish_row(self, layout: SegmentLayout, rank: int) -> None:
        """See `Segment.publish_row`. To few ranks it is a message each, which the plan's faults may come between."""
        shared, world, size = self.shared, self.shared.world, len(self.shared.owners)
        if size <= MOST_MEETING_WITHIN_A_HOST or world.wires.cut:
            row = [(layout.status_row(rank), ROW_BYTES)]
            for target in range(size):
                if target != rank:
                    self.make_signal(shared.semaphore(layout, "status", rank, target), "status", target, rank, row)()
            return
        scheduler, wires, source, content = world.scheduler, world.wires, shared.owners[rank], bytes(self._row)
        # Who waits in vain for a rank that left in good order looks when nothing else can happen (`on_quiet`).
        is_abort = shared.row_of(rank, rank).status == ABORTED
        scheduler.step()
        for host, to in shared.owners_on.items():
            arrival = wires.last_arrival(scheduler.now, source, to) if to != [source] else scheduler.now

            def arrive(host: int = host, to: Sequence[int] = to) -> None:
                shared.show(rank, host, content)
                if is_abort:
                    for each in to:
                        if each != source:
                            scheduler.alarm(each)

            if arrival > scheduler.now:
                scheduler.at(arrival, arrive)
            else:
                arrive()


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
    if rank:
        segment = world.segments[group.store.get("segment").decode()]
    else:
        owners = tuple(int(endpoint.process) - FIRST_PID for endpoint in group.endpoints)
        # The windows of the real transports: the times of copies and messages depend on them.
        one_host = len({world.wires.hosts[owner] for owner in owners}) == 1
        window = window_for(len(members)) if one_host else WINDOW_BYTES
        layout = SegmentLayout(len(members), window=window, cells=CELLS, mailbox_bytes=0)
        key = f"{group.name}, {len(world.segments)}"
        segment = world.segments[key] = SimulatedSegment(world, layout, owners)
        group.store.set("segment", key)
    end, layout, owners = SimulatedEnd(segment, rank), segment.layout, segment.owners
    link = Link(end, layout, rank, members, group.name, group.timeout)
    link.spins = link.yields = 0
    link.liveness = SimulatedLiveness(world, owners)
    link.rows = end.rows()
    link.row = link.rows[rank]
    link.hosts = segment.hosts if len(segment.owners_on) > 1 else None
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
