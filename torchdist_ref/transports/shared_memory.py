"""Shared-memory transport: ranks are processes of one host, which map one anonymous segment per group.

Group rank 0 creates a memfd and publishes a *handle* (pid, file descriptor, nonce) with its endpoint. The others open
it under /proc and map it. The segment has no name, so nothing leaks: when the last process has ended, however it ended,
the memory is freed. (POSIX shm_open needs /dev/shm, which containers limit to 64 MB and which outlives a SIGKILL.)

Memory order: semaphores are POSIX semaphores inside the segment. `sem_post` is an atomic read-modify-write with release
order; `sem_wait` and `sem_trywait` have acquire order on the same word. This holds on every processor that glibc
supports, aarch64 included: a rank that acquires a semaphore sees all that its poster wrote before. Python's `SemLock`
calls them: 35 ns a call, without the GIL while it blocks, interruptible by Ctrl-C.

Liveness: a pidfd becomes readable when its process ends, and cannot refer to a later process with the same pid. Blocked
waits poll the pidfds of all peers, so that a death is noticed within one poll, without threads or messages. A process
that calls `exec` lives on as another program; `torchdist_ref.processes.witness` finds it.

Do not add heartbeats: a stopped process is not dead, and the time-out finds it.
"""

from __future__ import annotations

import _multiprocessing
import ctypes
import mmap
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from torchdist_ref.errors import DistBackendError, UnsupportedError, advice_on_limit
from torchdist_ref.membership.liveness import MemberWatch, PeerProcesses
from torchdist_ref.processes.witness import own_witness
from torchdist_ref.stores import Store
from torchdist_ref.transports.base import Semaphore
from torchdist_ref.transports.link import Link
from torchdist_ref.transports.registered_memory import open_peer_descriptor
from torchdist_ref.transports.segment import (
    CACHE_LINE,
    RING_BYTES,
    SEMAPHORE_KINDS,
    CommonSegment,
    SegmentLayout,
    window_for,
)

# `SemLock`'s kind of a counting semaphore, and its largest count.
_COUNTING_SEMAPHORE = 1
_MAX_COUNT = 2**31 - 1
_NONCE_BYTES = 16
# Of mmap(2); Python has no name for them.
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


class SharedMemorySegment(CommonSegment):
    """Mapped segment with POSIX semaphores in it."""

    kind = "shared_memory"

    def __init__(self, fd: int, nbytes: int) -> None:
        # Python's `mmap` keeps a copy of the descriptor for as long as it lives, one for each group. So the file takes
        # the place of anonymous memory, which `mmap` unmaps with its last user.
        self.buffer = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = memoryview(self.buffer)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        if (
            _mmap()(self._base, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
            == _FAILED
        ):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def create_semaphores(self, layout: SegmentLayout) -> None:
        """Initialize every semaphore to 0. Called once, by the rank that created the segment."""
        init, last = _sem_init(), layout.size - 1
        begin = layout.semaphore(SEMAPHORE_KINDS[0], 0, 0)
        end = layout.semaphore(SEMAPHORE_KINDS[-1], last, last) + CACHE_LINE
        for address in range(self._base + begin, self._base + end, CACHE_LINE):
            if init(address, 1, 0):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def semaphore(self, layout: SegmentLayout, kind: str, source: int, target: int) -> Semaphore:
        """See `Segment.semaphore`. It has no name: nothing is opened or closed."""
        address = self._base + layout.semaphore(kind, source, target)
        return _multiprocessing.SemLock._rebuild(  # type: ignore[no-any-return]  # noqa: SLF001 - no public way
            address, _COUNTING_SEMAPHORE, _MAX_COUNT, None
        )


@cache
def _mmap() -> Callable[[int, int, int, int, int, int], int]:
    function: Any = ctypes.CDLL(None, use_errno=True).mmap
    function.restype, numbers = ctypes.c_void_p, (ctypes.c_int, ctypes.c_int, ctypes.c_int)
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *numbers, ctypes.c_ssize_t)
    return function  # type: ignore[no-any-return]


@cache
def _sem_init() -> Callable[[int, int, int], int]:
    function: Any = ctypes.CDLL(None, use_errno=True).sem_init
    function.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
    return function  # type: ignore[no-any-return]


