"""Costs of schedules: counted against closed forms, simulated against the formulas of the catalogue."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from math import log2
from pathlib import Path

import pytest

from tests.schedules.formulas import A, B, G, M, formula, lg, network_of
from torchdist_ref.errors import ArgumentError
from torchdist_ref.schedules import (
    Move,
    Network,
    Schedule,
    TraceEvent,
    algorithms,
    build,
    carry,
    cost,
    entry,
    operations,
    simulate,
)
from torchdist_ref.schedules.catalogue import make
from torchdist_ref.schedules.tree import CHAIN_PIECES

ALL = [(op, name) for op in operations() for name in algorithms(op)]
FLAT = [(op, name) for op, name in ALL if name != "hierarchical"]
DATA = ("data", 0)

# (op, algorithm) -> steps, most bytes sent and received by a rank, most reduced, in whole buffers; n a power of two.
CLOSED = {
    ("all_reduce", "direct"): "1, n-1, n-1, n-1",
    ("all_reduce", "two_shot"): "2, 2*(n-1)/n, 2*(n-1)/n, (n-1)/n",
    ("all_reduce", "recursive_doubling"): "lg(n), lg(n), lg(n), lg(n)",
    ("all_reduce", "halving_doubling"): "2*lg(n), 2*(n-1)/n, 2*(n-1)/n, (n-1)/n",
    ("all_reduce", "blocks"): "2*lg(n), 2*(n-1)/n, 2*(n-1)/n, (n-1)/n",  # up to 16 ranks
    ("all_reduce", "ring"): "2*(n-1), 2*(n-1)/n, 2*(n-1)/n, (n-1)/n",
    ("all_reduce", "tree"): "2*lg(n), lg(n), lg(n), lg(n)",
    ("all_reduce", "chain"): "2*(n+6), 2 if n > 2 else 1, 2 if n > 2 else 1, 1",
    ("reduce", "direct"): "1, 1, n-1, n-1",
    ("reduce", "two_shot"): "2, 1, 2*(n-1)/n, (n-1)/n",
    ("reduce", "tree"): "lg(n), 1, lg(n), lg(n)",
    ("reduce", "halving_doubling"): "2*lg(n), (n-1)/n + 1/2, 2*(n-1)/n, (n-1)/n",
    ("reduce", "ring"): "n, 1, 2*(n-1)/n, (n-1)/n",
    ("reduce", "chain"): "n+6, 1, 1, 1",
    ("broadcast", "direct"): "1, n-1, 1, 0",
    ("broadcast", "tree"): "lg(n), lg(n), 1, 0",
    ("broadcast", "scatter_all_gather"): "lg(n) + n-1, 2*(n-1)/n, (n-1)/n + 1/2, 0",
    ("broadcast", "chain"): "n+6, 1, 1, 0",
    ("all_gather", "direct"): "1, (n-1)/n, (n-1)/n, 0",
    ("all_gather", "recursive_doubling"): "lg(n), (n-1)/n, (n-1)/n, 0",
    ("all_gather", "bruck"): "lg(n), (n-1)/n, (n-1)/n, 0",
    ("all_gather", "ring"): "n-1, (n-1)/n, (n-1)/n, 0",
    ("gather", "direct"): "1, 1/n, (n-1)/n, 0",
    ("gather", "tree"): "lg(n), 1/2, (n-1)/n, 0",
    ("scatter", "direct"): "1, (n-1)/n, 1/n, 0",
    ("scatter", "tree"): "lg(n), (n-1)/n, 1/2, 0",
    ("reduce_scatter", "direct"): "1, (n-1)/n, (n-1)/n, (n-1)/n",
    ("reduce_scatter", "recursive_halving"): "lg(n), (n-1)/n, (n-1)/n, (n-1)/n",
    ("reduce_scatter", "pairwise"): "n-1, (n-1)/n, (n-1)/n, (n-1)/n",
    ("reduce_scatter", "ring"): "n-1, (n-1)/n, (n-1)/n, (n-1)/n",
    ("all_to_all", "direct"): "1, (n-1)/n, (n-1)/n, 0",
    ("all_to_all", "bruck"): "lg(n), lg(n)/2, lg(n)/2, 0",
    ("all_to_all", "pairwise"): "n-1, (n-1)/n, (n-1)/n, 0",
    ("barrier", "direct"): "1, 0, 0, 0",
    ("barrier", "dissemination"): "lg(n), 0, 0, 0",
    ("barrier", "tree"): "2*lg(n), 0, 0, 0",
    ("send", "direct"): "1, 1, 1, 0",
}


@pytest.mark.parametrize("world", [2, 4, 8, 16])
@pytest.mark.parametrize(("op", "name"), FLAT)
def test_counted_costs_equal_closed_forms(op: str, name: str, world: int) -> None:
    found = cost(build(op, name, world))
    assert (op, name) in CLOSED, f"add the closed form of {name!r} of {op} to CLOSED in {Path(__file__).name}"
    wanted = eval(CLOSED[op, name], {"n": Fraction(world), "lg": lg})
    assert (found.steps, found.sent, found.received, found.reduced) == tuple(map(Fraction, wanted))


def test_steps_for_other_worlds() -> None:
    for world in (3, 5, 6, 7, 13):
        assert cost(build("broadcast", "tree", world)).steps == lg(world)
        assert cost(build("all_gather", "bruck", world)).steps == lg(world)
        assert cost(build("barrier", "dissemination", world)).steps == lg(world)
        assert cost(build("all_reduce", "recursive_doubling", world)).steps == int(log2(world)) + 2
        assert cost(build("all_reduce", "ring", world)).total == 2 * (world - 1)
        assert cost(build("all_to_all", "pairwise", world)).messages == world * (world - 1)


def test_parser_of_formulas() -> None:
    assert formula("2(n-1)a + 2(n-1)/n mb", 4) == pytest.approx(6 * A + 1.5 * M * B)
    assert formula("lg(n) (a + mb/2)", 5) == pytest.approx(3 * (A + M * B / 2))


@pytest.mark.parametrize("world", [2, 4, 8, 16])
@pytest.mark.parametrize(("op", "name"), FLAT)
def test_simulated_times_equal_the_formulas_of_the_catalogue(op: str, name: str, world: int) -> None:
    found = simulate(build(op, name, world), M, network_of(name, world)).total
    assert found == pytest.approx(formula(entry(op, name).cost, world), rel=1e-9)


@pytest.mark.parametrize("world", [3, 5, 6, 7, 12])
@pytest.mark.parametrize(
    ("op", "name"),
    [(op, name) for op, name in FLAT if name in ("ring", "pairwise", "chain", "dissemination") and op != "all_reduce"]
    + [("all_reduce", "ring"), ("all_reduce", "two_shot"), ("all_gather", "bruck"), ("broadcast", "tree")],
)
def test_some_formulas_hold_for_every_world(op: str, name: str, world: int) -> None:
    found = simulate(build(op, name, world), M, network_of(name, world)).total
    assert found == pytest.approx(formula(entry(op, name).cost, world), rel=1e-9)


def layouts(world: int) -> list[tuple[int, ...] | None]:
    """No hosts, one host, hosts of 2, 3 and 8 ranks where the world divides by that, and hosts in disorder."""
    equal = [tuple(rank // size for rank in range(world)) for size in (world, 2, 3, 8) if world % size == 0]
    return list(dict.fromkeys([None, *equal, tuple(rank % 3 for rank in range(world))]))


def few_stand_for_all(op: str, name: str, world: int) -> int:
    """Run a schedule with all ranks and with few, on all layouts; give how often few were enough for a round."""
    enough = 0
    for hosts in layouts(world):
        schedule = make(entry(op, name), world, 0, hosts or tuple(range(world)))
        network = Network(A, B, G, hosts, local_alpha=A / 7, local_beta=B / 9)
        all_of_them = simulate(schedule, M, network, representative=False)
        few = simulate(schedule, M, network, representative=True)
        assert few.total == all_of_them.total, (hosts, few.note)
        assert set(few) <= set(all_of_them), (hosts, few.note)
        enough += bool(few.note)
    return enough


@pytest.mark.parametrize(("op", "name"), ALL)
def test_few_ranks_represent_all_to_the_last_bit(op: str, name: str) -> None:
    for world in (*range(1, 9), 12):
        few_stand_for_all(op, name, world)


@pytest.mark.long
@pytest.mark.parametrize(("op", "name"), ALL)
def test_few_ranks_represent_all_of_up_to_64(op: str, name: str) -> None:
    for world in range(13, 65):
        few_stand_for_all(op, name, world)


def test_few_ranks_represent_all_in_symmetric_rounds() -> None:
    everywhere_but_in_disorder = len(layouts(16)) - 1
    assert few_stand_for_all("all_reduce", "ring", 16) == everywhere_but_in_disorder
    assert few_stand_for_all("all_reduce", "halving_doubling", 16) == everywhere_but_in_disorder
    assert few_stand_for_all("all_to_all", "hierarchical", 16) == everywhere_but_in_disorder - 1, "nor on one host"
    assert few_stand_for_all("all_reduce", "direct", 16) == everywhere_but_in_disorder
    assert few_stand_for_all("broadcast", "scatter_all_gather", 16) == 0


def test_events_have_rank_time_and_slots() -> None:
    trace = simulate(build("all_reduce", "direct", 2), 8, Network(alpha=1.0, beta=0.5, gamma=0.25))
    assert trace.total == 1 + 4 + 2 and len(trace) == 6
    assert trace[:3] == [
        TraceEvent(1, "send", 0.0, 5.0, 0, 8.0, "data[0] +"),
        TraceEvent(0, "recv", 0.0, 5.0, 1, 8.0, "data[0] +"),
        TraceEvent(0, "reduce", 5.0, 7.0, 1, 8.0, "data[0] +"),
    ]


def test_a_rank_sends_one_message_at_a_time() -> None:
    for op in ("all_to_all", "broadcast", "all_reduce"):
        sends = [e for e in simulate(build(op, "direct", 6), M) if e.kind == "send"]
        for rank in range(6):
            mine = sorted((e.start, e.end) for e in sends if e.rank == rank)
            assert all(first[1] <= second[0] for first, second in pairwise(mine))


def test_ranks_of_a_host_share_its_network_card() -> None:
    crossing = tuple(carry(rank, rank + 2, DATA) for rank in range(2))
    network = Network(alpha=1.0, beta=0.5, gamma=0.0, hosts=(0, 0, 1, 1))
    assert simulate(Schedule("two streams", 4, (crossing,)), 8, network).total == 1 + 2 * 4
    apart = Network(alpha=1.0, beta=0.5, gamma=0.0)
    assert simulate(Schedule("two streams", 4, (crossing,)), 8, apart).total == 1 + 4


def test_within_a_host_readers_do_not_wait_for_each_other() -> None:
    network = Network(hosts=(0,) * 9, local_alpha=1.0, local_beta=0.5)
    assert simulate(build("broadcast", "direct", 9), 8, network).total == 1 + 4
    assert simulate(build("gather", "direct", 9), 9 * 8, network).total == 8 * (1 + 4)


def test_hierarchy_pays_between_hosts() -> None:
    hosts = tuple(rank // 8 for rank in range(32))
    network = Network(hosts=hosts)
    flat = {"all_reduce": "ring", "reduce": "direct", "broadcast": "direct", "barrier": "tree", "all_gather": "bruck"}
    for op, name in {**flat, "all_to_all": "pairwise"}.items():
        clever = simulate(build(op, "hierarchical", 32, hosts=hosts), 4096, network).total
        assert clever < simulate(build(op, name, 32), 4096, network).total


def test_local_work_takes_no_message() -> None:
    local = Schedule("local", 1, ((Move(0, 0, DATA, ("tmp", 0)),), (Move(0, 0, ("tmp", 0), DATA, True),)))
    trace = simulate(local, 8, Network(alpha=1.0, beta=1.0, gamma=0.25))
    assert [(e.kind, e.start, e.end) for e in trace] == [("copy", 0.0, 0.0), ("reduce", 0.0, 2.0)]


def test_a_wrong_number_of_hosts_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"'network.hosts' must be one host for each of 4 ranks, got \(0, 1\)"):
        simulate(build("all_reduce", "ring", 4), 1, Network(hosts=(0, 1)))


def test_negative_times_are_named() -> None:
    with pytest.raises(ArgumentError, match="'nbytes' must be 0 or more, got -1"):
        simulate(build("all_reduce", "ring", 4), -1)
    with pytest.raises(ArgumentError, match=r"'local_beta' must be seconds, 0 or more, got -1\.0"):
        Network(local_beta=-1.0)


def test_chain_has_the_number_of_pieces_of_the_catalogue() -> None:
    assert CHAIN_PIECES == 8
