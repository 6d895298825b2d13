"""Where everything lies in a group's segment: the byte map that all ranks share.

::

    | magic, token | board: one line of 2 KiB per rank | tokens: one cache line each | stages | boxes |

* The *board* holds, per rank: status, pid, the number of the last finished call, whom it waits for, why it gave up,
  and the announcements (sequence number, fingerprint, text) of its last two calls.
* A *token* is a counting semaphore from one rank to another (see `KINDS`).
* A *stage* is what a rank lays out for its peers to read in a round; it has two halves, used in turn.
* A *box* is the point-to-point mailbox of one ordered pair of ranks: an envelope and two halves.

Nothing here touches memory; don't add anything that does.
"""

from __future__ import annotations

from dataclasses import dataclass

PAGE = 4096
CACHE_LINE = 64

# full: "my stage holds this round's data"; free: "I have read it". offer, reply: the two halves of a
# point-to-point handshake; more, room: its later windows. bell (on the diagonal): "some offer is there".
# line: nobody waits for it; it only says that a board line has changed.
KINDS = ("full", "free", "offer", "reply", "more", "room", "bell", "line")

HEADER = PAGE
BOARD_LINE = 2048
ENVELOPE = 1024

# Offsets in a board line.
STATUS, DONE, PID, GAVE_UP_AT, WAITS, BEAT, HEADS, TEXTS, REASON = 0, 8, 16, 24, 32, 40, 64, 192, 704
# What of a line changes in every call: everything before the reason.
ANNOUNCEMENT = REASON
TEXT_BYTES, REASON_BYTES = 256, 1344


def half_for(size: int) -> int:
    """Bytes of one half of a stage where all ranks see the same memory.

    Two ranks work side by side, and what one lays out should still be in its cache when the other reads it. More ranks
    often share cores: each window then costs every rank a turn, which is dearer (measured) than a slower cache.
    """
    return 512 * 1024 if size <= 2 else 1024 * 1024


def _up(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


@dataclass(frozen=True, slots=True)
class Layout:
    """The map of a segment for `size` ranks.

    Attributes:
        size: Ranks in the group.
        half: Bytes of one half of a stage (see `half_for`).
        box: Bytes of one half of a mailbox.
    """

    size: int
    half: int = 512 * 1024
    box: int = 256 * 1024

    def board(self, rank: int) -> int:
        """Where the board line of `rank` begins."""
        return HEADER + rank * BOARD_LINE

    def token(self, kind: str, source: int, target: int) -> int:
        """Where the token of this kind from `source` to `target` lies."""
        index = (KINDS.index(kind) * self.size + source) * self.size + target
        return HEADER + _up(self.size * BOARD_LINE) + index * CACHE_LINE

    def stage(self, rank: int, half: int) -> int:
        """Where a half of the stage of `rank` begins."""
        return self._stages + (2 * rank + half) * self.half

    def envelope(self, source: int, target: int) -> int:
        """Where the envelope of the mailbox from `source` to `target` begins."""
        return self._boxes + (source * self.size + target) * (_up(ENVELOPE) + 2 * self.box)

    def mailbox(self, source: int, target: int, half: int) -> int:
        """Where a half of the mailbox from `source` to `target` begins."""
        return self.envelope(source, target) + _up(ENVELOPE) + half * self.box

    @property
    def _stages(self) -> int:
        return HEADER + _up(self.size * BOARD_LINE) + _up(len(KINDS) * self.size**2 * CACHE_LINE)

    @property
    def _boxes(self) -> int:
        return self._stages + 2 * self.size * self.half

    @property
    def nbytes(self) -> int:
        """Bytes of the whole segment. Pages that nobody touches cost nothing."""
        return self.envelope(self.size, 0)
