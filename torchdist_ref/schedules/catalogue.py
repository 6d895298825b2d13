"""Catalogue of the algorithms for each operation, with cost and source.

The table in the documentation is made from it, the tests run over it, and a backend builds from it. To add an
algorithm to the library, write its function and add its row in `entries`; a program adds its own with `register`.

Do not add here: the choice between algorithms (`choose`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from torchdist_ref.errors import ArgumentError, explain
from torchdist_ref.schedules.entries import ENTRIES, Entry, entry_of
from torchdist_ref.schedules.schedule import Schedule
from torchdist_ref.schedules.verify import verify

_registered: dict[tuple[str, str], Entry] = {}


def operations() -> tuple[str, ...]:
    """Return the operations that have schedules.

    >>> operations()[:3]
    ('all_reduce', 'reduce', 'broadcast')
    """
    return tuple(dict.fromkeys(entry.op for entry in ENTRIES))


def register(op: str, algorithm: str, make: Callable[..., Schedule], *, summary: str = "") -> None:
    """Add an algorithm of this program, so that `build`, ``TORCHDIST_REF_ALGORITHM`` and the backend ``ref`` know it.

    The schedule is verified, symbolically and for all ranks at once, whenever it is built for another world: a wrong
    one is never executed. A name that this program registered before is replaced; groups that exist keep the plans
    they made.

    Args:
        op: operation, such as ``"all_reduce"``; see `operations`.
        algorithm: name, as in ``TORCHDIST_REF_ALGORITHM="op=algorithm"``: no comma, no ``=``, no space, and no name
            of the library's own algorithms for ``op``.
        make: ``world -> Schedule``, or ``(world, root) -> Schedule`` for an operation with a root (broadcast,
            reduce, gather, scatter, send). Every rank registers the same function.
        summary: the idea, in one line (default: none).

    Raises:
        ArgumentError: there is no such operation, or the name can't be used.

    >>> from torchdist_ref.schedules import Schedule, carry
    >>> def star(world, root):
    ...     others = (rank for rank in range(world) if rank != root)
    ...     return Schedule("star broadcast", world, (tuple(carry(root, rank, ("data", 0)) for rank in others),))
    >>> register("broadcast", "star", star)
    >>> len(build("broadcast", "star", 5).rounds[0])
    4
    >>> unregister("broadcast", "star")
    """
    algorithms(op)
    if not algorithm or set(algorithm) & set(",= \t\n"):
        raise ArgumentError(explain("register", "algorithm", "a name without comma, '=' or space", algorithm))
    own = tuple(row.algorithm for row in ENTRIES if row.op == op)
    if algorithm in own:
        expected = f"a name that the library does not use for {op} ({', '.join(own)})"
        raise ArgumentError(explain("register", "algorithm", expected, algorithm))
    row = entry_of(op, algorithm, make, summary)
    _registered[op, algorithm] = replace(row, make=_verified(row))
    build.cache_clear()


def unregister(op: str, algorithm: str) -> None:
    """Remove an algorithm that this program added with `register`; nothing if there is none."""
    _registered.pop((op, algorithm), None)
    build.cache_clear()


def _verified(row: Entry) -> Callable[[int, int, tuple[int, ...]], Schedule]:
    """Return the row's function, which verifies what it makes."""

    def make(world: int, root: int, hosts: tuple[int, ...]) -> Schedule:
        schedule = row.make(world, root, hosts)
        verify(schedule, row.op, root)
        return schedule

    return make


def _entries() -> tuple[Entry, ...]:
    return (*ENTRIES, *_registered.values())


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
    names = tuple(entry.algorithm for entry in _entries() if entry.op == op)
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
    return next(e for e in _entries() if (e.op, e.algorithm) == (op, algorithm))


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
