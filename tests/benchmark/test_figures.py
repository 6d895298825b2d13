"""Figures of the benchmark against the documents that define them; tables and reports against text written out."""

from __future__ import annotations

import argparse
import io
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from torchdist_ref.benchmark import collectives, faults, limit, report
from torchdist_ref.benchmark.collectives import bus_bandwidth
from torchdist_ref.benchmark.faults import BUSY
from torchdist_ref.benchmark.limit import DIRECT, LIMIT
from torchdist_ref.benchmark.operations import OPERATIONS
from torchdist_ref.benchmark.report import parse_size, show_size
from torchdist_ref.benchmark.rounds import (
    Result,
    busy,
    busy_now,
    calls_for,
    disturbed_by_others,
    durations,
    own_clock,
    shared_out,
)

# nccl-tests, doc/PERFORMANCE.md, for 4 ranks.
BUS_FACTORS = {
    "all_reduce": 1.5,
    "reduce": 1.0,
    "broadcast": 1.0,
    "all_gather": 0.75,
    "reduce_scatter": 0.75,
    "all_to_all": 0.75,
    "gather": 0.75,
    "scatter": 0.75,
    "sendrecv": 1.0,
}


def least(op: str, n: int) -> set[tuple[float, float]]:
    """The formulas of staging: (copied, added) on the busiest and, where it differs, on the other ranks."""
    return {
        "all_reduce": {((2 * n - 1) / n, (n - 1) / n)},
        "reduce": {(2 * (n - 1) / n, (n - 1) / n), (1.0, (n - 1) / n)},
        "broadcast": {(1.0, 0.0)},
        "all_gather": {((n + 1) / n, 0.0)},
        "reduce_scatter": {((n - 1) / n, (n - 1) / n)},
        "all_to_all": {((2 * n - 1) / n, 0.0)},
        "gather": {(1.0, 0.0), (1 / n, 0.0)},
        "scatter": {(1.0, 0.0), (1 / n, 0.0)},
        "sendrecv": {(2.0, 0.0)},
        "barrier": {(0.0, 0.0)},
    }[op]


def least_direct(op: str, n: int) -> set[tuple[float, float]]:
    """The same where peers' tensors can be read and written."""
    return {
        "all_reduce": {((n - 1) / n, (n - 1) / n)},
        "reduce": {(0.0, (n - 1) / n)},
        "broadcast": {(1.0, 0.0), (0.0, 0.0)},
        "all_gather": {(1.0, 0.0)},
        "reduce_scatter": {(0.0, (n - 1) / n)},
        "all_to_all": {(1.0, 0.0)},
        "gather": {(1 / n, 0.0)},
        "scatter": {(1 / n, 0.0)},
        "sendrecv": {(1.0, 0.0)},
        "barrier": {(0.0, 0.0)},
    }[op]


def cost(op: str, rank: int, world: int, direct: bool = False, processors: int | None = None) -> tuple[float, float]:
    """The bytes that a rank copies and adds, as parts of the whole buffer."""
    copied = added = 0
    for kind, blocks in limit.work(op, rank, world, direct, processors):
        if kind in ("add", "add_each", "sum"):
            added += blocks
        else:
            copied += blocks
    return copied / world, added / world


def test_costs_are_counted_in_parts_of_the_whole_buffer() -> None:
    assert cost("all_reduce", 0, 2) == (1.5, 0.5)
    assert cost("reduce", 0, 4) == (1.5, 0.75)
    assert cost("reduce", 0, 4, processors=2) == (0.0, 3.0)


def result(op: str, size: int, samples: dict[str, list[float]], disturbed: tuple[bool, ...], **missing: str) -> Result:
    cell = {"op": op, "size_bytes": size, "world": 4}
    return Result(cell, samples, disturbed, {"calls": dict.fromkeys(samples, 5), "missing": missing})


