"""Direct, two shots, shared: one or two rounds in which every rank reads what it needs where it is.

On shared memory a move is a read of the sender's slot, so a round is one synchronization and then plain memory
traffic: nothing can be faster for small messages. Between hosts a rank would take ``n - 1`` messages one after
the other, which the other files avoid.

**Direct**: steps 1. Bytes: in `all_reduce` and `reduce`, each rank that gets the result reads ``(n - 1) m`` (``m``: the
whole buffer). In the other operations ranks read the least possible, ``(n - 1)/n m``. One-shot all-reduce is the
small-message algorithm of MPICH's and DeepSpeed's shared-memory collectives.

**Two shots** (`two_shot_all_reduce`, `two_shot_reduce`): every rank reduces one chunk, which it reads from all ranks,
and then reads the finished chunks. This is the least work possible for large tensors. Steps 2. Bytes that a rank
takes: ``2 (n - 1)/n m``; reduced: ``(n - 1)/n m``. Source: the "distributed" shared-memory all-reduce of Gloo.

**Shared** (`shared_reduce`, `shared_broadcast`): rank ``c`` handles chunk ``c`` of a rooted call, whatever ranks it
comes from and goes to, so that all ranks work at once and nothing moves twice. It needs a backend whose ranks write
into each other's tensors (registered buffers). Steps 1. Bytes that a rank handles: ``(n - 1)/n m``.

Do not add here: algorithms with more than two rounds.
"""

from __future__ import annotations

from collections.abc import Iterable

from torchdist_ref.schedules.compose import then
from torchdist_ref.schedules.schedule import Move, Rounds, Schedule, Slot, arriving, carry

DATA: Slot = ("data", 0)
SIGNAL: Slot = ("tmp", 0)


def rest(rank: int, world: int) -> Iterable[int]:
    """Return all ranks but ``rank`` from 0 on: the order in which a round lists the moves that leave it."""
    return (peer for peer in range(world) if peer != rank)


def others(rank: int, world: int) -> Iterable[int]:
    """Return all ranks but ``rank``, counted from the next one, so that no two ranks begin with the same peer."""
    return ((rank + k) % world for k in range(1, world))


def all_reduce(world: int) -> Schedule:
    """Read every rank's tensor on every rank (one shot): all ranks combine the same values along the same tree."""

    def arrivals(step: int, rank: int) -> list[Move]:
        return [carry(peer, rank, DATA, reduce=True) for peer in others(rank, world)]

    def leaving(step: int, rank: int) -> list[Move]:
        return [carry(rank, peer, DATA, reduce=True) for peer in rest(rank, world)]

    rounds = arriving(world, min(1, world - 1), arrivals, leaving, 1, lambda step, rank: [DATA])
    return Schedule("direct all_reduce", world, rounds)


def reduce(world: int, root: int = 0) -> Schedule:
    """Read every rank's tensor on the root."""
    moves = tuple(carry(peer, root, DATA, reduce=True) for peer in others(root, world))
    return Schedule("direct reduce", world, (moves,) if moves else ())


def broadcast(world: int, root: int = 0) -> Schedule:
    """Read the root's tensor on every rank."""
    moves = tuple(carry(root, peer, DATA) for peer in others(root, world))
    return Schedule("direct broadcast", world, (moves,) if moves else ())


def all_gather(world: int) -> Schedule:
    """Read every rank's block on every rank."""

    def arrivals(step: int, rank: int) -> list[Move]:
        peers = [rank, *others(rank, world)]
        return [Move(peer, rank, ("in", 0), ("out", peer)) for peer in peers]

    def leaving(step: int, rank: int) -> list[Move]:
        return [Move(rank, peer, ("in", 0), ("out", rank)) for peer in range(world)]

    return Schedule("direct all_gather", world, arriving(world, 1, arrivals, leaving, period=1), world)


def gather(world: int, root: int = 0) -> Schedule:
    """Read every rank's block on the root."""
    moves = (Move(peer, root, ("in", 0), ("out", peer)) for peer in [root, *others(root, world)])
    return Schedule("direct gather", world, (tuple(moves),), world)


def scatter(world: int, root: int = 0) -> Schedule:
    """Read one block of the root on every rank."""
    moves = (Move(root, peer, ("in", peer), ("out", 0)) for peer in [root, *others(root, world)])
    return Schedule("direct scatter", world, (tuple(moves),), world)


