"""Calls that torch accepts besides those that it documents, with torch's results: ours has them too.

Complex and real tensors together, the forms of a process group's methods, process groups in Python, and a time-out in
seconds. torch's own Gloo is the oracle, in the same processes.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as oracle
from torch import Tensor

import torchdist_ref as dist
from tests.torchs_world import start_torch
from torchdist_ref.testing import fill, run

TIMEOUT = timedelta(seconds=20)


def complexes(rank: int, count: int) -> Tensor:
    return torch.view_as_complex(fill(rank, (count, 2)))


def gathered(library: Any, rank: int) -> Any:
    real, mixed = [torch.zeros(3, 2) for _ in range(2)], [torch.zeros(3, 2), torch.zeros(3, dtype=torch.complex64)]
    flat = torch.zeros(6, 2)
    library.all_gather(real, complexes(rank, 3))
    library.all_gather(mixed, complexes(rank, 3))
    library.all_gather_into_tensor(flat, complexes(rank, 3))
    return *real, *mixed, flat


def reduced_and_scattered(library: Any, rank: int) -> Any:
    both = [complexes(rank, 3), fill(rank, (4,))]
    library.all_reduce_coalesced(both)
    block = torch.zeros(3, 2) if rank else torch.zeros(3, dtype=torch.complex64)
    library.scatter(block, [complexes(r, 3) for r in range(2)] if rank == 1 else None, src=1)
    return *both, block


def exchanged(library: Any, rank: int) -> Any:
    output = torch.zeros(4, 2)
    library.all_to_all_single(output, complexes(rank, 4))
    return (output,)


def methods_with_tensors(library: Any, rank: int) -> Any:
    group, found = library.group.WORLD, []
    for call in (
        lambda t: group.allreduce(t),
        lambda t: group.allreduce(t, library.ReduceOp.MAX),
        lambda t: group.allreduce([t], op=library.ReduceOp.MIN, timeout=TIMEOUT),
        lambda t: group.allreduce([t], oracle.AllreduceOptions()),
        lambda t: group.broadcast(t, 1),
        lambda t: group.broadcast(tensor=t, root=1, timeout=TIMEOUT),
        lambda t: group.broadcast([t]),
    ):
        tensor = fill(rank, (4,))
        call(tensor).wait()
        found.append(tensor)
    tensor = fill(rank, (4,))
    group.reduce(tensor, root=1, op=library.ReduceOp.PRODUCT).wait()
    return *found, tensor if rank == 1 else torch.zeros(1)


def methods_with_lists(library: Any, rank: int) -> Any:
    group, blocks = library.group.WORLD, [torch.zeros(3) for _ in range(5)]
    on_root = [torch.zeros(3), torch.zeros(3)] if rank == 1 else []
    inputs = [fill(rank, (3,)), fill(rank + 2, (3,))]
    group.allgather(blocks[:2], fill(rank, (3,))).wait()
    group.gather(on_root, fill(rank, (3,)), 1).wait()
    group.scatter(blocks[2], inputs if rank == 1 else [], root=1, timeout=TIMEOUT).wait()
    group.reduce_scatter(blocks[3], inputs, library.ReduceOp.SUM).wait()
    group.reduce_scatter(output=blocks[4], input=inputs, op=library.ReduceOp.MAX).wait()
    exchanged = torch.zeros(4)
    group.alltoall_base(exchanged, fill(rank, (4,)), [], [], TIMEOUT).wait()
    group.barrier().wait()
    group.barrier(timeout=TIMEOUT).wait()
    group.monitored_barrier(TIMEOUT, wait_all_ranks=True)
    group.monitored_barrier()
    return *blocks, *on_root, exchanged


def seconds(library: Any, rank: int) -> Any:
    with pytest.warns(UserWarning, match="timedelta"):
        library.monitored_barrier(timeout=20.0)
    return ()


PROGRAMS: list[Callable[[Any, int], Any]] = [
    gathered,
    reduced_and_scattered,
    exchanged,
    methods_with_tensors,
    methods_with_lists,
    seconds,
]


def beside(rank: int, path: str) -> list[tuple[str, Any, Any]]:
    start_torch(store=oracle.FileStore(path, 2), rank=rank, world_size=2, timeout=TIMEOUT)
    found = [(program.__name__, program(oracle, rank), program(dist, rank)) for program in PROGRAMS]
    oracle.destroy_process_group()
    return found


# torch deprecates some of these functions.
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("backend", ["ref", "gloo"])
def test_torch_returns_the_same(backend: str, tmp_path: Path) -> None:
    for rank, found in enumerate(run(beside, 2, str(tmp_path / "store"), ranks="processes", backend=backend)):
        for name, theirs, ours in found:
            assert len(ours) == len(theirs)
            for mine, other in zip(ours, theirs, strict=True):
                assert mine.dtype == other.dtype and torch.equal(mine, other), f"{name} on rank {rank}"


def test_exchanged_lists_may_mix_complex_and_real_tensors() -> None:
    def program(rank: int) -> list[bool]:
        outputs = [torch.zeros(6), torch.zeros(3, dtype=torch.complex64)]
        dist.all_to_all(outputs, [complexes(10 * rank + d, 3) for d in range(2)])
        lists = [[torch.zeros(6), torch.zeros(1)] for _ in range(2)]
        dist.all_gather_coalesced(lists, [complexes(rank, 3), fill(rank, (1,))])
        whole = [torch.view_as_real(complexes(rank, 3)).flatten() for rank in (*range(2), rank, 10 + rank)]
        return [
            torch.equal(outputs[0], whole[2]),
            torch.equal(torch.view_as_real(outputs[1]).flatten(), whole[3]),
            *(torch.equal(lists[r][0], whole[r]) and torch.equal(lists[r][1], fill(r, (1,))) for r in range(2)),
        ]

    assert run(program, 2) == [[True] * 4] * 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda g: g.allreduce(torch.ones(1), colour=1),
            r"allreduce: unexpected argument 'colour' \(on rank 0\); it takes \['op', ",
        ),
        (lambda g: g.allreduce(torch.ones(1), dist.ReduceOp.SUM, TIMEOUT, 4), "allreduce: 3 values after the tensors"),
        (lambda g: g.broadcast(root=1), "broadcast: missing argument 'tensors'"),
    ],
)
def test_wrong_arguments_of_methods_are_named(call: Any, message: str) -> None:
    def program(rank: int) -> None:
        with pytest.raises(dist.ArgumentTypeError, match=message):
            call(dist.group.WORLD)

    run(program, 1)


def test_a_group_numbers_its_collectives() -> None:
    def program(rank: int) -> list[Any]:
        group = dist.group.WORLD
        group._set_sequence_number_for_group()
        before = group._get_sequence_number_for_group()
        for _ in range(3):
            dist.barrier()
        return [before, group._get_sequence_number_for_group()]

    assert run(program, 2) == [[0, 3]] * 2


class Finished(dist.Work):
    """Work in Python that has ended."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class Lonely(dist.ProcessGroup):
    """Process group in Python for one rank, as backends outside torch are written."""

    calls: ClassVar[list[str]] = []

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)

    def getBackendName(self) -> str:
        return "lonely"

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        self.calls.append("allreduce")
        return Finished()

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        self.calls.append("broadcast")
        return Finished()


