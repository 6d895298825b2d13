"""DDP's logging data: torch's fields and values, times of sampled iterations, and the log."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as theirs
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import torchdist_ref as dist
from tests.torchs_world import start_torch
from torchdist_ref.parallel.reducer import FIRST_ITERATIONS
from torchdist_ref.testing import fill, run

DDP = dist.DistributedDataParallel
OPTIONS: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}]


def train(model: Any, rank: int, iterations: int) -> dict[str, Any]:
    for step in range(iterations):
        model(fill(rank + step, (2, 3))).sum().backward()
    data: dict[str, Any] = model._get_ddp_logging_data()
    return data


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2, dtype=torch.float32))


def beside(rank: int, path: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    start_torch(store=theirs.FileStore(path, 2), rank=rank, world_size=2)
    pairs = []
    for options in OPTIONS:
        for iterations in (0, 3):
            pairs.append(
                (
                    train(TorchDDP(model(), **options), rank, iterations),
                    train(DDP(model(), **options), rank, iterations),
                )
            )
    theirs.destroy_process_group()
    return pairs


def test_fields_and_values_are_torchs(tmp_path: Path) -> None:
    for pairs in run(beside, 2, str(tmp_path / "store"), ranks="processes", backend="gloo"):
        for other, ours in pairs:
            assert set(other) <= set(ours)
            same = {name for name in other if "_time" not in name}
            assert {name: ours[name] for name in same} == {name: other[name] for name in same}


def test_times_add_up() -> None:
    def program(rank: int) -> dict[str, Any]:
        ddp = DDP(model())
        ddp._set_ddp_runtime_logging_sample_rate(1)
        return train(ddp, rank, 4)

    for data in run(program, 2):
        start = data["forward_compute_time_start"]
        assert start <= data["backward_compute_time_start"] <= data["backward_comm_time_start"]
        assert data["backward_comm_time_start"] <= data["backward_compute_time_end"] <= data["backward_comm_time_end"]
        assert data["forward_compute_time"] == data["backward_compute_time_start"] - start
        assert data["backward_compute_time"] == data["backward_compute_time_end"] - data["backward_compute_time_start"]
        assert data["backward_comm_time"] == data["backward_comm_time_end"] - data["backward_comm_time_start"]
        overlap = data["backward_compute_time_end"] - data["backward_comm_time_start"]
        assert data["backward_compute_comm_overlap_time"] == overlap
        assert 0 < data["avg_forward_compute_time"] and data["iteration"] == 3 and data["num_buckets_reduced"] == 1


def test_later_iterations_are_sampled_at_the_rate() -> None:
    def program(rank: int) -> list[int]:
        ddp = DDP(model())
        ddp._set_ddp_runtime_logging_sample_rate(4)
        with pytest.raises(dist.ArgumentError, match="'sample_rate' must be equal or greater than 1, got 0"):
            ddp._set_ddp_runtime_logging_sample_rate(0)
        return [train(ddp, rank, 1)["iteration"] for _ in range(FIRST_ITERATIONS + 8)]

    assert run(program, 1)[0] == [0, *range(1, 11), 10, 12, 12, 12, 12, 16, 16]


def test_the_log_has_both_at_the_debug_levels(caplog: pytest.LogCaptureFixture) -> None:
    def program(rank: int) -> None:
        train(DDP(model()), rank, 2)

    with caplog.at_level(logging.INFO, "torchdist_ref.parallel"):
        run(program, 1)
        assert "world_size: 1" not in caplog.text
        dist.set_debug_level(dist.DebugLevel.INFO)
        try:
            run(program, 1)
        finally:
            dist.set_debug_level(dist.DebugLevel.OFF)
    assert "constructed: backend_name: ref" in caplog.text and "world_size: 1" in caplog.text
    assert "runtime: avg_backward_comm_time: " in caplog.text and "iteration: 1" in caplog.text
