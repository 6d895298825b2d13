"""Segment: the memory of a group, as all transports lay it out.

::

    | id | status table: one row per rank | semaphores: one cache line each | staging buffers | mailboxes |

* *Status table*: a row per rank with its last two calls, the last one completed, and why it aborted (`StatusRow`).
* *Semaphores*: one of each kind (`SEMAPHORE_KINDS`) for every ordered pair of ranks.
* *Staging buffer* of a rank: the data that its peers read in a round. Small rounds use eager buffers, larger ones a
  ring buffer. Both have `cells` cells, so that a rank writes one cell while its peers read the others (double
  buffering).
* *Mailbox* of an ordered pair of ranks: a message header and a ring buffer, for point-to-point messages.

Each ring buffer holds several windows: rewriting a cache line that a peer has just read costs a coherence miss (4x
slower at 64 KiB, measured).

A rank writes only its own row, in aligned words of eight bytes. Announcements are read after acquiring a semaphore that
their writer posted, which orders the two accesses. All other fields are read without synchronization, between two polls
of a slow wait: a stale value costs one more poll.

The segment is memory of one process if the ranks are its threads (`PrivateSegment`), a mapping that the processes of a
host share (`SharedMemorySegment`), or a copy for each host (`tcp`).

Do not add waits here: a segment is plain memory, and a `link` waits. How transports access it is in `base`.
"""

from __future__ import annotations

import _multiprocessing
import ctypes
import errno
import mmap
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from queue import Empty, SimpleQueue
from time import monotonic_ns
from typing import Any, NamedTuple, overload
from weakref import WeakValueDictionary

from torchdist_ref.errors import DistBackendError, UnsupportedError, advice_on_limit
from torchdist_ref.membership.peer_processes import PeerProcesses
from torchdist_ref.processes.linux_calls import memfd_create
from torchdist_ref.processes.witness import own_witness
from torchdist_ref.stores import Store
from torchdist_ref.transports.base import DirectPath, Range, Semaphore

# ---- layout

PAGE = 4096
CACHE_LINE = 64

SEMAPHORE_KINDS = ("ready", "released", "message", "reply", "chunk", "credit", "doorbell", "status")
"""Kinds of semaphores.

ready: the poster's staging buffer holds the data of this round. released: the poster has read the other's data.
message, reply: handshake of a point-to-point message; chunk, credit: a later chunk of it, and free space for one.
doorbell (source and target are the receiver): any message has arrived. status: a row of the status table has changed;
nobody waits for it.
"""

SEGMENT_HEADER_BYTES = PAGE
MESSAGE_HEADER_BYTES = 1024

EAGER_BYTES = 4 * 1024
"""Size of an eager buffer. Rounds with no more data use one: reusing its cache lines costs nothing at this size."""

MIN_RING_BYTES = 64 * 1024
"""Smallest share of a ring buffer that a round uses. Smaller shares would mean more offsets, each with code of its
own."""

RING_BYTES = 2 * 1024 * 1024
"""Size of a ring buffer within a host: larger than the second-level cache of a core."""


def window_for(size: int) -> int:
    """Return the window for `size` ranks of one host: the bytes that a round stages at once, at most.

    Two ranks work side by side, and a window should still be in the cache when the peer reads it. More ranks often
    share cores. Each window then costs every rank a context switch, which is slower than the cache misses (measured).
    """
    return 512 * 1024 if size <= 2 else 1024 * 1024


