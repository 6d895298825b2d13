"""`torch.set_default_device` changes no tensor that the library makes for itself.

The device `meta` stands in for a GPU: a tensor of ours that lands there has no data, and breaks the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from tests.meaning.cases import MOVING, OBJECTS, REDUCING, UNEVEN, Case
from tests.meaning.compare import common, wait_for
from tests.meaning.formulas import meaning
from torchdist_ref.algorithms.ddp_comm_hooks import powerSGD_hook
from torchdist_ref.testing import fill, run

CASES = [Case(call, shape=(3, 2), root=1) for call in (*REDUCING, *MOVING)]
CASES += [Case(call, shape=(3, 2), root=1, uneven=True) for call in UNEVEN]


@contextmanager
def elsewhere() -> Iterator[None]:
    """Let tensors that name no device be on another device."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def right(case: Case) -> None:
    """Make a call and compare its outputs."""
    part, arguments = meaning(case, dist.get_rank(), [0, 1]), common(case, None)
    with elsewhere():
        wait_for(case, part.invoke(dist, part.inputs, part.outputs, arguments))
    for got, wanted in zip(part.outputs, part.expected, strict=True):
        assert wanted is None or torch.equal(got, wanted)


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_collectives_and_messages(backend: str) -> None:
    run(lambda rank: [right(case) for case in CASES], 2, backend=backend, ranks="processes")


def test_collectives_between_threads() -> None:
    run(lambda rank: [right(case) for case in CASES], 2)


@pytest.mark.parametrize("call", OBJECTS)
def test_objects(call: str) -> None:
    def program(rank: int) -> Any:
        received: list[Any] = [None, None]
        with elsewhere():
            if call == "all_gather_object":
                dist.all_gather_object(received, {"of": rank})
            elif call == "broadcast_object_list":
                received = [{"of": rank}, rank]
                dist.broadcast_object_list(received, src=1)
            elif call == "gather_object":
                dist.gather_object({"of": rank}, received if rank == 1 else None, dst=1)
            else:
                received = [None]
                dist.scatter_object_list(received, [{"of": 5}, {"of": 7}], src=1)
        return received

    both = [{"of": 0}, {"of": 1}]
    expected = {
        "all_gather_object": [both, both],
        "broadcast_object_list": [[{"of": 1}, 1]] * 2,
        "gather_object": [[None, None], both],
        "scatter_object_list": [[{"of": 5}], [{"of": 7}]],
    }
    assert run(program, 2) == expected[call]


def test_a_message_that_arrives_before_its_receive_and_one_to_the_rank_itself() -> None:
    def program(rank: int) -> list[torch.Tensor]:
        first, second = torch.zeros(5), torch.zeros(3)
        with elsewhere():
            works = [
                dist.isend(sent, 1 - rank, tag=tag) for tag, sent in enumerate((fill_of(rank, 5), fill_of(rank, 3)))
            ]
            dist.recv(second, 1 - rank, tag=1)
            dist.recv(first, 1 - rank, tag=0)
            for work in works:
                assert work is not None
                work.wait()
        return [first, second]

    for rank, received in enumerate(run(program, 2)):
        assert torch.equal(received[0], fill(1 - rank, (5,))) and torch.equal(received[1], fill(1 - rank, (3,)))


def fill_of(rank: int, count: int) -> torch.Tensor:
    with torch.device("cpu"):
        return fill(rank, (count,))


def test_the_random_numbers_of_powersgd() -> None:
    plain = powerSGD_hook.PowerSGDState(None).rng
    with elsewhere():
        other = powerSGD_hook.PowerSGDState(None).rng
        drawn = [other.randint(1000) for _ in range(5)]
    assert drawn == [plain.randint(1000) for _ in range(5)]


def test_a_mesh() -> None:
    def program(rank: int) -> list[list[int]]:
        with elsewhere():
            mesh = dist.init_device_mesh("cpu", (2, 1))
            return [list(map(int, row)) for row in mesh.mesh.tolist()]

    assert run(program, 2) == [[[0], [1]]] * 2
