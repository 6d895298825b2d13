"""Program of one rank under `torchdist_ref.testing.run`, its outcome, and the error made of all outcomes.

Do not add the start and end of ranks here: they belong to `running` (threads) and `process_ranks`.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from textwrap import indent
from typing import Any

from torchdist_ref import groups
from torchdist_ref.errors import GroupAbortedError, RankDiedError, indexed, message_of
from torchdist_ref.groups import world
from torchdist_ref.processes.control import name_ranks
from torchdist_ref.stores import Store
from torchdist_ref.timeouts import CLOCK, Clock

# Share of the time-out after which collectives fail: their own error explains more than a stack.
_GROUP_TIMEOUT_SHARE = 0.8


class RankError(RuntimeError):
    """Failure of a rank under `torchdist_ref.testing.run`; the message includes the state of the other ranks.

    The rank's own exception is ``__cause__`` (None if the rank died without one).

    Attributes:
        rank: Rank that failed first. If several failed, one whose failure does not follow from another's.
        outcomes: Outcome of each rank that ended.

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
        indexed(self)
        self.rank = rank
        self.outcomes = dict(outcomes or {})

    def __reduce__(self) -> tuple[type[RankError], tuple[str, int]]:
        return type(self), (str(self), self.rank)


class RankTimeoutError(RankError, TimeoutError):
    """Time-out of ranks; the message names those that were still running and shows their stacks."""


class RemoteError(RuntimeError):
    """Replacement of an exception or a result that could not be pickled in a rank's process."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        indexed(self)


@dataclass(frozen=True)
class Outcome:
    """Outcome of one rank: a value, an exception, or a death.

    Attributes:
        rank: Rank.
        value: Result of the function.
        error: Exception that the function raised, or None.
        died: Description of the end of a process that returned no result and raised no exception.
        when: Time of the outcome, in seconds of the system's monotonic clock, which all processes share.
    """

    rank: int
    value: Any = None
    error: BaseException | None = None
    died: str = ""
    when: float = field(default_factory=time.monotonic)

    @property
    def failed(self) -> bool:
        """Whether the rank returned no value."""
        return self.error is not None or bool(self.died)

    @property
    def follows(self) -> bool:
        """Whether another rank caused this failure."""
        return isinstance(self.error, GroupAbortedError | RankDiedError)

    def __str__(self) -> str:
        if self.died:
            return self.died
        if self.error is None:
            return "returned"
        return f"failed with {message_of(self.error)}".removesuffix(": ")


@dataclass(frozen=True)
class RunLimits:
    """Times of a run beside its time-out, in seconds.

    Attributes:
        grace: Time that the others have after the first failure. Their group is aborted, so they need far less.
        join: Time that hanging threads have to give up.
        dump: Time that a hanging process has to dump its stack.
        clock: Clock of the time-out and the grace.
    """

    grace: float = 3.0
    join: float = 1.0
    dump: float = 2.0
    clock: Clock = CLOCK


@dataclass(frozen=True)
class RankProgram:
    """Function to call on every rank, and the group to call it in. Thread ranks and process ranks run the same."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    backend: str | None
    timeout: float
    init: bool

    def __call__(self, rank: int, make_store: Callable[[], Store]) -> Outcome:
        """Join the group, call the function and leave the group."""
        try:
            if self.init:
                self._join(rank, make_store())
            value = self.fn(rank, *self.args)
            if groups.is_initialized():
                groups.destroy_process_group()
        except BaseException as error:
            outcome = Outcome(rank, error=error)
            # The others may be waiting for this rank, which makes no more calls.
            world.abort(f"rank {rank} {outcome}")
            return outcome
        return Outcome(rank, value)

    def _join(self, rank: int, store: Store) -> None:
        timeout = timedelta(seconds=self.timeout * _GROUP_TIMEOUT_SHARE)
        groups.init_process_group(self.backend, store=store, rank=rank, world_size=self.world_size, timeout=timeout)


def user_frames(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the frames above `RankProgram`'s call of the function: those below show only how the rank was started."""
    calls = [index for index, frame in enumerate(frames) if frame.filename == __file__]
    return list(frames[calls[0] + 1 if calls else 0 :])


def _others(outcomes: Mapping[int, Outcome], stuck: Mapping[int, str], without: int | None = None) -> str:
    """Return how the other ranks ended, or where they are. Ranks of which the same is to be said share one entry."""
    texts = {rank: str(outcome) for rank, outcome in outcomes.items() if rank != without}
    texts |= {rank: f"still running, at:\n{indent(stack, '  ')}" for rank, stack in stuck.items()}
    alike: dict[tuple[bool, str], list[int]] = {}
    for rank, text in sorted(texts.items()):
        alike.setdefault((rank in stuck, text), []).append(rank)
    lines = []
    for (is_stuck, text), ranks in alike.items():
        verb = ("were " if len(ranks) > 1 else "was ") if is_stuck else ""
        lines.append(f"{name_ranks(ranks)} {verb}{text}")
    return "".join(f"\n{indent(line, '  ')}" for line in lines)


def _first_failure(outcomes: Mapping[int, Outcome]) -> Outcome | None:
    failed = [outcome for outcome in outcomes.values() if outcome.failed]
    # A death comes first: the survivors' errors follow from it but are noticed earlier.
    return min(failed, key=lambda outcome: (not outcome.died, outcome.follows, outcome.when), default=None)


def values_or_error(
    outcomes: Mapping[int, Outcome], stuck: Mapping[int, str], world_size: int, timeout: float
) -> list[Any]:
    """Return the values in rank order, or raise the error that names the rank to look at.

    Args:
        outcomes: Outcome of each rank that ended.
        stuck: Stack of each of the others.
        world_size: Number of ranks.
        timeout: Time that the ranks had, in seconds.

    Returns:
        One value per rank.

    Raises:
        RankError: A rank failed.
        RankTimeoutError: No rank failed, but some did not finish.
    """
    first = _first_failure(outcomes)
    if first is not None:
        message = f"rank {first.rank} of {world_size} {first}{_others(outcomes, stuck, without=first.rank)}"
        raise RankError(message, first.rank, outcomes) from first.error
    if stuck:
        message = f"{name_ranks(stuck)} of {world_size} did not finish within {timeout:g} s{_others(outcomes, stuck)}"
        raise RankTimeoutError(message, min(stuck), outcomes)
    return [outcomes[rank].value for rank in range(world_size)]
