"""Averaging near ranks often and all ranks seldom (J. Wang, S. Wang, R. Chen, M. Ji, *Local Averaging Helps*, 2022).

The smallest circle, the ranks that average gradients, is for `post_localSGD_hook` to keep.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torchdist_ref import groups
from torchdist_ref.algorithms.model_averaging import averagers, utils
from torchdist_ref.errors import ArgumentError, explain

__all__ = ["HierarchicalModelAverager"]

logger = logging.getLogger("torchdist_ref.algorithms")
_NAME = "HierarchicalModelAverager"


class HierarchicalModelAverager(averagers.ModelAverager):
    """Averages in groups of several sizes, each size with a period of its own, once training has warmed up.

    In each step at most one average is taken: that of the longest period that divides the number of the step. Groups
    of `n` are the ranks 0 to n - 1, n to 2n - 1, and so on.

    Args:
        period_group_size_dict: Periods in steps, increasing, each with the size of the groups that average then. The
            last size is that of `process_group`; each must divide it.
        warmup_steps: Steps before the first average. Default: 0.
        process_group: The ranks. Default: all.

    Attributes:
        period_process_group_dict: For each period the group that this rank averages in.

    Raises:
        ArgumentError: No periods, periods that don't increase, a last size that is not the group's, or a negative
            number of steps.
        NotInitializedError: There is no group yet.

    Example:
        Pairs average at steps 0 and 2, all four at step 0:

        >>> import torch
        >>> from torchdist_ref.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     weight = torch.nn.Parameter(torch.zeros(1))
        ...     weight.grad = torch.zeros(1)
        ...     averager = HierarchicalModelAverager({2: 2, 4: 4})
        ...     for _ in range(3):
        ...         averager.average_parameters([weight])
        ...         weight.data += rank
        ...     return weight.item()
        >>> run(program, 4)
        [1.0, 2.0, 7.0, 8.0]
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: Any = None,
    ) -> None:
        super().__init__(process_group)
        averagers.check_warmup(_NAME, warmup_steps)
        sizes = dict(period_group_size_dict or {})
        self._check(sizes)
        averagers.warn_of_period_one(max(sizes))
        self.warmup_steps = warmup_steps
        self.period_process_group_dict = {period: self._group(period, size) for period, size in sizes.items()}

    def _check(self, sizes: dict[int, int]) -> None:
        periods = list(sizes)
        if not periods or periods[0] < 1 or periods != sorted(periods):
            expected = "one or more increasing periods, at least 1, and their sizes"
            raise ArgumentError(explain(_NAME, "period_group_size_dict", expected, sizes))
        whole = groups.get_world_size(self.process_group)
        if sizes[periods[-1]] != whole:
            expected = f"a dict whose last size is that of the process group, {whole}"
            raise ArgumentError(explain(_NAME, "period_group_size_dict", expected, sizes))

    def _group(self, period: int, size: int) -> Any:
        logger.info("Every %d steps, groups of %d ranks average their models.", period, size)
        if size == groups.get_world_size(self.process_group):
            return self.process_group
        return groups.new_subgroups(size, self.process_group)[0]

    def average_parameters(self, params: utils.Params) -> None:
        """Average the parameters that have a gradient with the ranks whose turn it is, if any, and count the call.

        Args:
            params: The parameters of a model, or the ``param_groups`` of an optimizer.

        Raises:
            MismatchError: Other parameters have gradients on another rank.
        """
        due = [group for period, group in self.period_process_group_dict.items() if self.step % period == 0]
        if due and self.step >= self.warmup_steps:
            utils.average_parameters_or_parameter_groups(params, due[-1])
        self.step += 1
