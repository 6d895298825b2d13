"""Layout of a segment."""

from __future__ import annotations

from itertools import pairwise

from torchdist_ref.transports.segment_layout import (
    CACHE_LINE,
    EAGER_BYTES,
    MESSAGE_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    SEMAPHORE_KINDS,
    SegmentLayout,
)
from torchdist_ref.transports.status_table import ROW_BYTES


def test_the_parts_of_a_segment_do_not_overlap() -> None:
    layout = SegmentLayout(3, window=8192, cells=4)
    parts = [(0, SEGMENT_HEADER_BYTES)]
    parts += [(layout.status_row(r), ROW_BYTES) for r in range(3)]
    pairs = [(a, b) for a in range(3) for b in range(3)]
    parts += [(layout.semaphore(kind, a, b), CACHE_LINE) for kind in SEMAPHORE_KINDS for a, b in pairs]
    parts += [(layout.eager_buffer(r, cell), EAGER_BYTES) for r in range(3) for cell in range(4)]
    parts += [(layout.ring(r, offset), 8192) for r in range(3) for offset in range(0, 4 * 8192, 8192)]
    parts += [(layout.message_header(a, b), MESSAGE_HEADER_BYTES) for a, b in pairs]
    parts += [(layout.mailbox_ring(a, b), layout.mailbox_ring_bytes) for a, b in pairs]
    parts.sort()
    for (begin, size), (following, _) in pairwise(parts):
        assert begin + size <= following
    assert parts[-1][0] + parts[-1][1] <= layout.nbytes
