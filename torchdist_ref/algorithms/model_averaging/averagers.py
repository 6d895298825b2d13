"""Model averaging: ranks train by themselves for some steps, then average their parameters.

An averager is called after every step, counts them, and calls `average_parameters` when an average is due: one message
for each dtype and device. Do not add optimizers or gradients here.
"""

from __future__ import annotations

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from torchdist_ref import groups
from torchdist_ref.algorithms.division import Divisor, average
from torchdist_ref.errors import ArgumentError, ArgumentTypeError, NotInitializedError, explain
from torchdist_ref.torch_internals.torch_modes import outside_modes

__all__ = [
    "HierarchicalModelAverager",
    "ModelAverager",
    "PeriodicModelAverager",
    "average_parameters",
    "average_parameters_or_parameter_groups",
    "get_params_to_average",
]

logger = logging.getLogger("torchdist_ref.algorithms")

ModelParameters = Iterable[Parameter] | Iterable[dict[str, Any]]


def average_parameters(params: Iterator[Parameter], process_group: Any) -> None:
    """Replace each parameter by its average over the ranks, in place. Temporarily doubles the memory of parameters.

    Args:
        params: The parameters; the same shapes and dtypes in the same order on all ranks.
        process_group: The ranks; None for all. A rank that is not in it does nothing.

    Raises:
        MismatchError: Ranks have different parameters.
        ArgumentTypeError: `params` is not an iterable of parameters.

    Example:
        >>> import torch
        >>> from torchdist_ref.algorithms.model_averaging.utils import average_parameters
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     weight = torch.nn.Parameter(torch.tensor([2.0, 5.0 * rank]))
        ...     average_parameters(iter([weight]), None)
        ...     return weight.tolist()
        >>> run(program, 2)
        [[2.0, 2.5], [2.0, 2.5]]

    Elsewhere:
        ``MPI_Allreduce`` and a division in MPI; ``ncclAllReduce`` with ``ncclAvg`` in NCCL; ``jax.lax.pmean`` of the
        parameters in JAX.
    """
    found = groups.world.resolve(process_group, "average_parameters", "process_group")
    if found is None:
        return
    parameters = list(params) if isinstance(params, Iterable) else [params]
    if (other := next((each for each in parameters if not isinstance(each, Tensor)), None)) is not None:
        raise ArgumentTypeError(explain("average_parameters", "params", "an iterable of parameters", other))
    tensors = [parameter.detach() for parameter in parameters]
    for kind in dict.fromkeys((tensor.device, tensor.dtype) for tensor in tensors):
        _average([tensor for tensor in tensors if (tensor.device, tensor.dtype) == kind], process_group)


def _average(tensors: list[Tensor], group: Any) -> None:
    # Divided before the sum, so that 16-bit floats do not overflow.
    with outside_modes():
        flat = average(torch.cat([tensor.reshape(-1) for tensor in tensors]), Divisor(groups.get_world_size(group)))
    groups.all_reduce(flat, group=group)
    with outside_modes():
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def get_params_to_average(params: ModelParameters) -> list[Parameter]:
    """Return the parameters that have a gradient: the others do not change, so they are equal on all ranks.

    Args:
        params: The parameters of a model, or the ``param_groups`` of an optimizer.

    Returns:
        The parameters with a gradient, in order.

    Raises:
        ArgumentTypeError: An element is neither a parameter nor a group of parameters.

    Example:
        >>> import torch
        >>> from torchdist_ref.algorithms.model_averaging.utils import get_params_to_average
        >>> model = torch.nn.Linear(2, 1)
        >>> model.weight.grad = torch.ones(1, 2)
        >>> [tuple(p.shape) for p in get_params_to_average(model.parameters())]
        [(1, 2)]

    Elsewhere:
        None in MPI, NCCL and JAX.
    """
    if not isinstance(params, Iterable):
        raise ArgumentTypeError(explain("get_params_to_average", "params", "an iterable of parameters", params))
    return [parameter for parameter in chain.from_iterable(map(_members, params)) if parameter.grad is not None]


def _members(entry: Any) -> list[Parameter]:
    if isinstance(entry, Parameter):
        return [entry]
    if isinstance(entry, dict):
        return list(entry["params"])
    expected = "an iterable of parameters, or of dicts with an entry 'params'"
    raise ArgumentTypeError(explain("get_params_to_average", "params", expected, type(entry).__name__))


def average_parameters_or_parameter_groups(params: ModelParameters, process_group: Any) -> None:
    """Replace each parameter that has a gradient by its average over the ranks, in place.

    Args:
        params: The parameters of a model, or the ``param_groups`` of an optimizer.
        process_group: The ranks; None for all. A rank that is not in it does nothing.

    Raises:
        ArgumentTypeError: ``params`` holds an object of another type.
        MismatchError: Other parameters have gradients on another rank.

    Example:
        >>> import torch
        >>> from torchdist_ref.algorithms.model_averaging.utils import average_parameters_or_parameter_groups
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     weights = [torch.nn.Parameter(torch.tensor([4.0 * rank])) for _ in range(2)]
        ...     weights[0].grad = torch.zeros(1)
        ...     average_parameters_or_parameter_groups([{"params": weights}], None)
        ...     return [weight.item() for weight in weights]
        >>> run(program, 2)
        [[2.0, 0.0], [2.0, 4.0]]

    Elsewhere:
        ``MPI_Allreduce`` and a division in MPI; ``ncclAllReduce`` with ``ncclAvg`` in NCCL; ``jax.lax.pmean`` of the
        parameters in JAX.
    """
    average_parameters(iter(get_params_to_average(params)), process_group)


