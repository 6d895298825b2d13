"""How each rank's run ended, and the one error that tells a test about all of them.

`torchdist_ref.testing.run` gathers an `Outcome` per rank, however the ranks were run, and hands them to `verdict`.
How ranks are started and stopped is not here: see `thread_ranks` and `process_ranks`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from textwrap import indent
from typing import Any

from torchdist_ref.errors import GroupAbortedError, RankDiedError


class RankError(RuntimeError):
    """A rank failed under `torchdist_ref.testing.run`; the message says what the other ranks were doing.

    The rank's own exception is ``__cause__`` (None when the rank died without one).

    Attributes:
        rank: The rank that failed first. Where several did, one whose failure does not merely follow from another's.
        outcomes: For each rank that came to an end, how.

    Example:
        >>> from torchdist_ref.testing import RankError, run
        >>> def program(rank):
        ...     return 1 / (rank - 1)
        >>> try:
        ...     run(program, 2, init=False)
        ... except RankError as error:
        ...     print(error.rank, type(error.__cause__).__name__)
        1 ZeroDivisionError
    """

    def __init__(self, message: str, rank: int, outcomes: Mapping[int, Outcome] | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.outcomes = dict(outcomes or {})

    def __reduce__(self) -> tuple[type[RankError], tuple[str, int]]:
        return type(self), (str(self), self.rank)


class RankTimeoutError(RankError, TimeoutError):
    """Ranks were still running when the time was up; the message says which, and where each of them was."""


class RemoteError(RuntimeError):
    """Stands in for an exception or a result that could not be brought over from a rank's process."""


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: with a value, with an exception, or by dying.

    Attributes:
        rank: Which rank.
        value: What the function returned there.
        error: What it raised instead, or None.
        died: How the process ended, in words, where it ended without either.
        when: Since when that was certain, in seconds of the system's monotonic clock, which all processes share.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    died: str = ""
    when: float = field(default_factory=time.monotonic)

    @property
    def failed(self) -> bool:
        """Whether there is no value."""
        return self.error is not None or bool(self.died)

    @property
    def follows(self) -> bool:
        """Whether this failure was brought about by another rank's."""
        return isinstance(self.error, GroupAbortedError | RankDiedError)

    def __str__(self) -> str:
        if self.died:
            return self.died
        if self.error is None:
            return "returned"
        return f"failed with {type(self.error).__name__}: {self.error}".removesuffix(": ")


def _names(ranks: Iterable[int]) -> str:
    listed = [str(rank) for rank in sorted(ranks)]
    return f"rank{'s' * (len(listed) > 1)} {', '.join(listed)}"


def _others(outcomes: Mapping[int, Outcome], stuck: Mapping[int, str], without: int | None = None) -> str:
    ended = {rank: f"rank {rank} {outcome}" for rank, outcome in outcomes.items() if rank != without}
    where = {rank: f"rank {rank} was still running, at:\n{indent(stack, '  ')}" for rank, stack in stuck.items()}
    lines = [text for _, text in sorted((ended | where).items())]
    return "".join(f"\n{indent(line, '  ')}" for line in lines)


def _first_failure(outcomes: Mapping[int, Outcome]) -> Outcome | None:
    failed = [outcome for outcome in outcomes.values() if outcome.failed]
    # Deaths come first, because the survivors' errors follow from them but are known sooner.
    return min(failed, key=lambda outcome: (not outcome.died, outcome.follows, outcome.when), default=None)


def verdict(outcomes: Mapping[int, Outcome], stuck: Mapping[int, str], world_size: int, timeout: float) -> list[Any]:
    """Give the values in rank order, or raise the error that names the rank to look at.

    Args:
        outcomes: The ranks that ended.
        stuck: The others, each with the text that shows where it was.
        world_size: The number of ranks.
        timeout: The seconds that they had.

    Returns:
        One value per rank.

    Raises:
        RankError: If a rank failed.
        RankTimeoutError: If none failed and some did not finish.
    """
    first = _first_failure(outcomes)
    if first is not None:
        message = f"rank {first.rank} of {world_size} {first}{_others(outcomes, stuck, without=first.rank)}"
        raise RankError(message, first.rank, outcomes) from first.error
    if stuck:
        message = f"{_names(stuck)} of {world_size} did not finish within {timeout:g} s{_others(outcomes, stuck)}"
        raise RankTimeoutError(message, min(stuck), outcomes)
    return [outcomes[rank].value for rank in range(world_size)]
