"""Catalogue of the algorithms for each operation: names, choice, and building.

The table in the documentation is made from it, the tests run over it, and a backend builds from it. To add an
algorithm to the library, write its function and add its row in `catalogue_rows`; a program adds its own by `register`.

`choose` is a pure function, so that every rank chooses the same algorithm without communication. It depends on nothing
but its arguments: no clock, no environment, no machine. A rank that chose otherwise would wait for messages that no
rank sends. The caller reads the environment's override and makes sure that all ranks have the same one; `overrides`
only parses its text.

Do not add here: thresholds (`measured`), or reading the environment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torchdist_ref.calls import fingerprint
from torchdist_ref.errors import ArgumentError, explain
from torchdist_ref.schedules.catalogue_rows import ENTRIES, Entry, entry_of
from torchdist_ref.schedules.measured import (
    BETWEEN_HOSTS,
    BETWEEN_TWO,
    MANY_WITHIN_A_HOST,
    MOST_DIRECT_RANKS,
    UNROUNDED,
    WITHIN_A_HOST,
    SizeTable,
)
from torchdist_ref.schedules.reduction_tree import are_subtrees
from torchdist_ref.schedules.schedule import Schedule
from torchdist_ref.schedules.verify import verify

_registered: dict[tuple[str, str], Entry] = {}
_DIRECT: SizeTable = ((float("inf"), "direct"),)


def operations() -> tuple[str, ...]:
    """Return the operations that have schedules.

    >>> from torchdist_ref.schedules import operations
    >>> operations()[:3]
    ('all_reduce', 'reduce', 'broadcast')
    """
    return tuple(dict.fromkeys(entry.op for entry in ENTRIES))


def register(op: str, algorithm: str, make: Callable[..., Schedule], *, summary: str = "") -> None:
    """Add an algorithm of this program, so that `build`, ``TORCHDIST_REF_ALGORITHM`` and the backend ``ref`` know it.

    Register before `init_process_group`, where ``TORCHDIST_REF_ALGORITHM`` is read. The schedule is verified,
    symbolically and for all ranks at once, whenever it is built for another world: a wrong one is never executed. A
    name that this program registered before is replaced; groups that exist keep the plans
    they made.

    Args:
        op: operation, such as ``"all_reduce"``; see `operations`.
        algorithm: name, as in ``TORCHDIST_REF_ALGORITHM="op=algorithm"``: no comma, no ``=``, no space, and no name
            of the library's own algorithms for ``op``.
        make: ``world -> Schedule``, or ``(world, root) -> Schedule`` for an operation with a root (broadcast,
            reduce, gather, scatter, send). Every rank registers the same function: ranks compare the schedules with
            each call, and raise a `MismatchError` if they differ.
        summary: the idea, in one line (default: none).

    Raises:
        ArgumentError: there is no such operation, the name can't be used, or `make` is not a function.

    >>> from torchdist_ref.schedules import build, register, unregister
    >>> from torchdist_ref.schedules import Schedule, carry
    >>> def star(world, root):
    ...     others = (rank for rank in range(world) if rank != root)
    ...     moves = tuple(carry(root, rank, ("data", 0)) for rank in others)
    ...     return Schedule("star broadcast", world, (moves,))
    >>> register("broadcast", "star", star)
    >>> len(build("broadcast", "star", 5).rounds[0])
    4
    >>> unregister("broadcast", "star")
    """
    algorithms(op)
    if not callable(make):
        raise ArgumentError(explain("register", "make", "a function that returns a Schedule", make))
    if not isinstance(algorithm, str) or not algorithm or set(algorithm) & set(",= \t\n"):
        raise ArgumentError(explain("register", "algorithm", "a name without comma, '=' or space", algorithm))
    own = tuple(row.algorithm for row in ENTRIES if row.op == op)
    if algorithm in own:
        expected = f"a name that the library does not use for {op} ({', '.join(own)})"
        raise ArgumentError(explain("register", "algorithm", expected, algorithm))
    row = entry_of(op, algorithm, make, summary)
    _registered[op, algorithm] = replace(row, function=_verified(row), takes=("world", "root", "hosts"))
    build.cache_clear()


def unregister(op: str, algorithm: str) -> None:
    """Remove an algorithm that this program added with `register`; without effect if there is none."""
    _registered.pop((op, algorithm), None)
    build.cache_clear()


def _verified(row: Entry) -> Callable[[int, int, tuple[int, ...]], Schedule]:
    """Return the row's function, which verifies what it makes."""

    def subject(world: int) -> str:
        return f"registered algorithm {row.algorithm!r} for {row.op} of {world} ranks"

    def make_verified(world: int, root: int, hosts: tuple[int, ...]) -> Schedule:
        try:
            return checked(make(row, world, root, hosts), world, root)
        except (TypeError, AttributeError) as error:
            expected = "A Schedule has rounds, which are tuples of Move between slots such as ('data', 0); see register"
            raise ArgumentError(f"{subject(world)} cannot be made: {error}. {expected}.") from error

    def checked(schedule: object, world: int, root: int) -> Schedule:
        if not isinstance(schedule, Schedule):
            raise ArgumentError(explain(subject(world), "make", "a function that returns a Schedule", schedule))
        if schedule.world != world:
            raise ArgumentError(explain(subject(world), "world", f"{world}, the ranks of the group", schedule.world))
        if not all(isinstance(moves, Sequence) for moves in schedule.rounds):
            raise ArgumentError(explain(subject(world), "rounds", "tuples of moves", "another iterable"))
        verify(schedule, row.op, root)
        return schedule

    return make_verified


