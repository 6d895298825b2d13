"""Where everything lies in a group's segment: the byte map that all ranks share.

::

    | magic, token | board: one line of 2 KiB per rank | tokens: one cache line each | stages | boxes |

* The *board* holds, per rank: status, pid, the number of the last finished call, whom it waits for, why it gave up,
  and the announcements (sequence number, fingerprint, text) of its last two calls.
* A *token* is a counting semaphore from one rank to another (see `KINDS`).
* A *stage* is what a rank lays out for its peers to read in a round: pockets for little, used in turn, and a ring for
  more (see `Layout.next_place`).
* A *box* is the point-to-point mailbox of one ordered pair of ranks: an envelope and a ring.

Rings are larger than what is laid out at once, for speed. What a peer has read is still in its core's cache, and to
write that again costs four times as much as to write what has left the caches since (measured, for 64 KiB).

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
# A round that lays out no more than this does so in a pocket: so little is written as fast wherever it lies.
POCKET = 4 * 1024
# The least that a round takes of a ring. Rounds of one kind lie in as many places as fit, and each has code of its own.
GRAIN = 64 * 1024
# Bytes of a stage's ring within a host: more than a core's second-level cache holds.
RING = 2 * 1024 * 1024
# What of a line changes in every call: everything before the reason.
ANNOUNCEMENT = REASON
TEXT_BYTES, REASON_BYTES = 256, 1344


def window_for(size: int) -> int:
    """Bytes that are laid out at once, at most, where all ranks see the same memory.

    Two ranks work side by side, and what one lays out should still be in its cache when the other reads it. More ranks
    often share cores: each window then costs every rank a turn, which is dearer (measured) than a slower cache.
    """
    return 512 * 1024 if size <= 2 else 1024 * 1024


def _up(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def room(nbytes: int) -> int:
    """What a round that lays out so many bytes takes of a ring; 0 if a pocket is enough.

    Powers of two, so that places which follow each other never overlap, though rounds of several kinds take turns.

    >>> room(POCKET), room(POCKET + 1), room(GRAIN + 1)
    (0, 65536, 131072)
    """
    return 0 if nbytes <= POCKET else max(GRAIN, 1 << (nbytes - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Layout:
    """The map of a segment for `size` ranks.

    Attributes:
        size: Ranks in the group.
        window: Bytes that are laid out at once, at most: a power of two. See `window_for`.
        turns: So many windows follow each other on a ring, and there are so many pockets: a power of two, and at least
            two. Four of the default size are more than a second-level cache holds.
        letters: Bytes of a rank's mailboxes together; each gets an equal part of them, between 64 KiB and 1 MiB.
    """

    size: int
    window: int = 512 * 1024
    turns: int = 4
    letters: int = 8 * 1024 * 1024

    def board(self, rank: int) -> int:
        """Where the board line of `rank` begins."""
        return HEADER + rank * BOARD_LINE

    def token(self, kind: str, source: int, target: int) -> int:
        """Where the token of this kind from `source` to `target` lies."""
        index = (KINDS.index(kind) * self.size + source) * self.size + target
        return HEADER + _up(self.size * BOARD_LINE) + index * CACHE_LINE

    def pocket(self, rank: int, turn: int) -> int:
        """Where the pocket for a turn begins on the stage of `rank`."""
        return self._stages + rank * self.stage + turn * POCKET

    def ring(self, rank: int, place: int) -> int:
        """Where a place of the ring of `rank` is."""
        return self._stages + rank * self.stage + self.turns * POCKET + place

    @property
    def stage(self) -> int:
        """Bytes of a stage."""
        return self.turns * (POCKET + self.window)

    def next_place(self, place: int, taken: int) -> int:
        """The first place at `place` or after it where a round that takes so many bytes can lie; the ring has no end.

        >>> [Layout(2, window=256, turns=2).next_place(place, 128) for place in (0, 1, 384, 385)]
        [0, 128, 384, 0]
        """
        return -(-place // taken) * taken % (self.turns * self.window)

    @property
    def box(self) -> int:
        """Bytes of a mailbox's ring."""
        share = self.letters // max(1, self.size - 1) // PAGE * PAGE
        return max(GRAIN, min(16 * GRAIN, share))

    def envelope(self, source: int, target: int) -> int:
        """Where the envelope of the mailbox from `source` to `target` begins."""
        return self._boxes + (source * self.size + target) * (_up(ENVELOPE) + self.box)

    def mailbox(self, source: int, target: int) -> int:
        """Where the ring of the mailbox from `source` to `target` begins."""
        return self.envelope(source, target) + _up(ENVELOPE)

    @property
    def _stages(self) -> int:
        return HEADER + _up(self.size * BOARD_LINE) + _up(len(KINDS) * self.size**2 * CACHE_LINE)

    @property
    def _boxes(self) -> int:
        return self._stages + self.size * self.stage

    @property
    def nbytes(self) -> int:
        """Bytes of the whole segment. Pages that nobody touches cost nothing."""
        return self.envelope(self.size, 0)
