"""Move, Round, Schedule: a collective algorithm as a value, written once for all ranks.

Words:

* **rank**: a member of the group, ``0 .. world - 1``.
* **slot**: ``(buffer, index)`` on one rank. Buffers: ``data`` (a tensor worked on in place, divided into
  chunks), ``in`` and ``out`` (blocks handed in and handed back), ``tmp`` (scratch).
* **move**: one arrow; one slot of one rank is copied to, or reduced into, one slot of one rank.
* **run**: moves of neighbouring slots between the same two ranks, written as one.
* **round**: a set of moves. *All reads happen before all writes*; several reductions into one slot are
  applied in the order in which they are listed.
* **schedule**: a sequence of rounds, for all ranks at once.

Because each arrow is one line, with both its ends, a send without a receive cannot be written down and no
order of waiting can deadlock. Interpreters are elsewhere: `verify` runs a schedule symbolically, `simulate`
clocks it, `draw` draws it, a backend plans from it what one rank has to do, and runs that.

Do not add here: algorithms (one file each), ways to combine them (`compose`), bytes, dtypes or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import chain
from typing import NamedTuple, overload

from torchdist_ref.errors import ArgumentError, explain

Slot = tuple[str, int]
BUFFERS = ("data", "in", "out", "tmp")


@dataclass(frozen=True, slots=True)
class Move:
    """One arrow: what ``src`` has in ``read`` goes to ``write`` on ``dst``.

    Args:
        src: the rank read from.
        dst: the rank written on; equal to ``src`` for a local copy or a local reduction.
        read: slot of ``src``.
        write: slot of ``dst``.
        reduce: combine with what ``write`` holds (True), or replace it (False, the default).

    >>> print(Move(0, 1, ("data", 2), ("data", 2), reduce=True))
    0.data[2] -> 1.data[2] +
    """

    src: int
    dst: int
    read: Slot
    write: Slot
    reduce: bool = False

    def __str__(self) -> str:
        mark = " +" if self.reduce else ""
        return f"{self.src}.{slot_name(self.read)} -> {self.dst}.{slot_name(self.write)}{mark}"


@dataclass(frozen=True, slots=True)
class Run(Sequence[Move]):
    """Moves like the first one, each of the slots that come next after those of the move before.

    Args:
        first: the first of them.
        length: how many.

    Whoever looks at a round's moves sees single ones; `simulate` and `cost` only ask how many there are, which saves
    them from looking at each of the 16,384 chunks that 16,384 ranks cut a tensor into.

    >>> print(*Run(carry(0, 1, ("data", 2)), 2), sep=" | ")
    0.data[2] -> 1.data[2] | 0.data[3] -> 1.data[3]
    """

    first: Move
    length: int

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> Move: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Move, ...]: ...
    def __getitem__(self, index: int | slice) -> Move | tuple[Move, ...]:
        found = range(self.length)[index]
        return self._later(found) if isinstance(found, int) else tuple(map(self._later, found))

    def _later(self, by: int) -> Move:
        (read, i), (write, j) = self.first.read, self.first.write
        return Move(self.first.src, self.first.dst, (read, i + by), (write, j + by), self.first.reduce)


Round = tuple[Move, ...]
Runs = tuple[Move | Run, ...]
Arrivals = Callable[[int, int], Iterable[Move | Run]]


def slot_name(slot: Slot) -> str:
    """A slot as people write it.

    >>> slot_name(("data", 3))
    'data[3]'
    """
    return f"{slot[0]}[{slot[1]}]"


def carry(src: int, dst: int, slot: Slot, reduce: bool = False) -> Move:
    """A move between equal slots of two ranks, which is what most algorithms are made of."""
    return Move(src, dst, slot, slot, reduce)


def carry_run(src: int, dst: int, buffer: str, indices: range, reduce: bool = False, into: str = "") -> Run:
    """A move for each index, between equal slots, or from ``buffer`` to the same index of the buffer ``into``."""
    start = indices.start
    return Run(Move(src, dst, (buffer, start), (into or buffer, start), reduce), len(indices))


def single(runs: Iterable[Move | Run]) -> Round:
    """The moves of a round, one by one."""
    return tuple(chain.from_iterable((item,) if isinstance(item, Move) else item for item in runs))


class Pattern(NamedTuple):
    """How a round repeats itself: what rank ``r`` does, rank ``r + period`` does too, with everybody relabelled.

    Args:
        period: after how many ranks; 1 if all ranks do the same. It divides the number of ranks.
        runs: ``ranks``, a multiple of the period -> the moves on one side (arriving or leaving) of the ranks
            ``0 .. ranks - 1``, which are a picture of the whole round.
    """

    period: int
    runs: Callable[[int], Runs]


class Rounds(Sequence[Round]):
    """Rounds made on demand, so that a schedule of 16,384 ranks costs nothing until someone looks at it.

    Args:
        count: how many rounds.
        make: round number (from 0) -> the moves of that round, some of them as runs.
        pattern: round number -> how the round repeats itself from rank to rank, or None (default: it does not).
            Where given, a few ranks can stand for all: `cost` uses that, and `simulate` for large worlds.
    """

    __slots__ = ("_count", "_make", "pattern")

    def __init__(
        self, count: int, make: Callable[[int], Runs], pattern: Callable[[int], Pattern | None] = lambda step: None
    ) -> None:
        self._count, self._make, self.pattern = count, make, pattern

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Round: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Round, ...]: ...
    def __getitem__(self, index: int | slice) -> Round | tuple[Round, ...]:
        if isinstance(index, slice):
            return tuple(single(self._make(i)) for i in range(*index.indices(self._count)))
        return single(self.runs(index))

    def __iter__(self) -> Iterator[Round]:
        return (single(self._make(i)) for i in range(self._count))

    def runs(self, step: int) -> Runs:
        """One round with runs as they are."""
        return self._make(range(self._count)[step])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (tuple, Rounds)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(self._count)


def arriving(world: int, count: int, arrivals: Arrivals, period: int = 0) -> Rounds:
    """Rounds from the receiver's point of view, the way in which most algorithms here are written.

    Args:
        world: number of ranks.
        count: number of rounds.
        arrivals: ``(round, rank) -> moves that end on that rank``, in the order in which they apply.
        period: the rounds repeat themselves after so many ranks (see `Pattern`; default 0: they do not).

    Returns:
        Rounds that call ``arrivals`` for one round at a time.
    """

    def among(step: int, ranks: int) -> Runs:
        return tuple(item for rank in range(ranks) for item in arrivals(step, rank))

    pattern = (lambda step: Pattern(period, partial(among, step))) if period else lambda step: None
    return Rounds(count, lambda step: among(step, world), pattern)


def runs_of(rounds: Sequence[Round], step: int) -> Runs:
    """One round with runs as they are; in a plain tuple there are none."""
    return rounds.runs(step) if isinstance(rounds, Rounds) else rounds[step]


def pattern_of(rounds: Sequence[Round], step: int) -> Pattern | None:
    """What `Rounds.pattern` says of one round; None for rounds that are a plain tuple."""
    return rounds.pattern(step) if isinstance(rounds, Rounds) else None


@dataclass(frozen=True)
class Schedule:
    """An algorithm for a collective operation: what every rank sends, to whom, in which round.

    Args:
        name: algorithm and operation, such as ``"ring all_reduce"``.
        world: number of ranks.
        rounds: a sequence of rounds (a tuple, or `Rounds` that are made on demand).
        chunks: into how many equal slots the whole buffer of the operation is divided, so that one slot has
            ``nbytes / chunks`` bytes (default 1; 0 where moves carry no bytes, as in a barrier). Slot
            ``tmp[i]`` has the size of ``data[i % chunks]``, or of a block.

    ``print(schedule)`` gives text with one line per arrow; in a notebook the value draws itself.

    >>> from torchdist_ref.schedules import build
    >>> print(build("all_reduce", "ring", 2))
    ring all_reduce: 2 ranks, 2 chunks, 2 rounds
    round 1: 1.data[0] -> 0.data[0] +
    round 1: 0.data[1] -> 1.data[1] +
    round 2: 1.data[1] -> 0.data[1]
    round 2: 0.data[0] -> 1.data[0]
    """

    name: str
    world: int
    rounds: Sequence[Round] = field(hash=False)
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.world < 1:
            raise ArgumentError(explain(self.name, "world", "at least 1", self.world))

    def __str__(self) -> str:
        head = f"{self.name}: {self.world} ranks, {self.chunks} chunks, {len(self.rounds)} rounds"
        lines = (f"round {i}: {move}" for i, moves in enumerate(self.rounds, 1) for move in moves)
        return "\n".join([head, *lines])

    def _repr_svg_(self) -> str:
        # Imported here because draw is an interpreter of schedules and imports this module.
        from torchdist_ref.schedules.draw import draw

        return draw(self)

    @property
    def share(self) -> Fraction:
        """The part of the whole buffer that one slot is: ``1 / chunks``, or 0 where moves carry no bytes."""
        return Fraction(1, self.chunks) if self.chunks else Fraction(0)
