"""Recorders: every backend records the same bytes for the same call, whether its blocks are a list or one tensor."""

from __future__ import annotations

import pytest
import torch

import torchdist_ref as dist
from torchdist_ref.calls import Barrier
from torchdist_ref.recorder import DEFAULT_CAPACITY, MAX_CAPACITY, Recorder, capacity_from_environment
from torchdist_ref.testing import run

WORLD = 2
BLOCK = 3 * 4


def blocks() -> list[torch.Tensor]:
    return [torch.ones(3) for _ in range(WORLD)]


def calls(rank: int) -> None:
    mine, whole = torch.ones(3), torch.ones(3 * WORLD)
    dist.all_reduce(mine)
    dist.all_gather(blocks(), mine)
    dist.all_gather_single(whole, mine)
    dist.reduce_scatter(mine, blocks())
    dist.reduce_scatter_single(mine, whole)
    dist.all_to_all(blocks(), blocks())
    dist.gather(mine, blocks() if rank == 0 else None)
    dist.scatter(mine, blocks() if rank == 0 else None)
    dist.barrier()


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_the_largest_operand_is_recorded(backend: str) -> None:
    def program(rank: int) -> list[int]:
        calls(rank)
        if rank == 0:
            dist.send(torch.ones(3), 1)
        else:
            dist.recv(torch.ones(3), 0)
        assert dist.group.WORLD is not None
        return [event.nbytes for event in dist.group.WORLD.recorder]

    everything = WORLD * BLOCK
    collectives = [BLOCK, *[everything] * 5]
    assert run(program, WORLD, backend=backend, ranks="processes") == [
        [*collectives, everything, everything, 0, BLOCK],
        [*collectives, BLOCK, BLOCK, 0, BLOCK],
    ]


def test_the_fake_backend_records_the_same() -> None:
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=WORLD)
    try:
        calls(0)
        assert dist.group.WORLD is not None
        assert [event.nbytes for event in dist.group.WORLD.recorder] == [BLOCK, *[WORLD * BLOCK] * 7, 0]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_a_call_is_recorded_when_it_is_made_with_its_dtype_shapes_and_state(backend: str) -> None:
    def program(rank: int) -> list[list[tuple[int, str, str]]]:
        assert dist.group.WORLD is not None
        recorder = dist.group.WORLD.recorder
        work = dist.all_reduce(torch.ones(2, 3), async_op=True) if rank == 0 else None
        before = [(event.sequence, event.text, event.state) for event in recorder.events()]
        if rank == 0:
            dist.send(torch.ones(1), 1)
        else:
            dist.recv(torch.ones(1), 0)
            work = dist.all_reduce(torch.ones(2, 3), async_op=True)
        assert work is not None
        work.wait()
        dist.all_reduce(torch.ones(3, dtype=torch.int32))
        after = [(event.sequence, event.text, event.state) for event in recorder.events()]
        return [before, sorted(after)]

    first, second = run(program, WORLD, backend=backend, ranks="processes")
    text = "all_reduce(reduction=sum) of float32 [2, 3]"
    [(number, found, state)] = first[0]
    assert (number, found) == (0, text) and state in ("scheduled", "started")
    assert second[0] == []
    for events, message in (
        (first[1], "send(dst=1, tag=0) of float32 [1]"),
        (second[1], "recv(src=0, tag=0) of float32 [1]"),
    ):
        last = (1, "all_reduce(reduction=sum) of int32 [3]", "completed")
        assert events == [(-1, message, "completed"), (0, text, "completed"), last]


def test_torchs_variable_sets_how_many_calls_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, kept in (("7", 7), ("0", 1), ("many", DEFAULT_CAPACITY), ("999999999999", MAX_CAPACITY)):
        monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", text)
        assert capacity_from_environment() == kept
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "9")
    assert capacity_from_environment() == 9
    monkeypatch.setenv("TORCHDIST_REF_FLIGHT_RECORDER_SIZE", "3")
    recorder = Recorder()
    for number in range(5):
        recorder.begin((number, 0), Barrier(), ((), ()))
    assert [event.sequence for event in recorder.events()] == [2, 3, 4]


def test_a_call_that_has_left_the_buffer_can_be_dropped() -> None:
    """Once a collective at DETAIL failed if messages of other threads had filled the buffer meanwhile."""
    recorder = Recorder(2)
    entry = recorder.begin((0, 0), Barrier(), ((), ()))
    for number in (1, 2):
        recorder.begin((number, 0), Barrier(), ((), ()))
    recorder.drop(entry)
    assert [event.sequence for event in recorder.events()] == [1, 2]
