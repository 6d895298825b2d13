"""The state of the PowerSGD hooks: what the user chose, and what is remembered from step to step.

All that a step needs of the past is here, so that a pickled state resumes to the same numbers. It lies in memory
bucket by bucket, and moves with the parameters when they come in other buckets: those of a new DDP are not those
that it has after its first step. How a step computes is in `powerSGD_hook`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchdist_ref.algorithms.ddp_comm_hooks.low_rank import Plan
from torchdist_ref.algorithms.ddp_comm_hooks.sequence import Line
from torchdist_ref.errors import ArgumentError, explain

__all__ = ["PowerSGDState"]

logger = logging.getLogger("torchdist_ref.algorithms")

RankRule = Callable[[torch.Tensor], int]


class SeedStream:
    """The random numbers from which each step's Q begins: the same on every rank, others at every step.

    Draws what ``numpy.random.RandomState(seed).randint(limit)`` would, so that runs compare with torch's.

    >>> SeedStream(7).randint(1_000_000_000)
    327741615
    """

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def randint(self, limit: int) -> int:
        """A number from 0 to ``limit`` - 1, by rejection."""
        mask = (1 << (limit - 1).bit_length()) - 1
        while True:
            drawn = int(torch.empty(1, dtype=torch.int32).random_(generator=self.generator)) & mask
            if drawn < limit:
                return drawn

    def __getstate__(self) -> dict[str, torch.Tensor]:
        return {"generator": self.generator.get_state()}

    def __setstate__(self, state: dict[str, torch.Tensor]) -> None:
        self.generator = torch.Generator()
        self.generator.set_state(state["generator"])


@dataclass(frozen=True)
class Layout:
    """How a bucket is divided.

    Attributes:
        key: All that the division depends on.
        plan: The division.
        owners: For the beginning of each matrix, the number of its parameter; none where a matrix has no one parameter.
    """

    key: Any
    plan: Plan
    owners: dict[int, Any]


class PowerSGDState:
    """What `powerSGD_hook` and `batched_powerSGD_hook` were asked to do, and what they remember.

    Args:
        process_group: The group over which gradients are averaged; None for the default group.
        matrix_approximation_rank: Columns of the factors P and Q. More: better gradients, more bytes. Usual are 1, 2
            and 4. Default 1.
        start_powerSGD_iter: Steps of plain averaging before compression begins, because early gradients matter most and
            DDP rebuilds its buckets after the first step. At least 2 with error feedback or warm start. Default 1000.
        min_compression_rate: A matrix is compressed only if that divides its size by more than this. Default 2.
        use_error_feedback: Add to each step's gradients what the last step's compression lost. Default True.
        warm_start: Begin each step with the last one's Q, so that steps converge to the best approximation of a slowly
            changing gradient. Default True.
        orthogonalization_epsilon: Added to norms that divide. Zero columns are safe without it. Default 0.
        random_seed: Of the first Q; the same on all ranks. Default 0.
        compression_stats_logging_frequency: Steps between log lines about the compression. Default 10,000.
        batch_tensors_with_same_shape: Draw the first Qs of equal shapes together, which are other random numbers (those
            of torch's hook). Costs and saves nothing. Default False.
        factor_dtype: Dtype in which the factors travel, say ``torch.bfloat16`` for half the bytes. Default None: the
            gradients' own.
        rank_rule: Called with each parameter; returns the rank to use in place of ``matrix_approximation_rank``, 0 for
            no compression. Has to answer alike on all ranks. See `layer_ranks`. Not part of a pickle. Default None.

    A pickle of the state goes on where it was: on a new DDP of the same model too, registered before its first step,
    although the buckets of that step are others. That holds for `powerSGD_hook` with ``warm_start``; what the batched
    hook remembers belongs to a bucket as a whole, and is dropped when the bucket changes.

    Raises:
        ArgumentError: ``start_powerSGD_iter`` is too small.

    Example:
        >>> state = PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=10)
        >>> state.compression_stats()
        (0, 0, 0)
    """

    def __init__(
        self,
        process_group: Any,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
        factor_dtype: torch.dtype | None = None,
        rank_rule: RankRule | None = None,
    ) -> None:
        if (use_error_feedback or warm_start) and start_powerSGD_iter <= 1:
            hint = "DDP rebuilds its buckets after the first step, and what is remembered would not fit them."
            name, expected = "start_powerSGD_iter", "at least 2 with use_error_feedback or warm_start"
            raise ArgumentError(explain("PowerSGDState", name, expected, start_powerSGD_iter, hint=hint))
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self.factor_dtype = factor_dtype
        self.rank_rule = rank_rule
        self.rng = SeedStream(random_seed)
        self.error_dict: dict[int, torch.Tensor] = {}
        self.p_memory_dict: dict[int, torch.Tensor] = {}
        self.q_memory_dict: dict[int, torch.Tensor] = {}
        self.layouts: dict[int, Layout] = {}
        self._loose: dict[Any, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        self.iter = 0
        self.next_stats_report = 0
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self._begin()

    NOT_SAVED = ("line", "process_group", "rank_rule", "_seen")

    def _begin(self) -> None:
        """What is not worth keeping in a pickle: it is made again when needed."""
        self.line = Line()
        self._seen: dict[int, tuple[torch.Tensor, int]] = {}

    def meet(self, bucket: Any) -> list[Any]:
        """Give each parameter of a bucket its number: its place in the order in which parameters were first met.

        A new DDP shows them in the order of definition, so a state from a pickle knows its own again, whatever the
        buckets. Gradients without parameters go by their place in the bucket.
        """
        parameters = bucket.parameters()
        if not parameters:
            return [(bucket.index(), place) for place in range(len(bucket.gradients()))]
        for parameter in parameters:
            self._seen.setdefault(id(parameter), (parameter, len(self._seen)))
        return [self._seen[id(parameter)][1] for parameter in parameters]

    def settle(self, index: int, layout: Layout, like: torch.Tensor) -> None:
        """From now on the bucket is divided like this: what is remembered of its parameters moves to their new places.

        Buckets behind it, which have not begun their step, give up what they hold, for it may be wanted here.
        """
        for behind in sorted(self.layouts):
            if behind >= index:
                self._loosen(behind, self.layouts.pop(behind))
        self.layouts[index] = layout
        matrices = layout.plan.matrices
        found = [self._loose.pop(layout.owners.get(matrix.start), None) for matrix in matrices]
        if self.use_error_feedback and any(found):
            errors = self.error_dict[index] = torch.zeros_like(like)
            for matrix, known in zip(matrices, found, strict=True):
                if known is not None and known[0] is not None and known[0].shape == (matrix.n, matrix.m):
                    matrix.of(errors).copy_(known[0])
        Qs = [known[1] for known in found if known is not None and known[1] is not None]
        if Qs and [(Q.shape, Q.dtype) for Q in Qs] == [((x.m, x.r), like.dtype) for x in matrices]:
            self.q_memory_dict[index] = torch.cat([Q.flatten() for Q in Qs])

    def _loosen(self, index: int, layout: Layout) -> None:
        error, Q = self.error_dict.pop(index, None), self.q_memory_dict.pop(index, None)
        self.p_memory_dict.pop(index, None)
        matrices = layout.plan.matrices
        Qs = [None] * len(matrices) if Q is None else layout.plan.qs(Q)
        for matrix, one in zip(matrices, Qs, strict=True):
            if matrix.start in layout.owners:
                self._loose[layout.owners[matrix.start]] = None if error is None else matrix.of(error), one

    def ranks_for(self, parameter: torch.Tensor) -> Callable[[int, int], int]:
        """The rank with which a parameter is compressed, given its matrix's size; 0 if that saves too little."""
        wanted = self.matrix_approximation_rank if self.rank_rule is None else self.rank_rule(parameter)

        def rank_for(n: int, m: int) -> int:
            r = min(n, m, wanted)
            return r if (n + m) * r * self.min_compression_rate < n * m else 0

        return rank_for

    def maybe_increase_iter(self, bucket: Any) -> None:
        """Count a step when its last bucket is done."""
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_powerSGD_iter:
                logger.info("PowerSGD: compression begins after %d steps.", self.iter)

    def count(self, bucket: Any, before: int, after: int) -> None:
        """Add one bucket to the statistics, and log them when it is time."""
        self.total_numel_before_compression += before
        self.total_numel_after_compression += after
        if bucket.is_last() and self.iter >= self.next_stats_report:
            logger.info("PowerSGD: step %d, rate %.1f, %d elements became %d.", self.iter, *self.compression_stats())
            self.next_stats_report = self.iter + self.compression_stats_logging_frequency

    def compression_stats(self) -> tuple[float, int, int]:
        """How much was saved so far.

        Returns:
            The rate (elements before, divided by elements after), the elements before, the elements after.
        """
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after else 0), before, after

    def __getstate__(self) -> dict[str, Any]:
        kept = {k: v for k, v in vars(self).items() if k not in self.NOT_SAVED}
        for name in ("error_dict", "p_memory_dict", "q_memory_dict"):
            kept[name] = {index: tensor.clone() for index, tensor in kept[name].items()}
        logger.warning("PowerSGDState: the process group and the rank rule are not part of a saved state.")
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        logger.warning("PowerSGDState: loaded with the default group; set process_group if another one is meant.")
        self.__dict__.update(state, process_group=None, rank_rule=None)
        self._begin()
