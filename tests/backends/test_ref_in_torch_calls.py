"""Each function of torch.distributed on `ref`, with each of its options: the result of Gloo, or an error."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d
from torch import Tensor

import torchdist_ref as dist
from tests.backends.inside_torch import compared, on
from tests.covering import covering
from tests.torch_versions import needs_torch
from torchdist_ref.testing import fill, run

# The older names are the ones that torch 2.11 has too.
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

OPS = {
    "SUM": torch.float32,
    "AVG": torch.float64,
    "PRODUCT": torch.int64,
    "MIN": torch.float32,
    "MAX": torch.uint8,
    "BAND": torch.int32,
    "BOR": torch.uint8,
    "BXOR": torch.int64,
}


def reductions(rank: int, size: int) -> Iterator[Tensor]:
    for name, dtype in OPS.items():
        op = getattr(c10d.ReduceOp, name)
        everywhere, scattered = fill(rank, (4, 3), dtype), torch.zeros(5, dtype=dtype)
        c10d.all_reduce(everywhere, op)
        yield everywhere
        c10d.reduce_scatter_tensor(scattered, fill(rank, (size * 5,), dtype), op)
        yield scattered
        c10d.reduce_scatter(scattered, [fill(rank + 10 * block, (5,), dtype) for block in range(size)], op)
        yield scattered
        for root in range(size):
            rooted = fill(rank, (6,), dtype)
            c10d.reduce(rooted, root, op)
            yield rooted if rank == root else torch.zeros(0)


def gatherings(rank: int, size: int) -> Iterator[Tensor]:
    for shape in ((0,), (), (3, 2)):
        outputs = [torch.zeros(shape) for _ in range(size)]
        c10d.all_gather(outputs, fill(rank, shape))
        yield from outputs
    row = torch.zeros(size * 2, 3)
    c10d.all_gather_into_tensor(row, fill(rank, (2, 3)))
    yield row
    for root in range(size):
        outputs = [torch.zeros(4) for _ in range(size)]
        c10d.gather(fill(rank, (4,)), outputs if rank == root else None, root)
        yield from outputs
        tensor = fill(rank, (3,))
        c10d.broadcast(tensor, root)
        yield tensor
        c10d.scatter(tensor, [fill(7 * to, (3,)) for to in range(size)] if rank == root else None, root)
        yield tensor


def exchanges(rank: int, size: int) -> Iterator[Tensor]:
    outputs = [torch.zeros(4) for _ in range(size)]
    c10d.all_to_all(outputs, [fill(10 * rank + to, (4,)) for to in range(size)])
    yield from outputs


def exchanges_of_rows(rank: int, size: int) -> Iterator[Tensor]:
    row = torch.zeros(2 * size, 3)
    c10d.all_to_all_single(row, fill(rank, (2 * size, 3)))
    yield row
    # Blocks of a size for each pair of ranks, some of them empty.
    given, taken = [rank * to for to in range(size)], [source * rank for source in range(size)]
    row = torch.zeros(sum(taken), 2)
    c10d.all_to_all_single(row, fill(rank, (sum(given), 2)), taken, given)
    yield row


def messages(rank: int, size: int) -> Iterator[Tensor]:
    # torch refuses messages to oneself.
    if size > 1:
        yield from around(rank, (rank + 1) % size, (rank - 1) % size)
    c10d.barrier()
    yield torch.zeros(0)


def around(rank: int, right: int, left: int) -> Iterator[Tensor]:
    tensors = [torch.zeros(3), torch.zeros(3)]
    works = [c10d.isend(fill(rank + tag, (3,)), right, tag=tag) for tag in (1, 2)]
    for tag in (2, 1):
        assert c10d.recv(tensors[tag - 1], left if tag == 1 else None, tag=tag) == left
    assert all(work is not None and work.wait() for work in works)
    yield from tensors
    batch = [c10d.P2POp(c10d.isend, fill(rank, (4,)), right), c10d.P2POp(c10d.irecv, tensor := torch.zeros(4), left)]
    for work in c10d.batch_isend_irecv(batch):
        work.wait()
    yield tensor


def groups(rank: int, size: int) -> Iterator[Tensor]:
    evens = c10d.new_group(list(range(0, size, 2)))
    tensor = fill(rank, (5,))
    if rank % 2 == 0:
        c10d.all_reduce(tensor, group=evens)
        c10d.broadcast(tensor, (size - 1) // 2 * 2, group=evens)
    yield tensor
    objects: list[Any] = [None] * size
    c10d.all_gather_object(objects, {"rank": rank, "data": fill(rank, (2,)).tolist()})
    yield torch.tensor([entry["data"] for entry in objects])


def coalesced(rank: int, size: int) -> Iterator[Tensor]:
    tensors = [fill(rank + shift, (2 + shift,)) for shift in range(3)]
    c10d.all_reduce_coalesced(tensors, c10d.ReduceOp.MAX)
    yield from tensors
    # torch gives a future here, not a Work.
    yield from c10d.all_reduce_coalesced(tensors, async_op=True).wait()


def strided(rank: int, size: int) -> Iterator[Tensor]:
    base = fill(rank, (6, 4))
    c10d.all_reduce(base.t()[1])
    yield base
    image = fill(rank, (2, 3, 4, 4)).to(memory_format=torch.channels_last)
    c10d.all_reduce(image)
    yield image


PROGRAMS = [
    reductions,
    gatherings,
    pytest.param(exchanges, marks=needs_torch("2.13", "lists of blocks in Gloo's all_to_all")),
    exchanges_of_rows,
    messages,
    groups,
    coalesced,
]


def listed(rank: int, size: int, program: Any) -> list[Tensor]:
    return [tensor.clone() for tensor in program(rank, size)]


# Over a second: two groups, on two backends, in more processes than there are cores.
@pytest.mark.parametrize(
    ("program", "size"), covering(PROGRAMS, (3, 2, 1)), ids=lambda value: getattr(value, "__name__", None)
)
def test_functions_of_torch_agree(program: Any, size: int, tmp_path: Path) -> None:
    """CI has each program in one world."""
    for ours, theirs, seen in compared(lambda rank, n: listed(rank, n, program), size, str(tmp_path / "meet")):
        assert ours and seen
        for got, wanted in zip(ours, theirs, strict=True):
            torch.testing.assert_close(got, wanted)


def on_ref(rank: int, size: int, path: str, program: Any) -> Any:
    return on("ref", rank, size, path, program)[0]


def alone(program: Any, tmp_path: Path, size: int = 2) -> list[Any]:
    """A program on `ref` only."""
    arguments = (size, str(tmp_path / "meet"), program)
    return run(on_ref, size, *arguments, init=False, ranks="processes")


def test_strided_tensors_are_reduced_in_place(tmp_path: Path) -> None:
    wanted = fill(0, (6, 4))
    wanted.t()[1] += fill(1, (6, 4)).t()[1]
    for base, image in alone(lambda rank, size: list(strided(rank, size)), tmp_path):
        assert torch.equal(base[:, 1], wanted[:, 1])
        assert torch.equal(image, fill(0, image.shape) + fill(1, image.shape))


def refused(rank: int, size: int) -> list[tuple[str, str]]:
    group: Any = c10d.group.WORLD
    wrong = c10d.AllreduceOptions()
    wrong.reduceOp = c10d._make_nccl_premul_sum(2.0)
    rooted = c10d.BroadcastOptions()
    rooted.rootRank = size
    second = c10d.BroadcastOptions()
    second.rootTensor = 1
    one, three = torch.ones(1), torch.ones(3)
    attempts = [
        lambda: group.allreduce([one], wrong).wait(),
        lambda: group.broadcast([one], rooted),
        lambda: group.broadcast([one], second),
        lambda: group.reduce([one, one]),
        lambda: group.all_gather_single(three, one),
        lambda: group.allgather([[one]], [one]),
        lambda: group.all_gather_single(torch.ones(3, 4)[:, ::2], three),
        lambda: group.reduce_scatter_single(one, torch.ones(4)),
        lambda: group.broadcast([torch.ones(2, 2).to_sparse()]),
        lambda: group.allreduce([torch.ones(2, device="meta")]),
        lambda: group._get_backend(torch.device("cuda")),
    ]
    return [failure(attempt) for attempt in attempts]


def failure(attempt: Any) -> tuple[str, str]:
    try:
        attempt()
    except (RuntimeError, ValueError, TypeError) as error:
        return type(error).__name__, str(error)
    return "", "nothing was raised"


WANTED = [
    ("UnsupportedError", "PREMUL_SUM"),
    ("MethodArgumentError", "rootRank"),
    ("MethodArgumentError", "rootTensor"),
    ("MethodArgumentError", "a list of one"),
    ("ArgumentError", "divides into 2"),
    ("MethodArgumentError", "2 tensors, one for each rank"),
    ("ArgumentError", "by its first dimension"),
    ("MethodArgumentError", "1 elements a rank"),
    ("UnsupportedError", "sparse"),
    ("UnsupportedError", "meta"),
    ("UnsupportedError", "cuda"),
]


def test_unsupported_options_are_errors_and_the_group_remains_usable(tmp_path: Path) -> None:
    for failures in alone(refused, tmp_path):
        for (kind, text), (wanted, words) in zip(failures, WANTED, strict=True):
            assert kind == wanted and words in text, text


class Unheard:
    """Options with a reduction that nobody knows."""

    reduceOp = "median"
    asyncOp = True


def test_an_unknown_reduction_is_an_error(tmp_path: Path) -> None:
    got = alone(lambda rank, size: failure(lambda: c10d.group.WORLD.allreduce([torch.ones(1)], Unheard())), tmp_path)
    assert [kind for kind, _ in got] == ["ArgumentTypeError"] * 2
    assert all("median" in text and "avg" in text for _, text in got)


def impatient(rank: int, size: int) -> tuple[tuple[str, str], list[float]]:
    """The options' own time-out ends the wait; the call itself goes on, and ends well when the others come."""
    tensor, opts = fill(rank, (3,)), c10d.AllreduceOptions()
    opts.timeout = timedelta(seconds=0.05)
    store = c10d.distributed_c10d._get_default_store()
    if rank:
        store.get("waited")
        c10d.all_reduce(tensor)
        return ("", ""), tensor.tolist()
    work = c10d.group.WORLD.allreduce([tensor], opts)
    outcome = failure(work.wait)
    store.set("waited", "")
    work.get_future().wait()
    assert work.is_completed() and work.is_success() and work.exception() is None
    return outcome, work.result()[0].tolist()