def _entries() -> tuple[Entry, ...]:
    """Return the algorithms of this library and those that users registered."""
    return (*ENTRIES, *_registered.values())


def algorithms(op: str) -> tuple[str, ...]:
    """Return the names of the algorithms for an operation.

    Args:
        op: such as ``"all_reduce"``; see `operations`.

    Returns:
        The names that `build` takes.

    Raises:
        ArgumentError: there is no such operation.

    >>> from torchdist_ref.schedules import algorithms
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

    >>> from torchdist_ref.schedules import build
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
    return make(found, world, root, hosts or (0,) * world)


def named(op: str, algorithm: str, schedule: Schedule) -> str:
    """Return an algorithm as text, equal on ranks that execute one schedule.

    For an algorithm of this program it ends with a digest of the schedule: another rank may have registered another
    function under the name.

    >>> named("all_reduce", "ring", build("all_reduce", "ring", 4))
    "algorithm 'ring'"
    """
    if (op, algorithm) not in _registered:
        return f"algorithm {algorithm!r}"
    digest = fingerprint(str(replace(schedule, name=""))) & 0xFFFFFFFF
    return f"algorithm {algorithm!r} (schedule {digest:08x})"


def make(row: Entry, world: int, root: int, hosts: tuple[int, ...]) -> Schedule:
    """Return the schedule of one row of the catalogue, not cached, from those arguments that its function takes."""
    values: dict[str, Any] = {"world": world, "root": root, "hosts": hosts}
    return row.function(*(values[name] for name in row.takes))


# ---- choice


def choose(
    op: str,
    world: int,
    nbytes: int,
    *,
    hosts: tuple[int, ...] | None = None,
    transport: str = "shared_memory",
    rounded: bool = False,
) -> str:
    """Return the algorithm to use for one call.

    For one number of ranks, all algorithms that this function may return for a reduction give the same bits: they
    combine the ranks along the `reduction_tree`.

    Args:
        op: operation, such as ``"all_reduce"``.
        world: number of ranks.
        nbytes: bytes of the whole buffer: the result of a rank in all_gather, the result of the root in gather, and
            the input of a rank (or of the root) in the others.
        hosts: the host of each rank, numbered in any way (default: not known).
        transport: ``"shared_memory"`` (also for ranks that are threads) or ``"tcp"``. Where ``hosts`` names
            more than one host, messages between hosts go by TCP, whatever this argument is.
        rounded: whether a partial result would be rounded before it is sent, as a sum of 16-bit floats is. If so,
            the algorithm is one that sends no partial results (default False).

    Returns:
        A name that `build` takes for this operation.

    Raises:
        ArgumentError: no such operation, transport, world or size, or ``hosts`` of another length.

    >>> from torchdist_ref.schedules import choose
    >>> choose("all_reduce", 4, 1024), choose("all_reduce", 4, 1 << 20)
    ('direct', 'two_shot')
    >>> choose("all_reduce", 16, 512 << 10, transport="tcp")
    'halving_doubling'
    """
    algorithms(op)
    if world < 1:
        raise ArgumentError(explain("choose", "world", "at least 1", world))
    if not nbytes >= 0:
        raise ArgumentError(explain("choose", "nbytes", "0 or more", nbytes))
    if hosts is not None and len(hosts) != world:
        raise ArgumentError(explain("choose", "hosts", f"one host for each of {world} ranks", hosts))
    if transport not in ("shared_memory", "tcp"):
        raise ArgumentError(explain("choose", "transport", "'shared_memory' or 'tcp'", transport))
    if hosts and len(set(hosts)) > 1:
        shared = max(Counter(hosts).values()) > 1 and op != "send"
        # Hosts that are not subtrees would be combined along another tree.
        hierarchy = shared and (op not in UNROUNDED or (are_subtrees(hosts) and not rounded))
        return "hierarchical" if hierarchy else _between_hosts(op, world, nbytes, rounded)
    if transport == "tcp" and world > 1:
        return _between_hosts(op, world, nbytes, rounded)
    many = world > MOST_DIRECT_RANKS and not (rounded and op in UNROUNDED)
    table = {1: {}, 2: BETWEEN_TWO}.get(world, MANY_WITHIN_A_HOST if many else WITHIN_A_HOST)
    return _first(table.get(op, _DIRECT), nbytes)


def _between_hosts(op: str, world: int, nbytes: int, rounded: bool) -> str:
    # With two ranks no third one can share the root's work, so a second round would gain nothing.
    if world == 2 and op in ("broadcast", "reduce"):
        return "tree"
    return _first((UNROUNDED if rounded else {}).get(op) or BETWEEN_HOSTS[op], nbytes)


def _first(table: SizeTable, nbytes: int) -> str:
    """Return the name in the first row of a table whose limit the size does not exceed."""
    return next(name for limit, name in table if nbytes <= limit)


def overrides(text: str) -> dict[str, str]:
    """Parse ``TORCHDIST_REF_ALGORITHM``: the algorithm by operation.

    Args:
        text: such as ``"all_reduce=ring,broadcast=tree"``; empty for none.

    Returns:
        Operation -> algorithm.

    Raises:
        ArgumentError: an item is not of the form ``op=algorithm``, names an unknown operation or algorithm, or an
            operation that another item names.

    >>> from torchdist_ref.schedules import overrides
    >>> overrides("all_reduce=ring, broadcast=tree")
    {'all_reduce': 'ring', 'broadcast': 'tree'}
    """
    found = [_override(item.strip()) for item in text.split(",") if item.strip()]
    if len(dict(found)) < len(found):
        raise ArgumentError(explain("choose", "TORCHDIST_REF_ALGORITHM", "each operation once", text))
    return dict(found)


def _override(item: str) -> tuple[str, str]:
    op, equals, algorithm = (part.strip() for part in item.partition("="))
    if not equals or op not in operations():
        expected = f"op=algorithm with op one of {', '.join(operations())}"
        raise ArgumentError(explain("choose", "TORCHDIST_REF_ALGORITHM", expected, item))
    if algorithm not in algorithms(op):
        expected = f"{op}= one of {', '.join(algorithms(op))}"
        hint = "Register an algorithm of your own before init_process_group, on every rank."
        raise ArgumentError(explain("choose", "TORCHDIST_REF_ALGORITHM", expected, item, hint=hint))
    return op, algorithm