def _page_aligned(nbytes: int) -> int:
    """Round a size up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def ring_bytes(nbytes: int) -> int:
    """Return the share of a ring buffer that a round with `nbytes` of data uses; 0 if an eager buffer suffices.

    Shares are powers of two, so that consecutive shares of different sizes never overlap.

    >>> ring_bytes(EAGER_BYTES), ring_bytes(EAGER_BYTES + 1), ring_bytes(MIN_RING_BYTES + 1)
    (0, 65536, 131072)
    """
    return 0 if nbytes <= EAGER_BYTES else max(MIN_RING_BYTES, 1 << (nbytes - 1).bit_length())


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Offsets in the segment of a group.

    Attributes:
        size: Number of ranks.
        window: Bytes that a round stages at once, at most; a power of two (see `window_for`).
        cells: Windows in a ring buffer, and number of eager buffers; a power of two, at least 2.
        mailbox_bytes: Size of the ring buffers of a rank's mailboxes together. Each gets an equal share, between 64 KiB
            and 1 MiB.
    """

    size: int
    window: int = 512 * 1024
    cells: int = 4
    mailbox_bytes: int = 8 * 1024 * 1024

    def status_row(self, rank: int) -> int:
        """Return the offset of the status row of `rank`."""
        return SEGMENT_HEADER_BYTES + rank * ROW_BYTES

    def semaphore(self, kind: str, source: int, target: int) -> int:
        """Return the offset of the semaphore of this kind that `source` posts and `target` acquires."""
        index = (SEMAPHORE_KINDS.index(kind) * self.size + source) * self.size + target
        return SEGMENT_HEADER_BYTES + _page_aligned(self.size * ROW_BYTES) + index * CACHE_LINE

    def eager_buffer(self, rank: int, cell: int) -> int:
        """Return the offset of an eager buffer of `rank`."""
        return self._staging + rank * self.staging_bytes + cell * EAGER_BYTES

    def ring(self, rank: int, offset: int) -> int:
        """Return the offset in the segment of an offset in the ring buffer of `rank`."""
        return self._staging + rank * self.staging_bytes + self.cells * EAGER_BYTES + offset

    @property
    def staging_bytes(self) -> int:
        """Size of a rank's staging buffer."""
        return self.cells * (EAGER_BYTES + self.window)

    def next_offset(self, offset: int, nbytes: int) -> int:
        """Return the first offset in a ring buffer, from `offset` on, for a share of `nbytes`; wraps around.

        >>> [SegmentLayout(2, window=256, cells=2).next_offset(offset, 128) for offset in (0, 1, 384, 385)]
        [0, 128, 384, 0]
        """
        return -(-offset // nbytes) * nbytes % (self.cells * self.window)

    @property
    def mailbox_ring_bytes(self) -> int:
        """Size of the ring buffer of one mailbox."""
        share = self.mailbox_bytes // max(1, self.size - 1) // PAGE * PAGE
        return max(MIN_RING_BYTES, min(16 * MIN_RING_BYTES, share))

    def message_header(self, source: int, target: int) -> int:
        """Return the offset of the message header in the mailbox from `source` to `target`."""
        stride = _page_aligned(MESSAGE_HEADER_BYTES) + self.mailbox_ring_bytes
        return self._mailboxes + (source * self.size + target) * stride

    def mailbox_ring(self, source: int, target: int) -> int:
        """Return the offset of the ring buffer in the mailbox from `source` to `target`."""
        return self.message_header(source, target) + _page_aligned(MESSAGE_HEADER_BYTES)

    @property
    def _staging(self) -> int:
        """Offset of the first staging buffer."""
        semaphores = len(SEMAPHORE_KINDS) * self.size**2 * CACHE_LINE
        return SEGMENT_HEADER_BYTES + _page_aligned(self.size * ROW_BYTES) + _page_aligned(semaphores)

    @property
    def _mailboxes(self) -> int:
        """Offset of the mailboxes."""
        return self._staging + self.size * self.staging_bytes

    @property
    def nbytes(self) -> int:
        """Size of the segment. Untouched pages use no memory."""
        return self.message_header(self.size, 0)


# ---- status table

ABSENT, PRESENT, LEFT, ABORTED = range(4)
"""Values of `StatusRow.status`."""

JOINING, JOINED = -2, -1
"""Values of `StatusRow.completed` before the first call, which is number 0."""

ZERO_COPY_BITS, REGISTERED_MEMORY, DEVICE_MEMORY = 3, 1, 2
"""Mask of the fingerprint bits for a zero-copy call, and their values: the kind of memory that its tensors are in."""

# Indices of the fields, in words.
_STATUS, COMPLETED, _PID, _ABORTED_AT, _WAITING_FOR, _WAITING_SINCE, _CLOSED, _WITNESS = range(8)
# Bits of the field `_CLOSED`.
_HAS_CLOSED, _PROGRAM_ENDED = 1, 2
# Offsets in bytes. An announcement is a header of 32 bytes and a memory handle of 32 bytes; a row holds two of each.
_ANNOUNCEMENTS, _HEADER_BYTES, _ANNOUNCEMENT_STRIDE = 64, 32, 64
_TEXTS, _TEXT_BYTES = 192, 256
_REASON = _TEXTS + 2 * _TEXT_BYTES

ROW_BYTES = 2048
_STORE_ADDRESS = ROW_BYTES - 128
REASON_BYTES = _STORE_ADDRESS - _REASON - 2
"""Longest reason of an abort or a leave. It is a value (see `membership.events`), which a shorter field would cut."""
ANNOUNCEMENT_BYTES = _REASON
"""Size of the part of a row that changes in every call: everything before the reason of an abort."""


class Announcement(NamedTuple):
    """Announcement of a call: a fingerprint for comparison and a text for messages."""

    fingerprint: int
    text: bytes


class StatusRow:
    """Row of one rank: two announcements, by the parity of the call's sequence number, and the rank's status.

    Args:
        memory: The segment, or this process's copy of it.
        begin: Offset of the row in bytes.

    Attributes:
        fields: The row as words of eight bytes; `COMPLETED` is the index that executors write directly.
        announcements: Headers of the two announcements: sequence number, fingerprint, and the call's number (two
            words).
        compared: The part of each header that ranks compare: everything but the sequence number.
        handles: Memory handles of the two calls, 32 bytes each, valid where `announce_zero_copy` wrote them.
        differs: In the place of the handles, where many ranks compare a call (`Link.hops`): whether the rank knows of
            two ranks that announced different calls. One byte for each of the two calls.
    """

    def __init__(self, memory: memoryview, begin: int) -> None:
        self._bytes = memory[begin : begin + ROW_BYTES]
        self.fields = self._bytes.cast("q")
        starts = (_ANNOUNCEMENTS, _ANNOUNCEMENTS + _ANNOUNCEMENT_STRIDE)
        self.headers = tuple(self.fields[at // 8 : (at + _HEADER_BYTES) // 8] for at in starts)
        self.compared = tuple(header[1:] for header in self.headers)
        self.handles = tuple(self._bytes[at + _HEADER_BYTES : at + _ANNOUNCEMENT_STRIDE] for at in starts)
        self.differs = tuple(handle[:1] for handle in self.handles)
        self._texts = tuple(self._bytes[at : at + _TEXT_BYTES] for at in (_TEXTS, _TEXTS + _TEXT_BYTES))
        self._written: list[Announcement | None] = [None, None]

    def announce(self, sequence: int, record: Announcement, number: tuple[int, int] = (0, 0)) -> None:
        """Write the announcement of the next call.

        The text is written only if it differs from the previous one of this parity: most loops repeat two calls.

        Args:
            sequence: Number of calls announced before.
            record: Fingerprint and text of the call.
            number: Identity of the call (see `calls`). Ranks may reach calls in different orders.
        """
        parity = sequence & 1
        header = self.headers[parity]
        header[0] = sequence
        header[1] = record.fingerprint
        header[2], header[3] = number
        if self._written[parity] is not record:
            self._written[parity] = record
            _put_text(self._texts[parity], record.text)

    def announce_zero_copy(self, parity: int, kind: int, handle: bytes) -> None:
        """Add to the announcement of this parity that peers may access this rank's tensors directly.

        Args:
            parity: Parity of the call just announced.
            kind: `REGISTERED_MEMORY` or `DEVICE_MEMORY`.
            handle: Location of the tensors, 32 bytes.
        """
        self.headers[parity][1] |= kind
        self.handles[parity][:] = handle

    def text(self, sequence: int) -> str:
        """Return the text of the call with this sequence number, if it is one of the last two."""
        parity = sequence & 1
        return _get_text(self._texts[parity]) if self.headers[parity][0] == sequence else "an earlier call"

    @property
    def announced(self) -> int:
        """Sequence number of the last announced call; -1 before the first."""
        return max(header[0] for header in self.headers)

    @property
    def status(self) -> int:
        """`ABSENT`, `PRESENT`, `LEFT` or `ABORTED`."""
        return self.fields[_STATUS]

    @status.setter
    def status(self, value: int) -> None:
        self.fields[_STATUS] = value

    @property
    def pid(self) -> int:
        """Process id of the rank."""
        return self.fields[_PID]

    @property
    def witness(self) -> int:
        """Witness of the rank's process (see `torchdist_ref.processes.witness`); 0 if it has none."""
        return self.fields[_WITNESS]

    def join(self, pid: int, witness: int = 0) -> None:
        """Mark the rank as present, with no call announced or completed."""
        for header in self.headers:
            header[0] = JOINED
        self.fields[COMPLETED] = JOINING
        self.fields[_PID], self.fields[_WITNESS] = pid, witness
        self.status = PRESENT

    @property
    def completed(self) -> int:
        """Sequence number of the last completed call; `JOINING` or `JOINED` before the first."""
        return self.fields[COMPLETED]

    @completed.setter
    def completed(self, sequence: int) -> None:
        self.fields[COMPLETED] = sequence

    def abort(self, reason: str) -> None:
        """Mark the rank as aborted, with the reason. Later aborts do not overwrite the first reason."""
        if self.status == PRESENT:
            self.explain_leave(reason)
            self.fields[_ABORTED_AT] = monotonic_ns()
            self.status = ABORTED

    def explain_leave(self, reason: str) -> None:
        """Write why this rank is about to leave, unless it has left or aborted."""
        if self.status == PRESENT:
            _put_text(self._bytes[_REASON:_STORE_ADDRESS], reason.encode(errors="backslashreplace"))

    @property
    def closed(self) -> bool:
        """Whether the rank has closed its end of the group, after an abort too: its process need not have ended."""
        return bool(self.fields[_CLOSED] & _HAS_CLOSED)

    @property
    def program_ended(self) -> bool:
        """Whether the rank closes its end of the group only because its program ends."""
        return bool(self.fields[_CLOSED] & _PROGRAM_ENDED)

    def end_program(self) -> None:
        """Mark the rank as one whose program ends without destroying the group."""
        self.fields[_CLOSED] |= _PROGRAM_ENDED

    def close(self) -> None:
        """Mark the rank as gone from the group; one that has aborted remains so."""
        self.fields[_CLOSED] |= _HAS_CLOSED
        if self.status != ABORTED:
            self.status = LEFT

    @property
    def has_left(self) -> bool:
        """Whether the rank has closed its end of the group in good order."""
        return self.closed and self.status == LEFT

    @property
    def aborted_at(self) -> int:
        """Time of the abort in nanoseconds, by the monotonic clock that the ranks of a host share."""
        return self.fields[_ABORTED_AT]

    @property
    def reason(self) -> str:
        """Reason of the abort, or failure after which the rank has left; empty if there was none."""
        return _get_text(self._bytes[_REASON:_STORE_ADDRESS])

    @property
    def store_address(self) -> str:
        """Host and port of a store that the rank serves in place of one that has ended; empty if it serves none."""
        return _get_text(self._bytes[_STORE_ADDRESS:])

    @store_address.setter
    def store_address(self, address: str) -> None:
        _put_text(self._bytes[_STORE_ADDRESS:], address.encode())

    def set_waiting_for(self, peer: int) -> None:
        """Record that this rank waits for `peer`. Call again while the wait lasts: the entry expires."""
        self.fields[_WAITING_FOR], self.fields[_WAITING_SINCE] = peer + 1, monotonic_ns()

    def clear_waiting_for(self) -> None:
        """Record that this rank no longer waits."""
        self.fields[_WAITING_FOR] = 0

    def waiting_for(self, max_age: float | None) -> int | None:
        """Return the rank that this one waits for, or None.

        Args:
            max_age: Age in seconds from which an entry counts as expired: a process stopped in a wait no longer renews
                it. None where the two ranks share no clock.
        """
        peer, since = self.fields[_WAITING_FOR] - 1, self.fields[_WAITING_SINCE]
        return peer if peer >= 0 and (max_age is None or monotonic_ns() - since < max_age * 1e9) else None

    def describe(self) -> str:
        """Describe the last known call of the rank, for messages."""
        if self.announced < 0:
            return "has made no collective on this group yet"
        call = f"call {self.announced}, {self.text(self.announced)}"
        return f"completed {call}, and has made no other" if self.completed >= self.announced else f"is in {call}"


class StatusRows(Sequence[StatusRow]):
    """Rows of the status table, each made when it is used first: groups of many ranks use few of them.

    Args:
        size: Number of ranks.
        make: Function that returns the row of a rank.
    """

    def __init__(self, size: int, make: Callable[[int], StatusRow]) -> None:
        self._size, self._make = size, make
        self._made: dict[int, StatusRow] = {}

    @overload
    def __getitem__(self, index: int) -> StatusRow: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[StatusRow, ...]: ...
    def __getitem__(self, index: int | slice) -> StatusRow | tuple[StatusRow, ...]:
        ranks = range(self._size)[index]
        if not isinstance(ranks, int):
            return tuple(map(self.__getitem__, ranks))
        found = self._made.get(ranks)
        if found is None:
            found = self._made[ranks] = self._make(ranks)
        return found

    def __len__(self) -> int:
        return self._size


def _put_text(field: memoryview, text: bytes) -> None:
    """Write a text and its length into a field, shortened if it does not fit."""
    text = text[: len(field) - 2]
    field[2 : 2 + len(text)] = text
    field[:2] = len(text).to_bytes(2, "little")


def _get_text(field: memoryview) -> str:
    length = min(int.from_bytes(field[:2], "little"), len(field) - 2)
    return bytes(field[2 : 2 + length]).decode(errors="replace")


# ---- access


class CommonSegment:
    """Segment that all ranks access directly."""

    buffer: Any
    bytes: memoryview
    rows_are_common = True

    def buffer_of(self, rank: int) -> Any:
        """See `Segment.buffer_of`."""
        return self.buffer

    def bytes_of(self, rank: int) -> memoryview:
        """See `Segment.bytes_of`."""
        return self.bytes

    def make_signal(
        self, semaphore: Semaphore, kind: str, target: int, owner: int, ranges: Sequence[Range]
    ) -> Callable[[], Any]:
        """See `Segment.make_signal`. The ranges are visible to the target anyway."""
        return semaphore.release

    def publish_row(self, layout: SegmentLayout, rank: int) -> None:
        """See `Segment.publish_row`. All ranks see the row anyway."""

    def direct_path(self, peer: int) -> DirectPath | None:
        """See `Segment.direct_path`."""
        return None


# ---- threads


class QueueSemaphore:
    """Counting semaphore on a queue, for threads: `release` puts an item, `acquire` gets one.

    The queue blocks without the GIL, and Ctrl-C interrupts it.

    >>> semaphore = QueueSemaphore()
    >>> semaphore.release()
    >>> semaphore.acquire(False), semaphore.acquire(False)
    (True, False)
    """

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: SimpleQueue[None] = SimpleQueue()

    def release(self) -> None:
        """See `Semaphore.release`."""
        self._queue.put(None)

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """See `Semaphore.acquire`."""
        try:
            self._queue.get(block, timeout)
        except Empty:
            return False
        return True


class PrivateSegment(CommonSegment):
    """Segment in private memory, for ranks that are threads of one process. Untouched pages use no memory."""

    kind = "threads"

    def __init__(self, nbytes: int) -> None:
        self.buffer = mmap.mmap(-1, nbytes)
        self.bytes = memoryview(self.buffer)
        self._semaphores: dict[int, QueueSemaphore] = {}

    def semaphore(self, layout: SegmentLayout, kind: str, source: int, target: int) -> Semaphore:
        """See `Segment.semaphore`. Created on first use."""
        return self._semaphores.setdefault(layout.semaphore(kind, source, target), QueueSemaphore())


# Segments by the key that rank 0 publishes: a store carries only bytes.
_of_this_process: WeakValueDictionary[str, PrivateSegment] = WeakValueDictionary()


def private_segment(store: Store, layout: SegmentLayout, first: bool) -> PrivateSegment:
    """Return the segment of ranks that are threads of this process: the first one creates it."""
    if not first:
        return _of_this_process[store.get("segment").decode()]
    key = secrets.token_hex(16)
    segment = _of_this_process[key] = PrivateSegment(layout.nbytes)
    store.set("segment", key.encode())
    return segment


# ---- processes of one host

# `SemLock`'s kind of a counting semaphore, and its largest count.
_COUNTING_SEMAPHORE = 1
_MAX_COUNT = 2**31 - 1
_NONCE_BYTES = 16
# Of mmap(2); Python has no name for them.
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


def layout_for(size: int) -> SegmentLayout:
    """Return the layout of a segment for the ranks of one host."""
    window = window_for(size)
    return SegmentLayout(size, window, RING_BYTES // window)


class SharedMemorySegment(CommonSegment):
    """Segment that the processes of one host map, with POSIX semaphores in it.

    Group rank 0 creates a memfd and publishes a *handle* (pid, file descriptor, nonce) with its endpoint. The others
    open it under /proc and map it. The segment has no name, so nothing leaks: when the last process has ended, however
    it ended, the memory is freed. (POSIX shm_open needs /dev/shm, which containers limit to 64 MB and which outlives a
    SIGKILL.)

    Memory order: `sem_post` is an atomic read-modify-write with release order; `sem_wait` and `sem_trywait` have
    acquire order on the same word. This holds on every processor that glibc supports, aarch64 included: a rank that
    acquires a semaphore sees all that its poster wrote before. Python's `SemLock` calls them: 35 ns a call, without the
    GIL while it blocks, interruptible by Ctrl-C.
    """

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
    if sys.platform != "linux":
        return f"shared memory needs Linux 5.3 or later (memfd, pidfd), and this is {sys.platform}"
    return ""


@contextmanager
def created_segment(layout: SegmentLayout) -> Iterator[tuple[SharedMemorySegment, bytes]]:
    """Create a segment, and yield it with its handle. The handle is valid until the context ends."""
    fd = memfd_create("torchdist_ref")
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


def open_peer_descriptor(pid: int, fd: int) -> int:
    """Open a file that another process has open, which may have no name; return the new descriptor.

    Raises:
        OSError: The process is not accessible, has no such descriptor, or the file belongs to another user.
    """
    descriptor = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    if (owner := os.fstat(descriptor).st_uid) != os.geteuid():
        # Root can open the files of all users.
        os.close(descriptor)
        raise PermissionError(errno.EACCES, f"the file belongs to user {owner}")
    return descriptor


def announce_process(row: StatusRow) -> None:
    """Mark the rank of a row as present, with this process."""
    row.join(os.getpid(), own_witness())


def watched_processes(rows: Mapping[int, StatusRow]) -> PeerProcesses:
    """Return the watch over the processes of ranks of this host that have joined.

    Args:
        rows: Their rows of the status table, by rank.
    """
    pids = {rank: row.pid for rank, row in rows.items()}
    return PeerProcesses(pids, {rank: row.witness for rank, row in rows.items()})


# ---- copies

_MEMMOVE = ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
_SIGNATURE = (None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
# Releasing and acquiring the GIL costs as much as copying some kilobytes.
_HOLD_GIL_BYTES = 16 * 1024
_with_gil, _without_gil = ctypes.PYFUNCTYPE(*_SIGNATURE)(_MEMMOVE), ctypes.CFUNCTYPE(*_SIGNATURE)(_MEMMOVE)


def memmove_for(nbytes: int) -> Callable[[int, int, int], None]:
    """Return `memmove(target address, source address, bytes)` for copies of this size, without a tensor operation.

    The addresses come from contiguous tensors (`Tensor.data_ptr`), which must outlive the call.

    >>> import torch
    >>> source, target = torch.tensor([1.5, 2.5]), torch.zeros(2)
    >>> memmove_for(8)(target.data_ptr(), source.data_ptr(), 8)
    >>> target
    tensor([1.5000, 2.5000])
    """
    return _with_gil if nbytes <= _HOLD_GIL_BYTES else _without_gil
