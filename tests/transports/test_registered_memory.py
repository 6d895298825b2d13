"""Registered memory: offsets identify the same bytes for good, and memory lives exactly as long as its tensors."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator

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


@pytest.fixture(scope="module", autouse=True)
def no_earlier_objects() -> None:
    """Have the collections below look at the objects of these tests alone: they take a second with all others."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_collection_of_earlier_garbage() -> Iterator[None]:
    """Free what the tests before have left, and let no collection free more while a test counts pages."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def handle(tensor: torch.Tensor) -> MemoryHandle:
    found = handle_of(tensor)
    assert found is not None
    return found


def pages_in_use() -> int:
    """Return the blocks that the kernel holds for this process's arena."""
    return os.fstat(registered_memory.own_arena().fd).st_blocks


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_registered_tensor_behaves_like_any_other(dtype: torch.dtype) -> None:
    tensor = registered_memory.empty((3, 5), dtype)
    assert (tensor.dtype, tensor.shape, tensor.is_contiguous()) == (dtype, (3, 5), True)
    assert tensor.is_leaf and not tensor._is_view()
    data = fill(1, (3, 5), dtype)
    assert torch.equal(tensor.copy_(data), data)
    assert torch.equal(tensor.clone(), data) and handle_of(tensor.clone()) is None


def test_an_empty_tensor_is_not_registered() -> None:
    tensor = registered_memory.empty((0, 3), torch.float32)
    assert tensor.shape == (0, 3) and handle_of(tensor) is None


def test_handles_of_views_have_their_offsets() -> None:
    tensor = registered_memory.empty((4, 6), torch.int16)
    whole = handle(tensor)
    assert whole.position == whole.begin
    assert handle(tensor[1:, 2:]) == whole._replace(position=whole.begin + 16)
    assert handle(tensor.view(-1)[5:]) == whole._replace(position=whole.begin + 10)
    assert handle(tensor.detach()) == whole


def test_a_peer_reads_a_view_without_a_copy() -> None:
    def program(rank: int) -> list[torch.Tensor]:
        pieces = [registered_memory.empty((300,), torch.float64) for _ in range(2)]
        for number, piece in enumerate(pieces):
            piece.copy_(fill(rank + 2 * number, (300,), torch.float64))
        exchanged: list[object] = [None, None]
        dist.all_gather_object(exchanged, (os.getpid(), [handle(piece[7:]) for piece in pieces]))
        pid, handles = exchanged[1 - rank]  # type: ignore[misc]
        peer = PeerMemory(pid)
        seen = [peer.view(each, torch.float64, 200, 16) for each in handles]
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


def test_memory_is_freed_with_the_last_view() -> None:
    gc.collect()
    empty = pages_in_use()
    tensor = registered_memory.empty((1 << 18,), torch.float32).fill_(1)
    view = tensor[100:200]
    address, regions = tensor.untyped_storage().data_ptr(), registered_memory.own_arena().regions
    assert pages_in_use() - empty == 2048 and address in regions
    del tensor
    assert view.sum() == 100 and pages_in_use() - empty == 2048
    del view
    assert pages_in_use() == empty and address not in regions


def test_offsets_are_never_reused() -> None:
    seen = set()
    for _ in range(20):
        found = handle(registered_memory.empty((1000,), torch.float32))
        assert found.begin not in seen
        seen.add(found.begin)


def test_freed_memory_that_a_peer_has_mapped_reads_as_zeros() -> None:
    pages = pages_in_use()
    tensor = registered_memory.empty((1000,), torch.float32).fill_(3)
    view = PeerMemory(os.getpid()).view(handle(tensor), torch.float32, 1000)
    assert view.sum() == 3000
    del tensor
    assert pages_in_use() == pages
    assert view.sum() == 0


def test_the_number_of_mappings_is_bounded() -> None:
    peer = PeerMemory(os.getpid())
    tensors = [
        registered_memory.empty((10,), torch.int64).fill_(number)
        for number in range(registered_memory.MAX_MAPPED_REGIONS + 10)
    ]
    views = [peer.view(handle(tensor), torch.int64, 10) for tensor in tensors]
    assert [int(view[3]) for view in views] == list(range(len(tensors)))
    assert len(peer.mapped) <= registered_memory.MAX_MAPPED_REGIONS


def test_a_forked_child_does_not_free_its_parents_memory() -> None:
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


def test_memory_of_an_ended_process_is_not_accessible() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(DistBackendError, match=rf"process {child}.*not accessible.*torch\.empty"):
        PeerMemory(child).view(MemoryHandle(5, 0, 4096, 0), torch.float32, 1)


@pytest.mark.parametrize("function", ["os.open", "mmap.mmap"])
def test_a_process_at_its_limit_is_told_which(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = handle(registered_memory.empty((3,), torch.float32))

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM if function == "mmap.mmap" else errno.EMFILE, "no more")

    monkeypatch.setattr(function, fail)
    advice = "No memory is free" if function == "mmap.mmap" else r"no free file descriptor.*ulimit -n"
    with pytest.raises(DistBackendError, match=advice):
        PeerMemory(os.getpid()).view(tensor, torch.float32, 1)


def test_without_memfd_tensors_are_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered_memory, "available", lambda: False)
    tensor = registered_memory.empty((3,), torch.float32)
    assert tensor.shape == (3,) and handle_of(tensor) is None
