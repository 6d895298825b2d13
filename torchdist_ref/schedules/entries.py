"""The rows of the catalogue, as data. One row says what, from which function, when, at which cost, from where.

In the costs ``n`` is the number of ranks, ``m`` the bytes of the whole buffer, ``a`` the seconds per message,
``b`` per byte moved, ``g`` per byte reduced; ``lg`` is the logarithm to base 2, rounded up. Costs are for powers
of two (some for all worlds), for ``direct`` and ``two_shot`` on one host (where reading overlaps with reducing),
for the others on a flat network. The tests compare them with `simulate`.

Do not add here: code that builds or looks up (`catalogue`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchdist_ref.schedules import (
    bruck,
    chain,
    direct,
    dissemination,
    doubling,
    halving,
    hierarchical,
    hierarchical_blocks,
    pairwise,
    ring,
    scatter_all_gather,
    tree,
    two_shot,
)
from torchdist_ref.schedules.schedule import Schedule

Maker = Callable[[int, int, tuple[int, ...]], Schedule]

PATARASUK = "Patarasuk, Yuan 2009"
THAKUR = "Thakur, Rabenseifner, Gropp 2005"
RABENSEIFNER = "Rabenseifner 2004"
BRUCK = "Bruck et al. 1997"
KARONIS = "Karonis et al. 2000"
PIPELINE = "van de Geijn 1994"
SEVERAL = "several ranks on each of several hosts"
SHARED = "shared-memory collectives of MPICH, DeepSpeed"


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
        equal_blocks: all blocks must have the same size (ranks forward blocks whose size they are not told).
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


def rooted(function: Callable[[int, int], Schedule]) -> Maker:
    """A maker for an algorithm that has a root."""
    return lambda world, root, hosts: function(world, root)


def hosted(function: Callable[[tuple[int, ...]], Schedule]) -> Maker:
    """A maker for an algorithm that asks where ranks are."""
    return lambda world, root, hosts: function(hosts)


def hosted_root(function: Callable[[tuple[int, ...], int], Schedule]) -> Maker:
    """A maker for an algorithm that asks where ranks are and has a root."""
    return lambda world, root, hosts: function(hosts, root)


ENTRIES: tuple[Entry, ...] = (
    Entry(
        "all_reduce",
        "direct",
        plain(direct.all_reduce),
        "everybody reads everything",
        "small, shared memory",
        "(n-1)(a + mb) + 2mg",
        SHARED,
    ),
    Entry(
        "all_reduce",
        "two_shot",
        plain(two_shot.all_reduce),
        "reduce one chunk each, read the others'",
        "large, shared memory",
        "2(n-1)(a + mb/n) + mg/n",
        SHARED,
    ),
    Entry(
        "all_reduce",
        "recursive_doubling",
        plain(doubling.all_reduce),
        "swap everything with ever further partners",
        "small, between hosts",
        "lg(n) (a + mb + mg)",
        THAKUR,
    ),
    Entry(
        "all_reduce",
        "halving_doubling",
        plain(halving.all_reduce),
        "swap halves, quarters, ... and back",
        "medium, between hosts",
        "2 lg(n) a + 2(n-1)/n mb + (n-1)/n mg",
        RABENSEIFNER,
    ),
    Entry(
        "all_reduce",
        "ring",
        plain(ring.all_reduce),
        "chunks go round twice",
        "large, between hosts",
        "2(n-1)a + 2(n-1)/n mb + (n-1)/n mg",
        PATARASUK,
    ),
    Entry(
        "all_reduce",
        "tree",
        plain(tree.all_reduce),
        "up a tree, then down",
        "for comparison",
        "2 lg(n) (a + mb) + lg(n) mg",
        THAKUR,
    ),
    Entry(
        "all_reduce",
        "chain",
        plain(chain.all_reduce),
        "along a chain and back, in 8 pieces",
        "for comparison",
        "2(n+6)(a + mb/8) + (n+6) mg/8",
        PIPELINE,
    ),
    Entry(
        "all_reduce",
        "hierarchical",
        hosted(hierarchical.all_reduce),
        "reduce within hosts, halving-doubling between",
        SEVERAL,
        "halving_doubling on hosts + 2 rounds within",
        KARONIS,
    ),
    Entry(
        "reduce",
        "direct",
        rooted(direct.reduce),
        "the root reads everything",
        "small, shared memory",
        "(n-1)(a + mb) + mg",
        SHARED,
    ),
    Entry(
        "reduce",
        "two_shot",
        rooted(two_shot.reduce),
        "reduce one chunk each, the root reads them",
        "large, shared memory",
        "2(n-1)(a + mb/n) + mg/n",
        SHARED,
    ),
    Entry("reduce", "tree", rooted(tree.reduce), "up a tree", "small, between hosts", "lg(n) (a + mb + mg)", THAKUR),
    Entry(
        "reduce",
        "halving_doubling",
        rooted(halving.reduce),
        "swap halves, then collect them",
        "large, between hosts",
        "2 lg(n) a + 2(n-1)/n mb + (n-1)/n mg",
        RABENSEIFNER,
    ),
    Entry(
        "reduce",
        "ring",
        rooted(ring.reduce),
        "chunks go round, then to the root",
        "large, between hosts, any n",
        "2(n-1)a + 2(n-1)/n mb + (n-1)/n mg",
        PATARASUK,
    ),
    Entry(
        "reduce",
        "chain",
        rooted(chain.reduce),
        "towards the root in 8 pieces",
        "long, between hosts",
        "(n+6)(a + mb/8 + mg/8)",
        PIPELINE,
    ),
    Entry(
        "reduce",
        "hierarchical",
        hosted_root(hierarchical.reduce),
        "reduce within hosts, a tree between",
        SEVERAL,
        "tree on hosts + 1 round within",
        KARONIS,
    ),
    Entry(
        "broadcast", "direct", rooted(direct.broadcast), "everybody reads the root's", "shared memory", "a + mb", SHARED
    ),
    Entry(
        "broadcast",
        "tree",
        rooted(tree.broadcast),
        "who has it tells who has not",
        "small, between hosts",
        "lg(n) (a + mb)",
        THAKUR,
    ),
    Entry(
        "broadcast",
        "scatter_all_gather",
        rooted(scatter_all_gather.broadcast),
        "hand out chunks, then chunks go round",
        "large, between hosts",
        "(lg(n) + n-1)a + 2(n-1)/n mb",
        "Barnett et al. 1994",
    ),
    Entry(
        "broadcast",
        "chain",
        rooted(chain.broadcast),
        "along a chain in 8 pieces",
        "long, few ranks",
        "(n+6)(a + mb/8)",
        PIPELINE,
    ),
    Entry(
        "broadcast",
        "hierarchical",
        hosted_root(hierarchical.broadcast),
        "a tree between hosts, direct within",
        SEVERAL,
        "tree on hosts + 1 round within",
        KARONIS,
    ),
    Entry(
        "all_gather",
        "direct",
        plain(direct.all_gather),
        "everybody reads everybody's",
        "shared memory",
        "(n-1)a + (n-1)/n mb",
        SHARED,
    ),
    Entry(
        "all_gather",
        "recursive_doubling",
        plain(doubling.all_gather),
        "swap all blocks gathered so far",
        "small, between hosts, n = 2^k",
        "lg(n) a + (n-1)/n mb",
        THAKUR,
    ),
    Entry(
        "all_gather",
        "bruck",
        plain(bruck.all_gather),
        "hear twice as many from twice as far",
        "small, between hosts, any n",
        "lg(n) a + (n-1)/n mb",
        BRUCK,
    ),
    Entry(
        "all_gather",
        "ring",
        plain(ring.all_gather),
        "blocks go round",
        "large, between hosts",
        "(n-1)a + (n-1)/n mb",
        PATARASUK,
    ),
    Entry(
        "all_gather",
        "hierarchical",
        hosted(hierarchical_blocks.all_gather),
        "collect within hosts, collections go round",
        SEVERAL,
        "ring on hosts + 2 rounds within",
        KARONIS,
    ),
    Entry(
        "gather",
        "direct",
        rooted(direct.gather),
        "the root reads everybody's",
        "shared memory",
        "(n-1)a + (n-1)/n mb",
        SHARED,
    ),
    Entry("gather", "tree", rooted(tree.gather), "collect up a tree", "between hosts", "lg(n) a + (n-1)/n mb", THAKUR),
    Entry(
        "gather",
        "hierarchical",
        hosted_root(hierarchical_blocks.gather),
        "collect within hosts, then to the root",
        SEVERAL,
        "direct on hosts + 1 round within",
        KARONIS,
    ),
    Entry(
        "scatter", "direct", rooted(direct.scatter), "everybody reads its block", "shared memory", "a + mb/n", SHARED
    ),
    Entry(
        "scatter", "tree", rooted(tree.scatter), "halve and pass on", "between hosts", "lg(n) a + (n-1)/n mb", THAKUR
    ),
    Entry(
        "scatter",
        "hierarchical",
        hosted_root(hierarchical_blocks.scatter),
        "to each host's leader, then within",
        SEVERAL,
        "direct on hosts + 1 round within",
        KARONIS,
    ),
    Entry(
        "reduce_scatter",
        "direct",
        plain(direct.reduce_scatter),
        "everybody reads its chunk",
        "shared memory",
        "(n-1)(a + mb/n) + mg/n",
        SHARED,
    ),
    Entry(
        "reduce_scatter",
        "recursive_halving",
        plain(halving.reduce_scatter),
        "swap halves, quarters, ...",
        "small, between hosts",
        "lg(n) a + (n-1)/n m(b + g)",
        THAKUR,
    ),
    Entry(
        "reduce_scatter",
        "pairwise",
        plain(pairwise.reduce_scatter),
        "a different peer in every step",
        "large, between hosts",
        "(n-1)(a + mb/n + mg/n)",
        THAKUR,
    ),
    Entry(
        "reduce_scatter",
        "ring",
        plain(ring.reduce_scatter),
        "partial sums go round",
        "large, neighbours only",
        "(n-1)(a + mb/n + mg/n)",
        PATARASUK,
    ),
    Entry(
        "reduce_scatter",
        "hierarchical",
        hosted(hierarchical_blocks.reduce_scatter),
        "sum within hosts, sums to their owner's host",
        SEVERAL,
        "pairwise on hosts + 2 rounds within",
        KARONIS,
    ),
    Entry(
        "all_to_all",
        "direct",
        plain(direct.all_to_all),
        "everybody reads what is meant for it",
        "shared memory",
        "(n-1)a + (n-1)/n mb",
        SHARED,
    ),
    Entry(
        "all_to_all",
        "bruck",
        plain(bruck.all_to_all),
        "forward by powers of two",
        "small, between hosts",
        "lg(n) (a + mb/2)",
        BRUCK,
        equal_blocks=True,
    ),
    Entry(
        "all_to_all",
        "pairwise",
        plain(pairwise.all_to_all),
        "a different peer in every step",
        "large, between hosts",
        "(n-1)(a + mb/n)",
        THAKUR,
    ),
    Entry(
        "all_to_all",
        "hierarchical",
        hosted(hierarchical_blocks.all_to_all),
        "through the leaders of both hosts",
        SEVERAL,
        "pairwise on hosts + 2 rounds within",
        "Träff 2002",
        equal_blocks=True,
    ),
    Entry(
        "barrier",
        "direct",
        plain(direct.barrier),
        "everybody tells everybody",
        "shared memory, few ranks",
        "(n-1)a",
        SHARED,
    ),
    Entry(
        "barrier",
        "dissemination",
        plain(dissemination.barrier),
        "word from ever further away",
        "between hosts",
        "lg(n) a",
        "Hensgen, Finkel, Manber 1988",
    ),
    Entry(
        "barrier", "tree", plain(tree.barrier), "report up, pass the word down", "for comparison", "2 lg(n) a", THAKUR
    ),
    Entry(
        "barrier",
        "hierarchical",
        hosted(hierarchical.barrier),
        "report within hosts, dissemination between",
        SEVERAL,
        "dissemination on hosts + 2 rounds within",
        KARONIS,
    ),
    Entry("send", "direct", rooted(direct.send), "hand it over", "always", "a + mb", "MPI standard, chapter 3"),
)
