"""Order in which the values of the ranks are combined: one tree for each number of ranks.

Floating-point addition commutes and does not associate: ``(a + b) + c`` and ``a + (b + c)`` round differently. So a
sum has the same bits in a bucket, in a slice, by another algorithm and over another transport only if the ranks are
combined along the same tree everywhere. This is the tree. If the number of ranks is not a power of two, the first ranks
form pairs until a power of two of values is left. Then neighbors are combined, again and again::

    4 ranks: (0 1) (2 3)          6 ranks: ((0 1) (2 3)) (4 5)
    5 ranks: ((0 1) 2) (3 4)      8 ranks: ((0 1) (2 3)) ((4 5) (6 7))

Neighbors come first because they are often on one host. If each host has ``2^k`` consecutive ranks, each host is a
subtree, and the tree over the hosts is again the one for their number: a host can combine its values before they
travel. The same holds for a rank that has ``2^k`` values of its own, such as the gradients of micro-batches.

In one round of a schedule, the values that arrive in a slot are combined along this tree, in the order of the ranks
that they come from. So an algorithm in which a rank reads the values of all ranks has the tree without effort. The
others must meet in the right order: `fold` makes the pairs, after which `core_ranks` is a power of two.

Do not add here: whole algorithms.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache
from typing import TypeVar

from torchdist_ref.schedules.schedule import Run, Schedule, arriving, carry_run, to_targets

T = TypeVar("T")


def core_size(count: int) -> int:
    """Return the largest power of two that is not above ``count``.

    >>> core_size(7), core_size(8)
    (4, 8)
    """
    return 1 << (count.bit_length() - 1)


def combined(values: Iterable[T], combine: Callable[[T, T], T]) -> T:
    """Combine the values of ranks 0, 1, 2, ... along the tree.

    >>> combined("01234", lambda a, b: f"({a} {b})")
    '(((0 1) 2) (3 4))'
    """
    left = list(values)
    extra = len(left) - core_size(len(left))
    left[: 2 * extra] = [combine(left[i], left[i + 1]) for i in range(0, 2 * extra, 2)]
    while len(left) > 1:
        left = [combine(left[i], left[i + 1]) for i in range(0, len(left), 2)]
    return left[0]


def core_ranks(world: int, root: int = 0) -> list[int]:
    """Return the ranks that have a value after `fold`, in order.

    >>> core_ranks(6), core_ranks(6, root=3)
    ([0, 2, 4, 5], [0, 3, 4, 5])
    """
    paired = 2 * (world - core_size(world))
    return [i | (i ^ root == 1) for i in range(0, paired, 2)] + list(range(paired, world))


def fold(world: int, chunks: int, root: int = 0) -> Schedule:
    """Combine the first ranks in pairs, until a power of two of values is left; the root keeps its pair's value."""
    paired = 2 * (world - core_size(world))

    def arrivals(step: int, rank: int) -> list[Run]:
        keeps = rank < paired and rank == (root if rank ^ root < 2 else rank & ~1)
        return [carry_run(rank ^ 1, rank, "data", range(chunks), reduce=True)] if keeps else []

    leaving = to_targets(arrivals, lambda step, rank: (rank ^ 1,))
    return Schedule("fold", world, arriving(world, int(paired > 0), arrivals, leaving), chunks)


@lru_cache
def are_subtrees(hosts: tuple[int, ...]) -> bool:
    """Return whether ranks that are combined within their hosts, and then between these, are combined along the tree.

    >>> are_subtrees((7, 7, 9, 9)), are_subtrees((7, 9, 7, 9)), are_subtrees((7, 7, 7, 9, 9, 9))
    (True, False, False)
    """
    teams: dict[int, list[Hashable]] = {}
    for rank, host in enumerate(hosts):
        teams.setdefault(host, []).append(rank)
    ranks: list[Hashable] = list(range(len(hosts)))
    return combined(ranks, _pair) == combined((combined(team, _pair) for team in teams.values()), _pair)


def _pair(a: Hashable, b: Hashable) -> Hashable:
    return frozenset((a, b))
