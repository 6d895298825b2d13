"""Memory of a staging buffer is written again only when the readers of what was there before have released it.

Tested on the executor itself: between real ranks the fault would show only when one of them happens to be late. Whether
all ranks use the same locations shows between real ranks only.
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
from torchdist_ref.backends.ref import Ref, fast
from torchdist_ref.backends.ref.fast import CompiledRound, RingBuffer, StagedRounds
from torchdist_ref.errors import MismatchError
from torchdist_ref.groups.world import default_group
from torchdist_ref.testing import fill, run
from torchdist_ref.transports.segment import EAGER_BYTES, MIN_RING_BYTES, SegmentLayout, ring_bytes


class Reader:
    """A reader's semaphore, which records that it was acquired."""

    def __init__(self, name: str, seen: list[str], ready: bool) -> None:
        self.name, self.seen, self.ready = name, seen, ready

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        if self.ready:
            self.seen.append(self.name)
        return self.ready


def link_with(cells: int, seen: list[str]) -> Any:
    def wait(semaphore: Reader, peer: int, operation: str) -> None:
        seen.append(f"waited for {semaphore.name}")

    row = SimpleNamespace(compared=(b"", b""), fields=[0] * 4, announce=lambda *_: None)
    layout = SegmentLayout(2, cells=cells)
    return SimpleNamespace(row=row, rows=(), peers=(), hops=(), rank=0, name="world", acquire=wait, layout=layout)


def being_read(ring: RingBuffer, seen: list[str], ready: bool) -> RingBuffer:
    """What rounds 0, 1 and 3 wrote is being read, by one reader each; round 4 comes next."""
    for number in (0, 1, 3):
        ring.readers.append((number, ((Reader(f"reader of round {number}", seen, ready), 1),)))
    ring.round = 4
    return ring


@pytest.mark.parametrize(("cells", "first"), [(4, [0]), (2, [0, 1])])
def test_readers_of_as_many_rounds_ago_as_there_are_cells_are_waited_for_and_no_others(
    cells: int, first: list[int]
) -> None:
    seen: list[str] = []
    ring = being_read(RingBuffer(link_with(cells, seen)), seen, ready=True)
    ring.wait_for_readers(4, "a call")
    assert seen == [f"reader of round {number}" for number in first]
    assert [number for number, _ in ring.readers] == [number for number in (0, 1, 3) if number not in first]


def test_readers_of_older_rounds_come_first() -> None:
    seen: list[str] = []
    being_read(RingBuffer(link_with(4, seen)), seen, ready=True).wait_for_readers(6, "a call")
    assert seen == ["reader of round 0", "reader of round 1"]


def test_a_reader_that_is_not_done_is_waited_for() -> None:
    seen: list[str] = []
    being_read(RingBuffer(link_with(2, seen)), seen, ready=False).wait_for_readers(4, "a call")
    assert seen == ["waited for reader of round 0", "waited for reader of round 1"]


@pytest.mark.parametrize("windows", [(0,), (0, 3)], ids=["one round", "several"])
def test_nothing_is_written_before_the_readers_are_done(
    windows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    staging_buffer = torch.zeros(3)
    at_the_wait: list[float] = []
    link = link_with(4, seen)
    wait = link.acquire

    def look(semaphore: Any, peer: int, operation: str) -> None:
        at_the_wait.extend(staging_buffer.tolist())
        wait(semaphore, peer, operation)

    def write(tensors: Sequence[torch.Tensor], begin: int) -> None:
        staging_buffer.copy_(tensors[0][begin : begin + 3])

    link.acquire = look
    compiled = CompiledRound(writes=(write,), signals=(), waits=(), steps=(), releases=(), readers=())
    rounds = SimpleNamespace(nbytes=0, by_location=lambda *_: dict.fromkeys(range(4), (compiled,)))
    monkeypatch.setattr(fast, "StagedRounds", lambda *_: rounds)
    executor = fast.FastExecutor(link)
    being_read(executor.ring, seen, ready=False)
    plan: Any = SimpleNamespace(windows=windows, rounds=[()], text="a call", record=None)
    staged = executor.compile_staged(plan)
    executor.run(fast.Program(plan, staged, staged), [torch.arange(1.0, 7.0)], (0, 0))
    # Round 5, if there is one, writes where round 1 did.
    assert seen == [f"waited for reader of round {number}" for number in range(len(windows))]
    assert at_the_wait == [0.0, 0.0, 0.0, 1.0, 2.0, 3.0][: 3 * len(windows)]
    assert staging_buffer.tolist() == [begin + 1.0 for begin in range(windows[-1], windows[-1] + 3)]


@given(st.lists(st.integers(EAGER_BYTES + 1, 4 * MIN_RING_BYTES), max_size=30), st.sampled_from((2, 4)))
def test_as_many_locations_in_a_row_as_there_are_cells_do_not_overlap(nbytes: list[int], cells: int) -> None:
    layout, head, found = SegmentLayout(2, window=4 * MIN_RING_BYTES, cells=cells), 0, []
    for taken in map(ring_bytes, nbytes):
        place = layout.next_offset(head, taken)
        assert 0 <= place <= place + taken <= cells * layout.window
        for other in found[1 - cells :]:
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
def test_ranks_use_the_same_locations_also_after_calls_that_failed(ranks: Any) -> None:
    assert run(sums_with_failures_between, 2, ranks=ranks) == [[True] * len(COUNTS)] * 2


def test_only_the_first_small_call_of_a_kind_compiles_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = [0, 0]
    compile_round = StagedRounds.compile_round

    def counting(rounds: StagedRounds, *arguments: Any) -> CompiledRound:
        compiled[rounds.link.rank] += 1
        return compile_round(rounds, *arguments)

    def program(rank: int) -> list[tuple[int, list[float]]]:
        found = []
        for call in range(6):
            tensor, before = fill(rank + call, (40,)), compiled[rank]
            dist.all_reduce(tensor)
            found.append((compiled[rank] - before, tensor.tolist()))
        backend = default_group().backend
        assert isinstance(backend, Ref) and found[0][0] == backend.link.layout.cells > 1
        return found

    monkeypatch.setattr(StagedRounds, "compile_round", counting)
    sums = [(fill(call, (40,)) + fill(1 + call, (40,))).tolist() for call in range(6)]
    for found in run(program, 2, ranks="threads"):
        assert [count for count, _ in found[1:]] == [0] * 5
        assert [values for _, values in found] == sums
