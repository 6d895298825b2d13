"""Registered memory: tensors that the peers on this host access directly.

A process keeps all its registered tensors in one *arena*: an anonymous file (memfd) that only grows. An
offset in it therefore identifies the same bytes for good, and freed memory is never reused. When the last process has
ended, however it ended, the file is freed. A rank announces a `MemoryHandle` for its tensor. A peer opens the file
under /proc and maps that region when it first receives the handle (`PeerMemory`), so no registration call is needed.
Each tensor has its own mapping, which ends with the last tensor that uses it, never before: results outlive groups. Its
pages are then freed at once, even if peers still map them.

Memory of a device is shared by other means (`DeviceMemory`), CUDA's by `transports.cuda_ipc`.

Do not add knowledge of groups or calls here.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import threading
from collections.abc import Sequence
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchdist_ref.errors import DistBackendError, advice_on_limit
from torchdist_ref.processes.linux_calls import memfd_create
from torchdist_ref.transports.segment import open_peer_descriptor

MAX_MAPPED_REGIONS = 64
"""Regions of one peer that stay mapped. Programs repeat a few tensors; beyond these, regions are mapped again."""


class MemoryHandle(NamedTuple):
    """Location of a tensor in registered memory, as announced to peers. Offsets are bytes in the owner's arena.

    Attributes:
        fd: Descriptor of the arena in the owner's process.
        begin: Offset of the mapping that contains the tensor.
        end: End of that mapping.
        position: Offset of the tensor's first element.
    """

    fd: int
    begin: int
    end: int
    position: int

    def pack(self) -> bytes:
        """Return the handle as 32 bytes."""
        return _HANDLE_FORMAT.pack(*self)

    @staticmethod
    def unpack_all(packed: bytes) -> list[MemoryHandle]:
        """Return the handles of several ranks from their packed bytes."""
        return [MemoryHandle(*fields) for fields in _HANDLE_FORMAT.iter_unpack(packed)]


_HANDLE_FORMAT = struct.Struct("4q")


class RegisteredRegion(mmap.mmap):
    """Mapping of one registered tensor and its views."""

    arena: Arena | None = None
    address: int

    def __del__(self) -> None:
        # A forked child inherits the mapping, but the memory still belongs to its parent.
        if self.arena is not None and self.arena.pid == os.getpid():
            self.arena.regions.pop(self.address, None)
            self.arena.changes += 1
            self.madvise(mmap.MADV_REMOVE)


class Arena:
    """Registered memory of one process.

    Attributes:
        pid: Process id.
        fd: Descriptor of the file.
        regions: Begin and end of the regions in use, by address.
        changes: Number of regions allocated and freed so far.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.fd = memfd_create("torchdist_ref registered")
        self.regions: dict[int, tuple[int, int]] = {}
        self.changes = 0
        self._end = 0
        self._growing = threading.Lock()

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """Return new memory, filled with zeros, in pages of its own."""
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._growing:
            begin, self._end = self._end, self._end + size
            os.ftruncate(self.fd, self._end)
        region = RegisteredRegion(self.fd, size, offset=begin)
        storage = torch.frombuffer(region, dtype=torch.uint8).untyped_storage()
        region.arena, region.address = self, storage.data_ptr()
        self.regions[region.address] = begin, begin + size
        self.changes += 1
        return storage


_arena: Arena | None = None
_arena_lock = threading.Lock()


def available() -> bool:
    """Return whether this platform supports registered memory."""
    return sys.platform == "linux"


def empty(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized tensor in registered memory.

    Tensors without elements, and all tensors on platforms without registered memory, are ordinary ones.

    >>> tensor = empty((2, 3), torch.float32)
    >>> tensor.shape, handle_of(tensor) is not None, handle_of(torch.empty(2))
    (torch.Size([2, 3]), True, None)
    """
    nbytes = prod(size) * dtype.itemsize
    if not nbytes or not available():
        return torch.empty(size, dtype=dtype, device="cpu")
    strides = torch.empty(size, dtype=dtype, device="meta").stride()
    tensor: Tensor = torch.empty(0, dtype=dtype, device="cpu").set_(
        own_arena().allocate(nbytes), 0, torch.Size(size), strides
    )
    return tensor


def own_arena() -> Arena:
    """Return the arena of this process, made on first use."""
    global _arena
    with _arena_lock:
        if _arena is None:
            _arena = Arena()
        return _arena


def _after_fork() -> None:
    # Inherited tensors belong to the parent: peers would search the child's file for them.
    global _arena, _arena_lock
    _arena, _arena_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def changes() -> int:
    """Return the number of regions allocated and freed so far. Handles stay valid while it stays the same."""
    return 0 if _arena is None else _arena.changes


def handle_of(tensor: Tensor) -> MemoryHandle | None:
    """Return the handle of a tensor in this process's registered memory (views included), or None."""
    if _arena is None:
        return None
    address = tensor.untyped_storage().data_ptr()
    region = _arena.regions.get(address)
    return None if region is None else MemoryHandle(_arena.fd, *region, region[0] + tensor.data_ptr() - address)


class PeerMemory:
    """Registered memory of another process, mapped into this one.

    Args:
        pid: Process id. The caller ensures that the process has not ended: the pid could be reused.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.mapped: dict[int, mmap.mmap] = {}

    def view(self, handle: MemoryHandle, dtype: torch.dtype, count: int, offset: int = 0) -> Tensor:
        """Return `count` elements of the peer's tensor, from byte `offset` on. Do not write to them.

        Raises:
            DistBackendError: The process is not accessible, or this one has reached a limit of the system.
        """
        start = handle.position - handle.begin + offset
        return torch.frombuffer(self._map(handle), dtype=dtype, count=count, offset=start)

    def _map(self, handle: MemoryHandle) -> mmap.mmap:
        mapping = self.mapped.get(handle.begin)
        if mapping is None:
            if len(self.mapped) >= MAX_MAPPED_REGIONS:
                self.mapped.clear()
            mapping = self.mapped[handle.begin] = self._open(handle)
        return mapping

    def _open(self, handle: MemoryHandle) -> mmap.mmap:
        try:
            fd = open_peer_descriptor(self._pid, handle.fd)
            try:
                return mmap.mmap(fd, handle.end - handle.begin, offset=handle.begin)
            finally:
                os.close(fd)
        except OSError as error:
            advice = advice_on_limit(error) or "Use tensors from torch.empty where ranks run as different users."
            raise DistBackendError(
                f"registered memory: that of process {self._pid}, which holds a peer's tensor, is not accessible "
                f"({error}). {advice}"
            ) from error


class DeviceMemory(Protocol):
    """Operations for sharing the memory of a device between processes."""

    def name(self, device: torch.device) -> str:
        """Return a text that is equal in two processes if and only if each can open the other's exports."""

    def empty(self, nbytes: int, device: torch.device) -> Tensor:
        """Return exportable memory as a tensor of bytes. Raises if there is none."""

    def export(self, tensor: Tensor) -> bytes:
        """Return a handle with which one other process can open the tensor. Raises if it cannot be exported."""

    def open(self, exported: bytes) -> Tensor:
        """Return the tensor that another process has exported. Raises if it cannot be opened here."""

    def collect(self) -> None:
        """Give back freed memory of exports that the other processes have released."""