def test_the_timeout_of_the_options_is_used(tmp_path: Path) -> None:
    (kind, values), (_, others) = alone(impatient, tmp_path)
    assert kind[0] == "RankStalledError" and "0.0" in kind[1]
    assert values == others == (fill(0, (3,)) + fill(1, (3,))).tolist()


def endless(rank: int, size: int, path: str) -> tuple[float, tuple[str, str]]:
    """C++ counts microseconds in 64 bits: `timedelta.max` arrives negative."""
    meet = f"file://{path}"
    c10d.init_process_group("ref", init_method=meet, rank=rank, world_size=size, timeout=timedelta.max)
    try:
        tensor, opts = torch.ones(1), c10d.AllreduceOptions()
        c10d.all_reduce(tensor, group=c10d.new_group(timeout=timedelta.max))
        opts.timeout = timedelta.max
        c10d.group.WORLD.allreduce([tensor], opts).wait(timedelta.max)
        return tensor.item(), failure(lambda: c10d.new_group(timeout=timedelta(seconds=-1)))
    finally:
        c10d.destroy_process_group()


def test_the_longest_timeout_is_accepted_and_a_negative_one_refused(tmp_path: Path) -> None:
    for value, (kind, text) in run(endless, 2, 2, str(tmp_path / "meet"), init=False, ranks="processes"):
        assert value == 4.0
        assert kind == "BackendArgumentError" and "new_group: argument 'timeout'" in text, text


