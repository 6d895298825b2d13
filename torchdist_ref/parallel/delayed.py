"""Parameters whose gradients wait for one another: one flat tensor, averaged at once when a chosen gradient is there.

DDP's ``delay_all_reduce_named_params`` and ``param_to_hook_all_reduce``. The reducer leaves these parameters alone:
their ``.grad`` lies in one buffer, which goes when the gradient of the trigger has arrived, and is waited for at
the end of backward. No communication hook sees it. Nothing here decides about other parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import Variable

from torchdist_ref import groups
from torchdist_ref.errors import ArgumentError, DistError, explain
from torchdist_ref.parallel.bucket import split

OPERATION = "DistributedDataParallel"


class Delayed:
    """The delayed parameters of one DDP.

    Args:
        named: Names and parameters, of one dtype and device.
        trigger: The parameter whose gradient sends the others'; it has to come after theirs. May be one of them.
        group: The group that DDP was given.

    Raises:
        ArgumentError: The parameters don't fit into one buffer.
    """

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]], trigger: torch.Tensor, group: Any) -> None:
        self.names, self.parameters = zip(*named, strict=True)
        self.change_group(group)
        kinds = {(p.dtype, p.device) for p in self.parameters}
        if len(kinds) > 1:
            expected = "parameters of one dtype on one device"
            raise ArgumentError(explain(OPERATION, "delay_all_reduce_named_params", expected, sorted(map(str, kinds))))
        self.buffer = torch.zeros_like(torch.cat([p.detach().reshape(-1) for p in self.parameters]))
        self.views = split(self.buffer, self.parameters)
        self._work: Any = None
        reference = weakref.ref(self)
        # The trigger may be one of the delayed ones: so its gradient has to lie where it belongs.
        trigger.register_post_accumulate_grad_hook(_sender(reference))
        for index, parameter in enumerate(self.parameters):
            if parameter is not trigger:
                parameter.register_post_accumulate_grad_hook(_watcher(reference, index))

    def change_group(self, group: Any) -> None:
        """Average over this group from now on."""
        self.group = group
        self.world_size = groups.get_world_size(group)

    def point(self) -> None:
        """After forward: gradients that are None become zeros in the buffer, so that backward adds up there."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                parameter.grad = view.zero_()

    @torch.no_grad()
    def send(self) -> None:
        """Begin to average. A gradient that is a tensor of the user's own moves into the buffer first."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is not view:
                view.copy_(parameter.grad) if parameter.grad is not None else view.zero_()
                parameter.grad = view
        self._work = groups.all_reduce(self.buffer.div_(self.world_size), group=self.group, async_op=True)
        Variable._execution_engine.queue_callback(self._wait)

    def _wait(self) -> None:
        work, self._work = self._work, None
        work.wait()

    def arrived(self, index: int) -> None:
        """Raise if this gradient comes too late to be averaged."""
        if self._work is not None:
            raise DistError(
                f"{OPERATION}: the gradient of delayed parameter {self.names[index]!r} came after that of "
                f"param_to_hook_all_reduce (on rank {groups.get_rank(self.group)}), so it would not be averaged. "
                "Choose a parameter whose gradient comes last: one of the first layer."
            )


def _sender(reference: weakref.ref[Delayed]) -> Callable[[torch.Tensor], None]:
    def send(_: torch.Tensor) -> None:
        delayed = reference()
        if delayed is not None:
            delayed.send()

    return send


def _watcher(reference: weakref.ref[Delayed], index: int) -> Callable[[torch.Tensor], None]:
    def arrived(_: torch.Tensor) -> None:
        delayed = reference()
        if delayed is not None:
            delayed.arrived(index)

    return arrived
