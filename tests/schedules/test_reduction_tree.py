"""One expression for each reduced element: every schedule that `choose` picks combines the ranks along one tree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from torchdist_ref.errors import ArgumentError
from torchdist_ref.schedules import Move, Schedule, algorithms, build, carry, choose, entry, verify, violations
from torchdist_ref.schedules.catalogue_rows import OTHER_TREES
from torchdist_ref.schedules.measured import BETWEEN_HOSTS, BETWEEN_TWO, UNROUNDED, WITHIN_A_HOST
from torchdist_ref.schedules.reduction_tree import are_subtrees, combined, core_ranks, fold

OPS = ("all_reduce", "reduce", "reduce_scatter")
LIMITS = {
    limit
    for table in (BETWEEN_HOSTS, BETWEEN_TWO, UNROUNDED, WITHIN_A_HOST)
    for op in OPS
    for limit, _ in table.get(op, ())
}
SIZES = sorted({0, *LIMITS, *(limit + 1 for limit in LIMITS)} - {float("inf")})
Case = tuple[str, str, int, int, tuple[int, ...] | None]


def placements(world: int) -> list[tuple[int, ...] | None]:
    """Where ranks may be: unknown, each alone, hosts of equal sizes, of unequal ones, and interleaved."""
    ranks = range(world)
    equal = (tuple(rank // each for rank in ranks) for each in (2, 3, 4, 8))
    return [None, tuple(ranks), *equal, tuple(rank * rank % 5 for rank in ranks), tuple(rank % 2 for rank in ranks)]


def chosen(worlds: Iterable[int], roots: int) -> Iterator[Case]:
    """Yield each schedule that `choose` picks, once: operation, algorithm, world, root, hosts."""
    found: dict[Case, None] = {}
    for world in worlds:
        some_roots = sorted({world - 1, world // 2, 1 % world, 0}, reverse=True)[:roots]
        for op in OPS:
            for hosts in placements(world):
                names = {choose(op, world, int(size), hosts=hosts, rounded=r) for size in SIZES for r in (False, True)}
                for name in sorted(names):
                    where = hosts if name == "hierarchical" else None
                    for root in some_roots if op == "reduce" else [0]:
                        found[op, name, world, root, where] = None
    yield from found


def check(worlds: Iterable[int], roots: int) -> int:
    count = 0
    for op, name, world, root, hosts in chosen(worlds, roots):
        verify(build(op, name, world, root, hosts=hosts), op, root, tree=True)
        count += 1
    return count


def test_every_schedule_that_is_chosen_has_the_tree() -> None:
    assert check([*range(2, 14), 16, 24], roots=2) > 150


@pytest.mark.long
@pytest.mark.parametrize("world", [*range(2, 67), 96])
def test_every_schedule_that_is_chosen_has_the_tree_for_each_number_of_ranks(world: int) -> None:
    assert check([world], roots=4) >= 10


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in OPS for name in algorithms(op)])
def test_algorithms_with_another_tree_are_listed_and_say_so(op: str, name: str) -> None:
    broken = {world for world in range(2, 10) if list(violations(build(op, name, world), op, tree=True))}
    assert bool(broken) == ((op, name) in OTHER_TREES)
    if broken:
        assert min(broken) > 2, "two operands commute"
        assert all(v.rule == "tree" for v in violations(build(op, name, 4), op, tree=True))
        described = __import__(entry(op, name).function.__module__, fromlist=["_"]).__doc__
        assert "reduction_tree" in described and "only where it is asked" in " ".join(described.split())


def test_the_rule_names_rank_and_slot() -> None:
    in_order = tuple(carry(src, 0, ("data", 0), True) for src in (1, 2, 3))
    chain = Schedule("chain", 4, tuple((move,) for move in in_order))
    verify(chain, "reduce")
    verify(Schedule("at once", 4, (in_order,)), "reduce", tree=True)
    with pytest.raises(
        ArgumentError, match=r"tree: rank 0, data\[0\], at the end: expected the order of the reduction"
    ):
        verify(chain, "reduce", tree=True)


def test_values_that_arrive_together_are_combined_by_rank_in_whatever_order_they_are_listed() -> None:
    slot = ("data", 0)
    moves = [carry(src, 2, slot, True) for src in (4, 0, 3, 1)]
    verify(Schedule("listed oddly", 5, (tuple(moves),)), "reduce", 2, tree=True)
    copied = (Move(3, 2, slot, ("tmp", 0)), *(Move(src, 2, slot, ("tmp", 0), True) for src in (4, 2, 0, 1)))
    verify(Schedule("in scratch", 5, (copied, (Move(2, 2, ("tmp", 0), slot),))), "reduce", 2, tree=True)


def test_hosts_of_two_to_the_k_ranks_are_subtrees() -> None:
    for each, hosts in ((1, 5), (2, 3), (4, 3), (8, 7), (2, 6)):
        assert are_subtrees(tuple(rank // each for rank in range(each * hosts)))
    assert are_subtrees((0, 0, 1)) and are_subtrees((4, 4, 2, 2))
    for unlike in ((0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1, 1, 1), (0, 0, 0, 1)):
        assert not are_subtrees(unlike)
        assert choose("all_reduce", len(unlike), 1 << 20, hosts=unlike) != "hierarchical"
        assert choose("broadcast", len(unlike), 1 << 20, hosts=unlike) == "hierarchical"


def test_a_tree_of_parts_is_the_tree_of_the_whole() -> None:
    def shown(values: Iterable[Any]) -> Any:
        return combined(values, lambda a, b: (a, b))

    for ranks in range(1, 20):
        for each in (1, 2, 4, 8):
            parts = (shown(range(rank * each, (rank + 1) * each)) for rank in range(ranks))
            assert shown(parts) == shown(range(ranks * each))


@pytest.mark.parametrize("world", range(1, 14))
def test_a_root_keeps_the_value_of_its_pair(world: int) -> None:
    for root in range(world):
        left = core_ranks(world, root)
        folded = {move.src for moves in fold(world, 1, root).rounds for move in moves}
        assert root in left and len(left) & len(left) - 1 == 0
        assert sorted([*left, *folded]) == list(range(world))


def test_sums_that_would_be_rounded_travel_whole() -> None:
    for op in OPS:
        for world in (3, 8):
            for size in SIZES:
                for hosts in placements(world):
                    name = choose(op, world, int(size), hosts=hosts, rounded=True)
                    rounds = build(op, name, world, hosts=hosts).rounds
                    assert sum(any(move.reduce for move in moves) for moves in rounds) == 1, (op, name)