class ModelAverager(ABC):
    """Base class of objects that average the parameters of a model periodically.

    Args:
        process_group: The ranks. Default: all.

    Attributes:
        step: Number of calls of `average_parameters`.
        process_group: The ranks.

    Raises:
        NotInitializedError: There is no group yet.

    Elsewhere:
        None in MPI, NCCL and JAX.
    """

    def __init__(self, process_group: Any = None) -> None:
        self.process_group = groups.GroupMember.WORLD if process_group is None else process_group
        if self.process_group is None:
            raise NotInitializedError(f"{type(self).__name__}: there is no process group; call init_process_group.")
        groups.world.resolve(self.process_group, type(self).__name__, "process_group")
        self.step = 0

    @abstractmethod
    def average_parameters(self, params: Any) -> None:
        """Average the parameters if an average is due, and count the call.

        Args:
            params: The parameters of a model, or the ``param_groups`` of an optimizer.
        """


class PeriodicModelAverager(ModelAverager):
    """Averager with one period, after warm-up.

    Args:
        period: Steps from one average to the next. With 1, averaging gradients costs the same and converges better.
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

    Elsewhere:
        None in MPI and NCCL; in JAX, ``jax.lax.pmean`` of the parameters in every n-th step.
    """

    def __init__(self, period: int, warmup_steps: int = 0, process_group: Any = None) -> None:
        super().__init__(process_group)
        _check_warmup(type(self).__name__, warmup_steps)
        if not isinstance(period, int):
            raise ArgumentTypeError(explain(type(self).__name__, "period", "a number of steps", period))
        if period < 1:
            raise ArgumentError(explain(type(self).__name__, "period", "at least 1", period))
        _warn_of_period_one(period)
        self.warmup_steps = warmup_steps
        self.period = period

    def average_parameters(self, params: ModelParameters) -> None:
        """Average the parameters that have a gradient, if an average is due, and count the call.

        Args:
            params: The parameters of a model, or the ``param_groups`` of an optimizer.

        Raises:
            MismatchError: Other parameters have gradients on another rank.
        """
        if self.step >= self.warmup_steps and (self.step - self.warmup_steps) % self.period == 0:
            average_parameters_or_parameter_groups(params, self.process_group)
        self.step += 1


def _check_warmup(name: str, warmup_steps: int) -> None:
    """Raise if the number of warm-up steps is negative."""
    if not isinstance(warmup_steps, int):
        raise ArgumentTypeError(explain(name, "warmup_steps", "a number of steps", warmup_steps))
    if warmup_steps < 0:
        raise ArgumentError(explain(name, "warmup_steps", "0 or more", warmup_steps))


def _warn_of_period_one(period: int) -> None:
    """Warn if averaging models has no advantage."""
    if period == 1:
        warnings.warn(
            "Averaging the model in every step costs as much as averaging gradients: DistributedDataParallel "
            "without a model averager does that.",
            stacklevel=4,
        )


class HierarchicalModelAverager(ModelAverager):
    """Averager over groups of several sizes, each with a period of its own, after warm-up.

    J. Wang, S. Wang, R. Chen, M. Ji, *Local Averaging Helps*, 2022. The smallest groups, which average gradients,
    belong to `post_localSGD_hook`.

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
        >>> from torchdist_ref.algorithms.model_averaging.hierarchical_model_averager import (
        ...     HierarchicalModelAverager)
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

    Elsewhere:
        None in MPI and NCCL; in JAX, ``jax.lax.pmean`` over one mesh axis in some steps and over all axes in others.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: Any = None,
    ) -> None:
        super().__init__(process_group)
        _check_warmup("HierarchicalModelAverager", warmup_steps)
        given: Any = period_group_size_dict or {}
        if not isinstance(given, Mapping):
            expected = "a dict of periods and sizes"
            raise ArgumentTypeError(explain("HierarchicalModelAverager", "period_group_size_dict", expected, given))
        sizes = dict(given)
        self._check(sizes)
        _warn_of_period_one(max(sizes))
        self.warmup_steps = warmup_steps
        self.period_process_group_dict = {period: self._group(period, size) for period, size in sizes.items()}

    def _check(self, sizes: dict[int, int]) -> None:
        periods = list(sizes)
        if not all(isinstance(number, int) for number in (*periods, *sizes.values())):
            expected = "a dict of periods and sizes, which are int"
            raise ArgumentTypeError(explain("HierarchicalModelAverager", "period_group_size_dict", expected, sizes))
        if not periods or periods[0] < 1 or periods != sorted(periods):
            expected = "one or more increasing periods, at least 1, and their sizes"
            raise ArgumentError(explain("HierarchicalModelAverager", "period_group_size_dict", expected, sizes))
        whole = groups.get_world_size(self.process_group)
        if sizes[periods[-1]] != whole:
            expected = f"a dict whose last size is that of the process group, {whole}"
            raise ArgumentError(explain("HierarchicalModelAverager", "period_group_size_dict", expected, sizes))

    def _group(self, period: int, size: int) -> Any:
        logger.info("Every %d steps, groups of %d ranks average their models.", period, size)
        if size == groups.get_world_size(self.process_group):
            return self.process_group
        return groups.new_subgroups(size, self.process_group)[0]

    def average_parameters(self, params: ModelParameters) -> None:
        """Average the parameters that have a gradient over the groups that are due, if any, and count the call.

        Args:
            params: The parameters of a model, or the ``param_groups`` of an optimizer.

        Raises:
            MismatchError: Other parameters have gradients on another rank.
        """
        due = [group for period, group in self.period_process_group_dict.items() if self.step % period == 0]
        if due and self.step >= self.warmup_steps:
            average_parameters_or_parameter_groups(params, due[-1])
        self.step += 1
