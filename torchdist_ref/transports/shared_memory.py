"""Shared memory: one anonymous segment per group, so that there is nothing to leak.

Group rank 0 makes a memfd and tells the others its pid and descriptor (a *deed*) together with the place where it is;
they open it under /proc and map it. No name exists anywhere: when the last process is gone, however it went, so is
the memory. (POSIX shm_open needs /dev/shm, which containers keep at 64 MB and which outlives a SIGKILL.)

Order: tokens are POSIX semaphores that lie inside the segment. `sem_post` is an atomic read-modify-write
with release order, `sem_wait` and `sem_trywait` with acquire order on the same word, on every processor
that glibc runs on, aarch64 included: whatever a rank wrote before it posted is seen by the rank that took
the token. No flag is read without one. Python's own `SemLock` drives them: 35 ns a call, the GIL released
while it blocks, Ctrl-C answered.
"""

from __future__ import annotations

import _multiprocessing
import ctypes
import errno
import mmap
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from torchdist_ref.errors import DistBackendError, UnsupportedError
from torchdist_ref.stores import Store
from torchdist_ref.transports.base import Link
from torchdist_ref.transports.layout import CACHE_LINE, KINDS, RING, Layout, window_for
from torchdist_ref.transports.liveness import Peers
from torchdist_ref.transports.memory import OneMemory, Token
from torchdist_ref.transports.registered import open_of

_SEMAPHORE = 1
_MOST = 2**31 - 1
_MARK = 16


class SharedMemory(OneMemory):
    """A mapped segment and the semaphores in it."""

    kind = "shared_memory"

    def __init__(self, fd: int, nbytes: int) -> None:
        self.buffer = mmap.mmap(fd, nbytes)
        self.bytes = memoryview(self.buffer)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))

    def lay_tokens(self, layout: Layout) -> None:
        """Make every semaphore, at zero. Done once, by the rank that made the segment."""
        make, last = _maker_of_semaphores(), layout.size - 1
        begin, end = layout.token(KINDS[0], 0, 0), layout.token(KINDS[-1], last, last) + CACHE_LINE
        for address in range(self._base + begin, self._base + end, CACHE_LINE):
            _check(make(address, 1, 0))

    def token(self, layout: Layout, kind: str, source: int, target: int) -> Token:
        """The semaphore at its place in the map. It has no name, so nothing is opened and nothing is closed."""
        address = self._base + layout.token(kind, source, target)
        return _multiprocessing.SemLock._rebuild(address, _SEMAPHORE, _MOST, None)  # type: ignore[no-any-return]


@cache
def _maker_of_semaphores() -> Callable[[int, int, int], int]:
    make: Any = ctypes.CDLL(None, use_errno=True).sem_init
    make.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
    return make  # type: ignore[no-any-return]


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def available() -> str:
    """Why shared memory cannot be used on this platform; empty where it can."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return f"shared memory needs Linux 5.3 or later (memfd, pidfd), and this is {sys.platform}"
    return ""


def connect(store: Store, rank: int, members: Sequence[int], name: str, timeout: float) -> Link:
    """Meet the other ranks of this host in one segment, which they find through the store.

    Args:
        store: Where the ranks find each other; keys of this group only.
        rank: This rank in the group.
        members: Global ranks of all members.
        name: The group's name, for messages.
        timeout: Seconds that a wait in this group takes at most.

    Returns:
        This rank's link, with all ranks present.

    Raises:
        UnsupportedError: The platform has no memfd, or the ranks can't see each other's processes.
        RankStalledError: A rank did not come in time.
    """
    if reason := available():
        raise UnsupportedError(f"{reason}. Use backend 'gloo', or ranks as threads.")
    layout = layout_for(len(members))
    with found(store, layout, rank == 0) as memory:
        return meet(memory, layout, rank, members, name, timeout)


def layout_for(size: int) -> Layout:
    """The map of a segment for the ranks of one host."""
    window = window_for(size)
    return Layout(size, window, RING // window)


def meet(memory: SharedMemory, layout: Layout, rank: int, members: Sequence[int], name: str, timeout: float) -> Link:
    """Wait in a segment until all ranks are there. Arguments and result as in `connect`."""
    link = Link(memory, layout, rank, members, name, timeout)
    link.line.arrive(os.getpid())
    link.alive = Peers({})
    link.meet("init_process_group")
    link.alive = Peers({peer: link.lines[peer].pid for peer in link.peers})
    return link


@contextmanager
def made(layout: Layout) -> Iterator[tuple[SharedMemory, bytes]]:
    """A new segment, and the deed by which others find it: until this ends, by when all should have mapped it."""
    fd = os.memfd_create("torchdist_ref", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, layout.nbytes)
        memory = SharedMemory(fd, layout.nbytes)
        mark = secrets.token_bytes(_MARK)
        memory.bytes[:_MARK] = mark
        memory.lay_tokens(layout)
        yield memory, f"{os.getpid()} {fd} {mark.hex()}".encode()
    finally:
        os.close(fd)


@contextmanager
def found(store: Store, layout: Layout, first: bool) -> Iterator[SharedMemory]:
    """The segment of a host: its first rank makes it, the others learn of it through the store."""
    if not first:
        yield attach(store.get("segment"), layout)
        return
    with made(layout) as (memory, deed):
        store.set("segment", deed)
        yield memory


def attach(deed: bytes, layout: Layout) -> SharedMemory:
    """Map the segment that another process of this host has made.

    Raises:
        UnsupportedError: That process is out of sight.
    """
    pid, number, mark = deed.decode().split()
    try:
        fd = open_of(int(pid), int(number))
    except OSError as error:
        raise UnsupportedError(
            f"shared memory: process {pid}, which holds the group's segment, is out of sight from here ({error}); "
            f"the ranks are in different pid namespaces or belong to different users. Use backend 'gloo'."
        ) from error
    memory = SharedMemory(fd, layout.nbytes)
    os.close(fd)
    if memory.bytes[:_MARK] != bytes.fromhex(mark):
        raise DistBackendError(f"shared memory: descriptor {number} of process {pid} is not the group's segment.")
    return memory


def host_identity() -> str:
    """Equal for two ranks if and only if they can share memory: same host, same namespaces.

    ``TORCHDIST_REF_HOST_ID`` overrides it, which lets one machine play several hosts.
    """
    given = os.environ.get("TORCHDIST_REF_HOST_ID")
    if given is not None:
        return given
    try:
        return "/".join([_boot(), *(os.readlink(f"/proc/self/ns/{space}") for space in ("pid", "ipc", "user"))])
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EACCES):
            raise
        return os.uname().nodename


@cache
def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