def lonely(rank: int) -> Any:
    dist.Backend.register_backend("lonely", Lonely, devices=["cpu"])
    dist.init_process_group("lonely", store=dist.HashStore(), rank=0, world_size=1)
    tensor = fill(0, (3,))
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
    group = Lonely(None, 0, 1, None)
    dist.destroy_process_group()
    return Lonely.calls, tensor.tolist(), group.rank(), group.size(), isinstance(group, oracle.ProcessGroup)


def test_a_backend_in_python_is_a_subclass_of_our_group() -> None:
    (found,) = run(lonely, 1, init=False, ranks="processes")
    assert found == (["allreduce", "broadcast"], fill(0, (3,)).tolist(), 0, 1, True)


def test_a_work_tells_how_its_call_ended() -> None:
    def program(rank: int) -> list[Any]:
        tensor = fill(rank, (3,))
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.synchronize()
        ends = [work.get_future_result().wait(), tensor.tolist()]
        block = torch.zeros(1)
        receive = dist.irecv(block, 1 - rank)
        dist.send(torch.ones(1), 1 - rank) if receive is None else dist.isend(torch.ones(1), 1 - rank)
        receive.wait()
        failing = dist.all_reduce(torch.zeros(1 + rank), async_op=True)
        assert failing is not None
        return [*ends, receive._source_rank(), failing.get_future_result().wait()]

    total = (fill(0, (3,)) + fill(1, (3,))).tolist()
    assert run(program, 2) == [[0, total, 1 - rank, 2] for rank in range(2)]
