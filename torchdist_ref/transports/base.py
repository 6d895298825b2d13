"""Interface of a transport: a segment that the ranks access, its semaphores, and a zero-copy path.

To add a transport: write a module with a class like `tcp.ReplicatedSegment`, and a function like `tcp.connect`. Put it
through `testing.transport_contract.check_transport`, and add a row to `selection.TRANSPORTS`. The first row whose
`supports` holds is used.

Do not add offsets here (`segment`), or waits (`link`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Semaphore(Protocol):
    """Counting semaphore from one rank to another. Writes before `release` are visible after `acquire`."""

    def release(self) -> Any:
        """Increment the count."""

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Decrement the count; return False if it is zero (until the time-out)."""


Range = tuple[int, int]
"""Part of a segment: (offset, size), in bytes."""


class DirectPath(Protocol):
    """Zero-copy path to a peer: bytes go from one tensor to another, without a copy through the segment."""

    def send(self, kind: str, data: memoryview) -> None:
        """Send the bytes and post a semaphore of this kind. They go to the next view that the peer has posted."""

    def post_receive(self, views: Sequence[memoryview]) -> None:
        """Post one view for each of the next sends of the peer."""

    def cancel_receives(self) -> None:
        """Discard what the peer has yet to send to the posted views, whose memory is the user's again."""


class Segment(Protocol):
    """Memory of a group: shared by all ranks, or a copy on each host that the ranks keep up to date."""

    kind: str
    rows_are_common: bool
    """Whether a row of the status table reaches all ranks without a signal to each of them."""

    def buffer_of(self, rank: int) -> Any:
        """Return the buffer that holds the parts of `rank`, for `torch.frombuffer`."""

    def bytes_of(self, rank: int) -> memoryview:
        """Return the buffer that holds the parts of `rank` as bytes."""

    def semaphore(self, layout: Any, kind: str, source: int, target: int) -> Semaphore:
        """Return the semaphore of this kind that `source` posts and `target` acquires, in a `segment.SegmentLayout`."""

    def make_signal(
        self, semaphore: Semaphore, kind: str, target: int, owner: int, ranges: Sequence[Range]
    ) -> Callable[[], Any]:
        """Return a function that makes ranges of the parts of `owner` visible to `target` and posts the semaphore."""

    def publish_row(self, layout: Any, rank: int) -> None:
        """Make the status row of `rank`, which is this one, visible to the ranks that do not see it anyway."""

    def direct_path(self, peer: int) -> DirectPath | None:
        """Return the zero-copy path to and from `peer`; None where both access the same segment.

        A segment of copies must have one: a signal carries only the first chunk of a message.
        """
