"""Data loading over several epochs, and from the middle of an epoch: torch's ``elastic.utils.data``.

Do not add what needs no torch here: it is in `bootstrap`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sized
from itertools import cycle, islice
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import Dataset, DistributedSampler

from torchdist_ref import groups
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, explain

__all__ = ["CyclingIterator", "ElasticDistributedSampler"]

T = TypeVar("T")
_NAME = "ElasticDistributedSampler"


class CyclingIterator(Iterator[T], Generic[T]):
    """Iterator over several epochs.

    Args:
        n: The number of epochs, including those before ``start_epoch``.
        generator_fn: Function from an epoch's number to an iterator over the epoch.
        start_epoch: The first epoch. Default: 0.

    Example:
        >>> from torchdist_ref.elastic.utils.data import CyclingIterator
        >>> list(CyclingIterator(3, lambda epoch: iter([epoch, 10 * epoch]), start_epoch=1))
        [1, 10, 2, 20]

    Elsewhere:
        None in MPI, NCCL and JAX.
    """

    def __init__(self, n: int, generator_fn: Callable[[int], Iterator[T]], start_epoch: int = 0) -> None:
        self._n = n
        self._generator_fn = generator_fn
        self._epoch = start_epoch
        self._current = generator_fn(start_epoch)

    def __next__(self) -> T:
        while True:
            try:
                return next(self._current)
            except StopIteration:
                if self._epoch >= self._n - 1:
                    raise
            # A loop, since any number of epochs may be empty.
            self._epoch += 1
            self._current = self._generator_fn(self._epoch)


class ElasticDistributedSampler(DistributedSampler[Any]):
    """Sampler that divides the rest of an epoch among ranks, shuffled, in equal parts.

    The epoch may have begun with another number of ranks. If the samples do not divide evenly, some occur twice.
    `set_epoch` changes the order; all ranks must set the same epoch.

    Args:
        dataset: The data, with a length.
        num_replicas: The number of ranks. Default: that of the default group.
        rank: This rank. Default: that in the default group.
        start_index: The number of samples of the dataset that have been used: the rest begins at this index.

    Raises:
        ArgumentTypeError: The dataset has no length.
        ArgumentError: There is no sample from ``start_index`` on, or the rank is out of range.
        NotInitializedError: The number of ranks or the rank is not given, and there is no group.

    Example:
        >>> from torchdist_ref.elastic.utils.data import ElasticDistributedSampler
        >>> samplers = [ElasticDistributedSampler(range(10), 2, rank, start_index=6) for rank in range(2)]
        >>> sorted(index for sampler in samplers for index in sampler)
        [6, 7, 8, 9]

    Elsewhere:
        None in MPI, NCCL and JAX. ``IndexSampler`` with ``ShardByJaxProcess`` in Grain, which loads data for JAX.
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
            expected = f"from 0 to {len(dataset) - 1}, so that samples are left"
            raise ArgumentError(explain(_NAME, "start_index", expected, start_index))
        self.num_samples = math.ceil(self._left / ranks)
        self.total_size = self.num_samples * ranks

    def __iter__(self) -> Iterator[Any]:
        generator = torch.Generator("cpu").manual_seed(self.epoch)
        order = torch.randperm(self._left, generator=generator, dtype=torch.int64, device="cpu")
        shuffled = (order + self.start_index).tolist()
        return islice(cycle(shuffled), self.rank, self.total_size, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples
