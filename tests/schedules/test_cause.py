"""Causes of wrong results: the move that a mutant changed is the one that the cause of its wrong result names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchdist_ref.schedules import Move, Schedule, build, carry, violations
from torchdist_ref.schedules.cause import cause_of

DATA, SIGNAL = ("data", 0), ("tmp", 0)


def causes(schedule: Schedule, op: str) -> set[tuple[int, Move | None]]:
    """Return round and move of the cause of each wrong result."""
    found = [violation for violation in violations(schedule, op) if violation.rule == "result"]
    assert found
    all_causes = [cause_of(schedule, op, violation.rank, violation.slot) for violation in found]
    return {(cause.round, cause.move) for cause in all_causes if cause is not None}


def changed(schedule: Schedule, number: int, move: Move, *instead: Move) -> Schedule:
    """Return a schedule with other moves in the place of one."""
    moves = schedule.rounds[number - 1]
    at = moves.index(move)
    rounds = list(schedule.rounds)
    rounds[number - 1] = (*moves[:at], *instead, *moves[at + 1 :])
    return replace(schedule, rounds=tuple(rounds))


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_a_reduction_that_became_a_copy_is_named(world: int) -> None:
    ring = build("all_reduce", "ring", world)
    for number in range(1, world):
        for move in ring.rounds[number - 1]:
            wrong = move._replace(reduce=False)
            assert causes(changed(ring, number, move, wrong), "all_reduce") == {(number, wrong)}


@pytest.mark.parametrize("world", [3, 4, 7])
def test_a_value_that_is_added_twice_is_named(world: int) -> None:
    ring = build("all_reduce", "ring", world)
    again = ring.rounds[0][0]
    twice = replace(ring, rounds=(*ring.rounds[:1], (again,), *ring.rounds[1:]))
    assert causes(twice, "all_reduce") == {(2, again)}


def test_a_read_that_comes_too_early_is_named() -> None:
    early = Schedule("early", 3, ((carry(1, 0, DATA, True),), (carry(2, 1, DATA, True),)))
    cause = cause_of(early, "reduce", 0, DATA)
    assert cause is not None and (cause.round, cause.move) == (1, carry(1, 0, DATA, True))
    assert cause.text == "reads data[0] on rank 1 before 2.data[0] is in it, and no later move brings it to rank 0"


def test_a_missing_move_is_said_to_be_missing() -> None:
    """Once 'at the end' was all that was known of it."""
    idle = Schedule("idle", 2, ())
    assert str(cause_of(idle, "all_reduce", 0, DATA)) == "no move brings 1.data[0] to data[0] on rank 0"


def test_a_signal_that_leaves_too_early_is_named() -> None:
    early = carry(0, 1, SIGNAL)
    barrier = Schedule(
        "early", 3, ((early,), (carry(2, 0, SIGNAL),), (carry(0, 2, SIGNAL), carry(1, 0, SIGNAL))), chunks=0
    )
    cause = cause_of(barrier, "barrier", 1, SIGNAL)
    assert cause is not None and (cause.round, cause.move) == (1, early)
    assert cause.text == "rank 0 sends before rank 2 has notified it, and no later move passes that on to rank 1"


@pytest.mark.parametrize("name", ["direct", "dissemination", "tree"])
@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_each_rank_that_misses_a_signal_has_a_cause_with_round_and_move(name: str, world: int) -> None:
    right = build("barrier", name, world)
    assert all(cause_of(right, "barrier", rank, SIGNAL) is None for rank in range(world))
    for number, moves in enumerate(right.rounds, 1):
        for move in moves:
            wrong = changed(right, number, move)
            for violation in violations(wrong, "barrier"):
                cause = cause_of(wrong, "barrier", violation.rank, violation.slot)
                into = any(each.dst == violation.rank for each_round in wrong.rounds for each in each_round)
                assert cause is not None and (cause.move is not None) == into, (number, move)
                if cause.move is None:
                    assert str(cause) == f"no move notifies rank {violation.rank}"
                else:
                    assert cause.move in wrong.rounds[cause.round - 1]


def test_a_block_in_the_wrong_place_is_named() -> None:
    blocks = build("all_to_all", "direct", 3)
    number, move = next((n, m) for n, moves in enumerate(blocks.rounds, 1) for m in moves if m.src != m.dst)
    wrong = move._replace(read=("in", (move.read[1] + 1) % 3))
    cause = cause_of(changed(blocks, number, move, wrong), "all_to_all", move.dst, move.write)
    assert cause is not None and (cause.round, cause.move) == (number, wrong)


@pytest.mark.parametrize("name", ["ring", "tree", "recursive_doubling", "two_shot"])
def test_right_results_have_no_fault(name: str) -> None:
    right = build("all_reduce", name, 6)
    assert all(
        cause_of(right, "all_reduce", rank, ("data", c)) is None for rank in range(6) for c in range(right.chunks)
    )
