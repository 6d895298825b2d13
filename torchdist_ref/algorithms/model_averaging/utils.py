"""Averaging the parameters of a model over ranks, in one message for each kind of parameter.

When to average is for `averagers` to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from torchdist_ref import groups
from torchdist_ref.errors import ArgumentTypeError, explain

__all__ = ["average_parameters", "average_parameters_or_parameter_groups", "get_params_to_average"]

Params = Iterable[Parameter] | Iterable[dict[str, Any]]


def average_parameters(params: Iterator[Parameter], process_group: Any) -> None:
    """Replace each parameter by its average over the ranks, in place. Needs as much memory again.

    Args:
        params: The parameters; the same shapes and dtypes in the same order on all ranks.
        process_group: The ranks; None for all. On a rank that is not in it nothing happens.

    Raises:
        MismatchError: Ranks have different parameters.

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
    """
    if groups.get_rank(process_group) < 0:
        return
    tensors = [parameter.detach() for parameter in params]
    for kind in dict.fromkeys((tensor.device, tensor.dtype) for tensor in tensors):
        _average([tensor for tensor in tensors if (tensor.device, tensor.dtype) == kind], process_group)


def _average(tensors: list[Tensor], group: Any) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    # Divided first, so that narrow types don't overflow.
    flat /= groups.get_world_size(group)
    groups.all_reduce(flat, group=group)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def get_params_to_average(params: Params) -> list[Parameter]:
    """Choose the parameters that have a gradient: the others don't change, so they are the same everywhere.

    Args:
        params: The parameters of a model, or the ``param_groups`` of an optimizer.

    Returns:
        Those with a gradient, in order.

    Raises:
        ArgumentTypeError: Something else is among them.

    Example:
        >>> import torch
        >>> from torchdist_ref.algorithms.model_averaging.utils import get_params_to_average
        >>> model = torch.nn.Linear(2, 1)
        >>> model.weight.grad = torch.ones(1, 2)
        >>> [tuple(p.shape) for p in get_params_to_average(model.parameters())]
        [(1, 2)]
    """
    return [parameter for parameter in chain.from_iterable(map(_members, params)) if parameter.grad is not None]


def _members(entry: Any) -> list[Parameter]:
    if isinstance(entry, Parameter):
        return [entry]
    if isinstance(entry, dict):
        return list(entry["params"])
    expected = "an iterable of parameters, or of dicts with an entry 'params'"
    raise ArgumentTypeError(explain("get_params_to_average", "params", expected, type(entry).__name__))


def average_parameters_or_parameter_groups(params: Params, process_group: Any) -> None:
    """Replace each parameter that has a gradient by its average over the ranks, in place.

    Args:
        params: The parameters of a model, or the ``param_groups`` of an optimizer.
        process_group: The ranks; None for all. On a rank that is not in it nothing happens.

    Raises:
        ArgumentTypeError: ``params`` holds something else.
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
    """
    average_parameters(iter(get_params_to_average(params)), process_group)
