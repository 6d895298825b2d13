"""Going through data again and again, and going on in the middle of an epoch."""

from __future__ import annotations

from torchdist_ref.elastic.utils.data.cycling_iterator import CyclingIterator
from torchdist_ref.elastic.utils.data.elastic_distributed_sampler import ElasticDistributedSampler

__all__ = ["CyclingIterator", "ElasticDistributedSampler"]
