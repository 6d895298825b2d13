"""Layout of a group's segment: the offset of every part, the same on all ranks.

::

    | id | status table: one row per rank | semaphores: one cache line each | staging buffers | mailboxes |

* *Status table*: see `status_table`.
* *Semaphores*: one of each kind (`SEMAPHORE_KINDS`) for every ordered pair of ranks.
* *Staging buffer* of a rank: the data that its peers read in a round. Small rounds use eager buffers, larger ones a
  ring buffer. Both have `cells` cells, so that a rank writes one cell while its peers read the others (double
  buffering).
* *Mailbox* of an ordered pair of ranks: a message header and a ring buffer, for point-to-point messages.

Each ring buffer holds several windows: rewriting a cache line that a peer has just read costs a coherence miss (4x
slower at 64 KiB, measured).

Do not access memory here: this module only computes offsets.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchdist_ref.transports.status_table import ROW_BYTES

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
        return self._staging + self.size * self.staging_bytes

    @property
    def nbytes(self) -> int:
        """Size of the segment. Untouched pages use no memory."""
        return self.message_header(self.size, 0)