def row(op: str = "all_reduce", size: int = 1 << 20, disturbed: tuple[bool, ...] = (False,) * 3) -> Result:
    samples = {"ref": [100e-6, 200e-6, 110e-6], "gloo": [900e-6, 1000e-6, 1100e-6], LIMIT: [80e-6, 80e-6, 100e-6]}
    return result(op, size, samples, disturbed)


@pytest.mark.parametrize("op", BUS_FACTORS)
def test_bus_factors_are_those_of_nccl_tests(op: str) -> None:
    assert OPERATIONS[op].factor(4) == BUS_FACTORS[op]
    assert bus_bandwidth(row(op), "ref") == pytest.approx((1 << 20) / 110e-6 * BUS_FACTORS[op])


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("op", OPERATIONS)
def test_limit_has_the_cost_of_the_formula(op: str, world: int) -> None:
    found = {tuple(round(part, 9) for part in cost(op, rank, world)) for rank in range(world)}
    expected = {(1.0, 0.0), (0.0, 1.0)} if (op, world) == ("reduce", 2) else least(op, world)
    assert found == {tuple(round(part, 9) for part in parts) for parts in expected}


@pytest.mark.parametrize("world", [2, 3, 8])
def test_two_processors_reduce_with_least_work_when_the_root_adds_all(world: int) -> None:
    costs = [cost("reduce", rank, world, processors=2) for rank in range(world)]
    assert costs == [(0.0, world - 1)] + [(1.0, 0.0)] * (world - 1)
    parts = [cost("reduce", rank, world, processors=3 * world) for rank in range(world)]
    # More work in sum, less for the busiest; two ranks are no more than two processors.
    assert (parts == costs) == (world == 2)
    assert world == 2 or sum(map(sum, parts)) > sum(map(sum, costs))
    assert max(map(sum, parts)) <= max(map(sum, costs))


@pytest.mark.parametrize("processors", [2, None])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("op", [op for op in OPERATIONS if op != "barrier"])
def test_limit_moves_as_many_bytes_as_its_cost(op: str, world: int, processors: int | None) -> None:
    stages = limit.Stages(bytearray(world * 4096), 4096, processors)
    for rank in range(world):
        buffers = OPERATIONS[op].buffers(rank, world, 48 * 1024, torch.float32)
        written = [operands[0].nbytes for _, *operands in limit.kernels(op, buffers, stages)]
        assert sum(written) == pytest.approx(sum(cost(op, rank, world, processors=processors)) * 48 * 1024)
        assert max(written) <= 4096
        stages.bind(OPERATIONS[op], buffers)()


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("op", OPERATIONS)
def test_direct_bound_has_the_cost_of_the_formula(op: str, world: int) -> None:
    found = {tuple(round(part, 9) for part in cost(op, rank, world, direct=True)) for rank in range(world)}
    assert found == {tuple(round(part, 9) for part in parts) for parts in least_direct(op, world)}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("op", [op for op in OPERATIONS if op != "barrier"])
def test_direct_bound_works_on_tensors_in_shared_memory(op: str, world: int) -> None:
    capacity = 2 * 48 * 1024
    memory = bytearray(world * capacity)
    for rank in range(world):
        tensors = limit.Tensors(memory, capacity, 4096, rank)
        buffers = OPERATIONS[op].buffers(rank, world, 48 * 1024, torch.float32, tensors.make)
        done = list(limit.kernels(op, buffers, tensors))
        written = sum(operands[0].nbytes for _, *operands in done)
        assert written == pytest.approx(sum(cost(op, rank, world, direct=True)) * 48 * 1024)
        tensors.bind(OPERATIONS[op], buffers)()


