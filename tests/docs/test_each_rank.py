"""The blocks "what each rank gets" are computed, for 2 and 4 ranks, and the docstrings beside them are complete."""

import inspect
from typing import Any

import each_rank
import pytest

import torchdist_ref as dist
from torchdist_ref.nn import functional

MOVING = [
    *(
        "all_reduce",
        "broadcast",
        "reduce",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_single",
        "gather",
        "gather_single",
        "gather_into_tensor",
        "scatter",
    ),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single"),
    *("all_reduce_coalesced", "all_gather_coalesced", "send", "recv", "isend", "irecv", "batch_isend_irecv"),
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "broadcast_multigpu", "all_reduce_multigpu", "reduce_multigpu"),
    *("all_gather_multigpu", "reduce_scatter_multigpu"),
]
STILL = [
    *(
        "init_process_group",
        "destroy_process_group",
        "is_initialized",
        "get_rank",
        "get_world_size",
        "get_backend",
        "barrier",
        "get_backend_impl",
        "set_timeout",
    ),
    *("new_group", "new_subgroups", "get_group_rank", "get_global_rank", "get_process_group_ranks", "init_device_mesh"),
]
DIFFERENTIABLE = [name.removeprefix("nn.functional.") for name in each_rank.PROGRAMS if name.startswith("nn.")]


def inputs(size: int) -> list[list[int]]:
    return [[(rank + 2) ** (at + 1) for at in range(size)] for rank in range(size)]


@pytest.mark.parametrize("size", each_rank.SIZES)
def test_results_are_those_of_the_definitions(size: int) -> None:
    given = inputs(size)
    pairs = [row[:2] for row in given]
    sums = [sum(column) for column in zip(*given, strict=True)]
    columns = [list(column) for column in zip(*given, strict=True)]
    expected: dict[str, list[Any]] = {
        "all_reduce": [[sum(column) for column in zip(*pairs, strict=True)]] * size,
        "broadcast": [pairs[1]] * size,
        "all_gather": [pairs] * size,
        "all_gather_into_tensor": [[value for pair in pairs for value in pair]] * size,
        "gather_single": [[value for pair in pairs for value in pair]] + ["nothing"] * (size - 1),
        "scatter": pairs,
        "reduce_scatter": [[total] for total in sums],
        "reduce_scatter_tensor": [[total] for total in sums],
        "all_to_all": [[[value] for value in column] for column in columns],
        "all_to_all_single": columns,
        "batch_isend_irecv": [pairs[(rank - 1) % size] for rank in range(size)],
        "send": [pairs[rank - rank % 2] for rank in range(size)],
    }
    got = {name: [output for _, output in each_rank.results(name, size)] for name in expected}
    assert got == expected


@pytest.mark.parametrize("name", MOVING)
def test_a_call_that_moves_data_has_a_block_for_two_and_four_ranks(name: str) -> None:
    text = each_rank.text_of(name)
    assert text.count("rank 0: ") == 2 and text.count("rank 3: ") == 1
    assert max(map(len, text.splitlines())) <= 104


@pytest.mark.parametrize("name", MOVING + STILL)
def test_its_docstring_names_counterparts_errors_and_differentiability(name: str) -> None:
    text = inspect.getdoc(getattr(dist, name)) or ""
    wanted = ["Elsewhere:", *(["Differentiable:"] if name in MOVING else [])]
    wanted += (
        []
        if name in ("is_initialized", "all_gather_single", "reduce_scatter_single", "gather_into_tensor")
        else ["Raises:"]
    )
    assert [word for word in wanted if f"\n{word}\n" not in text] == []


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_differentiable_call_shows_its_gradient(name: str) -> None:
    assert "Differentiable:\n    Yes" in (inspect.getdoc(getattr(functional, name)) or "")
    assert each_rank.text_of(f"nn.functional.{name}").count("gradient") == 6
