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
from torchdist_ref.backends.ref.executor import Executor
from torchdist_ref.backends.ref.plan import RoundCode
from torchdist_ref.errors import MismatchError
from torchdist_ref.testing import fill, run
from torchdist_ref.transports.segment_layout import EAGER_BYTES, MIN_RING_BYTES, SegmentLayout, ring_bytes


class Reader:
    """A reader's token, which writes down that it was waited for."""

    def __init__(self, name: str, seen: list[str], ready: bool) -> None:
        self.name, self.seen, self.ready = name, seen, ready

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        if self.ready:
            self.seen.append(self.name)
        return self.ready


def executor_with(turns: int, ready: bool) -> tuple[Executor, list[str]]:
    """What was laid out in rounds 0, 1 and 3 is being read, by one reader each; round 4 comes next."""
    seen: list[str] = []

    def wait(token: Reader, peer: int, doing: str) -> None:
        seen.append(f"waited for {token.name}")

    row = SimpleNamespace(compared=(b"", b""), fields=[0] * 4, announce=lambda *_: None)
    link: Any = SimpleNamespace(row=row, rows=(), peers=(), acquire=wait, layout=SegmentLayout(2, cells=turns))
    executor = Executor(link)
    for number in (0, 1, 3):
        executor._turns.readers.append((number, ((Reader(f"reader of round {number}", seen, ready), 1),)))
    executor._turns.number = 4
    return executor, seen


@pytest.mark.parametrize(("turns", "first"), [(4, [0]), (2, [0, 1])])
def test_readers_of_as_many_rounds_ago_as_there_are_turns_are_waited_for_and_no_others(
    turns: int, first: list[int]
) -> None:
    executor, seen = executor_with(turns, ready=True)
    executor._turns.make_room(4, "a call")
    assert seen == [f"reader of round {number}" for number in first]
    assert [number for number, _ in executor._turns.readers] == [number for number in (0, 1, 3) if number not in first]


def test_readers_of_older_rounds_come_first() -> None:
    executor, seen = executor_with(4, ready=True)
    executor._turns.make_room(6, "a call")
    assert seen == ["reader of round 0", "reader of round 1"]


def test_a_reader_that_is_not_done_is_waited_for() -> None:
    executor, seen = executor_with(2, ready=False)
    executor._turns.make_room(4, "a call")
    assert seen == ["waited for reader of round 0", "waited for reader of round 1"]


def plan_of(windows: tuple[int, ...], code: tuple[RoundCode, ...]) -> Any:
    """A plan that has this code for each of its windows."""
    rounds = {"windows": windows, "rounds": [()] * len(code), "room": 0, "code": lambda begin, place: code}
    return SimpleNamespace(**rounds, carries_data=True, record=None, doing="a call", fits=None, inputs=0, nbytes=12)


@pytest.mark.parametrize("windows", [(0,), (0, 3)], ids=["one round", "several"])
def test_nothing_is_laid_out_before_the_readers_are_done(windows: tuple[int, ...]) -> None:
    executor, seen = executor_with(4, ready=False)
    stage = torch.zeros(3)
    at_the_wait: list[float] = []
    wait = executor.link.acquire

    def look(token: Any, peer: int, doing: str) -> None:
        at_the_wait.extend(stage.tolist())
        wait(token, peer, doing)

    def lay(tensors: Sequence[torch.Tensor], begin: int) -> None:
        stage.copy_(tensors[0][begin : begin + 3])

    executor.link.acquire = look  # type: ignore[method-assign,assignment]
    code = RoundCode(stage=(lay,), posts=(), waits=(), steps=(), frees=(), readers=())
    executor.run(executor.prepared(plan_of(windows, (code,))), [torch.arange(1.0, 7.0)], (0, 0))
    # Round 5, if there is one, lies where round 1 did.
    assert seen == [f"waited for reader of round {number}" for number in range(len(windows))]
    assert at_the_wait == [0.0, 0.0, 0.0, 1.0, 2.0, 3.0][: 3 * len(windows)]
    assert stage.tolist() == [begin + 1.0 for begin in range(windows[-1], windows[-1] + 3)]


@given(st.lists(st.integers(EAGER_BYTES + 1, 4 * MIN_RING_BYTES), max_size=30), st.sampled_from((2, 4)))
def test_as_many_places_in_a_row_as_there_are_turns_do_not_overlap(nbytes: list[int], turns: int) -> None:
    layout, head, found = SegmentLayout(2, window=4 * MIN_RING_BYTES, cells=turns), 0, []
    for taken in map(ring_bytes, nbytes):
        place = layout.next_offset(head, taken)
        assert 0 <= place <= place + taken <= turns * layout.window
        for other in found[1 - turns :]:
            assert place >= other.stop or place + taken <= other.start
        head = place + taken
        found.append(range(place, head))


# Elements of float32, for: a pocket, the least of a ring, more, several windows in one round and in two.
COUNTS = (5, EAGER_BYTES, 3 * MIN_RING_BYTES // 4, 200_000, 1_200_000)


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
