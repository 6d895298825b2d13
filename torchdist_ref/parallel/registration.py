"""What a communication hook must look like before DDP takes it: the checks of `register_comm_hook`.

A hook is called deep inside backward, where a mistake is hard to read; so whatever can be seen at
registration is said then. The checks accept hooks written for torch, for this library, and without annotations.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket as TorchBucket
from torch.futures import Future

from torchdist_ref.errors import ArgumentError, ArgumentTypeError, DistError, explain
from torchdist_ref.parallel.bucket import GradBucket

OPERATION = "register_comm_hook"
BUCKETS = (inspect.Parameter.empty, GradBucket, TorchBucket)
RESULTS = (inspect.Signature.empty, Future, Future[torch.Tensor])


def check_hook(hook: Any, rank: int) -> None:
    """Raise unless ``hook`` can be called as ``hook(state, bucket)`` and says nothing that contradicts its use.

    Raises:
        ArgumentTypeError: It can't be called, or not with two arguments.
        ArgumentError: Its annotations name another kind of bucket or result.
    """
    if not callable(hook):
        hint = "Pass the function itself, and the state first: register_comm_hook(state, hook)."
        raise ArgumentTypeError(explain(OPERATION, "hook", "callable", type(hook).__name__, rank=rank, hint=hint))
    signature = _signature(hook)
    if signature is not None:
        _check_arity(hook, signature, rank)
        _check_annotations(hook, signature, rank)


def _signature(hook: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(hook)
    except (TypeError, ValueError):
        return None


def _check_arity(hook: Callable[..., Any], signature: inspect.Signature, rank: int) -> None:
    try:
        signature.bind(None, None)
    except TypeError:
        hint = "DDP calls hook(state, bucket)."
        raise ArgumentTypeError(
            explain(OPERATION, "hook", "callable with two arguments", f"{_name(hook)}{signature}", rank=rank, hint=hint)
        ) from None


def _check_annotations(hook: Callable[..., Any], signature: inspect.Signature, rank: int) -> None:
    bucket = list(signature.parameters.values())[1:2]
    if bucket and bucket[0].kind is not inspect.Parameter.VAR_POSITIONAL and not _known(bucket[0].annotation, BUCKETS):
        raise ArgumentError(_disagrees(hook, f"take a GradBucket, not {bucket[0].annotation}", rank))
    if not _known(signature.return_annotation, RESULTS):
        raise ArgumentError(
            _disagrees(hook, f"return torch.futures.Future[torch.Tensor], not {signature.return_annotation}", rank)
        )


def _known(annotation: Any, known: tuple[Any, ...]) -> bool:
    """Whether an annotation is one of those expected; text (postponed annotations) passes if it ends alike."""
    if isinstance(annotation, str):
        last = annotation.split(".")[-1]
        return last.startswith(("GradBucket", "Future[", "Tensor]")) or last in ("Any", "Future")
    return annotation is Any or any(annotation is one or annotation == one for one in known)


def _disagrees(hook: Callable[..., Any], expected: str, rank: int) -> str:
    hint = "Correct the annotation, or leave it out."
    return explain(OPERATION, "hook", f"annotated to {expected}", _name(hook), rank=rank, hint=hint)


def _name(hook: Callable[..., Any]) -> str:
    return str(getattr(hook, "__name__", type(hook).__name__))


def check_free(registered: str | None, rank: int) -> None:
    """Raise when DDP has a hook already."""
    if registered is not None:
        raise DistError(
            f"{OPERATION}: DistributedDataParallel has a hook already, {registered!r} (on rank {rank}), and takes one. "
            "Combine hooks with a wrapper such as fp16_compress_wrapper, or build another DistributedDataParallel."
        )
