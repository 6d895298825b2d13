"""Debug level DETAIL: tensors of one shape that a rank passes in another order are named by the lines of the calls."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator

import pytest
import torch

import torchdist_ref as dist
from torchdist_ref.debug.call_sites import STACKS_VARIABLE
from torchdist_ref.debug.frames import user_frames
from torchdist_ref.testing import fill, run

BACKENDS = pytest.mark.parametrize("backend", ["ref", "gloo"])


@pytest.fixture(autouse=True)
def detail() -> Iterator[None]:
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    yield
    dist.set_debug_level(before)


def line_of(function: Callable[..., object], text: str) -> str:
    lines, first = inspect.getsourcelines(function)
    [offset] = [number for number, line in enumerate(lines) if text in line]
    return f"test_call_sites.py:{first + offset} in {function.__name__}"


def messages(program: Callable[[int], object], size: int, backend: str, log: pytest.LogCaptureFixture) -> list[str]:
    """Return the distinct warnings and errors of all ranks."""
    log.clear()
    with log.at_level(logging.WARNING, "torchdist_ref.debug"):
        run(program, size, backend=backend)
    return sorted({record.message for record in log.records if record.name == "torchdist_ref.debug"})


def swaps(rank: int) -> list[list[float]]:
    first, second = fill(rank, (3,)), fill(rank + 7, (3,))
    if rank == 1:
        dist.all_reduce(second)  # second on rank 1
    dist.all_reduce(first)
    if rank != 1:
        dist.all_reduce(second)  # second elsewhere
    return [first.tolist(), second.tolist()]


def swaps_in_functions(rank: int) -> None:
    def reduce_first() -> None:
        dist.all_reduce(fill(rank, (3,)))  # the first tensor

    def reduce_second() -> None:
        dist.all_reduce(fill(rank + 7, (3,)))  # the second tensor

    for step in (reduce_second, reduce_first) if rank == 1 else (reduce_first, reduce_second):
        step()


@BACKENDS
def test_swapped_tensors_are_named_with_both_lines(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    warned, swapped = messages(swaps_in_functions, 3, backend, caplog)
    base = inspect.getsourcelines(swaps_in_functions)[1]
    first, second = (f"test_call_sites.py:{base + line} in reduce_" for line in (2, 5))
    call = "of group 'world', all_reduce(reduction=sum) of float32 [3],"
    assert warned.startswith(
        f"call 0 {call} is at different lines: rank 0 at {first}first (dist.all_reduce(fill(rank, "
    )
    assert f"(dist.all_reduce(fill(rank + 7, (3,)))  # the second tensor), rank 2 at {first}first" in warned
    assert f"rank 1 at {second}second" in warned
    assert swapped.startswith(f"calls 0 and 1 {call} are swapped: the first was rank 0 at {first}")
    assert f"the second is rank 0 at {second}" in swapped


@BACKENDS
def test_an_additional_call_is_named_by_its_line(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    warned, swapped = messages(swaps, 3, backend, caplog)
    assert f"rank 1 at {line_of(swaps, '# second on rank 1')}" in warned
    assert "are swapped" in swapped and f"rank 2 at {line_of(swaps, '# second elsewhere')}" in swapped


def valid(rank: int) -> list[float]:
    total = torch.zeros(2)
    for root in range(2):
        mine = fill(rank, (2,))
        if rank == root:
            dist.broadcast(mine, root)
        else:
            dist.broadcast(mine, root)
        total += mine
    if rank == 0:
        dist.barrier()
    else:
        dist.barrier()
    for _ in range(3):
        dist.all_reduce(total)
    # Each rank contributes another number of elements.
    gathered = [torch.zeros(2), torch.zeros(3)]
    dist.all_gather(gathered, fill(rank, (2 + rank,)))
    assert [each.tolist() for each in gathered] == [fill(each, (2 + each,)).tolist() for each in range(2)]
    return total.tolist()


@BACKENDS
def test_valid_programs_run_and_nothing_is_said_of_roots_and_barriers(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert messages(valid, 2, backend, caplog) == []
    expected = ((fill(0, (2,)) + fill(1, (2,))) * 8).tolist()
    assert run(valid, 2, backend=backend) == [expected] * 2


def branches(rank: int) -> list[float]:
    for _ in range(3):
        tensor = fill(rank, (2,))
        if rank == 0:
            dist.all_reduce(tensor)
        else:
            dist.all_reduce(tensor)
    return tensor.tolist()


@BACKENDS
def test_calls_in_two_branches_are_warned_of_once_and_run(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    [warned] = messages(branches, 2, backend, caplog)
    assert "is at different lines" in warned and sum(warned == record.message for record in caplog.records) == 2
    assert run(branches, 2, backend=backend) == [(fill(0, (2,)) + fill(1, (2,))).tolist()] * 2


def mismatched(rank: int) -> str:
    with pytest.raises(dist.MismatchError) as caught:
        dist.all_reduce(fill(rank, (2 + rank,)))  # where they differ
    dist.all_reduce(fill(rank, (2,)))
    return str(caught.value)


@BACKENDS
def test_a_mismatch_names_the_lines_and_shows_the_stack_if_asked(
    backend: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = line_of(mismatched, "# where they differ")
    for text in run(mismatched, 2, backend=backend):
        assert f"Call sites: rank 0 at {where}" in text and f"rank 1 at {where}" in text
    assert messages(mismatched, 2, backend, caplog) == []
    monkeypatch.setenv(STACKS_VARIABLE, "1")
    stacks = messages(mismatched, 2, backend, caplog)
    assert len(stacks) == 2
    for rank, stack in enumerate(stacks):
        assert stack.startswith("Collective desynchronization: ") and f"on rank {rank}" in stack
        assert f", line {where.partition(':')[2].partition(' ')[0]}, in mismatched" in stack
        assert "in all_reduce" in stack.partition("in mismatched")[2]


def test_asynchronous_calls_are_compared_and_leave_no_keys(caplog: pytest.LogCaptureFixture) -> None:
    def program(rank: int) -> int:
        tensors = [fill(rank, (3,)) for _ in range(6)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            assert work is not None
            work.wait()
        assert all(tensor.tolist() == (fill(0, (3,)) + fill(1, (3,))).tolist() for tensor in tensors)
        dist.barrier()
        assert dist.group.WORLD is not None
        dist.monitored_barrier()
        return sum("sites/" in key for key in dist.group.WORLD.store.list_keys())

    with caplog.at_level(logging.WARNING, "torchdist_ref.debug"):
        assert max(run(program, 2)) <= 2
    assert not [record for record in caplog.records if record.name == "torchdist_ref.debug"]


def test_more_calls_may_wait_than_the_recorder_keeps(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a rank aborted with StopIteration because the call that ran next was not kept any more."""
    monkeypatch.setenv("TORCHDIST_REF_FLIGHT_RECORDER_SIZE", "3")

    def program(rank: int) -> list[list[float]]:
        tensors = [fill(rank + number, (3,)) for number in range(40)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            assert work is not None
            work.wait()
        return [tensor.tolist() for tensor in tensors]

    expected = [(fill(number, (3,)) + fill(number + 1, (3,))).tolist() for number in range(40)]
    with caplog.at_level(logging.WARNING, "torchdist_ref.debug"):
        assert run(program, 2) == [expected] * 2
    assert not [record for record in caplog.records if record.name == "torchdist_ref.debug"]


def test_frames_of_libraries_are_not_the_users() -> None:
    frames = [
        ("submit", "/home/me/torchdist_ref/torchdist_ref/backends/ref/backend.py", 1),
        ("wrapper", "/env/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", 2),
        ("helper", "/env/lib/python3.11/site-packages/lightning/trainer.py", 3),
        ("step", "/home/me/torch/train.py", 4),
    ]
    assert user_frames(frames) == [frames[3]]
    # The stack may be of another Python than the one that reads it.
    foreign = [("wait", "/opt/other/lib/python3.12/threading.py", 1), ("g", "/usr/lib/python3/dist-packages/a.py", 2)]
    assert user_frames([*foreign, frames[3]]) == [frames[3]]
    assert user_frames(frames[:3]) == [frames[2]]
    assert user_frames(frames[:2]) == []
