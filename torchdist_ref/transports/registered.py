"""Registered memory: tensors that the other ranks of this host can read where they lie.

A process keeps all of it in one *arena*: a file without a name (memfd) that only grows. So a position in it means
the same bytes for good, freed memory is never taken for new memory, and when the last process is gone, however it
went, so is the file. A rank says in its announcement where its tensor lies (`Place`); a peer opens the file under
/proc and maps that region when it first hears of it (`Neighbour`). Nothing is agreed on beforehand.

Each tensor has a mapping of its own, which goes with the last tensor that lies in it, never before: results
outlive groups. Then the pages are given back at once, whoever else still has them mapped.
Don't add knowledge of groups or calls here.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import threading
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from torchdist_ref.errors import DistBackendError

# A peer's regions that one link keeps mapped. Programs repeat a few; mappings beyond these are made again.
MOST = 64


class Place(NamedTuple):
    """Where a tensor lies, as a process tells others. Offsets are bytes in its arena.

    Attributes:
        fd: The arena's descriptor in that process.
        begin: Where the mapping starts that the tensor is part of.
        end: Where it ends.
        position: Where the tensor starts.
    """

    fd: int
    begin: int
    end: int
    position: int

    def pack(self) -> bytes:
        """As it is announced."""
        return _WORDS.pack(*self)

    @staticmethod
    def unpack_all(announced: bytes) -> list[Place]:
        """Several announcements in a row."""
        return [Place(*words) for words in _WORDS.iter_unpack(announced)]


_WORDS = struct.Struct("4q")


class Region(mmap.mmap):
    """The mapping of one registered tensor and its views."""

    arena: Arena | None = None
    address: int

    def __del__(self) -> None:
        # The child of a fork has the mapping too, but the memory is not its own.
        if self.arena is not None and self.arena.pid == os.getpid():
            self.arena.regions.pop(self.address, None)
            self.arena.changes += 1
            self.madvise(mmap.MADV_REMOVE)


class Arena:
    """The registered memory of one process.

    Attributes:
        pid: The process.
        fd: The file.
        regions: What of it is in use, by address.
        changes: How many times that changed.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.fd = os.memfd_create("torchdist_ref registered", os.MFD_CLOEXEC)
        self.regions: dict[int, tuple[int, int]] = {}
        self.changes = 0
        self._end = 0
        self._growing = threading.Lock()

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """New memory, zero everywhere, in pages of its own."""
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._growing:
            begin, self._end = self._end, self._end + size
            os.ftruncate(self.fd, self._end)
        region = Region(self.fd, size, offset=begin)
        storage = torch.frombuffer(region, dtype=torch.uint8).untyped_storage()
        region.arena, region.address = self, storage.data_ptr()
        self.regions[region.address] = begin, begin + size
        self.changes += 1
        return storage


_arena: Arena | None = None
_making = threading.Lock()


def available() -> bool:
    """Whether this platform has what it takes."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def empty(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor in registered memory; an ordinary one where it has no bytes or the platform no such memory.

    >>> tensor = empty((2, 3), torch.float32)
    >>> tensor.shape, place_of(tensor) is not None, place_of(torch.empty(2))
    (torch.Size([2, 3]), True, None)
    """
    nbytes = prod(size) * dtype.itemsize
    if not nbytes or not available():
        return torch.empty(size, dtype=dtype)
    strides = torch.empty(size, device="meta").stride()
    tensor: Tensor = torch.empty(0, dtype=dtype).set_(_our_arena().allocate(nbytes), 0, torch.Size(size), strides)
    return tensor


def _our_arena() -> Arena:
    global _arena
    with _making:
        if _arena is None:
            _arena = Arena()
        return _arena


def _after_fork() -> None:
    # What the child inherits is its parent's: others would look for it in the child's file.
    global _arena, _making
    _arena, _making = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def changes() -> int:
    """How often registered memory of this process came or went: while it stays the same, so do places; 0 for none."""
    return 0 if _arena is None else _arena.changes


def place_of(tensor: Tensor) -> Place | None:
    """Where a tensor lies, if that is registered memory of this process; any view of a registered tensor does."""
    if _arena is None:
        return None
    address = tensor.untyped_storage().data_ptr()
    region = _arena.regions.get(address)
    return None if region is None else Place(_arena.fd, *region, region[0] + tensor.data_ptr() - address)


def open_of(pid: int, fd: int) -> int:
    """A descriptor of this process for the file that another one has open, which may have no name.

    Raises:
        OSError: That process is out of sight, or has no such descriptor.
    """
    return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


class Neighbour:
    """Registered memory of another process, as this one sees it.

    Args:
        pid: That process. Somebody else must know that it has not ended, lest the number mean another one.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._mapped: dict[int, mmap.mmap] = {}

    def view(self, place: Place, dtype: torch.dtype, count: int, offset: int = 0) -> Tensor:
        """The neighbour's own tensor: `count` elements from byte `offset` after its start. For reading only.

        Raises:
            DistBackendError: The memory is out of sight.
        """
        start = place.position - place.begin + offset
        return torch.frombuffer(self._map(place), dtype=dtype, count=count, offset=start)

    def _map(self, place: Place) -> mmap.mmap:
        found = self._mapped.get(place.begin)
        if found is None:
            if len(self._mapped) >= MOST:
                self._mapped.clear()
            found = self._mapped[place.begin] = self._open(place)
        return found

    def _open(self, place: Place) -> mmap.mmap:
        try:
            fd = open_of(self._pid, place.fd)
        except OSError as error:
            raise DistBackendError(
                f"registered memory: process {self._pid}, in which a peer's tensor lies, is out of sight ({error}). "
                f"Use tensors from torch.empty where ranks run as different users."
            ) from error
        try:
            return mmap.mmap(fd, place.end - place.begin, offset=place.begin)
        finally:
            os.close(fd)
