"""Registered memory: positions mean the same bytes for good, and memory lives exactly as long as its tensors."""

from __future__ import annotations

import gc
import os

import pytest
import torch

import torchdist_ref as dist
from torchdist_ref.errors import DistBackendError
from torchdist_ref.testing import fill, run
from torchdist_ref.transports import registered_memory
from torchdist_ref.transports.registered_memory import MemoryHandle, PeerMemory, handle_of

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int64,
    torch.bool,
    torch.complex64,
)


def where(tensor: torch.Tensor) -> MemoryHandle:
    place = handle_of(tensor)
    assert place is not None
    return place


def pages_in_use() -> int:
    """Of this process's arena: what the kernel keeps for it."""
    return os.fstat(registered_memory._own_arena().fd).st_blocks


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_is_as_any_other(dtype: torch.dtype) -> None:
    tensor = registered_memory.empty((3, 5), dtype)
    assert (tensor.dtype, tensor.shape, tensor.is_contiguous()) == (dtype, (3, 5), True)
    assert tensor.is_leaf and not tensor._is_view()
    data = fill(1, (3, 5), dtype)
    assert torch.equal(tensor.copy_(data), data)
    assert torch.equal(tensor.clone(), data) and handle_of(tensor.clone()) is None


def test_no_bytes_need_no_memory() -> None:
    tensor = registered_memory.empty((0, 3), torch.float32)
    assert tensor.shape == (0, 3) and handle_of(tensor) is None


def test_views_lie_where_they_begin() -> None:
    tensor = registered_memory.empty((4, 6), torch.int16)
    whole = where(tensor)
    assert whole.position == whole.begin
    assert where(tensor[1:, 2:]) == whole._replace(position=whole.begin + 16)
    assert where(tensor.view(-1)[5:]) == whole._replace(position=whole.begin + 10)
    assert where(tensor.detach()) == whole


def test_a_neighbour_reads_a_view_where_it_lies() -> None:
    def program(rank: int) -> list[torch.Tensor]:
        pieces = [registered_memory.empty((300,), torch.float64) for _ in range(2)]
        for number, piece in enumerate(pieces):
            piece.copy_(fill(rank + 2 * number, (300,), torch.float64))
        told: list[object] = [None, None]
        dist.all_gather_object(told, (os.getpid(), [where(piece[7:]) for piece in pieces]))
        pid, places = told[1 - rank]  # type: ignore[misc]
        neighbour = PeerMemory(pid)
        seen = [neighbour.view(place, torch.float64, 200, 16) for place in places]
        before = [view.clone() for view in seen]
        dist.barrier()
        pieces[0].zero_()
        dist.barrier()
        return [*before, seen[0].clone()]

    for rank, (first, second, later) in enumerate(run(program, 2, ranks="processes")):
        other = 1 - rank
        assert torch.equal(first, fill(other, (300,), torch.float64)[9:209])
        assert torch.equal(second, fill(other + 2, (300,), torch.float64)[9:209])
        assert torch.equal(later, torch.zeros(200, dtype=torch.float64))


def test_memory_goes_with_the_last_view() -> None:
    gc.collect()
    empty = pages_in_use()
    tensor = registered_memory.empty((1 << 18,), torch.float32).fill_(1)
    view = tensor[100:200]
    address, regions = tensor.untyped_storage().data_ptr(), registered_memory._own_arena().regions
    assert pages_in_use() - empty == 2048 and address in regions
    del tensor
    assert view.sum() == 100 and pages_in_use() - empty == 2048
    del view
    assert pages_in_use() == empty and address not in regions


def test_a_position_is_never_used_again() -> None:
    seen = set()
    for _ in range(20):
        place = where(registered_memory.empty((1000,), torch.float32))
        assert place.begin not in seen
        seen.add(place.begin)


def test_who_still_has_freed_memory_mapped_sees_zeros_not_a_signal() -> None:
    pages = pages_in_use()
    tensor = registered_memory.empty((1000,), torch.float32).fill_(3)
    view = PeerMemory(os.getpid()).view(where(tensor), torch.float32, 1000)
    assert view.sum() == 3000
    del tensor
    assert pages_in_use() == pages
    assert view.sum() == 0


def test_a_neighbour_keeps_a_bounded_number_of_mappings() -> None:
    neighbour = PeerMemory(os.getpid())
    tensors = [
        registered_memory.empty((10,), torch.int64).fill_(number)
        for number in range(registered_memory._MAX_MAPPED_REGIONS + 10)
    ]
    views = [neighbour.view(where(tensor), torch.int64, 10) for tensor in tensors]
    assert [int(view[3]) for view in views] == list(range(len(tensors)))
    assert len(neighbour._mapped) <= registered_memory._MAX_MAPPED_REGIONS


def test_the_child_of_a_fork_frees_nothing_of_its_parents_and_begins_anew() -> None:
    tensor = registered_memory.empty((1000,), torch.float32).fill_(2)
    held = [tensor[:10]]
    pages = pages_in_use()
    child = os.fork()
    if child == 0:
        inherited = handle_of(held[0])
        held.clear()
        del tensor
        gc.collect()
        own = handle_of(registered_memory.empty((10,), torch.float32))
        os._exit(0 if inherited is None and own is not None and own.begin == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert pages_in_use() == pages and tensor.sum() == 2000


def test_a_process_that_is_gone_is_out_of_sight() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(DistBackendError, match=rf"process {child}.*not accessible.*torch\.empty"):
        PeerMemory(child).view(MemoryHandle(5, 0, 4096, 0), torch.float32, 1)


def test_without_memfd_it_is_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered_memory, "available", lambda: False)
    tensor = registered_memory.empty((3,), torch.float32)
    assert tensor.shape == (3,) and handle_of(tensor) is None