def unavailable_reason() -> str:
    """Return the reason why this platform has no shared memory; empty if it has."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return f"shared memory needs Linux 5.3 or later (memfd, pidfd), and this is {sys.platform}"
    return ""


def connect(
    store: Store, rank: int, members: Sequence[int], name: str, timeout: float, watch: MemberWatch | None = None
) -> Link:
    """Connect to the other ranks of this host through one segment, found through the store.

    Args:
        store: Store for the keys of this group only.
        rank: This rank in the group.
        members: Global ranks of all members.
        name: Name of the group, for messages.
        timeout: Longest duration of a wait in seconds.
        watch: Watch over the members until all have joined; None to wait for the time-out.

    Returns:
        Link of this rank, after all ranks have joined.

    Raises:
        UnsupportedError: The platform has no memfd, or the ranks cannot access each other's processes.
        RankStalledError: A rank did not join in time.
    """
    if reason := unavailable_reason():
        raise UnsupportedError(f"{reason}. Use backend 'gloo', or ranks as threads.")
    layout = layout_for(len(members))
    with shared_segment(store, layout, rank == 0) as segment:
        return join_segment(segment, layout, rank, members, name, timeout, watch)


def layout_for(size: int) -> SegmentLayout:
    """Return the layout of a segment for the ranks of one host."""
    window = window_for(size)
    return SegmentLayout(size, window, RING_BYTES // window)


def join_segment(
    segment: SharedMemorySegment,
    layout: SegmentLayout,
    rank: int,
    members: Sequence[int],
    name: str,
    timeout: float,
    watch: MemberWatch | None = None,
) -> Link:
    """Join a segment and wait until all ranks have. Arguments and result as in `connect`."""
    link = Link(segment, layout, rank, members, name, timeout)
    announce_process(link)
    with link.joining():
        link.handshake(watch)
        link.liveness = watched_processes(link, link.peers)
    return link


def announce_process(link: Link) -> None:
    """Mark this rank as present, with its process."""
    link.row.join(os.getpid(), own_witness())


def watched_processes(link: Link, ranks: Sequence[int]) -> PeerProcesses:
    """Return the watch over the processes of ranks of this host that have joined."""
    rows = {rank: link.rows[rank] for rank in ranks}
    pids = {rank: row.pid for rank, row in rows.items()}
    return PeerProcesses(pids, {rank: row.witness for rank, row in rows.items()})


@contextmanager
def created_segment(layout: SegmentLayout) -> Iterator[tuple[SharedMemorySegment, bytes]]:
    """Create a segment, and yield it with its handle. The handle is valid until the context ends."""
    fd = os.memfd_create("torchdist_ref", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, layout.nbytes)
        segment = SharedMemorySegment(fd, layout.nbytes)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        segment.bytes[:_NONCE_BYTES] = nonce
        segment.create_semaphores(layout)
        yield segment, f"{os.getpid()} {fd} {nonce.hex()}".encode()
    finally:
        os.close(fd)


@contextmanager
def shared_segment(store: Store, layout: SegmentLayout, first: bool) -> Iterator[SharedMemorySegment]:
    """Yield the segment of a host: its first rank creates it, the others get the handle from the store."""
    if not first:
        yield attach(store.get("segment"), layout)
        return
    with created_segment(layout) as (segment, handle):
        store.set("segment", handle)
        yield segment


def attach(handle: bytes, layout: SegmentLayout) -> SharedMemorySegment:
    """Map a segment that another process of this host has created.

    Raises:
        UnsupportedError: The process is not accessible.
        OSError: This process has reached a limit of the system.
    """
    pid, number, nonce = handle.decode().split()
    try:
        fd = open_peer_descriptor(int(pid), int(number))
    except OSError as error:
        if advice_on_limit(error):
            raise
        raise UnsupportedError(
            f"shared memory: process {pid}, which holds the group's segment, is not accessible ({error}); the "
            f"ranks are in different pid namespaces or belong to different users. Use backend 'gloo'."
        ) from error
    try:
        segment = SharedMemorySegment(fd, layout.nbytes)
    finally:
        os.close(fd)
    if segment.bytes[:_NONCE_BYTES] != bytes.fromhex(nonce):
        raise DistBackendError(f"shared memory: descriptor {number} of process {pid} is not the group's segment.")
    return segment
