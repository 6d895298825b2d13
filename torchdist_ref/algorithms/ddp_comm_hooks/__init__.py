"""Communication hooks: functions that exchange a bucket of gradients between backward and the optimizer.

A hook is a function ``hook(state, bucket) -> torch.futures.Future[torch.Tensor]``, registered with
``DistributedDataParallel.register_comm_hook``. `hook_traits` declares properties of your own hook that make it faster.
`DDPCommHookType` names the hooks of this library, for programs that choose one by name. The linear algebra of
`powerSGD_hook`, with its orthonormalization, is in `low_rank`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from torchdist_ref.algorithms.ddp_comm_hooks import (
    default_hooks,
    optimizer_overlap_hooks,
    powerSGD_hook,
    quantization_hooks,
)
from torchdist_ref.algorithms.ddp_comm_hooks.hook_support import HookTraits, hook_traits, traits_of
from torchdist_ref.errors import ArgumentTypeError, explain

# torch's names of the same modules. Hooks for debugging are among the default ones here.
default = debugging = debugging_hooks = default_hooks
powerSGD, quantization, optimizer_overlap = powerSGD_hook, quantization_hooks, optimizer_overlap_hooks

__all__ = ["DDPCommHookType", "HookTraits", "hook_traits", "register_ddp_comm_hook", "traits_of"]


class HookRegistrar:
    """Function that registers one hook on a model; for PowerSGD it makes the state, of a group and a rank."""

    def __init__(self, comm_hook: Callable[..., Any], rank: int = 0) -> None:
        self.comm_hook = comm_hook
        self.rank = rank

    def __call__(self, model: Any, state: Any = None, start_powerSGD_iter: int = 1_000) -> None:
        """Register the hook.

        Args:
            model: A DistributedDataParallel of ours or of torch's.
            state: The process group, or None for the default group.
            start_powerSGD_iter: For PowerSGD, the step at which compression begins. Default 1000.
        """
        if self.rank:
            state = powerSGD_hook.PowerSGDState(state, self.rank, start_powerSGD_iter)
        model.register_comm_hook(state, self.comm_hook)


class DDPCommHookType(Enum):
    """Hooks by name; the value of each registers it: ``DDPCommHookType.NOOP.value(model=model, state=None)``.

    Example:
        >>> from torchdist_ref.algorithms.ddp_comm_hooks import DDPCommHookType
        >>> DDPCommHookType["FP16_COMPRESS"].value.comm_hook.__name__
        'fp16_compress_hook'

    Elsewhere:
        None in MPI, NCCL and JAX. Horovod's ``Compression`` names its compressors.
    """

    ALLREDUCE = HookRegistrar(default_hooks.allreduce_hook)
    FP16_COMPRESS = HookRegistrar(default_hooks.fp16_compress_hook)
    BF16_COMPRESS = HookRegistrar(default_hooks.bf16_compress_hook)
    QUANTIZE_PER_TENSOR = HookRegistrar(quantization_hooks.quantization_pertensor_hook)
    QUANTIZE_PER_CHANNEL = HookRegistrar(quantization_hooks.quantization_perchannel_hook)
    POWER_SGD = HookRegistrar(powerSGD_hook.powerSGD_hook, 1)
    POWER_SGD_RANK2 = HookRegistrar(powerSGD_hook.powerSGD_hook, 2)
    BATCHED_POWER_SGD = HookRegistrar(powerSGD_hook.batched_powerSGD_hook, 1)
    BATCHED_POWER_SGD_RANK2 = HookRegistrar(powerSGD_hook.batched_powerSGD_hook, 2)
    NOOP = HookRegistrar(default_hooks.noop_hook)


def register_ddp_comm_hook(comm_hook_type: Any, model: Any, state: Any = None) -> None:
    """Register one of the named hooks.

    Args:
        comm_hook_type: A member of `DDPCommHookType`.
        model: A DistributedDataParallel of ours or of torch's.
        state: The process group, or None for the default group.

    Raises:
        ArgumentTypeError: ``comm_hook_type`` is not one of the names.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.algorithms.ddp_comm_hooks import DDPCommHookType, register_ddp_comm_hook
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     model = dist.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        ...     register_ddp_comm_hook(DDPCommHookType.FP16_COMPRESS, model)
        ...     model(torch.tensor([[4.0 * rank]])).sum().backward()
        ...     return model.module.weight.grad.item()
        >>> run(program, 2)
        [2.0, 2.0]

    Elsewhere:
        None in MPI and NCCL; in JAX a program exchanges gradients by itself. Horovod's ``DistributedOptimizer`` has the
        argument ``compression``.
    """
    if not isinstance(comm_hook_type, DDPCommHookType):
        hint = "A function goes to model.register_comm_hook(state, hook)."
        expected = "a member of DDPCommHookType"
        raise ArgumentTypeError(
            explain("register_ddp_comm_hook", "comm_hook_type", expected, comm_hook_type, hint=hint)
        )
    if not hasattr(model, "register_comm_hook"):
        expected = "a model with the method register_comm_hook, such as DistributedDataParallel"
        raise ArgumentTypeError(explain("register_ddp_comm_hook", "model", expected, model))
    comm_hook_type.value(model=model, state=state)
