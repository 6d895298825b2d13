"""Schedules as values: laziness, text, and the functions that make new ones from old ones.

The algorithms themselves (ring, tree and the others) are proved in `test_algorithms`.
"""

from __future__ import annotations

from operator import attrgetter

import pytest

from torchdist_ref.errors import ArgumentError
from torchdist_ref.schedules import (
    Move,
    Round,
    Rounds,
    Schedule,
    algorithms,
    alongside,
    build,
    carry,
    entry,
    on_ranks,
    only,
    operations,
    renamed,
    reversed_,
    rooted,
    segmented,
    then,
    verify,
)
from torchdist_ref.schedules.cost import cost
from torchdist_ref.schedules.schedule import single

ALL = [(op, name) for op in operations() for name in algorithms(op)]
DATA = ("data", 0)


def test_rounds_are_made_on_demand() -> None:
    asked = []
    rounds = Rounds(1_000_000, lambda step: asked.append(step) or (carry(step % 2, (step + 1) % 2, DATA),))
    assert len(rounds) == 1_000_000 and asked == []
    assert rounds[-1] == (carry(1, 0, DATA),) and rounds[2:4] == (rounds[0], rounds[1])
    assert asked == [999_999, 2, 3, 0, 1]
    with pytest.raises(IndexError):
        rounds[1_000_000]


def test_schedules_are_equal_if_their_rounds_are() -> None:
    lazy = build("all_reduce", "ring", 3)
    eager = Schedule(lazy.name, 3, tuple(lazy.rounds), lazy.chunks)
    assert lazy == eager and hash(lazy) == hash(eager)
    assert lazy != Schedule(lazy.name, 3, tuple(lazy.rounds)[:-1], lazy.chunks)
    assert build("all_reduce", "ring", 3) is lazy


