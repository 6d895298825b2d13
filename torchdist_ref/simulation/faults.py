"""Faults of a simulation: what the plan does to ranks and to the network, and when.

A fault occurs at a virtual time, or before the n-th operation of a rank that others can notice (a request to a store, a
post of a semaphore, a wait for one, a sleep), counted from 1. A rank's own locks and queues are not counted: whether it
dies before or after one is the same to others. Do not add how the library notices faults: that is its own code.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from torchdist_ref.errors import ArgumentError, ArgumentTypeError, explain


@dataclass(frozen=True)
class Fault:
    """Base class of faults.

    Args:
        at: Virtual time in seconds at which it occurs; None if it occurs at an operation.
        operation: Number of the operation of the rank before which it occurs, from 1; 0 if it occurs at a time.
    """

    at: float | None = None
    operation: int = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that the fault names; the first one is that whose operations are counted."""
        return ()

    def check(self, world_size: int) -> None:
        """Raise unless the fault fits a world.

        Raises:
            ArgumentError: A rank does not exist, or the fault has neither a time nor an operation, or both.
        """
        name = type(self).__name__
        for quantity in ("seconds", "factor", "longer"):
            value = getattr(self, quantity, None)
            if value is not None and not (_is_number(value) and 0 < value < inf):
                raise ArgumentError(explain(f"simulation.{name}", quantity, "a positive number", value))
        for rank in self.ranks:
            if type(rank) is not int or not 0 <= rank < world_size:
                raise ArgumentError(explain(f"simulation.{name}", "rank", f"a rank from 0 to {world_size - 1}", rank))
        if (self.at is None) == (self.operation == 0):
            got = f"at={self.at}, operation={self.operation}"
            raise ArgumentError(explain(f"simulation.{name}", "at", "a time, or operation= with a number", got))
        counts = type(self.operation) is int and self.operation >= 0
        if not counts or (self.at is not None and not (_is_number(self.at) and 0 <= self.at < inf)):
            got = f"at={self.at}, operation={self.operation}"
            raise ArgumentError(
                explain(f"simulation.{name}", "at", "a time of 0 s or later, or the number of an operation", got)
            )


@dataclass(frozen=True)
class Kill(Fault):
    """End of a rank, as by SIGKILL.

    Args:
        rank: Rank.
    """

    rank: int = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """See `Fault.ranks`."""
        return (self.rank,)


@dataclass(frozen=True)
class Stop(Fault):
    """Stop of a rank, as by SIGSTOP.

    Args:
        rank: Rank.
        seconds: Virtual time after which it continues; None for never.
    """

    rank: int = 0
    seconds: float | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """See `Fault.ranks`."""
        return (self.rank,)


@dataclass(frozen=True)
class Slow(Fault):
    """Slower computation of a rank from a moment on; without effect if computation takes no time (``compute=0``).

    Args:
        rank: Rank.
        factor: Factor of the time that its computation takes.
    """

    rank: int = 0
    factor: float = 2.0

    @property
    def ranks(self) -> tuple[int, ...]:
        """See `Fault.ranks`."""
        return (self.rank,)


@dataclass(frozen=True)
class Cut(Fault):
    """Cut of the network between some ranks and all others. Messages between them arrive when it heals.

    Args:
        some: The ranks.
        seconds: Virtual time after which it heals; None for never.
    """

    some: Collection[int] = ()
    seconds: float | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """See `Fault.ranks`."""
        return tuple(self.some)

    def check(self, world_size: int) -> None:
        """See `Fault.check`."""
        if not isinstance(self.some, Collection) or not 0 < len(set(self.some)) < world_size:
            expected = f"some of {world_size} ranks, and not all"
            raise ArgumentError(explain(f"simulation.{type(self).__name__}", "some", expected, self.some))
        super().check(world_size)


@dataclass(frozen=True)
class Delay(Cut):
    """Delay of the network between some ranks and all others: each message between them takes longer.

    Args:
        some: The ranks.
        seconds: Virtual time after which it heals; None for never.
        longer: Virtual seconds that each message takes in addition.
    """

    longer: float = 1.0


@dataclass(frozen=True)
class EndStore(Fault):
    """End of the store, as if the process that serves it were killed. Requests to it fail from then on.

    No rank serves a store of `run` itself, so none can serve another one in its place. If a rank serves a
    `TCPStore`, kill that rank instead: `shrink_group` then has another one serve a new store.

    Args:
        rank: Rank whose operations are counted, if it occurs at an operation.
    """

    rank: int = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """See `Fault.ranks`."""
        return (self.rank,)


@dataclass(frozen=True)
class EndHost(Fault):
    """End of a host, as by a power failure: its ranks stop, and nobody is notified.

    The system closes the connections of a rank that is killed, and the others notice at once. Only ranks that
    wait for the host notice its end, at their time-out. In `run_job`, the host's agent ends too.

    Args:
        host: A number of the network's `hosts`, or one of the hosts of a job.
    """

    host: int = 0

    def check_hosts(self, hosts: Collection[int], counted: bool) -> None:
        """Raise unless the fault fits these hosts; `counted` is whether they have agents whose operations count.

        Raises:
            ArgumentError: There is no such host, or it ends at an operation of nobody.
        """
        if type(self.host) is not int or self.host not in hosts:
            expected = f"one of the hosts {', '.join(map(str, sorted(hosts)))}"
            raise ArgumentError(explain("simulation.EndHost", "host", expected, self.host))
        if self.operation and not counted:
            hint = "Operations of an agent are counted in run_job alone."
            raise ArgumentError(explain("simulation.EndHost", "at", "a time", f"operation={self.operation}", hint=hint))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_all(faults: Sequence[Fault], world_size: int, hosts: Collection[int]) -> None:
    """Raise unless each of some values is a fault that fits a world.

    Args:
        faults: The values.
        world_size: Number of ranks.
        hosts: Hosts of the ranks.

    Raises:
        ArgumentError: One is not.
    """
    if not isinstance(faults, Sequence):
        raise ArgumentTypeError(explain("simulation.run", "faults", "a sequence of faults", faults))
    for fault in faults:
        if not isinstance(fault, Fault) or type(fault) is Fault:
            expected = "Kill, Stop, Slow, Cut, Delay, EndHost or EndStore"
            raise ArgumentError(explain("simulation.run", "faults", expected, fault))
        fault.check(world_size)
        if isinstance(fault, EndHost):
            fault.check_hosts(hosts, counted=False)


def check_job(faults: Sequence[Fault], hosts: int, workers: int) -> None:
    """Raise unless each of some values is a fault that fits an elastic job.

    Args:
        faults: The values.
        hosts: Number of hosts.
        workers: Number of workers of each host.

    Raises:
        ArgumentError: One does not.
    """
    if not isinstance(faults, Sequence):
        raise ArgumentTypeError(explain("simulation.run_job", "faults", "a sequence of faults", faults))
    for fault in faults:
        # The subclass `Delay` is none of them.
        if type(fault) not in (EndHost, Kill, Cut):
            hint = "A job has a store of its own in each attempt, and its ranks are new ones."
            raise ArgumentError(explain("simulation.run_job", "faults", "EndHost, Kill or Cut", fault, hint=hint))
        fault.check(hosts * workers if isinstance(fault, Kill) else hosts)
        if isinstance(fault, EndHost):
            fault.check_hosts(range(hosts), counted=True)
        elif fault.operation:
            hint = "Of a job, the operations of agents are counted, for EndHost."
            expected, got = "a time", f"operation={fault.operation}"
            raise ArgumentError(explain(f"simulation.{type(fault).__name__}", "at", expected, got, hint=hint))
