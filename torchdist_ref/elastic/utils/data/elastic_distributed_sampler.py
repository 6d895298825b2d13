"""A sampler that can begin in the middle of an epoch, with another number of ranks than before."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import Dataset, DistributedSampler

from torchdist_ref import groups
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, explain

__all__ = ["ElasticDistributedSampler"]

_NAME = "ElasticDistributedSampler"


class ElasticDistributedSampler(DistributedSampler[Any]):
    """Divides what is left of an epoch among ranks, shuffled, all ranks getting equally many.

    Where the samples don't divide evenly, some are given twice. `set_epoch` changes the order; all ranks must set it
    alike.

    Args:
        dataset: The data, with a length.
        num_replicas: How many ranks. Default: those of the default group.
        rank: This rank. Default: that in the default group.
        start_index: How many samples of the dataset were used up already: those from this index on are left.

    Raises:
        ArgumentTypeError: The dataset has no length.
        ArgumentError: Nothing is left from ``start_index`` on, or the rank is not among the ranks.
        NotInitializedError: Ranks are not given and there is no group.

    Example:
        >>> from torchdist_ref.elastic.utils.data import ElasticDistributedSampler
        >>> samplers = [ElasticDistributedSampler(range(10), 2, rank, start_index=6) for rank in range(2)]
        >>> sorted(index for sampler in samplers for index in sampler)
        [6, 7, 8, 9]
    """

    def __init__(
        self, dataset: Dataset[Any], num_replicas: int | None = None, rank: int | None = None, start_index: int = 0
    ) -> None:
        if not isinstance(dataset, Sized):
            raise ArgumentTypeError(explain(_NAME, "dataset", "something with a length", type(dataset).__name__))
        ranks = groups.get_world_size() if num_replicas is None else num_replicas
        mine = groups.get_rank() if rank is None else rank
        if not 0 <= mine < ranks:
            raise ArgumentError(explain(_NAME, "rank", f"from 0 to {ranks - 1}", mine))
        super().__init__(dataset, ranks, mine)
        self.start_index = start_index
        self._left = len(dataset) - start_index
        if not 0 < self._left <= len(dataset):
            expected = f"from 0 to {len(dataset) - 1}, so that something is left"
            raise ArgumentError(explain(_NAME, "start_index", expected, start_index))
        self.num_samples = math.ceil(self._left / ranks)
        self.total_size = self.num_samples * ranks

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(self.epoch)
        shuffled = (torch.randperm(self._left, generator=generator) + self.start_index).tolist()
        return islice(cycle(shuffled), self.rank, self.total_size, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples
