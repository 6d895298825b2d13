"""Direct: everybody takes what it needs from where it is, in one round.

On shared memory a move is a read of the sender's slot, so that all of these are one hand-over and then plain
memory traffic: nothing can be faster for small messages. Between hosts a rank would take ``n - 1`` messages
one after the other, which is what the other files are about.

Steps 1. Bytes: `all_reduce` and `reduce` take ``(n - 1) m`` on each rank that holds the result (``m``: the
whole buffer), the others the least possible, ``(n - 1)/n m``. The one-shot all-reduce is the small-message
algorithm of MPICH's and DeepSpeed's shared-memory collectives.

Do not add here: algorithms with more than one round (the two-round variants are in `two_shot`).
"""

from __future__ import annotations

from collections.abc import Iterable

from torchdist_ref.schedules.schedule import Move, Rounds, Schedule, Slot, arriving, carry

DATA: Slot = ("data", 0)
TOKEN: Slot = ("tmp", 0)


def others(rank: int, world: int) -> Iterable[int]:
    """All ranks but ``rank``, counted from the next one, so that no two ranks begin with the same peer."""
    return ((rank + k) % world for k in range(1, world))


def all_reduce(world: int) -> Schedule:
    """One shot: every rank reads every rank's tensor and reduces for itself.

    Reductions commute but do not associate, and all ranks must end with the same bits. So all of them
    compute ``((d0 + d1) + d2) + ...``: ranks 0 and 1 start from their own value, the others replace theirs
    by rank 0's and add their own old value (reads happen before writes) at its place.
    """

    def arrivals(step: int, rank: int) -> list[Move]:
        if rank < 2:
            return [carry(peer, rank, DATA, reduce=True) for peer in range(world) if peer != rank]
        return [carry(peer, rank, DATA, reduce=peer > 0) for peer in range(world)]

    return Schedule("direct all_reduce", world, arriving(world, min(1, world - 1), arrivals))


def reduce(world: int, root: int = 0) -> Schedule:
    """The root reads everybody's tensor."""
    moves = tuple(carry(peer, root, DATA, reduce=True) for peer in others(root, world))
    return Schedule("direct reduce", world, (moves,) if moves else ())


def broadcast(world: int, root: int = 0) -> Schedule:
    """Everybody reads the root's tensor."""
    moves = tuple(carry(root, peer, DATA) for peer in others(root, world))
    return Schedule("direct broadcast", world, (moves,) if moves else ())


def all_gather(world: int) -> Schedule:
    """Everybody reads everybody's block."""

    def arrivals(step: int, rank: int) -> list[Move]:
        peers = [rank, *others(rank, world)]
        return [Move(peer, rank, ("in", 0), ("out", peer)) for peer in peers]

    return Schedule("direct all_gather", world, arriving(world, 1, arrivals, period=1), world)


def gather(world: int, root: int = 0) -> Schedule:
    """The root reads everybody's block."""
    moves = (Move(peer, root, ("in", 0), ("out", peer)) for peer in [root, *others(root, world)])
    return Schedule("direct gather", world, (tuple(moves),), world)


def scatter(world: int, root: int = 0) -> Schedule:
    """Everybody reads its block from the root."""
    moves = (Move(root, peer, ("in", peer), ("out", 0)) for peer in [root, *others(root, world)])
    return Schedule("direct scatter", world, (tuple(moves),), world)


def reduce_scatter(world: int) -> Schedule:
    """Everybody reads its chunk from everybody: its own is copied, the others are reduced into it."""

    def arrivals(step: int, rank: int) -> list[Move]:
        peers = [rank, *others(rank, world)]
        return [Move(peer, rank, ("in", rank), ("out", 0), reduce=peer != rank) for peer in peers]

    return Schedule("direct reduce_scatter", world, arriving(world, 1, arrivals, period=1), world)


def all_to_all(world: int) -> Schedule:
    """Everybody reads from everybody the block that is meant for it."""

    def arrivals(step: int, rank: int) -> list[Move]:
        return [Move(peer, rank, ("in", rank), ("out", peer)) for peer in [rank, *others(rank, world)]]

    return Schedule("direct all_to_all", world, arriving(world, 1, arrivals, period=1), world)


def barrier(world: int) -> Schedule:
    """Everybody tells everybody."""

    def arrivals(step: int, rank: int) -> list[Move]:
        return [carry(peer, rank, TOKEN) for peer in others(rank, world)]

    rounds: Rounds = arriving(world, min(1, world - 1), arrivals, period=1)
    return Schedule("direct barrier", world, rounds, chunks=0)


def send(world: int, root: int = 0) -> Schedule:
    """``root`` hands its block to the next rank: to the other one in a world of 2, to itself in a world of 1."""
    return Schedule("direct send", world, ((Move(root, (root + 1) % world, ("in", 0), ("out", 0)),),))
