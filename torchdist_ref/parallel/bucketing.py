"""Division of parameters into buckets: a pure function of sizes, the same on every rank.

Gradients of one bucket share dtype and device; a sparse gradient has a bucket of its own. A bucket closes as soon as
its size *reaches* the cap, so it may exceed the cap by one parameter. The first iteration uses a single bucket, because
the order of the gradients is unknown. Then `Reducer.rebuild_buckets` builds the buckets anew, in the order in which
gradients became ready. The first of them is small, so that communication starts early. Do not add storage or
communication here.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, fields
from numbers import Real

import torch

from torchdist_ref.errors import ArgumentError, ArgumentTypeError, explain

MIB_BYTES = 1024 * 1024
DEFAULT_CAP_MIB = 25
FIRST_BUCKET_BYTES = MIB_BYTES


@dataclass(frozen=True, slots=True)
class Caps:
    """Limits in bytes: the n-th bucket of a kind takes the n-th limit, later ones the last limit."""

    initial: tuple[int, ...]
    rebuilt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ParameterEntry:
    """Parameter that takes part.

    Attributes:
        name: Its name in the module.
        parameter: The parameter.
        sparse: Whether its gradients are sparse.
    """

    name: str
    parameter: torch.Tensor
    sparse: bool = False


@dataclass(frozen=True, slots=True)
class ReducerOptions:
    """Arguments of DDP that the reducer needs.

    Attributes:
        caps: Sizes of buckets.
        find_unused: Whether parameters that a backward pass cannot reach are searched for.
        gradient_as_view: Whether ``.grad`` is a view of the bucket.
        static_graph: Whether every iteration is promised to run the same graph.
        skip_unused: Whether buckets without a used parameter are not communicated.
        lazy_buckets: Whether the buffers of buckets exist during backward only.
    """

    caps: Caps
    find_unused: bool = False
    gradient_as_view: bool = False
    static_graph: bool = False
    skip_unused: bool = False
    lazy_buckets: bool = False


def completed(options: ReducerOptions) -> ReducerOptions:
    """Return the options of a pickle, with the defaults of those that an earlier release did not have."""
    known = (each.name for each in fields(options) if hasattr(options, each.name))
    return ReducerOptions(**{name: getattr(options, name) for name in known})


# Names of these classes in pickles of DistributedDataParallel from before they were renamed.
Entry, Options = ParameterEntry, ReducerOptions


def bucket_caps(cap_mib: float | None, cap_mib_list: Sequence[float] | None, final: bool) -> Caps:
    """Return the limits for the first iteration and for those after it.

    Args:
        cap_mib: Limit in MiB, or None for the default.
        cap_mib_list: Limits of the first bucket, the second and so on; replaces ``cap_mib``.
        final: Whether buckets are never rebuilt, so that the initial limits have to be the real ones.

    Raises:
        ArgumentTypeError: A limit is not a number.
        ArgumentError: A limit is negative, infinite or not a number.
    """
    for name, limits in (("bucket_cap_mb", [cap_mib]), ("bucket_cap_mb_list", cap_mib_list or ())):
        if not all(limit is None or isinstance(limit, Real) for limit in limits):
            raise ArgumentTypeError(explain("DistributedDataParallel", name, "a number of MiB", list(limits)))
        if not all(limit is None or 0 <= limit < float("inf") for limit in limits):
            expected = "finite sizes in MiB, from 0 up"
            raise ArgumentError(explain("DistributedDataParallel", name, expected, list(limits)))
    if cap_mib_list:
        listed = tuple(int(mib * MIB_BYTES) for mib in cap_mib_list)
        return Caps(listed, listed)
    cap = int((DEFAULT_CAP_MIB if cap_mib is None else cap_mib) * MIB_BYTES)
    sized = (FIRST_BUCKET_BYTES, cap) if cap_mib is None else (cap,)
    return Caps(sized if final else (sys.maxsize,), sized)


class _OpenBucket:
    """Bucket being filled, and the number of buckets of its kind that were closed before it."""

    def __init__(self) -> None:
        self.members: list[int] = []
        self.size = 0
        self.closed = 0


def assign(
    tensors: Sequence[torch.Tensor], limits: Sequence[int], order: Iterable[int], alone: Container[int] = ()
) -> list[list[int]]:
    """Divide ``order`` (indices into ``tensors``) into buckets that close when they reach their limit.

    Each index in ``alone`` has a bucket to itself, which neither waits for others nor counts toward limits.

    >>> import torch
    >>> tensors = [torch.empty(n) for n in (1, 2, 3, 4)]
    >>> assign(tensors, (8, 16), [3, 2, 1, 0])
    [[3], [2, 1], [0]]
    >>> assign(tensors, (8, 16), [3, 2, 1, 0], alone={1})
    [[3], [1], [2, 0]]
    """
    buckets: list[list[int]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], _OpenBucket] = {}
    for index in order:
        if index in alone:
            buckets.append([index])
            continue
        tensor = tensors[index]
        bucket = open_buckets.setdefault((tensor.dtype, tensor.device), _OpenBucket())
        bucket.members.append(index)
        bucket.size += tensor.numel() * tensor.element_size()
        if bucket.size >= limits[min(bucket.closed, len(limits) - 1)]:
            buckets.append(bucket.members)
            bucket.members, bucket.size, bucket.closed = [], 0, bucket.closed + 1
    return buckets + [bucket.members for bucket in open_buckets.values() if bucket.members]


def in_definition_order(
    tensors: Sequence[torch.Tensor], limits: Sequence[int], alone: Container[int] = ()
) -> list[list[int]]:
    """Return the buckets before any gradient was seen: filled first layer to last, launched last to first.

    Backward usually runs from the last layer to the first, so that is the best guess at the order of gradients.
    """
    return sorted(assign(tensors, limits, range(len(tensors)), alone), key=min, reverse=True)
