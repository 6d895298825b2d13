"""Works in boxes of torch's, in which operators and C++ hold them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as theirs

import torchdist_ref as dist
from torchdist_ref.testing import fill, run


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_a_box_gives_the_same_work_back(backend: str) -> None:
    def program(rank: int) -> list[Any]:
        tensor = fill(rank, (5,))
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        box = work.boxed()
        same = dist.Work.unbox(box) is work
        return [type(box) is torch.ScriptObject, same, work.wait(), tensor.tolist()]

    expected = (fill(0, (5,)) + fill(1, (5,))).tolist()
    assert run(program, 2, backend=backend) == [[True, True, True, expected]] * 2


def test_a_box_alone_keeps_the_work_that_torch_waits_for() -> None:
    def program(rank: int) -> list[Any]:
        tensor = fill(rank, (5,))
        box = dist.all_reduce(tensor, async_op=True).boxed()  # type: ignore[union-attr]
        gc.collect()
        held: Any = theirs.Work.unbox(box)
        done = held.wait(), held.is_completed(), held.is_success()
        return [isinstance(held, theirs.Work), done, tensor.tolist(), held.get_future().value()[0] is tensor]

    expected = (fill(0, (5,)) + fill(1, (5,))).tolist()
    assert run(program, 2) == [[True, (True, True, True), expected, True]] * 2


def test_works_of_methods_and_of_torch_are_unboxed_as_they_are() -> None:
    group: Any = theirs.ProcessGroup(theirs.HashStore(), 0, 1)
    gloo = theirs.ProcessGroupGloo(theirs.HashStore(), 0, 1)
    group._register_backend(torch.device("cpu"), theirs.ProcessGroup.BackendType.GLOO, gloo)
    work = group.allreduce([torch.ones(1)])
    assert dist.Work.unbox(work.boxed()) is work is theirs.Work.unbox(work.boxed())

    def program(rank: int) -> bool:
        ours = dist.group.WORLD.allreduce([torch.ones(1)])
        return dist.Work.unbox(ours.boxed()) is ours

    assert run(program, 1) == [True]


def test_something_else_is_refused() -> None:
    def program(rank: int) -> None:
        for wrong in (3, theirs.ReduceOp.SUM, dist.group.WORLD.boxed()):
            with pytest.raises(TypeError, match=r"Work\.unbox: argument 'obj' must be a torch\.ScriptObject"):
                dist.Work.unbox(wrong)

    run(program, 1)


def test_the_current_stream_is_blocked_until_the_result_is_there() -> None:
    def program(rank: int) -> list[float]:
        tensor = fill(rank, (5,))
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None and work.block_current_stream() is None
        return tensor.tolist()

    assert run(program, 2) == [(fill(0, (5,)) + fill(1, (5,))).tolist()] * 2
