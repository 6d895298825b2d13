"""Rounds: what ranks publish while they initialize, and the state of one rank among the others, without any wait.

Several initializations may use one store, one after the other or by mistake at once. Rank 0 opens a *round*: it draws
a nonce, and publishes a `Round` in the one key that all of them share. All further keys lie under that nonce, so no
key of another attempt has the same name. Each other rank reads the round and publishes an `Attendee` under it,
with a nonce of its own. When all have announced themselves, rank 0 publishes the list of their nonces and closes the
round. A rank that finds its own nonce in the list has met the others; until then it follows every new round.

Why that is right: a list with a rank's nonce was written after that rank had announced itself. So rank 0 was there
then, and so was each rank of the list. A round that a dead rank 0 left open gets no list, and the next rank 0 replaces
it.

A failure that a rank finds in a round may be that of an earlier attempt, whose keys are still in the store. It can
only be so if the round was open before the rank looked for the first time, and if its rank 0 is not known to live.
Then the rank waits for another round before it believes the failure (`Attendance.believes`): for a moment, or under an
agent for as long as it may, since an agent ends the ranks of a failed attempt.

Everything here is a value or a pure function: the store, the processes and the time are arguments. Do not add requests
to a store here: they belong to `membership.meeting`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from torchdist_ref.errors import RendezvousError

OPEN, CLOSED = "open", "closed"
LEAVE_SECONDS = 0.3
"""Time that the last process with this rank, or a failed attempt, has to end or to be replaced."""
DOUBT_UNDER_AGENT = inf
"""`Attendance.doubt_seconds` under an agent, which ends the ranks of a failed attempt."""
_MAX_PID = 2**22
_MAX_WITNESS = 2**63 - 1


class Round(NamedTuple):
    """Content of the key that all initializations on a store share.

    Attributes:
        nonce: Name of the world.
        state: `OPEN`, or `CLOSED` once all ranks have met.
        size: World size of rank 0.
        pid: Process of rank 0.
        host: Host of that process, as `processes.identity.host_identity` returns it.

    >>> Round.parse(Round("4f2a", OPEN, 2, 711, "node|7").encode())
    Round(nonce='4f2a', state='open', size=2, pid=711, host='node|7')
    """

    nonce: str
    state: str
    size: int
    pid: int
    host: str

    def encode(self) -> bytes:
        """Return the value of the key."""
        return json.dumps(self).encode()

    @classmethod
    def parse(cls, value: bytes) -> Round:
        """Return the round that a value describes.

        Raises:
            RendezvousError: It describes none.
        """
        try:
            return cls(*_fields(value, str, str, int, int, str))
        except ValueError:
            raise RendezvousError(
                f"init_process_group: the store has {value!r} where rank 0 announces a world. Another program writes "
                f"to it."
            ) from None


class Attendee(NamedTuple):
    """Content of the key by which a rank announces itself in a round.

    Announcements are not authenticated. A wrong one makes ranks fail or wait, and nothing else.

    Attributes:
        host: Host of the process, as `processes.identity.host_identity` returns it.
        pid: Process id.
        witness: Witness of the process (see `processes.witness`); 0 for none.
        size: World size of the rank.
        backend: Backend on which the ranks have to agree; empty if they need not.
        nonce: Random number by which the rank recognizes itself in the list of those who have met.
    """

    host: str
    pid: int
    witness: int
    size: int
    backend: str
    nonce: str

    def encode(self) -> str:
        """Return the value of the key."""
        return json.dumps(self)

    @classmethod
    def parse(cls, value: bytes) -> Attendee:
        """Return the announcement that a value describes.

        Raises:
            RendezvousError: It describes none.
        """
        try:
            made = cls(*_fields(value, str, int, int, int, str, str))
            if not 0 < made.pid <= _MAX_PID or not 0 <= made.witness <= _MAX_WITNESS:
                raise ValueError(made)
            return made
        except ValueError:
            raise RendezvousError(
                f"init_process_group: {value!r} announces no rank. Another program writes to the store."
            ) from None


def _fields(value: bytes, *kinds: type) -> list[Any]:
    """Return the items of a JSON list.

    Raises:
        ValueError: It is no such list, or an item is of another kind.
    """
    items = json.loads(value)
    if not isinstance(items, list) or [type(item) for item in items] != [*kinds]:
        raise ValueError(value)
    return items


@dataclass(slots=True)
class Attendance:
    """State of one rank in the rounds of its initialization: it looks for a round, has announced itself, or has met.

    Attributes:
        rank: This rank.
        size: Number of ranks.
        nonce: Random number of this rank; if it is rank 0, that of the round that it opens.
        doubt_seconds: Time for which a failure that may be that of an earlier attempt is not believed.
        opened: The round in which this rank has announced itself; None while it looks for one.
        missed: Nonces of the rounds that were completed without this rank, or replaced.
        doubtful: Nonce of a round that may be that of an earlier attempt; empty for none.
        believes_at: Time from which a failure in this round counts; None until one is found.
        met: Whether this rank has met the others.

    >>> seat = Attendance(rank=1, size=2, nonce="mine", doubt_seconds=0.3)
    >>> seat.found(Round("old", OPEN, 2, 711, "gone"), may_have_ended=True)
    >>> seat.enter(Round("old", OPEN, 2, 711, "gone"))
    >>> seat.believes(failed=True, now=5.0), seat.believes(failed=True, now=5.3)
    (False, True)
    >>> seat.leave(), seat.accepts(Round("old", OPEN, 2, 711, "gone")), seat.accepts(Round("new", OPEN, 2, 803, "here"))
    (None, False, True)
    """

    rank: int
    size: int
    nonce: str
    doubt_seconds: float = LEAVE_SECONDS
    opened: Round | None = None
    missed: frozenset[str] = frozenset()
    doubtful: str = ""
    believes_at: float | None = None
    met: bool = False

    def found(self, opened: Round, may_have_ended: bool) -> None:
        """Note the round that was in the store when this rank looked for the first time, if its rank 0 may be gone."""
        self.doubtful = opened.nonce if may_have_ended else ""

    def accepts(self, opened: Round) -> bool:
        """Return whether this rank can announce itself in a round: it is open, and none that this rank has missed."""
        return opened.state == OPEN and opened.nonce not in self.missed

    def enter(self, opened: Round) -> None:
        """Announce this rank in a round."""
        self.opened, self.believes_at, self.met = opened, None, False

    def leave(self) -> None:
        """Look for another round."""
        if self.opened is not None:
            self.missed |= {self.opened.nonce}
        self.opened = None

    def is_replaced_by(self, current: Round) -> bool:
        """Return whether the round in the store is another one than this rank's."""
        return self.opened is not None and current.nonce != self.opened.nonce

    def believes(self, failed: bool, now: float) -> bool:
        """Return whether a failure in this rank's round is one of this attempt.

        The first check decides from when on failures count. A round that was opened while this rank waited, and one
        without a failure at the first check, is not that of an earlier attempt.

        Args:
            failed: Whether the check has found a failure.
            now: Time of the check in seconds.
        """
        if self.believes_at is None:
            certain = not failed or self.opened is None or self.opened.nonce != self.doubtful
            self.believes_at = now + (0.0 if certain else self.doubt_seconds)
        return now >= self.believes_at

    def listed(self, nonces: list[str]) -> bool:
        """Take the list of those who have met; return whether this rank is in it, by its own nonce at its own place."""
        self.met = nonces[self.rank : self.rank + 1] == [self.nonce]
        return self.met
