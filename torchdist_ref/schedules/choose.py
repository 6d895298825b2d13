"""Choice of the algorithm: a pure function, so that every rank chooses the same one without communication.

It depends on nothing but its arguments: no clock, no environment, no machine. A rank that chose otherwise
would wait for messages that no rank sends. The caller reads the environment's override and makes sure that all
ranks have the same one; `overrides` only parses its text.

Do not add here: thresholds (`measured`), or reading the environment.
"""

from __future__ import annotations

from collections import Counter

from torchdist_ref.errors import ArgumentError, explain
from torchdist_ref.schedules.catalogue import algorithms, operations
from torchdist_ref.schedules.measured import BETWEEN_HOSTS, BETWEEN_TWO, WITHIN_A_HOST, SizeTable

_DIRECT: SizeTable = ((float("inf"), "direct"),)


def choose(
    op: str,
    world: int,
    nbytes: int,
    *,
    hosts: tuple[int, ...] | None = None,
    transport: str = "shared_memory",
) -> str:
    """Return the algorithm to use for one call.

    Args:
        op: operation, such as ``"all_reduce"``.
        world: number of ranks.
        nbytes: bytes of the whole buffer: what every rank ends with in all_gather, what the root ends with in
            gather, what a rank (or the root) starts with in the others.
        hosts: the host of each rank, numbered in any way (default: not known).
        transport: ``"shared_memory"`` (also for ranks that are threads) or ``"tcp"``. Where ``hosts`` names
            more than one host, messages between them go by TCP whatever this is.

    Returns:
        A name that `catalogue.build` takes for this operation.

    Raises:
        ArgumentError: no such operation, transport, world or size, or ``hosts`` of another length.

    >>> choose("all_reduce", 4, 1024), choose("all_reduce", 4, 1 << 20)
    ('direct', 'two_shot')
    >>> choose("all_reduce", 16, 4 << 20, transport="tcp")
    'ring'
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
        return "hierarchical" if shared else _between_hosts(op, world, nbytes)
    if transport == "tcp" and world > 1:
        return _between_hosts(op, world, nbytes)
    table = {1: {}, 2: BETWEEN_TWO}.get(world, WITHIN_A_HOST)
    return _first(table.get(op, _DIRECT), nbytes)


def _between_hosts(op: str, world: int, nbytes: int) -> str:
    # With two ranks no third one shares the root's work: a second round would only bring it back what it has.
    return "tree" if world == 2 and op in ("broadcast", "reduce") else _first(BETWEEN_HOSTS[op], nbytes)


def _first(table: SizeTable, nbytes: int) -> str:
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
        raise ArgumentError(explain("choose", "TORCHDIST_REF_ALGORITHM", expected, item))
    return op, algorithm
