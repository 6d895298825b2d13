"""Simulated time of a schedule: a clock for every rank, on a network of a few numbers (`network.Network`).

A message of ``k`` bytes takes ``alpha + k beta`` seconds and reducing it takes ``k gamma`` (Hockney's model). A
rank sends one message at a time and receives one at a time (both at once); messages of a round start in order:
the first of every receiver before the second of any, and among those first the first rank of every host, then
the second; a rank enters its next round when it has completed this one, without waiting for other ranks;
reductions follow arrivals, in listed order. A local copy takes `copy` seconds a byte, by default none. Without
`overlap` a rank does one of these at a time, and nothing else while it sends or receives.

Hosts: between ranks of one host a message is a read by the receiver, with ``local_alpha`` and ``local_beta``, and
occupies no other rank. Between hosts all ranks of a host share its one network card in each direction.

Few ranks represent all. If a round repeats itself from rank to rank (`schedule.Pattern`), and the network does too
(hosts filled in order, with equally many ranks each), the ranks of every host have the same events at the same times
as those of the first: nothing in the rules above depends on a host's number. So the same clock runs with one host's
ranks only, rank ``r`` read as ``r % period``, and finds the same times to the last bit. Without hosts that is one
rank. A round that does not repeat itself, or whose ranks begin it at different times, is run for all ranks: about 10
microseconds and 500 bytes of events a message. So 16,384 ranks take seconds, but for scatter_all_gather, where every
rank receives from every rank and no two at the same times: 268 million messages (10 seconds are enough for 900 ranks).

Do not add here: effects that `network.Network` has no number for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from torchdist_ref.errors import ArgumentError, explain
from torchdist_ref.schedules.network import COPIED, WRITTEN, Network
from torchdist_ref.schedules.schedule import Message, Runs, Schedule, messages, pattern_of, picture, runs_of

# Ranks. From so many on, a few represent all.
MIN_REPRESENTED = 257


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Interval in which one rank was busy with one message or reduction.

    Args:
        rank: the busy rank.
        kind: ``"send"``, ``"recv"``, ``"reduce"`` or ``"copy"``.
        start: seconds from the beginning.
        end: seconds from the beginning.
        peer: the other rank of a message; the rank itself for local work.
        nbytes: bytes moved or reduced.
        label: slots, such as ``"data[3]"``.
    """

    rank: int
    kind: str
    start: float
    end: float
    peer: int
    nbytes: float
    label: str


@dataclass(frozen=True)
class Trace(Sequence[TraceEvent]):
    """Events of a run, and the time that the run took.

    Args:
        title: name of the schedule.
        world: number of ranks.
        events: in the order in which they were computed.
        total: seconds until the last rank completed.
        note: remark, such as that one rank represents all (default: none).

    ``len``, indexing and iteration are those of the events. In a notebook the value draws itself.
    """

    title: str
    world: int
    events: list[TraceEvent]
    total: float
    note: str = ""

    def __len__(self) -> int:
        return len(self.events)

    @overload
    def __getitem__(self, index: int) -> TraceEvent: ...
    @overload
    def __getitem__(self, index: slice) -> list[TraceEvent]: ...
    def __getitem__(self, index: int | slice) -> TraceEvent | list[TraceEvent]:
        return self.events[index]

    def __iter__(self) -> Iterator[TraceEvent]:
        return iter(self.events)

    def _repr_svg_(self) -> str:
        return picture(self)


class _Until(dict[int, float]):
    """Time until which each rank is busy in a round; by default the start of its round."""

    def __init__(self, ready: list[float]) -> None:
        super().__init__()
        self._ready = ready

    def __missing__(self, rank: int) -> float:
        return self._ready[rank]


