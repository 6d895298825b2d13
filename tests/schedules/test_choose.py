"""Choice of an algorithm: pure, always one that exists, with the thresholds of the table."""

from __future__ import annotations

import itertools

import pytest

from torchdist_ref.errors import ArgumentError
from torchdist_ref.schedules import Schedule, algorithms, build, choose, cost, operations, overrides, verify
from torchdist_ref.transports.segment import window_for

KIB = 1024
SIZES = (0, 1, 4 * KIB, 32 * KIB, 32 * KIB + 1, 100 * KIB, 1 << 20, (1 << 20) + 1, 1 << 30)


@pytest.mark.parametrize("op", operations())
def test_every_choice_can_be_built_and_is_right(op: str) -> None:
    chosen = set()
    for world, nbytes, transport in itertools.product((1, 2, 3, 8), SIZES, ("shared_memory", "tcp")):
        for hosts in (None, (0,) * world, tuple(range(world)), tuple(r // 2 for r in range(world))):
            name = choose(op, world, nbytes, hosts=hosts, transport=transport)
            assert name in algorithms(op) and name == choose(op, world, nbytes, hosts=hosts, transport=transport)
            chosen.add((name, world, hosts))
    for name, world, hosts in chosen:
        verify(build(op, name, world, hosts=hosts), op)


@pytest.mark.parametrize("op", operations())
def test_on_shared_memory_all_is_direct_but_large_reductions_and_exchanges(op: str) -> None:
    mib = 1024 * KIB
    limits = {("all_reduce", 2): 4 * mib} | {("all_reduce", world): 256 * KIB for world in (5, 64)}
    limits |= {("reduce", world): 4 * mib for world in (5, 64)} | {("all_to_all", world): 2 * mib for world in (5, 64)}
    large = {"all_reduce": "two_shot", "reduce": "two_shot", "all_to_all": "pairwise"}
    for world in (2, 5, 64):
        most = limits.get((op, world), 1 << 30)
        found = [choose(op, world, size) for size in (0, most, most + 1, 1 << 31)]
        assert found == ["direct"] * 2 + [large[op] if (op, world) in limits else "direct"] * 2
    assert choose(op, 1, 1 << 30) == "direct"


@pytest.mark.parametrize("world", [65, 97, 100, 128])
def test_many_ranks_on_one_host_have_few_messages_each_and_the_bits_of_the_tree(world: int) -> None:
    for op in ("all_reduce", "reduce", "all_gather", "reduce_scatter", "barrier"):
        sizes = (4, 4 * KIB, 4 * KIB + 1, 1 << 30)
        for name, among_64 in {(choose(op, world, nbytes), choose(op, 64, nbytes)) for nbytes in sizes}:
            schedule = build(op, name, world)
            messages = cost(schedule).messages
            assert messages < 16 * world * (2 if name == "blocks" else 1), f"{name} of {op}"
            assert op == "reduce" or messages < cost(build(op, among_64, world)).messages
            if op in ("all_reduce", "reduce", "reduce_scatter"):
                verify(schedule, op, tree=True)


def test_sums_of_16_bit_floats_among_many_ranks_are_rounded_once() -> None:
    assert [choose("all_reduce", 100, n, rounded=True) for n in (4, 1 << 20)] == ["direct", "two_shot"]
    assert choose("reduce_scatter", 100, 1 << 20, rounded=True) == "direct"
    assert choose("barrier", 100, 0, rounded=True) == "dissemination"


@pytest.mark.parametrize("world", [*range(1, 40), 64, 65, 100])
def test_blocks_combine_the_ranks_along_the_tree_at_every_size(world: int) -> None:
    verify(build("all_reduce", "blocks", world), "all_reduce", tree=True)


@pytest.mark.parametrize("world", [3, 4, 8])
@pytest.mark.parametrize("op", ["all_reduce", "reduce"])
def test_small_reductions_have_few_rounds_and_large_ones_divide_the_additions(op: str, world: int) -> None:
    costs = {name: cost(build(op, name, world)) for name in ("direct", "two_shot")}
    assert choose(op, world, 64 * KIB) == min(costs, key=lambda name: costs[name].steps)
    assert choose(op, world, 1 << 26) == min(costs, key=lambda name: costs[name].reduced)


def waits(schedule: Schedule, nbytes: int) -> int:
    """Count the waits of rank 0 for peers: for each that it reads from, in each window of the staging buffer."""
    found = 0
    for moves in schedule.rounds:
        peers = {move.src for move in moves if move.dst == 0 != move.src}
        arranged = {move.read for move in moves if move.src == 0 != move.dst}
        found += len(peers) * -(-len(arranged) * nbytes // schedule.chunks // window_for(schedule.world))
    return found


@pytest.mark.parametrize("nbytes", [KIB, 1 << 20, 1 << 22, 1 << 26])
@pytest.mark.parametrize("world", [3, 4, 8])
def test_all_to_all_has_the_fewest_waits_and_then_few_rounds(world: int, nbytes: int) -> None:
    found = {name: build("all_to_all", name, world) for name in ("direct", "pairwise")}
    least = min(found, key=lambda name: (waits(found[name], nbytes), len(found[name].rounds)))
    assert choose("all_to_all", world, nbytes) == least


@pytest.mark.parametrize(
    ("op", "nbytes", "name"),
    [
        ("all_reduce", 64 * KIB, "recursive_doubling"),
        ("all_reduce", 64 * KIB + 1, "halving_doubling"),
        ("all_reduce", 1024 * KIB, "halving_doubling"),
        ("all_reduce", 1024 * KIB + 1, "two_shot"),
        ("reduce", 1, "tree"),
        ("reduce", 1 << 20, "halving_doubling"),
        ("broadcast", 1, "tree"),
        ("broadcast", 1 << 20, "scatter_all_gather"),
        ("all_gather", 512 * KIB, "bruck"),
        ("all_gather", 1 << 20, "ring"),
        ("reduce_scatter", 1, "recursive_halving"),
        ("reduce_scatter", 1 << 20, "direct"),
        ("all_to_all", 16 * KIB, "bruck"),
        ("all_to_all", 16 * KIB + 1, "pairwise"),
        ("gather", 1, "tree"),
        ("scatter", 1 << 30, "tree"),
        ("barrier", 0, "dissemination"),
        ("send", 1, "direct"),
    ],
)
def test_between_hosts_the_classic_cut_offs_hold(op: str, nbytes: int, name: str) -> None:
    assert choose(op, 16, nbytes, transport="tcp") == name
    assert choose(op, 16, nbytes, hosts=tuple(range(16))) == name


@pytest.mark.parametrize("op", ["broadcast", "reduce"])
def test_between_two_hosts_reductions_to_a_root_use_the_tree(op: str) -> None:
    assert {choose(op, 2, nbytes, hosts=(0, 1)) for nbytes in (1, 1 << 20, 1 << 30)} == {"tree"}
    assert choose(op, 2, 1 << 20, transport="tcp") == "tree" != choose(op, 3, 1 << 20, transport="tcp")


def test_several_ranks_on_several_hosts_are_a_hierarchy() -> None:
    for op in operations():
        name = choose(op, 4, 1024, hosts=(0, 0, 1, 1), transport="tcp")
        assert name == ("direct" if op == "send" else "hierarchical")


def test_overrides_are_parsed() -> None:
    assert overrides("") == overrides(" , ") == {}
    assert overrides("all_reduce = ring,broadcast=tree,") == {"all_reduce": "ring", "broadcast": "tree"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ring", "'TORCHDIST_REF_ALGORITHM' must be op=algorithm with op one of all_reduce, .*, got 'ring'"),
        ("allreduce=ring", "must be op=algorithm with op one of all_reduce"),
        ("all_reduce=bruck", "must be all_reduce= one of direct, two_shot, .*, got 'all_reduce=bruck'"),
        ("all_reduce=ring,all_reduce=tree", "must be each operation once, got 'all_reduce=ring,all_reduce=tree'"),
    ],
)
def test_errors_name_the_wrong_override(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        overrides(text)


def test_unknown_operations_and_transports_are_named() -> None:
    with pytest.raises(ArgumentError, match="'op' must be one of all_reduce"):
        choose("reduce_all", 4, 1)
    with pytest.raises(ArgumentError, match="'transport' must be 'shared_memory' or 'tcp', got 'udp'"):
        choose("all_reduce", 4, 1, transport="udp")


@pytest.mark.parametrize(
    ("world", "nbytes", "hosts", "message"),
    [
        (0, 1, None, "'world' must be at least 1, got 0"),
        (4, -5, None, "'nbytes' must be 0 or more, got -5"),
        (4, float("nan"), None, "'nbytes' must be 0 or more, got nan"),
        (4, 1, (0, 1), r"'hosts' must be one host for each of 4 ranks, got \(0, 1\)"),
    ],
)
def test_impossible_worlds_and_sizes_are_named(
    world: int, nbytes: int, hosts: tuple[int, ...] | None, message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        choose("all_reduce", world, nbytes, hosts=hosts)
