"""torch's column of the page "Differences from torch": torch's Gloo behaves as the page says.

If a test fails here, torch has changed: update the page and `compare.torch_can`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as oracle

from torchdist_ref.testing import run

VERSION = "2.13"
TIMEOUT = timedelta(seconds=20)


def strided_outputs_overwrite_gaps(rank: int, group: Any) -> None:
    matrix = torch.ones(3, 2)
    oracle.all_reduce(matrix[:, 0], group=group)
    assert matrix.tolist() == [[2.0, 2.0], [2.0, 1.0], [1.0, 1.0]]


def bool_sums_leave_bytes_other_than_one(rank: int, group: Any) -> None:
    truth = torch.tensor([True])
    oracle.all_reduce(truth, group=group)
    assert truth.view(torch.uint8).tolist() == [2]


def reduce_scatter_has_no_future(rank: int, group: Any) -> None:
    output = torch.zeros(4)
    work = oracle.reduce_scatter(output, [torch.ones(4), torch.ones(4)], group=group, async_op=True)
    work.wait()
    assert not work.is_completed() and output.tolist() == [2.0] * 4
    refused("getFuture not implemented", work.get_future)


def refused(words: str, act: Callable[[], Any]) -> None:
    try:
        act()
    except RuntimeError as error:
        assert words in str(error), str(error)
    else:
        raise AssertionError("torch accepts it")


def dtypes_are_refused(rank: int, group: Any) -> None:
    for dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e5m2):
        own, tensor = oracle.new_group(timeout=TIMEOUT), torch.ones(2).to(dtype)
        refused("Invalid scalar type", partial(oracle.all_reduce, tensor, group=own))


def gather_of_complex_is_refused(rank: int, group: Any) -> None:
    tensor = torch.ones(2, dtype=torch.complex64)
    lists = [tensor.clone(), tensor.clone()] if rank == 0 else None
    refused("Invalid scalar type", lambda: oracle.gather(tensor, lists, 0, group))


def all_gather_of_different_sizes_is_refused(rank: int, group: Any) -> None:
    lists = [torch.zeros(1), torch.zeros(2)]
    refused("invalid tensor size", lambda: oracle.all_gather(lists, torch.ones(rank + 1), group))


def zero_dimensional_inputs_are_refused(rank: int, group: Any) -> None:
    refused("invalid tensor size", lambda: oracle.all_gather_into_tensor(torch.zeros(2), torch.tensor(1.0), group))


def premul_sum_is_refused(rank: int, group: Any) -> None:
    op = oracle._make_nccl_premul_sum(0.5)
    refused("PREMUL_SUM with Gloo", lambda: oracle.all_reduce(torch.ones(2), op, group))


def isend_to_self_is_refused(rank: int, group: Any) -> None:
    refused("not connected", lambda: oracle.isend(torch.ones(2), rank, group))


def nan_may_vanish_in_min(rank: int, group: Any) -> None:
    tensor = torch.tensor([float("nan") if rank == 1 else 1.0])
    oracle.all_reduce(tensor, oracle.ReduceOp.MIN, group)
    assert tensor.tolist() == [1.0]


def stacked_blocks_are_refused(rank: int, group: Any) -> None:
    refused("invalid tensor size", lambda: oracle.all_gather_into_tensor(torch.zeros(2, 3), torch.ones(3), group))


def a_destroyed_group_still_works(rank: int, group: Any) -> None:
    gone = oracle.new_group(timeout=TIMEOUT)
    oracle.destroy_process_group(gone)
    assert oracle.get_world_size(gone) == 2
    oracle.all_reduce(torch.ones(1), group=gone)


FACTS = (
    strided_outputs_overwrite_gaps,
    bool_sums_leave_bytes_other_than_one,
    reduce_scatter_has_no_future,
    dtypes_are_refused,
    gather_of_complex_is_refused,
    all_gather_of_different_sizes_is_refused,
    zero_dimensional_inputs_are_refused,
    premul_sum_is_refused,
    isend_to_self_is_refused,
    nan_may_vanish_in_min,
    stacked_blocks_are_refused,
    a_destroyed_group_still_works,
)


def program(rank: int, path: str) -> None:
    warnings.simplefilter("ignore")
    store = oracle.FileStore(path, 2)
    oracle.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    for fact in FACTS:
        try:
            fact(rank, oracle.new_group(timeout=TIMEOUT))
        except AssertionError as error:
            raise AssertionError(f"{fact.__name__}: {error}") from error


@pytest.mark.skipif(not torch.__version__.startswith(VERSION), reason=f"the page is about torch {VERSION}")
def test_torch_behaves_as_the_page_says(tmp_path: Any) -> None:
    run(program, 2, str(tmp_path / "store"), ranks="processes", init=False)
