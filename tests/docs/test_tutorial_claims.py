"""The tutorial's third question can be answered with no: its check notices a reducer that does not do its work.

The loop under test is the notebook's own: the cells with the tags `data` and `train` are read out of it and run here.
"""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from tests.docs import pages
from torchdist_ref.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torchdist_ref.testing import run

NOTEBOOK = pages.ROOT / "tutorials" / "03_train_digits.ipynb"
TOLERANCE = 1e-9
RANKS = 4
Names = dict[str, Any]
Prepare = Callable[[int, dist.DistributedDataParallel], AbstractContextManager[None]]


def tutorial(rank: int) -> Names:
    """Return what the tutorial's cells define, on one rank."""
    names: Names = {}
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    for cell in cells:
        if {"data", "train"} & set(cell["metadata"].get("tags", [])):
            magic, program = "".join(cell["source"]).split("\n", 1)
            assert magic == f"%%spmd -n {RANKS}"
            exec(program.replace('os.environ["RANK"]', str(rank)), names)
    return names


def train(rank: int, prepare: Prepare, epochs: int) -> tuple[torch.Tensor, int]:
    """Train as the tutorial does; return the weights and how many all_reduces the backend recorded."""
    names = tutorial(rank)
    model = dist.DistributedDataParallel(names["make_model"]())
    with prepare(rank, model):
        names["train"](model, slice(rank, None, RANKS), epochs=epochs)
    return names["weights"](model), model_reductions(model)


def model_reductions(model: dist.DistributedDataParallel) -> int:
    """Count the all_reduces that `ref` wrote down on the group of the model."""
    return sum(event.call.op == "all_reduce" for event in model.process_group.recorder)


def alone(epochs: int) -> torch.Tensor:
    names = tutorial(0)
    model = names["make_model"]()
    names["train"](model, slice(None), epochs=epochs)
    weights: torch.Tensor = names["weights"](model)
    return weights


def difference(prepare: Prepare, epochs: int = 1) -> tuple[list[float], list[int]]:
    """Return, for each rank, how far its weights are from those of one process, and its recorded all_reduces."""
    expected = alone(epochs)
    results = run(train, RANKS, prepare, epochs, ranks="processes", timeout=90.0)
    return [(weights - expected).abs().max().item() for weights, _ in results], [count for _, count in results]


def as_told(rank: int, model: dist.DistributedDataParallel) -> AbstractContextManager[None]:
    return nullcontext()


def without_averaging(rank: int, model: dist.DistributedDataParallel) -> AbstractContextManager[None]:
    return model.no_sync()


def one_bucket_damaged_on_one_rank(rank: int, model: dist.DistributedDataParallel) -> AbstractContextManager[None]:
    def damage(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if rank == 2 and bucket.index() == 0:
            bucket.buffer()[0] += 0.001
        return allreduce_hook(state, bucket)

    model.register_comm_hook(None, damage)
    return nullcontext()


def test_as_told_it_is_the_model_of_one_process_and_ref_saw_every_step() -> None:
    apart, recorded = difference(as_told)
    steps = 11
    assert all(value <= TOLERANCE for value in apart), apart
    assert all(count >= steps for count in recorded), recorded


@pytest.mark.parametrize("fault", [without_averaging, one_bucket_damaged_on_one_rank])
def test_a_faulty_reducer_is_noticed(fault: Prepare) -> None:
    apart, _ = difference(fault)
    assert all(value > 1000 * TOLERANCE for value in apart), apart


def test_without_averaging_ref_sees_no_gradient() -> None:
    _, recorded = difference(without_averaging)
    assert all(count < 11 for count in recorded), recorded


def test_the_notebooks_hold_no_outputs() -> None:
    for path in (pages.ROOT / "tutorials").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert [cell.get("outputs") for cell in cells if cell["cell_type"] == "code" and cell["outputs"]] == []
        assert [
            cell["execution_count"] for cell in cells if cell["cell_type"] == "code" and cell["execution_count"]
        ] == []
