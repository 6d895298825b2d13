"""Move, Round, Schedule: a collective algorithm as a value, written once for all ranks.

Terms:

* **rank**: a member of the group, ``0 .. world - 1``.
* **slot**: ``(buffer, index)`` on one rank. Buffers: ``data`` (a tensor worked on in place, divided into
  chunks), ``in`` and ``out`` (blocks read and blocks written), ``tmp`` (scratch).
* **move**: one arrow; one slot of one rank is copied to, or reduced into, one slot of one rank.
* **run**: moves of neighboring slots between the same two ranks, written as one.
* **message**: the moves of a round with the same two ends, which travel together.
* **round**: a set of moves. *All reads happen before all writes*. The values that are reduced into one slot are
  combined along one tree (`reduction_tree`), in the order of the ranks that they come from; the slot's own
  value comes from its rank, or from where it was copied in this round.
* **schedule**: a sequence of rounds, for all ranks at once.

Because each arrow is one line, with both its ends, a send without a receive cannot be written down and no
order of waiting can deadlock. Interpreters are elsewhere: `verify` runs a schedule symbolically, `simulate`
times it, `drawing` draws it, and a backend compiles it to the plan of one rank, which it executes.

Do not add here: algorithms, ways to combine them (`compose`), bytes, dtypes or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, cached_property, partial, singledispatch
from itertools import chain
from typing import NamedTuple, overload

from torchdist_ref.errors import ArgumentError, explain

Slot = tuple[str, int]
BUFFERS = ("data", "in", "out", "tmp")


class Move(NamedTuple):
    """Arrow from slot ``read`` of rank ``src`` to slot ``write`` of rank ``dst``.

    Args:
        src: the rank read from.
        dst: the rank written on; equal to ``src`` for a local copy or a local reduction.
        read: slot of ``src``.
        write: slot of ``dst``.
        reduce: combine with the value of ``write`` (True), or replace it (False, the default).

    >>> from torchdist_ref.schedules import Move
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
    """Moves of neighboring slots between the same two ranks, as a sequence.

    Args:
        first: the first of them.
        length: number of moves.

    A round's moves are single ones; `simulate` and `cost` use the number only, so that they need not look at each of
    the 16,384 chunks into which 16,384 ranks cut a tensor.

    >>> from torchdist_ref.schedules import Run, carry
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
"""Moves of one rank on one side, arriving or leaving: (round, rank) -> moves, in listed order."""
Reads = Callable[[int, int], Iterable[Slot]]


def slot_name(slot: Slot) -> str:
    """Return a slot as text.

    >>> slot_name(("data", 3))
    'data[3]'
    """
    return f"{slot[0]}[{slot[1]}]"


def carry(src: int, dst: int, slot: Slot, reduce: bool = False) -> Move:
    """Return a move between equal slots of two ranks; most algorithms consist of these."""
    return Move(src, dst, slot, slot, reduce)


def carry_run(src: int, dst: int, buffer: str, indices: range, reduce: bool = False, into: str = "") -> Run:
    """Return a move for each index, between equal slots, or from ``buffer`` to the same index of ``into``."""
    start = indices.start
    return Run(Move(src, dst, (buffer, start), (into or buffer, start), reduce), len(indices))


def single(runs: Iterable[Move | Run]) -> Round:
    """Return the moves of a round, one by one."""
    return tuple(chain.from_iterable((item,) if isinstance(item, Move) else item for item in runs))


class Pattern(NamedTuple):
    """Repetition of a round: rank ``r + period`` does the same as rank ``r``, with all ranks relabeled.

    Args:
        period: number of ranks after which it repeats; 1 if all ranks do the same. It divides the number of ranks.
        runs: ``ranks``, a multiple of the period -> the moves on one side (arriving or leaving) of the ranks
            ``0 .. ranks - 1``, which represent the whole round.
    """

    period: int
    runs: Callable[[int], Runs]


class Own(NamedTuple):
    """Moves of single ranks, found without those of all others.

    A backend plans one rank. It would be quadratic in the number of ranks, and cubic over all of them, to make the
    rounds of all ranks for that.

    Args:
        into: moves that end on a rank.
        out_of: moves that begin on a rank.
        alike: round number -> ranks of which at least one has as many moves on each side as any rank has.
        reads: ``(round, rank) -> slots`` that the moves out of a rank read, in their order, where no move of the round
            stays on its rank; None if only the moves say it (default). A backend looks at the slots of each peer, so
            this pays where ranks read from all others.
    """

    into: Arrivals
    out_of: Arrivals
    alike: Callable[[int], Iterable[int]]
    reads: Reads | None = None


class Rounds(Sequence[Round]):
    """Rounds made on demand, so that a schedule of 16,384 ranks costs nothing until it is used.

    Args:
        count: number of rounds.
        make: round number (from 0) -> the moves of that round, some of them as runs.
        pattern: round number -> repetition of the round from rank to rank, or None (default: no repetition).
            With it, a few ranks can represent all: `cost` uses that, and `simulate` for large worlds.
        own: moves of single ranks (default: None, so that they are looked up in the rounds of all ranks).
    """

    __slots__ = ("_count", "_make", "own", "pattern")

    def __init__(
        self,
        count: int,
        make: Callable[[int], Runs],
        pattern: Callable[[int], Pattern | None] = lambda step: None,
        own: Own | None = None,
    ) -> None:
        self._count, self._make, self.pattern, self.own = count, make, pattern, own

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
        """Return one round with runs as they are."""
        return self._make(range(self._count)[step])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (tuple, Rounds)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(self._count)


def arriving(
    world: int, count: int, arrivals: Arrivals, leaving: Arrivals, period: int = 0, reads: Reads | None = None
) -> Rounds:
    """Return rounds from the receiver's point of view; most algorithms here are written like that.

    Args:
        world: number of ranks.
        count: number of rounds.
        arrivals: ``(round, rank) -> moves that end on that rank``, in the order in which they are listed.
        leaving: ``(round, rank) -> moves that begin on that rank``, in the order of the ranks on which they end.
            `to_targets` derives them from the arrivals where these are few.
        period: the rounds repeat themselves after so many ranks (see `Pattern`; default 0: they do not).
        reads: slots that are read of a rank (see `Own`; default None).

    Returns:
        Rounds that call ``arrivals`` for one round at a time.
    """

    def among(step: int, ranks: int) -> Runs:
        return tuple(item for rank in range(ranks) for item in arrivals(step, rank))

    pattern = (lambda step: Pattern(period, partial(among, step))) if period else lambda step: None
    own = Own(
        # The schedule may have more ranks than those that take part.
        lambda step, rank: arrivals(step, rank) if rank < world else (),
        lambda step, rank: leaving(step, rank) if rank < world else (),
        lambda step: range(period or world),
        reads,
    )
    return Rounds(count, lambda step: among(step, world), pattern, own)


def to_targets(arrivals: Arrivals, targets: Callable[[int, int], Iterable[int]]) -> Arrivals:
    """Return the moves that leave a rank, found among those that arrive on the ranks to which it may send.

    Args:
        arrivals: as for `arriving`.
        targets: ``(round, rank) -> ranks``, of which some may be outside the world if nothing arrives there.
    """

    def leaving(step: int, rank: int) -> Iterator[Move | Run]:
        for target in sorted(set(targets(step, rank))):
            for item in arrivals(step, target):
                if (item if isinstance(item, Move) else item.first).src == rank:
                    yield item

    return leaving


def runs_of(rounds: Sequence[Round], step: int) -> Runs:
    """Return one round with runs as they are; a plain tuple has none."""
    return rounds.runs(step) if isinstance(rounds, Rounds) else rounds[step]


def pattern_of(rounds: Sequence[Round], step: int) -> Pattern | None:
    """Return `Rounds.pattern` of one round; None for rounds that are a plain tuple."""
    return rounds.pattern(step) if isinstance(rounds, Rounds) else None


@singledispatch
def picture(value: object) -> str:
    """Return a value as SVG text; `drawing` registers a function for each type that it can draw."""
    raise TypeError(f"no picture of a {type(value).__name__}")


@dataclass(frozen=True)
class Schedule:
    """Algorithm for a collective operation: the messages between all ranks, round by round.

    Args:
        name: algorithm and operation, such as ``"ring all_reduce"``.
        world: number of ranks.
        rounds: a sequence of rounds (a tuple, or `Rounds` that are made on demand).
        chunks: number of equal slots into which the whole buffer of the operation is divided, so that one slot has
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
        return picture(self)

    @cached_property
    def own(self) -> Own:
        """Moves of single ranks."""
        found = self.rounds.own if isinstance(self.rounds, Rounds) else None
        return found or _looked_up(self.rounds, self.world)

    @cached_property
    def staged(self) -> dict[tuple[int, int], dict[Slot, int]]:
        """Slots that ranks stage, each with its position, by round and rank, as a backend has found them."""
        return {}

    @property
    def share(self) -> Fraction:
        """Share of the whole buffer that one slot has: ``1 / chunks``, or 0 where moves carry no bytes."""
        return Fraction(1, self.chunks) if self.chunks else Fraction(0)


