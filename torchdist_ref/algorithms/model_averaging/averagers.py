"""When to average: an averager is called after every step and counts them.

An averager knows no optimizer. How tensors are averaged is in `utils`.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from typing import Any

from torchdist_ref import groups
from torchdist_ref.algorithms.model_averaging import utils
from torchdist_ref.errors import ArgumentError, NotInitializedError, explain

__all__ = ["ModelAverager", "PeriodicModelAverager"]


class ModelAverager(ABC):
    """What averages the parameters of a model now and then.

    Args:
        process_group: The ranks. Default: all.

    Attributes:
        step: How often `average_parameters` was called.
        process_group: The ranks.

    Raises:
        NotInitializedError: There is no group yet.
    """

    def __init__(self, process_group: Any = None) -> None:
        self.process_group = groups.GroupMember.WORLD if process_group is None else process_group
        if self.process_group is None:
            raise NotInitializedError(f"{type(self).__name__}: there is no process group; call init_process_group.")
        self.step = 0

    @abstractmethod
    def average_parameters(self, params: Any) -> None:
        """Average the parameters if it is time, and count the call.

        Args:
            params: The parameters of a model, or the ``param_groups`` of an optimizer.
        """


class PeriodicModelAverager(ModelAverager):
    """Averages every so many steps, once training has warmed up.

    Args:
        period: From one average to the next, in steps. With 1, averaging gradients costs the same and does more.
        warmup_steps: Steps before the first average. Default: 0.
        process_group: The ranks. Default: all.

    Raises:
        ArgumentError: A period below 1, or a negative number of steps.
        NotInitializedError: There is no group yet.

    Example:
        Averages are taken at calls 1, 3 and so on, after one call to warm up:

        >>> import torch
        >>> from torchdist_ref.algorithms.model_averaging.averagers import PeriodicModelAverager
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     weight = torch.nn.Parameter(torch.tensor([4.0 * rank]))
        ...     weight.grad = torch.zeros(1)
        ...     averager = PeriodicModelAverager(period=2, warmup_steps=1)
        ...     seen = []
        ...     for _ in range(4):
        ...         averager.average_parameters([weight])
        ...         seen.append(weight.item())
        ...         weight.data += rank
        ...     return seen
        >>> run(program, 2)
        [[0.0, 2.5, 2.5, 3.5], [4.0, 2.5, 3.5, 3.5]]
    """

    def __init__(self, period: int, warmup_steps: int = 0, process_group: Any = None) -> None:
        super().__init__(process_group)
        check_warmup(type(self).__name__, warmup_steps)
        if period < 1:
            raise ArgumentError(explain(type(self).__name__, "period", "at least 1", period))
        warn_of_period_one(period)
        self.warmup_steps = warmup_steps
        self.period = period

    def average_parameters(self, params: utils.Params) -> None:
        """Average the parameters that have a gradient, if it is time, and count the call.

        Args:
            params: The parameters of a model, or the ``param_groups`` of an optimizer.

        Raises:
            MismatchError: Other parameters have gradients on another rank.
        """
        if self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0:
            utils.average_parameters_or_parameter_groups(params, self.process_group)
        self.step += 1


def check_warmup(name: str, warmup_steps: int) -> None:
    """Raise unless the number of steps to warm up makes sense."""
    if warmup_steps < 0:
        raise ArgumentError(explain(name, "warmup_steps", "0 or more", warmup_steps))


def warn_of_period_one(period: int) -> None:
    """Warn where averaging models has no advantage."""
    if period == 1:
        warnings.warn(
            "Averaging the model in every step costs as much as averaging gradients: DistributedDataParallel "
            "without a model averager does that.",
            stacklevel=4,
        )
