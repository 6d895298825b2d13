"""A step of an ordinary optimizer for some of its parameters only, with gradients from elsewhere.

While gradients of other parameters are still being computed, their ``grad`` belongs to autograd: so nothing here
looks at it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from torch import Tensor
from torch.optim import Optimizer


@contextlib.contextmanager
def only(optimizer: Optimizer, gradients: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Make an optimizer see some parameters only, with these gradients, for as long as the context lasts.

    Args:
        optimizer: Any optimizer.
        gradients: For each parameter to see, its gradient.
    """
    lists = [group["params"] for group in optimizer.param_groups]
    former = {parameter: parameter.grad for parameter in gradients}
    try:
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if parameter in gradients]
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        yield
    finally:
        for parameter, gradient_or_none in former.items():
            parameter.grad = gradient_or_none
        for group, parameters in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = parameters
