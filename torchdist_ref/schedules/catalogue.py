"""Catalogue of the algorithms for each operation, with cost and source.

The table in the documentation is made from it, the tests run over it, and a backend builds from it. To add
an algorithm, write its function and add its row in `entries`.

Do not add here: the choice between algorithms (`choose`).
"""

from __future__ import annotations

from functools import lru_cache

from torchdist_ref.errors import ArgumentError, explain
from torchdist_ref.schedules.entries import ENTRIES, Entry
from torchdist_ref.schedules.schedule import Schedule


def operations() -> tuple[str, ...]:
    """Return the operations that have schedules.

    >>> operations()[:3]
    ('all_reduce', 'reduce', 'broadcast')
    """
    return tuple(dict.fromkeys(entry.op for entry in ENTRIES))


def algorithms(op: str) -> tuple[str, ...]:
    """Return the names of the algorithms for an operation.

    Args:
        op: such as ``"all_reduce"``; see `operations`.

    Returns:
        The names that `build` takes.

    Raises:
        ArgumentError: there is no such operation.

    >>> algorithms("scatter")
    ('direct', 'tree', 'hierarchical')
    """
    names = tuple(entry.algorithm for entry in ENTRIES if entry.op == op)
    if not names:
        raise ArgumentError(explain("algorithms", "op", f"one of {', '.join(operations())}", op))
    return names


def entry(op: str, algorithm: str) -> Entry:
    """Return the row of one algorithm for one operation.

    Raises:
        ArgumentError: there is no such operation, or no such algorithm for it.
    """
    known = algorithms(op)
    if algorithm not in known:
        raise ArgumentError(explain(op, "algorithm", f"one of {', '.join(known)}", algorithm))
    return next(e for e in ENTRIES if (e.op, e.algorithm) == (op, algorithm))


@lru_cache(maxsize=1024)
def build(op: str, algorithm: str, world: int, root: int = 0, *, hosts: tuple[int, ...] | None = None) -> Schedule:
    """Return the schedule of one algorithm for one operation, cached.

    Args:
        op: operation, such as ``"all_reduce"``.
        algorithm: such as ``"ring"``; see `algorithms`.
        world: number of ranks, at least 1.
        root: the root of a rooted operation, or the sender in ``send`` (default 0; others ignore it).
        hosts: for ``hierarchical``, the host of each rank, numbered in any way (default: all on one host).

    Returns:
        A schedule for all ranks. Equal arguments give the same object.

    Raises:
        ArgumentError: no such operation, algorithm, world, root, or ``hosts`` of another length.

    >>> len(build("broadcast", "tree", 8).rounds)
    3
    """
    found = entry(op, algorithm)
    if world < 1:
        raise ArgumentError(explain(op, "world", "at least 1", world))
    if not 0 <= root < world:
        raise ArgumentError(explain(op, "root", f"a rank from 0 to {world - 1}", root))
    if hosts is not None and len(hosts) != world:
        raise ArgumentError(explain(op, "hosts", f"one host for each of {world} ranks", hosts))
    return found.make(world, root, hosts or (0,) * world)