def _looked_up(rounds: Sequence[Round], world: int) -> Own:
    """Return the moves of single ranks in rounds that are given for all ranks. They are sorted by rank once."""

    @cache
    def sides(step: int) -> tuple[dict[int, list[Move]], dict[int, list[Move]]]:
        into: dict[int, list[Move]] = {}
        out_of: dict[int, list[Move]] = {}
        for move in rounds[step]:
            into.setdefault(move.dst, []).append(move)
            out_of.setdefault(move.src, []).append(move)
        return into, out_of

    return Own(
        lambda step, rank: sides(step)[0].get(rank, ()),
        lambda step, rank: sides(step)[1].get(rank, ()),
        lambda step: range(world),
    )


@dataclass(slots=True)
class Message:
    """All moves of one round from ``src`` to ``dst``, in listed order, some of them as runs."""

    src: int
    dst: int
    runs: list[Run] = field(default_factory=list)

    @property
    def moves(self) -> list[Move]:
        """Moves, one by one."""
        return [move for run in self.runs for move in run]

    @property
    def slots(self) -> int:
        """Number of slots carried."""
        return sum(run.length for run in self.runs)

    @property
    def reduced(self) -> int:
        """Number of slots that are reduced into the slot written."""
        return sum(run.length for run in self.runs if run.first.reduce)

    @property
    def label(self) -> str:
        """Slots carried, as text: ``data[0-3] +`` for four neighboring slots that are reduced."""
        copied = ", ".join(slot_ranges((run.first.read, run.length) for run in self.runs if not run.first.reduce))
        reduced = ", ".join(slot_ranges((run.first.read, run.length) for run in self.runs if run.first.reduce))
        return ", ".join(part for part in (copied, reduced and f"{reduced} +") if part)


