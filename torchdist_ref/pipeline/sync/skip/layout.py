"""Which skip connections cross from one partition to another: what each takes in, and what it sends out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from torchdist_ref.pipeline.sync.skip.skippable import Skippable
from torchdist_ref.pipeline.sync.skip.tracker import Key

__all__ = ["crossing"]


def crossing(partitions: Sequence[nn.Module]) -> list[tuple[list[Key], list[Key]]]:
    """Find the connections of each partition.

    Args:
        partitions: The partitions, in order.

    Returns:
        For each, what it pops that an earlier one stashed, and what it stashes for a later one.
    """
    found = []
    for partition in partitions:
        layers = [layer for layer in partition.modules() if isinstance(layer, Skippable)]
        stashed = _all(layer.stashable() for layer in layers)
        popped = _all(layer.poppable() for layer in layers)
        found.append(([key for key in popped if key not in stashed], [key for key in stashed if key not in popped]))
    return found


def _all(sets: Iterable[set[Key]]) -> list[Key]:
    return [key for keys in sets for key in sorted(keys, key=str)]