def reduce_scatter(world: int) -> Schedule:
    """Read one chunk of every rank on every rank: its own is copied, the others are reduced into it."""

    def arrivals(step: int, rank: int) -> list[Move]:
        peers = [rank, *others(rank, world)]
        return [Move(peer, rank, ("in", rank), ("out", 0), reduce=peer != rank) for peer in peers]

    def leaving(step: int, rank: int) -> list[Move]:
        return [Move(rank, peer, ("in", peer), ("out", 0), reduce=peer != rank) for peer in range(world)]

    return Schedule("direct reduce_scatter", world, arriving(world, 1, arrivals, leaving, period=1), world)


def all_to_all(world: int) -> Schedule:
    """Read from every rank the block that is meant for the reader."""

    def arrivals(step: int, rank: int) -> list[Move]:
        return [Move(peer, rank, ("in", rank), ("out", peer)) for peer in [rank, *others(rank, world)]]

    def leaving(step: int, rank: int) -> list[Move]:
        return [Move(rank, peer, ("in", peer), ("out", rank)) for peer in range(world)]

    return Schedule("direct all_to_all", world, arriving(world, 1, arrivals, leaving, period=1), world)


def barrier(world: int) -> Schedule:
    """Notify every rank from every rank."""

    def arrivals(step: int, rank: int) -> list[Move]:
        return [carry(peer, rank, SIGNAL) for peer in others(rank, world)]

    def leaving(step: int, rank: int) -> list[Move]:
        return [carry(rank, peer, SIGNAL) for peer in rest(rank, world)]

    rounds: Rounds = arriving(world, min(1, world - 1), arrivals, leaving, period=1)
    return Schedule("direct barrier", world, rounds, chunks=0)


def send(world: int, root: int = 0) -> Schedule:
    """Copy ``root``'s block to the next rank: the other one in a world of 2, itself in a world of 1."""
    return Schedule("direct send", world, ((Move(root, (root + 1) % world, ("in", 0), ("out", 0)),),))


def reduce_scatter_in_place(world: int) -> Schedule:
    """Reduce chunk ``c`` of every rank's ``data`` on rank ``c``."""

    def arrivals(step: int, rank: int) -> list[Move]:
        return [carry(peer, rank, ("data", rank), reduce=True) for peer in others(rank, world)]

    def leaving(step: int, rank: int) -> list[Move]:
        return [carry(rank, peer, ("data", peer), reduce=True) for peer in rest(rank, world)]

    def reads(step: int, rank: int) -> list[Slot]:
        return [("data", peer) for peer in rest(rank, world)]

    rounds = arriving(world, min(1, world - 1), arrivals, leaving, 1, reads)
    return Schedule("direct reduce_scatter in place", world, rounds, world)


def all_gather_in_place(world: int) -> Schedule:
    """Copy chunk ``c`` of rank ``c``'s ``data`` to every rank."""

    def arrivals(step: int, rank: int) -> list[Move]:
        return [carry(peer, rank, ("data", peer)) for peer in others(rank, world)]

    def leaving(step: int, rank: int) -> list[Move]:
        return [carry(rank, peer, ("data", rank)) for peer in rest(rank, world)]

    rounds = arriving(world, min(1, world - 1), arrivals, leaving, 1, lambda step, rank: [("data", rank)])
    return Schedule("direct all_gather in place", world, rounds, world)


def gather_in_place(world: int, root: int = 0) -> Schedule:
    """Copy chunk ``c`` of rank ``c``'s ``data`` to the root."""
    moves = tuple(carry(peer, root, ("data", peer)) for peer in others(root, world))
    return Schedule("direct gather in place", world, (moves,) if moves else (), world)


def two_shot_all_reduce(world: int) -> Schedule:
    """Run a direct reduce-scatter, then a direct all-gather."""
    return then(reduce_scatter_in_place(world), all_gather_in_place(world), name="two_shot all_reduce")


def two_shot_reduce(world: int, root: int = 0) -> Schedule:
    """Run a direct reduce-scatter, then read the finished chunks on the root."""
    return then(reduce_scatter_in_place(world), gather_in_place(world, root), name="two_shot reduce")


def shared_reduce(world: int, root: int = 0) -> Schedule:
    """Reduce chunk ``c`` of every rank's ``data`` into the root's; rank ``c`` does it."""
    peers = others(root, world)
    moves = tuple(carry(peer, root, ("data", chunk), reduce=True) for peer in peers for chunk in range(world))
    return Schedule("shared reduce", world, (moves,) if moves else (), world)


def shared_broadcast(world: int, root: int = 0) -> Schedule:
    """Copy chunk ``c`` of the root's ``data`` into every rank's; rank ``c`` does it."""
    moves = tuple(carry(root, peer, ("data", chunk)) for peer in others(root, world) for chunk in range(world))
    return Schedule("shared broadcast", world, (moves,) if moves else (), world)
