"""Time of calls on simulated ranks is what the network's numbers say, to the last term; so is computation between."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from torchdist_ref import simulation
from torchdist_ref.backends.ref.fast import FastExecutor
from torchdist_ref.simulation import Network, RankError, scheduler
from torchdist_ref.testing import fill

BYTES = 64 * 1024
COPY, NEAR, FAR, GAMMA = 2.0**-30, 2.0**-29, 2.0**-27, 2.0**-31
NETWORK = Network(
    alpha=0.5, beta=FAR, gamma=GAMMA, hosts=(0, 0), local_alpha=0.25, local_beta=NEAR, copy=COPY, overhead=8.0
)
APART = Network(**{**vars(NETWORK), "hosts": (0, 1)})


def seconds(call: Callable[[int], Any], network: Network, nbytes: int = BYTES) -> float:
    """Return the time of the second call, from a common start; the first one is planned."""

    def program(rank: int) -> float:
        for start in (100.0, 200.0):
            time.sleep(start - time.monotonic())
            call(rank)
        return time.monotonic() - 200.0

    return max(simulation.run(program, 2, network=network).values)


def broadcast(nbytes: int) -> Callable[[int], Any]:
    return lambda rank: dist.broadcast(fill(rank, (nbytes // 4,)), 0)


def all_reduce(nbytes: int) -> Callable[[int], Any]:
    return lambda rank: dist.all_reduce(fill(rank, (nbytes // 4,)))


def test_a_broadcast_is_a_call_a_copy_and_a_message() -> None:
    copied = 8.0 + BYTES * COPY
    assert seconds(broadcast(BYTES), NETWORK) == copied + 0.25 + BYTES * NEAR
    assert seconds(broadcast(BYTES), APART) == copied + 0.5 + BYTES * FAR


def test_a_sum_is_reduced_once_it_has_arrived() -> None:
    assert seconds(all_reduce(BYTES), NETWORK) == 8.0 + BYTES * COPY + 0.25 + BYTES * NEAR + BYTES * GAMMA


def test_one_processor_sends_before_it_receives() -> None:
    one = Network(**{**vars(APART), "overlap": False})
    rest = 8.0 + BYTES * COPY + 0.5 + BYTES * GAMMA
    assert seconds(all_reduce(BYTES), APART) == rest + BYTES * FAR
    assert seconds(all_reduce(BYTES), one) == rest + 2 * BYTES * FAR


def test_calls_that_exceed_the_cache_wait_for_memory() -> None:
    slow = Network(**{**vars(NETWORK), "cache": BYTES // 4, "memory": 2.0**-20})
    # Each byte is read once for the staging buffer; the sum is read and written.
    assert seconds(all_reduce(BYTES), slow) == 8.0 + 0.25 + BYTES * (3 * 2.0**-20 + GAMMA)


def test_reads_of_registered_tensors_take_time() -> None:
    nbytes = 256 * 1024

    def program(rank: int) -> float:
        tensor = dist.empty_registered(nbytes // 4, dtype=torch.float32)
        tensor.copy_(fill(rank, (nbytes // 4,)))
        for start in (100.0, 200.0):
            time.sleep(start - time.monotonic())
            dist.all_gather_into_tensor(torch.empty(nbytes // 2), tensor)
        return time.monotonic() - 200.0

    found = max(simulation.run(program, 2, network=NETWORK).values)
    # Twice all wait for all: where the tensors are, and that nobody reads them any more.
    assert found == 8.0 + 0.25 + nbytes * (NEAR + COPY) + 0.25


# ---- computation


class Processor:
    """Clock of processor time that advances only where a test computes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used = 0.0
        monkeypatch.setattr(scheduler, "thread_time", lambda: self.used)

    def compute(self, amount: float) -> None:
        self.used += amount


