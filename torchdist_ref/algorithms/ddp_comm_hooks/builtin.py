"""The hooks that torch has in C++, by torch's name for each: here they are those of `default_hooks`."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from torchdist_ref.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torchdist_ref.errors import ArgumentTypeError, explain

__all__ = ["BuiltinCommHookType"]


class BuiltinCommHookType(Enum):
    """Hooks that ``DistributedDataParallel._register_builtin_comm_hook`` takes; torch's own members are taken as well.

    Example:
        >>> import torch, torchdist_ref as dist
        >>> from torchdist_ref.testing import run
        >>> def program(rank):
        ...     model = dist.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        ...     model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        ...     model(torch.tensor([[4.0 * rank]])).sum().backward()
        ...     return model.module.weight.grad.item()
        >>> run(program, 2)
        [2.0, 2.0]
    """

    ALLREDUCE = 1
    FP16_COMPRESS = 2


def builtin_hook(kind: Any) -> Callable[..., Any]:
    """The hook that a member of `BuiltinCommHookType`, ours or torch's, stands for.

    Raises:
        ArgumentTypeError: It is no such member.
    """
    hooks = {"ALLREDUCE": allreduce_hook, "FP16_COMPRESS": fp16_compress_hook}
    if type(kind).__name__ != "BuiltinCommHookType":
        hint = "A function goes to register_comm_hook(state, hook)."
        expected = "a member of BuiltinCommHookType"
        raise ArgumentTypeError(explain("_register_builtin_comm_hook", "comm_hook_type", expected, kind, hint=hint))
    return hooks[kind.name]
