"""Mutants of every algorithm: `verify` rejects those that are wrong, and no others.

The oracle is an executor with numbers, without symbols, contributions or contracts: it runs each
mutant on data that is linear neither in rank nor in position, for three seeds. Whole numbers show whether the
sums are right; floating-point numbers of very different sizes show whether all ranks end with the same bits.
A barrier has no data: there the oracle lets each rank in turn arrive last, and no rank may leave before.

Where verify rejects a mutant that is harmless to the oracle, one of the named rules of rounds is the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import sin

import pytest

from tests.covering import covering
from torchdist_ref.schedules import Move, Round, Schedule, Slot, algorithms, build, operations, violations

ALL = [(op, name) for op in operations() for name in algorithms(op)]
SEEDS = (1, 2, 3)
FLOATS = 8  # per seed: two orders of summation often round alike, so that one number would not tell
NAMED_RULES = {"writable", "unwritten", "clobber", "repeat"}
OTHER = {"data": "tmp", "in": "out", "out": "in", "tmp": "data"}
Value = tuple[tuple[int, ...], tuple[float, ...]]
State = dict[tuple[int, Slot], Value]


@cache
def fill(rank: int, slot: Slot) -> Value:
    """Return the value of a slot at the start (or junk), for each seed: whole numbers and floats."""
    at = slot[1] + 31 * ("data", "in", "out", "tmp").index(slot[0])
    whole = tuple(((rank + 2) ** 3 * (at + 5) ** 2 + 7 * rank * rank + seed * at**3) % 1_000_003 for seed in SEEDS)
    waves = (sin(1.7 * rank * rank + 0.9 * (at + 1) * seed * (k + 1)) for seed in SEEDS for k in range(FLOATS))
    floats = tuple(10.0 ** ((3 * rank + k + at) % 3) * (2 + wave) for k, wave in enumerate(waves))
    return whole, floats


def plus(a: Value, b: Value) -> Value:
    return tuple(map(int.__add__, a[0], b[0])), tuple(map(float.__add__, a[1], b[1]))


def total(values: list[Value]) -> Value:
    """Add values along the tree for their number, cut in two at the top: another definition than the library's."""
    if len(values) == 1:
        return values[0]
    core = 1 << (len(values).bit_length() - 1)
    left = core // 2 + min(len(values) - core, core // 2)
    return plus(total(values[:left]), total(values[left:]))


def execute(schedule: Schedule) -> State:
    """Run the moves by their definition: all reads, then all writes. Unwritten slots have junk."""
    state: State = {}

    def held(rank: int, slot: Slot) -> Value:
        return state[rank, slot] if (rank, slot) in state else fill(rank, slot)

    for moves in schedule.rounds:
        arrived: dict[tuple[int, Slot], list[tuple[int, Value]]] = {}
        for move in moves:
            own = [(move.dst, held(move.dst, move.write))] if move.reduce else []
            before = arrived.get((move.dst, move.write), own) if move.reduce else []
            arrived[move.dst, move.write] = [*before, (move.src, held(move.src, move.read))]
        for place, values in arrived.items():
            state[place] = total([value for _, value in sorted(values, key=lambda each: each[0])])
    return state


def expected(op: str, world: int, root: int, chunks: int) -> dict[tuple[int, Slot], tuple[int, ...]]:
    """Return the result of each operation, computed independently, in numbers."""
    ranks = range(world)

    def total(slot: Slot) -> tuple[int, ...]:
        return tuple(map(sum, zip(*(fill(r, slot)[0] for r in ranks), strict=True)))

    data = [("data", c) for c in range(chunks)]
    return {
        "all_reduce": lambda: {(r, s): total(s) for r in ranks for s in data},
        "reduce": lambda: {(root, s): total(s) for s in data},
        "broadcast": lambda: {(r, s): fill(root, s)[0] for r in ranks for s in data},
        "all_gather": lambda: {(r, ("out", s)): fill(s, ("in", 0))[0] for r in ranks for s in ranks},
        "gather": lambda: {(root, ("out", s)): fill(s, ("in", 0))[0] for s in ranks},
        "scatter": lambda: {(r, ("out", 0)): fill(root, ("in", r))[0] for r in ranks},
        "reduce_scatter": lambda: {(r, ("out", 0)): total(("in", r)) for r in ranks},
        "all_to_all": lambda: {(d, ("out", s)): fill(s, ("in", d))[0] for s in ranks for d in ranks},
        "send": lambda: {((root + 1) % world, ("out", 0)): fill(root, ("in", 0))[0]},
    }[op]()


def harmful(schedule: Schedule, op: str, root: int) -> bool:
    """Whether the numbers are wrong for any seed, or ranks end with different bits."""
    if op == "barrier":
        return leaves_early(schedule)
    state = execute(schedule)
    for (rank, slot), whole in expected(op, schedule.world, root, schedule.chunks).items():
        got = state.get((rank, slot), fill(rank, slot))
        if got[0] != whole:
            return True
        if op == "all_reduce" and got[1] != state.get((0, slot), fill(0, slot))[1]:
            return True
    return any(place[1][0] == "in" and state[place] != fill(*place) for place in state)


