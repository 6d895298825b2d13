"""Cause behind a wrong result: the round and the move at which a schedule goes wrong.

`verify` finds a wrong value where it matters, at the end. The move that made it wrong is earlier, often on another
rank. `cause_of` runs the schedule once more, keeps the history of every slot, and follows the wrong value back. Do not
add here: rules that a schedule breaks, which belong to `verify`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torchdist_ref.schedules.contract import Contribution, contract
from torchdist_ref.schedules.schedule import Move, Schedule, Slot, single, slot_name

Place = tuple[int, Slot]
Value = Counter[Contribution]


@dataclass(frozen=True)
class Cause:
    """Cause of a wrong result.

    Attributes:
        text: The cause in words.
        round: Number of the round, from 1; 0 if no move is wrong, but one is missing.
        move: The move; None if one is missing.
    """

    text: str
    round: int = 0
    move: Move | None = None

    def __str__(self) -> str:
        where = f"round {self.round}, move {self.move}: " if self.move else ""
        return f"{where}{self.text}"


@dataclass(frozen=True)
class _Write:
    """Change of one slot: the round, the moves into it, and the values before and after."""

    number: int
    moves: tuple[Move, ...]
    read: tuple[Value, ...]
    before: Value
    after: Value


class _Run:
    """Values of all slots at the end, and all changes of each."""

    def __init__(self, schedule: Schedule, op: str, root: int) -> None:
        self.promise = contract(op, schedule.world, schedule.chunks or 1, root)
        self.state: dict[Place, Value] = {
            (rank, slot): Value([(rank, slot)]) for rank in range(schedule.world) for slot in self.promise.before(rank)
        }
        self.writes: dict[Place, list[_Write]] = {}
        self.lost: list[tuple[int, Move, frozenset[Contribution]]] = []
        for number, moves in enumerate(schedule.rounds, 1):
            self._run(number, single(moves))

    def _run(self, number: int, moves: tuple[Move, ...]) -> None:
        into: dict[Place, list[tuple[Move, Value]]] = {}
        for move in moves:
            into.setdefault((move.dst, move.write), []).append((move, self.state.get((move.src, move.read), Value())))
        before = {place: self.state.get(place, Value()) for place in into}
        for place, arrived in into.items():
            kept = Value() if any(not move.reduce for move, _ in arrived) else before[place]
            self.state[place] = sum((value for _, value in arrived), kept)
            write = _Write(number, tuple(m for m, _ in arrived), tuple(v for _, v in arrived), kept, self.state[place])
            self.writes.setdefault(place, []).append(write)
        held = {contribution for value in self.state.values() for contribution in value}
        for place, arrived in into.items():
            replacing = next((move for move, _ in arrived if not move.reduce), None)
            if replacing is not None and (gone := frozenset(before[place]) - held):
                self.lost.append((number, replacing, gone))

    def until(self, place: Place, number: int) -> Iterator[_Write]:
        """Yield the changes of a slot before a round, the last one first."""
        return (write for write in reversed(self.writes.get(place, [])) if write.number < number)


def cause_of(schedule: Schedule, op: str, rank: int, slot: Slot, root: int = 0) -> Cause | None:
    """Return the cause behind a wrong slot, or None if the slot has each contribution once that it should have.

    Args:
        schedule: the schedule.
        op: the operation.
        rank: rank of the slot that is wrong at the end.
        slot: the slot. In a barrier it is the signal, ``("tmp", 0)``, which is wrong on a rank that some rank did not
            notify.
        root: for rooted operations (default 0).

    >>> from torchdist_ref.schedules import Schedule, carry
    >>> forgets = Schedule("forgets to add", 2, ((carry(0, 1, ("data", 0)),), (carry(1, 0, ("data", 0)),)))
    >>> print(cause_of(forgets, "all_reduce", 0, ("data", 0)))
    round 1, move 0.data[0] -> 1.data[0]: replaces the value of data[0] on rank 1, and that of 1.data[0] is lost
    """
    if op == "barrier":
        return _not_notified(schedule, rank)
    run = _Run(schedule, op, root)
    wanted, place = Value(run.promise.after(rank)[slot]), (rank, slot)
    got = run.state.get(place, Value())
    repeated = {contribution for contribution, count in got.items() if count > 1}
    if repeated:
        return _added_twice(run, repeated)
    missing, extra = set(wanted) - set(got), set(got) - set(wanted)
    # A slot that should have one value, and has another one.
    if extra and len(wanted) == 1:
        return _brought(run, place, min(extra))
    for number, move, gone in run.lost:
        if gone & missing:
            name = _name(min(gone & missing))
            text = f"replaces the value of {slot_name(move.write)} on rank {move.dst}, and that of {name} is lost"
            return Cause(text, number, move)
    if missing:
        return _came_too_late(run, place, min(missing), len(schedule.rounds) + 1)
    return _brought(run, place, min(extra)) if extra else None


def _not_notified(schedule: Schedule, rank: int) -> Cause | None:
    """Return the signal that a rank of a barrier sends too early, or else the last one to the rank that misses some."""
    ranks = range(schedule.world)
    rounds = [[move for move in single(moves) if move.src in ranks and move.dst in ranks] for moves in schedule.rounds]
    notified_by = [{each} for each in ranks]
    for moves in rounds:
        before = [frozenset(each) for each in notified_by]
        for move in moves:
            notified_by[move.dst] |= before[move.src]
    missing = min(set(ranks) - notified_by[rank], default=None)
    if missing is None:
        return None
    # Follow the signals back, from those to this rank: its notifications came from these senders.
    senders = {rank}
    last: Cause | None = None
    for number, moves in reversed([*enumerate(rounds, 1)]):
        arriving = [move for move in moves if move.dst in senders]
        for move in arriving:
            if missing in notified_by[move.src]:
                text = (
                    f"rank {move.src} sends before rank {missing} has notified it, and no later move passes that on "
                    f"to rank {rank}"
                )
                return Cause(text, number, move)
            if last is None and move.dst == rank:
                last = Cause(
                    f"is the last to notify rank {rank}, and no move passes on that of rank {missing}", number, move
                )
        senders |= {move.src for move in arriving}
    return last or Cause(f"no move notifies rank {rank}")


def _name(contribution: Contribution) -> str:
    return f"{contribution[0]}.{slot_name(contribution[1])}"


def _added_twice(run: _Run, repeated: set[Contribution]) -> Cause | None:
    """Return the first move that adds a contribution to a value which has it already."""
    found = []
    for place, writes in run.writes.items():
        for write in writes:
            held = Value(write.before)
            for move, value in zip(write.moves, write.read, strict=True):
                again = {c for c in repeated & set(value) if value[c] == 1 and held[c] == 1}
                if again:
                    text = f"adds {_name(min(again))} to {slot_name(place[1])} on rank {place[0]}, which has it already"
                    found.append(Cause(text, write.number, move))
                held += value
    return min(found, key=lambda cause: cause.round, default=None)


def _came_too_late(run: _Run, place: Place, missing: Contribution, number: int) -> Cause:
    """Return the move that reads a slot before a contribution is in it, or say that no move brings it."""
    for write in run.until(place, number):
        for move in write.moves:
            source = (move.src, move.read)
            if missing in run.state.get(source, ()):
                text = (
                    f"reads {slot_name(move.read)} on rank {move.src} before {_name(missing)} is in it, and no later "
                    f"move brings it to rank {place[0]}"
                )
                return Cause(text, write.number, move)
        source = (write.moves[0].src, write.moves[0].read)
        if source != place and missing not in write.before:
            return _came_too_late(run, source, missing, write.number)
    return Cause(f"no move brings {_name(missing)} to {slot_name(place[1])} on rank {place[0]}")


def _brought(run: _Run, place: Place, extra: Contribution) -> Cause | None:
    """Return the last move that brings a contribution which does not belong in a slot."""
    for write in reversed(run.writes.get(place, [])):
        for move, value in zip(write.moves, write.read, strict=True):
            if extra in value:
                text = f"brings {_name(extra)} to {slot_name(place[1])} on rank {place[0]}, where it does not belong"
                return Cause(text, write.number, move)
    return Cause(f"no move replaces {_name(extra)} in {slot_name(place[1])} on rank {place[0]}")
