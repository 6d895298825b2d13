"""How long a schedule would take: a clock for every rank, on a network with three numbers.

A message of ``k`` bytes takes ``alpha + k beta`` seconds and reducing it takes ``k gamma`` (Hockney's model). A
rank sends one message at a time and receives one at a time (both at once); messages of a round start in listed
order, the first of every receiver before the second of any; a rank enters its next round when it is done with
this one, without waiting for anybody else; reductions follow arrivals, in listed order. Local copies are free.

Hosts: between ranks of one host a message is a read by the receiver, with ``local_alpha`` and ``local_beta``, and
keeps nobody else busy. Between hosts all ranks of a host share its one network card in each direction.

Where every rank does the same, one rank can stand for all; from `REPRESENTED` ranks on (and no hosts given) it
does, so that 16,384 ranks are as much work as one of them. Other schedules are as much work as they have moves:
10 to 20 microseconds and some 500 bytes of events each. Trees, chains and most hierarchies of 16,384 ranks are
lean (seconds). These are not, since everybody's chunk meets everybody: direct all_reduce, scatter_all_gather, the
hierarchical all_gather, reduce_scatter and all_to_all, and halving where ranks must fold (about 1,000 ranks in 10 s).

Do not add here: other network effects. This clock is for comparing algorithms, not for promising times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchdist_ref.errors import ArgumentError, explain
from torchdist_ref.schedules.events import Event, Trace
from torchdist_ref.schedules.messages import Message, messages
from torchdist_ref.schedules.schedule import Round, Schedule, sampled

REPRESENTED = 257


@dataclass(frozen=True)
class Network:
    """Seconds per message, per byte moved and per byte reduced, and which rank is on which host.

    Args:
        alpha: seconds per message between hosts (default 30 microseconds, TCP from Python).
        beta: seconds per byte between hosts (default 1.25 GB/s, a 10 Gbit/s card).
        gamma: seconds per byte reduced (default 8 GB/s).
        hosts: the host of each rank, numbered in any way (default: every rank has a host to itself).
        local_alpha: seconds per message within a host (default 0.3 microseconds, a semaphore).
        local_beta: seconds per byte within a host (default 8 GB/s, a copy).
    """

    alpha: float = 30e-6
    beta: float = 1 / 1.25e9
    gamma: float = 1 / 8e9
    hosts: tuple[int, ...] | None = None
    local_alpha: float = 0.3e-6
    local_beta: float = 1 / 8e9


class _Until(dict[int, float]):
    """Until when each rank is busy in a round: from the start of its round on, unless said otherwise."""

    def __init__(self, ready: list[float]) -> None:
        super().__init__()
        self._ready = ready

    def __missing__(self, rank: int) -> float:
        return self._ready[rank]


class _Clock:
    """When each rank, and each network card, is free again."""

    def __init__(self, world: int, slot: float, network: Network) -> None:
        self.network, self.slot = network, slot
        self.hosts: Sequence[int] = network.hosts or range(world)
        self.cards = {host: [0.0, 0.0] for host in set(self.hosts)} if network.hosts else None
        self.ready = [0.0] * world
        self.events: list[Event] = []

    def round(self, moves: Round) -> None:
        # Only ranks that take part are touched: a chain has as many rounds as ranks, and two busy ranks in each.
        self.sending, self.receiving, self.working = _Until(self.ready), _Until(self.ready), _Until(self.ready)
        for message in _in_turn(messages(moves)):
            nbytes, label = len(message.moves) * self.slot, message.label
            arrived = self._travel(message, nbytes, label)
            self._reduce(message, arrived, label)
        for times in (self.sending, self.receiving, self.working):
            for rank, time in times.items():
                self.ready[rank] = max(self.ready[rank], time)

    def _travel(self, message: Message, nbytes: float, label: str) -> float:
        """Move the bytes; give the time at which they are there."""
        src, dst = message.src, message.dst
        if src == dst:
            # Listed order: local work waits for what is listed before it, which may be what it adds to.
            return self.receiving[dst]
        if self.hosts[src] == self.hosts[dst]:
            start = max(self.ready[src], self.receiving[dst])
            end = start + self.network.local_alpha + nbytes * self.network.local_beta
        else:
            start = self._card_free(src, dst, max(self.sending[src], self.receiving[dst]), nbytes)
            self.sending[src] = end = start + self.network.alpha + nbytes * self.network.beta
            self.events.append(Event(src, "send", start, end, dst, nbytes, label))
        self.receiving[dst] = end
        self.events.append(Event(dst, "recv", start, end, src, nbytes, label))
        return end

    def _card_free(self, src: int, dst: int, start: float, nbytes: float) -> float:
        """When both network cards can begin, and keep them for the bytes (latencies overlap)."""
        if self.cards is None:
            return start
        out, into = self.cards[self.hosts[src]], self.cards[self.hosts[dst]]
        start = max(start, out[0], into[1])
        out[0] = into[1] = start + nbytes * self.network.beta
        return start

    def _reduce(self, message: Message, arrived: float, label: str) -> None:
        rank, nbytes = message.dst, message.reduced * self.slot
        if message.reduced:
            start = max(arrived, self.working[rank])
            self.working[rank] = end = start + nbytes * self.network.gamma
            self.events.append(Event(rank, "reduce", start, end, message.src, nbytes, label))
        elif message.src == rank:
            self.events.append(Event(rank, "copy", arrived, arrived, rank, len(message.moves) * self.slot, label))


    def stand_in(self, moves: Round) -> None:
        """A round of rank 0 on its own network card."""
        arrived = worked = self.ready[0]
        for message in messages(moves):
            nbytes, label, started = len(message.moves) * self.slot, message.label, arrived
            if message.src != message.dst:
                arrived = started + self.network.alpha + nbytes * self.network.beta
                kind, peer = ("send", message.dst) if message.dst else ("recv", message.src)
                self.events.append(Event(0, kind, started, arrived, peer, nbytes, label))
            if message.reduced:
                start, nbytes = max(arrived, worked), message.reduced * self.slot
                worked = start + nbytes * self.network.gamma
                self.events.append(Event(0, "reduce", start, worked, message.src, nbytes, label))
        self.ready[0] = max(arrived, worked)


def _in_turn(parts: list[Message]) -> list[Message]:
    """Every receiver's first message before anybody's second one."""
    turns: dict[int, int] = {}
    keyed = []
    for part in parts:
        turns[part.dst] = turn = turns.get(part.dst, -1) + 1
        keyed.append((turn, part))
    return [part for _, part in sorted(keyed, key=lambda item: item[0])]


def simulate(
    schedule: Schedule, nbytes: float, network: Network | None = None, *, representative: bool | None = None
) -> Trace:
    """Run a schedule against the clock.

    Args:
        schedule: to run.
        nbytes: bytes of the operation's whole buffer (see `cost`).
        network: the network (default: ``Network()``, every rank on a host of its own).
        representative: let rank 0 stand for all ranks in the rounds from the first in which all do the same
            (default: from 257 ranks on; never with ``network.hosts``).

    Returns:
        What every rank (or rank 0 for all) was busy with, and ``total``, the time until the last one was done.

    Raises:
        ArgumentError: ``network.hosts`` has another length.

    Source: R. Hockney, "The communication challenge for MPP", 1994; Thakur, Rabenseifner, Gropp 2005.

    >>> from torchdist_ref.schedules import build
    >>> network = Network(alpha=1.0, beta=0.25, gamma=0.0)
    >>> simulate(build("broadcast", "tree", 8), 4, network).total
    6.0
    """
    network = network or Network()
    if network.hosts is not None and len(network.hosts) != schedule.world:
        expected = f"one host for each of {schedule.world} ranks"
        raise ArgumentError(explain("simulate", "network.hosts", expected, network.hosts))
    clock = _Clock(schedule.world, nbytes * float(schedule.share), network)
    if representative is None:
        representative = schedule.world >= REPRESENTED and network.hosts is None
    alike = _one_for_all(schedule, clock) if representative else 0
    for step in range(alike, len(schedule.rounds)):
        clock.round(schedule.rounds[step])
    note = f"rank 0 stands for all ranks in rounds 1 to {alike}" if alike else ""
    return Trace(schedule.name, schedule.world, clock.events, max(clock.ready), note)


def _one_for_all(schedule: Schedule, clock: _Clock) -> int:
    """Run the first rounds, as long as all ranks do the same in them, for rank 0 alone; give their number.

    A sample shows one side of rank 0: each of its messages has a counterpart of the same size on the other.
    """
    for step in range(len(schedule.rounds)):
        moves = sampled(schedule.rounds, step)
        if moves is None or clock.cards is not None:
            break
        clock.stand_in(moves)
    else:
        step = len(schedule.rounds)
    clock.ready = [clock.ready[0]] * schedule.world
    return step
