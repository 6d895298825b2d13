"""Division into buckets, compared with torch's for any sizes and dtypes."""

from __future__ import annotations

import random

import torch
import torch.distributed
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchdist_ref.parallel import bucketing

TENSORS = st.lists(
    st.builds(
        lambda n, dtype: torch.empty(n, dtype=dtype),
        st.integers(0, 40),
        st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    ),
    min_size=1,
    max_size=20,
)
LIMITS = st.lists(st.integers(1, 200), min_size=1, max_size=3)
SPARSE = st.frozensets(st.integers(0, 19), max_size=4)
# Buckets that reach their limit to the byte, which random sizes hardly ever do.
EXACT = [torch.empty(n) for n in (1, 3, 2, 2, 4, 1)]


@settings(max_examples=200, deadline=None)
@given(TENSORS, LIMITS, SPARSE)
@example(EXACT, [16], frozenset())
@example(EXACT, [16], frozenset([1]))
def test_first_buckets_equal_torchs(tensors: list[torch.Tensor], limits: list[int], sparse: frozenset[int]) -> None:
    flags = [index in sparse for index in range(len(tensors))]
    theirs, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, limits, flags)
    ours = bucketing.in_definition_order(tensors, limits, sparse)
    assert ours == list(reversed(theirs))


@settings(max_examples=200, deadline=None)
@given(TENSORS, LIMITS, SPARSE, st.randoms())
@example(EXACT, [16], frozenset(), random.Random(0))
def test_rebuilt_buckets_equal_torchs(
    tensors: list[torch.Tensor], limits: list[int], sparse: frozenset[int], source: object
) -> None:
    order = list(range(len(tensors)))
    source.shuffle(order)  # type: ignore[attr-defined]
    arrived = [tensors[i] for i in order]
    flags = [index in sparse for index in range(len(tensors))]
    theirs, _ = torch.distributed._compute_bucket_assignment_by_size(arrived, limits, flags, order)
    # torch leaves open in which order the last, unfilled bucket of each dtype comes.
    assert sorted(bucketing.assign(tensors, limits, order, sparse)) == sorted(theirs)


def test_every_parameter_is_in_one_bucket_of_its_kind() -> None:
    tensors = [torch.empty(3, dtype=dtype) for dtype in (torch.float32, torch.float64) * 4]
    buckets = bucketing.assign(tensors, (24,), range(8))
    assert sorted(index for members in buckets for index in members) == list(range(8))
    assert all(len({tensors[i].dtype for i in members}) == 1 for members in buckets)


def test_bucket_caps() -> None:
    mb = bucketing.MIB_BYTES
    assert bucketing.bucket_caps(None, None, final=True).initial == (mb, 25 * mb)
    assert bucketing.bucket_caps(None, None, final=False).rebuilt == (mb, 25 * mb)
    assert bucketing.bucket_caps(None, None, final=False).initial[0] > 2**60
    assert bucketing.bucket_caps(3, None, final=True) == bucketing.Caps((3 * mb,), (3 * mb,))
    assert bucketing.bucket_caps(0.5, [1, 2], final=False) == bucketing.Caps((mb, 2 * mb), (mb, 2 * mb))
