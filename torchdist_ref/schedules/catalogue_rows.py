"""Rows of the catalogue, as data: operation, algorithm, idea, use, cost, and source.

In the costs ``n`` is the number of ranks, ``m`` the bytes of the whole buffer, ``a`` the seconds per message,
``b`` per byte moved, ``g`` per byte reduced; ``k`` is the smaller of ``n`` and 16 (the ranks of a block), ``lg`` the
logarithm to base 2, rounded up. Costs are for powers
of two (some for all worlds), for ``direct`` and ``two_shot`` on one host (where reading overlaps with reducing),
for the others on a flat network. The tests compare them with `simulate`.

Do not add here: code that builds or looks up (`catalogue`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torchdist_ref.schedules import bruck, direct, halving_doubling, hierarchical, ring, tree
from torchdist_ref.schedules.schedule import Schedule

ROOTED = ("reduce", "broadcast", "gather", "scatter", "send")
THAKUR = "Thakur, Rabenseifner, Gropp 2005"
SEVERAL = "several ranks on each of several hosts"
# Source of each algorithm. Two rows have another one (see `_source`).
SOURCES = {
    "direct": "shared-memory collectives of MPICH, DeepSpeed",
    "two_shot": "shared-memory collectives of MPICH, DeepSpeed",
    "recursive_doubling": THAKUR,
    "halving_doubling": "Rabenseifner 2004",
    "blocks": "Rabenseifner 2004, with larger chunks",
    "ring": "Patarasuk, Yuan 2009",
    "tree": THAKUR,
    "chain": "van de Geijn 1994",
    "hierarchical": "Karonis et al. 2000",
    "scatter_all_gather": "Barnett et al. 1994",
    "bruck": "Bruck et al. 1997",
    "recursive_halving": THAKUR,
    "pairwise": THAKUR,
    "dissemination": "Hensgen, Finkel, Manber 1988",
}

# Reductions that combine the ranks in another order than the `reduction_tree`. Their bits differ from those of all
# others, and the order depends on the index in the tensor or on the rank. `choose` picks none of them.
OTHER_TREES = frozenset(
    [*((op, name) for op in ("all_reduce", "reduce") for name in ("ring", "chain"))]
    + [("reduce_scatter", name) for name in ("pairwise", "ring")]
)


@dataclass(frozen=True)
class Entry:
    """Row of the catalogue.

    Args:
        op: operation.
        algorithm: name, as in ``TORCHDIST_REF_ALGORITHM="op=algorithm"``.
        function: makes the schedule.
        takes: its arguments in order: of ``world``, ``root`` and ``hosts`` (one host for each rank).
        summary: the idea, in one line.
        when: the calls for which it is the right one.
        cost: time on an alpha-beta-gamma network, as text.
        source: paper or program that it comes from.
    """

    op: str
    algorithm: str
    function: Callable[..., Schedule]
    takes: tuple[str, ...]
    summary: str
    when: str
    cost: str
    source: str


def _takes(op: str, algorithm: str) -> tuple[str, ...]:
    """Return the names of the arguments of an algorithm's function."""
    return ("hosts" if algorithm == "hierarchical" else "world", *(("root",) if op in ROOTED else ()))


def entry_of(op: str, algorithm: str, function: Callable[..., Schedule], summary: str) -> Entry:
    """Return the row of an algorithm of a program: a function of world, and of root for a rooted operation."""
    named = function.func if isinstance(function, partial) else function
    source = f"{named.__module__}.{getattr(named, '__qualname__', type(named).__qualname__)}"
    return Entry(op, algorithm, function, _takes(op, algorithm), summary, "this program", "", source)


def _rows(op: str, *rows: tuple[str, Callable[..., Schedule], str, str, str]) -> tuple[Entry, ...]:
    """Return the entries of one operation."""
    return tuple(
        Entry(
            op,
            algorithm,
            function,
            _takes(op, algorithm),
            summary,
            _when(op, algorithm, when),
            cost,
            _source(op, algorithm),
        )
        for algorithm, function, summary, when, cost in rows
    )


def _when(op: str, algorithm: str, when: str) -> str:
    return f"{when}; only by name, since its bits differ" if (op, algorithm) in OTHER_TREES else when


