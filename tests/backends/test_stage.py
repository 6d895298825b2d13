"""A place on a stage is laid out again only when the readers of what was laid out there before have freed it.

Seen on the executor itself: between real ranks the fault would show only when one of them happens to be late. That
all ranks mean the same places shows between real ranks only.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchdist_ref as dist
from torchdist_ref.backends.executor import Executor
from torchdist_ref.backends.plan import RoundCode
from torchdist_ref.errors import MismatchError
from torchdist_ref.testing import fill, run
from torchdist_ref.transports.layout import GRAIN, POCKET, Layout, room

PLAN: Any = SimpleNamespace(doing="a call")


class Reader:
    """A reader's token, which writes down that it was waited for."""

    def __init__(self, name: str, seen: list[str], ready: bool) -> None:
        self.name, self.seen, self.ready = name, seen, ready

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        if self.ready:
            self.seen.append(self.name)
        return self.ready


def executor_with(last: int, ready: bool) -> tuple[Executor, list[str]]:
    """What was laid out in even and in odd turns is being read, by one reader each; turn `last` was the last one."""
    seen: list[str] = []

    def wait(token: Reader, peer: int, doing: str) -> None:
        seen.append(f"waited for {token.name}")

    line = SimpleNamespace(said=(b"", b""), words=[0] * 4, announce=lambda *_: None)
    link: Any = SimpleNamespace(line=line, lines=(), peers=(), wait=wait)
    executor = Executor(link)
    executor._readers = [((Reader(f"reader of turn {turn}", seen, ready), 1),) for turn in (0, 1)]
    executor._staged_last = last
    return executor, seen


def test_in_turn_only_the_readers_of_that_turn_are_waited_for() -> None:
    executor, seen = executor_with(last=1, ready=True)
    executor._make_room(0, PLAN)
    assert seen == ["reader of turn 0"]
    assert [len(readers) for readers in executor._readers] == [0, 1]


def test_out_of_turn_the_readers_of_the_other_turn_come_first() -> None:
    executor, seen = executor_with(last=0, ready=True)
    executor._make_room(0, PLAN)
    assert seen == ["reader of turn 1", "reader of turn 0"]
    assert [len(readers) for readers in executor._readers] == [0, 0]


def test_a_reader_that_is_not_done_is_waited_for() -> None:
    executor, seen = executor_with(last=0, ready=False)
    executor._make_room(0, PLAN)
    assert seen == ["waited for reader of turn 1", "waited for reader of turn 0"]


def test_nothing_is_laid_out_before_the_readers_are_done() -> None:
    executor, seen = executor_with(last=1, ready=False)
    stage = torch.zeros(3)
    at_the_wait: list[float] = []
    wait = executor.link.wait

    def look(token: Any, peer: int, doing: str) -> None:
        at_the_wait.extend(stage.tolist())
        wait(token, peer, doing)

    def lay(tensors: Sequence[torch.Tensor], begin: int) -> None:
        stage.copy_(tensors[0])

    executor.link.wait = look  # type: ignore[method-assign,assignment]
    code = RoundCode(stage=(lay,), posts=(), waits=(), steps=(), frees=(), readers=())
    rounds = {"windows": (0,), "room": 0, "carries_data": True, "code": lambda begin, place: (code,)}
    plan: Any = SimpleNamespace(**rounds, record=None, doing="a call", fits=None, inputs=0, nbytes=12)
    executor.prepared(plan).run([torch.tensor([1.0, 2.0, 3.0])], (0, 0))
    assert seen == ["waited for reader of turn 0"]
    assert at_the_wait == [0.0, 0.0, 0.0]
    assert stage.tolist() == [1.0, 2.0, 3.0]


@given(st.lists(st.integers(POCKET + 1, 4 * GRAIN), max_size=30), st.sampled_from((2, 4)))
def test_places_that_follow_each_other_do_not_overlap(nbytes: list[int], turns: int) -> None:
    layout, head, last = Layout(2, window=4 * GRAIN, turns=turns), 0, range(0)
    for taken in map(room, nbytes):
        place = layout.next_place(head, taken)
        assert 0 <= place <= place + taken <= turns * layout.window
        assert place >= last.stop or place + taken <= last.start
        head, last = place + taken, range(place, place + taken)


# Elements of float32, for: a pocket, the least of a ring, more, several windows in one round and in two.
COUNTS = (5, POCKET, 3 * GRAIN // 4, 200_000, 1_200_000)


def sums_with_failures_between(rank: int) -> list[bool]:
    """Sums of all sizes; before each of them the ranks don't agree, and one would have taken more of the ring."""
    right = []
    for turn, count in enumerate(COUNTS):
        with pytest.raises(MismatchError):
            dist.all_reduce(torch.zeros(COUNTS[(turn + rank) % len(COUNTS)]))
        tensor = fill(rank + turn, (count,))
        dist.all_reduce(tensor)
        right.append(torch.equal(tensor, fill(turn, (count,)) + fill(turn + 1, (count,))))
    return right


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_ranks_mean_the_same_places_also_after_calls_that_failed(ranks: Any) -> None:
    assert run(sums_with_failures_between, 2, ranks=ranks) == [[True] * len(COUNTS)] * 2