def leaves_early(schedule: Schedule) -> bool:
    """Return whether some rank can leave the barrier before the last one has arrived, for any last rank."""
    for last in range(schedule.world):
        clock = [1.0 if rank == last else 0.0 for rank in range(schedule.world)]
        for moves in schedule.rounds:
            before = list(clock)
            for move in moves:
                clock[move.dst] = max(clock[move.dst], before[move.src])
        if min(clock) < 1.0:
            return True
    return False


def changed_moves(move: Move, world: int) -> Iterator[tuple[str, tuple[Move, ...]]]:
    """Every single thing that can be wrong with one move, with a word for it."""
    (read, i), (write, j) = move.read, move.write
    yield "dropped", ()
    yield "doubled", (move, move)
    yield "reduce flipped", (move._replace(reduce=not move.reduce),)
    yield "turned round", (move._replace(src=move.dst, dst=move.src),)
    for shift in range(1, world):
        yield "from another rank", (move._replace(src=(move.src + shift) % world),)
        yield "to another rank", (move._replace(dst=(move.dst + shift) % world),)
    for shift in (-1, 1):
        yield "other slot read", (move._replace(read=(read, i + shift)),)
        yield "other slot written", (move._replace(write=(write, j + shift)),)
    yield "other buffer read", (move._replace(read=(OTHER[read], i)),)
    yield "other buffer written", (move._replace(write=(OTHER[write], j)),)


def mutated_rounds(rounds: tuple[Round, ...], world: int) -> Iterator[tuple[str, tuple[Round, ...]]]:
    for step, moves in enumerate(rounds):
        before, after = rounds[:step], rounds[step + 1 :]
        yield "round dropped", (*before, *after)
        yield "round doubled", (*before, moves, moves, *after)
        if after:
            yield "rounds swapped", (*before, after[0], moves, *after[1:])
            yield "rounds merged", (*before, moves + after[0], *after[1:])
        for k, move in enumerate(moves):
            rest = (moves[:k], moves[k + 1 :])
            for word, instead in changed_moves(move, world):
                yield word, (*before, rest[0] + instead + rest[1], *after)
            if k:
                yield "moves swapped", (*before, (*moves[: k - 1], move, moves[k - 1], *rest[1]), *after)
            if after:
                yield "moved later", (*before, rest[0] + rest[1], (move, *after[0]), *after[1:])
            if before:
                yield "moved earlier", (*before[:-1], (*before[-1], move), rest[0] + rest[1], *after)


def oracle(op: str, name: str, world: int, root: int = 0) -> Counter[str]:
    """Try all mutants; fail on the first on which oracle and verify disagree; count the verdicts."""
    hosts = tuple(rank % 3 // 2 for rank in range(world))
    good = build(op, name, world, root, hosts=hosts)
    verdicts: Counter[str] = Counter()
    assert not harmful(good, op, root)
    for word, rounds in mutated_rounds(tuple(good.rounds), world):
        mutant = replace(good, rounds=rounds)
        wrong, rules = harmful(mutant, op, root), {v.rule for v in violations(mutant, op, root)}
        assert rules or not wrong, f"verify lets this pass ({word}):\n{mutant}"
        named = rules & NAMED_RULES
        assert wrong or named or not rules, f"verify rejects what is harmless ({word}, {rules}):\n{mutant}"
        verdicts["harmful" if wrong else f"harmless, but {sorted(named)}" if rules else "harmless"] += 1
    return verdicts


@pytest.mark.parametrize(("op", "name", "world"), covering(ALL, (3, 4)))
def test_every_harmful_mutant_is_rejected(op: str, name: str, world: int) -> None:
    assert oracle(op, name, world, root=1)["harmful"] >= 3


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 5, 6])
@pytest.mark.parametrize(("op", "name"), ALL)
def test_every_harmful_mutant_of_more_ranks_is_rejected(op: str, name: str, world: int) -> None:
    assert oracle(op, name, world, root=world - 1)["harmful"] >= 1


def test_harmless_mutants_pass() -> None:
    """So that verify does not win by refusing everything."""
    assert oracle("broadcast", "tree", 4)["harmless"] >= 3
    assert oracle("all_gather", "direct", 4)["harmless"] >= 3


def test_the_oracle_sees_other_orders_of_summation() -> None:
    """Without this, nothing would be known about the rule that all ranks end with the same bits."""
    data, scratch = ("data", 0), ("tmp", 0)
    pairs = (Move(1, 0, data, data, True), Move(0, 1, data, data, True), Move(0, 2, data, data, True))
    rest = (Move(2, 0, data, scratch), Move(2, 1, data, scratch), Move(1, 2, data, scratch))
    after = tuple(Move(rank, rank, scratch, data, True) for rank in range(3))
    swapped = Schedule("(0 1) 2 on two ranks, (0 2) 1 on one", 3, ((*pairs, *rest), after))
    assert harmful(swapped, "all_reduce", 0) and {v.rule for v in violations(swapped, "all_reduce")} == {"replicas"}
