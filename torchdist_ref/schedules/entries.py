"""The rows of the catalogue, as data. One row says what, from which function, when, at which cost, from where.

In the costs ``n`` is the number of ranks, ``m`` the bytes of the whole buffer, ``a`` the seconds per message,
``b`` per byte moved, ``g`` per byte reduced; ``lg`` is the logarithm to base 2, rounded up.

Do not add here: code that builds or looks up (`catalogue`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import direct, ring, tree, two_shot
from .schedule import Schedule

Maker = Callable[[int, int, tuple[int, ...]], Schedule]
PATARASUK = "Patarasuk, Yuan 2009"
THAKUR = "Thakur, Rabenseifner, Gropp 2005"
SHARED = "shared-memory collectives of MPICH, DeepSpeed, Gloo"


@dataclass(frozen=True)
class Entry:
    """One row of the catalogue.

    Args:
        op: operation.
        algorithm: name, as in ``TORCHDIST_REF_ALGORITHM="op=algorithm"``.
        make: ``(world, root, hosts) -> Schedule``.
        summary: the idea, in one line.
        when: when it is the right one.
        cost: time on an alpha-beta-gamma network, as text.
        source: paper or program that it comes from.
        equal_blocks: all blocks must have the same size (blocks of several owners share scratch).
    """

    op: str
    algorithm: str
    make: Maker
    summary: str
    when: str
    cost: str
    source: str
    equal_blocks: bool = False


def plain(function: Callable[[int], Schedule]) -> Maker:
    """A maker for an algorithm that has neither root nor hosts."""
    return lambda world, root, hosts: function(world)


def with_root(function: Callable[[int, int], Schedule]) -> Maker:
    """A maker for an algorithm that has a root."""
    return lambda world, root, hosts: function(world, root)


SMALL, LARGE = "small messages on shared memory", "large messages on shared memory"

ENTRIES: tuple[Entry, ...] = (
    Entry("all_reduce", "direct", plain(direct.all_reduce), "everybody reads everything", SMALL,
          "(n-1)(a + mb + mg)", SHARED),
    Entry("all_reduce", "two_shot", plain(two_shot.all_reduce), "reduce a chunk each, read the others'", LARGE,
          "2(n-1)a + 2(n-1)/n mb + (n-1)/n mg", SHARED),
    Entry("all_reduce", "ring", plain(ring.all_reduce), "chunks go twice round", "large messages between hosts",
          "2(n-1)a + 2(n-1)/n mb + (n-1)/n mg", PATARASUK),
    Entry("all_reduce", "tree", plain(tree.all_reduce), "up a tree, then down", "reference",
          "2 lg(n) (a + mb) + lg(n) mg", THAKUR),
    Entry("reduce", "direct", with_root(direct.reduce), "the root reads everything", SMALL, "(n-1)(a + mb + mg)", SHARED),
    Entry("reduce", "two_shot", with_root(two_shot.reduce), "reduce a chunk each, the root reads them", LARGE,
          "2(n-1)a + 2(n-1)/n mb + (n-1)/n mg", SHARED),
    Entry("reduce", "ring", with_root(ring.reduce), "chunks go round, then to the root", "large, any number of ranks",
          "2(n-1)a + 2(n-1)/n mb + (n-1)/n mg", PATARASUK),
    Entry("reduce", "tree", with_root(tree.reduce), "up a tree", "small messages between hosts",
          "lg(n) (a + mb + mg)", THAKUR),
    Entry("broadcast", "direct", with_root(direct.broadcast), "everybody reads the root's", "shared memory",
          "(n-1)(a + mb)", SHARED),
    Entry("broadcast", "tree", with_root(tree.broadcast), "who has it tells who has not", "small messages between hosts",
          "lg(n) (a + mb)", THAKUR),
    Entry("all_gather", "direct", plain(direct.all_gather), "everybody reads everybody's", "shared memory",
          "(n-1)a + (n-1)/n mb", SHARED),
    Entry("all_gather", "ring", plain(ring.all_gather), "blocks go round", "large messages between hosts",
          "(n-1)a + (n-1)/n mb", PATARASUK),
    Entry("gather", "direct", with_root(direct.gather), "the root reads everybody's", "shared memory",
          "(n-1)a + (n-1)/n mb", SHARED),
    Entry("gather", "tree", with_root(tree.gather), "collect up a tree", "small messages between hosts",
          "lg(n) a + (n-1)/n mb", THAKUR),
    Entry("scatter", "direct", with_root(direct.scatter), "everybody reads its block", "shared memory",
          "(n-1)a + (n-1)/n mb", SHARED),
    Entry("scatter", "tree", with_root(tree.scatter), "halve and pass on", "small messages between hosts",
          "lg(n) a + (n-1)/n mb", THAKUR),
    Entry("reduce_scatter", "direct", plain(direct.reduce_scatter), "everybody reads its chunk", "shared memory",
          "(n-1)a + (n-1)/n m(b + g)", SHARED),
    Entry("reduce_scatter", "ring", plain(ring.reduce_scatter), "partial sums go round", "large messages between hosts",
          "(n-1)a + (n-1)/n m(b + g)", PATARASUK),
    Entry("all_to_all", "direct", plain(direct.all_to_all), "everybody reads what is meant for it", "shared memory",
          "(n-1)a + (n-1)/n mb", SHARED),
    Entry("barrier", "direct", plain(direct.barrier), "everybody tells everybody", "few ranks", "(n-1)a", SHARED),
    Entry("barrier", "tree", plain(tree.barrier), "report up, pass the word down", "reference", "2 lg(n) a", THAKUR),
    Entry("send", "direct", with_root(direct.send), "hand it over", "always", "a + mb", "MPI standard, 3"),
)
