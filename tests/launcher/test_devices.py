"""Ranks on simulated devices, started by the launcher, by a notebook, and as processes of `testing.run`."""

from __future__ import annotations

import os
import textwrap
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from tests.launcher.test_api import config
from tests.on_sim import missing, on_sim
from torchdist_ref.launcher.api import launch_agent
from torchdist_ref.notebook import RankPool, RankServer
from torchdist_ref.testing import fill, run, simulated_device

TOTAL = [(2 * (a + b)).item() for a, b in zip(fill(0, (5,)), fill(1, (5,)), strict=True)]


@pytest.fixture(autouse=True)
def built() -> None:
    if why := missing():
        pytest.skip(why)


def summed_on_device() -> tuple[str, list[float]]:
    """Return the device of the local rank, and the sum of two ranks' tensors there."""
    simulated_device.install()
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    tensor = fill(dist.get_rank(), (5,)).to("sim") * 2
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return str(tensor.device), tensor.tolist()


@pytest.mark.parametrize("virtual", [False, True])
def test_the_launcher_gives_each_rank_the_device_of_its_local_rank(virtual: bool) -> None:
    found = launch_agent(config(virtual_local_rank=virtual, start_method="fork"), summed_on_device, [])
    places = ["sim:0", "sim:0"] if virtual else ["sim:0", "sim:1"]
    assert found == {rank: (place, TOTAL) for rank, place in enumerate(places)}


CELL = """
    import os, torch
    import torchdist_ref as dist
    from torchdist_ref.testing import fill, simulated_device

    simulated_device.install(2)
    dist.init_process_group()
    tensor = fill(dist.get_rank(), (5,)).to(f"sim:{dist.get_rank()}") * 2
    dist.all_reduce(tensor)
    print(tensor.device, tensor.tolist())
"""


def test_the_ranks_of_a_notebook() -> None:
    shown: list[tuple[int, Any]] = []
    server = RankServer()
    try:
        with RankPool(2, server) as pool:
            pool.run(textwrap.dedent(CELL), show=lambda rank, item: shown.append((rank, item.strip())))
            pool.run("dist.destroy_process_group()")
    finally:
        server.close()
    assert sorted(shown) == [(rank, f"sim:{rank} {TOTAL}") for rank in range(2)]


def on_own_device(rank: int) -> list[float]:
    """Rank of `run`, which has the devices of the process that called it."""
    tensor = fill(rank, (5,)).to(f"sim:{rank}") * 2
    dist.all_reduce(tensor)
    found: list[float] = tensor.tolist()
    return found


@on_sim
def test_processes_are_forked_before_the_device_is_used_and_started_anew_after_it() -> None:
    assert not torch.sim.is_initialized()  # type: ignore[attr-defined]
    assert run(on_own_device, 2, ranks="processes") == [TOTAL] * 2
    assert torch.ones(2, device="sim").tolist() == [1, 1] and torch.sim.is_initialized()  # type: ignore[attr-defined]
    assert run(on_own_device, 2, ranks="processes", timeout=60) == [TOTAL] * 2
