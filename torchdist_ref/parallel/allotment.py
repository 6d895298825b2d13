"""From a division of the parameters to the buckets that carry their gradients: dense, sparse, or none at all.

`bucketing` says which parameters travel together; here each such set gets what it needs for that: a flat buffer,
a `SparseBucket`, or, for the last dense one where ranks share memory, a place among those that are averaged `in_place`.
Don't add storage or communication here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchdist_ref.parallel.exchange import Exchange
from torchdist_ref.parallel.in_place import InPlace
from torchdist_ref.parallel.options import Entry, Options
from torchdist_ref.parallel.sparse import SparseBucket
from torchdist_ref.parallel.storage import Bucket

AnyBucket = Bucket | SparseBucket


def allot(
    assignment: Sequence[list[int]], entries: Sequence[Entry], options: Options, group: Any, resting: Exchange | None
) -> tuple[list[AnyBucket], InPlace]:
    """The buckets of an assignment, in the order of communication, and what is averaged in place after them.

    Args:
        assignment: Indices into ``entries``; a sparse parameter is alone.
        entries: The parameters.
        options: How DDP was asked to work.
        group: Who exchanges the buckets.
        resting: How the last dense bucket is averaged, if that is to be done in place.
    """
    dense = [members for members in assignment if not entries[members[0]].sparse]
    rest = dense[-1] if resting is not None and dense else []
    travelling = [members for members in assignment if members is not rest]
    last = len(travelling) - 1
    with torch.no_grad():
        buckets = [_bucket(i, members, entries, i == last, options, group) for i, members in enumerate(travelling)]
    over, dtype = (group, None) if resting is None else (resting.over, resting.dtype)
    return buckets, InPlace([entries[member].parameter for member in rest], over, dtype)


def _bucket(
    index: int, members: list[int], entries: Sequence[Entry], is_last: bool, options: Options, group: Any
) -> AnyBucket:
    if entries[members[0]].sparse:
        return SparseBucket(index, members[0], entries[members[0]], is_last)
    parameters = [entries[member].parameter for member in members]
    bucket = Bucket(index, members, parameters, is_last, options.pointing, group)
    bucket.adopt()
    return bucket
