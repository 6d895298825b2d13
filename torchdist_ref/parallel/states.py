"""What makes up a replica besides gradients: its parameters and buffers, and how they are made the same on all ranks.

At construction everything is taken from one rank; before a forward pass the buffers are (running statistics, say).
Parameters named in ``_ddp_params_and_buffers_to_ignore`` stay each rank's own. Gradients are none of its business.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from torchdist_ref.parallel import agreement


class States:
    """The parameters and buffers of a module that all ranks hold alike.

    Args:
        module: The module that DDP wraps.
        ignored: Names that are left alone.
        group: The group that DDP was given.
    """

    def __init__(self, module: nn.Module, ignored: Collection[str], group: Any) -> None:
        self.module = module
        self.ignored = ignored
        self.group = group
        self._pack: agreement.Pack | None = None

    def share(self, with_buffers: bool, root: int = 0) -> None:
        """Take the parameters, and if wanted the buffers, of rank ``root``."""
        named = [*self.module.named_parameters(), *(self.module.named_buffers() if with_buffers else ())]
        agreement.share([tensor for name, tensor in named if name not in self.ignored], self.group, root)

    @property
    def has_buffers(self) -> bool:
        """Whether the module has buffers at all."""
        return next(self.module.buffers(), None) is not None

    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that all ranks hold alike, by name."""
        return {name: tensor for name, tensor in self.module.named_buffers() if name not in self.ignored}

    @torch.no_grad()
    def share_buffers(self, root: int) -> None:
        """Take the buffers of rank ``root``, in one message that is laid out once."""
        buffers = list(self.buffers().values())
        if not buffers:
            return
        if self._pack is None or not _same(self._pack.tensors, buffers):
            self._pack = agreement.Pack(buffers)
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(buffers)):
            self._pack.share(self.group, root)


def _same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))