def _source(op: str, algorithm: str) -> str:
    """Return the source of a row."""
    if op == "send":
        return "MPI standard, chapter 3"
    if algorithm not in SOURCES:
        raise LookupError(
            f"{op}: algorithm {algorithm!r} has no source. Add its paper or program to SOURCES in "
            "torchdist_ref/schedules/catalogue_rows.py, under this name."
        )
    return "Träff 2002" if (op, algorithm) == ("all_to_all", "hierarchical") else SOURCES[algorithm]


ENTRIES: tuple[Entry, ...] = (
    *_rows(
        "all_reduce",
        ("direct", direct.all_reduce, "every rank reads every tensor", "small, shared memory", "(n-1)(a + mb) + mg"),
        (
            "two_shot",
            direct.two_shot_all_reduce,
            "reduce one chunk each, read the others'",
            "large",
            "2(n-1)(a + mb/n) + mg/n",
        ),
        (
            "recursive_doubling",
            halving_doubling.doubling_all_reduce,
            "exchange whole tensors at growing distances",
            "small, between hosts",
            "lg(n) (a + mb + mg)",
        ),
        (
            "halving_doubling",
            halving_doubling.all_reduce,
            "exchange halves, quarters, ..., then gather",
            "medium, between hosts",
            "2 lg(n) a + 2(n-1)/n mb + (n-1)/n mg",
        ),
        (
            "blocks",
            halving_doubling.blocks_all_reduce,
            "exchange halves within blocks of 16 ranks, then between blocks",
            "hundreds of ranks on one host",
            "(lg(n) + lg(k))a + (2(k-1)/k + lg(n/k)/k) mb + ((k-1)/k + lg(n/k)/k) mg",
        ),
        (
            "ring",
            ring.all_reduce,
            "chunks travel twice around the ring",
            "large, links between neighbors",
            "2(n-1)a + 2(n-1)/n mb + (n-1)/n mg",
        ),
        ("tree", tree.all_reduce, "reduce up a tree, broadcast down", "for comparison", "2 lg(n) (a + mb) + lg(n) mg"),
        (
            "chain",
            tree.chain_all_reduce,
            "reduce along a chain and back, in 8 pieces",
            "for comparison",
            "2(n+6)(a + mb/8) + (n+6) mg/8",
        ),
        (
            "hierarchical",
            hierarchical.all_reduce,
            "reduce within hosts, halving-doubling between",
            SEVERAL,
            "halving_doubling on hosts + 2 rounds within",
        ),
    ),
    *_rows(
        "reduce",
        ("direct", direct.reduce, "the root reads every tensor", "small, shared memory", "(n-1)(a + mb) + mg"),
        (
            "two_shot",
            direct.two_shot_reduce,
            "reduce one chunk each, the root reads them",
            "large, shared memory",
            "2(n-1)(a + mb/n) + mg/n",
        ),
        ("tree", tree.reduce, "reduce up a tree", "small, between hosts", "lg(n) (a + mb + mg)"),
        (
            "halving_doubling",
            halving_doubling.reduce,
            "exchange halves, then gather them",
            "large, between hosts",
            "2 lg(n) a + 2(n-1)/n mb + (n-1)/n mg",
        ),
        (
            "ring",
            ring.reduce,
            "chunks travel around the ring, then to the root",
            "large, links between neighbors",
            "2(n-1)a + 2(n-1)/n mb + (n-1)/n mg",
        ),
        ("chain", tree.chain_reduce, "reduce along a chain in pieces", "long, between hosts", "(n+6)(a + mb/8 + mg/8)"),
        (
            "hierarchical",
            hierarchical.reduce,
            "reduce within hosts, a tree between",
            SEVERAL,
            "tree on hosts + 1 round within",
        ),
    ),
    *_rows(
        "broadcast",
        ("direct", direct.broadcast, "every rank reads the root's tensor", "shared memory", "a + mb"),
        ("tree", tree.broadcast, "ranks with the data forward it", "small, between hosts", "lg(n) (a + mb)"),
        (
            "scatter_all_gather",
            ring.scatter_all_gather_broadcast,
            "scatter chunks, then gather them around a ring",
            "large, between hosts",
            "(lg(n) + n-1)a + 2(n-1)/n mb",
        ),
        ("chain", tree.chain_broadcast, "forward along a chain, in 8 pieces", "long, few ranks", "(n+6)(a + mb/8)"),
        (
            "hierarchical",
            hierarchical.broadcast,
            "a tree between hosts, direct within",
            SEVERAL,
            "tree on hosts + 1 round within",
        ),
    ),
    *_rows(
        "all_gather",
        ("direct", direct.all_gather, "every rank reads every block", "shared memory", "(n-1)a + (n-1)/n mb"),
        (
            "recursive_doubling",
            halving_doubling.doubling_all_gather,
            "exchange all blocks gathered so far",
            "small, between hosts, n = 2^k",
            "lg(n) a + (n-1)/n mb",
        ),
        (
            "bruck",
            bruck.all_gather,
            "receive twice as many blocks at each step",
            "small, between hosts, any n",
            "lg(n) a + (n-1)/n mb",
        ),
        ("ring", ring.all_gather, "blocks travel around the ring", "large, between hosts", "(n-1)a + (n-1)/n mb"),
        (
            "hierarchical",
            hierarchical.all_gather,
            "gather within hosts, a ring between",
            SEVERAL,
            "ring on hosts + 2 rounds within",
        ),
    ),
    *_rows(
        "gather",
        ("direct", direct.gather, "the root reads every block", "shared memory", "(n-1)a + (n-1)/n mb"),
        ("tree", tree.gather, "gather up a tree", "between hosts", "lg(n) a + (n-1)/n mb"),
        (
            "hierarchical",
            hierarchical.gather,
            "gather within hosts, then on the root",
            SEVERAL,
            "direct on hosts + 1 round within",
        ),
    ),
    *_rows(
        "scatter",
        ("direct", direct.scatter, "every rank reads its block", "shared memory", "a + mb/n"),
        ("tree", tree.scatter, "send halves down a tree", "between hosts", "lg(n) a + (n-1)/n mb"),
        (
            "hierarchical",
            hierarchical.scatter,
            "to each host's leader, then within",
            SEVERAL,
            "direct on hosts + 1 round within",
        ),
    ),
    *_rows(
        "reduce_scatter",
        (
            "direct",
            direct.reduce_scatter,
            "every rank reads its chunk",
            "shared memory, or large",
            "(n-1)(a + mb/n) + mg/n",
        ),
        (
            "recursive_halving",
            halving_doubling.reduce_scatter,
            "exchange halves, quarters, ...",
            "small, between hosts",
            "lg(n) a + (n-1)/n m(b + g)",
        ),
        (
            "pairwise",
            bruck.pairwise_reduce_scatter,
            "a different peer in every step",
            "for comparison",
            "(n-1)(a + mb/n + mg/n)",
        ),
        (
            "ring",
            ring.reduce_scatter,
            "partial sums travel around the ring",
            "large, links between neighbors",
            "(n-1)(a + mb/n + mg/n)",
        ),
        (
            "hierarchical",
            hierarchical.reduce_scatter,
            "reduce within hosts, then on the owner's host",
            SEVERAL,
            "pairwise on hosts + 2 rounds within",
        ),
    ),
    *_rows(
        "all_to_all",
        ("direct", direct.all_to_all, "every rank reads its blocks", "shared memory", "(n-1)a + (n-1)/n mb"),
        ("bruck", bruck.all_to_all, "forward blocks at doubling distances", "small, between hosts", "lg(n) (a + mb/2)"),
        (
            "pairwise",
            bruck.pairwise_all_to_all,
            "a different peer in every step",
            "large, between hosts",
            "(n-1)(a + mb/n)",
        ),
        (
            "hierarchical",
            hierarchical.all_to_all,
            "through the leaders of both hosts",
            SEVERAL,
            "pairwise on hosts + 2 rounds within",
        ),
    ),
    *_rows(
        "barrier",
        ("direct", direct.barrier, "every rank notifies every rank", "shared memory, few ranks", "(n-1)a"),
        ("dissemination", bruck.dissemination_barrier, "notify at doubling distances", "between hosts", "lg(n) a"),
        ("tree", tree.barrier, "notify up a tree, then down", "for comparison", "2 lg(n) a"),
        (
            "hierarchical",
            hierarchical.barrier,
            "notify within hosts, dissemination between",
            SEVERAL,
            "dissemination on hosts + 2 rounds within",
        ),
    ),
    *_rows("send", ("direct", direct.send, "copy to the receiver", "always", "a + mb")),
)
