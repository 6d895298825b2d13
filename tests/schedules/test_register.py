"""Algorithms that a program registers: real ranks execute them, and a wrong one is never executed."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from torchdist_ref.errors import ArgumentError
from torchdist_ref.schedules import Move, Schedule, algorithms, build, carry, choose, overrides, register, unregister
from torchdist_ref.testing import fill, run

OWN = [("all_reduce", "pass_and_return"), ("broadcast", "star")]
BUILT: set[str] = set()


def pass_and_return(world: int) -> Schedule:
    """Reduce along the ranks in order, and copy the sum back along them."""
    BUILT.add("pass_and_return")
    up = [(carry(rank, rank + 1, ("data", 0), reduce=True),) for rank in range(world - 1)]
    down = [(carry(rank + 1, rank, ("data", 0)),) for rank in reversed(range(world - 1))]
    return Schedule("pass_and_return all_reduce", world, (*up, *down))


def star(world: int, root: int) -> Schedule:
    BUILT.add("star")
    moves = tuple(carry(root, rank, ("data", 0)) for rank in range(world) if rank != root)
    return Schedule("star broadcast", world, (moves,))


def adds_twice(world: int) -> Schedule:
    """Return to rank 0 a sum that rank 0 then adds again."""
    up = [(carry(rank, rank + 1, ("data", 0), reduce=True),) for rank in range(world - 1)]
    down = [(carry(rank + 1, rank, ("data", 0), reduce=True),) for rank in reversed(range(world - 1))]
    return Schedule("adds_twice all_reduce", world, (*up, *down))


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    BUILT.clear()
    yield
    for op, name in OWN:
        unregister(op, name)


def reduce_and_broadcast(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    summed, copied = fill(rank, (1001,), torch.float64), fill(rank, (17,), torch.float64)
    dist.all_reduce(summed)
    dist.broadcast(copied, src=1)
    assert BUILT == {"pass_and_return", "star"}, "the backend asked for other algorithms"
    return summed, copied


@pytest.mark.parametrize("ranks", ["processes", "threads"])
@pytest.mark.parametrize("executor", ["fast", "reference"])
def test_ref_executes_registered_algorithms(ranks: str, executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    register("all_reduce", "pass_and_return", pass_and_return)
    register("broadcast", "star", star)
    monkeypatch.setenv("TORCHDIST_REF_ALGORITHM", "all_reduce=pass_and_return,broadcast=star")
    monkeypatch.setenv("TORCHDIST_REF_EXECUTOR", executor)
    sums = sum(fill(rank, (1001,), torch.float64) for rank in range(3))
    for summed, copied in run(reduce_and_broadcast, 3, ranks=ranks):
        torch.testing.assert_close(summed, sums)
        assert torch.equal(copied, fill(1, (17,), torch.float64))


def test_a_wrong_algorithm_is_refused_with_the_rank_and_the_slot() -> None:
    register("all_reduce", "pass_and_return", adds_twice)
    message = r"is not an all_reduce of 3 ranks:\n  result: rank 0, data\[0\], at the end: .* more than once"
    with pytest.raises(ArgumentError, match=message):
        build("all_reduce", "pass_and_return", 3)


def of_chunks(chunks: int, world: int) -> Schedule:
    """Return a schedule that is right where slots are equal: its sums are made in a slot of another size."""
    spare = ("tmp", 1)
    first = tuple(carry(rank, 0, ("data", 0), reduce=True) for rank in range(1, world))
    through = (Move(0, 0, ("data", 0), spare), *(Move(0, r, ("data", 0), ("data", 0)) for r in range(1, world)))
    back = (Move(0, 0, spare, ("data", 0)),)
    others = [tuple(carry(r, 0, ("data", c), reduce=True) for r in range(1, world)) for c in range(1, chunks)] + [
        tuple(carry(0, r, ("data", c)) for r in range(1, world)) for c in range(1, chunks)
    ]
    return Schedule("through another slot", world, (first, through, back, *others), chunks)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda world: pass_and_return(2), "'world' must be 3, the ranks of the group, got 2"),
        (lambda world: pass_and_return(5), "'world' must be 3, the ranks of the group, got 5"),
        (lambda world: Schedule("none", world, (), 0), r"chunks: rank 0, .* expected at least 1 slot, got 0"),
        (lambda world: Schedule("none", world, (), -1), r"chunks: rank 0, .* expected at least 1 slot, got -1"),
        (partial(of_chunks, 3), r"size: rank 0, tmp\[1\], round 2: expected a slot of the size of data\[0\]"),
        (lambda world: None, "a function that returns a Schedule, got None"),
        (lambda: pass_and_return(3), "'pass_and_return' for all_reduce of 3 ranks cannot be made: .*positional"),
        (
            lambda world: Schedule("x", world, (((0, 1),),)),
            "of 3 ranks cannot be made: .*'tuple' object has no attribute",
        ),
        (lambda world: Schedule("x", world, None), "of 3 ranks cannot be made: .*rounds, which are tuples of Move"),
        (lambda world: Schedule("x", world, (), "1"), "of 3 ranks cannot be made: 'str' object"),
        (lambda world: Schedule("lazy", world, ((move for move in ()),)), "'rounds' must be tuples of moves"),
    ],
    ids=[
        "fewer ranks",
        "more ranks",
        "no slot",
        "negative",
        "sizes",
        "nothing",
        "arguments",
        "no move",
        "no rounds",
        "text",
        "generator",
    ],
)
def test_what_is_no_schedule_of_the_group_is_refused(make: Callable[..., Any], message: str) -> None:
    """Most of these once gave all ranks wrong values without an error."""
    register("all_reduce", "pass_and_return", make)
    with pytest.raises(ArgumentError, match=message):
        build("all_reduce", "pass_and_return", 3)


def test_a_gather_without_chunks_is_refused() -> None:
    right = build("all_gather", "ring", 3)
    register("all_gather", "mine", lambda world: Schedule("mine", world, right.rounds, 0))
    try:
        with pytest.raises(ArgumentError, match="expected at least 1 slot, got 0"):
            build("all_gather", "mine", 3)
    finally:
        unregister("all_gather", "mine")


def wrong_call(rank: int) -> str:
    tensor = fill(rank, (8,), torch.float64)
    with pytest.raises(ArgumentError, match="more than once") as caught:
        dist.all_reduce(tensor)
    assert torch.equal(tensor, fill(rank, (8,), torch.float64))
    return str(caught.value)


def test_ref_never_executes_a_wrong_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    register("all_reduce", "pass_and_return", adds_twice)
    monkeypatch.setenv("TORCHDIST_REF_ALGORITHM", "all_reduce=pass_and_return")
    assert all("adds_twice all_reduce is not" in text for text in run(wrong_call, 3))


def by_other_functions(rank: int, chosen: tuple[str, str]) -> str:
    """Make a call by another algorithm than the other rank, then one by the same; return the error."""
    register("all_reduce", "pass_and_return", pass_and_return if rank else build_by_tree)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDIST_REF_ALGORITHM", f"all_reduce={chosen[rank]}")
        group = dist.new_group()
    tensor = fill(rank, (5,), torch.int64)
    with pytest.raises(dist.MismatchError) as caught:
        dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, fill(rank, (5,), torch.int64)), "a mismatch writes nothing"
    dist.broadcast(tensor, 1, group=group)
    assert torch.equal(tensor, fill(1, (5,), torch.int64))
    return str(caught.value)


def build_by_tree(world: int) -> Schedule:
    return build("all_reduce", "tree", world)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (
            ("pass_and_return",) * 2,
            r"rank 0: .*'pass_and_return' \(schedule (\w{8})\).* rank 1: .*\(schedule (?!\1)\w{8}",
        ),
        (("ring", "tree"), "rank 0: all_reduce.* by algorithm 'ring' of int64.* rank 1: .* by algorithm 'tree' of"),
    ],
    ids=["other functions", "other names"],
)
def test_ranks_notice_that_they_use_other_algorithms(chosen: tuple[str, str], message: str) -> None:
    """Other functions under one name once gave wrong sums without an error, and other names stalled."""
    for text in run(by_other_functions, 2, chosen, ranks="processes"):
        assert re.search(message, text), text
        assert "register the same function on each" in text


def other_shapes(rank: int) -> str:
    with pytest.raises(dist.MismatchError) as caught:
        dist.all_reduce(fill(rank, (5 + rank,)), group=dist.new_group())
    return str(caught.value)


def test_ranks_that_chose_the_same_algorithm_are_not_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDIST_REF_ALGORITHM", "all_reduce=ring")
    for text in run(other_shapes, 2):
        assert "by algorithm 'ring'" in text and "ALGORITHM alike" not in text


def test_a_name_that_is_registered_again_has_the_new_function() -> None:
    register("all_reduce", "pass_and_return", adds_twice)
    register("all_reduce", "pass_and_return", pass_and_return)
    assert build("all_reduce", "pass_and_return", 3) == pass_and_return(3)
    assert overrides("all_reduce=pass_and_return") == {"all_reduce": "pass_and_return"}
    assert choose("all_reduce", 3, 64) == "direct"
    unregister("all_reduce", "pass_and_return")
    assert "pass_and_return" not in algorithms("all_reduce")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_reduc", "mine"), "'op' must be one of all_reduce, reduce"),
        (("all_reduce", "ring"), "a name that the library does not use for all_reduce"),
        (("all_reduce", ""), "a name without comma, '=' or space"),
        (("all_reduce", "my ring"), "a name without comma, '=' or space"),
        (("all_reduce", 3), "a name without comma, '=' or space, got 3"),
        (("all_reduce", "mine", None), "'make' must be a function that returns a Schedule, got None"),
    ],
)
def test_errors_of_register(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        register(*(*arguments, pass_and_return)[:3])


def test_a_name_that_is_not_registered_is_refused_with_when_to_register() -> None:
    with pytest.raises(ArgumentError, match=r"got 'all_reduce=mine'.* Register .* before init_process_group"):
        overrides("all_reduce=mine")
