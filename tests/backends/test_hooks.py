"""Hooks of a group, as torch 2.15 has them: what they are told of each call, and that the calls are as without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchdist_ref as dist
from torchdist_ref.backends.hooked import HookOpName
from torchdist_ref.testing import fill, run

# What torch 2.15.0 told the hooks of its Gloo on rank 0 of 2: name, asynchronous or not, shapes read and written, root.
OBSERVED: dict[str, tuple[Callable[[int], Any], tuple[Any, ...]]] = {
    "all_reduce": (lambda rank: dist.all_reduce(torch.ones(2)), ("ALLREDUCE", False, [(2,)], [], -1)),
    "asynchronous": (
        lambda rank: dist.all_reduce(torch.ones(2), async_op=True).wait(),  # type: ignore[union-attr]
        ("ALLREDUCE", True, [(2,)], [], -1),
    ),
    "broadcast": (lambda rank: dist.broadcast(torch.ones(2), 1), ("BROADCAST", False, [(2,)], [], 1)),
    "reduce": (lambda rank: dist.reduce(torch.ones(2), 1), ("REDUCE", False, [(2,)], [], 1)),
    "all_gather": (
        lambda rank: dist.all_gather([torch.zeros(2), torch.zeros(2)], torch.ones(2)),
        ("ALLGATHER", False, [(2,)], [(2,), (2,)], -1),
    ),
    "all_gather_into_tensor": (
        lambda rank: dist.all_gather_into_tensor(torch.zeros(4), torch.ones(2)),
        ("ALLGATHER_BASE", False, [(2,)], [(4,)], -1),
    ),
    "gather": (
        lambda rank: dist.gather(torch.ones(2), None if rank else [torch.zeros(2), torch.zeros(2)]),
        ("GATHER", False, [(2,)], [(2,), (2,)], 0),
    ),
    "scatter": (
        lambda rank: dist.scatter(torch.ones(2), None if rank else [torch.zeros(2), torch.zeros(2)]),
        ("SCATTER", False, [(2,), (2,)], [(2,)], 0),
    ),
    "reduce_scatter": (
        lambda rank: dist.reduce_scatter(torch.zeros(2), [torch.zeros(2), torch.zeros(2)]),
        ("REDUCE_SCATTER", False, [(2,), (2,)], [(2,)], -1),
    ),
    "reduce_scatter_tensor": (
        lambda rank: dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(4)),
        ("REDUCE_SCATTER_BASE", False, [(4,)], [(2,)], -1),
    ),
    "all_to_all": (
        lambda rank: dist.all_to_all([torch.zeros(2), torch.zeros(2)], [torch.zeros(2), torch.zeros(2)]),
        ("ALLTOALL", False, [(2,), (2,)], [(2,), (2,)], -1),
    ),
    "barrier": (lambda rank: dist.barrier(), ("BARRIER", False, [], [], -1)),
    "send": (
        lambda rank: dist.recv(torch.zeros(2), 0) if rank else dist.send(torch.ones(2), 1),
        ("SEND", True, [(2,)], [], 1),
    ),
    "recv": (
        lambda rank: dist.send(torch.ones(2), 0) if rank else dist.recv(torch.zeros(2), 1),
        ("RECV", True, [], [(2,)], 1),
    ),
}


@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_hooks_are_told_what_torch_tells_them(backend: str) -> None:
    def program(rank: int) -> Any:
        group: Any = dist.group.WORLD
        before: list[Any] = []
        after: list[Any] = []
        group.register_pre_hook(3, before.append)
        group.register_post_hook(3, after.append)
        for call, _ in OBSERVED.values():
            call(rank)
        told = [
            (a.name.name, a.async_op, [*map(shape, a.input_tensors)], [*map(shape, a.output_tensors)], a.root)
            for a in before
        ]
        assert [a.op_id for a in before] == [a.op_id for a in after] == list(range(len(OBSERVED)))
        assert [a.name for a in before] == [a.name for a in after] and all(a.work.is_completed() for a in after)
        return told

    def shape(tensor: torch.Tensor) -> tuple[int, ...]:
        return tuple(tensor.shape)

    assert run(program, 2, backend=backend)[0] == [wanted for _, wanted in OBSERVED.values()]


def test_hooks_can_be_replaced_and_unregistered_and_cost_nothing_then() -> None:
    def program(rank: int) -> Any:
        group: Any = dist.group.WORLD
        backend, seen = group.backend, []
        group.register_pre_hook(1, lambda args: seen.append("first"))
        group.register_pre_hook(2, lambda args: seen.append("second"))
        group.register_pre_hook(1, lambda args: seen.append("other"))
        tensor = fill(rank, (3,))
        dist.all_reduce(tensor)
        group.unregister_pre_hook(1)
        group.unregister_pre_hook(7)
        dist.barrier()
        group.unregister_pre_hook(2)
        return seen, group.backend is backend, tensor

    for seen, restored, tensor in run(program, 2):
        assert seen == ["other", "second", "second"] and restored
        assert torch.equal(tensor, fill(0, (3,)) + fill(1, (3,)))


def test_an_exception_of_a_hook_is_raised_before_the_call_and_the_group_remains_usable() -> None:
    def program(rank: int) -> Any:
        group: Any = dist.group.WORLD

        def refuse(args: Any) -> None:
            raise ValueError(f"no {args.name.name}")

        group.register_pre_hook(1, refuse)
        tensor = torch.ones(1)
        with pytest.raises(ValueError, match="no ALLREDUCE"):
            dist.all_reduce(tensor)
        group.unregister_pre_hook(1)
        dist.all_reduce(tensor)
        return tensor.item()

    assert run(program, 2) == [2.0, 2.0]


def test_hooks_see_the_calls_of_ddp_and_of_torchs_functions() -> None:
    def program(rank: int) -> Any:
        group: Any = dist.group.WORLD
        seen: list[Any] = []
        group.register_post_hook(1, lambda args: seen.append(args.name))
        model = dist.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False), find_unused_parameters=True)
        seen.clear()
        model(fill(rank, (1, 2))).sum().backward()
        torch.distributed.broadcast(torch.ones(1), 0)
        return seen, model.module.weight.grad

    for seen, gradient in run(program, 2, ranks="processes"):
        assert HookOpName.ALLREDUCE in seen and seen[-1] is HookOpName.BROADCAST
        torch.testing.assert_close(gradient, (fill(0, (1, 2)) + fill(1, (1, 2))) / 2)


def test_abort_hooks_and_hooks_of_destroyed_groups_are_refused() -> None:
    def program(rank: int) -> None:
        group: Any = dist.new_group()
        assert not group.supports_abort_hooks
        for call in (lambda: group.register_abort_hook(1, print), lambda: group.unregister_abort_hook(1)):
            with pytest.raises(dist.UnsupportedError, match="does not support"):
                call()
        dist.destroy_process_group(group)
        for call in (lambda: group.register_pre_hook(1, print), lambda: group.unregister_post_hook(1)):
            with pytest.raises(dist.DestroyedGroupError, match="was destroyed"):
                call()

    run(program, 2)
