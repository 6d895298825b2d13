"""A rank forks: the child has no group, and whatever it does or lets go of, the parent's goes on."""

from __future__ import annotations

import gc
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as c10d
from torch.utils.data import DataLoader, TensorDataset

import torchdist_ref as dist
from tests.process_ends import answer_of_child
from torchdist_ref.testing import fill, run

LARGE = 300_000


def try_to_reduce() -> str:
    try:
        dist.all_reduce(torch.ones(3))
    except dist.DistError as error:
        return f"DistError: {error}"
    except ValueError as error:
        return f"ValueError: {error}"
    return "reduced"


def fork_and_go_on(rank: int) -> tuple[str, list[bool]]:
    tensor = dist.empty_registered(LARGE)
    tensor.copy_(fill(rank, (LARGE,)))
    held = [tensor]

    def let_go() -> str:
        held.clear()
        gc.collect()
        return ""

    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    said = answer_of_child(try_to_reduce)
    answer_of_child(let_go)
    work.wait()
    kept = torch.equal(tensor, fill(rank, (LARGE,)))
    dist.all_reduce(tensor)
    return said, [kept, torch.equal(tensor, fill(0, (LARGE,)) + fill(1, (LARGE,)))]


def test_a_child_is_told_that_it_has_no_group_and_the_parent_goes_on() -> None:
    for said, right in run(fork_and_go_on, 2, ranks="processes"):
        assert said.startswith("ValueError: Default process group has not been initialized")
        assert right == [True, True]


def load(rank: int) -> float:
    total = 0.0
    for (batch,) in DataLoader(TensorDataset(torch.arange(24.0)), batch_size=8, num_workers=2):
        part = batch.sum() * (rank + 1)
        dist.all_reduce(part)
        total += part.item()
    return total


def test_workers_of_a_data_loader_may_be_forked_between_calls() -> None:
    assert run(load, 2, ranks="processes") == [3 * 276.0] * 2


def fork_in_a_group_of_torchs(rank: int, path: str) -> tuple[list[str], list[float]]:
    """Return what calls of a forked child raise, and the parents' next sum: the child once took part in it."""
    timeout = timedelta(seconds=5)
    c10d.init_process_group("ref", init_method=f"file://{path}", rank=rank, world_size=2, timeout=timeout)
    tensor = torch.full((2,), 10.0 * (rank + 1))
    calls = {
        "waits": lambda: c10d.all_reduce(torch.ones(2)),
        "does not wait": lambda: c10d.all_reduce(torch.ones(2), async_op=True),
        "sends": lambda: c10d.send(torch.ones(2), 1 - rank),
        "leaves": c10d.destroy_process_group,
    }
    said = [answer_of_child(lambda call=call: str(call())) for call in calls.values()]  # type: ignore[misc]
    c10d.all_reduce(tensor)
    c10d.destroy_process_group()
    return said, tensor.tolist()


def test_a_child_cannot_use_its_parents_group_of_torchs(tmp_path: Path) -> None:
    for said, total in run(fork_in_a_group_of_torchs, 2, str(tmp_path / "store"), init=False, ranks="processes"):
        assert [text.partition(":")[0] for text in said] == ["DestroyedGroupError"] * 3 + ["None"], said
        assert "belongs to the process that forked this one" in said[0]
        assert total == [30.0, 30.0]