@pytest.mark.parametrize(("compute", "factor"), [(0, 0.0), (2.0, 2.0), ("measured", 1.0)])
def test_computation_between_calls_takes_its_factor(
    compute: float | str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = Processor(monkeypatch)

    def program(rank: int) -> tuple[float, float]:
        dist.barrier()
        began = time.monotonic()
        if rank == 1:
            processor.compute(3.0)
        own = time.monotonic() - began
        dist.barrier()
        return own, time.monotonic() - began

    network = Network(0.0, 0.0, 0.0, (0, 0), 0.0, 0.0)
    values = simulation.run(program, 2, network=network, compute=compute).values
    assert values == [(0.0, 3.0 * factor), (3.0 * factor, 3.0 * factor)]


def test_processor_time_of_calls_is_no_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    processor, run = Processor(monkeypatch), FastExecutor.run

    def slow(*arguments: Any) -> None:
        processor.compute(5.0)
        run(*arguments)

    monkeypatch.setattr(FastExecutor, "run", slow)
    assert seconds(all_reduce(BYTES), NETWORK) == seconds(all_reduce(BYTES), NETWORK)

    def program(rank: int) -> float:
        began = time.monotonic()
        for _ in range(3):
            dist.all_reduce(torch.ones(3))
        return time.monotonic() - began

    free = Network(0.0, 0.0, 0.0, (0, 0), 0.0, 0.0)
    assert simulation.run(program, 2, network=free, compute="measured").values == [0.0, 0.0]
    assert processor.used >= 30.0


def computes(rank: int) -> float:
    for step in range(3):
        sum(number * number for number in range(2000 * (1 + rank + step)))
        dist.all_reduce(fill(rank, (5,)))
        dist.send(fill(rank, (3,)), 1 - rank) if rank else dist.recv(torch.zeros(3), 1)
    return time.monotonic()


@pytest.mark.parametrize("seed", [0, 3])
def test_a_record_of_measured_times_repeats_the_run_exactly(seed: int) -> None:
    network = Network(alpha=1e-5, hosts=(0, 1))
    first = simulation.run(computes, 2, seed=seed, network=network, compute="measured")
    assert min(first.values) > 0 and len(first.computed) > 6
    other = simulation.run(computes, 2, seed=seed, network=network, compute="measured")
    again = simulation.run(computes, 2, seed=seed, network=network, compute=first.computed)
    assert (again.digest, again.times, again.values) == (first.digest, first.times, first.values)
    assert again.computed == first.computed and other.digest != first.digest
    repeated = simulation.run(computes, 2, decisions=first.decisions, network=network, compute=first.computed)
    assert repeated.digest == first.digest


def test_a_record_of_another_run_is_refused() -> None:
    few = simulation.run(lambda rank: dist.barrier(), 2, compute="measured").computed
    with pytest.raises(RankError, match="must be the record of a run with the same program, ranks, network, faults"):
        simulation.run(computes, 2, compute=few)
    for wrong in ([0.1, -1.0], ["a"], [True], "measure", b"1"):
        with pytest.raises(
            dist.ArgumentError, match="argument 'compute' must be a factor of 0 or more, 'measured', or"
        ):
            simulation.run(computes, 2, compute=wrong)
    assert simulation.run(computes, 2).computed == ()


def test_computation_and_messages_share_one_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = Processor(monkeypatch)

    def program(rank: int) -> float:
        tensor = fill(rank, (BYTES // 4,))
        dist.all_reduce(tensor)
        time.sleep(100.0 - time.monotonic())
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        processor.compute(64.0)
        time.monotonic()
        work.wait()
        return time.monotonic() - 100.0

    alone = seconds(all_reduce(BYTES), NETWORK)
    both = Network(**{**vars(NETWORK), "overlap": False})
    assert simulation.run(program, 2, network=NETWORK, compute=1).values == [64.0, 64.0]
    assert simulation.run(program, 2, network=both, compute=1).values == pytest.approx([64.0 + alone] * 2, abs=1e-6)