def wait_in_a_callback(rank: int, size: int) -> list[float]:
    """A callback waits for the future of a new call, and a callback of that for a third."""

    def again(future: Any) -> Tensor:
        return c10d.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]

    def twice(future: Any) -> Tensor:
        return c10d.all_reduce(future.value()[0], async_op=True).get_future().then(again).wait()

    tensor = fill(rank, (3,))
    return c10d.all_reduce(tensor, async_op=True).get_future().then(twice).wait().tolist()


def test_a_callback_may_wait_for_the_future_of_a_new_call(tmp_path: Path) -> None:
    total = fill(0, (3,)) + fill(1, (3,))
    assert alone(wait_in_a_callback, tmp_path) == [(total * 4).tolist()] * 2


def mismatched(rank: int, size: int) -> tuple[str, bool]:
    tensor = torch.ones(3 + rank)
    kind, _ = failure(lambda: c10d.all_reduce(tensor))
    c10d.barrier()
    return kind, issubclass(dist.MismatchError, c10d.DistBackendError) and tensor.sum() == 3 + rank


def test_mismatched_calls_raise_an_error_on_all_ranks(tmp_path: Path) -> None:
    assert alone(mismatched, tmp_path) == [("MismatchError", True)] * 2


def leave(rank: int, size: int) -> str:
    group = c10d.new_group([0, 1])
    c10d.barrier(group)
    if rank == 1:
        c10d.destroy_process_group(group)
        c10d.barrier()
        return "GroupAbortedError"
    kind, _ = failure(lambda: c10d.barrier(group))
    c10d.barrier()
    return kind


def test_aborting_a_group_fails_the_calls_of_the_other_ranks(tmp_path: Path) -> None:
    assert alone(leave, tmp_path) == ["GroupAbortedError"] * 2
