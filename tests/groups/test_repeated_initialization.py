"""init, destroy, init: on a store that outlives the worlds, and on one port where rank 0 serves each store."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torchdist_ref as dist
from tests.ports import reserve_port
from torchdist_ref.stores import TCPStore
from torchdist_ref.testing import run

CYCLES, WORLD = 30, 2


def initialize_again(rank: int, method: str, port: int, agent: bool) -> list[float]:
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(agent))
    results = []
    for cycle in range(CYCLES):
        dist.init_process_group("ref", init_method=method, rank=rank, world_size=WORLD)
        tensor = torch.tensor([1.5 * rank + cycle])
        dist.all_reduce(tensor)
        dist.destroy_process_group()
        results.append(tensor.item())
    return results


EXPECTED = [2.0 * cycle + 1.5 for cycle in range(CYCLES)]


def test_on_the_store_of_a_launcher() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True)
    results = run(initialize_again, WORLD, "env://", server.port, True, ranks="processes", init=False)
    assert results == [EXPECTED] * WORLD
    server.close()


@pytest.mark.parametrize("method", ["env://", "tcp://127.0.0.1:{}"])
def test_on_one_port_where_rank_0_serves_the_store(method: str) -> None:
    port = reserve_port()
    results = run(initialize_again, WORLD, method.format(port), port, False, ranks="processes", init=False)
    assert results == [EXPECTED] * WORLD


def test_on_one_file(tmp_path: Path) -> None:
    """The last rank that closes the file removes it, while others open it for the next world."""
    results = run(initialize_again, WORLD, f"file://{tmp_path}/file", 0, False, ranks="processes", init=False)
    assert results == [EXPECTED] * WORLD
