"""Network of a simulation: when the bytes of a message arrive, and who is busy meanwhile.

The model is that of `schedules.simulate`: a message of ``k`` bytes takes ``alpha + k beta`` seconds between hosts, and
``local_alpha + k local_beta`` within a host, where the receiver reads it and nobody else is busy. Between hosts a rank
sends one message at a time and receives one at a time, and the ranks of a host share its network card in each
direction. Without `overlap` a rank's processor does one thing at a time: it computes, sends or receives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchdist_ref.schedules.network import WRITTEN
from torchdist_ref.schedules.network import Network as Network


class Wires:
    """Times until which ranks and network cards are busy.

    Args:
        network: The network.
        size: Number of ranks.

    Attributes:
        hosts: Host of each rank.
        cut: Pairs of ranks between which nothing arrives, in both orders.
        cut_hosts: Pairs of hosts between whose ranks nothing arrives, in both orders.
        silent: Ranks on hosts that have ended: nothing arrives from them or at them any more.

    >>> wires = Wires(Network(alpha=1.0, beta=0.5, hosts=(0, 1, 1), local_alpha=0.25, local_beta=0.0), 3)
    >>> wires.arrival(0.0, 0, 1, 4), wires.arrival(0.0, 0, 2, 4), wires.arrival(0.0, 1, 2, 4)
    (3.0, 6.0, 6.25)
    >>> wires.arrival(0.0, 2, 0, 0), wires.arrival(0.0, 0, 2, 0)
    (1.0, 6.0)
    """

    def __init__(self, network: Network, size: int) -> None:
        self.network = network
        self.hosts = [*(network.hosts or range(size))]
        self._arrived: dict[int, dict[int, float]] = {}
        self.cut: set[tuple[int, int]] = set()
        self.cut_hosts: set[tuple[int, int]] = set()
        self.silent: set[int] = set()
        self._longer: dict[tuple[int, int], float] = {}
        self._sending, self._receiving, self._working = [0.0] * size, [0.0] * size, [0.0] * size
        if not network.overlap:
            self._sending = self._receiving = self._working
        times = network.alpha, network.beta, network.local_alpha, network.local_beta, network.memory
        # Nothing is ever on its way, and nobody busy, until the plan delays something.
        self._is_instant = network.overlap and not any(times)
        self._cards_out = dict.fromkeys(self.hosts, 0.0)
        self._cards_in = dict.fromkeys(self.hosts, 0.0)

    def add(self, host: int) -> int:
        """Add a rank on a host, and return its number."""
        self.hosts.append(host)
        for busy in {id(times): times for times in (self._sending, self._receiving, self._working)}.values():
            busy.append(0.0)
        return len(self.hosts) - 1

    def occupy(self, now: float, rank: int, seconds: float) -> float:
        """Return when a rank has done some work that it begins now, and occupy its processor for it."""
        if self.network.overlap:
            return now + seconds
        self._working[rank] = end = max(now, self._working[rank]) + seconds
        return end

    def arrival(self, now: float, source: int, target: int, nbytes: int, uncached: float = 0.0) -> float:
        """Return when a message that a rank sends now arrives, and occupy the network for it.

        Args:
            now: Time.
            source: Rank that sends it.
            target: Rank that receives it.
            nbytes: Bytes of data.
            uncached: Part of the call that memory limits.
        """
        if self._is_instant:
            return now
        network, here, there = self.network, self.hosts[source], self.hosts[target]
        if not nbytes:
            end = self.notice(now, source, target)
        elif here == there:
            beta = network.per_byte(network.local_beta, WRITTEN, uncached)
            start = max(now, self._receiving[target])
            self._receiving[target] = end = start + network.local_alpha + nbytes * beta
        else:
            start = max(now, self._sending[source], self._receiving[target])
            if network.hosts is not None:
                start = max(start, self._cards_out[here], self._cards_in[there])
                self._cards_out[here] = self._cards_in[there] = start + nbytes * network.beta
            end = start + network.alpha + nbytes * network.beta
            self._sending[source] = self._receiving[target] = end if network.overlap else end - network.alpha
        if nbytes and self._longer:
            end += self._longer.get((source, target), 0.0)
        sent = self._arrived.get(source)
        if sent is None:
            sent = self._arrived[source] = {}
        if end < (before := sent.get(target, 0.0)):
            end = before
        sent[target] = end
        return end

    def last_arrival(self, now: float, source: int, targets: Sequence[int]) -> float:
        """Return when a message without data that a rank sends to all ranks of a host now has arrived at the last one.

        As the maximum of `arrival`, but of a large group only the few ranks count to which something was sent before.
        """
        if self._longer:
            return max(self.arrival(now, source, target, 0) for target in targets)
        end, sent = self.notice(now, source, targets[0]), self._arrived.get(source, {})
        if len(sent) < len(targets):
            there = self.hosts[targets[0]]
            return max([end, *(at for target, at in sent.items() if self.hosts[target] == there)])
        return max([end, *(sent.get(target, end) for target in targets)])

    def notice(self, now: float, source: int, target: int) -> float:
        """Return when a rank sees a change of another's state, such as its end: one message without bytes."""
        same = self.hosts[source] == self.hosts[target]
        seconds = self.network.local_alpha if same else self.network.alpha
        return now + seconds + (self._longer.get((source, target), 0.0) if self._longer else 0.0)

    def lengthen(self, some: Iterable[int], others: Iterable[int], seconds: float) -> None:
        """Let each message between some ranks and others take longer by some seconds, or shorter if negative."""
        others, self._is_instant = tuple(others), False
        for one in some:
            for other in others:
                for pair in ((one, other), (other, one)):
                    self._longer[pair] = self._longer.get(pair, 0.0) + seconds

    def is_cut(self, source: int, target: int) -> bool:
        """Return whether nothing arrives between two ranks."""
        return bool(self.cut or self.cut_hosts) and (
            (source, target) in self.cut or (self.hosts[source], self.hosts[target]) in self.cut_hosts
        )

    def cut_off(self, some: Iterable[int], others: Iterable[int]) -> None:
        """Let nothing arrive between some ranks and others."""
        others = tuple(others)
        for one in some:
            for other in others:
                self.cut |= {(one, other), (other, one)}
