"""An optimizer that averages the model after its steps: the second half of post-local SGD.

The first half is `post_localSGD_hook`, which averages gradients. The averager decides when models are averaged, and
over which ranks. Do not add averaging here.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch.optim import Optimizer

from torchdist_ref.algorithms.model_averaging.averagers import ModelAverager
from torchdist_ref.errors import ArgumentTypeError, explain

__all__ = ["PostLocalSGDOptimizer"]


class PostLocalSGDOptimizer(Optimizer):
    """Optimizer that calls an averager after each of its steps.

    Groups of parameters, state and all other attributes are those of the wrapped optimizer.

    Args:
        optim: The optimizer of this rank.
        averager: Averages the parameters, for example a ``PeriodicModelAverager``.

    Example:
        >>> import torch
        >>> from torchdist_ref.algorithms.model_averaging.averagers import PeriodicModelAverager
        >>> from torchdist_ref.optim import PostLocalSGDOptimizer
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     weight = torch.nn.Parameter(torch.zeros(1))
        ...     averager = PeriodicModelAverager(period=2, warmup_steps=1)
        ...     optimizer = PostLocalSGDOptimizer(torch.optim.SGD([weight], lr=1.0), averager)
        ...     for _ in range(2):
        ...         weight.grad = torch.tensor([float(rank)])
        ...         optimizer.step()
        ...     return weight.item()
        >>> run(program, 2)
        [-1.0, -1.0]

    Raises:
        ArgumentTypeError: Not an optimizer, or not an averager.

    T. Lin, S. Stich, K. K. Patel, M. Jaggi, *Don't Use Large Mini-Batches, Use Local SGD*, ICLR 2020.
    """

    def __init__(self, optim: Optimizer, averager: ModelAverager) -> None:
        for argument, value, method in (("optim", optim, "step"), ("averager", averager, "average_parameters")):
            if not callable(getattr(value, method, None)):
                expected = f"an object with a method {method}"
                raise ArgumentTypeError(explain("PostLocalSGDOptimizer", argument, expected, value))
        # `Optimizer.__init__` is not called: it would create groups and state beside those of the optimizer inside.
        self.optim = optim
        self.averager = averager

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the optimizer inside."""
        if name == "optim":  # absent while a copy is being made
            raise AttributeError(name)
        return getattr(self.optim, name)

    def __repr__(self) -> str:
        return repr(self.optim)

    def step(self) -> None:  # type: ignore[override]
        """Take a step of the optimizer, then average the model if an average is due."""
        self.optim.step()
        self.averager.average_parameters(params=self.optim.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.

        Args:
            set_to_none: Whether they become None; else zeros. Default: True.
        """
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters.

        Args:
            param_group: ``params``, and options that differ from those of the constructor.
        """
        self.optim.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, and as ``step`` the number of steps that the averager has counted.

        Returns:
            A dict for `load_state_dict`.
        """
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's state, and set the averager to the step at which it was saved.

        Args:
            state_dict: From `state_dict`. Without ``step`` (saved by a plain optimizer) the averager starts at
                step 0, with a warning.
        """
        self.optim.load_state_dict(state_dict)
        if "step" not in state_dict:
            text = "PostLocalSGDOptimizer: the state has no 'step', so the averager begins at step 0."
            warnings.warn(text, stacklevel=2)
        self.averager.step = state_dict.get("step", 0)
