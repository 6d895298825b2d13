"""Moves of single ranks, which plans are made from: exactly the slice of the schedule for all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pytest

from torchdist_ref.schedules import Move, Schedule, build, catalogue
from torchdist_ref.schedules.schedule import Round, Run, single

WORLDS = range(1, 21)
CASES = [(op, algorithm) for op in catalogue.operations() for algorithm in catalogue.algorithms(op)]


def hosts_of(algorithm: str, world: int) -> list[tuple[int, ...] | None]:
    """Return hosts of equal and of different sizes, in order and mixed; none for algorithms that ignore them."""
    if algorithm != "hierarchical":
        return [None]
    return [(0,) * world, *(tuple(r // size for r in range(world)) for size in (1, 2, 4)), mixed(world)]


def mixed(world: int) -> tuple[int, ...]:
    return tuple(rank * rank % 3 for rank in range(world))


def schedules(op: str, algorithm: str, world: int) -> Iterator[Schedule]:
    roots = sorted({0, world // 2, world - 1}) if "root" in catalogue.entry(op, algorithm).takes else [0]
    for hosts in hosts_of(algorithm, world):
        for root in roots:
            yield build(op, algorithm, world, root, hosts=hosts)


def most(side: Sequence[Round], ranks: Iterable[int]) -> int:
    """Return the largest number of moves that one of some ranks has."""
    return max((len(side[rank]) for rank in ranks), default=0)


@pytest.mark.parametrize(("op", "algorithm"), CASES)
def test_own_moves_are_the_slice_of_the_whole_schedule(op: str, algorithm: str) -> None:
    for world in WORLDS:
        everyone = range(world)
        for schedule in schedules(op, algorithm, world):
            own = schedule.own
            for step, moves in enumerate(schedule.rounds):
                where = f"{schedule.name} of {world}, round {step + 1}"
                wanted: tuple[list[list[Move]], ...] = tuple([[] for _ in everyone] for _ in range(2))
                for move in moves:
                    wanted[0][move.dst].append(move)
                    wanted[1][move.src].append(move)
                found = [[single(side(step, rank)) for rank in everyone] for side in (own.into, own.out_of)]
                assert [[list(each) for each in side] for side in found] == list(wanted), where
                arriving, leaving = found
                if own.reads is not None:
                    for rank in everyone:
                        reads = [move.read for move in leaving[rank]]
                        assert list(dict.fromkeys(own.reads(step, rank))) == list(dict.fromkeys(reads)), where
                        assert all(move.dst != rank for move in leaving[rank]), where
                some = [*own.alike(step)]
                assert [most(side, some) for side in found] == [most(side, everyone) for side in found], where
                some_reduce = any(move.reduce for rank in some for move in arriving[rank])
                assert some_reduce == any(move.reduce for move in moves), where


def test_the_moves_of_a_schedule_of_a_program_are_looked_up_by_rank() -> None:
    moves = (Move(0, 2, ("data", 0), ("data", 0)), Move(0, 1, ("data", 0), ("data", 0)))
    own = Schedule("star", 3, (moves,)).own
    assert [*own.out_of(0, 0)] == [*moves] and [*own.into(0, 1)] == [moves[1]] and not own.out_of(0, 2)


@pytest.mark.parametrize(
    ("op", "algorithm", "most"),
    [
        ("all_reduce", "direct", 2 * 511),
        ("all_reduce", "two_shot", 4 * 511),
        ("all_reduce", "recursive_doubling", 2 * 9),
        ("all_gather", "ring", 2 * 511 + 2),
        ("barrier", "dissemination", 2 * 9),
        ("broadcast", "tree", 10),
    ],
)
def test_the_moves_of_a_rank_grow_with_the_ranks_and_not_with_their_square(
    op: str, algorithm: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count the moves that are made for the plan of one of 512 ranks."""
    made = 0
    make = Move.__new__

    def counted(cls: type[Move], *args: object, **named: object) -> Move:
        nonlocal made
        made += 1
        return make(cls, *args, **named)  # type: ignore[arg-type]

    schedule = build(op, algorithm, 512)
    monkeypatch.setattr(Move, "__new__", counted)
    found: list[Move | Run] = []
    for step in range(len(schedule.rounds)):
        found += [*schedule.own.into(step, 7), *schedule.own.out_of(step, 7)]
    monkeypatch.undo()
    assert 0 < len(found) <= most
    # A ring looks at the moves of two ranks to find those that leave.
    assert 0 < made <= 2 * most
