"""How an optimizer of several ranks takes part in a `Join`: ranks without inputs go on taking steps."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from torchdist_ref.algorithms.join import Joinable, JoinHook


class _Shadow(JoinHook):
    """What a rank without inputs does: it goes on updating its shard, since nobody else can."""

    def __init__(self, optimizer: JoinsSteps) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        self._optimizer._step_and_share(None)


class JoinsSteps(Joinable):
    """The part of an optimizer that lets ranks have different numbers of inputs."""

    param_groups: list[dict[str, Any]]
    process_group: Any

    @abstractmethod
    def _step_and_share(self, closure: None) -> Any:
        """Take a step without telling `Join`."""

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What a rank without inputs does in place of its steps; takes no arguments."""
        return _Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the first parameter."""
        device: torch.device = self.param_groups[0]["params"][0].device
        return device

    @property
    def join_process_group(self) -> Any:
        """The ranks."""
        return self.process_group
