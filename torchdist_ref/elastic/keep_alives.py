"""Rules of keep-alives: when the coordinator looks at them next, and which agents have ended or fallen silent.

A `KeepAlives` has neither store nor clock: `coordinator` reads the keep-alives and passes what they say, and the time.
Two checks a second suffice while all keep-alives arrive. Do not add communication here.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from math import inf

LATE_SECONDS = 0.45
"""Silence after which an agent is lost if it has disconnected."""


class Finding(Enum):
    """State of an agent, as the coordinator finds it.

    Attributes:
        BEAT: A keep-alive has arrived since the last check.
        WAITING: None has arrived, but one still can in time.
        DISCONNECTED: Its connection has ended, and it is late: it has ended, or left.
        SILENT: It has been silent for too long.
    """

    BEAT, WAITING, DISCONNECTED, SILENT = (auto() for _ in range(4))


class KeepAlives:
    """Last keep-alive of each agent.

    Args:
        silence_seconds: Silence after which an agent is lost.
    """

    def __init__(self, silence_seconds: float) -> None:
        self._silence_seconds = silence_seconds
        self._last_beats: dict[str, tuple[int, float]] = {}
        self._looked_at = -inf

    def next_look(self, agents: Iterable[str]) -> float:
        """Return when one of these agents is late next, or silent for too long. A new one is looked at right away."""
        due = inf
        for agent in agents:
            since = self._last_beats.get(agent, (-1, -inf))[1]
            # By the sum that is returned: by a difference, which is rounded otherwise, a look at the very time that is
            # due may be too early, and due again at once.
            was_late = self._looked_at >= since + LATE_SECONDS
            due = min(due, since + (self._silence_seconds if was_late else LATE_SECONDS))
        return due

    def look(self, agent: str, beat: int, has_disconnected: bool, now: float) -> Finding:
        """Return the state of an agent.

        Args:
            agent: Its key.
            beat: Number of its last keep-alive; -1 if that cannot be read, since another program has changed it.
            has_disconnected: Whether its connection has ended, which it also does when the network is slow.
            now: Present time in seconds.
        """
        self._looked_at = now
        before, since = self._last_beats.setdefault(agent, (-1, now))
        # Accept larger numbers only: another program may replay an earlier keep-alive of the agent.
        if beat > before:
            self._last_beats[agent] = beat, now
            return Finding.BEAT
        if has_disconnected and now >= since + LATE_SECONDS:
            return Finding.DISCONNECTED
        return Finding.SILENT if now >= since + self._silence_seconds else Finding.WAITING

    def silence(self, agent: str, now: float) -> float:
        """Return for how long an agent has been silent, in seconds."""
        return now - self._last_beats[agent][1]