def test_limit_of_sizes_that_do_not_divide() -> None:
    stages = limit.Stages(bytearray(2 * 4096), window=4096)
    buffers = OPERATIONS["all_reduce"].buffers(0, 2, 4, torch.float32)
    assert len(list(limit.kernels("all_reduce", buffers, stages))) == 4


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_to_all", "scatter"])
def test_slots_of_the_limit_begin_at_cache_lines(op: str) -> None:
    """Blocks for eight ranks that crossed cache lines made this bound longer than the time that it bounds."""
    window = 64 * 1024
    stages = limit.Stages(bytearray(8 * window + 64), window)
    begin = -torch.frombuffer(stages.memory, dtype=torch.uint8).data_ptr() % 64
    stages.memory = memoryview(stages.memory)[begin:]
    first = torch.frombuffer(stages.memory, dtype=torch.uint8).data_ptr()
    buffers = OPERATIONS[op].buffers(0, 8, 1 << 20, torch.float32)
    operands = [operand for _, *operands in limit.kernels(op, buffers, stages) for operand in operands]
    staged = [offset for operand in operands if 0 <= (offset := operand.data_ptr() - first) < 8 * window]
    assert len(staged) > 8 and not any(offset % 64 for offset in staged)


def test_a_call_lasts_from_the_last_start_to_the_last_end() -> None:
    assert durations([[(0.0, 5.0), (6.0, 7.0)], [(1.0, 4.0), (6.5, 9.5)]]) == [4.0, 3.0]
    assert durations([[(0.0, 8.0)], [(0.0, 6.0)]], parts=4) == [2.0]
    assert calls_for([3e-3, 1e-3, 2e-3], 0.05) == 25


def test_bound_is_the_longest_rank_or_an_even_share_whichever_is_longer() -> None:
    # The root works 6 s, three others 2 s each: together 12 s. When they began plays no part.
    worked = [[(0.0, 6.0)], [(3.0, 5.0)], [(0.0, 2.0)], [(7.0, 9.0)]]
    assert [shared_out(worked, processors=many) for many in (1, 2, 3, 4)] == [[12.0], [6.0], [6.0], [6.0]]
    alike = [[(0.0, 2.0), (1.0, 2.0)]] * 8
    assert shared_out(alike, processors=2) == [8.0, 4.0] and shared_out(alike, parts=4, processors=8) == [0.5, 0.25]
    assert shared_out(worked) == shared_out(worked, processors=len(os.sched_getaffinity(0)))
    assert own_clock(len(os.sched_getaffinity(0))) is time.perf_counter
    assert own_clock(len(os.sched_getaffinity(0)) + 1) is time.thread_time


def test_ratios_compare_the_same_round_and_leave_out_disturbed_ones() -> None:
    assert row().ratio("gloo", "ref") == pytest.approx(9.0)
    assert row(disturbed=(True, False, True)).noisy
    quiet = row(disturbed=(True, False, False))
    assert not quiet.noisy
    assert quiet.median("ref") == pytest.approx(155e-6)
    assert quiet.ratio("gloo", "ref") == pytest.approx(7.5)


def test_other_processes_are_the_busy_time_that_is_not_ours() -> None:
    stat = "cpu 1 1 1 1\ncpu0 10 1 5 999 888 2 3 4 0 0\ncpu1 100 0 0 5 0 0 0 0 0 0\nintr 5"
    assert busy(stat, {0}, 100) == 0.25
    assert busy(stat, {0, 1}, 100) == 1.25
    # Two ticks and 15 % of the time are tolerated.
    assert disturbed_by_others(1.2, own=1.0, wall=1.0) and not disturbed_by_others(1.16, own=1.0, wall=1.0)
    assert 0 < busy_now() <= busy_now()


def test_the_table_shows_backends_side_by_side() -> None:
    noisy = row("barrier", 0, (True, True, False))
    without = result("barrier", 0, {"ref": [*noisy.samples["ref"]]}, (True, True, False), gloo="has none")
    assert collectives.table([row(), without], ["ref", "gloo"], "gloo") == (
        "op           size  limit us  ref us  GB/s   bus  x gloo  / limit  gloo us  GB/s   bus  / limit\n"
        "all_reduce  1 MiB      80.0     110  9.53  14.3    9.00     1.25    1,000  1.05  1.57     11.2\n"
        "barrier         -         -    110~     -     -       -        -        -     -     -        -"
    )


