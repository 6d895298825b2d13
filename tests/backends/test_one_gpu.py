"""Ranks whose tensors are on one device, simulated by `device_stand_in`: values, agreement, and failures.

All but CUDA's own calls is what runs on a GPU; those are run by `test_on_gpu`. Buffers are small here, so that tensors
of some hundred elements go through them in many windows.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import torchdist_ref as dist
from tests.backends.device_stand_in import (
    Nameless,
    Separate,
    SharedDevice,
    current_stream,
    on_device,
    seen_by_host,
    share_memory_by,
    stand_in,
    to_be_doubled,
)
from torchdist_ref.backends.ref import contiguous, one_gpu
from torchdist_ref.backends.ref.one_gpu import DevicePath, DeviceSlots
from torchdist_ref.testing import RankError, fill, run

BUFFER_BYTES = 2048
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint16, torch.float8_e4m3fn)
through_host: list[int] = []


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    monkeypatch.setattr(one_gpu, "BUFFER_BYTES", BUFFER_BYTES)
    share_memory_by(SharedDevice(), monkeypatch)
    monkeypatch.setattr(contiguous, "pinned", counted)
    through_host.clear()


def counted(tensor: Tensor) -> Tensor:
    through_host.append(tensor.numel())
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def same(what: str, got: Tensor, wanted: Tensor) -> None:
    current_stream().synchronize()
    seen, wide = seen_by_host(got), torch.complex128 if wanted.is_complex() else torch.float64
    assert seen.dtype == wanted.dtype and torch.equal(seen.to(wide), wanted.to(wide)), f"{what}: {seen}, not {wanted}"


def spread(data: Tensor) -> Tensor:
    """Return the values as every third element of a tensor of the device, which its stream has yet to write."""
    wide = on_device(torch.zeros(3 * data.numel(), dtype=data.dtype))
    return wide[::3].copy_(on_device(data))


def in_a_row(data: Tensor) -> Tensor:
    return on_device(torch.zeros(data.numel() + 13, dtype=data.dtype))[13:].copy_(on_device(data))


def small(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    return (fill(rank, (count,), torch.int64) % 5).abs().to(dtype)


def every_operation(rank: int, size: int, make: Callable[[Tensor], Tensor], dtype: torch.dtype, block: int) -> None:
    count, last = block * size, size - 1
    data = [small(r, count, dtype) for r in range(size)]
    wide = torch.complex128 if dtype.is_complex else torch.float64
    total = torch.stack([each.to(wide) for each in data]).sum(0).to(dtype)
    mine, blank = data[rank], torch.zeros(count, dtype=dtype)
    tensor = make(mine)
    dist.all_reduce(tensor)
    same("all_reduce", tensor, total)
    tensor = make(mine)
    dist.reduce(tensor, last)
    same("reduce", tensor, total if rank == last else mine)
    dist.broadcast(tensor := make(mine), last)
    same("broadcast", tensor, data[last])
    rows = [make(blank) for _ in data]
    dist.all_gather(rows, make(mine))
    for row, wanted in zip(rows, data, strict=True):
        same("all_gather", row, wanted)
    dist.gather(make(mine), rows if rank == last else None, dst=last)
    dist.scatter(tensor, rows if rank == last else None, src=last)
    same("scatter", tensor, mine)
    dist.all_to_all_single(out := make(blank), make(mine))
    same("all_to_all", out, torch.cat([each.view(size, -1)[rank] for each in data]))
    dist.reduce_scatter_tensor(part := make(blank[:block]), make(mine))
    same("reduce_scatter", part, total.view(size, -1)[rank])


def all_kinds(rank: int, size: int) -> int:
    for dtype in DTYPES:
        every_operation(rank, size, in_a_row, dtype, 601)
    every_operation(rank, size, spread, torch.float32, 257)
    every_operation(rank, size, in_a_row, torch.complex128, 1)
    return len(through_host)


# Over a second: some hundred calls of several windows, each with tensors that are calculated late.
@pytest.mark.parametrize(("size", "ranks"), [(2, "processes"), (3, "processes"), (3, "threads")])
def test_every_operation_in_every_size_and_stride(size: int, ranks: str) -> None:
    assert run(all_kinds, size, size, ranks=ranks) == [0] * size


def odd_ones(rank: int) -> int:
    size, lengths = 3, [700, 0, 41]
    data = [small(r, 741, torch.float32) for r in range(size)]
    rows = [on_device(torch.zeros(n)) for n in lengths]
    dist.all_gather(rows, on_device(data[rank][: lengths[rank]]))
    for each, n, row in zip(data, lengths, rows, strict=True):
        same("unequal all_gather", row, each[:n])
    mean = on_device(data[rank] * 3)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    same("average", mean, torch.stack(data).sum(0))
    most, product = torch.stack(data).amax(0), torch.stack(data).prod(0)
    for op, wanted in ((dist.ReduceOp.MAX, most), (dist.ReduceOp.PRODUCT, product)):
        dist.all_reduce(tensor := on_device(data[rank].clone()), op)
        same(f"{op}", tensor, wanted)
    whole = on_device(torch.zeros(741))
    whole[247 * rank : 247 * (rank + 1)].copy_(on_device(data[rank][:247]))
    dist.all_gather_into_tensor(whole, whole[247 * rank : 247 * (rank + 1)])
    same("all_gather in place", whole, torch.cat([each[:247] for each in data]))
    dist.all_to_all_single(whole, whole)
    same("all_to_all in place", whole, torch.cat([torch.cat([e[:247] for e in data]).view(3, -1)[rank]] * 3))
    dist.broadcast(on_device(torch.empty(0)), 0)
    dist.barrier()
    return len(through_host)


def test_unequal_blocks_averages_and_outputs_in_inputs() -> None:
    assert run(odd_ones, 3, ranks="processes") == [0, 0, 0]


def sums_of_any_numbers(rank: int) -> list[Tensor]:
    torch.manual_seed(rank)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        dist.all_reduce(tensor := on_device(torch.randn(1000).to(dtype)))
        current_stream().synchronize()
        results.append(seen_by_host(tensor))
    return results


def test_all_ranks_hold_the_same_bits() -> None:
    first, *others = run(sums_of_any_numbers, 3, ranks="processes")
    assert all(torch.equal(one, other) for each in others for one, other in zip(first, each, strict=True))


def late_early_and_at_once(rank: int) -> int:
    """Use new tensors that the stream has yet to fill; overwrite results as soon as a call returns."""
    for turn in range(40):  # a fault here is a race, which a turn shows now and then
        tensor = to_be_doubled(on_device(torch.full((900,), float(rank + turn))))
        dist.all_reduce(tensor)
        kept = seen_by_host(tensor)
        tensor.fill_(-1)
        assert kept.eq(2 * (2 * turn + 1)).all(), f"turn {turn}: {kept}"
    tensors = [to_be_doubled(on_device(torch.full((900,), float(rank + n)))) for n in range(6)]
    works = [dist.all_reduce(each, async_op=True) for each in tensors]
    for n, (work, each) in enumerate(zip(works, tensors, strict=True)):
        assert work is not None and work.wait() and seen_by_host(each).eq(2 * (2 * n + 1)).all()
    return len(through_host)


def test_nothing_is_seen_too_early_or_overwritten_too_soon() -> None:
    assert run(late_early_and_at_once, 2, ranks="processes") == [0, 0]


def several_groups(rank: int) -> int:
    pair = dist.new_group([0, 2])
    for _ in range(3):
        tensor = on_device(torch.full((900,), float(rank)))
        if rank != 1:
            dist.all_reduce(tensor, group=pair)
            same("the pair's sum", tensor, torch.full((900,), 2.0))
        dist.broadcast(tensor, 1)
        same("broadcast", tensor, torch.full((900,), 1.0))
    return len(through_host)


def test_each_group_has_its_own_staging_buffers() -> None:
    assert run(several_groups, 3, ranks="processes") == [0, 0, 0]


def disagree(rank: int) -> str:
    tensor = on_device(torch.full((900 + rank,), float(rank)))
    with pytest.raises(dist.MismatchError) as caught:
        dist.all_reduce(tensor)
    same("what was not written", tensor, torch.full((900 + rank,), float(rank)))
    dist.all_reduce(tensor := on_device(torch.full((900,), float(rank))))
    same("the next call", tensor, torch.full((900,), 1.0))
    assert not through_host
    return str(caught.value)


def test_a_mismatch_writes_nothing_and_leaves_the_group_as_it_was() -> None:
    for text in run(disagree, 2, ranks="processes"):
        assert "[900]" in text and "[901]" in text


def first_without_gradients(rank: int) -> int:
    for mode in (True, False):
        with torch.inference_mode(mode):
            dist.all_reduce(tensor := on_device(torch.full((900,), float(rank))))
            same("all_reduce", tensor, torch.full((900,), 1.0))
    return len(through_host)


def test_buffers_made_under_inference_mode_can_be_used_after_it() -> None:
    assert run(first_without_gradients, 2, ranks="processes") == [0, 0]


class CannotOpen(SharedDevice):
    def open(self, exported: bytes) -> Tensor:
        raise RuntimeError("no such handle")


class Another(SharedDevice):
    def name(self, device: torch.device) -> str:
        return "another device"


UNSUPPORTED = {
    "one can't export": (Separate, "rank 1 can't export.*not exported"),
    "one can't open": (CannotOpen, "rank 1 can't open.*no such handle"),
    "one is elsewhere": (Another, "several devices.*; another device; the one device"),
    "one has no name": (Nameless, "several devices.*rank 1 can't name.*uuid"),
}


def with_an_unsupported_rank(rank: int, kind: type[SharedDevice]) -> tuple[list[str], int]:
    if rank == 1:
        one_gpu.MEMORIES["cpu"] = kind()
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    one_gpu.log.addHandler(handler)
    one_gpu.log.setLevel(logging.INFO)
    for turn in range(3):
        dist.all_reduce(tensor := to_be_doubled(on_device(torch.full((900,), float(rank + turn)))))
        same("all_reduce", tensor, torch.full((900,), 6.0 + 6 * turn))
    return lines, len(through_host)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_where_one_rank_cannot_all_go_through_the_host_and_the_log_gives_the_reason_once(name: str) -> None:
    kind, words = UNSUPPORTED[name]
    for lines, copies in run(with_an_unsupported_rank, 3, kind, ranks="processes"):
        assert copies == 3
        (line,) = lines
        assert re.search(f"group 'world'.*through the host's memory.*{words}", line), line


def some_on_the_host(rank: int, make: Callable[[int], Tensor]) -> list[int]:
    copies = []
    for turn in range(3):
        count = 300_000  # enough for zero-copy
        tensor = make(count) if rank == 1 and turn != 1 else on_device(torch.zeros(count))
        dist.all_reduce(tensor.fill_(rank + turn))
        same("all_reduce", tensor, torch.full((count,), 2.0 * turn + 1))
        copies.append(len(through_host))
    return copies


@pytest.mark.parametrize("make", [torch.zeros, dist.empty_registered], ids=["ordinary", "registered"])
def test_some_have_their_tensors_on_the_host(make: Callable[[int], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_gpu, "BUFFER_BYTES", 2 << 20)
    assert run(some_on_the_host, 2, make, ranks="processes") == [[1, 1, 2], [0, 0, 0]]


def die(rank: int) -> str:
    dist.all_reduce(on_device(torch.ones(900)))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.RankDiedError) as caught:
        dist.all_reduce(on_device(torch.ones(900)))
    return str(caught.value)


def test_survivors_name_the_dead_rank() -> None:
    with pytest.raises(RankError, match="rank 1 of 3 was killed by SIGKILL") as caught:
        run(die, 3, ranks="processes")
    for rank in (0, 2):
        assert "rank 1 died" in caught.value.outcomes[rank].value


def die_in_agreement(rank: int) -> str:
    if rank == 1:
        one_gpu.MEMORIES["cpu"].open = lambda exported: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(dist.RankDiedError) as caught:
        dist.all_reduce(on_device(torch.ones(900)))
    return str(caught.value)


def test_a_rank_may_die_while_ranks_agree() -> None:
    with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL") as caught:
        run(die_in_agreement, 2, ranks="processes")
    assert "rank 1 died" in caught.value.outcomes[0].value


def a_group_and_its_end(rank: int) -> bool:
    buffers: list[weakref.ref[Tensor]] = []
    make = DeviceSlots.__init__

    def noted(self: DeviceSlots, path: DevicePath, found: Sequence[Tensor]) -> None:
        buffers[:] = [weakref.ref(each) for each in found]
        make(self, path, found)

    DeviceSlots.__init__ = noted  # type: ignore[method-assign]
    dist.all_reduce(on_device(torch.ones(900)))
    assert len(buffers) == 2 and all(each() is not None for each in buffers)
    dist.destroy_process_group()
    gc.collect()
    return all(each() is None for each in buffers)


def test_buffers_are_freed_with_their_group() -> None:
    assert run(a_group_and_its_end, 2, ranks="processes") == [True, True]
