"""Eight mistakes of order that the simulated device shows, each beside the program that is right.

A program returns the number that it computed; `RIGHT` is what it should be. A mistake must give another number, or an
error, in each of 100 runs; the right program must give the right number in 100 runs, and with 100 seeds.
"""

from __future__ import annotations

import functools
import mmap
import operator
from collections.abc import Callable

import pytest
import torch

import torchdist_ref as dist
from tests.on_sim import on_sim
from torchdist_ref.testing import run, simulated_device

RIGHT, RUNS = 3.0, 100
sim = "sim"


def filled(device: str = sim, length: int = 64) -> torch.Tensor:
    """Return a tensor that is RIGHT once its stream has run."""
    return torch.ones(length, device=device).mul_(RIGHT)


def collective_on_a_side_stream(waits: bool) -> float:
    """Have a side stream publish a tensor, as a collective does, with or without an event before it."""
    tensor, side = filled(), torch.Stream(sim)
    published = torch.empty(64).pin_memory()
    if waits:
        side.wait_event(torch.accelerator.current_stream().record_event())
    with side:
        published.copy_(tensor, non_blocking=True)
    side.synchronize()
    return published.mean().item()


def result_on_the_host(waits: bool) -> float:
    """Read a result that was copied to the host asynchronously."""
    result = filled().to("cpu", non_blocking=True)
    if waits:
        torch.accelerator.synchronize()
    return result.mean().item()


def staging_buffer(waits: bool) -> float:
    """Use one staging buffer for two copies to the device."""
    staging, first, second = torch.full((64,), RIGHT).pin_memory(), torch.empty(64, device=sim), filled()
    first.copy_(staging, non_blocking=True)
    if waits:
        torch.accelerator.current_stream().synchronize()
    staging.fill_(5)
    second.copy_(staging, non_blocking=True)
    return first.mean().item()


def record_stream(waits: bool) -> float:
    """Free a tensor that a side stream still reads, and allocate another."""
    main, side = torch.accelerator.current_stream(), torch.Stream(sim)
    tensor = filled()
    side.wait_stream(main)
    with side:
        result = tensor * 1
    if waits:
        tensor.record_stream(side)
    del tensor
    another = torch.zeros(64, device=sim)
    main.wait_stream(side)
    return (result + another).mean().item()


def current_device(waits: bool) -> float:
    """Wait for the current stream of the tensor's device, or of the current device."""
    tensor = filled("sim:1")
    stream, other = torch.Stream("sim:1"), torch.accelerator.current_stream("sim:1" if waits else None)
    stream.wait_event(other.record_event())
    with stream:
        host = tensor.to("cpu", non_blocking=True)
    stream.synchronize()
    return host.mean().item()


def stream_of_the_copy(waits: bool) -> float:
    """Synchronize the stream of a copy, or the one that was current before."""
    tensor, side = filled(), torch.Stream(sim)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        host = tensor.to("cpu", non_blocking=True)
    (side if waits else torch.accelerator.current_stream()).synchronize()
    return host.mean().item()


def freed_pinned_memory(waits: bool) -> float:
    """Unmap registered memory after, or before, the copy from it has run."""
    memory = mmap.mmap(-1, 4096)
    source = torch.frombuffer(memory, dtype=torch.float32)
    source.fill_(RIGHT)
    torch.sim.host_register(source.data_ptr(), 4096)  # type: ignore[attr-defined]
    target = torch.empty(1024, device=sim)
    try:
        target.copy_(source, non_blocking=True)
        if waits:
            torch.accelerator.synchronize()
    finally:
        torch.sim.host_unregister(source.data_ptr())  # type: ignore[attr-defined]
        del source
        memory.close()
    return target.mean().item()


def barrier_of_a_device(waits: bool) -> float:
    """Wait for all streams of the device that computes, or of another."""
    host = filled("sim:1").to("cpu", non_blocking=True)
    torch.accelerator.synchronize("sim:1" if waits else "sim:0")
    return host.mean().item()


def reduced_on_a_side_stream(rank: int, waits: bool) -> float:
    """Reduce, on a side stream, a tensor that the current stream still computes."""
    tensor, side = torch.ones(64, device=f"sim:{rank}").mul_(rank + 1), torch.Stream(f"sim:{rank}")
    if waits:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        dist.all_reduce(tensor)
    torch.accelerator.synchronize()
    return tensor.mean().item()


def reduced_asynchronously(rank: int, waits: bool) -> float:
    """Read the result of an asynchronous reduction: threads of the host decide when it is there without a wait."""
    tensor = torch.ones(64, device=f"sim:{rank}").mul_(rank + 1)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    if waits:
        work.wait()
    host = tensor.to("cpu", non_blocking=True)
    torch.accelerator.current_stream().synchronize()
    work.wait()
    torch.accelerator.synchronize()
    return host.mean().item()


COLLECTIVE = [reduced_on_a_side_stream, reduced_asynchronously]
PROGRAMS = [
    collective_on_a_side_stream,
    result_on_the_host,
    staging_buffer,
    record_stream,
    current_device,
    stream_of_the_copy,
    freed_pinned_memory,
    barrier_of_a_device,
]


def outcome(program: Callable[[bool], float], waits: bool) -> float | str:
    try:
        return program(waits)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("program", PROGRAMS)
@on_sim
def test_a_mistake_gives_a_wrong_number_or_an_error_in_each_run(program: Callable[[bool], float]) -> None:
    wrong = [outcome(program, waits=False) for _ in range(RUNS)]
    torch.accelerator.synchronize()
    assert RIGHT not in wrong, f"{wrong.count(RIGHT)} of {RUNS} runs were right"


@pytest.mark.parametrize("program", PROGRAMS)
@on_sim
def test_the_right_program_is_right_in_each_run_and_order(program: Callable[[bool], float]) -> None:
    for delay in ("late", "none", *range(RUNS)):
        with simulated_device.delay(delay):
            assert outcome(program, waits=True) == RIGHT, delay


def on_ranks(program: Callable[[int, bool], float], waits: bool, times: int) -> list[float]:
    """Return the results of both ranks of a program that runs so many times."""

    def repeated(rank: int) -> list[float]:
        torch.accelerator.set_device_index(rank)
        return [program(rank, waits) for _ in range(times)]

    return functools.reduce(operator.iadd, run(repeated, 2), [])


@on_sim
def test_a_collective_on_a_side_stream_without_an_event_is_wrong_in_each_run() -> None:
    assert RIGHT not in on_ranks(reduced_on_a_side_stream, waits=False, times=RUNS)


@pytest.mark.parametrize("program", COLLECTIVE)
@on_sim
def test_a_collective_that_is_waited_for_is_right_in_each_run_and_order(program: Callable[[int, bool], float]) -> None:
    assert on_ranks(program, waits=True, times=RUNS) == [RIGHT] * 2 * RUNS
    for delay in ("none", *range(5)):
        with simulated_device.delay(delay):
            assert on_ranks(program, waits=True, times=5) == [RIGHT] * 10, delay


@on_sim
def test_a_block_restores_the_delay_before_it() -> None:
    with simulated_device.delay("none"):
        with simulated_device.delay(7):
            pass
        torch.ones(4, device="sim")
        assert torch.ops.simulated_device.pending(0) == 0
    torch.ones(4, device="sim")
    assert torch.ops.simulated_device.pending(0) > 0


@on_sim
def test_programs_that_share_the_device_between_threads_stay_right() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: outcome(PROGRAMS[number % len(PROGRAMS)], waits=True), range(160)))
    assert found == [RIGHT] * 160