def test_registered_buffers_have_a_bound_of_their_own() -> None:
    samples = {"registered": [50e-6] * 3, "ref": [100e-6] * 3, LIMIT: [80e-6] * 3, DIRECT: [40e-6] * 3}
    both = result("all_reduce", 1 << 20, samples, (False,) * 3)
    assert collectives.table([both], ["registered"], "registered") == (
        "op           size  limit us  direct us  registered us  GB/s   bus  / direct\n"
        "all_reduce  1 MiB      80.0       40.0           50.0  21.0  31.5      1.25"
    )
    assert collectives.table([both], ["ref"], "ref").splitlines()[0].endswith("bus  / limit")


def test_report_has_machine_date_and_versions() -> None:
    found = report.report("collectives", {"world": 4}, collectives.entries([row()]), ["a note"])
    assert found["schema"] == 3 and found["benchmark"] == "collectives" and found["notes"] == ["a note"]
    assert torch.__version__.startswith(found["versions"]["torch"])
    assert {"processor", "processors_for_us", "memory_kib", "load_average"} <= set(found["machine"])
    entry = next(entry for entry in found["results"] if entry["backend"] == "ref")
    assert entry["samples_seconds"] == [100e-6, 200e-6, 110e-6]
    assert entry["times_longer_than"]["gloo"] == pytest.approx(1 / 9)
    assert entry["quartiles_seconds"] == pytest.approx([105e-6, 155e-6])
    assert entry["quartiles_times_longer_than"]["gloo"] == pytest.approx([(1 / 10 + 1 / 9) / 2, (1 / 9 + 1 / 5) / 2])
    assert entry["disturbed"] == [False] * 3 and entry["size_bytes"] == 1 << 20


def test_the_same_figures_draw_the_same_plot(tmp_path: Path) -> None:
    rows = [row(size=1 << power) for power in (10, 20)] + [row("barrier", 0)]
    drawn = []
    for name in ("a.svg", "b.svg"):
        collectives.plot(str(tmp_path / name), rows)
        drawn.append((tmp_path / name).read_text())
    assert drawn[0] == drawn[1]
    assert all(text in drawn[0] for text in ("all_reduce, 4 ranks", "gloo", "1 MiB", LIMIT))
    assert "barrier" not in drawn[0]


def test_distribution_of_faults_counts_errors_that_never_came() -> None:
    found = faults.result(BUSY, "barrier", "ref", [0.02, None, 0.04, 0.03])
    never = faults.result(BUSY, "barrier", "ref", [None])
    lines = [line.split() for line in faults.show(None, [found, never]).splitlines()]
    assert lines[1] == ["all", "busy", "barrier", "ref", "30.0", "40.0", "40.0", "1", "of", "4"]
    assert lines[2][4:] == ["-", "-", "-", "1", "of", "1"]


@pytest.mark.parametrize("text", ["", "0", "4X", "K", "-1", "1.5M"])
def test_a_wrong_size_is_named(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="sizes such as 4"):
        parse_size(text)


def test_sizes_read_as_they_are_shown() -> None:
    for size in (4, 1000, 1024, 3 << 20, 1 << 30):
        assert parse_size(show_size(size)) == size


class Terminal(io.StringIO):
    """Stream that may be a terminal."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: is_terminal  # type: ignore[method-assign]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_bar_shows_the_rounds_on_a_terminal_alone(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal(is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    bar = report.ProgressBar()
    bar.show("barrier", 1, 4)
    bar.clear()
    assert ("barrier" in stream.getvalue(), "25%" in stream.getvalue()) == (is_terminal, is_terminal)
    assert bool(stream.getvalue()) == is_terminal
