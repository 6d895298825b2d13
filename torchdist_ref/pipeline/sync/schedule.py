"""Who works on what, and when: the schedule of GPipe.

Micro-batch `i` is in partition `j` at clock ``i + j``. Backwards the same runs in reverse. Nothing here knows tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["clock_cycles", "draw"]


def clock_cycles(chunks: int, partitions: int) -> Iterator[list[tuple[int, int]]]:
    """Yield, for each clock, the pairs (micro-batch, partition) that are computed then.

    Args:
        chunks: How many micro-batches.
        partitions: How many partitions.

    Yields:
        The pairs of one clock, which don't depend on each other. There are ``chunks + partitions - 1`` clocks.

    Example:
        >>> for pairs in clock_cycles(3, 2):
        ...     print(pairs)
        [(0, 0)]
        [(1, 0), (0, 1)]
        [(2, 0), (1, 1)]
        [(2, 1)]
    """
    for clock in range(chunks + partitions - 1):
        first, last = max(0, clock - chunks + 1), min(clock, partitions - 1)
        yield [(clock - partition, partition) for partition in range(first, last + 1)]


def draw(chunks: int, partitions: int) -> str:
    """Draw the schedule: a line for each partition, a column for each clock, in it the micro-batch.

    Args:
        chunks: How many micro-batches.
        partitions: How many partitions.

    Returns:
        The lines.

    Example:
        >>> print(draw(4, 3))
        0: 0 1 2 3 . .
        1: . 0 1 2 3 .
        2: . . 0 1 2 3
    """
    clocks = [{partition: chunk for chunk, partition in pairs} for pairs in clock_cycles(chunks, partitions)]
    lines = ([str(clock.get(partition, ".")) for clock in clocks] for partition in range(partitions))
    return "\n".join(f"{partition}: {' '.join(line)}" for partition, line in enumerate(lines))
