"""What a link stands on: memory that all ranks see, or copies that are kept up, and tokens that say when to look.

These are the seams between a link and the places that ranks can be in: `threads`, `shared_memory` and `tcp` each have
a class for each of them. How waits end and what is on a board is the link's (`base`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torchdist_ref.transports.layout import Layout


class Token(Protocol):
    """A counting semaphore from one rank to another. `release` comes before what the taker does next."""

    def release(self) -> Any:
        """Add one."""

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """Take one; False if there was none (in time)."""


class Liveness(Protocol):
    """Who is gone: see `liveness`."""

    def dead(self) -> list[int]:
        """Ranks whose processes have ended."""

    def close(self) -> None:
        """Let go."""


Range = tuple[int, int]
"""(offset, bytes) in a segment."""


class Memory(Protocol):
    """What a link stands on: a segment that all ranks see (or a copy of it that is kept up), and tokens."""

    kind: str

    def buffer_of(self, rank: int) -> Any:
        """Where the parts of the segment that belong to `rank` are, for `torch.frombuffer`."""

    def bytes_of(self, rank: int) -> memoryview:
        """The same as bytes."""

    def token(self, layout: Layout, kind: str, source: int, target: int) -> Token:
        """The token of this kind from `source` to `target`, the same for both."""

    def giver(self, token: Token, kind: str, target: int, owner: int, ranges: Sequence[Range]) -> Callable[[], Any]:
        """What to call so that `target` gets a token and then sees these ranges of what belongs to `owner`."""

    def lane(self, peer: int) -> Lane | None:
        """How bytes go to and from a peer past the segment; None where both see the segment."""


class Lane(Protocol):
    """A way for bytes to a peer, and from it, that spares the copy into a segment which only one of the two sees."""

    def send(self, kind: str, data: memoryview) -> None:
        """Give the peer these bytes, and a token. They go where it `expects` the next ones."""

    def expect(self, views: Sequence[memoryview]) -> None:
        """Say where the peer's next bytes belong: one view for each time that it sends."""


class OneMemory:
    """The part that is alike where all ranks have one segment in common: everything is where everything is."""

    buffer: Any
    bytes: memoryview

    def buffer_of(self, rank: int) -> Any:
        """See `Memory`."""
        return self.buffer

    def bytes_of(self, rank: int) -> memoryview:
        """See `Memory`."""
        return self.bytes

    def giver(self, token: Token, kind: str, target: int, owner: int, ranges: Sequence[Range]) -> Callable[[], Any]:
        """See `Memory`. The target sees everything already: the token is all that it needs."""
        return token.release

    def lane(self, peer: int) -> Lane | None:
        """See `Memory`."""
        return None
