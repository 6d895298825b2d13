"""Recorders: every backend records the same bytes for the same call, whether its blocks are a list or one tensor."""

from __future__ import annotations

import pytest
import torch

import torchdist_ref as dist
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
