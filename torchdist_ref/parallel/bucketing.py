"""Which gradients travel together: a pure function from sizes to buckets, the same on every rank.

Gradients of one bucket share dtype and device; a sparse one has a bucket to itself. A bucket closes as soon as its
size *reaches* the cap, so it may overshoot by one parameter. The first iteration uses a single bucket (the order of
the gradients is not yet known); after it the buckets are rebuilt in the order in which gradients arrived, the first
one small so that communication starts early. Only sizes and limits belong here: no storage, no communication.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import torch

MiB = 1024 * 1024
DEFAULT_CAP_MB = 25
FIRST_BUCKET_BYTES = MiB


@dataclass(frozen=True, slots=True)
class Caps:
    """Limits in bytes: the n-th bucket of a kind takes the n-th limit, later ones the last limit."""

    initial: tuple[int, ...]
    rebuilt: tuple[int, ...]


def caps(cap_mb: float | None, cap_mb_list: Sequence[float] | None, final: bool) -> Caps:
    """The limits for the first iteration and for those after it.

    With ``final`` buckets are never rebuilt, so the initial ones are the real ones already.
    """
    if cap_mb_list:
        listed = tuple(int(mb * MiB) for mb in cap_mb_list)
        return Caps(listed, listed)
    cap = int((DEFAULT_CAP_MB if cap_mb is None else cap_mb) * MiB)
    sized = (FIRST_BUCKET_BYTES, cap) if cap_mb is None else (cap,)
    return Caps(sized if final else (sys.maxsize,), sized)


class _Open:
    """A bucket being filled, and how many of its kind were closed before it."""

    def __init__(self) -> None:
        self.members: list[int] = []
        self.size = 0
        self.closed = 0


def assign(
    tensors: Sequence[torch.Tensor], limits: Sequence[int], order: Iterable[int], alone: Container[int] = ()
) -> list[list[int]]:
    """Divide ``order`` (indices into ``tensors``) into buckets that close when they reach their limit.

    Those in ``alone`` have a bucket to themselves, which neither waits for others nor counts towards limits.

    >>> import torch
    >>> tensors = [torch.empty(n) for n in (1, 2, 3, 4)]
    >>> assign(tensors, (8, 16), [3, 2, 1, 0])
    [[3], [2, 1], [0]]
    >>> assign(tensors, (8, 16), [3, 2, 1, 0], alone={1})
    [[3], [1], [2, 0]]
    """
    buckets: list[list[int]] = []
    opened: dict[tuple[torch.dtype, torch.device], _Open] = {}
    for index in order:
        if index in alone:
            buckets.append([index])
            continue
        tensor = tensors[index]
        box = opened.setdefault((tensor.dtype, tensor.device), _Open())
        box.members.append(index)
        box.size += tensor.numel() * tensor.element_size()
        if box.size >= limits[min(box.closed, len(limits) - 1)]:
            buckets.append(box.members)
            box.members, box.size, box.closed = [], 0, box.closed + 1
    return buckets + [box.members for box in opened.values() if box.members]


def in_definition_order(
    tensors: Sequence[torch.Tensor], limits: Sequence[int], alone: Container[int] = ()
) -> list[list[int]]:
    """The buckets before any gradient was seen: filled first layer to last, launched last to first.

    Backward usually runs from the last layer to the first, so that is the best guess at arrival order.
    """
    return sorted(assign(tensors, limits, range(len(tensors)), alone), key=min, reverse=True)