class _Clock:
    """Times at which each rank, and each network card, is free again. Rank ``r`` has the time of ``r % len(ready)``."""

    def __init__(self, world: int, slot: float, network: Network, nbytes: float) -> None:
        self.network, self.slot, self.world = network, slot, world
        uncached = network.uncached(nbytes)
        self.local_beta = network.per_byte(network.local_beta, WRITTEN, uncached)
        self.copy = network.per_byte(network.copy, COPIED, uncached)
        self.hosts: Sequence[int] = network.hosts or range(world)
        self.local_ranks = _local_ranks(self.hosts)
        self.cards = dict.fromkeys(self.hosts, (0.0, 0.0)) if network.hosts else None
        self.ready = [network.overhead] * world
        self.events: list[TraceEvent] = []

    def narrowed(self, period: int) -> bool:
        """Continue with the first ranks only, if all others have the same times; return whether they have."""
        first = self.ready[:period]
        if first * (len(self.ready) // period) != self.ready:
            return False
        if self.cards and len(self.ready) > period:
            # A card that is free before the first rank can use it counts as free at that time.
            soonest = min(first)
            cards = {(max(out, soonest), max(into, soonest)) for out, into in self.cards.values()}
            if len(cards) > 1:
                return False
            self.cards = {self.hosts[0]: cards.pop()}
        self.ready = first
        return True

    def widen(self) -> None:
        """Continue with all ranks."""
        self.ready *= self.world // len(self.ready)
        if self.cards and len(self.cards) == 1:
            self.cards = dict.fromkeys(self.hosts, self.cards[self.hosts[0]])

    def round(self, moves: Runs) -> None:
        """Advance the times by the messages of one round."""
        # Only ranks that take part are touched: a chain has as many rounds as ranks, and two busy ranks in each.
        self.sending = _Until(self.ready)
        self.receiving, self.working, self.arriving = self.sending, self.sending, _Until(self.ready)
        if self.network.overlap:
            self.receiving, self.working = _Until(self.ready), _Until(self.ready)
        for message in self._in_order(messages(moves)):
            nbytes, label = message.slots * self.slot, message.label
            arrived = self._transfer(message, nbytes, label)
            self._reduce(message, arrived, label)
        for times in (self.sending, self.receiving, self.working, self.arriving):
            for rank, time in times.items():
                self.ready[rank] = max(self.ready[rank], time)

    def _in_order(self, parts: list[Message]) -> list[Message]:
        """Sort every receiver's first message before any second one; among equals, every host's first rank first."""
        counts: dict[int, int] = {}
        keyed = []
        for part in parts:
            counts[part.dst] = count = counts.get(part.dst, -1) + 1
            keyed.append(((count, self.local_ranks[part.dst]), part))
        return [part for _, part in sorted(keyed, key=lambda item: item[0])]

    def _transfer(self, message: Message, nbytes: float, label: str) -> float:
        """Move the bytes, and return the time of their arrival."""
        src, dst = message.src % len(self.ready), message.dst % len(self.ready)
        if message.src == message.dst:
            # Listed order: local work waits for the moves listed before it, which may write its operand.
            return self.receiving[dst]
        far = self.hosts[message.src] != self.hosts[message.dst]
        if not far:
            start = max(self.ready[src], self.receiving[dst])
            end = start + self.network.local_alpha + nbytes * self.local_beta
        else:
            start = self._card_free(src, dst, max(self.sending[src], self.receiving[dst]), nbytes)
            end = start + self.network.alpha + nbytes * self.network.beta
            self.sending[src] = end if self.network.overlap else end - self.network.alpha
            self._record(message.src, "send", start, end, message.dst, nbytes, label)
        self.receiving[dst] = self.sending[src] if far else end
        # Without overlap a processor is free for alpha seconds, but its round lasts until the bytes have arrived.
        self.arriving[dst] = max(self.arriving[dst], end)
        self._record(message.dst, "recv", start, end, message.src, nbytes, label)
        return end

    def _card_free(self, src: int, dst: int, start: float, nbytes: float) -> float:
        """Return when both network cards are free, and occupy them for the bytes (latencies overlap)."""
        if self.cards is None:
            return start
        sender, receiver = self.hosts[src], self.hosts[dst]
        start = max(start, self.cards[sender][0], self.cards[receiver][1])
        end = start + nbytes * self.network.beta
        self.cards[sender] = (end, self.cards[sender][1])
        self.cards[receiver] = (self.cards[receiver][0], end)
        return start

    def _reduce(self, message: Message, arrived: float, label: str) -> None:
        rank, nbytes = message.dst % len(self.ready), message.reduced * self.slot
        if message.reduced:
            start = max(arrived, self.working[rank])
            self.working[rank] = end = start + nbytes * self.network.gamma
            self._record(message.dst, "reduce", start, end, message.src, nbytes, label)
        elif message.src == message.dst:
            nbytes = message.slots * self.slot
            self.receiving[rank] = end = arrived + nbytes * self.copy
            self._record(message.dst, "copy", arrived, end, message.src, nbytes, label)

    def _record(self, rank: int, kind: str, start: float, end: float, peer: int, nbytes: float, label: str) -> None:
        # With few ranks for all, the events of the others equal those of these.
        if rank < len(self.ready):
            self.events.append(TraceEvent(rank, kind, start, end, peer, nbytes, label))


def _local_ranks(hosts: Sequence[int]) -> list[int]:
    """Return the number of ranks before each rank on its host."""
    seen: dict[int, int] = {}
    found = []
    for host in hosts:
        found.append(seen.get(host, 0))
        seen[host] = found[-1] + 1
    return found


def _period(hosts: tuple[int, ...] | None, world: int) -> int:
    """Return after how many ranks the network repeats itself: 1, the ranks of a host, or all.

    On a single host no rank waits for a network card, so all ranks are alike there, too.
    """
    count = len(set(hosts)) if hosts else 1
    if hosts is None or count == 1:
        return 1
    size = world // count
    filled_in_order = all(hosts[rank] == hosts[rank // size * size] for rank in range(world))
    return size if world == size * count and filled_in_order else world


def simulate(
    schedule: Schedule, nbytes: float, network: Network | None = None, *, representative: bool | None = None
) -> Trace:
    """Run a schedule against the clock.

    Args:
        schedule: to run.
        nbytes: bytes of the operation's whole buffer (see `cost`).
        network: the network (default: ``Network()``, every rank on a host of its own).
        representative: let the first host's ranks represent all in rounds that repeat themselves from host to
            host: the same times, much sooner (default: from 257 ranks on).

    Returns:
        The events of every rank (or of those that represent all), and ``total``, the time until the last one
        completed.

    Raises:
        ArgumentError: ``network.hosts`` has another length, or ``nbytes`` is negative.

    Source: R. Hockney, "The communication challenge for MPP", 1994; Thakur, Rabenseifner, Gropp 2005.

    >>> from torchdist_ref.schedules import Network, build, simulate
    >>> network = Network(alpha=1.0, beta=0.25, gamma=0.0)
    >>> simulate(build("broadcast", "tree", 8), 4, network).total
    6.0
    """
    network, world = network or Network(), schedule.world
    if network.hosts is not None and len(network.hosts) != world:
        expected = f"one host for each of {world} ranks"
        raise ArgumentError(explain("simulate", "network.hosts", expected, network.hosts))
    if not nbytes >= 0:
        raise ArgumentError(explain("simulate", "nbytes", "0 or more", nbytes))
    if representative is None:
        representative = world >= MIN_REPRESENTED
    few = _period(network.hosts, world) if representative else world
    clock = _Clock(world, nbytes * float(schedule.share), network, nbytes)
    narrow = sum(_round(schedule, step, clock, few) for step in range(len(schedule.rounds)))
    some = "rank 0 represents" if few == 1 else f"ranks 0 to {few - 1} represent"
    note = f"{some} all ranks in {narrow} of {len(schedule.rounds)} rounds" if narrow else ""
    return Trace(schedule.name, world, clock.events, max(clock.ready), note)


def _round(schedule: Schedule, step: int, clock: _Clock, few: int) -> bool:
    """Run one round, with few ranks for all where possible; return whether it was."""
    pattern = pattern_of(schedule.rounds, step) if few < schedule.world else None
    if pattern and few % pattern.period == 0 and clock.narrowed(few):
        clock.round(pattern.runs(few))
        return True
    clock.widen()
    clock.round(runs_of(schedule.rounds, step))
    return False
