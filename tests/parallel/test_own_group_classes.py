"""DistributedDataParallel, and functions, on groups whose class a program wrote: its methods make the calls.

Fault-tolerant trainers do so: their group forwards each call to the group of the moment, and returns a Work of theirs.
torch's DDP on the same group is the oracle.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as theirs
from torch import nn

import torchdist_ref as dist
from torchdist_ref.testing import fill, run


class OwnWork(theirs.Work):
    """Work in Python of torch's class."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def wait(self, timeout: Any = None) -> bool:
        return bool(self.inner.wait())

    def get_future(self) -> Any:
        return self.inner.get_future()


class OurWork(dist.Work):
    """Work in Python of our class."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def wait(self, timeout: Any = None) -> bool:
        return bool(self.inner.wait())

    def get_future(self) -> Any:
        return self.inner.get_future()


def managed(base: Any, work: Any) -> Any:
    """Return a class of groups that forward to the default group, and whose sums are three times as large."""

    class Managed(base):  # type: ignore[misc]
        def __init__(self, inner: Any) -> None:
            super().__init__(inner.rank(), inner.size())
            self.inner, self.calls = inner, []

        def allreduce(self, tensors: Any, opts: Any = None) -> Any:
            tensors = tensors if isinstance(tensors, list) else [tensors]
            self.calls.append("allreduce")
            for tensor in tensors:
                tensor.mul_(3)
            return work(self.inner.allreduce(tensors))

        def broadcast(self, tensors: Any, opts: Any = None) -> Any:
            self.calls.append("broadcast")
            return work(self.inner.broadcast(tensors, opts))

        def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
            self.calls.append("allgather")
            return work(self.inner.allgather(outputs, inputs))

        def getBackendName(self) -> str:
            return "managed"

        def rank(self) -> int:
            return int(self.inner.rank())

        def size(self) -> int:
            return int(self.inner.size())

    return Managed


def trained(wrap: Any, group: Any, rank: int) -> list[torch.Tensor]:
    """Return the gradients of two steps."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    for number, parameter in enumerate(model.parameters()):
        parameter.data = fill(number + 10 * rank, tuple(parameter.shape)) / 50
    wrapped, seen = wrap(model, process_group=group), []
    for step in range(2):
        wrapped.zero_grad()
        wrapped(fill(rank + step, (5, 3)) / 50).pow(2).sum().backward()
        seen.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    return seen


CLASSES = [(theirs.ProcessGroup, OwnWork), (dist.ProcessGroup, OwnWork), (dist.ProcessGroup, OurWork)]


@pytest.mark.parametrize(("base", "work"), CLASSES)
def test_ddp_uses_the_methods_of_a_group_in_python(base: Any, work: Any) -> None:
    def program(rank: int) -> Any:
        inner = dist.group.WORLD
        group = managed(base, work)(inner)
        ours = trained(dist.DistributedDataParallel, group, rank)
        called = list(group.calls)
        # torch's C++ takes a Work of torch's only.
        torchs = trained(nn.parallel.DistributedDataParallel, managed(theirs.ProcessGroup, OwnWork)(inner), rank)
        plain = trained(dist.DistributedDataParallel, inner, rank)
        return ours, torchs, plain, called

    for ours, torchs, plain, called in run(program, 2):
        for step in range(2):
            torch.testing.assert_close(ours[step], torchs[step])
            torch.testing.assert_close(ours[step], 3 * plain[step])
        assert {"allreduce", "broadcast"} <= set(called)


@pytest.mark.parametrize(("base", "work"), CLASSES)
def test_functions_use_the_methods_too(base: Any, work: Any) -> None:
    def program(rank: int) -> Any:
        group: Any = managed(base, work)(dist.group.WORLD)
        tensor = fill(rank, (4,))
        dist.all_reduce(tensor, group=group)
        handle = dist.broadcast(row := fill(rank + 5, (3,)), group_src=1, group=group, async_op=True)
        handle.wait()
        assert handle.is_completed()
        # Without a method for it.
        with pytest.raises((dist.DistBackendError, dist.ArgumentError)):
            dist.reduce(fill(rank, (2,)), 0, group=group)
        return tensor, row, dist.get_rank(group), dist.get_world_size(group)

    for rank, (tensor, row, seen, size) in enumerate(run(program, 2)):
        assert torch.equal(tensor, 3 * (fill(0, (4,)) + fill(1, (4,))))
        assert torch.equal(row, fill(6, (3,)))
        assert (seen, size) == (rank, 2)


def test_no_default_group_is_needed_and_the_group_is_freed() -> None:
    class Alone(theirs.ProcessGroup):
        def __init__(self) -> None:
            super().__init__(0, 1)  # type: ignore[call-arg]

        def allreduce(self, tensors: Any, opts: Any = None) -> Any:
            done: Any = torch.futures.Future()
            done.set_result([tensor.add_(1) for tensor in tensors])
            return Done(done)

    class Done(theirs.Work):
        def __init__(self, future: Any) -> None:
            super().__init__()
            self.future = future

        def wait(self, timeout: Any = None) -> bool:
            return True

        def get_future(self) -> Any:
            return self.future

    group = Alone()
    tensor = fill(0, (3,))
    dist.all_reduce(tensor, group=group)  # type: ignore[arg-type]
    assert torch.equal(tensor, fill(0, (3,)) + 1) and not dist.is_initialized()
    freed = weakref.ref(group)
    del group
    gc.collect()
    assert freed() is None


def test_a_group_of_the_class_itself_still_has_no_backend() -> None:
    with pytest.raises(dist.ArgumentError, match="no backend"):
        dist.all_reduce(fill(0, (2,)), group=dist.ProcessGroup(0, 1))