def test_text_has_one_line_per_arrow() -> None:
    assert str(build("reduce_scatter", "ring", 2)).splitlines() == [
        "ring reduce_scatter: 2 ranks, 2 chunks, 1 rounds",
        "round 1: 1.in[0] -> 0.out[0]",
        "round 1: 0.in[0] -> 0.out[0] +",
        "round 1: 0.in[1] -> 1.out[0]",
        "round 1: 1.in[1] -> 1.out[0] +",
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_one_shot_all_reduce_computes_the_same_expression_on_every_rank(world: int) -> None:
    for rank in range(world):
        moves = [m for moves in build("all_reduce", "direct", world).rounds for m in moves if m.dst == rank]
        assert sorted(m.src for m in moves) == [r for r in range(world) if r != rank]
        assert all(m.reduce for m in moves), "so all ranks combine the same values, in the order of the ranks"
    verify(build("all_reduce", "direct", world), "all_reduce", tree=True)


def test_reversed_reduce_scatter_is_an_all_gather() -> None:
    half = build("all_reduce", "ring", 5).rounds[:4]
    turned = reversed_(Schedule("x", 5, half, 5))
    assert turned.rounds[0] == tuple(Move(m.dst, m.src, m.write, m.read) for m in half[3])
    verify(then(Schedule("x", 5, half, 5), turned), "all_reduce")


def test_reversed_broadcast_is_a_reduce() -> None:
    for name in algorithms("broadcast"):
        turned = reversed_(build("broadcast", name, 6, root=4), reduce=True)
        if name != "scatter_all_gather":
            verify(turned, "reduce", root=4)


def test_segments_run_one_after_the_other() -> None:
    whole = build("broadcast", "tree", 4)
    pieces = segmented(whole, 3)
    assert (len(pieces.rounds), pieces.chunks) == (len(whole.rounds) + 2, 3)
    assert [m.read[1] for m in pieces.rounds[2]] == [1, 1, 2]
    verify(pieces, "broadcast")
    at_once = segmented(build("all_reduce", "ring", 4), 2, stagger=0)
    assert (len(at_once.rounds), at_once.chunks) == (6, 8)
    verify(at_once, "all_reduce")
    with pytest.raises(ArgumentError, match="'pieces' must be at least 1, got 0"):
        segmented(whole, 0)


def test_parts_on_some_ranks_run_side_by_side() -> None:
    pairs = [on_ranks(build("all_reduce", "direct", 2), ranks, 4) for ranks in ((0, 3), (2, 1))]
    both = alongside(*pairs)
    assert both.world == 4 and sorted((m.src, m.dst) for m in both.rounds[0]) == [(0, 3), (1, 2), (2, 1), (3, 0)]
    across = alongside(*(on_ranks(build("all_reduce", "direct", 2), ranks, 4) for ranks in ((0, 2), (1, 3))))
    verify(then(both, across), "all_reduce")


def test_other_roots_buffers_and_selections() -> None:
    verify(rooted(build("broadcast", "tree", 5), 3), "broadcast", root=3)
    flipped = renamed(build("send", "direct", 2), {"in": "out", "out": "tmp"})
    assert flipped.rounds[0] == (Move(0, 1, ("out", 0), ("tmp", 0)),)
    assert only(build("broadcast", "direct", 4), lambda m: m.dst == 2).rounds[0] == (carry(0, 2, DATA),)


def test_errors_of_composition() -> None:
    with pytest.raises(ArgumentError, match="of 4 ranks and 4 chunks, got '5 and 5'"):
        then(build("all_reduce", "ring", 4), build("all_reduce", "ring", 5))
    with pytest.raises(ArgumentError, match="'world' must be at least 1, got 0"):
        Schedule("none", 0, ())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_reduc", "ring", 4), "'op' must be one of all_reduce, reduce"),
        (("all_reduce", "rings", 4), "all_reduce: argument 'algorithm' must be one of direct, two_shot"),
        (("all_reduce", "ring", 0), "'world' must be at least 1, got 0"),
        (("reduce", "tree", 4, 4), "'root' must be a rank from 0 to 3, got 4"),
    ],
)
def test_errors_of_build(arguments: tuple, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        build(*arguments)


def test_build_needs_a_host_for_each_rank() -> None:
    with pytest.raises(ArgumentError, match="one host for each of 4 ranks"):
        build("all_reduce", "hierarchical", 4, hosts=(0, 1))


def test_every_entry_of_the_catalogue_is_complete() -> None:
    assert len(ALL) == len(set(ALL))
    for op, name in ALL:
        row = entry(op, name)
        assert all((row.summary, row.when, row.cost, row.source)), row
        assert build(op, name, 5).name == f"{name} {op}"


@pytest.mark.parametrize(("op", "name"), ALL)
def test_patterns_of_rounds_hold(op: str, name: str) -> None:
    """A pattern shows one side of the first ranks, and ranks a period apart have messages of the same sizes."""
    for world in range(2, 10):
        hosts = tuple(rank // (2 if world % 2 == 0 else 3) for rank in range(world))
        rounds = build(op, name, world, hosts=hosts).rounds
        for step in range(len(rounds)) if isinstance(rounds, Rounds) else ():
            pattern, moves = rounds.pattern(step), rounds[step]
            for ranks in range(pattern.period, world + 1, pattern.period) if pattern else ():
                arriving, leaving = (
                    tuple(m for m in moves if end(m) < ranks) for end in (attrgetter("dst"), attrgetter("src"))
                )
                assert single(pattern.runs(ranks)) in (arriving, leaving)
                assert all(profile(moves, r) == profile(moves, r + pattern.period) for r in range(world - ranks))


def profile(moves: Round, rank: int) -> list[tuple[bool, bool, bool]]:
    return sorted((m.dst == rank, m.src == m.dst, m.reduce) for m in moves if rank in (m.src, m.dst))


def test_counting_by_few_ranks_equals_counting_all() -> None:
    for op, name in ALL:
        for world, hosts in [(1, None), (2, None), (5, None), (8, None), (8, (0, 0, 1, 1, 2, 2, 3, 3))]:
            lazy = build(op, name, world, hosts=hosts)
            assert cost(lazy) == cost(Schedule(lazy.name, world, tuple(lazy.rounds), lazy.chunks)), (op, name, world)
