"""Ways of working that few programs choose, put together from their parts: each function prepares one for a DDP.

Low precision (`precision` and the hook of mixed precision), parameters that wait for one another (`delayed`), and
optimizers that step inside backward. The parts know nothing of each other; don't add arithmetic here.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchdist_ref.algorithms.ddp_comm_hooks.mixed_precision_hooks import (
    _AllreduceUpcastHookState,
    _reducer_allreduce_and_upcast_hook,
)
from torchdist_ref.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import _apply_optim_in_backward_hook
from torchdist_ref.parallel import agreement
from torchdist_ref.parallel.delayed import Delayed
from torchdist_ref.parallel.precision import LowPrecision

if TYPE_CHECKING:
    from torchdist_ref.parallel.distributed_data_parallel import DistributedDataParallel


def lower_precision(ddp: DistributedDataParallel) -> None:
    """Compute and communicate as ``mixed_precision`` says, if it does."""
    if ddp.mixed_precision is not None:
        ddp.reducer.precision = LowPrecision(ddp.module, ddp.mixed_precision, ddp.parameters_to_ignore)
        ddp.register_comm_hook(_AllreduceUpcastHookState(weakref.ref(ddp)), _reducer_allreduce_and_upcast_hook)


def delay(named: Sequence[tuple[str, torch.Tensor]], trigger: Any, group: Any) -> Delayed | None:
    """Average some parameters' gradients when the trigger's gradient is there; they begin as rank 0's."""
    if not named:
        return None
    agreement.share([parameter for _, parameter in named], group)
    return Delayed(named, trigger, group)


def adopt_optimizers(ddp: DistributedDataParallel) -> None:
    """Where parameters carry optimizers (torch's ``_apply_optimizer_in_backward``), let them step on averages.

    Those optimizers would step on this rank's own gradient, as soon as it is there; their triggers are removed.
    """
    carriers = [entry.parameter for entry in ddp._entries if hasattr(entry.parameter, "_in_backward_optimizers")]
    if carriers:
        for parameter in carriers:
            for handle in _triggers(parameter):
                handle.remove()
        ddp.register_comm_hook(weakref.ref(ddp), _apply_optim_in_backward_hook(ddp.gradient_as_bucket_view))


def _triggers(parameter: torch.Tensor) -> Sequence[Any]:
    theirs = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    return [] if theirs is None else theirs.param_to_optim_hook_handle_map.get(parameter, [])
