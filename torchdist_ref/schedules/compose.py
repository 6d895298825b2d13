"""Combinators of schedules: after each other, reversed, in pieces, on other ranks, side by side.

An all-reduce is a reduce-scatter `then` an all-gather. Halving-doubling's all-gather is its reduce-scatter
`reversed_`. A pipelined chain is a chain `segmented`. A tree with another root is the tree `rooted` there.
So every algorithm file states one idea, once. Each function here is pure and keeps rounds lazy.

Do not add here: the meaning of an operation (`contract`) or its cost (`cost`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from torchdist_ref.errors import ArgumentError, explain
from torchdist_ref.schedules.schedule import (
    Arrivals,
    Move,
    Own,
    Pattern,
    Round,
    Rounds,
    Run,
    Runs,
    Schedule,
    Slot,
    pattern_of,
    runs_of,
    single,
)


def each(schedule: Schedule, change: Callable[[Move], Iterable[Move]], symmetric: bool = False) -> Schedule:
    """Replace every move by those that ``change`` returns for it: none, one or several.

    Args:
        schedule: to change.
        change: function of a move, called when its round is requested. It must not change the two ranks.
        symmetric: ``change`` treats all ranks alike, so that some ranks can still represent all.
    """

    def changed(runs: Runs) -> Runs:
        return tuple(chain.from_iterable(map(change, single(runs))))

    before, all_ranks = schedule.own, range(schedule.world)
    own = Own(
        lambda step, rank: changed(tuple(before.into(step, rank))),
        lambda step, rank: changed(tuple(before.out_of(step, rank))),
        # Moves may become several on some ranks and none on others.
        before.alike if symmetric else lambda step: all_ranks,
    )
    return replace(schedule, rounds=_changed(schedule.rounds, changed, int(symmetric), own))


Relabel = Callable[[Iterable[Move | Run]], Runs]


def _relabel(change: Callable[[Move], Move]) -> Relabel:
    """Return a function that renames ranks or slots in moves; runs stay runs.

    Args:
        change: function of a move, or of the first one of a run. It must not change indices of slots.
    """

    def changed(runs: Iterable[Move | Run]) -> Runs:
        return tuple(change(item) if isinstance(item, Move) else Run(change(item.first), item.length) for item in runs)

    return changed


def _changed(rounds: Sequence[Round], changed: Callable[[Runs], Runs], spacing: int, own: Own) -> Rounds:
    """Return rounds in which the moves are changed.

    Args:
        rounds: to change.
        changed: called with the moves of a round.
        spacing: rank ``r`` becomes rank ``r * spacing``, apart from a rotation of all ranks; 0 if ranks change in
            another way.
        own: moves of single ranks, changed.
    """

    def pattern(step: int) -> Pattern | None:
        found = pattern_of(rounds, step)
        if not spacing or found is None:
            return None
        period, runs = found
        return Pattern(period * spacing, lambda ranks: changed(runs(ranks // spacing)))

    return Rounds(len(rounds), lambda step: changed(runs_of(rounds, step)), pattern, own)


def then(*schedules: Schedule, name: str = "") -> Schedule:
    """Run one schedule after another.

    Args:
        schedules: at least one; equal worlds and equal chunks.
        name: of the result (default: the names joined by "then").

    Returns:
        All rounds, in order.

    Raises:
        ArgumentError: worlds or chunks differ.
    """
    first = schedules[0]
    for other in schedules[1:]:
        if (other.world, other.chunks) != (first.world, first.chunks):
            expected = f"of {first.world} ranks and {first.chunks} chunks"
            raise ArgumentError(explain("then", other.name, expected, f"{other.world} and {other.chunks}"))
    steps = [(s, i) for s in schedules for i in range(len(s.rounds))]

    def part(step: int) -> tuple[Sequence[Round], int]:
        return steps[step][0].rounds, steps[step][1]

    def reads(step: int, rank: int) -> Iterable[Slot]:
        schedule, number = steps[step]
        return schedule.own.reads(number, rank) if schedule.own.reads else ()

    own = Own(
        lambda step, rank: steps[step][0].own.into(steps[step][1], rank),
        lambda step, rank: steps[step][0].own.out_of(steps[step][1], rank),
        lambda step: steps[step][0].own.alike(steps[step][1]),
        reads if all(s.own.reads for s in schedules) else None,
    )
    joined = Rounds(len(steps), lambda step: runs_of(*part(step)), lambda step: pattern_of(*part(step)), own)
    return replace(first, name=name or " then ".join(s.name for s in schedules), rounds=joined)


def reversed_(schedule: Schedule, reduce: bool = False, name: str = "") -> Schedule:
    """Reverse a schedule: last round first, every arrow reversed.

    Args:
        schedule: to reverse.
        reduce: whether the reversed arrows reduce (a broadcast becomes a reduce) or copy (a reduce-scatter
            becomes an all-gather, the default).
        name: of the result.

    Returns:
        A schedule whose round ``i`` is the reversed round ``len - 1 - i``.
    """
    turn = _relabel(lambda m: Move(m.dst, m.src, m.write, m.read, reduce))
    before, last = schedule.own, len(schedule.rounds) - 1
    turned = _changed(schedule.rounds, turn, 1, before)
    own = Own(
        lambda step, rank: turn(before.out_of(last - step, rank)),
        lambda step, rank: turn(before.into(last - step, rank)),
        lambda step: before.alike(last - step),
    )
    rounds = Rounds(last + 1, lambda step: turned.runs(last - step), lambda step: turned.pattern(last - step), own)
    return replace(schedule, name=name or f"{schedule.name} reversed", rounds=rounds)


def segmented(schedule: Schedule, pieces: int, stagger: int = 1) -> Schedule:
    """Cut every slot into equal pieces, each of which runs the whole schedule, one a little after the other.

    Args:
        schedule: works in place (buffers ``data`` and ``tmp``): blocks of ``in`` and ``out`` are not divisible.
        pieces: how many pieces a slot is cut into.
        stagger: piece ``p`` runs ``p * stagger`` rounds late. 1 (default) makes a pipeline; 0 runs all pieces
            together, which only divides the tensor more finely.

    Returns:
        A schedule with ``pieces`` times as many chunks and ``(pieces - 1) * stagger`` more rounds.

    Raises:
        ArgumentError: ``pieces`` is less than 1.
    """
    if pieces < 1:
        raise ArgumentError(explain("segmented", "pieces", "at least 1", pieces))
    steps, before = len(schedule.rounds), schedule.own

    def active(step: int) -> list[tuple[int, int]]:
        return [(i, p) for p in range(pieces) if 0 <= (i := step - p * stagger) < steps]

    def make(step: int) -> Round:
        return tuple(_piece(m, pieces, p) for i, p in active(step) for m in schedule.rounds[i])

    def side(of: Arrivals) -> Arrivals:
        return lambda step, rank: [_piece(m, pieces, p) for i, p in active(step) for m in single(of(i, rank))]

    def alike(step: int) -> Iterable[int]:
        # Rounds in which other ranks are busy overlap.
        return before.alike(step) if not stagger else range(schedule.world)

    count = steps + (pieces - 1) * stagger if steps else 0
    own = Own(side(before.into), side(before.out_of), alike)
    return replace(schedule, rounds=Rounds(count, make, own=own), chunks=schedule.chunks * pieces)


def _piece(move: Move, pieces: int, piece: int) -> Move:
    read: Slot = (move.read[0], move.read[1] * pieces + piece)
    write: Slot = (move.write[0], move.write[1] * pieces + piece)
    return Move(move.src, move.dst, read, write, move.reduce)


def on_ranks(schedule: Schedule, ranks: Sequence[int], world: int) -> Schedule:
    """Run a schedule on some ranks of a larger world; slots keep their indices.

    Args:
        schedule: for ``len(ranks)`` ranks.
        ranks: ``ranks[i]`` plays rank ``i``. If they are evenly spaced, some can still represent all.
        world: size of the larger world.
    """
    if schedule.world == world and list(ranks) == list(range(world)):
        return schedule
    spacing = world // len(ranks)
    even = list(ranks) == list(range(0, world, spacing))
    moved = _relabel(lambda m: Move(ranks[m.src], ranks[m.dst], m.read, m.write, m.reduce))
    before, played = schedule.own, {rank: i for i, rank in enumerate(ranks)}
    own = Own(
        lambda step, rank: moved(before.into(step, played[rank])) if rank in played else (),
        lambda step, rank: moved(before.out_of(step, played[rank])) if rank in played else (),
        lambda step: [ranks[i] for i in before.alike(step)],
    )
    return replace(schedule, rounds=_changed(schedule.rounds, moved, even * spacing, own), world=world)


def rooted(schedule: Schedule, root: int) -> Schedule:
    """Shift a schedule written for root 0 so that ``root`` plays rank 0; then no tree needs to mention a root."""
    world = schedule.world
    return on_ranks(schedule, [(v + root) % world for v in range(world)], world) if root else schedule


def alongside(*schedules: Schedule) -> Schedule:
    """Run schedules of one world at the same time, round by round (on disjoint ranks, as a rule)."""
    steps = max(len(s.rounds) for s in schedules)

    def make(step: int) -> Round:
        return tuple(chain.from_iterable(s.rounds[step] for s in busy(step)))

    def busy(step: int) -> Iterable[Schedule]:
        return (s for s in schedules if step < len(s.rounds))

    own = Own(
        lambda step, rank: chain.from_iterable(s.own.into(step, rank) for s in busy(step)),
        lambda step, rank: chain.from_iterable(s.own.out_of(step, rank) for s in busy(step)),
        lambda step: chain.from_iterable(s.own.alike(step) for s in busy(step)),
    )
    return replace(schedules[0], rounds=Rounds(steps, make, own=own))


def renamed(schedule: Schedule, buffers: Mapping[str, str], name: str = "") -> Schedule:
    """Rename buffers, such as those of a reversed scatter, with ``in`` and ``out`` exchanged."""

    def slot(old: Slot) -> Slot:
        return (buffers.get(old[0], old[0]), old[1])

    moved = _relabel(lambda m: Move(m.src, m.dst, slot(m.read), slot(m.write), m.reduce))
    before = schedule.own
    own = Own(
        lambda step, rank: moved(before.into(step, rank)),
        lambda step, rank: moved(before.out_of(step, rank)),
        before.alike,
    )
    return replace(schedule, name=name or schedule.name, rounds=_changed(schedule.rounds, moved, 1, own))


def only(schedule: Schedule, keep: Callable[[Move], bool]) -> Schedule:
    """Keep only the moves for which ``keep`` is true."""
    return each(schedule, lambda m: [m] if keep(m) else [])
