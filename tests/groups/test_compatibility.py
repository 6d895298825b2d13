"""Private names that published programs use are there and work; errors have the phrases that programs match."""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as theirs
from torch import nn

import torchdist_ref as dist
from tests.groups import compatibility_table as table
from tests.groups.member_table import find
from torchdist_ref.pipeline.pipe import Pipe
from torchdist_ref.testing import fill, run

SHORT = timedelta(seconds=0.2)


@pytest.mark.parametrize("name", [name for name in table.NAMES if not name.startswith("ProcessGroup")])
def test_private_names_are_torchs(name: str) -> None:
    ours, other = find(name, "torchdist_ref", {}), find(name, "torch.distributed", {})
    assert ours is other or all(getattr(ours, part) is getattr(other, part) for part in dir(other) if part[0] != "_")


def test_modules_below_companions_are_found() -> None:
    below = importlib.import_module("torchdist_ref.checkpoint.state_dict")
    assert below.get_model_state_dict is find("checkpoint.state_dict.get_model_state_dict", "torch.distributed", {})


def private_functions(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    private: Any = dist
    tensors = [fill(rank, (3,)), fill(rank + 2, (2, 2))]
    private._broadcast_coalesced(dist.group.WORLD, tensors, 1 << 20, 1)
    gathered, block = torch.zeros(6), torch.zeros(3)
    private._all_gather_base(gathered, fill(rank, (3,)))
    private._reduce_scatter_base(block, fill(rank, (6,)))
    coalesced = [fill(rank, (3,)), fill(rank + 2, (4,))]
    with private._coalescing_manager():
        for tensor in coalesced:
            theirs.all_reduce(tensor)
    only_one = dist.new_group([1])
    module = find("distributed_c10d", "torchdist_ref", {})
    return {
        "broadcast": [tensor.tolist() for tensor in tensors],
        "gathered": gathered.tolist(),
        "block": block.tolist(),
        "coalesced": [tensor.tolist() for tensor in coalesced],
        "outside": private._rank_not_in_group(only_one),
        "default": private._get_default_group() is dist.group.WORLD is module._world.default_pg,
        "buckets": private._compute_bucket_assignment_by_size([torch.zeros(n) for n in (4, 4, 9)], [32])[0],
        "verified": private._verify_params_across_processes(dist.group.WORLD, tensors, None),
    }


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_private_functions_work_on_our_groups(backend: str) -> None:
    for rank, found in enumerate(run(private_functions, 2, ranks="processes", backend=backend)):
        assert found["broadcast"] == [fill(1, (3,)).tolist(), fill(3, (2, 2)).tolist()]
        assert found["gathered"] == [*fill(0, (3,)).tolist(), *fill(1, (3,)).tolist()]
        assert found["block"] == (fill(0, (6,)) + fill(1, (6,)))[3 * rank : 3 * rank + 3].tolist()
        sums = [(fill(0, (3,)) + fill(1, (3,))).tolist(), (fill(2, (4,)) + fill(3, (4,))).tolist()]
        assert found["coalesced"] == sums
        assert found["outside"] == (rank == 0) and found["default"]
        assert found["buckets"] == [[0, 1], [2]] and found["verified"] is None


class Unused(nn.Module):
    """A model that uses one of its layers only in the calls that are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.second(self.first(x)) if both else self.first(x)


def unused(static: bool) -> None:
    model = dist.DistributedDataParallel(Unused(), static_graph=static)
    for both in (static, False, True):
        model(torch.ones(1, 2), both).sum().backward()


def twice() -> None:
    model = dist.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    model(torch.ones(1, 2))
    for _ in range(2):
        model.module[1](torch.ones(1, 2)).sum().backward()


def outside() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dist.barrier(dist.new_group([1]))


ALONE: dict[str, Callable[[], Any]] = {
    "trying to initialize the default process group twice": lambda: dist.init_process_group("ref"),
    "Invalid function argument": lambda: dist.all_reduce(3),  # type: ignore[arg-type]
    "Invalid usage of tensors with different dtypes": lambda: dist.all_gather_into_tensor(
        torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    ),
    "destination rank should not be the same as the rank of the current process": lambda: dist.send(torch.ones(1), 0),
    "wait timeout after": lambda: dist.HashStore().wait(["absent"], SHORT),
    "Expected to have finished reduction in the prior iteration before starting a new one": lambda: unused(False),
    "parameters that were not used in producing loss": lambda: unused(False),
    "Your training graph has changed in this iteration": lambda: unused(True),
    "Expected to mark a variable ready only once": twice,
    "module must be nn.Sequential to be partitioned": lambda: Pipe(nn.Linear(1, 1)),  # type: ignore[arg-type]
    "checkpoint is not one of 'always', 'except_last', or 'never'": lambda: Pipe(nn.Sequential(), 1, "often"),
    "module with duplicate children is not supported": lambda: Pipe(nn.Sequential(*[nn.Linear(1, 1)] * 2)),
}


def texts(rank: int) -> dict[str, str]:
    found = {}
    for phrase, call in ALONE.items():
        try:
            call()
        except Exception as error:
            found[phrase] = str(error)
    return found


def without_rank_1(rank: int, ended: threading.Event) -> list[str]:
    if rank == 1:
        # A rank that leaves ends the barrier before its time.
        ended.wait(20)
        return []
    found = []
    for call in (lambda: dist.monitored_barrier(timeout=SHORT), outside):
        try:
            call()
        except Exception as error:
            found.append(str(error))
    ended.set()
    return found


def lacking(rank: int) -> str:
    try:
        dist.all_reduce(torch.ones(1), dist.ReduceOp.BXOR) if rank > 1 else dist.group.WORLD.backend._reduce_op(  # type: ignore[union-attr]
            Lacking()
        )
    except dist.UnsupportedError as error:
        return str(error)
    return ""


class Lacking:
    op, reduction = "all_reduce", "median"


def test_errors_have_the_phrases_that_programs_match() -> None:
    with pytest.raises(dist.NotInitializedError) as before:
        dist.get_rank()
    (found,) = run(texts, 1)
    barrier = run(without_rank_1, 2, threading.Event())[0][0]
    with pytest.warns(UserWarning) as warned:
        run(lambda rank: dist.barrier(dist.new_group([1])) if rank == 0 else dist.new_group([1]) and None, 2)
    (unsupported,) = run(lacking, 1, backend="gloo", ranks="processes")
    found |= {phrase: barrier for phrase in table.PHRASES if "monitoredBarrier" in phrase}
    found["Default process group has not been initialized"] = str(before.value)
    found["which does not belong to the given group"] = " ".join(str(w.message) for w in warned)
    found["does not support"] = unsupported
    assert set(found) == set(table.PHRASES)
    assert {phrase for phrase, text in found.items() if phrase not in text} == set()


def test_the_page_shows_the_tables() -> None:
    again = "run `python -m tests.groups.compatibility_table`"
    assert table.PAGE.read_text(encoding="utf-8") == table.page(), again