def messages(moves: Iterable[Move | Run]) -> list[Message]:
    """Return the messages of a round, in the order in which their first moves are listed.

    >>> from torchdist_ref.schedules import build
    >>> [m.label for m in messages(build("all_reduce", "halving_doubling", 4).rounds[0])]
    ['data[0-1] +', 'data[2-3] +', 'data[0-1] +', 'data[2-3] +']
    """
    found: dict[tuple[int, int], Message] = {}
    for item in moves:
        run = Run(item, 1) if isinstance(item, Move) else item
        ends = (run.first.src, run.first.dst)
        if ends not in found:
            found[ends] = Message(*ends)
        found[ends].runs.append(run)
    return list(found.values())


def slot_ranges(runs: Iterable[tuple[Slot, int]]) -> Iterator[str]:
    """Return slots as text, with neighbors joined; each run is its first slot and its length.

    >>> list(slot_ranges([(("in", 2), 1), (("data", 1), 4), (("data", 0), 1), (("data", 6), 1)]))
    ['data[0-4]', 'data[6]', 'in[2]']
    """
    joined: list[tuple[str, int, int]] = []
    for (buffer, first), count in sorted(runs):
        before = joined[-1] if joined else ("", 0, 0)
        if before[0] == buffer and first <= before[2]:
            joined[-1] = (buffer, before[1], max(first + count, before[2]))
        else:
            joined.append((buffer, first, first + count))
    return (f"{buffer}[{a}]" if b == a + 1 else f"{buffer}[{a}-{b - 1}]" for buffer, a, b in joined)
