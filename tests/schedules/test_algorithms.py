"""Proof of every algorithm for every world size; errors name rule, rank, slot, expected and got."""

from __future__ import annotations

import pytest

from torchdist_ref.errors import ArgumentError
from torchdist_ref.schedules import (
    Move,
    Schedule,
    algorithms,
    build,
    carry,
    direct,
    entry,
    operations,
    verify,
    violations,
)
from torchdist_ref.schedules.catalogue import make
from torchdist_ref.schedules.catalogue_rows import _rows

ALL = [(op, name) for op in operations() for name in algorithms(op)]
ROOTED = ("reduce", "broadcast", "gather", "scatter", "send")
DATA, SIGNAL = ("data", 0), ("tmp", 0)


def placements(name: str, world: int) -> list[tuple[int, ...] | None]:
    """Where ranks may be: for hierarchical algorithms one host, full hosts, and hosts of uneven sizes, interleaved."""
    ranks = range(world)
    return [None, tuple(r // 4 for r in ranks), tuple(r * r % 5 for r in ranks)] if name == "hierarchical" else [None]


def sweep(op: str, name: str, worlds: range) -> int:
    """Prove one algorithm for many worlds, at several roots; give the number of schedules proved."""
    proved = 0
    for world in worlds:
        for root in sorted({0, 1 % world, world // 2, world - 1}) if op in ROOTED else [0]:
            for hosts in placements(name, world):
                schedule = make(entry(op, name), world, root, hosts or (0,) * world)
                assert schedule.world == world
                verify(schedule, op, root)
                proved += 1
    return proved


@pytest.mark.parametrize(("op", "name"), ALL)
def test_every_algorithm_is_right_for_1_to_17_ranks(op: str, name: str) -> None:
    assert sweep(op, name, range(1, 18)) >= 17


@pytest.mark.long
@pytest.mark.parametrize(("op", "name"), ALL)
def test_every_algorithm_is_right_for_1_to_64_ranks(op: str, name: str) -> None:
    assert sweep(op, name, range(1, 65)) >= 64


def test_every_root_of_a_small_world() -> None:
    for op, name in ALL:
        for root in range(7) if op in ROOTED else ():
            verify(build(op, name, 7, root, hosts=(0, 1, 0, 2, 1, 0, 2)), op, root)


def test_very_many_hosts_exchange_whole_tensors() -> None:
    hosts = tuple(rank % 70 for rank in range(100))
    schedule = build("all_reduce", "hierarchical", 100, hosts=hosts)
    assert schedule.chunks == 1
    verify(schedule, "all_reduce")


def refused(op: str, *rounds: tuple[Move, ...], world: int = 2, root: int = 0) -> str:
    with pytest.raises(ArgumentError) as caught:
        verify(Schedule("draft", world, rounds), op, root)
    return str(caught.value)


def test_contribution_counted_twice_is_an_error() -> None:
    """The schedule that a check with sets lets through: 0 to 1, 1 to 0, 0 to 1."""
    there, back = carry(0, 1, DATA, True), carry(1, 0, DATA, True)
    text = refused("all_reduce", (there,), (back,), (there,))
    assert text.startswith("draft is not an all_reduce of 2 ranks:")
    assert (
        "result: rank 0, data[0], at the end: expected 0.data[0] + 1.data[0], got 0.data[0] more than once + 1.data[0]"
    ) in text


def test_another_order_of_reductions_is_an_error() -> None:
    """Every rank adds up all contributions, but rank 2 in another order than ranks 0 and 1."""
    pairs = (carry(1, 0, DATA, True), carry(0, 1, DATA, True), carry(0, 2, DATA, True))
    rest = (Move(2, 0, DATA, SIGNAL), Move(2, 1, DATA, SIGNAL), Move(1, 2, DATA, SIGNAL))
    after = tuple(Move(rank, rank, SIGNAL, DATA, True) for rank in range(3))
    text = refused("all_reduce", (*pairs, *rest), after, world=3)
    assert "replicas: rank 2, data[0], at the end: expected the order of the ranks before, got another order" in text
    assert "rank 0" not in text and "rank 1," not in text


def test_the_order_of_two_operands_does_not_matter() -> None:
    verify(Schedule("swap", 2, ((carry(0, 1, DATA, True), carry(1, 0, DATA, True)),)), "all_reduce")


@pytest.mark.parametrize(
    ("op", "moves", "message"),
    [
        ("broadcast", [carry(0, 2, DATA)], "rank: rank 2, data[0], round 1: expected ranks from 0 to 1"),
        ("broadcast", [carry(0, 1, ("data", 1))], "writable: rank 1, data[1], round 1: expected a slot that"),
        ("broadcast", [Move(0, 1, ("tmp", 3), DATA)], "unwritten: rank 0, tmp[3], round 1: expected a value to read"),
        ("send", [Move(0, 1, ("in", 0), ("out", 0), True)], "unwritten: rank 1, out[0], round 1: expected a value to"),
        ("broadcast", [carry(0, 1, DATA), carry(0, 1, DATA)], "clobber: rank 1, data[0], round 1: expected one"),
        ("reduce", [carry(1, 0, DATA, True), carry(0, 0, DATA)], "clobber: rank 0, data[0], round 1: expected one"),
        ("all_gather", [Move(0, 1, ("in", 0), ("in", 0))], "writable: rank 1, in[0], round 1: expected a slot that"),
        ("gather", [Move(0, 1, ("in", 0), ("out", 0))], "writable: rank 1, out[0], round 1: expected a slot that"),
        ("barrier", [carry(0, 1, SIGNAL)] * 2, "repeat: rank 1, tmp[0], round 1: expected one signal, got 2"),
        (
            "barrier",
            [carry(0, 1, SIGNAL)],
            "result: rank 0, tmp[0], at the end: expected a notification from every rank",
        ),
        ("barrier", [carry(0, 5, SIGNAL)], "rank: rank 5, tmp[0], round 1: expected ranks from 0 to 1"),
        ("barrier", [carry(0, 1, DATA)], "writable: rank 1, data[0], round 1: expected a signal"),
        ("scatter", [Move(0, 1, ("in", 1), ("out", 0))], "result: rank 0, out[0], at the end: expected 0.in[0], got n"),
    ],
)
def test_every_rule_is_named(op: str, moves: list[Move], message: str) -> None:
    assert message in refused(op, tuple(moves))


def test_reads_happen_before_writes() -> None:
    swap = Schedule("swap", 2, ((Move(0, 1, DATA, ("tmp", 0)), Move(1, 0, DATA, ("tmp", 0))),))
    assert {v.rule for v in violations(swap, "broadcast")} == {"result"}
    chain = Schedule("chain in one round", 3, ((carry(0, 1, DATA), carry(1, 2, DATA)),))
    assert [v.rank for v in violations(chain, "broadcast")] == [2]


def test_long_lists_are_cut() -> None:
    text = refused("all_reduce", world=40)
    assert "0.data[0] + 1.data[0]" in text and "+ 32 more, got 0.data[0]" in text
    assert text.endswith("and 32 more") and text.count("\n") == 9


def test_contracts_exist_for_known_operations_and_roots_only() -> None:
    with pytest.raises(ArgumentError, match=r"'op' must be one of .*\ball_reduce\b.*got 'sent'"):
        verify(build("send", "direct", 2), "sent")
    with pytest.raises(ArgumentError, match="'root' must be a rank from 0 to 1, got 2"):
        verify(build("send", "direct", 2), "send", root=2)


def test_a_new_algorithm_without_a_source_is_told_where_to_add_it() -> None:
    with pytest.raises(LookupError, match=r"'zigzag' has no source. Add .* to SOURCES in .*catalogue_rows\.py"):
        _rows("barrier", ("zigzag", direct.barrier, "idea", "when", "cost"))
